"""The timeline of real ranks: each collective and message once on each rank, under the same numbers."""

from __future__ import annotations

import collections
import fcntl
import json
import pathlib
import sqlite3
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from evenstep.backend_tensors import WAITS_UNASKED

# Every kind of caller: torch.distributed (waiting, asynchronous, messages, a subgroup), es.comm, and es.prepare.
TRAIN = """
    import numpy
    import torch
    import torch.distributed as dist
    import evenstep as es

    dist.init_process_group("evenstep")
    rank = dist.get_rank()
    for count in (1, 1000):
        dist.all_reduce(torch.ones(count))
    dist.broadcast(torch.zeros(10, dtype=torch.int64), 1)
    dist.all_reduce(torch.ones(77, dtype=torch.float64), op=dist.ReduceOp.MAX, async_op=True).wait()
    peer = 1 - rank
    for tag in (3, 4):
        box = torch.zeros(5)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(5), peer, tag=tag),
                                            dist.P2POp(dist.irecv, box, peer, tag=tag)]):
            work.wait()
    alone = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(torch.ones(3), group=alone)
    dist.barrier()
    with es.comm.open("mine") as group:
        group.all_reduce(numpy.ones(6, dtype=numpy.float32), "avg")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(24, 4))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def _check_structure(trace: dict[str, Any]) -> None:
    """What the Trace Event Format asks of each event."""
    open_messages: collections.Counter[tuple[int, str]] = collections.Counter()
    starts: collections.Counter[str] = collections.Counter()
    ends: collections.Counter[str] = collections.Counter()
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        kind = event["ph"]
        assert kind in {"X", "M", "i", "b", "e", "s", "f"}, event
        if kind == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert (event["pid"], event["tid"]) in named, event
        if kind == "X":
            assert event["dur"] >= 0
        elif kind in "be":
            assert event["cat"] == "message"
            open_messages[event["pid"], event["id"]] += 1 if kind == "b" else -1
        elif kind == "s":
            starts[event["id"]] += 1
        elif kind == "f":
            assert event["bp"] == "e"
            ends[event["id"]] += 1
    assert not any(open_messages.values())
    assert set(starts) == set(ends) and set(starts.values()) <= {1}


def _calls(trace: dict[str, Any], rank: int) -> dict[str, list[tuple[Any, ...]]]:
    """Of each group: (number, name, bytes, dtype, op) of the collectives, in order."""
    found: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "collective" and event["pid"] == rank:
            told = event["args"]
            call = (told["number"], event["name"], told["bytes"], told.get("dtype"), told.get("op"))
            found[told["group"]].append(call)
    return {group: sorted(calls) for group, calls in found.items()}


def _trace(program: pathlib.Path, folder: pathlib.Path, run: str) -> dict[str, Any]:
    command = [str(program), "report", run, "--timeline", "trace.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "trace.json").read_text())


@pytest.fixture
def job(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], script: Callable[[str], str]
) -> Callable[..., dict[str, Any]]:
    def run(source: str, *words: str, **variables: str) -> dict[str, Any]:
        command = [
            str(program),
            "run",
            "-n",
            "2",
            "--name",
            "t",
            "--policy",
            "equal",
            "--no-pin",
            *words,
            script(source),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return _trace(program, tmp_path, "t")

    return run


def test_each_call_is_there_once_on_each_rank(job: Callable[..., dict[str, Any]], tmp_path: pathlib.Path) -> None:
    trace = job(TRAIN, "--timeline")
    _check_structure(trace)
    calls = _calls(trace, 0)
    alone = {group for group in _calls(trace, 1) if group not in calls}
    assert len(alone) == 1
    assert {group: c for group, c in _calls(trace, 1).items() if group not in alone} == calls
    assert trace["otherData"]["lost_records"] == 0
    world = next(c for group, c in calls.items() if group.startswith("torch/"))
    own = [call[1:] for call in world]
    for expected in [
        ("all_reduce", 4, "F32", "SUM"),
        ("all_reduce", 4000, "F32", "SUM"),
        ("broadcast", 80, None, None),
        ("all_reduce", 616, "F64", "MAX"),
    ]:
        assert own.count(expected) == 1, own
    for of_group in calls.values():  # each number once, without a gap
        assert [call[0] for call in of_group] == list(range(of_group[0][0], of_group[0][0] + len(of_group)))
    assert ("all_reduce", 24, "F32", "AVG") in [call[1:] for call in calls["comm/mine/1"]]
    gradients = next(c for group, c in calls.items() if "gradients" in group)
    assert sum(call[1:] == ("all_reduce", 128, "F32", "SUM") for call in gradients) == 3  # a bucket in each step
    control = next(c for group, c in calls.items() if "control" in group)
    assert sum(call[1] == "all_gather" for call in control) >= 3  # the votes

    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        if event.get("cat") == "collective":
            row, told = rows[event["pid"], event["tid"]], event["args"]
            assert told["engine"] == "shm" and told["waited_us"] <= event["dur"] + 1
            assert (row == "communication thread") == ("gradients" in told["group"] and told["bytes"] in (128, 2)), (
                event
            )
            asked = told["bytes"] == 616
            # torch 2.6: most of its own groups' calls are
            unasked = WAITS_UNASKED and told["group"].startswith("torch/") and not asked
            assert unasked or (row == "asynchronous calls") == asked, event
            if told["bytes"] > 0:
                assert "busbw_GBps" in told or event["dur"] == 0
    steps = {e["args"]["step"] for e in events if e.get("cat") == "collective" and "gradients" in e["args"]["group"]}
    assert {0, 1, 2} <= steps

    for rank in (0, 1):
        begun = [e for e in events if e["ph"] == "b" and e["pid"] == rank]
        for name in ("send", "receive"):
            assert sorted(e["args"]["tag"] for e in begun if e["name"] == name) == [3, 4]
        assert {e["args"]["peer"] for e in begun} == {1 - rank}
    arrows = [e for e in events if e["ph"] == "s" and e["name"] == "message"]
    assert len(arrows) == 4  # two tags, both ways

    with sqlite3.connect(tmp_path / "runs/t/run.db") as history:
        made = dict(history.execute("SELECT rank, count(*) FROM calls WHERE tag IS NULL GROUP BY rank").fetchall())
        totals = dict(history.execute("SELECT rank, max(collectives) FROM usage GROUP BY rank").fetchall())
    assert totals == made  # all were counted as well


OVER_TORCH = """
    import torch
    import evenstep as es

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(24, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader, engine="torch")
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


