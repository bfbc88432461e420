"""Bytes that tell their place, beyond 32 bits too, and their rank; and what a rank of `make large` says of itself."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

SCALE = int(os.environ.get("EVENSTEP_LARGE_SCALE", "1"))  # of everything a part so large: to try a script out
BYTES = ((4 << 30) + 70_001) // SCALE  # more than 32 bits can count, and no round number
HALF = ((1 << 31) + 35_001) // SCALE  # elements: more than 31 bits can count, and twice as many more than 32
PIECE = 256 << 10  # what is made for a comparison stays in the caches

Array = Any
"""NumPy's, of bytes."""


def pattern(begin: int, length: int, rank: int) -> Array:
    """The bytes from place `begin` on: those of 2^32 places further differ, also where ranks are combined."""
    places = np.arange(begin // 8, (begin + length) // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (places ^ places >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9 + 2 * rank)
    return words.view(np.uint8)[begin % 8 : begin % 8 + length]


def fill(data: Array, rank: int, begin: int = 0) -> None:
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        part[:] = pattern(begin + at, len(part), rank)


def check(data: Array, wanted: Callable[[int, int], Array], what: str) -> None:
    """`wanted(begin, length)` says which elements must be there."""
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        wrong = np.flatnonzero(part != wanted(at, len(part)))
        if len(wrong) > 0:
            raise SystemExit(f"large: {what}: {len(wrong)} wrong from element {at + wrong[0]} of {len(data)} on")
    print(f"  ok  {what}", flush=True)


def xor(ranks: int, begin: int, length: int) -> Array:
    data = pattern(begin, length, 0)
    for rank in range(1, ranks):
        data = data ^ pattern(begin, length, rank)
    return data


def largest(ranks: int, begin: int, length: int) -> Array:
    """Of signed bytes."""
    return np.max([pattern(begin, length, rank).view(np.int8) for rank in range(ranks)], axis=0)


def _held() -> int:
    """Bytes of memory that this process has, its share of what it has in common with others."""
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def watched(who: str) -> Iterator[None]:
    """Says at the end how much memory this process has had at most; where memory is short the kernel takes it before others."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    ended = threading.Event()
    most = 0

    def look() -> None:
        nonlocal most
        pause = 0.5
        while not ended.wait(pause):
            began = time.monotonic()
            most = max(most, _held())
            pause = max(0.5, 20 * (time.monotonic() - began))  # the kernel walks all pages for it

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    yield
    ended.set()
    watcher.join()
    print(f"      {who}: {most / 2**30:.1f} GiB of memory at most", flush=True)


def place() -> str:
    """Of a rank that has its place from the environment."""
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
