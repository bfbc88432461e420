"""What the ranks of test_backend_messages.py do: `python backend_message_cases.py NAME`, with torchrun's variables."""

from __future__ import annotations

import os
import re
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import evenstep

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SITES = re.compile(r"; sent at \S+cases\.py:\d+ in case_failures; received at \S+cases\.py:\d+ in <lambda>")


def case_every_dtype() -> None:
    peer = 1 - RANK
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64, torch.uint16):
        for shape in ((), (0,), (5,), (3, 4), (400_000,)):
            sent = torch.ones(shape, dtype=dtype) if RANK == 0 else torch.zeros(shape, dtype=dtype)
            got = torch.full(shape, 7, dtype=torch.int32).to(dtype)
            if RANK == 0:
                dist.send(sent, peer)
                assert dist.recv(got, peer) == peer
            else:
                assert dist.recv(got, peer) == peer
                dist.send(sent, peer)
            assert torch.equal(got, torch.full(shape, RANK, dtype=torch.int32).to(dtype)), (dtype, shape)


def case_tags_and_any() -> None:
    if RANK == 0:
        for number in range(SIZE - 1):
            word = torch.zeros(2)
            source = dist.recv(word, tag=4)
            assert source == int(word[0]) and word[1] == 4, (source, word, number)
        for source in range(1, SIZE):
            first, second = torch.zeros(300_000), torch.zeros(1)
            dist.recv(second, source, tag=2)  # sent last, wanted first
            dist.recv(first, source, tag=1)
            assert bool(first.eq(source).all()) and second.item() == -source
        return
    work = dist.isend(torch.full((300_000,), float(RANK)), 0, tag=1)
    if RANK % 2:
        dist.send(torch.tensor([float(RANK), 4.0]), 0, tag=4)
    later = dist.isend(torch.tensor([-float(RANK)]), 0, tag=2)
    if RANK % 2 == 0:
        dist.send(torch.tensor([float(RANK), 4.0]), 0, tag=4)
    work.wait()
    later.wait()


def case_layouts() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    if RANK == 0:
        dist.send(matrix.t().contiguous(), 1)
        dist.send(matrix[:, 1].contiguous(), 1)
        return
    wide = torch.zeros(3, 4)
    dist.recv(wide.t(), 0)  # not contiguous: filled through a copy
    assert torch.equal(wide, matrix)
    wide.zero_()
    try:
        dist.recv(torch.zeros(1).expand(3), 0)
    except RuntimeError as error:
        assert "refers to a single memory location" in str(error), error
    else:
        raise AssertionError("three numbers went to one place")
    work = dist.irecv(wide[:, 1], 0)  # nothing was taken
    while not work.is_completed():
        pass
    assert torch.equal(wide[:, 1], matrix[:, 1]) and wide[:, 0].eq(0).all()


