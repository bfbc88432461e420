"""How ranks of `evenstep bench balance` are made slower while they run: by the CPU quota of their control group, which the
program made for them, or by busy neighbours on their CPUs. Nothing sleeps in place of work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from evenstep._core import EvenstepError

PERIOD_US = 10_000  # as of `evenstep run --cpu-quota`
LEAST_QUOTA_US = 1_000  # the kernel takes none below

MOST_NEIGHBOURS = 31


class Slowing(Protocol):
    def hold(self, part: float) -> None:
        """From now on this process gets so much of its CPUs (0 < part <= 1; 1: all that they have)."""

    def close(self) -> None:
        """All is as it was."""


def slowing(way: str) -> Slowing:
    return Quota() if way == "quota" else Neighbours()


class Quota:
    def __init__(self, root: str = "") -> None:
        self._folder, self._version = own_group(root)
        if not self._folder.name.startswith("evenstep-"):  # never another's
            raise EvenstepError(
                f"this rank is in the control group {self._folder}, which Evenstep has not made, so it sets no quota there\n"
                "  fix: start it with `evenstep bench balance`"
            )
        self._cores = len(os.sched_getaffinity(0))

    def hold(self, part: float) -> None:
        cores = min(part, 0.999) * self._cores
        period = max(PERIOD_US, round(LEAST_QUOTA_US / cores))
        quota = round(cores * period)
        if self._version == 2:
            (self._folder / "cpu.max").write_text(f"{quota} {period}\n", encoding="ascii")
        else:
            # a shorter period first would make a larger part of the old quota than there may be
            (self._folder / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")
            (self._folder / "cpu.cfs_period_us").write_text(f"{period}\n", encoding="ascii")
            (self._folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="ascii")

    def close(self) -> None:
        self.hold(1.0)


def own_group(root: str = "") -> tuple[Path, int]:
    """Where this process's control group with the cpu controller is mounted, and its version. `root`: before /proc and the
    mount points."""
    groups = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    mounts = Path(f"{root}/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    for version in (1, 2):
        for line in groups:
            _, controllers, group = line.split(":", 2)
            if not (controllers == "" if version == 2 else "cpu" in controllers.split(",")):
                continue
            for mount in mounts:
                fields, _, tail = mount.partition(" - ")
                kind, _, options = tail.split(" ", 2)
                if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or "cpu" in options.split(",")):
                    shown, point = fields.split(" ")[3:5]
                    below = group[len(shown) :] if shown != "/" and group.startswith(shown) else group
                    folder = Path(f"{root}{point}{below}")
                    if (folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
                        return folder, version
    raise EvenstepError("this process is in no control group with a CPU quota")


class Neighbours:
    """Busy processes of the same weight: N of them leave a single thread beside them one part of N + 1."""

    def __init__(self) -> None:
        self._busy: list[subprocess.Popen[bytes]] = []

    def hold(self, part: float) -> None:
        wanted = min(MOST_NEIGHBOURS, max(0, round(1 / part) - 1)) * len(os.sched_getaffinity(0))
        while len(self._busy) > wanted:
            self._end(self._busy.pop())
        while len(self._busy) < wanted:
            loop = "import os; os.write(1, b'.')\nwhile True: pass"
            one = subprocess.Popen([sys.executable, "-SEc", loop], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            self._busy.append(one)
            assert one.stdout is not None
            one.stdout.read(1)  # it is at work

    def close(self) -> None:
        self.hold(1.0)

    @staticmethod
    def _end(one: subprocess.Popen[bytes]) -> None:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()
