"""The torch backend "evenstep" where ranks wait for one another in several groups: told with both lines, and not where another
thread may yet call."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backend_session import Check, join

torch = pytest.importorskip("torch")

from evenstep import hosts

UCX, WHY_NONE = hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")  # `make test` skips nothing that it should have run


@pytest.fixture
def check(run_ranks: Callable[..., Any]) -> Check:
    """Runs a body of this file on so many ranks; all must end well."""

    def run(body: Callable[..., None], ranks: int) -> None:
        run_ranks(Path(__file__), ranks, args=(body.__name__,))

    return run


# ---- what the ranks do; run in processes of their own ----


def body_crossed() -> None:
    """Two groups in opposite order, after calls that ran on the groups' own threads and beside idle ones of Python's; on two
    hosts, too."""
    import concurrent.futures

    import torch.distributed as dist

    import evenstep
    from evenstep.group_end import GroupEnd

    rank, _ = join()
    groups = dist.new_group(), dist.new_group()
    end = GroupEnd(dist.new_group(backend="gloo"), dist.HashStore(), "place")  # a thread stands by from now on
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(int).result()
    try:
        dist.all_reduce(torch.ones(4 + rank % 2), group=groups[rank % 2])
    except evenstep.EvenstepError as error:
        text = str(error)
        if "EVENSTEP_HOST_ID" in os.environ and error.status == "EVEN_ERR_PEER_LOST":
            os._exit(0)  # by one that saw it first, was told what is looked for here, and has gone
        assert error.status == "EVEN_ERR_MISMATCH" and "ranks wait for one another" in text, text
        host = r" \(host [^)]+\)" if "EVENSTEP_HOST_ID" in os.environ else ""
        assert re.search(rf"rank [02]{host} is in all_reduce of 4 F32", text), text
        assert re.search(rf"rank 1{host} is in all_reduce of 5 F32", text), text
        circle = text.partition("; rank ")[0]
        assert circle.count("test_backend_crossed.py:") == circle.count(" in body_crossed") == 2, text
        assert len({name.split()[0] for name in circle.split(" of group ")[1:]}) == 2, text
    else:
        raise AssertionError("no error")
    assert end.error is None
    os._exit(0)


def body_crossed_later() -> None:
    """The same with asynchronous calls: no mismatch while a rank computes beside one, but where it waits for it."""
    import torch.distributed as dist

    import evenstep

    rank, _ = join()
    one, other = dist.new_group(), dist.new_group()
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(tensor, group=one, async_op=True)
        time.sleep(3.5)  # computes, for longer than it takes to find a circle
        dist.all_reduce(tensor.clone(), group=other)
        work.wait()
    else:
        dist.all_reduce(tensor.clone(), group=other)
        dist.all_reduce(tensor, group=one)
    assert tensor.tolist() == [2] * 4
    try:
        if rank == 0:
            dist.all_reduce(tensor, group=one, async_op=True).wait()
        else:
            dist.all_reduce(tensor, group=other)
    except evenstep.EvenstepError as error:
        text = str(error).partition("; rank ")[0]
        assert error.status == "EVEN_ERR_MISMATCH" and text.count(" in body_crossed_later") == 2, text
    else:
        raise AssertionError("no error")
    os._exit(0)


def body_crossed_in_training() -> None:
    """A rank waits for gradients, and for the vote on them, the other in a group of the script's own: of es.prepare, and of DDP."""
    import torch.distributed as dist

    import evenstep as es

    def wrapped(model: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)

    rank, _ = join()
    for prepared, group in zip((wrapped, es.prepare), (dist.new_group(), dist.new_group())):
        model = prepared(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        try:
            if rank == 0:
                model(torch.ones(4, 8)).sum().backward()
            else:
                dist.all_reduce(torch.ones(5), group=group)
        except RuntimeError as error:  # DDP's are torch's own
            text = str(error).partition("; rank ")[0]
            assert "ranks wait for one another" in text and "is in all_reduce of 5 F32" in text, text
            assert text.count("test_backend_crossed.py:") == text.count(" in body_crossed_in_training") == 2, text
        else:
            raise AssertionError("no error")
    os._exit(0)


# ---- the tests ----


def test_groups_in_opposite_order_are_a_mismatch(check: Check) -> None:
    check(body_crossed, 2)


needs_ucx = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")


def run_on_hosts(run_ranks: Callable[..., Any], body: Callable[..., None], names: str) -> None:
    places = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(names)}
    run_ranks(Path(__file__), len(names), args=(body.__name__,), env={"UCX_TLS": "tcp,self"}, rank_env=places)


@needs_ucx
def test_groups_over_two_hosts_in_opposite_order_are_a_mismatch(run_ranks: Callable[..., Any]) -> None:
    run_on_hosts(run_ranks, body_crossed, "xyx")


@needs_ucx
@pytest.mark.more
@pytest.mark.parametrize("body", [body_crossed_later, body_crossed_in_training])
def test_training_over_two_hosts_against_a_call_of_another_group(
    run_ranks: Callable[..., Any], body: Callable[..., None]
) -> None:
    run_on_hosts(run_ranks, body, "xy")


