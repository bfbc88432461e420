"""How the ranks talk about anything but gradients: small records, bytes, sums; over shared memory or torch's Gloo."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from evenstep import _core, plain, script_exchanges
from evenstep._core import EvenstepError
from evenstep.device_memory import is_out_of_memory
from evenstep.environment import Environment
from evenstep.generation_torch import MAKERS, forget, open_torch_group
from evenstep.group_end import GroupEnd, closed_peers, raise_instead
from evenstep.rendezvous import OverGloo, claim, has_ended, open_group
from evenstep.torch_groups import named_by_ranks

if TYPE_CHECKING:
    from evenstep.mended_hosts import MendedHosts


class Group(Protocol):
    """One rank's place among all ranks. Every method but `revoke` is collective."""

    rank: int
    ranks: int

    def exchange(self, record: bytes) -> list[bytes]:
        """The records of all ranks, of equal length, in rank order."""

    def sum_(self, values: torch.Tensor) -> None:
        """Adds a CPU tensor up over the ranks, in place."""

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        """A contiguous CPU tensor of rank `root` on all ranks."""

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The ranks' contiguous CPU tensors one after the other; rank r brings counts[r] elements."""

    def barrier(self) -> None: ...

    def revoke(self, why: str = "") -> None:
        """Ends what the other ranks wait for, where the engine can, and tells them why, where it can do that."""


class Alone:
    """The group of a process outside any job, and of a rank until it has found the others."""

    rank, ranks = 0, 1

    def exchange(self, record: bytes) -> list[bytes]:
        return [record]

    def sum_(self, values: Any) -> None: ...

    def broadcast_(self, values: Any, root: int = 0) -> None: ...

    def gather_rows(self, values: Any, counts: list[int]) -> Any:
        return values.clone()

    def barrier(self) -> None: ...

    def revoke(self, why: str = "") -> None: ...


def _addresses(mine: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, int, int]:
    """And the type; of none zeros are meant."""
    if mine is None:
        return 0, 0, _core.DTYPE_F64
    return mine[0].data_ptr(), mine[1].data_ptr(), DTYPES[mine[0].dtype]


class SharedGroup:
    """Over an engine group in shared memory; where a rank may be lost, also over one whose hosts Gloo connects."""

    def __init__(self, comm: _core.Comm | MendedHosts) -> None:
        self.comm = comm
        self.rank, self.ranks = comm.rank, comm.ranks
        self._bytes = -1

    def exchange(self, record: bytes) -> list[bytes]:
        length = len(record)
        if length != self._bytes:
            self._bytes = length
            self._out = ctypes.create_string_buffer(max(1, length))
            self._in = ctypes.create_string_buffer(max(1, length * self.ranks))
            self._out_address, self._in_address = ctypes.addressof(self._out), ctypes.addressof(self._in)
            self._counts = [length] * self.ranks
        self._out.raw = record
        self.comm.all_gather(self._out_address, self._in_address, self._counts, _core.DTYPE_U8)
        everything = self._in.raw
        return [everything[i : i + length] for i in range(0, length * self.ranks, length)]

    def sum_(self, values: torch.Tensor) -> None:
        self.comm.all_reduce(values.data_ptr(), values.numel(), DTYPES[values.dtype], _core.OP_SUM)

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        self.comm.broadcast(values.data_ptr(), values.numel() * values.element_size(), root)

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        out = torch.empty(sum(counts), dtype=values.dtype)
        size = values.element_size()
        if out.numel() == 0:
            return out
        mine = values if values.numel() else out  # an address is wanted even where nothing is sent
        self.comm.all_gather(mine.data_ptr(), out.data_ptr(), [count * size for count in counts], _core.DTYPE_U8)
        return out

    @property
    def adds_norms(self) -> bool:
        """Whether it has the two calls that follow."""
        return hasattr(self.comm, "norm_statistics")

    def norm_statistics(
        self,
        mark: tuple[float, float],
        count: int,
        mine: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        narrow: torch.Tensor | None,
    ) -> tuple[float, ...] | None:
        """Of a BatchNorm's layer: all ranks' mean and variance into out (two rows of 64 bits), and into narrow in 32. mine: this
        rank's, contiguous CPU tensors of 32 or 64 bits. What each rank counted; None where the ranks' marks differ."""
        comm: Any = self.comm
        return comm.norm_statistics(  # type: ignore[no-any-return]
            *mark, count, *_addresses(mine), out.shape[1], out.data_ptr(), 0 if narrow is None else narrow.data_ptr()
        )

    def norm_sums(
        self,
        mark: tuple[float, float],
        weight: float,
        mine: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
    ) -> tuple[float, ...] | None:
        """The same of a layer's backward: the ranks' sums, each times its weight, into out."""
        comm: Any = self.comm
        return comm.norm_sums(*mark, weight, *_addresses(mine), out.shape[1], out.data_ptr())

    def barrier(self) -> None:
        self.comm.barrier()

    def revoke(self, why: str = "") -> None:
        self.comm.revoke()


