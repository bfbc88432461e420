"""How long training pauses while a host is drained and its ranks move to another one (`evenstep drain HOST --to …`): with the
processes that go on started before the others end, and with `--cold`.

    python bench/drain_bench.py [--drains 5] [--ranks 1] [--step-ms 20] [--program PATH]

Each job has two hosts with so many ranks each, played by this machine; the second one is drained once, to a third. The pause
is from the end of the last step before to the end of the first step after it, by rank 0's clock: in it the state is saved,
the ranks end, the hosts change, and the others go on from the checkpoint. The step itself is in it, too. How long the drained
host's user waits, from the command to its end, stands beside it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from heading import add_program, found_program, print_heading
from small_job import SETUP

SCRIPT = f"""{SETUP}
pause, folder, first = float(sys.argv[1]), pathlib.Path(sys.argv[2]), None
moved = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
while not (moved and first is not None and es.step() >= first + 10):
    for batch in loader:
        step(batch, pause)
        first = es.step() if first is None else first
        if es.is_main():
            with open(folder / "steps", "a") as file:
                print(int(moved), es.step(), time.monotonic_ns(), file=file)
        if moved and es.step() >= first + 10:
            break
"""

# As ssh, to this machine.
SHELL = """#!/bin/sh
name=$1
shift
EVENSTEP_HOST_ID=$name exec "$@"
"""


def steps(folder: pathlib.Path) -> list[tuple[int, int]]:
    """The attempt and the time of each step of rank 0."""
    try:
        lines = (folder / "steps").read_text().splitlines()
    except OSError:
        return []
    return [(int(moved), int(at)) for moved, _, at in (line.split() for line in lines if line.count(" ") == 2)]


def drain_once(options: argparse.Namespace, folder: pathlib.Path, name: str, *words: str) -> tuple[float, float]:
    """Seconds of the pause, and of the command."""
    own = folder / name
    own.mkdir()
    for file, text in (("train.py", SCRIPT), ("shell.sh", SHELL)):
        (own / file).write_text(text)
    (own / "shell.sh").chmod(0o755)
    hosts = f"one:{options.ranks},two:{options.ranks}"
    run = [
        "run",
        "--hosts",
        hosts,
        "--ssh",
        str(own / "shell.sh"),
        "--address",
        "127.0.0.1",
        "--no-pin",
        "--no-monitor",
    ]
    run += [
        "--name",
        "a",
        "--python",
        sys.executable,
        "--max-restarts",
        "0",
        "train.py",
        str(options.step_ms),
        str(own),
    ]
    with (own / "said").open("w") as said:
        job = subprocess.Popen(
            [options.program, *run],
            cwd=own,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | {"EVENSTEP_HOST_ID": "one"},
        )
    while len(steps(own)) < 20:
        if job.poll() is not None:
            sys.exit(f"the job ended:\n{(own / 'said').read_text()}")
        time.sleep(0.05)
    begun = time.monotonic()
    drained = subprocess.run(
        [options.program, "drain", "--run", "a", *words, "--to", "three", "two"],
        cwd=own,
        capture_output=True,
        text=True,
    )
    took = time.monotonic() - begun
    if drained.returncode != 0 or job.wait() != 0:
        sys.exit(f"the host was not drained:\n{drained.stderr}{(own / 'said').read_text()}")
    times = steps(own)
    before = max(at for moved, at in times if moved == 0)
    return (min(at for moved, at in times if moved == 1) - before) / 1e9, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drains", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=20)
    add_program(parser)
    options = parser.parse_args()
    options.program = found_program(options)
    print_heading(f"drain_bench: {options.ranks} ranks on each of two hosts, steps of {options.step_ms:g} ms")
    took: dict[str, list[tuple[float, float]]] = {"started first": [], "--cold": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.drains):  # in turns: what else the machine does meets both
            took["started first"].append(drain_once(options, pathlib.Path(folder), f"warm-{turn}"))
            took["--cold"].append(drain_once(options, pathlib.Path(folder), f"cold-{turn}", "--cold"))
    print(f"{'processes':<14} {'pause s: median':>16} {'least':>7} {'most':>7} {'command s: median':>19}")
    for name, each in took.items():
        pauses = [pause for pause, _ in each]
        waits = statistics.median(wait for _, wait in each)
        print(f"{name:<14} {statistics.median(pauses):>16.2f} {min(pauses):>7.2f} {max(pauses):>7.2f} {waits:>19.2f}")


if __name__ == "__main__":
    main()
