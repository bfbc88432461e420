"""What two benches of gradients have in common: a training step that keeps what backward takes after its last gradient."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any


class StepWithTail:
    """A step on `tokens` (to be set, as `model` and `optimizer` are), and in `tails` the seconds from its last gradient to
    backward's end."""

    model: Any
    optimizer: Any
    tokens: Any

    def watch(self, parameters: Iterable[Any]) -> None:
        """`parameters`: the model's. DDP hears of a gradient after this."""
        self.tails: list[float] = []
        self._last_gradient = 0.0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._stamp)

    def _stamp(self, _: Any) -> None:
        self._last_gradient = time.perf_counter()

    def __call__(self) -> None:
        from torch.nn.functional import cross_entropy

        loss = cross_entropy(self.model(self.tokens).flatten(0, 1), self.tokens.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.tails.append(time.perf_counter() - self._last_gradient)
        self.optimizer.step()
