"""A rank of two of `make large`: a checkpoint of a model with a tensor of more than 4 GiB, which all ranks take part in, verified,
put into other files, and loaded by both."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import torch
from large_checkpoint import Large
from large_pattern import check, fill, pattern, place, watched

import evenstep as es


def _command(*words: str | os.PathLike[str]) -> None:
    program = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep")
    if program is None:
        raise SystemExit("large: no evenstep program (EVENSTEP_PROGRAM)")
    done = subprocess.run([program, "ckpt", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"large: evenstep ckpt {words[0]}: exit code {done.returncode}: {done.stdout}")
    print(f"  ok  evenstep ckpt {words[0]}", flush=True)


def _largest(folder: pathlib.Path) -> int:
    return max(path.stat().st_size for path in folder.iterdir())


def _into_the_cache(folder: pathlib.Path) -> None:
    """What the page cache has is read to where it belongs; else each rank needs as much memory again."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(16 << 20):
                pass


def main(folder: pathlib.Path) -> None:
    rank, model = int(os.environ["RANK"]), Large()
    if rank == 0:
        fill(model.large.numpy(), 0)
    model = es.prepare(model)
    data = model.large.numpy()
    check(data, lambda at, n: pattern(at, n, 0), f"{place()}: the buffer of rank 0")
    written, others = folder / "written", folder / "others"
    with torch.no_grad():
        model.linear.weight.fill_(3)
    es.checkpoint(written)
    if rank == 0:
        print(f"  ok  written: a file of {_largest(written):,} bytes", flush=True)
        _command("verify", written)
        _command("reshard", written, others, "--files", "2")
        shutil.rmtree(written)
        _command("verify", others)
        print(f"  ok  the largest of two: {_largest(others):,} bytes", flush=True)
        _into_the_cache(others)
    data[:] = 0
    with torch.no_grad():
        model.linear.weight.zero_()
    es.load_checkpoint(others)
    check(model.large.numpy(), lambda at, n: pattern(at, n, 0), f"{place()}: loaded")
    if not bool((model.linear.weight == 3).all()):
        raise SystemExit(f"large: {place()}: the small tensor is wrong")


if __name__ == "__main__":
    where = os.environ.get("EVENSTEP_LARGE_FOLDER")
    with watched(place()), contextlib.ExitStack() as stack:
        # rank 0 makes the folder and tells the others by their port
        name = pathlib.Path(where or tempfile.gettempdir()) / f"evenstep-large-{os.environ['MASTER_PORT']}"
        if os.environ["RANK"] == "0":
            name.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, name, True)
        main(name)
