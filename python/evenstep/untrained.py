"""Parameters of prepared models that no prepared optimizer trains: fixed ones, or such as the script changes by itself, an average
of others say. A void pass changes these too, and nobody knows back what they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

_LOOKED_INTO = 8  # parameters of which two values are compared: `.data` changes them without a version


class _Seen(NamedTuple):
    parameter: nn.Parameter
    version: int
    values: tuple[float, ...]


class Untrained:
    """Of one session, as they were when they were looked at last."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def look(self, models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """As they are now."""
        trained = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
        found = {
            id(one): one
            for model in models.values()
            for one in model.parameters()
            if id(one) not in trained and not is_lazy(one) and not one.is_inference()
        }
        every = -(-len(found) // _LOOKED_INTO)
        self._seen = [
            _Seen(one, one._version, _values(one) if place % every == 0 else ())
            for place, one in enumerate(found.values())
        ]

    @property
    def changed(self) -> bool:
        """Since they were looked at."""
        return any(one.parameter._version != one.version or _moved(one) for one in self._seen)


def _values(parameter: nn.Parameter) -> tuple[float, ...]:
    """Its first and last one."""
    if not parameter.numel() or parameter.layout is not torch.strided or parameter.is_complex():
        return ()
    flat = parameter.detach()
    return float(flat[(0,) * flat.dim()]), float(flat[(-1,) * flat.dim()])


def _moved(one: _Seen) -> bool:
    now = _values(one.parameter) if one.values else ()
    return any(a != b and not (a != a and b != b) for a, b in zip(one.values, now))
