"""What the size of es.prepare's buckets is worth: fixed ones beside those that are chosen by measurement, in one run.

    evenstep run -n 2 bench/bucket_bench.py [--million 4,16] [--batch 32] [--turns 7] [--caps 4,0.25,1,16]
    python bench/bucket_bench.py --hosts 2 [--mbit 1000] …      # hosts of network namespaces: root, ip, tc, UCX

Each size trains a model of its own (layers of 256 KiB) in the same job; they take turns, so that all see the same machine. `step`
is a whole one, `open` what its exchange takes after backward on the rank that comes last; medians over turns. `measured` is
looked at when it has decided.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from heading import print_heading
from shaped_hosts import ShapedHosts, missing

WIDTH = 256
DECIDED = 24
"""Steps after which sizes are what they stay (python/evenstep/bucket_sizes.py)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", default="4,16", help="parameters of each model, in millions")
    parser.add_argument("--batch", type=int, default=512, help="samples of all ranks")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn", type=int, default=6, help="steps")
    parser.add_argument(
        "--caps", default="4,0.25,1,16", help="fixed sizes, in MiB; 4 is what is taken without measurement"
    )
    parser.add_argument("--hosts", type=int, default=0, help="namespaces; 0: these ranks")
    parser.add_argument("--mbit", type=float, default=1000, help="of each link, in either direction")
    parser.add_argument("--seconds", type=float, default=900, help="the most that all may take")
    return parser.parse_args()


class Choice:
    """One model, and what its steps take."""

    def __init__(self, cap: str, million: float, batch: int, turn: int) -> None:
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        import evenstep as es

        torch.manual_seed(0)
        layers = max(2, round(million * 1e6 / WIDTH**2))
        body = [one for _ in range(layers) for one in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        model = nn.Sequential(*body)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(batch * 8, WIDTH)), batch_size=batch)
        fixed = {} if cap == "measured" else {"bucket_cap_mb": float(cap)}
        self.cap, self.turn = cap, turn
        self.model, self.optimizer, self.loader = es.prepare(
            model, optimizer, loader, engine="shared", policy="equal", **fixed
        )
        self.sync = es.session().steps.syncs[-1]
        self.batches = self._endless()
        self.opened: list[float] = []  # of a turn
        self.steps: list[float] = []  # medians, one a turn
        self.exposed: list[float] = []
        engine: Any = self.sync.engine
        finish = type(engine).finish

        def watched(engine: Any = engine) -> Any:
            used, report = finish(engine)
            self.opened.append(report.exposed_ns / 1e6)
            return used, report

        engine.finish = watched

    def _endless(self) -> Any:
        while True:
            for (x,) in self.loader:
                yield x

    def run(self, steps: int) -> None:
        import evenstep as es
        from evenstep.group import gather_objects

        self.opened.clear()
        es.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.model(next(self.batches)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        es.barrier()
        self.steps.append(1e3 * (time.perf_counter() - began) / steps)
        least = [min(one) for one in zip(*gather_objects(es.session().group, self.opened))]
        self.exposed.append(statistics.median(least))

    def sizes(self) -> str:
        cap, first = self.sync.engine._sizes
        return "4 MiB, the first 0.25" if cap == 0 else f"{cap / (1 << 20):g} MiB, the first {first / (1 << 20):g}"


def measure(options: argparse.Namespace) -> None:
    import torch

    import evenstep as es

    torch.set_num_threads(1)
    for million in map(float, options.million.split(",")):
        choices = [Choice(cap, million, options.batch, options.turn) for cap in (*options.caps.split(","), "measured")]
        for choice in choices:
            choice.run(DECIDED if choice.cap == "measured" else 3)
            choice.steps.clear()
            choice.exposed.clear()
        for _ in range(options.turns):
            for choice in choices:
                choice.run(choice.turn)
        if es.rank() == 0:
            print(
                f"{million:g} million fp32 parameters in layers of 256 KiB, {es.world_size()} ranks, {options.batch} samples a step"
            )
            print(f"{'buckets':34}{'step, ms':>10}{'open, ms':>10}")
            for choice in choices:
                name = f"{choice.cap} MiB" if choice.cap != "measured" else f"measured: {choice.sizes()}"
                print(
                    f"{name:34}{statistics.median(choice.steps):10.2f}{statistics.median(choice.exposed):10.2f}",
                    flush=True,
                )
        es.barrier()


def main() -> int:
    options = arguments()
    if not options.hosts:
        measure(options)
        return 0
    why = missing()
    if why:
        sys.stderr.write(f"sizes between hosts were not measured: {why}\n")
        return 1
    print_heading("Sizes of gradient buckets between hosts (network namespaces on one machine, shaped links)")
    print(f"{options.hosts} hosts, links of {options.mbit:g} Mbit/s\n", flush=True)
    command = [sys.executable, __file__, "--million", options.million, "--batch", str(options.batch)]
    command += ["--turns", str(options.turns), "--turn", str(options.turn), "--caps", options.caps]
    with ShapedHosts(options.hosts, options.mbit) as hosts:
        return hosts.run(command, {}, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
