"""What a backend is asked for beside dense collectives: sparse tensors, odd dtypes, overlaps, meshes, forks, barriers that
name who is missing. Run in each rank: `python backend_rest_cases.py PART`."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import evenstep
from evenstep import _core
from evenstep.backend_tensors import WAITS_UNASKED

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def raises(kind: type[BaseException], call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"no {kind.__name__}: {words}")


def sparse_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...], sparse: int, count: int) -> torch.Tensor:
    """Not coalesced: indices may come twice. Whole numbers: any order of adding gives the same."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.stack([torch.randint(0, n, (count,), generator=generator) for n in shape[:sparse]])
    values = torch.randint(0, 5, (count, *shape[sparse:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def sparse() -> None:
    gloo = dist.new_group(backend="gloo")
    kinds = [
        (torch.float32, (7, 4), 1, 5),
        (torch.float64, (3, 5), 2, 4 * RANK),
        (torch.float32, (100, 300), 1, 80),
        (torch.int64, (6,), 1, 3),
        (torch.float32, (4, 2, 3), 2, 0),
        (torch.float32, (4, 0), 1, 2),
    ]
    for dtype, shape, dimensions, count in kinds:
        counts = [4 * rank if count == 4 * RANK and shape == (3, 5) else count for rank in range(SIZE)]
        inputs = [sparse_of(rank, dtype, shape, dimensions, n) for rank, n in enumerate(counts)]
        wanted = torch.stack([tensor.to_dense() for tensor in inputs]).sum(0)
        for asynchronous in (False, True):
            tensor = inputs[RANK].clone()
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), wanted), (dtype, shape)
    theirs, ours = (sparse_of(RANK, torch.float32, (9, 3), 1, 6) for _ in range(2))
    dist.all_reduce(theirs, group=gloo)
    dist.all_reduce(ours)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    alike = torch.sparse_coo_tensor([[1]], [1.0], (3 + (RANK == 0),))
    raises(ValueError, lambda: dist.all_reduce(alike), "sparse tensors of different kinds", "[4]", "[3]")

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 2))
    grads = []
    for group in (None, gloo):
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        wrapped(torch.arange(6) * (RANK + 1) % 50).square().mean().backward()
        grads.append([p.grad.to_dense().clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*grads))


def odd_dtypes() -> None:
    names = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    for dtype in [getattr(torch, name) for name in names if hasattr(torch, name)]:
        mine = torch.full((3,), RANK + 1.0).to(dtype)
        parts = [torch.zeros(3).to(dtype) for _ in range(SIZE)]
        dist.all_gather(parts, mine)
        assert [float(part[0]) for part in parts] == [r + 1 for r in range(SIZE)], dtype
        whole = torch.zeros(3 * SIZE).to(dtype)
        dist.all_gather_into_tensor(whole, mine)
        swapped = torch.zeros(3 * SIZE).to(dtype)
        dist.all_to_all_single(swapped, whole)
        assert float(swapped[0]) == RANK + 1 and float(whole[-1]) == SIZE
        got = mine.clone()
        dist.broadcast(got, src=SIZE - 1)
        assert float(got[0]) == SIZE
        if RANK == 0:
            dist.send(mine, 1)
        elif RANK == 1:
            dist.recv(got, 0)
            assert float(got[0]) == 1.0
        if dtype.is_floating_point:
            raises(RuntimeError, lambda mine=mine: dist.all_reduce(mine.clone()), "Invalid scalar type")  # as Gloo


def refusals() -> None:
    """What no group of these tensors does is refused before anything is sent, in torch's words: the next call works."""
    number, single = torch.ones(3, dtype=torch.int32), torch.ones(3)
    raises(RuntimeError, lambda: dist.all_reduce(number, dist.ReduceOp.AVG), "Cannot use ReduceOp.AVG")
    raises(RuntimeError, lambda: dist.reduce(number, 0, dist.ReduceOp.AVG), "Cannot use ReduceOp.AVG")
    raises(RuntimeError, lambda: dist.all_reduce(single, dist.ReduceOp.BXOR), "ReduceOp.BXOR with non-integral dtype")
    whole = torch.ones(3 * SIZE)
    raises(RuntimeError, lambda: dist.reduce_scatter_tensor(single, whole, dist.ReduceOp.BAND), "ReduceOp.BAND")
    raises(RuntimeError, lambda: dist.reduce_scatter(single, [single] * SIZE, dist.ReduceOp.BOR), "ReduceOp.BOR")
    for root in (SIZE, -1):
        raises(ValueError, lambda root=root: dist.broadcast(single, group_src=root), "invalid root rank")
        raises(ValueError, lambda root=root: dist.reduce(single, group_dst=root), "invalid root rank")
        raises(ValueError, lambda root=root: dist.scatter(single, group_src=root), "invalid root rank")
        raises(ValueError, lambda root=root: dist.gather(single, group_dst=root), "invalid root rank")
    dist.all_reduce(single)
    assert single.tolist() == [SIZE] * 3


