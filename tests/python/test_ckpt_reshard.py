"""evenstep ckpt reshard: the same tensors in other files, and a training that goes on from them."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, use  # noqa: F401
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from evenstep import checkpoint_reshard
from evenstep.checkpoint_reshard import reshard, split
from evenstep.convert_contents import Refused
from evenstep.convert_formats import kind_of


def options(source: Any, target: Any, **named: Any) -> argparse.Namespace:
    given = {"files": 0, "shard_bytes": 0, "force": False, **named}
    return argparse.Namespace(input=pathlib.Path(source), output=pathlib.Path(target), **given)


def read_shards(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        with safe_open(folder / file, "pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


def test_parts() -> None:
    sizes = {f"t{i}": size for i, size in enumerate([5, 1, 1, 5, 4, 4])}
    assert split(sizes, 2, 0) == [["t0", "t1", "t2", "t3"], ["t4", "t5"]]
    assert split(sizes, 0, 6) == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t5"]]
    assert split(sizes, 6, 0) == [[name] for name in sizes]
    for many in range(1, 7):
        parts = split({f"t{i}": 0 if i else 100 for i in range(6)}, many, 0)
        assert len(parts) == many and all(parts) and [name for part in parts for name in part] == list(sizes)
    with pytest.raises(Refused, match="do not make 7 files"):
        split(sizes, 7, 0)
    assert split({}, 1, 0) == split({}, 0, 9) == [[]]  # an optimizer's that has made no step
    with pytest.raises(Refused, match="do not make 2 files"):
        split({}, 2, 0)


def test_a_folder_of_shards(tmp_path: pathlib.Path) -> None:
    weights = {f"layer.{i}": torch.randn(10, i + 1).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(9)}
    save_file(weights, tmp_path / "one.safetensors", {"format": "pt"})
    assert reshard(options(tmp_path / "one.safetensors", tmp_path / "a", files=4))["files"] == 4
    (tmp_path / "a" / "config.json").write_text("{}")
    reshard(options(tmp_path / "a", tmp_path / "b", shard_bytes=700))
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "b" / "config.json").read_text() == "{}"
    for folder in ("a", "b"):
        found = read_shards(tmp_path / folder)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in weights.items())
    reshard(options(tmp_path / "b", tmp_path / "c", files=1))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].bias = model[1].bias
    return model, torch.optim.Adam(model.parameters(), 0.1)


def test_a_checkpoint_that_training_goes_on_from(program: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    train(model, optimizer)
    session.step = 7
    path = ck.checkpoint("whole", extra={"mean": torch.arange(3)})
    done = subprocess.run(
        [program, "ckpt", "reshard", "--python", sys.executable, "--files", "3", path, "split"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "read back and compared" in done.stdout, done.stderr
    state = files.read_manifest(pathlib.Path("split"))["state"]
    assert state["models"]["model"]["files"] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert subprocess.run([program, "ckpt", "verify", "split"], capture_output=True).returncode == 0
    other, its_optimizer = make()
    use(monkeypatch, OneProcess(model=other, optimizer=its_optimizer))
    facts = ck.load_checkpoint("split")
    assert facts["step"] == 7 and torch.equal(facts["extra"]["mean"], torch.arange(3))
    for _ in range(2):
        train(model, optimizer)
        train(other, its_optimizer)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    reshard(options("split", "joined", files=1))
    assert (pathlib.Path("joined") / "model.safetensors").exists()
    done = subprocess.run([program, "ckpt", "diff", "--tensors", "whole", "joined"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_one_tensor_of_a_checkpoint_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    model.register_buffer("turning", torch.tensor([1 + 2j, 3 - 4j]))
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    train(model, optimizer)
    path, asked = ck.checkpoint("whole"), []
    read = checkpoint_reshard.Shards.read

    def watched(self: Any, names: Any) -> Any:
        asked.append(list(names))
        return read(self, asked[-1])

    monkeypatch.setattr(checkpoint_reshard.Shards, "read", watched)
    reshard(options(path, "split", files=2))
    assert len(asked) > 10 and all(len(names) == 1 for names in asked)
    other, its_optimizer = make()
    other.register_buffer("turning", torch.zeros(2, dtype=torch.complex64))
    use(monkeypatch, OneProcess(model=other, optimizer=its_optimizer))
    ck.load_checkpoint("split")
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_header_is_read_once_for_all_of_its_tensors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each: that is a time that grows with the square of their number."""
    read: list[str] = []
    real = files.TensorFile._read_header

    def counted(self: Any) -> None:
        read.append(self.path.name)
        real(self)

    monkeypatch.setattr(files.TensorFile, "_read_header", counted)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(60)))
    optimizer = torch.optim.Adam(model.parameters())
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    reshard(options(ck.checkpoint("first"), "first-split", files=4))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    reshard(options(ck.checkpoint("whole"), "split", files=4))
    reshard(options("split", "three", files=3))
    save_file({f"t{i}": torch.full((1,), float(i)) for i in range(60)}, "one.safetensors")
    reshard(options("one.safetensors", "a", files=4))
    reshard(options("a", "b", files=3))
    assert max(read.count(name) for name in read) < 30, {name: read.count(name) for name in read}


