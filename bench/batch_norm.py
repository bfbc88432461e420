"""What synchronised BatchNorm costs: the same CNN on two equal ranks with batch_norm="sync" and "local", in turns of five steps.

evenstep run -n 2 bench/batch_norm.py [-o FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import torch
from heading import heading
from torch import nn
from torch.nn import functional

import evenstep as es

TURNS, STEPS, BATCH = 16, 5, 32


def cnn(width: int, blocks: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(blocks):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    output = parser.parse_args().output
    torch.manual_seed(es.rank())
    lines = ["Synchronised BatchNorm against each rank's own, two equal ranks"]
    lines += [f"  {name:9} {value}" for name, value in heading().items()] + [""]
    for width, blocks, size in ((32, 8, 32), (16, 20, 16)):
        x, y = torch.randn(BATCH // es.world_size(), 3, size, size), torch.randint(10, (BATCH // es.world_size(),))
        trained = {}
        for kind in ("local", "sync"):
            model = cnn(width, blocks)
            trained[kind] = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batch_norm=kind)
        seconds: dict[str, list[float]] = {kind: [] for kind in trained}
        for _ in range(TURNS):
            for kind, (model, optimizer) in trained.items():
                for _ in range(STEPS):
                    es.barrier()
                    begun = time.perf_counter()
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    seconds[kind].append(time.perf_counter() - begun)
        local, sync = (1e3 * statistics.median(seconds[kind][STEPS:]) for kind in ("local", "sync"))
        best = {kind: 1e3 * min(found) for kind, found in seconds.items()}
        lines.append(
            f"  {blocks + 1} layers of {width} channels, {size} x {size}: local {local:.1f} ms, sync {sync:.1f} ms a step "
            f"({100 * (sync / local - 1):+.1f} %, {1e3 * (sync - local) / (blocks + 1):.0f} µs a layer; the best steps: "
            f"{best['local']:.1f} and {best['sync']:.1f} ms)"
        )
    es.print("\n".join(lines))
    if output is not None and es.is_main():
        output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
