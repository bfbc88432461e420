"""What is called where it goes by legs: its pieces say little of the whole, so that ranks compare that behind the first one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from evenstep import _core
from evenstep.called import DIFFERS_FIX, OPERATIONS
from evenstep.errors import error_of

RECORD_BYTES = 384
_DIGEST_BYTES = 16
_SITE_BYTES = 160


def words_of(name: str, data: Sequence[tuple[Sequence[int], torch.dtype]], op: int, root: int | None = None) -> str:
    """A reduction of so many elements: for each tensor, and each rank's part of it."""
    parts = ", ".join(f"{parted(counts)} {str(dtype)[6:]} elements" for counts, dtype in data)
    to = "" if root is None else f" to rank {root}"
    return f"{name} of {parts} with {OPERATIONS.get(op, f'operation {op}')}{to}"


def parted(counts: Sequence[int]) -> str:
    """The same of equal parts, whichever of torch's calls has them."""
    return str(sum(counts)) if len(set(counts)) == 1 else "+".join(map(str, counts))


def record_of(words: str, site: str | None) -> bytes:
    """Of one size. What is too long is compared all the same."""
    shown = words.encode()[: RECORD_BYTES - _DIGEST_BYTES - _SITE_BYTES - 1]
    place = b"" if site is None else f" at {site}".encode()[:_SITE_BYTES]
    digest = hashlib.blake2b(words.encode(), digest_size=_DIGEST_BYTES).digest()
    return (digest + shown + b"\0" + place).ljust(RECORD_BYTES, b"\0")


def check_calls(records: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Each of which is of the rank there: all make one call, or all raise one error."""
    digests = [record[:_DIGEST_BYTES] for record in records]
    other = next((place for place, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    sides = []
    for place in (0, other):
        words, site = records[place][_DIGEST_BYTES:].split(b"\0")[:2]
        sides.append(f"rank {ranks[place]} called {words.decode(errors='replace')}{site.decode(errors='replace')}")
    raise error_of(
        "EVEN_ERR_MISMATCH",
        ", but ".join(sides),
        DIFFERS_FIX,
        ranks[other],
    )


def exchanged(comm: _core.Comm, record: bytes) -> list[bytes]:
    """Of all of a group, in their order."""
    own = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    every = torch.empty(comm.ranks * len(record), dtype=torch.uint8)
    comm.all_gather(own.data_ptr(), every.data_ptr(), [len(record)] * comm.ranks, _core.DTYPE_U8)
    return [bytes(one.tolist()) for one in every.split(len(record))]
