"""Checkpoints in the host's memory between those on the disk (--checkpoint-memory K): whole ones, of the same form, in a folder
of a memory file system that the agent has made. The newest is there, and the one that is being written: the one before
goes when the next is whole. The agent sends it to other hosts' memory (src/orchestrator/copies.h), and restarts from the
newest that anybody has.

The state is copied as for the disk (evenstep.checkpoint_background); one that is due while another one is still being written,
to the memory or to the disk, is left out: training never waits for these."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from evenstep import _core
from evenstep.checkpoint import write_behind
from evenstep.checkpoint_files import MANIFEST, PARTIAL
from evenstep.checkpoint_snapshot import Snapshot
from evenstep.checkpoint_state import capture, pack_random
from evenstep.exchange_state import capture_exchange
from evenstep.memory import HostMemory


class _Kept:
    """What rank 0 knows of those that it has written."""

    def __init__(self) -> None:
        self.newest: Path | None = None
        self.told: set[str] = set()

    def tell_once(self, what: str, text: str) -> None:
        if what not in self.told:
            self.told.add(what)
            sys.stderr.write(f"evenstep: {text}\n")


_kept = _Kept()


def keep(session: Any) -> None:
    """Collective, between two steps: rank 0 keeps the state in its host's memory."""
    with session.steps.apart(_core.SPAN_CHECKPOINT):  # where a rank is lost, those that are left keep it
        session.synchronise_models()  # a call of its own, as before a checkpoint on disk
        session.call_by_all(lambda: _keep(session))


def _keep(session: Any) -> None:
    random_states = session.all_gather_bytes(pack_random(session.pending_random))
    session.exchange_state = capture_exchange(session)
    folder = os.environ.get("EVENSTEP_CHECKPOINT_MEMORY", "")
    try:
        if session.rank == 0 and folder:
            _take(session, Path(folder), random_states)
    except Exception as error:  # whatever an object's state_dict raises: no training ends for want of these
        _failed(error)
    finally:
        session.exchange_state = {}


def _take(session: Any, folder: Path, random_states: list[bytes]) -> None:
    snapshot = capture(session, random_states, session.user_state)
    snapshot.state["between"] = False
    size = snapshot.size
    if not _has_room(folder, size):
        _kept.tell_once("room", f"warning: {_megabytes(size)} of free memory are not there: no checkpoints in memory")
        return
    if _write(folder / f"step-{int(session.step):08d}", snapshot):
        _kept.tell_once(
            "kept",
            f"checkpoints of {_megabytes(size)} are kept in this host's memory: up to {_megabytes(3 * size)}, what is "
            "being copied and written among them",
        )


def _write(path: Path, snapshot: Snapshot) -> bool:
    def after() -> None:
        _kept.newest = path
        for other in path.parent.iterdir():
            if other != path and not other.name.endswith(PARTIAL):
                _core.checkpoint_remove(other)

    def failed(error: BaseException) -> bool:
        _failed(error)
        return True

    return write_behind(path, snapshot, (path / MANIFEST).exists(), _kept.newest, after, failed)


def _failed(error: BaseException) -> None:
    _kept.tell_once("failed", f"warning: a checkpoint in memory was not written, training goes on: {error}")


def _has_room(folder: Path, size: int) -> bool:
    """For one more beside what is there: of the file system, and of the host's memory."""
    disk = os.statvfs(folder)
    memory = HostMemory()
    use = memory.read()
    return size < disk.f_bavail * disk.f_frsize and size + memory.reserve * use.limit < use.available


def _megabytes(size: int) -> str:
    return f"{max(size, 10**5) / 1e6:.1f} MB"
