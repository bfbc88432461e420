"""Blocks that take turns in one process: each has the random numbers that it would have alone, and a thread that stays hears
of what changes between two steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep.exact_random import NumPyGenerator, PythonGenerator, Randoms

numpy = pytest.importorskip("numpy")

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "half a pair of random": lambda: random.gauss(0.0, 1.0),  # which keeps the second one, too
    "numpy": numpy.random.rand,
    "half a pair": lambda: numpy.random.normal(),  # of two normal numbers NumPy keeps the second one
    "nothing": lambda: None,
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_each_block_has_its_own_random_numbers(first: str, second: str) -> None:
    """Three draws of each, of two blocks in turns, against each block alone; then something of everything."""
    kinds = [[first, second, first, *DRAWS], [second, first, "half a pair", *DRAWS]]
    generators = NumPyGenerator(), PythonGenerator()
    alone = []
    for block, draws in enumerate(kinds):
        Randoms(7 + block, *generators).begin()
        alone.append([DRAWS[kind]() for kind in draws])
    randoms = [Randoms(7 + block, *generators) for block in range(2)]
    in_turns: list[list[Any]] = [[], []]
    for step in range(len(kinds[0])):
        for block, own in enumerate(randoms):
            own.begin() if step == 0 else own.put()
            in_turns[block].append(DRAWS[kinds[block][step]]())
            own.take()
    assert in_turns == alone


def test_another_generator_of_numpy_is_kept_as_a_whole() -> None:
    """Its memory is not known, so nothing is concluded from it."""
    if not hasattr(numpy.random, "set_bit_generator"):
        pytest.skip("this NumPy cannot change its global generator")
    generator = NumPyGenerator()
    assert generator.look() is not None
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.MT19937(3))
    try:
        assert generator.look() is None
    finally:
        numpy.random.set_bit_generator(before)


THREADS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

seen = []
def train_step(model, batch):
    seen.append((torch.get_num_threads(), float(torch.tensor(2.0**-1060, dtype=torch.float64) * 1)))
    return model(batch[0]).square().mean()

def on_step(trainer):
    if trainer.step == 2:
        torch.set_num_threads(2)
        torch.set_flush_denormal(True)

model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
config = es.Config(exact="bitwise", block=4, threads=1)
trainer = es.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), train_step, on_step=on_step, config=config)
trainer.fit(DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8), epochs=1)
torch.set_flush_denormal(False)
assert seen == [(1, 2.0**-1060)] * 4 + [(2, 0.0)] * 4, seen
"""


def test_threads_that_stay_hear_of_settings(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(THREADS, ranks=1)
