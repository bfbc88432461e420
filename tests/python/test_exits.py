"""How ranks end whose collectives run on threads of their own: no thread comes back from C++ into an ending interpreter."""

from __future__ import annotations

import _thread
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep import exits_older, group_end

HEAD = """
import atexit, threading

def left():
    print("left:", [thread.name for thread in threading.enumerate() if thread.name.startswith("evenstep")])

atexit.register(left)  # before evenstep's own, so that it runs after them
import torch
import torch.distributed as dist
import evenstep

dist.init_process_group("evenstep")
"""


def test_no_thread_is_left(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(
        HEAD
        + """
works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
for work in works:
    work.wait()
assert any(thread.name == "evenstep-collectives" for thread in threading.enumerate())
""",
        2,
    )
    assert [rank.stdout for rank in ranks] == ["left: []\n"] * 2
    assert not any("terminate called" in rank.stderr for rank in ranks)


def test_a_call_that_does_not_end_holds_nobody_up(run_ranks: Callable[..., Any]) -> None:
    waiting, absent = run_ranks(
        HEAD
        + """
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1000), async_op=True)
    print("goes", flush=True)
else:
    import os, pathlib, time
    while "left:" not in pathlib.Path("run_1_rank_0.out").read_text():
        time.sleep(0.01)
""",
        2,
    )
    assert waiting.stdout == "goes\nleft: ['evenstep-collectives']\n"
    assert absent.stdout == "left: []\n"


def test_a_question_to_a_slow_store_is_waited_for(run_ranks: Callable[..., Any]) -> None:
    (rank,) = run_ranks(
        HEAD.replace('dist.init_process_group("evenstep")', "")
        + """
from datetime import timedelta
from evenstep.group_end import within

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
assert within(0.001, lambda: store.wait(["nobody sets it"], timedelta(seconds=0.2))) is None
assert any(thread.name == "evenstep-group-end" for thread in threading.enumerate())
""",
        1,
    )
    assert rank.stdout == "left: []\n"


def test_a_question_at_the_end_is_asked(run_ranks: Callable[..., Any]) -> None:
    """Python 3.12 begins no thread then: ranks of this harness neither."""
    (rank,) = run_ranks(
        HEAD.replace('dist.init_process_group("evenstep")', "")
        + """
from evenstep.group_end import GroupEnd, within

def asks():
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        print("begins none")
    print(within(100, lambda: "answered"), within(0.001, lambda: time.sleep(0.2)), within(100, lambda: "again"))

import time
dist.init_process_group("gloo")
end = GroupEnd(dist.group.WORLD, dist.HashStore(), "place")
atexit.register(asks)
""",
        1,
    )
    assert rank.stdout == "begins none\nanswered None again\nleft: []\n"


def test_who_stops_a_question_waits_for_its_thread() -> None:
    """Not for the answer alone: what the thread still does then, it may not do in an ending interpreter."""
    go_on = threading.Event()

    class Slow(threading.Event):
        def set(self) -> None:
            super().set()
            go_on.wait()

    asked = group_end._Asked(lambda: 1)
    asked.stop(100)
    asked._over = Slow()
    thread = threading.Thread(target=asked._run)
    asked._thread = thread
    thread.start()
    assert asked._over.wait(100)
    asked.stop(0.01)
    assert asked.hangs
    go_on.set()
    asked.stop(100)
    assert not asked.hangs and not thread.is_alive()


def test_where_no_thread_can_begin_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(group_end, "_standing", None)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert group_end.within(100, lambda: 1) is None


def test_a_thread_that_looks_again_and_again_ends_before(run_ranks: Callable[..., Any]) -> None:
    """The interpreter's own end takes as long as a look."""
    waiting, _ = run_ranks(
        """
        import os, select, sys, threading, time
        import torch
        import torch.distributed as dist
        from evenstep.group_end import wait_for

        class Long:
            def __del__(self):
                time.sleep(1)

        class Seen:  # a Work that says when it is waited for
            def __init__(self, work):
                self.work, self.waits = work, threading.Event()

            def is_completed(self):
                return self.work.is_completed()

            def wait(self, limit):
                self.waits.set()
                self.work.wait(limit)

        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("process", str(os.getpid()))
            store.wait(["watched"])
            sys.setswitchinterval(1000)  # who has said that it waits keeps the interpreter until it is in C++
            work = Seen(dist.all_reduce(torch.ones(1), async_op=True))
            threading.Thread(target=wait_for, args=(work, dist.group.WORLD), daemon=True).start()
            threading.kept = Long()
            work.waits.wait()
            print("ends", flush=True)
        else:
            other = os.pidfd_open(int(store.get("process")))
            store.set("watched", "")
            select.select([other], [], [])
            os._exit(0)
        """,
        2,
        fresh=True,
    )
    assert waiting.stdout == "ends\n" and "terminate called" not in waiting.stderr


def test_a_thread_of_gloos_that_takes_the_interpreter_is_waited_for(run_ranks: Callable[..., Any]) -> None:
    """As one does that drops a call of backward's: here by what follows on the call."""
    ranks = run_ranks(
        """
        import threading, time
        import torch
        import torch.distributed as dist
        import evenstep

        dist.init_process_group("gloo")
        begun = threading.Event()

        def follows(_):
            begun.set()
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            print("done", flush=True)

        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(follows)
        assert begun.wait(60)
        """,
        2,
        fresh=True,
    )
    assert [rank.stdout for rank in ranks] == ["done\n"] * 2
    assert not any("terminate called" in rank.stderr or "FATAL" in rank.stderr for rank in ranks)


@pytest.mark.parametrize("known", [False, True])
def test_threads_that_torch_gives_no_name_are_found(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """As torch 2.6's are, of C++: here one that the module threading does not know. A script's own is not waited for."""
    monkeypatch.setattr(exits_older, "_has_gloo", lambda: True)
    over, ended = threading.Event(), threading.Event()

    def works() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the GIL
        ended.set()

    if known:
        threading.Thread(target=works, daemon=True).start()
    else:
        _thread.start_new_thread(works, ())
    try:
        seen = [exits_older.unnamed_threads_rest("no such thread", 0.0) for _ in range(50)]
        assert all(seen) if known else not all(seen)
        named = Path("/proc/self/comm").read_text().strip()
        assert exits_older.unnamed_threads_rest(named, 0.0), "where they have a name, nothing else is looked at"
    finally:
        over.set()
    assert ended.wait(60) and exits_older.unnamed_threads_rest("no such thread", 60.0)
