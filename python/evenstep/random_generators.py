"""The global random number generators of a process, torch's, random's and NumPy's: seeding them, seeing whether anything was
drawn, putting them back."""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
import sys
from typing import Any, Protocol

import torch

_PYTHON_STATE = struct.Struct("625I")  # an index, 624 words
_KEY_BYTES = 4 * 624
_STATE_BYTES = _KEY_BYTES + ctypes.sizeof(ctypes.c_int)


def numpy_seed(seed: int) -> int:
    return seed & 0xFFFFFFFF


def seed_generators(seed: int) -> None:
    """torch's, random's and NumPy's global generators."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # torch.manual_seed would keep a traceback for when it is: milliseconds
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpy_seed(seed))


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


class Watched(Protocol):
    """One generator. A look is taken cheaply, and is enough to see whether anything was drawn since, and to put it back."""

    def seed(self, seed: int) -> None: ...

    def look(self) -> Any: ...

    def drawn_since(self, look: Any) -> bool: ...

    def put_back(self, look: Any) -> None: ...


class _Torch:
    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def look(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def drawn_since(self, look: torch.Tensor) -> bool:
        return not torch.equal(torch.default_generator.get_state(), look)

    def put_back(self, look: torch.Tensor) -> None:
        torch.default_generator.set_state(look)


class PythonGenerator:
    """Of `random`. Its state as a tuple of 625 numbers costs 10 µs; its memory is looked at instead, where it is what CPython
    has there."""

    def __init__(self) -> None:
        instance: Any = random._inst  # type: ignore[attr-defined]
        self._instance, self._address = instance, 0
        start = object.__basicsize__
        version, words, _ = random.getstate()
        if version == 3 and _random.Random.__basicsize__ >= start + _PYTHON_STATE.size:
            address = id(instance) + start
            if ctypes.string_at(address, _PYTHON_STATE.size) == _PYTHON_STATE.pack(words[-1], *words[:-1]):
                self._address = address

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def look(self) -> tuple[Any, float | None]:
        if not self._address:
            _, words, half = random.getstate()
            return words, half
        return ctypes.string_at(self._address, _PYTHON_STATE.size), self._instance.gauss_next

    def drawn_since(self, look: tuple[Any, float | None]) -> bool:
        return self.look() != look

    def put_back(self, look: tuple[Any, float | None]) -> None:
        words, half = look
        if self._address:
            index, *state = _PYTHON_STATE.unpack(words)
            words = (*state, index)
        random.setstate((3, words, half))


class _NumPy:
    """Of normal numbers it draws two, and keeps the second one where nobody can look. That there is none is known of the
    memory of which it was once asked: another one comes by drawing alone."""

    def __init__(self) -> None:
        self._memory: NumPyGenerator | None = None
        self._alone: bytes | None = None  # the memory beside which there was no second number

    def _module(self) -> Any:
        return sys.modules.get("numpy.random")

    def seed(self, seed: int) -> None:
        module = self._module()
        if module is not None:
            module.seed(numpy_seed(seed))
            self._alone = self._look_at_memory()

    def _look_at_memory(self) -> bytes | None:
        if self._memory is None:
            self._memory = NumPyGenerator()
        return self._memory.look()

    def look(self) -> tuple[bytes | None, Any] | None:
        """(memory, the whole state where that does not say all); None: there is no NumPy."""
        module = self._module()
        if module is None:
            return None
        memory = self._look_at_memory()
        if memory is not None and memory == self._alone:
            return memory, None
        state = module.get_state(legacy=False)
        if memory is not None and state["has_gauss"] == 0:
            self._alone = memory
            return memory, None
        return memory, state

    def drawn_since(self, look: tuple[bytes | None, Any] | None) -> bool:
        module = self._module()
        if look is None or module is None:
            return module is not None
        memory, state = look
        if state is None:
            return self._look_at_memory() != memory
        now = module.get_state(legacy=False)
        return bool(
            now["bit_generator"] != state["bit_generator"]
            or (now["has_gauss"], now["gauss"]) != (state["has_gauss"], state["gauss"])
            or _flat(now["state"]) != _flat(state["state"])
        )

    def put_back(self, look: tuple[bytes | None, Any] | None) -> None:
        module = self._module()
        if look is None or module is None:  # NumPy came with the first sample: its seed is anybody's
            return
        memory, state = look
        if state is None:
            assert memory is not None
            words = struct.unpack(f"={_KEY_BYTES // 4}Ii", memory)
            module.set_state(("MT19937", words[:-1], words[-1], 0, 0.0))
            self._alone = memory
        else:
            module.set_state(state)


def _flat(state: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value.tolist() if hasattr(value, "tolist") else value) for name, value in sorted(state.items())]


@functools.cache
def watched() -> tuple[Watched, ...]:
    """Those of this process."""
    return _Torch(), PythonGenerator(), _NumPy()
