"""es.prepare(workers="auto"): how many workers each rank's loader gets, by what loading took of its first steps, and whether steps
are shorter so; else none again. Where nobody asked, rank 0 says once that it would help.

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
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

STEPS = 8  # measured, after those that warm up
WARM_UP = 2
MATTERS = 0.05  # of a step
HEADROOM = 1.25
MANY = 1 << 16
_DEEP, _LONG = 6, 64  # of what is in a data set
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


class WorkerSizing:
    """Of one loader, until it has decided. Alike on all ranks."""

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]] | None,
        why_not: Callable[[], str],
        tell: Callable[[str], None],
        reopens: Callable[[], bool] = lambda: True,
        most: int = MANY,
    ) -> None:
        """gather: of all ranks; None: only says what would help. why_not: why the data set cannot go to workers, "": it can.
        tell: for people, once a job. reopens: whether the epoch can be opened again where it is. most: workers of a rank."""
        self._rank, self._gather, self._why_not, self._tell = rank, gather, why_not, tell
        self._reopens, self._most = reopens, most
        self.reopens = False  # with what was chosen last, on all ranks; else the next epoch begins with it
        self._steps: list[tuple[float, float, float, float]] = []
        self._loading = self._computing = 0.0
        self._step = -1
        self._since = self._blocked = 0.0
        self._asked = 0.0, 0.0
        self._without = math.nan  # seconds of a step without workers, once they are tried
        self._opened = True  # an iteration, since there are others
        self.decided = False

    @property
    def asked(self) -> bool:
        """Whether it chooses, and does not only say what would help."""
        return self._gather is not None

    def ask(self) -> None:
        """A batch is asked for."""
        self._asked = time.perf_counter(), time.process_time()

    def arrive(self) -> None:
        self._loading += time.perf_counter() - self._asked[0]
        self._computing += time.process_time() - self._asked[1]

    def open(self) -> None:
        """An iteration is opened: with the workers that were chosen."""
        self._opened = True
        self._step = -1  # what lies between two iterations is no part of a step
        self._loading = self._computing = 0.0

    def step(self, step: int, blocked_seconds: float) -> list[tuple[int, int]] | None:
        """Between two batches. Where that is news: the workers of each rank and batches ahead of each; [] where none are to
        be. Collective then."""
        if step == self._step or not self._opened:
            return None  # accumulation
        now = time.perf_counter()
        if self._step >= 0:
            whole = now - self._since
            work = whole - self._loading - (blocked_seconds - self._blocked)
            self._steps.append((self._loading, max(0.0, work), self._computing, whole))
        self._step, self._since, self._blocked = step, now, blocked_seconds
        self._loading = self._computing = 0.0
        if len(self._steps) < WARM_UP + STEPS:
            return None
        medians = [statistics.median(column) for column in zip(*self._steps[WARM_UP:])]
        self._steps = []
        if self._gather is None:
            self.decided = True
            self._advise(*medians[:3])
            return None
        return (
            self._judge(self._gather, medians) if math.isnan(self._without) else self._look_back(self._gather, medians)
        )

    def _judge(self, gather: Callable[[Any], list[Any]], medians: Sequence[float]) -> list[tuple[int, int]]:
        everybody = gather((*medians[:3], _allowed(), os.uname().nodename, sorted(os.sched_getaffinity(0)), medians[3]))
        ranks = [Measured(one[0], one[1], one[2] / max(one[0], 1e-9), _cores(one, everybody)) for one in everybody]
        chosen = sizes(ranks, self._most)
        why_not = self._agree(gather) if chosen else ""
        self.decided = not chosen or bool(why_not)
        if not chosen:
            return []
        most = max(range(len(ranks)), key=lambda rank: ranks[rank].loading)
        part = ranks[most].loading / (ranks[most].loading + ranks[most].work)
        words = f"loading took {100 * part:.0f}% of the first steps of rank {most}"
        if why_not:
            self._tell(f"{words}, and no workers load for it: {why_not}")
            return []
        self._without, self._opened = statistics.median(one[6] for one in everybody), False
        self._tell(
            f"{words}: from now on {', '.join(str(workers) for workers, _ in chosen)} workers load for the ranks"
        )
        return chosen

    def _look_back(self, gather: Callable[[Any], list[Any]], medians: Sequence[float]) -> list[tuple[int, int]] | None:
        """No regret."""
        self.decided = True
        with_them = statistics.median(gather(medians[3]))
        seconds = f"{1e3 * with_them:.3g} ms, {1e3 * self._without:.3g} ms before"
        if with_them < self._without:
            self._tell(f"steps with workers take {seconds}")
            return None
        self._agree(gather)
        self._tell(f"steps with workers take {seconds}: none load from now on")
        return []

    def _agree(self, gather: Callable[[Any], list[Any]]) -> str:
        """Why not, of the first rank that knows."""
        told = gather((self._why_not(), self._reopens()))
        self.reopens = all(reopens for _, reopens in told)
        return next((why_not for why_not, _ in told if why_not), "")

    def _advise(self, loading: float, work: float, computing: float) -> None:
        cores = min(
            _allowed(), len(os.sched_getaffinity(0)) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
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


def _cores(one: Any, everybody: Sequence[Any]) -> float:
    """That a rank has: its quota, or its part of the cores on which it may run, with others of its host."""
    _, _, _, quota, host, mask = one[:6]
    sharing = sum(other[4] == host and not set(other[5]).isdisjoint(mask) for other in everybody)
    return min(quota, len(mask) / max(1, sharing))


def _allowed(root: str = "") -> float:
    """CPU seconds a second that control groups allow this process; infinite where they do not say."""
    least = math.inf
    try:
        lines = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return least
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = Path(f"{root}/sys/fs/cgroup{'/' + 'cpu' if controllers else ''}")
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            least = min(least, _quota(group))
            if group == top:
                break
    return least


def _quota(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period")
            )
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
