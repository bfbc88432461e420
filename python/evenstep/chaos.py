"""What `evenstep chaos` does inside a rank: a gradient becomes NaN, once, when it asks for that."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable

import torch

_ASKED, _DONE = 1, 2  # cli/chaos_rank.c


def spoil_when_asked(parameters: Iterable[torch.Tensor]) -> None:
    """Has these parameters' hooks look at this rank's byte of the memory that EVENSTEP_CHAOS_NAN names: where it asks, the
    first gradient that backward computes is NaN, and the byte says that it was. Without the variable nothing is done."""
    path = os.environ.get("EVENSTEP_CHAOS_NAN")
    if not path:
        return
    with open(path, "r+b") as file:
        asked = mmap.mmap(file.fileno(), 0)
    rank = int(os.environ["RANK"])

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if asked[rank] != _ASKED:
            return None
        asked[rank] = _DONE
        return gradient * math.nan

    for parameter in parameters:
        parameter.register_hook(spoil)
