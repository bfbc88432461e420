"""A value, and the memory of the tensors in it, apart: on its way from one rank to all, or through a file of one user's.

Tensors come back as they lay: their type, their strides, what memory they shared. Reading builds them and plain values, and runs
nothing that the bytes say (evenstep.plain). Tensors around tensors (of 8-bit optimizers, say) are of classes that this process has
marked as safe to load itself (torch.serialization.add_safe_globals), as torch.load wants it."""

from __future__ import annotations

import ctypes
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evenstep import plain
from evenstep._core import EvenstepError
from evenstep.group import broadcast_bytes, gather_objects

if TYPE_CHECKING:
    from evenstep.group import Group

_LARGE = 1 << 20  # bytes: smaller memories travel together
_HEAD = 8  # bytes of a file: how long its text is


class CannotBeTold(EvenstepError):
    """Something in a rank's value that other ranks cannot be given: raised on all of them."""


class Dense(NamedTuple):
    """Where a tensor lies in one of the memories; strides and offset count elements."""

    memory: int
    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    offset: int
    wants_gradient: bool
    is_parameter: bool


class Sparse(NamedTuple):
    """A sparse one (COO), of its two dense parts."""

    indices: Dense
    values: Dense
    shape: list[int]
    is_coalesced: bool


class Around(NamedTuple):
    """One of a class that is around others (torch's __tensor_flatten__), by its name."""

    kind: str
    parts: dict[str, Any]
    context: Any
    shape: list[int]
    strides: list[int]


