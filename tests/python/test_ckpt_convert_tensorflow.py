"""TensorFlow's checkpoint format, read and written: by bytes put together here as its documents say, and there and back."""

from __future__ import annotations

import argparse
import pathlib
import random
import struct
from typing import Any

import pytest
import torch

from evenstep import _core, ckpt_convert
from evenstep.convert_contents import Refused
from evenstep.convert_formats import kind_of, read
from evenstep.convert_tensorflow import _ordered
from evenstep.convert_tensorflow_table import make_table, read_table
from evenstep.convert_tensorflow_table import read_varint as _varint


def masked(data: bytes) -> bytes:
    crc = _core.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def block(content: bytes) -> bytes:
    return content + b"\0" + masked(content + b"\0")


def write_by_hand(folder: pathlib.Path) -> pathlib.Path:
    """Two variables, [1, 2] and a scalar, with keys that share their beginning, as LevelDB writes them."""
    data = struct.pack("<2f", 1, 2) + struct.pack("<q", -7)
    name, scalar = b"net/w/.ATTRIBUTES/VARIABLE_VALUE", b"net/z/.ATTRIBUTES/VARIABLE_VALUE"
    first = b"\x08\x01\x12\x08\x12\x02\x08\x01\x12\x02\x08\x02\x28\x08\x35" + masked(data[:8])
    second = b"\x08\x09\x12\x00\x20\x08\x28\x08\x35" + masked(data[8:])
    header = b"\x08\x01\x1a\x02\x08\x01"
    entries = bytes([0, 0, len(header)]) + header
    entries += bytes([0, len(name), len(first)]) + name + first
    entries += bytes([4, len(scalar) - 4, len(second)]) + scalar[4:] + second
    entries += struct.pack("<II", 0, 1)
    empty = struct.pack("<II", 0, 1)
    meta_at = len(entries) + 5
    handle = b"\0" + bytes([len(entries) & 0x7F | 0x80, len(entries) >> 7])
    index = bytes([0, 1, len(handle)]) + b"x" + handle + struct.pack("<II", 0, 1)
    index_at = meta_at + len(empty) + 5
    places = b"".join(bytes([v & 0x7F | 0x80, v >> 7]) for v in (meta_at, len(empty), index_at, len(index)))
    table = block(entries) + block(empty) + block(index) + places.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")
    (folder / "ckpt-3.index").write_bytes(table)
    (folder / "ckpt-3.data-00000-of-00001").write_bytes(data)
    return folder / "ckpt-3"


def convert(source: pathlib.Path, target: pathlib.Path, kind: str) -> dict[str, Any]:
    words = {"kind": kind, "force": False, "weights_only": False, "model": "model", "config": None, "shard_bytes": 1}
    return ckpt_convert.convert(argparse.Namespace(input=source, output=target, **words))


def test_the_checksum_is_crc_32c() -> None:
    """RFC 3720, appendix B.4."""
    assert _core.crc32c(b"") == 0 and _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(bytes(32)) == 0x8A9136AA and _core.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _core.crc32c(bytes(range(32))) == 0x46DD794E


def test_bytes_that_the_documents_describe(tmp_path: pathlib.Path) -> None:
    prefix = write_by_hand(tmp_path)
    for path in (prefix, prefix.with_name("ckpt-3.index"), tmp_path):
        assert kind_of(path) == "tensorflow"
        model = read(path).model()
        assert list(model) == ["net/w", "net/z"]
        assert torch.equal(model["net/w"], torch.tensor([[1.0, 2.0]])) and torch.equal(model["net/z"], torch.tensor(-7))


def test_every_flipped_bit_is_found_or_harmless(tmp_path: pathlib.Path) -> None:
    """Nothing but Refused, and no value other than what was written."""
    prefix = write_by_hand(tmp_path)
    wanted = read(prefix).model()
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            try:
                model = read(prefix).model()
            except Refused:
                continue
            assert all(torch.equal(model[name], tensor) for name, tensor in wanted.items()), (path, at)
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(Refused):
                read(prefix)
        path.write_bytes(whole)


def test_there_and_back(tmp_path: pathlib.Path) -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    weights = {f"layer.{i}.{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(kinds)}
    weights |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), "complex": torch.tensor([1 + 2j])}
    weights |= {f"many.{i}": torch.tensor([i]) for i in range(3000)}  # several blocks
    torch.save(weights, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "tf", "tensorflow")
    assert sorted(p.name for p in (tmp_path / "tf").iterdir()) == [
        "checkpoint",
        "model.data-00000-of-00001",
        "model.index",
    ]
    back = read(tmp_path / "tf").model()
    assert set(back) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype, name


