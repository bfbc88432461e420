"""es.prepare(workers="auto"): how many workers each rank's loader gets, by what loading took of its first steps, and of some later
ones; and whether steps are shorter so, else as before. Where nobody asked, rank 0 says once that it would help.

It is not the default. A script that sets no num_workers may count on its data set staying in its process: on what it changes
there (a curriculum), what samples leave there (a cache), on files and connections that it holds open, which forked processes
would share, and on a container whose /dev/shm is small. None of these can be seen with certainty from outside."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenstep.cpu_quota import allowed as allowed_cores

STEPS = 8  # measured, after those that warm up
WARM_UP = 2
MATTERS = 0.05  # of a step
HEADROOM = 1.25
MANY = 1 << 16
_DEEP, _LONG = 6, 64  # of what is in a data set
DISTANCE, MOST_DISTANCE = 100, 12_800  # steps between two looks; the first is doubled each time
AGAIN = 20  # steps, for a second look at what is to have changed
OTHERWISE = 1.5  # times as much loading as where other workers gained nothing, or as little
IDLE, SAME = 0.01, 1.02  # of a step
MOST_TRIES = 8
WORTH_SAYING = 0.1, 0.002  # of a step, and seconds


@dataclass(frozen=True)
class Measured:
    """One rank's: seconds of a step, medians."""

    loading: float
    work: float  # without loading, and without waiting for other ranks
    busy_loading: float  # part of loading in which it computes, rather than waits for a disk
    cores: float  # that it has for itself


def most_workers(cores: float) -> int:
    """One core is for training; one worker is allowed anywhere."""
    return max(1, math.floor(cores) - 1)


def wanted(one: Measured, slowest_work: float, most: int = MANY) -> int:
    """Workers that load a batch for each step of the slowest rank, at most so many."""
    if one.loading < MATTERS * (one.loading + one.work):
        return 0
    if one.cores < 2 and one.busy_loading > 0.5:
        return 0  # a worker would take the core from training
    return min(most, most_workers(one.cores), math.ceil(HEADROOM * one.loading / max(slowest_work, 1e-9)))


def sizes(ranks: Sequence[Measured], most: int = MANY) -> list[tuple[int, int]]:
    """(workers, prefetch_factor) of each rank; [] where none is worth it. All draw equally many batches ahead, so that a
    step's shares are decided at one time on all ranks: where one has workers, each has at least one."""
    slowest = max(one.work for one in ranks)
    needed = [wanted(one, slowest, most) for one in ranks]
    if max(needed) == 0:
        return []
    least = 2 * max(needed)
    choices = [_divided(needed, ranks, ahead, most) for ahead in range(least, 2 * least + 1)]
    return max(
        choices, key=lambda chosen: min(min(1, workers / (need or 1)) for (workers, _), need in zip(chosen, needed))
    )


