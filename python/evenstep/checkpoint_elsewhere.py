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
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.answering import Silent
from evenstep.checkpoint_files import MANIFEST, PARTIAL, damaged_tensors, read_manifest, verify
from evenstep.checkpoint_remote import _CLAIM, _NOT_THERE, _PATTERN, _READ_BYTES, Remote, is_url, shown
from evenstep.convert_contents import DAMAGED, INPUT, SYSTEM, UNSUPPORTED, USAGE, Refused

_At = tuple[str, str, str]  # protocol, host, path: the same for all spellings of a place
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
_BESIDE_URLS = "EVENSTEP_CKPT_BESIDE_URLS"  # of the program that this starts: it takes no URLs (cli/ckpt.c)


def _refused(error: EvenstepError) -> Refused:
    what, _, fix = str(error).partition("\n  fix: ")
    code = UNSUPPORTED if "another version" in fix else DAMAGED if " is damaged" in what else INPUT
    return Refused(what, fix, code)


def _here(path: str) -> _At:
    return "file", "", os.path.realpath(path)


class Place(Remote):
    """A checkpoint, a file or a folder at another place, by its URL."""

    def __init__(self, url: str) -> None:
        parent, _, self.name = url.rstrip("/").rpartition("/")
        if not self.name or parent.endswith(":/"):
            raise Refused(f"{shown(url)} names a whole place, and no checkpoint in it", "", USAGE)
        super().__init__(f"{parent}/" if parent.endswith("://") else parent)
        self.shown, self._place = f"{self.url}/{self.name}", f"{self._root}/{self.name}"
        self._only = ""  # where the new is, once what it replaces is being removed

    def is_at(self) -> _At:
        protocol, options = self._files.protocol, self._files.storage_options
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if "file" in protocols:
            return _here(self._place)
        return min(protocols), str(options.get("host") or options.get("account_name") or ""), self._place

    def files(self) -> dict[str, int | None]:
        """What is there, with sizes where the driver says them, by paths in it; "" is the thing itself, a file."""
        try:
            self._files.invalidate_cache()
            found = self._ask(f"{self.name} is listed", lambda: self._files.find(self._place, detail=True))
        except _NOT_THERE:
            return {}
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} cannot be listed", error) from None
        paths = {path.removeprefix(self._place): entry.get("size") for path, entry in found.items()}
        return {path.lstrip("/"): size for path, size in paths.items() if ".." not in path.split("/")}

    def to_bring(self) -> dict[str, int | None]:
        """Its files, where it is one checkpoint, or a file or folder of another kind."""
        files = self.files()
        if not files:
            raise Refused(f"nothing is at {self.shown}", "`evenstep ckpt ls URL` lists the checkpoints at a place")
        own = sorted(file.partition("/")[0] for file in files if file.count("/") == 1 and file.endswith(f"/{MANIFEST}"))
        if own and all("/" in file for file in files):
            raise Refused(
                f"{self.shown} is no checkpoint: it holds {len(own)}",
                f"name one of them, such as {self.shown}/{own[-1]}; `evenstep ckpt ls {self.shown}` lists them",
            )
        return files

    def bring(self, files: Iterable[str], folder: Path, compare: bool) -> Path:
        """These into the folder; a checkpoint's checksums are compared where that is asked for."""
        target = folder / self.name
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
            name = entry["name"]
            if name not in files:
                found.append(f"{name} is missing")
            elif files[name] not in (None, entry["bytes"]):
                found.append(f"{name} has {files[name]} bytes, and not {entry['bytes']}")
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

    def check_free(self, force: bool) -> dict[str, int | None]:
        """What --force replaces."""
        self._check_names([""])
        files = self.files()
        if files and not force:
            raise Refused(f"{self.shown} exists", "--force replaces a file or a checkpoint, or choose another name")
        if files and "" not in files and not (MANIFEST in files and self._is_own()):
            raise Refused(f"{self.shown} is a folder that is no checkpoint, and is not replaced", "choose another name")
        return files

    def _check_names(self, ends: Iterable[str]) -> None:
        for end in ends:
            if not _PATTERN.isdisjoint(self._place + end):
                what = f"{self.shown}{end} is not written: a driver may take * ? [ in it for a pattern"
                raise Refused(what, "choose another name", USAGE)

    def _is_own(self) -> bool:
        """Web pages have a manifest.json, too."""
        try:
            text = self._ask(
                f"{self.name}/{MANIFEST} is read", lambda: self._files.cat_file(f"{self._place}/{MANIFEST}")
            )
            return str(json.loads(text)["format"]).startswith("evenstep-checkpoint")
        except (ValueError, KeyError, TypeError):
            return False
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} cannot be read", error) from None

    def send(self, path: Path, force: bool) -> str:
        """What was made, in place of what is there with --force; of what fails nothing stays. Its URL."""
        old = self.check_free(force)  # somebody may have put something there since
        return self._send_checkpoint(path, old) if (path / MANIFEST).is_file() else self._send_other(path, old, force)

    def _send_checkpoint(self, path: Path, old: Iterable[str]) -> str:
        """As every other: in the place of one of the same training, whose manifest goes first."""
        if "" in old:
            raise Refused(f"{self.shown} is a file, and is not replaced by a checkpoint", "choose another name")
        name = self.put(path)
        if name == self.name:
            new = {MANIFEST, *(entry["name"] for entry in read_manifest(path)["files"])}
            for file in old:
                if file and file not in new and not file.endswith(_CLAIM):
                    self._remove_old(file)
        return f"{self.url}/{name}"

    def _send_other(self, path: Path, old: Iterable[str], force: bool) -> str:
        """A file, or a folder of another kind: under another name first, but where nothing is there and a file is there once
        it is whole."""
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        ends = ["" if one == path else f"/{one.relative_to(path).as_posix()}" for one in files]
        beside = bool(old) or not self._is_store()
        self._check_names(ends if beside else [])
        first = f"{self._place}-{os.urandom(4).hex()}{PARTIAL}" if beside else self._place
        own = [first] if beside else []  # what goes where this fails
        try:
            for one, end in zip(files, ends):
                self._make((first + end).rpartition("/")[0])
                if not beside:
                    own.append(first + end)
                self._send(one, first + end)
            if beside:
                self._replace(first, dict(zip(ends, files)), own, force)
            self._files.invalidate_cache()
        except BaseException as error:
            if self._only:
                raise self._half_replaced(error) from None
            self._undo(own, path.is_dir())
            if isinstance(error, (EvenstepError, Refused)) or not isinstance(error, Exception):
                raise
            raise self._failed(f"{self.name} was not uploaded", error) from None
        return self.shown

    def _replace(self, first: str, new: dict[str, Path], own: list[str], force: bool) -> None:
        """The new alone is there then, as on a disk. A file takes a file's place. new: the files here, by the ends of their paths
        there. From the first change of the old on nothing is undone: the new may be all that is left."""
        old, is_file = self.check_free(force), "" in new
        takes_its_place = is_file and "" in old
        self._only = first if old else ""
        if old and not takes_its_place:
            self.remove(self.name)
        elif is_file and self._ask(f"{self.name} is looked for", partial(self._files.isdir, self._place)):
            self._tell(f"the empty folder {self.name} is removed", partial(self._files.rmdir, self._place))
        for end, one in new.items():
            here, there = first + end, self._place + end
            self._make(there.rpartition("/")[0])
            if not takes_its_place:
                own.append(there)
            move = partial(self._files.mv, here, there)
            self._tell(f"{self.name}{end} is put in its place", move, size=one.stat().st_size)
        self._only = ""
        own.clear()
        if not is_file:
            with suppress(Exception):  # all of it is there, and stores have no empty folders
                self._tell("its folder is removed", partial(self._files.rm, first, recursive=True))

    def _half_replaced(self, error: BaseException) -> BaseException:
        """What ended it, with where the new is."""
        end = self._only.removeprefix(self._place)
        where = f"of the new what is not whole at {self.shown} is at {self.shown}{end}; the old is removed, or in part"
        what = f"{self.name} was not put in its place"
        if not isinstance(error, Exception):
            _complain(Refused(f"{what}: {where}"))
            return error
        known = error if isinstance(error, EvenstepError) else self._failed(what, error)
        what, _, fix = str(known).partition("\n  fix: ")
        return Refused(f"{what}; {where}", fix)

    def _undo(self, places: Iterable[str], is_folder: bool) -> None:
        for place in places:
            try:
                named = {"recursive": True} if is_folder and place.endswith(PARTIAL) else {}
                remove = partial(self._files.rm if named else self._files.rm_file, place, **named)
                self._tell("what was sent is removed", remove)
            except Silent:
                return
            except Exception:  # it is not there: it was not sent, or was moved
                continue

    def _remove_old(self, file: str) -> None:
        try:
            self._tell(f"{self.name}/{file} is removed", partial(self._files.rm_file, f"{self._place}/{file}"))
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{self.name} is there, but {file} of the one before cannot be removed", error) from None

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


