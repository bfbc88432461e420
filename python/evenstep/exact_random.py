"""The random numbers of a block that shares a process with others: torch's, random's and NumPy's global generators, put aside
while another block has its turn."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

from evenstep.exact_blocks import numpy_seed, seed_generators

_KEY_BYTES = 4 * 624
_STATE_BYTES = _KEY_BYTES + ctypes.sizeof(ctypes.c_int)


class NumPyGenerator:
    """NumPy's global generator. Taking its state and putting it back costs 80 µs, so a generator from which nothing was drawn
    since it was seeded is seeded again instead; whether that is so shows in its memory, which is only looked at."""

    def __init__(self) -> None:
        self._address = 0
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return
        state = numpy.random.get_state(legacy=False)
        try:
            generator = numpy.random.mtrand._rand._bit_generator
            address = int(generator.ctypes.state_address)
        except AttributeError:
            return
        expected = state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder)
        if state["bit_generator"] == "MT19937" and ctypes.string_at(address, _STATE_BYTES) == expected:
            self._address, self._generator = address, generator

    def look(self) -> bytes | None:
        """What changes with every number drawn; None: unknown."""
        numpy = sys.modules.get("numpy")
        if not self._address or numpy is None or numpy.random.mtrand._rand._bit_generator is not self._generator:
            return None
        return ctypes.string_at(self._address, _STATE_BYTES)


class Randoms:
    """Of one block; `begin` when it begins, `take` before another one has its turn, `put` after."""

    def __init__(self, seed: int, numpy: NumPyGenerator) -> None:
        self._seed, self._numpy = seed, numpy
        self._seen: bytes | None = None
        self._state: tuple[Any, Any, Any] | None = None

    def begin(self) -> None:
        seed_generators(self._seed)
        self._seen = self._numpy.look()

    def take(self) -> None:
        numpy = sys.modules.get("numpy")
        # What remains of a pair of normal numbers is no part of that memory, but comes of drawing the pair.
        drawn = self._seen is None or self._numpy.look() != self._seen
        self._state = (
            torch.default_generator.get_state(),
            random.getstate(),
            numpy.random.get_state(legacy=False) if numpy is not None and drawn else None,
        )

    def put(self) -> None:
        assert self._state is not None
        numpy = sys.modules.get("numpy")
        torch.default_generator.set_state(self._state[0])
        random.setstate(self._state[1])
        if self._state[2] is not None:
            assert numpy is not None
            numpy.random.set_state(self._state[2])
        elif numpy is not None:
            numpy.random.seed(numpy_seed(self._seed))
