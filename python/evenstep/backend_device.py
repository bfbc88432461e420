"""Collectives of CUDA tensors on our NCCL engine: what torch calls on a backend, ordered on CUDA streams."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from evenstep import _core, sites
from evenstep.backend_exchange import offsets, places, rows
from evenstep.backend_tensors import (
    all_apart,
    apart,
    as_real,
    check_outputs,
    device_dtype,
    factor_of,
    landing,
    limit_of,
    op_of,
    plain,
    root_of,
    scaled,
    sources_as_real,
    wants_work,
)
from evenstep.backend_work import completed
from evenstep.device_groups import DeviceGroups
from evenstep.device_messages import DeviceMessage, Line
from evenstep.device_streams import CudaStreams, DeviceWork, SeveralWorks, Watch
from evenstep.hosts_over_gloo import Collectives

Body = Callable[[_core.DeviceComm, int], None]


def _one(tensors: Any) -> torch.Tensor:
    given: list[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(given) != 1:
        raise ValueError(f"one tensor a rank, not {len(given)}: one GPU belongs to one rank")
    return given[0]


def _weight(options: Any) -> tuple[float | None, torch.Tensor | None]:
    """PREMUL_SUM's factor: a number, which NCCL folds in, or a tensor, which is multiplied before."""
    factor = factor_of(options)
    return (None, factor) if isinstance(factor, torch.Tensor) else (factor, None)


def _op(options: Any) -> int:
    op = op_of(options)
    if op is None:
        raise ValueError("this reduce operation is not known to backend evenstep")
    return op


def _equal(name: str, parts: Sequence[torch.Tensor], own: torch.Tensor, ranks: int) -> None:
    if len(parts) != ranks or any(part.dtype != own.dtype for part in parts):
        raise ValueError(f"{name} needs {ranks} tensors of {own.dtype}; got {[(p.numel(), p.dtype) for p in parts]}")


