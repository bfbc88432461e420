"""A GPU's memory as torch tells of it, where there is none: torch's functions, answered from a few numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Gpu:
    """`total` bytes, of which others have `others`. Torch's allocator keeps what was freed, until it is told to give it back."""

    def __init__(self, total: int, others: int = 0, uuid: str = "GPU-1") -> None:
        self.total, self.others, self.uuid = total, others, uuid
        self.allocated = self.reserved = self.highest = 0
        self.settled = 0
        self.asked: set[str] = set()  # of which devices

    def take(self, count: int) -> None:
        if self.others + self.allocated + count > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} bytes")
        self.allocated += count
        self.reserved = max(self.reserved, self.allocated)
        self.highest = max(self.highest, self.allocated)

    def free(self, count: int) -> None:
        self.allocated -= count

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of torch's."""

        def empty_cache() -> None:
            self.reserved = self.allocated

        def reset(device: Any) -> None:
            self.asked.add(str(device))
            self.highest = self.allocated

        def told(name: str) -> Any:
            def of(device: Any) -> Any:
                self.asked.add(str(device))
                return getattr(self, name)

            return of

        def settle(device: Any) -> None:
            self.settled += 1

        made = {
            "mem_get_info": lambda device: (self.total - self.others - self.reserved, self.total),
            "memory_allocated": told("allocated"),
            "memory_reserved": told("reserved"),
            "max_memory_allocated": told("highest"),
            "reset_peak_memory_stats": reset,
            "empty_cache": empty_cache,
            "synchronize": settle,
            "get_device_properties": lambda device: SimpleNamespace(uuid=self.uuid),
        }
        for name, function in made.items():
            monkeypatch.setattr(torch.cuda, name, function)
