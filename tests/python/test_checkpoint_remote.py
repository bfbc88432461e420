"""Checkpoints at another place, through fsspec: whole or not there, whatever ends an upload."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from run_jobs import Run
from torch import nn

from evenstep import EvenstepError, checkpoint_remote, checkpoint_uploads
from evenstep.answering import Silent
from evenstep.checkpoint_keeping import Keep
from evenstep.checkpoint_remote import Altered, Remote, Wish, bring, fetch_newest, is_url, shown
from evenstep.checkpoint_uploads import Uploads


@pytest.fixture(params=["memory", "file"])
def url(request: Any, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/far/run"
        return
    yield "memory://far/run"
    fsspec.filesystem("memory").store.clear()


OURS, THEIRS = "ab" * 8, "cd" * 8


@pytest.fixture(autouse=True)
def no_places_of_before(empty_place: None) -> None:  # noqa: F811
    checkpoint_uploads._looks.clear()
    checkpoint_uploads._uploads.clear()


def save(monkeypatch: pytest.MonkeyPatch, step: int, lineage: str = OURS, folder: str = "") -> Path:
    session = use(monkeypatch, OneProcess(model=nn.Linear(30, 30)))
    session.step, session.lineage = step, lineage
    with monkeypatch.context() as patch:
        if folder:
            patch.setenv("EVENSTEP_CHECKPOINT_DIR", folder)
        path: Path = ck.checkpoint()
    return path


def test_there_and_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    assert remote.whole() == []
    paths = [save(monkeypatch, step) for step in (1, 2)]
    for path in paths:
        remote.put(path)
        remote.put(path)  # once
    assert [one.name for one in remote.whole()] == ["step-00000002", "step-00000001"]
    got = fetch_newest(url, Path("back"))
    assert got == Path("back/step-00000002") and fetch_newest(url, Path("back")) == got
    for name in ("manifest.json", "model.safetensors", "random.safetensors"):
        assert (got / name).read_bytes() == (paths[1] / name).read_bytes()
    assert fetch_newest(f"{url}/step-00000001", Path("back")).name == "step-00000001"
    with pytest.raises(EvenstepError, match="another checkpoint"):
        save(monkeypatch, 1)
        Remote(url).fetch("step-00000001", Path("checkpoints"))


def test_an_upload_that_ends_anywhere_leaves_the_one_before(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(url)
    remote.put(save(monkeypatch, 1))
    path = save(monkeypatch, 2)
    calls = ("makedirs", "put_file", "pipe_file", "rm_file")
    real = {call: getattr(remote._files, call) for call in calls}
    for nth in range(1, 20):
        left = [nth]

        def broken(call: str, left: list[int] = left) -> Any:
            def run(*words: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    if call == "pipe_file":  # half of it comes through
                        real[call](words[0], words[1][: len(words[1]) // 2])
                    raise OSError("the network is gone")
                return real[call](*words, **named)

            return run

        with monkeypatch.context() as patch:
            for call in calls:
                patch.setattr(remote._files, call, broken(call), raising=False)
            up = False
            try:
                remote.put(path)
                up = True
            except EvenstepError as error:
                assert "step-00000002 was not uploaded" in str(error)
        newest = fetch_newest(url, tmp_path / f"back-{nth}")
        files.verify(newest, files.read_manifest(newest))
        assert newest.name == ("step-00000002" if up else "step-00000001")
        if left[0] > 0:
            break
    assert nth > 6  # each file, the manifest, their folder, the claim
    assert [one.name for one in remote.whole()] == ["step-00000002", "step-00000001"]


def test_a_replaced_one_is_never_a_mixture(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    path = save(monkeypatch, 1)
    remote.put(path)
    model = torch.nn.Linear(30, 30)
    session = use(monkeypatch, OneProcess(model=model))
    session.step, session.lineage = 1, "ab" * 8
    assert ck.checkpoint() == path  # replaced here
    put = remote._files.put_file
    done = []

    def fails_second(*words: Any, **named: Any) -> Any:
        done.append(words)
        if len(done) == 2:
            raise OSError("the network is gone")
        return put(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(remote._files, "put_file", fails_second)
        with pytest.raises(EvenstepError, match="network is gone"):
            remote.put(path)
    assert remote.whole() == []
    remote.put(path)
    got = fetch_newest(url, Path("back"))
    assert (got / "manifest.json").read_bytes() == (path / "manifest.json").read_bytes()


def test_what_is_damaged_there_is_passed_over_or_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(url)
    for step in (1, 2, 3):
        remote.put(save(monkeypatch, step))
    place = f"{remote._root}/step-00000003"
    remote._files.pipe_file(f"{place}/model.safetensors", b"short")
    text = remote._files.cat_file(f"{remote._root}/step-00000002/manifest.json")
    remote._files.pipe_file(f"{remote._root}/step-00000002/manifest.json", text.replace(b"model", b"m0del"))
    assert fetch_newest(url, tmp_path / "a").name == "step-00000001"
    whole = remote._files.cat_file(f"{remote._root}/step-00000001/model.safetensors")
    remote._files.pipe_file(f"{remote._root}/step-00000001/model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EvenstepError, match=r"chunk 0 of model\.safetensors"):
        fetch_newest(url, tmp_path / "b")
    assert names(tmp_path / "b") == []  # nothing half stays
    with pytest.raises(EvenstepError, match="no whole checkpoint"):
        fetch_newest(f"{url}/nothing", tmp_path / "b")


def test_the_same_are_kept_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    for step in range(1, 7):
        remote.put(save(monkeypatch, step))
        remote.retain(Keep(2, steps=3), "ab" * 8)
    assert [one.step for one in remote.whole()] == [6, 5, 3]
    remote.retain(Keep(1), "another's")
    assert len(remote.whole()) == 3
    path = save(monkeypatch, 7)
    remote.put(path.rename(path.with_name("best")))
    remote.retain(Keep(2, steps=3), OURS)  # a name that the user gave neither goes nor counts
    assert [one.step for one in remote.whole()] == [7, 6, 5, 3]
    for step in (8, 9):
        remote.put(save(monkeypatch, step))
        remote.retain(Keep(1), OURS)
    assert [one.name for one in remote.whole()] == ["step-00000009", "best"]


def same_bytes(remote: Remote, name: str, path: Path) -> bool:
    there = remote._files.cat_file
    return all(there(f"{remote._root}/{name}/{file.name}") == file.read_bytes() for file in path.iterdir())


def test_a_name_that_drivers_take_for_a_pattern(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it matches stays, and it goes itself."""
    remote = Remote(url)
    for step, name in enumerate(("best[12]", "best1", "last")):
        path = save(monkeypatch, step + 1, THEIRS if name == "best1" else OURS)
        assert remote.put(path.rename(path.with_name(name))) == name
    remote.remove("best[12]")
    assert sorted(one.name for one in remote.whole()) == ["best1", "last"]
    assert not remote._files.exists(f"{remote._root}/best[12]")


