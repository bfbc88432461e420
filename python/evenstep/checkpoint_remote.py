"""Checkpoints kept elsewhere, too: at any place that fsspec has a driver for (s3://, gs://, abfs://, sftp://, file:// …).

A checkpoint is there once its manifest is, which goes up last and is taken away first: whatever ends an upload, the newest
one that can be loaded is whole. What was brought back is compared with every checksum before it gets its name here.

    python -m evenstep.checkpoint_remote ls URL | push PATH URL | fetch URL FOLDER | bring
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evenstep._core import EvenstepError
from evenstep.answering import UPLOAD, Answer, Silent, answer_of
from evenstep.checkpoint_files import (
    MANIFEST,
    PARTIAL,
    first_wrong,
    holds,
    parse_manifest,
    read_manifest,
    sync_files,
    sync_folder,
    verify,
)
from evenstep.checkpoint_keeping import STEP_NAME, Keep
from evenstep.checkpoint_order import order_of
from evenstep.place_errors import OBJECT_STORES, explained, is_without_bucket
from evenstep.place_listing import entry, table


def reads_back() -> bool:
    """Whether a checkpoint at another place is read before it pushes older ones out (EVENSTEP_UPLOAD_READ_BACK=0: it is not)."""
    return os.environ.get("EVENSTEP_UPLOAD_READ_BACK", "") != "0"


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z0-9+]+://", text) is not None  # even_path_is_url


def shown(text: str) -> str:
    """The text without user:password@ of the URLs in it, as it may be printed and kept."""
    return re.sub(r"://[^/\s]*@", "://", text)


class Altered(EvenstepError):
    """A checkpoint there has other bytes than its manifest says."""


class Replaced(EvenstepError):
    """Another checkpoint took its name here while it was sent."""


class Stored(NamedTuple):
    """A whole checkpoint at the other place."""

    order: str  # evenstep.checkpoint_order
    name: str
    manifest: dict[str, Any]

    @classmethod
    def of(cls, name: str, manifest: dict[str, Any]) -> Stored:
        return cls(order_of(manifest), name, manifest)

    @property
    def step(self) -> int:
        step = self.manifest["state"].get("step")
        return step if isinstance(step, int) else 0

    @property
    def sum(self) -> str:
        return str(self.manifest["manifest_checksum"])

    @property
    def lineage(self) -> str:
        return str(self.manifest["state"].get("lineage", ""))


# What is no folder. (What may not be read is not taken for that: a training would begin anew beside its checkpoints.)
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


_LEAST_SPEED = 10e6  # bytes a second
_CLAIM = ".evenstep.claim"
_PATTERN = frozenset("*?[")  # drivers remove and move all that such a name matches
_READ_BYTES = 16 << 20  # of one reading


def _owner(manifest: dict[str, Any]) -> str:
    """The training whose checkpoint it is; of one that does not say so, the checkpoint itself."""
    lineage = manifest["state"].get("lineage", "")
    return lineage if re.fullmatch(r"[0-9a-f]{8,64}", lineage) else str(manifest["manifest_checksum"])


_NOTHING_LEFT = threading.Event()
_NOTHING_LEFT.set()


class Remote:
    """A folder of checkpoints at another place."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]

            self.url = shown(url.rstrip("/"))
            self._files, root = self._ask("it is opened", lambda: fsspec.core.url_to_fs(url))
        except Silent:
            raise
        except (ImportError, ValueError) as error:
            raise EvenstepError(
                f"{shown(f'{url}: {error}')}\n  fix: install fsspec's driver for it beside torch, such as s3fs for s3://, gcsfs for gs://"
            ) from None
        except Exception as error:  # drivers have errors of their own
            raise EvenstepError(shown(f"{url}: {type(error).__name__}: {error}")) from None
        self._root = root.rstrip("/")
        self._left: dict[str, threading.Event] = {}  # uploads that were given up, and may yet write there
        self._right: set[str] = set()  # manifests' checksums of what was read back

    def _ask(self, what: str, call: Callable[[], Answer], into: Path | None = None) -> Answer:
        """What a driver answers. into: the file that it writes meanwhile."""

        def arrived() -> int:
            return into.stat().st_size if into is not None and into.exists() else 0

        def silent(seconds: float) -> Silent:
            got = "" if into is None else f" ({arrived() / 1e6:.1f} MB of it are here)"
            return Silent(
                f"{self.url} does not answer on host {socket.gethostname()}: {what}, and nothing came for {seconds:g} s{got}\n"
                "  fix: look whether it can be reached from that host (network, name, credentials, the store itself); "
                "EVENSTEP_FETCH_TIMEOUT waits longer (inf: for ever)"
            )

        return answer_of(call, silent, arrived)

    def _tell(
        self, what: str, call: Callable[[], Answer], moved: Callable[[], int] = lambda: 0, size: int = 0
    ) -> Answer:
        """What comes of a call that changes something there. size: of a file that goes there; a driver that does not say
        how far it is has time for it at _LEAST_SPEED."""

        def silent(seconds: float) -> Silent:
            return Silent(
                f"{self.url} takes nothing from host {socket.gethostname()}: {what}, and nothing came of it for {seconds:g} s\n"
                "  fix: look whether it can be reached and written to from that host (network, credentials, the store itself); "
                "EVENSTEP_UPLOAD_TIMEOUT waits longer (inf: for ever)"
            )

        return answer_of(call, silent, moved, UPLOAD, size / _LEAST_SPEED)

    def _send(self, path: Path, place: str) -> None:
        from fsspec.callbacks import Callback  # type: ignore[import-untyped]

        sent, named = Callback(), inspect.signature(self._files.put_file).parameters
        takes = any(one.name == "callback" or one.kind == one.VAR_KEYWORD for one in named.values())
        self._tell(
            f"{path.parent.name}/{path.name} is sent",
            lambda: self._files.put_file(os.fspath(path), place, **({"callback": sent} if takes else {})),
            lambda: int(sent.value),
            path.stat().st_size,
        )

    def _failed(self, what: str, error: BaseException) -> EvenstepError:
        """To be raised from None: what a driver says in a traceback of its own may hold the URL in full."""
        return EvenstepError(shown(explained(self.url, what, error)))

    def _look(self, name: str) -> dict[str, Any] | None:
        """The manifest of a checkpoint that is whole by its own checksum and by the sizes of its files; None: there is none.
        A place that does not answer raises what its driver says: an older one is not to be taken for that."""
        try:
            place = f"{self._root}/{name}"
            text = self._ask(f"{name}/{MANIFEST} is read", lambda: self._files.cat_file(f"{place}/{MANIFEST}"))
            entries = self._ask(f"{name} is listed", lambda: self._files.ls(place, detail=True))
        except _NOT_THERE:
            return None
        try:
            manifest = parse_manifest(Path(name) / MANIFEST, text)
            sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}
        except (EvenstepError, ValueError, KeyError):
            return None
        return manifest if all(sizes.get(e["name"]) == e["bytes"] for e in manifest["files"]) else None

    def _manifest(self, name: str) -> dict[str, Any] | None:
        try:
            return self._look(name)
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{name} cannot be read", error) from None

    def whole(self) -> list[Stored]:
        """The whole ones, newest first."""
        try:
            self._files.invalidate_cache()
            places = self._ask("it is listed", lambda: self._files.ls(self._root, detail=False))
            names = [place.rstrip("/").rpartition("/")[2] for place in places]
            found = [(name, self._look(name)) for name in names if not name.endswith(PARTIAL)]
        except Silent:
            raise
        except Exception as error:  # drivers have errors of their own
            if isinstance(error, FileNotFoundError) and not is_without_bucket(error):
                return []
            raise self._failed("cannot be listed", error) from None
        return sorted((Stored.of(name, m) for name, m in found if m is not None), reverse=True, key=_newest)

    def put(self, folder: Path) -> str:
        """Uploads a checkpoint and gives its name there: its own, or, where another training has that, NAME-LINEAGE. One that is
        there already is left as it is. Silent: what was sent has not moved for EVENSTEP_UPLOAD_TIMEOUT seconds."""
        read_manifest(folder)  # says what is wrong with it
        text = (folder / MANIFEST).read_bytes()  # of one moment: the folder may be replaced
        manifest = parse_manifest(folder / MANIFEST, text)
        if not self._left.get(folder.name, _NOTHING_LEFT).is_set():
            raise EvenstepError(
                f"{self.url}: {folder.name} is not uploaded: an upload of this name was given up, and may yet write there"
            )
        try:
            name, is_there = self._take_name(folder.name, manifest)
            if is_there:
                return name
            place = f"{self._root}/{name}"
            self._take_away(place)
            for entry in manifest["files"]:
                self._send(folder / entry["name"], f"{place}/{entry['name']}")
            self._check_same(folder, text)  # else what went up is of both
            self._pipe(f"{place}/{MANIFEST}", text)
            with suppress(Exception):  # it is up; a claim that stays says what its manifest does
                self._leave_claim(place, manifest)
            self._files.invalidate_cache()
        except Silent as error:
            if error.ended is not None:
                self._left[folder.name] = error.ended
            raise
        except EvenstepError:
            raise
        except Exception as error:
            self._check_same(folder, text)
            raise self._failed(f"{folder.name} was not uploaded", error) from None
        if self._manifest(name) != manifest:
            raise EvenstepError(f"{self.url}: {name} is not whole there after its upload")
        return name

    def _check_same(self, folder: Path, text: bytes) -> None:
        try:
            same = (folder / MANIFEST).read_bytes() == text
        except OSError:  # it goes, or is between two renames
            same = False
        if not same:
            raise Replaced(
                f"{self.url}: {folder.name} was replaced or removed here while it was sent, so what went up does not count "
                "there\n  fix: training sends the newer one by itself; else push it again"
            ) from None

    # -- whose a name is: nobody takes another training's --

    def _take_name(self, name: str, manifest: dict[str, Any]) -> tuple[str, bool]:
        """The first of its names that is no other training's there, and whether the checkpoint is there already. If not it is
        claimed: a file of the training's name lies in the folder until the manifest does. Of two that would have one name at once
        at least one sees the other's claim, and takes the next."""
        own = _owner(manifest)
        for one in (name, f"{name}-{own[:8]}", f"{name}-{own}"):
            place = f"{self._root}/{one}"
            if self._is_anothers(place, manifest):
                continue
            if self._look(one) == manifest:
                return one, True
            self._make(place)
            self._pipe(f"{place}/{own}{_CLAIM}", b"\n")
            if not self._is_anothers(place, manifest):
                return one, False
            self._leave_claim(place, manifest)
        raise EvenstepError(f"{self.url}: {name} is not uploaded: other trainings have all of its names there")

    def _is_store(self) -> bool:
        protocol = self._files.protocol
        return not OBJECT_STORES.isdisjoint({protocol} if isinstance(protocol, str) else protocol)

    def _make(self, place: str) -> None:
        if self._is_store():
            return
        self._tell(f"{place.rpartition('/')[2]} is made", lambda: self._files.makedirs(place, exist_ok=True))

    def _pipe(self, path: str, text: bytes) -> None:
        self._tell(f"{'/'.join(path.split('/')[-2:])} is sent", lambda: self._files.pipe_file(path, text))

    def _is_anothers(self, place: str, manifest: dict[str, Any]) -> bool:
        """Whether another training has a checkpoint there, or is about to. What cannot be read is one's own by the claim alone."""
        own = _owner(manifest)
        self._files.invalidate_cache()
        try:
            entries = self._ask(f"{place.rpartition('/')[2]} is listed", lambda: self._files.ls(place, detail=False))
        except _NOT_THERE:
            return False
        names = {entry.rstrip("/").rpartition("/")[2] for entry in entries}
        if any(name.endswith(_CLAIM) and name != own + _CLAIM for name in names):
            return True
        if MANIFEST not in names:
            return False
        path = f"{place}/{MANIFEST}"
        try:
            text = self._ask(f"{path.rpartition('/')[2]} is read", lambda: self._files.cat_file(path))
            return _owner(parse_manifest(Path(place) / MANIFEST, text)) != own
        except _NOT_THERE:
            return False
        except Silent:
            raise
        except EvenstepError:
            return own + _CLAIM not in names

    def _leave_claim(self, place: str, manifest: dict[str, Any]) -> None:
        path = f"{place}/{_owner(manifest)}{_CLAIM}"
        self._tell(f"{path.rpartition('/')[2]} is removed", lambda: self._files.rm_file(path))

    def fetch(self, name: str, into: Path) -> Path:
        """Downloads a checkpoint; one of that name that is here, and the same, is taken. What lies here under its name, and
        is damaged, is replaced; another checkpoint is an error."""
        target = into / name
        manifest = self._manifest(name)
        if manifest is None:
            raise EvenstepError(f"{self.url}/{name} is no whole checkpoint")
        if not target.exists():
            return self._download(name, target)
        if read_manifest(target) != manifest:
            raise EvenstepError(
                f"{target} is another checkpoint than {self.url}/{name}\n  fix: fetch into another folder"
            )
        if not holds(target, manifest):
            return self._download(name, target)
        return target

    def fetch_beside(self, name: str, into: Path, manifest: dict[str, Any]) -> Path:
        """The same, where another checkpoint may have that name here: then under one of its own."""
        name_here = name.removesuffix(f"-{_owner(manifest)[:8]}")  # NAME-LINEAGE there may be NAME here
        if name_here != name and holds(into / name_here, manifest):
            return into / name_here
        try:
            taken = (into / name).exists() and read_manifest(into / name) != manifest
        except EvenstepError:  # it stays: `ckpt repair` may want it
            taken = True
        if not taken:
            return self.fetch(name, into)
        target = into / f"{name}-{manifest['manifest_checksum']}"
        return target if holds(target, manifest) else self._download(name, target)

    def _download(self, name: str, target: Path) -> Path:
        """To `target`, which it gets only when it is whole; what was there goes then."""
        partial, old = (target.with_name(f"{target.name}{word}{PARTIAL}") for word in ("", ".damaged"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            self._get(name, MANIFEST, partial)
            manifest = read_manifest(partial)
            for entry in manifest["files"]:
                self._get(name, entry["name"], partial)
            try:
                verify(partial, manifest)
            except EvenstepError as error:
                what = str(error).partition("\n")[0].partition(" is damaged: ")[2]
                raise Altered(f"{self.url}/{name} is damaged: {what}") from None
            sync_files(partial)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            partial.rename(target)
            sync_folder(target.parent)
        except EvenstepError:
            raise
        except Exception as error:
            raise self._failed(f"{name} could not be fetched", error) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        return target

    def _get(self, name: str, file: str, partial: Path) -> None:
        place, to = f"{self._root}/{name}/{file}", partial / file
        self._ask(f"{name}/{file} is read", lambda: self._files.get_file(place, os.fspath(to)), to)

    def _take_away(self, place: str) -> None:
        """The manifest."""
        path, shown_as = f"{place}/{MANIFEST}", f"{place.rpartition('/')[2]}/{MANIFEST}"
        if self._tell(f"{shown_as} is looked for", lambda: self._files.exists(path)):
            self._tell(f"{shown_as} is removed", lambda: self._files.rm_file(path))

    def remove(self, name: str) -> None:
        """The manifest first: no moment shows half of it as a whole one."""
        place = f"{self._root}/{name}"
        try:
            self._take_away(place)
            if _PATTERN.isdisjoint(place):
                self._tell(f"{name} is removed", lambda: self._files.rm(place, recursive=True))
            else:
                for path in self._ask(f"{name} is listed", lambda: self._files.find(place)):
                    self._tell(f"{name} is removed", partial(self._files.rm_file, path))
                with suppress(Exception):  # stores have no empty folders
                    self._tell(f"{name} is removed", lambda: self._files.rmdir(place))
            self._files.invalidate_cache()
        except Silent:
            raise
        except Exception as error:
            raise self._failed(f"{name} cannot be removed", error) from None

    def retain(self, keep: Keep, lineage: str, found: list[Stored] | None = None) -> None:
        """The same rules as for the folder here, of step-N alone: none goes before one that stays was read back and found right
        (once in as many uploads as stay). found: what `whole` gives."""
        there = self.whole() if found is None else found
        own = [one for one in there if one.lineage == lineage and STEP_NAME.match(one.name)]
        stays = keep.stays([(one.order, one.step, one.name) for one in own])
        goes = [one for one in own if one.name not in stays]
        if goes and reads_back() and not any(one.sum in self._right for one in own[: keep.newest]):
            self._read_back(own[0])
        for one in goes:
            self.remove(one.name)

    def _read_back(self, one: Stored) -> None:
        """Compares every checksum with what the place gives. What is damaged goes: nobody is to take it for the newest."""
        try:
            for entry in one.manifest["files"]:
                self._compare(one.name, entry)
        except (Silent, Altered):
            raise
        except Exception as error:
            raise self._failed(f"{one.name} could not be read back", error) from None
        self._right.add(one.sum)

    def _piece(self, path: str, begin: int, end: int) -> bytes:
        what = f"{'/'.join(path.split('/')[-2:])} is read back"
        return self._ask(what, lambda: bytes(self._files.cat_file(path, start=begin, end=end)))

    def _compare(self, name: str, entry: dict[str, Any]) -> None:
        path, chunk, sums = f"{self._root}/{name}/{entry['name']}", entry["chunk_bytes"], entry["checksums"]
        step = max(_READ_BYTES // chunk, 1) * chunk
        for begin in range(0, entry["bytes"], step):
            end = min(begin + step, entry["bytes"])
            expected = sums[begin // chunk : -(-end // chunk)]
            wrong = first_wrong(self._piece(path, begin, end), end - begin, chunk, expected)
            if wrong is not None:  # once more: an answer may be wrong where the file is right
                self._files.invalidate_cache()
                wrong = first_wrong(self._piece(path, begin, end), end - begin, chunk, expected)
            if wrong is not None:
                self.remove(name)
                raise Altered(
                    f"{self.url}: {name} was damaged there after its upload (chunk {begin // chunk + wrong} of {entry['name']}), "
                    "and was removed; older ones stay"
                )


def _newest(one: Stored) -> tuple[str, int, str]:
    return one.order, one.step, one.name


def _exactly(url: str) -> tuple[Remote, Stored] | None:
    """The checkpoint at `url` itself, where there is one."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if parent.endswith(":/"):
        return None
    try:
        above = Remote(
            f"{parent}/" if parent.endswith("://") else parent
        )  # file:///NAME: file:// is the working folder
        manifest = above._look(name)
    except Silent:
        raise
    except Exception:  # what is above need not be open to us; where nothing answers its own listing says so
        return None
    return None if manifest is None else (above, Stored.of(name, manifest))


def fetch_newest(url: str, into: Path) -> Path:
    """The checkpoint at `url`, or the newest whole one in it."""
    if (one := _exactly(url)) is not None:
        return one[0].fetch(one[1].name, into)
    remote = Remote(url)
    found = remote.whole()
    if not found:
        raise EvenstepError(f"{remote.url} holds no whole checkpoint")
    return remote.fetch(found[0].name, into)


class Wish(NamedTuple):
    """Which checkpoint an agent wants (src/orchestrator/agent.h has what its members say)."""

    url: str
    folder: str
    after: str = ""
    job: str = ""
    lineage: str = ""
    until: str = ""

    def takes(self, one: Stored) -> bool:
        state = one.manifest["state"]
        if one.order <= self.after:
            return False
        if not self.job or state.get("job") == self.job:
            return True
        return bool(self.lineage) and one.lineage == self.lineage and one.order <= self.until


def bring(wish: Wish, tell: Callable[[str], None]) -> Path | None:
    """The newest whole one that is wanted, brought to the wish's folder; None where there is none.

    What is whole by its sizes and damaged all the same is passed over, and told. Raises EvenstepError where the place does
    not answer, or all that was wanted is damaged.
    """
    url, into = wish.url, Path(wish.folder)
    damage: Altered | None = None
    if (one := _exactly(url)) is not None:
        found = [one]
    else:
        remote = Remote(url)
        found = [(remote, stored) for stored in remote.whole() if wish.takes(stored)]
    for place, stored in found:
        size = sum(entry["bytes"] for entry in stored.manifest["files"])
        tell(f"{stored.name} ({size / 1e6:,.1f} MB) is fetched from {place.url}")
        try:
            return place.fetch_beside(stored.name, into, stored.manifest)
        except Altered as error:
            tell(f"passed over: {error}")
            damage = damage or error
    if damage is not None:
        raise Altered(f"{shown(url)}: none of the {len(found)} checkpoints there is whole: {damage}")
    return None


def _answer_agent() -> int:
    """One request in a line of JSON, from `evenstep run`; notices and an answer, each in one."""

    writes = threading.Lock()

    def say(**what: Any) -> None:
        with writes:
            print(json.dumps(what), flush=True)

    def live() -> None:
        """For the agent: this process does not stand still."""
        while True:
            say(lives=True)
            time.sleep(1)

    with os.fdopen(int(os.environ["EVENSTEP_REQUESTS_FD"]), encoding="utf-8") as requests:
        wish = Wish(**json.loads(requests.readline()))
    try:
        threading.Thread(target=live, name="evenstep-lives", daemon=True).start()
        path = bring(wish, lambda text: say(notice=text))
    except EvenstepError as error:
        what, _, fix = str(error).partition("\n  fix: ")
        say(what=what, fix=fix, code=6 if isinstance(error, Altered) else 3)
        return 1
    say(text="", report="" if path is None else os.fspath(path))
    return 0


def main(words: list[str]) -> int:
    if words == ["bring"]:
        return _answer_agent()
    try:
        if len(words) == 2 and words[0] == "ls":
            place = Remote(words[1])
            answer: Any = [entry(place.url, one.name, one.order, one.manifest) for one in place.whole()]
        elif len(words) == 3 and words[0] == "push":
            name = Remote(words[2]).put(Path(words[1]).absolute())
            answer = f"{shown(words[2].rstrip('/'))}/{name}"
        elif len(words) == 3 and words[0] == "fetch":
            answer = os.fspath(fetch_newest(words[1], Path(words[2]).absolute()))
        else:
            answer = None
    except EvenstepError as error:
        what, _, fix = str(error).partition("\n  fix: ")
        print(json.dumps({"what": what, "fix": fix, "code": 3}), flush=True)
        if isinstance(error, Silent):
            os._exit(1)  # a driver's threads that wait may keep the interpreter from its end
        return 1
    if answer is None:
        sys.stderr.write((__doc__ or "").splitlines()[-1].strip() + "\n")
        return 2
    text = answer if isinstance(answer, str) else table(answer)
    print(json.dumps({"text": text, "report": answer}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
