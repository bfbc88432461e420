"""What the ranks of test_device_legs.py do: CUDA collectives of the backend by legs between hosts, with CPU tensors and made-up
streams in CUDA's place (fake_streams.py) over a made-up NCCL. `python device_leg_cases.py CASE`; HOSTS has a letter for each rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_streams import FakeStreams, stand_in

import evenstep
from evenstep import backend_legs, device_legs, device_ways

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOSTS = os.environ["HOSTS"]
ALONE = HOSTS.count(HOSTS[RANK]) == 1
TOTAL = SIZE * (SIZE + 1) // 2
OP = dist.ReduceOp


def same(got: torch.Tensor, want: Any) -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    assert torch.equal(got, want.expand_as(got)), (got, want)


def refused(call: Callable[[], Any], status: str, *words: str) -> evenstep.EvenstepError:
    try:
        call()
    except evenstep.EvenstepError as error:
        assert error.status == status and all(word in str(error) for word in words), (error.status, error, words)
        return error
    raise AssertionError(f"no {status}")


class Job:
    def __init__(self, seconds: float) -> None:
        dist.init_process_group("evenstep", timeout=timedelta(seconds=seconds))
        self.group: Any = dist.group.WORLD
        self.store = dist.PrefixStore("cases/", dist.distributed_c10d._get_default_store())
        self.streams: FakeStreams = stand_in(self.group, seconds)

    def done(self, work: Any = None) -> None:
        if work is not None:
            work.wait()
        self.streams.finish()

    def called(self) -> str:
        return self.streams.library.fake_gpu_log().decode()

    def meet(self, words: str) -> None:
        """Over the store, which is rank 0's."""
        for seen in ("here", "seen"):
            self.store.set(f"{words}/{seen}/{RANK}", "")
            if seen == "here" or RANK == 0:
                self.store.wait([f"{words}/{seen}/{rank}" for rank in range(SIZE)], timedelta(seconds=60))


def sums(job: Job) -> None:
    """Of each dtype and operation that NCCL and our engine have; in pieces; in gaps; several as one."""
    backend_legs.PIECE_BYTES = 256
    for later in (False, True):
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.int64,
            torch.uint32,
        ):
            tensor = torch.full((7, 31), RANK + 1).to(dtype)
            job.done(dist.all_reduce(tensor, async_op=later))
            same(tensor.float(), TOTAL)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64):
            tensor = torch.full((70,), 2 * SIZE * (RANK + 1), dtype=dtype)
            job.done(dist.all_reduce(tensor, OP.AVG, async_op=later))
            same(tensor, 2 * TOTAL)
        for op, want in ((OP.MAX, SIZE), (OP.MIN, 1), (OP.PRODUCT, 24 if SIZE == 4 else None)):
            tensor = torch.full((5,), float(RANK + 1))
            job.done(dist.all_reduce(tensor, op, async_op=later))
            same(tensor, want if want is not None else torch.arange(1, SIZE + 1).prod())
        flags = torch.tensor([RANK == 0, RANK == 1, False, True])
        job.done(dist.all_reduce(flags, OP.MAX, async_op=later))
        same(flags, [True, True, False, True])
        tensor = torch.ones(100, 2)
        job.done(dist.all_reduce(tensor[:, 0], dist._make_nccl_premul_sum(RANK + 0.5), async_op=later))
        same(tensor[:, 0], TOTAL - SIZE / 2)
        same(tensor[:, 1], 1)
        root = torch.full((600,), RANK + 1.0)
        job.done(dist.reduce(root, SIZE - 1, OP.AVG, async_op=later))
        same(root, TOTAL / SIZE if RANK == SIZE - 1 else RANK + 1)
    given = [torch.full((3,), RANK + 1), torch.full((4000,), RANK + 1.0), torch.zeros(0)]
    with dist._coalescing_manager(job.group, torch.device("cpu"), async_ops=True) as manager:
        for tensor in given[1:2]:
            dist.all_reduce(tensor)
        dist.broadcast(given[0], 1, async_op=True)
    job.done(manager)
    same(given[0], 2)
    same(given[1], TOTAL)
    job.done(dist.all_reduce(given[2], async_op=True))
    job.done(job.group.allreduce_coalesced([given[0], given[1]]))
    same(given[0], 2 * SIZE)
    same(given[1], TOTAL * SIZE)
    backend_legs.PIECE_BYTES = 8 << 20


