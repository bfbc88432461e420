"""What the ranks of test_backend_device.py do: CUDA collectives of the backend, with CPU tensors and made-up streams in
CUDA's place (fake_streams.py) over a made-up NCCL that moves real bytes between the ranks."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_streams import FakeStreams, stand_in

import evenstep


def same(got: torch.Tensor, want: Any) -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    assert torch.equal(got, want.expand_as(got)), (got, want)


def both(call: Callable[[bool], Any], check: Callable[[], None], streams: FakeStreams) -> None:
    """Once as a call that waits, once as one that returns a Work."""
    for later in (False, True):
        work = call(later)
        if later:
            assert work is not None
            work.wait()
            assert f"current waits for an event of {work._stream.name}" == streams.log[-1]
        streams.finish()
        check()


def reductions(rank: int, ranks: int, streams: FakeStreams) -> None:
    total = sum(range(1, ranks + 1))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for later in (False, True):
            tensor = torch.full((3, 5), rank + 1, dtype=dtype)
            work = dist.all_reduce(tensor, async_op=later)
            if work is not None:
                work.wait()
            streams.finish()
            same(tensor, total)
    for op, want in ((dist.ReduceOp.MAX, ranks), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.AVG, total / ranks)):
        tensor = torch.full((4,), float(rank + 1))
        dist.all_reduce(tensor, op=op)
        streams.finish()
        same(tensor, want)
    for dtype in (torch.int32, torch.int64, torch.uint8):  # rounded towards zero
        tensor = torch.full((4,), rank + 1, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        streams.finish()
        same(tensor, total // ranks)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op, want in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, ranks), (dist.ReduceOp.AVG, total / ranks)):
            tensor = torch.full((4,), rank + 1.0).to(dtype)
            dist.all_reduce(tensor, op=op)
            streams.finish()
            same(tensor.float(), want)
        part = torch.zeros(2, dtype=torch.float32).to(dtype)
        dist.reduce_scatter_tensor(part, torch.full((2 * ranks,), 0.5 * (rank + 1)).to(dtype))
        streams.finish()
        same(part.float(), total / 2)
    # a weight of each rank's own: a number, and a tensor
    for factor in (0.5 * (rank + 1), torch.tensor([0.5 * (rank + 1)])):
        tensor = torch.full((4,), 2.0)
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
        streams.finish()
        same(tensor, total)
    by_tensors(rank, ranks, streams)
    crossed = torch.zeros(4, 4)
    crossed[:, 1] = rank + 1.0
    dist.all_reduce(crossed[:, 1])  # not contiguous
    streams.finish()
    same(crossed[:, 1], total)
    same(crossed[:, 0], 0)
    complex_ = torch.full((3,), complex(rank, 1))
    dist.all_reduce(complex_)
    streams.finish()
    same(complex_, complex(total - ranks, ranks))
    kept = torch.full((3,), float(rank + 1))
    dist.reduce(kept, dst=1)
    streams.finish()
    same(kept, total if rank == 1 else rank + 1)


def by_tensors(rank: int, ranks: int, streams: FakeStreams) -> None:
    """What a tensor has multiplied keeps its dtype, as which it is sent, or is refused before that."""
    total = sum(range(1, ranks + 1))

    def together(tensor: torch.Tensor, op: Any) -> None:
        with dist._coalescing_manager():
            dist.all_reduce(tensor, op)
            dist.all_reduce(tensor.clone(), op)

    def to_root(tensor: torch.Tensor, op: Any) -> None:
        dist.reduce(tensor, 0, op)

    for call in (dist.all_reduce, together, to_root):
        for dtype, factor in ((torch.bfloat16, torch.tensor([0.5])), (torch.int64, torch.tensor([3]))):
            tensor = torch.full((64,), 2 * (rank + 1), dtype=dtype)
            call(tensor, dist._make_nccl_premul_sum(factor))
            streams.finish()
            same(tensor, 2 * (rank + 1) if call is to_root and rank else 2 * total * factor)
        tensor = torch.full((64,), rank + 1)
        try:
            call(tensor, dist._make_nccl_premul_sum(torch.tensor([0.5])))
        except RuntimeError as error:
            assert "can't be cast" in str(error), error
        else:
            raise AssertionError("integers by a fraction")
        same(tensor, rank + 1)


def moves(rank: int, ranks: int, streams: FakeStreams) -> None:
    out = torch.zeros(ranks * 2)
    own = torch.tensor([rank, rank + 0.5])
    whole = torch.arange(ranks * 2, dtype=torch.float32) + rank
    part = torch.zeros(2)
    every = torch.tensor([[r, r + 0.5] for r in range(ranks)]).view(-1)
    both(lambda later: dist.all_gather_into_tensor(out, own, async_op=later), lambda: same(out, every), streams)
    summed = [ranks * (2 * rank + i) + sum(range(ranks)) for i in range(2)]
    both(
        lambda later: dist.reduce_scatter_tensor(part, whole, async_op=later),
        lambda: same(part, summed),
        streams,
    )
    parts = [torch.zeros(r + 1, dtype=torch.int64) for r in range(ranks)]
    mine = torch.full((rank + 1,), rank)
    both(
        lambda later: dist.all_gather(parts, mine, async_op=later),
        lambda: [same(parts[r], r) for r in range(ranks)] and None,
        streams,
    )
    uneven = [torch.full((r + 1,), 1.0) for r in range(ranks)]
    landed = torch.zeros(rank + 1)
    both(lambda later: dist.reduce_scatter(landed, uneven, async_op=later), lambda: same(landed, ranks), streams)
    data = torch.full((3,), float(rank))
    both(lambda later: dist.broadcast(data, src=1, async_op=later), lambda: same(data, 1), streams)
    got = [torch.zeros(2) for _ in range(ranks)] if rank == 0 else None
    both(
        lambda later: dist.gather(own, got, dst=0, async_op=later),
        lambda: same(torch.cat(got), every) if got else None,
        streams,
    )
    given = [torch.full((2,), float(r)) for r in range(ranks)] if rank == 1 else None
    both(lambda later: dist.scatter(part, given, src=1, async_op=later), lambda: same(part, rank), streams)
    sent = torch.cat([torch.full((r + 1,), 10.0 * rank + r) for r in range(ranks)])
    received = torch.zeros((rank + 1) * ranks)
    want = torch.cat([torch.full((rank + 1,), 10.0 * r + rank) for r in range(ranks)])
    splits = [r + 1 for r in range(ranks)]
    both(
        lambda later: dist.all_to_all_single(received, sent, [rank + 1] * ranks, splits, async_op=later),
        lambda: same(received, want),
        streams,
    )
    outs, ins = list(torch.zeros(ranks, 2)), [torch.full((2,), 10.0 * rank + r) for r in range(ranks)]
    both(
        lambda later: dist.all_to_all(outs, ins, async_op=later),
        lambda: [same(outs[r], 10 * r + rank) for r in range(ranks)] and None,
        streams,
    )
    peer = 1 - rank
    if rank < 2:
        inbox = torch.zeros(3)
        outbox = torch.full((3,), 5.0 + rank)
        works = [dist.isend(outbox, peer), dist.irecv(inbox, peer)]
        for work in works:
            work.wait()
        streams.finish()
        same(inbox, 5 + peer)
        outbox = torch.full((3,), 7.0 + rank)
        ops = [dist.P2POp(dist.irecv, inbox, peer), dist.P2POp(dist.isend, outbox, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        streams.finish()
        same(inbox, 7 + peer)


def refuses_overlaps(rank: int, ranks: int) -> None:
    """An output several of whose elements are one place: before anything is launched, so that nobody waits."""
    one, row = torch.zeros(1).expand(4), torch.ones(4)
    many = torch.zeros(1).expand(4 * ranks)
    for call in (
        lambda: dist.all_reduce(one),
        lambda: dist.reduce(one, 0),
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_gather([one] * ranks, row),
        lambda: dist.all_gather_into_tensor(many, row),
        lambda: dist.reduce_scatter(one, [row] * ranks),
        lambda: dist.reduce_scatter_tensor(one, torch.ones(4 * ranks)),
        lambda: dist.all_to_all_single(many, torch.ones(4 * ranks)),
        lambda: dist.all_to_all([one] * ranks, [row] * ranks),
        lambda: dist.recv(one, 1 - rank),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "refers to a single memory location" in str(error), error
        else:
            raise AssertionError("written several times to one place")
    assert dist.group.WORLD._devices._groups.opened()[0].flight(rank)[-1][0] == 1


def overlaps(rank: int, ranks: int, streams: FakeStreams) -> None:
    """An input that is overwritten while it is read is as good as a copy of it; at its own place it is in place."""
    ready = torch.ones(1)
    dist.all_reduce(ready)
    streams.finish()
    refuses_overlaps(rank, ranks)
    for shift in (0, 1):
        for later in (False, True):

            def done(work: Any) -> None:
                if work is not None:
                    work.wait()
                streams.finish()

            for at in range(ranks):
                memory = torch.full((ranks * 2 + shift,), -1.0)
                whole, part = memory[: ranks * 2], memory[2 * at + shift : 2 * at + shift + 2]
                part.fill_(rank)
                done(dist.all_gather_into_tensor(whole, part, async_op=later))
                same(whole, torch.arange(ranks).repeat_interleave(2))
                memory = torch.arange(float(ranks * 2 + shift))
                whole, part = memory[: ranks * 2], memory[2 * at + shift : 2 * at + shift + 2]
                done(dist.reduce_scatter_tensor(part, whole, async_op=later))
                same(part, torch.arange(2.0) * ranks + 2 * rank * ranks)
            memory = torch.arange(float(ranks * 2 + shift)) + rank
            done(dist.all_to_all_single(memory[shift:], memory[: ranks * 2], async_op=later))
            same(memory[shift:], torch.cat([torch.arange(2.0) + 2 * rank + r for r in range(ranks)]))
            pieces = list((torch.arange(float(ranks)) + 10 * rank).split(1))
            done(dist.all_to_all(pieces, list(reversed(pieces)), async_op=later))
            assert [piece.item() for piece in pieces] == [10 * r + ranks - 1 - rank for r in range(ranks)], pieces
    overlaps_of_pairs(rank, ranks, streams)


def overlaps_of_pairs(rank: int, ranks: int, streams: FakeStreams) -> None:
    """All pairs of a call are one operation of NCCL: an input is what it was, also where another's output is written."""
    group = dist.group.WORLD
    own = slice(2 * rank, 2 * rank + 2)
    for crossed in (False, True):  # each in its own output, where it is in place, or in that of the other pair
        wholes = [torch.full((2 * ranks,), -1.0) for _ in range(2)]
        parts = [whole[own] for whole in (reversed(wholes) if crossed else wholes)]
        for i, part in enumerate(parts):
            part.fill_(rank + 10 * i)
        group.all_gather_single_coalesced(wholes, parts).wait()
        streams.finish()
        for i, whole in enumerate(wholes):
            same(whole, torch.arange(ranks).repeat_interleave(2) + 10 * i)
        wholes = [torch.arange(2.0 * ranks) + 10 * i for i in range(2)]
        parts = [whole[own] for whole in (reversed(wholes) if crossed else wholes)]
        group.reduce_scatter_single_coalesced(parts, wholes).wait()
        streams.finish()
        for i, part in enumerate(parts):
            same(part, (torch.arange(2.0) + 2 * rank + 10 * i) * ranks)


