"""Checkpoints on their way to the place that EVENSTEP_CHECKPOINT_TO names, while training goes on.

What is left when the interpreter ends goes by a process of its own: some drivers (s3fs) begin threads to connect, and an
interpreter that ends lets nobody begin one.

    python -m evenstep.checkpoint_uploads    one request in a line of JSON; the last line that it prints is the answer
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from evenstep._core import EvenstepError
from evenstep.answering import Silent
from evenstep.checkpoint_files import MANIFEST, REPLACED
from evenstep.checkpoint_keeping import STEP_NAME, Keep
from evenstep.checkpoint_remote import Altered, Remote, Replaced, shown

_BEGINS_NONE = (3, 12) <= sys.version_info[:3] <= (3, 12, 1)
"""Whether this Python begins no thread once the script has ended, though others of its threads go on."""


def _ends() -> bool:
    """Whether this interpreter does: the script has ended, and each thread that goes on after it (none of a daemon's)."""
    goes_on = not _BEGINS_NONE and any(one.is_alive() and not one.daemon for one in threading.enumerate())
    return _script_ended() and not goes_on


def _script_ended() -> bool:
    return not threading.main_thread().is_alive()


class OlderStay(EvenstepError):
    """The checkpoint is up; those that it was to push out are still there."""


def _retain(remote: Remote, keep: Keep, lineage: str) -> str:
    """The order of the newest there. Raises OlderStay; Altered where what was uploaded is gone again."""
    try:
        found = remote.whole()
        remote.retain(keep, lineage, found)
    except Altered:
        raise
    except Exception as error:
        raise OlderStay(f"older ones stay: {error}") from None
    return max((one.order for one in found), default="")


def _comes_anew(folder: Path, error: BaseException) -> bool:
    """Whether that is no failure to be told, for a newer one follows: it has the name by now, or is about to (where two folders
    cannot be swapped, the older one goes aside first)."""
    here = folder / MANIFEST
    if here.exists():
        return isinstance(error, Replaced)
    return folder.with_name(folder.name + REPLACED).exists() or here.exists()


class _Upload(NamedTuple):
    """One that waits."""

    folder: Path
    keep: Keep | None
    lineage: str

    @property
    def place(self) -> Path | None:
        """Whose turn it takes where another one waits."""
        return None if STEP_NAME.match(self.folder.name) else self.folder


class Uploads:
    """Uploads in the background: one at a time. Of the step-N that wait the newest alone goes; what has a name that the user
    gave waits for itself. place: the URL in full, for what is left when the interpreter ends."""

    def __init__(self, remote: Remote | None, place: str = "") -> None:
        self._remote = remote
        self._place = place
        self.newest = ""  # the order of the newest there, as far as it is known
        self._told = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: dict[Path | None, _Upload] = {}  # None: the newest step-N
        self._under_way: Path | None = None

    def busy_with(self) -> set[Path]:
        """Folders that must stay."""
        with self._lock:
            waiting = {one.folder for one in self._waiting.values()}
            return waiting | ({self._under_way} if self._under_way is not None else set())

    def begin(self, folder: Path, keep: Keep | None, lineage: str, failed: Callable[[BaseException], None]) -> None:
        with self._lock:
            one = _Upload(folder, keep, lineage)
            self._waiting[one.place] = one
            if self._remote is None or (self._place and _ends()):
                return  # `send_by_process` takes it
            if self._thread is None or not self._thread.is_alive():
                # `join` at the process's end says how long a place may keep it
                self._thread = threading.Thread(target=self._run, args=(failed,), name="evenstep-upload", daemon=True)
                self._thread.start()

    def _next(self) -> _Upload | None:
        with self._lock:
            taken = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            self._under_way = taken.folder if taken is not None else None
            if taken is None:
                self._thread = None  # who begins the next one from here on starts another
            return taken

    def _run(self, failed: Callable[[BaseException], None]) -> None:
        while (taken := self._next()) is not None:
            folder, keep, lineage = taken
            try:
                assert self._remote is not None
                self._tell_name(folder, self._remote.put(folder))
                if keep is not None:
                    self.newest = _retain(self._remote, keep, lineage)
            except OlderStay as error:
                failed(error)  # nothing is left to upload
            except Exception as error:
                if _comes_anew(folder, error):
                    continue
                if isinstance(error, Replaced) or not (self._place and _script_ended()):
                    failed(error)
                    continue
                if not _ends():
                    failed(error)
                with self._lock:  # it may be for that alone
                    self._waiting = {taken.place: taken, **self._waiting}
                    self._thread = self._under_way = None
                return

    def _tell_name(self, folder: Path, name: str) -> None:
        if name != folder.name and not self._told:
            self._told = True
            sys.stderr.write(
                f"evenstep: {folder.name} at {self.url} is another training's, and stays: this one's is {name} there (so are "
                "others whose names are taken)\n"
            )

    @property
    def url(self) -> str:
        return shown(self._place.rstrip("/")) if self._remote is None else self._remote.url

    def join(self, seconds: float = math.inf) -> list[Path]:
        """Waits for what is under way and what waits, but no longer than this; says what is then still not up."""
        until = time.monotonic() + seconds
        thread = self._thread
        while thread is not None:
            left = until - time.monotonic()
            thread.join(min(max(left, 0.0), threading.TIMEOUT_MAX))
            if thread.is_alive():
                break
            thread = self._thread if self._thread is not thread else None
        return sorted(self.busy_with())

    def send_by_process(self, seconds: float) -> list[tuple[Path, str]]:
        """Those that wait, where the interpreter ends; whatever is then not up, with the reason."""
        if self._thread is not None:
            return [(path, "") for path in sorted(self.busy_with())]
        waiting, self._waiting = self._waiting, {}
        until = time.monotonic() + seconds
        return [
            one for taken in waiting.values() for one in self._by_process(taken, max(until - time.monotonic(), 0.0))
        ]

    def _by_process(self, taken: _Upload, seconds: float) -> list[tuple[Path, str]]:
        folder, keep, lineage = taken
        request = {
            "url": self._place,
            "folder": os.fspath(folder),
            "keep": keep,
            "lineage": lineage,
            "conf": _settings(),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "evenstep.checkpoint_uploads"],
                input=json.dumps(request),
                capture_output=True,
                env=_environment(),
                text=True,
                errors="replace",
                timeout=None if seconds == math.inf else seconds,
            )
        except subprocess.TimeoutExpired:
            return [(folder, "")]
        except (OSError, ValueError) as error:
            return [(folder, f"the process that was to upload it failed: {error}")]
        answer = _answer_in(done.stdout)
        if answer is None:
            said = shown(" / ".join(done.stderr.splitlines()[-3:])) or "nothing"
            return [(folder, f"the process that was to upload it ended with code {done.returncode}, and said: {said}")]
        sys.stderr.write(done.stderr)
        if "name" in answer:
            self._tell_name(folder, answer["name"])
        if "older" in answer:
            what, _, fix = answer["older"].partition("\n  fix: ")
            sys.stderr.write(f"evenstep: warning: {what}\n" + (f"  fix: {fix}\n" if fix else ""))
        return [(folder, answer["what"])] if "what" in answer else []


