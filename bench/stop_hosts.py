"""How soon the others have the error of a call in which a rank of another host, alone there, is killed or stopped: two hosts
made of network namespaces, one rank each, started by `evenstep run --hosts`. Needs root, ip and tc, and UCX.

    python bench/stop_hosts.py [--tries 20] [--minutes M] [--continue FILE] [--program PATH]

Each try is a job of its own, whose ranks make calls without a pause (all_reduce of 1 KB and of 4 MB, broadcast of 1 MB, barrier, in
turn from try to try). One of them, every other time the one beside the leader, gets the signal at a random time; the time ends when
the other one has the error, which must name it. No other rank sees one that is stopped there: its agent tells. The two signals
take turns, so that an end before the last try (--minutes, Ctrl-C) leaves as many of each; FILE keeps each try, and those that it
has count.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from heading import add_program, found_program, print_heading
from shaped_hosts import ShapedHosts, missing

SCRIPT = """
import os, signal, sys, time
import numpy as np
import evenstep as es

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of its agent, which hears of the kill as soon as this rank does
group, kind = es.comm.open(), sys.argv[1]
small, large = np.ones(256, dtype=np.float32), np.ones(1_000_000, dtype=np.float32)
work = {
    "all_reduce of 1 KB": lambda: group.all_reduce(small, "max"),
    "all_reduce of 4 MB": lambda: group.all_reduce(large, "max"),
    "broadcast of 1 MB": lambda: group.broadcast(large[:250_000], root=0),
    "barrier": lambda: group.barrier(),
}[kind]
try:
    for number in range(1_000_000_000):
        work()
        if number == 3:
            print(f"works {group.rank} {os.getpid()}", flush=True)
except es.EvenstepError as error:
    now = time.monotonic_ns()
    print(f"heard {group.rank} {now} {error.status} {error}", flush=True)
    os._exit(3)
"""
WORKS = ("all_reduce of 1 KB", "all_reduce of 4 MB", "broadcast of 1 MB", "barrier")

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
QUICK_START = pathlib.Path(__file__).resolve().parent.parent / "tests" / "python" / "quick_start"

SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name ip netns exec "$name" "$@" <&3 3<&- &
wait $!
"""


def try_once(
    options: argparse.Namespace, folder: pathlib.Path, names: list[str], number: int, chance: random.Random, sent: int
) -> tuple[float | None, str]:
    """Milliseconds from the signal to the other one's error, and that; None and all that the job said where it did not name it."""
    victim = number % 2
    command = ["ip", "netns", "exec", names[0], "env", f"EVENSTEP_HOST_ID={names[0]}", options.program, "run"]
    command += ["--hosts", ",".join(f"{name}:1" for name in names), "--ssh", str(folder / "shell.sh"), "--no-pin"]
    command += ["--no-monitor", "--log-rank", "all", "--max-restarts", "0", "--name", f"{sent}-{number}"]
    command += ["--python", sys.executable, str(folder / "calls.py"), WORKS[number // 2 % len(WORKS)]]
    path = os.pathsep.join(filter(None, [str(QUICK_START), os.environ.get("PYTHONPATH")]))  # for more tries an hour
    environment = {**os.environ, "EVENSTEP_COMM_COSTS": "off", "UCX_TLS": "tcp,self", "PYTHONPATH": path}
    job = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    pids: dict[int, int] = {}
    text, sent_ns = [], 0
    for line in job.stdout:
        text.append(line)
        if found := re.search(r"works (\d) (\d+)", line):
            pids[int(found[1])] = int(found[2])
        if not sent_ns and len(pids) == 2:
            time.sleep(chance.uniform(0.05, 0.3))
            sent_ns = time.monotonic_ns()
            os.kill(pids[victim], sent)
    job.wait()
    found = re.search(rf"heard {1 - victim} (\d+) EVEN_ERR_PEER_LOST (rank {victim} .*)", "".join(text))
    if not found:
        return None, f"rank {1 - victim} did not name rank {victim}:\n{''.join(text)}"
    return (int(found[1]) - sent_ns) / 1e6, found[2]


class Try(NamedTuple):
    signal: str
    ms: float | None  # None: the other rank did not name this one
    said: str


def show(tries: Sequence[Try]) -> None:
    print(f"{'signal':8} {'tries':>5} {'median/ms':>10} {'99 %/ms':>8} {'max/ms':>8} {'wrong':>5}")
    for sent in SIGNALS:
        of = [one for one in tries if one.signal == sent.name]
        times = sorted(one.ms for one in of if one.ms is not None)
        if not times:
            continue
        median, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        figures = f"{median:10.1f} {late:8.1f} {times[-1]:8.1f} {len(of) - len(times):5}"
        print(f"{sent.name:8} {len(of):5} {figures}")
        if len(times) <= 50:
            print("         all, in ms: " + " ".join(f"{took:.1f}" for took in times))
        words = Counter(in_short(one.said) for one in of if one.ms is not None)
        for said, count in words.most_common():
            print(f"{count:13} as: {said}")
        for one in of:
            if one.ms is None:
                print(f"wrong: {one.said}")


def in_short(said: str) -> str:
    return re.sub(r"rank \d", "the rank", re.sub(r" \(process \d+ on host \S+\)", "", said)).split(";")[0]


def run_tries(options: argparse.Namespace, tries: list[Try]) -> None:
    """Adds to `tries` until there are enough, or the time is over."""
    end = time.monotonic() + 60 * options.minutes
    begun = {sent: sum(one.signal == sent.name for one in tries) for sent in SIGNALS}
    chance = random.Random(options.seed + len(tries))
    with tempfile.TemporaryDirectory() as name, ShapedHosts(2, 10000) as hosts:
        folder = pathlib.Path(name)
        (folder / "calls.py").write_text(SCRIPT)
        (folder / "shell.sh").write_text(SHELL)
        (folder / "shell.sh").chmod(0o755)
        while time.monotonic() < end and (sent := min(SIGNALS, key=lambda one: begun[one])):
            if begun[sent] >= options.tries:
                return
            took, said = try_once(options, folder, hosts.names, begun[sent], chance, sent)
            begun[sent] += 1
            tries.append(Try(sent.name, took, said))
            if options.kept is not None:
                with options.kept.open("a") as file:
                    file.write(json.dumps(tries[-1]) + "\n")
            shutil.rmtree(folder / "runs", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=20, help="of each signal")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no try begins later")
    parser.add_argument(
        "--continue", dest="kept", metavar="FILE", type=pathlib.Path, help="keeps each try; those it has count"
    )
    parser.add_argument("--seed", type=int, default=1)
    add_program(parser)
    options = parser.parse_args()
    options.program = found_program(options)
    if why := missing():
        sys.exit(f"ranks that are alone on their hosts were not measured: {why}")
    print_heading("A rank that is alone on its host gets a signal inside a call: when does that of another host know?")
    has = options.kept.read_text().splitlines() if options.kept is not None and options.kept.is_file() else []
    tries = [Try(*json.loads(line)) for line in has]
    if tries:
        print(f"{len(tries)} tries are of sittings before this one\n")
    try:
        run_tries(options, tries)
    except KeyboardInterrupt:
        print("ended by hand")
    show(tries)


if __name__ == "__main__":
    main()