def _divided(needed: Sequence[int], ranks: Sequence[Measured], ahead: int, most: int) -> list[tuple[int, int]]:
    """So many batches drawn ahead, by at least the needed workers of each rank where its cores allow that."""
    divisors = [number for number in range(1, ahead + 1) if ahead % number == 0]
    chosen = []
    for need, one in zip(needed, ranks):
        allowed = [number for number in divisors if number <= min(most, most_workers(one.cores))]
        workers = next((number for number in allowed if number >= need), allowed[-1])
        chosen.append((workers, ahead // workers))
    return chosen


@dataclass(frozen=True)
class _Look:
    """What one rank tells the others of a look: medians of its steps, in seconds, and what it may compute with."""

    waited: float  # for a batch, in this process
    work: float
    busy: float  # as Measured.busy_loading
    whole: float
    fetched: float  # that loading took, in whichever process
    quota: float
    host: str
    cores: list[int]

    @property
    def waiting(self) -> float:
        return self.waited / max(self.waited + self.work, 1e-9)


@dataclass(frozen=True)
class _Try:
    """Other workers than before."""

    before: list[tuple[int, int]]
    seconds: float  # of a step then
    demand: float


class WorkerSizing:
    """Of one loader, by looks at some of its steps. Alike on all ranks."""

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]] | None,
        why_not: Callable[[], str],
        tell: Callable[[str], None],
        reopens: Callable[[], bool] = lambda: True,
        most: int = MANY,
        fetched: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """gather: of all ranks; None: only says what would help. why_not: why the data set cannot go to workers, "": it can.
        tell: for people, once a job. reopens: whether the epoch can be opened again where it is. most: workers of a rank.
        fetched: seconds that loading took so far, in whichever process."""
        self._rank, self._gather, self._why_not, self._tell = rank, gather, why_not, tell
        self._reopens, self._most, self._fetched = reopens, most, fetched
        self.reopens = False  # with what was chosen last, on all ranks; else the next epoch begins with it
        self._steps: list[tuple[float, ...]] = []
        self._loading = self._computing = 0.0
        self._step = -1
        self._since = self._blocked = self._fetched_before = 0.0
        self._asked = 0.0, 0.0
        self._opened = True  # an iteration, since there are others
        self._standing: list[tuple[int, int]] = []  # of all ranks; []: none
        self._busy = 0.0  # of this rank's loading, when it was here last
        self._first = True
        self._try: _Try | None = None  # under way
        self._tries, self._refused = 0, math.nan  # at which demand the last one was
        self._sure = False  # the look before found a reason, too
        self._rest, self._distance = 0, DISTANCE  # steps until the next look, and after it
        self.decided = False  # there are no more looks

    @property
    def may_change(self) -> bool:
        """Whether other workers are likely to come soon: it chooses, for the first time, or has something to look back at."""
        return self._gather is not None and (self._first or self._try is not None)

    def ask(self) -> None:
        """A batch is asked for."""
        if not self._rest:
            self._asked = time.perf_counter(), time.process_time()

    def arrive(self) -> None:
        if not self._rest:
            self._loading += time.perf_counter() - self._asked[0]
            self._computing += time.process_time() - self._asked[1]

    def open(self) -> None:
        """An iteration is opened: with the workers that were chosen."""
        self._opened = True
        self._step = -1  # what lies between two iterations is no part of a step
        self._loading = self._computing = 0.0

    def step(self, step: int, blocked_ns: Callable[[], int]) -> list[tuple[int, int]] | None:
        """Between two batches. Where that is news: the workers of each rank and batches ahead of each; [] where none are to
        be. Collective then."""
        if step == self._step or not self._opened:
            return None  # accumulation
        begun, self._step = self._step >= 0 and not self._rest, step
        if self._rest:
            self._rest -= 1
            if self._rest:
                return None
        now, blocked, fetched = time.perf_counter(), blocked_ns() / 1e9, self._fetched()
        if begun:
            whole = now - self._since
            work = max(0.0, whole - self._loading - (blocked - self._blocked))
            self._steps.append((self._loading, work, self._computing, whole, fetched - self._fetched_before))
        self._since, self._blocked, self._fetched_before = now, blocked, fetched
        self._loading = self._computing = 0.0
        if len(self._steps) < WARM_UP + STEPS:
            return None
        waited, work, computing, whole, took = (statistics.median(one) for one in zip(*self._steps[WARM_UP:]))
        self._steps = []
        if self._gather is None:
            self.decided = True
            self._advise(waited, work, computing)
            return None
        if not self._standing:
            self._busy = computing / max(waited, 1e-9)
        mine = (
            waited,
            work,
            self._busy,
            whole,
            took,
            allowed_cores(),
            os.uname().nodename,
            sorted(os.sched_getaffinity(0)),
        )
        looks = [_Look(*one) for one in self._gather(mine)]
        return (
            self._judge(self._gather, looks) if self._try is None else self._look_back(self._gather, self._try, looks)
        )

    def _judge(self, gather: Callable[[Any], list[Any]], looks: Sequence[_Look]) -> list[tuple[int, int]] | None:
        loads = [one.fetched if self._standing else one.waited for one in looks]
        ranks = [Measured(load, one.work, one.busy, _cores(one, looks)) for load, one in zip(loads, looks)]
        demand = max(loads) / max(1e-9, *(one.work for one in ranks))
        chosen, reason = self._other(looks, sizes(ranks, self._most), demand)
        if not reason:
            self._go_on()
            return None
        if not self._first and not self._sure:
            self._sure, self._rest = True, AGAIN
            return None
        why_not = self._agree(gather)
        if why_not and chosen:
            self.decided = True
            self._tell(f"{reason}, and no {'more ' if self._standing else ''}workers load for it: {why_not}")
            return None
        self._try = _Try(self._standing, statistics.median(one.whole for one in looks), max(IDLE, demand))
        self._standing, self._opened, self._tries = chosen, False, self._tries + 1
        self._tell(f"{reason}: from now on {_said(chosen)} load for the ranks")
        return chosen

    def _other(
        self, looks: Sequence[_Look], chosen: list[tuple[int, int]], demand: float
    ) -> tuple[list[tuple[int, int]], str]:
        """Who should load rather than who does now, and why; "": nobody."""
        if self._refused / OTHERWISE <= max(IDLE, demand) <= self._refused * OTHERWISE:
            return [], ""  # where nothing was refused, that is NaN
        if self._standing and demand < IDLE:
            return [], f"loading takes the workers less than {100 * IDLE:.0f}% of a step by now"
        more = [
            rank
            for rank, (workers, _) in enumerate(chosen)
            if not self._standing or (workers > self._standing[rank][0] and looks[rank].waiting >= MATTERS)
        ]
        if not more:
            return [], ""
        worst = max(more, key=lambda rank: looks[rank].waiting)
        part = f"{100 * looks[worst].waiting:.0f}%"
        if self._standing:
            return chosen, f"waiting for its workers takes {part} of the steps of rank {worst} by now"
        return chosen, f"loading took {part} of the {'first' if self._first else 'last'} steps of rank {worst}"

    def _look_back(
        self, gather: Callable[[Any], list[Any]], tried: _Try, looks: Sequence[_Look]
    ) -> list[tuple[int, int]] | None:
        """No regret."""
        now = statistics.median(one.whole for one in looks)
        kept = now < tried.seconds if self._standing else now <= SAME * tried.seconds
        which = (
            "without workers"
            if not self._standing
            else f"with {_said(self._standing)}"
            if tried.before
            else "with workers"
        )
        words = f"steps {which} take {1e3 * now:.3g} ms, {1e3 * tried.seconds:.3g} ms before"
        self._try = None
        if kept:
            self._tell(words)
            self._go_on()
            return None
        self._tell(f"{words}: {_said(tried.before)} load from now on")
        self._agree(gather)
        self._standing, self._refused, self._opened = tried.before, tried.demand, False
        self._go_on()
        return tried.before

    def _go_on(self) -> None:
        """Until the next look, if there is one."""
        self._first = self._sure = False
        self.decided = self._tries == MOST_TRIES
        self._rest, self._distance = self._distance, min(2 * self._distance, MOST_DISTANCE)

    def _agree(self, gather: Callable[[Any], list[Any]]) -> str:
        """Why not, of the first rank that knows."""
        told = gather((self._why_not(), self._reopens()))
        self.reopens = all(reopens for _, reopens in told)
        return next((why_not for why_not, _ in told if why_not), "")

    def _advise(self, loading: float, work: float, computing: float) -> None:
        cores = min(
            allowed_cores(), len(os.sched_getaffinity(0)) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        )
        one = Measured(loading, work, computing / max(loading, 1e-9), cores)
        part, seconds = WORTH_SAYING
        if loading >= max(part * (loading + work), seconds) and wanted(one, work) > 0:
            self._tell(
                f"loading took {100 * loading / (loading + work):.0f}% of the first steps of rank {self._rank}: workers would load "
                "beside them (num_workers of the DataLoader, or es.prepare(workers='auto'), EVENSTEP_WORKERS=auto; 'off' says nothing)"
            )


