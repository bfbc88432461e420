"""Values of a few known kinds as bytes, and back: what the ranks tell one another. Reading them builds plain Python values,
tensors and Evenstep's own records, runs nothing that the bytes say, and imports nothing but evenstep's modules.

Bytes are JSON. A value that is not what JSON has as well is an object with one tag; dictionaries are tagged, too, so that
their keys may be anything that has a hash.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import importlib
import json
import math
import sys
from collections import Counter, OrderedDict
from typing import Any, Callable

import torch

from evenstep._core import EvenstepError

_OWN = "evenstep."  # modules whose records may be built
_DICTIONARIES: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}
_DEPTH = 64


def dumps(value: Any) -> bytes:
    """Of None, booleans, numbers, strings, bytes, lists, tuples, sets, dictionaries, tensors (not sparse or quantised), NumPy
    numbers, torch's dtypes, sizes and devices, and evenstep's dataclasses, named tuples and enumerations of such.

    Raises TypeError for anything else, and for integers above 4,300 digits.
    """
    try:
        return json.dumps(_encoded(value, 0), separators=(",", ":")).encode("ascii")
    except ValueError as error:
        raise TypeError(f"a value cannot be told to other ranks: {error}") from None


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The inverse. Raises EvenstepError where the bytes are none of `dumps`'s."""
    try:
        return _decoded(json.loads(bytes(data).decode("ascii")), 0)
    except EvenstepError:
        raise
    except Exception as error:  # bytes of somebody else's fail in any way; none of them runs code
        raise EvenstepError(f"a message between ranks cannot be read: {type(error).__name__}: {error}") from None


def _encoded(value: Any, depth: int) -> Any:
    if depth > _DEPTH:
        raise TypeError(f"a value is nested more than {_DEPTH} deep")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(one, depth + 1) for one in value]
    if isinstance(value, torch.Tensor):
        return {"tensor": _tensor(value)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if kind is tuple:
        return {"tuple": [_encoded(one, depth + 1) for one in value]}
    if kind in (set, frozenset):
        return {kind.__name__: [_encoded(one, depth + 1) for one in value]}
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        pairs = [[_encoded(k, depth + 1), _encoded(v, depth + 1)] for k, v in value.items()]
        return {_DICTIONARIES.get(kind, "dict"): pairs}
    return _encoded_rare(value, depth)


def _encoded_rare(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {kind.__name__: str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)):
        return {"numpy": [value.dtype.name, value.item()]}
    if numpy is not None and isinstance(value, numpy.complexfloating):
        return {"numpy": [value.dtype.name, [float(value.real), float(value.imag)]]}
    if kind.__module__.startswith(_OWN):
        name = [kind.__module__, kind.__qualname__]
        if isinstance(value, enum.Enum):
            return {"own": [*name, _encoded(value.value, depth + 1)]}
        if dataclasses.is_dataclass(value):
            fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            return {"own": [*name, _encoded(fields, depth + 1)]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"own": [*name, _encoded(list(value), depth + 1)]}
    for plain in (bool, int, float, str):  # of a class of its own: numbers of IntEnum, strings of a library
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be told to other ranks")


def _tensor(value: torch.Tensor) -> list[Any]:
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"a tensor of layout {value.layout} and type {value.dtype} cannot be told to other ranks")
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().tobytes() if flat.numel() else b""
    return [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode("ascii")]


def _decoded(value: Any, depth: int) -> Any:
    if depth > 4 * _DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_decoded(one, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _KINDS[tag](content, depth + 1)


def _decoded_tensor(content: Any, _: int) -> torch.Tensor:
    name, shape, text = content
    kind = _dtype(name)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("no shape")
    data = bytearray(base64.b64decode(text, validate=True))
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _dtype(name: Any) -> torch.dtype:
    kind = vars(torch).get(name) if isinstance(name, str) else None  # no getattr: that may import what is not there yet
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"no type of torch's: {name!r}")
    return kind


def _decoded_numpy(content: Any, _: int) -> Any:
    import numpy

    name, value = content
    kind = numpy.dtype(str(name))
    if kind.kind not in "biufc":
        raise ValueError(f"no number of NumPy's: {name!r}")
    return kind.type(complex(*value) if kind.kind == "c" else value)


def _decoded_own(content: Any, depth: int) -> Any:
    module, name, held = content
    if not (isinstance(module, str) and module.startswith(_OWN)):
        raise ValueError(f"no record of evenstep's: {module!r}")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = vars(kind)[part]
    if not isinstance(kind, type) or kind.__module__ != module:
        raise ValueError(f"no record of evenstep's: {name!r}")
    held = _decoded(held, depth)
    if issubclass(kind, enum.Enum):
        return kind(held)
    if issubclass(kind, tuple) and hasattr(kind, "_make"):
        return kind._make(held)
    if not dataclasses.is_dataclass(kind) or {one.name for one in dataclasses.fields(kind)} != set(held):
        raise ValueError(f"no record of evenstep's: {name!r}")
    made = object.__new__(kind)
    for field, one in held.items():
        object.__setattr__(made, field, one)
    return made


_KINDS: dict[str, Callable[[Any, int], Any]] = {
    "tensor": _decoded_tensor,
    "size": lambda content, _: torch.Size(content),
    "tuple": lambda content, depth: tuple(_decoded(content, depth)),
    "set": lambda content, depth: set(_decoded(content, depth)),
    "frozenset": lambda content, depth: frozenset(_decoded(content, depth)),
    "dict": lambda content, depth: {_decoded(k, depth): _decoded(v, depth) for k, v in content},
    "ordered": lambda content, depth: OrderedDict((_decoded(k, depth), _decoded(v, depth)) for k, v in content),
    "counter": lambda content, depth: Counter({_decoded(k, depth): _decoded(v, depth) for k, v in content}),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "bytearray": lambda content, _: bytearray(base64.b64decode(content, validate=True)),
    "complex": lambda content, _: complex(*content),
    "dtype": lambda content, _: _dtype(content),
    "device": lambda content, _: torch.device(content),
    "numpy": _decoded_numpy,
    "own": _decoded_own,
}
