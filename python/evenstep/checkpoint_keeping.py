"""Which checkpoints a folder has, whose they are, and which of them may go.

A training has an identity, its lineage: drawn at its start, kept by restarts, inherited by what goes on from one of its
checkpoints. Two jobs that share a folder leave each other's alone.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.checkpoint_files import MANIFEST, read_manifest, verify
from evenstep.checkpoint_order import begin_turn, created_in, follow, next_order, order_of, turn_after
from evenstep.environment import cadence

Name = TypeVar("Name")
STEP_NAME = re.compile(r"step-\d+(-[0-9a-f]+)?\Z")
_DEFAULT_KEEP = 3


def checkpoint_folder() -> Path:
    """Where checkpoints without a path of their own go."""
    folder = os.environ.get("EVENSTEP_CHECKPOINT_DIR", "")
    if re.match(r"[A-Za-z0-9+]+://", folder):
        raise EvenstepError(
            "EVENSTEP_CHECKPOINT_DIR names a place to upload to, and no folder of this host\n"
            "  fix: name a folder; EVENSTEP_CHECKPOINT_TO has the place"
        )
    run = os.environ.get("EVENSTEP_RUN_DIR", "")
    return (Path(folder) if folder else Path(run or ".") / "checkpoints").absolute()


def folder_of(session: Any) -> Path:
    """The same for this training: a process set's checkpoints are in a folder of its name there."""
    return checkpoint_folder() / session.name


def own_checkpoint(session: Any, named: Path) -> Path:
    """What the launcher names, as this training means it: itself, or, where that is a checkpoint of another process set or
    of all ranks, the newest of its own beside it. Raises EvenstepError where there is none."""
    writer = ""
    if (named / MANIFEST).exists():
        writer = read_manifest(named)["state"].get("process_set", "")
        if writer == session.name:
            return named
        home = named.parent.parent if writer else named.parent
        if os.fspath(home) == os.environ.get("EVENSTEP_CHECKPOINT_MEMORY"):  # sets keep none in memory
            home = checkpoint_folder()
    else:
        home = named
    own = newest_checkpoint(home / session.name)
    if own is None and (session.name or writer):
        whose = f"the process set {session.name!r}" if session.name else "all ranks"
        raise EvenstepError(
            f"{home / session.name} has no whole checkpoint of {whose} to go on from\n"
            "  fix: name a checkpoint beside which there is one, or leave --resume out"
        )
    return own or named


def restarted_checkpoint(session: Any) -> Path | None:
    """The newest whole one that this training of the job wrote before it was restarted."""
    job = os.environ.get("EVENSTEP_JOB", "")
    whole, _ = _all_checkpoints(folder_of(session))
    return next((path for _, _, path in whole if job and _facts_of(path).job == job), None)


