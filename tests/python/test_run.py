"""`evenstep run`: what a rank gets, what the user sees, how a job ends, and that nothing of it stays behind."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


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

    def wait_for(self, pattern: str, times: int = 1, timeout: float = 30) -> list[str]:
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

    def finish(self, timeout: float = 30) -> tuple[int, str]:
        """Waits for the end; everybody that holds the output must be gone, or this does not return."""
        rest, _ = self.process.communicate(timeout=timeout)
        self.seen += rest
        return self.process.returncode, self.seen.decode(errors="replace")


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


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def own_cgroup(controller: str) -> pathlib.Path | None:
    """The version 1 control group of this process, where it may make children."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            folder = pathlib.Path("/sys/fs/cgroup") / controller / path.lstrip("/")
            return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    return None


# ---- what a rank gets ----

SHOW_ENVIRONMENT = """
    import json, os, pathlib, sys
    pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


def test_environment_is_torchruns(run: Run, script, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    name = script(SHOW_ENVIRONMENT)
    result = run("-n", "2", name, "ours-")
    assert result.returncode == 0, result.stderr
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name, "theirs-"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    differ = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"}
    # theirs alone: where its error files lie, and the store that its agent serves
    absent = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"}
    for rank in "01":
        ours = json.loads((tmp_path / f"ours-{rank}").read_text())
        theirs = json.loads((tmp_path / f"theirs-{rank}").read_text())
        set_by_torchrun = {key for key, value in theirs.items() if environment.get(key) != value}
        assert "RANK" in set_by_torchrun and "TORCHELASTIC_RESTART_COUNT" in set_by_torchrun
        for key in sorted(set_by_torchrun - absent - {"OLDPWD", "PWD", "_"}):
            assert key in ours, f"torchrun sets {key}={theirs[key]}"
            if key not in differ:
                assert ours[key] == theirs[key], key
        assert int(ours["MASTER_PORT"]) > 0 and ours["MASTER_ADDR"] == "127.0.0.1"


def test_environment_of_evenstep(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script(SHOW_ENVIRONMENT)
    words = ["--name", "a", "--policy", "dynamic", "--checkpoint-every", "30s", "--keep", "7", "--cpu-quota", "1:0.5"]
    assert run("-n", "2", *words, name, "e-").returncode == 0
    first, second = (json.loads((tmp_path / f"e-{rank}").read_text()) for rank in "01")
    assert first["EVENSTEP_JOB"] == second["EVENSTEP_JOB"] and len(first["EVENSTEP_JOB"]) == 32
    assert first["EVENSTEP_RUN_DIR"] == str(tmp_path / "runs/a")
    assert first["EVENSTEP_CHECKPOINT_DIR"] == str(tmp_path / "runs/a/checkpoints")
    assert first["EVENSTEP_DEVICE"] != second["EVENSTEP_DEVICE"] or os.cpu_count() == 1
    assert first["EVENSTEP_POLICY"] == "dynamic" and first["EVENSTEP_CHECKPOINT_EVERY"] == "30s"
    assert first["EVENSTEP_CHECKPOINT_KEEP"] == "7" and "EVENSTEP_RESUME" not in first
    fast, slow = map(float, first["EVENSTEP_SPEEDS"].split(","))
    assert slow == pytest.approx(fast / 2)
    assert first["PYTHONUNBUFFERED"] == "1" and int(first["OMP_NUM_THREADS"]) >= 1


def test_omp_num_threads_of_the_user_is_kept(run: Run, script, tmp_path: pathlib.Path) -> None:
    run("-n", "1", script(SHOW_ENVIRONMENT), "e-", env={"OMP_NUM_THREADS": "3"})
    assert json.loads((tmp_path / "e-0").read_text())["OMP_NUM_THREADS"] == "3"


def test_ranks_are_pinned_unless_told_otherwise(run: Run, script) -> None:
    name = script("import os; print('cpus', len(os.sched_getaffinity(0)))")
    whole = len(os.sched_getaffinity(0))
    pinned = run("--devices", "cpu:0", name)
    assert int(re.findall(r"cpus (\d+)", pinned.stdout)[0]) <= whole
    loose = run("--devices", "cpu:0", "--no-pin", name)
    assert int(re.findall(r"cpus (\d+)", loose.stdout)[0]) == whole


def test_arguments_and_modules_reach_the_script(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script("import sys; print(__name__, sys.argv[1:])", "own_module.py")
    assert "__main__ ['--name', 'x', '-n', '3']" in run("-n", "1", name, "--name", "x", "-n", "3").stdout
    assert "__main__ ['--lr', '1']" in run("-n", "1", "-m", "own_module", "--lr", "1").stdout


def test_a_program_that_is_not_python(run: Run, tmp_path: pathlib.Path) -> None:
    tool = tmp_path / "tool.sh"
    tool.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE"\n')
    tool.chmod(0o755)
    assert "rank 1 of 2" in run("-n", "2", "--log-rank", "1", "--no-python", "./tool.sh").stdout
    refused = run("-n", "2", "./tool.sh")
    assert refused.returncode == 3 and "--no-python" in refused.stderr


@pytest.mark.slow
def test_a_torchrun_script_runs_unchanged(run: Run, script) -> None:
    name = script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print("sum", total.item(), "local", os.environ["LOCAL_RANK"])
        dist.destroy_process_group()
    """)
    result = run("-n", "2", "--log-rank", "all", name, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0") == 2


# ---- what the user sees ----


def test_output_is_prefixed_and_kept(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script(r"""
        import os, sys
        print("hello", os.environ["RANK"])
        sys.stdout.buffer.write(b"\xff\x00\n" + b"x" * 200_000 + b"\n10%\r20%\rdone\n")
        sys.stdout.flush()
        os.close(1)
        sys.stderr.write("last words, no newline")
    """)
    result = run("-n", "2", "--name", "a", "--log-rank", "all", name)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert "[rank 0] hello 0" in lines and "[rank 1] hello 1" in lines
    assert "[rank 1] done" in lines and "10%" not in result.stdout
    assert sum(line.count("x") for line in lines) == 400_000
    assert result.stderr.count("last words, no newline\n") == 2
    log = (tmp_path / "runs/a/logs/rank-1.log").read_bytes()
    assert log.startswith(b"==== attempt 0") and b"\xff\x00\n" in log and b"10%\r20%\rdone\n" in log
    assert b"x" * 200_000 in log and log.endswith(b"last words, no newline")


@pytest.mark.parametrize(("which", "shown"), [(None, [0]), ("all", [0, 1]), ("none", []), ("1", [1])])
def test_log_rank(run: Run, script, which: str | None, shown: list[int]) -> None:
    name = script("import os; print('rank', os.environ['RANK'])")
    result = run("-n", "2", *(["--log-rank", which] if which else []), name)
    assert sorted(result.stdout.splitlines()) == [f"[rank {rank}] rank {rank}" for rank in shown]


def test_json_is_all_of_standard_output(run: Run, script) -> None:
    result = run("-n", "1", "--json", "--name", "a", script("import sys; print('noise'); sys.exit(5)"))
    outcome = json.loads(result.stdout)
    assert outcome["exit_code"] == 5 == result.returncode
    assert outcome["run_folder"] == "runs/a" and outcome["restarts"] == 0 and outcome["ranks"] == 1
    assert "exited with code 5" in outcome["cause"] and "noise" in result.stderr


def test_a_name_used_again_keeps_the_old_run(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script("print('x')")
    for _ in range(3):
        assert run("-n", "1", "--name", "a", name).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "a.1", "a.2"]
    assert run("-n", "1", "--name", "a", "--resume", "auto", name).returncode == 0
    assert (tmp_path / "runs/a/logs/rank-0.log").read_text().count("==== attempt 0") == 2


def test_a_run_folder_in_use_is_refused(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    waits = script("import time; print('up'); time.sleep(600)")
    job = start("-n", "1", "--name", "a", waits)
    job.wait_for("up")
    second = run("-n", "1", "--name", "a", script("print('x')", "other.py"))
    assert second.returncode == 5 and "running" in second.stderr and "--name" in second.stderr
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 128 + signal.SIGTERM


# ---- how a job ends ----


def test_the_scripts_exit_code(run: Run, script) -> None:
    name = script("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    assert run("-n", "2", name).returncode == 7
    assert run("-n", "1", name).returncode == 0


def test_the_cause_names_rank_place_and_line(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script("""
        import os, time
        def load(path):
            return {}[path]
        if os.environ["RANK"] == "1":
            load("weights")
        time.sleep(600)
    """)
    result = run("-n", "2", "--name", "a", name)
    assert result.returncode == 1
    first = next(line for line in result.stderr.splitlines() if line.startswith("evenstep: rank"))
    assert re.match(r"evenstep: rank 1 \(cpu:\d+ on \S+, process \d+\) exited with code 1: KeyError: 'weights'", first)
    assert first.endswith("(train.py:4, in load)")
    assert "  | Traceback (most recent call last):" in result.stderr  # rank 1 is not shown, so its last lines are
    assert "not restarted" in result.stderr


def test_the_rank_that_began_it_is_named(run: Run, script) -> None:
    # rank 0 fails first by the clock, because rank 1 hung up on it while it was ending
    name = script("""
        import os, socket, sys, time
        path = sys.argv[1]
        if os.environ["RANK"] == "1":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
                server.listen()
                peer, _ = server.accept()
                try:
                    raise RuntimeError("the real fault")
                except RuntimeError:
                    import traceback
                    traceback.print_exc()
                peer.close()
            time.sleep(600)
        while True:
            try:
                client = socket.socket(socket.AF_UNIX)
                client.connect(path)
                break
            except OSError:
                client.close()
                time.sleep(0.01)
        client.recv(1)
        raise ConnectionResetError("Connection reset by peer")
    """)
    result = run("-n", "2", name, "peer.socket")
    assert result.returncode != 0
    causes = [line for line in result.stderr.splitlines() if line.startswith("evenstep: ")]
    assert "rank 1" in causes[0] and causes[1].startswith("evenstep: then rank 0")


def test_a_killed_rank_restarts_the_job(start, script, tmp_path: pathlib.Path) -> None:
    name = script("""
        import os, time
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "port", os.environ["MASTER_PORT"],
              "pid", os.getpid(), flush=True)
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.01)
    """)
    job = start("-n", "2", "--name", "a", "--log-rank", "all", name)
    pids = job.wait_for(r"attempt 0 port \d+ pid (\d+)", times=2)
    victim = int(job.wait_for(r"\[rank 1\] attempt 0 port \d+ pid (\d+)")[0])
    assert str(victim) in pids
    os.kill(victim, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert re.search(rf"rank 1 \(cpu:\d+ on \S+, process {victim}\) was killed by SIGKILL", text)
    assert "restart 1 of 3 from the beginning" in text
    ports = dict(re.findall(r"attempt (\d) port (\d+)", text))
    assert set(ports) == {"0", "1"} and ports["0"] != ports["1"]
    log = (tmp_path / "runs/a/logs/rank-0.log").read_text()
    assert log.count("==== attempt") == 2


def write_checkpoint(folder: pathlib.Path) -> None:
    from evenstep import _core

    folder.parent.mkdir(parents=True, exist_ok=True)
    _core.CheckpointWriter(folder, True, 0).commit('{"step": 7, "epoch": 0, "world_size": 1}')


@pytest.mark.parametrize("resume", [[], ["--resume", "chosen"]])
def test_a_restart_leaves_checkpoints_of_other_trainings_alone(
    run: Run, script, tmp_path: pathlib.Path, resume: list[str]
) -> None:
    write_checkpoint(tmp_path / "chosen")
    write_checkpoint(tmp_path / "kept/step-00000007")
    name = script("""
        import os, signal
        print("goes on from", os.environ.get("EVENSTEP_RESUME"), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    text = run("-n", "1", "--checkpoint-dir", "kept", *resume, name).stdout
    begun = str(tmp_path / "chosen") if resume else "None"
    assert re.findall(r"goes on from (.*)", text) == [begun, begun]


def test_a_restart_goes_on_from_the_checkpoint_of_this_job(run: Run, script, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "kept/step-00000007")
    write_checkpoint(tmp_path / "made")
    name = script("""
        import os, signal
        print("goes on from", os.environ.get("EVENSTEP_RESUME"), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.rename("made", "kept/step-00000003")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    text = run("-n", "1", "--checkpoint-dir", "kept", name).stdout
    assert re.findall(r"goes on from (.*)", text) == ["None", str(tmp_path / "kept/step-00000003")]


def test_restarts_are_counted(run: Run, script) -> None:
    name = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    result = run("-n", "1", "--max-restarts", "2", "--json", name)
    assert result.returncode == 128 + signal.SIGKILL
    assert json.loads(result.stdout)["restarts"] == 2 and "no restart is left" in result.stderr


def test_an_error_of_the_script_restarts_only_on_demand(run: Run, script) -> None:
    name = script("raise ValueError('always')")
    assert json.loads(run("-n", "1", "--json", name).stdout)["restarts"] == 0
    assert json.loads(run("-n", "1", "--json", "--max-restarts", "1", name).stdout)["restarts"] == 1


def test_ctrl_c_lets_the_ranks_end(start, script) -> None:
    name = script("""
        import time
        print("up", flush=True)
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
    """)
    job = start("-n", "2", "--log-rank", "all", name)
    job.wait_for("up", times=2)
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 130 and text.count("saved") == 2 and "restart" not in text


def test_ctrl_c_twice_ends_at_once(start, script) -> None:
    name = script("""
        import os, signal, time
        signal.signal(signal.SIGINT, lambda *_: print("stubborn", flush=True))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        while True:
            time.sleep(1)
    """)
    job = start("-n", "2", "--log-rank", "all", name)
    job.wait_for("up", times=2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("stubborn", times=2)
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish(timeout=8)  # the first alone would take 15 s
    assert code == 130 and "killing" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_are_forwarded(start, script, number: signal.Signals) -> None:
    name = script(f"""
        import signal, sys, time
        def end(*_):
            print("told", flush=True)
            sys.exit(0)
        signal.signal({int(number)}, end)
        print("up", flush=True)
        time.sleep(600)
    """)
    job = start("-n", "1", name)
    job.wait_for("up")
    job.process.send_signal(number)
    code, text = job.finish()
    assert code == 128 + number and "told" in text


def test_user_signals_are_forwarded_and_change_nothing(start, script) -> None:
    name = script("""
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
        print("up", flush=True)
        while True:
            time.sleep(1)
    """)
    job = start("-n", "1", name)
    job.wait_for("up")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("usr1")
    job.process.send_signal(signal.SIGUSR2)
    assert job.finish()[0] == 0


# ---- nothing stays behind (the fixture no_process_left watches over each test, too) ----

LEAVES_PROCESSES = """
    import os, pathlib, subprocess, sys, time
    plain = subprocess.Popen(["sleep", "600"])
    far = subprocess.Popen(["sleep", "600"], start_new_session=True)
    bare = subprocess.Popen(["env", "-i", "sleep", "600"])
    if os.fork() == 0:
        os.setsid()
        orphan = subprocess.Popen(["sleep", "600"])
        print("pids", plain.pid, far.pid, bare.pid, orphan.pid, flush=True)
        os._exit(0)
    os.wait()
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    while not all(pathlib.Path(f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    how = sys.argv[1]
    if how == "ends":
        sys.exit(0)
    if how == "fails":
        sys.exit(3)
    time.sleep(600)
"""


def pids_of(job: Job) -> list[int]:
    groups = job.wait_for(r"pids ([\d ]+)\n", times=2)
    return [int(pid) for group in groups for pid in group.split()]


def cgroups_left() -> list[str]:
    folder = own_cgroup("cpu")
    return [path.name for path in folder.glob("evenstep-*")] if folder else []


@pytest.mark.parametrize("how", ["ends", "fails", "interrupted", "killed"])
def test_nothing_stays_behind(start, script, how: str, tmp_path: pathlib.Path) -> None:
    before = set(cgroups_left())
    job = start("-n", "2", "--log-rank", "all", "--cpu-quota", "1:0.5", script(LEAVES_PROCESSES), how)
    pids = pids_of(job)
    if how == "interrupted":
        job.process.send_signal(signal.SIGINT)
    if how == "killed":
        job.process.kill()
    # communicate() returns when the last process that holds the output has ended: the guardian, too
    code, _ = job.finish()
    assert code == {"ends": 0, "fails": 3, "interrupted": 130, "killed": -9}[how]
    assert [pid for pid in pids if alive(pid)] == []
    assert set(cgroups_left()) <= before


def test_quota_slows_a_rank_down(run: Run, script) -> None:
    # CPU time, not wall time: what the kernel gave, whatever else the machine does
    name = script("""
        import os, time
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        print("share", os.environ["RANK"], time.process_time())
    """)
    result = run("--devices", "cpu:0", "--cpu-quota", "0:0.25", name)
    assert result.returncode == 0, result.stderr
    if "busy neighbours" in result.stderr:
        pytest.skip("no CPU quota is permitted here; the neighbours' effect depends on the scheduler")
    assert float(re.findall(r"share 0 ([\d.]+)", result.stdout)[0]) < 0.5


def test_out_of_memory_is_told(start, script) -> None:
    parent = own_cgroup("memory")
    group = parent / f"evenstep-test-{os.getpid()}" if parent else None
    try:
        assert group is not None
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
    except (AssertionError, OSError) as error:
        pytest.skip(f"no memory control group may be made here: {error}")
    name = script("""
        import os
        print("up", flush=True)
        if os.environ["RANK"] == "1":
            blocks = []
            while True:
                blocks.append(bytearray(os.urandom(1 << 20)))
        import time
        time.sleep(600)
    """)
    try:
        into = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        code, text = start("-n", "2", "--max-restarts", "0", name, before=into).finish(timeout=60)
    finally:
        group.rmdir()
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(.*\) was killed by the kernel's out-of-memory killer \(it held up to \d+ MiB\)", text)


# ---- the monitor, and the view in a terminal ----


def test_a_port_in_use_is_named(
    program: pathlib.Path, script, tmp_path: pathlib.Path, environment: dict[str, str]
) -> None:
    name = script("print('ran')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [str(program), "run", "-n", "1", "--port", str(port), name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 5, result.stderr
    assert str(port) in result.stderr and "  fix: " in result.stderr and "ran" not in result.stdout


def screen(data: str) -> list[str]:
    """What a terminal shows after these bytes: returns, new lines, cursor up and erase are all that may be there."""
    rows, row, column = [""], 0, 0
    for match in re.finditer(r"\x1b\[([\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+", data):
        text = match.group(0)
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif text.startswith("\x1b"):
            assert match.group(2) in "AJm", text
            if match.group(2) == "A":
                row = max(0, row - int(match.group(1)))
            elif match.group(2) == "J":
                rows[row] = rows[row][:column]
                del rows[row + 1 :]
        else:
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
            column += len(text)
    return rows


def test_the_live_view_leaves_lines_whole(
    program: pathlib.Path, script, tmp_path: pathlib.Path, environment: dict[str, str]
) -> None:
    name = script("""
        import time
        for number in range(20):
            print("line", number, "x" * 40, flush=True)
            time.sleep(0.05)
    """)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [str(program), "run", "-n", "2", "--log-rank", "all", "--name", "live", name],
        cwd=tmp_path,
        env={**environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    data = b""
    try:
        while chunk := os.read(master, 65536):
            data += chunk
    except OSError:  # how a terminal tells its end
        pass
    finally:
        os.close(master)
    assert process.wait(timeout=30) == 0
    rows = screen(data.decode())
    for rank in range(2):
        shown = [row for row in rows if row.startswith(f"[rank {rank}] ")]
        assert shown == [f"[rank {rank}] line {number} {'x' * 40}" for number in range(20)]
    assert data.count(b"\x1b[J") >= 2  # drawn and erased
    assert sum("live" in row and "ended" not in row and "http" not in row for row in rows) <= 2  # and not left over


# ---- wrong input ----


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["missing.py"], 3, ["missing.py does not exist"]),
        (["-n", "0", "train.py"], 2, ["-n 0", "auto"]),
        (["-n", "two", "train.py"], 2, ["-n two"]),
        (["--polcy", "equal", "train.py"], 2, ["did you mean --policy"]),
        (["--policy", "hybird", "train.py"], 2, ["hybird", "did you mean hybrid"]),
        (["--devices", "cuda:77", "train.py"], 4, ["cuda:77"]),
        (["--profile", "train.py", "train.py"], 3, ["train.py", "JSON"]),
        (["--profile", "none.json", "train.py"], 3, ["none.json"]),
        (["--resume", "nowhere", "train.py"], 3, ["nowhere", "ckpt ls"]),
        (["--cpu-quota", "9:0.5", "train.py"], 2, ["9:0.5", "no such rank"]),
        (["--cpu-quota", "0:1.5", "train.py"], 2, ["0:1.5"]),
        (["--log-rank", "7", "train.py"], 2, ["--log-rank 7"]),
        (["--checkpoint-every", "soon", "train.py"], 2, ["soon", "30s"]),
        (["--python", "/no/python", "train.py"], 3, ["/no/python"]),
        (["--name", "a/b", "train.py"], 2, ["a/b"]),
        ([], 2, ["no script"]),
    ],
)
def test_wrong_input_is_named_and_nothing_is_made(
    run: Run, script, tmp_path: pathlib.Path, words: list[str], code: int, told: list[str]
) -> None:
    script("print('ran')")
    result = run(*words)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("evenstep: ") and "  fix: " in result.stderr
    for text in told:
        assert text in result.stderr
    assert "ran" not in result.stdout and not (tmp_path / "runs").exists()
