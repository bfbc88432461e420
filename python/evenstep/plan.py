"""Measuring steps of `evenstep plan`: who runs how much in them, what was seen, and the prediction.

All ranks run in every measuring step, so that what they take from one another (memory bandwidth, power, cores) is in
the figures as it is in training.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep._core import Balancer, EvenstepError, balance
from evenstep.plan_without import without_ranks

FORMAT = "evenstep-plan-1"
DEFAULT_STEPS = 8
# How far a rank's share is moved away from the predicted one, so that its time per sample and its fixed time can be
# told apart.
TILT = 0.3
# The balanced split must promise this part of the step over the equal one, and a job without some ranks over one with all.
LEAST_GAIN = 0.01
# From so many measured sizes of a rank on its times are a table of these, and not a straight line.
SHAPE_FROM = 4


class Plan:
    """The plan of one job, on one rank.

    The session asks :meth:`shares` for each step, calls :meth:`observe` with the timings that all ranks exchanged in
    the step's commit, and :meth:`finish` once :attr:`done`. Every rank must make the same calls with the same timings,
    then all decide alike without a leader.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        batch: int,
        device: str,
        path: str | os.PathLike[str],
        steps: int = DEFAULT_STEPS,
        speeds: Sequence[float] | None = None,
        caps: Sequence[int | None] | None = None,
        buckets: Sequence[int | None] | None = None,
    ) -> None:
        if steps < 4:
            raise ValueError(f"a plan wants at least 4 measuring steps, not {steps}: set EVENSTEP_PLAN_STEPS higher")
        self.rank = rank
        self.world_size = world_size
        self.batch = batch
        self.device = device
        self.path = Path(path)
        self.steps = steps
        self._caps = list(caps or [None] * world_size)  # most samples of each rank
        self._buckets = list(buckets or [None] * world_size)
        self._balancer = Balancer("hybrid", world_size, batch, speeds=speeds, caps=self._caps, buckets=self._buckets)
        self._equal = Balancer("equal", world_size, batch, caps=self._caps)
        self._decided: dict[int, list[int]] = {}
        self._timings: list[list[tuple[int, float]]] = []
        self._memory: dict[int, int] = {}
        self._first_memory = 0  # the first step's peak: caches and workspaces are made then, whatever the share
        # of each step: shares, seconds, and those beside the slowest rank's work
        self._whole: list[tuple[list[int], float, float]] = []
        self._waits: list[float] = []  # the same: of these, what ranks waited for one another before all were done
        reset_peak_memory(device)

    @classmethod
    def from_environment(
        cls,
        *,
        rank: int,
        world_size: int,
        batch: int,
        device: str,
        speeds: Sequence[float] | None = None,
        caps: Sequence[int | None] | None = None,
        buckets: Sequence[int | None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Plan | None:
        """The plan that `evenstep plan` asks for with EVENSTEP_PLAN and EVENSTEP_PLAN_STEPS; None in training."""
        values = os.environ if environment is None else environment
        path = values.get("EVENSTEP_PLAN")
        if not path:
            return None
        text = values.get("EVENSTEP_PLAN_STEPS", str(DEFAULT_STEPS))
        try:
            steps = int(text)
        except ValueError:
            raise ValueError(f"EVENSTEP_PLAN_STEPS={text!r} is not a whole number") from None
        return cls(
            rank=rank,
            world_size=world_size,
            batch=batch,
            device=device,
            path=path,
            steps=steps,
            speeds=speeds,
            caps=caps,
            buckets=buckets,
        )

    @property
    def done(self) -> bool:
        """Whether enough steps were observed."""
        return len(self._timings) >= self.steps

    def shares(self, step: int, batch: int | None = None) -> list[int]:
        """Shares of measuring step `step` (the first is 0); once decided they stay, whatever is learned later."""
        if step not in self._decided:
            self._decided[step] = self._decide(step, self.batch if batch is None else batch)
        return list(self._decided[step])

    def _decide(self, step: int, batch: int) -> list[int]:
        if step < 2:  # the first is warm-up, the second tells the speeds
            return self._equal.shares(batch)
        turn = (step - 2) % 6
        if turn == 5:
            return self._equal.shares(batch)
        predicted = self._balancer.shares(batch)
        moved = predicted if turn in (0, 2, 4) else tilted(predicted, batch, upwards=turn == 1)
        held = all(cap is None or share <= cap for share, cap in zip(moved, self._caps))
        return moved if held else predicted

    def observe(
        self, timings: Sequence[tuple[int, float]], step_seconds: float | None = None, passes: Sequence[float] = ()
    ) -> None:
        """Takes a step: (samples, busy seconds) of every rank, and the wall time of the step where it is known. passes: busy seconds
        with what was waited for others within the step; 0: nothing was."""
        timings = [(int(samples), float(seconds)) for samples, seconds in timings]
        first = not self._timings
        self._timings.append(timings)
        own, peak = timings[self.rank][0], peak_memory(self.device)
        reset_peak_memory(self.device)
        if first:
            self._first_memory = peak
            return  # warm-up: lazy initialisation is no property of the rank
        self._memory[own] = max(self._memory.get(own, 0), peak)
        self._balancer.observe(timings)
        if step_seconds is not None and math.isfinite(step_seconds):
            busy = max(seconds for _, seconds in timings)
            beside = max(0.0, step_seconds - busy)
            self._waits.append(max(0.0, max(passes, default=0.0) - busy))
            self._whole.append(([samples for samples, _ in timings], step_seconds, beside))

    def finish(self, all_gather_bytes: Callable[[bytes], list[bytes]]) -> None:
        """Gathers what only each rank knows; rank 0 writes the plan. Ends the process: raises SystemExit(0)."""
        mine = {"device": self.device, "first_memory": self._first_memory, "memory": sorted(self._memory.items())}
        everyone = [json.loads(data) for data in all_gather_bytes(json.dumps(mine).encode())]
        if self.rank == 0:
            write_plan(self.path, self.result(everyone))
        raise SystemExit(0)

    def result(self, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The plan as plan.json has it, from the device and memory of each rank."""
        measured = [self._measured(rank) for rank in range(self.world_size)]
        models = [self._table(rank, measured[rank]) for rank in range(self.world_size)]
        shares, step = balance(models, self.batch, self._caps, buckets=self._buckets)
        equal = self._equal.shares()
        busy_for = [
            lambda samples, table=table, bucket=bucket or 1: seconds_at(table, -(-samples // bucket) * bucket)
            for table, bucket in zip(models, self._buckets)
        ]
        equal_step = max(busy_for[rank](share) for rank, share in enumerate(equal))
        of_equal = self._overhead(equal) - self._overhead(shares) if any(self._waits) else 0.0
        if (equal_step + of_equal) * (1 - LEAST_GAIN) <= step:  # equal ranks: prefer what every other tool does
            shares, step, of_equal = equal, equal_step, 0.0
        overhead = self._overhead(shares)
        least = max(LEAST_GAIN * (step + overhead), self._missed(busy_for))
        without = without_ranks(
            models,
            busy_for,
            self.batch,
            self._caps,
            self._buckets,
            overhead=overhead,
            together=step + overhead,
            least=least,
        )
        ranks = []
        bound = 0.0
        for rank in range(self.world_size):
            busy = busy_for[rank](shares[rank])
            bound += shares[rank] / busy if shares[rank] > 0 and busy > 0 else 0.0
            memory = [(int(samples), int(peak)) for samples, peak in everyone[rank]["memory"]]
            peaks = dict(memory)
            ranks.append(
                {
                    "rank": rank,
                    "device": everyone[rank]["device"],
                    "samples": [samples for samples, _ in measured[rank]],
                    "seconds": [seconds for _, seconds in measured[rank]],
                    "memory_bytes": [peaks.get(samples) for samples, _ in measured[rank]],
                    "peak_memory_bytes": extrapolate_memory(memory, shares[rank], int(everyone[rank]["first_memory"])),
                    "share": shares[rank],
                    "share_equal": equal[rank],
                    "predicted_seconds": busy,
                    "predicted_seconds_equal": busy_for[rank](equal[rank]),
                    **({"predicted_seconds_of_one": busy_for[rank](1)} if shares[rank] == 0 else {}),
                }
            )
        return {
            "format": FORMAT,
            "batch": self.batch,
            "steps": len(self._timings),
            "ranks": ranks,
            "predicted": {
                "balanced": pace(self.batch, step + overhead),
                "equal": pace(self.batch, equal_step + overhead + of_equal),
                "bound_samples_per_second": bound,
                "overhead_seconds": overhead,
                **({"waits_seconds": self._of_nearest(self._waits, shares)} if any(self._waits) else {}),
                **({"without": {"ranks": without[0], **pace(self.batch, without[1])}} if without else {}),
            },
        }

    def _overhead(self, shares: Sequence[int]) -> float:
        """Seconds of a step beside the slowest rank's work. What ranks wait for one another within steps depends on the split: it is
        that of the measured ones nearest to it."""
        besides = [beside for _, _, beside in self._whole]
        if any(self._waits):
            return self._of_nearest(besides, shares)
        return statistics.median(besides) if besides else 0.0

    def _of_nearest(self, values: Sequence[float], shares: Sequence[int]) -> float:
        """The median of those, one a step, whose steps had shares that are nearest to these."""
        away = [sum(abs(one - other) for one, other in zip(ran, shares)) for ran, _, _ in self._whole]
        return statistics.median(value for value, far in zip(values, away) if far == min(away))

    def _missed(self, busy_for: Sequence[Callable[[int], float]]) -> float:
        """By how many seconds what was measured of a step mostly differs from what is predicted of it."""
        missed = [
            abs(seconds - self._overhead(shares) - max(busy(share) for busy, share in zip(busy_for, shares)))
            for shares, seconds, _ in self._whole
        ]
        return statistics.median(missed) if missed else 0.0

    def _measured(self, rank: int) -> list[tuple[int, float]]:
        """The median seconds of each size that a rank ran, the warm-up step left out."""
        seen: dict[int, list[float]] = {}
        for timings in self._timings[1:]:
            samples, seconds = timings[rank]
            seen.setdefault(samples, []).append(seconds)
        return [(samples, statistics.median(seconds)) for samples, seconds in sorted(seen.items())]

    def _seconds(self, rank: int, samples: int) -> float:
        return self._balancer.predict(rank, samples)

    def _table(self, rank: int, measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """What was measured, where that was enough sizes to show a shape; else the learned line."""
        if sum(samples > 0 for samples, _ in measured) >= SHAPE_FROM:
            return shaped(measured, self._seconds(rank, 0), self._seconds(rank, self.batch), self.batch)
        points = sorted({0, 1, self.batch, *(samples for samples, _ in measured)})
        table = []
        least = 0.0
        for samples in points:
            least = max(least, self._seconds(rank, samples))
            table.append((samples, least))
        return table


def shaped(measured: Sequence[tuple[int, float]], idle: float, whole: float, batch: int) -> list[tuple[int, float]]:
    """Medians of measured sizes as a table that never falls: the nearest such one, by pooling neighbours that do (Ayer et al.,
    "An empirical distribution function for sampling with incomplete information", 1955). idle, whole: what is believed of no
    samples and of the whole batch, which the ends are taken from where they were not measured."""
    pools: list[tuple[float, list[int]]] = []
    for samples, seconds in measured:
        pools.append((seconds, [samples]))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (before, some), (last, more) = pools[-2:]
            mean = (before * len(some) + last * len(more)) / (len(some) + len(more))
            pools[-2:] = [(mean, some + more)]
    table = [(samples, seconds) for seconds, sizes in pools for samples in sizes]
    if table[0][0] > 0:
        table.insert(0, (0, min(idle, table[0][1])))
    if table[-1][0] < batch:
        table.append((batch, max(whole, table[-1][1])))
    return table


def seconds_at(table: Sequence[tuple[int, float]], samples: int) -> float:
    """As the solver reads a table that begins at 0."""
    (size, seconds), *more = table
    for next_size, next_seconds in more:
        if samples <= next_size or (next_size, next_seconds) == table[-1]:
            return seconds + (next_seconds - seconds) * (samples - size) / (next_size - size)
        size, seconds = next_size, next_seconds
    return seconds


def pace(batch: int, step_seconds: float) -> dict[str, float]:
    """Step time and throughput, as plan.json has them."""
    return {
        "step_seconds": step_seconds,
        "samples_per_second": batch / step_seconds if step_seconds > 0 else math.inf,
    }


def tilted(shares: Sequence[int], batch: int, *, upwards: bool) -> list[int]:
    """`shares` with every other rank moved up and the rest down; the sum stays."""
    factors = [1 + TILT if (rank % 2 == 0) == upwards else 1 - TILT for rank in range(len(shares))]
    # a rank that has none is tried with one sample, to see its time at all
    wanted = [max(share, 1) * factor for share, factor in zip(shares, factors)]
    return apportion(wanted, batch)


def apportion(weights: Sequence[float], batch: int) -> list[int]:
    """`batch` in whole samples in proportion to `weights` (largest remainders, ties to the lower rank)."""
    total = math.fsum(weights)
    exact = [batch * weight / total for weight in weights]
    shares = [math.floor(value) for value in exact]
    order = sorted(range(len(weights)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in order[: batch - sum(shares)]:
        shares[rank] += 1
    return shares


def extrapolate_memory(measured: Sequence[tuple[int, int]], samples: int, first: int = 0) -> int | None:
    """Peak memory of a run at `samples`: measured there, else on the least-squares line through what was measured.

    At least `first`, the first step's, which every run has.
    """
    known = [(size, peak) for size, peak in measured if peak > 0]
    if not known:
        return None
    if samples in dict(known):
        return max(first, dict(known)[samples])
    mean_size = statistics.fmean(size for size, _ in known)
    mean_peak = statistics.fmean(peak for _, peak in known)
    width = math.fsum((size - mean_size) ** 2 for size, _ in known)
    slope = math.fsum((size - mean_size) * (peak - mean_peak) for size, peak in known) / width if width > 0 else 0.0
    line = mean_peak + max(0.0, slope) * (samples - mean_size)
    # more samples never need less than fewer did
    return round(max([line, first, *(peak for size, peak in known if size <= samples)]))


def peak_memory(device: str) -> int:
    """Most bytes held since :func:`reset_peak_memory`: the process's resident memory, or the GPU's allocations."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        return int(torch.cuda.max_memory_allocated())
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def reset_peak_memory(device: str) -> None:
    """Starts a new peak."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # a kernel without it: the peak is that of the whole run
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def write_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Writes plan.json whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise EvenstepError(
            f"the plan could not be written to {path}: {error.strerror}\n  fix: choose another file with -o"
        ) from error