def moves(job: Job) -> None:
    """In place and not, unequal parts, hosts whose ranks are not one behind the other."""
    every = torch.arange(SIZE).repeat_interleave(2).float()
    for later in (False, True):
        gathered = torch.zeros(2 * SIZE)
        job.done(dist.all_gather_into_tensor(gathered, torch.full((2,), float(RANK)), async_op=later))
        same(gathered, every)
        gathered = torch.zeros(2 * SIZE)
        own = gathered[2 * RANK : 2 * RANK + 2].fill_(RANK)
        job.done(dist.all_gather_into_tensor(gathered, own, async_op=later))
        same(gathered, every)
        strided = torch.full((2,), RANK, dtype=torch.bfloat16)[::2]  # of one element: contiguous
        ones = torch.zeros(SIZE, dtype=torch.bfloat16)
        job.done(dist.all_gather(list(ones.split(1)), strided, async_op=later))
        same(ones, torch.arange(SIZE))
        uneven = [torch.zeros(100 * rank, dtype=torch.int16) for rank in range(SIZE)]
        job.done(dist.all_gather(uneven, torch.full((100 * RANK,), RANK, dtype=torch.int16), async_op=later))
        for rank, part in enumerate(uneven):
            same(part, rank)
        whole = torch.arange(3.0 * SIZE) + RANK
        part = whole[3 * RANK : 3 * RANK + 3] if later else torch.zeros(3)
        job.done(dist.reduce_scatter_tensor(part, whole, async_op=later))
        same(part, SIZE * (torch.arange(3.0) + 3 * RANK) + TOTAL - SIZE)
        if not later:
            same(whole, torch.arange(3.0 * SIZE) + RANK)
        into = torch.zeros(RANK, dtype=torch.float64)
        parts = [torch.full((rank,), rank + 1.0, dtype=torch.float64) for rank in range(SIZE)]
        job.done(dist.reduce_scatter(into, parts, OP.AVG, async_op=later))
        same(into, RANK + 1)
        for root in range(SIZE):
            data = torch.full((33, 3), root == RANK)
            job.done(dist.broadcast(data, root, async_op=later))
            same(data, True)
        with torch.inference_mode():
            data = torch.full((SIZE, 2), float(RANK))
            job.done(dist.all_reduce(data[:, 0], OP.AVG, async_op=later))
            same(data[:, 0], (SIZE - 1) / 2)
        summed, terms = torch.zeros(3), torch.arange(3.0 * SIZE)
        with torch.inference_mode():  # which makes what the call makes, too
            job.done(dist.reduce_scatter_tensor(summed, terms, OP.AVG, async_op=later))
        same(summed, torch.arange(3.0) + 3 * RANK)
        data = torch.stack([torch.full((9,), float(RANK))] * 2, 1)
        job.done(dist.broadcast(data[:, 0], SIZE - 1, async_op=later))
        same(data[:, 0], SIZE - 1)
        same(data[:, 1], RANK)


def leaves(job: Job) -> None:
    """What legs do not carry goes through the host, and over NCCL inside one; 8-bit floats over one communicator of all."""
    parts = list(torch.zeros(SIZE, 2))
    job.done(dist.gather(torch.full((2,), float(RANK)), parts if RANK == 1 else None, dst=1))
    if RANK == 1:
        same(torch.stack(parts)[:, 0], torch.arange(float(SIZE)))
    part = torch.zeros(2)
    job.done(
        dist.scatter(part, [torch.full((2,), float(r)) for r in range(SIZE)] if RANK == 0 else None, async_op=True)
    )
    same(part, RANK)
    received = torch.zeros(SIZE)
    job.done(dist.all_to_all_single(received, torch.arange(float(SIZE)) + 10 * RANK, async_op=True))
    same(received, RANK + 10 * torch.arange(float(SIZE)))
    outs = list(torch.zeros(SIZE, 2))
    job.done(dist.all_to_all(outs, [torch.full((2,), float(rank)) for rank in range(SIZE)]))
    same(torch.stack(outs), RANK)
    bits = torch.tensor([1 << RANK])
    job.done(dist.all_reduce(bits, OP.BOR))
    same(bits, (1 << SIZE) - 1)
    before, right, left = job.called(), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(RANK)), right)
    dist.recv(got, left)
    job.done(sent)
    same(got, left)
    for words, peer in (("ncclSend", right), ("ncclRecv", left)):
        assert (words in job.called()[len(before) :]) == (HOSTS[peer] == HOSTS[RANK]), (words, job.called())
    tensor = torch.full((7,), RANK + 1.0)
    job.done(dist.all_reduce(tensor))
    same(tensor, TOTAL)
    called = job.called()
    assert ("ncclReduce 7" in called) != ALONE and "ncclAllReduce 7" not in called, called
    assert not ALONE or "nccl" not in called, called
    eight = torch.ones(4).to(torch.float8_e5m2)
    job.done(dist.all_reduce(eight))
    same(eight.float(), SIZE)
    assert "ncclAllReduce 4" in job.called()


