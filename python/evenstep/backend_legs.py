"""Collectives of CUDA tensors over several hosts without a communicator of NCCL over all of them: NCCL inside each host, legs of
our own engine between the hosts (`evenstep.device_legs`)."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import _core, sites
from evenstep.backend_device import DeviceCollectives, _op, as_one, limited
from evenstep.backend_tensors import (
    all_apart,
    as_real,
    check_outputs,
    device_dtype,
    elements_of,
    engine_dtype,
    factor_of,
    landing,
    limit_of,
    of_inference,
    plain,
    wants_work,
)
from evenstep.backend_work import LaterWork
from evenstep.comm_debug import note
from evenstep.crossing import cut
from evenstep.device_groups import DeviceGroups
from evenstep.device_host import Ends, HostWork
from evenstep.device_legs import Call, HostLegs, Passage
from evenstep.device_places import hosts_apart
from evenstep.device_streams import CudaStreams
from evenstep.device_ways import WayOverHosts
from evenstep.leg_calls import parted, words_of

PIECE_BYTES = 8 << 20
"""Of what is larger one piece is on its way down while another is between the hosts and a third comes up."""

_SHORT = (torch.float16, torch.bfloat16)  # for an average multiplied before they are added, as NCCL does it
_DIVIDED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)  # after that

Passages = Callable[["_core.DeviceComm | None", int], Iterator[Passage]]


def carries(tensors: Sequence[torch.Tensor], op: int, options: Any) -> bool:
    """Whether legs can reduce these: what both NCCL and the CPU engine know. The same on all ranks."""
    dtypes = {tensor.dtype for tensor in tensors}
    if op == _core.OP_AVG:
        return dtypes <= {*_SHORT, *_DIVIDED}
    if factor_of(options) is not None and not all(dtype.is_floating_point for dtype in dtypes):
        return False
    return all(engine_dtype(dtype, op) is not None for dtype in dtypes)


class LegCollectives(DeviceCollectives):
    """What legs do not carry is as of DeviceCollectives, over NCCL, but for what `leaves` names."""

    def __init__(
        self, groups: DeviceGroups, streams: CudaStreams, legs: HostLegs, way: WayOverHosts | None = None
    ) -> None:
        """`way`: whether anything goes by legs; None: it does."""
        super().__init__(groups, streams)
        self._way, self._said, self._by_legs = way, way is None, way is None
        self._legs, self._ends = legs, Ends()
        self._order = [rank for team in legs.hosts for rank in team]  # host by host
        self._host_of = {rank: host for host, team in enumerate(legs.hosts) for rank in team}

    def leaves(self, call: str, peer: int | None = None) -> str:
        if peer is None and not self._by_legs:
            return ""
        if peer is not None and not (self._said and self._host_of[peer] != self._legs.host):
            return ""  # messages: of a choice at a collective the two sides may not know yet
        return f"it crosses hosts, and legs carry no {call}"

    # -- how every call runs --

    def _goes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it goes by legs; the first time, where nobody has said it, all ranks try it out."""
        way = self._way
        if way is not None and self._streams.captures():
            way.captured = True
        elif way is not None:
            begun, self._begun = self._begun, None
            options = dist.AllreduceOptions()
            over_nccl = super()._allreduce
            try:
                self._by_legs = way.by_legs(
                    tensors[0], lambda one: over_nccl([one], options), lambda one: self._add_up([one], options)
                )
            finally:
                self._begun = begun
            self._way = None
            if not self._by_legs:
                self._legs.close()
        return self._by_legs

    def _cross(self, tensors: Sequence[torch.Tensor], options: Any, words: str, passages: Passages, result: Any) -> Any:
        """`passages(comm, stream)` puts one piece of the call after the other on its way down; `words`: what is called, the same on
        all ranks."""
        check_outputs(result)
        if self._streams.captures():
            raise _core.EvenstepError(
                "a call that goes by legs cannot be captured in a CUDA graph: the host has a part in it\n"
                "  fix: make it outside the graph, or with EVENSTEP_DEVICE_HOSTS=nccl"
            )
        legs, place, seconds = self._legs, sites.of_caller(), limit_of(options)
        device = self._streams.device(tensors[0])
        side = self._streams.side(device)
        begun: list[tuple[Passage, Any]] = []
        try:
            comm = legs.open(device)
            if comm is not None:
                comm.set_site(sites.words_of(place))
            side.wait_stream(self._streams.current(device))
            with self._streams.use(side), torch.no_grad(), limited(comm, seconds):
                for passage in passages(comm, side.cuda_stream):
                    begun.append((passage, self._streams.mark(side, blocking=True)))
        except BaseException as error:
            legs.fail(error)  # others wait for what does not come
            raise
        finally:
            for tensor in tensors:
                self._streams.keep(tensor, side)
        future: Future[Any] = Future()

        def up(stream: Any) -> None:
            for tensor in tensors:
                self._streams.keep(tensor, stream)

        host = [LaterWork(future, None)]
        work = HostWork(self._streams, device, host, up, lambda: legs.up_stream(device), result)
        inference = of_inference(result) or torch.is_inference_mode_enabled()  # so are tensors that it has made
        self._hand_on(device, begun, Call(words, place, seconds, inference), future)
        self._ends.await_end(work)
        if wants_work(options):
            return self._noted(work)
        work.wait()
        return None

    def _hand_on(
        self,
        device: int,
        begun: Sequence[tuple[Passage, Any]],
        call: Call,
        future: Future[Any],
    ) -> None:
        left = len(begun)

        def ended(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif left == 0:
                future.set_result(None)

        if not begun:
            future.set_result(None)
        for number, (passage, mark) in enumerate(begun):
            self._legs.carry(device, passage, mark, call, number == 0, ended)

    def _copied(self, targets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], None]:
        """Where what has come does not lie where it belongs: (there, here)."""

        def end(stream: int) -> None:
            for target, source in targets:
                if source is not target:
                    self._streams.settle(stream)
                    target.copy_(source)

        return end

    # -- reductions --

    def _terms(self, tensor: torch.Tensor, op: int, options: Any) -> torch.Tensor:
        """What is added of it: itself, or a copy."""
        factor, data = factor_of(options), plain(tensor)
        if op == _core.OP_AVG and tensor.dtype in _SHORT:
            factor = 1 / self._size
        return data if factor is None else data.mul(factor).to(data.dtype)

    def _divide(self, total: torch.Tensor, op: int, stream: int) -> None:
        if op != _core.OP_AVG or total.dtype in _SHORT:
            return
        self._streams.settle(stream)
        total.div_(self._size, rounding_mode=None if total.is_floating_point() else "trunc")

    def _down(
        self, comm: _core.DeviceComm | None, parts: Sequence[Sequence[torch.Tensor]], op: int, stream: int
    ) -> None:
        """Sums of the host, each lane's with its carrier."""
        if comm is None:
            return
        with as_one(comm):
            for lane, part in _lanes(parts):
                dtype, address, root = device_dtype(part, op), part.data_ptr(), self._legs.carriers[lane]
                comm.reduce(address, address, part.numel(), dtype, _summed(op), None, root, stream)

    def _spread(self, parts: Sequence[Sequence[torch.Tensor]]) -> Callable[[_core.DeviceComm, int], None]:
        """Each lane's from its carrier."""

        def spread(comm: _core.DeviceComm, stream: int) -> None:
            if not parts:
                return
            with as_one(comm):
                for lane, part in _lanes(parts):
                    comm.broadcast(part.data_ptr(), part.nbytes, self._legs.carriers[lane], stream)

        return spread

    def _landed(self, part: torch.Tensor) -> torch.Tensor:
        pinned = self._streams.pinned(part.shape, part.dtype)
        self._streams.copy(pinned, part)
        return pinned

    def _sum(
        self,
        comm: _core.DeviceComm | None,
        flat: torch.Tensor,
        op: int,
        stream: int,
        end: Callable[[int], None],
        root_host: int | None = None,
    ) -> Passage:
        """Over all ranks, in place; `root_host`: of that host's alone."""
        parts = cut(flat, self._legs.lanes)
        self._down(comm, [parts], op, stream)
        here = root_host is None or root_host == self._legs.host
        dtype, called = device_dtype(flat, op), _summed(op)
        carried: list[tuple[int, Callable[[_core.Comm], None]]] = []
        up = []
        for lane in self._legs.own_lanes:
            if not parts[lane].numel():
                continue
            pinned = self._landed(parts[lane])

            def sum_up(leg: _core.Comm, pinned: torch.Tensor = pinned) -> None:
                if root_host is None:
                    leg.all_reduce(pinned.data_ptr(), pinned.numel(), dtype, called)
                    return
                counts = [pinned.numel() if host == root_host else 0 for host in range(len(self._legs.hosts))]
                leg.reduce_scatter(pinned.data_ptr(), pinned.data_ptr(), counts, dtype, called, root_host)

            carried.append((lane, sum_up))
            if here:
                up.append((parts[lane], pinned))

        def ended(stream: int) -> None:
            if here:
                self._divide(flat, op, stream)
                end(stream)

        return Passage(carried, up, self._spread([parts] if here else []), ended, [flat])

    def _pieces(self, data: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, Callable[[int], None]]]:
        """Of `data`, and what is done behind each: the last one's is that the target has it."""
        flat = data.view(-1)
        pieces = flat.split(max(1, PIECE_BYTES // data.element_size())) if data.numel() else ()
        for number, piece in enumerate(pieces, 1):
            yield piece, self._copied([(target, data)] if number == len(pieces) else [])

    def _allreduce(self, given: Sequence[torch.Tensor], options: Any) -> Any:
        op = _op(options)
        if not carries(as_real(given, op), op, options) or not self._goes(given):
            return super()._allreduce(given, options)
        return self._add_up(given, options)

    def _add_up(self, given: Sequence[torch.Tensor], options: Any) -> Any:
        op = _op(options)
        tensors = as_real(given, op)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            for tensor in tensors:
                for piece, end in self._pieces(self._terms(tensor, op, options), tensor):
                    yield self._sum(comm, piece, op, stream, end)

        words = words_of("all_reduce", [([tensor.numel()], tensor.dtype) for tensor in tensors], op)
        return self._cross(given, options, words, passages, list(given))

    def _reduce(self, tensor: torch.Tensor, op: int, root: int, opts: Any, given: Any) -> Any:
        if not carries([tensor], op, opts) or not self._goes(given):
            return super()._reduce(tensor, op, root, opts, given)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            data = self._terms(tensor, op, opts)
            if data is tensor and self._rank != root and comm is not None:
                data = data.clone()  # it keeps its own
            for piece, end in self._pieces(data, tensor if self._rank == root else data):
                yield self._sum(comm, piece, op, stream, end, self._host_of[root])

        words = words_of("reduce", [([tensor.numel()], tensor.dtype)], op, root)
        return self._cross(given, opts, words, passages, given)

    def _scattered(
        self,
        comm: _core.DeviceComm | None,
        output: torch.Tensor,
        rows: Sequence[torch.Tensor],
        op: int,
        options: Any,
        stream: int,
    ) -> Iterator[Passage]:
        """`rows`: for each rank, of one dimension."""
        legs = self._legs
        flat = self._terms(torch.cat([rows[rank] for rank in self._order]), op, options)  # memory of its own
        blocks = flat.split([sum(rows[rank].numel() for rank in team) for team in legs.hosts])
        if not flat.numel():
            return
        parts = [cut(block, legs.lanes) for block in blocks]
        self._down(comm, parts, op, stream)
        dtype, called = device_dtype(flat, op), _summed(op)
        carried: list[tuple[int, Callable[[_core.Comm], None]]] = []
        up = []
        for lane in legs.own_lanes:
            counts = [lanes[lane].numel() for lanes in parts]
            if not sum(counts):
                continue
            pinned = self._streams.pinned((sum(counts),), flat.dtype)
            for place, lanes in zip(pinned.split(counts), parts):
                if place.numel():
                    self._streams.copy(place, lanes[lane])
            own = self._streams.pinned((counts[legs.host],), flat.dtype)

            def sum_up(leg: _core.Comm, pinned: Any = pinned, own: Any = own, counts: Any = counts) -> None:
                leg.reduce_scatter(pinned.data_ptr(), own.data_ptr(), counts, dtype, called)

            carried.append((lane, sum_up))
            if own.numel():
                up.append((parts[legs.host][lane], own))
        mine = blocks[legs.host].split([rows[rank].numel() for rank in legs.team])[legs.place]

        def end(stream: int) -> None:
            if mine.numel():
                self._divide(mine, op, stream)
                self._copied([(output, mine.view(output.shape))])(stream)

        yield Passage(carried, up, self._spread([parts[legs.host]]), end, [flat])

    def _reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: int, opts: Any, given: Any
    ) -> Any:
        if not carries([output], op, opts) or not self._goes(given):
            return super()._reduce_scatter(output, parts, op, opts, given)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            yield from self._scattered(comm, output, [plain(part).view(-1) for part in parts], op, opts, stream)

        words = words_of("reduce_scatter", [([part.numel() for part in parts], output.dtype)], op)
        return self._cross([output, *parts], opts, words, passages, given)

    def _reduce_scatter_singles(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: int, opts: Any, given: Any
    ) -> Any:
        if not carries(outputs, op, opts) or not self._goes(given):
            return super()._reduce_scatter_singles(outputs, inputs, op, opts, given)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            for output, whole in zip(outputs, inputs):
                rows = plain(whole).view(-1).split(output.numel()) if output.numel() else ()
                if rows:
                    yield from self._scattered(comm, output, rows, op, opts, stream)

        words = words_of("reduce_scatter", [([whole.numel()], whole.dtype) for whole in inputs], op)
        return self._cross([*outputs, *inputs], opts, words, passages, given)

    # -- moves --

    def _broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Any:
        if not self._goes([tensor]):
            return super()._broadcast(tensor, root, opts)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            data = plain(tensor) if self._rank == root else landing(tensor)
            target = data if self._rank == root else tensor
            flat = _bytes(data)
            for piece in flat.split(PIECE_BYTES) if flat.numel() else ():
                last = piece.data_ptr() + piece.nbytes == flat.data_ptr() + flat.nbytes
                yield self._tell(comm, piece, root, elements_of(tensor), stream, [(target, data)] if last else [])

        words = f"broadcast of {tensor.nbytes} bytes from rank {root}"
        return self._cross([tensor], opts, words, passages, [tensor])

    def _tell(
        self,
        comm: _core.DeviceComm | None,
        piece: torch.Tensor,
        root: int,
        elements: int,
        stream: int,
        copied: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> Passage:
        """The root's host has it before it goes down; on others it comes up."""
        legs, root_host = self._legs, self._host_of[root]
        here, parts = root_host == legs.host, cut(piece, legs.lanes)
        if here and comm is not None:
            comm.broadcast(piece.data_ptr(), piece.nbytes, legs.team.index(root), stream)
        carried: list[tuple[int, Callable[[_core.Comm], None]]] = []
        up = []
        for lane in legs.own_lanes:
            if not parts[lane].numel():
                continue
            pinned = self._landed(parts[lane]) if here else self._streams.pinned(parts[lane].shape, torch.uint8)

            def tell(leg: _core.Comm, pinned: torch.Tensor = pinned) -> None:
                leg.broadcast(pinned.data_ptr(), pinned.nbytes, root_host, elements)

            carried.append((lane, tell))
            if not here:
                up.append((parts[lane], pinned))
        return Passage(carried, up, self._spread([] if here else [parts]), self._copied(copied), [piece])

    def _gathered(
        self,
        comm: _core.DeviceComm | None,
        own: torch.Tensor,
        everything: torch.Tensor,
        sizes: Sequence[int],
        elements: int,
        stream: int,
        end: Callable[[int], None],
        kept: Sequence[torch.Tensor] = (),
    ) -> Passage:
        """All ranks' bytes, host by host in `everything`; `own` may lie at its place there."""
        legs = self._legs
        blocks = everything.split([sum(sizes[rank] for rank in team) for team in legs.hosts])
        block, inside = blocks[legs.host], [sizes[rank] for rank in legs.team]
        if comm is not None:
            comm.all_gather(own.data_ptr(), block.data_ptr(), inside, stream)
        elif own.data_ptr() != block.data_ptr():
            block.copy_(own)
        parts = [cut(one, legs.lanes) for one in blocks]
        carried: list[tuple[int, Callable[[_core.Comm], None]]] = []
        up: list[tuple[torch.Tensor, torch.Tensor]] = []
        for lane in legs.own_lanes:
            counts = [lanes[lane].numel() for lanes in parts]
            if not sum(counts):
                continue
            pinned = self._streams.pinned((sum(counts),), torch.uint8)
            there = pinned.split(counts)
            if counts[legs.host]:
                self._streams.copy(there[legs.host], parts[legs.host][lane])

            def gather(leg: _core.Comm, pinned: Any = pinned, there: Any = there, counts: Any = counts) -> None:
                leg.all_gather(there[legs.host].data_ptr(), pinned.data_ptr(), counts, _core.DTYPE_U8, elements)

            carried.append((lane, gather))
            up += [(parts[host][lane], there[host]) for host in self._others() if counts[host]]
        spread = self._spread([parts[host] for host in self._others()])
        return Passage(carried, up, spread, end, [everything, *kept])

    def _others(self) -> list[int]:
        return [host for host in range(len(self._legs.hosts)) if host != self._legs.host]

    def _all_gather(
        self, gathers: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], opts: Any, result: Any
    ) -> Any:
        if not self._goes([gathers[0][1]]):
            return super()._all_gather(gathers, opts, result)

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            for parts, own in gathers:
                sizes = [part.nbytes for part in parts]
                if not sum(sizes):
                    continue
                everything = torch.empty(sum(sizes), dtype=torch.uint8, device=own.device)
                come = everything.split([sizes[rank] for rank in self._order])
                targets = [(parts[rank], one) for rank, one in zip(self._order, come) if sizes[rank]]
                kind = max(map(elements_of, parts))
                yield self._gathered(comm, _bytes(plain(own)), everything, sizes, kind, stream, self._placed(targets))

        every = [*(own for _, own in gathers), *(part for parts, _ in gathers for part in parts)]
        sizes = ", ".join(parted([part.nbytes for part in parts]) for parts, _ in gathers)
        return self._cross(every, opts, f"all_gather of {sizes} bytes in all", passages, result)

    def _placed(self, come: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], None]:
        """Bytes that have come, as what they are."""

        def end(stream: int) -> None:
            self._streams.settle(stream)
            for target, data in come:
                target.copy_(data.view(target.dtype).view(target.shape))

        return end

    def _all_gather_singles(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        if not self._goes(inputs):
            return super()._all_gather_singles(outputs, inputs, opts)
        in_order = self._order == list(range(self._size))

        def passages(comm: _core.DeviceComm | None, stream: int) -> Iterator[Passage]:
            targets = list(map(landing, outputs))
            sources = all_apart(list(map(plain, inputs)), targets, [-own.nbytes * self._rank for own in inputs])
            for output, target, source in zip(outputs, targets, sources):
                if not source.nbytes:
                    continue
                flat, end = _bytes(target), self._copied([(output, target)])
                everything = flat if in_order else torch.empty_like(flat)
                if not in_order:
                    end = self._ordered(output, target, flat, everything)
                sizes = [source.nbytes] * self._size
                kind = elements_of(source)
                yield self._gathered(comm, _bytes(source), everything, sizes, kind, stream, end, [flat])

        words = f"all_gather of {', '.join(str(output.nbytes) for output in outputs)} bytes in all"
        return self._cross([*outputs, *inputs], opts, words, passages, list(outputs))

    def _ordered(
        self, output: torch.Tensor, target: torch.Tensor, flat: torch.Tensor, everything: torch.Tensor
    ) -> Callable[[int], None]:
        """Parts that came host by host, rank by rank."""
        rows, come = flat.view(self._size, -1), everything.view(self._size, -1)

        def end(stream: int) -> None:
            self._streams.settle(stream)
            for number, rank in enumerate(self._order):
                rows[rank].copy_(come[number])
            if target is not output:
                output.copy_(target)

        return end

    # -- ends --

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._legs.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        try:
            self._legs.close()
        finally:
            self._ends.stop()
            super().shutdown()

    def abort(self) -> None:
        self._legs.abort()
        super().abort()


def device_collectives(
    groups: DeviceGroups, streams: CudaStreams, hosts: Sequence[str], wanted: str
) -> DeviceCollectives:
    """As ranks on these hosts want them (EVENSTEP_DEVICE_HOSTS). Legs are engines of ours: where Gloo alone connects the hosts it is
    one communicator of NCCL, with a warning."""
    parts = hosts_apart(hosts, "evenstep") if wanted not in ("", "nccl") else None
    if parts is None:
        return DeviceCollectives(groups, streams)
    if groups.beside is None:
        if groups.rank == 0 and wanted == "legs":
            sites.warn(
                f"EVENSTEP_DEVICE_HOSTS=legs, but Gloo alone connects the hosts of {groups.name}: CUDA tensors' collectives "
                "go over one communicator of NCCL\n  fix: apt-get install libucx0, or pip install 'evenstep[ucx]', on every host"
            )
        return DeviceCollectives(groups, streams)
    legs = HostLegs(groups, parts, streams)
    words = f"by {parts.lanes} legs between {len(parts.teams)} hosts, NCCL inside each"
    if wanted != "legs":
        return LegCollectives(groups, streams, legs, WayOverHosts(groups, streams, wanted == "measure", words))
    note(f"{groups.name}: CUDA tensors go {words} (EVENSTEP_DEVICE_HOSTS=legs)", groups.rank)
    return LegCollectives(groups, streams, legs)


def _lanes(parts: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Of each that was cut, what is not empty."""
    return ((lane, part) for one in parts for lane, part in enumerate(one) if part.numel())


def _summed(op: int) -> int:
    return _core.OP_SUM if op == _core.OP_AVG else op


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one element the stride may be any
