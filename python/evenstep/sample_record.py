"""A decoded sample as bytes, and back: tensors, NumPy arrays, PIL images, numbers and words, in tuples, lists and dictionaries."""

from __future__ import annotations

import importlib
import marshal
import struct
import sys
from typing import Any

import torch

from evenstep._core import EvenstepError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HEAD = struct.Struct("<I")
_ALIGNED = 16


def pack(sample: Any) -> list[bytes | memoryview]:
    """Pieces to be written one after the other. Errors: EvenstepError where the sample has anything else in it."""
    pieces: list[bytes | memoryview] = []
    tree = marshal.dumps(_tree(sample, pieces))
    head = _HEAD.pack(len(tree)) + tree
    return [head + bytes(-len(head) % _ALIGNED), *pieces]


def unpack(record: bytearray) -> Any:
    """The sample; its tensors and arrays lie in `record`, which is theirs from now on."""
    (length,) = _HEAD.unpack_from(record)
    end = _HEAD.size + length
    return _sample(marshal.loads(memoryview(record)[_HEAD.size : end]), record, [end + -end % _ALIGNED])


def _put(data: bytes | memoryview, pieces: list[bytes | memoryview]) -> int:
    size = len(data)
    pieces.append(data)
    if size % _ALIGNED:
        pieces.append(bytes(-size % _ALIGNED))
    return size


def _tree(value: Any, pieces: list[bytes | memoryview]) -> tuple[Any, ...]:
    kind = type(value)
    if kind in _PLAIN:
        return ("=", value)
    if kind in (tuple, list):
        return ("(" if kind is tuple else "[", [_tree(one, pieces) for one in value])
    if kind is dict:
        return ("{", [(_tree(key, pieces), _tree(one, pieces)) for key, one in value.items()])
    if (
        kind is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
    ):
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        size = _put(memoryview(flat.view(torch.uint8).numpy()) if len(flat) else b"", pieces)
        return ("t", str(value.dtype).split(".", 1)[1], list(value.shape), size)
    numpy: Any = sys.modules.get("numpy")
    array = numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic))
    if array and not value.dtype.hasobject and value.dtype.names is None:
        size = _put(value.tobytes(), pieces)
        return ("n" if kind is numpy.ndarray else "s", value.dtype.str, list(value.shape), size)
    pil: Any = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        return _image(value, pieces)
    raise EvenstepError(
        f"es.SampleCache was given a sample with a {kind.__module__}.{kind.__qualname__} in it, which it cannot keep\n"
        "  fix: let the data set give tensors (on the CPU, without gradient), NumPy arrays, PIL images, numbers and strings, in "
        "tuples, lists and dictionaries, and make anything else of them in a data set around the cache"
    )


def _image(image: Any, pieces: list[bytes | memoryview]) -> tuple[Any, ...]:
    """What it shows, its palette, and of what its file said that which is plain (EXIF, transparency, DPI)."""
    palette = None
    size = _put(image.tobytes(), pieces)  # loads one of a file, and with it the palette
    if (
        image.mode in ("P", "PA") and image.palette is not None
    ):  # others keep one of a frame before, which says nothing of them
        palette = image.palette.mode, bytes(image.getpalette(image.palette.mode))
    said = {}
    for key, value in image.info.items():
        try:
            said[key] = marshal.dumps(value)
        except ValueError:  # of a class of PIL's
            continue
    return ("i", image.mode, list(image.size), size, palette, said)


def _made_image(tree: tuple[Any, ...], data: memoryview) -> Any:
    _, mode, shape, _, palette, said = tree
    image = importlib.import_module("PIL.Image").frombytes(mode, tuple(shape), bytes(data))
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info.update({key: marshal.loads(value) for key, value in said.items()})
    return image


def _sample(tree: tuple[Any, ...], record: bytearray, at: list[int]) -> Any:
    kind = tree[0]
    if kind == "=":
        return tree[1]
    if kind in "([":
        items = [_sample(one, record, at) for one in tree[1]]
        return tuple(items) if kind == "(" else items
    if kind == "{":
        return {_sample(key, record, at): _sample(one, record, at) for key, one in tree[1]}
    _, name, shape, size = tree[:4]
    offset = at[0]
    at[0] += size + -size % _ALIGNED
    if kind == "i":
        return _made_image(tree, memoryview(record)[offset : offset + size])
    if kind == "t":
        dtype = getattr(torch, name)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(record, dtype=torch.uint8, count=size, offset=offset)
        return flat.view(dtype).reshape(shape)
    numpy: Any = sys.modules["numpy"]
    array = numpy.ndarray(shape, name, record, offset) if size else numpy.empty(shape, name)
    return array if kind == "n" else array[()]
