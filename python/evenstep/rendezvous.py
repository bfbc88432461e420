"""How the ranks of a group find each other's shared memory: through torch's store, once, when the group is made."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.comm_debug import explain

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_ELSEWHERE = "elsewhere"


def _place() -> str:
    """The same for all processes that can open each other's memory, different for any others."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{host} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


def _announcement() -> str:
    return f"{_place()}|{os.getpid()}"


_processes: dict[int, int] = {}
"""Of the job's ranks on this host that have opened a group together with this one."""


def _ended(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return isinstance(error, (FileNotFoundError, ProcessLookupError))
    return stat[stat.rindex(")") + 2] in "ZX"


def _never_comes(rank: int, process: int, name: str) -> _core.EvenstepError:
    fix = f"the end of rank {rank}'s own output says why"
    error = _core.EvenstepError(
        f"rank {rank} (process {process}) died or came to its end before it opened the group {name} "
        f"(EVEN_ERR_PEER_LOST)\n  fix: {fix}"
    )
    error.status, error.fix, error.rank, error.device = "EVEN_ERR_PEER_LOST", fix, rank, None
    return error


class _Meeting:
    """What is known of the ranks while they come together."""

    def __init__(self, store: Store, prefix: str, name: str, members: Sequence[int], timeout_seconds: float) -> None:
        self._store, self._prefix, self._name, self._members = store, prefix, name, members
        self._deadline = time.monotonic() + timeout_seconds
        self.processes = {rank: _processes[member] for rank, member in enumerate(members) if member in _processes}

    def get(self, key: str) -> str:
        """The value of a key that another rank sets; an error where one of those that must come has ended."""
        pause, looked = 0.0005, time.monotonic()
        while not self._store.check([f"{self._prefix}/{key}"]):
            now = time.monotonic()
            if now >= self._deadline:
                self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=0.001))  # its error has torch's words
            if now - looked > 0.1:
                looked = now
                self._look(key)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self._store.get(f"{self._prefix}/{key}").decode()

    def _look(self, key: str) -> None:
        for rank, process in self.processes.items():
            # One that did its part may have ended by an error of the meeting, which the key will say.
            if _ended(process) and not self._store.check([f"{self._prefix}/{key}"]):
                raise _never_comes(rank, process, self._name)

    def learn(self, rank: int, process: int) -> None:
        self.processes[rank] = process

    def keep(self) -> None:
        """All are on this host, and have come."""
        for rank, process in self.processes.items():
            _processes[self._members[rank]] = process


def _announce(store: Store, prefix: str, ranks: int, arena_bytes: int, meeting: _Meeting) -> int | None:
    """Rank 0: makes the segment and says where it is, once all ranks are known to be on this host."""
    try:
        here = _place()
        places = {here}
        meeting.learn(0, os.getpid())
        store.set(f"{prefix}/0", _announcement())
        for rank in range(1, ranks):
            place, _, process = meeting.get(str(rank)).rpartition("|")
            places.add(place)
            if place == here:
                meeting.learn(rank, int(process))
        all_here = len(places) == 1
        processes = [meeting.processes[rank] for rank in range(ranks)] if all_here else []
        fd = _core.Comm.create_segment(ranks, arena_bytes, processes) if all_here else None
    except Exception as error:
        store.set(f"{prefix}/segment", f"error {error}")
        raise
    said = ",".join(map(str, processes))
    store.set(f"{prefix}/segment", _ELSEWHERE if fd is None else f"{os.getpid()}:{fd}:{said}")
    return fd


def _find(store: Store, prefix: str, rank: int, meeting: _Meeting) -> int | None:
    """The other ranks: the descriptor of the segment that rank 0 announces."""
    store.set(f"{prefix}/{rank}", _announcement())
    place, _, process = meeting.get("0").rpartition("|")
    if place == _place():
        meeting.learn(0, int(process))
    words = meeting.get("segment")
    if words == _ELSEWHERE:
        return None
    if words.startswith("error "):
        raise RuntimeError(f"rank 0 could not make the group's shared memory: {words[6:]}")
    process, fd, processes = words.split(":")
    for other, number in enumerate(processes.split(",")):
        meeting.learn(other, int(number))
    return _core.open_peer_fd(int(process), int(fd))


def open_group(
    store: Store,
    rank: int,
    ranks: int,
    *,
    name: str = "group",
    arena_bytes: int = 0,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
    members: Sequence[int] | None = None,
) -> _core.Comm | None:
    """Opens a group over `store`; collective over its `ranks` ranks. None where they are not all on one host.

    `name` tells groups of one store apart; a restarted job (TORCHELASTIC_RESTART_COUNT) has names of its own. `members`
    are the ranks' numbers in the whole job, where the group is not all of it.
    """
    if ranks == 1:
        fd: int | None = _core.Comm.create_segment(1, arena_bytes)
    else:
        prefix = f"evenstep/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        meeting = _Meeting(store, prefix, name, members or range(ranks), timeout_seconds)
        host = rank == 0
        fd = _announce(store, prefix, ranks, arena_bytes, meeting) if host else _find(store, prefix, rank, meeting)
    if fd is None:
        return None
    try:
        comm = _core.Comm(fd, rank, ranks, arena_bytes, timeout_seconds, spin)
    finally:
        os.close(fd)
    if ranks > 1:
        # All have come: nobody needs the keys, and a later group of this name must not find them, nor lose its own.
        if rank == 0:
            for key in ("segment", *map(str, range(ranks))):
                store.delete_key(f"{prefix}/{key}")
        comm.barrier()
        meeting.keep()
        explain(name, comm, "at its opening")
    return comm
