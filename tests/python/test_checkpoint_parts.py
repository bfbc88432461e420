"""Which tensor is damaged, where several share a chunk of a file."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError


class Parts(nn.Module):
    """Small ones, one over three chunks, and one that neither lies contiguous nor is written by several threads."""

    def __init__(self, strided: bool) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.arange(2_500_000, dtype=torch.float32))
        for name in ("first", "second", "third"):
            setattr(self, name, nn.Parameter(torch.randn(100)))
        self.turned = nn.Parameter(torch.randn(300, 200).t() if strided else torch.randn(200, 300))
        self.register_buffer("few", torch.ones(7, dtype=torch.uint8))


def flipped(file: Path, byte: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(byte)
        old = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([old ^ 4]))


def ends(file: Path) -> list[tuple[str, int]]:
    """A byte at the beginning, in the middle and at the end of each tensor, and of the header."""
    found = [("header", 0), ("header", 7)]
    with files.TensorFile(file) as tensors:
        places = [(name, begin, tensors.bytes_of(name)) for name, begin in tensors.by_place()]
    found += [("header", min(begin for _, begin, _ in places) - 1)]
    return found + [(name, at) for name, begin, n in places for at in (begin, begin + n // 2, begin + n - 1)]


@pytest.mark.parametrize("how", ["direct", "background", "strided"])
def test_the_damaged_tensor_is_named_and_no_other(how: str, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=Parts(how == "strided")))
    path = ck.checkpoint("here", wait=how != "background")
    ck._join_background()
    file = path / "model.safetensors"
    entry = next(one for one in files.read_manifest(path)["files"] if one["name"] == file.name)
    assert len(entry["checksums"]) == 3 and len(entry["parts"]) == 1 + 5 + 2  # the large one's in two chunks
    told = []
    for name, byte in ends(file):
        flipped(file, byte)
        with pytest.raises(EvenstepError, match=rf"is altered \({name}\)"):
            files.compare(path, entry)
        if how == "direct" and byte % 3 == 0:  # the program says the same
            words = [str(program), "ckpt", "verify", str(path), "--json"]
            said = subprocess.run(words, capture_output=True, text=True)
            assert said.returncode == 6
            told.append(re.findall(r"is altered \((.*?)\)", said.stdout))
            assert told[-1] == [name], said.stdout
        flipped(file, byte)
    files.verify(path, files.read_manifest(path))
    assert how != "direct" or len(told) > 3


def test_two_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=Parts(False)))
    path = ck.checkpoint("here")
    file = path / "model.safetensors"
    places = dict(ends(file))
    for name in ("first", "third", "header"):
        flipped(file, places[name])
    manifest = files.read_manifest(path)
    with pytest.raises(EvenstepError, match=r"is altered \((first, third|third, first)\)"):
        flipped(file, places["header"])
        files.verify(path, manifest)


def test_a_manifest_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no checksums of parts: what lies in the chunk is named."""
    use(monkeypatch, OneProcess(model=Parts(False)))
    path = ck.checkpoint("here")
    manifest = json.loads((path / "manifest.json").read_text())
    for one in manifest["files"]:
        del one["parts"]
    entry: dict[str, Any] = next(one for one in manifest["files"] if one["name"] == "model.safetensors")
    file = path / "model.safetensors"
    flipped(file, dict(ends(file))["second"])
    with pytest.raises(EvenstepError, match=r"chunk 2 .* is altered \(large, (first|turned), .* and 2 more\)"):
        files.compare(path, entry)
