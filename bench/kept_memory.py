"""What a step on a CPU costs, and what it holds, where freed memory is kept for the next one and where it is not.

    python bench/kept_memory.py [--models cnn,gpt,bert,resnet] [--rounds 3] [--steps 16] [--varied 150] [-o FILE]

Plain torch on one thread, without ranks: each line is of processes of its own, forked from one that has torch, in turns
that change their order from round to round. "own": glibc by itself; "kept": as ranks on CPUs run it (docs/balancing.md).
CPU time and page faults are of a step, medians over the rounds; `system` is the kernel's part of that time, which
other work on the host disturbs least. `peak` and `held` are the process's, in MB, since the warm-up and after the last step;
`after`: when its free memory was given back. Fixed: all steps of one size; varied: of 1/8 to all of it, at random, as
where the balancer moves samples.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from heading import heading
from torch import nn

from evenstep._core import Memory
from evenstep.kept_memory import kept_memory
from evenstep.memory import HostMemory, MemoryWatch
from evenstep.models import BERT, GPT2, ResNet, SimpleCNN

WARM = 3
SMALL = {"words": 4096, "length": 128, "layers": 2, "width": 256, "heads": 4}
# The model, the most samples of a step, and how many of --steps it makes
MODELS: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "cnn": (SimpleCNN, 64, 1.0),
    "gpt": (lambda: GPT2(**SMALL), 16, 0.5),
    "bert": (lambda: BERT(**SMALL), 16, 0.5),
    "resnet": (lambda: ResNet(10, small_images=True), 8, 0.25),
}
Figures = dict[str, float]


def of_process(name: str, keep: bool, steps: int, varied: bool) -> Figures:
    memory = Memory()
    if keep and not kept_memory.begin({}, half_stays_free=True):
        raise SystemExit("this process's allocator is none of glibc's")
    watch = MemoryWatch(HostMemory()) if keep else None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(1)
    made, most, _ = MODELS[name]
    model, images = made(), name in ("cnn", "resnet")
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if images
        else torch.optim.AdamW(model.parameters(), lr=1e-4)
    )

    def step(number: int) -> int:
        """The peak of what the process held."""
        size = random.randint(most // 8, most) if varied else most
        x = torch.randn(size, 3, 32, 32) if images else torch.randint(SMALL["words"], (size, SMALL["length"]))
        y = torch.randint(10, (size,)) if images else x.flatten()
        optimizer.zero_grad()
        found = model(x)
        nn.functional.cross_entropy(found if images else found.flatten(0, 1), y).backward()
        peak = memory.read()[1]
        if watch is not None:
            watch.stepped(number, size, [size])
        optimizer.step()
        return peak

    for number in range(WARM):
        step(number + 1)
    memory.reset_peak()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    peak = max(step(WARM + number + 1) for number in range(steps))
    spent, now = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF)
    held = memory.read()[0]
    if keep and not kept_memory.on:
        raise SystemExit(f"nothing was kept any more: {kept_memory.ended_for}")
    memory.give_back()
    return {
        "cpu": 1e3 * spent / steps,
        "system": 1e3 * (now.ru_stime - before.ru_stime) / steps,
        "faults": (now.ru_minflt - before.ru_minflt) / steps,
        "peak": peak / 1e6,
        "held": held / 1e6,
        "after": memory.read()[0] / 1e6,
    }


def forked(name: str, keep: bool, steps: int, varied: bool) -> Figures:
    ours, its = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(its, json.dumps(of_process(name, keep, steps, varied)).encode())
        finally:
            os._exit(0)
    os.close(its)
    with open(ours) as told:
        found: Figures = json.load(told)
    os.waitpid(process, 0)
    return found


def measured(name: str, steps: int, rounds: int, varied: bool) -> list[str]:
    found: dict[bool, list[Figures]] = {False: [], True: []}
    for number in range(rounds):
        for keep in (False, True) if number % 2 == 0 else (True, False):
            found[keep].append(forked(name, keep, steps, varied))
    lines = []
    for keep, figures in found.items():
        one: dict[str, Any] = {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        lines.append(
            f"{name:7} {'varied' if varied else 'fixed':7} {'kept' if keep else 'own':5} {one['cpu']:8.2f} {one['system']:8.2f} "
            f"{one['faults']:9.0f} {one['peak']:7.0f} {one['held']:7.0f} {one['after']:7.0f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--varied", type=int, default=150, help="steps of varied sizes; one round")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    options = parser.parse_args()
    lines = ["What a step on a CPU costs and holds where freed memory is kept"]
    lines += [f"  {name:9} {value}" for name, value in heading().items()]
    lines += ["", "                      cpu ms system ms    faults peak MB    held   after"]
    print("\n".join(lines), flush=True)
    for varied, rounds, steps in (False, options.rounds, options.steps), (True, 1, options.varied):
        for name in options.models.split(","):
            more = measured(name, max(2, int(steps * MODELS[name][2])), rounds, varied)
            print("\n".join(more), flush=True)
            lines += more
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
