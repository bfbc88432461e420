"""What the Python tests share: the program, free ports, jobs of several ranks, and a watch over leftovers."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import run_jobs
from run_jobs import Job, Run, end_all, go_without

TREE = pathlib.Path(__file__).resolve().parents[2]
MARK = "EVENSTEP_TEST_MARK"  # inherited by every process that a test starts
# Programs with it end as a user's do, with all of torch taken apart (quick_start/); those of these files' tests do.
WHOLE_END = "EVENSTEP_TEST_WHOLE_END"
WHOLE_ENDS = ("test_backend_ends", "test_examples", "test_exits", "test_mpi", "test_run_endings", "test_run_hosts")
os.environ["EVENSTEP_COMM_COSTS"] = "off"  # not the user's, and no test learns from another
# torch's threads would poll for each other on cores that other tests want
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
for _signal in (signal.SIGINT, signal.SIGQUIT):  # a shell starts what is to run beside it deaf to these
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)
if "EVENSTEP_TEST_FRESH" not in os.environ:  # ranks that start as programs do not import torch's compiler
    _quick_start = str(pathlib.Path(__file__).with_name("quick_start"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_quick_start, os.environ.get("PYTHONPATH")]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "more: a further variant of a long test; left out unless EVENSTEP_TEST_MORE=1")
    if os.environ.get("EVENSTEP_TEST_INSTALLED") == "1":
        import evenstep

        where = pathlib.Path(evenstep.__file__).resolve()
        if TREE / "python" in where.parents:
            raise pytest.UsageError(f"the tests were to run against the installed package, but {where} was imported")
    place = tempfile.mkdtemp(prefix="es-")  # of what tests start: killed owners of workers leave their folders
    config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))
    os.environ["TMPDIR"] = place
    _examples_without_a_clock()


def _examples_without_a_clock() -> None:
    """Hypothesis fails an example that takes 0.2 s, or ten that are made in more than a second, which is the machine's doing; and the
    same ones are tried each time but where further variants are asked for: what a new one finds is looked for there."""
    from hypothesis import HealthCheck, settings

    same = os.environ.get("EVENSTEP_TEST_MORE") != "1"
    settings.register_profile("evenstep", deadline=None, derandomize=same, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("evenstep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the further variants of long tests, and says how many ("N deselected")."""
    if os.environ.get("EVENSTEP_TEST_MORE") != "1":
        left_out = [item for item in items if item.get_closest_marker("more")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("more")]


class _Unread(pytest.File):
    """A file of tests that several pytests share: who claims it reads it, and nobody else."""

    def collect(self) -> list[pytest.Item]:  # of the files that were asked for; pytest makes one of each in the folder
        if self not in _unread:
            _unread.append(self)
        return []


_unread: list[_Unread] = []


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: pytest.Collector) -> _Unread | None:
    return _Unread.from_parent(parent, path=module_path) if "EVENSTEP_TEST_CLAIMS" in os.environ else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Beside other pytests (scripts/python_tests.sh): who comes first to a file of tests reads and runs it.
    EVENSTEP_TEST_CLAIMS is a folder for all to mark in, empty before; `ran`: there was a test. EVENSTEP_TEST_PART=I/N: the I-th of N begins with the
    I-th part of the files, and goes round."""
    claims = os.environ.get("EVENSTEP_TEST_CLAIMS")
    if claims is None:
        return None
    session.testscollected = len(_unread)  # not "no tests": others may be quicker to all of them
    part, parts = map(int, os.environ.get("EVENSTEP_TEST_PART", "0/1").split("/"))
    first = len(_unread) * part // parts
    files = _unread[first:] + _unread[:first]
    for file, next_file in itertools.zip_longest(files, files[1:]):
        try:
            (pathlib.Path(claims) / file.path.name).touch(exist_ok=False)
        except FileExistsError:
            continue
        items = list(session.genitems(pytest.Module.from_parent(file.parent, path=file.path)))
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
        session.testscollected += len(items) - 1
        if items:
            (pathlib.Path(claims) / "ran").touch()
        # The next file, read by this pytest or not, has what is kept for the session among its parents.
        for item, next_item in itertools.zip_longest(items, items[1:], fillvalue=next_file):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


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


@pytest.fixture
def bench_module(tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a program of bench/ by its name, for one test."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(tree / "bench"))
        spec = importlib.util.spec_from_file_location(name, tree / "bench" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def program() -> pathlib.Path:
    """The `evenstep` program: EVENSTEP_PROGRAM, or the one on PATH."""
    path = _program()
    if path is None or not path.exists():
        pytest.fail("no evenstep program: install the wheel, or set EVENSTEP_PROGRAM=build/dev/cli/evenstep")
    return path


@pytest.fixture
def free_port() -> int:
    return run_jobs.free_port()


def _ticks() -> int:
    """Now, as /proc has it of when a process was started."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _of_process(name: str, what: str) -> bytes:
    with open(f"/proc/{name}/{what}", "rb", buffering=0) as file:
        return file.read()


