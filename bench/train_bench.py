"""Training throughput on unequal and on equal CPU ranks, side by side with PyTorch, medians of alternating rounds.

    python bench/train_bench.py [--rounds 5] [--quick] [--json FILE] [--markdown FILE]

Unequal: two ranks, each pinned to its own core, rank 1 held to a quarter of its core by a CPU quota.
Equal: two ranks, each pinned to its own core. Every mode is started by the same launcher (`evenstep run`).
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from heading import heading

BENCH = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"


def launch(mode: str, quota: str | None, *options: str, monitor: bool = False) -> dict:
    """Runs one job and returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, "run", "-n", "2", "--runs-dir", folder, "--name", mode, "--max-restarts", "0"]
        command += ["--python", sys.executable]
        command += [] if monitor else ["--no-monitor"]
        command += ["--cpu-quota", quota] if quota else []
        command += [str(BENCH / "train_rank.py"), "--mode", mode, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            return json.loads(line.split("RESULT ", 1)[1])
    tail = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    raise SystemExit(f"{' '.join(command)}\nended with {done.returncode} and no result:\n{tail}")


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


def speeds(batch: int, quota: str | None, guess: list[int], seconds: float) -> list[dict]:
    sizes = "/".join(",".join(map(str, sizes_around(share))) for share in guess)
    return launch("speeds", quota, "--batch", str(batch), "--sizes", sizes, "--seconds", str(seconds))["tables"]


def unequal(args: argparse.Namespace) -> dict:
    batch, quota = args.batch, "1:0.25"
    common = ["--batch", str(batch), "--steps", str(args.steps), "--warmup", str(args.warmup)]
    first_guess = [round(batch * 0.8), batch - round(batch * 0.8)]
    split, _ = best_split(speeds(batch, quota, first_guess, args.seconds), batch)
    candidates = [[split[0] + d, split[1] - d] for d in range(-args.scan, args.scan + 1) if split[1] - d > 0]
    scan = {
        f"{a},{b}": launch("hand", quota, "--split", f"{a},{b}", *common)["samples_per_second"] for a, b in candidates
    }
    tuned = max(scan, key=scan.__getitem__)
    print(f"  hand-tuned splits tried: { {k: round(v, 1) for k, v in scan.items()} } -> {tuned}", flush=True)
    rounds = []
    for index in range(args.rounds):
        tables = speeds(batch, quota, split, args.seconds)
        ideal, bound = best_split(tables, batch)
        row = {"best_split": ideal, "bound": bound, "tables": tables}
        for name, mode, options, monitor in (
            ("evenstep", "evenstep", [], True),
            ("hand", "hand", ["--split", tuned], False),
            ("ddp", "ddp", [], False),
        ):
            result = launch(mode, quota, *common, *options, monitor=monitor)
            row[name] = result["samples_per_second"]
            if name == "evenstep":
                row["rank0_shares"] = result["rank0_shares"]
        rounds.append(row)
        print(
            f"  round {index + 1}: bound {bound:.1f} (split {ideal}), evenstep {row['evenstep']:.1f}, "
            f"hand {row['hand']:.1f}, ddp {row['ddp']:.1f} samples/s",
            flush=True,
        )
    middle = {name: statistics.median(row[name] for row in rounds) for name in ("bound", "evenstep", "hand", "ddp")}
    ratios = {
        "evenstep_over_bound": statistics.median(row["evenstep"] / row["bound"] for row in rounds),
        "evenstep_over_ddp": statistics.median(row["evenstep"] / row["ddp"] for row in rounds),
        "evenstep_over_hand": statistics.median(row["evenstep"] / row["hand"] for row in rounds),
    }
    return {"quota": quota, "tuned_split": tuned, "scan": scan, "rounds": rounds, "median": middle, "ratios": ratios}


def equal(args: argparse.Namespace) -> dict:
    common = ["--batch", str(args.batch), "--steps", str(args.steps), "--warmup", str(args.warmup)]
    rounds = []
    for index in range(args.rounds):
        row = {
            "evenstep": launch("evenstep", None, *common, monitor=True)["samples_per_second"],
            "ddp": launch("ddp", None, *common)["samples_per_second"],
        }
        rounds.append(row)
        print(f"  round {index + 1}: evenstep {row['evenstep']:.1f}, ddp {row['ddp']:.1f} samples/s", flush=True)
    middle = {name: statistics.median(row[name] for row in rounds) for name in ("evenstep", "ddp")}
    return {
        "rounds": rounds,
        "median": middle,
        "ratios": {"evenstep_over_ddp": statistics.median(row["evenstep"] / row["ddp"] for row in rounds)},
    }


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
    if "unequal" in result:
        case = result["unequal"]
        for name, text in (
            ("bound", "best integer split at the speeds while both run"),
            ("evenstep", "Evenstep, balanced"),
            ("hand", f"hand-tuned split {case['tuned_split']}, DDP over Gloo"),
            ("ddp", "equal split, DDP over Gloo"),
        ):
            lines.append(f"| 1 : 0.25 | {text} | {case['median'][name]:.1f} samples/s | |")
        for name, text, goal in (
            ("evenstep_over_bound", "Evenstep / best integer split", "≥ 0.95"),
            ("evenstep_over_ddp", "Evenstep / equal split with DDP", "≥ 2.8"),
            ("evenstep_over_hand", "Evenstep / hand-tuned split", "≥ 1.0"),
        ):
            lines.append(f"| 1 : 0.25 | {text} | {case['ratios'][name]:.3f} | {goal} |")
    if "equal" in result:
        case = result["equal"]
        lines.append(f"| 1 : 1 | Evenstep | {case['median']['evenstep']:.1f} samples/s | |")
        lines.append(f"| 1 : 1 | DDP over Gloo | {case['median']['ddp']:.1f} samples/s | |")
        lines.append(f"| 1 : 1 | Evenstep / DDP | {case['ratios']['evenstep_over_ddp']:.3f} | ≥ 1.0 |")
    lines += ["", "Ratios are medians of the ratios of each round; the rows above them are medians of the rates.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--scan", type=int, default=2, help="hand-tuned splits tried on either side of the best one")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it works")
    parser.add_argument("--only", choices=["unequal", "equal"])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.warmup, args.seconds = 1, 15, 8, 1.0
    result = dict(heading())
    for name, run in (("unequal", unequal), ("equal", equal)):
        if args.only in (None, name):
            print(f"{name} ranks:", flush=True)
            result[name] = run(args)
    text = markdown(result)
    print("\n" + text)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(text)


if __name__ == "__main__":
    main()
