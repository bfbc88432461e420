"""es.checkpoint and es.load_checkpoint: durable state of everything that was prepared, and going on from it.

The session calls `automatic` on all ranks at the same moment, between two steps: at each Nth, or where rank 0's clock
said so in the vote. es.prepare makes a `Resume` where EVENSTEP_RESUME names a checkpoint."""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

from evenstep import _core, checkpoint_shared
from evenstep._core import EvenstepError
from evenstep.checkpoint_background import Background, Saved, saved_words
from evenstep.checkpoint_files import MANIFEST, PARTIAL, owner, read_manifest, sync_folder, write_tensors
from evenstep.checkpoint_keeping import (
    checkpoint_folder,
    folder_of,
    inherit,
    keeping,
    lineage_of,
    newest_checkpoint,
    own_checkpoint,
    restarted_checkpoint,
    retain,
    step_folder,
)
from evenstep.checkpoint_reading import check_sizes
from evenstep.checkpoint_remote import Altered, fetch_newest, is_url
from evenstep.checkpoint_room import Room
from evenstep.checkpoint_snapshot import Snapshot
from evenstep.checkpoint_state import KINDS, Loader, capture, load_random, pack_random
from evenstep.checkpoint_uploads import OlderStay, begin_look, newest_elsewhere, under_way, upload, wait_for_uploads
from evenstep.errors import words_of
from evenstep.exchange_state import capture_exchange, restore_exchange
from evenstep.generation_gift import Gift

__all__ = ["Resume", "automatic", "checkpoint", "load_checkpoint", "newest_checkpoint"]

# -- writing --


def _make_parent(folder: Path) -> None:
    """With those above it; each new one's name is on the disk, too."""
    parent = folder.parent.absolute()
    if parent.is_dir():
        return
    new = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for path in new:
            with suppress(PermissionError):  # one that may be written to, and not read
                sync_folder(path.parent)
    except OSError as error:
        raise EvenstepError(
            f"the folder for checkpoints {folder.parent} cannot be made: {error.strerror}\n"
            "  fix: choose another one with --checkpoint-dir"
        ) from None


def _write(folder: Path, snapshot: Snapshot, replace: bool, previous: Path | None) -> Saved:
    """Writes one checkpoint, or leaves nothing."""
    _make_parent(folder)
    writer = _core.CheckpointWriter(folder, replace, snapshot.size + len(snapshot.text), previous, *owner())
    try:
        for name, tensors in snapshot.files.items():
            write_tensors(writer, name, tensors, snapshot.metadata.get(name, ()))
        for name, content in snapshot.tables.items():
            writer.add(name, content)
        return writer.commit(snapshot.text)
    finally:
        writer.abandon()  # nothing where it was committed


_background = Background()
_room = Room()  # for automatic ones


def is_writing() -> bool:
    """Whether this process writes a checkpoint in the background."""
    return _background.busy


def expect_automatic(session: Any) -> None:
    """Makes ready for automatic checkpoints what may not be had when they are due."""
    _background.begin_thread()
    begin_look(session)


def _finish_at_exit() -> None:
    error = _background.join()
    if error is not None:
        sys.stderr.write(f"evenstep: the last checkpoint was not written: {error}\n")
    wait_for_uploads()


atexit.register(_finish_at_exit)  # the thread is a daemon's: this waits for what it writes, and tells its error


def _join_background() -> None:
    before = _background.join()
    if before is not None:
        raise EvenstepError(f"the checkpoint before this one was not written: {before}")


def _replays(session: Any) -> bool:
    """Whether the script, which runs again from its beginning, has not come to where its checkpoint was written: its
    calls were made before then. What follows es.load_checkpoint at once is a new call."""
    if session.loaded is None or session.loaded.step != session.step:
        return False
    trained = [loader for loader in session.loaders.values() if loader.train]
    return any(loader.resuming if session.loaded.by_launcher else loader.replaying for loader in trained)


_told: set[str] = set()