def coalesced(rank: int, ranks: int, streams: FakeStreams) -> None:
    """As DeepSpeed does: torch asks the group for one Work of all that was called, which waits for each."""
    total = sum(range(1, ranks + 1))
    group, device = dist.group.WORLD, torch.device("cpu")
    given = [torch.full((4,), rank + 1.0), torch.full((5,), rank + 1.0)]
    other, own, parts = torch.full((3,), float(rank)), torch.full((2,), float(rank)), torch.zeros(2 * ranks)
    with dist._coalescing_manager(group, device, async_ops=True) as manager:
        for tensor in given:
            dist.all_reduce(tensor)
    streams.log.clear()
    manager.wait()
    assert streams.log == ["current waits for an event of side"], streams.log
    with dist._coalescing_manager(group, device, async_ops=True) as manager:
        dist.broadcast(other, src=1, async_op=True)
        group.all_gather_single(parts, own).is_completed()  # of which nobody keeps the Work
    streams.log.clear()
    manager.wait()
    assert streams.log == ["current waits for an event of side"] * 2, streams.log
    streams.finish()
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in manager.works)
    for tensor in given:
        same(tensor, total)
    same(other, 1)
    same(parts, torch.tensor([[float(r)] * 2 for r in range(ranks)]).view(-1))
    with dist._coalescing_manager(group, device):
        dist.all_reduce(own)
    streams.finish()
    same(own, total - ranks)
    with dist._coalescing_manager(group, device, async_ops=True) as manager:
        pass
    assert not manager.works
    if rank < 2:
        inbox, outbox = torch.zeros(3), torch.full((3,), 9.0 + rank)
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            dist.isend(outbox, 1 - rank)
            dist.irecv(inbox, 1 - rank)
        streams.log.clear()
        manager.wait()
        assert len([line for line in streams.log if line.startswith("current waits for an event")]) == 2, streams.log
        streams.finish()
        same(inbox, 10 - rank)


