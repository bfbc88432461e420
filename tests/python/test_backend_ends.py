"""The torch backend "evenstep" where ranks die, never come, are late or call otherwise: who waits is told, and by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from backend_session import SECONDS, Check, join, leave
from run_jobs import free_port

torch = pytest.importorskip("torch")


def start(body: Callable[..., None], ranks: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = dict(
            os.environ,
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, body.__name__],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.fixture
def check(run_ranks: Callable[..., Any]) -> Callable[[Callable[..., None], int], None]:
    """Runs a body of this file on so many ranks; all must end well."""

    def run(body: Callable[..., None], ranks: int) -> None:
        run_ranks(Path(__file__), ranks, args=(body.__name__,))

    return run


# ---- what the ranks do; run in processes of their own ----


def body_stall() -> None:
    """Who waits for long says so, without Python's help: rank 1 comes once rank 0 has said that it waits."""
    import tempfile
    import threading

    import torch.distributed as dist

    os.environ["EVENSTEP_STALL_SECONDS"] = "0.05"
    rank, size = join()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        said = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (to the end of the process)
        os.dup2(said.fileno(), 2)

        def watch() -> None:
            while b"a collective stands still: rank 0 has waited" not in os.pread(said.fileno(), 4096, 0):
                time.sleep(0.01)
            store.set("said", "yes")

        threading.Thread(target=watch, daemon=True).start()
    else:
        store.wait(["said"])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3
    if rank == 0:
        words = os.pread(said.fileno(), 4096, 0).decode()
        assert (
            "for rank 1 (process " in words
            and "all_reduce of 3 F32 elements with SUM; reached: rank 0 in call" in words
        )
    leave()


def body_death() -> None:
    import torch.distributed as dist

    import evenstep

    rank, _ = join()
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        print("ready", flush=True)
        signal.pause()
    began = time.monotonic()
    print("waiting", flush=True)
    try:
        dist.all_reduce(torch.ones(1_000_000))
    except evenstep.EvenstepError as error:
        assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == 1, error
        print(f"lost {time.monotonic() - began:.3f}", flush=True)
        os._exit(0)
    os._exit(1)


def body_death_in_ddp() -> None:
    import torch.distributed as dist  # noqa: F401

    rank, _ = join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(2, 64)).sum().backward()
    except RuntimeError as error:
        assert "rank 1" in str(error) and "EVEN_ERR_PEER_LOST" in str(error), error
        os._exit(0)
    os._exit(1)


def body_mismatch() -> None:
    import torch.distributed as dist

    import evenstep

    rank, _ = join()
    whole, part = torch.ones(8 + 4 * rank), torch.ones(4 + 2 * rank)
    mine = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
    twice = torch.ones(8, dtype=mine.dtype)
    every = [torch.ones(4), torch.ones(4)]
    calls = {
        "5 F32,4 F32": lambda g: dist.all_reduce(torch.ones(4 + rank), group=g),
        "8 F32,12 F32": lambda g: dist.reduce_scatter_tensor(part, whole, group=g),  # of a name that torch deprecates
        "bytes of F32,bytes of I32": lambda g: dist.broadcast(mine, group_src=0, group=g),
        "32 bytes of F32,32 bytes of I32": lambda g: dist.all_gather_into_tensor(twice, mine, group=g),
        "gather of 16 bytes of F32 to rank 0,to rank 1": lambda g: dist.gather(
            torch.ones(4), every, group_dst=rank, group=g
        ),
        "reduce of 4 F32,to rank 1": lambda g: dist.reduce(torch.ones(4), group_dst=rank, group=g),
        "of F32,of I32,by the other": lambda g: dist.all_to_all_single(torch.empty_like(mine), mine, group=g),
        "in all_to_all rank,of F32,of I32,by the other": lambda g: dist.all_to_all(
            [torch.empty_like(mine[:2]), torch.empty_like(mine[:2])], [mine[:2].clone(), mine[2:].clone()], group=g
        ),
        "all_to_all,by the other": lambda g: dist.all_to_all_single(
            torch.ones(4), torch.ones(4), [2, 2], [2 - rank, 2 + rank], group=g
        ),
    }
    for words, call in calls.items():
        try:
            call(dist.new_group())
        except evenstep.EvenstepError as error:
            text = str(error)
            assert error.status == "EVEN_ERR_MISMATCH" and all(word in text for word in words.split(",")), text
            lines = text.count("test_backend_ends.py:"), text.count(" in <lambda>")
            assert lines == (2, 2), text  # both sides' own
        else:
            raise AssertionError(f"no error: {words}")
    os._exit(0)


