"""Which checkpoints stay and which go, also where jobs share a folder."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError


def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (100, 200, 300):
        ck.checkpoint()
    assert names() == ["step-00000200", "step-00000300"]
    (Path("checkpoints") / "notes.txt").write_text("mine")
    session.step = 50  # went back: newest is what was written last
    ck.checkpoint()
    assert names() == ["notes.txt", "step-00000050", "step-00000300"]
    assert ck.newest_checkpoint().name == "step-00000050"
    ck.checkpoint("elsewhere")  # a path of its own is nobody's to remove
    session.step = 51
    ck.checkpoint()
    assert Path("elsewhere/manifest.json").exists()


def test_damaged_ones_do_not_count_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (1, 2):
        ck.checkpoint()
    os.truncate("checkpoints/step-00000002/model.safetensors", 10)
    session.step = 3
    ck.checkpoint()
    assert names() == ["step-00000001", "step-00000003"]


def test_a_checkpoint_is_replaced_but_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (1, 2):
        ck.checkpoint("best")
    assert files.read_manifest(Path("best"))["state"]["step"] == 2
    Path("mine").mkdir()
    with pytest.raises(EvenstepError, match="not a checkpoint"):
        ck.checkpoint("mine")
    assert names(".") == ["best", "mine"]


def save(session: Any, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    use(monkeypatch, session)
    for session.step in steps:
        ck.checkpoint()


def lineage(path: str) -> str:
    return str(files.read_manifest(Path("checkpoints") / path)["state"]["lineage"])


def test_jobs_that_share_a_folder_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    mine, other = OneProcess(model=nn.Linear(1, 1)), OneProcess(model=nn.Linear(2, 2))
    save(mine, monkeypatch, 10, 20, 30)
    save(other, monkeypatch, 10, 20)  # of the same names: nothing of mine is replaced
    other_20 = f"step-00000020-{other.lineage[:8]}"
    assert names() == ["step-00000010", "step-00000020", other_20, "step-00000030"]
    assert lineage("step-00000020") == mine.lineage and lineage(other_20) == other.lineage
    save(other, monkeypatch, 20, 25)  # its own is replaced, its oldest goes
    assert names() == ["step-00000020", other_20, "step-00000025", "step-00000030"]
    save(mine, monkeypatch, 40)
    assert names() == [other_20, "step-00000025", "step-00000030", "step-00000040"]
    assert ck.newest_checkpoint().name == "step-00000040"


def test_a_damaged_one_of_another_job_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "1")
    save(OneProcess(model=nn.Linear(1, 1)), monkeypatch, 1)
    os.truncate("checkpoints/step-00000001/model.safetensors", 10)
    save(OneProcess(model=nn.Linear(1, 1)), monkeypatch, 2, 3)
    assert names() == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("change", ["link", "short", "link at once"])
def test_what_its_user_changed_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    """A file that was moved to a larger disk, a symbolic link in its place: the folder is no checkpoint, but it is the user's.
    One that is cut off goes. What was known of either before does not count."""
    keeping = importlib.import_module("evenstep.checkpoint_keeping")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "1")
    session = OneProcess(model=nn.Linear(3, 3))
    save(session, monkeypatch, 1)
    file, far = Path("checkpoints/step-00000001/model.safetensors"), tmp_path / "far"

    def move() -> None:
        file.rename(far)
        file.symlink_to(far)

    def verify(folder: Path, manifest: Any) -> None:
        move()

    if change == "link":
        move()
    elif change == "short":
        os.truncate(file, 10)
    else:  # when it was already looked at
        monkeypatch.setattr(keeping, "verify", verify)
    save(session, monkeypatch, 2)
    assert names() == [*(["step-00000001"] if change != "short" else []), "step-00000002"]
    assert change == "short" or (file.is_symlink() and far.exists())


def test_a_manifest_whose_time_was_set_back_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is another, its size and the time it was written are not."""
    save(OneProcess(model=nn.Linear(3, 3)), monkeypatch, 7)
    folder = Path("checkpoints/step-00000007").absolute()
    assert ck.newest_checkpoint() == folder
    manifest, there = folder / "manifest.json", (folder / "manifest.json").stat()
    manifest.write_bytes(manifest.read_bytes().replace(b"step", b"stop", 1))
    os.utime(manifest, ns=(there.st_atime_ns, there.st_mtime_ns))
    while manifest.stat().st_ctime_ns == there.st_ctime_ns:  # the kernel's clock goes by ticks
        os.utime(manifest, ns=(there.st_atime_ns, there.st_mtime_ns))
    assert manifest.stat().st_ino == there.st_ino and manifest.stat().st_size == there.st_size
    assert ck.newest_checkpoint() is None


