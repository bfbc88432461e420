"""The losses that backward passes begin from, added up over the step under way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


def known_loss(tensors: Any) -> float | None:
    """The value that backward starts from, where it is one number, in the host's memory."""
    if isinstance(tensors, torch.Tensor):
        if tensors.numel() == 1 and tensors.device.type == "cpu" and not tensors.is_complex():
            return float(tensors.detach())
        return None
    try:
        parts = [known_loss(tensor) for tensor in tensors]
    except TypeError:
        return None
    known = [part for part in parts if part is not None]
    return total_of(known) if known and len(known) == len(parts) else None


def total_of(losses: Iterable[float]) -> float:
    """math.fsum, which refuses infinities of both signs."""
    given = list(losses)
    return math.fsum(given) if all(map(math.isfinite, given)) else sum(given)


class StepLoss:
    """This rank's part of it."""

    def __init__(self) -> None:
        self.sum = 0.0  # weighted
        self.bad = False  # one was not finite since the last vote
        self._value = math.nan  # of the pass under way
        self._known = False

    def begins_from(self, losses: Any) -> None:
        loss = known_loss(losses)
        self._value, self._known = (math.nan, False) if loss is None else (loss, True)

    def is_unknown(self) -> None:
        """That of the pass under way."""
        self._value, self._known = math.nan, False

    def counts(self, weight: float) -> None:
        """The pass is over."""
        if weight > 0:
            self.sum += weight * self._value
            self.bad = self.bad or (self._known and not math.isfinite(self._value))

    def forget(self) -> None:
        self.sum, self.bad = 0.0, False
