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
from contextlib import nullcontext
from typing import Any

import torch
from small_training import describe, loss_after, prepare_wide, step, width_of

import evenstep as es

MODES = "none,local:8,diloco:8,stale:1"


def options_of(name: str) -> dict[str, Any]:
    """Of es.prepare."""
    kind, _, number = name.partition(":")
    make = {"local": es.LocalSGD, "diloco": es.DiLoCo, "stale": es.Stale}.get(kind)
    mode = {} if make is None else {"sync": make(int(number))}
    return {"compression": "none", **mode}


class Choice:
    """One model and what its steps cost."""

    def __init__(self, name: str, width: int, batch: int, steps: int) -> None:
        self.name = name
        self.model, self.optimizer, self.loader = prepare_wide(
            width, batch * 8, batch, engine="shared", **options_of(name)
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
        others = [sync.model for sync in es.session().steps.syncs if sync.model is not self.model]
        with es.no_sync(*others) if others else nullcontext():  # else ranks of all modes would vote in every step
            for _ in range(self.steps):
                step(self.model, self.optimizer, next(self.batches))
        es.barrier()
        self.seconds.append((time.perf_counter() - start) / self.steps)
        self.moved.append(moved[0] // self.steps)
        saved.add = add


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
    width = width_of(args.million)
    choices = [Choice(name, width, args.batch, args.turn) for name in args.only.split(",")]
    for _ in range(1 + args.turns):
        for choice in choices:
            choice.turn()
    es.print(f"{describe(width)}, {args.batch} samples a step, medians of {args.turns} turns of {args.turn} steps")
    es.print(f"{'mode':14}{'MB a step':>10}{'step, ms':>10}" + (f"{'loss':>12}" if args.steps else ""))
    for choice in choices:
        moved, seconds = (statistics.median(every[1:]) for every in (choice.moved, choice.seconds))
        words = f"{choice.name:14}{moved / 1e6:10.2f}{1e3 * seconds:10.1f}"
        es.print(words + (f"{loss_after(args.steps, **options_of(choice.name)):12.3g}" if args.steps else ""))


if __name__ == "__main__":
    main()