def in_their_order(job: Job) -> None:
    """The host waits for nothing: a call returns before others make it, and a second one goes down behind the first."""
    first, second = torch.full((300,), RANK + 1.0), torch.full((5,), RANK + 1.0)
    job.done(dist.all_reduce(torch.zeros(1)))
    if RANK == 0:
        job.streams.log.clear()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        down = [line for line in job.streams.log if line in ("a copy down on side", "side waits for current")]
        assert down == ["side waits for current", "a copy down on side"] * 2, job.streams.log
        assert not any(work.is_completed() for work in works)
        refused(lambda: works[0].wait(timedelta(seconds=0.05)), "EVEN_ERR_TIMEOUT", "it goes on")
        job.store.set("both are under way", "")
    else:
        job.store.wait(["both are under way"], timedelta(seconds=60))
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    works[1].wait()
    current = [line for line in job.streams.log if line.startswith("current waits")]
    assert current[-1] == "current waits for an event of side legs up", job.streams.log
    job.done(works[0])
    same(first, TOTAL)
    same(second, TOTAL)
    assert all(
        work.is_completed() and work.is_success() and work.result()[0] is tensor
        for work, tensor in zip(works, (first, second))
    )


def trains(job: Job) -> None:
    """DDP, whose C++ waits for the Works' futures."""
    job.streams.careful = True
    torch.manual_seed(7)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    model = torch.nn.parallel.DistributedDataParallel(alone, bucket_cap_mb=0.0001)
    batch = torch.arange(12.0 * SIZE).view(-1, 6) / 24
    for _ in range(2):
        model.zero_grad()
        model(batch[2 * RANK : 2 * RANK + 2]).square().mean().backward()
    want = torch.autograd.grad(alone(batch).square().mean(), list(alone.parameters()))
    for parameter, gradient in zip(alone.parameters(), want):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-5), (parameter.grad, gradient)


def all_of_it(job: Job) -> None:
    leaves(job)  # while there is room in the log
    sums(job)
    moves(job)
    in_their_order(job)
    trains(job)


def differs(job: Job) -> None:
    """Ranks of different hosts in different calls, with one GPU each: both sides and their lines, before anybody waits."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    work = dist.all_reduce(tensor, OP.MAX if RANK else OP.SUM, async_op=True)
    future = work.get_future()
    refused(work.wait, "EVEN_ERR_MISMATCH", "with MAX", "with SUM", "device_leg_cases.py:")
    assert work.exception() is not None and not work.is_success()
    try:
        future.wait()
    except Exception as error:
        assert "with MAX" in str(error), error
    else:
        raise AssertionError("the future has no error")
    refused(lambda: dist.all_reduce(tensor), "EVEN_ERR_MISMATCH", "with MAX", "with SUM")


def unlike(job: Job) -> None:
    """Of which the pieces alone say nothing: the whole calls are compared. Each in a group of its own, which ends by it."""
    backend_legs.PIECE_BYTES = 256

    def refuses(call: Callable[[Any], Any], *words: str, hears_later: bool = False) -> None:
        group: Any = dist.new_group()
        stand_in(group)
        dist.all_reduce(torch.ones(4), group=group)
        if hears_later:
            call(group)
        for _ in range(2):
            refused(lambda: call(group), "EVEN_ERR_MISMATCH", "device_leg_cases.py:", *words)

    def in_other_sizes(group: Any) -> None:
        for size in (64, 128) if RANK == SIZE - 1 else (128, 64):
            dist.all_reduce(torch.ones(size), group=group)

    last = OP.AVG if RANK == SIZE - 1 else OP.SUM
    refuses(
        lambda group: dist.all_reduce(torch.ones(3), last, group=group), "of 3 float32 elements with SUM", "with AVG"
    )
    refuses(in_other_sizes, "rank 0 called all_reduce of 128", f"rank {SIZE - 1} called all_reduce of 64")
    root = 1 if RANK == 1 else 0
    words = ("to rank 0", "rank 1 called", "to rank 1")
    away = RANK == SIZE - 1  # whose host brings its part, and gets none
    refuses(lambda group: dist.reduce(torch.ones(3), root, group=group), *words, hears_later=away)
    job.meet("unlike")


def late(job: Job) -> None:
    """The last host does not come: its ranks are named, not one of a host whose ranks wait for each other."""
    tensor = torch.ones(1)
    job.done(dist.all_reduce(tensor))
    job.meet("all are there")
    if RANK < SIZE - 1:
        legs = job.group._devices._legs
        for leg in legs._legs.values():
            leg.set_timeout(0.2)
        limits: list[float] = []
        meeting = legs._meeting.comm

        class Limited:
            """Its limit is told, and not had."""

            def __getattr__(self, name: str) -> Any:
                return limits.append if name == "set_timeout" else getattr(meeting, name)

        legs._meeting.comm = Limited()
        error = refused(lambda: dist.all_reduce(tensor), "EVEN_ERR_TIMEOUT", f"rank {SIZE - 1}")
        assert error.rank == SIZE - 1, (error.rank, error)
        assert RANK == 0 or limits == [120], limits
    job.meet("late")


def no_room(job: Job) -> None:
    """What fails before anything goes down ends the others' calls, too."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    if RANK == 1:
        legs = job.group._devices._legs

        def opens(device: int) -> None:
            legs.check()
            raise evenstep.EvenstepError("no memory for it")

        legs.open = opens
        refused(lambda: dist.all_reduce(tensor), "", "no memory for it")
        assert job.streams.kept[-1] == (tensor.data_ptr(), "side")
    else:
        refused(lambda: dist.all_reduce(tensor), "", "no memory for it")
    job.meet("no room")


