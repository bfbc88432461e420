"""How soon the others have the error of a call in which a rank of another host, alone there, is killed or stopped: two hosts
made of network namespaces, one rank each, started by `evenstep run --hosts`. Needs root, ip and tc, and UCX.

    python bench/stop_hosts.py [--tries 20] [--program PATH]

Each try is a job of its own, whose ranks make calls without a pause (all_reduce of 1 KB and of 4 MB, broadcast of 1 MB, barrier, in
turn from try to try). One of them, every other time the one beside the leader, gets the signal at a random time; the time ends when
the other one has the error, which must name it. No other rank sees one that is stopped there: its agent tells.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

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
    raise SystemExit(3)
"""
WORKS = ("all_reduce of 1 KB", "all_reduce of 4 MB", "broadcast of 1 MB", "barrier")

SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name ip netns exec "$name" "$@" <&3 3<&- &
wait $!
"""


def try_once(
    options: argparse.Namespace, folder: pathlib.Path, names: list[str], number: int, chance: random.Random, sent: int
) -> tuple[float, str]:
    """Milliseconds from the signal to the other one's error, and that."""
    victim = number % 2
    command = ["ip", "netns", "exec", names[0], "env", f"EVENSTEP_HOST_ID={names[0]}", options.program, "run"]
    command += ["--hosts", ",".join(f"{name}:1" for name in names), "--ssh", str(folder / "shell.sh"), "--no-pin"]
    command += ["--no-monitor", "--log-rank", "all", "--max-restarts", "0", "--name", f"{sent}-{number}"]
    command += ["--python", sys.executable, str(folder / "calls.py"), WORKS[number // 2 % len(WORKS)]]
    environment = {**os.environ, "EVENSTEP_COMM_COSTS": "off", "UCX_TLS": "tcp,self"}
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
        sys.exit(f"rank {1 - victim} did not name rank {victim}:\n{''.join(text)}")
    return (int(found[1]) - sent_ns) / 1e6, found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=20, help="of each signal")
    parser.add_argument("--seed", type=int, default=1)
    add_program(parser)
    options = parser.parse_args()
    options.program = found_program(options)
    if why := missing():
        sys.exit(f"ranks that are alone on their hosts were not measured: {why}")
    print_heading("A rank that is alone on its host gets a signal inside a call: when does that of another host know?")
    chance = random.Random(options.seed)
    print(f"{'signal':8} {'tries':>5} {'median/ms':>10} {'max/ms':>8}  all, in ms")
    with tempfile.TemporaryDirectory() as name, ShapedHosts(2, 10000) as hosts:
        folder = pathlib.Path(name)
        (folder / "calls.py").write_text(SCRIPT)
        (folder / "shell.sh").write_text(SHELL)
        (folder / "shell.sh").chmod(0o755)
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            tries = [try_once(options, folder, hosts.names, at, chance, sent) for at in range(options.tries)]
            times = sorted(took for took, _ in tries)
            median = times[len(times) // 2]
            each = " ".join(f"{took:.1f}" for took in times)
            print(f"{sent.name:8} {len(times):5} {median:10.1f} {times[-1]:8.1f}  {each}")
            words = re.sub(r" \(process \d+ on host \S+\)", "", tries[-1][1])
            print(f"         as: {words.split(';')[0]}", flush=True)


if __name__ == "__main__":
    main()
