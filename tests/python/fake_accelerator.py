"""Stands for an accelerator where there is none: CPU tensors as its memory. What is put on a stream is done when somebody waits
for it and no sooner, so that whoever looks too early, or takes memory again too early, has the wrong numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from evenstep.accelerators import Accelerators


class FakeStream:
    def __init__(self, world: FakeAccelerators, name: str) -> None:
        self._world, self.name = world, name
        self.jobs: list[Callable[[], Any]] = []
        self.done = 0

    def put(self, job: Callable[[], Any]) -> None:
        with self._world.lock:
            self.jobs.append(job)

    def finish(self, place: int | None = None) -> None:
        """What was put there before that place is done."""
        with self._world.lock:
            while self.done < (len(self.jobs) if place is None else place):
                job, self.done = self.jobs[self.done], self.done + 1
                job()

    def wait_stream(self, other: FakeStream) -> None:
        self._world.log.append(f"{self.name} waits for {other.name}")
        place = len(other.jobs)
        self.put(lambda: other.finish(place))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "a wait for an event that nobody has recorded"
        self._world.log.append(f"{self.name} waits for an event of {event.stream.name}")
        stream, place = event.stream, event.place
        self.put(lambda: stream.finish(place))


class FakeEvent:
    def __init__(self, world: FakeAccelerators) -> None:
        self._world = world
        self.stream: FakeStream | None = None
        self.place = 0

    def record(self, stream: FakeStream) -> None:
        self._world.log.append(f"an event on {stream.name}")
        self.stream, self.place = stream, len(stream.jobs)

    def synchronize(self) -> None:
        assert self.stream is not None, "a wait for an event that nobody has recorded"
        self._world.log.append(f"the host waits for {self.stream.name}")
        self.stream.finish(self.place)


class FakeAccelerators(Accelerators):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.own = FakeStream(self, "own")
        self.streams = [self.own]
        self.pins: list[tuple[int, int]] = []
        self._used = threading.local()

    def stream(self, device: torch.device) -> Any:
        assert device == self._device, device
        self.streams.append(FakeStream(self, f"side {len(self.streams)}"))
        return self.streams[-1]

    def event(self, device: torch.device) -> Any:
        assert device == self._device, device
        return FakeEvent(self)

    def current(self, device: torch.device) -> Any:
        assert device == self._device, device
        return getattr(self._used, "stream", self.own)

    def use(self, stream: Any) -> None:
        assert stream in self.streams
        self._used.stream, self._used.device = stream, 0

    def device(self) -> int:
        return getattr(self._used, "device", 1)

    def use_device(self, index: int) -> None:
        self._used.device = index

    def pinned(self, count_bytes: int) -> torch.Tensor:
        memory = torch.empty(count_bytes, dtype=torch.uint8)
        self.pins.append((memory.data_ptr(), count_bytes))
        return memory

    def pin(self, device: torch.device, address: int, count_bytes: int) -> Callable[[], Any]:
        assert device == self._device and (address, count_bytes) not in self.pins, (device, address)
        self.pins.append((address, count_bytes))
        return lambda: self.pins.remove((address, count_bytes))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(at <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= at + n for at, n in self.pins)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
        assert not target.nbytes or self._is_pinned(target) != self._is_pinned(source), "one side is pinned memory"
        stream = self.current(self._device)
        self.log.append(f"a copy {'down' if self._is_pinned(target) else 'up'} on {stream.name}")

        def job() -> None:
            with torch.no_grad():
                target.copy_(source)

        stream.put(job)

    def finish(self) -> None:
        """All that was put anywhere is done."""
        for stream in list(self.streams):
            stream.finish()
