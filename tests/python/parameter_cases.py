"""Run by test_parameter_checks.py on three ranks: one bit of one rank's parameter is flipped, for real."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
from torch import nn

import evenstep as es

RANK = es.rank()


def say(name: str, **facts: Any) -> None:
    print(json.dumps([name, facts]), flush=True)


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """As a cosmic ray would, past torch."""
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_ubyte.from_address(address).value ^= 1 << bit % 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def train(
    name: str,
    bit: int | None,
    *,
    policy: str = "report",
    back: bool = False,
    lr: float = 0.0,
    steps: int = 9,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    shape: bool = False,
    **options: Any,
) -> None:
    """Parameters are compared every second step. In step 5 rank 1 has one bit of one parameter flipped; `back`: later it
    is flipped back; `frozen`: of one that is not trained; `shape`: that one has another shape there from then on."""
    torch.manual_seed(0)
    current = es.session()
    current.parameter_checks.every, current.parameter_checks.policy = 2, policy
    current.parameter_checks._rare, current.parameter_checks._since = 1, -1
    net = Net().to(dtype)
    net.first.requires_grad_(not frozen)
    net.unused = nn.Parameter(torch.ones(3), requires_grad=False)
    net, made = es.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), batch_norm="local", **options)
    draws = torch.Generator().manual_seed(RANK)  # each rank has samples of its own
    first, said = current.step + current.step % 2, ""
    while current.step < first:  # from an even step on
        net(torch.randn(4, 5, generator=draws).to(dtype)).sum().backward()
        made.step()
    print(f"BEGIN {name}", file=sys.stderr, flush=True)
    try:
        for number in range(steps):
            if RANK == 1 and bit is not None and (number == 5 or (back and number == 7)):
                flip((net.first if frozen else net.second).weight.detach(), 4, bit)
            if RANK == 1 and shape and number == 5:
                net.unused.data = torch.ones(4)
            net(torch.randn(4, 5, generator=draws).to(dtype)).sum().backward()
            made.step()
            made.zero_grad()
    except es.EvenstepError as error:
        said = str(error)
    es.synchronise_models()
    print(f"END {name}", file=sys.stderr, flush=True)
    say(name, said=said, steps=current.step - first)
    current.steps.syncs.clear()


def apart() -> None:
    """What ranks may have apart: parameters between synchronisations, buffers, a process set's."""
    train("local frozen", 23, frozen=True, sync=es.LocalSGD(every=3))
    train("local", None, lr=0.1, sync=es.LocalSGD(every=3))
    train("diloco", None, lr=0.1, sync=es.DiLoCo(every=4))
    train("stale", None, lr=0.1, sync=es.Stale(steps=1))


def main() -> None:
    train("plain", None, lr=0.1)
    train("high bit", 23)
    train("frozen", 23, frozen=True)
    train("another shape", None, shape=True)
    train("low bit", 0)
    train("bf16", 14, dtype=torch.bfloat16)
    train("back", 23, back=True)
    apart()
    train("stop", 29, policy="stop")  # after it, nothing goes on


if __name__ == "__main__":
    main()