@torch.no_grad()
def take_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A text, and what goes with it: bytes in the host's memory, each a tensor's or that of several. Of what `plain` knows, and
    sparse tensors. Raises TypeError for anything else."""
    apart = _Apart()
    tree = apart.take(value)
    return plain.dumps((tree, [memory.numel() for memory in apart.memories])), apart.memories


def sizes_of(text: bytes) -> list[int]:
    """How many bytes go with it. Raises EvenstepError where it is no such text."""
    _, sizes = _read(text)
    return sizes


@torch.no_grad()
def put_together(text: bytes, memories: Sequence[torch.Tensor]) -> Any:
    """The inverse of take_apart; the tensors lie in these memories. Raises EvenstepError where they do not fit the text."""
    tree, sizes = _read(text)
    if [memory.numel() for memory in memories] != sizes:
        raise EvenstepError("a state cannot be read: other memory than its text says")
    try:
        return _Together(memories).give(tree)
    except Exception as error:  # a text of somebody else's fails in any way; none of them runs code
        raise EvenstepError(f"a state cannot be read: {type(error).__name__}: {error}") from None


def _read(text: bytes) -> tuple[Any, list[int]]:
    found = plain.loads(text)
    if type(found) is tuple and len(found) == 2 and type(found[1]) is list:
        tree, sizes = found
        if all(type(size) is int and size >= 0 for size in sizes):
            return tree, sizes
    raise EvenstepError("a state cannot be read: its text has another form")


class _Apart:
    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # of each storage
        self._kept: list[torch.UntypedStorage] = []  # so that no other one gets an address that is known

    def take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind in (list, tuple):
            return kind(self.take(one) for one in value)
        if kind in (dict, OrderedDict, Counter):
            return kind({key: self.take(one) for key, one in value.items()})
        return value

    def _tensor(self, value: Any) -> Dense | Sparse | Around:
        kind = type(value)
        if kind in _classes_around().values():
            names, context = value.__tensor_flatten__()
            parts = {name: self.take(getattr(value, name)) for name in names}
            return Around(_name_of(kind), parts, context, list(value.shape), list(value.stride()))
        sparse = value.layout is torch.sparse_coo
        known = kind in (torch.Tensor, torch.nn.Parameter) and (sparse or value.layout is torch.strided)
        if not known or value.is_quantized or value.is_meta or value.is_nested:
            raise TypeError(
                f"a {kind.__module__}.{kind.__qualname__} of layout {value.layout} and type {value.dtype} on "
                f"{value.device} cannot be told to other ranks"
            )
        if sparse:
            indices, values = (self._dense(part, False, False) for part in (value._indices(), value._values()))
            return Sparse(indices, values, list(value.shape), value.is_coalesced())
        return self._dense(value, value.requires_grad, kind is torch.nn.Parameter)

    def _dense(self, value: torch.Tensor, wants_gradient: bool, is_parameter: bool) -> Dense:
        here = value.detach().resolve_conj().resolve_neg().cpu()
        storage = here.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.memories))
        if number == len(self.memories):
            self.memories.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._kept.append(storage)
        place = list(here.shape), list(here.stride()), here.storage_offset()
        return Dense(number, here.dtype, *place, wants_gradient, is_parameter)


class _Together:
    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._memories = memories

    def give(self, value: Any) -> Any:
        kind = type(value)
        if kind is Dense:
            return self._dense(value)
        if kind is Sparse:
            parts = self._dense(value.indices), self._dense(value.values)
            options = {"is_coalesced": value.is_coalesced, "check_invariants": True}
            return torch.sparse_coo_tensor(*parts, value.shape, **options)
        if kind is Around:
            parts = self.give(value.parts)
            return _classes_around()[value.kind].__tensor_unflatten__(
                parts, value.context, torch.Size(value.shape), tuple(value.strides)
            )
        if kind in (list, tuple):
            return kind(self.give(one) for one in value)
        if kind in (dict, OrderedDict, Counter):
            return kind({key: self.give(one) for key, one in value.items()})
        return value

    def _dense(self, lies: Dense) -> torch.Tensor:
        memory = self._memories[lies.memory]
        size = lies.dtype.itemsize
        whole = memory[: memory.numel() // size * size].view(lies.dtype)
        found = whole.as_strided(lies.shape, lies.strides, lies.offset)  # refuses what is outside
        if lies.is_parameter:
            return torch.nn.Parameter(found, requires_grad=lies.wants_gradient)
        return found.requires_grad_(lies.wants_gradient)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes_around() -> dict[str, Any]:
    """Those that this process has marked, by their names."""
    marked = [one for one in torch.serialization.get_safe_globals() if isinstance(one, type)]
    return {_name_of(one): one for one in marked if hasattr(one, "__tensor_unflatten__")}


# -- between ranks --


def broadcast_state(group: Group, value: Any, root: int = 0) -> Any:
    """The value of rank `root` on all ranks: a copy, there itself; the others' is not looked at. Collective. Raises
    CannotBeTold, on all ranks, where one could not take it apart or put it together."""
    text, memories = b"", []
    if group.rank == root:
        try:
            text, memories = take_apart(value)
        except (
            Exception
        ) as error:  # the others wait: a value may be too deep, a class of the script's may raise anything
            text, memories = plain.dumps(_in_words(error)), []
    text = broadcast_bytes(group, text, root)
    found = plain.loads(text)
    if isinstance(found, str):
        raise CannotBeTold(found)
    if group.rank != root:
        memories = [torch.empty(size, dtype=torch.uint8) for size in sizes_of(text)]
    for some in _messages(memories):
        message = some[0] if len(some) == 1 else torch.cat(some)
        group.broadcast_(message, root)
        if group.rank != root and len(some) > 1:
            for memory, part in zip(some, message.split([memory.numel() for memory in some])):
                memory.copy_(part)
    why = ""
    if group.rank != root:
        try:
            value = put_together(text, memories)
        except Exception as error:
            why = _in_words(error)
    _all_could(group, why)
    return value


def _in_words(error: Exception) -> str:
    if isinstance(error, EvenstepError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _all_could(group: Group, why: str) -> None:
    """why: what kept this rank from it; "": nothing. Collective."""
    if all(mark == b"\0" for mark in group.exchange(b"\1" if why else b"\0")):
        return
    whys = gather_objects(group, why)
    rank = next(rank for rank, one in enumerate(whys) if one)
    raise CannotBeTold(f"rank {rank}: {whys[rank]}")


def _messages(memories: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    some: list[torch.Tensor] = []
    together = 0
    for memory in memories:
        if memory.numel() >= _LARGE:
            yield [memory]
        elif memory.numel() > 0:
            some.append(memory)
            together += memory.numel()
            if together >= _LARGE:
                yield some
                some, together = [], 0
    if some:
        yield some


# -- files --


def write(path: Path, value: Any) -> None:
    """Raises TypeError as take_apart does, OSError."""
    text, memories = take_apart(value)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_HEAD, "little") + text)
        for memory in filter(torch.numel, memories):
            file.write(_bytes(memory))


def read(path: Path) -> Any:
    """What `write` wrote. Raises EvenstepError where the file is none of these, OSError."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _HEAD
        length = int.from_bytes(file.read(_HEAD), "little")
        if length > left:
            raise EvenstepError(f"{path} cannot be read: it ends too early")
        text = file.read(length)
        sizes = sizes_of(text)
        if sum(sizes) != left - length:
            raise EvenstepError(f"{path} cannot be read: it has another length than it says")
        memories = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for memory in filter(torch.numel, memories):
            file.readinto(_bytes(memory))  # type: ignore[attr-defined]
    return put_together(text, memories)


def _bytes(memory: torch.Tensor) -> Any:
    return (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