def _tell_once(session: Any, what: str, text: str) -> None:
    if session.rank == 0 and what not in _told:
        _told.add(what)
        sys.stderr.write(f"evenstep: {text}\n")


def _is_loaded(session: Any, folder: Path) -> bool:
    """Whether this call of the script wrote the checkpoint that it goes on from."""
    loaded = session.loaded
    if loaded is None or not loaded.between or not isinstance(loaded.folder, Path):
        return False
    return bool(folder.resolve() == loaded.folder.resolve())


def _on_rank_zero(
    session: Any,
    path: Path | None,
    random_states: list[bytes],
    extra: Any,
    wait: bool,
    between: bool = False,
    told: Told | None = None,
) -> tuple[Path, bool]:
    """The folder, and whether it was left as it was: the call is one of before the checkpoint that the script resumes.
    told: says that the write in the background of a step failed; None: the next call raises it."""
    _join_background()
    step = int(session.step)
    lineage = lineage_of(session)
    folder, replace = step_folder(folder_of(session), step, lineage) if path is None else (path, True)
    if path is not None:
        _check_not_anothers(session, path)
    if replace and _replays(session) and (folder / MANIFEST).exists():
        _tell_once(
            session,
            "replayed",
            f"the checkpoint {folder} stays as it is: the script is not yet where the run that it resumes was, and wrote "
            "it there (so are others until then)",
        )
        return folder, True
    if told is not None and _room.is_lacking():
        return folder, True
    keep = keeping() if path is None else None
    session.order_elsewhere = newest_elsewhere(session)
    snapshot = capture(session, random_states, extra)
    snapshot.state["between"] = between

    previous = checkpoint_shared.previous(session)
    if told is not None:
        _room.begin(session, folder.parent, snapshot.size + len(snapshot.text), previous is not None)

    def after(saved: Saved) -> None:
        checkpoint_shared.written(session, folder, previous)
        _room.took(session, saved[0] - saved[1] - saved[2])
        session.telemetry.event(_core.EVENT_CHECKPOINT, step, step, saved_words(folder, saved))
        if told is not None:
            _room.written(session, step)
        if keep is not None:
            session.resumed_from = retain(folder, keep, lineage, session.resumed_from, under_way(), damaged)
        upload(session, folder, keep, lineage, not_up)

    def damaged() -> None:
        checkpoint_shared.share_none(session)

    def not_up(error: BaseException) -> None:
        what, _, fix = str(error).partition("\n  fix: ")
        text = f"warning: {what}; it is tried again with the next one"
        if isinstance(error, OlderStay):
            once = "older"
        else:
            text += ", and training goes on"
            once = what if isinstance(error, Altered) else "upload"
        if isinstance(error, Altered):  # there or here, before it was sent
            damaged()
        _tell_once(session, once, f"{text}\n  fix: {fix}" if fix else text)

    def failed(error: BaseException) -> bool:
        if told is not None:
            told(step, error)
        return told is not None

    if not wait:
        _make_parent(folder)
        if _background.take(folder, snapshot, replace, previous):
            # begins once the others know: they wait for this one's answer
            _background.prepare(lambda: after(_background.saved), failed)
            return folder, False
        _tell_once(
            session,
            "room",
            "warning: checkpoints are written while training stands still: the free memory does not hold a copy of the "
            "state",
        )
    after(_write(folder, snapshot, replace, previous))
    return folder, False


def write_behind(
    folder: Path,
    snapshot: Snapshot,
    replace: bool,
    previous: Path | None,
    after: Callable[[], None],
    failed: Callable[[BaseException], bool],
) -> bool:
    """Copies a state and writes it while training goes on. False where another one is being written, or where the free
    memory does not hold the copy: nothing was done."""
    if _background.busy or not _background.take(folder, snapshot, replace, previous):
        return False
    _background.start(after, failed)
    return True


