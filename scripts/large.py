"""Collectives and messages of more than 4 GiB between two ranks, each checked to the last byte: `make large`. Takes 9 GB of
memory and a minute or two; not a part of `make test`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

RANKS = 2
BYTES = (4 << 30) + 70_001  # one more than 32 bits can count, and no round number
PIECE = 64 << 20


def pattern(begin: int, length: int, rank: int) -> Any:
    """Bytes that tell their place, beyond 32 bits too, and their rank."""
    import numpy as np

    places = np.arange(begin // 8, (begin + length) // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (places + np.uint64(rank)).view(np.uint8)[begin % 8 : begin % 8 + length]


def fill(data: Any, rank: int, begin: int = 0) -> None:
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        part[:] = pattern(begin + at, len(part), rank)


def check(data: Any, wanted: Any, what: str) -> None:
    """`wanted(begin, length)` says what must be there."""
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        if not (part == wanted(at, len(part))).all():
            raise SystemExit(f"large: {what}: wrong between bytes {at} and {at + len(part)}")
    print(f"  ok  {what}", flush=True)


def run_rank() -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open(arena_bytes=0) as group:
        rank = group.rank
        data = np.empty(BYTES, dtype=np.uint8)

        fill(data, rank)
        group.all_reduce(data, "bxor")
        check(data, lambda at, n: pattern(at, n, 0) ^ pattern(at, n, 1), f"rank {rank}: all_reduce")

        fill(data, rank)
        group.broadcast(data, root=1)
        check(data, lambda at, n: pattern(at, n, 1), f"rank {rank}: broadcast")

        # All but ten bytes are rank 0's; either part is in place.
        counts = [BYTES - 10, 10]
        own = data[: BYTES - 10] if rank == 0 else data[BYTES - 10 :]
        begin = 0 if rank == 0 else BYTES - 10
        data[:] = 0
        fill(own, rank, begin)
        group.all_gather(own, data, counts)
        check(data[: BYTES - 10], lambda at, n: pattern(at, n, 0), f"rank {rank}: all_gather, the large part")
        check(
            data[BYTES - 10 :], lambda at, n: pattern(BYTES - 10 + at, n, 1), f"rank {rank}: all_gather, the small one"
        )

        fill(data, rank)
        group.reduce_scatter(data, own, counts, "bxor")
        check(
            own,
            lambda at, n: pattern(begin + at, n, 0) ^ pattern(begin + at, n, 1),
            f"rank {rank}: reduce_scatter",
        )

        # Rank 0 gives, rank 1 takes, in two ways.
        nothing = np.empty(0, dtype=np.uint8)
        for what in ("all_to_all", "send and receive"):
            fill(data, rank)
            if what == "all_to_all":
                parts = [nothing, data] if rank == 0 else [nothing, nothing]
                group.all_to_all(parts, [nothing, nothing] if rank == 0 else [data, nothing])
            elif rank == 0:
                group.send(data, 1)
            else:
                group.recv(data, 0)
            check(data, lambda at, n: pattern(at, n, 0), f"rank {rank}: {what}")


def main() -> int:
    if "RANK" in os.environ:
        run_rank()
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    print("large: all well" if not any(codes) else f"large: the ranks ended with {codes}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
