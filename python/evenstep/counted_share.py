"""A loop over a prepared loader that trained nothing, as an evaluation, after which the ranks told one another nothing: what the script
has counted in it is of one rank's samples."""

from __future__ import annotations

import atexit
import os
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

from evenstep import script_exchanges, sites
from evenstep.exits import ended_by_exception
from evenstep.script_exchanges import Moment

if TYPE_CHECKING:
    from evenstep.session import Session

SHARE = (
    "a loop over a prepared loader trained nothing (an evaluation?), and the ranks have told one another nothing since it began: it had "
    "this rank's share alone, {0} of {1} samples, so what was counted in it is that share's\n  fix: add counts up over the ranks "
    "before they are used, hits = es.gather(torch.tensor([hits]), batch=False).sum(), and means by es.reduce_mean(mean, weight=samples); "
    "or es.evaluate(model, loader, fn); or leave the loader out of es.prepare, and each rank goes through all of it. Where nothing was "
    "counted, or the ranks' parts meet in another way (files), that is no error: "
    "warnings.filterwarnings('ignore', 'a loop over a prepared loader trained nothing')"
)


class Begun(NamedTuple):
    """A loop at its first batch."""

    moment: Moment
    course: tuple[int, int, int]  # backwards, steps and BatchNorms over all ranks' samples before it


class _Ended(NamedTuple):
    moment: Moment  # at its begin
    place: sites.Place | None
    samples: tuple[int, int]  # of this rank, of all


class CountedShare:
    """Looks at loops to their end, on rank 0; says it once, before the next backward or when the script ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = self._at_exit_too = False
        self._ended: _Ended | None = None

    def begins(self) -> Begun | None:
        """None where nothing is to be said."""
        session = self._session
        if self._told or session.rank != 0 or session.world_size == 1 or session.planning or session.watch is not None:
            return None
        moment = script_exchanges.so_far()
        return None if moment is None else Begun(moment, self._course())

    def ends(self, begun: Begun | None, samples: tuple[int, int], train: bool) -> None:
        """The loop came to its end. samples: this rank's and all. train: the loader is one to train by, which a script may evaluate
        by, too."""
        if begun is None or self._ended is not None or samples[0] == samples[1]:
            return
        if self._course() != begun.course:
            return
        if train and torch.is_grad_enabled() and all(model.training for model in self._session.models.values()):
            return
        self._ended = _Ended(begun.moment, sites.of_caller(), samples)
        if not self._at_exit_too:
            self._at_exit_too = True
            atexit.register(self._at_exit, os.getpid())

    def _course(self) -> tuple[int, int, int]:
        session = self._session
        return session.steps.begun_backwards, session.step, session.norm_calls

    def goes_on(self) -> None:
        """A backward begins, or the script ends."""
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        if script_exchanges.none_between(ended.moment, script_exchanges.so_far()):
            self._told = True
            path, line, _ = ended.place or (__file__, 0, "")
            warnings.warn_explicit(SHARE.format(*ended.samples), UserWarning, path, line)

    def _at_exit(self, process: int) -> None:
        if process == os.getpid() and not ended_by_exception():
            self.goes_on()
