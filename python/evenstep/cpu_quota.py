"""What the CPU quotas of this process's control groups allow, and how long the CPU time that it used lasts at that.

A quota lets a process run at full speed until its period's time is used up, and stops it until the next. One that waits for other
ranks in every step has a whole period's time each time that it goes on: measured by the clock it looks faster than its quota allows,
for as long as it waits. What it cannot outrun is the CPU time that a step takes it, divided by its quota.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_OWN, _ALL = 8, 64  # steps after which the process's own groups are read again, and those above, too


class CpuQuota:
    def __init__(self, root: str = "", clock: Callable[[], int] = time.process_time_ns) -> None:
        """root: before /proc and the mount points. clock: ns of CPU time that the process has used."""
        self._clock = clock
        self._groups = list(_groups(root))
        self._least = [_quota(group) for group in self._groups]
        self._own = [number for number, group in enumerate(self._groups) if self._is_own(number)]
        self._asked = 0

    def _is_own(self, number: int) -> bool:
        """The deepest one of its hierarchy."""
        return number == 0 or self._groups[number - 1].parent != self._groups[number]

    @property
    def cores(self) -> float:
        """CPU seconds a second that were allowed when that was last read; infinite where no group has a quota. Asked once a step."""
        self._asked += 1
        if self._asked % _ALL == 0:
            self._read(range(len(self._groups)))
        elif self._asked % _OWN == 0:
            self._read(self._own)
        return min(self._least, default=math.inf)

    def look(self) -> float:
        """The same by what the process's own groups say now: a quota may be set while it runs."""
        self._read(self._own)
        return min(self._least, default=math.inf)

    def _read(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._least[number] = _quota(self._groups[number])

    def used_ns(self) -> int:
        return self._clock()


def allowed(root: str = "") -> float:
    """CPU seconds a second that control groups allow this process; infinite where they do not say."""
    return min(map(_quota, _groups(root)), default=math.inf)


def _groups(root: str) -> Iterator[Path]:
    """In each hierarchy with the cpu controller this process's group and those above it."""
    try:
        lines = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = Path(f"{root}/sys/fs/cgroup{'/' + 'cpu' if controllers else ''}")
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            yield group
            if group == top:
                break


def _read(path: str) -> bytes | None:
    """Of a file that is small and made anew for each reader; pathlib would take several times as long, in each step."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(file, 64)
    except OSError:
        return None
    finally:
        os.close(file)


def _quota(group: Path) -> float:
    whole = _read(f"{group}/cpu.max")
    if whole is not None:
        quota, _, period = whole.strip().partition(b" ")
    else:
        quota, period = (_read(f"{group}/cpu.cfs_{name}_us") or b"" for name in ("quota", "period"))
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max", or there is none
        return math.inf
