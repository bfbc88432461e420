"""What pinned staging asks of torch for any accelerator, in one place: tests without one put their own there."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Accelerators:
    """Streams have wait_stream and wait_event; events record(stream) and synchronize."""

    def stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    def event(self, device: torch.device) -> Any:
        return torch.Event(device)

    def current(self, device: torch.device) -> Any:
        """This thread's stream."""
        return torch.accelerator.current_stream(device)

    def use(self, stream: Any) -> None:
        """From now on in this thread, whose device it makes the current one."""
        torch.accelerator.set_stream(stream)

    def device(self) -> int:
        """The number of this thread's."""
        return int(torch.accelerator.current_device_index())

    def use_device(self, index: int) -> None:
        torch.accelerator.set_device_index(index)

    @contextmanager
    def beside(self, stream: Any, device: torch.device) -> Iterator[None]:
        """On that stream of the device; then this thread has the stream and the device that it had."""
        index, before = self.device(), self.current(device)
        self.use(stream)
        try:
            yield
        finally:
            self.use(before)
            self.use_device(index)

    def pinned(self, count_bytes: int) -> torch.Tensor:
        return torch.empty(count_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, device: torch.device, address: int, count_bytes: int) -> Callable[[], Any] | None:
        """Pins memory of the host's that is there, where the device's maker can: what ends it."""
        if device.type != "cuda":
            return None
        cuda = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(address, count_bytes, 0)) != 0:
            return None
        return lambda: cuda.cudaHostUnregister(address)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins it, on this thread's stream."""
        target.copy_(source, non_blocking=True)
