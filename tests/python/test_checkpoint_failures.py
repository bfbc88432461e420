"""Damaged checkpoints, full disks, killed writers, wrong use: one clear error, and nothing is lost."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, names, small, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError, _core


def test_altered_and_truncated_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(64, 64)))
    path = ck.checkpoint("here")
    file = path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    with pytest.raises(EvenstepError, match=r"chunk 0 of model.safetensors \(bytes 0–\d+\) is altered"):
        ck.load_checkpoint(path)
    file.write_bytes(good[:100])
    with pytest.raises(EvenstepError, match=rf"model.safetensors is truncated: 100 of {len(good)} bytes"):
        ck.load_checkpoint(path)
    file.write_bytes(good)
    manifest = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(manifest.replace(b'"step": 0', b'"step": 9'))
    with pytest.raises(EvenstepError, match="its checksum does not match"):
        ck.load_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(EvenstepError, match="not a checkpoint"):
        ck.load_checkpoint(path)
    with pytest.raises(EvenstepError, match="does not exist"):
        ck.load_checkpoint("nowhere")


@pytest.mark.parametrize("name", ["manifest", "model", "optimizer", "random", "state"])
@pytest.mark.parametrize("cut", [0, 7, 1 / 2, "last"])
def test_damage_of_every_file_is_named(name: str, cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> OneProcess:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return OneProcess(model=model, optimizer=optimizer)

    use(monkeypatch, make())
    path = ck.checkpoint("here", extra={"mean": torch.ones(3)})
    session = use(monkeypatch, make())
    before = {key: value.clone() for key, value in session.models["model"].state_dict().items()}
    file = path / (f"{name}.safetensors" if name != "manifest" else "manifest.json")
    good = file.read_bytes()
    if cut == "last":
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    else:
        file.write_bytes(good[: int(cut * len(good)) if isinstance(cut, float) else cut])
    with pytest.raises(EvenstepError, match=rf"(?s){file.name}.*fix: resume from an earlier checkpoint"):
        ck.load_checkpoint(path)
    for key, value in session.models["model"].state_dict().items():  # nothing of it was loaded
        assert torch.equal(value, before[key])


def test_a_full_disk_loses_nothing(
    small_disk: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    full_disk = small_disk("256k")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", str(full_disk / "checkpoints"))
    small_one = use(monkeypatch, OneProcess(model=nn.Linear(8, 8)))
    small_one.step = 1
    old = ck.checkpoint()
    large = use(monkeypatch, OneProcess(model=nn.Linear(512, 512)))
    large.step = 2
    with pytest.raises(EvenstepError, match=r"(?s)No space left on device.*free at least \d+ bytes.*--checkpoint-dir"):
        ck.checkpoint()
    assert names(full_disk / "checkpoints") == [old.name]
    files.verify(old, files.read_manifest(old))
    for _ in range(2):
        ck.automatic(large)  # training goes on
        assert ck._background.join() is None
    told = capsys.readouterr().err
    assert told.count("checkpoints wait from step 2 on, for the disk of ") == 1 and "training goes on" in told
    assert names(full_disk / "checkpoints") == [old.name]
    files.verify(old, files.read_manifest(old))
    subprocess.run(["mount", "-o", "remount,size=8m", str(full_disk)], check=True)
    ck.automatic(large)
    assert ck._background.join() is None
    assert "the disk has room again: the checkpoint of step 2 is whole" in capsys.readouterr().err
    assert len(names(full_disk / "checkpoints")) == 2


def test_a_limit_on_file_sizes_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(8, 8)))
    old = ck.checkpoint()
    session.models["model"] = nn.Linear(512, 512)
    session.step = 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(EvenstepError, match=r"(?s)File too large.*ulimit -f"):
            ck.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names() == [old.name]


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    Path("file").write_text("")
    with pytest.raises(EvenstepError, match=r"file.* cannot be made"):
        ck.checkpoint("file/below/here")


def test_unsavable_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    with pytest.raises(EvenstepError, match="'extra/when'"):
        ck.checkpoint("here", extra={"when": object()})
    with pytest.raises(EvenstepError, match="sparse"):
        ck.checkpoint("here", extra={"t": torch.eye(3).to_sparse()})
    assert not names(".")


def test_a_rank_that_has_the_outcome_from_another_goes_on_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank was lost after another one had heard it: the call is not made again."""
    session = use(monkeypatch, OneProcess(model=small()))
    outcome = {"path": "there", "kept": False, "loaded": False}
    session.call_by_all = lambda make: json.dumps(outcome)
    assert ck.checkpoint(extra={"by": "the script"}) == Path("there") and session.user_state == {"by": "the script"}
    outcome = {"error": "no room"}
    with pytest.raises(EvenstepError, match="no room"):
        ck.checkpoint()
    ended = []

    def call_by_all(make: Any) -> Any:
        ended.append(made := make())
        return made

    session.call_by_all = call_by_all  # all have made a call whose outcome is an error, too
    with pytest.raises(EvenstepError, match="'extra/what'"):
        ck.checkpoint(extra={"what": object()})
    assert "error" in json.loads(ended[0])


