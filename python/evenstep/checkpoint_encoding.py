"""Nested training state as JSON plus named tensors, and back. No pickle: the key of what fits neither is named."""

from __future__ import annotations

import base64
import functools
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from typing import Any, Callable

import torch

from evenstep._core import EvenstepError

_INT64 = 1 << 63
_MISSING = object()


class UnsavableState(EvenstepError):
    """Something in the training state that a checkpoint cannot hold."""


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for `value`; its tensors go to `tensors` under names that begin with `where`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encode_text(value)
    if isinstance(value, torch.Tensor):
        return {"$tensor": _put(value, where, tensors)}
    if type(value) is dict:  # most of a state, and none of numpy's
        return _encode_dict(value, where, tensors)
    if _is_numpy(value):
        return _encode_numpy(value, where, tensors)
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else {"$int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where, tensors)
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode(item, f"{where}/{i}", tensors) for i, item in enumerate(sorted(value, key=repr))]}
    return _encode_rare(value, where)


def _put(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    """Its name: `where`, or, where another has that ({"a/b": …, "a": {"b": …}}), the first that is free."""
    name, others = where, 1
    while name in tensors:
        others += 1
        name = f"{where}~{others}"
    tensors[name] = tensor
    return name


def _encode_text(value: str) -> Any:
    # JSON readers in C take neither NUL nor half a surrogate pair
    if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        return {"$text": [ord(c) for c in value]}
    return value


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _encode_numpy(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import numpy

    if isinstance(value, numpy.ndarray):
        try:
            tensor = torch.from_numpy(numpy.ascontiguousarray(value).copy()).reshape(value.shape)
        except TypeError:
            raise _unsavable(value, where) from None
        return {"$array": _put(tensor, where, tensors)}
    if isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)):
        return {"$numpy": [value.dtype.name, encode(value.item(), where, tensors)]}
    raise _unsavable(value, where)


_DICT_KINDS = ((Counter, "$counter"), (OrderedDict, "$ordered"), (dict, "$dict"))


def _encode_dict(value: dict[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = next(name for cls, name in _DICT_KINDS if isinstance(value, cls))
    plain = kind == "$dict" and all(
        isinstance(key, str) and not key.startswith("$") and _encode_text(key) is key for key in value
    )
    if plain and not isinstance(value, defaultdict):
        return {key: encode(item, f"{where}/{key}", tensors) for key, item in value.items()}
    return {
        kind: [
            [encode(key, f"{where}/(key)", tensors), encode(item, f"{where}/{key}", tensors)]
            for key, item in value.items()
        ]
    }


def _encode_rare(value: Any, where: str) -> Any:
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).split(".", 1)[1]}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if _is_code(value):
        # as torch does with LambdaLR's functions: code is not state; the object that loads keeps its own
        return {"$kept": getattr(value, "__qualname__", type(value).__qualname__)}
    raise _unsavable(value, where)


def _is_code(value: Any) -> bool:
    """Functions, methods, classes, and what else can be called and has nothing of its own. An object whose class says in
    Python what a call does has a state: a module's weights."""
    if isinstance(value, functools.partial):
        return _is_code(value.func)
    if isinstance(value, type) or type(value).__module__ in ("typing", "torch._ops"):
        return True
    if not callable(value):
        return False
    return not (isinstance(type(value).__call__, types.FunctionType) and getattr(value, "__dict__", None))


def _unsavable(value: Any, where: str) -> UnsavableState:
    return UnsavableState(
        f"the training state has something at {where!r} that a checkpoint cannot hold: {type(value).__qualname__}\n"
        "  fix: keep numbers, strings, lists, dictionaries and tensors there, of an object its state_dict() (checkpoints use no pickle)"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor], current: Any = _MISSING) -> Any:
    """The inverse of `encode`. `tensor(name)` gives a tensor; `current` is the same state of the object that loads,
    from which code ("$kept") is taken."""
    if isinstance(value, list):
        return [decode(item, tensor, _at(current, i)) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind.startswith("$"):
            return _decode_kind(kind, content, tensor, current)
    return {
        key: decode(item, tensor, _at(current, key))
        for key, item in value.items()
        if not (_is_kept(item) and _at(current, key) is _MISSING)  # the loading object has no such code: nor a None
    }


def tensor_names(value: Any) -> set[str]:
    """Of all that `decode` would ask for."""
    if isinstance(value, list):
        return set().union(*map(tensor_names, value))
    if not isinstance(value, dict):
        return set()
    names = {value[kind] for kind in ("$tensor", "$array") if isinstance(value.get(kind), str)}
    return names.union(*map(tensor_names, value.values()))


def _hashable(value: Any) -> Any:
    """A key, or a set's member: what is a set in it was a frozenset."""
    if isinstance(value, set):
        return frozenset(value)
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value


def _is_kept(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and "$kept" in value


def _at(current: Any, key: Any) -> Any:
    try:
        return current[key]
    except (LookupError, TypeError):
        return _MISSING


def _decode_kind(kind: str, content: Any, tensor: Callable[[str], torch.Tensor], current: Any) -> Any:
    if kind == "$tensor":
        return tensor(content)
    if kind == "$array":
        return tensor(content).numpy()
    try:
        return _decode_value(kind, content, tensor, current)
    except EvenstepError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise EvenstepError(
            f"the checkpoint is damaged: what it holds as {kind!r} is none ({type(error).__name__}: {error})\n"
            "  fix: resume from an earlier checkpoint"
        ) from None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):  # any other of torch's names, a function's
        raise TypeError(f"{name!r} is no type of torch's")
    return found


def _decode_value(kind: str, content: Any, tensor: Callable[[str], torch.Tensor], current: Any) -> Any:
    if kind == "$numpy":
        import numpy

        return numpy.dtype(content[0]).type(decode(content[1], tensor))
    if kind == "$tuple":
        return tuple(decode(content, tensor, current))
    if kind == "$set":
        return set(map(_hashable, decode(content, tensor)))
    if kind in ("$dict", "$ordered", "$counter"):
        pairs = [(_hashable(decode(key, tensor)), item) for key, item in content]
        cls: Any = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[kind]
        return cls({key: decode(item, tensor, _at(current, key)) for key, item in pairs})
    simple: dict[str, Callable[[Any], Any]] = {
        "$int": int,
        "$float": float,
        "$text": lambda points: "".join(map(chr, points)),
        "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
        "$bytes": base64.b64decode,
        "$dtype": _dtype,
        "$device": torch.device,
        "$kept": lambda name: None if current is _MISSING else current,
    }
    if kind not in simple:
        raise EvenstepError(f"the checkpoint holds a value of the unknown kind {kind!r}\n  fix: use a newer Evenstep")
    return simple[kind](content)
