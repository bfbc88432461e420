"""Whether the gradients of one model are finite: of what is the same on all ranks, and of what a rank has by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from evenstep.nonfinite import Found, Look, found_among, tells_by_itself

if TYPE_CHECKING:
    from evenstep.engine import Engine


class GradientLook:
    """One look at a time is under way on an accelerator, so each model has its own."""

    def __init__(self) -> None:
        self.acts_at_once = False  # on what is not finite: in the step, where else an accelerator may be late
        self.engine_tells = self.tells_late = True  # what all ranks agreed on: evenstep.nonfinite.agreed_ways
        self._look = Look()

    def at_sums(self, engine: Engine, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> Found:
        """Of the engine's sums with these numbers, before they take the place of what this rank had."""
        teller: Any = engine
        tells = tells_by_itself(engine)
        if tells and self.engine_tells:
            return list(teller.nonfinite)
        views = engine.views
        if self._look.finite([views[index] for index in indices], self._at_once):
            return []
        if tells:  # and another rank's does not
            own = dict(teller.nonfinite)
            return [(index, own.get(index, False)) for index, _ in found_among(indices, views, lambda _: None)]
        return found_among(indices, views, lambda i: p if (p := parameters[i].grad) is not views[i] else None)

    def at_common(self, indices: Iterable[int], parameters: Sequence[torch.Tensor], late: bool = True) -> Found:
        """Of what is in p.grad, the same on all ranks; late=False: the answer is of these, not of those before."""
        return self._among(indices, parameters, self._at_once or not late)

    def at_own(self, parameters: Sequence[torch.Tensor]) -> Found:
        """Of what is in p.grad of a rank that trains on its own."""
        return self._among(range(len(parameters)), parameters, self.acts_at_once)

    @property
    def _at_once(self) -> bool:
        """Of a look at what is the same on all ranks."""
        return self.acts_at_once or not self.tells_late

    def _among(self, indices: Iterable[int], parameters: Sequence[torch.Tensor], at_once: bool) -> Found:
        gradients = {index: p for index in indices if (p := parameters[index].grad) is not None}
        if self._look.finite(gradients.values(), at_once):
            return []
        return found_among(list(gradients), gradients, lambda _: None)
