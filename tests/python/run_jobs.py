"""Jobs of `evenstep run` that are watched while they run, and what they may leave."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


_held: list[socket.socket] = []


def free_port() -> int:
    """One that nobody gets who asks the kernel for any, as ranks of a test beside this one do meanwhile, nor another pytest or agent,
    before it is bound: held by its name, as src/os/port.c does."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = 10000
    while True:
        port = lowest + secrets.randbelow(first - lowest) if first > 2 * lowest else 0
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                port = int(probe.getsockname()[1])
                name.bind(f"\0evenstep/port/{port}")
            except OSError:
                name.close()
                continue
        if len(_held) == 64:  # those of this test are among them
            _held.pop(0).close()
        _held.append(name)
        return port


def go_without(word: str, why: str) -> NoReturn:
    """Skips a test for want of something; fails it where EVENSTEP_TEST_REQUIRE has the word: then it was to be there."""
    required = os.environ.get("EVENSTEP_TEST_REQUIRE", "")
    if word in required.split(","):
        pytest.fail(f"EVENSTEP_TEST_REQUIRE is {required}, but: {why}")
    pytest.skip(why)


def compile_library(out: pathlib.Path, source: pathlib.Path, *options: str) -> None:
    """A shared library of one file, for a program to load; skips the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler for {source.name}")
    words = [compiler, "-D_GNU_SOURCE", *options, "-shared", "-fPIC", str(source), "-o", str(out)]
    subprocess.run(words, check=True)


def hear_hangups() -> None:
    """A job under nohup rightly ignores SIGHUP; these tests may run under nohup themselves."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Job:
    """A job that is watched while it runs."""

    def __init__(self, command: Sequence[str], cwd: pathlib.Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_hangups,
        )
        self.seen = b""

    def wait_for(self, pattern: str, times: int = 1, timeout: float = 300) -> list[str]:
        """Reads on until the pattern was printed so often; its first groups."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while len(found := re.findall(pattern.encode(), self.seen)) < times:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                pytest.fail(f"{pattern!r} was not printed {times} times: {self.seen.decode(errors='replace')}")
            self.seen += chunk
        return [each.decode() for each in found]

    def finish(self, timeout: float = 300) -> tuple[int, str]:
        """Waits for the end; everybody that holds the output must be gone, or this does not return."""
        rest, _ = self.process.communicate(timeout=timeout)
        self.seen += rest
        return self.process.returncode, self.seen.decode(errors="replace")


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid: int) -> set[int]:
    return set(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def supervised(job: Job) -> int:
    """The agent that the job's process has started, and starts again."""
    (agent,) = (
        process
        for process in children(job.process.pid)
        if b"guardian" not in pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    )
    return agent


def end_soon(pids: Iterable[int]) -> bool:
    """Whether all of them end: who was killed may be on its way out."""
    deadline = time.monotonic() + 300
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if alive(pid)]
        time.sleep(0.01)
    return not left


def own_cgroup(controller: str) -> pathlib.Path | None:
    """The version 1 control group of this process, where it may make children."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            folder = pathlib.Path("/sys/fs/cgroup") / controller / path.lstrip("/")
            return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    return None


def write_checkpoint(folder: pathlib.Path, tensor: bool = False) -> None:
    from evenstep import _core

    folder.parent.mkdir(parents=True, exist_ok=True)
    writer = _core.CheckpointWriter(folder, True, 0)
    if tensor:
        content = ctypes.create_string_buffer(64)
        writer.add("model.safetensors", [("w", "U8", (64,), ctypes.addressof(content), 64)])
    writer.commit('{"step": 7, "epoch": 0, "world_size": 1}')


def wait_until(true: Callable[[], object], seconds: float = 300) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)


def end_all(jobs: Sequence[Job], others: Callable[[], Sequence[int]] = list) -> None:
    """At a test's end: these jobs, and then the processes of theirs that `others` still finds."""
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        if job.process.stdout is not None:
            job.process.stdout.close()
    for process in others():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
