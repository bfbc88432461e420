"""Prepared learning-rate schedulers: their steps between epochs are counted, so that a resumed script does not make
again those that its checkpoint already has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SchedulerSteps:
    """Counts what each scheduler steps by itself while `training()` is false: what another scheduler steps for it
    (SequentialLR) is that one's business. While `stopped()` nothing is stepped: the step before did not count."""

    def __init__(self, training: Callable[[], bool], stopped: Callable[[], bool] = lambda: False) -> None:
        self._training, self._stopped = training, stopped
        self._made: dict[str, int] = {}
        self._before: dict[str, int] = {}  # the checkpoint's
        self._inside = False

    def watch(self, name: str, scheduler: Any) -> None:
        """From now on its steps are counted, and left out where the checkpoint has them. Copies and pickles of it are
        of its own class and not counted."""
        steps = self
        plain: Any = type(scheduler)
        self._made[name] = 0

        def step(scheduler: Any, *arguments: Any, **options: Any) -> Any:
            if steps._stopped() and not steps._inside:
                return None
            if steps._inside or steps._training():
                return plain.step(scheduler, *arguments, **options)
            steps._made[name] += 1
            if steps._made[name] <= steps._before.get(name, 0):
                return None
            steps._inside = True
            try:
                return plain.step(scheduler, *arguments, **options)
            finally:
                steps._inside = False

        def reduce(scheduler: Any, protocol: int) -> Any:
            # later protocols make the object by its own class, whatever the arguments say
            watched, found = type(scheduler), plain.__reduce_ex__(scheduler, min(protocol, 1))
            if not isinstance(found, tuple):
                return found
            make, arguments, *rest = (plain if one is watched else one for one in found)
            return (make, tuple(plain if one is watched else one for one in arguments), *rest)

        # A class of the same name, not an attribute: a scheduler's state_dict takes all attributes along.
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        scheduler.__class__ = type(plain.__name__, (plain,), {"step": step, "__reduce_ex__": reduce, **names})

    def made(self) -> dict[str, int]:
        """How many this script has come by, those left out among them."""
        return dict(self._made)

    def total(self) -> dict[str, int]:
        """How many training has had."""
        return {name: max(made, self._before.get(name, 0)) for name, made in self._made.items()}

    def replay(self, before: dict[str, int]) -> None:
        """The script runs from its beginning: the first so many of each were made before."""
        self._before = dict(before)
        self._made = dict.fromkeys(self._made, 0)

    def go_on(self, made: dict[str, int] | None = None) -> None:
        """The script skips to where it had come by so many; by default to where training stands: every one counts."""
        for name in self._made:
            self._made[name] = self._before.get(name, 0) if made is None else made.get(name, 0)