@pytest.mark.parametrize(("dtype", "code"), [(torch.uint16, 17), (torch.uint32, 22), (torch.uint64, 23)])
def test_whole_numbers_without_a_sign(tmp_path: pathlib.Path, dtype: torch.dtype, code: int) -> None:
    """By the code that TensorFlow's types.proto has of each; the greatest number is none of the type with a sign."""
    weights = {
        "ids": torch.tensor([1, 2, -1]).view(torch.uint8).reshape(3, 8)[:, : dtype.itemsize].contiguous().view(dtype)
    }
    torch.save(weights, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "tf", "tensorflow")
    assert read_table((tmp_path / "tf/model.index").read_bytes())[b"ids"][:2] == bytes([0x08, code])
    assert (tmp_path / "tf/model.data-00000-of-00001").read_bytes()[-dtype.itemsize :] == b"\xff" * dtype.itemsize
    back = read(tmp_path / "tf").model()["ids"]
    assert back.dtype == dtype and back.tolist() == [[1], [2], [256**dtype.itemsize - 1]]


def test_what_is_no_weight_is_listed(tmp_path: pathlib.Path) -> None:
    prefix = write_by_hand(tmp_path)
    index = prefix.with_name("ckpt-3.index")
    table = read_table(index.read_bytes())
    first = table.pop(b"net/w/.ATTRIBUTES/VARIABLE_VALUE")
    table[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = table[b"words"] = b"\x08\x07"
    table[b"net/m/.OPTIMIZER_SLOT/adam/m/.ATTRIBUTES/VARIABLE_VALUE"] = first
    table[b"\0parts\0\1"] = first  # of no variable: TensorFlow asks for none by this name
    index.write_bytes(make_table(table))
    told = convert(prefix, tmp_path / "out.safetensors", "safetensors")
    assert [line.split("'")[1][:6] for line in told["left"]] == ["_CHECK", "net/m/", "words"]
    assert told["tensors"] == 1
    table[b"huge"] = b"\x08\x01\x12\x0c\x12\x0a\x08" + b"\xff" * 8 + b"\x7f"
    index.write_bytes(make_table(table))
    with pytest.raises(Refused, match="a shape that no tensor has"):
        read(prefix)
    table[b"huge"] = b"\x08\x01\x12\x06\x12\x04\x08\xff\xff\x7f"
    index.write_bytes(make_table(table))
    with pytest.raises(Refused, match="'huge' has 0 bytes, which its shape has not"):
        read(prefix)
    table[b"huge"] = b"\x08\x01\x12\x0e\x12\x00\x12\x0a\x08" + b"\xff" * 8 + b"\x7f"
    index.write_bytes(make_table(table))
    with pytest.raises(Refused, match="a shape that no tensor has"):  # of no values: a first dimension is 0
        read(prefix)


def entry(dtype: int, dimensions: list[int], data: bytes, offset: int) -> bytes:
    """As tensor_bundle.proto has it; all numbers here are below 128, or sizes of two bytes."""
    shape = b"".join(b"\x12" + bytes([len(number(size)) + 1]) + b"\x08" + number(size) for size in dimensions)
    head = b"\x08" + bytes([dtype]) + b"\x12" + bytes([len(shape)]) + shape
    return head + b"\x20" + number(offset) + b"\x28" + number(len(data)) + b"\x35" + masked(data)


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 0x7F | 0x80, value >> 7])


def extents(*numbers: bytes) -> bytes:
    """Field 7: a slice; of each of its dimensions nothing, or start and length."""
    content = b"".join(b"\x0a" + bytes([len(one)]) + one for one in numbers)
    return b"\x3a" + bytes([len(content)]) + content


def write_partitioned(folder: pathlib.Path) -> tuple[pathlib.Path, dict[bytes, bytes], torch.Tensor, torch.Tensor]:
    """net/w of 130 rows in two parts, and v of 2 × 3 in columns; keys of parts as ordered_code.cc says they are."""
    prefix = write_by_hand(folder)
    table = read_table(prefix.with_name("ckpt-3.index").read_bytes())
    w, v = torch.arange(130, dtype=torch.int16), torch.arange(6.0).reshape(2, 3)
    written = [
        one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in (w[:64], w[64:], v[:, :1], v[:, 1:])
    ]
    at = [sum(len(one) for one in written[:i]) for i in range(5)]
    data = prefix.with_name("ckpt-3.data-00000-of-00001")
    data.write_bytes(b"".join(written))
    table = {b"": table[b""]}
    # start 0: the smallest field is not written
    table[b"net/w"] = b"\x08\x05\x12\x05\x12\x03\x08\x82\x01" + extents(b"\x10\x40") + extents(b"\x08\x40\x10\x42")
    table[b"\0net/w\0\1\x01\x01\x80\xc0\x40"] = entry(5, [64], written[0], at[0])
    table[b"\0net/w\0\1\x01\x01\xc0\x40\xc0\x42"] = entry(5, [66], written[1], at[1])
    whole = entry(1, [2, 3], b"", 0)
    table[b"v"] = whole[: whole.index(b"\x20")] + extents(b"", b"\x10\x01") + extents(b"", b"\x08\x01\x10\x02")
    table[b"\0v\0\1\x01\x02\x80\x7f\x80\x81"] = entry(1, [2, 1], written[2], at[2])
    table[b"\0v\0\1\x01\x02\x80\x7f\x81\x82"] = entry(1, [2, 2], written[3], at[3])
    prefix.with_name("ckpt-3.index").write_bytes(make_table(table))
    return prefix, table, w, v


