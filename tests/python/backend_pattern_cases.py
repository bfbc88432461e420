"""The ways in which PyTorch's own wrappers use a backend, one small example each, on backend "evenstep": all in one job of
two ranks. Run in each: `python backend_pattern_cases.py FOLDER [inductor]`, the latter for what a compiler of C++ takes long
for, alone."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstep  # noqa: F401

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
INDUCTOR = "inductor" in sys.argv
STEPS = 3
CPUS_TRAIN_SHARDED = hasattr(torch.cpu.Stream, "record_event")  # 2.6's fully_shard trains on no CPU, over no backend


class Net(torch.nn.Module):
    """With a branch that only some inputs take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.side = torch.nn.Linear(32, 32)
        self.last = torch.nn.Linear(32, 2)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.side(hidden) if branch else hidden)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def new_net() -> Net:
    torch.manual_seed(5)
    return Net()


def reference(branch: Callable[[int], bool] = lambda step: True, micro: int = 1) -> list[torch.Tensor]:
    """One process with everybody's batches: the mean of the ranks' gradients."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        for part in range(micro):
            for rank in range(SIZE):
                (net(batch(rank, step * micro + part), branch(step)).square().mean() / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def close(got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    got, wanted = list(got), list(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (a - b).abs().max()


def train(wrapped: Any, branch: Callable[[int], bool] = lambda step: True, micro: int = 1) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        for part in range(micro):
            with wrapped.no_sync() if part + 1 < micro else nullcontext():
                wrapped(batch(RANK, step * micro + part), branch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    variants: list[dict[str, Any]] = [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.001},
    ]
    for options in variants:
        wrapped = DistributedDataParallel(new_net(), **options)
        train(wrapped)
        close(wrapped.parameters(), reference())
    wrapped = DistributedDataParallel(new_net(), find_unused_parameters=True)
    sometimes = lambda step: step % 2 == 0  # noqa: E731
    train(wrapped, sometimes)
    close(wrapped.parameters(), reference(sometimes))
    wrapped = DistributedDataParallel(new_net())
    train(wrapped, micro=2)
    close(wrapped.parameters(), reference(micro=2))
    for hook, tolerance in ((default_hooks.allreduce_hook, 1e-6), (default_hooks.fp16_compress_hook, 1e-3)):
        wrapped = DistributedDataParallel(new_net())
        wrapped.register_comm_hook(None, hook)
        train(wrapped)
        close(wrapped.parameters(), reference(), tolerance)


def uneven() -> None:
    """Rank 1 has fewer batches; the others go on without it."""
    from torch.distributed.algorithms.join import Join

    wrapped = DistributedDataParallel(new_net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with Join([wrapped]):
        for step in range(4 - RANK):
            wrapped(batch(RANK, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    everyone = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(everyone, wrapped.module.last.bias.detach())
    assert torch.equal(everyone[0], everyone[1])


def fully_sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    nets = []
    for policy, tolerance in ((None, 1e-6), (MixedPrecisionPolicy(param_dtype=torch.bfloat16), 3e-2)):
        net = new_net()
        mesh = init_device_mesh("cpu", (SIZE,))
        options = {} if policy is None else {"mp_policy": policy}
        for layer in (net.first, net.side, net.last):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(net, mesh=mesh, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            net(batch(RANK, step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        close((p.full_tensor().detach() for p in net.parameters()), reference(), tolerance)
        nets.append(net)
    return nets[0]


def saved(net: Any) -> None:
    """torch.distributed.checkpoint, of the sharded net: saved, saved in the background, loaded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    before = [p.full_tensor().detach().clone() for p in net.parameters()]
    dcp.save({"net": get_model_state_dict(net)}, checkpoint_id=str(FOLDER / "now"))
    future = dcp.async_save({"net": get_model_state_dict(net)}, checkpoint_id=str(FOLDER / "later"))
    future.result()
    for name in ("now", "later"):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        state = {"net": get_model_state_dict(net)}
        dcp.load(state, checkpoint_id=str(FOLDER / name))
        set_model_state_dict(net, state["net"])
        close((p.full_tensor().detach() for p in net.parameters()), before, 0)


def tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(1)
    a, b = torch.randn(6, 5), torch.randn(5, 7)
    by_columns, by_rows = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    product = torch.matmul(by_columns, by_rows)  # a sum over the ranks is left to do
    assert isinstance(product, DTensor)
    close([product.full_tensor(), product.redistribute(mesh, [Shard(0)]).full_tensor()], [a @ b] * 2, 1e-5)
    turned = distribute_tensor(a, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])  # an all-to-all
    close([turned.redistribute(mesh, [Replicate()]).to_local()], [a], 0)


