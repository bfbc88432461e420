"""`evenstep ckpt repair`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from run_jobs import write_checkpoint


def ckpt(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, "ckpt", *map(str, words)], capture_output=True, text=True, timeout=300)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def test_repair(program: Path, tmp_path: Path) -> None:
    one, copy = tmp_path / "one", tmp_path / "copy"
    write_checkpoint(one, tensor=True)
    shutil.copytree(one, copy)
    (file,) = one.glob("*.safetensors")
    assert "nothing to repair" in ckpt(program, "repair", one, "--from", copy).stdout
    damage(file)
    assert ckpt(program, "verify", one).returncode == 6
    done = ckpt(program, "repair", one, "--from", copy)
    assert done.returncode == 0 and "whole again" in done.stdout and f"repaired: chunk 0 of {file.name}" in done.stdout
    assert ckpt(program, "verify", one).returncode == 0
    damage(file)
    damage(copy / file.name)
    done = ckpt(program, "repair", one, "--from", copy)
    assert done.returncode == 6 and f"damaged in both: chunk 0 of {file.name}" in done.stdout
    said = json.loads(ckpt(program, "repair", one, "--from", copy, "--json").stdout)
    assert said["left"] == [f"chunk 0 of {file.name}"] and said["repaired"] == []


def test_an_empty_manifest(program: Path, tmp_path: Path) -> None:
    one, copy = tmp_path / "one", tmp_path / "copy"
    write_checkpoint(one, tensor=True)
    shutil.copytree(one, copy)
    manifest = one / "manifest.json"
    for rest in (b"", manifest.read_bytes()[:100], bytes(300)):
        manifest.write_bytes(rest)
        done = ckpt(program, "repair", one, "--from", copy)
        assert done.returncode == 0 and "repaired: manifest.json" in done.stdout, done
        assert manifest.read_bytes() == (copy / "manifest.json").read_bytes()
    manifest.write_bytes(b"")
    (one / "model.safetensors").unlink()
    done = ckpt(program, "repair", one, "--from", copy)
    assert done.returncode == 3 and "no file of that one is whole here" in done.stderr, done
    assert manifest.read_bytes() == b""


def test_bad_input(program: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", tensor=True)
    for words, code, text in (
        ([tmp_path / "one"], 2, "--from COPY"),
        ([tmp_path / "one", "--from", tmp_path / "absent"], 3, "absent"),
        ([tmp_path / "absent", "--from", tmp_path / "one"], 3, "absent"),
    ):
        done = ckpt(program, "repair", *words)
        assert done.returncode == code and text in done.stderr, done
