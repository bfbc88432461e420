"""CUDA tensors on backend "evenstep": our NCCL engine through the extension, over made-up libraries (no GPU here)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_streams import build_fake

from evenstep import _core

CASES = Path(__file__).with_name("device_cases.py")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_fake(tmp_path_factory.mktemp("fake"))
    if path is None:
        pytest.skip("no C compiler for the made-up NCCL")
    return path


def environment(fake: Path) -> dict[str, str]:
    return {
        "EVENSTEP_NCCL_LIBRARY": str(fake),
        "EVENSTEP_CUDA_LIBRARY": str(fake),
        "EVENSTEP_FAKE_GPUS": "4",
        "TMPDIR": str(fake.parent),
    }


@pytest.mark.parametrize(
    ("case", "ranks"), [("all", 2), ("moves", 3), ("overlaps", 2), ("fails", 2), ("limited", 2), ("differs", 2)]
)
def test_collectives(run_ranks: Callable[..., Any], fake: Path, case: str, ranks: int) -> None:
    run_ranks(CASES, ranks, args=(case,), env=environment(fake))
    assert not list(fake.parent.glob("fake-nccl-*")), "a group's file is left: a communicator was not closed"


@pytest.mark.parametrize("case", ["loses", "never_meets"])
def test_a_killed_rank_is_named(run_ranks: Callable[..., Any], fake: Path, case: str) -> None:
    ranks = run_ranks(CASES, 3, args=(case,), env=environment(fake), check=False)
    assert [rank.returncode for rank in ranks] == [0, -9, 0], [rank.stderr for rank in ranks]
    for left in fake.parent.glob("fake-nccl-*"):  # the dead could not
        left.unlink()


def test_the_timeline_has_gpu_calls(run_ranks: Callable[..., Any], fake: Path, tmp_path: Path) -> None:
    variables = {**environment(fake), "EVENSTEP_TIMELINE": str(tmp_path / "line.json")}
    run_ranks(CASES, 2, args=("recorded",), env=variables)
    for rank in range(2):
        text = (tmp_path / f"line.rank-{rank}.json").read_text().rstrip().rstrip(",").removesuffix("]")
        events = json.loads(f"{text}]")
        calls = [
            e for e in events if e["ph"] == "X" and e["name"] == "all_reduce" and e["args"].get("bytes") in (12, 20)
        ]
        assert sorted(e["args"]["bytes"] for e in calls) == [12, 20], events
        names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["tid"] == calls[0]["tid"]]
        assert names == [f"calls on cuda:{rank}"], names


def test_without_nccl() -> None:
    with pytest.raises(_core.EvenstepError, match="NCCL was not found") as caught:
        _core.DeviceComm.version("libevenstep-absent.so")
    assert caught.value.status == "EVEN_ERR_UNSUPPORTED"
    assert "EVENSTEP_NCCL_LIBRARY" in caught.value.fix
    with pytest.raises(ValueError, match="128 bytes, not 3"):
        _core.DeviceComm(b"abc", 0, 1, 0)


def test_a_communicator_that_another_thread_closes_hides_no_error() -> None:
    from datetime import timedelta
    from types import SimpleNamespace

    from evenstep.backend_device import _limit

    told: list[float] = []

    class Closing:
        closed = False  # it still is not when that is asked

        def set_call_timeout(self, seconds: float) -> None:
            told.append(seconds)
            if seconds == 0:
                raise _core.EvenstepError("the device communicator is closed")

    options = SimpleNamespace(timeout=timedelta(seconds=3))
    with pytest.raises(_core.EvenstepError, match="rank 1 was lost"), _limit(Closing(), options):
        raise _core.EvenstepError("rank 1 was lost")
    assert told == [3, 0]


def test_alone(fake: Path) -> None:
    """One rank through the extension, shrinking and growing refused as they should be, closed and forgotten."""
    script = """
        import array, gc
        from evenstep import _core
        comm = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0, timeout_seconds=20)
        data = array.array("f", [1, 2, 3])
        comm.all_reduce(data.buffer_info()[0], data.buffer_info()[0], 3, _core.DTYPE_F32, _core.OP_SUM, 0.5, 0)
        comm.poll()
        for wrong in (lambda: comm.shrink([0]), lambda: comm.grow(1), lambda: comm.broadcast(0, 4, 0, 0)):
            try:
                wrong()
            except _core.EvenstepError as error:
                assert error.status == "EVEN_ERR_ARGUMENT", error
            else:
                raise AssertionError
        comm.close()
        comm.close()
        assert comm.closed and list(data) == [0.5, 1.0, 1.5], list(data)
        try:
            comm.barrier(0)
        except _core.EvenstepError as error:
            assert error.status == "EVEN_ERR_STATE", error
        forgotten = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0)
        del forgotten
    """
    run_alone(fake, script)


def test_another_thread_s_group_of_calls_does_not_keep_a_close(fake: Path) -> None:
    """It ends with an error, and the communicator with it; one that is never ended goes with its thread."""
    script = """
        import threading
        import time
        from evenstep import _core

        def said(call):
            try:
                call()
            except _core.EvenstepError as error:
                return error.status

        def open_group(comm):
            comm.group_begin()
            begun.set()
            closed.wait()
            statuses.extend([said(lambda: comm.barrier(0)), said(comm.group_end), said(comm.group_end)])

        begun, closed, statuses = threading.Event(), threading.Event(), []
        comm = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0)
        thread = threading.Thread(target=open_group, args=(comm,))
        thread.start()
        begun.wait()
        comm.close()
        closed.set()
        thread.join()
        assert statuses == ["EVEN_ERR_STATE", "EVEN_ERR_REVOKED", "EVEN_ERR_STATE"], statuses
        own = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0)
        own.group_begin()
        own.close()
        left = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0)
        numbers = []

        def begin():
            left.group_begin()
            numbers.append(threading.get_ident())

        def close():
            if threading.get_ident() in numbers and not left.closed:
                statuses.extend([said(left.group_end), said(left.close)])

        for target in (begin, *[close] * 100):  # one of these has its number: the first, most often
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert statuses[3:] == ["EVEN_ERR_STATE"] * 2 * left.closed, statuses
        forgotten = _core.DeviceComm(_core.DeviceComm.make_id(), 0, 1, 0)
        thread = threading.Thread(target=forgotten.group_begin)
        thread.start()
        thread.join()
        del thread, left, begin, close, forgotten
        while any(FOLDER.glob("fake-nccl-*")):  # until these threads' ends have come, of which Python does not tell
            time.sleep(0.01)
    """.replace("FOLDER", f"__import__('pathlib').Path({str(fake.parent)!r})")
    run_alone(fake, script)


def run_alone(fake: Path, script: str) -> None:
    import os
    import textwrap

    words = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(words, check=True, env={**os.environ, **environment(fake)}, timeout=150)