def _named(command: str, words: Sequence[str]) -> list[_Word]:
    """The words that are URLs, by the rule of cli/ckpt.c, or name what is here, and what the command does with each."""
    found, operands, option, ended = [], iter(_OPERANDS[command]), "", False
    for at, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--") and not ended else ("", "", word)
        role: str | None = None
        if option:
            role, option = None if name else _OPTIONS.get((command, option)), ""
        elif word == "--" and not ended:
            ended = True
            continue
        elif name:
            option = "" if equals or name in _FLAGS else name
            role = _OPTIONS.get((command, name))
        elif ended or not word.startswith("-"):
            role = next(operands, None)
        if not value or (role is None and not is_url(value)):
            continue
        if role is None:
            raise Refused(f"ckpt {command} takes no URL there: {shown(value)}", "name a file of this host", USAGE)
        found.append(_Word(at, f"{name}=" if name else "", value, role))
    return found


def _verify(words: Sequence[str]) -> int:
    end = words.index("--") if "--" in words else len(words)
    unknown = [word for word in words[:end] if word.startswith("-") and word not in ("-", "--json")]
    if unknown:
        raise Refused(
            f"ckpt verify: unknown option {shown(unknown[0])}",
            "`evenstep ckpt verify --help` says which there are",
            USAGE,
        )
    as_json, urls = "--json" in words[:end], [word for word in words[:end] if word != "--json"] + list(words[end + 1 :])
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
                if not as_json:
                    _complain(refusal)
            report.append({"path": shown(url), "whole": code == 0, "problems": problems})
            if not as_json and code in (0, DAMAGED):
                lines = [f"{shown(url)}: {'DAMAGED' if code else 'whole'}", *map(_clean, problems)]
                _write("\n  ".join(lines) + "\n", sys.stdout)
            worst = max(worst, code)
    if as_json:
        _write(json.dumps(report, indent=2, ensure_ascii=False) + "\n", sys.stdout)
    return worst


