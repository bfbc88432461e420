"""Training throughput on unequal and on equal CPU ranks, side by side with PyTorch, medians of alternating rounds.

    python bench/train_bench.py [--rounds 40] [--batch 32 64] [--policy auto] [--quick] [--only unequal|equal] [--json FILE] [--markdown FILE]

Unequal: two ranks, each pinned to its own core, rank 1 held to a quarter of its core by a CPU quota; for each global
batch in turn. Equal: two ranks, each pinned to its own core, the first of the batches. Every mode is a job of the same launcher (`evenstep run`); all stand ready
and take turns of a second or two, so that a round's figures were taken within some eight seconds: the speed of a shared
machine moves by a third within a minute.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from heading import heading
from train_gate import Job

BENCH = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"


class Jobs:
    """One job for each mode, all at their gates."""

    def __init__(self, args: argparse.Namespace, batch: int, quota: str | None, *modes: str) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self._jobs = {
                mode: stack.enter_context(Job(command(args, batch, quota, mode, folder), 2)) for mode in modes
            }
            for job in self._jobs.values():
                job.ready()
            self._stack = stack.pop_all()

    def __enter__(self) -> dict[str, Job]:
        return self._jobs

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]


def command(args: argparse.Namespace, batch: int, quota: str | None, mode: str, folder: str) -> list[str]:
    words = [PROGRAM, "run", "-n", "2", "--runs-dir", folder, "--name", mode, "--max-restarts", "0"]
    words += ["--python", sys.executable]
    words += ["--policy", args.policy] if mode == "evenstep" else ["--no-monitor"]
    words += ["--cpu-quota", quota] if quota else []
    words += [str(BENCH / "train_rank.py"), "--mode", mode, "--batch", str(batch), "--steps", str(args.steps)]
    return words


def seconds_at(table: dict, samples: int) -> float:
    """The least-squares line through the measured points, neither its start nor its slope below zero."""
    sizes, seconds = table["samples"], table["seconds"]
    size, second = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((b - size) ** 2 for b in sizes)
    slope = sum((b - size) * (t - second) for b, t in zip(sizes, seconds)) / spread if spread else second / size
    slope = min(max(slope, 0.0), second / size)
    return second + slope * (samples - size) if samples > 0 else 0.0


def best_split(tables: list[dict], batch: int) -> tuple[list[int], float]:
    """The best integer split for two ranks, by trying all of them, and its samples per second."""
    seconds, first = min((max(seconds_at(tables[0], b), seconds_at(tables[1], batch - b)), b) for b in range(batch + 1))
    return [first, batch - first], batch / seconds


def sizes_around(share: int) -> list[int]:
    """Four different batch sizes: each rank measures as many, as all meet before each."""
    sizes = {max(1, round(share * f)) for f in (0.6, 0.8, 1.0, 1.25)}
    while len(sizes) < 4:
        sizes.add(max(sizes) + 1)
    return sorted(sizes)


def measure_speeds(job: Job, split: list[int], seconds: float) -> list[dict]:
    return job.block(sizes=[sizes_around(share) for share in split], seconds=seconds)["tables"]


def hand_tuned(job: Job, args: argparse.Namespace, split: list[int]) -> tuple[list[int], dict[str, float]]:
    """The fastest split of those around `split`, tried as a patient user would: each in turn, several times."""
    tried = [[split[0] + d, split[1] - d] for d in range(-args.scan, args.scan + 1) if split[1] - d > 0]
    rates: dict[str, list[float]] = {f"{a},{b}": [] for a, b in tried}
    for _ in range(args.scan_rounds):
        for one in tried:
            rates[f"{one[0]},{one[1]}"].append(job.block(split=one)["samples_per_second"])
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    return max(tried, key=lambda one: medians[f"{one[0]},{one[1]}"]), medians


def unequal(args: argparse.Namespace, batch: int) -> dict:
    quota = "1:0.25"
    first = round(batch * 0.8)
    with Jobs(args, batch, quota, "speeds", "ddp", "evenstep") as jobs:
        split, _ = best_split(measure_speeds(jobs["speeds"], [first, batch - first], args.seconds), batch)
        tuned, scan = hand_tuned(jobs["ddp"], args, split)
        print(f"  hand-tuned splits tried: { {k: round(v, 1) for k, v in scan.items()} } -> {tuned}", flush=True)
        for _ in range(args.settle):
            jobs["evenstep"].block()
        turns = {
            "tables": lambda: measure_speeds(jobs["speeds"], split, args.seconds),
            "evenstep": jobs["evenstep"].block,
            "hand": lambda: jobs["ddp"].block(split=tuned),
            "ddp": lambda: jobs["ddp"].block(split=[batch // 2, batch - batch // 2], steps=max(3, args.steps // 3)),
        }
        rounds = []
        for index in range(args.rounds):
            names = list(turns)
            names = names[index % 4 :] + names[: index % 4]
            found = {name: turns[name]() for name in names}
            ideal, bound = best_split(found["tables"], batch)
            row = {"best_split": ideal, "bound": bound, "tables": found["tables"]}
            row |= {name: found[name]["samples_per_second"] for name in ("evenstep", "hand", "ddp")}
            row["rank0_shares"] = found["evenstep"]["rank0_shares"]
            rounds.append(row)
            print(
                f"  round {index + 1}: bound {bound:.1f} (split {ideal}), evenstep {row['evenstep']:.1f}, "
                f"hand {row['hand']:.1f}, ddp {row['ddp']:.1f} samples/s",
                flush=True,
            )
    middle = {name: statistics.median(row[name] for row in rounds) for name in ("bound", "evenstep", "hand", "ddp")}
    ratios = {f"evenstep_over_{name}": ratio(rounds, "evenstep", name) for name in ("bound", "ddp", "hand")}
    ratios["hand_over_bound"] = ratio(rounds, "hand", "bound")
    scatter = {f"evenstep_over_{name}": interval(rounds, "evenstep", name) for name in ("bound", "ddp", "hand")}
    scatter["hand_over_bound"] = interval(rounds, "hand", "bound")
    found = {"quota": quota, "batch": batch, "tuned_split": tuned, "scan": scan, "rounds": rounds}
    return found | {"median": middle, "ratios": ratios, "intervals": scatter}


def equal(args: argparse.Namespace, batch: int) -> dict:
    halves = [batch // 2, batch - batch // 2]
    rounds = []
    with Jobs(args, batch, None, "ddp", "evenstep") as jobs:
        for _ in range(args.settle):
            jobs["evenstep"].block()
        for index in range(args.rounds):
            names = ["evenstep", "ddp"] if index % 2 == 0 else ["ddp", "evenstep"]
            orders: dict[str, dict] = {"evenstep": {}, "ddp": {"split": halves}}
            row = {name: jobs[name].block(**orders[name])["samples_per_second"] for name in names}
            rounds.append(row)
            print(f"  round {index + 1}: evenstep {row['evenstep']:.1f}, ddp {row['ddp']:.1f} samples/s", flush=True)
    middle = {name: statistics.median(row[name] for row in rounds) for name in ("evenstep", "ddp")}
    ratios = {"evenstep_over_ddp": ratio(rounds, "evenstep", "ddp")}
    scatter = {"evenstep_over_ddp": interval(rounds, "evenstep", "ddp")}
    return {"batch": batch, "rounds": rounds, "median": middle, "ratios": ratios, "intervals": scatter}


def ratio(rounds: list[dict], one: str, other: str) -> float:
    return statistics.median(row[one] / row[other] for row in rounds)


def interval(rounds: list[dict], one: str, other: str) -> tuple[float, float]:
    """Between which the median of the rounds' ratios is with 95 % confidence, by their order alone."""
    ordered = sorted(row[one] / row[other] for row in rounds)
    half = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return ordered[max(0, low)], ordered[min(len(ordered), high + 1) - 1]


