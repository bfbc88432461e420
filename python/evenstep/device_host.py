"""Calls of CUDA tensors that NCCL cannot make, through the host: copied into pinned memory on a stream, made there by the group's
own CPU engine in the order of its calls, and copied back on a stream.

No call waits for one that comes later, so that these may be mixed with NCCL's: the copy down is on its stream, and the memory is
pinned (for which a driver may wait for all of the GPU), before the call returns; and the thread that makes the CPU engine's calls puts
nothing on a GPU, where it could wait for a later call of NCCL's. What copies up does so on threads that no other rank waits for."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import _core
from evenstep.backend_tensors import check_outputs, landing, of_inference, plain
from evenstep.backend_work import Worker
from evenstep.device_streams import CudaStreams

Copies = Callable[[torch.Tensor], torch.Tensor]
"""The tensor on the host that stands for one of a GPU's."""


def _keep(streams: CudaStreams, tensor: torch.Tensor, stream: Any) -> None:
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    for part in parts:
        streams.keep(part, stream)


class _Rising(dist.Work):
    """A call that the host has a part in. wait() waits there for that part, as Gloo's does for CUDA tensors; the copy back is then
    on a stream, which the caller's waits for."""

    def __init__(
        self,
        streams: CudaStreams,
        device: int,
        host: Sequence[Any],
        up: Callable[[Any], None],
        stream: Callable[[], Any],
        result: Any,
        anew: Sequence[torch.Tensor] = (),
    ) -> None:
        """`host`: Works that are waited for in turn; `up(stream)` puts what has come on the stream that `stream` gives. `anew`:
        tensors that get memory there, which is that stream's."""
        super().__init__()
        self._streams, self._device, self._host = streams, device, host
        self._up: Callable[[Any], None] | None = up
        self._stream, self._result, self._anew = stream, result, anew
        self._lock = threading.Lock()
        self._event: Any = None
        self._error: BaseException | None = None

    def _rise(self) -> None:
        """Puts the copy back on its stream; whoever comes first does it."""
        with self._lock:
            up, self._up = self._up, None
            if up is None:
                return
            try:
                stream = self._stream()
                writes = torch.inference_mode(of_inference(self._result))  # a mode of the caller's thread
                with self._streams.use(stream), writes, torch.no_grad():
                    up(stream)
                    self._event = self._streams.mark(stream)
            except Exception as error:
                self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._host:
            work.wait(*([] if timeout is None else [timeout]))
        self._rise()
        if self._error is not None:
            raise self._error
        current = self._streams.current(self._device)
        current.wait_event(self._event)
        for tensor in self._anew:
            _keep(self._streams, tensor, current)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._host):
            return False
        if self.exception() is None:
            self._rise()
        return self.exception() is not None or self._event.query()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it failed with; None where it did not, or goes on."""
        ended = (work.exception() for work in self._host if work.is_completed())
        return next((error for error in ended if error is not None), self._error)

    def result(self) -> Any:
        return self._result


class HostWork(_Rising):
    """A collective. (A limit of wait() ends that wait alone: the call goes on.)"""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._finished = False
        self._future: Future[Any] | None = None
        self._for_cpp: Any = None

    def finish(self) -> None:
        """Brings it to its end where nobody waits for it."""
        try:
            for work in self._host:
                work.wait()
            self._rise()
        except Exception as error:
            self._error = error
        with self._lock:
            self._finished = True
            future = self._future
        if future is not None:
            self._tell(future)

    def _tell(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        with self._streams.use(self._stream()):
            future.set_result(self._result)

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._for_cpp is not None:
                return self._for_cpp
            self._future = future = self._streams.future(self._device)
            self._for_cpp = future.then(lambda done: done.value())  # in which an error is one to C++, too
            finished = self._finished
        if finished:
            self._tell(future)
        return self._for_cpp


class Ends:
    """A thread that brings collectives to their end where nobody waits for them."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def await_end(self, work: HostWork) -> None:
        if self._worker is None or not self._worker.alive():
            self._worker = Worker("evenstep-rising", row=None)
        self._worker.submit(work.finish, None)

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class HostReceive(_Rising):
    """A message that comes over the host."""

    def source_rank(self) -> int:
        return self._host[0]._source_rank()

    _source_rank = source_rank


class HostSend(dist.Work):
    """A message that goes over the host: the CPU engine has it once its data are down."""

    def __init__(self, down: Any, sent: list[Any]) -> None:
        super().__init__()
        self._down, self._sent = down, sent

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._down.wait()
        return self._sent[0].wait(*([] if timeout is None else [timeout]))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._down.is_completed() and (not self._sent or self._sent[0].is_completed())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._sent[0].exception() if self._sent else self._down.exception()


