"""With which checkpoint the next one may share files, so that what has not changed is not written again. Rank 0 decides: it
writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenstep._core import EvenstepError


def previous(session: Any) -> Path | None:
    """One that is known to be damaged shares none: memory has what it lost."""
    if not getattr(session, "shares_files", True):
        return None
    last: Path | None = getattr(session, "last_checkpoint", None)
    loaded = None if session.loaded is None else session.loaded.folder
    return last or (loaded if isinstance(loaded, Path) else None)  # who joined has its state from a rank


def written(session: Any, folder: Path, shared: Path | None) -> None:
    """A checkpoint is whole. shared: with which it was to share, which may have been found damaged meanwhile."""
    session.last_checkpoint = folder
    if shared is None:
        session.shares_files = True


def share_none(session: Any) -> None:
    """Until the next one is whole."""
    session.shares_files = False


@contextmanager
def reading(session: Any) -> Iterator[None]:
    """Damage that is found, on whichever rank, may be that of the newest one, too: older ones share files with it."""
    try:
        yield
    except EvenstepError as error:
        if " is damaged" in str(error):
            share_none(session)
        raise


def read_whole(session: Any, folder: Path) -> None:
    """What training goes on from was compared, every file of it."""
    session.last_checkpoint, session.shares_files = folder, True