def functional() -> None:
    import torch.distributed._functional_collectives as calls

    group = dist.distributed_c10d._get_default_group()

    def step(x: torch.Tensor) -> torch.Tensor:
        total = calls.all_reduce(x * dist.get_world_size(group), "sum", group) * 2 / group.size()
        parts = calls.all_gather_tensor(total[:2], 0, group)
        return calls.reduce_scatter_tensor(parts, "avg", 0, group) + 1

    x = torch.full((4,), RANK + 1.0)
    wanted = torch.full((2,), SIZE * (SIZE + 1.0) + 1)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    close([step(x), compiled(x), compiled(x)], [wanted] * 3)
    if INDUCTOR:
        compiled = torch.compile(step, fullgraph=True)
        close([compiled(x), compiled(x)], [wanted] * 2)

    def plain(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x + 1

    close([torch.compile(plain, backend="aot_eager")(torch.ones(3))], [torch.full((3,), SIZE + 1.0)])


def compiled() -> None:
    """What torch.compile does not take into its graphs: DDP, and calls that it leaves to the group."""
    wrapped = DistributedDataParallel(new_net())
    branch = lambda step: True  # noqa: E731
    train(torch.compile(wrapped, backend="aot_eager"), branch)
    close(wrapped.parameters(), reference())

    def asynchronous(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, async_op=True).wait()
        return x + 1

    def rooted(x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        dist.reduce(x, 0)
        dist.broadcast(x, 0)
        return x + 1

    def around(x: torch.Tensor) -> torch.Tensor:
        got = torch.zeros(3)
        work = dist.isend(x, (RANK + 1) % SIZE)
        dist.recv(got, (RANK - 1) % SIZE)
        work.wait()
        return got + 1

    total = torch.full((3,), SIZE * (SIZE - 1) / 2 + 1)
    for call, wanted in ((asynchronous, total), (rooted, total), (around, torch.full((3,), (RANK - 1) % SIZE + 1.0))):
        close([torch.compile(call, backend="aot_eager")(torch.full((3,), float(RANK)))], [wanted])


def pipeline() -> None:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    for kind in (ScheduleGPipe, Schedule1F1B):
        scheduled(kind, 1)
    scheduled(ScheduleInterleaved1F1B, 2)


def scheduled(kind: Any, each: int) -> None:
    """`each` stages a rank, against the whole model on one."""
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(7)
    layers = [
        torch.nn.Linear(8, 16),
        *(torch.nn.Linear(16, 16) for _ in range(each * SIZE - 2)),
        torch.nn.Linear(16, 2),
    ]
    whole = copy.deepcopy(torch.nn.Sequential(*layers))
    x, target = batch(9, 9).repeat(2, 1), torch.zeros(8, 2)
    own = range(RANK, each * SIZE, SIZE)
    stages = [PipelineStage(layers[i], i, each * SIZE, torch.device("cpu")) for i in own]
    schedule = kind(stages if each > 1 else stages[0], n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    output = schedule.step(x) if RANK == 0 else schedule.step(target=target, losses=losses)
    result = whole(x)
    torch.nn.functional.mse_loss(result, target).backward()
    if RANK == SIZE - 1:
        close([output], [result], 1e-5)
    parts = 1 if hasattr(schedule, "scale_grads") else 4  # 2.6's adds the micro-batches' gradients up
    for i in own:
        close([p.grad / parts for p in layers[i].parameters()], [p.grad for p in whole[i].parameters()], 1e-5)


def fully_sharded_before() -> None:
    """FullyShardedDataParallel, which fully_shard replaces."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({torch.nn.Linear})
    net = FullyShardedDataParallel(
        new_net(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    train(net)
    with FullyShardedDataParallel.summon_full_params(net):
        close(net.parameters(), reference())


def zero_redundancy() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(new_net())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        wrapped(batch(RANK, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(wrapped.parameters(), reference())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("evenstep")
    ddp()
    uneven()
    if INDUCTOR:
        functional()
        dist.destroy_process_group()
        sys.exit()
    if CPUS_TRAIN_SHARDED:
        saved(fully_sharded())
        fully_sharded_before()
    tensors()
    functional()
    compiled()
    pipeline()
    zero_redundancy()
    dist.barrier()
    dist.destroy_process_group()
