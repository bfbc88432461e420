"""What each compression saves and what it costs: bytes and time of a training step, side by side.

    evenstep run -n 2 bench/compression_bench.py [--million 8] [--rounds 10] [--only none,bf16]

Every choice trains a model of its own in the same job, on the shared-memory engine and on torch's (Gloo); they take turns
of a step, so that all see the same machine. Prints medians. With --mbit also the bound, which is what a rank's bytes take
on a link of that speed, one after the other in one direction, and what part of the exchange it is; with --steps the loss
of a small training. bench/compression_hosts.py makes hosts with such links.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from small_training import describe, loss_after, prepare_wide, step, width_of

import evenstep as es

CHOICES = "none,fp16,bf16,int8,onebit,topk:0.01,powersgd:4"
BATCH = 16


class Choice:
    """One model and what its exchanges cost."""

    def __init__(self, engine: str, compression: str, width: int, steps: int) -> None:
        self.engine, self.compression = engine, compression
        self.model, self.optimizer, loader = prepare_wide(
            width, BATCH * steps, BATCH, engine=engine, compression=compression
        )
        self.batches = iter(loader)
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.communication: list[float] = []
        self.bytes = 0
        self._watch()

    def _watch(self) -> None:
        sync = next(s for s in es.session().steps.syncs if s.model is self.model)
        finish = sync.finish

        def watched(again: bool) -> Any:
            report = finish(again)
            self.bytes = report.bytes
            self.exposed.append(report.exposed_ns / 1e9)
            self.communication.append(report.communication_ns / 1e9)
            return report

        sync.finish = watched

    def step(self) -> None:
        (x,) = next(self.batches)
        es.barrier()
        start = time.perf_counter()
        step(self.model, self.optimizer, x)
        es.barrier()
        self.seconds.append(time.perf_counter() - start)


def bound_seconds(moved: int, args: argparse.Namespace) -> float:
    """What passes a host's link of so many bytes, as an all-reduce's count: each who sends has 2 / n of them for each other,
    and what those of one host have for one another does not pass it."""
    senders = args.senders or es.world_size()
    return args.sharing * 2 * (senders - args.sharing) / senders * moved * 8 / (args.mbit * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=8, help="parameters of each model, in millions")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engines", default="shared,torch")
    parser.add_argument("--only", default=CHOICES)
    parser.add_argument("--mbit", type=float, default=0, help="of the links between the ranks; 0: not known")
    parser.add_argument("--senders", type=int, default=0, help="hosts, where one of each sends; 0: every rank does")
    parser.add_argument("--sharing", type=int, default=1, help="how many of those who send share a link")
    parser.add_argument("--steps", type=int, default=0, help="of the small training; 0: none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = width_of(args.million)
    warm = 12  # PowerSGD begins after ten steps
    choices = [
        Choice(engine, compression, width, warm + args.rounds + 1)
        for engine in args.engines.split(",")
        for compression in args.only.split(",")
    ]
    for _ in range(warm + args.rounds):
        for choice in choices:
            choice.step()
    es.print(f"{describe(width)}, medians of {args.rounds} steps")
    table(choices, args)


def table(choices: list[Choice], args: argparse.Namespace) -> None:
    head = f"{'engine':8}{'compression':14}{'MB a step':>10}{'step, ms':>10}{'not hidden, ms':>16}"
    head += f"{'exchange, ms':>14}{'bound, ms':>11}{'bound/exchange':>16}" if args.mbit else ""
    es.print(head + (f"{'loss':>12}" if args.steps else ""))
    for choice in choices:
        every = (choice.seconds, choice.exposed, choice.communication)
        seconds, exposed, exchange = (statistics.median(s[-args.rounds :]) for s in every)
        words = f"{choice.engine:8}{choice.compression:14}{choice.bytes / 1e6:10.2f}{1e3 * seconds:10.1f}"
        words += f"{1e3 * exposed:16.1f}"
        if args.mbit:
            bound = bound_seconds(choice.bytes, args)
            words += f"{1e3 * exchange:14.1f}{1e3 * bound:11.1f}{bound / exchange:16.2f}"
        if args.steps:
            words += f"{loss_after(args.steps, compression=choice.compression):12.3g}"
        es.print(words)


if __name__ == "__main__":
    main()