def test_another_trainings_checkpoint_is_not_replaced(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    ours, theirs = save(monkeypatch, 1), save(monkeypatch, 1, THEIRS, "theirs")
    assert ours.name == theirs.name
    assert remote.put(ours) == "step-00000001"
    for _ in range(2):  # and its own again
        assert remote.put(theirs) == "step-00000001-cdcdcdcd"
    theirs = save(monkeypatch, 1, THEIRS, "theirs")  # its own is replaced
    assert remote.put(theirs) == "step-00000001-cdcdcdcd"
    assert same_bytes(remote, "step-00000001", ours) and same_bytes(remote, "step-00000001-cdcdcdcd", theirs)
    assert not [path for path in remote._files.find(remote._root) if path.endswith(".claim")]
    assert remote.put(save(monkeypatch, 2)) == "step-00000002"
    remote.retain(Keep(1), OURS)
    assert sorted(one.name for one in remote.whole()) == ["step-00000001-cdcdcdcd", "step-00000002"]
    wish = Wish(url, "theirs", lineage=THEIRS, job="x", until="9")
    assert bring(wish, lambda text: None) == Path("theirs/step-00000001")  # NAME-LINEAGE there is NAME here
    assert bring(wish._replace(folder="new"), lambda text: None) == Path("new/step-00000001-cdcdcdcd")


def test_what_cannot_be_told_apart_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that nobody can read is another training's, but where this one's upload has ended in its midst."""
    remote = Remote(url)
    path = save(monkeypatch, 1)
    place = f"{remote._root}/step-00000001"
    remote._files.makedirs(place, exist_ok=True)
    remote._files.pipe_file(f"{place}/manifest.json", b"of another kind")
    assert remote.put(path) == "step-00000001-abababab"
    remote._files.pipe_file(f"{remote._root}/step-00000001-abababab/{OURS}.evenstep.claim", b"")
    remote._files.pipe_file(f"{remote._root}/step-00000001-abababab/manifest.json", b"half")
    assert remote.put(path) == "step-00000001-abababab"
    assert remote._files.cat_file(f"{place}/manifest.json") == b"of another kind"
    other = save(monkeypatch, 7, THEIRS, "theirs")
    for name in ("", "-cdcdcdcd", f"-{THEIRS}"):
        remote._files.makedirs(f"{remote._root}/step-00000007{name}", exist_ok=True)
        remote._files.pipe_file(f"{remote._root}/step-00000007{name}/{OURS}.evenstep.claim", b"")
    with pytest.raises(EvenstepError, match="other trainings have all of its names"):
        remote.put(other)


def test_two_that_want_one_name_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees the other's claim gives way: never do both write there."""
    ours, theirs = save(monkeypatch, 1), save(monkeypatch, 1, THEIRS, "theirs")
    remote, other = Remote(url), Remote(url)
    pipe, names_had = remote._files.pipe_file, []

    def meanwhile(path: str, *words: Any, **named: Any) -> Any:
        if path.endswith(f"{OURS}.evenstep.claim") and not names_had:
            names_had.append("")  # all of the other's upload falls between the look and the claim
            names_had[0] = other.put(theirs)
        return pipe(path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(remote._files, "pipe_file", meanwhile)
        name = remote.put(ours)
    assert names_had == ["step-00000001"] and name == "step-00000001-abababab"
    assert same_bytes(remote, name, ours) and same_bytes(remote, names_had[0], theirs)
    remote._files.pipe_file(f"{remote._root}/step-00000001/{THEIRS}.evenstep.claim", b"")  # it is about to replace it
    remote._files.rm_file(f"{remote._root}/step-00000001/manifest.json")
    assert remote.put(ours) == "step-00000001-abababab"


def test_a_training_that_begins_anew_is_the_newest_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its first checkpoint already, however many the one before has written."""
    remote = Remote(url)
    for step in range(1, 8):
        path = save(monkeypatch, step)
    remote.put(path)
    monkeypatch.setattr(checkpoint_uploads, "_LOOK_SECONDS", 120)
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_TO", url)
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", "theirs")
    session = use(monkeypatch, OneProcess(model=nn.Linear(30, 30)))
    session.lineage = THEIRS
    session.step = 7
    ck.checkpoint()
    ck.wait_for_uploads()
    assert [one.name for one in remote.whole()] == ["step-00000007-cdcdcdcd", "step-00000007"]
    save(monkeypatch, 8, folder="checkpoints")  # the first one goes on all the same, beside it
    ck.wait_for_uploads()
    assert remote.whole()[0].name == "step-00000008"
    session.step = 9
    use(monkeypatch, session)
    ck.checkpoint()
    ck.wait_for_uploads()
    assert remote.whole()[0].name == "step-00000009"
    assert bring(Wish(url, "new"), lambda text: None) == Path("new/step-00000009")


def test_what_pushes_others_out_is_read_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    put, get = remote._files.put_file, remote._files.cat_file
    read: list[str] = []

    def one_bit(source: str, place: str, **named: Any) -> None:
        put(source, place, **named)
        if place.endswith("step-00000003/model.safetensors"):
            content = bytearray(get(place))
            content[-1] ^= 1
            remote._files.pipe_file(place, bytes(content))

    def watched(path: str, *words: Any, **named: Any) -> Any:
        if path.endswith("model.safetensors"):
            read.append(path.split("/")[-2])
        return get(path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(remote._files, "put_file", one_bit)
        patch.setattr(remote._files, "cat_file", watched)
        patch.setattr(checkpoint_remote, "_READ_BYTES", 1)  # a chunk a reading
        for step in (1, 2):
            remote.put(save(monkeypatch, step))
            remote.retain(Keep(2), OURS)
        assert read == []  # nothing is pushed out
        remote.put(save(monkeypatch, 3))
        with pytest.raises(
            Altered, match=r"step-00000003 was damaged .*chunk 0 of model\.safetensors.*older ones stay"
        ):
            remote.retain(Keep(2), OURS)
        assert [one.step for one in remote.whole()] == [2, 1]
        for step in range(4, 9):
            remote.put(save(monkeypatch, step))
            remote.retain(Keep(2), OURS)
        assert [one.step for one in remote.whole()] == [8, 7]
        assert read == [
            f"step-0000000{step}" for step in (3, 3, 4, 6, 8)
        ]  # once in as many as are kept; what seems damaged again
        monkeypatch.setenv("EVENSTEP_UPLOAD_READ_BACK", "0")
        for step in range(9, 12):
            remote.put(save(monkeypatch, step))
            remote.retain(Keep(2), OURS)
        assert read[5:] == []


def test_nothing_goes_where_it_cannot_be_read_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(url)
    for step in (1, 2, 3):
        remote.put(save(monkeypatch, step))
    get = remote._files.cat_file

    def fails(path: str, *words: Any, **named: Any) -> Any:
        if path.endswith("safetensors"):
            raise OSError("the network is gone")
        return get(path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(remote._files, "cat_file", fails)
        with pytest.raises(EvenstepError, match="could not be read back"):
            remote.retain(Keep(1), OURS)
    assert [one.step for one in remote.whole()] == [3, 2, 1]


def test_uploads_in_the_background(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for none; of those that wait the newest goes, and what is under way stays here."""
    remote = Remote(url)
    paths = [save(monkeypatch, step) for step in (1, 2, 3)]
    may, began = threading.Event(), threading.Event()
    put = remote._files.put_file

    def slow(*words: Any, **named: Any) -> Any:
        began.set()
        assert may.wait(120)
        return put(*words, **named)

    monkeypatch.setattr(remote._files, "put_file", slow)
    uploads = Uploads(remote)
    told: list[BaseException] = []
    uploads.begin(paths[0], None, "", told.append)
    assert began.wait(120)
    best = save(monkeypatch, 4, folder="named")
    best = best.rename(best.with_name("best"))
    for path in (paths[1], best, paths[2]):
        uploads.begin(path, None, "", told.append)
    assert uploads.busy_with() == {paths[0], paths[2], best}  # a name that the user gave waits for itself
    may.set()
    uploads.join()
    assert not told and uploads.busy_with() == set()
    assert sorted(one.step for one in remote.whole()) == [1, 3, 4]


def test_an_upload_that_does_not_move_is_given_up_and_the_next_one_goes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(url)
    paths = [save(monkeypatch, step) for step in (1, 2)]
    put, ask, go_on = remote._files.put_file, checkpoint_remote.answer_of, threading.Event()

    def stalls(source: str, *words: Any, **named: Any) -> Any:
        if "step-00000001" in source:
            assert go_on.wait(120)
        return put(source, *words, **named)

    def soon(*words: Any) -> Any:
        """What is sent alone has little time; a loaded machine may take its own for all else."""
        with monkeypatch.context() as patch:
            if words[4:] > (0,):
                patch.setenv("EVENSTEP_UPLOAD_TIMEOUT", "0.1")
            return ask(*words)

    monkeypatch.setattr(remote._files, "put_file", stalls)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_remote, "answer_of", soon)
        with pytest.raises(Silent, match=r"takes nothing from host .*: step-00000001/\S+ is sent, .*for 0\.1") as told:
            remote.put(paths[0])
    assert "EVENSTEP_UPLOAD_TIMEOUT waits longer" in str(told.value)
    with pytest.raises(EvenstepError, match="may yet write there"):
        remote.put(paths[0])
    remote.put(paths[1])
    assert [one.step for one in remote.whole()] == [2]
    go_on.set()  # what was left behind ends after all
    assert told.value.ended is not None and told.value.ended.wait(120)
    remote.put(paths[0])
    assert sorted(one.step for one in remote.whole()) == [1, 2]
    monkeypatch.setenv("EVENSTEP_UPLOAD_TIMEOUT", "never")
    with pytest.raises(EvenstepError, match="EVENSTEP_UPLOAD_TIMEOUT=never is no time"):
        remote.remove("step-00000001")


def test_how_far_an_upload_is_counts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its driver says so; what goes on is waited for (test_fetch_silence.py)."""
    remote = Remote(url)
    put, ask = remote._files.put_file, checkpoint_remote.answer_of
    seen: list[tuple[str, bool, int]] = []

    def says(*words: Any, callback: Any, **named: Any) -> Any:
        callback.relative_update(5)
        return put(*words, **named)

    def watched(call: Any, silent: Any, moved: Any, variable: str = "", first: float = 0.0) -> Any:
        before, answer = moved(), ask(call, silent, moved, *filter(None, [variable]))
        seen.append((variable, first > 0, moved() - before))
        return answer

    monkeypatch.setattr(remote._files, "put_file", says)
    monkeypatch.setattr(checkpoint_remote, "answer_of", watched)
    remote.put(save(monkeypatch, 1))
    sent = [one for one in seen if one[1]]
    assert len(sent) >= 2 and set(sent) == {("EVENSTEP_UPLOAD_TIMEOUT", True, 5)}, seen


def test_a_session_uploads_and_goes_on_from_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_TO", url)
    model = nn.Linear(3, 3)
    session = use(monkeypatch, OneProcess(model=model))
    for step in (1, 2):
        session.step = step
        ck.checkpoint(wait=step == 1)
    ck._join_background()
    ck.wait_for_uploads()
    assert 2 in [one.step for one in Remote(url).whole()]
    other = nn.Linear(3, 3)
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", "elsewhere")
    use(monkeypatch, OneProcess(model=other))
    assert ck.load_checkpoint(url)["step"] == 2
    assert torch.equal(other.weight, model.weight)
    assert names("elsewhere") == ["step-00000002"]


def test_a_place_that_fails_is_told_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    Path("wall").write_text("")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_TO", f"file://{Path('wall').absolute()}/x")
    session = use(monkeypatch, OneProcess(model=nn.Linear(3, 3)))
    for step in (1, 2):
        session.step = step
        ck.checkpoint()
        ck.wait_for_uploads()
    assert capsys.readouterr().err.count("was not uploaded") == 1
    assert names() == ["step-00000001", "step-00000002"]


def test_a_place_that_nobody_has_a_driver_for_is_told_before_the_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_TO", "nonsense-scheme://s3/x")
    session = use(monkeypatch, OneProcess(model=nn.Linear(3, 3)))
    checkpoint_uploads.begin_look(session)
    (look,) = checkpoint_uploads._looks.values()
    look.join(60)
    told = capsys.readouterr().err
    assert told.startswith(
        "evenstep: warning: checkpoints cannot be sent to another place: nonsense-scheme://s3/x: "
    ), told
    assert "\n  fix: install fsspec's driver" in told and not checkpoint_uploads.newest_elsewhere(session)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(monkeypatch, 1)
    url = f"file://{tmp_path}/far"

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "evenstep.checkpoint_remote", *words], capture_output=True, text=True
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    assert run("push", str(path), url)["report"] == f"{url}/step-00000001"
    assert [one["step"] for one in run("ls", url)["report"]] == [1]
    assert Path(run("fetch", url, "back")["report"]).name == "step-00000001"
    assert "no whole checkpoint" in run("fetch", f"{url}/none", "back")["what"]
    assert "s3" in run("ls", "nonsense-scheme://s3/x")["what"]


STALLED = """
    import os, threading
    import torch
    from fsspec.implementations.local import LocalFileSystem
    import evenstep as es

    def stalled(self, *words, **named):
        threading.Event().wait()

    LocalFileSystem.put_file = stalled
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    for batch, in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_upload_that_stalls_does_not_keep_the_process(run: Run, script: Any, tmp_path: Path) -> None:
    """At the end of the job, where the last checkpoint is taken, too."""
    place = {"EVENSTEP_CHECKPOINT_TO": f"file://{tmp_path}/far", "EVENSTEP_UPLOAD_WAIT": "0.5"}
    words = ("-n", "1", "--name", "a", "--checkpoint-every", "1")
    result = run(*words, script(STALLED), env=place, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "still on its way" in result.stderr and "at most 0.5 s" in result.stderr
    assert "step-00000002 is not at file://" in result.stderr
    assert "ckpt push" in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "runs/a/checkpoints/step-00000002/manifest.json").exists()


def test_the_limit_of_the_wait(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for text, seconds in {"": 600, "0": 0, "2.5": 2.5, "inf": math.inf, "-1": 600, "nan": 600, "soon": 600}.items():
        monkeypatch.setenv("EVENSTEP_UPLOAD_WAIT", text)
        assert checkpoint_uploads._upload_wait() == seconds
        assert ("is no time" in capsys.readouterr().err) == (text in ("-1", "nan", "soon"))


def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shown("a sftp://me:p@ss@host/a@b, ftp://me@host") == "a sftp://host/a@b, ftp://host"
    assert shown("s3://bucket/run@2 and me@host") == "s3://bucket/run@2 and me@host"
    url = "memory://me:secret@host/run"

    def fails(*words: Any, **named: Any) -> Any:
        raise OSError(f"no way to {url}")

    path = save(monkeypatch, 1)
    remote = Remote(url)
    with monkeypatch.context() as patch:
        for call in ("put_file", "ls", "exists"):
            patch.setattr(type(remote._files), call, fails, raising=False)
        for act in (
            lambda: remote.put(path),
            remote.whole,
            lambda: remote.remove("x"),
            lambda: fetch_newest(url, path),
        ):
            with pytest.raises(EvenstepError, match="no way to memory://host/run") as told:
                act()
            assert "secret" not in "".join(traceback.format_exception(told.value)), act
    for act in (
        lambda: Remote("nonsense://me:secret@host/x"),
        lambda: remote.fetch("none", tmp_path),
        lambda: fetch_newest(url, tmp_path),
    ):
        with pytest.raises(EvenstepError) as told:
            act()
        assert "secret" not in str(told.value)
    fsspec.filesystem("memory").store.clear()


def test_passwords_are_kept_nowhere(start: Any, script: Any, tmp_path: Path) -> None:
    url = "nonsense://me:secret@host/x"
    name = script("import time; print('there')")
    code, text = start("-n", "1", "--name", "a", "--checkpoint-to", url, name, url, monitor=True).finish()
    assert code == 0 and "secret" not in text, text
    kept = [path for path in (tmp_path / "runs/a").rglob("*") if path.is_file()]
    assert any(b"nonsense://host/x" in path.read_bytes() for path in kept)
    assert not [path for path in kept if b"secret" in path.read_bytes()]


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/x") and is_url("memory://x") and not is_url("/a/b") and not is_url("a://"[:1])
