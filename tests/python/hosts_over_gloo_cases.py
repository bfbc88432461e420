"""What the ranks of test_hosts_over_gloo.py do: backend "evenstep" on hosts that Gloo alone connects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import evenstep
from evenstep import hosts_over_gloo

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOSTS = os.environ["HOSTS"]  # a letter for each rank
TEAMS = [[rank for rank, host in enumerate(HOSTS) if host == one] for one in dict.fromkeys(HOSTS)]


def value(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def host_by_host(tensors: list[torch.Tensor], among: int = 1) -> torch.Tensor:
    """In rank order on each of two hosts, then both: 16-bit floats in fp32, and rounded once a host, and once more."""
    kind = tensors[0].dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    sums = []
    for team in TEAMS:
        total = tensors[team[0]].to(wide)
        for rank in team[1:]:
            total = total + tensors[rank].to(wide)
        sums.append(total.to(kind))
    total = sums[0].to(wide)
    for one in sums[1:]:
        total = total + one.to(wide)
    return (total / among).to(kind)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=2e-2, atol=2e-2)


def bits() -> None:
    """Of two hosts all is known to the last bit; of more all ranks have the same."""
    hosts_over_gloo.PIECE_BYTES = 4096
    group: Any = dist.group.WORLD
    assert "shared memory on each of" in group.over_hosts_by_gloo
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for count in (1, 700, 5000):
            every = [value(rank, count, dtype) for rank in range(SIZE)]
            wanted = host_by_host(every)
            tensor = every[RANK].clone()
            dist.all_reduce(tensor)
            if len(TEAMS) == 2 or dtype.itemsize == 2:  # whose sums in fp32 are the same in any order
                assert torch.equal(tensor, wanted), (dtype, count)
            theirs = [torch.empty_like(tensor) for _ in range(SIZE)]
            dist.all_gather(theirs, tensor)
            assert all(torch.equal(one, tensor) for one in theirs), "the ranks' bits differ"
            assert near(tensor, wanted)
            tensor.copy_(every[RANK])
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            averages = host_by_host(every, SIZE)
            assert torch.equal(tensor, averages) if len(TEAMS) == 2 or dtype.itemsize == 2 else near(tensor, averages)
            for root in range(SIZE):
                kept = every[RANK].clone()
                dist.reduce(kept, root)
                if root != RANK:
                    assert torch.equal(kept, every[RANK])
                else:
                    assert torch.equal(kept, wanted) if len(TEAMS) == 2 else near(kept, wanted), (dtype, count, root)
            part, parts = torch.empty(count, dtype=dtype), [value(RANK * SIZE + r, count, dtype) for r in range(SIZE)]
            dist.reduce_scatter(part, parts)
            wanted = host_by_host([value(r * SIZE + RANK, count, dtype) for r in range(SIZE)])
            assert torch.equal(part, wanted) if len(TEAMS) == 2 else near(part, wanted), (dtype, count)
    parts = [torch.zeros(3000 * r + (r == 2)) for r in range(SIZE)]  # of unequal sizes, one of them nothing
    dist.all_gather(parts, value(RANK, 3000 * RANK + (RANK == 2)))
    assert all(torch.equal(one, value(r, 3000 * r + (r == 2))) for r, one in enumerate(parts))
    later = [torch.full((3000,), RANK + 1.0) for _ in range(6)]
    works = [dist.all_reduce(one, async_op=True) for one in later]
    spread = torch.full((3000,), float(RANK))
    dist.broadcast(spread, SIZE - 1)  # comes after them
    for work in works:
        work.wait()
    total = SIZE * (SIZE + 1) / 2
    assert all(bool(one.eq(total).all()) for one in later) and bool(spread.eq(SIZE - 1).all())
    dist.all_reduce(torch.empty(0))
    average = torch.full((5,), float(RANK))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert bool(average.eq((SIZE - 1) / 2).all())
    large = torch.full((3,), 60000.0 if any(team[0] == RANK for team in TEAMS) else 0.0, dtype=torch.float16)
    dist.all_reduce(large, dist.ReduceOp.AVG)  # which no sum of float16 holds
    assert torch.equal(large, torch.full((3,), 60000.0 * len(TEAMS) / SIZE, dtype=torch.float16)), large
    for dtype, whose in ((torch.float32, 0), (torch.bfloat16, SIZE - 1), (torch.float64, SIZE - 1)):
        for op, wins in ((dist.ReduceOp.MIN, 0.0), (dist.ReduceOp.MAX, SIZE - 1.0)):
            extreme = torch.tensor([RANK, torch.nan if whose == RANK else RANK, -torch.inf], dtype=dtype)
            dist.all_reduce(extreme, op)
            assert extreme[0] == wins and extreme[1].isnan() and extreme[2] == -torch.inf, (op, extreme)
    refused = 0
    for dtype, op in (
        (torch.int16, dist.ReduceOp.SUM),
        (torch.int32, dist.ReduceOp.AVG),
        (torch.float32, dist.ReduceOp.BOR),
    ):
        try:
            dist.all_reduce(torch.ones(3, dtype=dtype), op)
        except RuntimeError:
            refused += 1
    assert refused == 3
    dist.barrier()  # goes on, since nothing was sent
    dist.destroy_process_group()


def ends(call: Callable[[], Any]) -> list[Any]:
    try:
        call()
    except evenstep.EvenstepError as error:
        return [error.status, error.rank, str(error).partition("\n")[0]]
    raise AssertionError("no error")


def different() -> list[list[Any]]:
    """Calls that differ on a host, then between hosts, each in a group of its own."""
    ones, other, op = torch.ones(3), RANK == 1, dist.ReduceOp
    calls: list[Callable[[Any], Any]] = [
        lambda group: dist.all_reduce(ones, op.SUM if other else op.AVG, group=group),
        lambda group: dist.broadcast(ones, 2 if other else 0, group=group),
        lambda group: dist.reduce(ones, 0, group=group) if other else dist.all_reduce(ones, group=group),
        lambda group: dist.all_reduce(ones, op.SUM if HOSTS[RANK] == HOSTS[0] else op.MAX, group=group),
    ]
    found = []
    for call in calls:
        group = dist.new_group(backend="evenstep")
        found.append(ends(lambda call=call, group=group: call(group)))  # type: ignore[misc]
        assert ends(lambda group=group: dist.barrier(group=group))[0] == found[-1][0]  # type: ignore[misc]
    return found


def lost() -> None:
    """First calls that differ, then a rank that does not come to a call of a group with a limit, then, in another group, one that dies."""
    gone = int(sys.argv[2])
    store = dist.PrefixStore("cases/", dist.distributed_c10d._get_default_store())
    limited = dist.new_group(timeout=timedelta(seconds=2), backend="evenstep")
    dist.all_reduce(torch.ones(1), group=limited)
    dist.all_reduce(torch.ones(1))
    found: list[Any] = [different()]
    if gone != RANK:
        found.append(ends(lambda: dist.all_reduce(torch.ones(1), group=limited)))
        found.append(ends(lambda: dist.all_reduce(torch.ones(1), group=limited)))  # it is over
        store.set(f"late/{RANK}", "")
    else:
        store.wait([f"late/{rank}" for rank in range(SIZE) if rank != gone], timedelta(seconds=100))
        os._exit(0)
    found.append(ends(lambda: dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()))
    found.append(ends(lambda: dist.all_reduce(torch.ones(1 << 20))))
    print(json.dumps(found), flush=True)
    store.set(f"told/{RANK}", "")
    if RANK == 0:  # which has the store
        store.wait([f"told/{rank}" for rank in range(SIZE) if rank != gone], timedelta(seconds=100))
    os._exit(0)


def lost_in_a_sum() -> None:
    """Of es.prepare: the last rank dies when all have voted for the step, before it hands its last bucket on."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    evenstep.prepare(model, bucket_cap_mb=0.0001)
    engine: Any = evenstep.session().steps.syncs[-1].engine
    assert engine._by_hosts, type(engine)
    last = RANK == SIZE - 1
    if last:
        engine._hand_on_rest = lambda used: os._exit(0)
    outputs = [part(torch.ones(1, 4)).sum() for part in (model[:1] if last else model)]
    print(json.dumps(ends(sum(outputs).backward)), flush=True)  # type: ignore[union-attr]
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "lost_in_a_sum":
        lost_in_a_sum()
    dist.init_process_group("evenstep", timeout=timedelta(seconds=100))
    {"bits": bits, "lost": lost}[sys.argv[1]]()
