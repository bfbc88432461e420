"""What telemetry costs a training step, three ways: with and without in one run, the writing alone, the agent's part.

    evenstep run -n 2 bench/telemetry_overhead.py -o telemetry.txt

Trains the demo's model with equal shares, so that nothing but the records changes. Under torchrun, where there is no agent,
it writes to a ring of its own and leaves the agent's part out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

import evenstep as es
from evenstep import _core

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from char_gpt import GPT, Windows, standard_library_text  # noqa: E402

BOUND_PERCENT = 0.5
BATCH, LENGTH = 32, 64
KINDS = (_core.SPAN_DATA, _core.SPAN_FORWARD, _core.SPAN_BACKWARD, _core.SPAN_WAIT, _core.SPAN_OPTIMIZER)


class Training:
    """The demo's training, step by step, with records or without: those of the engine's thread too."""

    def __init__(self, steps: int, telemetry: _core.Telemetry) -> None:
        self.telemetry = es.session().telemetry = es.session().steps.telemetry = telemetry  # the engine keeps it, too
        torch.manual_seed(0)
        data = Windows(standard_library_text(1_000_000), LENGTH)
        loader = DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, num_samples=steps * BATCH))
        model = GPT(layers=4, width=128, heads=4, length=LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def equal(_: int, batch: int) -> list[int]:
            ranks = es.world_size()
            return [batch // ranks + (rank < batch % ranks) for rank in range(ranks)]

        self.model, self.optimizer, self.loader = es.prepare(model, optimizer, loader, shares=equal)
        self._batches: Iterator[list[torch.Tensor]] = iter(self.loader)

    def record(self, wanted: bool) -> None:
        self.telemetry.paused = not wanted

    def block(self, steps: int) -> float:
        """Seconds that so many steps take."""
        began = time.perf_counter()
        for _ in range(steps):
            tokens, targets = next(self._batches)
            loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return time.perf_counter() - began


def compare(training: Training, pairs: int, steps: int) -> list[list[float]]:
    """Seconds of a step with and without, in pairs of blocks that follow one another, in turning order: drift and
    neighbours meet both alike."""
    found = []
    for number in range(pairs):
        seconds = {}
        for wanted in (True, False) if number % 2 == 0 else (False, True):
            training.record(wanted)
            seconds[wanted] = training.block(steps) / steps
        found.append([seconds[True], seconds[False]])
    return found


def interval(values: list[float], rounds: int = 4000) -> tuple[float, float, float]:
    """The median and its 95 % interval by the bootstrap (Efron 1979)."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return statistics.median(values), medians[rounds * 25 // 1000], medians[rounds * 975 // 1000]


def cost_of_records(telemetry: _core.Telemetry, buckets: int) -> float:
    """Seconds of writing what one step writes; the engine's spans too, although C writes them for less."""
    rounds = 20_000
    kinds = KINDS + (_core.SPAN_COMMUNICATION,) * buckets
    now = _core.clock_ns()
    began = time.perf_counter()
    for step in range(rounds):
        for kind in kinds:
            telemetry.span(kind, step, now, 1)
        telemetry.step(step, 0, now, 1, 1, 8, 16, 0.5, 0.1)
    return (time.perf_counter() - began) / rounds


def cost_of_balancing(ranks: int) -> float:
    """Seconds to take one step's timings and split the next batch."""
    balancer = _core.Balancer("hybrid", ranks, BATCH)
    rounds = 5_000
    began = time.perf_counter()
    for number in range(rounds):
        shares = balancer.shares(BATCH)
        balancer.observe([(share, 0.01 * (share + 1) * (1 + number % 7 / 100)) for share in shares])
    return (time.perf_counter() - began) / rounds


def agent_clock() -> Callable[[], float] | None:
    """CPU seconds of the agent's process so far, by the scheduler's own count of nanoseconds."""
    try:
        folder = pathlib.Path(os.environ["EVENSTEP_RUN_DIR"])
        pid = json.loads((folder / "agent.json").read_text())["pid"]
        tasks = pathlib.Path(f"/proc/{pid}/task")
        sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())
    except (KeyError, OSError, ValueError):
        return None
    return lambda: sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def agents_part(training: Training, steps: int) -> tuple[float, float]:
    """CPU seconds of the agent for a step: with records to drain, and without."""
    clock = agent_clock()
    assert clock is not None
    spent = []
    for wanted in (True, False):
        training.record(wanted)
        began = clock()
        training.block(steps)
        spent.append((clock() - began) / steps)
    return spent[0], spent[1]


