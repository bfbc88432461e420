"""A frozen part of a model is not written again: a file of its own, shared with the checkpoint before."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from safetensors.torch import load_file
from torch import nn

from evenstep import EvenstepError, checkpoint_shared, convert_evenstep
from evenstep.checkpoint_remote import Altered


def partly_frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3))
    model[0].requires_grad_(False)
    return model, torch.optim.Adam(model[2].parameters(), 0.1)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 600)).square().mean().backward()
    optimizer.step()


def inode(path: Path, name: str) -> int:
    return (path / name).stat().st_ino


def lose_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, 2)
        byte = file.read(1)[0]
        file.seek(-9, 2)
        file.write(bytes([byte ^ 4]))


TRAINED, FROZEN = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("wait", [True, False])
def test_a_frozen_part_is_shared(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    paths = []
    for i in range(3):
        train(model, optimizer)
        paths.append(ck.checkpoint(f"at-{i}", wait=wait))
    ck._join_background()
    want = {key: value.clone() for key, value in model.state_dict().items()}
    assert len({inode(path, FROZEN) for path in paths}) == 1
    assert len({inode(path, TRAINED) for path in paths}) == 3
    for path in paths[:2]:
        shutil.rmtree(path)
    files.verify(paths[2], files.read_manifest(paths[2]))
    other, its_optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=other, optimizer=its_optimizer))
    ck.load_checkpoint(paths[2])
    assert all(torch.equal(value, want[key]) for key, value in other.state_dict().items())
    ck.checkpoint("next")  # what was loaded is shared, too
    assert inode(Path("next"), FROZEN) == inode(paths[2], FROZEN)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    ck.checkpoint("after")
    assert inode(Path("after"), FROZEN) != inode(Path("next"), FROZEN)


@pytest.mark.parametrize("wait", [True, False])
def test_how_much_is_shared_is_told(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = partly_frozen()
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    said: list[str] = []
    session.telemetry = SimpleNamespace(event=lambda event, step, value, words: said.append(words))
    for i in range(2):
        train(model, optimizer)
        ck.checkpoint(f"at-{i}", wait=wait)
    ck._join_background()
    entries = files.read_manifest(Path("at-1"))["files"]
    total, linked = sum(one["bytes"] for one in entries), (Path("at-1") / FROZEN).stat().st_size
    assert said == ["at-0", f"at-1: of {total / 2**20:.1f} MiB {linked / 2**20:.1f} linked, 0.0 shared"]


def test_nothing_is_shared_with_one_that_is_known_to_be_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has lost a bit of a file that two of them share; memory has it."""
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "1")
    model, optimizer = partly_frozen()
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    session.step = 1
    lose_a_bit(ck.checkpoint() / FROZEN)
    session.step = 2
    with pytest.warns(RuntimeWarning, match="an old checkpoint stays"):
        ck.checkpoint()
    assert names() == ["step-00000001", "step-00000002"]
    session.step = 3
    third = ck.checkpoint()
    files.verify(third, files.read_manifest(third))
    assert names() == [third.name]
    kept, session.step = inode(third, FROZEN), 4
    assert inode(ck.checkpoint(), FROZEN) == kept  # from then on they share again


def test_nothing_is_shared_with_one_that_could_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = partly_frozen()
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    old = ck.checkpoint("old")
    shutil.copytree(old, "copy")
    last = ck.checkpoint("last")
    assert inode(last, FROZEN) == inode(old, FROZEN)
    lose_a_bit(last / FROZEN)
    for path in (last, old):  # found in either: they have the file in common
        with pytest.raises(files.EvenstepError, match="is damaged"):
            ck.load_checkpoint(path)
        new = ck.checkpoint("new")
        files.verify(new, files.read_manifest(new))
        assert inode(ck.checkpoint("next"), FROZEN) == inode(new, FROZEN)  # from then on they share again
    with pytest.raises(files.EvenstepError, match="is damaged"):
        ck.load_checkpoint(last)
    ck.load_checkpoint("copy")  # what was loaded since is right, and newer than what was written
    assert inode(ck.checkpoint("after"), FROZEN) == inode(Path("copy"), FROZEN)
    assert session.last_checkpoint == Path("after").absolute()


def test_nothing_is_shared_with_one_whose_upload_was_altered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent may have been damaged here already."""
    model, optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    errors = [EvenstepError("it does not answer"), Altered("it was damaged there"), None]
    monkeypatch.setattr(ck, "upload", lambda *given: given[4](errors.pop(0)) if errors[0] else None)
    one, two, three = (ck.checkpoint(name) for name in ("one", "two", "three"))
    assert inode(one, FROZEN) == inode(two, FROZEN) != inode(three, FROZEN)


def test_damage_that_is_found_while_the_next_one_is_written_is_not_forgotten() -> None:
    session = SimpleNamespace(loaded=None)
    checkpoint_shared.written(session, Path("one"), None)
    shared = checkpoint_shared.previous(session)
    assert shared == Path("one")
    checkpoint_shared.share_none(session)  # an upload of it was read back
    checkpoint_shared.written(session, Path("two"), shared)
    assert checkpoint_shared.previous(session) is None
    checkpoint_shared.written(session, Path("three"), None)
    assert checkpoint_shared.previous(session) == Path("three")


def test_its_files_are_shards_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers reads them: an index that names each tensor's file."""
    model, optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"0.weight": FROZEN, "0.bias": FROZEN, "2.weight": TRAINED, "2.bias": TRAINED}
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in model.state_dict().values())
    merged = {**load_file(path / FROZEN), **load_file(path / TRAINED)}
    assert all(torch.equal(merged[key], value) for key, value in model.state_dict().items())
    names = [entry["name"] for entry in files.read_manifest(path)["files"]]
    assert "model.safetensors.index.json" in names


def test_small_or_whole_models_stay_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    small[0].requires_grad_(False)
    use(monkeypatch, OneProcess(model=small))
    assert (ck.checkpoint("small") / "model.safetensors").exists()
    use(monkeypatch, OneProcess(model=nn.Linear(600, 600).requires_grad_(False)))
    whole = ck.checkpoint("whole")
    assert (whole / "model.safetensors").exists()
    assert inode(ck.checkpoint("again"), "model.safetensors") == inode(whole, "model.safetensors")


def test_freezing_later_changes_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("frozen")
    want = {key: value.clone() for key, value in model.state_dict().items()}
    thawed, its_optimizer = partly_frozen()
    thawed.requires_grad_(True)
    use(monkeypatch, OneProcess(model=thawed, optimizer=its_optimizer))
    ck.load_checkpoint(path)
    assert all(torch.equal(value, want[key]) for key, value in thawed.state_dict().items())
    assert (ck.checkpoint("thawed") / "model.safetensors").exists()


def test_the_program_reads_them_all(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = partly_frozen()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    for name in ("a", "b"):
        train(model, optimizer)
        ck.checkpoint(name)
    out = subprocess.run([program, "ckpt", "diff", "a", "b", "--tensors", "--json"], capture_output=True, text=True)
    told = json.loads(out.stdout)
    found = {one["file"] for one in told["tensors"]}
    assert out.returncode == 1 and found - {"random.safetensors"} == {TRAINED, "optimizer.safetensors"}
    assert subprocess.run([program, "ckpt", "verify", "a"], capture_output=True).returncode == 0
    contents = convert_evenstep.read_folder(Path("b"))
    assert all(torch.equal(contents.model()[key], value) for key, value in model.state_dict().items())
