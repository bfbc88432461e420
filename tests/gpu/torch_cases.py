"""What torch asks of backend "evenstep" with CUDA tensors beside plain collectives: calls that go through the host, and torch's own
wrappers. Part of cases.py, which starts it. Not run on a GPU yet: seen over made-up libraries alone."""

from __future__ import annotations

import copy
import pathlib
import time
from typing import Any

import torch
import torch.distributed as dist
from cases import DEVICE, RANK, RANKS, join, own_gpu, row, same

TOTAL = sum(range(1, RANKS + 1))


def full(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, device=DEVICE).to(dtype)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _through_host() -> None:
    """Each call that NCCL has not, against what must come of it; then with NCCL's calls between them, waited for in another order
    on each rank."""
    own_gpu()
    join("evenstep")
    every = 0
    for rank in range(RANKS):
        every |= 1 << rank
    for later in (False, True):
        for dtype in (torch.int16, torch.uint16):
            tensor = full(1000, RANK + 1, dtype)
            finish(dist.all_reduce(tensor, async_op=later))
            same(tensor, TOTAL)
        for dtype in (torch.int32, torch.uint8, torch.int64):
            tensor = full(1000, 1 << RANK, dtype)
            finish(dist.all_reduce(tensor, dist.ReduceOp.BOR, async_op=later))
            same(tensor, every)
        crossed = torch.zeros(4, 4, dtype=torch.int16, device=DEVICE)
        crossed[:, 1] = 1
        finish(dist.all_reduce(crossed[:, 1], async_op=later))
        same(crossed.sum(), 4 * RANKS)
        kept = full(3, RANK + 1, torch.int16)
        finish(dist.reduce(kept, RANKS - 1, async_op=later))
        same(kept, TOTAL if RANK == RANKS - 1 else RANK + 1)
        part = full(2, 0, torch.int16)
        finish(dist.reduce_scatter_tensor(part, full(2 * RANKS, 1, torch.int16), async_op=later))
        same(part, RANKS)
        sparse = torch.sparse_coo_tensor([[RANK, 5]], [1.0, 2.0], (RANKS + 6,), device=DEVICE)
        finish(dist.all_reduce(sparse, async_op=later))
        dense = sparse.to_dense().cpu()
        assert dense.sum().item() == 3 * RANKS and dense[5].item() >= 2 * RANKS, dense
    for number in range(16):
        floats, shorts = full(4096, RANK + 1), full(64, RANK + 1, torch.int16)
        bits = full(64, 1 << RANK, torch.int32)
        works = [
            dist.all_reduce(shorts, async_op=True),
            dist.all_reduce(floats, async_op=True),
            dist.all_reduce(bits, dist.ReduceOp.BOR, async_op=True),
        ]
        for work in works if (RANK + number) % 2 else reversed(works):
            work.wait()
        same(floats, TOTAL)
        same(shorts, TOTAL)
        same(bits, every)
    if RANKS > 1:
        _messages_with_tags()
    dist.destroy_process_group()


through_host_alone = through_host_pair = _through_host


def _messages_with_tags() -> None:
    right, left = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    large, small = full(1 << 20, RANK), full(3, -RANK)
    works = [dist.isend(large, right, tag=7), dist.isend(small, right, tag=9)]
    got, last = full(1 << 20, 0), full(3, 0)
    dist.recv(last, left, tag=9)  # sent last, wanted first
    dist.recv(got, left, tag=7)
    same(last, -left)
    same(got, left)
    for work in works:
        work.wait()
    if RANK == 0:
        for _ in range(RANKS - 1):
            word = full(1, 0)
            source = dist.recv(word, tag=4)
            assert source == word.item() > 0, (source, word)
    else:
        dist.send(full(1, RANK), 0, tag=4)