def limited(job: Job) -> None:
    """A call's own limit ends it where a host does not come."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    if RANK == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        refused(lambda: job.group.allreduce([tensor], options).wait(), "EVEN_ERR_TIMEOUT")
    job.meet("limited")


def aborted(job: Job) -> None:
    """A call under way ends with its group, and says so."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    if RANK == 0:
        work = dist.all_reduce(tensor, async_op=True)
        job.group.abort()
        refused(work.wait, "EVEN_ERR_REVOKED", "was aborted")
        refused(lambda: dist.all_reduce(tensor), "EVEN_ERR_REVOKED", "was aborted")
    other: Any = dist.new_group()
    stand_in(other)
    dist.all_reduce(tensor, group=other)
    if RANK == 0:
        job.store.wait(["under way"], timedelta(seconds=60))
        other.abort()
    else:
        work = dist.all_reduce(tensor, group=other, async_op=True)
        job.store.set("under way", "")
        refused(work.wait, "EVEN_ERR_REVOKED", "was aborted on rank 0")
    job.meet("aborted")


def lost(job: Job) -> None:
    """The last rank dies while the others are in a call: each of them hears of it long before the time limit."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    job.meet("all are there")
    if RANK == SIZE - 1:
        job.store.wait([f"under way/{rank}" for rank in range(SIZE - 1)], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    job.store.set(f"under way/{RANK}", "")
    for call in (work.wait, lambda: dist.all_reduce(tensor)):
        try:
            call()
        except evenstep.EvenstepError as error:
            assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == SIZE - 1, (error.status, error)
        else:
            raise AssertionError("a sum without a rank")
    job.streams.finish()  # nothing stands on a stream
    job.store.set(f"has heard/{RANK}", "")
    if RANK == 0:
        job.store.wait([f"has heard/{rank}" for rank in range(SIZE - 1)], timedelta(seconds=60))


def over_gloo(job: Job) -> None:
    """Where no engine of ours connects the hosts it is NCCL, and says so."""
    tensor = torch.ones(4)
    job.done(dist.all_reduce(tensor))
    same(tensor, SIZE)
    assert "ncclAllReduce 4" in job.called(), job.called()


def chosen(job: Job, by_legs: bool) -> None:
    """By the group's first collective, whose call it is all the same; what comes after goes that way, too."""
    tensor, first = torch.full((7,), RANK + 1.0), torch.full((2 * SIZE,), -1.0)
    job.done(dist.all_gather_into_tensor(first, torch.full((2,), float(RANK)), async_op=True))
    same(first, torch.arange(SIZE).repeat_interleave(2))
    job.done(dist.all_reduce(tensor))
    same(tensor, TOTAL)
    assert ("ncclAllReduce 7" in job.called()) != by_legs, job.called()
    parts = list(torch.zeros(SIZE, 2))
    job.done(dist.gather(torch.full((2,), float(RANK)), parts if RANK == 0 else None, dst=0))
    same(torch.stack(parts)[:, 0], torch.arange(float(SIZE)) if RANK == 0 else 0)
    assert ("ncclSend" in job.called() or "ncclRecv" in job.called()) != by_legs, job.called()


