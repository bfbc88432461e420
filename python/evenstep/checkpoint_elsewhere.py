"""`evenstep ckpt` with URLs: verify, show, diff, convert, export, reshard, repair. (ls, push, fetch: evenstep.checkpoint_remote.)

verify reads there, a piece at a time. For the others what is named is brought to a folder in TMPDIR, the same command works on
that, and what it made is sent there. The folder goes however this ends but by SIGKILL; then the next such command removes it.

    python -m evenstep.checkpoint_elsewhere PROGRAM COMMAND WORD…
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.answering import Silent
from evenstep.checkpoint_files import MANIFEST, damaged_tensors, read_manifest, verify
from evenstep.checkpoint_remote import _NOT_THERE, _READ_BYTES, Remote, is_url, shown
from evenstep.convert_contents import DAMAGED, INPUT, UNSUPPORTED, USAGE, Refused

_PREFIX = "evenstep-ckpt-"
_FLAGS = {"--json", "--force", "--tensors"}
_READ, _COPY, _MEND, _WRITE = "read", "copy", "mend", "write"
_OPERANDS = {
    "show": [_READ],
    "diff": [_READ, _READ],
    "convert": [_READ, _WRITE],
    "export": [_READ],
    "reshard": [_READ, _WRITE],
    "repair": [_MEND],
}
_OPTIONS = {("export", "--to"): _WRITE, ("repair", "--from"): _COPY}


def _refused(error: EvenstepError) -> Refused:
    what, _, fix = str(error).partition("\n  fix: ")
    code = UNSUPPORTED if "another version" in fix else DAMAGED if " is damaged" in what else INPUT
    return Refused(what, fix, code)


class Place(Remote):
    """A checkpoint, a file or a folder at another place, by its URL."""

    def __init__(self, url: str) -> None:
        parent, _, self.name = url.rstrip("/").rpartition("/")
        if not self.name or parent.endswith(":/"):
            raise Refused(f"{shown(url)} names a whole place, and no checkpoint in it", "", USAGE)
        super().__init__(f"{parent}/" if parent.endswith("://") else parent)
        self.shown, self._place = f"{self.url}/{self.name}", f"{self._root}/{self.name}"

    def files(self) -> dict[str, int]:
        """What is there, with sizes, by paths in it; "" is the thing itself, a file."""
        try:
            self._files.invalidate_cache()
            found = self._ask(f"{self.name} is listed", lambda: self._files.find(self._place, detail=True))
        except _NOT_THERE:
            return {}
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} cannot be listed", error) from None
        paths = {path.removeprefix(self._place): entry["size"] for path, entry in found.items()}
        return {path.lstrip("/"): size for path, size in paths.items() if ".." not in path.split("/")}

    def bring(self, folder: Path, compare: bool) -> Path:
        """Into the folder; a checkpoint's checksums are compared where that is asked for."""
        files, target = self.files(), folder / self.name
        if not files:
            raise Refused(f"nothing is at {self.shown}", "`evenstep ckpt ls URL` lists the checkpoints at a place")
        try:
            for file in files:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                if file:
                    self._get(self.name, file, target)
                else:
                    self._ask(f"{self.name} is read", lambda: self._files.get_file(self._place, str(target)), target)
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} could not be fetched", error) from None
        if compare and MANIFEST in files:
            try:
                verify(target, read_manifest(target))
            except EvenstepError as error:
                raise _refused(EvenstepError(str(error).replace(str(target), self.shown))) from None
        return target

    # -- verify --

    def problems(self, folder: Path) -> list[str]:
        """A line for each damage, as of a checkpoint here. In the folder lie its manifest and one damaged chunk at a time."""
        files = self.files()
        if MANIFEST not in files:
            raise Refused(
                f"{self.shown} is no checkpoint: it has no {MANIFEST}", "`evenstep ckpt ls URL` lists those of a place"
            )
        folder.mkdir(exist_ok=True)
        try:
            self._get(self.name, MANIFEST, folder)
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} cannot be read", error) from None
        try:
            manifest = read_manifest(folder)
        except EvenstepError as error:
            if " is damaged" not in str(error):
                raise
            return [f"{MANIFEST} is damaged: {str(error).partition(' is damaged: ')[2]}"]
        found = []
        for entry in manifest["files"]:
            name, size = entry["name"], files.get(entry["name"])
            if size is None:
                found.append(f"{name} is missing")
            elif size != entry["bytes"]:
                found.append(f"{name} has {size} bytes, and not {entry['bytes']}")
            else:
                found += self._damage(folder, entry)
        return found

    def _bytes(self, file: str, begin: int, end: int) -> bytes:
        try:
            return self._piece(f"{self._place}/{file}", begin, end)
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name}/{file} cannot be read", error) from None

    def _damage(self, folder: Path, entry: dict[str, Any]) -> Iterator[str]:
        name, size, chunk = entry["name"], entry["bytes"], entry["chunk_bytes"]
        step = max(_READ_BYTES // chunk, 1) * chunk
        for begin in range(0, size, step):
            data = self._bytes(name, begin, min(begin + step, size))
            for index in range(begin // chunk, -(-min(begin + step, size) // chunk)):
                first, end = index * chunk, min((index + 1) * chunk, size)
                piece = data[first - begin : end - begin]
                if not _is_right(piece, entry, index):  # once more: an answer may be wrong where the file is right
                    piece = self._bytes(name, first, end)
                if not _is_right(piece, entry, index):
                    what = f"chunk {index} of {name} (bytes {first}–{end - 1}) is altered"
                    yield what + self._tensors_in(folder, entry, what, first, piece)

    def _tensors_in(self, folder: Path, entry: dict[str, Any], what: str, first: int, piece: bytes) -> str:
        """By a file that has nothing but its header and that chunk."""
        path = folder / entry["name"]
        head = min(8 + int.from_bytes(self._bytes(entry["name"], 0, min(8, entry["bytes"])), "little"), entry["bytes"])
        try:
            with path.open("wb") as file:
                if head < entry["bytes"]:
                    file.write(self._bytes(entry["name"], 0, head))
                file.seek(first)
                file.write(piece)
                file.truncate(entry["bytes"])
            return damaged_tensors(folder, [entry], what)
        finally:
            path.unlink(missing_ok=True)

    # -- what is made goes there --

    def check_free(self, force: bool) -> None:
        files = self.files()
        if files and not force:
            raise Refused(f"{self.shown} exists", "--force replaces a file or a checkpoint, or choose another name")
        if files and "" not in files and MANIFEST not in files:
            raise Refused(f"{self.shown} is a folder that is no checkpoint, and is not replaced", "choose another name")

    def send(self, path: Path) -> str:
        """A checkpoint as every other; of a file or folder of another kind nothing stays there where it fails. Its URL."""
        if (path / MANIFEST).is_file():
            return f"{self.url}/{self.put(path)}"
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        places = [f"{self._place}/{one.relative_to(path)}" if one != path else self._place for one in files]
        try:
            for folder in sorted({place.rpartition("/")[0] for place in places}):
                self._make(folder)
            for one, place in zip(files, places):
                self._send(one, place)
            self._files.invalidate_cache()
        except BaseException as error:
            with suppress(Exception):  # up to the first that is not there, or a place that does not answer
                for place in places:
                    self._tell("what was sent is removed", partial(self._files.rm_file, place))
            if isinstance(error, EvenstepError) or not isinstance(error, Exception):
                raise
            raise self._failed(f"{self.name} was not uploaded", error) from None
        return self.shown

    def send_mended(self, path: Path, before: dict[Path, Any]) -> None:
        """The files that a repair has replaced. The manifest goes first and comes last: no moment shows half of it as whole."""
        changed = [one for one, facts in _facts(path).items() if before.get(one) != facts]
        if not changed:
            return
        try:
            self._take_away(self._place)
            for one in changed:
                if one.name != MANIFEST:
                    self._send(one, f"{self._place}/{one.name}")
            if (path / MANIFEST).exists():
                self._pipe(f"{self._place}/{MANIFEST}", (path / MANIFEST).read_bytes())
            self._files.invalidate_cache()
        except EvenstepError:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} was not put right: run this once more", error) from None


def _is_right(piece: bytes, entry: dict[str, Any], index: int) -> bool:
    return f"{_core.checksum(piece):016x}" == entry["checksums"][index]


def _facts(folder: Path) -> dict[Path, tuple[int, int]]:
    """Which file each is: a repair writes what it changes anew."""
    return {one: (one.stat().st_ino, one.stat().st_mtime_ns) for one in folder.iterdir() if one.is_file()}


# -- the folder here --


@contextmanager
def _folder() -> Iterator[Path]:
    """Removed at the end; a lock tells the next command whose owner lives."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if old.stat().st_uid == os.getuid() and time.time() - old.stat().st_mtime > 60:
                with _lock(old):
                    shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


# -- the commands --


class _Word(NamedTuple):
    at: int
    option: str  # "--to=" where it is one word with its option
    url: str
    role: str


def _urls(command: str, words: Sequence[str]) -> list[_Word]:
    """The words that are URLs, and what the command does with each."""
    found, operands, option, ended = [], iter(_OPERANDS[command]), "", False
    for at, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--") and not ended else ("", "", word)
        role: str | None = None
        if option:
            role, option = _OPTIONS.get((command, option)), ""
        elif word == "--" and not ended:
            ended = True
            continue
        elif name:
            option = "" if equals or name in _FLAGS else name
            role = _OPTIONS.get((command, name))
        elif ended or not word.startswith("-"):
            role = next(operands, None)
        if not is_url(value):
            continue
        if role is None:
            raise Refused(f"ckpt {command} takes no URL there: {shown(value)}", "name a file of this host", USAGE)
        found.append(_Word(at, f"{name}=" if name else "", value, role))
    return found


def _verify(words: Sequence[str]) -> int:
    urls = [word for word in words if word != "--json"]
    if not all(map(is_url, urls)):
        raise Refused(
            "ckpt verify takes URLs, or paths of this host, not both at once", "verify one after the other", USAGE
        )
    worst, report = 0, []
    with _folder() as folder:
        for number, url in enumerate(urls):
            code, problems = 0, []
            try:
                problems = Place(url).problems(folder / str(number))
                code = DAMAGED if problems else 0
            except (EvenstepError, Refused) as error:
                refusal = error if isinstance(error, Refused) else _refused(error)
                code, problems = refusal.code, [refusal.what]
                if "--json" not in words:
                    _complain(refusal)
            report.append({"path": shown(url), "whole": code == 0, "problems": problems})
            if "--json" not in words and code in (0, DAMAGED):
                print("\n  ".join([f"{shown(url)}: {'DAMAGED' if code else 'whole'}", *map(_clean, problems)]))
            worst = max(worst, code)
    if "--json" in words:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    return worst


def _work(program: str, command: str, words: list[str]) -> int:
    urls, shown_as = _urls(command, words), {}
    ends: list[tuple[_Word, Place, Path]] = []
    with _folder() as folder:
        for number, one in enumerate(urls):
            place, here = Place(one.url), folder / str(number)
            here.mkdir()
            if one.role == _WRITE:
                place.check_free("--force" in words)
            path = here / place.name
            words[one.at] = f"{one.option}{path}"
            shown_as[str(path)] = place.shown
            ends.append((one, place, path))
        for one, place, path in ends:
            if one.role != _WRITE:
                place.bring(path.parent, one.role == _READ)
        before = {path: _facts(path) for one, _, path in ends if one.role == _MEND and path.is_dir()}
        done = _run([program, "ckpt", command, *words])
        for one, place, path in ends:
            if one.role == _WRITE and done.returncode == 0:
                shown_as[str(path)] = place.send(path)
            elif one.role == _MEND and done.returncode in (0, DAMAGED) and path in before:
                place.send_mended(path, before[path])
                if done.returncode == 0 and (left := place.problems(folder / "again")):
                    raise Refused(f"{place.shown} is not whole after it was put right: {left[0]}", "", DAMAGED)
        for text, stream in ((done.stdout, sys.stdout), (done.stderr, sys.stderr)):
            for path_text, url in sorted(shown_as.items(), reverse=True):
                text = text.replace(path_text, json.dumps(url)[1:-1] if "--json" in words else url)
            stream.write(text)
        return done.returncode


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        out, err = child.communicate()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    return subprocess.CompletedProcess(words, child.returncode if child.returncode >= 0 else 5, out, err)


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _complain(error: Refused) -> None:
    sys.stderr.write(f"evenstep: {_clean(error.what)}\n" + (f"  fix: {_clean(error.fix)}\n" if error.fix else ""))


def work(program: str, command: str, words: Sequence[str]) -> int:
    """The exit code; what came of it is printed."""
    try:
        if "--help" in words or "-h" in words:
            return subprocess.run([program, "ckpt", command, "--help"], check=False).returncode
        return _verify(words) if command == "verify" else _work(program, command, list(words))
    except Refused as error:
        _complain(error)
        return error.code
    except EvenstepError as error:
        _complain(_refused(error))
        return _refused(error).code
    except OSError as error:
        _complain(Refused(f"{error.filename or tempfile.gettempdir()}: {error.strerror or error}"))
        return 5


def main() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _: object) -> None:
        for one in signals:  # what is here is removed first
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in signals:
        signal.signal(one, leave)
    code = 1
    try:
        code = work(sys.argv[1], sys.argv[2], sys.argv[3:])
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a driver's threads that wait may keep the interpreter from its end


if __name__ == "__main__":
    main()