def streams_in_order(rank: int, streams: FakeStreams) -> None:
    """The stream beside begins after the caller's, and the caller's goes on after it; the host waits for neither."""
    streams.log.clear()
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert streams.log == ["side waits for current", "an event on side", "kept for side"], streams.log
    streams.log.clear()
    work.wait()
    assert streams.log == ["current waits for an event of side"], streams.log
    streams.finish()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor
    streams.log.clear()
    dist.all_reduce(tensor)  # on the caller's own stream where torch says that nobody wants a Work
    assert "side waits for current" not in streams.log or not hasattr(dist.AllreduceOptions(), "asyncOp"), streams.log
    streams.finish()


def trains(rank: int) -> None:
    """DDP, whose C++ waits for the Works' futures."""
    torch.manual_seed(7)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    model = torch.nn.parallel.DistributedDataParallel(alone, bucket_cap_mb=0.0001)
    batch = torch.arange(24, dtype=torch.float32).view(4, 6) / 24
    model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    want = torch.autograd.grad(alone(batch).square().mean(), list(alone.parameters()))
    for parameter, gradient in zip(alone.parameters(), want):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6), (parameter.grad, gradient)


def refused(call: Callable[[], Any], status: str, *words: str) -> evenstep.EvenstepError:
    try:
        call()
    except evenstep.EvenstepError as error:
        assert error.status == status and all(word in str(error) for word in words), (error, words)
        return error
    raise AssertionError(f"no {status}")


