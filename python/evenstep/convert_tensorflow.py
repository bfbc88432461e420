"""TensorFlow's checkpoint format ("tensor bundle"): PREFIX.index, a sorted table of names in LevelDB's form
whose values are protocol buffers, and PREFIX.data-K-of-N, the values themselves. Sources of the layout: LevelDB's
doc/table_format.md, TensorFlow's tensor_bundle.proto, tensor_shape.proto, tensor_slice.proto, saved_tensor_slice_util.cc and
ordered_code.cc (keys of a partitioned variable's parts). All numbers are little-endian, but for those in keys."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import torch

from evenstep.convert_contents import DAMAGED, UNSUPPORTED, Contents, Refused, Tensors
from evenstep.convert_safetensors import leave_all_but_weights, leave_files
from evenstep.convert_tensorflow_graph import GRAPH, VALUE, Graph, read_graph, text_of
from evenstep.convert_tensorflow_states import put_by_names, take_by_names, take_from_graph
from evenstep.convert_tensorflow_table import (
    FOOTER,
    MAGIC,
    make_table,
    masked,
    read_fields,
    read_table,
    write_field,
    write_varint,
)

_MOST_INDEX = 1 << 30
_MOST_DIMENSIONS = 64
_ALL = (1 << 64) - 1  # the length -1: all of a dimension
_NAME = "model"  # PREFIX of what is written
_COUNTER = "save_counter"
_OTHERS = (GRAPH.decode(), _COUNTER, "_optimizer", "optimizer/", ".OPTIMIZER_SLOT")  # where no graph says what is what

_TYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
    24: torch.float8_e5m2,
    25: torch.float8_e4m3fn,
}
_TYPE_STRING = 7
_PART = b"\0"  # before the name of a partitioned variable, in the key of a part of it
_CODES = {dtype: code for code, dtype in _TYPES.items()}


# -- reading --


def prefix_of(path: Path) -> Path | None:
    """The prefix that is meant: by itself, by its .index, or by a folder with one of them. None: no such files."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        named = path / "checkpoint"
        if named.is_file() and named.stat().st_size < 1 << 20:
            match = re.search(r'^model_checkpoint_path: "([^"/\\]+)"', named.read_text(errors="replace"), re.MULTILINE)
            found = [path / f"{match.group(1)}.index"] if match else found
        return prefix_of(found[0]) if len(found) == 1 else None
    index = path if path.name.endswith(".index") else path.with_name(path.name + ".index")
    if not index.is_file() or index.stat().st_size < FOOTER:
        return None
    with index.open("rb") as file:
        file.seek(-8, 2)
        whole = file.read(8) == struct.pack("<Q", MAGIC)
    return index.with_name(index.name[: -len(".index")]) if whole else None


def _shape(data: bytes) -> tuple[int, ...]:
    shape = []
    for number, value in read_fields(data):
        if number == 2:
            size = next((item for field, item in read_fields(value) if field == 1), 0)
            if size >= 1 << 63:
                raise ValueError("a dimension below zero")
            shape.append(size)
        elif number == 3 and value:
            raise ValueError("a shape of unknown rank")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions")
    if math.prod(max(size, 1) for size in shape) >= 1 << 59:  # 16 bytes each
        raise ValueError("a shape that no tensor has")
    return tuple(shape)


def _extents(data: bytes) -> list[tuple[int, int]]:
    """(start, length) in each dimension; (0, -1): all of it."""
    extents = []
    for number, value in read_fields(data):
        if number == 1:
            fields: dict[int, Any] = {1: 0, 2: _ALL, **dict(read_fields(value))}
            start, length = fields[1], -1 if fields[2] == _ALL else fields[2]
            if start >= 1 << 63 or length >= 1 << 63 or length == 0 or (length < 0 and start != 0):
                raise ValueError("a part that is none")
            extents.append((start, length))
    return extents


