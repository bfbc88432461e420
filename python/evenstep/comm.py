"""Collectives between the processes of a job, on NumPy arrays, CPU tensors and whatever else shows its memory.

    import numpy as np
    import evenstep as es

    with es.comm.open() as group:           # under `evenstep run`, torchrun or mpirun-like variables
        x = np.full(1000, group.rank, dtype=np.float32)
        group.all_reduce(x)                 # in place, on every rank
        group.broadcast(x, root=0)

On one host neither torch nor torch.distributed is needed, nor started. Every call but `send`, `recv`, `isend`, `irecv`, `close` and
`revoke` is collective: all ranks of the group make it, in the same order, with the same sizes. Arrays are anything with
DLPack (torch's tensors, through its table of C functions), NumPy's array interface or the buffer protocol, in this host's
memory, elements one after the other. The GIL is released while a call moves data. Failures are `es.EvenstepError`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Union

from evenstep import _core, sites
from evenstep._core import EvenstepError
from evenstep.comm_arena import Arena
from evenstep.comm_costs import cpu_mask, follow, machine, shape_of
from evenstep.comm_data import (
    Data,
    argument_error,
    check_apart,
    check_same_dtype,
    counts_of,
    data_of,
    kind_of_all,
    reduced_as,
)
from evenstep.comm_debug import explain
from evenstep.comm_meeting import meet
from evenstep.comm_store import OverStore, torch_store
from evenstep.environment import read_environment
from evenstep.errors import error_of
from evenstep.hosts import wanted_engine
from evenstep.ring import record_calls

if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.typing import DTypeLike
    from typing_extensions import Self

__all__ = ["ANY", "Group", "Request", "open"]

ANY = -1
"""`recv(x, ANY)` takes the next message of any rank."""

_OPS = {
    "sum": _core.OP_SUM,
    "avg": _core.OP_AVG,
    "product": _core.OP_PRODUCT,
    "min": _core.OP_MIN,
    "max": _core.OP_MAX,
    "band": _core.OP_BAND,
    "bor": _core.OP_BOR,
    "bxor": _core.OP_BXOR,
}

_LONGEST_MASK = 2048  # letters: Linux has up to 8192 CPUs
_MOST_ROOM = 1 << 48  # bytes of a rank: what processors can address
_LONGEST_PLACE = 1024  # bytes: where a part's segment is, or why there is none
_DEFAULT_TIMEOUT = 1800.0

Array = TypeVar("Array")
Arrays = Union[Any, Sequence[Any]]


def _op(name: str) -> int:
    op = _OPS.get(name)
    if op is None:
        raise argument_error(f"{name!r} is no reduce operation", f"choose one of {', '.join(_OPS)}")
    return op


class Request:
    """A message under way. The group keeps its array until it is done."""

    def __init__(self, request: _core.Request, data: Data, array: Any) -> None:
        self._request = request
        self._kept: tuple[Data, Any] | None = (data, array)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        done = self._request.done()
        if done and self._kept is not None:
            with contextlib.suppress(
                _core.EvenstepError
            ):  # whoever waits is told; a transfer that failed may still write
                self.wait()
        return done

    def wait(self, timeout: float = 0.0) -> int:
        """Returns when it is done, with the rank at the other end; `timeout` in seconds, 0: the group's."""
        rank = self._request.wait(timeout)
        self._kept = None
        return rank


