"""GPUs of a real job of the program, which are watched through made-up driver libraries (tests/device)."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
import subprocess
from collections.abc import Callable

import pytest
import test_run_hosts as two_hosts
from run_jobs import compile_library

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
DEVICE = pathlib.Path(__file__).resolve().parents[1] / "device"

WAITS = """
    import contextlib, pathlib, sqlite3, time
    until = time.monotonic() + 120
    found = (0, 0)
    while min(found) == 0 and time.monotonic() < until:
        time.sleep(0.05)
        with contextlib.closing(sqlite3.connect("runs/a/run.db")) as history:
            found = tuple(history.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in (
                "gpus WHERE clock_mhz = 1755 AND utilization = 0.87", "events WHERE event = 'gpu'"))
    raise SystemExit(0 if min(found) else 1)
"""


@pytest.fixture
def libraries(tmp_path: pathlib.Path) -> dict[str, str]:
    """The variables with which a program finds the made-up libraries."""
    for source, name in (("fake_cuda.c", "libcuda.so.1"), ("fake_nvml.c", "libnvidia-ml.so.1")):
        compile_library(tmp_path / name, DEVICE / source, "-std=c11", "-DFAKE_WHOLE")
    return {"LD_LIBRARY_PATH": str(tmp_path), "EVENSTEP_FAKE_GPUS": "1"}


def test_a_jobs_gpus_are_sampled_and_an_xid_is_told(
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    libraries: dict[str, str],
    script: Callable[[str], str],
) -> None:
    (tmp_path / "nvml").touch()
    (tmp_path / "nvml.xid").write_text("48")
    added = libraries | {"EVENSTEP_FAKE_NVML_STATE": str(tmp_path / "nvml")}
    ended = subprocess.run(
        [str(program), "run", "--devices", "cuda:0", "--name", "a", script(WAITS)],
        cwd=tmp_path,
        env=environment | added,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "evenstep: GPU of rank 0 (cuda:0): Xid 48: a memory error of two bits" in ended.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        told = history.execute("SELECT rank, value, words FROM events WHERE event = 'gpu'").fetchall()
    assert told == [(0, -1, "GPU of rank 0 (cuda:0): Xid 48: a memory error of two bits")]


THREADS = """
    import os
    print("threads", len(os.listdir(f"/proc/{os.getppid()}/task")))
"""


def test_nobody_asks_how_gpus_are_where_that_is_not_wanted(
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    libraries: dict[str, str],
    script: Callable[[str], str],
) -> None:
    """The watch is a thread of the agent's, which is there before ranks are."""

    def threads(*words: str, **added: str) -> int:
        ended = subprocess.run(
            [str(program), "run", "--devices", "cuda:0", *words, script(THREADS)],
            cwd=tmp_path,
            env=environment | libraries | added,
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        )
        return int(ended.stdout.split()[-1])

    watched = threads()
    assert threads("--gpu-watch", "off") == threads(EVENSTEP_GPU_WATCH="off") == watched - 1
    assert threads("--gpu-watch", "30", EVENSTEP_GPU_WATCH="off") == watched


def test_an_xid_of_another_hosts_gpu_is_told_where_the_job_was_started(
    hosts: two_hosts.Hosts, tmp_path: pathlib.Path, libraries: dict[str, str], script: Callable[[str], str]
) -> None:
    (tmp_path / "nvml").touch()
    (tmp_path / "nvml.xid").write_text("79")
    hosts.environment = hosts.environment | libraries
    there = f"env EVENSTEP_FAKE_NVML_STATE={tmp_path / 'nvml'}"
    code, text = hosts.run("--name", "a", script(WAITS), before=there, monitor=True)
    assert code == 0, text
    words = f"GPU of rank 1 (cuda:0 on {hosts.names[1]}): Xid 79: the GPU has fallen off the bus"
    assert f"evenstep: {words}" in text, text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        told = history.execute("SELECT rank, value, words FROM events WHERE event = 'gpu'").fetchall()
    assert told == [(1, -1, words)]