def bad_messages() -> None:
    """Refused before anything is sent: the next message of that pair comes as it is."""
    single = torch.ones(3)
    group = dist.group.WORLD
    for source in (-1, SIZE):  # -1 is any rank to the engine
        raises(ValueError, lambda source=source: group.recv([single], source, 0), "invalid source rank", str(source))
    for tag in (-1, 1 << 64):
        raises(ValueError, lambda tag=tag: group.send([single], (RANK + 1) % SIZE, tag), f"tag {tag}", "0 or more")
        raises(ValueError, lambda tag=tag: group.recv([single], (RANK - 1) % SIZE, tag), f"tag {tag}")
    raises(evenstep.EvenstepError, lambda: group.send([single], -1, 0), "rank -1")
    sent = dist.isend(torch.full((3,), float(RANK)), (RANK + 1) % SIZE)
    dist.recv(single, (RANK - 1) % SIZE)
    sent.wait()
    assert single.tolist() == [float((RANK - 1) % SIZE)] * 3


def overlaps() -> None:
    one = torch.zeros(1).expand(4)
    message = "refers to a single memory location"
    raises(RuntimeError, lambda: dist.all_reduce(one), message)
    raises(RuntimeError, lambda: dist.broadcast(one, 0), message)
    raises(RuntimeError, lambda: dist.all_gather([one] * SIZE, torch.ones(4)), message)
    raises(RuntimeError, lambda: dist.all_gather_into_tensor(torch.zeros(1).expand(4 * SIZE), torch.ones(4)), message)
    raises(RuntimeError, lambda: dist.reduce_scatter_tensor(one, torch.ones(4 * SIZE)), message)
    raises(RuntimeError, lambda: dist.all_to_all_single(torch.zeros(1).expand(SIZE), torch.ones(SIZE)), message)
    # An input that is overwritten while it is read is as good as a copy of it; at its own place it is in place.
    for width, shift in ((2, 0), (2, 1), (300_000, 1000)):
        for at in range(SIZE):
            memory = torch.full((SIZE * width + shift,), -1.0)
            whole, part = memory[: SIZE * width], memory[width * at + shift : width * at + shift + width]
            part.fill_(RANK)
            dist.all_gather_into_tensor(whole, part)
            assert torch.equal(whole, torch.arange(float(SIZE)).repeat_interleave(width)), (width, at)
            memory = torch.arange(float(SIZE * width + shift))
            whole, part = memory[: SIZE * width], memory[width * at + shift : width * at + shift + width]
            dist.reduce_scatter_tensor(part, whole)
            assert torch.equal(part, torch.arange(float(width)) * SIZE + width * RANK * SIZE), (width, at)
        memory = torch.arange(float(SIZE * width + shift)) + RANK
        dist.all_to_all_single(memory[shift:], memory[: SIZE * width])
        wanted = [torch.arange(float(width)) + width * RANK + r for r in range(SIZE)]
        assert torch.equal(memory[shift:], torch.cat(wanted)), width
    pieces = list((torch.arange(float(SIZE)) + 10 * RANK).split(1))
    dist.all_to_all(pieces, list(reversed(pieces)))
    assert [piece.item() for piece in pieces] == [10 * r + SIZE - 1 - RANK for r in range(SIZE)]