def body_interrupted() -> None:
    """Rank 0 gets a signal while it waits in a call, for longer than it takes until others are told: what its handler raises
    comes when the call has ended, and it does not run before."""
    import threading

    import torch.distributed as dist

    rank, _ = join()
    seen = []

    def stop(*_: Any) -> None:
        seen.append(tensor[0].item())
        sys.exit(5)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored before
    signal.signal(signal.SIGTERM, stop)
    for number, error in (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit):
        tensor = torch.ones(4)
        dist.barrier()
        if rank == 1:
            time.sleep(2)
            dist.all_reduce(tensor)
            continue
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        try:
            dist.all_reduce(tensor)
        except error:
            assert tensor[0] == 2
        else:
            raise AssertionError(f"nothing of {number}")
    assert seen == [2.0] * (1 - rank), seen
    os._exit(0)


def body_native() -> None:
    """An asynchronous call goes on while other code keeps the GIL, until its peer, which comes late, has got through."""
    import ctypes
    import struct

    import torch.distributed as dist

    rank, _ = join()
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor, async_op=True).wait()
    end, begin = os.pipe()
    pipe = [(os.getpid(), begin)]
    dist.broadcast_object_list(pipe, src=0)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        found = ctypes.PyDLL(None).poll(struct.pack("ihh", end, 1, 0), 1, 20_000)  # unlike CDLL's, with the GIL
        work.wait()
        assert found == 1, found
    else:
        time.sleep(1.5)
        dist.all_reduce(tensor)
        with open(f"/proc/{pipe[0][0]}/fd/{pipe[0][1]}", "wb") as told:
            told.write(b"1")
    assert tensor[0] == 4
    dist.barrier()
    os._exit(0)


def body_timeout() -> None:
    import torch.distributed as dist

    rank, _ = join()
    from datetime import timedelta

    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            dist.barrier()
        except RuntimeError as error:
            assert "Timed out" in str(error) and "0.3 s" in str(error), error
            print("timed out", flush=True)
            store.set("seen", "1")
            store.wait(["told"])  # the store lives here: not gone before the other has looked
            os._exit(0)
        os._exit(1)
    store.wait(["seen"])  # too late for the barrier, however long the other took
    store.set("told", "1")
    os._exit(0)


# ---- the tests ----


def test_one_that_never_comes_is_named(monkeypatch):
    import torch.distributed as dist

    import evenstep
    from evenstep import rendezvous

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lost = f"rank 1 .process {gone.pid}. died or came to its end before it opened the group"
    store = dist.HashStore()
    prefix = "evenstep/group/0"
    # It has said that it comes, and ended; rank 2 has not come yet.
    store.set(f"{prefix}/1", json.dumps({"place": rendezvous._place(), "wanted": "", "process": gone.pid}))
    with pytest.raises(evenstep.EvenstepError, match=lost) as caught:
        rendezvous.open_group(store, 0, 3, timeout_seconds=60)
    assert (caught.value.status, caught.value.rank) == ("EVEN_ERR_PEER_LOST", 1)
    with pytest.raises(RuntimeError, match=lost):  # and rank 0 tells the others
        rendezvous.open_group(store, 2, 3, timeout_seconds=60)
    # It was in a group with this rank, and ended.
    monkeypatch.setitem(rendezvous._processes, 5, gone.pid)
    for rank in (0, 2):
        with pytest.raises(evenstep.EvenstepError, match=lost):
            rendezvous.open_group(dist.HashStore(), rank, 3, timeout_seconds=60, members=[4, 5, 6])
    with pytest.raises(RuntimeError, match=r"[Tt]imeout|[Tt]ime"):
        rendezvous.open_group(dist.HashStore(), 0, 2, timeout_seconds=0.05)


