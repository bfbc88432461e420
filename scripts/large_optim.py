"""A rank of `make large`: steps of es.optim.SGD on a bfloat16 parameter, whose values in float32 (and, with momentum, its state)
are more than 4 GiB each. large_optim.py momentum|elements: `momentum` of two ranks that share them, 2^30 elements and more;
`elements` of one, 2^31 and more, without a state."""

from __future__ import annotations

import os
import pathlib
import sys

import torch
from large_pattern import HALF, place, watched

import evenstep as es

_PIECE = 1 << 20
_RATE, _MOMENTUM = 0.5, 0.5


_PERIOD = 61  # of which 2^30 and 2^32 are no multiples
_VALUES, _GRADIENTS = (torch.arange(_PERIOD) * factor % _PERIOD for factor in (3, 5))


def _pieces(count: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _PIECE, count)) for begin in range(0, count, _PIECE)]


def _fill(memory: torch.Tensor, values: torch.Tensor) -> None:
    row = values.bfloat16().repeat(_PIECE // _PERIOD + 2)
    for begin, end in _pieces(memory.numel()):
        memory[begin:end] = row[begin % _PERIOD :][: end - begin]


def _expected(steps: int, momentum: float) -> torch.Tensor:
    """Exact in float32."""
    value, moved = _VALUES.float(), torch.zeros(_PERIOD)
    for _ in range(steps):
        moved = momentum * moved + _GRADIENTS.float()
        value -= _RATE * moved
    return value.bfloat16()


def _check(parameter: torch.Tensor, momentum: float, steps: int) -> None:
    row = _expected(steps, momentum).repeat(_PIECE // _PERIOD + 2)
    for begin, end in _pieces(parameter.numel()):
        if not torch.equal(parameter[begin:end], row[begin % _PERIOD :][: end - begin]):
            raise SystemExit(f"large: {place()}: step {steps} is wrong between elements {begin} and {end}")
    print(f"  ok  {place()}: es.optim.SGD, step {steps}", flush=True)


def _gradient(count: int, group: es.comm.Group) -> torch.Tensor:
    """One memory of all ranks: what they have of it is the same."""
    path = pathlib.Path("/dev/shm") / f"evenstep-large-{os.environ['MASTER_PORT']}"
    if group.rank == 0:
        gradient = torch.from_file(str(path), shared=True, size=count, dtype=torch.bfloat16)
        _fill(gradient, _GRADIENTS)
    group.barrier()
    if group.rank > 0:
        gradient = torch.from_file(str(path), shared=True, size=count, dtype=torch.bfloat16)
    group.barrier()
    if group.rank == 0:
        path.unlink()
    return gradient


def main(momentum: float, count: int) -> None:
    parameter = torch.nn.Parameter(torch.empty(count, dtype=torch.bfloat16))
    with torch.no_grad():
        _fill(parameter, _VALUES)
    with es.comm.open(timeout=600) as group:
        parameter.grad = _gradient(count, group)
        optimizer = es.optim.SGD([parameter], lr=_RATE, momentum=momentum)
        if group.size > 1:
            optimizer.share(group._comm)
        for step in range(2):
            optimizer.step()
            _check(parameter.detach(), momentum, step + 1)
        group.barrier()


if __name__ == "__main__":
    with watched(place()):
        if sys.argv[1] == "momentum":
            main(_MOMENTUM, HALF // 2)
        else:
            main(0.0, HALF)
