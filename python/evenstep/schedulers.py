"""Prepared learning-rate schedulers: their steps between epochs are counted, so that a resumed script does not make
again those that its checkpoint already has; one that follows a metric follows the same one on all ranks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evenstep import script_exchanges
from evenstep._core import EvenstepError
from evenstep.group import gather_objects

if TYPE_CHECKING:
    from evenstep.session import Session


_CALL = "ReduceLROnPlateau.step"
_ROUNDING = 1e-4  # relative: so far apart come metrics of the same samples, by other devices' kernels


class AgreedMetric:
    """What ReduceLROnPlateau.step(metrics) is given, on all ranks: a rank's own samples make a metric of its own, by which it
    would lower its rate alone."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._warned = False

    def __call__(self, metric: Any) -> Any:
        """The ranks' mean, by the samples that each had in the loop that the metric is of; where all give the same, that.
        Collective."""
        session = self._session
        if session.world_size == 1:
            return metric
        script_exchanges.made()
        mine = _CALL, float(metric), session.metric_samples
        with session.steps.blocking():
            told = session.call_by_all(lambda: gather_objects(session.group, mine))
        for rank, one in enumerate(told):
            if not isinstance(one, tuple) or one[:1] != (_CALL,):
                raise EvenstepError(
                    f"rank {rank} made another call where rank {session.rank} was in {_CALL}, which all ranks make\n"
                    "  fix: call the step of a prepared ReduceLROnPlateau on every rank, not on the main one alone"
                )
        if len({repr(value) for _, value, _ in told}) == 1:
            return metric
        known = all(samples is not None for _, _, samples in told) and any(samples for _, _, samples in told)
        counted = [(value, float(samples) if known else 1.0) for _, value, samples in told if samples or not known]
        mean = sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)
        values = [value for value, _ in counted if math.isfinite(value)]
        apart = max(values) - min(values) if values else math.inf
        if session.rank == 0 and not self._warned and apart > _ROUNDING * max(map(abs, values), default=0.0):
            self._warned = True
            between = f" ({min(values):.6g} to {max(values):.6g})" if values else ""
            warnings.warn(
                f"ReduceLROnPlateau.step was given another number on each rank{between}, of its own samples; their mean, weighted "
                "by these samples, is taken on all\n  fix: give what es.evaluate or es.reduce_mean(value, weight=samples) gives, "
                "which is exact for sums and ratios, too",
                stacklevel=4,
            )
        return mean


class _Before:
    """A scheduler's state, and what it writes of its optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        self._groups = [
            (group, {key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
            for group in scheduler.optimizer.param_groups
        ]

    def put_back(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, values in self._groups:
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a learning rate that the optimizer knows by its place
                else:
                    group[key] = value


class SchedulerSteps:
    """Counts what each scheduler steps by itself while `training()` is false: what another scheduler steps for it
    (SequentialLR) is that one's business. While `stopped()` nothing is stepped: the step before did not count."""

    def __init__(
        self,
        training: Callable[[], bool],
        stopped: Callable[[], bool] = lambda: False,
        agree: Callable[[Any], Any] = lambda metric: metric,
    ) -> None:
        self._training, self._stopped, self._agree = training, stopped, agree
        # Whether there are batches since the last step that stands, which would come again where a rank is lost.
        self.uncertain: Callable[[], bool] = lambda: False
        self._undo: dict[str, _Before] = {}
        self._made: dict[str, int] = {}
        self._before: dict[str, int] = {}  # the checkpoint's
        self._inside = False

    def watch(self, name: str, scheduler: Any) -> None:
        """From now on its steps are counted, and left out where the checkpoint has them. Copies and pickles of it are
        of its own class and not counted."""
        steps = self
        plain: Any = type(scheduler)
        follows_metric = isinstance(scheduler, ReduceLROnPlateau)
        self._made[name] = 0

        def make(scheduler: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if follows_metric:
                if arguments:
                    arguments = (steps._agree(arguments[0]), *arguments[1:])
                elif "metrics" in options:
                    options = {**options, "metrics": steps._agree(options["metrics"])}
            return plain.step(scheduler, *arguments, **options)

        def step(scheduler: Any, *arguments: Any, **options: Any) -> Any:
            if steps._stopped() and not steps._inside:
                return None
            within = not steps._inside and steps._training()
            if within and name not in steps._undo and steps.uncertain():  # as behind a step that a scaler skips
                steps._undo[name] = _Before(scheduler)
            if steps._inside or within:
                return make(scheduler, arguments, options)
            steps._made[name] += 1
            if steps._made[name] <= steps._before.get(name, 0):
                return None
            if follows_metric:
                return make(scheduler, arguments, options)
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

    def stands(self) -> None:
        """What was stepped so far is of batches that do not come again."""
        self._undo.clear()

    def put_back(self) -> None:
        """Without what was stepped since."""
        for before in self._undo.values():
            before.put_back()
        self._undo.clear()

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
