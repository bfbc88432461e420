"""Checkpoints made of tensors and a state, sound and forged, for the tests of `evenstep ckpt`."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import torch

from evenstep import _core
from evenstep.checkpoint_files import MANIFEST, write_tensors

STATE: dict[str, Any] = {"step": 7, "epoch": 0, "world_size": 1, "models": {}, "optimizers": {}}


def save(
    folder: pathlib.Path, files: dict[str, dict[str, torch.Tensor]], state: dict[str, Any] | None = None
) -> pathlib.Path:
    writer = _core.CheckpointWriter(folder, True, 0)
    for name, tensors in files.items():
        write_tensors(writer, name, tensors)
    writer.commit(json.dumps(STATE if state is None else state))
    return folder


def forge(folder: pathlib.Path, before: str, after: str) -> None:
    """Changes the manifest's text, and its checksum with it, as who means harm would."""
    text = (folder / MANIFEST).read_text()
    assert before in text, text
    body, mark, _ = text.replace(before, after).rpartition('\n  "manifest_checksum": "')
    (folder / MANIFEST).write_bytes(f'{body}{mark}{_core.checksum(body.encode()):016x}"\n}}\n'.encode())


def ckpt(program: pathlib.Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(program), "ckpt", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, **options)