def forms() -> None:
    """A process group's own methods, in each form that torch's have: with options, or a root, an operation and a limit."""
    from evenstep.backend_forms import in_full

    group, gloo, seconds = dist.group.WORLD, dist.new_group(backend="gloo"), timedelta(seconds=50)
    last, most = SIZE - 1, dist.ReduceOp.MAX
    one, many = (lambda: torch.arange(4.0) + RANK), (lambda: [torch.arange(4.0) + RANK + r for r in range(SIZE)])
    zero, zeros = (lambda: torch.zeros(4)), (lambda: [torch.zeros(4) for _ in range(SIZE)])
    of_last, zeros_of_last = (lambda: many() if last == RANK else []), (lambda: zeros() if last == RANK else [])
    whole = lambda: torch.cat(many())  # noqa: E731
    wide, one_listed = (lambda: torch.zeros(4 * SIZE)), (lambda: [one()])
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("allreduce", (one, most), {}),
        ("allreduce", (one, most, seconds), {}),
        ("allreduce", (lambda: [one()], most, seconds), {}),
        ("allreduce", (one,), {"op": most, "timeout": seconds}),
        ("allreduce", (), {"tensor": one, "timeout": seconds}),
        ("broadcast", (one, last), {}),
        ("broadcast", (one, last, seconds), {}),
        ("broadcast", (), {"tensor": one, "root": last}),
        ("reduce", (one, last), {}),
        ("reduce", (one, last, most, seconds), {}),
        ("reduce", (one,), {"root": last, "op": most}),
        ("allgather", (zeros, one, seconds), {}),
        ("gather", (zeros_of_last, one, last), {}),
        ("scatter", (zero, of_last, last, seconds), {}),
        ("scatter", (zero, of_last), {"root": last}),
        ("reduce_scatter", (zero, many, most), {}),
        ("reduce_scatter", (zero, many), {"op": most, "timeout": seconds}),
        ("alltoall", (zeros, many, seconds), {}),
        ("alltoall_base", (lambda: torch.zeros(4 * SIZE), whole, [], [], seconds), {}),
        ("barrier", (seconds,), {}),
        ("barrier", (), {"timeout": seconds}),
        ("all_gather_single", (), {"output": wide, "input": one}),
        ("_allgather_base", (wide,), {"input": one, "opts": None}),
        (
            "allgather_coalesced",
            (),
            {"output_lists": lambda: [[zero()] for _ in range(SIZE)], "input_list": one_listed},
        ),
        ("allgather_into_tensor_coalesced", (lambda: [wide()],), {"input_list": one_listed}),
        ("reduce_scatter_single", (), {"outputTensor": zero, "inputTensor": whole}),
        ("_reduce_scatter_base", (zero,), {"inputTensor": whole, "opts": None}),
        ("reduce_scatter_tensor_coalesced", (lambda: [zero()],), {"inputTensors": lambda: [whole()]}),
        ("allreduce_coalesced", (), {"tensors": one_listed}),
    ]
    for method, given, named in calls:
        results = []
        for kind in (group, gloo):
            tensors = [word() if callable(word) and word is not most else word for word in given]
            words = {key: word() if callable(word) and word is not most else word for key, word in named.items()}
            try:
                getattr(kind, method)(*tensors, **words).wait()
            except (
                RuntimeError,
                TypeError,
                AttributeError,
            ) as error:  # Gloo has neither all of these forms nor all of these calls
                assert kind is gloo, (method, given, named, error)
                results.append(results[0])
                continue
            # Gloo leaves parts of sums in the tensors of those that are no root.
            kept = method != "barrier" and (method != "reduce" or last == RANK)
            results.append([*tensors, *words.values()][0] if kept else None)
        assert str(results[0]) == str(results[1]), (method, given, named, results)
    got, sent = zero(), group.send([one()], dstRank=(RANK + 1) % SIZE, tag=5)
    group.recv(tensors=[got], srcRank=(RANK - 1) % SIZE, tag=5).wait()
    sent.wait()
    assert torch.equal(got, torch.arange(4.0) + (RANK - 1) % SIZE)
    (data, options) = in_full("broadcast", (one(), last, seconds), {})
    assert options.rootRank == last and options.timeout == seconds and len(data) == 1
    for name, words in (("broadcast", {"rot": 1}), ("allgather", {"tensors": one()}), ("reduce", {"timeout": 3.0})):
        raises(TypeError, lambda name=name, words=words: getattr(group, name)(zeros(), **words), name)
    apart = dist.new_group()
    if RANK == 0:
        late = lambda: apart.broadcast(one(), last, timedelta(seconds=0.1)).wait()  # noqa: E731
        raises(evenstep.EvenstepError, late, "EVEN_ERR_TIMEOUT")
    assert group.get_group_store() is not None


