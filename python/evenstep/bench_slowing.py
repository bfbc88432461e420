"""How ranks of `evenstep bench balance` are made slower while they run: by the CPU quota of their control group, which the
program made for them, or by busy neighbours on their CPUs. Nothing sleeps in place of work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from evenstep._core import EvenstepError

PERIOD_US = 10_000  # as of `evenstep run --cpu-quota`
LEAST_QUOTA_US = 1_000  # the kernel takes none below

MOST_NEIGHBOURS = 31
# of a process beside one of nice 0: what the kernel gives it by its nice value (sched_prio_to_weight: a quarter more a step)
LIGHTER = {1: 820, 2: 655, 3: 526, 4: 423, 5: 335, 6: 272, 7: 215, 9: 137, 11: 87, 14: 45}
WHOLE = 1024


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
        self._period = 0  # that was written last

    def hold(self, part: float) -> None:
        cores = min(part, 0.999) * self._cores
        period = max(PERIOD_US, round(LEAST_QUOTA_US / cores))
        quota = round(cores * period)
        if self._version == 2:
            (self._folder / "cpu.max").write_text(f"{quota} {period}\n", encoding="ascii")
        elif period == self._period:
            (self._folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="ascii")
        else:
            # a shorter period first would make a larger part of the old quota than there may be
            (self._folder / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")
            (self._folder / "cpu.cfs_period_us").write_text(f"{period}\n", encoding="ascii")
            (self._folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="ascii")
        self._period = period

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
    """Busy processes of the same weight: N of them leave a single thread beside them one part of N + 1. What is left over is that of
    a lighter one, which stands still while another part is asked for."""

    def __init__(self) -> None:
        self._busy: list[subprocess.Popen[bytes]] = []
        self._light: dict[int, list[subprocess.Popen[bytes]]] = {}  # of each nice value, one a CPU
        self._running = 0  # the nice value of those that are at work; 0: none

    def hold(self, part: float) -> None:
        beside = 1 / part - 1  # in the weight of this process
        whole = min(MOST_NEIGHBOURS, max(0, int(beside + 0.03)))
        wanted = whole * len(os.sched_getaffinity(0))
        while len(self._busy) > wanted:
            self._end(self._busy.pop())
        while len(self._busy) < wanted:
            self._busy.append(self._begin(0))
        self._run_light(nearest_lighter(beside - whole) if whole < MOST_NEIGHBOURS else 0)

    def close(self) -> None:
        self.hold(1.0)
        for one in (one for light in self._light.values() for one in light):
            self._end(one)
        self._light.clear()

    def _run_light(self, nice: int) -> None:
        if nice == self._running:
            return
        if nice and nice not in self._light:
            self._light[nice] = [self._begin(nice) for _ in os.sched_getaffinity(0)]
        for one in self._light.get(self._running, ()):
            one.send_signal(signal.SIGSTOP)
        for one in self._light.get(nice, ()):
            one.send_signal(signal.SIGCONT)
        self._running = nice

    @staticmethod
    def _begin(nice: int) -> subprocess.Popen[bytes]:
        loop = f"import os; os.nice({nice}); os.write(1, b'.')\nwhile True: pass"
        one = subprocess.Popen([sys.executable, "-SEc", loop], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert one.stdout is not None
        one.stdout.read(1)  # it is at work
        return one

    @staticmethod
    def _end(one: subprocess.Popen[bytes]) -> None:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


def nearest_lighter(weight: float) -> int:
    """The nice value of a process that is nearest to so much of this one's weight (0 to 1); 0: none at all."""
    known = {0: 0, **LIGHTER}
    return min(known, key=lambda nice: abs(known[nice] / WHOLE - weight))
