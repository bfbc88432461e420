"""Gradients that are used some steps after they were made, and exchanged meanwhile: es.Stale of one model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep._core import EvenstepError
from evenstep.generation_told import name

if TYPE_CHECKING:
    from evenstep.engine import Engine, Report
    from evenstep.generation_passes import Passes
    from evenstep.late_votes import LateVotes

Result = dict[int, torch.Tensor]  # index of a parameter: its sum over ranks
Leftovers = dict[str, torch.Tensor]  # what an engine has left out of the gradients so far


def ends_alone(engine: Engine) -> bool:
    """Whether its rounds end without a call that waits for the other ranks."""
    return hasattr(engine, "complete") and not getattr(engine, "beside_others", False)


@dataclass
class _Round:
    """What this rank gives to one, kept where ranks may be lost until its sum has been used."""

    number: int  # turns that had been committed
    gradients: Result
    weight: float
    left_out: Leftovers | None = None  # of what came before it; None: nothing is remembered
    ranks: int = 1  # of which it was this rank's
    whole: bool = False  # the gradients are the sum, the same on all ranks


class StaleRounds:
    """One engine for each round under way, as many as the gradients are late."""

    def __init__(
        self, engines: Sequence[Engine], passes: Passes | None = None, ranks: int = 1, sums: bool = False
    ) -> None:
        """passes: where ranks may be lost and the others go on; ranks: how many there are; sums: losses are sums over samples."""
        self.engines, self._ranks, self._sums = list(engines), ranks, sums
        self._passes = passes
        self._kept: deque[_Round] = deque()
        self._free = deque(engines)
        self._under_way: deque[Engine] = deque()  # the oldest first
        self._results: deque[Result] = deque()  # of rounds before those, not used yet
        self._late = len(engines)
        self._last = -1  # the step of the newest round
        self.votes: LateVotes | None = None  # about these rounds

    def __str__(self) -> str:
        return f"gradients {self._late} step{'s' if self._late > 1 else ''} late"

    def check_once_a_step(self, step: int) -> None:
        if step == self._last:
            raise EvenstepError(
                "a second backward in one optimizer step of a model prepared with sync=es.Stale: its p.grad now holds the "
                "gradient of an earlier step\n  fix: accumulate under es.no_sync, all but the last backward of a step"
            )

    @property
    def passes_over(self) -> bool:
        """Whether the gradients that have come are those of a round that is on its way already."""
        return self._passes is not None and self._passes.passes_over

    def turn(self, gradients: Result, weight: float, step: int) -> tuple[Result, list[Report]]:
        """Hands this step's gradients over; gives those that are due (none in the first steps). Collective."""
        reports: list[Report] = []
        due: Result = {}
        if len(self._results) + len(self._under_way) == self._late:
            if not self._results:
                reports.append(self._finish_oldest())
            due = self._results.popleft()
        if self._passes is not None:
            engine: Any = self._free[0]
            left_out = engine.feedback_state() if hasattr(engine, "feedback_state") else None
            self._kept.append(_Round(self._passes.committed, gradients, weight, left_out, self._ranks))
        self._begin(gradients, weight, step)
        self._last = step
        return due, reports

    def _begin(self, gradients: Result, weight: float, step: int) -> None:
        engine = self._free.popleft()
        engine.begin(weight, step)
        for index, gradient in gradients.items():
            engine.ready(index, gradient)
        if ends_alone(engine):
            engine.complete()  # type: ignore[attr-defined]
        self._under_way.append(engine)

    def _finish_oldest(self) -> Report:
        engine = self._under_way.popleft()
        used, report = engine.finish()
        self._results.append({i: view.clone() for i, view in enumerate(engine.views) if used[i]})
        self._free.append(engine)
        return report

    # -- where ranks may be lost --

    def stands(self) -> None:
        """The turn under way is committed: what it used comes never again."""
        while len(self._kept) > self._late:
            self._kept.popleft()

    def take_back(self) -> None:
        """A round of a turn that counts nothing is dropped where the ranks go on."""

    def weights(self) -> dict[int, float]:
        """This rank's in each round that may have to be made again."""
        return {one.number: one.weight for one in self._kept}

    def lost_with(self, ranks: Sequence[int]) -> str:
        if not self._kept:
            return ""
        return f"the gradients of {name(ranks, '')} that were late are lost: those steps use the others'"

    def go_on(self, engines: Sequence[Engine], totals: Mapping[int, float], ranks: int) -> None:
        """With other engines, of so many ranks that are there: each late round is made again among them. totals: these, and what
        the ranks weigh in each together. Collective; who has joined gives nothing to them."""
        own = {one.number: one for one in self._kept}
        kept = [own.get(number) or _Round(number, {}, 0.0) for number in totals]
        void = [one for one in self._kept if one.number > max(totals, default=-1)]
        self.engines, self._free, self._ranks = list(engines), deque(engines), ranks
        self._under_way.clear()
        self._results.clear()
        self._last = -1
        self._kept = deque(kept)
        self._remember_what_was_left_out([one for one in kept if not one.whole] or void)
        for one in kept:
            if one.whole:
                self._results.append(one.gradients)
                continue
            total = 1.0 if self._sums else totals[one.number]
            self._begin(one.gradients, one.weight / total if total > 0 else 0.0, max(0, one.number))

    def _remember_what_was_left_out(self, rounds: Sequence[_Round]) -> None:
        """As before the first of those that are made again. Where it is remembered there is one engine alone."""
        engine: Any = self.engines[0]
        if rounds and rounds[0].left_out is not None:
            engine.load_feedback(engine.of_ranks(rounds[0].left_out, rounds[0].ranks))

    # -- checkpoints --

    def wait(self) -> None:
        """For what is under way. Collective."""
        while self._under_way:
            self._finish_oldest()

    def state(self) -> dict[str, Any]:
        """Waits for what is under way. Collective; the same on all ranks."""
        if self.votes is not None:
            self.votes.read_all()
        self.wait()
        return {"mode": "Stale", "results": _named(self._results)}

    def own_state(self) -> dict[str, Any]:
        """Of that what this rank has without the others, for one that joins: sums of before a checkpoint. The other late ones are
        made again with it."""
        whole = [one.gradients for one in self._kept if one.whole]
        return {"mode": "Stale", "results": _named(whole), "late": len(self._kept)}

    def load(self, state: dict[str, Any] | None, devices: Sequence[torch.device]) -> bool:
        """False where the checkpoint has no gradients that are late by as many steps: the first steps change nothing."""
        if self.votes is not None:
            self.votes.forget()
        self.wait()
        self._results.clear()
        self._kept.clear()
        self._last = -1
        if state is None or state["mode"] != "Stale" or len(state["results"]) > self._late:
            return False
        for saved in state["results"]:
            self._results.append({int(i): one.to(devices[int(i)], copy=True) for i, one in saved.items()})
        if self._passes is not None:  # the same on all ranks, so their mean is what they are
            first = self._passes.committed - state.get("late", len(self._results))
            self._kept.extend(_Round(first + i, one, 1.0, whole=True) for i, one in enumerate(self._results))
        return True


def _named(results: Iterable[Result]) -> list[dict[str, torch.Tensor]]:
    return [{str(index): one for index, one in result.items()} for result in results]
