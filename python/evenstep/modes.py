"""What es.prepare(sync=…) may be: ranks that exchange less often than at every step, or later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Union

MOST_STALE = 8


def _check_every(name: str, every: int) -> None:
    if not (isinstance(every, int) and every >= 1):
        raise ValueError(f"es.{name}(every={every!r}): give a whole number of optimizer steps, at least 1")


@dataclass(frozen=True)
class LocalSGD:
    """Each rank steps on its own gradients; every `every` optimizer steps the parameters become their mean over the ranks,
    each with the samples that it has trained on since (Stich, "Local SGD converges fast and communicates little", 2019)."""

    every: int = 8

    def __post_init__(self) -> None:
        _check_every("LocalSGD", self.every)

    def __str__(self) -> str:
        return f"local SGD every {self.every} steps"


@dataclass(frozen=True)
class DiLoCo:
    """As LocalSGD, but what the ranks have moved in `every` steps is one gradient for an outer SGD with Nesterov momentum
    (Douillard et al., "DiLoCo", 2023)."""

    every: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_every("DiLoCo", self.every)
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise ValueError(f"es.DiLoCo(outer_lr={self.outer_lr!r}): give a number > 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"es.DiLoCo(outer_momentum={self.outer_momentum!r}): give a number from 0 to below 1")

    def __str__(self) -> str:
        return f"DiLoCo every {self.every} steps"


@dataclass(frozen=True)
class Stale:
    """Each optimizer step uses the exact gradient of `steps` steps before, which was exchanged while the ranks went on; the
    first `steps` steps change nothing (Li et al., "Pipe-SGD", NeurIPS 2018, with a pipeline of `steps`). A rank may be as many steps
    ahead of another (bounded staleness: Ho et al., NIPS 2013)."""

    steps: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.steps, int) and 1 <= self.steps <= MOST_STALE):
            raise ValueError(f"es.Stale(steps={self.steps!r}): give a whole number of steps from 1 to {MOST_STALE}")


Mode = Union[LocalSGD, DiLoCo, Stale]
