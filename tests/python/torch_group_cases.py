"""What the ranks of test_torch_group.py do: es.prepare where Gloo connects them, and one of them fails, dies, or does not come."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_engine_cases import LAYERS, Parts, prepared

from evenstep import group_end
from evenstep.group import TorchGroup
from evenstep.group_end import GroupEnd

kept: list[Any] = []
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def caught(call: Callable[[], Any]) -> list[str]:
    """Status, first line and fix."""
    try:
        call()
    except RuntimeError as error:
        words, _, fix = str(error).partition("\n  fix: ")
        return [getattr(error, "status", "") or type(error).__name__, words, fix]
    except ValueError as error:
        return ["ValueError", str(error), ""]
    return []


def others_heard() -> bool:
    """Whether all others write, while this rank lives and calls nothing, that they have heard."""
    until = time.monotonic() + 60
    wanted = [Path(f"heard-{rank}") for rank in range(RANKS) if rank != RANK]
    while not all(one.exists() for one in wanted):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def tell(*told: Any) -> None:
    Path(f"heard-{RANK}").touch()
    print(json.dumps(told))


def begun(**options: Any) -> tuple[Any, Any, Any, Any]:
    """A training whose first step has been made."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts(), **options)
    x = next(iter(loader))[0]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x, engine


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails() -> None:
    """Rank 1's backward fails; its script catches that, and its process goes on."""
    model, _, x, _ = begun(compression=sys.argv[2])

    def fail(_: torch.Tensor) -> None:
        raise ValueError("the script's own")

    if RANK == 1:
        model.parts[0].weight.register_hook(fail)
    words = caught(lambda: model(x).square().mean().backward())
    if RANK == 1:
        print(json.dumps([words, others_heard(), os.getpid()]))
    else:
        tell(words)


def dies() -> None:
    """Rank 1 is killed in backward."""
    model, _, x, _ = begun()
    if RANK == 1:
        model.parts[0].weight.register_hook(die)
    tell(caught(lambda: model(x).square().mean().backward()), caught(lambda: model(x).square().mean().backward()))


def dies_in_sums() -> None:
    """Rank 1 is killed after the vote, when some of its buckets are under way."""
    model, _, x, engine = begun(compression=sys.argv[2])
    if RANK == 1:
        begin_sum, sums = engine._begin_sum, []

        def begin(flat: torch.Tensor, narrow: bool) -> Any:
            sums.append(flat)
            return die() if len(sums) == LAYERS // 2 else begin_sum(flat, narrow)

        engine._begin_sum = begin
        engine._hand_on_complete = lambda: None
    tell(caught(lambda: model(x).square().mean().backward()))


def dies_after_backward() -> None:
    """Where gradients go when backward has ended: rank 1 is killed in that."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import evenstep as es

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 8))
    model, optimizer, loader = es.prepare(
        model, optimizer, DataLoader(data, batch_size=4), compression="int8", policy="equal"
    )
    x = next(iter(loader))[0]
    model(x).square().mean().backward()
    optimizer.step()
    engine: Any = es.session().steps.syncs[-1].engine
    if RANK == 1:
        engine._combine = die
    tell(caught(lambda: model(x).square().mean().backward()))


def group_of(seconds: float | None = None) -> TorchGroup:
    """Of all ranks, which have met in it; its calls have that limit from then on, or ten seconds where torch's Gloo keeps the one
    that the group was made with (2.6)."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    world = dist.group.WORLD
    dist.barrier()
    made = world if seconds is None else dist.new_group(timeout=timedelta(seconds=max(10.0, seconds)))
    assert made is not None
    group = TorchGroup(made, GroupEnd(made, dist.distributed_c10d._get_default_store(), "place"))
    assert group.exchange(bytes([RANK])) == [bytes([rank]) for rank in range(RANKS)]
    if seconds is not None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), made)
    return group


def leaves() -> None:
    """Rank 1's script comes to its end, by itself or by an error, and its process with it; the others make another call."""
    group = group_of()
    if RANK == 1:
        kept.append(group)  # as a session does
        Path("left").touch()
        if sys.argv[2] == "failed":
            raise ValueError("the script's own")
        return
    wait_for("left")
    tell(caught(group.barrier), caught(group.barrier))


def late() -> None:
    """Rank 1 does not come to a call."""
    group = group_of(1.0)
    if RANK == 1:
        print(json.dumps([others_heard(), os.getpid()]))
    else:
        tell(caught(group.barrier), caught(group.barrier))


def revokes() -> None:
    """Rank 1 ends what the others wait for, or will: the last one comes when the first has heard."""
    group = group_of()
    if RANK == 1:
        group.revoke("enough")
        group.revoke("more than enough")  # the first word counts
        print(json.dumps([others_heard(), os.getpid(), caught(group.barrier)]))
        return
    if RANK == 2:
        while not Path("heard-0").exists():
            time.sleep(0.01)
    values = torch.ones(3)
    tell(caught(lambda: group.sum_(values)))


def apart() -> None:
    """Rank 1 makes another call, of other sizes."""
    group = group_of(3.0)
    tell(caught(group.barrier if RANK == 1 else lambda: group.exchange(b"record")))


class Watched:
    """The job's store, as this rank sees it: `failed` is touched when it has not answered."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        try:
            return bool(self._store.check(keys))
        except RuntimeError:
            Path("failed").touch()
            raise


def wait_for(path: str) -> None:
    until = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def sets() -> None:
    """Ranks 0 and 1, and 2 and 3, each by themselves. The first end, and with rank 0 the job's store; rank 3 waits longer for 2, and
    has looked in the store meanwhile."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    number = RANK // 2
    store = Watched(dist.distributed_c10d._get_default_store())
    group = TorchGroup(groups[number], GroupEnd(groups[number], store, f"place/{number}"))
    group.barrier()
    Path(f"met-{RANK}").touch()
    if number == 0:
        wait_for("met-2")
        wait_for("met-3")
        return
    if RANK == 2:
        wait_for("failed")
    tell(caught(group.barrier))


def refused() -> None:
    """Torch refuses a call, on rank 1 alone: the group goes on, in step."""
    group = group_of()

    def refuse() -> None:
        raise RuntimeError("no such type")

    words = caught(lambda: group._call("a call", refuse)) if RANK == 1 else []
    values = torch.ones(3)
    group.sum_(values)
    assert group._end is not None
    tell(words, values.tolist(), group._end._call)


def half() -> None:
    """Half of a message comes, and then its connection ends: rank 1 may read no more of its own memory."""
    group_end._LOOK_SECONDS = 0.05
    dist.init_process_group("gloo")
    size = 32 << 20
    memory = mmap.mmap(-1, size)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    if RANK == 1:
        half = ctypes.c_void_p(values.data_ptr() + size // 2)
        assert ctypes.CDLL(None, use_errno=True).mprotect(half, ctypes.c_size_t(size // 2), 0) == 0
    work = dist.broadcast(values, 1, async_op=True)
    words = caught(lambda: group_end.wait_for(work, dist.group.WORLD))
    tell(words, work.is_completed())
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