def _check_apart(ends: Sequence[tuple[_Word, _At]]) -> None:
    """What is written is, and holds, nothing of what is read, however these are spelled."""
    written = [at for one, at in ends if one.role == _WRITE]
    for one, at in ends:
        if one.role != _WRITE and any(at[:2] == to[:2] and f"{at[2]}/".startswith(f"{to[2]}/") for to in written):
            raise Refused(f"{shown(one.url)} is the input, and would be replaced", "choose another name", USAGE)


def _check_room(sizes: Iterable[int | None]) -> None:
    room, needed = shutil.disk_usage(tempfile.gettempdir()).free, sum(size or 0 for size in sizes)
    if needed > room:
        raise Refused(
            f"{needed / 1e6:,.1f} MB are to be fetched, and {tempfile.gettempdir()} has room for {room / 1e6:,.1f} MB",
            "TMPDIR names a folder of a larger disk",
            SYSTEM,
        )


def _work(program: str, command: str, words: list[str]) -> int:
    named = _named(command, words)
    urls, shown_as = [one for one in named if is_url(one.url)], {}
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
        _check_apart(
            [(word, place.is_at()) for word, place, _ in ends]
            + [(word, _here(word.url)) for word in named if word not in urls]
        )
        wanted = [(one, place, path, place.to_bring()) for one, place, path in ends if one.role != _WRITE]
        _check_room(size for *_, files in wanted for size in files.values())
        for one, place, path, files in wanted:
            place.bring(files, path.parent, one.role == _READ)
        before = {path: _facts(path) for one, _, path in ends if one.role == _MEND and path.is_dir()}
        done = _run([program, "ckpt", command, *words])
        for one, place, path in ends:
            if one.role == _WRITE and done.returncode == 0:
                shown_as[str(path)] = place.send(path, "--force" in words)
            elif one.role == _MEND and done.returncode in (0, DAMAGED) and path in before:
                place.send_mended(path, before[path])
                if done.returncode == 0 and (left := place.problems(folder / "again")):
                    raise Refused(f"{place.shown} is not whole after it was put right: {left[0]}", "", DAMAGED)
        for text, stream in ((done.stdout, sys.stdout), (done.stderr, sys.stderr)):
            for path_text, url in sorted(shown_as.items(), reverse=True):
                text = text.replace(path_text, json.dumps(url)[1:-1] if "--json" in words else url)
            _write(text, stream)
        return done.returncode


def _write(text: str, stream: TextIO) -> None:
    """At once: what a full disk says is of this stream."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        name = "standard output" if stream is sys.stdout else "standard error"
        raise Refused(f"{name} cannot be written: {error.strerror or error}", "", SYSTEM) from None


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, _BESIDE_URLS: "1"},
    )
    try:
        out, err = child.communicate()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    return subprocess.CompletedProcess(words, child.returncode if child.returncode >= 0 else SYSTEM, out, err)


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
        return SYSTEM


def main() -> None:
    signals = [
        one
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(one) != signal.SIG_IGN  # nohup, and & in a script, mean it
    ]

    def leave(number: int, _: object) -> None:
        for one in signals:  # what is here is removed first
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in signals:
        signal.signal(one, leave)
    code = SYSTEM  # not 1: that two differ
    try:
        code = work(sys.argv[1], sys.argv[2], sys.argv[3:])
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception:
        with suppress(OSError):
            sys.stderr.write(shown(traceback.format_exc()))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)  # a driver's threads that wait may keep the interpreter from its end


if __name__ == "__main__":
    main()
