"""Ranks that train on their own between synchronisations: LocalSGD and DiLoCo of one model.

The parameters (LocalSGD), or how far they have moved (DiLoCo), go through the model's engine in place of gradients: each
rank with its part of the samples since the last time. Every optimizer has its own count and synchronises what it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from evenstep.generation_told import name
from evenstep.mended_group import MendedGroup
from evenstep.modes import DiLoCo, LocalSGD
from evenstep.step_checks import parameters_in

if TYPE_CHECKING:
    from evenstep.engine import Engine
    from evenstep.nonfinite import Found
    from evenstep.steps import Steps


class LocalTraining:
    """`parameters` are the engine's, in its order."""

    def __init__(
        self, mode: LocalSGD | DiLoCo, engine: Engine, parameters: list[torch.nn.Parameter], steps: Steps
    ) -> None:
        self.mode, self.engine, self._parameters, self._steps = mode, engine, parameters, steps
        self._index = {id(p): index for index, p in enumerate(parameters)}
        self._seen = 0.0  # samples of this rank since the start
        self._stood = 0.0  # the same, of turns that are committed
        self._counts: dict[int, int] = {}  # optimizer (id): its steps since the last synchronisation
        self._seen_before: dict[int, float] = {}  # and what had been seen then
        self._trained: dict[int, list[int]] = {}  # and which parameters it has, or had since the start …
        self._had: dict[int, int] = {}  # … when it had so many
        self._sums: dict[int, torch.Tensor] = {}  # of the exchange under way, by parameter
        self._unused: Found = []  # what was not finite in a pass without a vote, until a step uses it …
        self._untold: dict[int, bool] = {}  # … and until the next vote …
        self._told: dict[int, bool] = {}  # … which tells it, as do those of the same step, until an optimizer's says it
        self._told_at = -1
        self._bytes = sum(p.numel() * p.element_size() for p in parameters)
        self._outer: torch.optim.SGD | None = None
        self._anchors: list[torch.Tensor] = []  # where the parameters were when all ranks had the same
        if isinstance(mode, DiLoCo):
            self._anchors = [p.detach().clone() for p in parameters]
            self._outer = torch.optim.SGD(
                self._anchors,
                lr=mode.outer_lr,
                momentum=mode.outer_momentum,
                nesterov=mode.outer_momentum > 0,
                foreach=False,
            )
        self._loose = set(range(len(self._anchors)))  # those that no optimizer has moved since all ranks had the same

    def saw(self, amount: float) -> None:
        """A backward has ended, and made gradients of `amount` samples (or what es.set_weight counts) here."""
        if self._loose:  # the script may have set the parameters since es.prepare, or since they were one
            self._anchor()
        self._seen += amount

    def spare_exchange(self) -> None:
        """Gradients stay here that would else have been exchanged."""
        self._steps.saved.add(str(self.mode), 0, self._bytes)

    @torch.no_grad()
    def _anchor(self) -> None:
        for index in self._loose:
            self._anchors[index].copy_(self._parameters[index])
        # the script may set the others yet, until an optimizer gets them
        self._loose.difference_update(*self._trained.values())

    @property
    def whole(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not any(self._counts.values())

    @property
    def due(self) -> bool:
        """Whether some optimizer's next step synchronises."""
        return any(count + 1 >= self.mode.every for count in self._counts.values())

    def after_step(self, optimizer: Optimizer) -> None:
        """Collective at every `every`-th step of the optimizer, which all ranks make."""
        key = id(optimizer)
        if self._had.get(key) != parameters_in(optimizer):  # it may have got more by add_param_group
            found = (self._index.get(id(p)) for group in optimizer.param_groups for p in group["params"])
            self._trained[key] = sorted({*self._trained.get(key, ()), *(index for index in found if index is not None)})
            self._had[key] = parameters_in(optimizer)
        if not self._trained[key]:
            return
        self._loose.difference_update(self._trained[key])
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] >= self.mode.every:
            self._synchronise(key)

    def synchronise(self) -> None:
        """Now, whatever the count. Collective."""
        for key, count in self._counts.items():
            if count > 0:
                self._synchronise(key)

    @torch.no_grad()
    def _synchronise(self, key: int) -> None:
        """Where a rank is lost meanwhile, those that are left make the whole of it again, or use the sums that they all have."""
        group, indices = self._steps.group, self._trained[key]
        if isinstance(group, MendedGroup):
            group.call(lambda: self._meet_for(key), lambda _: bytes, lambda _: None, lambda: False)
        else:
            self._add_up(key)
        self._counts[key], self._seen_before[key] = 0, self._seen
        sums, self._sums = self._sums, {}
        if sums:
            self._take(indices, sums)

    def _meet_for(self, key: int) -> None:
        """Who comes out knows that all have the sums."""
        self._add_up(key)
        self._steps.group.barrier()

    def _add_up(self, key: int) -> None:
        self._sums = {}
        seen = max(0.0, self._seen - self._seen_before.get(key, 0.0))
        total = torch.tensor([seen], dtype=torch.float64)
        with self._steps.blocking():
            self._steps.group.sum_(total)
        if float(total) > 0:  # else no rank has trained
            self._exchange(self._trained[key], seen / float(total))

    def _exchange(self, indices: list[int], weight: float) -> None:
        engine, parameters = self.engine, self._parameters
        engine.begin(weight, self._steps.step)
        for index in indices:
            value = parameters[index].detach()
            engine.ready(index, self._anchors[index] - value if self._outer is not None else value)
        _, report = engine.finish()
        self._steps.exchanged(str(self.mode), report)
        self._sums = {index: engine.views[index] for index in indices}

    def _take(self, indices: list[int], sums: dict[int, torch.Tensor]) -> None:
        parameters = self._parameters
        if self._outer is None:
            for index in indices:
                parameters[index].copy_(sums[index])
            return
        for index in indices:
            self._anchors[index].grad = sums[index]
        self._outer.step()
        for index in indices:
            self._anchors[index].grad = None
            parameters[index].copy_(self._anchors[index])
        self._loose.update(indices)

    # -- gradients that are not finite --

    def to_tell(self, found: Found, quiet: bool, fired: bool) -> Found:
        """What the vote of this pass tells of it, and of those before that had none. quiet: it has none either. fired: it is of
        this model, so that the step to come may be one of its optimizer's."""
        if quiet:
            self._unused = found
            return []
        self._unused = []
        step = self._steps.step
        if step != self._told_at:  # an optimizer that makes no step any more says nothing
            self._told.clear()
        if fired and self._untold:
            self._told.update(self._untold)
            self._told_at = step
            self._untold = {}
        return list({**self._told, **dict(found)}.items())

    def steps_on_nonfinite(self) -> None:
        """An optimizer uses what the last pass found, if that was anything."""
        self._untold.update(self._unused)
        self._unused = []

    def said_nonfinite(self) -> None:
        """By a step of its optimizer, which came after the votes."""
        self._told.clear()

    # -- where ranks may be lost --

    def stands(self) -> None:
        """The turn under way is committed: what was seen in it counts."""
        self._stood = self._seen

    def take_back(self) -> None:
        """It is not, or was made for the second time."""
        self._seen = self._stood

    def lost_with(self, ranks: Sequence[int]) -> str:
        steps = max(self._counts.values(), default=0)
        if not steps:
            return ""
        since = f"in the {steps} steps" if steps > 1 else "in the step"
        return f"what {name(ranks, '')} trained {since} since the last exchange is lost ({self.mode})"

    # -- checkpoints, which are written where the parameters are whole --

    def state(self) -> dict[str, Any]:
        """The same on all ranks."""
        outer = {} if self._outer is None else self._outer.state
        momentum = {str(i): outer[p]["momentum_buffer"] for i, p in enumerate(self._anchors) if p in outer}
        return {"mode": type(self.mode).__name__, "momentum": {k: v for k, v in momentum.items() if v is not None}}

    def begin_anew(self) -> None:
        """The parameters were loaded on all ranks: the time on their own begins here."""
        self._counts.clear()
        self._seen_before = dict.fromkeys(self._trained, self._seen)
        self._loose = set(range(len(self._anchors)))

    def load(self, state: dict[str, Any] | None) -> bool:
        """After the parameters were loaded. False where the checkpoint has no state of this mode."""
        self.begin_anew()
        if self._outer is None:
            return True
        self._outer.state.clear()
        if state is None or state["mode"] != type(self.mode).__name__:
            return False
        for index, buffer in state["momentum"].items():
            anchor = self._anchors[int(index)]
            self._outer.state[anchor]["momentum_buffer"] = buffer.to(anchor.device, anchor.dtype, copy=True)
        return True
