"""What exact="bitwise" costs, and whether it holds: step times of es.Trainer with and without it, in turns, on equal ranks with
equal shares; then random histories (ranks, splits, deaths, resumes), whose parameters must not differ in one bit.

    python bench/bitwise.py [--ranks 2] [--turns 3] [--histories 20] [--part cost|histories] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from heading import heading
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"
CASES = pathlib.Path(__file__).resolve().parent.parent / "tests/python/bitwise_cases.py"
STEPS, WARM, HISTORY = 24, 4, 7
WORDS, LENGTH, WIDTH = 512, 64, 192


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(tokens) + self.places.weight, mask=self.mask, is_causal=True))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if inner != outer and inner > 3 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def task(name: str) -> tuple[nn.Module, TensorDataset, Any]:
    if name == "gpt":
        tokens = torch.randint(WORDS, (512, LENGTH + 1))
        return GPT(), TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), predict
    return cnn(), TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,))), classify


def predict(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(name: str, exact: str | None, block: int) -> None:
    """In every rank: prints the step times as JSON on rank 0."""
    torch.manual_seed(3)
    model, data, loss = task(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends = [time.perf_counter()]
    config = es.Config(exact=exact, block=block if exact else None, threads=1, policy="equal")
    trainer = es.Trainer(model, optimizer, loss, on_step=lambda _: ends.append(time.perf_counter()), config=config)
    trainer.fit(DataLoader(data, batch_size=64), epochs=STEPS, steps=STEPS)
    es.print("TIMES " + json.dumps([b - a for a, b in zip(ends, ends[1:])][WARM:]))


def run(ranks: int, script: pathlib.Path, *arguments: str, check: bool = True, **variables: str) -> str:
    command = [PROGRAM, "run", "-n", str(ranks), "--max-restarts", "0", str(script), *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900)
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def found(output: str, mark: str) -> Any:
    return json.loads(next(line for line in output.splitlines() if mark in line).partition(mark)[2])


def cost(ranks: int, turns: int) -> list[str]:
    lines = [f"A step of 64 samples on {ranks} equal ranks of one thread, {turns} turns of {STEPS - WARM} steps"]
    for name in ("gpt", "cnn"):
        kinds = {"plain": ("", 0), "16 blocks": ("bitwise", 4), "8 blocks": ("bitwise", 8)}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(turns):
            for kind, (exact, block) in kinds.items():
                seconds[kind] += found(run(ranks, pathlib.Path(__file__), "--train", name, exact, str(block)), "TIMES ")
        medians = {kind: 1e3 * statistics.median(times) for kind, times in seconds.items()}
        words = [f"{kind} {ms:.1f} ms ({100 * (ms / medians['plain'] - 1):+.1f} %)" for kind, ms in medians.items()]
        lines.append(f"  {name}: {', '.join(words)}; to reach: +30 %")
    return lines


def history(case: str, seed: int, folder: pathlib.Path) -> Any:
    """Jobs of 1 to 4 ranks, each but the last ended by the death of a rank; how the last one ends."""
    draw = random.Random(seed)
    variables = {"EVENSTEP_CHECKPOINT_EVERY": "1", "EVENSTEP_CHECKPOINT_DIR": str(folder)}
    for number, stop in enumerate(sorted(draw.sample(range(2, HISTORY), draw.choice([1, 2])))):
        ranks = draw.randint(1, 4)
        victim = str(draw.randrange(ranks))
        run(ranks, CASES, case, str(seed + number), victim, str(stop), check=False, **variables)
        variables["EVENSTEP_RESUME"] = str(max(folder.glob("step-*"), default=""))
    return found(run(draw.randint(1, 4), CASES, case, str(seed + 7), **variables), "END ")


def histories(count: int) -> list[str]:
    lines = [f"{count} random histories of {HISTORY} steps against one rank without failures"]
    for case in ("gpt", "cnn", "gpt_bf16"):
        whole = found(run(1, CASES, case, "0"), "END ")
        other = 0
        for seed in range(count):
            with tempfile.TemporaryDirectory() as folder:
                other += history(case, seed, pathlib.Path(folder)) != whole
        lines.append(f"  {case}: {count - other} of {count} have the same bits")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--part", choices=("cost", "histories"))
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train[0], options.train[1] or None, int(options.train[2]))
        return
    lines = ["exact='bitwise'"] + [f"  {name:9} {value}" for name, value in heading().items()] + [""]
    if options.part != "histories":
        lines += cost(options.ranks, options.turns)
    if options.part != "cost":
        lines += histories(options.histories)
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
