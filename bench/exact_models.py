"""Parameters after 200 steps of a CNN with BatchNorm, a GPT and a BERT, by es.verify: on three ranks with other uneven shares
at every step against one device. To reach: 1e-12 in fp64, 1e-5 in fp32 (relative norm over all parameters). Beside it: one
device against itself with the samples of each batch the other way round, which is what rounding alone makes of the model.

    python bench/exact_models.py [--steps 200] [--ranks 3]
"""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from heading import print_heading
from torch import nn
from torch.nn import functional

import evenstep as es

PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"
Make = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
BATCH, LENGTH, WORDS, WIDTH = 24, 16, 64, 32


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.norms[1](self.second(functional.relu(self.norms[0](self.first(x))))))


def cnn() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Transformer(nn.Module):
    """A GPT where `causal`, else a BERT."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, "gelu", batch_first=True, norm_first=causal)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64) if causal else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        mask = None if self.mask is None else self.mask.to(x.dtype)
        return self.head(self.body(x, mask=mask, is_causal=mask is not None))


def texts() -> tuple[torch.Tensor, ...]:
    tokens = (torch.arange(LENGTH + 1) * torch.randint(1, 9, (BATCH, 1)) + torch.randint(WORDS, (BATCH, 1))) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


def classify(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def fill_in(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A mean over the words left out, of which each text has its own number."""
    tokens = batch[0]
    gone = (tokens * 7 + torch.arange(LENGTH)) % 5 == 0
    latest = es.session().latest
    if latest is not None:
        es.set_weight(float(gone.sum()) if latest.samples else 0.0)
    losses = functional.cross_entropy(
        model(tokens.masked_fill(gone, 0)).flatten(0, 1), tokens.flatten(), reduction="none"
    )
    return (losses * gone.flatten()).sum() / gone.sum().clamp(min=1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def turned_round(
    model: nn.Module, make: Make, batch: tuple[torch.Tensor, ...], loss: Loss, steps: int, dtype: torch.dtype
) -> float:
    """One device against itself."""
    ends = []
    for turned in (False, True):
        twin = copy.deepcopy(model).to(dtype)
        optimizer = make(twin)
        given = tuple(one.to(dtype) if one.is_floating_point() else one for one in batch)
        given = tuple(one.flip(0) for one in given) if turned else given
        for _ in range(steps):
            optimizer.zero_grad()
            loss(twin, given).backward()
            optimizer.step()
        ends.append(
            torch.cat([p.detach().double().reshape(-1) for n, p in twin.named_parameters() if "in_proj_bias" not in n])
        )
    return float((ends[1] - ends[0]).norm() / ends[0].norm())


def in_rank(steps: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))
    trained = (
        (
            "CNN with BatchNorm",
            cnn(),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
            images,
            classify,
        ),
        ("GPT", Transformer(causal=True), adamw, texts(), predict),
        ("BERT", Transformer(causal=False), adamw, texts(), fill_in),
    )
    for name, model, optimizer, batch, loss in trained:
        for dtype in (torch.float64, torch.float32):
            found = es.verify(model, optimizer(model), batch, loss, steps=steps, dtype=dtype)
            apart = ", ".join(f"{one} {apart:.1e}" for one, apart in found.without_gradient.items()) or "none"
            itself = turned_round(model, optimizer, batch, loss, steps, dtype) if es.is_main() else 0.0
            es.print(
                f"  {name:<20} {found.dtype}   {found.difference:.1e}   to reach {found.bound:.0e}   "
                f"{'reached' if found.difference <= found.bound else 'MISSED'}   one device and itself {itself:.1e}   running statistics {found.buffers_difference:.1e}   "
                f"without gradient: {apart}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    if es.world_size() > 1:
        in_rank(options.steps)
        return
    print_heading(
        f"Parameters after {options.steps} steps, {options.ranks} ranks with changing uneven shares against one device"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, "run", "-q", "-n", str(options.ranks), "--no-monitor", "--runs-dir", folder]
        script = [str(pathlib.Path(__file__)), "--steps", str(options.steps)]
        done = subprocess.run(
            [*command, "--python", sys.executable, *script], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    print("\n".join(line.partition("] ")[2] for line in done.stdout.splitlines() if " to reach " in line))


if __name__ == "__main__":
    main()