def fails(rank: int, streams: FakeStreams) -> None:
    """Rank 1 never comes to the second call: rank 0's is aborted at the time limit, and says so from then on."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    streams.finish()
    if rank == 0:
        dist.group.WORLD._devices._set_default_timeout(timedelta(seconds=0.2))
        works = []

        def late() -> None:  # at the limit the call itself may still be on its way to the stream
            works.append(dist.all_reduce(tensor, async_op=True))
            streams.finish()  # the abort lets the stream go on
            works[0].wait()

        for call in (late, lambda: dist.all_reduce(tensor)):
            words = "Timed out: all_reduce of 4 F32 elements with SUM on cuda:0", "rank 1 did not come"
            refused(call, "EVEN_ERR_TIMEOUT", *words)
        assert all(not work.is_success() and work.exception() is not None for work in works)


def limited(rank: int, streams: FakeStreams) -> None:
    """A call's own limit ends it, not the group's minute."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    streams.finish()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.2)

        def late() -> None:  # at the limit the call itself may still be on its way to the stream
            work = dist.group.WORLD.allreduce([tensor], options)
            streams.finish()
            work.wait()

        words = (
            "Timed out: all_reduce of 4 F32 elements with SUM on cuda:0 was not done after 0.2 s",
            "rank 1 did not come",
        )
        refused(late, "EVEN_ERR_TIMEOUT", *words)


