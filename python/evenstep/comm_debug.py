"""EVENSTEP_COMM_DEBUG: how each group moves its data, and what it has learnt, on standard error."""

from __future__ import annotations

import os
import sys

from evenstep import _core


def _speaks(rank: int) -> bool:
    """EVENSTEP_COMM_DEBUG=1 lets rank 0 of a group speak, =all each rank."""
    wanted = os.environ.get("EVENSTEP_COMM_DEBUG", "0")
    return wanted not in ("", "0") and (rank == 0 or wanted == "all")


def note(words: str, rank: int = 0) -> None:
    """What was chosen, and why. `rank`: this process's in the group that is chosen for."""
    if _speaks(rank):
        print(f"evenstep: comm: {words}", file=sys.stderr, flush=True)


def explain(name: str, comm: _core.Comm | None, when: str) -> None:
    """How a group of the engine moves its data. Of one over Gloo (None) all was said when it was chosen."""
    if comm is not None and not comm.closed:
        note(f"group {name}, rank {comm.rank}, {when}: {comm.description}", comm.rank)
