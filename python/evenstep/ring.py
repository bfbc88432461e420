"""The telemetry ring of this rank: for the process that the launcher started, not for those that it starts."""

from __future__ import annotations

import multiprocessing
import os
import warnings

from evenstep import _core

_VARIABLE = "EVENSTEP_TELEMETRY_FD"


def open_ring(fd: int, rank: int) -> _core.Telemetry:
    """The writer of the rank's ring; one that writes nowhere where `fd` is no telemetry segment in this process.

    A ring has one writer: processes that this one starts do not get the variable. Those started before, and the script
    behind a wrapper of the user's, may have it though the descriptor was closed, or is another file by now.
    """
    if fd >= 0 and not _is_segment(fd):
        if multiprocessing.parent_process() is None:
            warnings.warn(
                f"{_VARIABLE} is {fd}, which is no telemetry segment in this process (`evenstep run` started another "
                "one, which started this?), so the steps of this rank are not recorded\n"
                "  fix: let `evenstep run` start the script itself",
                stacklevel=2,
            )
        fd = -1
    ring = _core.Telemetry(fd, rank)
    os.environ.pop(_VARIABLE, None)
    return ring


def _is_segment(fd: int) -> bool:
    try:
        return "memfd:evenstep-telemetry" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
