"""Buckets are filled in the order in which gradients come, learned in the first pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from evenstep import _core
from evenstep.backward import observe_backward
from evenstep.compression import parse_compression
from evenstep.engine import EngineOptions, SharedEngine
from evenstep.gradients import GradientSync
from evenstep.group import Alone
from evenstep.steps import Steps


class Backwards(nn.Module):
    """Built in another order than it is used in; `never` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.never, self.first, self.second = (nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().sum()


@pytest.fixture
def trained() -> Iterator[tuple[Backwards, SharedEngine]]:
    torch.manual_seed(0)
    model, steps = Backwards().double(), Steps(Alone(), _core.Telemetry(-1, 0))
    parameters, options = list(model.parameters()), EngineOptions(bucket_bytes=64)  # one a bucket
    size = SharedEngine.arena_bytes(parameters, options)
    comm = _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size)
    engine = SharedEngine(parameters, comm, None, options)
    steps.syncs.append(GradientSync("model", model, engine, steps))
    observe_backward(steps)
    yield model, engine
    observe_backward(None)


def order_of(model: nn.Module, engine: SharedEngine) -> list[str]:
    """The layers as their buckets are reduced."""
    names = [name.partition(".")[0] for name, _ in model.named_parameters()]
    return sorted(names, key=lambda name: engine._addresses[names.index(name)])


def plain(model: Backwards, x: torch.Tensor) -> list[torch.Tensor | None]:
    used = [p for name, p in model.named_parameters() if not name.startswith("never")]
    found = iter(torch.autograd.grad(model(x), used))
    return [None if name.startswith("never") else next(found) for name, _ in model.named_parameters()]


def same(model: nn.Module, expected: list[torch.Tensor | None]) -> bool:
    pairs = zip((p.grad for p in model.parameters()), expected)
    return all(a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-12) for a, b in pairs)


def test_the_second_round_has_the_order_of_the_first(trained: tuple[Backwards, SharedEngine]) -> None:
    model, engine = trained
    assert order_of(model, engine) == ["second", "first", "never", "third"]
    for number in range(4):
        x = torch.full((2, 3), 0.3 * (number + 1), dtype=torch.float64)
        expected = plain(model, x)
        model(x).backward()
        assert same(model, expected)
        assert all(p.grad is None or p.grad is v for p, v in zip(model.parameters(), engine.views))
        assert (order_of(model, engine) == ["third", "second", "first", "never"]) is (number > 0)
        model.zero_grad()


def test_what_is_kept_of_the_first_round_stays(trained: tuple[Backwards, SharedEngine]) -> None:
    model, _ = trained
    x = torch.ones(2, 3, dtype=torch.float64)
    model(x).backward()
    kept, seen = model.first.weight.grad, model.second.weight.grad.detach()
    values = kept.clone(), seen.clone()
    model.zero_grad()
    for number in range(3):
        y = x * (number + 2)
        expected = plain(model, y)
        model(y).backward()
        assert same(model, expected)
        model.zero_grad()
    assert torch.equal(kept, values[0]) and torch.equal(seen, values[1])


def test_sums_and_zeros_survive_it(trained: tuple[Backwards, SharedEngine]) -> None:
    model, engine = trained
    x = torch.ones(2, 3, dtype=torch.float64)
    model(x).backward()
    model(x).backward()  # adds to what is in the old memory
    assert order_of(model, engine)[-1] == "never"
    assert same(model, [None if g is None else 2 * g for g in plain(model, x)])
    model.zero_grad(set_to_none=False)
    model(2 * x).backward()
    assert same(model, plain(model, 2 * x))


def test_an_order_that_needs_more_memory_is_left_alone() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (128, 192, 128)]
    options = EngineOptions(bucket_bytes=1024, compression=parse_compression("bf16"))
    size = SharedEngine.arena_bytes(parameters, options)
    engine = SharedEngine(parameters, _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size), None, options)
    assert not engine.reorder([0, 2, 1], [])  # 0 and 2 in one bucket: the place for a narrowed one would have to grow
    assert engine.reorder([2, 1, 0], [])
    engine.begin(1.0, 0)
    engine.ready(1, torch.ones(192))
    assert engine.finish()[0] == b"\0\1\0" and bool((engine.views[1] == 1).all())
