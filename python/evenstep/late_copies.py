"""Large tensors as they were at a moment, copied only once that is wanted: an average of the parameters, which changes after each
step, would else be copied in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from evenstep._core import EvenstepError

_LOOKED_INTO = 8  # tensors of which two values are compared: `.data` changes them without a version


class _Seen(NamedTuple):
    tensor: torch.Tensor
    version: int
    values: tuple[float, ...]


class LateCopies:
    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._copies: dict[int, torch.Tensor] | None = None  # by id of the tensor
        self._changed = False  # before they were wanted

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """As they are now."""
        every = max(1, -(-len(tensors) // _LOOKED_INTO))
        self._seen = [
            _Seen(one, one._version, _values(one) if place % every == 0 else ()) for place, one in enumerate(tensors)
        ]
        self._copies, self._changed = None, False

    @torch.no_grad()
    def want(self) -> None:
        """They will be: copies them, where they have not changed meanwhile."""
        if self._copies is not None or self._changed:
            return
        self._changed = any(one.tensor._version != one.version or _moved(one) for one in self._seen)
        if not self._changed:
            self._copies = {id(one.tensor): one.tensor.detach().clone() for one in self._seen}

    def copies(self) -> dict[int, torch.Tensor]:
        """By id of each tensor. Raises EvenstepError where they had changed before they were wanted."""
        self.want()
        if self._copies is None:
            raise EvenstepError(
                "a rank was lost in a step, which cannot be made again: a prepared object with a large state, or parameters "
                "that no prepared optimizer trains (an average, say), had changed in it before (EVEN_ERR_PEER_LOST)\n"
                "  fix: update averages after optimizer.step(), the last one where there are several"
            )
        return self._copies


def untrained(models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Parameters of prepared models that no prepared optimizer trains: fixed ones, or such as the script changes by itself."""
    trained = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
    found = {
        id(one): one
        for model in models.values()
        for one in model.parameters()
        if id(one) not in trained and not is_lazy(one) and not one.is_inference()
    }
    return list(found.values())


def _values(tensor: torch.Tensor) -> tuple[float, ...]:
    """Its first and last one."""
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_complex():
        return ()
    found = tensor.detach()
    return float(found[(0,) * found.dim()]), float(found[(-1,) * found.dim()])


def _moved(one: _Seen) -> bool:
    now = _values(one.tensor) if one.values else ()
    return any(a != b and not (a != a and b != b) for a, b in zip(one.values, now))
