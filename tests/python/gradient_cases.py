"""Loops that do more with gradients and batches than one backward a batch: as in one process, whatever the shares.

Run as a script in every rank by test_gradient_loops.py, which gives the engine; prints the relative differences as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from prepare_cases import mlp, share_schedule, square, vector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 12, 12
Keep = Callable[[nn.Module], list[torch.Tensor]]


def data(seed: int = 1, samples: int = BATCH * STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(samples, width, dtype=torch.float64, generator=generator) for width in (6, 3)]
    return TensorDataset(*draw)


def loader_of(seed: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(seed), batch_size=BATCH, **options)


def build() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = {id(p): p for model in models for p in model.parameters()}
    return torch.optim.SGD(parameters.values(), lr=0.05)


class Prepared:
    """es.prepare with the test's shares and engine; outside, everything unchanged."""

    def __init__(self, es: Any, engine: str | None) -> None:
        self.es, self.engine = es, engine

    def __call__(self, *objects: Any, **options: Any) -> Any:
        if self.es is None:
            return objects
        shares = share_schedule(self.es.world_size(), 7)
        return self.es.prepare(*objects, **{"shares": shares, "engine": self.engine, **options})

    @property
    def samples(self) -> int:
        return BATCH if self.es is None else self.es.session().latest.samples

    def no_sync(self, when: bool, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        return self.es.no_sync(*models) if when and self.es is not None else contextlib.nullcontext()

    def exchange_gradients(self) -> None:
        if self.es is not None:
            self.es.exchange_gradients()

    def set_weight(self, amount: float) -> None:
        if self.es is not None:
            self.es.set_weight(amount)


def objects_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def detached(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach() for p in model.parameters()]


def slices(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.view(-1)[: p.numel()].view_as(p) for p in model.parameters()]


def two_losses(keep: Keep) -> Callable[[Prepared], list[nn.Module]]:
    """As PCGrad: the gradients of two losses are kept, and combined into the step's."""

    def run(prepared: Prepared) -> list[nn.Module]:
        model = build()
        model, optimizer, loader = prepared(model, sgd(model), loader_of())
        for x, y in loader:
            optimizer.zero_grad()
            square(model, x, y).backward()
            first = keep(model)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            second = keep(model)
            for p, a, b in zip(model.parameters(), first, second):
                p.grad = a + 0.5 * b
            optimizer.step()
        return [model]

    return run


def kept_while_adding(prepared: Prepared) -> list[nn.Module]:
    """What is kept of p.grad sees the backward that adds to it in place, and not the one after zero_grad."""
    model = build()
    model, optimizer, loader = prepared(model, sgd(model), loader_of())
    for x, y in loader:
        optimizer.zero_grad()
        square(model, x, y).backward()
        kept = [p.grad if i % 2 else p.grad.detach() for i, p in enumerate(model.parameters())]
        model(x).square().mean().backward()
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        for p, sums in zip(model.parameters(), kept):
            p.grad.add_(sums)
        optimizer.step()
    return [model]


def nothing_in_a_micro_batch(unsynchronised: int) -> Callable[[Prepared], list[nn.Module]]:
    """Of three micro-batches the second has no token on any rank."""

    def run(prepared: Prepared) -> list[nn.Module]:
        model = build()
        model, optimizer, loader = prepared(model, sgd(model), loader_of())
        for number, (x, y) in enumerate(loader):
            tokens = 0 if number % 3 == 1 else 1
            prepared.set_weight(float(tokens * prepared.samples))
            with prepared.no_sync(number % 3 < unsynchronised):
                (square(model, x, y) * tokens).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [model]

    return run


def nothing_at_the_end(prepared: Prepared) -> list[nn.Module]:
    """The last micro-batch of a step is empty; what no_sync left still has to be exchanged."""
    model = build()
    model, optimizer, loader = prepared(model, sgd(model), loader_of())
    for number, (x, y) in enumerate(loader):
        tokens = number % 2 == 0
        prepared.set_weight(float(tokens * prepared.samples))
        with prepared.no_sync(number % 2 == 0):
            (square(model, x, y) * tokens).backward()
        if not tokens:
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def set_by_hand(prepared: Prepared) -> list[nn.Module]:
    """No backward pass: torch.autograd.grad gives the gradients, one of them of no use in every other step."""
    model = build()
    model, optimizer, loader = prepared(model, sgd(model), loader_of())
    parameters = list(model.parameters())
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        used = parameters[number % 2 :]
        for p, gradient in zip(used, torch.autograd.grad(square(model, x, y), used)):
            p.grad = gradient
        prepared.exchange_gradients()
        optimizer.step()
    return [model]


class Head(nn.Module):
    def __init__(self, trunk: nn.Module, seed: int) -> None:
        super().__init__()
        self.trunk = trunk
        torch.manual_seed(seed)
        self.head = nn.Linear(20, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x)))


def common_trunk(unsynchronised: int) -> Callable[[Prepared], list[nn.Module]]:
    """Actor and critic with one encoder, which is also prepared by itself."""

    def run(prepared: Prepared) -> list[nn.Module]:
        torch.manual_seed(0)
        trunk = nn.Linear(6, 20).double()
        actor, critic = Head(trunk, 1), Head(trunk, 2)
        optimizer = sgd(actor, critic)
        actor, critic, trunk, optimizer, loader = prepared(actor, critic, trunk, optimizer, loader_of())
        for number, (x, y) in enumerate(loader):
            with prepared.no_sync(number % 3 < unsynchronised):
                (square(actor, x, y) + critic(x).square().mean()).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [actor, critic]

    return run