def connected(job: Job) -> None:
    """Though the caller's stream stands still until then."""
    found, own = device_ways.WayOverHosts._found, job.streams._own

    def standing(self: Any, *given: Any) -> bool:
        with own.held():
            here, there = torch.zeros(4), torch.ones(4)
            job.streams.library.fake_gpu_copy(own.cuda_stream, here.data_ptr(), there.data_ptr(), here.nbytes)
            try:
                return found(self, *given)
            finally:
                standing.kept = here, there  # type: ignore[attr-defined]

    device_ways.WayOverHosts._found = standing  # type: ignore[method-assign]
    chosen(job, by_legs=False)


def others_connect(first_call: Callable[..., Any] | None = None) -> None:
    """The first call of the ranks but rank 1."""

    def connects(self: Any, device: int, where: Any, stream: Any, given_up: threading.Event) -> Any:
        self._groups.open(device, given_up=given_up)
        return device_ways._GOOD, ""

    if RANK != 1 or first_call is not None:
        device_ways.WayOverHosts._first_call = first_call if RANK == 1 else connects  # type: ignore[method-assign,assignment]


def unconnected(job: Job, code: int = 6) -> None:
    """By what a missing route really gives: the group's own communicator stays as it is."""
    others_connect()
    if RANK == 1:
        job.streams.library.fake_gpu_fail(b"ncclAllReduce", 1, code)
    chosen(job, by_legs=True)
    dist.barrier()
    in_their_order(job)


def unconnected_by_itself(job: Job) -> None:
    unconnected(job, 2)
    assert job.group._devices._groups.opened() == []


def captured(job: Job) -> None:
    """A graph's calls keep the communicator that they are on."""
    job.streams.captures = lambda: True  # type: ignore[method-assign]
    ones = torch.ones(2)
    job.done(dist.all_reduce(ones))
    same(ones, SIZE)
    job.streams.captures = lambda: False  # type: ignore[method-assign]
    unconnected(job)
    assert [comm.closed for comm in job.group._devices._groups.opened()] == [False]


def hanging(job: Job) -> None:
    """Whose communicator comes when nobody wants it any more."""
    came = threading.Event()

    def first_call(self: Any, device: int, where: Any, stream: Any, given_up: threading.Event) -> Any:
        given_up.wait()
        refused(lambda: self._groups.open(device, given_up=given_up), "", "came too late")
        came.set()

    device_ways.first_call_seconds = lambda: 0.05 if RANK == 1 else 100.0
    others_connect(first_call)
    chosen(job, by_legs=True)
    assert RANK != 1 or came.wait(60)
    assert job.group._devices._groups.opened() == []


def measured(job: Job, by_legs: bool) -> None:
    took = device_ways.WayOverHosts._seconds

    def seconds(self: Any, device: int, name: str, *given: Any) -> float:
        assert took(self, device, name, *given) > 0
        return 1.0 if (name == "legs") == by_legs else 2.0

    device_ways.WayOverHosts._seconds = seconds  # type: ignore[method-assign]
    chosen(job, by_legs)


def quick_legs(job: Job) -> None:
    measured(job, by_legs=True)


def slow_legs(job: Job) -> None:
    measured(job, by_legs=False)


def main() -> None:
    case = sys.argv[1]
    device_legs.TELLING_SECONDS = 50  # others may be slow
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        job = Job(1200 if case == "lost" else 60)  # far more than the test has
    told = [str(one.message) for one in said if "EVENSTEP_DEVICE_HOSTS=legs" in str(one.message)]
    assert len(told) == (case == "over_gloo" and RANK == 0), told
    globals()[case](job)
    if case == "lost":  # nobody can meet any more
        os._exit(0)
    job.meet("the end")
    assert job.streams.violation() == "", job.streams.violation()
    try:
        dist.destroy_process_group()
    except evenstep.EvenstepError:
        assert case in ("differs", "unlike", "late", "no_room", "limited", "aborted")


main()
