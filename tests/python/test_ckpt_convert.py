"""`evenstep ckpt convert` and `export`: what each format keeps, what is refused, and that nothing is ever overwritten or
run. Fixtures of other libraries' formats are written in their published layouts, with torch alone."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pathlib
import pickle
import subprocess
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, use
from ckpt_samples import ckpt
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from evenstep import ckpt_convert
from evenstep.checkpoint_files import read_manifest
from evenstep.convert_contents import Refused
from evenstep.convert_formats import read

Training = tuple[nn.Module, torch.optim.Optimizer, Any]


def training(steps: int = 3) -> Training:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    go_on((model, optimizer, scheduler), steps)
    return model, optimizer, scheduler


def go_on(what: Training, steps: int) -> None:
    model, optimizer, scheduler = what
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def six_keys(what: Training, **more: Any) -> dict[str, Any]:
    model, optimizer, scheduler = what
    return {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "epoch": 2,
        "step": 3,
        "metrics": {"loss": [1.5, 0.25]},
        **more,
    }


def convert(source: pathlib.Path, target: pathlib.Path, kind: str | None = None, **options: Any) -> dict[str, Any]:
    words = {"kind": kind, "force": False, "weights_only": False, "model": "model", "config": None}
    words.update({"shard_bytes": 1 << 30, **options})
    return ckpt_convert.convert(argparse.Namespace(input=source, output=target, **words))


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]) and tensor.dtype == b[name].dtype, name


def same_training(a: Training, b: Training) -> None:
    """Bit by bit, after some more steps, too."""
    for _ in range(2):
        same_tensors(a[0].state_dict(), b[0].state_dict())
        go_on(a, 3)
        go_on(b, 3)
    assert a[1].state_dict()["param_groups"][0]["lr"] == b[1].state_dict()["param_groups"][0]["lr"]


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.save(six_keys(training()), tmp_path / "in.pt")
    return tmp_path / "in.pt"


# -- each format --


def test_one_of_several_models(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the optimizers that are of it alone; what is another's is listed."""
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    objects: dict[str, Any] = {"model": first, "model_1": second}
    for number, model in enumerate((first, second)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(1, 2 + number)).sum().backward()
        optimizer.step()
        objects[f"optimizer_{number}"] = optimizer
        objects[f"scheduler_{number}"] = torch.optim.lr_scheduler.StepLR(optimizer, 7 + number)
    use(monkeypatch, OneProcess(**objects))
    ck.checkpoint(tmp_path / "in")
    for kind in ("six-key", "evenstep"):
        told = convert(tmp_path / "in", tmp_path / kind, kind, model="model_1")
        left = [line for line in told["left"] if "generators" not in line and "exchange" not in line]
        assert [line.split(":")[0] for line in left] == ["model", "optimizer_0", "scheduler_0"]
        assert told["tensors"] == 2
        back = read(tmp_path / kind)
        assert list(back.models) == ["model"]
        same_tensors(back.model(), second.state_dict())
        assert [one.state["step_size"] for one in back.schedulers.values()] == [8]
        (kept,) = back.optimizers.values()
        momentum = objects["optimizer_1"].state[second.weight]["momentum_buffer"]
        assert torch.equal(next(iter(kept.state.values()))["momentum_buffer"], momentum)
    told = convert(tmp_path / "in", tmp_path / "m.pt", weights_only=True, model="model_1")
    assert [line.split(":")[0] for line in told["left"]] == ["model"]
    same_tensors(torch.load(tmp_path / "m.pt", weights_only=True), second.state_dict())
    convert(tmp_path / "in", tmp_path / "both")
    assert list(read(tmp_path / "both").models) == ["model", "model_1"]


def test_to_evenstep_and_on_with_the_training(
    saved: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = convert(saved, tmp_path / "ours")
    assert told["left"] == [] and "named by their order: the model's" in told["notes"][0]
    model, optimizer, scheduler = training(0)
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer, scheduler=scheduler))
    facts = ck.load_checkpoint(tmp_path / "ours")
    assert (facts["step"], facts["epoch"], facts["extra"]) == (3, 2, {"metrics": {"loss": [1.5, 0.25]}})
    assert session.step == 3
    same_training((model, optimizer, scheduler), training())