def test_what_lies_beyond_4_gib(tmp_path: pathlib.Path) -> None:
    path, large, small = tmp_path / "large.safetensors", (1 << 32) + 5, torch.tensor([1.5, -2.0, 3.25])
    entries = {
        "large": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]},
        "small": {"dtype": "F32", "shape": [3], "data_offsets": [large, large + 12]},
    }
    head = json.dumps(entries).encode()
    with path.open("wb") as file:  # the large one has no blocks on the disk, and is not read
        file.write(len(head).to_bytes(8, "little") + head)
        file.seek(large, 1)
        file.write(small.numpy().tobytes())
    shards = checkpoint_reshard.Shards([path])
    assert shards.sizes == {"large": large, "small": 12}
    assert torch.equal(shards.read(["small"])["small"], small)
    _, specs, _, fetch = shards.file("one.safetensors", ["small"], [])
    assert specs == [("small", "F32", (3,), 0, 12)] and fetch is not None
    assert ctypes.string_at(fetch(0), 12) == small.numpy().tobytes()
    with files.TensorFile(path) as stored:
        assert b"".join(stored.pieces("small", 5)) == small.numpy().tobytes()
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(files.EvenstepError, match="'small' ends beyond it"):
            list(stored.pieces("small", 5))


def test_a_damaged_checkpoint_is_told_by_the_exit_code(program: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    file = pathlib.Path(ck.checkpoint("whole")) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    command = [program, "ckpt", "reshard", "--python", sys.executable, "--files", "3", "whole", "split"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 6 and "is altered" in done.stderr, done
    assert not pathlib.Path("split").exists()


def test_what_cannot_be_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    with pytest.raises(Refused, match="either"):
        reshard(options(tmp_path / "one.safetensors", tmp_path / "x"))
    torch.save({"a": torch.ones(2)}, tmp_path / "t.pt")
    with pytest.raises(Refused, match="no shards"):
        reshard(options(tmp_path / "t.pt", tmp_path / "x", files=1))
    use(monkeypatch, OneProcess(model=nn.Linear(9, 9)))
    path = ck.checkpoint("here")
    file = path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(Exception, match="altered"):
        reshard(options(path, tmp_path / "x", files=2))
    file.write_bytes(good)
    real = files.TensorFile.pieces  # what is read back is not what was written

    def wrong(self: Any, name: str, most: int) -> Iterator[bytes]:
        for piece in real(self, name, most):
            yield piece if self.path.name == "one.safetensors" else piece[:-1] + bytes([piece[-1] ^ 1])

    monkeypatch.setattr(files.TensorFile, "pieces", wrong)
    with pytest.raises(Refused, match="does not read back"):
        reshard(options(tmp_path / "one.safetensors", tmp_path / "y", files=1))
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_a_header_that_begins_as_a_pickle_does(tmp_path: pathlib.Path) -> None:
    """The length of a header may be of any value: 0x80 is the first byte of a pickle, too."""
    for padding in range(300):
        save_file({"a" * (padding + 1): torch.ones(1)}, tmp_path / "x.safetensors")
        if (tmp_path / "x.safetensors").read_bytes()[0] == 0x80:
            break
    assert (tmp_path / "x.safetensors").read_bytes()[0] == 0x80
    assert kind_of(tmp_path / "x.safetensors") == "safetensors"
