"""How long after a whole host was lost as many ranks as before compute again (`evenstep run --hosts … --recovery replace`):
spares of another host in the places of its ranks, or new processes there, once its agent was started again. On two hosts
made of network namespaces. Needs root, ip and tc, and UCX.

    python bench/recovery_hosts.py [--jobs 5] [--ranks 2] [--step-ms 30] [--program PATH]

In each job the agent of the second host is killed (its ranks end with it) at a random time. The time ends when the last of
the members has the first batch in hand: of those that are left, and of as many as before. At its end each job's parameters
are compared with those of a job in which no host was lost.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import torch
from heading import add_program, found_program, print_heading
from recovery_bench import SCRIPT, describe
from shaped_hosts import ShapedHosts, missing

SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name ip netns exec "$name" "$@" <&3 3<&- &
wait $!
"""


def start(
    options: argparse.Namespace, folder: pathlib.Path, names: list[str], name: str, *more: str
) -> subprocess.Popen[str]:
    hosts = ",".join(f"{one}:{options.ranks}" for one in names)
    command = ["ip", "netns", "exec", names[0], "env", f"EVENSTEP_HOST_ID={names[0]}", options.program, "run"]
    command += ["--hosts", hosts, "--ssh", str(folder / "shell.sh"), "--no-pin", "--no-monitor", "--log-rank", "all"]
    command += ["--name", name, "--python", sys.executable, "--recovery", "replace", *more, str(folder / "train.py")]
    command += [str(options.step_ms), str(options.steps), str(folder / f"{name}.pt")]
    environment = {**os.environ, "EVENSTEP_COMM_COSTS": "off", "UCX_TLS": "tcp,self"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def parent(process: int) -> int:
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def lose_a_host(job: subprocess.Popen[str], ranks: int, chance: random.Random) -> tuple[float, float]:
    """Milliseconds until those that are left compute again, and until as many as before do."""
    pids: dict[int, int] = {}
    text: list[str] = []
    killed_ns, whole = 0, 2 * ranks
    heard: dict[tuple[int, int], list[int]] = {}
    assert job.stdout is not None
    for line in job.stdout:
        text.append(line)
        if found := re.search(r"trains (\d+) (\d+)", line):
            pids[int(found[1])] = int(found[2])
        if not killed_ns and all(rank in pids for rank in range(whole)):
            time.sleep(chance.uniform(0.2, 0.6))
            killed_ns = time.monotonic_ns()
            os.kill(parent(pids[ranks]), 9)
        if found := re.search(r"again (\d+) (\d+) (\d+)", line):
            heard.setdefault((int(found[1]), int(found[2])), []).append(int(found[3]))
    complete = {key: max(times) for key, times in heard.items() if len(times) == key[1]}
    left = [at for (_, members), at in complete.items() if members == ranks]
    back = [at for (_, members), at in complete.items() if members == whole]
    if job.wait() != 0 or not left or not back or "restart" in "".join(text):
        sys.exit(f"the job did not go on as it should:\n{''.join(text)}")
    return (min(left) - killed_ns) / 1e6, (min(back) - killed_ns) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    add_program(parser)
    options = parser.parse_args()
    options.program = found_program(options)
    if why := missing():
        sys.exit(f"lost hosts were not measured: {why}")
    print_heading("A host is lost (network namespaces on one machine): when do as many ranks as before compute again?")
    chance = random.Random(options.seed)
    far = 0.0
    with tempfile.TemporaryDirectory() as name, ShapedHosts(2, 10000) as hosts:
        folder, names = pathlib.Path(name), hosts.names
        (folder / "train.py").write_text(SCRIPT)
        (folder / "shell.sh").write_text(SHELL)
        (folder / "shell.sh").chmod(0o755)
        whole = start(options, folder, names, "whole")
        words = whole.communicate()[0]
        if whole.returncode != 0:
            sys.exit(words)
        expected = torch.load(folder / "whole.pt")
        for who, more in (
            ("spares of the other host", ("--spares", f"{names[0]}:{options.ranks}")),
            ("new processes, the host's agent started again", ()),
        ):
            left, back = [], []
            for number in range(options.jobs):
                this = f"{len(more)}-{number}"
                one, other = lose_a_host(start(options, folder, names, this, *more), options.ranks, chance)
                left.append(one)
                back.append(other)
                far = max(far, float((torch.load(folder / f"{this}.pt") - expected).norm() / expected.norm()))
            print(f"{options.ranks} ranks on each host, steps of {options.step_ms:g} ms, {options.jobs} jobs; {who}:")
            print(f"  kill of the host to the survivors computing again: {describe(left)}")
            print(f"  kill of the host to as many ranks as before computing: {describe(back)}", flush=True)
    print(f"parameters at the end against a job without losses: at most {far:.1e} apart (fp64, relative norm)")


if __name__ == "__main__":
    main()
