"""What each compression saves and what it costs: bytes and time of a training step, side by side.

    evenstep run -n 2 bench/compression_bench.py [--million 8] [--rounds 10] [--only none,bf16]

Every choice trains a model of its own in the same job, on the shared-memory engine and on torch's (Gloo); they take turns
of a step, so that all see the same machine. Prints medians.
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

CHOICES = "none,fp16,bf16,int8,onebit,topk:0.01,powersgd:4"
BATCH = 16


class Choice:
    """One model and what its exchanges cost."""

    def __init__(self, engine: str, compression: str, width: int, steps: int) -> None:
        self.engine, self.compression = engine, compression
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(BATCH * steps, width))
        self.model, self.optimizer, loader = es.prepare(
            model, optimizer, DataLoader(data, batch_size=BATCH), engine=engine, compression=compression
        )
        self.batches = iter(loader)
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.bytes = 0
        self._watch()

    def _watch(self) -> None:
        sync = next(s for s in es.session().steps.syncs if s.model is self.model)
        finish = sync.finish

        def watched(again: bool) -> Any:
            report = finish(again)
            self.bytes = report.bytes
            self.exposed.append(report.exposed_ns / 1e9)
            return report

        sync.finish = watched

    def step(self) -> None:
        (x,) = next(self.batches)
        es.barrier()
        start = time.perf_counter()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        es.barrier()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=8, help="parameters of each model, in millions")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engines", default="shared,torch")
    parser.add_argument("--only", default=CHOICES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = round((args.million * 1e6 / 8) ** 0.5)
    warm = 12  # PowerSGD begins after ten steps
    choices = [
        Choice(engine, compression, width, warm + args.rounds + 1)
        for engine in args.engines.split(",")
        for compression in args.only.split(",")
    ]
    for _ in range(warm + args.rounds):
        for choice in choices:
            choice.step()
    es.print(
        f"{8 * width * width / 1e6:.1f} million fp32 parameters, {es.world_size()} ranks, medians of {args.rounds} steps"
    )
    es.print(f"{'engine':8}{'compression':14}{'MB a step':>10}{'step, ms':>10}{'not hidden, ms':>16}")
    for choice in choices:
        seconds, exposed = (statistics.median(s[-args.rounds :]) for s in (choice.seconds, choice.exposed))
        words = f"{choice.engine:8}{choice.compression:14}{choice.bytes / 1e6:10.2f}{1e3 * seconds:10.1f}"
        es.print(f"{words}{1e3 * exposed:16.1f}")


if __name__ == "__main__":
    main()