class Group:
    """This process's place among the ranks of a group. One thread at a time may be in a collective of it."""

    def __init__(
        self, comm: _core.Comm, arena_bytes: int, timeout: float, over: OverStore | None = None, name: str = ""
    ) -> None:
        self._comm = comm
        self._reduce = comm.all_reduce_data
        self._arena_bytes = arena_bytes
        self._arena: Arena | None = None
        self._timeout = timeout
        self._over = over
        self._name = name
        self._splits = 0
        self._requests: list[Request] = []
        self.rank: int = comm.rank
        """0 … size - 1"""
        self.size: int = comm.ranks
        """How many ranks the group has."""

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<evenstep.comm.Group rank {self.rank} of {self.size}{state}>"

    # -- reductions --

    def all_reduce(self, data: Array, op: str = "sum") -> Array:
        """In place on all ranks: the operation over the ranks' arrays, in rank order, so that all have the same bits.
        Returns `data`. `op`: sum, avg, product, min, max, band, bor, bxor. An array of `empty` is reduced where it lies."""
        number = _OPS.get(op)
        try:
            self._reduce(data, _op(op) if number is None else number)
        except TypeError:
            view = data_of(data, written=True)  # an object with the buffer protocol alone
            self._comm.all_reduce(view.address, *reduced_as(view, _op(op), op), _op(op))
        return data

    def reduce(self, data: Array, root: int = 0, op: str = "sum") -> Array:
        """As all_reduce, but only rank `root` gets the result; the others' arrays stay as they are."""
        view = data_of(data, written=self.rank == root)
        counts = [0] * self.size
        chosen = self._rank_named(root)
        counts[chosen], dtype = reduced_as(view, _op(op), op)
        self._comm.reduce_scatter(view.address, view.address, counts, dtype, _op(op), chosen)
        return data

    def reduce_scatter(self, data: Any, out: Array, counts: Sequence[int] | None = None, op: str = "sum") -> Array:
        """`out` = the operation over the ranks' parts for this rank. The parts lie in `data` in rank order: counts[r]
        elements for rank r, equal parts where no counts are given. `out` may be this rank's own part of `data`."""
        source, target = data_of(data), data_of(out, written=True)
        check_same_dtype(source, target, "reduce_scatter")
        parts = counts_of(counts, source.length, self.size, "reduce_scatter")
        self._check_length(target, parts[self.rank], "reduce_scatter", "out")
        check_apart(target, source, "reduce_scatter", sum(parts[: self.rank]) * source.element)
        _, dtype = reduced_as(source, _op(op), op)
        self._comm.reduce_scatter(
            source.address, target.address, [part * source.reals for part in parts], dtype, _op(op)
        )
        return out

    # -- movements: any dtype --

    def all_gather(self, data: Any, out: Array, counts: Sequence[int] | None = None) -> Array:
        """`out` = the ranks' arrays in rank order; counts[r] elements come from rank r, as many from each where no counts
        are given. `data` may lie at its place in `out`."""
        source, target = data_of(data), data_of(out, written=True)
        check_same_dtype(source, target, "all_gather")
        parts = counts_of(counts, target.length, self.size, "all_gather")
        self._check_length(source, parts[self.rank], "all_gather", "data")
        check_apart(source, target, "all_gather", sum(parts[: self.rank]) * source.element)
        element = target.element
        sizes = [part * element for part in parts]
        self._comm.all_gather(source.address, target.address, sizes, _core.DTYPE_U8, target.elements)
        return out

    def broadcast(self, data: Array, root: int = 0) -> Array:
        """The array of rank `root` on all ranks. Returns `data`."""
        view = data_of(data, written=self.rank != root)
        self._comm.broadcast(view.address, view.bytes, self._rank_named(root), view.elements)
        return data

    def gather(self, data: Any, out: Array | None = None, root: int = 0) -> Array | None:
        """`out` of rank `root` = the ranks' arrays in rank order, all of one size; the others give none."""
        source = data_of(data)
        sends = self._only(self._rank_named(root), source)
        called = (source.elements, _core.CALL_GATHER, self._rank_named(root))
        if self.rank == root:
            target = self._of_root(out, source, "gather", written=True)
            self._exchange(sends, self._split(target, None, "gather"), "gather", *called)
        else:
            self._exchange(sends, self._only(-1, source), "gather", *called)
        return out

    def scatter(self, data: Any, out: Array, root: int = 0) -> Array:
        """`out` = this rank's part of `data` of rank `root`, parts in rank order, all of one size; the others give None."""
        target = data_of(out, written=True)
        receives = self._only(self._rank_named(root), target)
        called = (target.elements, _core.CALL_SCATTER, self._rank_named(root))
        if self.rank == root:
            source = self._of_root(data, target, "scatter", written=False)
            self._exchange(self._split(source, None, "scatter"), receives, "scatter", *called)
        else:
            self._exchange(self._only(-1, target), receives, "scatter", *called)
        return out

    def all_to_all(
        self,
        data: Arrays,
        out: Arrays,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ) -> Arrays:
        """Each rank has a part for every rank and gets one from each. `data` and `out` are either an array each, whose
        parts lie in rank order (sends[r] elements for rank r, receives[r] from it; equal parts where they are not given),
        or a list of arrays, one for each rank, of any sizes."""
        given, wanted = (
            self._parts(data, sends, written=False),
            self._parts(out, receives, written=True),
        )
        self._exchange(given, wanted, "all_to_all", kind_of_all(given))
        return out

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        self._comm.barrier()

    # -- messages --

    def send(self, data: Any, to: int, tag: int = 0, timeout: float = 0.0) -> None:
        """Sends the array to rank `to`; returns when it may be changed again."""
        self.isend(data, to, tag).wait(timeout)

    def recv(self, data: Any, source: int = ANY, tag: int = 0, timeout: float = 0.0) -> int:
        """Receives the next message with that tag from rank `source` into the array, which has its size; returns the rank
        that sent it."""
        return self.irecv(data, source, tag).wait(timeout)

    def isend(self, data: Any, to: int, tag: int = 0) -> Request:
        """Begins to send. The array stays as it is until the request is done."""
        view = data_of(data)
        request = self._comm.send(view.address, view.bytes, to, tag, view.kind, sites.of_message())
        return self._begun(Request(request, view, data))

    def irecv(self, data: Any, source: int = ANY, tag: int = 0) -> Request:
        """Begins to receive."""
        view = data_of(data, written=True)
        return self._begun(Request(self._comm.receive(view.address, view.bytes, source, tag, view.kind), view, data))

    def _begun(self, request: Request) -> Request:
        self._requests.append(request)  # in place, and first: another thread may begin one while these are asked
        for other in self._requests[:-1]:
            if other.done():
                with contextlib.suppress(ValueError):  # that thread has taken it out
                    self._requests.remove(other)
        return request

    # -- memory --

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> ndarray:
        """A new NumPy array in the group's shared memory, its content undefined: collectives on it stage nothing, where
        every rank's data come from `empty`. The memory stays as long as the array or a view of it, also after `close`,
        and then serves another `empty`. `torch.from_numpy` of it is a tensor on the same memory."""
        import numpy

        kind = numpy.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
        if kind.hasobject or min(sizes, default=0) < 0:
            raise argument_error(
                f"no array of shape {sizes} and dtype {kind} can be shared", "give sizes and a number type"
            )
        if self._arena is None:
            self._arena = Arena(self._comm, self._arena_bytes)
        length = kind.itemsize
        for size in sizes:
            length *= size
        block = self._arena.take(length, {"shape": sizes, "typestr": kind.str})
        return numpy.asarray(block).view(kind)  # its fields, which have no place in a typestr

    # -- the group itself --

    def split(self, ranks: Sequence[int], *, arena_bytes: int | None = None) -> Group | None:
        """A group of some of the ranks, in that order; None on the others. Collective over all ranks of this group, which
        all name the same ranks."""
        chosen = [self._rank_named(rank) for rank in ranks]
        if not chosen or len(set(chosen)) != len(chosen):
            raise argument_error(f"a group of the ranks {chosen}", "name at least one rank, and none twice")
        room = self._arena_bytes if arena_bytes is None else _checked_room(arena_bytes)
        words = f"{chosen} {room}".encode().ljust(4096)
        own = words + cpu_mask().encode().ljust(_LONGEST_MASK)
        said = bytearray(len(own) * self.size)
        self.all_gather(bytearray(own), said)
        masks = []
        for rank in range(self.size):
            record = bytes(said[rank * len(own) : (rank + 1) * len(own)])
            theirs = record[: len(words)]
            masks.append(record[len(words) :].decode().strip())
            if theirs != words:
                raise argument_error(
                    f"rank {self.rank} splits off the ranks {words.decode().strip()}, rank {rank} {theirs.decode().strip()}",
                    "name the same ranks, in the same order, on every rank",
                )
        if self._over is not None:
            over = self._over.part(chosen)
            if self.rank not in chosen:
                return None
            return Group(over.open(chosen.index(self.rank), room, self._timeout), room, self._timeout, over)
        return self._split_off(chosen, room, [masks[rank] for rank in chosen])

    def _split_off(self, chosen: list[int], arena_bytes: int, masks: list[str]) -> Group | None:
        """On one host. `masks`: the CPUs of those chosen."""
        self._splits += 1  # on every rank of this group, so that all number the parts alike
        first = self.rank == chosen[0]
        fd, failure = -1, None
        if first:
            try:
                fd = _core.Comm.create_segment(len(chosen), arena_bytes)
            except EvenstepError as error:  # the others are told, who would wait for it
                failure = error
        place = bytearray(f"{os.getpid()}:{fd}:{failure or ''}".encode()[:_LONGEST_PLACE].ljust(_LONGEST_PLACE))
        try:
            self.broadcast(place, chosen[0])
            comm = None
            process, segment, why = place.decode(errors="replace").strip().split(":", 2)
            if why:
                raise failure or error_of(
                    "EVEN_ERR_SYSTEM", f"rank {chosen[0]} could not make the group: {why}", rank=chosen[0]
                )
            if self.rank in chosen:
                if not first:
                    fd = _core.open_peer_fd(int(process), int(segment))
                own = chosen.index(self.rank)
                comm = _core.Comm(fd, own, len(chosen), arena_bytes, self._timeout)
        finally:
            if fd >= 0:
                os.close(fd)
        if comm is None:
            return None
        name = f"{self._name}/part{self._splits}"
        if len(chosen) > 1:
            follow(comm, shape_of([0] * len(chosen), masks, [machine()]))
        record_calls(comm, name)
        explain(name, comm, "at its opening")
        return Group(comm, arena_bytes, self._timeout, name=name)

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for the others before it fails with EVEN_ERR_TIMEOUT; the same on all ranks."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._comm.set_timeout(seconds)
        self._timeout = seconds

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the group."""
        return self._comm.closed

    def revoke(self) -> None:
        """Ends every blocked and future call of the group on all ranks, with EVEN_ERR_REVOKED. Any thread."""
        self._comm.revoke()

    def close(self) -> None:
        """Leaves the group. Ranks that still wait for this one get an error that names it."""
        self._comm.close()
        self._requests = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the others where all went well, so that nobody leaves while another still needs it."""
        try:
            if kind is None and not self.closed:
                self.barrier()
        finally:
            self.close()

    # -- parts --

    def _rank_named(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise argument_error(f"rank {rank} of a group of {self.size} ranks", f"give one of 0 … {self.size - 1}")
        return rank

    @staticmethod
    def _check_length(data: Data, count: int, call: str, name: str) -> None:
        if data.length != count:
            raise argument_error(
                f"{call}: {name} has {data.length} elements where this rank's part has {count}", "make them agree"
            )

    def _of_root(self, array: Any, own: Data, call: str, *, written: bool) -> Data:
        if array is None:
            raise argument_error(f"{call}: the root gives no array for all parts", "give it one on the root")
        whole = data_of(array, written=written)
        check_same_dtype(whole, own, call)
        self._check_length(whole, own.length * self.size, call, "the root's array")
        return whole

    def _only(self, rank: int, data: Data) -> list[Data]:
        """A part for one rank, nothing for the others."""
        return [data if other == rank else data._replace(length=0) for other in range(self.size)]

    def _split(self, data: Data, counts: Sequence[int] | None, call: str) -> list[Data]:
        parts = counts_of(counts, data.length, self.size, call)
        begins = itertools.accumulate([0, *parts[:-1]])
        return [
            data._replace(address=data.address + begin * data.element, length=part)
            for begin, part in zip(begins, parts)
        ]

    def _parts(self, arrays: Arrays, counts: Sequence[int] | None, *, written: bool) -> list[Data]:
        if not isinstance(arrays, (list, tuple)):
            return self._split(data_of(arrays, written=written), counts, "all_to_all")
        if len(arrays) != self.size or counts is not None:
            raise argument_error(
                f"all_to_all: {len(arrays)} arrays for {self.size} ranks",
                "give one for each rank, and no counts with them",
            )
        return [data_of(array, written=written) for array in arrays]

    def _exchange(self, sends: list[Data], receives: list[Data], call: str, *called: int) -> None:
        for target, source in itertools.product(receives, sends):
            check_apart(target, source, call)
        for target, source in zip(receives, sends):
            check_same_dtype(source, target, call)
        self._comm.all_to_all(
            [part.address for part in sends],
            [part.bytes for part in sends],
            [part.address for part in receives],
            [part.bytes for part in receives],
            *called,
        )


_opened: dict[str, int] = {}


def _checked_room(arena_bytes: int) -> int:
    """As Python's own number, also where it is one of NumPy's."""
    try:
        room = -1 if isinstance(arena_bytes, bool) else operator.index(arena_bytes)
    except TypeError:
        room = -1
    if not 0 <= room <= _MOST_ROOM:
        raise argument_error(f"an arena of {arena_bytes!r} bytes", "give a whole number of bytes, 0 for none")
    return room


def open(name: str = "default", *, arena_bytes: int = 64 << 20, timeout: float = _DEFAULT_TIMEOUT) -> Group:
    """Opens a group of all ranks of the job; collective. Each call of the same name opens a new one.

    The ranks are those of RANK and WORLD_SIZE (`evenstep run`, torchrun, or any launcher that sets them and MASTER_PORT);
    without them the group has one rank. Ranks on several hosts, and those that EVENSTEP_COMM_ENGINE tells to use UCX, meet
    at torch's store, which needs torch and MASTER_ADDR. `arena_bytes` is the shared memory of each rank for `empty`, taken
    up only when it is used; `timeout` the seconds that a call waits for the others, 1800 where it is not above 0 (`inf`: for
    ever)."""
    room = _checked_room(arena_bytes)
    environment = read_environment()
    timeout = timeout if timeout > 0 else _DEFAULT_TIMEOUT
    wanted = wanted_engine()
    _opened[name] = number = _opened.get(name, 0) + 1
    place, rank, ranks = f"{name}/{number}", environment.rank, environment.world_size
    if ranks == 1 or environment.local_world_size == ranks:
        engine = wanted if ranks > 1 else ""
        comm = meet(place, rank, ranks, arena_bytes=room, timeout_seconds=timeout, engine=engine)
        if comm is not None:
            return Group(comm, room, timeout, name=f"comm/{place}")
    over = OverStore(torch_store(), f"comm/{place}", list(range(ranks)))
    return Group(over.open(rank, room, timeout), room, timeout, over)
