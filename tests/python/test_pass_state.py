"""Buffers as they were at a pass's beginning, whatever changed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evenstep import plain
from evenstep._core import EvenstepError
from evenstep.call_results import packed, packs_later, told_result
from evenstep.pass_state import PassState, too_large

LARGE = 1 << 17


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("none", None)
        self.register_buffer("longer", torch.zeros(2), persistent=False)
        self.norm = nn.BatchNorm1d(4)


class Counter:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_whatever_changed_is_put_back() -> None:
    model, counter = Changing(), Counter()
    state = PassState({"model": model}, {"object": counter}, {})
    small, other = model.small, model.other
    for number in range(3):
        state.keep()
        for _ in range(2):  # two void passes, one after the other
            assert isinstance(model.large, torch.Tensor) and isinstance(small, torch.Tensor)
            model.large += 1
            small.data.fill_(7.0)
            model.other = torch.ones(5)
            model.none = torch.ones(1)
            model.longer = torch.ones(9)
            model.norm(torch.randn(8, 4))
            counter.seen.append(0)
            state.put_back()
            assert float(model.large.max()) == float(small.max()) == number
            assert model.small is small and model.other is other and model.none is None
            assert model.longer.tolist() == [0.0, 0.0] and counter.seen == [1] * number
            assert int(model.norm.num_batches_tracked) == 0 and float(model.norm.running_var.min()) == 1.0
        model.large += 1  # what counts
        small.data.add_(1.0)
        counter.seen.append(1)


class Coming(nn.Module):
    """Whose buffers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("shared", torch.zeros(1).expand(8))
        self.register_buffer("last", torch.zeros(2), persistent=False)


def test_buffers_that_come_and_go() -> None:
    model = Coming()
    state = PassState({"model": model}, {}, {})
    state.keep()
    del model.first
    model.register_buffer("cache", torch.ones(3), persistent=False)
    model.inner = Changing()
    state.put_back()
    assert list(dict(model.named_buffers(recurse=False))) == ["first", "shared", "last"]
    assert list(model.state_dict())[:2] == ["first", "shared"] and "last" not in model.state_dict()

    del model.first  # in a pass that counts
    model.register_buffer("cache", torch.zeros(3))
    state.keep()
    assert isinstance(model.cache, torch.Tensor) and isinstance(model.inner.small, torch.Tensor)
    model.cache += 1
    model.inner.small += 1
    state.put_back()
    assert list(dict(model.named_buffers(recurse=False))) == ["shared", "last", "cache"]
    assert float(model.cache.max()) == float(model.inner.small.max()) == 0.0


def test_a_buffer_whose_elements_are_one_in_memory() -> None:
    model = Coming()
    state = PassState({"model": model}, {}, {})
    for number in range(2):
        state.keep()
        for _ in range(2):
            model.shared = torch.full((8,), 5.0)
            state.put_back()
            assert isinstance(model.shared, torch.Tensor)
            assert model.shared.tolist() == [float(number)] * 8
        model.shared = (model.shared[:1] + 1).expand(8)


def test_lazy_buffers() -> None:
    model = nn.LazyBatchNorm1d(affine=False)
    state = PassState({"model": model}, {}, {})
    state.keep()
    model(torch.randn(8, 4))
    state.put_back()
    state.keep()
    mean = model.running_mean
    assert mean is not None
    before = mean.clone()
    model(torch.randn(8, 4) + 3)
    state.put_back()
    assert torch.equal(mean, before)


class Holding:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


@pytest.mark.parametrize(
    ("held", "large"),
    [
        (torch.zeros(1000), False),
        ([torch.zeros(LARGE), {"other": (torch.zeros(LARGE), torch.zeros(1))}], False),  # copied once that is wanted
        (torch.zeros(LARGE).numpy(), False),
        (torch.zeros(LARGE + 1, dtype=torch.float64).numpy(), True),
        (list(range(100)), False),
        (list(range(100_000)), True),
    ],
)
def test_objects_with_a_large_state(held: Any, large: bool) -> None:
    why = too_large({"small": Holding(0), "average": Holding(held)})
    assert bool(why) == large and ("average (Holding)" in why) == large
    assert PassState({}, {"small": Holding(0), "average": Holding(held)}, {}).keep() == why


class Averages:
    """What a script prepares of its own: of 2 MiB."""

    def __init__(self) -> None:
        self.values, self.count = torch.zeros(1 << 18, dtype=torch.float64), 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.count = state["values"], state["count"]

    def update(self) -> None:
        self.values += 1.0
        self.count += 1


@pytest.mark.parametrize("early", [False, True])
def test_a_large_state_is_copied_where_a_pass_is_void(early: bool) -> None:
    model, averages = nn.Linear(2, 2), Averages()
    before = model.weight.detach().clone()
    state = PassState({"average": model}, {"object": averages}, {})
    for _ in range(3):  # after each step that counts
        assert state.keep() == ""
        assert state._late._copies is None
        averages.update()
    assert state.keep() == ""
    if early:  # before the loss is heard of
        averages.update()
    state.want()
    for _ in range(2):
        averages.update()
        model.weight.data.add_(1.0)
        if early:
            with pytest.raises(EvenstepError, match="update averages after optimizer"):
                state.put_back()
            return
        state.put_back()
        assert averages.count == 3 and bool((averages.values == 3.0).all())
        assert torch.equal(model.weight.detach(), before)


def test_a_result_is_packed_when_one_asks() -> None:
    rows = torch.zeros(3)
    packs = packs_later(rows)
    assert torch.equal(plain.loads(packs()), rows)
    rows += 1
    assert "has changed it" in str(told_result(packs))

    found: dict[str, Any] = {"loss": 1.0, "rows": torch.zeros(2)}
    packs = packs_later(found)
    found["more"] = 2.0
    given = plain.loads(packs())
    assert sorted(given) == ["loss", "rows"]
    found["rows"].fill_(1.0)
    assert "has changed it" in str(told_result(packs))

    with torch.inference_mode():
        inner = torch.zeros(2)
        packs = packs_later(inner)
        inner += 1
    assert plain.loads(packs()).tolist() == [0.0, 0.0]
    assert "cannot be given" in str(told_result(packs_later(lambda: 0)))
    assert told_result(packed(b"known")) == b"known"
