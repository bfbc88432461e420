"""A rank of two of `make large`: es.prepare with one parameter of more than 4 GiB and more than 2^31 elements in bfloat16, whose
first values are rank 0's and whose gradients are added up in a bucket of its own.

Parameter and gradients are zeros of which the kernel has no pages, but for places here and there, around 2^30, 2^31 and their
like among them; the buckets are memory from end to end. So each rank needs the bucket alone, and rank 1 the parameter, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from large_pattern import HALF, PIECE, place, watched

import evenstep as es

_STEPS = 2  # buckets are laid out anew behind the first


def _places() -> torch.Tensor:
    """Where something is: around every power of two, and every 64 MiB and a little."""
    edges = {(1 << power) + off for power in range(4, 32) for off in (-1, 0, 1)}
    spread = range(0, HALF, 33_554_467)
    found = sorted(at for at in {*edges, *spread, HALF - 1} if at < HALF)
    return torch.tensor(found, dtype=torch.int64)


def _zeros() -> torch.Tensor:
    """As the kernel gives them: torch.zeros would write them."""
    return torch.from_numpy(np.zeros(HALF, dtype=np.int16)).view(torch.bfloat16)


def _values(places: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Whole numbers, even, of which bfloat16 has all: half of them is one, too."""
    return (2 * (places * (rank + 3) % (61 + step) + 1)).bfloat16()


def _check(found: torch.Tensor, places: torch.Tensor, values: torch.Tensor, what: str) -> None:
    there, wanted = found.detach().view(torch.int16).numpy(), values.view(torch.int16).numpy()
    at = places.numpy()
    for begin in range(0, HALF, PIECE):
        part = there[begin : begin + PIECE]
        first, end = np.searchsorted(at, (begin, begin + len(part)))
        expected = np.zeros(len(part), dtype=np.int16)
        expected[at[first:end] - begin] = wanted[first:end]
        wrong = np.flatnonzero(part != expected)
        if len(wrong) > 0:
            raise SystemExit(f"large: {place()}: {what}: {len(wrong)} wrong from element {begin + wrong[0]} on")
    print(f"  ok  {place()}: {what}", flush=True)


class _Given(torch.autograd.Function):
    """A loss with a gradient that was made before, and is nobody else's: torch keeps that memory for p.grad."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
        context.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.gradient.pop(), None


class Large(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(_zeros())

    def forward(self, gradient: list[torch.Tensor]) -> torch.Tensor:
        return _Given.apply(self.weight, gradient)  # type: ignore[no-any-return]


def main() -> None:
    places, model = _places(), Large()
    first = _values(places, 7, 0)
    with torch.no_grad():
        model.weight[places] = first + float(place() != "rank 0 of 2")  # rank 0's are everybody's
    model = es.prepare(model)
    _check(model.weight, places, first, "the first values, of rank 0")
    for step in range(_STEPS):
        model.weight.grad = None  # else what buckets that move hold is copied
        gradient = _zeros()
        gradient[places] = _values(places, int(place().split()[1]), step)
        given = [gradient]
        del gradient
        model(given).backward()
        sums = (_values(places, 0, step).float() + _values(places, 1, step).float()) / 2
        _check(model.weight.grad, places, sums.bfloat16(), f"the gradient of step {step + 1}")


if __name__ == "__main__":
    with watched(place()):
        main()
