"""What the Python tests share: the program, free ports, jobs of several ranks, and a watch over leftovers."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from run_jobs import Job, Run

TREE = pathlib.Path(__file__).resolve().parents[2]
MARK = "EVENSTEP_TEST_MARK"  # inherited by every process that a test starts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    if os.environ.get("EVENSTEP_TEST_INSTALLED") == "1":
        import evenstep

        where = pathlib.Path(evenstep.__file__).resolve()
        if TREE / "python" in where.parents:
            raise pytest.UsageError(f"the tests were to run against the installed package, but {where} was imported")


def pytest_report_header() -> list[str]:
    import evenstep

    return [f"evenstep {evenstep.__version__} from {pathlib.Path(evenstep.__file__).parent}", f"program: {_program()}"]


def _program() -> pathlib.Path | None:
    named = os.environ.get("EVENSTEP_PROGRAM")
    found = named or shutil.which("evenstep", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    return pathlib.Path(found).resolve() if found else None


@pytest.fixture(scope="session")
def tree() -> pathlib.Path:
    """The root of the source tree (for examples and docs; never on sys.path)."""
    return TREE


@pytest.fixture(scope="session")
def program() -> pathlib.Path:
    """The `evenstep` program: EVENSTEP_PROGRAM, or the one on PATH."""
    path = _program()
    if path is None or not path.exists():
        pytest.fail("no evenstep program: install the wheel, or set EVENSTEP_PROGRAM=build/dev/cli/evenstep")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    return _free_port()


def _marked(mark: str) -> dict[int, str]:
    """Processes, zombies excepted, that carry the mark in their environment, with their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def _wait_gone(pids: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(pidfd)


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test: no process that it started, nor their children, outlives it by more than five seconds."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    left = _marked(mark)
    if left:
        _wait_gone(list(left), 5.0)
        left = _marked(mark)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert not left, f"processes left behind: {left}"


@dataclasses.dataclass(frozen=True)
class Rank:
    """How one rank of `run_ranks` ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_ranks(tmp_path: pathlib.Path) -> Callable[..., list[Rank]]:
    """Runs a script as several ranks with torchrun's environment, without any launcher.

    run_ranks(source_or_path, ranks=2, args=(), env={}, rank_env={1: {…}}, timeout=60, check=True) -> [Rank, …]
    A str is the script's source (dedented), a Path an existing script. Ranks run in tmp_path; when the time is up all
    are killed and the test fails with their output. check=True fails the test unless every rank ended with 0.
    """
    count = 0

    def run(
        script: str | pathlib.Path,
        ranks: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> list[Rank]:
        nonlocal count
        count += 1
        if isinstance(script, str):
            path = tmp_path / f"script_{count}.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script
        port = _free_port()
        processes = []
        outputs = []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
                **((rank_env or {}).get(rank, {})),
            }
            out = tmp_path / f"run_{count}_rank_{rank}.out"
            err = tmp_path / f"run_{count}_rank_{rank}.err"
            outputs.append((out, err))
            with out.open("wb") as out_file, err.open("wb") as err_file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(path), *args],
                        env=environment,
                        cwd=tmp_path,
                        stdin=subprocess.DEVNULL,
                        stdout=out_file,
                        stderr=err_file,
                    )
                )
        late = _end_by(processes, time.monotonic() + timeout)
        results = [
            Rank(process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"))
            for process, (out, err) in zip(processes, outputs, strict=True)
        ]
        if late or (check and any(result.returncode != 0 for result in results)):
            story = f"not ended after {timeout} s: ranks {late}\n" if late else ""
            for rank, result in enumerate(results):
                story += f"--- rank {rank}: exit {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-4000:]}\n"
            pytest.fail(story)
        return results

    return run


def _end_by(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Waits for all, kills those that are late; returns the late ones."""
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        processes[rank].kill()
        processes[rank].wait()
    return late


# ---- jobs of `evenstep run` ----


@pytest.fixture
def environment() -> dict[str, str]:
    """The tests' own, with this interpreter for the ranks and without what would change the runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("EVENSTEP_") or name.startswith("EVENSTEP_TEST")
    }
    kept.pop("OMP_NUM_THREADS", None)
    return {**kept, "EVENSTEP_PYTHON": sys.executable}


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Callable[[str], str]:
    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return name

    return write


@pytest.fixture
def run(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Run:
    """Runs `evenstep run --no-monitor …` to its end in the test's own folder."""

    def call(*words: str, timeout: float = 60, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "run", "--no-monitor", *words],
            cwd=tmp_path,
            env={**environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )

    return call


@pytest.fixture
def start(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def call(*words: str, before: Sequence[str] = ()) -> Job:
        jobs.append(Job([*before, str(program), "run", "--no-monitor", *words], tmp_path, environment))
        return jobs[-1]

    yield call
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        if job.process.stdout is not None:
            job.process.stdout.close()
