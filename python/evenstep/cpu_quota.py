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
from typing import NamedTuple

_OWN = 8  # steps after which the process's own groups and the one that binds are read again, …
_ALL = 64  # … and all others, too


class Bound(NamedTuple):
    """What was read together."""

    cores: float  # CPU seconds a second
    period_ns: int


_NONE = Bound(math.inf, 0)


class CpuQuota:
    def __init__(self, root: str = "", clock: Callable[[], int] = time.process_time_ns) -> None:
        """root: before /proc and the mount points. clock: ns of CPU time that the process has used."""
        self._clock = clock
        folders = list(_groups(root))
        self._groups = [_Group(folder) for folder in folders]
        self._own = [
            i for i, folder in enumerate(folders) if i == 0 or folders[i - 1].parent != folder
        ]  # deepest of a hierarchy
        self._asked = 0
        self._all()

    def _all(self) -> None:
        for group in self._groups:
            group.open()
        self._bounds = [group.bound() for group in self._groups]

    @property
    def bound(self) -> Bound:
        """What was allowed when that was last read; infinite where no group has a quota. Asked once a step."""
        self._asked += 1
        if self._asked % _ALL == 0:
            self._all()
        elif self._asked % _OWN == 0:
            return self.look()
        return min(self._bounds, default=_NONE)

    def look(self) -> Bound:
        """The same by what the process's own groups say now, and the one that bound it: a quota may be set while it runs."""
        self._read(self._own)
        least = min(self._bounds, default=_NONE)
        if least.cores < math.inf:
            self._read([self._bounds.index(least)])
        return min(self._bounds, default=_NONE)

    def _read(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._bounds[number] = self._groups[number].bound()

    def used_ns(self) -> int:
        return self._clock()


def allowed(root: str = "") -> float:
    """CPU seconds a second that control groups allow this process; infinite where they do not say."""
    groups = [_Group(folder) for folder in _groups(root)]
    for group in groups:
        group.open()
    return min((group.bound().cores for group in groups), default=math.inf)


def _groups(root: str) -> Iterator[Path]:
    """In each hierarchy with the cpu controller this process's group and those above it."""
    try:
        lines = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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


class _Group:
    """Its files stay open: to open them takes many times as long as to read them, in each step of a rank that is stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._period_us = -1, 0  # 0: beside the quota in the same file, as in version 2

    def open(self) -> None:
        """Its files, anew; version 1 has a period of its own, which is read here alone."""
        self._close()
        self._period_us = 0
        self._file = _open(f"{self._folder}/cpu.max")
        if self._file < 0:
            period = _open(f"{self._folder}/cpu.cfs_period_us")
            self._period_us = _number(_read(period))
            if period >= 0:
                os.close(period)
            self._file = _open(f"{self._folder}/cpu.cfs_quota_us") if self._period_us > 0 else -1

    def bound(self) -> Bound:
        """As the kernel has it now."""
        quota, _, period = _read(self._file).strip().partition(b" ")
        cores, each = _number(quota), self._period_us or _number(period)  # "max", -1: it has none
        return Bound(cores / each, each * 1000) if cores > 0 and each > 0 else _NONE

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self._close()


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _read(file: int) -> bytes:
    """Of a file that is small and made anew for who reads its beginning; nothing where it cannot be read."""
    try:
        return os.pread(file, 64, 0) if file >= 0 else b""
    except OSError:
        return b""


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        return 0
