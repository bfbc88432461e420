"""A step of es.optim.AdamW, whose states the ranks of a host share, beside torch.optim.AdamW on every rank.

    evenstep run -n 2 bench/optim_bench.py [--millions 20] [--rounds 15] [--threads 1] [-o FILE]

Both step on the same gradients, in turns, each rank with `threads` threads of torch; es.optim has one. A figure is the
median over the rounds of the time from a barrier until the last rank has made the step. `states` is the memory that a
host has for them, by what this kernel says of each rank's proportional share (Pss). The bound: every byte that a step has
to move, each once, as fast as the ranks together run over memory with `a += b`: of torch on each rank values, two
states (read and written) and the gradient, of es.optim these once a host, and on each rank the values that others made
(read and written). bfloat16: torch has its states in bfloat16 and no values in float32; es.optim has all in float32.

Then the whole way from gradients that each rank has to new values: exchange, clipping by the norm of all gradients, step. "Gloo":
torch's all-reduce in buckets of 25 MB. "shared": Evenstep's engine in shared memory. With max_grad_norm the step clips; with
shard_gradients it also adds up, and nobody gathers what was added up.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from typing import Any, Callable

import torch
from heading import heading

import evenstep as es
from evenstep.engine import EngineOptions, SharedEngine
from evenstep.shared_states import share_states
from evenstep.torch_engine import TorchEngine

OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


def shared_bytes() -> int:
    """This rank's part of all memory that it has."""
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def over_all(value: float, how: Callable[[list[float]], float]) -> float:
    return how([float(one) for one in es.gather(torch.tensor([value], dtype=torch.float64))])


def timed(step: Callable[[], Any]) -> float:
    """Until the last rank is done."""
    es.barrier()
    start = time.perf_counter()
    step()
    return over_all(time.perf_counter() - start, max)