def measure(pairs: int, steps: int, watched: int) -> dict[str, float | int | None]:
    warm_up = 10
    in_run = es.session().environment.telemetry_fd >= 0
    alone = _core.Telemetry(_core.telemetry_segment(1), 0)
    own = _core.Telemetry(_core.telemetry_segment(1), 0)
    training = Training(warm_up + 2 * pairs * steps + 2 * watched, es.session().telemetry if in_run else own)
    training.block(warm_up)
    times = compare(training, pairs, steps)
    step = statistics.median(seconds for pair in times for seconds in pair)
    middle, low, high = interval([100 * (a - b) / b for a, b in times])
    buckets = 2
    records, balancing = cost_of_records(alone, buckets), cost_of_balancing(es.world_size())
    result: dict[str, float | int | None] = {
        "ranks": es.world_size(),
        "pairs": pairs,
        "steps_a_block": steps,
        "step_seconds": step,
        "difference_percent": middle,
        "difference_percent_low": low,
        "difference_percent_high": high,
        "records_seconds_per_step": records,
        "records_percent": 100 * records / step,
        "balancing_seconds_per_step": balancing,
        "balancing_percent": 100 * balancing / step,
        "agent_seconds_per_step": None,
        "agent_idle_seconds_per_step": None,
        "bound_percent": BOUND_PERCENT,
    }
    if es.session().environment.run_dir and es.is_main() and agent_clock() is None:
        sys.stderr.write("no agent.json in the run's folder: the agent's part is left out\n")
    if in_run:
        with_records, without = (
            agents_part(training, watched)
            if agent_clock() is not None
            else (float("nan"), training.block(2 * watched) * 0)
        )
        result["agent_seconds_per_step"], result["agent_idle_seconds_per_step"] = with_records, without
    training.record(True)
    return result


def lines(r: dict) -> list[str]:
    step, bound = r["step_seconds"], r["bound_percent"]

    def verdict(percent: float) -> str:
        return f"{percent:.3f} % of the step; bound {bound} %: {'kept' if percent <= bound else 'NOT kept'}"

    out = [
        f"step of the demo's model, {r['ranks']} ranks, equal shares: {step * 1e3:.2f} ms",
        f"with against without, {r['pairs']} pairs of blocks of {r['steps_a_block']} steps: "
        f"{r['difference_percent']:+.3f} % (median; 95 % interval {r['difference_percent_low']:+.3f} "
        f"to {r['difference_percent_high']:+.3f})",
        f"writing a step's records alone: {r['records_seconds_per_step'] * 1e6:.2f} us, {verdict(r['records_percent'])}",
    ]
    total = r["records_percent"]
    if r["agent_seconds_per_step"] is not None:
        spent, idle = r["agent_seconds_per_step"], r["agent_idle_seconds_per_step"]
        drained = max(0.0, spent - idle)
        # the ranks have all cores: what the agent takes, it takes from one of them
        share = 100 * drained / step / r["ranks"]
        total += share
        out += [
            f"the agent's CPU for a step's records (drain, SQLite, page): {drained * 1e6:.1f} us of "
            f"{r['ranks']} ranks' time, {verdict(share)}",
            f"the agent in all: {spent * 1e6:.1f} us a step with records, {idle * 1e6:.1f} us without",
            f"records and agent together: {verdict(total)}",
        ]
    out.append(
        f"balancing (no telemetry): {r['balancing_seconds_per_step'] * 1e6:.2f} us, {r['balancing_percent']:.3f} % of the step"
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks, one with telemetry, one without")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--agent-steps", type=int, default=100, help="steps for the agent's part, with and without")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", help="write it here too")
    args = parser.parse_args()
    result = measure(args.pairs, args.steps, args.agent_steps)
    if not es.is_main():
        return
    text = json.dumps(result, indent=2) if args.json else "\n".join(lines(result))
    print(text, flush=True)
    if args.output:
        pathlib.Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
