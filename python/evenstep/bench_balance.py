"""What `evenstep bench balance` measures on each rank: real trainings of ranks that are made unequal while they run.

The program starts it as ``-m evenstep.bench_balance`` on every rank of a job; rank 0 writes what was measured, with what the
program simulated (--simulated), to the file that EVENSTEP_BENCH_OUT names: after each part, so that a bench that is interrupted
leaves what it has measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import bench_balance_report
from evenstep.bench_balance_courses import NAMES, Courses
from evenstep.bench_balance_noise import Noise, tried

if TYPE_CHECKING:
    from evenstep.bench_modes import Alone, Even, Plain, Single, Turn
    from evenstep.bench_slowing import Slowing
    from evenstep.session import Session

MEASURED = ("dynamic", "hybrid", "auto")  # policies that follow what is measured
DEFAULT_SPEEDS = {
    2: "1:1,2:1,4:1,16:1",
    3: "1:1:1,4:2:1",
    4: "1:1:1:1,12.7:9.1:3:3",  # RTX 3060, RTX 3050, GTX 1650, GTX 1650 by their makers' figures for fp32
    5: "1:1:1:1:1,16:8:4:2:1",
}
SLOWER = 4  # times, in mid-run
BEFORE, AFTER = 15, 40  # steps before the change and after each
BACK, HELD = 0.9, 3  # of the new optimum, for so many steps
MOST_STEPS = 40  # of a turn, so that none lasts long after its ranks became fast
OVERHEAD_STEPS = 1000

Lines = list[tuple[float, float]]  # (fixed seconds, seconds a sample) of each rank
Part = tuple[str, str, Callable[[], list[dict[str, Any]]]]
Keep = Callable[[dict[str, Any], list[str]], None]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="both")
    parser.add_argument("--policies", default="equal,proportional,dynamic,hybrid,auto")
    parser.add_argument("--speeds", default="")
    parser.add_argument("--courses", default="steady,slowing,drifting,bursty,noise")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.2)
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
    options.settle = 1 if options.quick else 6
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
        self._seconds: dict[Any, float] = {}  # of a mode's last step
        self.slowing: Slowing = slowing(options.slow_by)
        self.scale = self._make_room()
        torch.set_num_threads(len(os.sched_getaffinity(0)) if self.scale == 1.0 else 1)
        self.work = Work(
            options.batch, options.quick, options.model, options.model_sizes, options.data, options.batch_norm
        )
        self.alone: Alone = Alone(self.work, self.group)
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

    def say(self, words: str) -> None:
        if self.rank == 0:
            print(words, file=sys.stderr, flush=True)

    # -- turns --

    def turn(self, mode: Any, call: Callable[[int], Turn], seconds: float | None = None) -> Turn:
        """A turn of about so many seconds; the same number of steps on every rank."""
        wanted = seconds or self.options.seconds
        found = call(self.agreed(min(MOST_STEPS, max(3, round(wanted / self._seconds.get(mode, wanted / 3))))))
        self._seconds[mode] = max(found.step, 1e-6)
        return found

    def lines(self, split: Sequence[int]) -> Lines:
        return self.alone.lines(split, self.options.seconds)

    def hold(self, speeds: Sequence[float]) -> None:
        import torch.distributed as dist

        self.slowing.hold(self.scale * speeds[self.rank])
        dist.barrier(group=self.group)

    # -- a case: ranks of these speeds --

    def case(self, name: str) -> list[dict[str, Any]]:
        from evenstep.bench_modes import Even, best_split
        from evenstep.shares import equal_shares

        batch = self.options.batch
        speeds = speeds_of(name)
        self._seconds.clear()
        self.hold(speeds)
        guess = [max(1, round(batch * speed / sum(speeds))) for speed in speeds]
        split, _ = self.agreed(best_split(self.lines(guess), batch))
        evens = {policy: Even(self.work, policy, speeds, self.base) for policy in self.policies}
        turns: dict[str, Callable[[], Turn]] = {}
        for policy, even in evens.items():
            turns[policy] = lambda one=even: self.turn(one, one.turn)  # type: ignore[misc]
        splits: dict[str, list[int]] = {}
        if self.plain is not None:
            splits = {"ddp": equal_shares(batch, self.ranks), "hand": self._hand_tuned(split)}
        for kind, parts in splits.items():
            turns[kind] = lambda kind=kind, parts=parts: self.turn(kind, lambda n: self.plain.turn(n, parts))  # type: ignore[misc, union-attr]
        turns["single"] = lambda: self.turn("single", self.single.turn)
        for _ in range(self.options.settle):
            for policy in evens:
                turns[policy]()
        rounds = [self._round(turns, split, number) for number in range(self.options.rounds)]
        for even in evens.values():
            even.close()
        rows = [row_of(name, kind, rounds, splits.get(kind), batch) for kind in turns]
        for row in rows:
            self.say(
                f"  {row['policy']:13s} {row['samples_per_second']:8.1f} samples/s, {row['of_bound']:.3f} of the best split"
            )
        return rows

    def agreed(self, value: Any) -> Any:
        """Rank 0's."""
        from evenstep.group import TorchGroup, gather_objects

        return gather_objects(TorchGroup(self.group), value)[0]

    def _hand_tuned(self, split: list[int]) -> list[int]:
        """The fastest split of those around the best one, tried as a patient user would."""
        from evenstep.shares import at_least_one

        split = at_least_one(split)  # DDP's ranks all have samples
        if self.options.quick:
            return split
        around = [one for one in tried(split) if min(one) > 0]
        rates: list[list[float]] = [[] for _ in around]
        for _ in range(4):
            for number, one in enumerate(around):
                took = self.turn(("scan", number), lambda n, one=one: self.plain.turn(n, one), self.options.seconds / 2)  # type: ignore[misc, union-attr]
                rates[number].append(1 / took.step)
        medians = [statistics.median(rate) for rate in rates]
        return list(self.agreed(around[medians.index(max(medians))]))

    def _round(self, turns: dict[str, Callable[[], Turn]], split: list[int], number: int) -> dict[str, Any]:
        """Each mode once, in another order each time, beside the speeds at that moment."""
        from evenstep.bench_modes import best_split

        names = ["lines", *turns]
        at = number % len(names)
        found: dict[str, Any] = {}
        for name in names[at:] + names[:at]:
            found[name] = self.lines(split) if name == "lines" else turns[name]()
        best, seconds = best_split(found["lines"], self.options.batch)
        return {"best_split": best, "bound": self.options.batch / seconds, **found}

    # -- a rank slows in mid-run --

    def changes(self, policies: Sequence[str]) -> list[dict[str, Any]]:
        """Of the last rank, from as fast as the others to SLOWER times slower and back; each policy that measures."""
        from evenstep.bench_modes import Even
        from evenstep.shares import equal_shares

        batch, fast = self.options.batch, [1.0] * self.ranks
        slow = [*fast[1:], 1.0 / SLOWER]
        self.hold(slow)
        slow_lines = self.lines(rounded(slow, batch))
        self.hold(fast)
        fast_lines = self.lines(equal_shares(batch, self.ranks))
        found = []
        for policy in policies:
            even = Even(self.work, policy, fast, self.base)
            self._seconds.clear()
            for _ in range(self.options.settle):
                self.turn(even, even.turn)
            runs = [self._change(even, fast, slow) for _ in range(1 if self.options.quick else 3)]
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

    # -- what balancing costs by itself --

    def overhead(self) -> dict[str, float]:
        """Seconds a step of what only balancing needs: drawing shares, looking at memory, learning from the step and from what
        memory holds, and the ranks' vote."""
        from evenstep.memory import HostMemory, MemoryWatch, RanksMemory
        from evenstep.shares import Shares
        from evenstep.vote import Ballot

        options, steps = self.options, 50 if self.options.quick else OVERHEAD_STEPS
        shares = Shares("auto", self.ranks, options.batch, [1.0] * self.ranks)
        watch = MemoryWatch(HostMemory())
        memory = RanksMemory(watch, [watch.pool] * self.ranks, self.rank)
        state, deciding = 1, 0.0
        for step in range(steps):
            began = time.perf_counter()
            drawn = shares.draw(options.batch, step=step)
            watch.stepped(step, drawn[self.rank], drawn)
            deciding += time.perf_counter() - began
            timings, ballots = [], []
            for rank, share in enumerate(drawn):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                timings.append((share, (1 + rank) * (0.002 + 0.001 * share) * (0.95 + 0.1 * state / 2**64)))
                ballots.append(Ballot(0, step, share, options.batch, timings[-1][1], 0.0, 1.0, 1, 1, 0, 0, 0, 0, 1))
            began = time.perf_counter()
            memory.heard(ballots)
            shares.observe(timings, 0.1)
            shares.turned()
            shares.left_out(timings)
            shares.take_memory(memory.reports(ballots, timings))
            deciding += time.perf_counter() - began
        record = bytes(128)
        self.base.group.barrier()
        voting = []
        for _ in range(steps):
            began = time.perf_counter()
            self.base.group.exchange(record)
            voting.append(time.perf_counter() - began)
        return {"deciding_seconds": deciding / steps, "vote_seconds": statistics.median(voting)}

    def run(self, keep: Keep) -> None:
        """All parts, one after the other; `keep` is handed what there is after each, and the names of those that are to come."""
        options = self.options
        cases = options.speeds or DEFAULT_SPEEDS.get(self.ranks, ":".join(["1"] * self.ranks))
        cases = "2:1" if options.quick and not options.speeds and self.ranks == 2 else cases
        measured = [one for one in self.policies if one in MEASURED]
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
            "overhead": self.overhead(),
        }
        courses = options.courses.split(",")
        parts = self._parts(cases.split(","), courses, measured)
        left = [name for name, _, _ in parts]
        for name, kind, measure in parts:
            self.say(f"{name}:")
            found[kind] += measure()
            left.remove(name)
            keep(found, left)
        if not parts:
            keep(found, left)
        self.slowing.close()

    def _parts(self, cases: Sequence[str], courses: Sequence[str], measured: Sequence[str]) -> list[Part]:
        """Name, under which of the report's lists, and how it is measured; in this order."""
        found: list[Part] = []
        if "steady" in courses:
            found += [(f"speeds {name}", "rows", functools.partial(self.case, name)) for name in cases]
        if "slowing" in courses and measured:
            name = f"a rank becomes {SLOWER} times slower in mid-run, and recovers"
            found.append((name, "changes", functools.partial(self.changes, measured)))
        course = Courses(self)
        found += [
            (words, "courses", functools.partial(course.run, name)) for name, words in NAMES.items() if name in courses
        ]
        if "noise" in courses and measured:
            noise = Noise(self)
            found.append((noise.case, "noise", functools.partial(noise.run, measured)))
        return found


