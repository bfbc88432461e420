"""A factor on the learning rates, for the time of an optimizer's step alone: schedulers, checkpoints and the script see the
rates that were set."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class RateFactor:
    def __init__(self) -> None:
        self.factor = 1.0
        self._set: list[tuple[dict[str, Any], Any]] = []  # groups, and what their rates were

    def before_step(self, optimizer: Optimizer) -> None:
        self.after_step()  # of a step that raised
        if self.factor == 1.0:
            return
        for group in optimizer.param_groups:
            if "lr" in group:
                self._set.append((group, group["lr"]))
                group["lr"] = group["lr"] * self.factor

    def after_step(self) -> None:
        for group, rate in self._set:
            group["lr"] = rate
        self._set = []
