"""The torch backend "evenstep": each test starts real ranks, as processes that run one of the functions below."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backend_session import SECONDS, Check, join, leave, rank_and_size

torch = pytest.importorskip("torch")


@pytest.fixture
def check(run_ranks: Callable[..., Any]) -> Callable[[Callable[..., None], int], None]:
    """Runs a body of this file on so many ranks; all must end well."""

    def run(body: Callable[..., None], ranks: int) -> None:
        run_ranks(Path(__file__), ranks, args=(body.__name__,))

    return run


# ---- what the ranks do; run in processes of their own ----


def body_collectives() -> None:
    import torch.distributed as dist

    rank, size = join()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for shape in ((), (0,), (7,), (3, 5), (50_000,)):
            tensor = torch.full(shape, rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full(shape, size * (size + 1) // 2, dtype=dtype)), (dtype, shape)
    tensor = torch.full((9,), float(rank))
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert torch.allclose(tensor, torch.full((9,), (size - 1) / 2))
    tensor = torch.full((9,), float(rank))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    assert torch.equal(tensor, torch.full((9,), float(size - 1)))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, op=dist.ReduceOp.BAND)
    assert flags.tolist() == [size == 1, True, False]

    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert work.get_future().value()[0] is tensor or torch.equal(work.get_future().value()[0], tensor)

    for dtype in (torch.float32, torch.complex64, torch.bool, torch.uint16):
        parts = [torch.empty(r, dtype=dtype) for r in range(size)]
        dist.all_gather(parts, torch.ones(rank, dtype=dtype))
        assert [p.numel() for p in parts] == list(range(size))
        assert all(bool(p.eq(1).all()) for p in parts)
    whole = torch.empty(size * 3)
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank)))
    assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(3))

    out = torch.empty(4)
    dist.reduce_scatter_tensor(out, torch.arange(4.0 * size) * (rank + 1))
    assert torch.equal(out, torch.arange(4.0 * size)[4 * rank : 4 * rank + 4] * (size * (size + 1) // 2))
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((r + 1,), float(rank)) for r in range(size)])
    assert torch.equal(uneven, torch.full((rank + 1,), size * (size - 1) / 2))

    tensor = torch.full((5,), float(rank))
    dist.broadcast(tensor, src=size - 1)
    assert torch.equal(tensor, torch.full((5,), float(size - 1)))
    dist.barrier()
    leave()


def body_odd_tensors() -> None:
    import torch.distributed as dist

    rank, size = join()
    total = size * (size + 1) / 2
    matrix = torch.full((4, 6), float(rank + 1))
    dist.all_reduce(matrix.t())  # not contiguous: reduced through a copy
    assert torch.equal(matrix, torch.full((4, 6), total))
    matrix = torch.full((4, 6), float(rank + 1))
    dist.all_reduce(matrix[:, 1:3])
    assert torch.equal(matrix[:, 1:3], torch.full((4, 2), total))
    assert torch.equal(matrix[:, 0], torch.full((4,), float(rank + 1)))
    pairs = torch.full((3,), complex(rank, 1))
    dist.all_reduce(pairs)
    assert torch.equal(pairs, torch.full((3,), complex(size * (size - 1) / 2, size)))
    image = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
    dist.broadcast(image, src=0)
    assert torch.equal(image, torch.zeros(2, 3, 4, 5)) and image.is_contiguous(memory_format=torch.channels_last)
    columns = [torch.empty(6, 4).t() for _ in range(size)]
    dist.all_gather(columns, torch.full((6, 4), float(rank)).t())
    assert all(torch.equal(c, torch.full((4, 6), float(r))) for r, c in enumerate(columns))
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert torch.equal(leaf.detach(), torch.full((3,), float(size)))
    with dist._coalescing_manager():
        many = [torch.full((n,), float(rank)) for n in (1, 100, 3)]
        for tensor in many:
            dist.all_reduce(tensor)
    assert all(bool(t.eq(size * (size - 1) / 2).all()) for t in many)
    leave()


def body_callbacks() -> None:
    """What a callback of one call begins and waits for is done before the calls that were submitted meanwhile."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
    from torch.nn.parallel import DistributedDataParallel

    rank, size = join()
    first, second, third, fourth = (torch.full((1000,), float(rank + n)) for n in range(4))

    def go_on(_: Any) -> list[torch.Tensor]:
        found = dist.all_reduce(third, async_op=True).get_future().wait()
        dist.all_reduce(fourth)
        return found

    then = dist.all_reduce(first, async_op=True).get_future().then(go_on)
    after = dist.all_reduce(second, async_op=True)
    after.wait()
    assert torch.equal(then.wait()[0], torch.full((1000,), 5.0))
    assert [t[0].item() for t in (first, second, third, fourth)] == [1.0, 3.0, 5.0, 7.0]

    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        model(torch.full((8, 64), float(rank + step))).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    others = [torch.empty_like(gradients) for _ in range(size)]
    dist.all_gather(others, gradients)
    assert torch.equal(others[0], others[1]) and gradients.norm() > 0
    leave()


