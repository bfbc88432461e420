"""What each asynchronous mode saves and what a step costs from end to end: bytes and time of training, side by side.

    evenstep run -n 2 bench/modes_bench.py [--million 4] [--turns 5] [--only none,local:8,diloco:8,stale:1]

Every mode trains a model of its own in the same job; they take turns of --turn steps, measured as a whole (an exchange
comes once in some steps, or ends behind the step that made it), so that all see the same machine. Prints medians over
turns, with --steps also the loss of a small training. bench/compression_hosts.py --modes runs it between hosts of shaped links.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

MODES = "none,local:8,diloco:8,stale:1"


def mode_of(name: str) -> Any:
    kind, _, number = name.partition(":")
    make = {"local": es.LocalSGD, "diloco": es.DiLoCo, "stale": es.Stale}.get(kind)
    return None if make is None else make(int(number))


class Choice:
    """One model and what its steps cost."""

    def __init__(self, name: str, width: int, batch: int, steps: int) -> None:
        self.name = name
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(batch * 8, width))
        mode = mode_of(name)
        options = {} if mode is None else {"sync": mode}
        self.model, self.optimizer, self.loader = es.prepare(
            model, optimizer, DataLoader(data, batch_size=batch), engine="shared", compression="none", **options
        )
        self.batches = self._endless()
        self.seconds: list[float] = []
        self.moved: list[int] = []
        self.steps = steps

    def _endless(self) -> Any:
        while True:
            for (x,) in self.loader:
                yield x

    def turn(self) -> None:
        saved = es.session().steps.saved
        add, moved = saved.add, [0]

        def count(compression: str, sent: int, full: int) -> None:
            moved[0] += sent
            add(compression, sent, full)

        saved.add = count
        es.barrier()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.model(next(self.batches)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        es.barrier()
        self.seconds.append((time.perf_counter() - start) / self.steps)
        self.moved.append(moved[0] // self.steps)
        saved.add = add


def loss_after(name: str, steps: int) -> float:
    """Of a small net that learns what another one computes; on all of its data."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    student = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    x = torch.randn(2048, 32)
    data = TensorDataset(x, teacher(x).detach())
    loader = DataLoader(data, batch_size=64, shuffle=True)
    mode = mode_of(name)
    options = {} if mode is None else {"sync": mode}
    student, optimizer, loader = es.prepare(student, optimizer, loader, engine="shared", compression="none", **options)
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(student(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    if mode is not None:
        es.synchronise_models()
    with torch.no_grad():
        return float(nn.functional.mse_loss(student(data.tensors[0]), data.tensors[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=4, help="parameters of each model, in millions")
    parser.add_argument("--batch", type=int, default=16, help="samples of all ranks")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn", type=int, default=16, help="steps: a multiple of all that the modes count")
    parser.add_argument("--only", default=MODES)
    parser.add_argument("--steps", type=int, default=0, help="of the small training; 0: none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = round((args.million * 1e6 / 8) ** 0.5)
    choices = [Choice(name, width, args.batch, args.turn) for name in args.only.split(",")]
    for _ in range(1 + args.turns):
        for choice in choices:
            choice.turn()
    es.print(
        f"{8 * width * width / 1e6:.1f} million fp32 parameters, {es.world_size()} ranks, {args.batch} samples a step, "
        f"medians of {args.turns} turns of {args.turn} steps"
    )
    es.print(f"{'mode':14}{'MB a step':>10}{'step, ms':>10}" + (f"{'loss':>12}" if args.steps else ""))
    for choice in choices:
        moved, seconds = (statistics.median(every[1:]) for every in (choice.moved, choice.seconds))
        words = f"{choice.name:14}{moved / 1e6:10.2f}{1e3 * seconds:10.1f}"
        es.print(words + (f"{loss_after(choice.name, args.steps):12.3g}" if args.steps else ""))


if __name__ == "__main__":
    main()