def through_host_does_not_wait() -> None:
    """The call returns while the GPU is busy; and how long it takes when it is not."""
    own_gpu()
    join("evenstep")
    tensor = full(1024, 1, torch.int16)
    dist.all_reduce(tensor)  # pins memory, starts threads
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    work = dist.all_reduce(tensor, async_op=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query() and not work.is_completed(), "the host has waited for the GPU"
    work.wait()
    same(tensor, 1)
    for count in (1 << 10, 1 << 20, 32 << 20):
        data = full(count, 1, torch.int16)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        row(bytes=2 * count, through_host_us=round(min(times) * 1e6))
    dist.destroy_process_group()


def wrappers_pair() -> None:
    """FSDP2, DTensor, functional collectives and a checkpoint of torch's, on a mesh of GPUs."""
    import torch.distributed._functional_collectives as calls
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    own_gpu()
    join("evenstep")
    mesh = init_device_mesh(DEVICE, (RANKS,))
    nets = []
    for _ in range(2):
        torch.manual_seed(5)
        layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)]
        nets.append(torch.nn.Sequential(*layers).double())
    net, alone = nets[0].to(DEVICE), nets[1]
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, alone)]
    for step in range(3):
        batches = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)
            for rank in range(RANKS)
        ]
        net(batches[RANK].to(DEVICE)).square().mean().backward()
        for batch in batches:
            (alone(batch).square().mean() / RANKS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(net.parameters(), alone.parameters()):
        same(got.full_tensor().detach(), want.detach(), 1e-12)
    folder = str(pathlib.Path("torch-checkpoint").resolve())
    dcp.save({"net": get_model_state_dict(net)}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = {"net": get_model_state_dict(net)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["net"])
    for got, want in zip(net.parameters(), alone.parameters()):
        same(got.full_tensor().detach(), want.detach(), 1e-12)

    torch.manual_seed(1)
    a, b = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    by_columns = distribute_tensor(a.to(DEVICE), mesh, [Shard(1)])
    by_rows = distribute_tensor(b.to(DEVICE), mesh, [Shard(0)])
    same(torch.matmul(by_columns, by_rows).full_tensor(), a @ b, 1e-12)
    turned = by_columns.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Replicate()])  # an all-to-all
    same(turned.to_local(), a)

    group = mesh.get_group()
    x = full(2 * RANKS, RANK + 1)
    same(calls.all_reduce(x, "sum", group) + 0, TOTAL)
    same(calls.reduce_scatter_tensor(x, "sum", 0, group) + 0, TOTAL)
    same(calls.all_gather_tensor(x[:1], 0, group) + 0, list(range(1, RANKS + 1)))
    bits = full(3, 1 << RANK, torch.int32)
    same(calls.all_reduce(bits, "bor", group) + 0, (1 << RANKS) - 1)  # through the host
    dist.destroy_process_group()


def pipelines_pair() -> None:
    """A stage of a model on each rank, under the schedules of torch.distributed.pipelining; and the optimizer's state in parts
    (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    own_gpu()
    join("evenstep")
    for kind in (ScheduleGPipe, Schedule1F1B):
        _pipeline(kind)
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).double()
    alone = copy.deepcopy(net)
    wrapped = torch.nn.parallel.DistributedDataParallel(net.to(DEVICE))
    parts = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    whole = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(3):
        batches = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)
            for rank in range(RANKS)
        ]
        wrapped(batches[RANK].to(DEVICE)).square().mean().backward()
        for batch in batches:
            (alone(batch).square().mean() / RANKS).backward()
        for optimizer in (parts, whole):
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(wrapped.parameters(), alone.parameters()):
        same(got.detach(), want.detach(), 1e-12)
    dist.destroy_process_group()


def _pipeline(kind: Any) -> None:
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 8).double() for _ in range(RANKS)]
    whole = torch.nn.Sequential(*layers)
    x, target = torch.randn(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    own = copy.deepcopy(layers[RANK]).to(DEVICE)
    stage = PipelineStage(
        own, RANK, RANKS, torch.device(DEVICE, torch.cuda.current_device() if DEVICE == "cuda" else 0)
    )
    schedule = kind(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    given = (x.to(DEVICE),) if RANK == 0 else ()
    output = schedule.step(*given, **({"target": target.to(DEVICE)} if RANK == RANKS - 1 else {}))
    result = whole(x)
    torch.nn.functional.mse_loss(result, target).backward()
    if RANK == RANKS - 1:
        same(output.detach(), result.detach(), 1e-12)
    parts = 1 if hasattr(schedule, "scale_grads") else 4  # 2.6's adds the micro-batches' gradients up
    for got, want in zip(own.parameters(), layers[RANK].parameters()):
        assert got.grad is not None and want.grad is not None
        same(got.grad / parts, want.grad, 1e-12)