def body_async() -> None:
    import torch.distributed as dist

    rank, size = join()
    # While rank 0's all-reduce is under way it sends what rank 1 waits for before it joins: no deadlock.
    tensor = torch.full((300_000,), float(rank + 1))
    word = torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(word + 5, dst=1)
    else:
        dist.recv(word, src=0)
        assert word.item() == 5
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, torch.full((300_000,), 3.0))
    # Many at once, in order, and one that is not asynchronous behind them.
    many = [torch.full((n,), float(rank)) for n in range(1, 50)]
    works = [dist.all_reduce(t, async_op=True) for t in many]
    last = torch.ones(1)
    dist.all_reduce(last)
    for work in works:
        work.wait()
    assert all(bool(t.eq(1).all()) for t in many) and last.item() == size
    assert all(work.is_success() and work.exception() is None for work in works)
    # A failure belongs to its own Work.
    bad = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    try:
        bad.wait()
    except RuntimeError as error:
        assert "EVEN_ERR_MISMATCH" in str(error), error
        assert str(error).count("test_backend.py:") == 2 and str(error).count(" in body_async") == 2, error
    else:
        raise AssertionError("no error")
    assert bad.is_completed() and not bad.is_success()
    assert "EVEN_ERR_MISMATCH" in str(bad.exception()), bad.exception()
    leave()


def body_without_gil() -> None:
    """What a group's thread waits on takes up an all-reduce and makes it while another thread keeps the GIL."""
    import ctypes
    import sys
    import threading

    import torch.distributed as dist

    from evenstep import _core, backend_tensors

    _, size = join()
    if (
        backend_tensors.WAITS_UNASKED
    ):  # options that do not say who waits: each call is a job of the thread's, in Python
        assert dist.distributed_c10d._get_default_group()._reducer is None
        leave()
        return
    group, options, queue = dist.distributed_c10d._get_default_group(), dist.AllreduceOptions(), _core.CallQueue()
    tensor, ended = torch.ones(50_000), torch.zeros(1)
    last = ctypes.c_float.from_address(tensor.data_ptr() + 4 * (tensor.numel() - 1))
    usual = sys.getswitchinterval()
    for _ in range(50):  # the thread may not wait yet when the call comes
        tensor.fill_(1.0)
        thread = threading.Thread(target=queue.next)
        thread.start()
        dist.barrier()
        sys.setswitchinterval(1000)
        assert group._reducer.put(queue, None, None, [tensor], options)
        looks = 0
        while last.value != size and looks < 3_000_000:
            looks += 1
        without = last.value == size
        sys.setswitchinterval(usual)
        thread.join()
        ended.fill_(float(without))
        dist.all_reduce(ended, op=dist.ReduceOp.MIN)
        if ended.item():
            break
    assert ended.item(), "it was never made before the GIL was given up"
    assert torch.equal(tensor, torch.full((50_000,), float(size)))
    leave()


def body_limited_wait() -> None:
    """A wait may end before its collective, which goes on: as in Gloo."""
    from datetime import timedelta

    import torch.distributed as dist

    import evenstep

    rank, size = join()
    store = dist.distributed_c10d._get_default_store()
    for name, group in (("ours", None), ("gloo", dist.new_group(backend="gloo"))):
        tensor = torch.full((50_000,), float(rank + 1))
        if rank == 0:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            try:
                work.wait(timedelta(seconds=0.05))
            except RuntimeError as error:
                assert name == "gloo" or (isinstance(error, evenstep.EvenstepError) and "0.05 s" in str(error)), error
                assert name == "gloo" or error.status == "EVEN_ERR_TIMEOUT"
            else:
                raise AssertionError(f"{name}: no limit")
            assert not work.is_completed()
            assert name == "gloo" or (not work.is_success() and work.exception() is None)
            store.set(name, "may come")
        else:
            store.wait([name])
            work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work.wait(timedelta(seconds=50))
        work.wait(timedelta(seconds=0.001))  # done already
        assert torch.equal(tensor, torch.full((50_000,), size * (size + 1) / 2)), name
    leave()


