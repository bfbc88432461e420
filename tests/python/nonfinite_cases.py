"""Run by test_nonfinite.py on three ranks: what each case left, as JSON, from every rank."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from torch import nn

import evenstep as es

RANK = es.rank()
BAD_STEP = 2


def say(name: str, **facts: Any) -> None:
    print(json.dumps([name, facts]), flush=True)


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, sparse=True) if sparse else None
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None:
            x = x + self.words(torch.tensor([RANK]))
        return self.second(torch.tanh(self.first(x)))


class Spoiled(torch.autograd.Function):
    """Zero, with a gradient that is zero, too, or not a number."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
        context.bad = bad
        return x.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_full((1,), math.nan if context.bad else 0.0), None


def train(
    name: str, policy: str, value: float = math.nan, *, sparse: bool = False, mixed: bool = False, **options: Any
) -> None:
    """Rank 1 has `value` in its batch of one step. mixed: in its gradients, not in its loss."""
    torch.manual_seed(0)
    current = es.session()
    current.nonfinite.policy = policy
    net = Net(sparse).double()
    made: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9)
    net, made = es.prepare(net, made, **options)
    first, before, after, momentum, said = current.step, [], [], [], ""
    for number in range(5):
        x = torch.full((2, 3), 0.1 * (RANK + 1), dtype=torch.float64)
        bad = number == BAD_STEP and RANK == 1
        if bad and not mixed:
            x[1, 2] = value
        loss = net(x).square().mean()
        if mixed:
            loss = loss + Spoiled.apply(net.second.bias, bad)
        loss.backward()
        before.append([p.detach().clone() for p in net.parameters()])
        try:
            made.step()
        except es.EvenstepError as error:
            said = str(error)
            break
        momentum.append(
            [
                one.get("momentum_buffer").clone()
                for one in made.state.values()
                if one.get("momentum_buffer") is not None
            ]
        )
        after.append([p.detach().clone() for p in net.parameters()])
        made.zero_grad()
    es.synchronise_models()
    same = [all(torch.equal(a, b) for a, b in zip(*pair)) for pair in zip(before, after)]
    kept = len(momentum) > BAD_STEP and all(
        torch.equal(a, b) for a, b in zip(momentum[BAD_STEP - 1], momentum[BAD_STEP])
    )
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    say(
        name,
        unchanged=[n for n, one in enumerate(same) if one],
        finite=finite,
        steps=current.step - first,
        said=said,
        kept=kept,
    )


def scaled(name: str, prepared: bool, fused: bool) -> None:
    """A GradScaler whose scale is too large by far: it leaves steps out, and nobody else says a word."""
    torch.manual_seed(0)
    current = es.session()
    current.nonfinite.policy = "stop"
    net = Net()
    made: Any = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-40, growth_interval=1000)
    given = [net, made, *([scaler] if prepared else [])]
    es.prepare(*given)
    for _ in range(6):
        loss = 1e3 * net(torch.full((2, 3), 0.1 * (RANK + 1))).square().mean()
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()
        made.zero_grad()
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    say(name, finite=finite, scale=scaler.get_scale())
    current.objects.clear()


def main() -> None:
    for policy in ("report", "skip", "stop"):
        train(policy, policy)
    train("infinite", "skip", value=math.inf)
    train("gradients alone", "skip", mixed=True)
    train("torch", "skip", engine="torch")
    train("bf16", "skip", compression="bf16")
    train("int8", "skip", compression="int8")
    train("powersgd", "skip", compression="powersgd:1")
    train("sparse", "skip", sparse=True)
    train("local", "skip", sync=es.LocalSGD(every=2))
    for fused in (False, True):
        for prepared in (False, True):
            scaled(f"scaler {prepared} {fused}", prepared, fused)
    train("stale", "skip", sync=es.Stale(steps=1))


if __name__ == "__main__":
    sys.exit(main())
