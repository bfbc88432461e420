"""Samplers that keep something between epochs: resumed, they draw what they would have drawn, or the job says why not."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import evenstep
from evenstep import sampler_state

SCRIPT = """
import random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

kind, stop = sys.argv[1], int(sys.argv[2])
COUNT = 20

class Own:
    def __init__(self):
        self.calls = 0
        if kind == "random":
            self.source = random.Random(9)
    def __len__(self):
        return COUNT
    def order(self):
        self.calls += 1
        if kind == "random":
            return self.source.sample(range(COUNT), COUNT)
        return random.Random(self.calls).sample(range(COUNT), COUNT)
    def __iter__(self):
        return iter(self.order())

class Batches:
    def __init__(self):
        self.rng = random.Random(9)
    def __len__(self):
        return 4
    def __iter__(self):
        order = self.rng.sample(range(COUNT), COUNT)
        return iter([order[i : i + 5] for i in range(0, COUNT, 5)])

torch.manual_seed(3)
data = TensorDataset(torch.arange(float(COUNT)).reshape(COUNT, 1))
if kind == "batches":
    loader = DataLoader(data, batch_sampler=Batches())
else:
    loader = DataLoader(data, batch_size=5, sampler=Own())
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
for epoch in es.epochs(4):
    for (x,) in loader:
        if es.step() == stop:
            raise SystemExit(0)
        if es.is_main():
            print("SEEN", es.step(), es.session().latest.checksum, flush=True)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def seen(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith("SEEN")]


def stopped_and_resumed(run_ranks: Callable[..., list[Any]], folder: pathlib.Path, kind: str, step: int) -> list[Any]:
    environment = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": str(step)}
    run_ranks(SCRIPT, args=(kind, str(step + 1)), env=environment)
    resume = {"EVENSTEP_RESUME": str(folder / f"step-{step:08d}")}
    return run_ranks(SCRIPT, args=(kind, "-1"), env=resume, check=False)


@pytest.mark.parametrize(("kind", "step"), [("random", 6), ("batches", 8)])
def test_draws_what_it_would_have_drawn(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, kind: str, step: int
) -> None:
    whole = seen(run_ranks(SCRIPT, args=(kind, "-1")))
    assert len(whole) == 16
    results = stopped_and_resumed(run_ranks, tmp_path / "checkpoints", kind, step)
    assert [result.returncode for result in results] == [0, 0], results
    assert seen(results) == whole[step:]


def test_another_order_is_refused(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    results = stopped_and_resumed(run_ranks, tmp_path / "checkpoints", "counts", 6)
    assert all(result.returncode != 0 for result in results)
    words = "the sampler Own does not give the samples of before the checkpoint: the first 2 batches of epoch 1 differ"
    assert all(words in result.stderr for result in results), results


class Keeps:
    def __init__(self, source: Any) -> None:
        self.source = source
        self.generator = torch.Generator()  # seeded for each epoch: not kept


class Says:
    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(9), lambda source: source.random()),
        (lambda: numpy.random.default_rng(9), lambda source: source.integers(1 << 60)),
        (lambda: numpy.random.Generator(numpy.random.MT19937(9)), lambda source: source.integers(1 << 60)),
        (lambda: numpy.random.RandomState(9), lambda source: source.normal()),
        (lambda: torch.Generator().manual_seed(9), lambda source: torch.randn(1, generator=source).item()),
    ],
)
def test_generators_go_on(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    first, second = Keeps(make()), Keeps(make())
    draw(first.source)
    kept = sampler_state.save([first])
    sampler_state.load([second], kept)
    assert [draw(second.source) for _ in range(5)] == [draw(first.source) for _ in range(5)]


def test_what_a_sampler_says_is_kept() -> None:
    first, second = Says(), Says()
    first.state = {"calls": [1, 2]}
    sampler_state.load([second], sampler_state.save([first]))
    assert second.state == {"calls": [1, 2]}
    with pytest.raises(evenstep.EvenstepError, match="sampler Says cannot be kept in a checkpoint"):
        sampler_state.save([Says({1, 2})])


def test_torchs_own_keep_nothing() -> None:
    sampler = torch.utils.data.RandomSampler(range(4), generator=torch.Generator())
    assert sampler_state.save([sampler, torch.utils.data.BatchSampler(sampler, 2, False)]) == ""


def test_another_sampler_is_refused() -> None:
    kept = sampler_state.save([Keeps(random.Random(9))])
    for other in ([Says()], [Keeps(None)], [Keeps(random.Random(9)), Says()]):
        with pytest.raises(evenstep.EvenstepError, match="state of another sampler"):
            sampler_state.load(other, kept)