class TorchGroup:
    """Over a Gloo group of torch: several hosts, or no shared memory. `end`: what says why, where it has ended; where there is none,
    errors are torch's own, and `revoke` does nothing."""

    def __init__(self, group: Any, end: GroupEnd | None = None) -> None:
        self.group, self._end = group, end
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def _call(self, what: str, begin: Callable[[], Any]) -> None:
        if self._end is None:
            begin().wait()
            return
        self._end.begins(what)
        work = None
        try:
            work = begin()
            self._end.wait(work)
        except RuntimeError as error:
            own = isinstance(error, EvenstepError) or is_out_of_memory(error)
            if work is None and (own or not closed_peers(self.group)):
                self._end.was_refused()
                raise
            if own:
                raise
            raise_instead(self._end.heard(error), error)

    def exchange(self, record: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        out = [torch.empty_like(mine) for _ in range(self.ranks)]
        what = f"an exchange of {len(record)} bytes"
        self._call(what, lambda: dist.all_gather(out, mine, group=self.group, async_op=True))
        return [as_bytes(row) for row in out]

    def sum_(self, values: torch.Tensor) -> None:
        self._call(
            f"a sum of {values.numel()} values", lambda: dist.all_reduce(values, group=self.group, async_op=True)
        )

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        source = dist.get_global_rank(self.group, root)
        what = f"a broadcast of {values.numel()} values of rank {root}"
        self._call(what, lambda: dist.broadcast(values, src=source, group=self.group, async_op=True))

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        most = max(1, *counts)
        padded = torch.zeros(most, dtype=values.dtype)
        padded[: values.numel()] = values
        rows = [torch.empty_like(padded) for _ in range(self.ranks)]
        what = f"a gathering of {sum(counts)} values"
        self._call(what, lambda: dist.all_gather(rows, padded, group=self.group, async_op=True))
        return torch.cat([row[:count] for row, count in zip(rows, counts)])

    def barrier(self) -> None:
        self._call("a barrier", lambda: dist.barrier(group=self.group, async_op=True))

    def revoke(self, why: str = "") -> None:
        if self._end is not None:
            self._end.revoke(why or "it gave up")

    def explained(self, error: BaseException, what: str) -> EvenstepError | None:
        """Why a call of the same ranks in another process group of torch's has failed, by what they tell one another. Ends this
        one, so that all hear of it."""
        return None if self._end is None else self._end.heard(error, what)


DTYPES = {
    torch.float32: _core.DTYPE_F32,
    torch.float64: _core.DTYPE_F64,
    torch.float16: _core.DTYPE_F16,
    torch.bfloat16: _core.DTYPE_BF16,
    torch.int64: _core.DTYPE_I64,
    torch.int32: _core.DTYPE_I32,
    torch.uint8: _core.DTYPE_U8,
}


def as_bytes(values: torch.Tensor) -> bytes:
    """A contiguous CPU tensor's memory."""
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()) if values.numel() else b""


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Everyone's data, of any length, in rank order."""
    counts = [int.from_bytes(row, "little") for row in group.exchange(len(data).to_bytes(8, "little"))]
    mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    everything = as_bytes(group.gather_rows(mine, counts)) if sum(counts) else b""
    parts, at = [], 0
    for count in counts:
        parts.append(everything[at : at + count])
        at += count
    return parts


