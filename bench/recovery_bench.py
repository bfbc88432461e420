"""How long after a rank was killed the others compute again (`evenstep run --recovery shrink`), and how long until another
process has taken its place (`--recovery replace`, a spare or a new one).

    python bench/recovery_bench.py [--jobs 10] [--ranks 4] [--step-ms 10] [--program PATH]

Each job trains a small model; all of its ranks but one are killed, one after the other, at random times. A kill's time ends
when the last of those that are left has the first batch of the new generation in hand: what the step under way still
took is in it; and, for a place that is taken, when the last of all has the first batch among as many ranks as before. At its end each job's parameters are compared with those of a job in which nobody was killed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from heading import add_program, found_program
from small_job import SETUP

SCRIPT = f"""{SETUP}
seen, pause = 0, float(sys.argv[1])
print("trains", os.environ["RANK"], os.getpid(), flush=True)
while es.step() < int(sys.argv[2]):
    for batch in loader:
        recovery = es.session().recovery
        if recovery is not None and recovery.number > seen:
            seen = recovery.number
            print("again", seen, len(recovery.members), time.monotonic_ns(), flush=True)
        step(batch, pause)
        if es.step() >= int(sys.argv[2]):
            break
if es.is_main():
    torch.save(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), sys.argv[3])
"""


class Job:
    """One training; `lines` of its ranks as they come."""

    def __init__(
        self, options: argparse.Namespace, folder: pathlib.Path, name: str, *more: str, step_ms: float = 0.0
    ) -> None:
        self.result = folder / f"{name}.pt"
        words = [str(step_ms or options.step_ms), str(options.steps), str(self.result)]
        how = ["-n", str(options.ranks), "--no-pin", "--no-monitor", "--log-rank", "all", "--name", name]
        how += ["--python", sys.executable, *more, str(folder / "train.py"), *words]
        self.process = subprocess.Popen(
            [options.program, "run", *how],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        yield from self.process.stdout


def kill_all_but_one(job: Job, ranks: int, chance: random.Random) -> list[float]:
    """Milliseconds of each kill."""
    pids: dict[int, int] = {}
    took: list[float] = []
    killed_ns, heard, text = 0, 0, []
    for line in job.lines:
        text.append(line)
        if found := re.search(r"trains (\d+) (\d+)", line):
            pids[int(found[1])] = int(found[2])
        if found := re.search(r"again \d+ (\d+) (\d+)", line):
            heard += 1
            if heard == int(found[1]):
                took.append((int(found[2]) - killed_ns) / 1e6)
                heard = 0
        settled = len(pids) == ranks - len(took) and heard == 0
        if settled and len(pids) > 1 and ("trains" in line or "again" in line):
            time.sleep(chance.uniform(0.1, 0.4))
            victim = chance.choice(sorted(pids))
            killed_ns = time.monotonic_ns()
            os.kill(pids.pop(victim), 9)
    if job.process.wait() != 0 or len(took) != ranks - 1 or "restart" in "".join(text):
        sys.exit(f"the job did not go on as it should:\n{''.join(text)}")
    return took


def kill_and_replace(job: Job, ranks: int, kills: int, chance: random.Random) -> list[float]:
    """Milliseconds of each kill until as many ranks as before compute again."""
    pids: dict[int, int] = {}
    took: list[float] = []
    text = []
    killed_ns, last_ns, heard = 0, 0, 0
    for line in job.lines:
        text.append(line)
        if found := re.search(r"trains (\d+) (\d+)", line):
            pids[int(found[1])] = int(found[2])
        if (found := re.search(r"again \d+ (\d+) (\d+)", line)) and int(found[1]) == ranks:
            heard, last_ns = heard + 1, max(last_ns, int(found[2]))
            if heard == ranks:
                took.append((last_ns - killed_ns) / 1e6)
        ready = len(pids) == ranks and (not killed_ns or heard == ranks)
        if ready and len(took) < kills and ("trains" in line or "again" in line):
            time.sleep(chance.uniform(0.1, 0.4))
            victim, heard = chance.choice(sorted(pids)), 0
            killed_ns = time.monotonic_ns()
            os.kill(pids.pop(victim), 9)
    if job.process.wait() != 0 or len(took) != kills or "restart" in "".join(text):
        sys.exit(f"the job did not go on as it should:\n{''.join(text)}")
    return took


def describe(took: list[float]) -> str:
    took.sort()
    return (
        f"median {statistics.median(took):.0f} ms, 99th percentile {took[min(len(took) - 1, int(0.99 * len(took)))]:.0f} ms, "
        f"most {took[-1]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    add_program(parser)
    options = parser.parse_args()
    options.program = found_program(options)
    chance = random.Random(options.seed)
    took: list[float] = []
    far = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "train.py").write_text(SCRIPT)
        whole = Job(options, folder, "whole")
        words = whole.process.communicate()[0]
        if whole.process.returncode != 0:
            sys.exit(words)
        expected = torch.load(whole.result)
        for number in range(options.jobs):
            job = Job(options, folder, f"killed-{number}", "--recovery", "shrink")
            took += kill_all_but_one(job, options.ranks, chance)
            far = max(far, float((torch.load(job.result) - expected).norm() / expected.norm()))
        replaced: dict[str, list[float]] = {}
        # steps long enough that a training of so many does not end before
        for words, more, step_ms in (("a warm spare", ("--spares", "2"), 30.0), ("a new process", (), 100.0)):
            for number in range(options.jobs if more else (options.jobs + 2) // 3):
                name = f"replaced-{len(more)}-{number}"
                job = Job(options, folder, name, "--recovery", "replace", *more, step_ms=step_ms)
                replaced.setdefault(words, []).extend(kill_and_replace(job, options.ranks, 2 if more else 1, chance))
                far = max(far, float((torch.load(job.result) - expected).norm() / expected.norm()))
    print(f"{len(took)} kills, {options.ranks} ranks, steps of {options.step_ms:g} ms, seed {options.seed}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.0f}")  # fmt: skip
    print(f"kill to the survivors computing again: {describe(took)}")
    for words, times in replaced.items():
        print(f"kill to {words} computing in its place ({len(times)} kills): {describe(times)}")
    print(f"parameters at the end against a job without kills: at most {far:.1e} apart (fp64, relative norm)")


if __name__ == "__main__":
    main()
