"""A process of `make large`: a checkpoint of a tensor of more than 4 GiB, written, verified by the program and by its
checksums, and loaded."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile

import torch
from large_pattern import BYTES, check, fill, pattern, watched

import evenstep as es


class Large(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("large", torch.empty(BYTES, dtype=torch.uint8))


def main(folder: pathlib.Path) -> None:
    program = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep")
    if program is None:
        raise SystemExit("large: no evenstep program (EVENSTEP_PROGRAM)")
    model = es.prepare(Large())
    data = model.large.numpy()
    fill(data, 0)
    path = es.checkpoint(folder / "large")
    print(f"  ok  written: {sum(file.stat().st_size for file in path.iterdir()):,} bytes", flush=True)
    verified = subprocess.run([program, "ckpt", "verify", str(path)], stdout=subprocess.PIPE, text=True)
    if verified.returncode != 0:
        raise SystemExit(f"large: evenstep ckpt verify: exit code {verified.returncode}: {verified.stdout}")
    print("  ok  evenstep ckpt verify", flush=True)
    data[:] = 0
    es.load_checkpoint(path)
    check(model.large.numpy(), lambda at, n: pattern(at, n, 0), "loaded")


if __name__ == "__main__":
    with watched("the process"), tempfile.TemporaryDirectory(dir=os.environ.get("EVENSTEP_LARGE_FOLDER")) as place:
        main(pathlib.Path(place))