@pytest.mark.filterwarnings("ignore:the ranks talk through Gloo")
def test_a_second_group_over_gloo_meets_nothing_of_the_first(monkeypatch):
    """Of the same name, over one store."""
    import torch.distributed as dist

    from evenstep import rendezvous

    monkeypatch.setenv("EVENSTEP_COMM_ENGINE", "gloo")
    monkeypatch.setattr(rendezvous, "_processes", {})
    store, heard = dist.HashStore(), []

    def open_as(rank: int) -> None:
        assert rendezvous.open_group(store, rank, 2, timeout_seconds=60, over_gloo=heard.append) is None

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(open_as, range(2)))
        assert store.num_keys() == 0
    assert heard[0] == heard[1] != heard[2] == heard[3] and heard[0].host_of == []


def test_ranks_of_a_second_world_are_other_processes(monkeypatch):
    import torch.distributed as dist

    import evenstep  # noqa: F401
    from evenstep import rendezvous

    monkeypatch.setattr(rendezvous, "_processes", {})
    monkeypatch.setattr(rendezvous, "_had_world", False)
    for known in (True, False):  # of the first, from before it
        rendezvous.know({5: os.getpid()})
        dist.init_process_group("evenstep", store=dist.HashStore(), rank=0, world_size=1)
        assert rendezvous.are_here([5]) == known
        rendezvous.know({5: os.getpid()})
        dist.new_group([0])
        assert rendezvous.are_here([5])
        dist.destroy_process_group()