@dataclasses.dataclass
class Watch:
    """What tells the processes of a test: a mark in the environment, or, for forked ranks (the environment of /proc is
    that of the last exec), the process groups that they lead. None of them is older than the test, which saves reading most."""

    mark: str
    groups: list[int] = dataclasses.field(default_factory=list)
    begun: int = dataclasses.field(default_factory=_ticks)

    def left(self) -> dict[int, str]:
        """Processes of the test that run, zombies excepted, with their command lines."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                facts = _of_process(name, "stat").rpartition(b")")[2].split()
                state, group = facts[0], int(facts[2])
                if state == b"Z" or int(facts[19]) < self.begun:
                    continue
                if group in self.groups or wanted in _of_process(name, "environ").split(b"\0"):
                    found[int(name)] = _of_process(name, "cmdline").replace(b"\0", b" ").decode(errors="replace")
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
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every test: no process that it started, nor their children, outlives it: they are given the time to end that a loaded machine takes."""
    watch = Watch(secrets.token_hex(8))
    monkeypatch.setenv(MARK, watch.mark)
    yield watch
    left = watch.left()
    if left:
        _wait_gone(list(left), 150.0)
        left = watch.left()
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert not left, f"processes left behind: {left}"


@pytest.fixture(autouse=True)
def whole_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem in WHOLE_ENDS:
        monkeypatch.setenv(WHOLE_END, "1")


@dataclasses.dataclass(frozen=True)
class Rank:
    """How one rank of `run_ranks` ended."""

    returncode: int
    stdout: str
    stderr: str


