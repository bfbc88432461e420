"""Parameters after 200 steps of a CNN with BatchNorm, a GPT and a BERT: trained by es.prepare on three ranks, from a shuffling
DataLoader over several epochs whose last batches are smaller, by a policy that gives other shares in every step (none, too),
against torch alone on one device over the same batches. To reach: 1e-12 in fp64, 1e-5 in fp32 (relative norm over all
parameters; those whose gradient is zero apart). Beside it: one device against itself with the samples of each batch the other way
round, which is what rounding alone makes of the model, and in fp32 one device against itself in fp64, which is how far rounding
alone takes it from what it computes.

--rates: the CNN in fp32 on one batch by heart, by es.verify, at other learning rates too, with ReLU and with a smooth activation,
and when the first ReLU lets through on one side what it stops on the other (one device and itself, the other way round).

--seeds: the CNN with ReLU in fp32 alone, begun from so many seeds, each with batches of its own: whether ours is further from one
device than one device is from itself, or that is chance.

    python bench/exact_models.py [--steps 200] [--ranks 3] [--rates 0.001,0.02 | --seeds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from heading import print_heading
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

import evenstep as es
from evenstep.backward import observed_backward
from evenstep.data import SyntheticImages
from evenstep.environment import Environment
from evenstep.group import gather_objects
from evenstep.order import GlobalOrder
from evenstep.session import Session, in_place_of_session
from evenstep.verify import Verification, compared
from evenstep.verify_runs import Outcome, fresh, gradients_seen, outcome_of

PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"
Make = Callable[[nn.Module], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, ...]
Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, "float | None"]]  # and what it is a mean over; None: samples
SAMPLES, BATCH, LENGTH, WORDS, WIDTH = 250, 24, 16, 64, 32


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


def texts() -> TensorDataset:
    tokens = (torch.arange(LENGTH + 1) * torch.randint(1, 9, (SAMPLES, 1)) + torch.randint(WORDS, (SAMPLES, 1))) % WORDS
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def classify(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    return functional.cross_entropy(model(batch[0]), batch[1]), None


def predict(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), None


def fill_in(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """A mean over the words left out, of which each text has its own number."""
    tokens = batch[0]
    gone = (tokens * 7 + torch.arange(LENGTH)) % 5 == 0
    losses = functional.cross_entropy(
        model(tokens.masked_fill(gone, 0)).flatten(0, 1), tokens.flatten(), reduction="none"
    )
    return (losses * gone.flatten()).sum() / gone.sum().clamp(min=1), float(gone.sum())


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


def cast(batch: Sequence[torch.Tensor], dtype: torch.dtype) -> Batch:
    return tuple(one.to(dtype) if one.is_floating_point() else one for one in batch)


@dataclass
class Alone:
    """A training on one device, by torch alone."""

    model: nn.Module
    make: Make
    loss: Loss
    batches: Sequence[Batch]  # of each step

    def outcome(self, dtype: torch.dtype) -> Outcome:
        twin = copy.deepcopy(self.model).to(dtype)
        optimizer = self.make(twin)
        with gradients_seen(optimizer) as gradients:
            for _ in self._steps(twin, optimizer, dtype, turned=False):
                pass
        return outcome_of(twin, gradients, [])

    def _steps(
        self, twin: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, turned: bool
    ) -> Iterator[None]:
        for batch in self.batches:
            given = cast(batch, dtype)
            with in_place_of_session(Session(Environment())), observed_backward(None):
                optimizer.zero_grad()
                self.loss(twin, tuple(one.flip(0) for one in given) if turned else given)[0].backward()
                optimizer.step()
            yield

    def _seen(self, dtype: torch.dtype, turned: bool) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """After each step the parameters, and what each ReLU let through, in the order of the samples as they are given."""
        twin = copy.deepcopy(self.model).to(dtype)
        through: list[torch.Tensor] = []
        for module in twin.modules():
            if isinstance(module, nn.ReLU):
                module.register_forward_hook(lambda _module, _given, out: through.append(out.detach() > 0))
        for _ in self._steps(twin, self.make(twin), dtype, turned):
            yield values_of(twin), [one.flip(0) if turned else one for one in through]
            through.clear()

    def against(self, dtype: torch.dtype, other: torch.dtype) -> Apart:
        """Against itself: in another type, or with the samples the other way round."""
        found = Apart(0.0)
        runs = zip(self._seen(dtype, False), self._seen(other, dtype is other))
        for step, ((mine, through), (theirs, let)) in enumerate(runs, 1):
            if found.switched_at == 0 and not all(map(torch.equal, through, let)):
                found.switched_at, found.before = step, found.difference
            found.difference = float((theirs - mine).norm() / mine.norm())
        return found


def moving(view: es.PolicyView) -> list[int]:
    """Other shares in every step, by what every rank knows alike."""
    draw = random.Random(10 * view.steps + view.ranks)
    cuts = sorted(draw.randint(0, view.batch) for _ in range(view.ranks - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, view.batch])]


@dataclass
class Trained:
    """On all ranks."""

    outcome: Outcome
    shares: list[list[int]]  # of each step
    batches: list[Batch]  # the whole ones
    same: bool  # parameters on all ranks, to the bit


def train(model: nn.Module, make: Make, data: TensorDataset, loss: Loss, steps: int, dtype: torch.dtype) -> Trained:
    twin = copy.deepcopy(model).to(dtype)
    shares: list[list[int]] = []
    at: list[tuple[int, int]] = []  # epoch, batch
    with in_place_of_session(fresh(es.session())):
        twin, optimizer, loader = es.prepare(
            twin, make(twin), DataLoader(data, batch_size=BATCH, shuffle=True), policy=moving
        )
        while len(shares) < steps:
            for batch in loader:
                plan = es.session().latest
                assert plan is not None
                optimizer.zero_grad()
                value, amount = loss(twin, cast(batch, dtype))
                if amount is not None:
                    es.set_weight(amount if plan.samples else 0.0)
                value.backward()
                optimizer.step()
                shares.append(list(plan.shares))
                at.append((plan.epoch, plan.batch))
                if len(shares) == steps:
                    break
        orders = {
            epoch: list(GlobalOrder(loader.loader, 1).batches(loader.seed, epoch)) for epoch in {e for e, _ in at}
        }
    whole = [tuple(default_collate([data[index] for index in orders[epoch][number]])) for epoch, number in at]
    found = outcome_of(twin, {}, [])
    bits = hashlib.sha256(b"".join(one.numpy().tobytes() for one in found.parameters.values())).hexdigest()
    return Trained(found, shares, whole, len(set(gather_objects(es.session().group, bits))) == 1)


def sgd(rate: float) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def all_models(steps: int) -> list[dict[str, Any]]:
    images = TensorDataset(*default_collate(list(SyntheticImages(SAMPLES, side=16))))
    trained = (
        ("CNN with BatchNorm", cnn(), sgd(0.02), images, classify),
        ("CNN, GELU, mean pool", cnn(smooth=True), sgd(0.02), images, classify),
        ("GPT", Transformer(causal=True), adamw, texts(), predict),
        ("BERT", Transformer(causal=False), adamw, texts(), fill_in),
    )
    figures: list[dict[str, Any]] = []
    for name, model, optimizer, data, loss in trained:
        for dtype in (torch.float64, torch.float32):
            ours = train(model, optimizer, data, loss, steps, dtype)
            if es.is_main():
                figures.append(judge(name, ours, Alone(model, optimizer, loss, ours.batches), dtype))
            es.barrier()  # who waits in the next training's steps does so for nothing
    return figures


def judge(name: str, ours: Trained, alone: Alone, dtype: torch.dtype) -> dict[str, Any]:
    found: Verification = compared(ours.outcome, alone.outcome(dtype), {dtype}, ours.shares, ours.same)
    apart = ", ".join(f"{one} {apart:.1e}" for one, apart in found.without_gradient.items()) or "none"
    itself = alone.against(dtype, dtype).difference
    words = f"one device and itself {itself:.1e}"
    if dtype is torch.float32:
        words += f", and itself in fp64 {alone.against(dtype, torch.float64).difference:.1e}"
    reached = found.difference <= found.bound and found.same_on_all_ranks
    splits, idle = len(set(map(tuple, ours.shares))), sum(0 in one for one in ours.shares)
    es.print(
        f"  {name:<21}{found.dtype}   {found.difference:.1e}   to reach {found.bound:.0e}   "
        f"{'reached' if reached else 'MISSED'}   {words}   running statistics {found.buffers_difference:.1e}   "
        f"{splits} splits, {idle} of them without samples for a rank   without gradient: {apart}"
    )
    return {
        "model": name,
        "dtype": found.dtype,
        "steps": found.steps,
        "difference": found.difference if found.same_on_all_ranks else math.inf,
        "bound": found.bound,
        "itself": itself,
        "without_gradient": found.without_gradient,
    }


def all_rates(steps: int, rates: list[float]) -> None:
    images = torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))
    for smooth in (False, True):
        torch.manual_seed(1)
        model = cnn(smooth)
        for rate in rates:
            found = es.verify(
                model,
                sgd(rate)(model),
                images,
                lambda model, batch: classify(model, batch)[0],
                steps=steps,
                dtype=torch.float32,
            )
            if not es.is_main():
                continue
            one = Alone(model, sgd(rate), classify, [images] * steps)
            itself, exact = one.against(torch.float32, torch.float32), one.against(torch.float32, torch.float64)
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


def all_seeds(steps: int, seeds: int) -> None:
    """By seed, and together."""
    ours: list[float] = []
    itself: list[float] = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = cnn()
        images = TensorDataset(*default_collate(list(SyntheticImages(SAMPLES, side=16, seed=seed))))
        trained = train(model, sgd(0.02), images, classify, steps, torch.float32)
        if es.is_main():
            alone = Alone(model, sgd(0.02), classify, trained.batches)
            found = compared(
                trained.outcome, alone.outcome(torch.float32), {torch.float32}, trained.shares, trained.same
            )
            other = alone.against(torch.float32, torch.float32)
            ours.append(found.difference)
            itself.append(other.difference)
            es.print(
                f"  seed {seed:<3} {found.difference:.1e}   one device and itself {other.difference:.1e}, "
                f"a ReLU decides otherwise from step {other.switched_at or 'none'} on"
            )
        es.barrier()
    if es.is_main():
        further = sum(mine > own for mine, own in zip(ours, itself))
        es.print(
            f"  ours: median {statistics.median(ours):.1e} ({min(ours):.1e} to {max(ours):.1e}); one device and itself: median "
            f"{statistics.median(itself):.1e} ({min(itself):.1e} to {max(itself):.1e}); ours is the further one in {further} of {seeds}"
        )


def in_rank(steps: int, rates: str, seeds: int, file: str) -> None:
    if seeds:
        all_seeds(steps, seeds)
        return
    torch.manual_seed(0)
    if rates:
        all_rates(steps, [float(one) for one in rates.split(",")])
        return
    figures = all_models(steps)
    if file and es.is_main():
        pathlib.Path(file).write_text(json.dumps(figures) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rates", default="")
    parser.add_argument("--seeds", type=int, default=0, metavar="N")
    parser.add_argument("--json", default="", metavar="FILE")
    options = parser.parse_args()
    if es.world_size() > 1:
        in_rank(options.steps, options.rates, options.seeds, options.json)
        return
    print_heading(
        f"Parameters after {options.steps} steps, {options.ranks} ranks with other shares at every step against one device"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, "run", "-q", "-n", str(options.ranks), "--no-monitor", "--runs-dir", folder]
        script = [str(pathlib.Path(__file__)), "--steps", str(options.steps), "--rates", options.rates]
        script += ["--seeds", str(options.seeds), "--json", options.json]
        done = subprocess.run(
            [*command, "--python", sys.executable, *script], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    print("\n".join(line.partition("] ")[2] for line in done.stdout.splitlines() if "one device and itself" in line))


if __name__ == "__main__":
    main()
