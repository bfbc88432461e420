"""What `evenstep bench balance` measures on each rank: real trainings of ranks that are made unequal while they run.

The program starts it as ``-m evenstep.bench_balance`` on every rank of a job; rank 0 writes what was measured, with what the
program simulated (--simulated), to the file that EVENSTEP_BENCH_OUT names: after each part, so that a bench that is interrupted
leaves what it has measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import bench_balance_report, bench_heading
from evenstep.bench_awake import awake
from evenstep.bench_balance_bound import Bound, Lines, best_split, split_seconds
from evenstep.bench_balance_courses import NAMES, Courses, different
from evenstep.bench_balance_minutes import LEAST_STEPS, MOST_STEPS, Length
from evenstep.bench_balance_noise import Noise
from evenstep.bench_balance_steady import MEASURED, SELDOM, Steady, judged

if TYPE_CHECKING:
    from evenstep.bench_modes import Alone, Even, Plain, Single, Turn
    from evenstep.bench_slowing import Slowing
    from evenstep.session import Session

DEFAULT_SPEEDS = {
    2: "1:1,2:1,4:1,16:1",
    3: "1:1:1,4:2:1",
    4: "1:1:1:1,12.7:9.1:3:3",  # RTX 3060, RTX 3050, GTX 1650, GTX 1650 by their makers' figures for fp32
    5: "1:1:1:1:1,16:8:4:2:1",
}
SLOWER = 4  # times, in mid-run
BEFORE, AFTER, RUNS = 15, 40, 3  # steps before the change and after each, and how often
BACK, HELD = 0.9, 3  # of the new optimum, for so many steps
SETTLE = 6  # turns before what is measured of a policy counts
OVERHEAD_STEPS = 1000

Keep = Callable[[dict[str, Any], list[str]], None]


@dataclasses.dataclass
class Part:
    name: str
    kind: str  # the list of the report that its rows are in
    measure: Callable[[], list[dict[str, Any]]]
    seconds: float  # that it is expected to take


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="both")
    parser.add_argument("--policies", default="equal,proportional,dynamic,hybrid,auto")
    parser.add_argument("--speeds", default="")
    parser.add_argument("--courses", default="steady,slowing,drifting,bursty,noise")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--slow-by", default="quota")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--model-sizes", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--batch-norm", default="sync")
    parser.add_argument("--simulated", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 0.1)
    options.settle = 1 if options.quick else SETTLE
    return options


class Bench:
    """One rank of the real part."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from evenstep.bench_modes import Alone, Plain, Single
        from evenstep.bench_slowing import slowing
        from evenstep.bench_work import Work
        from evenstep.session import whole_session

        self.options = options
        self.policies = list(dict.fromkeys(options.policies.split(",")))
        dist.init_process_group("evenstep")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.base: Session = whole_session()
        self.base.join()
        self.group = dist.new_group(backend="gloo")
        self.seconds_of: dict[Any, float] = {}  # of a mode's last step
        self.slowing: Slowing = slowing(options.slow_by)
        self.scale = self._make_room()
        torch.set_num_threads(len(os.sched_getaffinity(0)) if self.scale == 1.0 else 1)
        self.work = Work(
            options.batch, options.quick, options.model, options.model_sizes, options.data, options.batch_norm
        )
        self.alone: Alone = Alone(self.work, self.group, self.base.environment)
        self.single: Single = Single(self.work, self.group)
        self.plain: Plain | None = None if options.no_peers else Plain(self.work, self.group)

    def _make_room(self) -> float:
        """The part of a core that the fastest rank may have, where there are more ranks than cores."""
        cores = len(os.sched_getaffinity(os.getppid()))
        if self.ranks <= cores:
            return 1.0
        if self.options.slow_by != "quota":
            sys.exit(f"evenstep bench balance: busy neighbours need a core for each of the {self.ranks} ranks")
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        return 0.9 * cores / self.ranks

    def close(self) -> None:
        """DDP's model goes before its group: were DDP's reducer, which is freed with the interpreter's lock held, the last to
        hold a Gloo group, then freeing it would wait for that group's thread, which may wait for the lock."""
        self.plain = None
        gc.collect()

    def say(self, words: str) -> None:
        if self.rank == 0:
            print(words, file=sys.stderr, flush=True)

    # -- turns --

    def turn(self, mode: Any, call: Callable[[int], Turn], seconds: float | None = None) -> Turn:
        """A turn of about so many seconds; the same number of steps on every rank."""
        wanted = seconds or self.options.seconds
        steps = round(wanted / self.seconds_of.get(mode, wanted / LEAST_STEPS))
        found = call(self.agreed(min(MOST_STEPS, max(LEAST_STEPS, steps))))
        self.seconds_of[mode] = max(found.step, 1e-6)
        return found

    def long(self, mode: Any) -> bool:
        """Whether a turn of it is so much longer than it is to be that it runs seldom."""
        from evenstep.bench_work import WARM_UP

        return (LEAST_STEPS + WARM_UP) * self.seconds_of.get(mode, 0.0) > SELDOM * self.options.seconds

    def settle(self, evens: Mapping[str, Even]) -> None:
        """Until they have learned how fast the ranks are."""
        for _ in range(self.options.settle):
            for policy, even in evens.items():
                self.turn(policy, even.turn, self.options.seconds / 2)

    def agreed(self, value: Any) -> Any:
        """Rank 0's."""
        from evenstep.group import TorchGroup, gather_objects

        return gather_objects(TorchGroup(self.group), value)[0]

    def bound(self, speeds: Sequence[float]) -> Bound:
        """Of ranks that have these speeds from now on."""
        self.hold(speeds)
        found = Bound(self.alone.step_seconds, self.options.batch, self.options.seconds / 2)
        found.learn(rounded(speeds, self.options.batch))
        return found

    def hold(self, speeds: Sequence[float]) -> None:
        import torch.distributed as dist

        self.slowing.hold(self.scale * speeds[self.rank])
        dist.barrier(group=self.group)

    # -- a rank slows in mid-run --

    def changes(self, policies: Sequence[str]) -> list[dict[str, Any]]:
        """Of the last rank, from as fast as the others to SLOWER times slower and back; each policy that measures."""
        from evenstep.bench_modes import Even

        batch, fast = self.options.batch, [1.0] * self.ranks
        slow = [*fast[1:], 1.0 / SLOWER]
        slow_lines, fast_lines = self.bound(slow).lines, self.bound(fast).lines
        found = []
        for policy in policies:
            even = Even(self.work, policy, fast, self.base)
            self.seconds_of.clear()
            self.settle({policy: even})
            runs = [self._change(even, fast, slow) for _ in range(1 if self.options.quick else RUNS)]
            even.close()
            found.append(change_row(policy, runs, fast_lines, slow_lines, batch))
        return found

    def _change(self, even: Even, fast: Sequence[float], slow: Sequence[float]) -> Turn:
        after = 8 if self.options.quick else AFTER

        def before(step: int) -> None:
            if step == BEFORE:
                self.slowing.hold(self.scale * slow[self.rank])
            elif step == BEFORE + after:
                self.slowing.hold(self.scale * fast[self.rank])

        return even.turn(BEFORE + 2 * after, before)

    def overhead(self) -> dict[str, float]:
        from evenstep.bench_balance_overhead import Overhead

        return Overhead(self.base, self.options.batch).measure(64 if self.options.quick else OVERHEAD_STEPS)

    def run(self, keep: Keep) -> None:
        """All parts, one after the other; `keep` is handed what there is after each, and the names of those that are to come."""
        options = self.options
        cases = options.speeds or DEFAULT_SPEEDS.get(self.ranks, ":".join(["1"] * self.ranks))
        cases = "2:1" if options.quick and not options.speeds and self.ranks == 2 else cases
        found: dict[str, Any] = {
            "ranks": self.ranks,
            "cores": len(os.sched_getaffinity(os.getppid())),
            "slowed_by": options.slow_by,
            "batch": options.batch,
            "rounds": options.rounds,
            "model": self.work.about(),
            "rows": [],
            "changes": [],
            "courses": [],
            "noise": [],
            "core_part": self.scale,
            "minutes": {},
            "overhead": self.overhead(),
        }
        parts = self._parts(cases.split(","), options.courses.split(","), self._length())
        if not options.quick:
            self.say(f"about {told_minutes(sum(part.seconds for part in parts))} on this machine:")
            for part in parts:
                self.say(f"  {told_minutes(part.seconds):>8}  {part.name}")
        left = [part.name for part in parts]
        for part in parts:
            self.say(f"{part.name}:")
            began = time.monotonic()
            found[part.kind] += part.measure()
            found["minutes"][part.name] = round((time.monotonic() - began) / 60, 1)
            self.say(f"  took {found['minutes'][part.name]} min")
            left.remove(part.name)
            keep(found, left)
        if not parts:
            keep(found, left)
        self.slowing.close()

    def _length(self) -> Length:
        options = self.options
        each = max(1, options.batch // self.ranks)
        self.hold([1.0] * self.ranks)
        rate = each / statistics.fmean(self.alone.step_seconds([each] * self.ranks, options.seconds / 2))
        peers = self.plain is not None
        return Length(rate, options.batch, options.seconds, options.rounds, options.settle, self.policies, peers)

    def _parts(self, cases: Sequence[str], courses: Sequence[str], length: Length) -> list[Part]:
        """In this order: what the numbers are made of first."""
        found: list[Part] = []
        measured = [one for one in different(self.policies) if one in MEASURED]
        steady, course, noise = Steady(self), Courses(self), Noise(self)
        if "steady" in courses:
            for name in cases:
                run = functools.partial(steady.run, name)
                found.append(Part(f"speeds {name}", "rows", run, length.steady(speeds_of(name))))
        if "slowing" in courses and measured:
            name = f"a rank becomes {SLOWER} times slower in mid-run, and recovers"
            seconds = length.slowing(self.ranks, SLOWER, BEFORE, AFTER, RUNS)
            found.append(Part(name, "changes", functools.partial(self.changes, measured), seconds))
        if "noise" in courses and measured:
            run = functools.partial(noise.run, [judged(measured)])
            found.append(Part(noise.case, "noise", run, length.noise(speeds_of(noise.name), 1)))
        first = True
        for name, words in NAMES.items():
            if name in courses:
                seconds = length.course(name, self.ranks, first)
                found.append(Part(words, "courses", functools.partial(course.run, name), seconds))
                first = False
        return found


def told_minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def speeds_of(name: str) -> list[float]:
    """ "4:1" -> [1.0, 0.25]"""
    speeds = [float(one) for one in name.split(":")]
    return [speed / max(speeds) for speed in speeds]


def rounded(speeds: Sequence[float], batch: int) -> list[int]:
    return [max(1, round(batch * speed / sum(speeds))) for speed in speeds]


def steps_until_back(efficiency: Sequence[float]) -> int | None:
    """Steps from a change on until the split is as good as BACK of the optimum, for HELD steps."""
    good = 0
    for step, one in enumerate(efficiency):
        good = good + 1 if one >= BACK else 0
        if good == HELD:
            return step - HELD + 1
    return None


def change_row(policy: str, runs: Sequence[Turn], fast: Lines, slow: Lines, batch: int) -> dict[str, Any]:
    """By the shares that ran and the speeds that were measured, so that one late step is no bad split."""
    from evenstep.bench_modes import usage_of

    ideal = {"fast": best_split(fast, batch)[1], "slow": best_split(slow, batch)[1]}
    slowed, recovered, course, rates, parts = [], [], [], [], []
    for run in runs:
        shares = run.shares
        after = (len(shares) - BEFORE) // 2
        part = [
            ideal["slow"] / split_seconds(slow, one)
            if BEFORE <= step < BEFORE + after
            else ideal["fast"] / split_seconds(fast, one)
            for step, one in enumerate(shares)
        ]
        slowed.append(steps_until_back(part[BEFORE : BEFORE + after]))
        recovered.append(steps_until_back(part[BEFORE + after :]))
        course.append(part)
        best = after * ideal["slow"] + (len(shares) - after) * ideal["fast"]
        rates.append(batch * len(shares) / sum(run.seconds))
        parts.append(best / sum(run.seconds))
    length, after = len(runs[0].shares), (len(runs[0].shares) - BEFORE) // 2
    return {
        "case": f"the last rank {SLOWER} times slower for a while",
        "course": "slowing",
        "ranks": len(fast),
        "policy": policy,
        "samples_per_second": statistics.median(rates),
        "bound_samples_per_second": batch * length / (after * ideal["slow"] + (length - after) * ideal["fast"]),
        "of_bound": statistics.median(parts),
        **usage_of(runs),
        "steps_after_slowing": slowed,
        "steps_after_recovery": recovered,
        "changes_at": [BEFORE, BEFORE + after],
        "efficiency": course[0],
        "step_seconds": list(runs[0].seconds),
        "shares": [list(one) for one in runs[0].shares],
    }


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_of(
    options: argparse.Namespace, top: dict[str, str], real: dict[str, Any] | None, left: Sequence[str] = ()
) -> dict[str, Any]:
    simulated = None
    if options.only != "real" and options.simulated:
        simulated = json.loads(Path(options.simulated).read_text(encoding="utf-8"))
    report: dict[str, Any] = {"format": "evenstep-bench-balance-1", **top, "quick": options.quick, "left": list(left)}
    report["judged"] = judged(options.policies.split(","))
    report |= {"real": real, "simulated": simulated}
    report["aims"] = bench_balance_report.aims(report)
    report["table"] = bench_balance_report.table(report)
    report["csv"] = bench_balance_report.csv_text(report)
    return dict(finite(report))


def keep(options: argparse.Namespace, top: dict[str, str], real: dict[str, Any] | None, left: list[str]) -> None:
    """On rank 0 the report of what there is; `left`: what is not measured yet."""
    if os.environ.get("RANK", "0") != "0":
        return
    out = Path(os.environ["EVENSTEP_BENCH_OUT"])
    whole = out.with_name(out.name + ".new")
    whole.write_text(json.dumps(report_of(options, top, real, left)), encoding="utf-8")
    whole.replace(out)


def main() -> None:
    options = arguments()
    top = bench_heading.heading()
    if options.only == "simulated":
        keep(options, top, None, [])
        return
    with awake() as cores:
        top["hardware"] += f", which {cores}"
        bench = Bench(options)
        top["software"] = bench_heading.software()
        bench.run(functools.partial(keep, options, top))
    import torch.distributed as dist

    bench.base.group.barrier()
    bench.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