def test_what_goes_on_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    first = OneProcess(model=nn.Linear(1, 1))
    save(first, monkeypatch, 1, 2)
    second = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.load_checkpoint("checkpoints")
    save(second, monkeypatch, 3)
    assert names() == ["step-00000002", "step-00000003"] and second.lineage == first.lineage
    # weights alone begin another training
    third = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.load_checkpoint("checkpoints", optimizers=False, loaders=False)
    save(third, monkeypatch, 1, 2, 3)
    assert len(names()) == 4 and third.lineage != first.lineage


def test_restarts_of_a_job_are_one_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_JOB", "0123456789abcdef")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "1")
    save(OneProcess(model=nn.Linear(1, 1)), monkeypatch, 1)
    save(OneProcess(model=nn.Linear(1, 1)), monkeypatch, 2)
    assert names() == ["step-00000002"] and lineage("step-00000002") == "0123456789abcdef"


def test_the_one_resumed_from_goes_only_when_a_newer_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "1")
    save(OneProcess(model=nn.Linear(1, 1)), monkeypatch, 1)
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.load_checkpoint("checkpoints")
    write = ck.write_tensors

    def bad_disk(writer: Any, name: str, *rest: Any) -> None:
        write(writer, name, *rest)
        path = next(Path("checkpoints").glob("*.partial")) / name
        path.write_bytes(path.read_bytes()[:-1] + b"\xee")

    with monkeypatch.context() as patch:
        patch.setattr(ck, "write_tensors", bad_disk)
        with pytest.warns(RuntimeWarning, match=r"an old checkpoint stays: .*step-00000002 is damaged"):
            save(session, monkeypatch, 2)
    assert names() == ["step-00000001", "step-00000002"]
    save(session, monkeypatch, 3)
    assert names() == ["step-00000003"]


def test_a_manifest_is_read_once_until_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint asks of all others, while training waits or shares its core."""
    keeping = importlib.import_module("evenstep.checkpoint_keeping")
    read, read_manifest = [], keeping.read_manifest
    monkeypatch.setattr(keeping, "read_manifest", lambda path: (read.append(path.name), read_manifest(path))[1])
    monkeypatch.setattr(keeping, "verify", lambda folder, manifest: read.remove(folder.name))
    monkeypatch.setattr(keeping, "_may_remove", lambda path, lineage: True)  # which reads anew
    session = use(monkeypatch, OneProcess(model=nn.Linear(3, 3)))
    for session.step in range(1, 8):
        ck.checkpoint()
    there = [Path("checkpoints", name).absolute() for name in ("step-00000006", "step-00000007")]
    assert sorted(read) == [f"step-{step:08d}" for step in range(1, 8)]
    known = {path.name for path in keeping._known if path.parent == there[0].parent}
    assert known - {"step-00000004"} == set(names())  # those that went before are forgotten
    assert ck.newest_checkpoint() == there[1]
    (there[1] / "model.safetensors").write_bytes(b"short")
    assert ck.newest_checkpoint() == there[0]
    manifest = there[0] / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"step", b"stop", 1))
    assert ck.newest_checkpoint().name == "step-00000005"
    assert read[7:] == ["step-00000006"]
