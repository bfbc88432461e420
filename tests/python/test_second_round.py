"""Rounds made a second time (reentrant checkpointing) where p.grad is the engine's memory on some ranks alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CODE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import evenstep as es
from evenstep.group import gather_objects

torch.set_default_dtype(torch.float64)
RANK = es.rank()


class Model(nn.Module):
    '''`gate` gets a gradient after the block's and one inside it where `reentrant`.'''

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = False

    def block(self, x):
        return torch.tanh(self.gate(self.first(x)))

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=True) if self.reentrant else self.block(x)
        return self.gate(x) + (self.unused(x) if RANK == 1 else 0.0)


def loss():
    generator = torch.Generator().manual_seed(RANK)
    return model(torch.randn(5, 3, generator=generator, requires_grad=True)).square().mean()


def expected(counts):
    model.reentrant = False
    found = torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found)]
    rows = gather_objects(es.session().group, [one.flatten().tolist() for one in found])
    whole = [torch.tensor(ranks[:counts]).sum(0) for ranks in zip(*rows)]
    return torch.cat(whole) if REDUCTION == "sum" else torch.cat(whole) / counts


def got():
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# Of how many ranks the samples count, and whether they agree: where they do not, training has ended.
for REDUCTION, counts, agrees in (("mean", 2, True), ("sum", 2, True), ("mean", 1, True), ("sum", 2, False)):
    model = Model()
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction=REDUCTION)
    (sync,) = (one for one in es.session().steps.syncs if one.model is model)
    for _ in range(3):  # until the gradients' order is known, by which they lie in memory
        model.zero_grad()
        loss().backward()
    wanted = expected(counts)
    sync.defer = False  # as before the first of these passes
    model.zero_grad(set_to_none=RANK == 0)
    if agrees and counts == 2:
        model.gate.zero_grad()  # set to None
    model.reentrant = RANK == 0
    try:
        if counts == 1:  # what rank 1 has kept of a sum is no gradient of its own
            es.set_weight(1.0 - RANK)
        loss().backward()
    except es.EvenstepError as error:
        assert not agrees, error
        assert "on rank 0 parameter 'gate." in str(error) and "the p.grad that rank 1 had kept" in str(error), error
    else:
        assert agrees and torch.allclose(got(), wanted, rtol=1e-13, atol=1e-15), (REDUCTION, got() - wanted)
"""


def test_what_one_rank_has_of_a_first_round_counts_on_all(run_ranks: Callable[..., list[Any]]) -> None:
    """`first` and `unused` hold the first round's sum on rank 1, their own gradients and nothing on rank 0. Where a gradient changed
    of which another rank has that sum alone, all are told so."""
    run_ranks(CODE)