def _ordered(value: int) -> bytes:
    """A number with a sign as keys have it, which sort as their numbers: as many leading bits as bytes tell its length."""
    size = (~value if value < 0 else value).bit_length() // 7 + 1
    return (value & (1 << 8 * size) - 1 ^ ((1 << size) - 1) << 7 * size).to_bytes(size, "big")


def _part_key(key: bytes, extents: list[tuple[int, int]]) -> bytes:
    count = len(extents).to_bytes(1, "big") if extents else b""  # of a shape: _MOST_DIMENSIONS
    places = b"".join(_ordered(start) + _ordered(length) for start, length in extents)
    return _PART + key.replace(b"\0", b"\0\xff") + b"\0\1" + bytes([len(count)]) + count + places


class _Bundle:
    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + ".index")
        if self.index.stat().st_size > _MOST_INDEX:
            raise Refused(f"{self.index} is larger than such a table is", "", DAMAGED)
        try:
            self.table = read_table(self.index.read_bytes())
            header = dict(read_fields(self.table.pop(b"")))
        except (ValueError, KeyError, IndexError, struct.error) as error:
            raise self.damaged(str(error) or "it has no header") from None
        except Refused as refused:
            raise Refused(f"{self.index}: {refused.what}", refused.fix, refused.code) from None
        self.shards = header.get(1, 1)
        if header.get(2, 0) != 0:
            raise Refused(f"{self.index} is of a big-endian machine", "", UNSUPPORTED)

    def damaged(self, why: str) -> Refused:
        return Refused(f"{self.index} is damaged: {why}", "check the copy", DAMAGED)

    def read(self, key: bytes, name: str, value: bytes, into: Contents) -> torch.Tensor | None:
        parts = [part for number, part in read_fields(value) if number == 7]
        code = self._entry(value)[0]
        if code not in _TYPES:
            into.leave(f"{name!r}: {'text' if code == _TYPE_STRING else f'of type {code}'}, not numbers")
            return None
        return self._joined(key, name, value, parts) if parts else self._values(name, value)

    def _entry(self, value: bytes) -> list[Any]:
        fields: dict[int, Any] = {1: 0, 2: b"", 3: 0, 4: 0, 5: 0, 6: 0}
        fields.update(read_fields(value))
        return [fields[number] for number in range(1, 7)]

    def _joined(self, key: bytes, name: str, value: bytes, slices: list[bytes]) -> torch.Tensor:
        """A partitioned variable: each part has an entry of its own, of its own shape. Of what is not there no memory is taken."""
        code, form = self._entry(value)[:2]
        shape = _shape(form)
        parts: list[tuple[list[slice], torch.Tensor]] = []
        for written in slices:
            extents = _extents(written)
            entry = self.table.get(_part_key(key, extents))
            if entry is None or self._entry(entry)[0] != code or len(extents) != len(shape):
                raise ValueError(f"{name!r} lacks a part, or has one of another type or shape")
            place = [
                slice(0, size) if length < 0 else slice(start, start + length)
                for (start, length), size in zip(extents, shape)
            ]
            part = self._values(name, entry)
            ends = all(one.stop <= size for one, size in zip(place, shape))
            if not ends or tuple(part.shape) != tuple(one.stop - one.start for one in place):
                raise ValueError(f"{name!r} has a part that is not of its shape")
            parts.append((place, part))
        if sum(part.numel() for _, part in parts) != math.prod(shape):
            raise ValueError(f"{name!r} has parts that are not the whole")
        whole, covered = torch.empty(shape, dtype=_TYPES[code]), torch.zeros(shape, dtype=torch.bool)
        for place, part in parts:
            whole[tuple(place)], covered[tuple(place)] = part, True
        if not covered.all():
            raise ValueError(f"{name!r} has parts that overlap")
        return whole

    def graph(self) -> Graph | None:
        """None: there is none, as in what tf.compat.v1.train.Saver wrote."""
        code, _, shard, offset, size, crc = self._entry(self.table.get(GRAPH, b""))
        if code != _TYPE_STRING or size == 0:
            return None
        try:
            return read_graph(text_of(self._bytes("the graph of its objects", shard, offset, size), crc))
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise self.damaged(str(error)) from None

    def _values(self, name: str, value: bytes) -> torch.Tensor:
        code, shape, shard, offset, size, crc = self._entry(value)
        dimensions, dtype = _shape(shape), _TYPES[code]
        if math.prod(dimensions) * dtype.itemsize != size:
            raise ValueError(f"{name!r} has {size} bytes, which its shape has not")
        data = self._bytes(repr(name), shard, offset, size)
        if masked(data) != crc:
            raise ValueError(f"the values of {name!r} are altered: their checksum is wrong")
        if not data:
            return torch.empty(dimensions, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(dimensions).clone()

    def _bytes(self, what: str, shard: int, offset: int, size: int) -> bytes:
        path = self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.shards:05d}")
        if shard >= self.shards or not path.is_file() or offset + size > path.stat().st_size:
            raise ValueError(f"{what} lies beyond the end of {path.name}, or that is not there")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def _name_of(key: str) -> str:
    return key[: -len(VALUE)] if key.endswith(VALUE) else key


