"""A reader by docs/checkpoints.md alone: json, XXH3 and the safetensors package, and nothing of Evenstep's. It builds torch's own
state_dicts of what was saved."""

from __future__ import annotations

import base64
import ctypes
import ctypes.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import Cursor, OneProcess, ck, empty_place, use  # noqa: F401
from safetensors.torch import load_file
from torch import nn


def xxh3(data: bytes) -> str:
    library = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    return f"{library.XXH3_64bits(data, ctypes.c_size_t(len(data))):016x}"


def manifest_of(folder: Path) -> Any:
    text = (folder / "manifest.json").read_bytes()
    assert re.search(rb',\n  "manifest_checksum": "[0-9a-f]{16}"\n\}\n\Z', text)
    manifest = json.loads(text)
    covered = text[: text.rindex(b',\n  "manifest_checksum"') + 1]
    assert manifest["manifest_checksum"] == xxh3(covered)
    assert manifest["format"] == "evenstep-checkpoint-1"
    return manifest


def check_files(folder: Path, manifest: Any) -> None:
    for file in manifest["files"]:
        assert "/" not in file["name"]
        data = (folder / file["name"]).read_bytes()
        size = file["chunk_bytes"]
        assert len(data) == file["bytes"] and len(file["checksums"]) == math.ceil(len(data) / size)
        for number, checksum in enumerate(file["checksums"]):
            assert xxh3(data[number * size : (number + 1) * size]) == checksum
        end = 0
        for begin, count, checksum in file.get("parts", []):
            assert begin >= end and begin // size == (begin + count - 1) // size
            assert xxh3(data[begin : begin + count]) == checksum
            end = begin + count


def value_of(value: Any, tensors: dict[str, torch.Tensor], prefix: str = "") -> Any:
    if isinstance(value, list):
        return [value_of(one, tensors, prefix) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, held),) = value.items()
        if tag in ("$tensor", "$array"):
            tensor = tensors[prefix + held]
            return tensor if tag == "$tensor" else tensor.numpy()
        if tag in ("$dict", "$ordered", "$counter"):
            return {value_of(k, tensors, prefix): value_of(v, tensors, prefix) for k, v in held}
        return {
            "$tuple": lambda: tuple(value_of(held, tensors, prefix)),
            "$set": lambda: set(value_of(held, tensors, prefix)),
            "$int": lambda: int(held),
            "$float": lambda: float(held),
            "$complex": lambda: complex(float(held[0]), float(held[1])),
            "$bytes": lambda: base64.b64decode(held),
            "$dtype": lambda: getattr(torch, held),
            "$text": lambda: "".join(map(chr, held)),
            "$device": lambda: torch.device(held),
        }[tag]()
    return {key: value_of(one, tensors, prefix) for key, one in value.items()}


def tensors_of(folder: Path, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for name in saved.get("files", [saved["file"]]) for k, v in load_file(folder / name).items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


@pytest.mark.usefixtures("empty_place")
def test_a_program_of_ones_own_reads_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW([{"params": [*model.first.parameters()]}, {"params": [model.second.bias]}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    session = OneProcess(model=model, optimizer=optimizer, scheduler=scheduler, loader=Cursor())
    use(monkeypatch, session)
    session.step = 3
    extra = {"words": "a\0b", "best": (1.5, float("inf")), 7: {1, 2}, "tensor": torch.eye(2), "bytes": b"\xff"}
    ck.checkpoint(tmp_path / "c", extra=extra)
    folder = tmp_path / "c"
    random = torch.get_rng_state()

    manifest = manifest_of(folder)
    check_files(folder, manifest)
    state = manifest["state"]
    assert (state["step"], state["world_size"], state["loaders"]["loader"]["batch"]) == (3, 1, 0)

    saved = state["models"]["model"]
    found = tensors_of(folder, saved)
    weights = {key: found[saved["tied"].get(key, key)] for key in model.state_dict()}
    other = Tied()
    other.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values()))

    saved = state["optimizers"]["optimizer"]
    found = tensors_of(folder, saved)
    names = [name for group in saved["parameters"] for name, _ in group]
    assert names == ["first.weight", "first.bias", "second.bias"]
    numbers = iter(range(len(names)))
    whole = {
        "state": {names.index(name): value_of(one, found) for name, one in saved["state"].items()},
        "param_groups": [
            {**value_of(options, found), "params": [next(numbers) for _ in group]}
            for options, group in zip(saved["groups"], saved["parameters"])
        ],
    }
    copy = torch.optim.AdamW([{"params": [*other.first.parameters()]}, {"params": [other.second.bias]}])
    copy.load_state_dict(whole)
    for theirs, mine in zip(copy.state_dict()["state"].values(), optimizer.state_dict()["state"].values()):
        assert all(torch.equal(theirs[key], mine[key]) for key in mine)
    assert copy.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"] < 0.01

    rest = load_file(folder / "state.safetensors")
    assert value_of(state["schedulers"]["scheduler"]["state"], rest)["last_epoch"] == 3
    back = value_of(state["extra"], rest)
    assert torch.equal(back.pop("tensor"), extra.pop("tensor"))
    assert back == extra
    generators = value_of(state["random"]["0"], load_file(folder / "random.safetensors"), "rank0/")
    assert torch.equal(generators["torch"], random)
