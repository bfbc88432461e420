"""The random numbers of a block that shares a process with others: torch's, random's and NumPy's global generators, put aside
while another block has its turn."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from evenstep.random_generators import NumPyGenerator, PythonGenerator, numpy_seed, seed_generators

__all__ = ["NumPyGenerator", "PythonGenerator", "Randoms"]


class Randoms:
    """Of one block; `begin` when it begins, `take` before another one has its turn, `put` after."""

    def __init__(self, seed: int, numpy: NumPyGenerator, python: PythonGenerator) -> None:
        self._seed, self._numpy, self._python = seed, numpy, python
        self._seen: tuple[bytes | None, Any] = (None, None)
        self._state: tuple[Any, Any, Any] | None = None

    def begin(self) -> None:
        seed_generators(self._seed)
        self._seen = self._numpy.look(), self._python.look()

    def take(self) -> None:
        numpy = sys.modules.get("numpy")
        # What remains of a pair of normal numbers is no part of that memory, but comes of drawing the pair.
        drawn = self._seen[0] is None or self._numpy.look() != self._seen[0]
        self._state = (
            torch.default_generator.get_state(),
            random.getstate() if self._python.drawn_since(self._seen[1]) else None,
            numpy.random.get_state(legacy=False) if numpy is not None and drawn else None,
        )

    def put(self) -> None:
        assert self._state is not None
        numpy = sys.modules.get("numpy")
        torch.default_generator.set_state(self._state[0])
        if self._state[1] is not None:
            random.setstate(self._state[1])
        else:
            random.seed(self._seed)
        if self._state[2] is not None:
            assert numpy is not None
            numpy.random.set_state(self._state[2])
        elif numpy is not None:
            numpy.random.seed(numpy_seed(self._seed))