class Way:
    """One optimizer of parameters of its own, which es.prepare knows."""

    def __init__(
        self, name: str, dtype: torch.dtype, elements: int, make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        self.name = name
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(elements // 8).to(dtype)) for _ in range(8)])
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        optimizer = make(model.parameters())
        before = over_all(shared_bytes(), sum)
        if isinstance(optimizer, (es.optim.AdamW,)):
            # its share of es.prepare: what the ranks of a host do together, without a training loop around it
            share_states(es.session(), [optimizer], apart=False)
        self.optimizer = optimizer
        optimizer.step()
        optimizer.step()
        es.barrier()
        self.state_bytes = over_all(shared_bytes(), sum) - before
        self.seconds: list[float] = []


def run_over(elements: int, rounds: int) -> float:
    """Bytes a second of all ranks together."""
    a, b = torch.zeros(elements), torch.zeros(elements)
    seconds = [timed(lambda: a.add_(b)) for _ in range(rounds)]
    return 12 * elements * es.world_size() / statistics.median(seconds)


def compare(dtype: torch.dtype, elements: int, rounds: int, speed: float) -> list[str]:
    ways = [
        Way("es.optim.AdamW", dtype, elements, lambda p: es.optim.AdamW(p, **OPTIONS)),
        Way("torch, fused", dtype, elements, lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS)),
        Way("torch, foreach", dtype, elements, lambda p: torch.optim.AdamW(p, foreach=True, **OPTIONS)),
    ]
    for _ in range(rounds):
        for way in ways:
            way.seconds.append(timed(way.optimizer.step))
    ranks, size = es.world_size(), dtype.itemsize
    wide = 4 if dtype == torch.bfloat16 else 0
    moved = {
        # a host's: states and gradient, and the values in float32 where these are beside; each rank's: its values
        "es.optim.AdamW": 16 + size + 2 * (wide or size) + (ranks - 1) * ((wide or 4) + size) + (wide and size),
    }
    fused = statistics.median(ways[1].seconds)
    lines = [
        f"{str(dtype).removeprefix('torch.')}, {elements / 1e6:.0f} million parameters, {ranks} ranks",
        f"  {'':16} {'ms a step':>9} {'of fused':>9} {'of bound':>9} {'states':>9}",
    ]
    for way in ways:
        seconds = statistics.median(way.seconds)
        bound = moved.get(way.name, ranks * 7 * size) * elements / speed
        lines.append(
            f"  {way.name:16} {seconds * 1e3:9.2f} {fused / seconds:8.2f}x {bound / seconds:9.2f} {way.state_bytes / 2**20:6.0f} MB"
        )
    return [*lines, ""]


class Whole:
    """From gradients to new values, one way."""

    def __init__(self, name: str, elements: int, clips: bool, **more: Any) -> None:
        self.name, self.clips = name, clips
        self.over_gloo, self.of_torch = more.pop("over_gloo", False), more.pop("of_torch", False)
        self.in_step = more.pop("in_step", False)
        shards = more.pop("shards", False)
        now = es.session()
        torch.manual_seed(1)
        self.parameters = [torch.nn.Parameter(torch.randn(elements // 8)) for _ in range(8)]
        torch.manual_seed(1 + now.rank)
        self.gradients = [torch.randn(p.shape) for p in self.parameters]
        if self.over_gloo:
            gloo = now.bootstrap.torch_group("gloo")
            self.engine: Any = TorchEngine(self.parameters, gloo, now.group, now.telemetry, EngineOptions())
        else:
            room = SharedEngine.arena_bytes(self.parameters)
            options = EngineOptions(unsummed=shards)
            self.engine = SharedEngine(self.parameters, now.bootstrap.shared(room, "bench"), now.telemetry, options)
        if self.of_torch:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters, fused=True, **OPTIONS)
        else:
            norm = 1.0 if self.in_step else None
            self.optimizer = es.optim.AdamW(self.parameters, max_grad_norm=norm, **OPTIONS)
            share_states(now, [self.optimizer], apart=False)
        self.seconds: list[float] = []
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self.engine.part(index) if shards else self.engine.views[index]
        self.step()
        self.step()

    def step(self) -> None:
        self.engine.begin(1 / es.world_size(), 0)
        for index, gradient in enumerate(self.gradients):
            self.engine.ready(index, gradient)
        self.engine.finish()
        if self.clips and not self.in_step:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def compare_whole(elements: int, rounds: int, clips: bool) -> list[str]:
    ways = [
        Whole("Gloo, torch's fused step", elements, clips, over_gloo=True, of_torch=True),
        Whole("shared, torch's fused step", elements, clips, of_torch=True),
        Whole("shared, es.optim", elements, clips),
    ]
    if clips:
        ways.append(Whole("  max_grad_norm", elements, clips, in_step=True))
    ways.append(Whole("  shard_gradients", elements, clips, in_step=clips, shards=True))
    for _ in range(rounds):
        for way in ways:
            way.seconds.append(timed(way.step))
    first = statistics.median(ways[1].seconds)
    what = "exchange, clipping and step" if clips else "exchange and step"
    lines = [
        f"{what} of float32, {elements / 1e6:.0f} million parameters, {es.world_size()} ranks",
        f"  {'':28} {'ms':>9} {'of shared, fused':>17}",
    ]
    for way in ways:
        seconds = statistics.median(way.seconds)
        lines.append(f"  {way.name:28} {seconds * 1e3:9.2f} {first / seconds:16.2f}x")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=20, help="parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on each rank")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="writes the figures there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    es.barrier()
    elements = int(options.millions * 1e6)
    speed = run_over(elements, options.rounds)
    lines = ["A step of AdamW with states that ranks share"]
    lines += [f"  {name:9} {value}" for name, value in heading().items()]
    lines += ["", f"a += b on all ranks: {speed / 1e9:.1f} GB/s", ""]
    for dtype in (torch.float32, torch.bfloat16):
        lines += compare(dtype, elements, options.rounds, speed)
    for clips in (False, True):
        lines += compare_whole(elements, options.rounds, clips)
    if es.is_main():
        print("\n".join(lines))
        if options.output is not None:
            options.output.write_text("\n".join(lines))


main()
