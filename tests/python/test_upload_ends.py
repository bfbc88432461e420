"""Uploads at the end of a process, and what is told of older checkpoints that could not go."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_session import OneProcess, ck, empty_place, use  # noqa: F401
from run_jobs import Run
from torch import nn

from evenstep import EvenstepError, checkpoint_uploads
from evenstep.checkpoint_files import REPLACED
from evenstep.checkpoint_keeping import Keep
from evenstep.checkpoint_remote import Altered, Remote
from evenstep.checkpoint_uploads import OlderStay, Uploads

OURS = "ab" * 8

# A driver in a folder that the script has added: it wants what the script put into fsspec's settings.
DRIVER = """
    import os, sys
    from fsspec.implementations.local import LocalFileSystem

    class Added(LocalFileSystem):
        protocol = "added"

        def __init__(self, word="", does="", **more):
            super().__init__(**more)
            print("a line", end="", flush=True)
            if does == "ends":
                print("it has had", file=sys.stderr)
                print("enough of added://me:secret@host", file=sys.stderr, flush=True)
                os._exit(7)
            if word != "open":
                raise OSError("the settings do not say so")
            self.does = does

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("added://"))

        def rm(self, *words, **named):
            raise OSError("nothing goes")

        def rm_file(self, path):
            if path.endswith("manifest.json"):
                raise OSError("nothing goes")
            super().rm_file(path)