def _check_not_anothers(session: Any, path: Path) -> None:
    """Process sets that name one folder would take turns in it."""
    if not (path / MANIFEST).exists():
        return
    writer = read_manifest(path)["state"].get("process_set", "")
    if writer != session.name:
        whose = f"the process set {writer!r}" if writer else "all ranks"
        raise EvenstepError(
            f"es.checkpoint: {path} is a checkpoint of {whose}\n  fix: give each process set a path of its own"
        )


Told = Callable[[int, BaseException], None]  # of the write of a step, in the background, that failed


def _save(
    session: Any, path: Path | None, extra: Any, wait: bool, between: bool = False, told: Told | None = None
) -> Path:
    """All ranks call it; rank 0 writes, its outcome is everyone's. between: the script asked for it, between two
    iterations, so that a resumed one comes by the call again."""
    session.join()
    if session.joining:  # in a lost rank's place, with nobody: the others have it, or will not make this call any more
        _tell_once(
            session,
            "joining",
            f"es.checkpoint writes nothing before the first batch of a process that takes a place (rank {session.place[0]}): the "
            "other ranks have made these calls without it",
        )
        return step_folder(folder_of(session), int(session.step), lineage_of(session))[0] if path is None else path
    causes: list[Exception] = []
    with session.steps.apart(_core.SPAN_CHECKPOINT):  # where a rank is lost, those that are left write it
        session.synchronise_models()  # a call of its own: where a rank is lost later, it is not made again
        outcome = session.call_by_all(lambda: _save_apart(session, path, extra, wait, between, told, causes))
        return _go_on_from(session, json.loads(outcome), extra, causes)


def _go_on_from(session: Any, result: dict[str, Any], extra: Any, causes: list[Exception]) -> Path:
    """After the call, and no part of it: a rank may have its outcome from another one that came out of it, and all have made it,
    also where it is an error."""
    if not result.get("kept"):
        session.user_state = extra
    if "error" in result:
        raise EvenstepError(result["error"]) from next(iter(causes), None)
    if result["loaded"]:  # what the script does to its objects from here on is not in the checkpoint
        session.put_objects_back()
    return Path(result["path"])


def _save_apart(
    session: Any, path: Path | None, extra: Any, wait: bool, between: bool, told: Told | None, causes: list[Exception]
) -> str:
    """The outcome, in JSON. causes: of an error on this rank, that is not in words of ours."""
    if told is None and session.steps.syncs:  # before those of the cadence the session has done it
        session.parameter_checks.check_now()
    random_states = session.all_gather_bytes(pack_random(session.pending_random))
    session.exchange_state = capture_exchange(session)
    outcome: bytes | None = None
    causes.clear()
    if session.rank == 0:
        try:
            folder, kept = _on_rank_zero(session, path, random_states, extra, wait, between, told)
            loaded = kept and _is_loaded(session, folder)
            outcome = json.dumps({"path": os.fspath(folder), "kept": kept, "loaded": loaded}).encode()
        except Exception as error:  # whatever an object's state_dict raises: the others wait for this one's answer
            causes += [] if isinstance(error, EvenstepError) else [error]
            if told is not None and _room.refused(session, session.step, error):
                outcome = json.dumps({"path": "", "kept": True, "loaded": False}).encode()
            else:
                outcome = json.dumps({"error": words_of(error)}).encode()
    session.exchange_state = {}
    try:
        return bytes(session.broadcast_bytes(outcome)).decode()
    finally:
        _background.begin()


