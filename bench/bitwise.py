"""What exact="bitwise" costs, and whether it holds.

Cost: the steps of es.Trainer with and without it on equal ranks with equal shares, beside what the blocks cost torch alone
(bitwise_rank.py says what each kind is). All jobs stand ready, and take turns of a few steps, so that a machine whose speed
moves moves for all; wall time and CPU time, medians over the turns of each turn's ratio to `plain` of the same round.
Histories: random ones (ranks, splits, jobs that end with the death of a rank and resume on other ranks, ranks that are lost in the midst
of a step while the others go on or another process takes their place), whose parameters must not differ in one bit.

    python bench/bitwise.py [--rounds 20] [--steps 4] [--ranks 2] [--models gpt cnn] [--blocks 0 4 8]
                            [--histories 20] [--cases gpt cnn bert …] [--history-steps 20] [--part cost|histories] [-o FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heading import heading
from train_gate import Job

BENCH = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"
SCRIPT = BENCH.parent / "tests/python/bitwise_cases.py"
BATCH, WARM = 64, 1
CASES = ("gpt", "cnn", "bert", "bert_scaler_recomputed")  # of the histories
FURTHER = ("gpt_bf16", "gpt_autocast", "gpt_scaler", "gpt_recomputed", "cnn_autocast", "cnn_recomputed")
WAYS = ("", "shrink", "replace")  # of the last job of a history to go on without ranks
WALL, CPU = range(2)
Measured = dict[str, list[list[float]]]  # kind -> of each round: median seconds, median CPU seconds


def job(model: str, kind: str, block: int, ranks: int, folder: str) -> Job:
    command = [
        PROGRAM,
        "run",
        "-n",
        str(ranks),
        "--runs-dir",
        folder,
        "--name",
        f"{kind}-{block}",
        "--max-restarts",
        "0",
    ]
    command += ["--no-monitor", "--python", sys.executable, str(BENCH / "bitwise_rank.py")]
    return Job([*command, "--model", model, "--kind", kind, "--block", str(block)], ranks)


def measure(model: str, block: int, ranks: int, rounds: int, steps: int) -> Measured:
    kinds = ["alone", "blocks", "lockstep", "plain", "bitwise"]
    measured: Measured = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        jobs = {kind: stack.enter_context(job(model, kind, block, ranks, folder)) for kind in kinds}
        for one in jobs.values():
            one.ready()
        for _ in range(2):  # not counted: the first steps make what the later ones keep
            for one in jobs.values():
                one.block(warm=0, steps=steps)
        for turn in range(rounds):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                told = jobs[kind].block(warm=WARM, steps=steps)
                measured[kind].append([statistics.median(step[which] for step in told) for which in (WALL, CPU)])
    return measured


def ratio(measured: Measured, kind: str, which: int) -> float:
    """To `plain`, round by round."""
    return statistics.median(a[which] / b[which] for a, b in zip(measured[kind], measured["plain"]))


def reach(measured: Measured, which: int) -> tuple[float, float]:
    """`plain` and what blocks cost torch alone, over `plain`: what no code around torch can go below; and how much of the
    way there bitwise mode is (1: it costs nothing else)."""
    bounds, reached = [], []
    for alone, blocks, plain, bitwise in zip(*(measured[kind] for kind in ("alone", "blocks", "plain", "bitwise"))):
        least = plain[which] + blocks[which] - alone[which]
        bounds.append(least / plain[which])
        reached.append(least / bitwise[which])
    return statistics.median(bounds), statistics.median(reached)


def table(model: str, block: int, measured: Measured) -> list[str]:
    lines = [
        f"  {model}, blocks of {block} ({-(-BATCH // block)}):        wall ms    CPU ms   over plain: wall      CPU"
    ]
    for kind, rounds in measured.items():
        wall, cpu = (1e3 * statistics.median(one[which] for one in rounds) for which in (WALL, CPU))
        over = [100 * (ratio(measured, kind, which) - 1) for which in (WALL, CPU)]
        lines.append(f"    {kind:24} {wall:10.1f} {cpu:9.1f} {over[WALL]:+16.1f} % {over[CPU]:+7.1f} %")
    bound, reached = zip(*(reach(measured, which) for which in (WALL, CPU)))
    over = [100 * (one - 1) for one in bound]
    lines.append(f"    {'bound: plain + blocks - alone':44} {over[WALL]:+16.1f} % {over[CPU]:+7.1f} %")
    lines.append(f"    {'achieved over bound':44} {reached[WALL]:16.2f}   {reached[CPU]:7.2f}")
    return lines


def cost(options: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    lines = [
        f"A step of {BATCH} samples on {options.ranks} equal ranks of one thread: medians of {options.rounds} rounds of "
        f"{options.steps} steps a kind, in turns. To reach: bitwise at most +30 % of plain"
    ]
    from evenstep.exact_blocks import default_block

    for model in options.models:
        for block in options.blocks:
            given = block or default_block(BATCH)
            measured = measure(model, given, options.ranks, options.rounds, options.steps)
            found[model] = {"block": given, "over_plain": ratio(measured, "bitwise", WALL) - 1}
            lines += table(model, given, measured)
            print("\n".join(lines[-8:]), file=sys.stderr, flush=True)
    return lines


def run(
    ranks: int,
    *arguments: str,
    options: Sequence[str] = (),
    dies: bool = False,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What it printed. With `dies` it must not end well."""
    command = [
        PROGRAM,
        "run",
        "-n",
        str(ranks),
        "--no-monitor",
        "--max-restarts",
        "0",
        "--python",
        sys.executable,
        *options,
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--runs-dir", folder, str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, **(environment or {})},
        )
    if (done.returncode != 0) != dies:
        sys.exit(f"{' '.join(command)} {arguments} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def told(output: str, mark: str) -> Any:
    return json.loads(next(line for line in output.splitlines() if mark in line).partition(mark)[2])


@dataclass(frozen=True)
class Course:
    """Jobs of `deaths`, each of which ends with the death of a rank: (ranks, who, after which step), then one of `ranks`, which
    loses `lost` in the midst of steps and goes on."""

    seed: int  # of its splits; each job adds its number
    deaths: tuple[tuple[int, int, int], ...]
    ranks: int
    recovery: str  # how it goes on without them; "": none is lost
    lost: tuple[tuple[int, int], ...]  # (step, rank)


def course(case: str, number: int, steps: int) -> Course:
    """No two cases and numbers have the same. Of any three numbers one case has each way to go on without a rank."""
    seed = 100 * (CASES + FURTHER).index(case) + number
    draw = random.Random(seed)
    recovery = WAYS[number % len(WAYS)]
    ends = sorted(draw.sample(range(2, steps - 1 if recovery else steps), draw.choice([1, 2])))
    deaths = []
    for end in ends:
        ranks = draw.randint(1, 4)
        deaths.append((ranks, draw.randrange(ranks), end))
    if not recovery:
        return Course(10 * seed, tuple(deaths), draw.randint(1, 4), "", ())
    ranks = draw.randint(2, 4)
    victims = draw.sample(range(ranks), draw.randint(1, ranks - 1))
    lost = sorted((draw.randint(ends[-1] + 1, steps - 1), rank) for rank in victims)
    return Course(10 * seed, tuple(deaths), ranks, recovery, tuple(lost))


def history(case: str, given: Course, folder: pathlib.Path, steps: int) -> tuple[str, Any]:
    """In words, and how it ends."""
    checkpoints, marks = folder / "checkpoints", folder / "lost"
    marks.mkdir()
    environment = {"STEPS": str(steps), "LOST_FOLDER": str(marks)}
    options = ["--checkpoint-every", "1", "--checkpoint-dir", str(checkpoints)]
    resume: list[str] = []
    words = []
    for number, (ranks, victim, stop) in enumerate(given.deaths):
        arguments = (case, str(given.seed + number), str(victim), str(stop))
        run(ranks, *arguments, options=options + resume, dies=True, environment=environment)
        # it is written beside the steps: perhaps none is whole yet
        newest = max(checkpoints.glob("step-*"), default=None)
        if newest is not None:
            resume = ["--resume", str(newest)]
        whence = "the start" if newest is None else newest.name
        words.append(f"{ranks} ranks, rank {victim} dies after step {stop}, on from {whence}")
    if given.recovery:
        options += ["--recovery", given.recovery, "--log-rank", "all"]
        environment["LOST"] = ",".join(f"{rank}:{step}" for step, rank in given.lost)
        told_of = ", ".join(f"rank {rank} in step {step}" for step, rank in given.lost)
        words.append(f"{given.ranks} ranks lose {told_of} ({given.recovery})")
    words.append(f"{given.ranks} ranks to the end" if not given.recovery else "to the end")
    end = told(run(given.ranks, case, str(given.seed + 7), options=options + resume, environment=environment), "END ")
    died = len(list(marks.iterdir()))
    if died != len(given.lost):
        sys.exit(f"{case}, {given}: {died} of {len(given.lost)} ranks died as they should")
    return "; ".join(words), end


def histories(options: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    count, steps = options.histories, options.history_steps
    lines = [
        f"{count * len(options.cases)} random histories of {steps} steps, {count} a case and each another one, with other splits at "
        "every step, against one rank without failures"
    ]
    for case in options.cases:
        whole = told(run(1, case, "0", environment={"STEPS": str(steps)}), "END ")
        same = 0
        each = []
        for number in range(count):
            with tempfile.TemporaryDirectory() as folder:
                words, end = history(case, course(case, number, steps), pathlib.Path(folder), steps)
            same += end == whole
            each.append(f"    {'the same bits' if end == whole else 'OTHER BITS   '}  {words}")
            print(case, each[-1], file=sys.stderr, flush=True)
        results[case] = {"same": same, "of": count, "steps": steps}
        lines += [f"  {case}: {same} of {count} have the same bits ({whole[0][:16]}…)", *each]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=("gpt", "cnn"), default=["gpt", "cnn"])
    parser.add_argument(
        "--blocks", nargs="+", type=int, default=[0], help="samples a block; 0: es.Trainer's own choice"
    )
    parser.add_argument("--histories", type=int, default=20, help="of each case")
    parser.add_argument("--history-steps", type=int, default=20, help="of training")
    parser.add_argument("--cases", nargs="+", choices=CASES + FURTHER, default=list(CASES), help="of the histories")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--part", choices=("cost", "histories"))
    parser.add_argument("-o", "--output", type=pathlib.Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"cost": {}, "histories": {}}
    lines = ["exact='bitwise'"] + [f"  {name:9} {value}" for name, value in heading().items()] + [""]
    if options.part != "histories":
        lines += cost(options, results["cost"])
    if options.part != "cost":
        lines += histories(options, results["histories"])
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
