"""What each rank does in test_backend_watched.py: `python backend_watched_cases.py PART`. What Gloo shows is the reference."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstep

warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for two of these
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


IS_LATER = hasattr(torch.cpu.Stream, "record_event")  # than 2.6, where fully_shard trains on no CPU
HAS_LISTS = hasattr(dist.ProcessGroup, "all_gather_single")  # reduce-scatter and all-to-all: 2.11 has the first


def calls(group: Any, lists: bool = True) -> None:
    """Each collective once, but an all-reduce more that is not waited for at once."""
    mine, whole = torch.full((10,), float(RANK)), torch.zeros(10 * SIZE)
    parts = list(whole.chunk(SIZE))
    dist.all_reduce(mine, group=group)
    work = dist.all_reduce(mine, group=group, async_op=True)
    work.wait()
    assert torch.equal(mine, torch.full((10,), float(SIZE * SIZE * (SIZE - 1) // 2)))
    mine.fill_(float(RANK))
    dist.broadcast(mine, 1, group=group)
    assert torch.equal(mine, torch.ones(10))
    dist.all_gather_into_tensor(whole, mine.fill_(float(RANK)), group=group)
    assert torch.equal(whole, torch.arange(float(SIZE)).repeat_interleave(10))
    whole.zero_()
    dist.all_gather(parts, mine, group=group)
    assert torch.equal(whole, torch.arange(float(SIZE)).repeat_interleave(10))
    dist.reduce_scatter_tensor(mine, whole, group=group)
    assert torch.equal(mine, torch.full((10,), float(SIZE * RANK)))
    if lists:
        dist.reduce_scatter(mine, parts, group=group)
    assert torch.equal(mine, torch.full((10,), float(SIZE * RANK)))
    dist.reduce(mine, 0, group=group)
    dist.gather(mine, parts if RANK == 0 else None, 0, group=group)
    dist.scatter(mine, parts if RANK == 0 else None, 0, group=group)
    dist.all_to_all_single(whole, torch.full((10 * SIZE,), float(RANK)), group=group)
    assert torch.equal(whole, torch.arange(float(SIZE)).repeat_interleave(10))
    if lists:
        dist.all_to_all(parts, [torch.full((10,), float(RANK)) for _ in range(SIZE)], group=group)
    assert torch.equal(whole, torch.arange(float(SIZE)).repeat_interleave(10))
    dist.barrier(group=group)


def uneven() -> None:
    """What Gloo has not."""
    parts = [torch.zeros(1 + rank) for rank in range(SIZE)]
    dist.all_gather(parts, torch.full((1 + RANK,), float(RANK)))
    assert all(bool(part.eq(rank).all()) for rank, part in enumerate(parts))
    given = [torch.full((1 + RANK + to,), float(RANK)) for to in range(SIZE)]
    got = [torch.zeros(1 + RANK + source) for source in range(SIZE)]
    dist.all_to_all(got, given)
    assert all(bool(part.eq(source).all()) for source, part in enumerate(got))
    rows = [1 + RANK + other for other in range(SIZE)]
    whole = torch.zeros(sum(rows))
    dist.all_to_all_single(whole, torch.full((sum(rows),), float(RANK)), rows, rows)
    assert torch.equal(whole, torch.cat(got))


def training(group: Any) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(10, 3), process_group=group)
    model(torch.full((2, 10), float(RANK))).sum().backward()


def messages() -> None:
    got = torch.zeros(7, dtype=torch.int64)
    if RANK == 0:
        dist.send(torch.arange(7), 1)
        dist.recv(got, 1, tag=3)
    if RANK == 1:
        dist.recv(got)  # from any rank
        dist.isend(got, 0, tag=3).wait()
    assert got.tolist() == list(range(7)) if RANK < 2 else True


def profile() -> None:
    def shown(body: Callable[[], None], **options: Any) -> tuple[dict[str, int], list[dict[str, Any]]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as seen:
            body()
        counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("evenstep:")}
        assert all(event.cpu_time_total > 0 for event in seen.key_averages() if event.key.startswith("evenstep:"))
        with tempfile.TemporaryDirectory() as folder:
            place = str(Path(folder) / "trace.json")
            seen.export_chrome_trace(place)
            events = json.loads(Path(place).read_text(encoding="utf-8"))["traceEvents"]
        return counts, [event for event in events if str(event.get("name", "")).startswith("evenstep:")]

    calls(None)  # what is not profiled is as it was
    counts, events = shown(lambda: calls(None), record_shapes=True)
    expected = {
        "all_reduce": 2,
        "broadcast": 1,
        "all_gather": 2,
        "reduce_scatter": 2,
        "reduce": 1,
        "gather": 1,
        "scatter": 1,
        "all_to_all": 2,
        "barrier": 1,
    }
    whole = {f"evenstep:{name}": n for name, n in expected.items()}
    assert counts == {**whole, **{f"{name}.call": n for name, n in whole.items()}}, counts
    sizes = [(one["name"], one["args"].get("Input Dims"), one["args"].get("Input type")) for one in events]
    assert sizes.count(("evenstep:all_reduce.call", [[10]], ["float"])) == 2, sizes
    assert ("evenstep:reduce_scatter.call", [[10 * SIZE]], ["float"]) in sizes, sizes
    assert ("evenstep:reduce_scatter.call", [[10]] * SIZE, ["float"] * SIZE) in sizes, sizes
    for event in events:
        call = event["name"].endswith(".call")
        assert event["cat"] == ("cpu_op" if call else "user_annotation"), event
        assert not call or event["args"]["ranks"] == SIZE, event
    counts, events = shown(lambda: training(None))
    assert counts["evenstep:all_reduce"] == 1, counts  # the gradients
    if RANK < 2:
        counts, events = shown(messages, record_shapes=True)
        assert (counts["evenstep:send"], counts["evenstep:recv"]) == (1, 1), counts
        assert any(event["args"].get("Input Dims") == [[7]] for event in events), events

    store = dist.distributed_c10d._get_default_store()

    def waited_for() -> None:
        """Rank 1 comes to both calls when rank 0 has done something beside each."""
        tensor = torch.zeros(3)
        for name in ("collective", "message"):
            if RANK == 0:
                begun = dist.all_reduce(tensor, async_op=True) if name == "collective" else dist.irecv(tensor, 1)
                with torch.profiler.record_function("beside"):
                    pass
                store.set(name, "may come")
                begun.wait()
            elif RANK == 1:
                store.wait([name])
                dist.all_reduce(tensor) if name == "collective" else dist.send(tensor, 0)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        waited_for()
    if RANK == 0:
        ends = {
            name: [e.time_range.end for e in seen.events() if e.name == name]
            for name in ("beside", "evenstep:all_reduce", "evenstep:recv")
        }
        assert ends["beside"][0] < ends["evenstep:all_reduce"][0] < ends["beside"][1] < ends["evenstep:recv"][0], ends

    def never_waited_for() -> None:
        """Neither for the message nor by another of its group: the record ends with that."""
        if RANK == 0:
            dist.isend(torch.ones(1 << 20), 1, group=pair)
            store.set("sent", "")
            store.wait(["received"])
        elif RANK == 1:
            store.wait(["sent"])
            dist.recv(torch.zeros(1 << 20), 0, group=pair)
            store.set("received", "")
        dist.destroy_process_group(pair)
        with torch.profiler.record_function("beside"):
            pass

    pair = dist.new_group([0, 1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        never_waited_for()
    if RANK == 0:
        sent, beside = ([e.time_range for e in seen.events() if e.name == name] for name in ("evenstep:send", "beside"))
        assert len(sent) == 1 and sent[0].end < beside[0].start, (sent, beside)

    def failing() -> None:
        for later in (False, True):
            try:
                work = dist.all_reduce(torch.ones(3 + RANK), async_op=later)
                assert later and work is not None
                work.wait()
            except evenstep.EvenstepError as error:
                assert error.status == "EVEN_ERR_MISMATCH", error
            else:
                raise AssertionError("sizes that differ were taken")

    counts, _ = shown(failing)
    assert counts["evenstep:all_reduce"] == 2, counts
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        gloo = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(3), group=gloo)
    assert not any(event.key.startswith("evenstep:") for event in seen.key_averages())


def modes() -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.placement_types import Replicate, Shard
    from torch.utils._python_dispatch import TorchDispatchMode

    def counted(body: Callable[[], Any]) -> dict[str, int]:
        with CommDebugMode() as mode:
            body()
        return {str(name): n for name, n in mode.get_comm_counts().items()}

    gloo = dist.new_group(backend="gloo")
    ours, theirs = counted(lambda: calls(None)), counted(lambda: calls(gloo, HAS_LISTS))
    if not HAS_LISTS:
        assert ours.pop("c10d.reduce_scatter_") == ours.pop("c10d.alltoall_") == 1
    assert ours == theirs and sum(ours.values()) == (12 if HAS_LISTS else 10), (ours, theirs)
    assert counted(uneven) == {"c10d.allgather_": 1, "c10d.alltoall_": 1, "c10d.alltoall_base_": 1}

    def refused() -> None:
        for wrong in (
            lambda: dist.all_gather_into_tensor(torch.zeros(3 * SIZE + 1), torch.zeros(3)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * SIZE + 1)),
            lambda: dist.all_gather([torch.zeros(2)] * SIZE, torch.zeros(3)),
        ):
            try:
                wrong()
            except ValueError as error:
                assert "elements" in str(error), error
            else:
                raise AssertionError("sizes that do not fit were taken")

    refused()
    assert not counted(refused)

    def functions(group: Any) -> None:
        total = functional.all_reduce(torch.ones(3), "sum", group)
        assert total.tolist() == [float(SIZE)] * 3
        assert functional.all_gather_tensor(torch.ones(3), 0, group).numel() == 3 * SIZE

    def sharded(group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        tensor = distribute_tensor(torch.arange(float(4 * SIZE)), mesh, [Shard(0)])
        assert tensor.redistribute(mesh, [Replicate()]).to_local().tolist() == list(range(4 * SIZE))

    def fully(group: Any) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(10, 2 * SIZE)
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        model(torch.ones(2, 10)).sum().backward()

    world = dist.group.WORLD
    bodies = [functions, sharded, training]
    if IS_LATER:
        bodies.append(fully)
    for body in bodies:
        ours, theirs = counted(lambda body=body: body(world)), counted(lambda body=body: body(gloo))
        assert ours == theirs, (body.__name__, ours, theirs)
        assert sum(ours.values()) > 0 or body is training, body.__name__

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Names() as names:
        messages()
    sent = {"c10d.send.default", "c10d.recv_.default", "c10d.recv_any_source_.default"}
    assert RANK > 1 or len(sent & names.seen.keys()) == 2, names.seen


def hooks() -> None:
    def gradients(hook: Any, dtype: torch.dtype, group: Any) -> torch.Tensor:
        torch.manual_seed(3)
        layers = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1)).to(dtype)
        model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.005)
        if hook is not None:
            model._register_builtin_comm_hook(hook)
        for step in range(3):
            model.zero_grad()
            model(torch.full((4, 50), float(RANK + step), dtype=dtype)).square().mean().backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    gloo = dist.new_group(backend="gloo")
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    for hook in (None, dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        for dtype in (torch.float32, torch.float16):
            ours, theirs = gradients(hook, dtype, None), gradients(hook, dtype, gloo)
            assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3) and ours.norm() > 0, (hook, dtype)
            everyone = [torch.empty_like(ours) for _ in range(SIZE)]
            dist.all_gather(everyone, ours)
            assert all(torch.equal(ours, other) for other in everyone)
            assert gradients(hook, dtype, alone).norm() > 0
    half = torch.full((5,), 1.0 + RANK, dtype=torch.float16)
    future = dist.all_reduce(half, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait()[0] == SIZE * (SIZE + 1) and future.wait()[0] is half
    bad = dist.all_reduce(torch.ones(3 + RANK, dtype=torch.float16), async_op=True)
    try:
        bad.get_future().wait()
    except RuntimeError as error:
        assert "EVEN_ERR_MISMATCH" in str(error), error
    else:
        raise AssertionError("sizes that differ were taken")


def callbacks() -> None:
    """Python's callbacks of a float16 all-reduce that wait for further ones, as torch's powerSGD_hook does: they run on the group's
    own thread, or in `then`, never on TorchScript's pool, which has one thread here."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.set_num_interop_threads(1)
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    for group in (None, alone):
        places: list[str] = []

        def again(done: Any, group: Any = group, places: list[str] = places) -> Any:
            places.append(threading.current_thread().name)
            dist.all_reduce(done.value()[0], group=group, async_op=True).get_future().wait()
            return done.value()[0]

        ones = [torch.ones(4, dtype=torch.float16) for _ in range(5)]
        begun = [dist.all_reduce(one, group=group, async_op=True).get_future().then(again) for one in ones]
        size = dist.get_world_size(group)
        assert all(future.wait()[0].item() == size * size for future in begun)
        assert set(places) <= {"MainThread", "evenstep-collectives"}, places
    done = dist.all_reduce(torch.ones(1, dtype=torch.float16), group=alone, async_op=True)
    assert done.is_completed() and done.get_future().done()

    def trained(compressed: bool, steps: int) -> torch.Tensor:
        """(Over Gloo itself the calls of several buckets' callbacks may meet in another order on each rank.)"""
        torch.manual_seed(3)
        layers = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Tanh(), torch.nn.Linear(60, 40))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.005)
        if compressed:
            state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
            model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
        for step in range(steps):
            model.zero_grad()
            model(torch.full((4, 50), float(RANK + step))).square().mean().backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    assert torch.allclose(trained(True, 2), trained(False, 2), rtol=1e-2, atol=1e-3)  # before it compresses
    ours = trained(True, 5)
    everyone = [torch.empty_like(ours) for _ in range(SIZE)]
    dist.all_gather(everyone, ours)
    assert ours.norm() > 0 and all(torch.equal(ours, other) for other in everyone)
    hooks()


if __name__ == "__main__":
    dist.init_process_group("evenstep")
    {"profile": profile, "modes": modes, "hooks": hooks, "callbacks": callbacks}[sys.argv[1]]()
    dist.destroy_process_group()
