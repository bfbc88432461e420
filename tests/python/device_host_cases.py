"""What the ranks of test_device_host.py do: calls of CUDA tensors that NCCL has not, through the host; CPU tensors and made-up
streams stand for a GPU's (fake_streams.py). `python device_host_cases.py NAME`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_streams import FakeStream, FakeStreams, stand_in

import evenstep
from evenstep.backend_tensors import WAITS_UNASKED

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OP = dist.ReduceOp
OVER_GLOO = os.environ.get("EVENSTEP_COMM_ENGINE") == "gloo"
BITS = {OP.BAND: torch.bitwise_and, OP.BOR: torch.bitwise_or, OP.BXOR: torch.bitwise_xor}


def same(got: torch.Tensor, want: Any) -> None:
    want = torch.as_tensor(want).to(got.dtype).expand_as(got)
    assert torch.equal(got, want), (got, want)


def refused(kind: type[BaseException], call: Callable[[], Any], *words: str) -> Any:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), (error, words)
        return error
    raise AssertionError(f"no {kind.__name__}: {words}")


def value(rank: int, dtype: torch.dtype, count: int = 1000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 2 if dtype is torch.bool else 120, (count,), generator=generator).to(dtype)


def reduced(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """In whole numbers, and then of the dtype."""
    more = {OP.SUM: torch.add, OP.MAX: torch.maximum, OP.MIN: torch.minimum, OP.PRODUCT: torch.mul}
    return functools.reduce({**BITS, **more}[op], [tensor.long() for tensor in tensors]).to(tensors[0].dtype)


def kinds() -> list[tuple[torch.dtype, Any]]:
    if OVER_GLOO:
        return [(torch.int32, OP.BAND), (torch.uint8, OP.BXOR), (torch.int64, OP.BOR)]
    narrow = [(dtype, op) for dtype in (torch.int16, torch.uint16) for op in (OP.SUM, OP.MAX, OP.MIN)]
    whole = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool)
    return [*narrow, (torch.int16, OP.PRODUCT), *((dtype, op) for dtype in whole for op in BITS)]


class Job:
    def __init__(self) -> None:
        dist.init_process_group("evenstep", timeout=timedelta(seconds=60))
        self.group: Any = dist.group.WORLD
        self.store = dist.PrefixStore("cases/", dist.distributed_c10d._get_default_store())
        self.streams: FakeStreams = stand_in(self.group)
        self.lines = 0

    def finish(self, work: Any = None) -> None:
        if work is not None:
            work.wait()
        self.streams.finish()

    def on_host(self, *numbers: float) -> torch.Tensor:
        """A CPU tensor, which all others here are not."""
        tensor = self.streams.pinned((len(numbers),), torch.float32)
        return tensor.copy_(torch.tensor(numbers))

    def meet(self) -> None:
        """The store is rank 0's, which hears of the others last."""
        for words in ("here", "seen"):
            self.lines += 1
            self.store.set(f"{self.lines}/{RANK}", words)
            if words == "here" or RANK == 0:
                self.store.wait([f"{self.lines}/{rank}" for rank in range(SIZE)], timedelta(seconds=60))


def reductions(job: Job) -> None:
    for dtype, op in kinds():
        inputs = [value(rank, dtype) for rank in range(SIZE)]
        want = reduced(op, inputs)
        for later in (False, True):
            tensor = inputs[RANK].clone()
            job.finish(dist.all_reduce(tensor, op, async_op=later))
            same(tensor, want)
            gaps = torch.stack([inputs[RANK], inputs[RANK]], 1)
            if not OVER_GLOO:
                job.finish(dist.all_reduce(gaps[:, 0], op, async_op=later))
                same(gaps[:, 0], want)
                same(gaps[:, 1], inputs[RANK])
            root = inputs[RANK].clone()
            job.finish(dist.reduce(root, SIZE - 1, op, async_op=later))
            same(root, want if RANK == SIZE - 1 else root if OVER_GLOO else inputs[RANK])
        if OVER_GLOO:
            continue
        several = [inputs[RANK].clone(), inputs[RANK][:7].clone()]
        with dist._coalescing_manager():
            for tensor in several:
                dist.all_reduce(tensor, op)
        job.finish()
        same(several[0], want)
        same(several[1], want[:7])
        parts = [[value(rank, dtype, to + 1, 5 + to) for to in range(SIZE)] for rank in range(SIZE)]
        mine = reduced(op, [parts[rank][RANK] for rank in range(SIZE)])
        into = torch.zeros(RANK + 1, dtype=dtype)
        job.finish(dist.reduce_scatter(into, parts[RANK], op))
        same(into, mine)
        whole, even = torch.cat([inputs[RANK]] * SIZE), torch.zeros(1000, dtype=dtype)
        for later in (False, True):
            job.finish(dist.reduce_scatter_tensor(even, whole, op, async_op=later))
            same(even, want)
        own = whole[1000 * RANK : 1000 * RANK + 1000]  # at its own place in the input
        job.finish(dist.reduce_scatter_tensor(own, whole, op))
        same(own, want)
    if SIZE == 2:
        options = dist.AllreduceOptions()
        options.reduceOp = OP.BOR
        tensor = torch.full((3,), 1 << RANK)
        if WAITS_UNASKED:  # torch 2.6: always a Work
            job.group.allreduce([tensor], options).wait()
        else:
            options.asyncOp = False
            assert job.group.allreduce([tensor], options) is None and options.asyncOp is False
        job.finish()
        same(tensor, 3)