def checkpoint(
    path: str | os.PathLike[str] | None = None, *, extra: dict[str, Any] | None = None, wait: bool = True
) -> Path:
    """Saves everything that was prepared: models, optimizers, schedulers, data positions, what else has a state; and the
    random states and the step.

    Every rank calls it at the same step, between two steps; rank 0 writes. Returns the folder. A resumed script that has
    not yet come to where its checkpoint was written has made this call before: what it wrote then stays as it is.

    path: the checkpoint's folder; a checkpoint there is replaced in one step. Default: step-N in the run's checkpoints
        folder (./checkpoints outside a run), of which the newest EVENSTEP_CHECKPOINT_KEEP (3) are kept.
    extra: anything of JSON and tensors to save with it; es.load_checkpoint and es.session().user_state give it back.
    wait: False copies the state to memory and writes it while training goes on; an error is then raised by the next
        es.checkpoint (or told at exit).

    Raises EvenstepError where it cannot be written: nothing half stays behind, earlier checkpoints are as they were. So it
    does under --on-difference stop where the ranks' parameters differ (--check-parameters)."""
    session = _session("es.checkpoint")
    if path is not None and Path(path).name.endswith(PARTIAL):
        raise ValueError(f"{path}: names that end in {PARTIAL} are those of unfinished checkpoints")
    if path is not None and is_url(os.fspath(path)):
        raise EvenstepError(
            f"es.checkpoint: {path} is no folder of this host\n  fix: name a folder; --checkpoint-to URL, or EVENSTEP_CHECKPOINT_TO, "
            "uploads each checkpoint, too"
        )
    where = None if path is None else Path(path).absolute()
    return _save(session, where, session.user_state if extra is None else extra, wait, between=not session.iterating)


def automatic(session: Any) -> None:
    """The checkpoint that the cadence asked for: called by the session on all ranks. It is written in the background; one
    that is due while the last is still being written waits for that. On a full disk they wait until it has room; another
    failure is told once (rank 0). Training goes on."""

    def told(step: int, error: BaseException) -> None:
        if _room.refused(session, step, error):
            return
        _tell_once(
            session,
            "automatic",
            f"warning: the checkpoint at step {step} was not written, training goes on: {error}",
        )

    try:
        _save(session, None, session.user_state, False, told=told)
    except EvenstepError as error:
        told(session.step, error)


SAVED_AND_ENDED = 75  # sysexits' EX_TEMPFAIL; the agent knows such an end by it (src/orchestrator/drain.c)


def save_and_end(session: Any) -> None:
    """The agent has notice that the job must end (--notice): on all ranks, between two steps. Raises EvenstepError where the
    state cannot be saved."""
    _save(session, None, session.user_state, True)
    raise SystemExit(SAVED_AND_ENDED)


def write_here(session: Any, random_states: list[bytes]) -> None:
    """The checkpoint that the cadence asked for, on rank 0 alone, with what the ranks' generators were."""
    with session.steps.apart(_core.SPAN_CHECKPOINT):
        _on_rank_zero(session, None, random_states, session.user_state, True)


# -- loading --


def _session(call: str) -> Any:
    from evenstep.session import training_session

    return training_session(call)