"""


def save(monkeypatch: pytest.MonkeyPatch, step: int) -> Path:
    session = use(monkeypatch, OneProcess(model=nn.Linear(3, 3)))
    session.step, session.lineage = step, OURS
    path: Path = ck.checkpoint()
    return path.absolute()


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_place: None) -> Callable[[Any], str]:  # noqa: F811
    """Gives the URL of a place of that driver, with these settings of it."""
    import textwrap

    import fsspec

    folder = tmp_path / "drivers"
    (folder / "added-1.dist-info").mkdir(parents=True)
    (folder / "added_driver.py").write_text(textwrap.dedent(DRIVER))
    (folder / "added-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (folder / "added-1.dist-info/entry_points.txt").write_text("[fsspec.specs]\nadded=added_driver:Added\n")
    monkeypatch.syspath_prepend(str(folder))

    def make(**settings: Any) -> str:
        monkeypatch.setitem(fsspec.config.conf, "added", {**settings, "no_json": object()})
        return f"added://{tmp_path}/far"

    return make


def send(place: str, folder: Path, keep: Keep | None = None) -> list[tuple[Path, str]]:
    uploads = Uploads(None, place)
    uploads.begin(folder, keep, OURS, lambda error: None)
    return uploads.send_by_process(300)


def test_the_last_process_has_the_scripts_modules_and_settings(
    added: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = save(monkeypatch, 1)
    assert send(added(word="open"), path) == []
    assert (tmp_path / "far/step-00000001/manifest.json").exists()
    [(_, why)] = send(added(word="shut"), path)
    assert "the settings do not say so" in why


def test_how_the_last_process_failed_is_told(added: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(monkeypatch, 1)
    [(_, why)] = send(added(word="open", does="ends"), path)
    assert "ended with code 7" in why and "it has had / enough of added://host" in why, why


def test_what_is_up_is_not_said_to_be_missing(
    added: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    place = added(word="open")
    assert send(place, save(monkeypatch, 1)) == []
    assert "older" not in capfd.readouterr().err
    assert send(place, save(monkeypatch, 2), Keep(1)) == []
    said = capfd.readouterr().err
    assert "evenstep: warning: older ones stay: added://" in said and "nothing goes" in said, said
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_older_ones_that_stay_are_told_as_such(
    at_the_end: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    empty_place: None,  # noqa: F811
) -> None:
    place = f"file://{tmp_path}/far"
    remote = Remote(place)
    remote.put(save(monkeypatch, 1))

    def fails(*words: Any) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(remote, "_take_away", lambda at: fails() if at.endswith("1") else None)
    told: list[BaseException] = []
    uploads = Uploads(remote, place)
    path = save(monkeypatch, 2)
    go_on = remote.put

    def put(folder: Path) -> str:
        name = go_on(folder)
        if at_the_end:
            monkeypatch.setattr(checkpoint_uploads, "_script_ended", lambda: True)
        return name

    monkeypatch.setattr(remote, "put", put)
    uploads.begin(path, Keep(1), OURS, told.append)
    assert uploads.join() == []  # nothing that a process would have to send
    assert [type(error) for error in told] == [OlderStay]
    assert str(told[0]).startswith(f"older ones stay: {place}: step-00000001 cannot be removed")
    assert [one.step for one in remote.whole()] == [2, 1]


def test_what_was_taken_away_again_is_no_upload(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    empty_place: None,  # noqa: F811
) -> None:
    remote = Remote(f"file://{tmp_path}/far")

    def damaged(*words: Any) -> None:
        raise Altered("it was removed")

    monkeypatch.setattr(remote, "retain", damaged)
    told: list[BaseException] = []
    uploads = Uploads(remote)
    uploads.begin(save(monkeypatch, 1), Keep(1), OURS, told.append)
    uploads.join()
    assert [type(error) for error in told] == [Altered]


def test_one_that_is_replaced_here_while_it_is_sent_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    empty_place: None,  # noqa: F811
) -> None:
    remote = Remote(f"file://{tmp_path}/far")
    path = save(monkeypatch, 1)
    put = remote._files.put_file
    told: list[Any] = []
    away = "gone"

    def meanwhile(source: str, *words: Any, **named: Any) -> Any:
        done = put(source, *words, **named)
        if len(told) == 0:
            told.append(save(monkeypatch, 1))  # of the same name and sizes
        elif len(told) == 2:
            told.append("")
            path.rename(path.with_name(away))
        return done

    monkeypatch.setattr(remote._files, "put_file", meanwhile)
    with pytest.raises(EvenstepError, match="step-00000001 was replaced or removed here while it was sent"):
        remote.put(path)
    assert remote.whole() == [] and told == [path]
    uploads = Uploads(remote)
    failed: list[BaseException] = []
    told.clear()
    uploads.begin(path, None, "", failed.append)
    uploads.join()
    assert remote.whole() == [] and not failed  # the newer one follows
    told.append(path)
    uploads.begin(path, None, "", failed.append)
    uploads.join()
    assert remote.whole() == [] and "removed here" in str(failed[0])
    path.with_name("gone").rename(path)
    away = path.name + REPLACED  # the first of two renames, where folders cannot be swapped
    assert told.pop() == ""
    for _ in range(2):  # while it is sent, and before
        uploads.begin(path, None, "", failed.append)
        uploads.join()
        assert remote.whole() == [] and len(failed) == 1 and path.with_name(away).exists()
    path.with_name(away).rename(path)
    assert remote.put(path) == path.name
    assert [one.name for one in remote.whole()] == [path.name]


def test_settings_that_json_cannot_carry_are_left_out(added: Callable[..., str]) -> None:
    added(word="open")
    settings = checkpoint_uploads._settings()
    assert settings["added"] == {"word": "open"}
    assert json.loads(json.dumps(settings)) == settings
    assert os.fspath(checkpoint_uploads._environment()["PYTHONPATH"]).split(os.pathsep)[0].endswith("drivers")


def test_where_no_thread_can_begin_a_process_sends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uploads = Uploads(Remote(f"file://{tmp_path}/far"), f"file://{tmp_path}/far")
    monkeypatch.setattr(checkpoint_uploads, "_script_ended", lambda: True)
    monkeypatch.setattr(checkpoint_uploads, "_BEGINS_NONE", True)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("it would have begun one"))
    uploads.begin(tmp_path / "step-00000002", None, OURS, print)
    assert uploads.join() == [tmp_path / "step-00000002"]  # `send_by_process` takes it
    for name in ("best", "step-00000003", "last", "best"):
        uploads.begin(tmp_path / name, None, OURS, print)
    monkeypatch.setattr(uploads, "_by_process", lambda one, seconds: [(one.folder, f"{seconds:g}")])
    assert uploads.send_by_process(math.inf) == [(tmp_path / name, "inf") for name in ("step-00000003", "best", "last")]
    assert uploads.join() == []


GOES_ON = """
    import atexit, pathlib, threading, time
    import torch
    import evenstep as es
    from evenstep import checkpoint_uploads

    model = es.prepare(torch.nn.Linear(2, 2))
    atexit.register(lambda: print("ends:", checkpoint_uploads._ends(), flush=True))

    def after():
        threading.main_thread().join()
        print("ends:", checkpoint_uploads._ends(), flush=True)
        es.checkpoint()
        uploads = checkpoint_uploads._uploads.values()
        while any(one._thread is not None for one in uploads):
            time.sleep(0.01)
        print("up:", len(list(pathlib.Path("far").glob("*/manifest.json"))), flush=True)

    threading.Thread(target=after).start()
"""


def test_a_thread_that_goes_on_after_the_script_uploads(run: Run, script: Any, tmp_path: Path) -> None:
    place = {"EVENSTEP_CHECKPOINT_TO": f"file://{tmp_path}/far"}
    done = run("-n", "1", "--log-rank", "0", script(GOES_ON), env=place, timeout=300)
    assert done.returncode == 0, done.stderr
    at_the_end = checkpoint_uploads._BEGINS_NONE  # by a process
    assert [line for line in done.stdout.splitlines() if line.startswith(("ends:", "up:"))] == [
        f"ends: {at_the_end}",
        f"up: {int(not at_the_end)}",
        "ends: True",
    ], done.stdout + done.stderr
    assert len(list(Path(tmp_path, "far").glob("*/manifest.json"))) == 1, done.stdout + done.stderr