def sparse_tensors(job: Job) -> None:
    for count in (0, 1, 50):
        mine = [torch.stack([value(r, torch.int64, count + r, s) % 7 for s in (1, 2)]) for r in range(SIZE)]
        given = [
            torch.sparse_coo_tensor(at, value(r, torch.float32, 4 * at.shape[1]).view(-1, 4), (7, 7, 4))
            for r, at in enumerate(mine)
        ]
        want = torch.stack([tensor.to_dense() for tensor in given]).sum(0)
        for later in (False, True):
            tensor = given[RANK].clone()
            job.finish(dist.all_reduce(tensor, async_op=later))
            assert tensor.is_coalesced()
            same(tensor.to_dense(), want)
    tensor, reader = given[RANK].clone(), FakeStream(job.streams, "reader", RANK)
    work = dist.all_reduce(tensor, async_op=True)
    with job.streams.use(reader):
        work.wait()
    # its memory is new, of the stream that the copy up was on: it may not go back there before the reader has passed
    parts = [part.data_ptr() for part in (tensor._indices(), tensor._values())]
    assert job.streams.kept[-2:] == [(part, "reader") for part in parts], job.streams.kept
    assert job.streams.log[-3:] == ["reader waits for an event of side up", *["kept for reader"] * 2], job.streams.log


def refusals(job: Job) -> None:
    """What neither can reduce is refused as before, and what does not fit before anything is sent."""
    few = torch.ones(2 * SIZE)
    refused(evenstep.EvenstepError, lambda: dist.all_reduce(few, OP.BAND), "NCCL has no bitwise reductions")
    refused(evenstep.EvenstepError, lambda: dist.all_reduce(few.to(torch.float8_e4m3fnuz)), "cannot be reduced")
    refused(evenstep.EvenstepError, lambda: dist.all_reduce(few.short(), OP.AVG), "does not reduce 16-bit integers")
    refused(evenstep.EvenstepError, lambda: dist.all_reduce(few.to_sparse(), OP.MAX), "cannot be reduced")
    same_place = torch.zeros(1, dtype=torch.int16).expand(2)
    refused(RuntimeError, lambda: dist.all_reduce(same_place), "refers to a single memory location")
    refused(ValueError, lambda: dist.reduce_scatter_tensor(torch.zeros(3).short(), few.short()), "needs an input of")
    refused(ValueError, lambda: dist.reduce(few.short(), group_dst=SIZE), "invalid root rank")
    refused(ValueError, lambda: dist.send(few, (RANK + 1) % SIZE, tag=1 << 30), "tags of 0 to")
    job.streams.captures = lambda: True  # type: ignore[method-assign]
    refused(evenstep.EvenstepError, lambda: dist.all_reduce(few.short()), "cannot be captured in a CUDA graph")
    refused(evenstep.EvenstepError, lambda: dist.send(few, (RANK + 1) % SIZE, tag=1), "cannot be captured")
    del job.streams.captures


