"""What `es.comm` sees of an array: where it lies, how much it is, what the engine can do with it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.errors import error_of


class Data(NamedTuple):
    """One array's memory. `dtype` is -1 where the engine can only move it; `reals` is 2 for complex numbers."""

    address: int
    length: int
    element: int
    dtype: int
    reals: int
    read_only: bool
    keeper: Any

    @property
    def bytes(self) -> int:
        return self.length * self.element

    @property
    def elements(self) -> int:
        """What ranks compare of the bytes that they move; 0 where it is not known, or nothing is moved."""
        if self.dtype < 0 or not self.bytes:
            return 0
        return self.dtype + 1 if self.reals == 1 else _core.ELEMENTS_OTHER + self.dtype

    @property
    def kind(self) -> int:
        """The same of what a message moves, or nothing, which is compared only where there is something."""
        return self.dtype + 1 if self.reals == 1 else _core.ELEMENTS_OTHER + self.dtype

    @property
    def end(self) -> int:
        return self.address + self.bytes


_FLOATS = {4: _core.DTYPE_F32, 8: _core.DTYPE_F64, 2: _core.DTYPE_F16}
_INTEGERS = {1: _core.DTYPE_I8, 2: _core.DTYPE_I16, 4: _core.DTYPE_I32, 8: _core.DTYPE_I64}
_UNSIGNED = {1: _core.DTYPE_U8, 2: _core.DTYPE_U16, 4: _core.DTYPE_U32, 8: _core.DTYPE_U64}


def argument_error(what: str, fix: str) -> EvenstepError:
    return error_of("EVEN_ERR_ARGUMENT", what, fix)


def _dtype_of(format: str, element: int) -> int:
    """Of an item of the buffer protocol, by its letter as in the module struct."""
    letter = format.lstrip("@=<")
    if letter in ("f", "d", "e"):
        return _FLOATS[element]
    if letter in ("b", "h", "i", "l", "q", "n"):
        return _INTEGERS[element]
    if letter in ("B", "H", "I", "L", "Q", "N"):
        return _UNSIGNED[element]
    return {"c": _core.DTYPE_U8, "?": _core.DTYPE_BOOL}.get(letter, -1)


def _of_buffer(array: Any) -> Data:
    view = memoryview(array)
    if not view.c_contiguous:
        raise argument_error("the elements of the buffer do not lie one after the other", "pass a contiguous one")
    dtype = _dtype_of(view.format, view.itemsize)
    source = bytearray(view.cast("B")) if view.readonly and view.nbytes else view
    memory = (ctypes.c_char * view.nbytes).from_buffer(source) if view.nbytes else None
    address = 0 if memory is None else ctypes.addressof(memory)
    count = view.nbytes // view.itemsize if view.itemsize else 0
    return Data(address, count, view.itemsize, dtype, 1, view.readonly, memory)


def data_of(array: Any, *, written: bool = False) -> Data:
    """The memory of an array; `written`: the call will write into it."""
    try:
        data = Data(*_core.data_of(array))
    except TypeError:
        try:
            data = _of_buffer(array)
        except TypeError:
            raise argument_error(
                f"{type(array).__name__!r} is no array whose memory can be seen",
                "pass a NumPy array, a tensor with DLPack, or an object with the buffer protocol",
            ) from None
    if written and data.read_only:
        raise argument_error("the call writes into an array that is read-only", "pass a copy")
    return data


def kind_of_all(parts: Sequence[Data]) -> int:
    """The kind of these; 0 where they differ."""
    kinds = {(part.dtype, part.reals) for part in parts}
    return parts[0].kind if len(kinds) == 1 else 0


def reduced_as(data: Data, op: int, name: str) -> tuple[int, int]:
    """Elements and dtype for the engine's reduction."""
    floating = data.dtype in (*_FLOATS.values(), _core.DTYPE_BF16)
    possible = data.dtype >= 0 and (
        op == _core.OP_SUM
        or (op == _core.OP_AVG and floating)
        or (op in (_core.OP_PRODUCT, _core.OP_MIN, _core.OP_MAX) and data.reals == 1)
        or (op in (_core.OP_BAND, _core.OP_BOR, _core.OP_BXOR) and not floating)
    )
    if not possible:
        raise argument_error(
            f"elements of this dtype ({data.element} bytes each) cannot be reduced with {name!r}",
            "integers have no average, floats no bits, complex numbers sums and averages alone; structures, dates, strings and "
            "numbers in another byte order can be moved only",
        )
    return data.length * data.reals, data.dtype


def check_same_dtype(a: Data, b: Data, call: str) -> None:
    if (a.dtype, a.element, a.reals) != (b.dtype, b.element, b.reals) and a.length and b.length:
        raise argument_error(
            f"{call}: the input and the output have elements of different dtypes", "give both the same"
        )


def check_apart(output: Data, source: Data, call: str, place: int = -1) -> None:
    """The output overlaps the source nowhere, but where it begins `place` bytes behind the source's beginning, which is in
    place: one is a part of the other (all_gather, whose part is the input, gives the two in turn)."""
    if source.bytes and output.bytes and source.address < output.end and output.address < source.end:
        if place >= 0 and output.address - source.address == place:
            return
        raise argument_error(
            f"{call}: the output overlaps the input", "give them memory of their own, or the input its own place in it"
        )


def counts_of(counts: Sequence[int] | None, total: int, ranks: int, call: str) -> list[int]:
    """Elements of each rank; equal parts where none are given."""
    if counts is None:
        if total % ranks:
            raise argument_error(
                f"{call}: {total} elements do not divide among {ranks} ranks", f"give counts=, {ranks} numbers"
            )
        return [total // ranks] * ranks
    numbers = [int(count) for count in counts]
    if len(numbers) != ranks or min(numbers) < 0 or sum(numbers) != total:
        raise argument_error(
            f"{call}: counts {numbers} for {total} elements and {ranks} ranks",
            "give one count for each rank; together they are all elements",
        )
    return numbers
