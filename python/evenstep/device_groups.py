"""Which communicators of our NCCL engine a group of torch has, and how its ranks open them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.group_end import ABORT_SECONDS, within
from evenstep.rendezvous import has_all, look_for_dead
from evenstep.ring import record_calls

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SHARING = 23000  # NCCL 2.30 takes several ranks on one GPU


def nccl_library() -> str | None:
    """NCCL as an installed wheel has it; None: where the loader finds it, or EVENSTEP_NCCL_LIBRARY."""
    if os.environ.get("EVENSTEP_NCCL_LIBRARY"):
        return None
    for folder in sys.path:
        path = Path(folder or ".", "nvidia", "nccl", "lib", "libnccl.so.2")
        if path.is_file():
            return str(path)
    return None


def engine_version() -> int:
    """NCCL's version where our engine can run on this machine, else 0. EVENSTEP_DEVICE_ENGINE=torch, and a torch for ROCm,
    whose RCCL is under torch's name for NCCL: 0."""
    torch = sys.modules.get("torch")
    if os.environ.get("EVENSTEP_DEVICE_ENGINE") == "torch" or (torch is not None and torch.version.hip):
        return 0
    try:
        return _core.DeviceComm.version(nccl_library())
    except _core.EvenstepError:
        return 0


class DeviceGroups:
    """Opens a communicator of all ranks for each GPU that this rank uses, and one for each direction of a pair that
    sends. `identity` names a GPU of this process so that two ranks can see that theirs is one."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        identity: Callable[[int], str],
        library: str | None = None,
        blocking: bool = False,
        beside: _core.Comm | None = None,
        name: str = "device",
        members: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """`beside`: a group of the same ranks on the host's memory, over which other hosts hear of failures; `name`: what
        the communicators are called in a timeline; `members`: the ranks' numbers in the job, where it has others; `numbers`: what errors call
        them."""
        self.rank, self.size = rank, size
        self._store = store
        self.timeout_seconds = timeout_seconds
        self._identity = identity
        self._library = library
        self._blocking = blocking
        self.beside, self.name = beside, name
        self.members, self._numbers = members or range(size), numbers or range(size)
        self._opened: dict[tuple[int, tuple[int, int] | None], _core.DeviceComm] = {}
        self._counts: dict[tuple[int, int] | None, int] = {}
        self._lock = threading.Lock()

    def store_of(self, words: str) -> Store:
        """Where what is told under these words meets nothing else."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"{words}/", self._store)

    def some(self, ranks: Sequence[int], words: str) -> DeviceGroups:
        """The same of some of its ranks, this one among them."""
        return DeviceGroups(
            self.store_of(words),
            ranks.index(self.rank),
            len(ranks),
            self.timeout_seconds,
            self._identity,
            self._library,
            self._blocking,
            self.beside,
            f"{self.name}/{words}",
            [self.members[rank] for rank in ranks],
            ranks,
        )

    def open(
        self, device: int, pair: tuple[int, int] | None = None, given_up: threading.Event | None = None
    ) -> _core.DeviceComm:
        """The communicator for that GPU, of all ranks or of a pair (its sender is rank 0, its receiver rank 1). `given_up`: it is
        tried, and what fails of it ends nothing beside it; once that is set, it comes too late, and is none of theirs."""
        comm = self._opened.get((device, pair))
        if comm is None:
            ranks = list(range(self.size)) if pair is None else list(pair)
            # A rank may go from one GPU to another: the nth communicator of one kind is everybody's nth.
            with self._lock:
                count = self._counts[pair] = self._counts.get(pair, 0) + 1
            name = f"{'all' if pair is None else f'{pair[0]}>{pair[1]}'}/{count}"
            comm = self._come_together(name, ranks.index(self.rank), ranks, device)
            if pair is None and given_up is None:
                comm.go_beside(self.beside)
            record_calls(comm, f"{self.name}/{name}")
            with self._lock:
                late = given_up is not None and given_up.is_set()
                if not late:
                    self._opened[(device, pair)] = comm
            if late:
                comm.abort()
                raise _core.EvenstepError(f"{self.name}: the GPUs' communicator {name} came too late")
        elif given_up is not None:
            comm.go_beside(None)
        return comm

    def opened(self) -> list[_core.DeviceComm]:
        return list(self._opened.values())

    def exchange(self, name: str, record: bytes, more_seconds: float = 0.0) -> list[bytes]:
        """The records of all ranks, which say one for each name; `more_seconds`: beside the group's limit."""
        return self._exchange(f"said/{name}", self.rank, range(self.size), record, more_seconds)

    def _exchange(
        self, name: str, rank: int, members: Sequence[int], record: bytes, more_seconds: float = 0.0
    ) -> list[bytes]:
        self._store.set(f"{name}/record/{rank}", record)
        keys = [f"{name}/record/{other}" for other in range(len(members))]
        self._wait_for(keys, members, more_seconds)
        return [self._store.get(key) for key in keys]

    def _come_together(self, name: str, rank: int, members: Sequence[int], device: int) -> _core.DeviceComm:
        ranks = len(members)
        own = self._identity(device)
        if rank == 0:
            self._store.set(f"{name}/id", _core.DeviceComm.make_id(self._library))
        self._store.set(f"{name}/{rank}", own)
        keys = [f"{name}/{other}" for other in range(ranks)]
        self._wait_for([f"{name}/id", *keys], members)
        places = [self._store.get(key).decode() for key in keys]
        shares = places.count(own) > 1
        if len(set(places)) < ranks and _core.DeviceComm.version(self._library) >= _SHARING:
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # on every rank, also those that share none
        return _core.DeviceComm(
            self._store.get(f"{name}/id"),
            rank,
            ranks,
            device,
            shares_device=shares,
            blocking=self._blocking,
            timeout_seconds=self.timeout_seconds,
            library=self._library,
            gather=lambda record: b"".join(self._exchange(name, rank, members, record)),
            numbers=[self._numbers[other] for other in members],
        )

    def _wait_for(self, keys: list[str], members: Sequence[int], more_seconds: float = 0.0) -> None:
        """Looks again and again: while one thread is in the store's own wait, no other can use the store."""
        looked = time.monotonic()
        seconds = self.timeout_seconds + more_seconds
        until = looked + seconds
        pause = 0.001
        while not has_all(self._store, keys, self.name):
            now = time.monotonic()
            if now > looked + 0.1:
                looked = now
                look_for_dead({self._numbers[rank]: self.members[rank] for rank in members}, self.name)
            if now > until:
                late = [key for key in keys if not self._store.check([key])]
                raise _core.EvenstepError(
                    f"rank {self._numbers[self.rank]} waited {seconds:.3g} s for its peers' GPUs; not there: {late}\n"
                    "  fix: see what the other ranks do: all of them make a group's collectives, both of a pair its messages"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def drop(self, device: int) -> None:
        """The communicator of all ranks for that GPU ends, and is none of theirs any more."""
        with self._lock:
            comm = self._opened.pop((device, None), None)
        if comm is not None and not comm.closed:
            within(ABORT_SECONDS, comm.abort)

    def set_timeout(self, seconds: float) -> None:
        self.timeout_seconds = seconds
        for comm in list(self._opened.values()):
            comm.set_timeout(seconds)

    def abort(self) -> None:
        for comm in list(self._opened.values()):
            if not comm.closed:
                comm.abort()

    def close(self) -> None:
        """Ends them all; the first error is raised when all are gone."""
        errors = []
        for comm in list(self._opened.values()):
            try:
                comm.close()
            except _core.EvenstepError as error:
                errors.append(error)
        self._opened.clear()
        if errors:
            raise errors[0]
