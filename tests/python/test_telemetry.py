"""The rings from Python: what a rank writes is what the agent reads."""

import gc
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evenstep import EvenstepError, _core


@pytest.fixture
def segment() -> Iterator[int]:
    fd = _core.telemetry_segment(2, 64)
    yield fd
    os.close(fd)


def test_records_come_back(segment: int) -> None:
    writer = _core.Telemetry(segment, 1)
    before = _core.clock_ns()
    writer.span(_core.SPAN_FORWARD, 3, 100, 20)
    writer.span(_core.SPAN_COMMUNICATION, 3, 110, 20, 4096)
    writer.step(3, 0, end_ns=130, duration_ns=40, busy_ns=30, samples=5, batch=16, loss=0.5)
    writer.event(_core.EVENT_SHARES, 3, words="11,5")
    records, lost = _core.TelemetryReader(segment).drain()
    assert lost == 0
    assert records[0] == ("span", 1, _core.SPAN_FORWARD, 3, 100, 20, 0)
    assert records[1][-1] == 4096
    assert records[2][:10] == ("step", 1, 3, 0, 130, 40, 30, 5, 16, 0.5)
    assert math.isnan(records[2][10])
    assert records[3][:4] == ("event", 1, _core.EVENT_SHARES, 3)
    assert before <= records[3][4] <= _core.clock_ns()
    assert records[3][5:] == (0, "11,5")


def test_a_long_name_keeps_its_number(segment: int) -> None:
    writer = _core.Telemetry(segment, 0)
    name = "é" * (_core.SCALAR_NAME_BYTES // 2)
    writer.scalar(name, 3, 1 / 3)
    writer.event(_core.EVENT_SHARES, 3, words=",".join(["1234"] * 100))
    (scalar, shares), lost = _core.TelemetryReader(segment).drain()
    assert (scalar[:4], scalar[5:], lost) == (("event", 0, _core.EVENT_SCALAR, 3), (1 / 3, name), 0)
    assert set(shares[6].split(",")) == {"1234", "…"}
    with pytest.raises(ValueError, match="128 bytes"):
        writer.scalar("n" * 128, 3, 1.0)


def test_a_paused_ring_stays_as_it_is(segment: int) -> None:
    writer = _core.Telemetry(segment, 0)
    writer.paused = True
    writer.span(_core.SPAN_DATA, 1, 1, 2)
    writer.paused = False
    writer.span(_core.SPAN_DATA, 2, 1, 2)
    records, lost = _core.TelemetryReader(segment).drain()
    assert ([record[3] for record in records], lost) == ([2], 0)


def test_without_a_ring_nothing_happens() -> None:
    writer = _core.Telemetry(-1, 0)
    writer.span(_core.SPAN_DATA, 0, 1, 2)
    writer.step(0, 0, 1, 1, 1, 1, 1)
    writer.event(_core.EVENT_EPOCH, 0, 1)
    writer.scalar("loss", 0, 1.0)
    writer.paused = True
    assert writer.handle is None


def test_a_ring_may_be_opened_late(segment: int) -> None:
    """As by a process that waits for the ranks before it: what it would write before goes nowhere."""
    writer = _core.Telemetry(-1, 1)
    enter = writer.enter
    writer.event(_core.EVENT_JOINING, 0)
    writer.open(segment, 1)
    writer.event(_core.EVENT_JOINED, 0)
    enter(_core.AT_COLLECTIVE)
    reader = _core.TelemetryReader(segment)
    records, _ = reader.drain()
    assert [record[2] for record in records] == [_core.EVENT_JOINED]
    assert reader.activity(1)[0] == _core.AT_COLLECTIVE
    with pytest.raises(ValueError, match="open"):
        writer.open(segment, 1)
    with pytest.raises(EvenstepError):
        _core.Telemetry(-1, 1).open(segment, 7)


def test_the_handle_keeps_the_ring_open(segment: int) -> None:
    handle = _core.Telemetry(segment, 0).handle
    gc.collect()
    assert 'capsule object "evenstep.telemetry"' in repr(handle)


def test_misuse_is_refused(segment: int) -> None:
    with pytest.raises(EvenstepError, match="rank 2 has no ring"):
        _core.Telemetry(segment, 2)
    with pytest.raises(ValueError, match="no kind of span"):
        _core.Telemetry(segment, 0).span(99, 0, 0, 0)
    with pytest.raises(ValueError, match="no kind of event"):
        _core.Telemetry(segment, 0).event(0, 0)
    with open(os.devnull) as nothing, pytest.raises(EvenstepError):
        _core.TelemetryReader(nothing.fileno())


CHILD = """
import json, sys
from evenstep.environment import read_environment
from evenstep.ring import open_ring
environment = read_environment()
ring = open_ring(environment.telemetry_fd, environment.rank)
print(json.dumps([environment.rank, ring.handle is not None]))
"""

RANK = (
    CHILD
    + """
import subprocess
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
)


def run_rank(code: str, fd: int, *arguments: str, keep: bool = True) -> tuple[list[list[object]], str]:
    """Runs code with the launcher's variables; what it printed, a JSON a line, and its errors."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", "EVENSTEP_TELEMETRY_FD": str(fd)},
        pass_fds=(fd,) if keep else (),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr


def test_a_process_that_the_rank_starts_has_no_ring(segment: int) -> None:
    printed, errors = run_rank(RANK, segment, CHILD)
    assert sorted(printed) == [[1, False], [1, True]] and errors == ""


def test_a_rank_behind_a_wrapper_goes_without_a_ring(segment: int, tmp_path: pathlib.Path) -> None:
    printed, errors = run_rank(CHILD, segment, keep=False)  # subprocess closed it
    assert printed == [[1, False]] and "the steps of this rank are not recorded" in errors
    with (tmp_path / "other").open("wb") as other:  # and another file got its number
        printed, errors = run_rank(CHILD, other.fileno())
    assert printed == [[1, False]] and "fix: let `evenstep run` start the script itself" in errors