def test_a_rank_is_one_process():
    import torch.distributed as dist

    import evenstep
    from evenstep import rendezvous

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store = dist.HashStore()
    key = "evenstep/process/0/1"
    store.set(key, f"{rendezvous._place()} {gone.pid}")
    rendezvous.claim(store, 1)  # who has ended has it no more
    rendezvous.claim(store, 1)
    rendezvous.claim(store, 0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first:  # lives until its input ends
        store.set(key, f"{rendezvous._place()} {first.pid}")
        with pytest.raises(
            evenstep.EvenstepError, match=f"rank 1 of this job is process {first.pid} already"
        ) as caught:
            rendezvous.claim(store, 1)
        assert (caught.value.status, caught.value.rank) == ("EVEN_ERR_IN_USE", 1)
        assert store.get(key).decode() == f"{rendezvous._place()} {first.pid}"  # the first is unharmed
        store.set(key, f"another host pid:[1] 0 {first.pid}")  # of which nothing is known here
        rendezvous.claim(store, 1)


def test_a_second_process_of_a_rank_is_refused_by_its_parents(monkeypatch):
    """Also where the rank has ended, or another process has its place: its own agent has not started it."""
    import evenstep
    from evenstep.lineage import look_for_the_first

    def parent(process: int) -> str:
        stat = Path(f"/proc/{process}/stat").read_text()
        return f"{process} {stat[stat.rindex(')') + 2 :].split()[19]}"

    command = "RANK=1 sh -c 'echo $$; exec sleep 1000' & wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        first = int(agent.stdout.readline())
        try:
            of_agent = parent(agent.pid)
            monkeypatch.setenv("EVENSTEP_PARENT", of_agent)
            for rank, which in ((1, f"process {first} already"), (2, "another process, which has ended")):
                with pytest.raises(evenstep.EvenstepError, match=f"rank {rank} of this job is {which}") as caught:
                    look_for_the_first(rank)
                assert (caught.value.status, caught.value.rank) == ("EVEN_ERR_IN_USE", rank)
            for other in (
                f"{agent.pid} 1",
                parent(os.getppid()),
                parent(os.getpid()),
                "",
            ):  # a number anew; its own agent's
                monkeypatch.setenv("EVENSTEP_PARENT", other)
                look_for_the_first(1)
        finally:
            os.kill(first, signal.SIGKILL)
    monkeypatch.setenv("EVENSTEP_PARENT", of_agent)  # which has ended
    look_for_the_first(1)


def test_the_agent_may_be_a_containers_first_process(monkeypatch):
    from evenstep import lineage

    monkeypatch.setattr(lineage, "process_stat", lambda process: ["S", "0" if process == 1 else "1", *["0"] * 17, "77"])
    monkeypatch.setenv("EVENSTEP_PARENT", "1 77")
    lineage.look_for_the_first(0)


def test_the_grace_of_a_stop_is_checked(monkeypatch):
    import evenstep
    from evenstep.rendezvous import open_group

    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("EVENSTEP_STOP_GRACE", text)
        with pytest.raises(evenstep.EvenstepError, match="EVENSTEP_STOP_GRACE is '" + text):
            open_group(None, 0, 1)
    for text in ("", "0.5", "inf"):
        monkeypatch.setenv("EVENSTEP_STOP_GRACE", text)
        open_group(None, 0, 1).close()


def test_a_stall_is_told(check: Check) -> None:
    check(body_stall, 2)


def test_dead_peer_is_named() -> None:
    waiting, victim = processes = start(body_death, 2)
    assert victim.stdout is not None and waiting.stdout is not None
    try:
        assert victim.stdout.readline().strip() == "ready"
        assert waiting.stdout.readline().strip() == "waiting"
        victim.send_signal(signal.SIGKILL)
    finally:
        (code, out, err), _ = finish(processes)
    assert code == 0, err
    assert out.startswith("lost")


def test_dead_peer_ends_ddp(run_ranks: Callable[..., Any]) -> None:
    survivor, killed = run_ranks(Path(__file__), 2, args=("body_death_in_ddp",), check=False)
    assert survivor.returncode == 0, survivor.stderr
    assert killed.returncode == -signal.SIGKILL


def test_mismatch_names_both_calls(check: Check) -> None:
    check(body_mismatch, 2)


def test_signals_while_a_rank_waits(check: Check) -> None:
    check(body_interrupted, 2)


@pytest.mark.skipif(
    not hasattr(torch.distributed.AllreduceOptions(), "asyncOp"),
    reason="collectives of this torch's (2.6, 2.7) go through the group's thread, which is Python",
)
def test_a_call_goes_on_beside_code_that_keeps_the_gil(check: Check) -> None:
    check(body_native, 2)


def test_timeout(check: Check) -> None:
    check(body_timeout, 2)


CHILD = """
    import os, sys, torch, torch.distributed as dist, evenstep
    dist.init_process_group("evenstep")
    dist.all_reduce(torch.ones(3))
    own = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(3), group=own)
    left = (dist.group.WORLD._beneath["cpu"], own)
    held = list(map(sys.getrefcount, left))
    child = os.fork()
    if child == 0:  # without the one more of each it would abort, or hang for a while, as chance has it
        now = list(map(sys.getrefcount, left))
        sys.exit(7 if now == [before + 1 for before in held] else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=own)
    dist.destroy_process_group()
"""


def test_a_forked_child_may_end_as_any_process(run_ranks: Callable[..., Any]) -> None:
    """Nobody takes down there what has threads in the rank alone: torch's Gloo, of which each group has one beneath, and which the
    script may have groups of its own over."""
    run_ranks(CHILD, 2, fresh=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
