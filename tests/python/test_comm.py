"""`es.comm`: collectives on arrays, without torch; see comm_cases.py and comm_properties.py."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("comm_cases.py")
FRESH = {"PYTHONHASHSEED": "0"}  # such ranks start as programs: what they import is theirs


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_on_every_kind_of_array(run_ranks: Callable[..., Any], ranks: int) -> None:
    run_ranks(CASES, ranks, args=("calls",), env=FRESH)


def test_tensors_of_torch(run_ranks: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    run_ranks(CASES, 2, args=("torch_tensors",))


def test_a_killed_rank_is_named(run_ranks: Callable[..., Any]) -> None:
    waiting, victim = run_ranks(CASES, 2, args=("killed",), check=False)
    assert waiting.returncode == 0, waiting.stderr
    assert victim.returncode == -9


def test_a_rank_that_does_not_come_is_named(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 3, args=("missing",))


def test_ranks_that_do_not_fit(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("unlike",))


ENGINES = """
    import evenstep as es

    try:
        es.comm.open(timeout=600)
    except es.EvenstepError as error:
        assert error.status == "EVEN_ERR_MISMATCH", error
        assert "EVENSTEP_COMM_ENGINE differs among the ranks: rank 0 {zero}, rank 1 {one}" in str(error), error
    else:
        raise AssertionError("no error")