def test_groups_in_opposite_order_with_asynchronous_calls(check: Check) -> None:
    check(body_crossed_later, 2)


def test_gradients_against_a_call_of_another_group_are_a_mismatch(check: Check) -> None:
    check(body_crossed_in_training, 2)


def test_others_that_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import concurrent.futures
    import threading
    import types

    from evenstep import _core, callers, group_end

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        before = _core.comm_others_may_call()  # by what pytest has
        rpc = types.SimpleNamespace(_is_current_rpc_agent_set=dict)  # {}: not False
        monkeypatch.setitem(sys.modules, "torch._C._distributed_rpc", rpc)
        assert _core.comm_others_may_call()
        rpc._is_current_rpc_agent_set = bool
        assert _core.comm_others_may_call() == before is False
    standing = group_end._Standing()
    try:
        for _ in range(2000):  # until it waits for something to do
            if not _core.comm_others_may_call():
                break
            time.sleep(0.01)
        assert not _core.comm_others_may_call()
    finally:
        standing.stop(100)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert _core.comm_others_may_call()
        assert thread.ident is not None
        monkeypatch.setitem(callers._waiting, thread.ident, bool)
        assert not _core.comm_others_may_call()
        monkeypatch.setitem(callers._waiting, thread.ident, dict)
        assert _core.comm_others_may_call()
    finally:
        monkeypatch.undo()
        end.set()
        thread.join()
    asked = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: asked.append(_core.comm_others_may_call()))
    leaf.sum().backward()
    assert asked == [True] and not _core.comm_others_may_call()


def asked_at_the_end_of_backward(calls: list[Any], inner: bool = False, then: Callable[[], None] = int) -> list[bool]:
    """Whether one may call while a backward that has asked for these calls waits in C++ at its end, and when each has ended.
    inner: it asked for the first in a backward inside it; then: what runs in Python before the wait."""
    import functools
    import threading

    from torch.autograd import Variable

    from evenstep import _core, callers, reducer_waits

    asked, end, waits = [], torch.futures.Future(), threading.Event()
    main, engine = threading.get_ident(), Variable._execution_engine

    def begin(first: int, last: int | None) -> None:
        for call in calls[first:last]:
            reducer_waits.made_by_cpp(call)

    def begin_all(_: Any) -> None:
        if inner:
            with torch.enable_grad():
                inside = torch.ones(1, requires_grad=True)
                inside.register_hook(lambda _: begin(0, 1))
                inside.sum().backward()
        begin(int(inner), None)
        for step in then, waits.set, functools.partial(torch._C.Future.wait, end):
            engine.queue_callback(step)

    def ask() -> None:
        try:
            with callers.waiting_for(bool):
                waits.wait()
            while sys._current_frames()[main].f_code is not reducer_waits._RUNS:
                time.sleep(0.001)
            asked.append(_core.comm_others_may_call())
            for call in calls:
                if not call.ended:
                    call.end(RuntimeError("lost") if call.job is None else None)
                    asked.append(_core.comm_others_may_call())
        finally:
            end.set_result(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(begin_all)
    leaf.sum().backward()
    thread.join()
    return asked


def test_who_waits_at_the_end_of_its_backward_calls_nothing() -> None:
    """Until all that it waits for has ended, or one by an error; of a backward inside another one, who waits is not known."""
    from evenstep.backend_work import Submitted

    def calls(jobs: list[Any]) -> list[Submitted]:
        return [Submitted(job, torch.futures.Future(), None, None) for job in jobs]

    assert asked_at_the_end_of_backward(calls([int, int])) == [False, False, True]
    assert asked_at_the_end_of_backward(calls([None, int])) == [False, True, True]  # the first fails
    assert asked_at_the_end_of_backward(calls([int, int]), inner=True) == [True, True, True]
    assert asked_at_the_end_of_backward(calls([int, int])) == [False, False, True]  # but the next one again
    early = calls([int, int])
    assert asked_at_the_end_of_backward(early, then=lambda: early[0].end(None)) == [False, True]
    ended = calls([int])
    ended[0].end(None)
    assert asked_at_the_end_of_backward(ended) == [True]
    assert asked_at_the_end_of_backward([]) == [True]


def test_who_has_left_its_backward_may_call() -> None:
    """For a step of Python's at its end, or by an error, while what it had asked for goes on."""
    from evenstep import _core
    from evenstep.backend_work import Submitted

    def ends() -> None:
        _core.comm_waits_in_backward(sys._getframe())

    asked = []
    call = Submitted(int, torch.futures.Future(), None, None)
    answers = asked_at_the_end_of_backward([call], then=lambda: asked.append(_core.comm_others_may_call()))
    assert answers == [False, True] and asked == [True]
    ends()
    assert _core.comm_others_may_call()
    _core.comm_backward_over()
    assert not _core.comm_others_may_call()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
