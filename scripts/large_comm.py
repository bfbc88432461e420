"""A rank of `make large`: calls of es.comm. large_comm.py plain|arena CALL…"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from large_pattern import BYTES, Array, check, fill, largest, pattern, watched, xor

import evenstep as es

Say = Callable[[str], str]


def all_reduce(group: Any, data: Array, say: Say) -> None:
    fill(data, group.rank)
    group.all_reduce(data, "bxor")
    check(data, lambda at, n: xor(group.size, at, n), say("all_reduce"))
    fill(data, group.rank)
    group.all_reduce(data.view(np.int8), "max")
    check(data.view(np.int8), lambda at, n: largest(group.size, at, n), say("all_reduce of signed bytes"))


def broadcast(group: Any, data: Array, say: Say) -> None:
    fill(data, group.rank)
    group.broadcast(data, root=1)
    check(data, lambda at, n: pattern(at, n, 1), say("broadcast"))


def divide(group: Any, data: Array) -> tuple[list[int], Array, int]:
    """All but ten bytes are rank 0's, ten rank 1's; each part is in place."""
    begin = [0, BYTES - 10, BYTES][group.rank]
    end = [BYTES - 10, BYTES, BYTES][group.rank]
    return [BYTES - 10, 10, 0][: group.size], data[begin:end], begin


def all_gather(group: Any, data: Array, say: Say) -> None:
    counts, own, begin = divide(group, data)
    data[:] = 0
    fill(own, group.rank, begin)
    group.all_gather(own, data, counts)
    check(data[: BYTES - 10], lambda at, n: pattern(at, n, 0), say("all_gather, the large part"))
    check(data[BYTES - 10 :], lambda at, n: pattern(BYTES - 10 + at, n, 1), say("all_gather, the small one"))


def reduce_scatter(group: Any, data: Array, say: Say) -> None:
    counts, own, begin = divide(group, data)
    fill(data, group.rank)
    group.reduce_scatter(data, own, counts, "bxor")
    check(own, lambda at, n: xor(group.size, begin + at, n), say("reduce_scatter"))


def all_to_all(group: Any, data: Array, say: Say) -> None:
    """Rank 0 gives, the last takes: another host's, where there are several."""
    nothing, last = data[:0], group.size - 1
    sent, taken = [nothing] * group.size, [nothing] * group.size
    fill(data, group.rank)
    if group.rank == 0:
        sent[last] = data
    elif group.rank == last:
        taken[0] = data
    group.all_to_all(sent, taken)
    check(data, lambda at, n: pattern(at, n, 0 if group.rank == last else group.rank), say("all_to_all"))


def send(group: Any, data: Array, say: Say) -> None:
    last = group.size - 1
    fill(data, group.rank)
    if group.rank == 0:
        group.send(data, last)
    elif group.rank == last:
        group.recv(data, 0)
        check(data, lambda at, n: pattern(at, n, 0), say("send and receive"))


CALLS = {call.__name__: call for call in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, send)}


def main(memory: str, calls: list[str]) -> None:
    room = BYTES + (1 << 20) if memory == "arena" else 0
    with es.comm.open(arena_bytes=room, timeout=600) as group:
        who = f"rank {group.rank} of {group.size}"
        with watched(who):
            data = group.empty(BYTES, "uint8") if room else np.empty(BYTES, dtype=np.uint8)
            for call in calls:
                CALLS[call](group, data, lambda what: f"{who}: {what}")
            group.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