def body_beneath() -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    rank, size = join()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    words: list[object] = ["from zero"] if rank == 0 else [None]
    dist.broadcast_object_list(words, src=0)
    assert words == ["from zero"]
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(tensor + 7, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
        assert torch.equal(tensor, torch.full((3,), 7.0))
    whole = torch.arange(float(size)) + 10 * rank
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, whole)
    assert torch.equal(swapped, torch.arange(float(size)) * 10 + rank)
    sums = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert torch.equal(sums, torch.full((3,), float(size)))
    tensor = torch.ones(3)
    dist.reduce(tensor, dst=0)
    assert rank != 0 or torch.equal(tensor, torch.full((3,), float(size)))
    assert dist.get_backend() == "evenstep"
    leave()


def body_groups() -> None:
    import torch.distributed as dist

    rank, size = join()
    pairs = [dist.new_group([r, r + 1]) for r in range(0, size, 2)]
    alone = [dist.new_group([r]) for r in range(size)]
    own = pairs[rank // 2]
    tensor = torch.full((20_000,), float(rank))
    dist.all_reduce(tensor, group=own)
    assert torch.equal(tensor, torch.full((20_000,), float(2 * (rank // 2 * 2) + 1)))
    dist.all_reduce(tensor, group=alone[rank])
    whole = torch.tensor([1.0])
    dist.all_reduce(whole)
    assert whole.item() == size
    dist.broadcast(tensor, src=rank // 2 * 2 + 1, group=own)
    dist.destroy_process_group(own)
    dist.barrier()
    leave()
    held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    assert not any("evenstep-group" in name for name in held), held
    assert "evenstep-group" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    # the same names once more, over the same store's keys
    join()
    dist.barrier()
    leave()


def train(backend: str, wrap: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    import torch.distributed as dist

    rank, _ = rank_and_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4)).to(dtype)
    group = dist.new_group(backend=backend)
    if wrap == "ddp":
        wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.01
        )
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        wrapped = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(5):
        inputs = torch.randn(8, 16, generator=data).to(dtype)
        loss = wrapped(inputs).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    full = getattr(torch.distributed.tensor, "DTensor", ()) if wrap == "fsdp" else ()
    return [p.full_tensor().detach() if isinstance(p, full) else p.detach().clone() for p in model.parameters()]


def body_ddp() -> None:
    join()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        ours, theirs = train("evenstep", "ddp", dtype), train("gloo", "ddp", dtype)
        for a, b in zip(ours, theirs):
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    leave()


def body_fsdp() -> None:
    import torch.distributed.tensor

    join()
    if not hasattr(torch.cpu.Stream, "record_event"):  # 2.6's fully_shard trains on no CPU, over no backend
        for backend in ("gloo", "evenstep"):
            with pytest.raises(AttributeError, match="record_event"):
                train(backend, "fsdp")
        leave()
        return
    for a, b in zip(train("evenstep", "fsdp"), train("evenstep", "ddp")):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    leave()


# ---- the tests ----


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives(ranks: int, check: Check) -> None:
    check(body_collectives, ranks)


def test_asynchronous_calls(check: Check) -> None:
    check(body_async, 2)


def test_calls_from_callbacks(check: Check) -> None:
    check(body_callbacks, 2)


def test_a_queued_all_reduce_needs_no_gil(check: Check) -> None:
    check(body_without_gil, 2)


def test_a_wait_with_a_limit(check: Check) -> None:
    check(body_limited_wait, 2)


def test_tensors_of_every_layout(check: Check) -> None:
    check(body_odd_tensors, 2)


def test_what_torch_does_beneath(check: Check) -> None:
    check(body_beneath, 2)


def test_subgroups_and_no_leaks(check: Check) -> None:
    check(body_groups, 4)


def test_ddp_as_gloo(check: Check) -> None:
    check(body_ddp, 2)


def test_fsdp_as_ddp(check: Check) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="no FSDP in this torch")
    check(body_fsdp, 2)


def test_import_does_not_import_torch() -> None:
    code = (
        "import sys, evenstep; assert 'torch' not in sys.modules; import torch.distributed as d; d.Backend('evenstep')"
    )
    environment = dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    code = "import torch.distributed as d, evenstep; assert 'evenstep' in d.Backend.backend_list"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]]()
