"""What es.prepare(workers="auto") and es.SampleCache gain: a training whose samples are read from a disk past the page cache
(loading waits), or decompressed (loading computes), by the ranks themselves and otherwise, in turns of an epoch.

    evenstep run -n 2 bench/loading_bench.py [--rounds 5] [--layers 4] [--folder DIR] [-o FILE]

Each way trains the same model on the same batches, in equal shares; in two epochs beforehand "auto" decides, and the cache is filled.
A figure is the time of an epoch over its steps, the median over the rounds, on rank 0; all ranks begin an epoch together. `of
off` is that of loading in the ranks' own processes over it: above 1 it is a gain. `one worker` has num_workers=1 on each rank, by hand.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pathlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from heading import heading
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import evenstep as es

SAMPLES, BATCH, FEATURES = 256, 16, 1024
STORED = 1 << 20  # bytes of a sample on the disk
PACKED = 1 << 16  # floats of a sample that is decompressed


class FromDisk(Dataset):
    """Samples that lie in a file, each read past the page cache: loading waits for the disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.opened = path, (0, -1)  # by which process

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.opened[0] != os.getpid():
            self.opened = os.getpid(), os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        memory = mmap.mmap(-1, STORED)
        os.preadv(self.opened[1], [memory], index * STORED)
        return torch.frombuffer(memory, dtype=torch.float32, count=FEATURES).clone()


class Decompressed(Dataset):
    """Samples that are decompressed: loading computes."""

    def __init__(self) -> None:
        values = torch.randint(-128, 128, (16, PACKED), generator=torch.Generator().manual_seed(0)).to(torch.float32)
        self.packed = [zlib.compress(one.numpy().tobytes(), 1) for one in values]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        whole = torch.frombuffer(bytearray(zlib.decompress(self.packed[index % 16])), dtype=torch.float32)
        return whole[:FEATURES] / 128


class InTurn(IterableDataset):
    """The same samples as a stream that says where it is."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return Walk(self.samples)


class Walk:
    def __init__(self, samples: Any) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == SAMPLES:
            raise StopIteration
        self.at += 1
        return self.samples[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each way that count (default 5)")
    parser.add_argument("--layers", type=int, default=4, help="of the model: what a step computes (default 4)")
    parser.add_argument("--folder", default="build", help="on the disk that samples are read from (default build)")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    return parser.parse_args()


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> float:
    """Seconds of a step."""
    es.barrier()
    begun, steps = time.perf_counter(), 0
    for x in loader:
        optimizer.zero_grad()
        functional.mse_loss(model(x), x).backward()
        optimizer.step()
        steps += 1
    return (time.perf_counter() - begun) / steps


def ways_of(samples: Any, cached: bool) -> dict[str, Any]:
    """Loaders that bring the same samples."""

    def loader(dataset: Any, workers: str, **options: Any) -> Any:
        return es.prepare(DataLoader(dataset, batch_size=BATCH, **options), policy="equal", workers=workers)

    ways = {"off": loader(samples, "off"), "auto": loader(samples, "auto")}
    ways["one worker"] = loader(samples, "off", num_workers=1, persistent_workers=True)
    if cached:
        ways["cache"] = loader(es.SampleCache(samples, 64 << 20), "off")
    ways.update({"stream, off": loader(InTurn(samples), "off"), "stream, auto": loader(InTurn(samples), "auto")})
    return ways


def compared(title: str, samples: Any, cached: bool, options: argparse.Namespace) -> list[str]:
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(options.layers)))
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    ways = ways_of(samples, cached)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 2):
        for name, loader in ways.items():
            took = epoch(model, optimizer, loader)
            if round_ > 1:
                seconds[name].append(took)
    lines = [f"{title:34} {'ms a step':>9} {'of off':>7}   workers by rank"]
    for name, loader in ways.items():
        off = seconds["stream, off" if name.startswith("stream") else "off"]
        ratio = statistics.median(a / b for a, b in zip(off, seconds[name]))
        mine = loader.num_workers or (loader.chosen or (0, 0))[0]
        workers = es.gather(torch.tensor([[mine]]), batch=False).flatten().tolist()
        lines.append(f"  {name:32} {1e3 * statistics.median(seconds[name]):9.1f} {ratio:7.2f}   {workers}")
    return [*lines, ""]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [f"Loading by workers and from a cache, {es.world_size()} ranks, medians of {options.rounds} rounds"]
    lines += [f"  {name:9} {value}" for name, value in heading().items()] + [""]
    pathlib.Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=options.folder) as file:
        one = torch.randn(STORED // 4).numpy().tobytes()
        for _ in range(SAMPLES):
            file.write(one)
        file.flush()
        os.fsync(file.fileno())
        lines += compared("read from a disk", FromDisk(pathlib.Path(file.name)), False, options)
    lines += compared("decompressed", Decompressed(), True, options)
    es.print("\n".join(lines))
    if options.output is not None and es.is_main():
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
