"""The table of a TensorFlow checkpoint's names, in LevelDB's form, and the protocol buffers that its values are. Sources of the layout:
LevelDB's doc/table_format.md and TensorFlow's tensor_bundle.proto. All numbers are little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from evenstep import _core
from evenstep.convert_contents import UNSUPPORTED, Refused

MAGIC = 0xDB4775248B80FB57
FOOTER = 48


def masked(data: bytes) -> int:
    """As LevelDB keeps a CRC in a file, so that the CRC of data with CRCs in them is no special one."""
    crc = _core.crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# -- numbers of protocol buffers --


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: numbers for types 0, 1, 5, bytes for 2."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of type {kind}")
        if size > len(data) - at:
            raise ValueError("a field is cut off")
        part = data[at : at + size]
        yield tag >> 3, part if kind == 2 else int.from_bytes(part, "little")
        at += size


def write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return write_varint(number << 3) + write_varint(value) if value else b""  # 0 is what a missing field means
    return write_varint(number << 3 | 2) + write_varint(len(value)) + value


# -- the table of names --


def _block(data: bytes, handle: bytes, at: int) -> tuple[bytes, int]:
    offset, at = read_varint(handle, at)
    size, at = read_varint(handle, at)
    if offset + size + 5 > len(data):
        raise ValueError("a block lies beyond the end")
    block, kind = data[offset : offset + size], data[offset + size]
    if struct.unpack_from("<I", data, offset + size + 1)[0] != masked(data[offset : offset + size + 1]):
        raise ValueError("the checksum of a block is wrong")
    if kind != 0:
        raise Refused("it is a compressed table", "TensorFlow writes these without compression", UNSUPPORTED)
    return block, at


def entries_of(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block is cut off")
    end = len(block) - 4 * (1 + struct.unpack_from("<I", block, len(block) - 4)[0])
    if end < 0:
        raise ValueError("a block has more restarts than bytes")
    key, at = b"", 0
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        size, at = read_varint(block, at)
        if shared > len(key) or own + size > end - at:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + size]
        at += size


def read_table(data: bytes) -> dict[bytes, bytes]:
    if len(data) < FOOTER or struct.unpack_from("<Q", data, len(data) - 8)[0] != MAGIC:
        raise ValueError("it has not the end of a table")
    footer = data[-FOOTER:-8]
    _, at = read_varint(footer, 0)  # of the index of other blocks, which there are none of
    _, at = read_varint(footer, at)
    index, _ = _block(data, footer, at)
    table: dict[bytes, bytes] = {}
    for _, handle in entries_of(index):
        table.update(entries_of(_block(data, handle, 0)[0]))
    return table


def _make_block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Each key whole: the form allows to leave out what it shares with the one before, and does not ask for it."""
    out = bytearray()
    restarts = []
    for key, value in entries:
        restarts.append(len(out))
        out += write_varint(0) + write_varint(len(key)) + write_varint(len(value)) + key + value
    return (
        bytes(out)
        + struct.pack(f"<{max(1, len(restarts))}I", *(restarts or [0]))
        + struct.pack("<I", max(1, len(restarts)))
    )


def make_table(table: dict[bytes, bytes]) -> bytes:
    out = bytearray()

    def add(block: bytes) -> bytes:
        handle = write_varint(len(out)) + write_varint(len(block))
        out.extend(block + b"\0" + struct.pack("<I", masked(block + b"\0")))
        return handle

    names = sorted(table)
    pieces = [names[i : i + 1024] for i in range(0, len(names), 1024)]
    index = [(piece[-1], add(_make_block([(name, table[name]) for name in piece]))) for piece in pieces]
    footer = add(_make_block([])) + add(_make_block(index))
    return bytes(out) + footer.ljust(FOOTER - 8, b"\0") + struct.pack("<Q", MAGIC)
