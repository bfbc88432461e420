"""What the ranks of test_hybrid.py do: two groups of CPUs stand for two makers' devices."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator import FakeAccelerators

from evenstep import _core, hybrid
from evenstep.hybrid import HybridGroup

MAKERS = sys.argv[1].split(",")
PINNED, WITHOUT = "pinned" in sys.argv, "without" in sys.argv


class Staged(hybrid._HostStage):
    """As an accelerator's: pieces leave the tensor and come back, and a slot is not used before it is free."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.order: list[str] = []

    def down(self, piece: torch.Tensor, slot: int) -> torch.Tensor:
        assert slot not in self.memory, "a slot is used before its piece has come back"
        self.memory[slot] = piece.clone()
        self.order.append("down")
        return self.memory[slot]

    def up(self, piece: torch.Tensor, slot: int) -> None:
        piece.copy_(self.memory.pop(slot))
        self.order.append("up")


def pinned(group: HybridGroup, rank: int) -> None:
    """Sums in the stage of accelerators. The collectives inside a maker are on its stream, as NCCL's would be."""
    fake = FakeAccelerators(torch.device("cuda", rank))
    if group._stage is not None:
        group._stage = hybrid._PinnedStage(torch.device("cuda", rank), 1024, fake)

    def on_stream(call: Any) -> Any:
        def late(*given: Any, **named: Any) -> Any:
            fake.current(torch.device("cuda", rank)).finish()
            return call(*given, **named)

        return late

    hybrid.dist.reduce, hybrid.dist.broadcast = on_stream(dist.reduce), on_stream(dist.broadcast)
    for dtype in (torch.float32, torch.int64):
        for count in (1, 256, 257, 5000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                value = (torch.arange(count) % 7 + rank).to(dtype)
                tensor = torch.zeros(count, dtype=dtype)
                fake.own.put(lambda tensor=tensor, value=value: tensor.copy_(value))
                group.all_reduce(tensor, op)
                fake.finish()
                dist.all_reduce(value, op=op)
                assert torch.equal(tensor, value), (dtype, count, op, tensor[:4], value[:4])


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("evenstep")
    ranks = dist.get_world_size()
    if WITHOUT:
        hybrid._exchanges = lambda device: False
    group = HybridGroup("cpu", maker=MAKERS[rank], piece_bytes=1024)
    names = [f"{name} of rank {r}" if WITHOUT and MAKERS.count(name) > 1 else name for r, name in enumerate(MAKERS)]
    hosts = os.environ.get("HOSTS", "")
    if len(set(hosts)) > 1:
        names = [f"{name} on host {sorted(set(hosts)).index(host)}" for name, host in zip(names, hosts)]
    assert group.makers == {name: [r for r in range(ranks) if names[r] == name] for name in names}, group.makers
    if PINNED:
        pinned(group, rank)
        dist.barrier()
        dist.destroy_process_group()
        return
    if group._stage is not None:
        group._stage = Staged()
    for dtype in (torch.float32, torch.float64, torch.int64):
        for count in (0, 1, 255, 256, 257, 5000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                tensor = (torch.arange(count) % 7 + rank).to(dtype)
                want = tensor.clone()
                group.all_reduce(tensor, op)
                dist.all_reduce(want, op=op)
                assert torch.equal(tensor, want), (dtype, count, op, tensor[:4], want[:4])
    tensor = torch.full((700,), float(rank))
    group.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, torch.full((700,), sum(range(ranks)) / ranks))
    for dtype in (torch.float32, torch.float64):
        tensor = torch.full((700,), 2.0 + rank, dtype=dtype)
        group.all_reduce(tensor, dist._make_nccl_premul_sum(0.25))
        assert torch.equal(tensor, torch.full((700,), 0.25 * sum(2.0 + r for r in range(ranks)), dtype=dtype))
        group.all_reduce(tensor, dist.ReduceOp.PRODUCT)
        assert torch.equal(
            tensor, torch.full((700,), (0.25 * sum(2.0 + r for r in range(ranks))) ** ranks, dtype=dtype)
        )
    tensor = torch.full((700,), 2.0)
    group.all_reduce(tensor, factor=0.5 * rank)
    assert torch.equal(tensor, torch.full((700,), float(sum(range(ranks)))))
    crossed = torch.zeros(40, 40)
    crossed[:, 3] = rank + 1.0
    group.all_reduce(crossed[:, 3])
    assert torch.equal(crossed[:, 3], torch.full((40,), sum(range(1, ranks + 1)) + 0.0)) and crossed[:, 2].sum() == 0
    if group._stage is not None:
        group._stage.order.clear()
    group.all_reduce(torch.ones(5 * 256))
    if group._stage is not None:
        assert group._stage.order == ["down"] * 3 + ["up", "down", "up", "down", "up", "up", "up"], group._stage.order
    try:
        group.all_reduce(torch.ones(4), dist.ReduceOp.BAND)
    except ValueError as error:
        assert "is not SUM, AVG, PREMUL_SUM" in str(error)
    else:
        raise AssertionError("BAND was taken")
    try:
        HybridGroup("cpu", maker=MAKERS[rank], piece_bytes=1024 * (1 + rank))
    except _core.EvenstepError as error:
        assert "different sizes" in str(error)
    else:
        raise AssertionError("different pieces were taken")
    dist.barrier()
    dist.destroy_process_group()


main()