def test_gradients_that_torch_adds_up_are_there(job: Callable[..., dict[str, Any]]) -> None:
    trace = job(OVER_TORCH, "--timeline")
    _check_structure(trace)
    for rank in (0, 1):
        calls = next(c for group, c in _calls(trace, rank).items() if group.startswith("torch/gradients/"))
        assert calls == [(number, "all_reduce", 40, "F32", "SUM") for number in (1, 2, 3)]
    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found = [e for e in events if e.get("cat") == "collective" and e["args"]["group"].startswith("torch/gradients/")]
    assert {rows[e["pid"], e["tid"]] for e in found} == {"communication thread"}
    assert {e["args"]["engine"] for e in found} == {"gloo"}


QUICK = """
    import torch
    import torch.distributed as dist
    import evenstep

    dist.init_process_group("evenstep")
    for _ in range(600):
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""


def test_without_being_asked_calls_are_only_counted(job: Callable[..., dict[str, Any]], tmp_path: pathlib.Path) -> None:
    trace = job(QUICK)
    _check_structure(trace)
    assert not _calls(trace, 0)
    with sqlite3.connect(tmp_path / "runs/t/run.db") as history:
        counted = history.execute("SELECT rank, max(collectives), max(collective_bytes) FROM usage GROUP BY rank")
        rows = counted.fetchall()
    assert [rank for rank, *_ in rows] == [0, 1]
    assert all(collectives >= 600 and moved >= 600 * 16 for _, collectives, moved in rows), rows


def test_of_many_calls_the_last_are_kept(job: Callable[..., dict[str, Any]]) -> None:
    trace = job(QUICK, "--timeline-calls", "100")
    _check_structure(trace)
    for rank in (0, 1):
        kept = [call for calls in _calls(trace, rank).values() for call in calls]
        assert len(kept) == 100
        assert ("all_reduce", 16, "F32", "SUM") in [call[1:] for call in kept]


def test_the_environment_asks_like_the_option(job: Callable[..., dict[str, Any]]) -> None:
    assert _calls(job(QUICK, EVENSTEP_TIMELINE="1"), 0)


PHASES = """
    import torch
    import evenstep as es
    from evenstep import ranges

    log = []
    ranges._opened = True
    ranges._start = lambda name: (log.append("<" + name), name)[1]
    ranges._end = lambda name: log.append(">" + name)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    phases = ["data", "forward", "backward", "communication", "optimizer"]
    step = [mark + phase for phase in phases for mark in "<>"]
    assert log == [*step, *step, "<data", ">data"], log
