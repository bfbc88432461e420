"""CUDA streams as the device collectives use them, the Works that they return, and who watches that they end."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
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

    def mark(self, stream: Any) -> Any:
        """An event after what is on the stream; None while a graph is captured, where nobody may ask for it."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def future(self, device: int) -> Future[Any]:
        return Future(devices=[torch.device("cuda", device)])

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory goes to nobody else before the stream has passed."""
        tensor.record_stream(stream)

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
        """The caller's stream goes on when the call is done. `timeout` is the group's affair: the host waits for nothing
        here."""
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


class Watch:
    """Sees from a thread of its own that what is on the streams ends: an error of NCCL, or a call that is not done within
    the group's time limit, aborts the communicator (the stream then goes on with what it has) and fails all later
    calls."""

    INTERVAL_SECONDS = 0.1

    def __init__(self, timeout: timedelta) -> None:
        self.timeout_seconds = timeout.total_seconds()
        self.error: _core.EvenstepError | None = None
        self._pending: collections.deque[tuple[str, _core.DeviceComm, Any, float]] = collections.deque()
        self._wake = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def add(self, name: str, comm: _core.DeviceComm, event: Any) -> None:
        if event is None:
            return
        self._pending.append((name, comm, event, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="evenstep-device-watch", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _work(self) -> None:
        while not self._ending:
            self._wake.wait()
            if self._pending:
                self.look()
                time.sleep(self.INTERVAL_SECONDS)
            else:
                self._wake.clear()
                if self._pending:  # came between the two lines above
                    self._wake.set()

    def look(self) -> None:
        """One look at what is pending; on one stream calls end in their order, on several nearly so."""
        try:
            while self._pending and self._pending[0][2].query():
                self._pending.popleft()
            if self._pending:
                name, comm, _, begun = self._pending[0]
                comm.poll()
                if time.monotonic() - begun > self.timeout_seconds:
                    raise self._late(name)
        except _core.EvenstepError as error:
            self._fail(error)
        except RuntimeError as error:  # of CUDA itself
            self._fail(_core.EvenstepError(f"a collective on the GPU failed: {error}"))

    def _late(self, name: str) -> _core.EvenstepError:
        fix = (
            "see what the other ranks do (a rank may be dead, or in another collective); start again from a checkpoint"
        )
        error = _core.EvenstepError(
            f"Timed out: {name} on the GPU was not done after {self.timeout_seconds:.3g} s; the communicator is aborted "
            f"(EVEN_ERR_TIMEOUT)\n  fix: {fix}"
        )
        error.status, error.fix, error.rank, error.device = "EVEN_ERR_TIMEOUT", fix, None, None
        return error

    def _fail(self, error: _core.EvenstepError) -> None:
        self.error = error
        for comm in {id(entry[1]): entry[1] for entry in self._pending}.values():
            if not comm.closed:
                comm.abort()
        self._pending.clear()
