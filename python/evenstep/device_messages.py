"""Messages between GPUs: each direction of a pair of ranks has a communicator and a stream of its own, so that a rank may
send and receive at once, in any order, with any peers."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import _core
from evenstep.device_groups import DeviceGroups
from evenstep.device_streams import CudaStreams, Watch

Body = Callable[[_core.DeviceComm, int], None]


class DeviceMessage(dist.Work):
    """A message: on its stream at once where the pair has met before, else as soon as it has."""

    def __init__(self, line: Line, tensor: torch.Tensor, body: Body) -> None:
        super().__init__()
        self._line, self._tensor, self._body = line, tensor, body
        self._start = line.streams.mark(line.streams.current(line.device))
        self._put = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def put(self, comm: _core.DeviceComm) -> None:
        """Puts it on the pair's stream; any thread."""
        stream = self._line.stream
        try:
            if self._start is not None:
                stream.wait_event(self._start)
            with self._line.streams.use(stream), torch.no_grad():
                self._body(comm, stream.cuda_stream)
                self._event = self._line.streams.mark(stream)
            self._line.streams.keep(self._tensor, stream)
        except Exception as error:
            self._error = error
        self._put.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._put.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The caller's stream goes on when the message has come or gone; the host waits only for the pair's first
        meeting."""
        del timeout
        self._put.wait()
        if self._error is not None:
            raise self._error
        self._line.watch.check()
        if self._event is not None:
            self._line.streams.current(self._line.device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._put.is_set() and (self._error is not None or self._event is None or self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._error or self._line.watch.error

    def result(self) -> Any:
        return [self._tensor]

    def get_future(self) -> Future[Any]:
        self._put.wait()
        future = self._line.streams.future(self._line.device)
        with self._line.streams.use(self._line.stream):
            future.set_result([self._tensor])
        return future


class Line:
    """One direction of a pair, from one GPU of this rank. The pair meets in a thread: two ranks that both begin with a
    send, or a ring of them, would else wait for one another."""

    def __init__(
        self, groups: DeviceGroups, streams: CudaStreams, watch: Watch, device: int, pair: tuple[int, int]
    ) -> None:
        self.streams, self.watch, self.device = streams, watch, device
        self.stream = streams.side(device, pair)
        self._groups, self._pair = groups, pair
        self._lock = threading.Lock()
        self._comm: _core.DeviceComm | None = None
        self._queue: list[DeviceMessage] = []
        self._meeting = False

    def submit(self, message: DeviceMessage) -> DeviceMessage:
        with self._lock:
            comm = self._comm
            if comm is None:
                self._queue.append(message)
                if not self._meeting:
                    self._meeting = True
                    threading.Thread(target=self._meet, name="evenstep-device-pair", daemon=True).start()
        if comm is not None:
            message.put(comm)
        return message

    def _meet(self) -> None:
        comm, failure = None, None
        try:
            comm = self._groups.open(self.device, self._pair)
        except Exception as error:
            failure = error
        with self._lock:
            for message in self._queue:
                if comm is None:
                    message.fail(failure or RuntimeError("no communicator"))
                else:
                    message.put(comm)
            self._queue.clear()
            self._comm = comm
            self._meeting = False
