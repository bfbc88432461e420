"""CUDA streams as the device collectives use them, the Works that they return, and who watches that they end."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import _core


class CudaStreams:
    """All that the collectives ask of torch.cuda, in one place: tests without a GPU put their own there."""

    def __init__(self) -> None:
        self._sides: dict[tuple[int, Any], Any] = {}

    def device(self, tensor: torch.Tensor) -> int:
        return tensor.device.index if tensor.device.index is not None else torch.cuda.current_device()

    def identity(self, device: int) -> str:
        """The same for two processes that have the same GPU, different for any two GPUs."""
        properties = torch.cuda.get_device_properties(device)
        return str(getattr(properties, "uuid", f"{properties.name}/{device}"))

    def current(self, device: int) -> Any:
        return torch.cuda.current_stream(device)

    def side(self, device: int, pair: Any = None) -> Any:
        """The stream beside the caller's: one for the collectives, one for each direction of a pair."""
        stream = self._sides.get((device, pair))
        if stream is None:
            stream = self._sides[(device, pair)] = torch.cuda.Stream(device)
        return stream

    def use(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def captures(self) -> bool:
        """Whether a graph is captured on the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def mark(self, stream: Any, blocking: bool = False) -> Any:
        """An event after what is on the stream; None while a graph is captured, where nobody may ask for it. `blocking`: a
        thread that waits for it sleeps."""
        if self.captures():
            return None
        event = torch.cuda.Event(blocking=blocking)
        event.record(stream)
        return event

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host's from which, and to which, a GPU copies on its own."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins it, on the current stream; one of both is pinned memory, which torch keeps until then."""
        target.copy_(source, non_blocking=True)

    def future(self, device: int) -> Future[Any]:
        return Future(devices=[torch.device("cuda", device)])

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory goes to nobody else before the stream has passed."""
        tensor.record_stream(stream)

    def let_go(self, stream: Any) -> None:
        """Tensors of a call on the caller's own stream may be freed: torch's allocator has that stream pass first."""

    def settle(self, stream: int) -> None:
        """torch's operations that follow come after what is on the stream: on a GPU they are on it themselves."""


class DeviceWork(dist.Work):
    """A collective on a stream beside the caller's. wait() makes the caller's stream wait; the host does not."""

    def __init__(
        self,
        streams: CudaStreams,
        watch: Watch,
        device: int,
        stream: Any,
        tensors: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        """With `stream` current, after the call is on it."""
        super().__init__()
        self._streams, self._watch, self._device, self._stream = streams, watch, device, stream
        self._result = result
        self._future: Future[Any] | None = None
        self.event = streams.mark(stream)
        for tensor in tensors:
            streams.keep(tensor, stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The caller's stream goes on when the call is done. `timeout` limits nothing: the host does not wait here, and
        the call has its own limit or the group's."""
        del timeout
        self._watch.check()
        current = self._streams.current(self._device)
        if self.event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(self.event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()

    def is_success(self) -> bool:
        return self.is_completed() and self._watch.error is None

    def exception(self) -> BaseException | None:
        return self._watch.error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = self._streams.future(self._device)
            with self._streams.use(self._stream):
                self._future.set_result(self._result)
        return self._future


class SeveralWorks(dist.Work):
    """Of calls that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)


class Watch:
    """Whether what a group has on streams goes on. The engine looks from a thread of its own, and ends a communicator whose
    calls will never be done (its streams then go on with what they have); all later calls of the group say why."""

    def __init__(self, comms: Callable[[], Collection[_core.DeviceComm]]) -> None:
        self._comms = comms
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        if self._error is None:
            for comm in self._comms():
                if comm.ended and not comm.closed:
                    self._error = _why(comm)
                    break
        return self._error

    def check(self) -> None:
        error = self.error
        if error is not None:
            raise error


def _why(comm: _core.DeviceComm) -> BaseException:
    try:
        comm.poll()
    except _core.EvenstepError as error:
        return error
    return RuntimeError("the communicator has ended")
