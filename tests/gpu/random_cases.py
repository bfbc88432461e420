"""Random calls of backend "evenstep" with CUDA tensors, the same on every rank, against what plain sums say: NCCL's own and those
through the host. Part of cases.py, which starts it."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist
from cases import DEVICE, RANK, RANKS, join, own_gpu, row, same

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
LENGTHS = (0, 1, 7, 128, 1023, 4096, 70_001)


class Call:
    """One: what is drawn is drawn on all ranks alike, also on those that are not in the group."""

    def __init__(self, draw: random.Random, groups: list[tuple[Any, list[int]]]) -> None:
        self.group, self.ranks = groups[draw.randrange(len(groups))]
        self.dtype = draw.choice(FLOATS + INTEGERS)
        whole = self.dtype in INTEGERS
        self.op = draw.choice(["SUM", "MIN", "MAX", "PRODUCT", *(("BAND", "BOR", "BXOR") if whole else ("AVG",))])
        self.length, self.root = draw.choice(LENGTHS), draw.randrange(len(self.ranks))
        self.lengths = [draw.choice(LENGTHS) for _ in self.ranks]
        self.table = [[draw.choice(LENGTHS) for _ in self.ranks] for _ in self.ranks]
        self.seed, self.later, self.gaps = draw.randrange(1 << 20), draw.random() < 0.5, draw.random() < 0.3
        self.kind = draw.choice(KINDS)
        self.inside = RANK in self.ranks
        self.own = self.ranks.index(RANK) if self.inside else -1

    def __str__(self) -> str:
        words = (self.dtype, self.op, self.length, self.lengths, self.later, self.gaps)
        return f"{self.kind.__name__} over ranks {self.ranks}: {words}"

    def value(self, place: int, length: int) -> torch.Tensor:
        """What a rank puts in, on the host: ones and twos, so that every order of adding gives the same."""
        made = torch.Generator().manual_seed(self.seed * 64 + place)
        return torch.randint(1, 3, (length,), generator=made).to(self.dtype)

    def given(self, host: torch.Tensor) -> torch.Tensor:
        tensor = host.to(DEVICE, copy=True)
        return torch.stack([tensor, tensor], -1)[..., 0] if self.gaps else tensor

    def empty(self, length: int) -> torch.Tensor:
        return self.given(torch.zeros(length, dtype=self.dtype))

    def reduced(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].to(torch.int64 if self.dtype in INTEGERS else torch.float64)
        for part in parts[1:]:
            total = COMBINE[self.op](total, part.to(total.dtype))
        return total / len(parts) if self.op == "AVG" else total

    def done(self, work: Any) -> None:
        if work is not None:
            work.wait()

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.later}

    @property
    def tolerance(self) -> float:
        return 0.02 if self.op == "AVG" else 0.0


def all_reduce(at: Call) -> None:
    parts = [at.value(place, at.length) for place in range(len(at.ranks))]
    tensor = at.given(parts[at.own])
    at.done(dist.all_reduce(tensor, getattr(dist.ReduceOp, at.op), **at.how))
    same(tensor, at.reduced(parts), at.tolerance)


def reduce(at: Call) -> None:
    parts = [at.value(place, at.length) for place in range(len(at.ranks))]
    tensor = at.given(parts[at.own])
    at.done(dist.reduce(tensor, at.ranks[at.root], getattr(dist.ReduceOp, at.op), **at.how))
    same(tensor, at.reduced(parts) if at.own == at.root else parts[at.own], at.tolerance)


def reduce_scatter(at: Call) -> None:
    parts = [at.value(place, at.length * len(at.ranks)) for place in range(len(at.ranks))]
    out = torch.zeros(at.length, dtype=at.dtype, device=DEVICE)
    given = parts[at.own].to(DEVICE, copy=True)
    at.done(dist.reduce_scatter_tensor(out, given, getattr(dist.ReduceOp, at.op), **at.how))
    same(out, at.reduced(parts)[at.length * at.own :][: at.length], at.tolerance)


def all_gather(at: Call) -> None:
    parts = [at.value(place, length) for place, length in enumerate(at.lengths)]
    outs = [at.empty(length) for length in at.lengths]
    at.done(dist.all_gather(outs, at.given(parts[at.own]), **at.how))
    for got, want in zip(outs, parts):
        same(got, want)


def all_gather_whole(at: Call) -> None:
    parts = [at.value(place, at.length) for place in range(len(at.ranks))]
    out = torch.zeros(at.length * len(at.ranks), dtype=at.dtype, device=DEVICE)
    at.done(dist.all_gather_into_tensor(out, parts[at.own].to(DEVICE, copy=True), **at.how))
    same(out, torch.cat(parts))


def broadcast(at: Call) -> None:
    tensor = at.given(at.value(at.own, at.length))
    at.done(dist.broadcast(tensor, at.ranks[at.root], **at.how))
    same(tensor, at.value(at.root, at.length))


def gather(at: Call) -> None:
    parts = [at.value(place, at.length) for place in range(len(at.ranks))]
    outs = [at.empty(at.length) for _ in parts] if at.own == at.root else None
    at.done(dist.gather(at.given(parts[at.own]), outs, at.ranks[at.root], **at.how))
    for got, want in zip(outs or [], parts):
        same(got, want)


def scatter(at: Call) -> None:
    parts = [at.value(place, at.length) for place in range(len(at.ranks))]
    out = at.empty(at.length)
    given = [at.given(part) for part in parts] if at.own == at.root else None
    at.done(dist.scatter(out, given, at.ranks[at.root], **at.how))
    same(out, parts[at.own])


def all_to_all(at: Call) -> None:
    """table[from][to] elements."""
    parts = [at.value(place, sum(sizes)) for place, sizes in enumerate(at.table)]
    receives = [sizes[at.own] for sizes in at.table]
    out = torch.zeros(sum(receives), dtype=at.dtype, device=DEVICE)
    given = parts[at.own].to(DEVICE, copy=True)
    at.done(dist.all_to_all_single(out, given, receives, at.table[at.own], **at.how))
    same(out, torch.cat([part.split(sizes)[at.own] for part, sizes in zip(parts, at.table)]))


def ring(at: Call) -> None:
    if len(at.ranks) == 1:
        return
    right, left = (at.own + 1) % len(at.ranks), (at.own - 1) % len(at.ranks)
    out, tag = at.empty(at.length), at.seed % 3  # none: over NCCL; any other: through the host
    given = at.given(at.value(at.own, at.length))
    works = [dist.isend(given, at.ranks[right], at.group, tag), dist.irecv(out, at.ranks[left], at.group, tag)]
    for work in works:
        at.done(work)
    same(out, at.value(left, at.length))


KINDS = (
    all_reduce,
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    all_gather_whole,
    broadcast,
    gather,
    scatter,
    all_to_all,
    ring,
)


def random_calls_pair(count: int = 300) -> None:
    own_gpu()
    join("evenstep")
    everyone = list(range(RANKS))
    groups = [(dist.new_group(ranks), ranks) for ranks in (everyone, everyone[-1:])]
    draw = random.Random(20)
    for number in range(count):
        call = Call(draw, groups)
        if call.inside:
            try:
                call.kind(call)
            except BaseException:
                print(f"call {number}: {call}", flush=True)
                raise
    if RANK == 0:
        group: Any = dist.group.WORLD
        row(calls=count, by=type(group._devices).__name__)
    dist.destroy_process_group()


def random_calls_by_legs() -> None:
    """Each rank takes itself for a host of its own; both may have one GPU, for there is no NCCL then. Not run yet."""
    from evenstep.hosts import ucx_state

    if not ucx_state()[0]:
        row(legs=f"none: {ucx_state()[1]}")
        return
    hosts = {"EVENSTEP_HOST_ID": f"host-{RANK}", "EVENSTEP_DEVICE_HOSTS": "legs"}
    os.environ.update(hosts)
    try:
        random_calls_pair()
    finally:
        for name in hosts:
            del os.environ[name]