@pytest.mark.parametrize("kind", ["six-key", "lightning", "dcp"])
def test_formats_that_keep_optimizers(saved: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    convert(saved, tmp_path / "ours")
    told = convert(tmp_path / "ours", tmp_path / "other", kind)
    assert told["left"] == (
        ["'metrics' of the input's own entries: Lightning's file has no place for it"] * (kind == "lightning")
    )
    back = read(tmp_path / "other")
    ours = read(tmp_path / "ours")
    same_tensors(back.model(), ours.model())
    a, b = back.optimizers["optimizer"], ours.optimizers["optimizer"]
    assert a.members == b.members and a.groups == b.groups and set(a.state) == set(b.state)
    for name, values in a.state.items():
        same_tensors(values, b.state[name])
    assert back.schedulers["scheduler"].state == ours.schedulers["scheduler"].state
    assert (back.step, back.epoch) == (3, 2)


@pytest.mark.parametrize("kind", ["six-key", "lightning"])
def test_torch_goes_on_from_what_was_written(saved: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    convert(saved, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "other.file", kind)
    loaded = torch.load(tmp_path / "other.file", weights_only=True)
    fresh = training(0)
    if kind == "six-key":
        parts = [loaded[key] for key in ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict")]
        assert (loaded["epoch"], loaded["step"], loaded["metrics"]) == (2, 3, {"loss": [1.5, 0.25]})
    else:
        parts = [loaded["state_dict"], loaded["optimizer_states"][0], loaded["lr_schedulers"][0]]
    for one, state in zip(fresh, parts):
        one.load_state_dict(state)
    same_training(fresh, training())


def test_torch_reads_the_dcp_folder(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(saved, tmp_path / "folder", "dcp")
    model = training(0)[0]
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "folder")
    same_tensors(state["model"], training()[0].state_dict())


def test_dcp_folders_that_torch_wrote_in_parts(tmp_path: pathlib.Path) -> None:
    """As several ranks write: a tensor in chunks, in a file each. The metadata is put together from two folders."""
    whole = torch.arange(12.0).reshape(4, 3)
    for i in range(2):
        dcp.save({"w": whole[2 * i : 2 * i + 2].clone()}, checkpoint_id=tmp_path / f"{i}")
    records = [pickle.loads((tmp_path / f"{i}" / ".metadata").read_bytes()) for i in range(2)]
    (tmp_path / "1" / "__0_0.distcp").rename(tmp_path / "0" / "__1_0.distcp")
    from torch.distributed.checkpoint.metadata import MetadataIndex

    about = records[0].state_dict_metadata["w"]
    about.size = torch.Size([4, 3])
    chunk = records[1].state_dict_metadata["w"].chunks[0]
    chunk.offsets = torch.Size([2, 0])
    about.chunks.append(chunk)
    (info,) = records[1].storage_data.values()
    info.relative_path = "__1_0.distcp"
    records[0].storage_data[MetadataIndex("w", [2, 0], 1)] = info
    (tmp_path / "0" / ".metadata").write_bytes(pickle.dumps(records[0]))
    assert torch.equal(read(tmp_path / "0").model()["w"], whole)
    info.relative_path = "../__1_0.distcp"
    (tmp_path / "0" / ".metadata").write_bytes(pickle.dumps(records[0]))
    with pytest.raises(Refused, match="no file of this folder"):
        read(tmp_path / "0")
    del info.relative_path
    (tmp_path / "0" / ".metadata").write_bytes(pickle.dumps(records[0]))
    with pytest.raises(Refused, match="AttributeError"):
        read(tmp_path / "0")
    info.relative_path, info.length = "__1_0.distcp", 1 << 63
    (tmp_path / "0" / ".metadata").write_bytes(pickle.dumps(records[0]))
    with pytest.raises(Refused, match="beyond the end"):
        read(tmp_path / "0")
    about.size = torch.Size([1 << 40, 3])
    (tmp_path / "0" / ".metadata").write_bytes(pickle.dumps(records[0]))
    with pytest.raises(Refused, match="not covered by its parts"):
        read(tmp_path / "0")


def test_dcp_keeps_no_order_and_no_empty_state(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "in")
    path = tmp_path / "in" / ".metadata"
    about = pickle.loads(path.read_bytes())
    about.state_dict_metadata = dict(reversed(about.state_dict_metadata.items()))  # as another rank's come first
    path.write_bytes(pickle.dumps(about))
    back = read(tmp_path / "in")
    assert back.left == [] and back.optimizers["optimizer"].state == {}
    assert [group["lr"] for group in back.optimizers["optimizer"].groups] == [0.1, 0.2]
    assert back.optimizers["optimizer"].members == [[0], [1]]


def test_weights_for_other_tools(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    wanted = training()[0].state_dict()
    told = convert(saved, tmp_path / "m.safetensors", weights_only=True)
    assert told["output_format"] == "safetensors" and told["left"] == []
    same_tensors(load_file(tmp_path / "m.safetensors"), wanted)
    convert(saved, tmp_path / "m.pt", weights_only=True)
    same_tensors(torch.load(tmp_path / "m.pt", weights_only=True), wanted)
    told = convert(saved, tmp_path / "all.safetensors")
    assert [line.split(":")[0] for line in told["left"]] == [
        "optimizer", "scheduler", "step 3", "epoch 2", "'metrics' of the input's own entries",
    ]  # fmt: skip


def test_hugging_face_folders(tmp_path: pathlib.Path) -> None:
    tied = torch.arange(8.0).reshape(2, 4).bfloat16()
    weights = {"embed.weight": tied, "mid.weight": torch.ones(3, 3), "head.weight": tied, "mid.bias": torch.zeros(3)}
    torch.save(weights, tmp_path / "in.pt")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    told = convert(
        tmp_path / "in.pt", tmp_path / "hf", weights_only=True, shard_bytes=40, config=tmp_path / "config.json"
    )
    assert any("head.weight only named" in note for note in told["notes"])
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16 + 36 + 12
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    stored = {}
    for name, file in index["weight_map"].items():
        stored.update(load_file(tmp_path / "hf" / file))
        assert torch.equal(stored[name], weights[name])
    assert set(stored) == {"embed.weight", "mid.weight", "mid.bias"}  # as other libraries see it
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "old.bin").write_bytes(b"x")
    told = convert(tmp_path / "hf", tmp_path / "again", "hf")
    assert told["left"] == ["old.bin: weights of another form beside the model"]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    told = convert(tmp_path / "hf", tmp_path / "ours")
    assert {line.split(":")[0] for line in told["left"]} == {"old.bin", "config.json", "tokenizer.json"}
    for bad, match in (("../in.pt", "no file of its folder"), ("none.safetensors", "not there"), (7, "no file of its")):
        index["weight_map"]["mid.bias"] = bad
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(Refused, match=match) as refused:
            read(tmp_path / "hf")
        assert refused.value.code == 6


def test_tied_tensors_stay_tied(tmp_path: pathlib.Path) -> None:
    tied = torch.randn(3, 2)
    torch.save({"a": tied, "b": tied}, tmp_path / "in.pt")
    for kind in ("evenstep", "safetensors", "torch", "hf"):
        convert(tmp_path / "in.pt", tmp_path / kind, kind)
        model = read(tmp_path / kind).model()
        assert torch.equal(model["a"], tied) and model["a"].data_ptr() == model["b"].data_ptr(), kind


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(5, 3)
        self.mid = torch.nn.Linear(3, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("shard_bytes", [70, 1 << 30])
def test_tied_names_come_back_from_a_hugging_face_folder(
    program: pathlib.Path, tmp_path: pathlib.Path, shard_bytes: int
) -> None:
    """By way of the folder, and of that folder in other files; and safetensors' own load_model takes it as before."""
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "hf", weights_only=True, shard_bytes=shard_bytes)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == (1 if shard_bytes > 70 else 2)
    done = subprocess.run(
        [program, "ckpt", "reshard", tmp_path / "hf", tmp_path / "other", "--files", str(3 - len(files))],
        capture_output=True,
    )
    assert done.returncode == 0, done
    for folder in ("hf", "other"):
        back = read(tmp_path / folder).model()
        assert set(back) == set(model.state_dict()), folder
        assert torch.equal(back["lm_head.weight"], model.wte.weight)
        assert back["lm_head.weight"].data_ptr() == back["wte.weight"].data_ptr()
        convert(tmp_path / folder, tmp_path / f"{folder}-ours")
        saved = read_manifest(tmp_path / f"{folder}-ours")["state"]["models"]["model"]
        assert len(saved["tied"]) == 1 and set(*saved["tied"].items()) == {"lm_head.weight", "wte.weight"}
    if len(files) == 1:
        other = Tied()
        assert load_model(other, files[0]) == (set(), [])
        assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_what_a_shard_stores_goes_before_what_another_names(tmp_path: pathlib.Path) -> None:
    """A folder of other hands, whose tensors are tied no more."""
    tensors = {"wte.weight": torch.ones(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    names = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, tmp_path / file, {"format": "pt", "lm_head.weight": "wte.weight"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    model = read(tmp_path).model()
    assert all(torch.equal(model[name], tensors[name]) for name in tensors) and len(model) == 2


# -- optimizers without names --


def test_groups_with_and_without_decay_are_named(tmp_path: pathlib.Path) -> None:
    model, _, scheduler = training(0)
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], 0.01)
    go_on((model, optimizer, scheduler), 2)
    torch.save(six_keys((model, optimizer, scheduler)), tmp_path / "in.pt")
    told = convert(tmp_path / "in.pt", tmp_path / "ours")
    assert "matrices first" in told["notes"][0]
    back = read(tmp_path / "ours").optimizers["optimizer"]
    assert back.members == [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]
    assert torch.equal(back.state["2.weight"]["exp_avg"], optimizer.state[model[2].weight]["exp_avg"])


def test_names_are_not_guessed_where_they_do_not_fit(tmp_path: pathlib.Path) -> None:
    model, _, scheduler = training(0)
    for parameters in ([*model.parameters()][::-1], [*model.parameters()][:3]):
        optimizer = torch.optim.AdamW(parameters, 0.01)
        go_on((model, optimizer, scheduler), 1)
        torch.save(six_keys((model, optimizer, scheduler)), tmp_path / "in.pt")
        told = convert(tmp_path / "in.pt", tmp_path / "ours", force=True)
        assert len(told["left"]) == 1 and told["left"][0].startswith("the state of optimizer: its ")
        assert read(tmp_path / "ours").optimizers == {}


def test_entries_of_odd_forms_are_kept_or_told(tmp_path: pathlib.Path) -> None:
    whole = six_keys(
        training(1), epoch=2.5, step=torch.tensor(4), note="mine", best=torch.ones(2), code=torch.Size([1])
    )
    whole["optimizer_state_dict"]["state"]["odd"] = 7
    torch.save(whole, tmp_path / "in.pt")
    told = convert(tmp_path / "in.pt", tmp_path / "ours")
    assert told["left"] == ["entries of 'optimizer_state_dict' that are no states of a parameter"]
    back = read(tmp_path / "ours")
    assert back.step == 4 and back.extra["epoch"] == 2.5 and back.extra["note"] == "mine"
    assert torch.equal(back.extra["best"], torch.ones(2)) and back.extra["code"] == (1,)
    told = convert(tmp_path / "ours", tmp_path / "again.pt")
    assert "'epoch' of the input's own entries: the format has another of that name" in told["left"]


def test_names_that_the_optimizer_has_are_taken(tmp_path: pathlib.Path) -> None:
    model, _, scheduler = training(0)
    optimizer = torch.optim.SGD([*model.named_parameters()][::-1], 0.01, momentum=0.9)
    go_on((model, optimizer, scheduler), 1)
    whole = six_keys((model, optimizer, scheduler))
    whole["model_state_dict"] = {f"module._orig_mod.{name}": t for name, t in model.state_dict().items()}
    torch.save(whole, tmp_path / "in.pt")
    told = convert(tmp_path / "in.pt", tmp_path / "ours")
    assert len(told["notes"]) == 2 and all("taken off" in note for note in told["notes"])
    state = read(tmp_path / "ours").optimizers["optimizer"].state
    assert torch.equal(state["0.weight"]["momentum_buffer"], optimizer.state[model[0].weight]["momentum_buffer"])


# -- what must not happen --


class Evil:
    def __init__(self, trace: pathlib.Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_code_in_a_file_is_refused_and_not_run(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    evil = Evil(tmp_path / "ran")
    torch.save({"w": torch.ones(2), "x": evil}, tmp_path / "zip.pt")
    torch.save({"w": torch.ones(2), "x": evil}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(evil, 2))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(evil))
    for name, what in (
        ("zip.pt", "mkdir"),
        ("old.pt", "mkdir"),
        ("bare.pt", "mkdir"),
        ("dcp", "mkdir"),
        ("module.pt", "Linear"),
    ):
        with pytest.raises(Refused, match=f"{what}.*nothing in a file is ever run") as refused:
            convert(tmp_path / name, tmp_path / "out.safetensors")
        assert refused.value.code == 3
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(evil, 4))  # torch's words would have it loaded with all its code
    with pytest.raises(Refused, match=r"no file of torch\.save: Unsupported") as refused:
        convert(tmp_path / "plain.pkl", tmp_path / "out.safetensors")
    assert refused.value.code == 6 and "weights_only" not in refused.value.what + refused.value.fix
    done = ckpt(program, "convert", tmp_path / "zip.pt", tmp_path / "out.pt")
    assert done.returncode == 3 and "mkdir, which is code" in done.stderr and "fix:" in done.stderr
    assert not (tmp_path / "ran").exists() and not list(tmp_path.glob("out*"))


def test_the_program_converts_and_tells(program: pathlib.Path, saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = ckpt(program, "convert", "--json", saved, tmp_path / "ours")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["format"] == "evenstep-ckpt-convert-1" and told["tensors"] == 9
    assert ckpt(program, "verify", tmp_path / "ours").returncode == 0
    done = ckpt(program, "export", tmp_path / "ours", "--to", tmp_path / "m.safetensors")
    assert done.returncode == 0 and done.stdout.startswith(f"{tmp_path}/m.safetensors: one .safetensors file, of 9")
    same_tensors(load_file(tmp_path / "m.safetensors"), training()[0].state_dict())


@pytest.mark.parametrize(
    ("words", "code"),
    [(["convert", "a"], 2), (["export", "a"], 2), (["export", "--to", "b"], 2), (["convert", "--as"], 2)],
)
def test_the_program_wants_both_ends(program: pathlib.Path, words: list[str], code: int) -> None:
    done = ckpt(program, *words)
    assert done.returncode == code and "fix:" in done.stderr


def test_nothing_is_overwritten(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"mine")
    with pytest.raises(Refused, match="exists"):
        convert(saved, there)
    assert there.read_bytes() == b"mine"
    convert(saved, there, force=True)
    assert len(load_file(there)) == 9
    folder = tmp_path / "things"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "a web page"}')
    for kind in ("hf", "dcp", "evenstep"):
        with pytest.raises(Refused, match="no checkpoint, so --force"):
            convert(saved, folder, kind, force=True)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    for source, target in ((saved, saved), (saved, tmp_path)):
        with pytest.raises(Refused, match="is, or holds, the input"):
            convert(source, target, "six-key", force=True)
    for kind in ("hf", "dcp", "hf"):
        convert(saved, tmp_path / "folder", kind, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.pt", "there.safetensors", "things"]


@pytest.mark.parametrize("kind", ["safetensors", "six-key", "hf", "dcp"])
def test_a_full_disk_leaves_nothing(
    saved: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="No space left"):
        convert(saved, tmp_path / "out", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_inputs_that_are_nothing(tmp_path: pathlib.Path) -> None:
    torch.save(six_keys(training(1)), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    bad: dict[str, tuple[bytes | Any, int, str]] = {
        "half.pt": (whole[: len(whole) // 2], 6, "damaged"),
        "empty": (b"", 3, "no format"),
        "text": (b"hello, I am no checkpoint", 8, "no format"),
        "pickle.pt": (b"\x80\x02garbage", 6, "damaged"),
        "keys.pt": ({"a": 1, "b": "c"}, 8, "its keys are 'a', 'b'"),
        "list.pt": ([torch.ones(1)], 3, "a list"),
    }
    for name, (content, code, match) in bad.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / name)
        with pytest.raises(Refused, match=match) as refused:
            convert(tmp_path / name, tmp_path / "out", "torch")
        assert refused.value.code == code, name
    with pytest.raises(Refused, match="does not exist"):
        convert(tmp_path / "none", tmp_path / "out", "torch")
    with pytest.raises(Refused, match="no checkpoint that this knows"):
        convert(tmp_path, tmp_path / "out", "torch")
    with pytest.raises(Refused, match="does not say which format"):
        convert(tmp_path / "whole.pt", tmp_path / "out.xyz")
    assert not (tmp_path / "out").exists()
