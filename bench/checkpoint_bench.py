"""Checkpoints beside torch.save, torch.distributed.checkpoint and a plain copy of the bytes; and what they cost training.

    python bench/checkpoint_bench.py [--megabytes 300] [--rounds 7] [--folder DIR] [--json FILE]

One process, alternating rounds, medians. A state is a model of linear layers with AdamW, a third of it weights. Saving
ends with an fsync of what was written (on disk), loading begins with a cold page cache (on disk) and ends with the values in
the model and the optimizer. `copy` writes and reads the same number of bytes from and to one buffer that was touched
before: one thread, through the page cache, cold or warm as for the others, no page faults, no checksums. What else is
compared takes the faults of its own memory in its time; es.load_checkpoint reads into the model's memory and the optimizer's.
`first load` is that of an optimizer that has no state yet, as a process that begins has it: its memory is new, as that of `copy,
new memory` is, which reads to memory that nobody has touched. The bound of loading from memory is a copy by all cores. `stall` is how long es.checkpoint(wait=False) keeps training
from going on, beside one copy of the state in memory;
`slowed` compares a step with a checkpoint every tenth with a step without.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from heading import heading, print_heading

import evenstep as es

WIDTH = 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="of the whole state (default 300)")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default 7)")
    parser.add_argument("--folder", default="build", help="on the disk to measure (default build)")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a step of the training that is slowed")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()


def sync_tree(path: pathlib.Path) -> None:
    for each in [path, *path.rglob("*")]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget_tree(path: pathlib.Path) -> None:
    """Out of the page cache."""
    for each in path.rglob("*"):
        if each.is_file():
            fd = os.open(each, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        layers = max(1, round(options.megabytes * 1e6 / (3 * 4 * (WIDTH * WIDTH + WIDTH))))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.model, self.optimizer = es.prepare(self.model, self.optimizer)
        self.batch = torch.randn(options.batch, WIDTH)
        self.step()
        states = self.optimizer.state_dict()["state"].values()
        self.tensors = [*self.model.state_dict().values(), *(t for s in states for t in s.values())]
        self.bytes = sum(t.numel() * t.element_size() for t in self.tensors)
        self.buffer = torch.ones(self.bytes, dtype=torch.uint8)
        self.options = options

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def saves(self, folder: pathlib.Path) -> dict[str, Callable[[], None]]:
        def copy() -> None:
            with (folder / "bytes").open("wb", buffering=0) as file:
                view = memoryview(self.buffer.numpy())
                while view:
                    view = view[file.write(view) :]

        return {
            "copy": copy,
            "evenstep": lambda: void(es.checkpoint(folder / "checkpoint")),
            "torch.save": lambda: torch.save(self.state(), folder / "state.pt"),
            "DCP": lambda: void(dcp.save(self.state(), checkpoint_id=folder, no_dist=True)),
        }

    def loads(self, folder: pathlib.Path) -> dict[str, Callable[[], None]]:
        def copy() -> None:
            with (folder / "bytes").open("rb", buffering=0) as file:
                view = memoryview(self.buffer.numpy())
                while view:
                    view = view[file.readinto(view) :]

        def copy_to_new() -> None:
            with (folder / "bytes").open("rb", buffering=0) as file:
                with mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                    view = memoryview(memory)
                    at = 0
                    while at < self.bytes:
                        at += file.readinto(view[at:])
                    view.release()

        def put(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        def load_dcp() -> None:
            state = self.state()
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            put(state)

        return {
            "copy": copy,
            "copy, new memory": copy_to_new,
            "evenstep": lambda: void(es.load_checkpoint(folder / "checkpoint")),
            "torch.save": lambda: put(torch.load(folder / "state.pt")),
            "DCP": load_dcp,
        }

    def speeds(self, place: pathlib.Path, on_disk: bool) -> dict[str, dict[str, list[float]]]:
        """Bytes a second, by way: of each round's save and load."""
        found: dict[str, dict[str, list[float]]] = {}
        for round_ in range(self.options.rounds + 1):
            for way in ("copy", "evenstep", "torch.save", "DCP"):
                folder = pathlib.Path(tempfile.mkdtemp(dir=place))
                try:
                    began = time.perf_counter()
                    self.saves(folder)[way]()
                    if on_disk:
                        sync_tree(folder)
                    save = time.perf_counter() - began
                    if on_disk:
                        forget_tree(folder)
                    began = time.perf_counter()
                    self.loads(folder)[way]()
                    load = time.perf_counter() - began
                    if way in ("copy", "evenstep"):
                        if on_disk:
                            forget_tree(folder)
                        if way == "evenstep":
                            self.optimizer.state.clear()
                        began = time.perf_counter()
                        self.loads(folder)["copy, new memory" if way == "copy" else way]()
                        new = time.perf_counter() - began
                finally:
                    shutil.rmtree(folder)
                if round_ > 0:
                    one = found.setdefault(way, {"save": [], "load": []})
                    one["save"].append(self.bytes / save)
                    one["load"].append(self.bytes / load)
                    if way in ("copy", "evenstep"):
                        one.setdefault("new", []).append(self.bytes / new)
        return found

    def bound(self) -> float:
        """Bytes a second that all cores copy in memory: each byte read once and written once, which no load can do without."""
        before = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        to = self.buffer.clone()
        times = []
        for _ in range(self.options.rounds):
            began = time.perf_counter()
            to.copy_(self.buffer)
            times.append(time.perf_counter() - began)
        torch.set_num_threads(before)
        return self.bytes / statistics.median(times)

    def training(self, place: pathlib.Path) -> dict[str, float]:
        """Seconds of ten steps with and without a checkpoint, of a stall, of a copy of the state in memory."""
        os.environ["EVENSTEP_CHECKPOINT_DIR"] = str(place / "checkpoints")
        es.checkpoint(wait=False)  # the memory's pages, and the first folder
        kept = [torch.empty_like(t) for t in self.tensors]
        times: dict[str, list[float]] = {"plain": [], "with": [], "stall": [], "copy": []}
        for round_ in range(self.options.rounds + 1):
            for way in ("plain", "with") if round_ % 2 else ("with", "plain"):
                began = time.perf_counter()
                for i in range(10):
                    self.step()
                    if way == "with" and i == 0:
                        before = time.perf_counter()
                        es.checkpoint(wait=False)
                        if round_ > 0:
                            times["stall"].append(time.perf_counter() - before)
                if round_ > 0:
                    times[way].append(time.perf_counter() - began)
            before = time.perf_counter()
            for to, tensor in zip(kept, self.tensors):
                to.copy_(tensor)
            if round_ > 0:
                times["copy"].append(time.perf_counter() - before)
        return {name: statistics.median(values) for name, values in times.items()}