"""


@pytest.mark.parametrize(("zero", "one"), [("shm", "ucx"), ("ucx", "shm"), ("gloo", "ucx")])
def test_ranks_that_name_different_engines_are_told_at_once(run_ranks: Callable[..., Any], zero: str, one: str) -> None:
    """All three, long before the time limit; the last to come, too."""
    names = {0: {"EVENSTEP_COMM_ENGINE": zero}, 1: {"EVENSTEP_COMM_ENGINE": one}, 2: {"EVENSTEP_COMM_ENGINE": zero}}
    run_ranks(ENGINES.format(zero=zero, one=one), 3, rank_env=names)


def test_two_jobs_of_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    import evenstep as es
    from evenstep import comm_meeting

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(comm_meeting._address("taken/1"))
        with pytest.raises(es.EvenstepError, match="another job on this host uses the same MASTER_PORT"):
            es.comm.open("taken")


@pytest.mark.parametrize("timeout", [10.0, float("inf")])
def test_strangers_do_not_keep_ranks_from_meeting(timeout: float) -> None:
    """One says nothing, as a rank that is stopped just then; others say what no rank does."""
    from evenstep import comm_meeting

    def meet(rank: int) -> Any:
        return comm_meeting.meet(f"strange/{timeout}", rank, 2, arena_bytes=0, timeout_seconds=timeout)

    said = [b"[]", b'{"rank": null}', b'{"rank": 1, "cpus": 2}', b'{"rank": Infinity, "cpus": "1"}', b"[" * 4000]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, 0)
        strangers = [comm_meeting._connect(f"strange/{timeout}", time.monotonic() + 60) for _ in range(len(said) + 1)]
        for stranger, words in zip(strangers[1:], said):
            stranger.sendall(words)
        try:
            second = meet(1)
        finally:
            for stranger in strangers:
                stranger.close()
        first.result().close()
        second.close()


def test_rank_0_that_gives_up_while_another_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import evenstep as es
    from evenstep import comm_meeting

    ours, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(comm_meeting, "_connect", lambda name, deadline: ours)
    gone.close()
    with pytest.raises(es.EvenstepError, match="rank 0 ended before all ranks had come"):
        comm_meeting.meet("over/1", 1, 2, arena_bytes=0, timeout_seconds=10)


def test_a_part_that_cannot_be_made_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep import comm, comm_meeting

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(comm_meeting._core, name)

        class Comm:
            @staticmethod
            def create_segment(ranks: int, arena_bytes: int) -> int:
                raise comm_meeting.EvenstepError("no room in /dev/shm")

    def split(rank: int) -> str:
        whole = comm_meeting.meet("parts/1", rank, 2, arena_bytes=0, timeout_seconds=60)
        with comm.Group(whole, 0, 60.0, name="parts") as group:
            with pytest.raises(comm_meeting.EvenstepError) as told:
                group.split([1, 0])
            with pytest.raises(comm_meeting.EvenstepError, match="an arena of -1 bytes"):
                group.split([0, 1], arena_bytes=-1)
        return str(told.value)

    monkeypatch.setattr(comm, "_core", Full())
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(split, 0)
        assert split(1) == "no room in /dev/shm"
        assert "rank 1 could not make the group: no room in /dev/shm" in first.result()


@pytest.mark.parametrize("room", [-1, 1 << 60, 1.5, True])
def test_nonsense_of_an_arena_is_refused_before_ranks_meet(room: Any) -> None:
    import evenstep as es

    with pytest.raises(es.EvenstepError, match="give a whole number of bytes"):
        es.comm.open("nonsense", arena_bytes=room)


def test_whole_numbers_of_others_are_sizes_of_an_arena() -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open("whole", arena_bytes=np.int64(1 << 20)) as group:
        assert type(group._arena_bytes) is int  # json, by which ranks meet, knows no other
        group.split([0], arena_bytes=np.uint32(4096)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user as well")
def test_another_user_who_waits_in_rank_0s_place_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    import evenstep as es
    from evenstep import comm_meeting

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "8"}.items():
        monkeypatch.setenv(name, value)
    address = comm_meeting._address("bait/1")
    ready, listening = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(address)
            other.listen(1)
            os.write(listening, b"x")
            connection, _ = other.accept()
            os._exit(0 if connection.recv(1) == b"" else 1)  # nothing of the job is said to it
    assert os.read(ready, 1) == b"x"
    with pytest.raises(es.EvenstepError, match="user 65534 listens where rank 0"):
        es.comm.open("bait")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(ready)
    os.close(listening)


def test_only_the_own_place_is_in_place() -> None:
    """all_gather's input and reduce_scatter's output of rank 1, counts 1 and 3: one element behind the whole's beginning,
    never one before it."""
    import numpy as np

    from evenstep import EvenstepError
    from evenstep.comm_data import check_apart, data_of

    memory = np.zeros(8, dtype="f4")
    whole, own, before = data_of(memory[3:7]), data_of(memory[4:7]), data_of(memory[2:5])
    check_apart(own, whole, "a call", 4)
    for place in (4, 8, -1):
        with pytest.raises(EvenstepError, match="overlaps"):
            check_apart(before, whole, "a call", place)


def test_torchs_tensors_in_place_are_not_copied() -> None:
    torch = pytest.importorskip("torch")
    from evenstep.backend_tensors import apart

    memory = torch.zeros(8)
    whole, own, before = memory[3:7], memory[4:7], memory[2:5]
    assert apart(whole, [own], 4) is whole  # reduce_scatter: the output lies in the input
    assert apart(own, [whole], -4) is own  # all_gather: the input lies in the output
    assert apart(whole, [before], 4) is not whole and apart(before, [whole], -4) is not before
    assert apart(whole, [own]) is not whole and apart(whole, [memory[7:]]) is whole


def test_of_pairs_that_go_as_one_only_the_own_target_is_in_place() -> None:
    torch = pytest.importorskip("torch")
    from evenstep.backend_tensors import all_apart, apart

    memory = torch.arange(64.0)
    wholes, owns = [memory[0:4], memory[8:12]], [memory[1:2], memory[9:10]]
    for kept, source in zip(all_apart(wholes, owns, [4, 4]), wholes):
        assert kept is source
    for kept, source in zip(all_apart(owns, wholes, [-4, -4]), owns):
        assert kept is source
    for sources, targets, place in ((wholes, owns[::-1], 4), (owns, wholes[::-1], -4)):  # the place, but another's
        for kept, source in zip(all_apart(sources, targets, [place] * 2), sources):
            assert kept is not source and torch.equal(kept, source)
    draw = random.Random(5)
    copied = 0
    for _ in range(300):
        pairs = draw.randrange(1, 9)
        sources, targets = (
            [memory[at : at + draw.randrange(5)] for at in draw.choices(range(60), k=pairs)] for _ in range(2)
        )
        places = [draw.choice((-4, 0, 4)) for _ in range(pairs)]
        for i, kept in enumerate(all_apart(sources, targets, places)):
            others = targets[:i] + targets[i + 1 :]
            alone = apart(sources[i], others) is sources[i] and apart(sources[i], [targets[i]], places[i]) is sources[i]
            assert (kept is sources[i]) == alone and torch.equal(kept, sources[i]), (sources, targets, places)
            copied += not alone
    assert copied > 100


def test_without_a_launcher_a_group_has_one_rank() -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open() as group:
        assert group.size == 1
        assert group.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


def test_messages_that_have_ended_keep_no_array() -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open() as group:
        arrays = [np.ones(1 << 20), np.zeros(1 << 20)]
        held = [weakref.ref(array) for array in arrays]
        sent = group.isend(arrays[0], 0)
        group.recv(arrays[1], 0)
        sent.wait()
        assert arrays[1].all()
        del arrays, sent
        assert [array() for array in held] == [None, None]


def test_asking_for_a_message_lets_other_threads_go_on() -> None:
    import numpy as np

    import evenstep as es

    go, woken = threading.Event(), threading.Event()

    def go_on() -> None:
        go.wait()
        woken.set()

    thread = threading.Thread(target=go_on)
    usual = sys.getswitchinterval()
    with es.comm.open() as group:
        begun = group.irecv(np.zeros(1), 0)
        thread.start()
        sys.setswitchinterval(1000)  # only who lets go of the GIL lets another thread run
        try:
            go.set()
            until = time.monotonic() + 120
            while not woken.is_set() and time.monotonic() < until:
                assert not begun.done()
            assert woken.is_set()
        finally:
            sys.setswitchinterval(usual)
        group.isend(np.ones(1), 0)
        begun.wait()
    thread.join()


def test_a_message_that_begins_while_others_are_asked_is_kept() -> None:
    """As another thread may begin one."""
    import numpy as np

    import evenstep as es

    with es.comm.open() as group:
        early = group.irecv(np.zeros(1), 0, tag=1)
        sent = np.ones(1 << 20)  # it waits for its receive

        def done() -> bool:
            group._requests.remove(early)
            group.isend(sent, 0, tag=2)
            return False

        early.done = done
        group.isend(np.ones(1), 0, tag=3)
        came = np.zeros(1 << 20)
        group.recv(came, 0, tag=2, timeout=120)
        assert came.all()
        group.isend(np.ones(1), 0, tag=1)
        early.wait()


def test_ranks_of_several_hosts_meet_at_the_store_of_torch(run_ranks: Callable[..., Any]) -> None:
    """They are on one here, and say otherwise."""
    pytest.importorskip("torch")
    script = """
        import numpy as np
        import evenstep as es

        with es.comm.open() as group:
            assert group.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
    """
    run_ranks(script, 2, env={"LOCAL_WORLD_SIZE": "1"})


def test_under_evenstep_run(run: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], str]) -> None:
    name = script(
        """
        import numpy as np
        import evenstep as es

        with es.comm.open() as group:
            x = group.empty(5)
            x[:] = group.rank
            assert group.size == 2
            print("sum", group.all_reduce(x).tolist())
        """
    )
    done = run("-n", "2", name)
    assert done.returncode == 0, done.stderr
    assert "sum [1.0, 1.0, 1.0, 1.0, 1.0]" in done.stdout


def test_random_calls_are_as_a_plain_reference(run_ranks: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("hypothesis")
    run_ranks(Path(__file__).with_name("comm_properties.py"), 3, args=("200",))


WITHOUT_MEMFD = """
    import ctypes
    import os
    import struct
    import warnings

    import numpy as np

    # As a container's seccomp profile does it: memfd_create (319 on x86-64, 279 on aarch64) fails with EPERM.
    number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    kernel = ctypes.CDLL(None, use_errno=True)
    assert kernel.prctl(38, 1, 0, 0, 0) == 0 and kernel.prctl(22, 2, program, 0, 0) == 0

    import evenstep as es

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with es.comm.open() as group:
            assert (group.all_reduce(np.ones(100000)) == group.size).all()
            own = group.rank
    words = [str(each.message) for each in said if each.category is RuntimeWarning]
    assert len(words) == (own == 0) and all(" MB, is a file in /" in each and "seccomp" in each for each in words), words
"""


def test_without_memfds_ranks_share_a_file_and_say_so(run_ranks: Callable[..., Any]) -> None:
    run_ranks(WITHOUT_MEMFD, 2, env=FRESH)