def lazy() -> None:
    """Views whose elements mean something else than what lies in memory; the shortest way must not take them."""
    negative = torch._neg_view(torch.full((3,), RANK + 1.0))
    dist.all_reduce(negative)
    assert negative.tolist() == [-SIZE * (SIZE + 1) / 2] * 3
    half = torch.full((4,), RANK + 1.0)[::2]
    dist.all_reduce(half)
    assert half.tolist() == [SIZE * (SIZE + 1) / 2] * 2

    class Marked(torch.Tensor):
        pass

    marked = torch.ones(3).as_subclass(Marked)
    dist.all_reduce(marked)
    assert marked.tolist() == [SIZE] * 3
    for shape in ((0,), (3, 0, 2), ()):
        empty = torch.ones(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather([torch.zeros(shape) for _ in range(SIZE)], empty)
        whole = torch.zeros((SIZE, *shape))
        dist.all_gather_into_tensor(whole, empty)
        dist.reduce_scatter_tensor(torch.zeros(shape), whole)
    group = dist.distributed_c10d._get_default_group()
    options = dist.AllreduceOptions()
    if WAITS_UNASKED:  # nor can there be one
        assert group._reducer is None
        return
    options.asyncOp = False
    assert group._reducer([torch.ones(3)], options), "the shortest way was not taken"
    for other in (
        torch._neg_view(torch.ones(3)),
        half,
        marked,
        torch.ones(3).to(torch.float8_e5m2),
        torch.ones(3).to_sparse(),
    ):
        assert not group._reducer([other], options), other
    options.reduceOp = dist.ReduceOp.AVG
    assert not group._reducer([torch.ones(3, dtype=torch.int64)], options)
    options.timeout = timedelta(seconds=9)
    assert not group._reducer([torch.ones(3)], options)
    queue = _core.CallQueue()
    assert not group._reducer.put(queue, "no", None, [torch.ones(3)], options), "a time limit of its own"
    options = dist.AllreduceOptions()
    for other in (half, marked, torch.ones(3).to_sparse()):
        assert not group._reducer.put(queue, "no", None, [other], options), other
    assert not group._reducer([torch.ones(3)], options), "an asynchronous call that was made at once"
    tensors = [torch.full((n,), 1.0) for n in (3, 0, 50_000)]
    for tensor in tensors:
        queue.put("before")
        assert group._reducer.put(queue, "after", ("file", 7, "name"), [tensor], options), (
            "the shortest way was not taken"
        )
    assert [queue.next() for _ in range(6)] == [("before", None), ("after", None)] * 3
    assert all(bool(tensor.eq(SIZE).all()) for tensor in tensors)
    only = [torch.ones(50_000)]
    kept = weakref.ref(only[0])
    assert group._reducer.put(queue, "one", None, only, options)
    only.clear()  # the list is the caller's
    assert kept() is not None and queue.next() == ("one", None) and kept() is None
    raises(TypeError, lambda: group._reducer.put([], "no", None, tensors[:1], options), "no CallQueue")
    queue.put("left")  # nobody takes these
    assert group._reducer.put(queue, "left", None, tensors[:1], options)


def inference() -> None:
    """Tensors made in inference mode, into which torch writes in that mode alone: the group's thread, and a caller that has
    left it, do so all the same."""
    with torch.inference_mode():
        mine, total = torch.full((4,), RANK + 1.0), torch.full((4,), SIZE * (SIZE + 1) / 2)
    outside, inside = (lambda: torch.inference_mode(False)), torch.inference_mode
    for mode, asynchronous in ((inside, False), (inside, True), (outside, False), (outside, True)):
        with torch.inference_mode():
            parts = [torch.zeros(4) for _ in range(SIZE)]
            summed, scattered, got, whole = (torch.zeros(8)[::2] for _ in range(4))
            sparse, scaled = torch.eye(2).mul(RANK + 1.0).to_sparse(), mine.clone()
            summed.copy_(mine)
            wholes = mine.repeat(SIZE)
        half = dist._make_nccl_premul_sum(0.5)
        with mode():
            works = [
                dist.all_gather(parts, mine, async_op=asynchronous),
                dist.all_reduce(summed, async_op=asynchronous),
                dist.all_reduce(scaled, half, async_op=asynchronous),
                dist.all_reduce(sparse, async_op=asynchronous),
                dist.reduce_scatter_tensor(scattered, wholes, async_op=asynchronous),
                dist.broadcast(whole, 0, async_op=asynchronous),
                dist.isend(mine, (RANK + 1) % SIZE),
                dist.irecv(got, (RANK - 1) % SIZE),
            ]
            for work in works:
                if work is not None:
                    work.wait()
        with torch.inference_mode():
            assert all(bool((part == rank + 1).all()) for rank, part in enumerate(parts))
            assert torch.equal(summed, total) and torch.equal(scaled, total / 2) and torch.equal(scattered, total)
            assert torch.equal(sparse.to_dense(), torch.eye(2) * total[0])
            assert bool((got == (RANK - 1) % SIZE + 1).all()) and not whole.any()


def given_back() -> None:
    """Who has waited has its tensors' memory again once it lets go of them; no later call is needed for that."""
    import numpy as np

    arrays = [np.ones(1 << 18, dtype=np.float32) for _ in range(3)]  # messages that are longer than a ring
    held = [weakref.ref(array) for array in arrays]
    summed, sent, got = (torch.from_numpy(array) for array in arrays)
    message = dist.isend(sent, (RANK + 1) % SIZE)
    dist.recv(got, (RANK - 1) % SIZE)
    message.wait()
    dist.all_reduce(summed, async_op=True).wait()
    out, parts = torch.zeros(2), [torch.ones(2) for _ in range(SIZE)]
    held += [weakref.ref(part) for part in parts]
    work = dist.reduce_scatter(out, parts, async_op=True)
    work.wait()
    del arrays, summed, sent, got, message, parts  # who keeps the Work keeps none of them
    late = time.monotonic() + 30  # the group's thread lets go of its call after it has told of it
    while any(array() is not None for array in held) and time.monotonic() < late:
        time.sleep(0.001)
    assert all(array() is None for array in held), [array() is None for array in held]
    assert work.is_success()


def meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    assert tensor.tolist() == [SIZE] * 3
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    assert isinstance(mesh.get_group("shard"), evenstep.backend.EvenstepGroup)
    if hasattr(dist.ProcessGroup, "all_gather_single"):  # torch 2.6 to 2.11 leave it to the members' backend
        raises(ValueError, lambda: dist.new_group([0, 0]), "duplicate")
    twice = SimpleNamespace(global_ranks_in_group=[0, 0], group_size=2)
    raises(ValueError, lambda: evenstep.backend.create_group(twice, None), "duplicate")


def forked() -> None:
    child = os.fork()
    if child == 0:
        try:
            for call in (
                lambda: dist.all_reduce(torch.ones(3)),
                lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
                lambda: dist.barrier(),
                lambda: dist.send(torch.ones(3), 1 - min(RANK, 1)),
            ):
                raises(evenstep.EvenstepError, call, "was forked from rank")
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()


def lists() -> None:
    """The caller's are read when a call is made, not when its turn comes: on rank 0 when the others come to the barrier."""
    store = dist.distributed_c10d._get_default_store()
    if RANK != 0:
        store.wait(["changed"])
    works = [dist.barrier(async_op=True)]
    mine, out = torch.full((2,), float(RANK)), torch.zeros(2)
    gathered, everyone, got = ([torch.zeros(2) for _ in range(SIZE)] for _ in range(3))
    sent, scattered = ([torch.full((2,), float(rank)) for rank in range(SIZE)] for _ in range(2))
    kept = [list(tensors) for tensors in (gathered, everyone, got)]
    works += [
        dist.gather(mine, gathered if RANK == 0 else None, async_op=True),
        dist.scatter(out, scattered if RANK == 0 else None, async_op=True),
        dist.all_gather(everyone, mine, async_op=True),
        dist.all_to_all(got, sent, async_op=True),
    ]
    for tensors in (gathered, scattered, everyone, got, sent):
        tensors.clear()
    if RANK == 0:
        store.set("changed", "")
    for work in works:
        work.wait()
    numbers = [float(rank) for rank in range(SIZE)]
    wanted = [numbers if RANK == 0 else [0.0] * SIZE, numbers, [float(RANK)] * SIZE]
    assert [[tensor[0].item() for tensor in tensors] for tensors in kept] == wanted and out[0] == RANK


def left_under_way() -> None:
    """What a rank has begun and not waited for is made before it leaves: rank 0 comes to it when the others leave."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(100_000)
    if RANK == 0:
        store.wait([f"leaves{rank}" for rank in range(1, SIZE)])
    dist.all_reduce(tensor, async_op=True)
    store.set(f"leaves{RANK}", "")
    dist.destroy_process_group()
    assert bool(tensor.eq(SIZE).all()), tensor


def rest() -> None:
    for part in (
        sparse,
        odd_dtypes,
        refusals,
        bad_messages,
        overlaps,
        forms,
        lazy,
        inference,
        given_back,
        meshes,
        forked,
        aborted,
        lists,
    ):
        part()
    dist.barrier()
    left_under_way()


def aborted() -> None:
    """Rank 0 aborts a group while the others are in it, or before they come."""
    group = dist.new_group()
    other = dist.new_group()
    if RANK == 0:
        group.abort()
    for tensor in (torch.ones(3), torch.ones(100_000)):
        try:
            dist.all_reduce(tensor, group=group)
        except evenstep.EvenstepError as error:
            assert error.status == "EVEN_ERR_REVOKED", error
        else:
            raise AssertionError("no error after abort")
    dist.all_reduce(torch.ones(3), group=other)  # the others go on


def absent() -> None:
    """All but rank 0 stay away from a monitored barrier."""
    group = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()
    group.monitored_barrier(timedelta(seconds=50), wait_all_ranks=True)
    if RANK == 0:
        barrier = lambda: group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)  # noqa: E731
        raises(evenstep.EvenstepError, barrier, f"ranks {list(range(1, SIZE))} did not come", "0.2 s")
        store.set("seen", "1")
        store.wait([f"told{rank}" for rank in range(1, SIZE)])
    else:
        store.wait(["seen"])
        if group._comm is None:  # over Gloo they meet in the store: who comes later hears the same at once
            late = lambda: group.monitored_barrier(timedelta(seconds=50), wait_all_ranks=True)  # noqa: E731
            raises(evenstep.EvenstepError, late, f"ranks {list(range(1, SIZE))} did not come", "0.2 s")
        store.set(f"told{RANK}", "1")
    if group._comm is None:
        gaps()
        absent_over_gloo(group, store)
    os._exit(0)


def gaps() -> None:
    """Gloo itself gives wrong numbers, and writes into the neighbours."""
    matrix, wanted = torch.arange(9.0).view(3, 3), torch.arange(9.0).view(3, 3)
    wanted[:, 1] *= SIZE**2
    dist.all_reduce(matrix[:, 1])
    dist.all_reduce_coalesced([matrix[:, 1]])
    dist.broadcast(matrix[:, 1], 0)
    assert torch.equal(matrix, wanted), matrix
    one = torch.zeros(1).expand(4)
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0), lambda tensor: dist.reduce(tensor, 0)):
        raises(RuntimeError, lambda call=call: call(one), "refers to a single memory location")


def absent_over_gloo(group: Any, store: Any) -> None:
    """The group goes on after a barrier that was missed; one rank is named where not all are asked for."""
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=50))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3
    if RANK == SIZE - 1:
        barrier = lambda: group.monitored_barrier(timedelta(seconds=0.2))  # noqa: E731
        raises(evenstep.EvenstepError, barrier, "ranks [0] did not come", "0.2 s")
        store.set("seen again", "1")
    store.wait(["seen again"])
    other = dist.new_group()
    if RANK == 1:
        os._exit(0)
    if RANK == SIZE - 1:  # rank 0 does not come either, but may
        barrier = lambda: other.monitored_barrier(timedelta(hours=1), wait_all_ranks=True)  # noqa: E731
        raises(evenstep.EvenstepError, barrier, "ranks [1] did not come")
        store.set("named", "1")
    else:
        store.wait(["named"])


if __name__ == "__main__":
    # On every device that there is; the same group serves them all.
    dist.init_process_group("cpu:evenstep,cuda:evenstep", timeout=timedelta(seconds=60))
    assert isinstance(dist.distributed_c10d._get_default_group(), evenstep.backend.EvenstepGroup)
    globals()[sys.argv[1]]()
