"""How long after a cut of its link a host is known to be lost where an earlier, shorter cut has just ended: `evenstep run --hosts`
on two hosts made of network namespaces, the two ends of one wire, over which nothing goes but the agents' own words. Needs root
and ip.

    python bench/cut_twice.py [--rounds 2] [--firsts 0,1,2,3] [--gaps 0.02,0.3,1] [--program PATH]

The link is cut for so long as `--firsts` says (0: not at all), is back for so long as `--gaps` says, and is cut again: the time
is from there to the leader's line that the host is lost. A host that is lost in the first cut is no case of this.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

from heading import add_program, found_program, print_heading
from recovery_hosts import SHELL
from shaped_hosts import missing

WAITING = """#!/bin/sh
echo "attempt $TORCHELASTIC_RESTART_COUNT rank $RANK"
exec sleep 600
"""
LIMIT = 60.0  # seconds


class Wire:
    """Two namespaces with this process's number in their names."""

    def __init__(self) -> None:
        self.names = [f"evens-{os.getpid()}-{host}" for host in range(2)]

    def __enter__(self) -> Wire:
        a, b = self.names
        for words in (
            f"netns add {a}",
            f"netns add {b}",
            f"link add eth0 netns {a} type veth peer name eth0 netns {b}",
            f"-n {a} addr add 10.79.0.1/24 dev eth0",
            f"-n {b} addr add 10.79.0.2/24 dev eth0",
            *(f"-n {name} link set {link} up" for name in (a, b) for link in ("lo", "eth0")),
        ):
            subprocess.run(["ip", *words.split()], check=True)
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Leader:
    """The job, and what it says, with the time of each line."""

    def __init__(self, program: str, folder: pathlib.Path, names: list[str]) -> None:
        for file, text in (("shell.sh", SHELL), ("waiting.sh", WAITING)):
            (folder / file).write_text(text)
            (folder / file).chmod(0o755)
        command = ["ip", "netns", "exec", names[0], "env", f"EVENSTEP_HOST_ID={names[0]}", program, "run"]
        command += ["--hosts", ",".join(f"{name}:1" for name in names), "--ssh", str(folder / "shell.sh")]
        command += ["--no-pin", "--no-monitor", "--log-rank", "all", "--max-restarts", "1000", "--name", "a"]
        self.process = subprocess.Popen(
            [*command, "--no-python", str(folder / "waiting.sh")],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line))

    def wait_for(self, pattern: str, times: int = 1) -> float:
        """When it had said so for the last of these times."""
        until = time.monotonic() + LIMIT
        at = 0.0
        while times > 0:
            try:
                at, line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                sys.exit(f"the job did not say {pattern!r} within {LIMIT:.0f} s")
            times -= re.search(pattern, line) is not None
        return at

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def cut_twice(leader: Leader, name: str, first: float, gap: float) -> float:
    """Seconds from the second cut."""
    link = ["ip", "-n", name, "link", "set", "eth0"]
    if first > 0:
        subprocess.run([*link, "down"], check=True)
        time.sleep(first)
        subprocess.run([*link, "up"], check=True)
        time.sleep(gap)
    begun = time.monotonic()
    subprocess.run([*link, "down"], check=True)
    lost = leader.wait_for(" is lost: ")
    subprocess.run([*link, "up"], check=True)
    return lost - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--firsts", default="0,1,2,3", help="seconds")
    parser.add_argument("--gaps", default="0.02,0.3,1", help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    add_program(parser)
    options = parser.parse_args()
    program = found_program(options)
    if why := missing():
        sys.exit(f"cuts were not measured: {why}")
    print_heading("A host's link is cut as an earlier cut of it has just ended: after how long is the host lost?")
    gaps = [float(one) for one in options.gaps.split(",")]
    chance = random.Random(options.seed)
    print("first cut   back for   seconds from the second cut until the host is lost", flush=True)
    with tempfile.TemporaryDirectory() as folder, Wire() as hosts:
        leader = Leader(program, pathlib.Path(folder), hosts.names)
        try:
            for first in (float(one) for one in options.firsts.split(",")):
                for gap in gaps if first > 0 else [0.0]:
                    times = []
                    for _ in range(options.rounds):
                        leader.wait_for(r"attempt \d+ rank \d", 2)
                        time.sleep(chance.uniform(1, 2))
                        times.append(cut_twice(leader, hosts.names[1], first, gap))
                    words = " ".join(f"{one:6.2f}" for one in times)
                    print(f"{first:7g} s  {gap:7g} s   {words}", flush=True)
        finally:
            leader.end()


if __name__ == "__main__":
    main()
