"""Parameters after 200 steps of a CNN with BatchNorm, a GPT and a BERT, by es.verify: on three ranks with other uneven shares
at every step against one device. To reach: 1e-12 in fp64, 1e-5 in fp32 (relative norm over all parameters). Beside it: one
device against itself with the samples of each batch the other way round, which is what rounding alone makes of the model, and
in fp32 one device against itself in fp64, which is how far rounding alone takes it from what it computes.

--rates: the CNN in fp32 at other learning rates too, with ReLU and with a smooth activation, and when the first ReLU lets
through on one side what it stops on the other (one device and itself, the other way round).

    python bench/exact_models.py [--steps 200] [--ranks 3] [--rates 0.001,0.02] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.activations = nn.ModuleList(activation() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, outer = self.activations
        return outer(x + self.norms[1](self.second(inner(self.norms[0](self.first(x))))))


def cnn(smooth: bool = False) -> nn.Module:
    activation, pool = (nn.GELU, nn.AvgPool2d(2)) if smooth else (nn.ReLU, nn.MaxPool2d(2))
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation(), pool]
    body = [Residual(16, activation), Residual(16, activation)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


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


@dataclass
class Apart:
    """How far two trainings on one device are from one another at the end, and when a ReLU first let through in one of them
    what it stopped in the other."""

    difference: float
    switched_at: int = 0  # step; 0: never
    before: float = 0.0  # the difference just before it


def values_of(model: nn.Module) -> torch.Tensor:
    named = ((name, p) for name, p in model.named_parameters() if "in_proj_bias" not in name)
    return torch.cat([p.detach().double().reshape(-1) for _, p in named])


def run_alone(
    model: nn.Module,
    make: Make,
    batch: tuple[torch.Tensor, ...],
    loss: Loss,
    steps: int,
    dtype: torch.dtype,
    turned: bool,
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """After each step the parameters, and what each ReLU let through, in the order of the samples as they are given."""
    twin = copy.deepcopy(model).to(dtype)
    optimizer = make(twin)
    given = tuple(one.to(dtype) if one.is_floating_point() else one for one in batch)
    given = tuple(one.flip(0) for one in given) if turned else given
    through: list[torch.Tensor] = []
    for module in twin.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda _module, _given, out: through.append(out.detach() > 0))
    for _ in range(steps):
        through.clear()
        optimizer.zero_grad()
        loss(twin, given).backward()
        optimizer.step()
        yield values_of(twin), [one.flip(0) if turned else one for one in through]


def alone(
    model: nn.Module,
    make: Make,
    batch: tuple[torch.Tensor, ...],
    loss: Loss,
    steps: int,
    dtype: torch.dtype,
    other: torch.dtype,
) -> Apart:
    """One device against itself: in another type, or with the samples the other way round."""
    found = Apart(0.0)
    one = run_alone(model, make, batch, loss, steps, dtype, False)
    two = run_alone(model, make, batch, loss, steps, other, dtype is other)
    for step, ((mine, through), (theirs, let)) in enumerate(zip(one, two), 1):
        if found.switched_at == 0 and not all(map(torch.equal, through, let)):
            found.switched_at, found.before = step, found.difference
        found.difference = float((theirs - mine).norm() / mine.norm())
    return found


def sgd(rate: float) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def all_models(steps: int, images: tuple[torch.Tensor, ...]) -> list[dict[str, Any]]:
    trained = (
        ("CNN with BatchNorm", cnn(), sgd(0.02), images, classify),
        ("CNN, GELU, mean pool", cnn(smooth=True), sgd(0.02), images, classify),
        ("GPT", Transformer(causal=True), adamw, texts(), predict),
        ("BERT", Transformer(causal=False), adamw, texts(), fill_in),
    )
    figures: list[dict[str, Any]] = []
    for name, model, optimizer, batch, loss in trained:
        for dtype in (torch.float64, torch.float32):
            found = es.verify(model, optimizer(model), batch, loss, steps=steps, dtype=dtype)
            apart = ", ".join(f"{one} {apart:.1e}" for one, apart in found.without_gradient.items()) or "none"
            if not es.is_main():
                continue
            itself = alone(model, optimizer, batch, loss, steps, dtype, dtype).difference
            figures.append(
                {
                    "model": name,
                    "dtype": found.dtype,
                    "steps": steps,
                    "difference": found.difference,
                    "bound": found.bound,
                    "itself": itself,
                    "without_gradient": found.without_gradient,
                }
            )
            words = f"one device and itself {itself:.1e}"
            if dtype is torch.float32:
                exact = alone(model, optimizer, batch, loss, steps, dtype, torch.float64).difference
                words += f", and itself in fp64 {exact:.1e}"
            es.print(
                f"  {name:<21}{found.dtype}   {found.difference:.1e}   to reach {found.bound:.0e}   "
                f"{'reached' if found.difference <= found.bound else 'MISSED'}   {words}   running statistics {found.buffers_difference:.1e}   "
                f"without gradient: {apart}"
            )
    return figures


def all_rates(steps: int, images: tuple[torch.Tensor, ...], rates: list[float]) -> None:
    for smooth in (False, True):
        torch.manual_seed(1)
        model = cnn(smooth)
        for rate in rates:
            found = es.verify(model, sgd(rate)(model), images, classify, steps=steps, dtype=torch.float32)
            if not es.is_main():
                continue
            given = (model, sgd(rate), images, classify, steps, torch.float32)
            itself, exact = alone(*given, torch.float32), alone(*given, torch.float64)
            switched = (
                f"a ReLU decides otherwise from step {itself.switched_at} on, {itself.before:.1e} before it"
                if itself.switched_at
                else "no ReLU decides otherwise"
                if not smooth
                else "no ReLU"
            )
            es.print(
                f"  {'GELU, mean pooling' if smooth else 'ReLU, max pooling':<20} rate {rate:<6g} {found.difference:.1e}   to reach {found.bound:.0e}   "
                f"{'reached' if found.difference <= found.bound else 'MISSED'}   one device and itself {itself.difference:.1e}, and itself in fp64 "
                f"{exact.difference:.1e}   {switched}"
            )


def in_rank(steps: int, rates: str, file: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))
    if rates:
        all_rates(steps, images, [float(one) for one in rates.split(",")])
        return
    figures = all_models(steps, images)
    if file and es.is_main():
        pathlib.Path(file).write_text(json.dumps(figures) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rates", default="")
    parser.add_argument("--json", default="", metavar="FILE")
    options = parser.parse_args()
    if es.world_size() > 1:
        in_rank(options.steps, options.rates, options.json)
        return
    print_heading(
        f"Parameters after {options.steps} steps, {options.ranks} ranks with changing uneven shares against one device"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, "run", "-q", "-n", str(options.ranks), "--no-monitor", "--runs-dir", folder]
        script = [str(pathlib.Path(__file__)), "--steps", str(options.steps), "--rates", options.rates]
        script += ["--json", options.json]
        done = subprocess.run(
            [*command, "--python", sys.executable, *script], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    print("\n".join(line.partition("] ")[2] for line in done.stdout.splitlines() if " to reach " in line))


if __name__ == "__main__":
    main()