def _environment() -> dict[str, str]:
    """In which a Python finds the modules that this one does: drivers may be in a folder that the script has added."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if isinstance(path, str) and path)}


def _settings() -> dict[str, dict[str, Any]]:
    """fsspec's, as they are now: the script may have made some. What JSON cannot carry is left out."""
    config = sys.modules.get("fsspec.config")
    settings: dict[str, dict[str, Any]] = {}
    for protocol, options in dict(getattr(config, "conf", {})).items():
        for name, value in options.items() if isinstance(options, dict) else ():
            with suppress(TypeError, ValueError):
                json.dumps({name: value})
                settings.setdefault(protocol, {})[name] = value
    return settings


def _set(settings: dict[str, dict[str, Any]]) -> None:
    from fsspec.config import conf  # type: ignore[import-untyped]

    for protocol, options in settings.items():
        conf.setdefault(protocol, {}).update(options)


def _answer_in(printed: str) -> dict[str, Any] | None:
    """Drivers may have printed lines before it."""
    try:
        answer = json.loads((printed.splitlines() or [""])[-1])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


class Look:
    """What a place holds before anything of this process is there. One that cannot be opened (no driver, a URL that is none) is
    told at once, for the first upload may be hours away; one that cannot be asked is told by that."""

    def __init__(self, place: str) -> None:
        self.newest = ""
        self._place = place
        self._waited = False
        self._thread = threading.Thread(target=self._run, name="evenstep-look", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            remote = Remote(self._place)
        except Silent:
            return
        except EvenstepError as error:
            sys.stderr.write(f"evenstep: warning: checkpoints cannot be sent to another place: {error}\n")
            return
        with suppress(Exception):
            self.newest = max((one.order for one in remote.whole()), default="")

    def join(self, seconds: float) -> None:
        """The first time: later ones take what is known."""
        if not self._waited:
            self._waited = True
            self._thread.join(seconds)


_LOOK_SECONDS = 5.0
_uploads: dict[str, Uploads] = {}  # by the place
_looks: dict[str, Look] = {}


def _place_of(session: Any) -> str:
    """ "": there is none."""
    place = os.environ.get("EVENSTEP_CHECKPOINT_TO", "")
    return f"{place.rstrip('/')}/{session.name}" if place and session.name else place


def begin_look(session: Any) -> None:
    """Asks the place, if there is one, what it holds."""
    place = _place_of(session)
    if place and place not in _looks and not _ends():
        _looks[place] = Look(place)


def newest_elsewhere(session: Any) -> str:
    """The order of the newest at the place, whose ever, as far as it is known: what is written now is to be newer. The first
    look is waited for, and not for long."""
    place = _place_of(session)
    begin_look(session)
    if place not in _looks:
        return ""
    _looks[place].join(_LOOK_SECONDS)
    return max(_looks[place].newest, _uploads[place].newest if place in _uploads else "")


def upload(
    session: Any, folder: Path, keep: Keep | None, lineage: str, failed: Callable[[BaseException], None]
) -> None:
    """To the place, while training goes on."""
    place = _place_of(session)
    if not place:
        return
    try:
        if place not in _uploads:
            _uploads[place] = Uploads(None if _ends() else Remote(place), place)
    except EvenstepError as error:
        failed(error)
        return
    _uploads[place].begin(folder, keep, lineage, failed)


def under_way() -> frozenset[Path]:
    """Folders that must stay."""
    return frozenset(path for one in _uploads.values() for path in one.busy_with())


_UPLOAD_WAIT_SECONDS = 600.0


def _upload_wait() -> float:
    text = os.environ.get("EVENSTEP_UPLOAD_WAIT", "")
    try:
        seconds = float(text or _UPLOAD_WAIT_SECONDS)
    except ValueError:
        seconds = -1.0
    if seconds >= 0:
        return seconds
    sys.stderr.write(
        f"evenstep: warning: EVENSTEP_UPLOAD_WAIT={text} is no time: {_UPLOAD_WAIT_SECONDS:g} seconds are waited\n"
    )
    return _UPLOAD_WAIT_SECONDS


def wait_for_uploads() -> None:
    """At the process's end: until what was begun has ended, but no longer than EVENSTEP_UPLOAD_WAIT says."""
    uploads = [one for one in _uploads.values() if one.join(0)]
    if not uploads:
        return
    seconds = _upload_wait()
    until = time.monotonic() + seconds
    for one in uploads:
        under_way = ", ".join(path.name for path in one.join(0))
        if not under_way:
            continue
        sys.stderr.write(f"evenstep: {under_way} is still on its way to {one.url}: at most {seconds:g} s are waited\n")
        one.join(max(until - time.monotonic(), 0.0))
        for path, why in one.send_by_process(max(until - time.monotonic(), 0.0)):
            what, _, fix = (why or f"its upload did not end within {seconds:g} s").partition("\n  fix: ")
            waits = "" if why else "; EVENSTEP_UPLOAD_WAIT sets how many seconds are waited"
            sys.stderr.write(
                f"evenstep: warning: {path.name} is not at {one.url}: {what}\n"
                f"  fix: {fix and f'{fix}; then '}`evenstep ckpt push {path} URL`{waits}\n"
            )


def _answer() -> None:
    """What `send_by_process` asks for."""
    request = json.loads(sys.stdin.read())
    answer: dict[str, str] = {}
    try:
        if request["conf"]:
            _set(request["conf"])
        remote = Remote(request["url"])
        answer["name"] = remote.put(Path(request["folder"]))
        if request["keep"] is not None:
            _retain(remote, Keep(*request["keep"]), request["lineage"])
    except OlderStay as error:
        answer["older"] = str(error)
    except Exception as error:
        answer["what"] = str(error)
    print("\n" + json.dumps(answer), flush=True)  # a driver may have begun a line
    sys.stderr.flush()
    os._exit(0)  # a driver's threads may keep the interpreter from its end


if __name__ == "__main__":
    _answer()