def case_batches() -> None:
    """The ring of pipelines and context parallelism: all post everything, then wait."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for count in (3, 1_000_000):
        out, into = torch.full((count,), float(RANK)), torch.empty(count)
        back, again = torch.full((count,), float(-RANK)), torch.empty(count)
        operations = [
            dist.P2POp(dist.isend, out, right, tag=1),
            dist.P2POp(dist.irecv, into, left, tag=1),
            dist.P2POp(dist.isend, back, left, tag=2),
            dist.P2POp(dist.irecv, again, right, tag=2),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert bool(into.eq(left).all()) and bool(again.eq(-right).all())
    group = dist.new_group([0, SIZE - 1])
    if RANK in (0, SIZE - 1):
        word = torch.tensor([float(RANK)])
        if RANK == 0:
            dist.send(word, SIZE - 1, group=group)
        else:
            assert dist.recv(word, 0, group=group) == 0 and word.item() == 0
    words: list[object] = [{"from": RANK}]
    if RANK == 0:
        dist.send_object_list(words, 1)
    elif RANK == 1:
        dist.recv_object_list(words, 0)
        assert words == [{"from": 0}]


def case_overlap() -> None:
    """A long message goes while a collective is under way, and the other way round; nobody keeps the first Work."""
    large = torch.full((2_000_000,), 3.0)
    if RANK == 0:
        dist.isend(large.clone(), 1)
        total = torch.ones(500_000)
        work = dist.all_reduce(total, async_op=True)
        word = torch.zeros(1)
        dist.recv(word, 1, tag=9)
        work.wait()
    else:
        got = torch.zeros(2_000_000)
        later = dist.irecv(got, 0)
        dist.send(torch.ones(1), 0, tag=9)
        total = torch.ones(500_000)
        dist.all_reduce(total)
        later.wait()
        assert torch.equal(got, large)
    assert bool(total.eq(2).all())


def expect(status: str, words: str, call) -> None:  # type: ignore[no-untyped-def]
    try:
        call()
    except evenstep.EvenstepError as error:
        assert error.status == status and words in str(error), error
        assert "; sent at " not in words or SITES.search(str(error)), error
    else:
        raise AssertionError(f"no {status}")


def mean_other_dtypes(store: dist.Store) -> None:
    """As many bytes of another dtype are refused, however they are asked for, and left where they are; bytes are what
    the other side says. Meanwhile the sender is in no call: it would be told."""
    if RANK == 0:
        dist.send(torch.tensor([1.5, 2.5]), 1, tag=3)
        dist.send(torch.tensor([1.5, 2.5]), 1)
        dist.send(torch.tensor([3.5]).view(torch.uint8), 1)
        store.set("sent", "1")
        store.wait(["taken"])
        return
    store.wait(["sent"])
    other = torch.zeros(2, dtype=torch.int32)
    batch = [dist.P2POp(dist.irecv, other, 0)]
    calls = (
        lambda: dist.recv(other, 0),
        lambda: dist.recv(other),
        lambda: dist.batch_isend_irecv(batch)[0].wait(),
    )
    for call in calls:
        expect("EVEN_ERR_MISMATCH", "rank 0 sent 8 bytes of F32 with tag 0, but rank 1 receives 8 of I32", call)
    expect("EVEN_ERR_MISMATCH", "8 bytes of F32 with tag 3", lambda: dist.recv(other, 0, tag=3))
    raw, whole, one = torch.zeros(8, dtype=torch.uint8), torch.zeros(2), torch.zeros(1)
    dist.recv(whole, 0, tag=3)
    dist.recv(raw, 0)
    dist.recv(one, 0)
    assert whole.tolist() == raw.view(torch.float32).tolist() == [1.5, 2.5] and one.item() == 3.5
    store.set("taken", "1")


def case_failures() -> None:
    store = dist.distributed_c10d._get_default_store()
    mean_other_dtypes(store)
    both = "rank 0 sent 12 bytes of F32 with tag 0, but rank 1 receives 8 of F32; sent at "
    if RANK == 0:
        dist.send(torch.zeros(3), 1)
        expect("EVEN_ERR_MISMATCH", both, lambda: dist.recv(torch.zeros(1), 1, tag=6))  # told while it waits
        work = dist.irecv(torch.zeros(1), 1, tag=5)
        assert work.exception() is None and not work.is_success()  # and neither waits for it
        expect("EVEN_ERR_TIMEOUT", "with tag 5", lambda: work.wait(timedelta(seconds=0.2)))
        assert isinstance(work.exception(), evenstep.EvenstepError) and not work.is_success()
        store.set("late", "1")
        store.wait(["over"])
    else:
        expect("EVEN_ERR_MISMATCH", both, lambda: dist.recv(torch.zeros(2), 0))
        store.wait(["late"])
        expect("EVEN_ERR_TIMEOUT", "", lambda: dist.recv(torch.zeros(3), 0))
        store.set("over", "1")
    os._exit(0)


def case_death() -> None:
    dist.barrier()  # all have the group: one that still made it would be told of its other end
    if RANK == 1:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0:
        dist.send(torch.zeros(1), 1)
    expect("EVEN_ERR_PEER_LOST", "rank 1", lambda: dist.recv(torch.zeros(1), 1))
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("evenstep", timeout=timedelta(seconds=60))
    globals()[f"case_{sys.argv[1]}"]()
    dist.barrier()
    dist.destroy_process_group()