def does_not_wait(job: Job) -> None:
    """The call returns while nothing on its stream goes on; it is done in wait() and not before, also for a future."""
    tensor = torch.full((3,), RANK + 1, dtype=torch.int16)
    job.finish(dist.all_reduce(tensor))  # starts the threads
    tensor.fill_(RANK + 1)
    job.streams.log.clear()
    with job.streams.side(RANK).held():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed() and work.exception() is None and not work.is_success()
        future = work.get_future()
        assert not future.done() and work.get_future() is future
        assert job.streams.log == [
            "side waits for current",
            "a copy down on side",
            "kept for side",
            "an event on side",
        ], job.streams.log
    work.wait()
    assert job.streams.log[-1] == "current waits for an event of side up", job.streams.log
    assert job.streams.log.count("a copy up on side up") == 1, job.streams.log
    assert future.wait() == [tensor]
    job.finish()
    assert work.is_completed() and work.is_success() and work.result() == [tensor]
    same(tensor, SIZE * (SIZE + 1) // 2)
    work = dist.all_reduce(tensor, async_op=True)  # nobody waits for it
    while not work.is_completed():
        pass
    same(tensor, SIZE * SIZE * (SIZE + 1) // 2)
    held = job.streams.pinned((1,), torch.float32)
    with job.streams.side(RANK).held():
        work = dist.all_reduce(tensor, async_op=True)
        refused(evenstep.EvenstepError, lambda: work.wait(timedelta(seconds=0.05)), "it goes on")
        later = dist.all_reduce(held, async_op=True)  # of CPU tensors: in the order of the calls
        assert not later.is_completed()
    later.wait()
    assert all(part.is_completed() for part in work._host)
    job.finish(work)


def mixes(job: Job) -> None:
    """Calls of NCCL, through the host, and of CPU tensors in one order; ranks wait for them where they like."""
    for number in range(24):
        bits, floats = torch.tensor([1 << RANK]), torch.full((2000,), RANK + 1.0)
        cpu, shorts = job.on_host(RANK, 1), torch.full((5,), RANK + 1, dtype=torch.int32 if OVER_GLOO else torch.int16)
        op = OP.BOR if OVER_GLOO else OP.SUM  # the same of 1 and 2
        calls: list[Callable[[], Any]] = [
            lambda bits=bits: dist.all_reduce(bits, OP.BOR, async_op=True),
            lambda floats=floats: dist.all_reduce(floats, async_op=True),
            lambda cpu=cpu, later=(RANK + number) % 2 == 0: dist.all_reduce(cpu, async_op=later),
            lambda shorts=shorts, op=op: dist.all_reduce(shorts, op, async_op=True),
        ]
        turn = number % len(calls)
        works = []
        for at, call in enumerate([*calls[turn:], *calls[:turn]]):
            works.append(call())
            if (number >> at) % 2 == RANK % 2 and works[-1] is not None:  # others launch more before they wait
                works[-1].wait()
        for work in works if RANK % 2 else reversed(works):
            if work is not None:
                work.wait()
        job.finish()
        total = SIZE * (SIZE + 1) // 2
        same(bits, (1 << SIZE) - 1)
        same(floats, total)
        same(shorts, total)
        same(cpu, [SIZE * (SIZE - 1) / 2, SIZE])


def rises_apart(job: Job) -> None:
    """A copy back that stands still on one rank, as one does that waits for a later call of NCCL's, holds up no rank's next
    call."""
    first, second = torch.ones(4).short(), torch.ones(4).short()
    job.finish(dist.all_reduce(first))
    begin = job.streams.copy

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if RANK == 0 and target is first:
            job.store.wait(["the second is done"], timedelta(seconds=50))
        begin(target, source)

    job.streams.copy = copy  # type: ignore[method-assign]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    if RANK != 0:
        works[1].wait()
        job.store.set("the second is done", "yes")
    for work in works:
        job.finish(work)
    same(first, SIZE * SIZE)
    same(second, SIZE)


def trains(job: Job) -> None:
    """DDP whose gradients are exchanged as 16-bit integers: C++ waits for futures of Works that are done on the host."""
    job.streams.careful = True

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        coded = (bucket.buffer() * 1024).round().short()
        work = dist.all_reduce(coded, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].float() / 1024 / SIZE)

    torch.manual_seed(7)
    net = torch.nn.Linear(6, 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        wrapped.zero_grad()
        batches = [torch.full((4, 6), (rank + 1) / 8) for rank in range(SIZE)]
        wrapped(batches[RANK]).square().mean().backward()
        got = [parameter.grad.clone() for parameter in net.parameters()]
        loss = sum(net(batch).square().mean() for batch in batches) / SIZE
        for gradient, want in zip(got, torch.autograd.grad(loss, list(net.parameters()))):
            assert torch.allclose(gradient, want, atol=2e-3), (gradient, want)


def messages(job: Job) -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    long, short = torch.full((300_000,), float(RANK)), torch.full((3,), -float(RANK))
    works = [dist.isend(long, right, tag=7), dist.isend(short, right, tag=9)]
    got, last = torch.zeros(300_000), torch.zeros(3, 2)
    assert dist.recv(last[:, 0], left, tag=9) == left  # sent last, wanted first; into gaps
    assert dist.recv(got, left, tag=7) == left
    for work in works:
        job.finish(work)
    same(got, left)
    same(last, [[-left, 0.0]] * 3)
    for number in range(3):  # one tag: in their order
        dist.isend(torch.full((2,), 10.0 * RANK + number), right, tag=1)
    numbers = [torch.zeros(2) for _ in range(3)]
    for work in [dist.irecv(number, left, tag=1) for number in numbers]:
        work.wait()
    job.finish()
    for at, number in enumerate(numbers):
        same(number, 10 * left + at)
    if RANK == 0:
        for _ in range(SIZE - 1):
            word = torch.zeros(1)
            source = dist.recv(word, tag=4)
            job.finish()
            assert source == word.item() > 0, (source, word)
    else:
        dist.send(torch.tensor([float(RANK)]), 0, tag=4)
    apart_from_others(job, right, left)
    operations = [
        dist.P2POp(dist.isend, long, right, tag=2),
        dist.P2POp(dist.irecv, got, left, tag=2),
        dist.P2POp(dist.isend, short, left, tag=3),
        dist.P2POp(dist.irecv, numbers[0].resize_(3), right, tag=3),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    job.finish()
    same(got, left)
    same(numbers[0], -right)
    inbox = torch.zeros(3).short()
    with dist._coalescing_manager(job.group, torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((3,), RANK).short(), right, tag=5)
        dist.irecv(inbox, left, tag=5)
        total = torch.ones(3)
        job.group.allreduce([total]).is_completed()
    manager.wait()
    job.finish()
    same(inbox, left)
    same(total, SIZE)


def apart_from_others(job: Job, right: int, left: int) -> None:
    """Messages without tags stay on NCCL, with tags on the host; those of CPU tensors are none of a GPU's."""
    word = torch.zeros(1)
    refused(evenstep.EvenstepError, lambda: dist.recv(word), "without a tag", "tag other than 0")
    for tag in (0, 6):
        cpu, gpu = job.on_host(RANK), torch.tensor([RANK + 0.5])
        works = [dist.isend(gpu, right, tag=tag), dist.isend(cpu, right, tag=tag)]
        landed = job.on_host(-1)
        dist.recv(landed, left, tag=tag)
        dist.recv(word, left, tag=tag)
        job.finish()
        same(landed, left)
        same(word, left + 0.5)
        for work in works:
            work.wait()
    job.meet()
    called = job.streams.library.fake_gpu_log().decode()
    assert called.count("ncclSend") == called.count("ncclRecv") == 1, called


def a_late_send(job: Job) -> None:
    """A message is there for the host once its data are down, whatever others wait for; isend does not wait for that."""
    word = torch.tensor([5.0])
    peer = 1 - RANK
    if RANK == 0:
        with job.streams.side(RANK, ("down", peer)).held():
            work = dist.isend(word, peer, tag=1)
            dist.all_reduce(torch.ones(1).short())  # goes its own way
            assert not work.is_completed()
        work.wait()
        assert work.is_completed() and work.is_success()
    else:
        got = torch.zeros(1)
        work = dist.irecv(got, peer, tag=1)
        dist.all_reduce(torch.ones(1).short())
        while not work.is_completed():
            pass
        same(got, 5)
        assert work.is_success() and work._source_rank() == peer


def differs(job: Job) -> None:
    tensor = torch.ones(4).short()
    job.finish(dist.all_reduce(tensor))
    work = dist.all_reduce(tensor, OP.MAX if RANK else OP.SUM, async_op=True)
    future = work.get_future()
    error = refused(evenstep.EvenstepError, work.wait, "with MAX", "with SUM", "device_host_cases.py:")
    assert error.status == "EVEN_ERR_MISMATCH" and work.exception() is not None and not work.is_success()
    refused(Exception, future.wait, "with MAX")
    refused(Exception, lambda: dist.all_reduce(tensor))  # the engine's group has ended
    work = dist.isend(tensor, 1 - RANK, tag=1)
    assert isinstance(refused(evenstep.EvenstepError, work.wait), evenstep.EvenstepError)
    assert work.is_completed() and not work.is_success()


def breaks(job: Job) -> None:
    """What did not come down is sent to nobody: the rank has its GPU's error, the others hear that it gave up."""
    tensor = torch.ones(4).short()
    job.finish(dist.all_reduce(tensor))
    if RANK == 1:
        mark = job.streams.mark

        def failing(stream: Any, blocking: bool = False) -> Any:
            event = mark(stream, blocking)
            if blocking:

                def fails() -> None:
                    raise RuntimeError("CUDA error: made up")

                event.synchronize = fails
            return event

        job.streams.mark = failing  # type: ignore[method-assign]
        refused(RuntimeError, lambda: dist.all_reduce(tensor), "CUDA error: made up")
    else:
        error = refused(evenstep.EvenstepError, lambda: dist.all_reduce(tensor))
        assert error.status == "EVEN_ERR_REVOKED", error
    same(tensor, SIZE)


def all_of_it(job: Job) -> None:
    for case in (reductions, sparse_tensors, refusals, messages, mixes, rises_apart, does_not_wait, trains):
        case(job)


def over_gloo(job: Job) -> None:
    for case in (reductions, messages, mixes):
        case(job)


def main() -> None:
    case = sys.argv[1]
    job = Job()
    globals()[case](job)
    job.meet()
    assert job.streams.violation() == "", job.streams.violation()
    if case in ("differs", "breaks"):  # nobody can meet any more
        os._exit(0)
    dist.destroy_process_group()


main()
