"""Collectives of CPU tensors between ranks of several hosts that no engine of ours connects: in shared memory on each host, and over
torch's Gloo between the hosts' first ranks, piece by piece, so that one piece is between the hosts while another is added up."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from evenstep import _core, sites
from evenstep._core import EvenstepError
from evenstep.backend_older import ended
from evenstep.called import DIFFERS_FIX, Called, called
from evenstep.errors import error_of
from evenstep.exits import left_in_children
from evenstep.gloo_group import open_gloo
from evenstep.group import DTYPES
from evenstep.group_end import STORE_SECONDS, closed_peers, end_calls, first_line, is_late, wait_for, within
from evenstep.measured_place import host_name
from evenstep.rendezvous import open_group

T = TypeVar("T")

PIECE_BYTES = 2 << 20
_LINE_BYTES = 256
_AHEAD = 2  # pieces that are between the hosts at a time

_KINDS = {number: dtype for dtype, number in DTYPES.items()} | {_core.DTYPE_I8: torch.int8}
REDUCED = frozenset(_KINDS)
"""What Gloo adds up as the engine does (its sums of booleans are none)."""
_SHORT = (torch.float16, torch.bfloat16)
_ORDERS = (_core.OP_MIN, _core.OP_MAX)
_OPS = {
    _core.OP_SUM: dist.ReduceOp.SUM,
    _core.OP_AVG: dist.ReduceOp.SUM,
    _core.OP_PRODUCT: dist.ReduceOp.PRODUCT,
    _core.OP_MIN: dist.ReduceOp.MIN,
    _core.OP_MAX: dist.ReduceOp.MAX,
    _core.OP_BAND: dist.ReduceOp.BAND,
    _core.OP_BOR: dist.ReduceOp.BOR,
    _core.OP_BXOR: dist.ReduceOp.BXOR,
}


def _pieces(address: int, size: int, count: int) -> Iterator[tuple[int, int]]:
    """Where each piece of `count` elements of `size` bytes begins, and how many it has."""
    most = PIECE_BYTES // size
    for first in range(0, count, most):
        yield address + first * size, min(most, count - first)


def _in_turn(parts: Sequence[T], begin: Callable[[T], Any], end: Callable[[T, Any], None]) -> None:
    """Each part begins while some that came before are under way; they end in their order."""
    under_way: deque[tuple[T, Any]] = deque()
    for part in parts:
        if len(under_way) == _AHEAD:
            end(*under_way.popleft())
        under_way.append((part, begin(part)))
    while under_way:
        end(*under_way.popleft())


def keys_of(values: torch.Tensor, op: int) -> torch.Tensor:
    """Integers in the order of floats, for MIN or MAX: Gloo's own of floats lose a NaN, which wins on a host."""
    values = values.float() if values.dtype in _SHORT else values
    winner = torch.copysign(torch.tensor(torch.nan, dtype=values.dtype), 1.0 if op == _core.OP_MAX else -1.0)
    return _turned(
        torch.where(values.isnan(), winner, values).view(torch.int32 if values.itemsize == 4 else torch.int64)
    )


def values_of(keys: torch.Tensor) -> torch.Tensor:
    return _turned(keys).view(torch.float32 if keys.itemsize == 4 else torch.float64)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Of negative floats all bits but the sign, so that integers are in their order; and back."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


class Collectives(Protocol):
    """What the backend's collectives call of an engine group, as `_core.Comm` has it."""

    @property
    def closed(self) -> bool: ...

    def all_reduce(self, address: int, count: int, dtype: int, op: int, /) -> None: ...

    def reduce_scatter(
        self, input: int, output: int, counts: Sequence[int], dtype: int, op: int, root: int = -1, /
    ) -> None: ...

    def all_gather(self, input: int, output: int, counts: Sequence[int], dtype: int, elements: int = 0, /) -> None: ...

    def broadcast(self, address: int, bytes: int, root: int, elements: int = 0, /) -> None: ...

    def barrier(self) -> None: ...

    def set_timeout(self, seconds: float, /) -> None: ...

    def revoke(self) -> None: ...

    def close(self) -> None: ...