class HostCalls:
    """Those of one group."""

    def __init__(self, streams: CudaStreams, before: Callable[[Callable[[], None]], Any]) -> None:
        """`before(job)` has `job` done before all calls of the CPU engine that are made from then on; a Work of it, or None where
        it was done at once."""
        self._streams, self._before = streams, before
        self._ends = Ends()
        self._senders: dict[int, Worker] = {}
        self._sent: list[HostSend] = []
        self._begun: list[Any] | None = None  # Works since start_coalescing

    # -- down and up --

    def _down(self, tensor: torch.Tensor, stream: Any) -> torch.Tensor:
        """A copy in pinned memory, begun on the stream, which is the current one."""
        if tensor.is_sparse:
            whole = tensor.coalesce()  # torch waits for the GPU here: how many values there are
            parts = [self._down(part, stream) for part in (whole.indices(), whole.values())]
            return torch.sparse_coo_tensor(*parts, whole.shape, is_coalesced=True, check_invariants=False)
        data = plain(tensor.detach())
        pinned = self._streams.pinned(data.shape, data.dtype)
        self._streams.copy(pinned, data)
        _keep(self._streams, tensor, stream)
        return pinned

    def _up(self, tensor: torch.Tensor, copy: torch.Tensor, stream: Any) -> None:
        if tensor.is_sparse:
            parts = [self._raised(part, tensor.device) for part in (copy._indices(), copy._values())]
            target = torch.sparse_coo_tensor(*parts, copy.shape, is_coalesced=True, check_invariants=False)
        else:
            target = landing(tensor)
            self._streams.copy(target, copy)
        if target is not tensor:
            self._streams.settle(stream.cuda_stream)
            tensor.copy_(target)
        _keep(self._streams, tensor, stream)

    def _raised(self, part: torch.Tensor, device: torch.device) -> torch.Tensor:
        pinned = self._streams.pinned(part.shape, part.dtype)
        pinned.copy_(part)
        target = torch.empty(part.shape, dtype=part.dtype, device=device)
        self._streams.copy(target, pinned)
        return target

    def _refuse_capture(self) -> None:
        if self._streams.captures():
            raise _core.EvenstepError(
                "a call that goes through the host cannot be captured in a CUDA graph: the host has a part in it\n"
                "  fix: make it outside the graph, or with what NCCL has"
            )

    # -- collectives --

    def collective(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call: Callable[[Copies], Any],
        result: Any,
    ) -> HostWork:
        """`call(copies)` makes the group's own call with tensors of the host's, and returns its Work. An output that is an input,
        too, has one copy."""
        check_outputs(outputs)
        self._refuse_capture()
        device = self._streams.device((*inputs, *outputs)[0])
        side = self._streams.side(device)
        side.wait_stream(self._streams.current(device))
        with self._streams.use(side), torch.no_grad():
            copies = {id(tensor): self._down(tensor, side) for tensor in inputs}
            for tensor in outputs:
                if id(tensor) not in copies:
                    copies[id(tensor)] = self._streams.pinned(tensor.shape, tensor.dtype)
            arrived = self._streams.mark(side, blocking=True)
        down = self._before(arrived.synchronize)
        made = call(lambda tensor: copies[id(tensor)])

        def up(stream: Any) -> None:
            for tensor in outputs:
                self._up(tensor, copies[id(tensor)], stream)

        host = [work for work in (down, made) if work is not None]
        rising = lambda: self._streams.side(device, "up")  # noqa: E731
        sparse = [tensor for tensor in outputs if tensor.is_sparse]
        work = HostWork(self._streams, device, host, up, rising, result, sparse)
        self._ends.await_end(work)
        return self._noted(work)

    # -- messages --

    def send(self, tensor: torch.Tensor, destination: int, post: Callable[[torch.Tensor], Any]) -> HostSend:
        """`post` sends a tensor of the host's. Messages to one rank keep their order, and wait for none to another."""
        self._refuse_capture()
        device = self._streams.device(tensor)
        stream = self._streams.side(device, ("down", destination))
        stream.wait_stream(self._streams.current(device))
        with self._streams.use(stream), torch.no_grad():
            copy = self._down(tensor, stream)
            arrived = self._streams.mark(stream, blocking=True)
        sent: list[Any] = []

        def job() -> None:
            arrived.synchronize()
            sent.append(post(copy))

        sender = self._senders.get(destination)
        if sender is None or not sender.alive():
            sender = self._senders[destination] = Worker("evenstep-sender", row=None)
        work = HostSend(sender.submit(job, None), sent)
        # Kept until it is done, even where nobody keeps the Work: Gloo's would else be given up.
        self._sent = [other for other in self._sent if not other.is_completed()] + [work]
        return self._noted(work)

    def receive(self, tensor: torch.Tensor, post: Callable[[torch.Tensor], Any]) -> HostReceive:
        """`post` receives into a tensor of the host's. The copy back is on the stream of who waits."""
        check_outputs([tensor])
        self._refuse_capture()
        device = self._streams.device(tensor)
        start = self._streams.mark(self._streams.current(device))
        copy = self._streams.pinned(tensor.shape, tensor.dtype)

        def up(stream: Any) -> None:
            stream.wait_event(start)
            self._up(tensor.detach(), copy, stream)

        current = lambda: self._streams.current(device)  # noqa: E731
        return self._noted(HostReceive(self._streams, device, [post(copy)], up, current, [tensor]))

    # -- several calls as one, and the end --

    def _noted(self, work: Any) -> Any:
        if self._begun is not None:
            self._begun.append(work)
        return work

    def start_coalescing(self) -> None:
        self._begun = []

    def end_coalescing(self) -> list[Any]:
        works, self._begun = self._begun or [], None
        return works

    def stop(self) -> None:
        """When the CPU engine has ended, and its calls with it."""
        self._ends.stop()
        for worker in self._senders.values():
            worker.stop()
        self._senders.clear()
        self._sent.clear()
