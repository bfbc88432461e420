"""Stands for an accelerator under exact="bitwise" where there is none: parameters' memory that says it is a device's, and whose
address the host may not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenstep import exact_training
from evenstep.exact_engine import ExactEngine

DEVICE = torch.device("cuda", 3)


class OnDevice(torch.Tensor):
    device = DEVICE
    is_cpu = False

    def data_ptr(self) -> int:
        raise AssertionError("the host reads a device's memory")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return found.as_subclass(cls) if function is torch.Tensor.detach else found


class DeviceExact(ExactEngine):
    """Of parameters and gradients on it."""

    def __init__(self, parameters: Sequence[torch.Tensor], *rest: Any) -> None:
        super().__init__([p.detach().as_subclass(OnDevice) for p in parameters], *rest)
        self._there = self.views
        assert not self.plain and all(type(view) is OnDevice for view in self._there)
        self.views = [view.as_subclass(torch.Tensor) for view in self._there]  # for who computes on the device

    @staticmethod
    def _like(one: torch.Tensor, device: torch.device) -> torch.Tensor:
        memory = ExactEngine._like(one, torch.device("cpu"))
        return memory.as_subclass(OnDevice) if device == DEVICE else memory

    def add(self, weight: float, loss: float, gradients: Sequence[torch.Tensor | None]) -> None:
        super().add(weight, loss, [None if one is None else one.as_subclass(OnDevice) for one in gradients])

    def finish(self) -> Any:
        here, self.views = self.views, self._there
        found = super().finish()
        self.views = here
        return found


def pretend() -> None:
    """es.Trainer's engine is one of a device."""
    exact_training.ExactEngine = DeviceExact  # type: ignore[misc]