class _Leg:
    """A piece between the hosts: where it lies here, what is sent of it, and the call."""

    def __init__(self, slot: torch.Tensor, sent: torch.Tensor, work: Any) -> None:
        self.slot, self.sent, self.work = slot, sent, work


def _words(error: BaseException) -> str:
    """What it says, without its status and its fix."""
    return first_line(error).removesuffix(f" ({getattr(error, 'status', '')})")


class HostsOverGloo:
    """`Collectives` of ranks on several hosts. One thread at a time, but for revoke and close.

    inside: the ranks of this host. between: a Gloo backend of the hosts' first ranks, None on the others. host_of: the host of each
    rank of the group, numbered by their first ranks. store: of this group alone; the ranks of a host tell one another there why what
    is between the hosts has failed. A call that fails on one rank ends the group on all: within a host by the engine, on other hosts by
    the closed connections of this host's first rank.
    """

    def __init__(
        self, inside: _core.Comm, between: Any, rank: int, host_of: Sequence[int], store: Any, timeout_seconds: float
    ) -> None:
        self._inside, self._between, self._store = inside, between, store
        self.rank, self.ranks = rank, len(host_of)
        self._host, self._host_of = host_of[rank], list(host_of)
        self._teams = [[r for r, host in enumerate(host_of) if host == one] for one in range(max(host_of) + 1)]
        self._team = self._teams[self._host]
        self._leads = self._team[0] == rank
        self._seconds, self._deadline = timeout_seconds, 0.0
        self._slots: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * _AHEAD
        self._taken = 0  # of the slots, in turn
        self._error: EvenstepError | None = None
        self._calls = 0
        self._asked: tuple[Called, torch.Tensor, Any] | None = None  # which call the other hosts' first ranks are in
        self._differs: EvenstepError | None = None  # of calls that differ on this host: all of its ranks find it
        self._under_way = False
        self._process = os.getpid()

    @property
    def description(self) -> str:
        return f"shared memory on each of {len(self._teams)} hosts, Gloo through torch between their first ranks"

    @property
    def closed(self) -> bool:
        return self._inside.closed

    def set_timeout(self, seconds: float) -> None:
        self._seconds = seconds

    # -- collectives --

    def all_reduce(self, address: int, count: int, dtype: int, op: int) -> None:
        self._all_reduce(called("all_reduce", dtype, op, 0, [count]), address, count, dtype, op)

    def _all_reduce(self, call: Called, address: int, count: int, dtype: int, op: int) -> None:
        kind = _KINDS[dtype]

        def begin(piece: tuple[int, int]) -> _Leg | None:
            slot = self._sum_inside(*piece, dtype, op)
            return None if slot is None else self._begin_sum(slot, op)

        def finish(piece: tuple[int, int], leg: _Leg | None) -> None:
            if leg is not None:
                self._end_sum(leg, op)
            self._spread(leg, piece[0], piece[1] * kind.itemsize)

        with self._call(call):
            _in_turn(list(_pieces(address, kind.itemsize, count)), begin, finish)

    def broadcast(self, address: int, bytes: int, root: int, elements: int = 0) -> None:
        host = self._host_of[root]
        place = self._teams[host].index(root)
        parts = [(host, *piece) for piece in _pieces(address, 1, bytes)]

        def begin(part: tuple[int, int, int]) -> _Leg | None:
            if host == self._host and len(self._team) > 1:
                self._limit()
                self._inside.broadcast(part[1], part[2], place)
            return self._begin_telling(part)

        with self._call(called("broadcast", _core.DTYPE_U8, elements, root, [bytes])):
            _in_turn(parts, begin, self._end_telling)

    def all_gather(self, input: int, output: int, counts: Sequence[int], dtype: int, elements: int = 0) -> None:
        """Of bytes."""
        assert dtype == _core.DTYPE_U8
        order = [rank for team in self._teams for rank in team]
        in_order = order == sorted(order)
        apart = None if in_order else torch.empty(sum(counts), dtype=torch.uint8)
        whole = output if apart is None else apart.data_ptr()  # host by host
        sizes = [sum(counts[rank] for rank in team) for team in self._teams]
        begins = [whole, *(whole + before for before in itertools.accumulate(sizes))]
        of_hosts = [[(host, *piece) for piece in _pieces(begins[host], 1, size)] for host, size in enumerate(sizes)]
        parts = [part for row in itertools.zip_longest(*of_hosts) for part in row if part is not None]
        with self._call(called("all_gather", dtype, elements, 0, counts)):
            if sizes[self._host]:
                own = [counts[rank] for rank in self._team]
                self._inside.all_gather(input, begins[self._host], own, dtype, elements)
            _in_turn(parts, self._begin_telling, self._end_telling)
        if apart is not None:
            targets = [output, *(output + before for before in itertools.accumulate(counts))]
            at = whole
            for rank in order:
                ctypes.memmove(targets[rank], at, counts[rank])
                at += counts[rank]

    def reduce_scatter(
        self, input: int, output: int, counts: Sequence[int], dtype: int, op: int, root: int = -1
    ) -> None:
        """`root`: it is a reduce, which writes that rank's output alone."""
        kind, size = _KINDS[dtype], _KINDS[dtype].itemsize
        total = sum(counts)
        call = (
            called("reduce_scatter", dtype, op, 0, counts) if root < 0 else called("reduce", dtype, op, root, [total])
        )
        if root < 0 and total * size <= PIECE_BYTES:  # one round, not one for each rank
            whole = torch.empty(total, dtype=kind)
            ctypes.memmove(whole.data_ptr(), input, whole.nbytes)
            self._all_reduce(call, whole.data_ptr(), total, dtype, op)
            at = whole.data_ptr() + sum(counts[: self.rank]) * size
            ctypes.memmove(output, at, counts[self.rank] * size)
            return
        befores = [0, *itertools.accumulate(counts)]
        of_ranks = [
            [
                (rank, at, n, at - input - befores[rank] * size)
                for at, n in _pieces(input + befores[rank] * size, size, count)
            ]
            for rank, count in enumerate(counts)
        ]
        parts = [part for row in itertools.zip_longest(*of_ranks) for part in row if part is not None]

        def begin(part: tuple[int, int, int, int]) -> _Leg | None:
            slot = self._sum_inside(part[1], part[2], dtype, op)
            return None if slot is None else self._begin_sum(slot, op, self._host_of[part[0]])

        def finish(part: tuple[int, int, int, int], leg: _Leg | None) -> None:
            if leg is not None:
                self._end_sum(leg, op)
            if self._host_of[part[0]] == self._host:
                self._give(leg, part[0], output + part[3], part[2] * size)

        with self._call(call):
            _in_turn(parts, begin, finish)

    def barrier(self) -> None:
        with self._call(called("barrier")):
            self._hear_hosts()  # when all ranks of each host have come
            self._limit(last=True)
            self._inside.barrier()

    # -- inside a host --

    def _slot(self, kind: torch.dtype, count: int) -> torch.Tensor:
        """Memory that Gloo may still write into when a call has failed: nobody else's."""
        self._taken = (self._taken + 1) % _AHEAD
        wanted = count * kind.itemsize
        if self._slots[self._taken].nbytes < wanted:
            self._slots[self._taken] = torch.empty(wanted, dtype=torch.uint8)
        return self._slots[self._taken][:wanted].view(kind)

    def _sum_inside(self, address: int, count: int, dtype: int, op: int) -> torch.Tensor | None:
        """This host's, in rank order, on its first rank."""
        slot = self._slot(_KINDS[dtype], count) if self._leads else None
        counts = [count] + [0] * (len(self._team) - 1)
        target = address if slot is None else slot.data_ptr()
        inner = _core.OP_SUM if op == _core.OP_AVG else op
        self._limit()
        self._inside.reduce_scatter(address, target, counts, dtype, inner, 0)
        return slot

    def _spread(self, leg: _Leg | None, address: int, bytes: int) -> None:
        """What came to this host's first rank, to all of its ranks."""
        if len(self._team) > 1:
            self._limit(last=True)
            self._inside.broadcast(address if leg is None else leg.slot.data_ptr(), bytes, 0)
        if leg is not None:
            ctypes.memmove(address, leg.slot.data_ptr(), bytes)

    def _give(self, leg: _Leg | None, rank: int, address: int, bytes: int) -> None:
        """What came there, to one of its ranks."""
        if rank == self._team[0]:
            if leg is not None:
                ctypes.memmove(address, leg.slot.data_ptr(), bytes)
            return
        nothing = [0] * len(self._team)
        sources, sizes, targets, taken = (list(nothing) for _ in range(4))
        place = self._team.index(rank)
        if leg is not None:
            sources[place], sizes[place] = leg.slot.data_ptr(), bytes
        elif rank == self.rank:
            targets[0], taken[0] = address, bytes
        self._limit(last=True)
        self._inside.all_to_all(sources, sizes, targets, taken)

    # -- between the hosts --

    def _begin_sum(self, slot: torch.Tensor, op: int, host: int | None = None) -> _Leg:
        """On all hosts, or on one. Gloo rounds 16-bit floats whenever it has added one: of more than two hosts they travel as fp32, and
        where their sum is yet to be divided."""
        if op in _ORDERS and slot.is_floating_point():
            sent = keys_of(slot, op)
        else:
            wide = slot.dtype in _SHORT and (len(self._teams) > 2 or op == _core.OP_AVG)
            sent = slot.float() if wide else slot
        if host is None:
            options = dist.AllreduceOptions()
        else:
            options = dist.ReduceOptions()
            options.rootRank = host
        options.reduceOp, options.timeout = _OPS[op], self._leg_limit()
        call = self._between.allreduce if host is None else self._between.reduce
        return _Leg(slot, sent, self._begun(lambda: call([sent], options)))

    def _end_sum(self, leg: _Leg, op: int) -> None:
        self._wait(leg.work)
        if op == _core.OP_AVG:
            leg.sent.div_(self.ranks)
        if leg.sent is not leg.slot:
            ordered = op in _ORDERS and leg.slot.is_floating_point()
            leg.slot.copy_(values_of(leg.sent) if ordered else leg.sent)

    def _begin_telling(self, part: tuple[int, int, int]) -> _Leg | None:
        """What a host has, (host, address, bytes), to the other hosts."""
        if not self._leads:
            return None
        host, address, bytes = part
        slot = self._slot(torch.uint8, bytes)
        if host == self._host:
            ctypes.memmove(slot.data_ptr(), address, bytes)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = host, self._leg_limit()
        return _Leg(slot, slot, self._begun(lambda: self._between.broadcast([slot], options)))

    def _end_telling(self, part: tuple[int, int, int], leg: _Leg | None) -> None:
        if leg is not None:
            self._wait(leg.work)
        if part[0] != self._host:
            self._spread(leg, part[1], part[2])

    def _begun(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise self._cut_off(error) from error

    def _wait(self, work: Any) -> None:
        self._hear_hosts()
        self._await(work)

    def _await(self, work: Any) -> None:
        try:
            self._wait_for(work)
        except EvenstepError:
            raise
        except RuntimeError as error:
            raise self._cut_off(error) from error

    def _wait_for(self, work: Any) -> None:
        wait_for(work, self._between)

    def _cut_off(self, error: RuntimeError) -> EvenstepError:
        """Of a call between the hosts."""
        late = is_late(error)
        closed = [] if late else closed_peers(self._between)
        ranks = ", ".join(str(self._teams[host][0]) for host in closed)
        which = f" (closed: the connection with rank {ranks})" if closed else ""
        return error_of(
            "EVEN_ERR_TIMEOUT" if late else "EVEN_ERR_PEER_LOST",
            f"rank {self.rank}, by which host {host_name()} meets the other hosts over Gloo, could not do so: "
            f"{first_line(error)}{which}",
            "a rank of another host has ended, hangs, or the network between them has failed: see what the others say",
        )

    # -- all ranks are in the same call --

    def _compare(self, call: Called) -> None:
        """On this host. Its first rank asks the other hosts' on the way: what comes of their answers is for _hear_hosts."""
        own = torch.tensor(call, dtype=torch.int64)
        if len(self._team) > 1:
            every = self._gathered(own).tolist()
            place = next((at for at, other in enumerate(every) if tuple(other) != call), None)
            if place is not None:
                lines = self._lines()
                self._differs = self._mismatch(
                    call, Called(*every[place]), self._team[place], lines[self._team.index(self.rank)], lines[place]
                )
                raise self._differs
        if self._leads:
            every_host = torch.empty((len(self._teams), own.numel()), dtype=own.dtype)
            options = c10d.AllgatherOptions()
            options.timeout = self._leg_limit()
            rows = list(every_host.unbind(0))
            work = self._begun(lambda: self._between.allgather([rows], [own], options))
            self._asked = call, every_host, work

    def _hear_hosts(self) -> None:
        """Before anything that came from another host is taken for what this call wants."""
        if self._asked is None:
            return
        (call, every, work), self._asked = self._asked, None
        self._await(work)
        for host, other in enumerate(every.tolist()):
            if tuple(other) != call:
                line = sites.of_message()
                error = self._mismatch(call, Called(*other), self._teams[host][0], f" at {line}" if line else "", "")
                raise error from RuntimeError("calls differ between hosts")  # which no other rank of this one knows

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        every = torch.empty((len(self._team), own.numel()), dtype=own.dtype)
        self._inside.all_gather(own.data_ptr(), every.data_ptr(), [own.nbytes] * len(self._team), _core.DTYPE_U8)
        return every

    def _lines(self) -> list[str]:
        """Where each rank of this host makes its call, as far as it can be told."""
        line = (sites.of_message() or "").encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
        try:
            every = self._gathered(torch.frombuffer(bytearray(line), dtype=torch.uint8)).numpy()
        except EvenstepError:
            return [""] * len(self._team)
        lines = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in every]
        return [f" at {one}" if one else "" for one in lines]

    def _mismatch(self, call: Called, other: Called, rank: int, own_line: str, line: str) -> EvenstepError:
        apart = ", divided otherwise among the ranks" if str(call) == str(other) else ""
        words = f"rank {self.rank} called {call}{own_line}, but rank {rank} called {other}{apart}{line}"
        return error_of("EVEN_ERR_MISMATCH", f"{words} (call {self._calls} of the group)", DIFFERS_FIX, rank)

    # -- limits: a rank that does not come is to be named by those of its own host, another host by this one's first rank --

    @property
    def _slack(self) -> float:
        return min(1.0, self._seconds / 4)

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _limit(self, last: bool = False) -> None:
        """For the next call inside; `last`: its first rank may have waited for other hosts."""
        self._inside.set_timeout(self._left() + (2 * self._slack if last else 0.0))

    def _leg_limit(self) -> timedelta:
        return timedelta(seconds=self._left() + self._slack)

    # -- the end --

    @contextmanager
    def _call(self, call: Called) -> Iterator[None]:
        if self._forked:
            words = f"this process was forked from rank {self.rank}, and has no part in its groups"
            raise error_of("EVEN_ERR_STATE", words, "open groups of its own there")
        if self._error is not None:
            raise error_of(self._error.status, _words(self._error), self._error.fix, self._error.rank)
        self._deadline, self._under_way = time.monotonic() + self._seconds, True
        self._calls += 1
        try:
            self._limit()
            self._compare(call)
            yield
            self._hear_hosts()
        except BaseException as error:
            made = self._ends(error)
            if made is error:
                raise
            raise made from error
        finally:
            self._under_way = False

    def _ends(self, error: BaseException) -> BaseException:
        """No rank is to wait for this one, nor this one for another. What is to be raised."""
        if self._leads:
            end_calls(self._between)
        if isinstance(error, EvenstepError) and error is self._differs:
            self._error = error
            return error
        inside = isinstance(error, EvenstepError) and error.__cause__ is None
        if not inside and not self._inside.closed:
            self._say_why(_words(error))
        if not self._inside.closed:
            self._inside.revoke()
        made = self._told(error) if inside and isinstance(error, EvenstepError) else error
        self._error = made if isinstance(made, EvenstepError) else error_of("EVEN_ERR_REVOKED", first_line(error))
        return made

    def _told(self, error: EvenstepError) -> EvenstepError:
        """The engine's error of this host's ranks, in the group's numbers, or what another of these ranks has said."""
        said = self._why_said() if error.status == "EVEN_ERR_REVOKED" else None
        words = _words(error)
        if said is not None:
            return error_of(error.status, f"{words}: {said}", error.fix)
        if self._team == list(range(len(self._team))):
            return error
        places = ", ".join(f"{place} is rank {rank}" for place, rank in enumerate(self._team))
        known = error.rank is not None and 0 <= error.rank < len(self._team)
        number = self._team[error.rank] if known and error.rank is not None else None
        return error_of(
            error.status, f"{words} (numbered on this host, where {places} of the group)", error.fix, number
        )

    def _say_why(self, words: str) -> None:
        """To the other ranks of this host."""
        within(STORE_SECONDS, lambda: self._store.set(f"why/{self._host}", words))

    def _why_said(self) -> str | None:
        key = f"why/{self._host}"
        return within(STORE_SECONDS, lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    @property
    def _forked(self) -> bool:
        """The connections are another process's, too."""
        return os.getpid() != self._process

    def revoke(self) -> None:
        """Any thread: ends what this rank, and all others, wait for."""
        if self._leads and not self._forked:
            end_calls(self._between)
        if not self._inside.closed:
            self._inside.revoke()

    def close(self) -> None:
        leads = self._leads and not self._forked
        if self._under_way and leads:
            end_calls(self._between)  # a call on another thread ends with it
        self._inside.close()
        if leads:
            ended(self._between, "shutdown")


def open_hosts_over_gloo(
    store: Any,
    place: str,
    rank: int,
    host_of: Sequence[int],
    name: str,
    timeout: timedelta,
    members: Sequence[int] | None,
) -> HostsOverGloo:
    """Collective over the group's ranks. `place`: a name that no other group of the store has; `members`: the ranks' numbers in the
    job."""
    team = [other for other, host in enumerate(host_of) if host == host_of[rank]]
    inside = open_group(
        store,
        team.index(rank),
        len(team),
        name=f"torch/{name}/{place}/{host_of[rank]}",
        timeout_seconds=timeout.total_seconds(),
        members=[members[other] if members is not None else other for other in team],
    )
    if inside is None:
        raise EvenstepError("the ranks of a host do not share its memory, and did before")
    between = None
    own = dist.PrefixStore(f"evenstep-{place}/{name}/", store)
    if team[0] == rank:
        hosts = max(host_of) + 1
        between, _ = open_gloo(own, host_of[rank], hosts, timeout)
        left_in_children(between)
    return HostsOverGloo(inside, between, rank, host_of, own, timeout.total_seconds())