def void(_: object) -> None:
    pass


def main() -> None:
    options = arguments()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    pathlib.Path(options.folder).mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    print_heading(f"Checkpoints of {bench.bytes / 1e6:.0f} MB, medians of {options.rounds} alternating rounds")
    figures: dict[str, Any] = {"heading": heading(), "bytes": bench.bytes}
    for name, parent in (("memory", "/dev/shm"), ("disk", options.folder)):
        place = pathlib.Path(tempfile.mkdtemp(prefix="evenstep-bench-", dir=parent))
        try:
            found = bench.speeds(place, name == "disk")
        finally:
            shutil.rmtree(place)
        figures[name] = found
        print(f"{name:12} {'save GB/s':>10} {'of copy':>8} {'load GB/s':>10} {'of copy':>8}")
        for way, speeds in found.items():
            row = []
            for what in ("save", "load"):
                ratio = statistics.median(a / b for a, b in zip(speeds[what], found["copy"][what]))
                row += [f"{statistics.median(speeds[what]) / 1e9:10.2f}", f"{ratio:8.2f}"]
            print(f"  {way:10} {' '.join(row)}")
        new, first = found["copy"]["new"], found["evenstep"]["new"]
        of_new = statistics.median(a / b for a, b in zip(first, new))
        of_copy = statistics.median(a / b for a, b in zip(first, found["copy"]["load"]))
        print(f"  copy, new memory: load {statistics.median(new) / 1e9:.2f} GB/s")
        print(f"  first load: {statistics.median(first) / 1e9:.2f} GB/s: {of_new:.2f} of that, {of_copy:.2f} of copy")
        if name == "memory":
            bound = figures["bound"] = bench.bound()
            reached = statistics.median(found["evenstep"]["load"]) / bound
            print(
                f"  bound of loading (all cores read and write each byte once): {bound / 1e9:.2f} GB/s; evenstep {reached:.2f}"
            )
        print()
    place = pathlib.Path(tempfile.mkdtemp(prefix="evenstep-bench-", dir=options.folder))
    try:
        training = bench.training(place)
    finally:
        es.checkpoint(place / "last")  # waits for the one that is being written
        shutil.rmtree(place)
    figures["training"] = training
    print(f"training, a checkpoint every 10 steps of {training['plain'] * 100:.0f} ms:")
    print(f"  slowed by {100 * (training['with'] / training['plain'] - 1):.1f} %")
    print(
        f"  stall {1000 * training['stall']:.1f} ms: {training['stall'] / training['copy']:.2f} x a copy of the state in "
        f"memory ({1000 * training['copy']:.1f} ms)"
    )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