class DeviceCollectives:
    """A group's collectives on GPUs. Methods are those of a backend of torch; each returns a Work, or None where the
    caller said that it does not want one (the call is then on the caller's own stream)."""

    def __init__(self, groups: DeviceGroups, streams: CudaStreams | None = None) -> None:
        self._groups = groups
        self._rank, self._size = groups.rank, groups.size
        self.streams = self._streams = streams or CudaStreams()
        self._watch = Watch(groups.opened)
        self._sites: dict[int, sites.Place | None] = {}
        self._lines: dict[tuple[int, tuple[int, int]], Line] = {}
        self._begun: list[Any] | None = None  # Works since start_coalescing

    def leaves(self, call: str, peer: int | None = None) -> str:
        """Why it leaves such a call (a message: with this rank) to the host; "" where it makes it. The same on all ranks."""
        del call, peer
        return ""

    # -- how every call runs --

    def _open(self, device: int) -> _core.DeviceComm:
        """The communicator for the next call, which is told where that is made: when a call on a GPU fails, nobody is in
        it any more."""
        self._watch.check()
        comm = self._groups.open(device)
        place = sites.of_caller()
        if device not in self._sites or self._sites[device] != place:
            self._sites[device] = place
            comm.set_site(sites.words_of(place))
        return comm

    def _run(self, tensors: Sequence[torch.Tensor], options: Any, body: Body, result: Any) -> Any:
        """`body` puts the call on a stream: the caller's own, or one beside it that begins after what the caller's has.
        `result`: what it writes, refused before anything is launched where that cannot be written."""
        check_outputs(result)
        device = self._streams.device(tensors[0])
        comm = self._open(device)
        current = self._streams.current(device)
        if not getattr(options, "asyncOp", True):
            with torch.no_grad(), _limit(comm, options):
                body(comm, current.cuda_stream)
            self._streams.let_go(current)
            return completed(result) if wants_work(options) else None
        side = self._streams.side(device)
        side.wait_stream(current)
        with self._streams.use(side), torch.no_grad():
            with _limit(comm, options):
                body(comm, side.cuda_stream)
            return self._noted(DeviceWork(self._streams, self._watch, device, side, tensors, result))

    def _noted(self, work: Any) -> Any:
        if self._begun is not None:
            self._begun.append(work)
        return work

    def start_coalescing(self) -> None:
        """Works from here to end_coalescing are waited for as one; the calls themselves go out as they come."""
        self._begun = []

    def end_coalescing(self) -> Any:
        """None where nothing that was called has a Work."""
        works, self._begun = self._begun, None
        return SeveralWorks(works) if works else None

    def _reduced(
        self, comm: _core.DeviceComm, tensor: torch.Tensor, dtype: int, op: int, options: Any, stream: int
    ) -> None:
        number, factor = _weight(options)
        data = scaled(tensor, factor)
        comm.all_reduce(data.data_ptr(), data.data_ptr(), data.numel(), dtype, op, number, stream)
        if data is not tensor:
            self._streams.settle(stream)
            tensor.copy_(data)

    def _allreduce(self, given: Sequence[torch.Tensor], options: Any) -> Any:
        op = _op(options)
        tensors = as_real(given, op)
        dtypes = [device_dtype(tensor, op) for tensor in tensors]

        def body(comm: _core.DeviceComm, stream: int) -> None:
            if len(tensors) == 1:
                self._reduced(comm, tensors[0], dtypes[0], op, options, stream)
                return
            number, factor = _weight(options)
            sources = [scaled(tensor, factor) for tensor in tensors]
            with as_one(comm):
                for data, dtype in zip(sources, dtypes):
                    comm.all_reduce(data.data_ptr(), data.data_ptr(), data.numel(), dtype, op, number, stream)
            self._copy_back(tensors, sources, stream)

        return self._run(given, options, body, list(given))

    def _copy_back(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: int) -> None:
        self._streams.settle(stream)
        for target, source in zip(targets, sources):
            if source is not target:
                target.copy_(source)

    # -- reductions --

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._allreduce([_one(tensors)], opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._allreduce(list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        op, root = _op(opts), root_of(opts, "reduce", self._size)
        return self._reduce(as_real([_one(tensors)], op)[0], op, root, opts, list(tensors))

    def _reduce(self, tensor: torch.Tensor, op: int, root: int, opts: Any, given: Any) -> Any:
        dtype = device_dtype(tensor, op)

        def body(comm: _core.DeviceComm, stream: int) -> None:
            number, factor = _weight(opts)
            data = scaled(tensor, factor)
            target = landing(tensor) if self._rank == root else data
            comm.reduce(data.data_ptr(), target.data_ptr(), data.numel(), dtype, op, number, root, stream)
            if self._rank == root:
                self._copy_back([tensor], [target], stream)
            elif data is not tensor:
                self._streams.settle(stream)

        return self._run(given, opts, body, given)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        op = _op(opts)
        output, parts = as_real([_one(outputs)], op)[0], sources_as_real(inputs[0], op)
        _equal("reduce_scatter", parts, output, self._size)
        counts = [part.numel() for part in parts]
        if output.numel() != counts[self._rank]:
            raise ValueError(f"reduce_scatter of {counts} elements into {output.numel()} on rank {self._rank}")
        return self._reduce_scatter(output, parts, op, opts, list(outputs))

    def _reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: int, opts: Any, given: Any
    ) -> Any:
        dtype, counts = device_dtype(output, op), [part.numel() for part in parts]

        def body(comm: _core.DeviceComm, stream: int) -> None:
            number, factor = _weight(opts)
            flat = scaled(torch.cat([plain(part).view(-1) for part in parts]), factor)  # memory of its own
            target = landing(output)
            comm.reduce_scatter(flat.data_ptr(), target.data_ptr(), counts, dtype, op, number, stream)
            self._copy_back([output], [target], stream)

        return self._run([output, *parts], opts, body, given)

    def reduce_scatter_single_coalesced(self, given_outputs: Any, given_inputs: Any, opts: Any = None) -> Any:
        op = _op(opts)
        outputs, inputs = as_real(given_outputs, op), sources_as_real(given_inputs, op)
        for output, whole in zip(outputs, inputs):
            if whole.numel() != output.numel() * self._size or whole.dtype != output.dtype:
                raise ValueError(
                    f"reduce_scatter_single into {output.numel()} {output.dtype} elements on each of {self._size} ranks "
                    f"needs an input of {output.numel() * self._size}, not of {whole.numel()} {whole.dtype}"
                )
        return self._reduce_scatter_singles(outputs, inputs, op, opts, list(given_outputs))

    def _reduce_scatter_singles(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: int, opts: Any, given: Any
    ) -> Any:
        dtypes = [device_dtype(output, op) for output in outputs]

        def body(comm: _core.DeviceComm, stream: int) -> None:
            number, factor = _weight(opts)
            targets = list(map(landing, outputs))
            own = [target.nbytes * self._rank for target in targets]
            sources = all_apart([scaled(whole, factor) for whole in inputs], targets, own)
            with as_one(comm):
                for source, target, dtype in zip(sources, targets, dtypes):
                    counts = [target.numel()] * self._size
                    comm.reduce_scatter(source.data_ptr(), target.data_ptr(), counts, dtype, op, number, stream)
            self._copy_back(outputs, targets, stream)

        return self._run([*outputs, *inputs], opts, body, given)

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    # -- moves --

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._broadcast(_one(tensors), root_of(opts, "broadcast", self._size), opts)

    def _broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Any:
        def body(comm: _core.DeviceComm, stream: int) -> None:
            data = plain(tensor)
            comm.broadcast(data.data_ptr(), data.nbytes, root, stream)
            self._copy_back([tensor], [data], stream)

        return self._run([tensor], opts, body, [tensor])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """output_lists[r][i] = rank r's inputs[i]; the ranks' may differ in size."""
        gathers = [([outputs[i] for outputs in output_lists], own) for i, own in enumerate(inputs)]
        for parts, own in gathers:
            _equal("all_gather", parts, own, self._size)
            if parts[self._rank].numel() != own.numel():
                raise ValueError(f"all_gather of {own.numel()} elements into {parts[self._rank].numel()}")
        return self._all_gather(gathers, opts, output_lists)

    def _all_gather(
        self, gathers: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], opts: Any, result: Any
    ) -> Any:
        def body(comm: _core.DeviceComm, stream: int) -> None:
            for parts, own in gathers:
                self._gather_parts(comm, parts, own, stream)

        every = [*(own for _, own in gathers), *(part for parts, _ in gathers for part in parts)]
        return self._run(every, opts, body, result)

    def _gather_parts(
        self, comm: _core.DeviceComm, parts: Sequence[torch.Tensor], own: torch.Tensor, stream: int
    ) -> None:
        sizes = [part.nbytes for part in parts]
        everything = torch.empty(sum(sizes), dtype=torch.uint8, device=own.device)
        source = plain(own)
        comm.all_gather(source.data_ptr(), everything.data_ptr(), sizes, stream)
        self._streams.settle(stream)
        for part, data in zip(parts, everything.split(sizes)):
            if part.numel():
                part.copy_(data.view(part.dtype).view(part.shape))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        _one(inputs)
        return self.allgather_coalesced([[part] for part in outputs[0]], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs):
            if output.nbytes != own.nbytes * self._size or output.dtype != own.dtype:
                raise ValueError(
                    f"all_gather_single of {own.numel()} {own.dtype} elements on each of {self._size} ranks needs an "
                    f"output of {own.numel() * self._size}, not of {output.numel()} {output.dtype} elements"
                )
        return self._all_gather_singles(outputs, inputs, opts)

    def _all_gather_singles(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        def body(comm: _core.DeviceComm, stream: int) -> None:
            targets = list(map(landing, outputs))
            sources = all_apart(list(map(plain, inputs)), targets, [-own.nbytes * self._rank for own in inputs])
            with as_one(comm):
                for source, target in zip(sources, targets):
                    comm.all_gather(source.data_ptr(), target.data_ptr(), [source.nbytes] * self._size, stream)
            self._copy_back(outputs, targets, stream)

        return self._run([*outputs, *inputs], opts, body, list(outputs))

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [own], opts)

    def _exchange(
        self,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        opts: Any,
        result: Any,
    ) -> Any:
        """Rank r gets inputs[r] as the entry for this rank of its outputs; None: nothing goes."""

        def body(comm: _core.DeviceComm, stream: int) -> None:
            targets = [None if tensor is None else landing(tensor) for tensor in outputs]
            sources = [None if tensor is None else apart(plain(tensor), targets) for tensor in inputs]
            comm.all_to_all(*places(sources), *places(targets), stream)
            pairs = [(own, into) for own, into in zip(outputs, targets) if own is not None and into is not None]
            self._copy_back([own for own, _ in pairs], [into for _, into in pairs], stream)

        every = [tensor for tensor in itertools.chain(inputs, outputs) if tensor is not None]
        return self._run(every, opts, body, result)

    def _rooted(self, name: str, own: torch.Tensor, parts: Sequence[torch.Tensor], result: Any, opts: Any) -> Any:
        root = root_of(opts, name, self._size)
        every: Sequence[torch.Tensor | None] = [None] * self._size
        if self._rank == root:
            _equal(name, parts, own, self._size)
            every = parts
        one = [own if rank == root else None for rank in range(self._size)]
        sources, targets = (one, every) if name == "gather" else (every, one)
        return self._exchange(sources, targets, opts, result)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._rooted("gather", _one(inputs), outputs[0] if outputs else [], outputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._rooted("scatter", _one(outputs), inputs[0] if inputs else [], outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all needs {self._size} inputs and outputs, not {len(inputs)} and {len(outputs)}")
        return self._exchange(inputs, outputs, opts, outputs)

    def all_to_all_single(self, output: Any, whole: Any, outs: Any, ins: Any, opts: Any = None) -> Any:
        if output.dtype != whole.dtype:
            raise ValueError(f"all_to_all_single from {whole.dtype} into {output.dtype}")
        received, sent = rows(output, outs, self._size, "output"), rows(whole, ins, self._size, "input")

        def body(comm: _core.DeviceComm, stream: int) -> None:
            target = landing(output)
            source = apart(plain(whole), [target])
            comm.all_to_all(offsets(source, sent), sent, offsets(target, received), received, stream)
            self._copy_back([output], [target], stream)

        return self._run([output, whole], opts, body, [output])

    # -- messages; those that have a tag, or may come from any rank, go through the host --

    def _message(self, tensors: Any, pair: tuple[int, int], body: Body) -> DeviceMessage:
        tensor = _one(tensors)
        self._watch.check()
        device = self._streams.device(tensor)
        line = self._lines.get((device, pair))
        if line is None:
            line = self._lines[(device, pair)] = Line(self._groups, self._streams, self._watch, device, pair)
        return self._noted(line.submit(DeviceMessage(line, tensor, body)))

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        del tag  # 0

        def body(comm: _core.DeviceComm, stream: int) -> None:
            data = plain(tensors[0])
            comm.send(data.data_ptr(), data.nbytes, 1, stream)
            if data is not tensors[0]:
                self._streams.settle(stream)

        return self._message(tensors, (self._rank, destination), body)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        del tag  # 0
        check_outputs(tensors)

        def body(comm: _core.DeviceComm, stream: int) -> None:
            target = landing(tensors[0])
            comm.receive(target.data_ptr(), target.nbytes, 0, stream)
            if target is not tensors[0]:
                self._copy_back([tensors[0]], [target], stream)

        return self._message(tensors, (source, self._rank), body)

    # -- names of torch before 2.13 --

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- ends --

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._groups.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        self._groups.close()

    def abort(self) -> None:
        self._groups.abort()


def _limit(comm: _core.DeviceComm, options: Any) -> contextlib.AbstractContextManager[None]:
    """The call's own time limit, where its options have one."""
    return limited(comm, limit_of(options))


@contextlib.contextmanager
def limited(comm: _core.DeviceComm | None, seconds: float) -> Iterator[None]:
    """Inside, calls have this time limit; 0: that of all."""
    if comm is None or seconds <= 0:
        yield
        return
    comm.set_call_timeout(seconds)
    try:
        yield
    finally:
        with contextlib.suppress(_core.EvenstepError):  # closed meanwhile, maybe: the call's own error says more
            comm.set_call_timeout(0)


@contextlib.contextmanager
def limited_by(comm: Collectives, seconds: float, usual: float) -> Iterator[None]:
    """The same of a group in host memory, whose calls else have the limit `usual`."""
    if seconds > 0:
        comm.set_timeout(seconds)
    try:
        yield
    finally:
        if seconds > 0 and not comm.closed:
            comm.set_timeout(usual)


class as_one:
    """Calls inside are one operation of NCCL."""

    def __init__(self, comm: _core.DeviceComm) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        self._comm.group_begin()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._comm.group_end()
            return
        try:
            self._comm.group_end()
        except _core.EvenstepError:
            pass  # the error that is under way says it
