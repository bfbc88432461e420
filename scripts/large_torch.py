"""A rank of two or three of `make large`: calls of torch.distributed on backend evenstep. large_torch.py CALL…"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from large_pattern import BYTES, HALF, Array, check, fill, largest, pattern, place, watched

import evenstep  # noqa: F401  (the backend)


def octets(tensor: torch.Tensor) -> Array:
    return tensor.view(torch.uint8).numpy()


def filled(elements: int) -> torch.Tensor:
    tensor = torch.empty(elements, dtype=torch.int8)
    fill(octets(tensor), dist.get_rank())
    return tensor


def say(what: str) -> str:
    return f"{place()}: {what}"


def all_reduce() -> None:
    data = filled(BYTES)
    dist.all_reduce(data, op=dist.ReduceOp.MAX)
    check(data.numpy(), lambda at, n: largest(dist.get_world_size(), at, n), say("all_reduce of int8"))


def all_reduce_bf16() -> None:
    """Whole numbers, of which bfloat16 has all up to 256; asked for with async_op."""
    most = 127 if dist.get_world_size() == 2 else 63
    bits = torch.arange(256).bfloat16().view(torch.int16).numpy()
    data = torch.empty(HALF, dtype=torch.bfloat16)
    numbers = data.view(torch.int16).numpy()
    for at in range(0, HALF, 128 << 10):
        part = numbers[at : at + (128 << 10)]
        part[:] = bits[pattern(at, len(part), dist.get_rank()) & most]
    dist.all_reduce(data, async_op=True).wait()
    check(
        numbers,
        lambda at, n: bits[
            sum((pattern(at, n, rank) & most).astype(np.int64) for rank in range(dist.get_world_size()))
        ],
        say("all_reduce of bfloat16, asynchronous"),
    )


def broadcast() -> None:
    data = filled(BYTES)
    dist.broadcast(data, src=1)
    check(octets(data), lambda at, n: pattern(at, n, 1), say("broadcast"))


def all_gather_into_tensor() -> None:
    output = torch.zeros(2 * HALF, dtype=torch.int8)
    dist.all_gather_into_tensor(output, filled(HALF))
    for rank in range(2):
        part = octets(output)[rank * HALF : (rank + 1) * HALF]
        check(part, lambda at, n, rank=rank: pattern(at, n, rank), say(f"all_gather_into_tensor, from rank {rank}"))


def reduce_scatter_tensor() -> None:
    output, begin = torch.empty(HALF, dtype=torch.int8), dist.get_rank() * HALF
    dist.reduce_scatter_tensor(output, filled(2 * HALF), op=dist.ReduceOp.MAX)
    check(output.numpy(), lambda at, n: largest(2, begin + at, n), say("reduce_scatter_tensor"))


def all_to_all_single() -> None:
    """All but ten bytes of each rank's go to rank 1, which sends as few."""
    rank = dist.get_rank()
    sends, receives = [[10, BYTES - 10], [10, 0]][rank], [[10, 10], [BYTES - 10, 0]][rank]
    output = torch.empty(sum(receives), dtype=torch.int8)
    dist.all_to_all_single(output, filled(sum(sends)), receives, sends)
    begin = 10 * rank
    check(octets(output)[: receives[0]], lambda at, n: pattern(begin + at, n, 0), say("all_to_all_single, from rank 0"))
    check(octets(output)[receives[0] :], lambda at, n: pattern(at, n, 1), say("all_to_all_single, from rank 1"))


def send() -> None:
    """From the first to the last: another host's, where there are several."""
    data, last = filled(BYTES), dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(data, dst=last)
    elif dist.get_rank() == last:
        dist.recv(data, src=0)
        check(octets(data), lambda at, n: pattern(at, n, 0), say("send and recv"))
    dist.barrier()


def both_ways() -> None:
    """Each rank sends half and receives half at once."""
    rank, came = dist.get_rank(), torch.empty(HALF, dtype=torch.int8)
    calls: list[Any] = [dist.P2POp(dist.isend, filled(HALF), 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    check(octets(came), lambda at, n: pattern(at, n, 1 - rank), say("batch_isend_irecv"))


CALLS = {
    call.__name__: call
    for call in (
        all_reduce,
        all_reduce_bf16,
        broadcast,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_to_all_single,
        send,
        both_ways,
    )
}


def main(calls: list[str]) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for two of these calls
    dist.init_process_group("evenstep", timeout=timedelta(seconds=600))
    with watched(place()):
        for call in calls or CALLS:
            CALLS[call]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
