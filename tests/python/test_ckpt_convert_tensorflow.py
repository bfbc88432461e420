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
from evenstep.convert_tensorflow import _varint, make_table, read_table


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
    table[b"parts"] = first + b"\x3a\x00"
    index.write_bytes(make_table(table))
    told = convert(prefix, tmp_path / "out.safetensors", "safetensors")
    assert [line.split("'")[1][:6] for line in told["left"]] == ["_CHECK", "net/m/", "parts", "words"]
    assert told["tensors"] == 1
    table[b"huge"] = b"\x08\x01\x12\x0c\x12\x0a\x08" + b"\xff" * 8 + b"\x7f"
    index.write_bytes(make_table(table))
    with pytest.raises(Refused, match="'huge' has 0 bytes, which its shape has not"):
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