def speeds_of(name: str) -> list[float]:
    """ "4:1" -> [1.0, 0.25]"""
    speeds = [float(one) for one in name.split(":")]
    return [speed / max(speeds) for speed in speeds]


def rounded(speeds: Sequence[float], batch: int) -> list[int]:
    return [max(1, round(batch * speed / sum(speeds))) for speed in speeds]


def interval(values: Sequence[float]) -> list[float]:
    """Between which their median is with 95 % confidence, by their order alone."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return [ordered[max(0, low)], ordered[min(len(ordered), high + 1) - 1]]


def row_of(
    name: str, kind: str, rounds: Sequence[dict[str, Any]], split: list[int] | None, batch: int
) -> dict[str, Any]:
    """A mode's figures in a case. Of plain PyTorch, whose waits nobody sees, utilisation is by the ranks' speeds."""
    from evenstep.bench_modes import seconds_of

    rates = [batch / one[kind].step for one in rounds]
    parts = [rate / one["bound"] for rate, one in zip(rates, rounds)]
    busy: list[list[float]] = []  # of a round: each rank's seconds a step
    for one in rounds:
        turn = one[kind]
        if turn.busy:
            busy.append([statistics.fmean(step[rank] for step in turn.busy) for rank in range(len(one["lines"]))])
        elif split is not None:
            busy.append([seconds_of(line, share) for line, share in zip(one["lines"], split)])
        else:
            busy.append([turn.step] + [0.0] * (len(one["lines"]) - 1))
    used = [[min(1.0, one / rounds[number][kind].step) for one in busy[number]] for number in range(len(rounds))]
    last = rounds[-1][kind].shares
    return {
        "case": name,
        "course": "steady",
        "ranks": len(rounds[0]["lines"]),
        "policy": kind,
        "samples_per_second": statistics.median(rates),
        "bound_samples_per_second": statistics.median(one["bound"] for one in rounds),
        "of_bound": statistics.median(parts),
        "of_bound_interval": interval(parts),
        "rates": rates,
        "utilisation": [statistics.median(one[rank] for one in used) for rank in range(len(used[0]))],
        "imbalance": statistics.median(max(one) / statistics.fmean(one) - 1 for one in busy),
        "shares": last[-1] if last else split or [batch] + [0] * (len(rounds[0]["lines"]) - 1),
        "best_split": rounds[-1]["best_split"],
    }


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
    from evenstep.bench_modes import best_split, split_seconds, usage_of

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


def heading() -> dict[str, str]:
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "hardware": f"{processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
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
    report |= {"real": real, "simulated": simulated}
    report["aims"] = bench_balance_report.aims(report)
    report["table"] = bench_balance_report.table(report)
    report["csv"] = bench_balance_report.csv_text(report)
    return dict(finite(report))


def software() -> Iterator[tuple[str, str]]:
    import torch

    yield "software", f"torch {torch.__version__}, Python {platform.python_version()}"


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
    top = heading()
    if options.only == "simulated":
        keep(options, top, None, [])
        return
    bench = Bench(options)
    top |= dict(software())
    bench.run(functools.partial(keep, options, top))
    import torch.distributed as dist

    bench.base.group.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
