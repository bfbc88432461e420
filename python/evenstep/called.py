"""What ranks compare of a call, in Python, where no engine of ours sees the whole of it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from evenstep import _core

_CALLS = ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "barrier")
_DTYPES, OPERATIONS = (
    {getattr(_core, name): name[len(kind) :] for name in dir(_core) if name.startswith(kind)}
    for kind in ("DTYPE_", "OP_")
)
DIFFERS_FIX = (
    "all ranks must make the same calls in the same order: look for a branch that depends on the rank or on the data"
)
_OTHER_TYPES = 256  # from here on numbers of elements are none of the engine's dtypes (src/comm/called.h)


class Called(NamedTuple):
    """A call as the ranks compare it."""

    kind: int  # of _CALLS
    dtype: int
    op: int  # of what only moves: the number of its elements
    root: int
    size: int  # in elements
    parts: int  # stands for how it is divided among the ranks

    def __str__(self) -> str:
        """In the engine's words."""
        name = _CALLS[self.kind]
        if name == "barrier":
            return name
        if name in ("all_gather", "broadcast"):
            kind = f" of {_DTYPES.get(self.op - 1, '?')}" if self.op < _OTHER_TYPES else f" of another type ({self.op})"
            where = "in all" if name == "all_gather" else f"from rank {self.root}"
            return f"{name} of {self.size} bytes{kind if self.op else ''} {where}"
        to = f" to rank {self.root}" if name == "reduce" else ""
        return f"{name} of {self.size} {_DTYPES[self.dtype]} elements with {OPERATIONS[self.op]}{to}"


def called(name: str, dtype: int = 0, op: int = 0, root: int = 0, counts: Sequence[int] = ()) -> Called:
    parts = zlib.crc32(array("q", counts)) if len(counts) > 1 else 0
    return Called(_CALLS.index(name), dtype, op, root, sum(counts), parts)