def broadcast_bytes(group: Group, data: bytes | None, root: int = 0) -> bytes:
    """The data of rank `root`; the others' is not looked at."""
    mine = (data or b"") if group.rank == root else b""
    length = int.from_bytes(group.exchange(len(mine).to_bytes(8, "little"))[root], "little")
    values = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.zeros(length, dtype=torch.uint8)
    if length:
        group.broadcast_(values, root)
    return as_bytes(values)[:length]


def gather_objects(group: Group, value: Any) -> list[Any]:
    """Everyone's small value, of the kinds that `plain` knows."""
    return [plain.loads(data) for data in gather_bytes(group, plain.dumps(value))]


class Bootstrap:
    """Opens groups over the job's torch store; counts them, so that every rank uses the same names.

    `members`: ranks of the job, of which alone the groups are, under a name that no other set of ranks has.
    """

    def __init__(
        self,
        environment: Environment,
        members: Sequence[int] | None = None,
        name: str = "session",
    ) -> None:
        self.environment = environment
        self.timeout_seconds = environment.timeout_seconds
        self._members, self._name = None if members is None else list(members), name
        self._opened = 0
        self._gloo: Any = None
        self._store: Any = None  # where those that are left meet; None: in torch's
        self.over: _core.Over | None = None  # tells groups that they are over: there is a newer generation
        self._look: Callable[[], None] | None = None  # raises then, while a group is opened
        self.heeds: Callable[[], None] | None = None  # the same, while they make what they would make again
        self.heed: Callable[[], None] | None = (
            None  # where a rank may be lost, and the others go on: raises when one is
        )
        self._of_torch: list[Any] = []  # groups of this generation

    def start(self) -> None:
        """Makes torch.distributed ready; a group that the user made before is kept. A set's ranks have done so."""
        if self._members is not None:
            return
        if not dist.is_available():
            raise EvenstepError(
                "this torch has no torch.distributed, which es.prepare needs to find the other ranks\n"
                "  fix: install a torch that has it (every Linux wheel does)"
            )
        if dist.is_initialized():
            if dist.get_world_size() != self.environment.world_size or dist.get_rank() != self.environment.rank:
                raise EvenstepError(
                    f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
                    f"but the launcher says rank {self.environment.rank} of {self.environment.world_size}\n"
                    "  fix: leave init_process_group to es.prepare, or use the launcher's RANK and WORLD_SIZE"
                )
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise EvenstepError(
                f"RANK and WORLD_SIZE are set but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not\n"
                "  fix: start the script with `evenstep run` or torchrun"
            )
        backend = "evenstep" if "evenstep" in dist.Backend.backend_list else None
        timeout = timedelta(seconds=self.timeout_seconds)
        # as init_process_group does it, but a process that is no rank must not come into a group's making
        store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        claim(store, rank)
        store = dist.PrefixStore("default_pg", store)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)

    def _in_job(self, ranks: Sequence[int] | None) -> list[int] | None:
        """Numbers in the job; None: all of it."""
        if ranks is None:
            return self._members
        return [self._members[rank] for rank in ranks] if self._members is not None else list(ranks)

    def shared(
        self,
        arena_bytes: int,
        purpose: str,
        ranks: Sequence[int] | None = None,
        messages: bool = False,
        measures: bool = False,
        over_gloo: Callable[[OverGloo], None] | None = None,
    ) -> _core.Comm | None:
        """An engine group of all ranks, or of some, or None where only torch can connect them, and on a rank outside. No
        messages, no all-to-all between hosts but where they are asked for. measures: it moves much, so that its engine is
        worth a measurement; one with messages has one in any case. over_gloo: hears of it where only Gloo does. Every rank calls it."""
        self._opened += 1
        chosen = range(self.environment.world_size) if ranks is None else ranks
        if self.environment.rank not in chosen:
            return None
        return open_group(
            self._store or dist.distributed_c10d._get_default_store(),
            chosen.index(self.environment.rank),
            len(chosen),
            name=f"{self._name}/{purpose}/{self._opened}",
            arena_bytes=arena_bytes,
            timeout_seconds=self.timeout_seconds,
            members=self._in_job(ranks),
            messages=messages,
            measures=measures or messages,
            over=self.over,
            look=self._look,
            heeds=self.heeds,
            over_gloo=over_gloo,
        )

    def lasting(self, purpose: str, heed: Callable[[], None]) -> _core.Comm | MendedHosts | None:
        """A group of all ranks in which one may be lost, and the others go on: also where only Gloo connects the hosts. heed: raises,
        while a call waits, where one of them is lost. None: not all ranks have `over`. Every rank that has it calls this, and the others
        `shared`."""
        heard: list[OverGloo] = []
        comm = self.shared(0, purpose, over_gloo=heard.append)
        if comm is not None or not heard[0].lasts:
            return comm
        from evenstep.mended_hosts import open_mended_hosts  # which imports this module

        assert self.over is not None
        return open_mended_hosts(
            self._store or dist.distributed_c10d._get_default_store(),
            self.environment.rank,
            heard[0].host_of or range(self.environment.world_size),
            name=f"evenstep/{self._name}/{purpose}/{heard[0].word}",
            timeout_seconds=self.timeout_seconds,
            members=self._members,
            over=self.over,
            look=self._look,
            heeds=self.heeds,
            heed=heed,
        )

    def go_on(
        self,
        environment: Environment,
        store: Any,
        members: Sequence[int],
        number: int,
        over: _core.Over | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """From now on the groups are of these ranks of the job: those that are left in the generation, until `over`, and
        `look`, which raises then, say that there is a newer one."""
        self.environment, self._store, self._members = environment, store, list(members)
        self.over, self._look = over, look
        self._name, self._opened = f"generation/{number}", 0
        forget(self._of_torch)
        self._of_torch.clear()

    def met(self) -> None:
        """All members go on: nobody meets any more."""
        self._look = None

    def gloo(self) -> Any:
        if self._gloo is None:
            self._gloo = self.torch_group("gloo")
        return self._gloo

    def torch_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """A new process group of torch. Some ranks make theirs without the others."""
        if ranks is None and backend in MAKERS and (self.heed is not None or self._store is not None):
            return self._torch_group_of_generation(backend)
        chosen = self._in_job(ranks)
        if self._store is not None:
            raise EvenstepError(
                f"a process group of torch ({backend}) cannot be made after ranks were lost\n  fix: leave --recovery out"
            )
        with nullcontext() if chosen is None else named_by_ranks(chosen):
            made = dist.new_group(
                chosen,
                timeout=timedelta(seconds=self.timeout_seconds),
                backend=backend,
                use_local_synchronization=chosen is not None,
            )
        script_exchanges.is_ours(made)
        return made

    def _torch_group_of_generation(self, backend: str) -> Any:
        """As `shared`, by torch: without its group of all ranks, which knows the job's first ones alone."""
        self._opened += 1
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        made = open_torch_group(
            backend,
            self._store or dist.distributed_c10d._get_default_store(),
            self.environment.rank,
            self.environment.world_size,
            name=f"evenstep/{self._name}/torch/{self._opened}/{restart}",
            timeout_seconds=self.timeout_seconds,
            look=self._look or (None if self.heeds is None else self.heed),
        )
        self._of_torch.append(made)
        return made

    def control(self) -> Group:
        comm = self.shared(0, "control")
        return SharedGroup(comm) if comm is not None else self.over_torch()

    def over_torch(self) -> TorchGroup:
        return TorchGroup(self.gloo(), self._end_of_gloo())

    def _end_of_gloo(self) -> GroupEnd:
        members = self._members or range(self.environment.world_size)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        place = f"evenstep/{self._name}/end/{self._opened}/{restart}"
        store = dist.distributed_c10d._get_default_store()
        return GroupEnd(self.gloo(), store, place, lambda rank: has_ended([members[rank]]))
