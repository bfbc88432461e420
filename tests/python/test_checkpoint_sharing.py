"""Chunks that have not changed share their place on real disks that can do that: XFS and btrfs, in files; ext4 writes them."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch
from ckpt_samples import STATE
from loop_disk import make_image, mounted, used_bytes

from evenstep import EvenstepError, _core
from evenstep.checkpoint_files import read_manifest, verify, write_tensors

pytestmark = pytest.mark.more

CHUNK = 4 << 20
WORDS = 6 * CHUNK // 8
MARK = 2 * CHUNK + CHUNK // 2  # in the middle of a chunk that no test changes
SHARING = ["xfs", "btrfs"]


def state(seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (WORDS,), generator=torch.Generator().manual_seed(seed))


def changed(tensor: torch.Tensor, *chunks: int) -> torch.Tensor:
    tensor = tensor.clone()
    for chunk in chunks:
        tensor[chunk * CHUNK // 8 + 1000] += 1
    return tensor


def save(folder: pathlib.Path, tensor: torch.Tensor, previous: pathlib.Path | None = None) -> tuple[int, int, int]:
    writer = _core.CheckpointWriter(folder, True, 0, previous)
    write_tensors(writer, "model.safetensors", {"weight": tensor})
    return writer.commit(json.dumps(STATE))


def is_whole(folder: pathlib.Path) -> bool:
    try:
        verify(folder, read_manifest(folder))
    except EvenstepError:
        return False
    return True


def ckpt(program: pathlib.Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, "ckpt", *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("kind", SHARING)
def test_only_what_changed_takes_room(program: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    image, tensor = make_image(kind, tmp_path / "image"), state()
    with mounted(image, tmp_path / "disk") as disk:
        one, two, three = (disk / name for name in ("one", "two", "three"))
        total, *same = save(one, tensor)
        before = used_bytes(disk)
        assert same == [0, 0]
        second = changed(tensor, 1, 4)
        assert save(two, second, one) == (total, 0, total - 2 * CHUNK)
        took = used_bytes(disk) - before
        assert 2 * CHUNK <= took < 3 * CHUNK, took
        assert is_whole(one) and is_whole(two)
        # all else sees files as any others
        assert ckpt(program, "verify", one, two).returncode == 0
        assert "weight" in ckpt(program, "diff", one, two).stdout
        shutil.copytree(two, tmp_path / "copy")
        with (two / "model.safetensors").open("r+b") as file:  # of the one file alone
            file.seek(MARK)
            file.write(b"\0")
        assert not is_whole(two) and is_whole(one)
        assert save(three, second, two) == (total, total, 0)  # a link: what it takes for whole, it inherits
        assert not is_whole(three)
        assert ckpt(program, "repair", two, "--from", tmp_path / "copy").returncode == 0
        assert is_whole(two) and is_whole(one) and not is_whole(three)
        _core.checkpoint_remove(one)
        _core.checkpoint_remove(three)
        assert is_whole(two)


@pytest.mark.parametrize("kind", SHARING)
def test_what_returned_is_there_after_the_power_was_cut(tmp_path: pathlib.Path, kind: str) -> None:
    """What was written back when a save returns is what a copy of the disk has then; all later is lost. (That the disk was
    told to flush what it has in caches of its own is not shown.) The bytes lie there once."""
    image, tensor = make_image(kind, tmp_path / "image"), state(1)
    mark = bytes(tensor.view(torch.uint8)[MARK : MARK + 64].tolist())
    cut = tmp_path / "cut"
    with mounted(image, tmp_path / "disk") as disk:
        save(disk / "one", tensor)
        for step in range(3):
            tensor = changed(tensor, step % 2)
            save(disk / f"two-{step}", tensor, disk / ("one" if step == 0 else f"two-{step - 1}"))
        subprocess.run(["cp", "--sparse=always", "--reflink=never", image, cut], check=True)
    names = ["one", "two-0", "two-1", "two-2"]
    with mounted(cut, tmp_path / "disk") as disk:
        assert all(is_whole(disk / name) for name in names)
        data = torch.frombuffer(
            bytearray((disk / "two-2" / "model.safetensors").read_bytes()[-8 * WORDS :]), dtype=torch.int64
        )
        assert torch.equal(data, tensor)
    content = bytearray(cut.read_bytes())
    at = content.find(mark)
    assert at >= 0 and content.find(mark, at + 1) < 0
    content[at] ^= 1  # the disk loses a bit: whoever shares it says so
    cut.write_bytes(content)
    with mounted(cut, tmp_path / "disk") as disk:
        assert not any(is_whole(disk / name) for name in names)
        save(disk / "anew", tensor)  # without `previous`
        assert is_whole(disk / "anew")


def test_a_disk_that_has_room_for_what_changed_alone(tmp_path: pathlib.Path) -> None:
    image, tensor = make_image("xfs", tmp_path / "image"), state(2)
    with mounted(image, tmp_path / "disk") as disk:
        save(disk / "one", tensor)
        with (disk / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 3 * CHUNK)
        total, _, shared = save(disk / "two", changed(tensor, 3), disk / "one")
        assert total - shared == CHUNK and is_whole(disk / "two")
        with pytest.raises(EvenstepError, match=f"free at least {4 * CHUNK} bytes"):  # chunk 3 is two's
            save(disk / "three", changed(tensor, *range(5)), disk / "two")
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "one", "two"]
        assert is_whole(disk / "one") and is_whole(disk / "two")


def test_other_file_systems_are_written_to(tmp_path: pathlib.Path) -> None:
    """Also where the one before lies on a disk that could share, and the new one on another."""
    tensor = state(3)
    xfs, ext4 = make_image("xfs", tmp_path / "xfs.image"), make_image("ext4", tmp_path / "ext4.image")
    with mounted(ext4, tmp_path / "ext4") as plain, mounted(xfs, tmp_path / "xfs") as sharing:
        save(plain / "one", tensor)
        _, *same = save(plain / "two", changed(tensor, 1), plain / "one")
        assert same == [0, 0] and is_whole(plain / "two")
        _, *same = save(sharing / "two", changed(tensor, 2), plain / "one")
        assert same == [0, 0] and is_whole(sharing / "two")
