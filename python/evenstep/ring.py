"""The telemetry ring of this rank: for the process that the launcher started, not for those that it starts."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import warnings

from evenstep import _core
from evenstep.ranges import open_ranges
from evenstep.stacks import tell_stacks

_VARIABLE = "EVENSTEP_TELEMETRY_FD"
_TIMELINE = "EVENSTEP_TIMELINE"
_RECORDS = 1 << 16

_last: tuple[int, _core.Telemetry] | None = None
"""The process that opened a ring, and the ring."""
_early: tuple[int, _core.Telemetry] | None = None
"""The same, where groups were opened before there was a session."""
_names: dict[str, int] = {}


def open_ring(fd: int, rank: int) -> _core.Telemetry:
    """The writer of the rank's ring; one that writes nowhere where `fd` is no telemetry segment in this process.

    A ring has one writer: processes that this one starts do not get the variable. Those started before, and the script
    behind a wrapper of the user's, may have it though the descriptor was closed, or is another file by now.
    """
    global _last
    if fd < 0 and _early is not None and _early[0] == os.getpid():
        return _early[1]
    if fd >= 0 and not _is_segment(fd):
        if multiprocessing.parent_process() is None:
            warnings.warn(
                f"{_VARIABLE} is {fd}, which is no telemetry segment in this process (`evenstep run` started another "
                "one, which started this?), so the steps of this rank are not recorded\n"
                "  fix: let `evenstep run` start the script itself",
                stacklevel=2,
            )
        fd = -1
    if fd >= 0:
        tell_stacks()
    ring = _core.Telemetry(fd, rank) if fd >= 0 else _own_ring(rank)
    os.environ.pop(_VARIABLE, None)
    os.environ.pop(_TIMELINE, None)
    _last = (os.getpid(), ring)
    return ring


def open_late(ring: _core.Telemetry, fd: int, rank: int) -> None:
    """The same for one that writes nowhere yet."""
    global _last
    if fd >= 0 and _is_segment(fd):
        tell_stacks()
        ring.open(fd, rank)
    os.environ.pop(_VARIABLE, None)
    os.environ.pop(_TIMELINE, None)
    _last = (os.getpid(), ring)


def _own_ring(rank: int) -> _core.Telemetry:
    """Without an agent: one that nobody reads, or, with EVENSTEP_TIMELINE=FILE, one that becomes FILE.rank-N.json."""
    asked = os.environ.get(_TIMELINE, "")
    if asked in ("", "0"):
        return _core.Telemetry(-1, rank)
    name = "timeline" if asked == "1" else asked[: -len(".json")] if asked.endswith(".json") else asked
    path = f"{name}.rank-{rank}.json"
    if not _lock(path, there=True):
        warnings.warn(
            f"another process writes {path} now, so the timeline of this rank is not written\n"
            f"  fix: give jobs that run at once names of their own ({_TIMELINE}=FILE)",
            stacklevel=2,
        )
        return _core.Telemetry(-1, rank)
    fd = _core.telemetry_segment(1, _RECORDS)
    try:
        ring = _core.Telemetry(fd, 0)
        atexit.register(_close, _core.Timeline(fd, rank, path))
        _lock(path, there=False)
    finally:
        os.close(fd)
    return ring


def _lock(path: str, there: bool) -> bool:
    """Locks the file that this process writes, until its end; or, `there`, says whether nobody has done so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # not there; or the one who writes it will say why not
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        return not isinstance(error, BlockingIOError)  # a file system without locks: as if nobody had
    if there:
        os.close(fd)
    return True


def _close(timeline: _core.Timeline) -> None:
    try:
        timeline.close()
    except _core.EvenstepError as error:
        warnings.warn(f"the timeline is not whole: {error}", stacklevel=2)


def _is_segment(fd: int) -> bool:
    try:
        return "memfd:evenstep-telemetry" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _of_process() -> _core.Telemetry:
    """Where this process's groups are recorded: the session's ring, or, where groups are opened without one, its own."""
    global _early
    if _last is not None and _last[0] == os.getpid():
        return _last[1]
    fd = os.environ.get(_VARIABLE, "")
    rank = next((v for v in map(os.environ.get, ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")) if v), "")
    known = int(rank) if rank.isdecimal() else 0
    ring = open_ring(int(fd) if fd.isdecimal() and rank.isdecimal() else -1, known)
    _early = (os.getpid(), ring)
    return ring


def watched_ring() -> _core.Telemetry | None:
    """This process's ring, where an agent may read it; none in a process that a rank has started."""
    fd = os.environ.get(_VARIABLE, "")
    known = _last is not None and _last[0] == os.getpid()
    return _of_process() if known or (fd.isdecimal() and _is_segment(int(fd))) else None


def record_calls(comm: _core.Comm | _core.DeviceComm, name: str) -> None:
    """Has the group's calls counted, and recorded where somebody asked for a timeline. Where a name is used again, the
    groups of that name are told apart by how often it was."""
    open_ranges()
    _names[name] = count = _names.get(name, 0) + 1
    comm.record(_of_process(), name if count == 1 else f"{name} ({count})")
