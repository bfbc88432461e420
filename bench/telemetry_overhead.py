"""What telemetry and balancing cost a training step, measured in one run: steps with and without, in turn.

    evenstep run -n 2 --no-monitor bench/telemetry_overhead.py      (or torchrun --nproc-per-node 2 …)

Writes to a ring of its own, so it needs no agent. Prints the medians, and what each part costs alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import _core


def alternate(
    loader: DataLoader, model: nn.Module, optimizer: torch.optim.Optimizer, writers: tuple[_core.Telemetry, ...]
) -> list[list[float]]:
    """Seconds of each step, by writer; the writers take turns step by step, so that both see the same weather."""
    steps = es.session().steps
    times: list[list[float]] = [[] for _ in writers]
    began = time.perf_counter()
    for number, (x, y) in enumerate(loader):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        times[number % len(writers)].append(now - began)
        began = now
        steps.telemetry = writers[(number + 1) % len(writers)]
    return times


def cost_of_records(telemetry: _core.Telemetry) -> float:
    """Seconds for the spans and the record that one step writes."""
    rounds = 20_000
    now = _core.clock_ns()
    began = time.perf_counter()
    for step in range(rounds):
        for kind in (_core.SPAN_DATA, _core.SPAN_FORWARD, _core.SPAN_BACKWARD, _core.SPAN_WAIT, _core.SPAN_OPTIMIZER):
            telemetry.span(kind, step, now, 1)
        telemetry.step(step, 0, now, 1, 1, 8, 16, 0.5, 0.1)
    return (time.perf_counter() - began) / rounds


def cost_of_balancing(ranks: int) -> float:
    """Seconds to take one step's timings and split the next batch."""
    balancer = _core.Balancer("hybrid", ranks, 32)
    rounds = 5_000
    began = time.perf_counter()
    for number in range(rounds):
        shares = balancer.shares(32)
        balancer.observe([(share, 0.01 * (share + 1) * (1 + number % 7 / 100)) for share in shares])
    return (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps, half of them with telemetry")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    batch = 32
    data = TensorDataset(torch.randn(args.steps * batch, args.width), torch.randn(args.steps * batch, args.width))
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(args.width, args.width), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=batch))
    on = _core.Telemetry(_core.telemetry_segment(1), 0)
    off = _core.Telemetry(-1, 0)
    alternate(loader, model, optimizer, (off,))  # warm-up
    times = alternate(loader, model, optimizer, (on, off))
    with_it, without = (statistics.median(one[2:]) for one in times)
    records, balancing = cost_of_records(on), cost_of_balancing(es.world_size())
    result = {
        "ranks": es.world_size(),
        "step_seconds_with_telemetry": with_it,
        "step_seconds_without_telemetry": without,
        "difference_percent": 100 * (with_it - without) / without,
        "records_seconds_per_step": records,
        "records_percent": 100 * records / without,
        "balancing_seconds_per_step": balancing,
        "balancing_percent": 100 * balancing / without,
    }
    if not es.is_main():
        return
    if args.json:
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    print(f"step without telemetry      {without * 1e3:9.3f} ms (median of {len(times[1])} steps)")
    print(f"step with telemetry         {with_it * 1e3:9.3f} ms ({result['difference_percent']:+.2f} %)")
    print(f"a step's records alone      {records * 1e6:9.2f} us ({result['records_percent']:.3f} % of the step)")
    print(f"a step's balancing alone    {balancing * 1e6:9.2f} us ({result['balancing_percent']:.3f} % of the step)")


if __name__ == "__main__":
    main()