def test_background_write_sees_the_state_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(300, 300)
    use(monkeypatch, OneProcess(model=model))
    want = model.weight.detach().clone()
    path = ck.checkpoint("here", wait=False)
    with torch.no_grad():
        model.weight.zero_()
    ck.checkpoint("next", wait=False)  # waits for the first
    with files.TensorFile(path / "model.safetensors") as file:
        assert torch.equal(file.read("weight"), want)
    assert ck._background.join() is None


def test_a_failed_background_write_is_told_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    Path("mine").mkdir()
    ck.checkpoint("mine", wait=False)
    with pytest.raises(EvenstepError, match=r"before this one was not written.*mine already exists"):
        ck.checkpoint("next")
    ck.checkpoint("next")


KILLED = """
import importlib, os, signal, sys, threading, torch
from evenstep import _core
ck = importlib.import_module("evenstep.checkpoint")
sys.path.insert(0, {tests!r})
from checkpoint_session import OneProcess
session = OneProcess(model=torch.nn.Linear(64, 64))
ck._session = lambda call: session
ck.checkpoint()
session.step = 1
session.models["model"] = torch.nn.Linear(4000, 4000)
write = ck.write_tensors
def then_die(writer, *rest):
    write(writer, *rest)
    os.kill(os.getpid(), signal.SIGKILL)
ck.write_tensors = then_die
ck.checkpoint()
"""


def test_killed_in_the_middle_leaves_the_older_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert names() == ["step-00000000", "step-00000001.evenstep.partial"]
    old = Path("checkpoints/step-00000000")
    files.verify(old, files.read_manifest(old))
    assert ck.newest_checkpoint() == old.absolute()
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    session.step = 2
    ck.checkpoint()
    assert names() == ["step-00000000", "step-00000002"]  # what the dead writer left is gone


def test_bad_keep_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "none")
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    with pytest.raises(EvenstepError, match="EVENSTEP_CHECKPOINT_KEEP"):
        ck.checkpoint()
    assert not Path("checkpoints").exists()


def test_the_names_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(ck, "sync_folder", synced.append)
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for _ in range(2):
        ck.checkpoint(tmp_path / "a" / "b" / "best")
    assert sorted(synced) == [tmp_path, tmp_path / "a"]


def test_one_that_was_being_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.checkpoint("best").rename("best.evenstep.replaced")  # as a crash between two renames leaves it
    with pytest.raises(EvenstepError, match=r"best does not exist: it is being replaced(.|\n)*best.evenstep.replaced"):
        ck.load_checkpoint("best")
    ck.load_checkpoint("best.evenstep.replaced")
    ck.checkpoint("other")
    ck.load_checkpoint("best")


# -- the writer in C, from Python --


def test_the_writer_names_a_fetch_that_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.evenstep.partial" / "folder").mkdir(parents=True)  # the sweep fails on it, which is no matter here
    writer = _core.CheckpointWriter(tmp_path / "a")
    with pytest.raises(EvenstepError, match="fetch gave no address for tensor 0"):
        writer.add("x", [("a", "U8", (1,), 0, 1)], fetch=lambda i: 0)


def test_the_writer_may_be_ended_while_it_reads_its_arguments(tmp_path: Path) -> None:
    writer = _core.CheckpointWriter(tmp_path / "a")

    def tensors() -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        writer.commit("{}")
        yield ("a", "U8", (1,), 1, 0)

    with pytest.raises(RuntimeError, match="committed or abandoned"):
        writer.add("x", tensors())  # type: ignore[arg-type]


def test_the_writer_refuses_misuse(tmp_path: Path) -> None:
    writer = _core.CheckpointWriter(tmp_path / "a")
    for bad in (
        [1],
        [("a", "U8", (1,), 0)],
        [("a", "U8", [1], 0, 1)],
        [("a", "U8", ("x",), 0, 1)],
        [("a", "U8", (1,), 0, -1)],
    ):
        with pytest.raises((TypeError, ValueError)):
            writer.add("x", [bad])  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        writer.add("x", [("a", "U8", (1,), 0, 1)], fetch=lambda i: 1 // 0)
    writer.abandon()
    with pytest.raises(RuntimeError, match="committed or abandoned"):
        writer.add("x", [])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError):
        _core.file_checksums(__file__, 0)