"""


def test_nvtx_ranges_follow_the_phases_of_a_step(run_ranks: Callable[..., Any]) -> None:
    """Each ends before the next begins. Around collectives the engine in C makes them (tests/comm/test_comm_ranges.c)."""
    run_ranks(PHASES, 2)


def test_nvtx_that_is_not_there_is_said_once(run_ranks: Callable[..., Any]) -> None:
    script = """
        import warnings
        import evenstep as es

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                with es.comm.open():
                    pass
        words = [str(one.message) for one in seen if "EVENSTEP_NVTX" in str(one.message)]
        assert len(words) == 1 and "/nowhere/libnvtx.so" in words[0], words
    """
    run_ranks(script, 2, env={"EVENSTEP_NVTX": "1", "EVENSTEP_NVTX_LIBRARY": "/nowhere/libnvtx.so"})


def test_without_an_agent_each_rank_writes_a_file(
    run_ranks: Callable[..., Any], program: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Under torchrun and the like: the same calls as with one, and `evenstep timeline` makes one file of all."""
    run_ranks(TRAIN, 2, env={"EVENSTEP_TIMELINE": "t.json"}, fresh=True)
    for rank in (0, 1):
        events = json.loads((tmp_path / f"t.rank-{rank}.json").read_text())
        assert {event["pid"] for event in events} == {rank}
        assert [e["args"]["count"] for e in events if e["name"] == "evenstep_lost_records"] == [0]
    words = [str(program), "timeline", "-o", "all.json", "t.rank-0.json", "t.rank-1.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "all.json").read_text())
    _check_structure(trace)
    first, second = _calls(trace, 0), _calls(trace, 1)
    assert first and {group: calls for group, calls in second.items() if group in first} == first
    assert ("all_reduce", 4000, "F32", "SUM") in [call[1:] for calls in first.values() for call in calls]
    names = {(e["pid"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {(0, "forward"), (1, "backward"), (0, "step 0")} <= names  # what es.prepare sees, too
    starts = {}  # of one host: one clock
    for event in trace["traceEvents"]:
        if event.get("cat") == "collective" and event["args"]["group"] in first and event["name"] == "barrier":
            key = event["args"]["group"], event["args"]["number"]
            starts.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(max(begin for begin, _ in both) <= min(end for _, end in both) for both in starts.values())


def test_files_of_several_hosts_are_laid_on_one_axis(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def write(rank: int, host: str, since: float, ts: float) -> str:
        told = {"host": host, "since_1970_us": since}
        events = [
            {"name": "evenstep_clock", "ph": "M", "pid": rank, "tid": 0, "args": told},
            {"name": "barrier", "ph": "X", "pid": rank, "tid": 19, "ts": ts, "dur": 1},
        ]
        (tmp_path / f"{rank}.json").write_text(json.dumps(events)[:-1] + ",\n" + '{"name": "cut o')
        return f"{rank}.json"

    files = [write(0, "a", 1000.0, 5.0), write(1, "b", 1700.5, 6.0), write(2, "a", 1003.0, 7.0)]
    done = subprocess.run([str(program), "timeline", *files], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event["ts"] for event in events if "ts" in event] == [5.0, 706.5, 7.0]
    (tmp_path / "no.json").write_text('{"a": 1}')
    for words, code in ((["no.json"], 3), ([], 2), (["nothing.json"], 3)):
        done = subprocess.run(
            [str(program), "timeline", *words], cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == code and done.stderr.count("evenstep:") == 1, done


def test_a_file_of_a_killed_rank_can_be_read(run_ranks: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    script = """
        import json, os, pathlib, signal, time
        import evenstep as es

        group = es.comm.open()
        group.barrier()
        path = pathlib.Path("t.rank-0.json")
        until = time.monotonic() + 120
        while '"barrier"' not in path.read_text() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    (rank,) = run_ranks(script, 1, env={"EVENSTEP_TIMELINE": "t"}, check=False, fresh=True)
    assert rank.returncode == -9
    events = json.loads((tmp_path / "t.rank-0.json").read_text() + "]")
    assert any(event["name"] == "barrier" for event in events)


TWO_JOBS = """
    import fcntl
    import evenstep as es

    with es.comm.open("mine") as group:
        if group.rank == 1:
            with open("t.rank-1.json") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print("locked")
        group.barrier()
"""


def test_a_file_that_another_job_writes_stays_its_own(run_ranks: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    theirs = tmp_path / "t.rank-0.json"
    theirs.write_text("theirs")
    with theirs.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = run_ranks(TWO_JOBS, 2, env={"EVENSTEP_TIMELINE": "t"}, fresh=True)
    assert theirs.read_text() == "theirs" and "another process writes t.rank-0.json now" in ranks[0].stderr
    assert "locked" in ranks[1].stdout and "another process" not in ranks[1].stderr
    assert any(event["name"] == "barrier" for event in json.loads((tmp_path / "t.rank-1.json").read_text()))