def loses(rank: int, streams: FakeStreams) -> None:
    """Rank 1 dies inside the second call: the others are told so at once, whatever they do."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    streams.finish()
    if rank == 1:
        streams.library.fake_gpu_hang(True)
        dist.all_reduce(tensor, async_op=True)
        comm = dist.group.WORLD._devices._groups.opened()[0]
        while not all(comm.flight(other)[-1][0] == 2 for other in (0, 2)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)  # the line that the error names
    streams.finish()
    for call in (work.wait, lambda: dist.all_reduce(tensor)):
        error = refused(call, "EVEN_ERR_PEER_LOST", "rank 1 (process ", "died or came to its end", "device_cases.py:")
        assert error.rank == 1 and "in call 2 (all_reduce of 4 F32 elements with SUM)" in str(error), error


def never_meets(rank: int) -> None:
    """Rank 1 dies before its first call on a GPU: the others do not wait for it until the time limit."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(4)
    words = "rank 1 (process ", "died or came to its end before it opened the group stand-in"
    error = refused(lambda: dist.all_reduce(tensor), "EVEN_ERR_PEER_LOST", *words)
    assert error.rank == 1, error
    done = pathlib.Path("rank-2-has-ended")
    if rank == 2:
        done.touch()
    while rank == 0 and not done.exists():  # the store is this rank's
        time.sleep(0.01)


def differs(rank: int, streams: FakeStreams) -> None:
    """Ranks in different calls: both sides are named, with their places in this file."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    streams.finish()

    def call() -> None:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, async_op=True)
        streams.finish()
        while work.exception() is None:
            time.sleep(0.001)
        work.wait()

    words = "with MAX at ", "with SUM at ", "device_cases.py:", "(call 2 of the communicator)"
    refused(call, "EVEN_ERR_MISMATCH", *words)


def recorded(rank: int, streams: FakeStreams) -> None:
    """The record and the timeline have what ran on the GPU."""
    tensors = [torch.ones(3), torch.ones(5)]  # kept: no allocator of a GPU's knows that they are in use
    for tensor in tensors:
        dist.all_reduce(tensor)
    streams.finish()
    comm = dist.group.WORLD._devices._groups.opened()[0]
    while comm.flight(rank)[-1][3] != "done":
        comm.poll()
    calls = comm.flight(1 - rank)
    assert [call[:2] for call in calls[:2]] == [
        (1, "all_reduce of 3 F32 elements with SUM"),
        (2, "all_reduce of 5 F32 elements with SUM"),
    ], calls
    assert all("device_cases.py" in call[2] and "in recorded" in call[2] for call in calls), calls


def main() -> None:
    case = sys.argv[1]
    dist.init_process_group("evenstep", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    barrier = group._comm.barrier
    streams = stand_in(group)
    others = {"fails": fails, "limited": limited, "loses": loses, "differs": differs, "recorded": recorded}
    shared = {"overlaps": overlaps}
    if case == "never_meets":
        never_meets(rank)
        os._exit(0)
    if case in others:
        others[case](rank, streams)
    elif case in shared:
        shared[case](rank, ranks, streams)
    else:
        moves(rank, ranks, streams)
        coalesced(rank, ranks, streams)
        if case == "all":
            reductions(rank, ranks, streams)
            streams_in_order(rank, streams)
            streams.careful = True
            trains(rank)
    if case == "loses":  # nobody can meet any more
        os._exit(0)
    barrier()
    assert streams.violation() == "", streams.violation()
    try:
        dist.destroy_process_group()
    except evenstep.EvenstepError as error:  # who closes what another rank's time limit has ended may be told so
        assert case in ("fails", "limited") and rank == 1 and error.status == "EVEN_ERR_TIMEOUT", error


main()