def may_set_quotas() -> bool:
    done = subprocess.run([PROGRAM, "doctor", "--json"], capture_output=True, text=True, check=False)
    return any(check["name"] == "CPU quota" and check["state"] == "ok" for check in json.loads(done.stdout)["checks"])


def markdown(result: dict) -> str:
    lines = [
        f"# Training throughput, {result['date']}",
        "",
        f"- hardware: {result['hardware']}",
        f"- software: {result['software']}",
        f"- command: `{result['command']}`",
        "",
        "| case | what | figure | to reach |",
        "|---|---|---|---|",
    ]
    for case in result.get("unequal", []):
        what = f"1 : 0.25, batch {case['batch']}"
        for name, text in (
            ("bound", "best integer split at the speeds while both run"),
            ("evenstep", "Evenstep, balanced"),
            ("hand", f"hand-tuned split {case['tuned_split']}, DDP over Gloo"),
            ("ddp", "equal split, DDP over Gloo"),
        ):
            lines.append(f"| {what} | {text} | {case['median'][name]:.1f} samples/s | |")
        for name, text, goal in (
            ("evenstep_over_bound", "Evenstep / best integer split", "≥ 0.95"),
            ("evenstep_over_ddp", "Evenstep / equal split with DDP", "≥ 2.8"),
            ("evenstep_over_hand", "Evenstep / hand-tuned split", "≥ 1.0"),
            ("hand_over_bound", "hand-tuned split / best integer split", ""),
        ):
            low, high = case["intervals"][name]
            lines.append(f"| {what} | {text} | {case['ratios'][name]:.3f} ({low:.3f} to {high:.3f}) | {goal} |")
    for case in result.get("equal", []):
        what = f"1 : 1, batch {case['batch']}"
        lines.append(f"| {what} | Evenstep | {case['median']['evenstep']:.1f} samples/s | |")
        lines.append(f"| {what} | DDP over Gloo | {case['median']['ddp']:.1f} samples/s | |")
        low, high = case["intervals"]["evenstep_over_ddp"]
        figure = f"{case['ratios']['evenstep_over_ddp']:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {what} | Evenstep / DDP | {figure} | ≥ 1.0 |")
    lines += [
        "",
        "Ratios are medians of the ratios of each round, with 95 % intervals of the median; the rows above them are medians of the rates.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64], help="global batches, one case each")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each batch size whose speed is measured")
    parser.add_argument("--settle", type=int, default=8, help="turns that Evenstep has before the first round")
    parser.add_argument("--scan", type=int, default=2, help="hand-tuned splits tried on either side of the best one")
    parser.add_argument("--scan-rounds", type=int, default=6, help="how often each of them is tried")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it works")
    parser.add_argument("--policy", default="auto", help="of Evenstep's jobs")
    parser.add_argument("--only", choices=["unequal", "equal"])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.seconds, args.settle, args.scan_rounds = 1, 8, 0.5, 1, 1
        args.batch = args.batch[:1]
    result = dict(heading())
    for name, run, batches in (("unequal", unequal, args.batch), ("equal", equal, args.batch[:1])):
        if name == "unequal" and not may_set_quotas():
            # each waiting job would have busy neighbours of its own on rank 1's core
            print("unequal ranks: not measured, CPU quotas are not permitted here (see `evenstep doctor`)", flush=True)
        elif args.only in (None, name):
            result[name] = []
            for batch in batches:
                print(f"{name} ranks, global batch {batch}:", flush=True)
                result[name].append(run(args, batch))
    text = markdown(result)
    print("\n" + text)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(text)


if __name__ == "__main__":
    main()
