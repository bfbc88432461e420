"""Gradients that are taken out of an optimizer's sight for one step, which is to apply nothing."""

from __future__ import annotations

import torch


class HiddenGradients:
    """An optimizer passes over what has no gradient."""

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Before its step. What is hidden already stays so."""
        found = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._hidden += found
        for parameter, _ in found:
            parameter.grad = None

    def put_back(self) -> None:
        """After it."""
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def put_back_after_error(self) -> None:
        """Before another step: where the one before raised, nobody called put_back. Gradients that were made since then are
        in their place."""
        if any(parameter.grad is not None for parameter, _ in self._hidden):
            self._hidden = []
        self.put_back()