def test_a_partitioned_variable_is_put_together(tmp_path: pathlib.Path) -> None:
    prefix, table, w, v = write_partitioned(tmp_path)
    told = read(prefix)
    assert torch.equal(told.model()["net/w"], w) and torch.equal(told.model()["v"], v)
    assert set(told.model()) == {"net/w", "v"} and told.left == []
    one, other = (key for key in table if key.startswith(b"\0v"))
    for altered, why in (
        ({one: b""}, "lacks a part"),  # no entry of a type
        ({b"v": table[b"v"][:-8]}, "damaged"),
        ({b"v": table[b"v"] + extents(b"", b"\x10\x01")}, "are not the whole"),
        ({b"v": table[b"v"].replace(b"\x08\x03", b"\x08\x02", 1)}, "has a part that is not of its shape"),
        ({b"v": table[b"v"].replace(b"\x08\x03", b"\x08\x04", 1)}, "are not the whole"),
        ({b"v": table[b"v"].replace(b"\x08\x03", b"\x0a\x00", 1)}, "damaged"),
        ({b"v": table[b"v"].replace(b"\x10\x02", b"\x10\x00", 1)}, "a part that is none"),
        ({one: table[other]}, "has a part that is not of its shape"),
    ):
        prefix.with_name("ckpt-3.index").write_bytes(make_table({**table, **altered}))
        with pytest.raises(Refused, match=why):
            read(prefix)


def test_numbers_in_keys() -> None:
    """The examples of ordered_code.cc, and those about where a length begins and ends."""
    assert _ordered(0x424242).hex() == "f0424242" and _ordered(-0x800).hex() == "3800"
    assert [_ordered(value).hex() for value in (0, 63, 64, -1, -64, -65)] == ["80", "bf", "c040", "7f", "40", "3fbf"]
    assert _ordered((1 << 63) - 1).hex() == "ffc07fffffffffffffff"


def test_parts_that_overlap_are_refused(tmp_path: pathlib.Path) -> None:
    prefix, table, _, _ = write_partitioned(tmp_path)
    both = extents(b"\x10\x40") + extents(b"\x10\x42")  # 64 and 66 of 130, from the first on
    table[b"net/w"] = table[b"net/w"][:9] + both
    table[b"\0net/w\0\1\x01\x01\x80\xc0\x42"] = table[b"\0net/w\0\1\x01\x01\xc0\x40\xc0\x42"]
    prefix.with_name("ckpt-3.index").write_bytes(make_table(table))
    with pytest.raises(Refused, match="parts that overlap"):
        read(prefix)


def blocks(table: bytes) -> list[tuple[int, int]]:
    """(first byte, size) of the three blocks of a small table that make_table wrote."""
    footer, at = table[-48:], 0
    numbers = []
    for _ in range(4):
        number, at = _varint(footer, at)
        numbers.append(number)
    meta, meta_size, index, index_size = numbers
    return [(0, meta - 5), (meta, meta_size), (index, index_size)]


def test_any_table_with_right_checksums_is_refused_or_read(tmp_path: pathlib.Path) -> None:
    """Bytes altered behind the checksums: blocks, entries and messages as nobody writes them. Nothing but Refused."""
    prefix = write_by_hand(tmp_path)
    index = prefix.with_name("ckpt-3.index")
    table = read_table(index.read_bytes())
    chance = random.Random(5)
    refused = 0
    for _ in range(500):
        altered = dict(table)
        name = chance.choice(sorted(altered))
        value = bytearray(altered.pop(name))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(value) + 1)
            value[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        altered[bytes(chance.randbytes(chance.randrange(3))) + name] = bytes(value)
        whole = bytearray(make_table(altered))
        if chance.random() < 0.5:  # and the blocks' own forms: lengths, what keys share, the footer's places
            end = len(whole) - 48
            at = chance.randrange(end - 5)
            whole[at] = chance.randrange(256)
            for begin, size in blocks(bytes(whole)):
                content = bytes(whole[begin : begin + size + 1])
                whole[begin + size + 1 : begin + size + 5] = masked(content)
        index.write_bytes(whole)
        try:
            read(prefix)
        except Refused:
            refused += 1
    assert 150 < refused < 500  # some of both
