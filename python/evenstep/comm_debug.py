"""EVENSTEP_COMM_DEBUG: how each group moves its data, and what it has learnt, on standard error."""

from __future__ import annotations

import os
import sys

from evenstep import _core


def note(words: str) -> None:
    """With EVENSTEP_COMM_DEBUG set: what was chosen for this process, and why."""
    if os.environ.get("EVENSTEP_COMM_DEBUG", "0") not in ("", "0"):
        print(f"evenstep: comm: {words}", file=sys.stderr, flush=True)


def explain(name: str, comm: _core.Comm | None, when: str) -> None:
    """With EVENSTEP_COMM_DEBUG=1 one line of rank 0 of the group, with =all one of each rank; else nothing."""
    wanted = os.environ.get("EVENSTEP_COMM_DEBUG", "0")
    if comm is None or wanted in ("", "0") or comm.closed or (comm.rank != 0 and wanted != "all"):
        return
    words = f"evenstep: comm: group {name}, rank {comm.rank}, {when}: {comm.description}"
    print(words, file=sys.stderr, flush=True)