class Keep(NamedTuple):
    """Which of a training's checkpoints stay: the `newest`, and the first of every `steps` steps or `seconds`."""

    newest: int
    steps: int = 0
    seconds: float = 0.0

    def stays(self, own: list[tuple[str, int, Name]]) -> set[Name]:
        """Which of these (order, step, name), newest first, the rules keep."""
        firsts: dict[int, Name] = {}
        for order, step, name in reversed(own):
            period = self.period(step, created_in(order))
            if period is not None:
                firsts.setdefault(period, name)
        return {*(name for _, _, name in own[: self.newest]), *firsts.values()}

    def period(self, step: int, created: str) -> int | None:
        """Of two with the same one, the older stays; None: only the newest do."""
        if self.steps:
            return step // self.steps or None
        if not self.seconds:
            return None
        try:
            time = datetime.fromisoformat(created.replace("Z", "+00:00"))
            return int(time.timestamp() // self.seconds)
        except (ValueError, OverflowError):  # a made-up manifest's
            return None


def keeping() -> Keep:
    """What the launcher's --keep and --keep-every say."""
    text = os.environ.get("EVENSTEP_CHECKPOINT_KEEP", "") or str(_DEFAULT_KEEP)
    if not text.isdigit() or int(text) < 1:
        raise EvenstepError(
            f"EVENSTEP_CHECKPOINT_KEEP is {text!r}\n  fix: give the number of checkpoints to keep, at least 1"
        )
    return Keep(
        int(text), *cadence("EVENSTEP_CHECKPOINT_KEEP_EVERY", os.environ.get("EVENSTEP_CHECKPOINT_KEEP_EVERY", ""))
    )


def lineage_of(session: Any) -> str:
    """The training's identity; rank 0's counts. Attempts of one job have the job's."""
    if not session.lineage:
        job = os.environ.get("EVENSTEP_JOB", "")
        session.lineage = job if re.fullmatch(r"[0-9a-f]{8,}", job) else secrets.token_hex(8)
    return str(session.lineage)


def order_beside(folder: Path) -> list[int]:
    """Of a checkpoint that is put there, and is the newest beside others."""
    newest = max((order for order, _, _ in _all_checkpoints(folder.absolute().parent)[0]), default="")
    return [turn_after([newest] if newest else []), 0, 0]


def _begin_turn(session: Any) -> None:
    begin_turn(session, lambda: [order for order, _, _ in _all_checkpoints(folder_of(session))[0]])


class _Facts(NamedTuple):
    """What keeping asks of a checkpoint's manifest."""

    version: tuple[int, int, int, int, int]  # which file that was
    order: str
    step: int
    lineage: str
    job: str
    sizes: tuple[tuple[str, int], ...]  # of its files, by name


_known: dict[Path, _Facts] = {}  # by folder: a manifest is read once, for each new checkpoint asks of all others


def _facts_of(path: Path) -> _Facts:
    """Raises EvenstepError, OSError, ValueError, KeyError where there is no manifest, or a damaged one."""
    there = (path / MANIFEST).stat()
    version = there.st_dev, there.st_ino, there.st_ctime_ns, there.st_mtime_ns, there.st_size
    known = _known.get(path)
    if known is None or known.version != version:
        manifest = read_manifest(path)
        state = manifest["state"]
        known = _known[path] = _Facts(
            version,
            order_of(manifest),
            state.get("step", 0),
            str(state.get("lineage", "")),
            str(state.get("job", "")),
            tuple((entry["name"], entry["bytes"]) for entry in manifest["files"]),
        )
    return known


def _forget_others(folder: Path, there: Collection[Path]) -> None:
    for path in [one for one in list(_known) if one.parent == folder and one not in there]:  # other threads add some
        _known.pop(path, None)


def _is_whole(path: Path, facts: _Facts) -> bool:
    """By the sizes of its files."""
    found = [(path / name).lstat() for name, _ in facts.sizes]
    return all(stat.S_ISREG(one.st_mode) and one.st_size == size for one, (_, size) in zip(found, facts.sizes))


def _newest_order(folder: Path) -> str:
    """Of what is in the folder, whose ever."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if STEP_NAME.match(path.name):
            with suppress(EvenstepError, OSError, ValueError, KeyError):  # it goes, or is damaged
                found[path] = _facts_of(path).order
    _forget_others(folder, found)
    return max(found.values(), default="")


def order_for(session: Any) -> list[int]:
    """The place among others of a checkpoint that is written now: behind all that its folder has, also where other jobs
    write there meanwhile, and all that is known of the place to which it goes, too."""
    _begin_turn(session)
    elsewhere: str = getattr(session, "order_elsewhere", "")
    return next_order(session, max(_newest_order(folder_of(session)), elsewhere))


def inherit(session: Any, folder: Path | None, state: dict[str, Any]) -> None:
    """The session goes on with the training that wrote the checkpoint."""
    _begin_turn(session)
    follow(session, state)
    session.lineage = state.get("lineage", "")
    session.resumed_from = folder


def _lineage_in(path: Path) -> str | None:
    """None: there is no telling."""
    try:
        return _facts_of(path).lineage
    except (EvenstepError, OSError, ValueError, KeyError):
        return None


def _may_remove(path: Path, lineage: str) -> bool:
    """Whether it is that training's by its manifest as it is now. One that the user has changed, a file of it a symbolic link
    to a larger disk, is left alone: its manifest is refused."""
    try:
        return bool(read_manifest(path)["state"].get("lineage", "") == lineage)
    except (EvenstepError, OSError, ValueError, KeyError, AttributeError):
        return False


def step_folder(folder: Path, step: int, lineage: str) -> tuple[Path, bool]:
    """The folder for a training's checkpoint of that step, and whether one of its own is there, to be replaced. Where
    another training has the plain name, this one's carries its lineage."""
    plain = folder / f"step-{step:08d}"
    if (plain / MANIFEST).exists() and _lineage_in(plain) != lineage:
        plain = folder / f"{plain.name}-{lineage[:8]}"
    return plain, _lineage_in(plain) == lineage


def _all_checkpoints(folder: Path) -> tuple[list[tuple[str, int, Path]], list[Path]]:
    """((order, step, path) of the whole ones, newest first; damaged ones) among folder/step-N."""
    whole, damaged = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not STEP_NAME.match(path.name) or not (path / MANIFEST).exists():
            continue
        try:
            facts = _facts_of(path)
            right = _is_whole(path, facts)
        except (EvenstepError, OSError, ValueError, KeyError):
            right = False
        if right:
            whole.append((facts.order, facts.step, path))
        else:
            damaged.append(path)
    return sorted(whole, reverse=True), damaged


def newest_checkpoint(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """The newest checkpoint in `folder` (default: where es.checkpoint writes) whose files have their sizes."""
    whole, _ = _all_checkpoints(checkpoint_folder() if folder is None else Path(folder))
    return whole[0][2] if whole else None


def retain(
    newest: Path,
    keep: Keep,
    lineage: str,
    verified: Path | None,
    spared: frozenset[Path] = frozenset(),
    damaged_newest: Callable[[], None] = lambda: None,
) -> Path | None:
    """Removes what the rules do not keep of this lineage's whole checkpoints, and its damaged ones; called when `newest` is
    written. verified: the last that is known to be right (it was loaded, or read back here). None goes before another one
    that stays was read back and found right. spared: what is being uploaded stays for now. damaged_newest: called where
    `newest` was read back and is not right. Returns the last one that is
    known to be right now."""
    whole, damaged = _all_checkpoints(newest.parent)
    own = [(order, step, path) for order, step, path in whole if path == newest or _lineage_in(path) == lineage]
    # what was written now counts as the newest whatever the clock says
    stays = keep.stays(sorted(own, key=lambda one: one[2] != newest)) | spared
    goes = [path for _, _, path in own if path not in stays]
    if goes and verified not in stays:
        try:
            verify(newest, read_manifest(newest))
            verified = newest
        except EvenstepError as error:
            damaged_newest()
            _warn(error)
            goes = []
    for path in [*goes, *(path for path in damaged if path != verified)]:
        if not _may_remove(path, lineage):
            continue
        try:
            _core.checkpoint_remove(path)
        except EvenstepError as error:
            _warn(error)
    return verified


def _warn(error: EvenstepError) -> None:
    warnings.warn(f"an old checkpoint stays: {error}", RuntimeWarning, stacklevel=3)