def why_not_in_workers(loader: DataLoader[Any]) -> str:
    """Why a loader's data set cannot be in other processes, as far as can be seen; "": it can."""
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which can have none"
    context = getattr(loader.multiprocessing_context, "_name", None) or (
        multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    )
    looked: set[int] = set()
    around: list[Any] = [loader.dataset, loader.collate_fn]
    for _ in range(_DEEP):
        around = [one for one in around if id(one) not in looked]
        looked.update(map(id, around))
        if any(isinstance(one, torch.Tensor) and one.is_cuda for one in around):
            return f"the data set, a {type(loader.dataset).__name__}, holds tensors of a GPU"
        around = [value for one in around for value in _inside(one)]
    if context != "fork":
        try:
            pickle.dumps((loader.dataset, loader.collate_fn))
        except Exception as error:
            return f"they would be started by {context!r}, and the data set cannot be pickled: {error}"
    return ""


def _inside(one: Any) -> list[Any]:
    """What an object holds itself, of a long list the first ones."""
    if isinstance(one, (list, tuple)):
        return list(one[:_LONG])
    if isinstance(one, dict):
        return list(islice(one.values(), _LONG))
    if isinstance(one, (type, ModuleType)):
        return []
    return list(getattr(one, "__dict__", {}).values())


def _said(chosen: Sequence[tuple[int, int]]) -> str:
    return f"{', '.join(str(workers) for workers, _ in chosen)} workers" if chosen else "none"


def _cores(one: _Look, everybody: Sequence[_Look]) -> float:
    """That a rank has: its quota, or its part of the cores on which it may run, with others of its host."""
    sharing = sum(other.host == one.host and not set(other.cores).isdisjoint(one.cores) for other in everybody)
    return min(one.quota, len(one.cores) / max(1, sharing))
