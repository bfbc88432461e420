"""What counts of a pass of backward: this rank's part of the batch that it is for, or what es.set_weight gave."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from evenstep.steps import Steps

_MAY_BE_IDLE = (
    "es.set_weight: several batches wait for backward, and this rank has a dummy sample in place of some of them: what is "
    "counted on that must not count\n  fix: keep es.session().latest beside each batch, and give 0 where its samples are 0; or call "
    "backward for each batch before the next is fetched"
)


class PassWeight:
    """Of the pass that is to come, or under way: given for one, and then for the next anew."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._given: float | None = None
        self._amount = 0.0  # of it
        self.sums: set[str] = set()  # models whose losses are sums over samples
        self.empty = False  # the pass counts nothing on any rank: set_weight

    def now(self) -> float:
        """This rank's part; those of all ranks sum to 1."""
        if self._given is not None:
            return self._given
        plan = self._steps.plan
        return plan.weight if plan is not None else 1.0 / self._steps.group.ranks

    def count(self) -> float:
        """The same where losses are sums over samples, which add up as they are."""
        return float(self.now() > 0)

    def of_loss(self) -> float:
        """Of this rank's, by what the losses are of models that the pass made gradients of."""
        sums = any(sync.name in self.sums and sync.handed_over for sync in self._steps.syncs)
        return self.count() if sums else self.now()

    def of_model(self, name: str) -> float:
        return self.count() if name in self.sums else self.now()

    def amount(self) -> float:
        """How much it is that is this rank's: samples, what es.set_weight counts, else 1."""
        if self._given is not None:
            return self._amount
        plan = self._steps.plan
        return float(plan.samples) if plan is not None else 1.0

    @property
    def is_given(self) -> bool:
        return self._given is not None

    def give(self, amount: float) -> float:
        """es.set_weight, which gives what counts. Collective."""
        if not (amount >= 0 and math.isfinite(amount)):
            raise ValueError(f"es.set_weight({amount!r}): give what this rank's loss is a mean over, a number >= 0")
        if self._steps.is_idle:
            amount = 0.0  # counted on a dummy sample
        elif amount > 0 and self._steps.may_be_idle:
            warnings.warn(_MAY_BE_IDLE, stacklevel=3)
        values = torch.tensor([float(amount)], dtype=torch.float64)
        with self._steps.blocking():
            self._steps.group.sum_(values)
        total = float(values[0])
        self._given, self._amount = amount / total if total > 0 else 0.0, amount
        self.empty = total == 0
        return amount

    def take(self, weight: float) -> None:
        """As `give`, for what asks nobody: a part of any whole, where only the ranks' ratio counts."""
        self._given = self._amount = weight

    def forget(self) -> None:
        """The pass was made, or counts nothing."""
        self._given, self.empty = None, False
