"""Process groups of torch's that a generation's ranks make without torch's group of all ranks, and leave behind."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from evenstep import EvenstepError, _core, generation_torch, torch_engine
from evenstep.compression import parse_compression
from evenstep.engine import EngineOptions, LastingEngine
from evenstep.errors import error_of
from evenstep.exchange import all_gather_single
from evenstep.generation_torch import MAKERS, forget, let_go, open_torch_group
from evenstep.group_end import wait_for
from evenstep.mended_group import MendedGroup, is_lost
from evenstep.regrouping import own_groups
from evenstep.rendezvous import Overtaken
from evenstep.torch_engine import TorchEngine


def _opened(store: Any, rank: int, ranks: int = 2, look: Any = lambda: None) -> Any:
    return open_torch_group("gloo", store, rank, ranks, name="evenstep/a/1", timeout_seconds=77, look=look)


def test_they_add_up_and_are_none_of_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_torch, "_CONNECT_SECONDS", 70.0)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: _opened(store, rank), range(2)))
        values = [torch.full((3,), rank + 1.0) for rank in range(2)]
        for work in [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(values, groups)]:
            wait_for(work, groups[0])
    assert all(torch.equal(one, torch.full((3,), 3.0)) for one in values)
    known = dist.distributed_c10d._world.pg_map
    for rank, group in enumerate(groups):
        assert (dist.get_backend(group), group.rank(), group.group_name) == ("gloo", rank, "evenstep/a/1")
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(
            seconds=77
        )  # that to connect is shorter
        assert group in known
    assert not own_groups()
    forget(groups)
    assert not any(group in known for group in groups)


def test_who_waits_for_one_that_never_comes_hears_that_nobody_wants_the_group() -> None:
    store, looks = dist.HashStore(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise Overtaken

    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(Overtaken):
        _opened(store, 0, look=look)
    left = [one for one in threading.enumerate() if one.name == "evenstep-torch-group"]
    assert len(left) == 1
    MAKERS["gloo"](dist.PrefixStore("evenstep/a/1/", store), 1, 2, timedelta(seconds=60))  # now it comes, and finds it
    left[0].join()
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_what_torch_says_of_a_lost_rank_becomes_the_loss_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed\nat great length")

    monkeypatch.setitem(MAKERS, "gloo", make)
    with pytest.raises(
        EvenstepError, match=r"rank 1 of 2 .* connectFullMesh failed \(EVEN_ERR_PEER_LOST\)\n  fix: "
    ) as found:
        _opened(dist.HashStore(), 1)
    assert found.value.status == "EVEN_ERR_PEER_LOST"


class _Call:
    """One of Gloo's that never ends."""

    over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self, limit: timedelta) -> None:
        raise RuntimeError("Operation timed out!")


def test_a_call_that_never_ends_is_left_where_a_rank_was_lost() -> None:
    looks: list[int] = []

    def heed() -> None:
        looks.append(1)
        if len(looks) == 15:  # beyond the first look
            raise Overtaken

    group: Any = MAKERS["gloo"](dist.HashStore(), 0, 1, timedelta(seconds=60))
    with pytest.raises(Overtaken):
        wait_for(_Call(), group, heed=heed)


class _Lost:
    """As evenstep.generations.Recovery, where a rank has just ended."""

    def heed(self) -> None:
        raise error_of("EVEN_ERR_PEER_LOST", "another rank was lost")


@pytest.mark.parametrize("waits", [True, False])
def test_an_engines_sum_that_waits_for_a_lost_rank_ends(waits: bool) -> None:
    """Also where nobody waits for it: the loss was heard of in the vote."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: _opened(store, rank), range(2)))
    comm: Any = SimpleNamespace(rank=0, ranks=2)
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    control = MendedGroup(comm, _Lost())  # type: ignore[arg-type]
    engine = TorchEngine(parameters, groups[0], control, _core.Telemetry(-1, 0), EngineOptions())
    assert engine.plain and isinstance(engine, LastingEngine)
    engine.know(b"\1")  # nobody is asked
    engine.begin(1.0, 0)
    engine.ready(0, torch.ones(3))
    under_way = engine._handed[0].sum
    if waits:
        with pytest.raises(EvenstepError, match="another rank was lost") as found:
            engine.finish()
        assert is_lost(found.value)
        engine.begin(1.0, 0)  # a pass that comes before the vote: it raises nothing in backward
        engine.ready(0, torch.ones(3))
        assert [one.sum for one in engine._handed] == [under_way]
    forget(groups)
    engine.revoke()
    while not under_way.over:
        time.sleep(0.001)
    before = sys.getrefcount(groups[0])
    engine.again((None, None))
    after = sys.getrefcount(groups[0])
    assert after == before


def test_a_sum_that_was_given_up_is_waited_for_where_its_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round before: some rank had never handed its part on. In 16 bits it is two calls."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda rank: _opened(store, rank), range(2)))
        second = list(pool.map(lambda rank: _opened(dist.PrefixStore("2", store), rank), range(2)))
    control = MendedGroup(SimpleNamespace(rank=0, ranks=2), _Lost())  # type: ignore[arg-type]
    options = EngineOptions(compression=parse_compression("bf16"))
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    engine = TorchEngine(parameters, first[0], control, _core.Telemetry(-1, 0), options, second[0])
    engine.know(b"\1")
    engine.begin(1.0, 0)
    engine.ready(0, torch.ones(4))
    given_up = engine._handed[0].sum
    engine.give_up()
    rows = torch.empty(4, dtype=torch.bfloat16)
    all_gather_single(rows, rows[:2].clone(), group=second[1])  # the other's second half comes
    while not given_up._work.is_completed():  # type: ignore[attr-defined]
        time.sleep(0.001)
    engine.begin(1.0, 1)
    assert not given_up.over and not engine._handed
    left: list[Any] = []
    monkeypatch.setattr(torch_engine, "let_go", lambda groups, under_way: left.extend(under_way))
    engine.revoke()
    while not given_up.over:
        time.sleep(0.001)
    engine.again((None, None))
    assert left == [given_up]
    forget([*first, *second])


@pytest.mark.parametrize("over", [True, False])
def test_a_group_ends_once_its_calls_have(monkeypatch: pytest.MonkeyPatch, over: bool) -> None:
    """Its end would wait for one that goes on."""
    monkeypatch.setattr(generation_torch, "_LEAVE_SECONDS", 0.0)
    group, call = type("Group", (), {})(), _Call()
    call.over = over
    before = sys.getrefcount(group)
    let_go([group], [call])
    assert sys.getrefcount(group) - before == (not over)
