"""Buffers as they were at a pass's beginning, whatever changed them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenstep.pass_state import PassState

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
    state = PassState({"model": model}, {"object": counter})
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