class _RankServer:
    """`rank_server.py`, kept for the whole session."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            environment = {name: value for name, value in os.environ.items() if name != MARK}
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(pathlib.Path(__file__).with_name("rank_server.py"))],
                env={**environment, "OMP_NUM_THREADS": "1", WHOLE_END: "1"},  # forked ranks end in its own way
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BaseException:  # a test's time limit: whoever asks next must not get this answer
            self._process.kill()
            self._process.wait()
            raise
        assert reply, f"the rank server ended with {self._process.wait()}"
        return dict(json.loads(reply))

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        return list(self._ask({"ranks": list(orders)})["pids"])

    def returncodes(self) -> list[int]:
        """Of all ranks started last; waits for those that still run."""
        return list(self._ask({"wait": True})["returncodes"])

    def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


@pytest.fixture(scope="session")
def rank_server() -> Iterator[_RankServer]:
    server = _RankServer()
    yield server
    server.end()


def _forkable(environment: Mapping[str, str]) -> bool:
    """Whether a process that is already up can take this environment on: nothing in it is read at Python's or torch's
    start alone."""
    read_at_start = ("OMP_", "MKL_", "KMP_", "PYTHON", "LD_", "MALLOC_", "TORCH", "CUDA_")
    return not any(name.startswith(read_at_start) for name in environment) and "EVENSTEP_TEST_FRESH" not in os.environ


def _run_fresh(orders: Sequence[dict[str, Any]], timeout: float) -> tuple[list[int], list[int]]:
    """Starts each rank as a program, which ends as a user's does; (return codes, ranks that were late and have been killed)."""
    processes = []
    for order in orders:
        with open(order["out"], "wb") as out, open(order["err"], "wb") as err:
            command = [sys.executable, *order["argv"]]
            processes.append(
                subprocess.Popen(
                    command,
                    env=order["env"] | {WHOLE_END: "1"},
                    cwd=order["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            )
    late = _end_by([process.pid for process in processes], timeout)
    return [process.wait() for process in processes], late


@pytest.fixture
def run_ranks(tmp_path: pathlib.Path, rank_server: _RankServer, no_process_left: Watch) -> Callable[..., list[Rank]]:
    """Runs a script as several ranks with torchrun's environment, without any launcher.

    run_ranks(source_or_path, ranks=2, args=(), env={}, rank_env={1: {…}}, timeout=300, check=True, fresh=False)
    -> [Rank, …]
    A str is the script's source (dedented), a Path an existing script. Ranks run in tmp_path; when the time is up all
    are killed and the test fails with their output. check=True fails the test unless every rank ended with 0. Ranks are
    forked from a process that has torch (rank_server.py), so that they share one order of sets of strings; fresh=True,
    or EVENSTEP_TEST_FRESH=1 for all, starts each as a program.
    """
    count = 0

    def run(
        script: str | pathlib.Path,
        ranks: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        timeout: float = 300,
        check: bool = True,
        fresh: bool = False,
    ) -> list[Rank]:
        nonlocal count
        count += 1
        if isinstance(script, str):
            path = tmp_path / f"script_{count}.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script
        port = run_jobs.free_port()
        orders = []
        given = [{**(env or {}), **((rank_env or {}).get(rank, {}))} for rank in range(ranks)]
        for rank in range(ranks):
            out, err = (tmp_path / f"run_{count}_rank_{rank}.{kind}" for kind in ("out", "err"))
            out.touch()
            err.touch()
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
                **given[rank],
            }
            orders.append(
                {
                    "argv": [str(path), *args],
                    "env": environment,
                    "cwd": str(tmp_path),
                    "out": str(out),
                    "err": str(err),
                }
            )
        if not fresh and all(map(_forkable, given)):
            pids = rank_server.start(orders)
            no_process_left.groups += pids
            late = _end_by(pids, timeout)
            returncodes = rank_server.returncodes()
        else:
            returncodes, late = _run_fresh(orders, timeout)
        results = [
            Rank(code, *(pathlib.Path(order[kind]).read_text(errors="replace") for kind in ("out", "err")))
            for code, order in zip(returncodes, orders)
        ]
        if late or (check and any(result.returncode != 0 for result in results)):
            story = f"not ended after {timeout} s: ranks {late}\n" if late else ""
            for rank, result in enumerate(results):
                story += f"--- rank {rank}: exit {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-4000:]}\n"
            pytest.fail(story)
        return results

    return run


def _end_by(pids: Sequence[int], seconds: float) -> list[int]:
    """Waits for all, kills those that are late; returns the late ones' ranks. None is reaped."""
    deadline = time.monotonic() + seconds
    late = []
    for rank, pid in enumerate(pids):
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                late.append(rank)
        finally:
            os.close(pidfd)
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
    return late


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[Callable[..., pathlib.Path]]:
    """A file system of its own, in memory: small_disk("6m", "runs") -> tmp_path / "runs". Goes without where mounting needs root."""
    places: list[pathlib.Path] = []

    def mount(size: str, name: str = "disk") -> pathlib.Path:
        place = tmp_path / name
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            go_without("namespaces", "mounting a small tmpfs needs root")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


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
    changes = {"EVENSTEP_COMM_COSTS": "off", "EVENSTEP_RESTART_PAUSE": "0"}  # no test waits
    return {**kept, "EVENSTEP_PYTHON": sys.executable, **changes}


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Callable[[str], str]:
    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return name

    return write


@pytest.fixture
def run(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Run:
    """Runs `evenstep run --no-monitor …` to its end in the test's own folder."""

    def call(*words: str, timeout: float = 300, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
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

    def call(*words: str, before: Sequence[str] = (), monitor: bool = False) -> Job:
        without = [] if monitor else ["--no-monitor"]
        jobs.append(Job([*before, str(program), "run", *without, *words], tmp_path, environment))
        return jobs[-1]

    yield call
    end_all(jobs)