def _agree(session: Any, find: Callable[[], Path | None]) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint that is meant, and its manifest where this rank has read it. Rank 0 waits for its own write and looks
    which it is; what it finds is everyone's: the others' own looks could come at another moment of a write. Each compares
    the checksums of what it reads."""
    verdict: bytes | None = None
    manifest: dict[str, Any] | None = None
    if session.rank == 0:
        try:
            _join_background()
            folder = find()
            if folder is not None:
                manifest = read_manifest(folder)
                check_sizes(folder, manifest)
            verdict = json.dumps({"path": None if folder is None else os.fspath(folder)}).encode()
        except Exception as error:
            verdict = json.dumps({"error": words_of(error)}).encode()
    result = json.loads(session.broadcast_bytes(verdict))
    if "error" in result:
        raise EvenstepError(result["error"])
    return None if result["path"] is None else Path(result["path"]), manifest


def _newest_in(path: str | os.PathLike[str]) -> Path:
    """The checkpoint of that name, or the newest whole one in a folder of them; of another place it is fetched first."""
    if is_url(os.fspath(path)):
        return fetch_newest(os.fspath(path), checkpoint_folder())
    folder = Path(path).absolute()
    if not (folder / MANIFEST).exists() and folder.is_dir():
        folder = newest_checkpoint(folder) or folder
    return folder


class Loaded(NamedTuple):
    """What a session has from a checkpoint: the step it was at, whether the launcher named it (or the script), where it
    is."""

    step: int
    by_launcher: bool
    folder: Path | Gift
    between: bool  # written by a call of es.checkpoint between two iterations


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    models: bool = True,
    optimizers: bool = True,
    schedulers: bool = True,
    loaders: bool = True,
    random: bool = True,
    objects: bool = True,
) -> dict[str, Any]:
    """Puts a checkpoint back into what was prepared, on every rank; the checksums are compared on the way,
    and nothing is put in place before they are right on all ranks.

    path: a checkpoint, or a folder of them (the newest whole one is taken), here or, as s3://bucket/run, at any place that
        fsspec knows; one that es.checkpoint(wait=False) is
        still writing is waited for. Parts may be left out, for example to
    begin a new training with the weights of an old one: es.load_checkpoint(path, optimizers=False, schedulers=False,
    loaders=False, random=False, objects=False). objects: what else was prepared, such as a GradScaler. Returns what was saved: path, step, epoch, world_size, created, extra.

    Outside a job loaders are the user's own, so a data position in the checkpoint is left alone.

    Raises EvenstepError where the checkpoint is damaged, or does not fit: the tensor, its shapes, types are named.
    Everything is compared before anything is loaded; what is read a second time, to where it belongs, once more then
    (docs/checkpoints.md)."""
    session = _session("es.load_checkpoint")
    session.join()
    if session.joining:  # in a lost rank's place, with nobody: nothing is put in place, for it gets the others' state
        folder, loader = _look_into(session, path)
        loader.read_first(False)
        return _facts(folder, loader)
    kinds = [kind for kind, on in zip(KINDS, (models, optimizers, schedulers, loaders, objects)) if on]

    found: tuple[Path, Loader] | None = None

    def read() -> str:
        """Whoever comes out of it knows that all have read and compared what they need. A file that is then read a second time,
        to where it belongs, is read by each rank for itself."""
        nonlocal found
        for sync in session.steps.syncs:
            if sync.stale is not None:
                sync.stale.wait()
        found = folder, loader = _look_into(
            session, path
        )  # before the last meeting: who hears there of a loss has read all
        loader.check_complete(kinds)
        loader.read_first(random)
        loader.read(kinds, rest=loaders and optimizers)
        return os.fspath(folder)

    with checkpoint_shared.reading(session):
        session.call_by_all(read)  # by those that are left, where a rank is lost
        assert found is not None
        folder, loader = found
        loader.put(loader.wanted)
    manifest = loader.manifest
    if models and optimizers:
        restore_exchange(session, loader.exchange())
    elif models:
        _forget_exchanges(session)
    session.pending_objects, session.replayed = loader.load_objects_again, False
    extra = loader.extra()
    session.user_state = extra if extra is not None else {}
    state = manifest["state"]
    if loaders and optimizers:  # the same training goes on
        session.step = state["step"]
        session.loaded = Loaded(session.step, False, folder, bool(state.get("between")))
        inherit(session, folder, state)
        checkpoint_shared.read_whole(session, folder)
    if random:
        _restore_random(session, loader, state)
    session.begin_pass_anew(models)
    return _facts(folder, loader)


def _look_into(session: Any, path: str | os.PathLike[str]) -> tuple[Path, Loader]:
    """The checkpoint that all ranks take, of which nothing is read yet."""
    folder, manifest = _agree(session, lambda: _newest_in(path))
    assert folder is not None
    return folder, Loader(session, folder, manifest or read_manifest(folder))


def _facts(folder: Path, loader: Loader) -> dict[str, Any]:
    state = {key: loader.manifest["state"][key] for key in ("step", "epoch", "world_size")}
    return {"path": folder, "created": loader.manifest["created"], "extra": loader.extra(), **state}


def _forget_exchanges(session: Any) -> None:
    """Weights were loaded without the rest: what ranks had moved on their own since they were one, gradients that are to
    come late, and what compression has left out of gradients belong to the weights that are gone. Collective."""
    for sync in session.steps.syncs:
        if sync.local is not None:
            sync.local.begin_anew()
        if sync.stale is not None:
            sync.stale.load(None, [])
        for engine in (one for one in sync.engines if hasattr(one, "load_feedback")):
            engine.load_feedback({})


def resume_of(session: Any) -> Resume | None:
    """From what the launcher names, or a process set's own of before a restart; None where it has none. Collective."""
    named = session.environment.resume

    def find() -> Path | None:
        own = restarted_checkpoint(session) if session.restarted_set else None
        if own is not None or not named:
            return own
        if is_url(named):
            return _newest_in(f"{named.rstrip('/')}/{session.name}")
        return own_checkpoint(session, _newest_in(named) if not session.name else Path(named).absolute())

    folder, _ = _agree(session, find)
    return None if folder is None else Resume(session, _place_here(session, folder))