def one_accumulates(prepared: Prepared) -> list[nn.Module]:
    """Two models; one steps at every batch, also while the other is under no_sync."""
    first, second = build(), build()
    first, second, slow, fast, loader = prepared(first, second, sgd(first), sgd(second), loader_of())
    for number, (x, y) in enumerate(loader):
        with prepared.no_sync(number % 2 == 0, first):
            square(first, x, y).backward()
            square(second, x, y).backward()
        fast.step()
        fast.zero_grad()
        if number % 2:
            slow.step()
            slow.zero_grad()
    return [first, second]


def whole_beside_no_sync(prepared: Prepared) -> list[nn.Module]:
    """A step on gradients that were whole before a pass of another model, under es.no_sync of all."""
    first, second = build(), build()
    first, second, fast, slow, loader = prepared(first, second, sgd(first), sgd(second), loader_of())
    for number, (x, y) in enumerate(loader):
        square(first, x, y).backward()
        with prepared.no_sync(number % 2 == 0):
            square(second, x, y).backward()
        fast.step()
        fast.zero_grad()
        if number % 2:
            slow.step()
            slow.zero_grad()
    return [first, second]


def kept_batches(prepared: Prepared) -> list[nn.Module]:
    """A list of the loader is trained on twice: all batches have the same shares."""
    model = build()
    model, optimizer, loader = prepared(model, sgd(model), loader_of(), shares=None)
    batches = list(loader)
    for x, y in batches * 2:
        optimizer.zero_grad()
        square(model, x, y).backward()
        optimizer.step()
    return [model]


class Moving:
    """A balancer with other shares after every observation."""

    choice = ("hybrid", 0.0, 0.0)

    def __init__(self, ranks: int) -> None:
        self.observed, self.schedule = 0, share_schedule(ranks, 3)

    def observe(self, timings: Any, *beside: Any) -> None:
        self.observed += 1

    def shares(self, batch: int) -> list[int]:
        return self.schedule(self.observed, batch)

    def predict(self, rank: int, samples: int) -> float:
        return float("nan")


def balanced(prepared: Prepared, *objects: Any) -> Any:
    """Prepared with moving shares, which all loaders must take alike."""
    everything = prepared(*objects, shares=None)
    if prepared.es is not None:
        for shares in {one.shares for one in everything if hasattr(one, "shares")}:
            shares._balancer = Moving(prepared.es.world_size())
    return everything


def pairs(skipped: int = -1, **options: Any) -> Callable[[Prepared], list[nn.Module]]:
    """Two batches of one loader in one backward, after one that was only looked at; one is left out."""

    def run(prepared: Prepared) -> list[nn.Module]:
        model = build()
        model, optimizer, loader = balanced(prepared, model, sgd(model), loader_of(**options))
        looked_at = next(iter(loader))
        for _ in range(2):
            batches = iter(loader)
            for number, one in enumerate(batches):
                if number == skipped:
                    continue
                other = next(batches, one)
                optimizer.zero_grad()
                (square(model, *one) + square(model, *other)).backward()
                optimizer.step()
        assert len(looked_at) == 2
        return [model]

    return run


def side_by_side(*options: dict[str, Any]) -> Callable[[Prepared], list[nn.Module]]:
    """As labelled and unlabelled data: a batch of each loader in one backward."""

    def run(prepared: Prepared) -> list[nn.Module]:
        model = build()
        loaders = [loader_of(seed, **one) for seed, one in enumerate(options, 1)]
        model, optimizer, *loaders = balanced(prepared, model, sgd(model), *loaders)
        for batches in zip(*loaders):
            optimizer.zero_grad()
            sum(square(model, x, y) for x, y in batches).backward()
            optimizer.step()
        return [model]

    return run


CASES: dict[str, Callable[[Prepared], list[nn.Module]]] = {
    "kept_gradients": two_losses(objects_of),
    "kept_detached_gradients": two_losses(detached),
    "kept_slices_of_gradients": two_losses(slices),
    "kept_while_adding": kept_while_adding,
    "nothing_in_a_micro_batch": nothing_in_a_micro_batch(0),
    "nothing_in_a_micro_batch_no_sync_before": nothing_in_a_micro_batch(1),
    "nothing_in_a_micro_batch_no_sync": nothing_in_a_micro_batch(2),
    "nothing_at_the_end": nothing_at_the_end,
    "set_by_hand": set_by_hand,
    "common_trunk": common_trunk(0),
    "common_trunk_no_sync": common_trunk(2),
    "one_accumulates": one_accumulates,
    "whole_beside_no_sync": whole_beside_no_sync,
    "kept_batches": kept_batches,
    "pairs": pairs(skipped=4),
    "pairs_ahead": pairs(num_workers=1, prefetch_factor=3),
    "two_loaders": side_by_side({}, {}),
    "three_loaders_ahead": side_by_side({}, {"num_workers": 1, "prefetch_factor": 3}, {}),
}


def results(es: Any, engine: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, run in CASES.items():
        es.session().loaders.clear()  # of the cases before
        expected = torch.cat([vector(model) for model in run(Prepared(None, engine))])
        ours = torch.cat([vector(model) for model in run(Prepared(es, engine))])
        everywhere = es.gather(ours[None])
        difference = float((ours - expected).norm() / expected.norm())
        yield name, {"difference": difference, "same_on_all_ranks": bool((everywhere == everywhere[0]).all())}


def main() -> None:
    import evenstep as es

    engine = None if sys.argv[1] == "default" else sys.argv[1]
    found = dict(results(es, engine))
    if es.is_main():
        print("RESULTS " + json.dumps(found))


if __name__ == "__main__":
    main()