def read_bundle(prefix: Path) -> Contents:
    bundle = _Bundle(prefix)
    into = Contents("TensorFlow", {"model": {}})
    graph = bundle.graph()
    states: Tensors = {}
    for key, value in bundle.table.items():
        if key.startswith(_PART) or (key == GRAPH and graph is not None):
            continue  # its variable has it
        try:
            name = key.decode("utf-8")
            inside = graph is not None and name in graph.states
            known = inside or (graph is not None and name in graph.weights and _name_of(name) != _COUNTER)
            if not known and any(other in name for other in _OTHERS):
                into.leave(f"{name!r} of TensorFlow's own")
                continue
            tensor = bundle.read(key, name, value, into)
        except (ValueError, KeyError, TypeError, struct.error) as error:  # TypeError: a number where bytes should be
            raise bundle.damaged(str(error)) from None
        if tensor is not None:
            weights = {} if graph is None else graph.weights
            (states if inside else into.model())[name if inside else weights.get(name, _name_of(name))] = tensor
    if not into.model():
        raise Refused(f"{bundle.index} holds no weights")
    if graph is not None:
        take_from_graph(into, graph, states)
    else:
        take_by_names(into)
    into.note("names and layouts are TensorFlow's: a dense layer's kernel is the transpose of torch's weight")
    return into


# -- writing --


def _entry(tensor: torch.Tensor, offset: int, data: bytes) -> bytes:
    dimensions = b"".join(write_field(2, write_field(1, size)) for size in tensor.shape)
    head = (
        write_field(1, _CODES[tensor.dtype])
        + write_field(2, dimensions)
        + write_field(4, offset)
        + write_field(5, len(data))
    )
    return head + write_varint(6 << 3 | 5) + struct.pack("<I", masked(data))


def _check_types(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES or tensor.layout != torch.strided:
            raise Refused(f"tensor {name!r} ({tensor.dtype}) has no type in TensorFlow's format", "", UNSUPPORTED)


def write_folder(contents: Contents, folder: Path) -> None:
    """A folder for tf.train.latest_checkpoint, tf.train.load_checkpoint and tf.compat.v1.train.Saver: variables under torch's names."""
    states = put_by_names(contents)
    leave_all_but_weights(contents)
    leave_files(contents)
    tensors = {**contents.model(), **states}
    _check_types(tensors)
    # 1 shard, little-endian; version 1 of the form
    table = {b"": write_field(1, 1) + write_field(3, write_field(1, 1))}
    with (folder / f"{_NAME}.data-00000-of-00001").open("wb") as file:
        for name in sorted(tensors):
            plain = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            table[name.encode()] = _entry(plain, file.tell(), data)
            file.write(data)
    (folder / f"{_NAME}.index").write_bytes(make_table(table))
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{_NAME}"\nall_model_checkpoint_paths: "{_NAME}"\n')
    contents.note("variables have torch's names and layouts: assign them by name, and transpose dense kernels")
