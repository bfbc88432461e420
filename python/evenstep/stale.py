"""Gradients that are used some steps after they were made, and exchanged meanwhile: es.Stale of one model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.engine import Engine, Report

Result = dict[int, torch.Tensor]  # index of a parameter: its sum over ranks


class StaleRounds:
    """One engine for each round under way, as many as the gradients are late."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._free = deque(engines)
        self._under_way: deque[Engine] = deque()  # the oldest first
        self._results: deque[Result] = deque()  # of rounds before those, not used yet
        self._late = len(engines)
        self._last = -1  # the step of the newest round

    def check_once_a_step(self, step: int) -> None:
        if step == self._last:
            raise EvenstepError(
                "a second backward in one optimizer step of a model prepared with sync=es.Stale: its p.grad now holds the "
                "gradient of an earlier step\n  fix: accumulate under es.no_sync, all but the last backward of a step"
            )

    def turn(self, gradients: Result, weight: float, step: int) -> tuple[Result, list[Report]]:
        """Hands this step's gradients over; gives those that are due (none in the first steps). Collective."""
        reports: list[Report] = []
        due: Result = {}
        if len(self._results) + len(self._under_way) == self._late:
            if not self._results:
                reports.append(self._finish_oldest())
            due = self._results.popleft()
        engine = self._free.popleft()
        engine.begin(weight, step)
        for index, gradient in gradients.items():
            engine.ready(index, gradient)
        self._under_way.append(engine)
        self._last = step
        return due, reports

    def _finish_oldest(self) -> Report:
        engine = self._under_way.popleft()
        used, report = engine.finish()
        self._results.append({i: view.clone() for i, view in enumerate(engine.views) if used[i]})
        self._free.append(engine)
        return report

    # -- checkpoints --

    def state(self) -> dict[str, Any]:
        """Waits for what is under way. Collective; the same on all ranks."""
        while self._under_way:
            self._finish_oldest()
        results = [{str(index): one for index, one in result.items()} for result in self._results]
        return {"mode": "Stale", "results": results}

    def load(self, state: dict[str, Any] | None, devices: Sequence[torch.device]) -> bool:
        """False where the checkpoint has no gradients that are late by as many steps: the first steps change nothing."""
        while self._under_way:
            self._finish_oldest()
        self._results.clear()
        self._last = -1
        if state is None or state["mode"] != "Stale" or len(state["results"]) > self._late:
            return False
        for saved in state["results"]:
            self._results.append({int(i): one.to(devices[int(i)], copy=True) for i, one in saved.items()})
        return True