def _place_here(session: Any, folder: Path) -> Path:
    """Where rank 0's checkpoint lies on this host: agents bring it to hosts that share no folder with rank 0's, and its
    path may be something else's there. Collective."""
    named = session.environment.resume
    theirs = session.broadcast_bytes(named.encode() if session.rank == 0 else None).decode()
    return Path(named).absolute() if named and folder == Path(theirs).absolute() else folder


class Resume:
    """Going on from a checkpoint. Objects are loaded as they are prepared, and what their exchange remembers with them
    (`take`, at the end of each es.prepare): a script that prepares no loader trains from there on. When the first batch of
    a prepared loader is about to be fetched, all that the checkpoint holds must have been (`finish`)."""

    def __init__(self, session: Any, folder: Path | Gift) -> None:
        manifest = read_manifest(folder) if isinstance(folder, Path) else {"state": folder.state}
        self._state = manifest["state"]
        self._loader = Loader(session, folder, manifest)
        self._loader.read_first(True)
        self._session = session
        self._restored: dict[str, int] = {}  # models whose exchange goes on: the rounds that they had made then
        session.step = self._state["step"]
        session.loaded = Loaded(session.step, True, folder, bool(self._state.get("between")))
        session.restarted = self._state.get("job", "") == os.environ.get("EVENSTEP_JOB", "") != ""
        inherit(session, folder if isinstance(folder, Path) else None, self._state)
        session.user_state = self._loader.extra() or {}
        _restore_random(session, self._loader, self._state)
        session.pending_objects = self._loader.load_objects_again
        if session.rank == 0:
            session.telemetry.event(_core.EVENT_RESUME, session.step, session.step, folder.name)

    def take(self) -> None:
        self._loader.load(KINDS, later=True)
        syncs = self._session.steps.syncs
        self._restore([s for s in syncs if self._loader.has_loaded("models", s.name) and s.name not in self._restored])

    def finish(self) -> None:
        """Exchanges of before the first batch leave no trace."""
        self._loader.check_complete(KINDS)
        self._loader.load(KINDS)
        self._restore([sync for sync in self._session.steps.syncs if self._restored.get(sync.name) != sync.rounds])

    def _restore(self, syncs: list[Any]) -> None:
        if syncs:
            session = self._session
            some = SimpleNamespace(rank=session.rank, world_size=session.world_size, steps=SimpleNamespace(syncs=syncs))
            restore_exchange(some, self._loader.exchange())
            self._restored.update({sync.name: sync.rounds for sync in syncs})


def _restore_random(session: Any, loader: Loader, state: dict[str, Any]) -> None:
    """Now, and once more before the first batch: what the script draws until then (a seed set anew, a loader's own)
    leaves no trace, so that the step to come draws what it would have drawn. Those that join at once, each rank 0 while it
    is alone, draw by their places."""
    put_back = load_random(loader.files, state, session.seen_rank)
    put_back()
    session.pending_random = put_back
