"""What is wrong with an optimizer's step before it is made: gradients that the ranks have not exchanged, parameters that
es.prepare has not seen, an optimizer that it was not given, a backward that has not ended."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep._core import EvenstepError
from evenstep.backward import in_backward

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync


class StepChecks:
    """The optimizers that es.prepare was given, and what each has seen."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._counts: dict[int, int] = {}  # parameters of each, by id, when es.prepare saw it
        self._rounds: dict[tuple[int, str], int] = {}  # (id, model): its gradients' rounds at the optimizer's last step
        self._hook: Any = None
        self._seen: set[int] = set()  # optimizers of which nothing is left to say, by id
        self._inner: set[int] = set()  # those that only stepped within a prepared one's step

    def watch(self, optimizer: Optimizer) -> None:
        self._optimizers.append(optimizer)
        self._counts[id(optimizer)] = parameters_in(optimizer)

    def check(self, optimizer: Optimizer, models: Iterable[nn.Module], syncs: list[GradientSync]) -> None:
        """Raises where the step would use what the ranks have not exchanged."""
        if parameters_in(optimizer) != self._counts[id(optimizer)]:
            self._check_parameters(optimizer, models, syncs)
            self._counts[id(optimizer)] = parameters_in(optimizer)
        for sync in syncs:
            key = (id(optimizer), sync.name)
            if sync.unsynchronised or self._rounds.get(key, 0) == sync.rounds:
                steps_on = _ids(optimizer)
                if sync.has_any(steps_on):
                    _check_exchanged(sync)
                    _check_whole(sync, steps_on)
            self._rounds[key] = sync.rounds

    def begin_anew(self) -> None:
        """Rounds are counted from zero again: they are among other ranks."""
        self._rounds.clear()

    def _check_parameters(self, optimizer: Optimizer, models: Iterable[nn.Module], syncs: list[GradientSync]) -> None:
        known = {id(p) for sync in syncs for p in sync.parameters}
        late = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad} - known
        if late:
            names = [name for model in models for name, p in model.named_parameters() if id(p) in late]
            raise EvenstepError(
                f"the {type(optimizer).__name__} has got parameters since es.prepare "
                f"({', '.join(names[:5]) or 'of no model'}), whose gradients would differ between ranks\n"
                "  fix: build the whole model and its optimizer before es.prepare"
            )

    def watch_all(self, syncs: list[GradientSync]) -> None:
        """Refuses every step on prepared parameters inside backward. Warns, once each, of optimizers that were not
        prepared though their parameters were, and that step by themselves (within a prepared one's step() one is no news)."""

        def before_any_step(optimizer: Optimizer, *_: Any) -> None:
            if in_backward():
                _check_outside_backward(optimizer, syncs)
            if id(optimizer) in self._seen or (id(optimizer) in self._inner and self._in_step()):
                return
            unprepared = all(optimizer is not one for one in self._optimizers)
            if unprepared and any(sync.has_any(_ids(optimizer)) for sync in syncs):
                if self._in_step():
                    self._inner.add(id(optimizer))
                    return
                warnings.warn(
                    f"the {type(optimizer).__name__} was not given to es.prepare, so its steps do not count: shares are "
                    "not balanced, no checkpoint is written, and nothing is exchanged under es.LocalSGD and es.DiLoCo\n"
                    "  fix: pass it along: model, optimizer, loader = es.prepare(model, optimizer, loader); one that is made later: "
                    "es.prepare(optimizer); one that another steps outside its own step() (SAM's base_optimizer): in its place",
                    stacklevel=3,
                )
            self._seen.add(id(optimizer))
            weakref.finalize(optimizer, self._seen.discard, id(optimizer))  # another may get its id

        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(before_any_step)

    def _in_step(self) -> bool:
        """Whether a prepared optimizer's step() is under way in this thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__:
                stepping = frame.f_locals.get("self")
                if any(stepping is one for one in self._optimizers):
                    return True
            frame = frame.f_back
        return False

    def forget(self) -> None:
        """What `watch_all` registered for all optimizers is no longer called."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _check_outside_backward(optimizer: Optimizer, syncs: list[GradientSync]) -> None:
    steps_on = _ids(optimizer)
    for sync in syncs:
        if sync.has_any(steps_on):
            raise EvenstepError(
                f"{type(optimizer).__name__}.step() inside backward, in a hook, on parameters of model {sync.name!r} "
                "whose gradients the ranks have not exchanged yet\n  fix: call optimizer.step() after backward"
            )


def _check_exchanged(sync: GradientSync) -> None:
    if sync.unsynchronised:
        raise EvenstepError(
            f"optimizer.step() after a backward of model {sync.name!r} under es.no_sync, whose gradients the ranks have "
            "not exchanged\n  fix: leave the last backward before the step outside es.no_sync"
        )


def _check_whole(sync: GradientSync, steps_on: set[int]) -> None:
    """No backward pass has made this model's gradients since the step before."""
    name = sync.differing(steps_on)
    if name is not None:
        raise EvenstepError(
            f"optimizer.step() with gradients that no backward pass made (parameter {name!r} of model {sync.name!r}), "
            "which the ranks have not exchanged: they differ between them\n"
            "  fix: call loss.backward(); or, after p.grad = …, es.exchange_gradients() before the step"
        )


def _ids(*optimizers: Optimizer) -> set[int]:
    """Of all that these step on."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def parameters_in(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
