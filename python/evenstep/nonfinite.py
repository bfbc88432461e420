"""Losses and gradients that are not finite: told in the step that would use them, on all ranks alike, and what follows.

What no step uses is no fault: a GradScaler that finds infinities leaves optimizer.step() out, and nothing is told.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.group import gather_objects

if TYPE_CHECKING:
    from evenstep.engine import Engine
    from evenstep.gradients import GradientSync
    from evenstep.group import Group
    from evenstep.steps import Steps

POLICIES = ("report", "skip", "stop")
UNNAMED = -1  # in place of a parameter's number, where it is not known which
MOST_NAMES = 2

Found = list[tuple[int, bool]]  # parameters, and whether the gradient of this rank is one of those


@torch.no_grad()
def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest magnitude of all, NaN where one is; None of none."""
    dense = (t if t.layout is torch.strided else t.coalesce().values() for t in tensors)
    real = [torch.view_as_real(t) if t.is_complex() else t for t in dense if t.numel()]
    if real and all(t.is_cpu for t in real):  # where torch's norm takes sixteen times as long: 15 ms for 4 million
        return torch.stack([torch.stack(t.aminmax()).abs().amax().double() for t in real]).amax()
    return torch.nn.utils.get_total_norm(real, math.inf) if real else None


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    norm = largest(tensors)
    return norm is None or bool(norm.isfinite())


class Look:
    """Whether tensors are finite. Of an accelerator's the answer is that about those of the call before: it is there by
    now, and nobody waits for it. With `at_once` it is waited for: so it is where ranks that look at the same sums do not
    all have them on accelerators (`agreed_ways`), for all act in the same step."""

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None

    def finite(self, tensors: Iterable[torch.Tensor], at_once: bool) -> bool:
        norm = largest(tensors)
        if norm is None:
            return True
        if not at_once and not norm.is_cpu:
            self._before, norm = norm, self._before
        return norm is None or bool(norm.isfinite())


def tells_by_itself(engine: Engine) -> bool:
    """Whether it has looked at what it was given when its round ends."""
    return hasattr(engine, "nonfinite")


def may_be_late(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a look at their gradients may be answered a round later."""
    return not any(p.is_cpu for p in parameters)


def agreed_ways(group: Group, engine: Engine, parameters: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Whether every rank's engine tells by itself, and whether every rank's look may be late. Collective: ranks that learn of
    it in different steps would wait for one another in the first of these."""
    told = gather_objects(group, (tells_by_itself(engine), may_be_late(parameters)))
    return all(tells for tells, _ in told), all(late for _, late in told)


def found_among(
    indices: Sequence[int],
    sums: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    own: Callable[[int], torch.Tensor | None],
) -> Found:
    """The parameters whose sums are not finite, where some are not; own(i): this rank's part of one, where it is kept."""
    found: Found = []
    for index in indices:
        if not all_finite([sums[index]]):
            mine = own(index)
            found.append((index, mine is not None and not all_finite([mine])))
    return found or [(UNNAMED, False)]  # those of the round before


class NonFinite:
    """Of the steps of one session. `scales`: whether a GradScaler was prepared."""

    def __init__(self, steps: Steps, policy: str, scales: Callable[[], bool]) -> None:
        self.policy = policy
        self._steps, self._scales = steps, scales
        self._since = -1  # the step from which on it lasts; -1: it does not
        self._told = 0  # steps that were
        self._teller = 0  # the rank whose ring has the event: that of its end comes after it in one ring alone

    def begin_anew(self) -> None:
        """Among other ranks, of which some know nothing of it: what lasts is told once more."""
        self._since, self._told = -1, 0

    def before_step(self, optimizer: torch.optim.Optimizer, leads: bool) -> bool:
        """Whether the step is to be left out. Collective where something was found, which all ranks know alike. `leads`:
        it is the optimizer whose step counts. Raises EvenstepError where the job is to end."""
        steps = self._steps
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if steps.quiet.last:
            if getattr(optimizer, "found_inf", None) is None:
                steps.quiet.steps_on(ids)
            self._told += 1 if leads and self._since >= 0 else 0
            return False
        syncs = [sync for sync in steps.syncs if sync.nonfinite]
        if syncs:
            syncs = [sync for sync in syncs if sync.has_any(ids)]
        loss = bool(steps.loss_ranks) and (bool(syncs) or not self._scales())
        if not syncs and not loss:
            if leads and self._since >= 0:
                self._is_over()
            return False
        if getattr(optimizer, "found_inf", None) is not None:
            return False  # a fused one, to which a GradScaler says that it shall leave the step out
        steps.quiet.said(ids)
        if self._since < 0 or self.policy == "stop":
            self._tell(syncs, loss)
        self._told += 1 if leads else 0
        return self.policy == "skip"

    def _tell(self, syncs: Sequence[GradientSync], loss: bool) -> None:
        steps = self._steps
        ranks, names = self._who(syncs)
        ranks = sorted(set(ranks) | set(steps.loss_ranks if loss else ()))
        what = "the loss and gradients" if loss and syncs else "the loss" if loss else "gradients"
        where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
        verb = "is" if what == "the loss" else "are"
        words = f"{what}{where} {verb} not finite" + (f": {_listed(names)}" if names else "")
        if self.policy == "stop":
            words += "; the job ends"
        elif self.policy == "skip":
            words += "; the step is left out"
        self._since, self._told = steps.step, 0
        self._teller = ranks[0] if ranks else 0
        if steps.group.rank == self._teller:
            steps.telemetry.event(_core.EVENT_NONFINITE, steps.step, max(1, len(ranks)), words)
        self._say(f"step {steps.step}: {words}")
        if self.policy == "stop":
            raise EvenstepError(
                f"step {steps.step}: {words}\n"
                "  fix: the parameters are as before this step, and so is the newest checkpoint: look at the data and the "
                "learning rate, then go on with --resume auto; --on-nonfinite skip leaves such steps out"
            )

    def _who(self, syncs: Sequence[GradientSync]) -> tuple[list[int], list[str]]:
        """The ranks whose own gradients were not finite, and the parameters, in the order of backward. Collective."""
        steps = self._steps
        mine = bytearray()
        for sync in syncs:
            flags = bytearray(len(sync.parameters))
            for index, own in sync.nonfinite:
                if own:
                    flags[index] = 1
            mine += flags
        with steps.blocking():
            told = steps.group.exchange(bytes(mine)) if mine else []
        names = [
            sync.name_of(index)
            for sync in syncs
            for index in sorted((index for index, _ in sync.nonfinite if index != UNNAMED), reverse=True)
        ]
        return [rank for rank, flags in enumerate(told) if any(flags)], names

    def _is_over(self) -> None:
        steps, since, count = self._steps, self._since, self._told
        self._since = -1
        words = f"finite again after {count} step{'s' if count > 1 else ''}, from step {since} on"
        if steps.group.rank == min(self._teller, steps.group.ranks - 1):
            steps.telemetry.event(_core.EVENT_NONFINITE, steps.step, 0, words)
        self._say(f"step {steps.step}: loss and gradients are {words}")

    def _say(self, words: str) -> None:
        if self._steps.group.rank == 0:
            sys.stderr.write(f"evenstep: {words}\n")
            sys.stderr.flush()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def check_policy(policy: Any, call: str) -> str:
    """Raises ValueError."""
    if policy not in POLICIES:
        raise ValueError(f"{call}: choose {', '.join(map(repr, POLICIES))}")
    return str(policy)
