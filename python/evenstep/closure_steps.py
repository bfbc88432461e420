"""Optimizers that are given a closure (LBFGS) make their gradients within their step: it is committed at its end, and where it counts
nothing, parameters and the optimizer's state are as before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, Optimizer

from evenstep.generation_passes import Passes

if TYPE_CHECKING:
    from evenstep.session import Session

Closure = Callable[[], Any]
_OF_SCHEDULERS = ("params", "lr", "initial_lr")


def closure_of(arguments: Sequence[Any], options: Mapping[str, Any]) -> Closure | None:
    """Of a call of step(), whose first argument is the optimizer."""
    found = arguments[1] if len(arguments) > 1 else options.get("closure")
    return found if callable(found) else None


def with_closure(
    arguments: Sequence[Any], options: Mapping[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, with this one."""
    if len(arguments) > 1:
        return (arguments[0], closure, *arguments[2:]), dict(options)
    return tuple(arguments), {**options, "closure": closure}


def goes_by_loss(optimizer: Optimizer) -> bool:
    """Whether what it does may depend on what its closure gives. Of torch's own (and ours) only LBFGS's does."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "evenstep."))
    return isinstance(optimizer, LBFGS) or not known


class _Told(torch.autograd.Function):
    """The whole batch's loss in the place of this rank's: an optimizer's backward goes on through the latter."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, whole: float) -> torch.Tensor:
        return torch.full_like(mine, whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class WholeLoss:
    """A closure that gives the loss of the whole batch, where the optimizer goes by it: by its own each rank would end its search at
    another point. Collective."""

    def __init__(self, closure: Closure, session: Session, sums: bool, of_one: bool) -> None:
        """sums: losses are sums over samples; of_one: they must be single numbers, of any number of dimensions."""
        self._closure, self._session, self._sums, self._of_one = closure, session, sums, of_one

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What is no scalar stays as it is, on all ranks: whether it is one does not depend on how many samples a rank has."""
        mine = self._closure(*arguments, **options)
        if isinstance(mine, bool) or not isinstance(mine, (int, float, torch.Tensor)):
            return mine
        if isinstance(mine, torch.Tensor) and (mine.is_complex() or (mine.dim() > 0 and not self._of_one)):
            return mine
        value = float(mine.detach() if isinstance(mine, torch.Tensor) else mine)
        total = self._session.call_by_all(lambda: self._whole(value))
        return _Told.apply(mine, total) if isinstance(mine, torch.Tensor) else total

    def _whole(self, loss: float) -> float:
        steps = self._session.steps
        group, ballots = steps.group, steps.ballots
        weight = ballots[group.rank].weight if len(ballots) == group.ranks else steps.weight.now()
        weight = float(weight > 0) if self._sums else weight
        told = torch.tensor([weight * loss if weight > 0 else 0.0, weight], dtype=torch.float64)
        with steps.blocking():
            group.sum_(told)
        return float(told[0]) / (1.0 if self._sums else float(told[1]) or 1.0)


class ClosureStep:
    """One such step. It gives the optimizer itself in the closure's place. keeps: it may come to apply nothing."""

    def __init__(self, optimizer: Optimizer, closure: Closure, passes: Passes, keeps: bool = True) -> None:
        self._closure, self._passes = closure, passes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._kept = KeptOptimizer(optimizer) if keeps else None
        self._made, self._value = False, None

    def within(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, with this as the closure."""
        return with_closure(arguments, options, self)

    def __call__(self) -> Any:
        """Of a step that counts nothing no more of the script's closures are made than the other ranks make."""
        if self._made and self._passes.closes_enough:
            self._clear_gradients()
            return self._value
        self._made = True
        self._passes.begins_closure()
        self._value = self._closure()
        if self._passes.void or self._passes.passes_over:
            self._clear_gradients()  # nothing to go on for
        return self._value

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    def take_back(self) -> None:
        """It counts nothing: once it has begun as many closures as on the other ranks, which may wait in them for this one."""
        self.leave_out()
        with torch.enable_grad():
            while not self._passes.closes_enough:
                self()

    def leave_out(self) -> None:
        """It counts, and nothing of it is applied."""
        if self._kept is not None:
            self._kept.put_back()


class KeptOptimizer:
    """What an optimizer's step changes, as it is now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self.parameters]
        # torch's LBFGS keeps up to a hundred steps in lists, whose tensors it never writes again
        self._whole = not isinstance(optimizer, LBFGS)
        self._state = {key: self._copy(state) for key, state in optimizer.state.items()}
        self._groups = [
            {name: self._copy(one) for name, one in group.items() if name not in _OF_SCHEDULERS}
            for group in optimizer.param_groups
        ]

    def _copy(self, one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.detach().clone()
        if isinstance(one, dict):
            return {key: self._copy(value) for key, value in one.items()}
        if type(one) in (list, tuple):
            return type(one)(map(self._copy, one)) if self._whole else type(one)(one)
        return one

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, values in zip(self.parameters, self._values):
            parameter.copy_(values)
        state = self._optimizer.state
        state.clear()
        state.update({key: self._copy(one) for key, one in self._state.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups):
            group.update({name: self._copy(one) for name, one in kept.items()})
