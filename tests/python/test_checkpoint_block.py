"""Loading from a disk: the file as it is in one block of memory, its tensors views of that; weights copied by several threads."""

from __future__ import annotations

import ctypes
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, same, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError, _core
from evenstep.checkpoint_block import ALIGNMENT, LEAST, Block, move

reading = importlib.import_module("evenstep.checkpoint_reading")


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """As if every file had to be read from a disk."""
    asked: list[Path] = []

    def cached(path: Path) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(_core, "file_is_cached", cached)
    return asked


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1024, 1100), nn.Linear(1100, 3))  # odd sizes among whole cache lines
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _saved(monkeypatch: pytest.MonkeyPatch) -> Path:
    model, optimizer = _training()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    return Path(ck.checkpoint("one"))


def _session(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, optimizer = _training()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return use(monkeypatch, OneProcess(model=model, optimizer=optimizer))


def test_what_comes_from_a_disk_is_as_it_was(monkeypatch: pytest.MonkeyPatch, nothing_is_cached: list[Path]) -> None:
    folder = _saved(monkeypatch)
    model, optimizer = _training()
    session = _session(monkeypatch)
    mine = session.models["model"]
    places = [parameter.data_ptr() for parameter in mine.parameters()]
    versions = [parameter._version for parameter in mine.parameters()]
    ck.load_checkpoint(folder, loaders=False)
    same(mine.state_dict(), model.state_dict())
    same(session.optimizers["optimizer"].state_dict(), optimizer.state_dict())
    assert [
        parameter.data_ptr() for parameter in mine.parameters()
    ] == places  # whoever looks there sees the new values
    assert all(parameter._version > before for parameter, before in zip(mine.parameters(), versions))
    assert {path.name for path in nothing_is_cached} == {"model.safetensors", "optimizer.safetensors"}
    for state in session.optimizers["optimizer"].state.values():
        for value in state.values():
            assert value.data_ptr() % ALIGNMENT == 0 or value.numel() < 16
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()  # torch.save writes no more
    mine(torch.randn(4, 1024)).square().mean().backward()
    session.optimizers["optimizer"].step()


def test_large_tensors_lie_at_cache_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _saved(monkeypatch)
    with files.TensorFile(folder / "optimizer.safetensors") as file:
        for name, begin in file.by_place():
            if file.bytes_of(name) % ALIGNMENT == 0:
                assert begin % ALIGNMENT == 0, name


def test_a_damage_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _saved(monkeypatch)
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    session = _session(monkeypatch)
    before = {key: value.clone() for key, value in session.models["model"].state_dict().items()}
    with pytest.raises(EvenstepError, match=r"chunk \d+ of optimizer.safetensors .* is altered"):
        ck.load_checkpoint(folder, loaders=False)
    same(dict(session.models["model"].state_dict()), before)


def test_a_file_of_before_cache_lines_counted_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors anywhere, as another version wrote them."""
    folder = _saved(monkeypatch)
    path = folder / "model.safetensors"
    with files.TensorFile(path) as file:
        tensors = {name: file.read(name) for name in file.names()}
    offset, entries, data = 0, {}, b""
    for name in sorted(tensors):  # a bias of 4400 bytes first
        raw = tensors[name].numpy().tobytes()
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data += raw
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    manifest = json.loads((folder / "manifest.json").read_text())
    sums, size = _core.file_checksums(path, manifest["files"][0]["chunk_bytes"])
    entry = {"name": path.name, "bytes": size, "chunk_bytes": manifest["files"][0]["chunk_bytes"]}
    stored = reading.StoredFiles(folder, {"files": [{**entry, "checksums": [f"{one:016x}" for one in sums]}]})
    found = stored.tensors([path.name])
    same(dict(sorted(found.items())), dict(sorted(tensors.items())))
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in found.values())


def test_a_block_lives_as_long_as_its_tensors() -> None:
    block = Block(LEAST, 3)
    empty, odd, value = block.tensors([(0, torch.float32, (0, 7)), (8, torch.int16, (5,)), (64, torch.float64, (3, 4))])
    del block
    value.fill_(2.5)
    assert value.sum() == 30 and empty.shape == (0, 7) and odd.tolist() == [0] * 5


def test_what_lies_badly_is_moved_in_its_block() -> None:
    """Without a second copy: each to the next cache line behind the one before, over the old place of those that follow."""
    sizes, begin = [70_001, 3, 64, 1 << 20, 40, 129, 64], 11
    data = torch.randint(0, 256, (begin + sum(sizes),), dtype=torch.uint8)
    block = Block(len(data), len(sizes))
    ctypes.memmove(block.address, data.data_ptr(), len(data))
    begins = [begin + sum(sizes[:i]) for i in range(len(sizes))]
    tensors = block.tensors([(at, torch.uint8, (size,)) for at, size in zip(begins, sizes)])
    for at, size, tensor in zip(begins, sizes, tensors):
        assert torch.equal(tensor, data[at : at + size]) and tensor.data_ptr() % ALIGNMENT == 0
        assert block.address <= tensor.data_ptr() < block.address + len(data) + len(sizes) * ALIGNMENT


def test_only_plain_memory_is_moved() -> None:
    to = [
        torch.zeros(2, 3),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float64),
        nn.Parameter(torch.zeros(6)),
    ]
    values = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.ones(6)]
    assert move(zip(to, values)) == [True, False, False, True]
    assert [float(one.detach().sum()) for one in to] == [6, 0, 0, 6]
    tied = torch.zeros(1 << 20)
    assert move([(tied, torch.ones(1 << 20)), (tied, torch.ones(1 << 20))]) == [True, True]
    assert tied.sum() == 1 << 20


def test_views_of_one_memory_are_left_to_torch() -> None:
    flat = torch.zeros(10)
    after = torch.zeros(10)
    views = [flat, flat[:4], flat[6:], after[:5], after[5:]]
    values = [torch.ones(10), torch.full((4,), 2.0), torch.full((4,), 3.0), torch.ones(5), torch.ones(5)]
    assert move(zip(views, values)) == [False, False, False, True, True]
    assert flat.sum() == 0 and after.sum() == 10


class _Views(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.full((LEAST // 4 + 7,), value))
        self.register_buffer("first", self.flat.data[:4])


def test_a_buffer_that_is_a_part_of_a_parameter_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=_Views(3.0)))
    folder = Path(ck.checkpoint("one"))
    session = use(monkeypatch, OneProcess(model=_Views(0.0)))
    ck.load_checkpoint(folder, loaders=False)
    assert bool((session.models["model"].flat == 3).all())
