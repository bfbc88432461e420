"""What checkpoints take on disks that can share chunks: bytes, not times.

    python bench/checkpoint_sharing.py [--megabytes 512] [--checkpoints 10] [--percent 1] [-o FILE]

Each file system is made in a file of its own and mounted by a loop device (root, mkfs.xfs, mkfs.btrfs, mkfs.ext4): so many
checkpoints of a model in one file, as es.checkpoint writes them (each beside the one before). "tensors": that much of the
model changes before each, tensor after tensor, the same number of them as the percentage says; "rows": as many rows, drawn
at random from one table that is the whole model. `allocated` is what the file system has in use more than empty, after a
sync; `written`: what the saves say that they did not share or link; `files`: the sizes of all files together.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import torch
from heading import heading

from evenstep import _core
from evenstep.checkpoint_files import read_manifest, verify, write_tensors

MAKES = {"xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"], "ext4": ["mkfs.ext4", "-q", "-F"]}
WIDTH = 1024  # of a row, in numbers of 4 bytes
MIB = 1 << 20


def used(place: pathlib.Path) -> int:
    subprocess.run(["sync", "-f", str(place)], check=True)
    facts = os.statvfs(place)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def model(megabytes: int, how: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = megabytes * MIB // 4 // WIDTH
    if how == "rows":
        return {"table": torch.randn(rows, WIDTH)}
    return {f"layer.{i:03d}": torch.randn(rows // 100, WIDTH) for i in range(100)}


def change(tensors: dict[str, torch.Tensor], how: str, percent: int, turn: int) -> None:
    if how == "rows":
        table = tensors["table"]
        table[torch.randperm(len(table))[: len(table) * percent // 100]] += 1
        return
    for i in range(percent):
        tensors[f"layer.{(turn * percent + i) % 100:03d}"] += 1


def save(folder: pathlib.Path, tensors: dict[str, torch.Tensor], before: pathlib.Path | None) -> tuple[int, int, int]:
    writer = _core.CheckpointWriter(folder, False, 0, before)
    write_tensors(writer, "model.safetensors", tensors)
    return writer.commit(json.dumps({"step": 1}))


def measure(kind: str, how: str, on: argparse.Namespace, scratch: pathlib.Path) -> dict[str, object]:
    image, place = scratch / "image", scratch / "disk"
    place.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate((on.checkpoints + 2) * on.megabytes * MIB + 512 * MIB)
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    program = shutil.which(MAKES[kind][0], path=path) or MAKES[kind][0]
    subprocess.run([program, *MAKES[kind][1:], image], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        tensors, empty, before = model(on.megabytes, how), used(place), None
        total = written = 0
        for turn in range(on.checkpoints):
            if turn > 0:
                change(tensors, how, on.percent, turn)
            folder = place / f"step-{turn:08d}"
            saved, linked, shared = save(folder, tensors, before)
            total, written, before = total + saved, written + saved - linked - shared, folder
        allocated = used(place) - empty
        for folder in sorted(place.glob("step-*")):
            verify(folder, read_manifest(folder))
        return {"file_system": kind, "changes": how, "files": total, "written": written, "allocated": allocated}
    finally:
        subprocess.run(["umount", place], check=True)
        image.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument("--percent", type=int, default=1)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    on = parser.parse_args()
    lines = ["What checkpoints take on disks that can share chunks"]
    lines += [f"  {name:9} {value}" for name, value in heading().items()]
    lines += [
        f"  kernel    {os.uname().release.partition('-')[0]}",
        "",
        f"{on.checkpoints} checkpoints of {on.megabytes} MiB, of which {on.percent} % changes before each; all read back and right",
        "",
        f"{'disk':6} {'changes':8} {'files MiB':>10} {'written MiB':>12} {'allocated MiB':>14} {'of the files':>13}",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        for kind in MAKES:
            for how in ("tensors", "rows"):
                one = measure(kind, how, on, pathlib.Path(scratch))
                files, written, allocated = (int(str(one[key])) for key in ("files", "written", "allocated"))
                line = (
                    f"{kind:6} {how:8} {files / MIB:10.0f} {written / MIB:12.0f} {allocated / MIB:14.0f} "
                    f"{100 * allocated / files:12.1f}%"
                )
                print(line, flush=True)
                lines.append(line)
    if on.output is not None:
        on.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
