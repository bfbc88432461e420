"""`evenstep run`: what a rank gets, what the user sees, and the run folder."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import termios

import pytest
from run_jobs import Run
from script_parts import TRAINING

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
        timeout=150,
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


def test_the_place_for_checkpoints_is_the_options_else_the_variables(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script(SHOW_ENVIRONMENT)

    def place(*words: str, **env: str) -> str | None:
        result = run("-n", "1", *words, name, "e-", env=env)
        assert result.returncode == 0, result.stderr
        told: str | None = json.loads((tmp_path / "e-0").read_text()).get("EVENSTEP_CHECKPOINT_TO")
        return told

    assert place(EVENSTEP_CHECKPOINT_TO="file:///a") == "file:///a"
    assert place("--checkpoint-to", "file:///b", EVENSTEP_CHECKPOINT_TO="file:///a") == "file:///b"
    assert place("--checkpoint-to", "", EVENSTEP_CHECKPOINT_TO="file:///a") is None
    # what a rank of another job starts does not write among that job's
    assert place(EVENSTEP_CHECKPOINT_TO="file:///a", EVENSTEP_JOB="another's") is None


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
    result = run("-n", "2", "--log-rank", "all", name, timeout=150)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0") == 2


@pytest.mark.slow
def test_a_job_has_all_of_torch(run: Run, script, environment: dict[str, str]) -> None:
    """As a user's, not as the tests' (quick_start/): with the compiler that torch's optimizers import."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    whole = os.pathsep.join(folder for folder in folders if pathlib.Path(folder).name != "quick_start")
    name = script("""
        import sys, torch, evenstep as es
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        print("compiler", "torch._dynamo" in sys.modules, "ends with", *(p.tolist() for p in model.parameters()))
    """)
    result = run("-n", "2", "--log-rank", "all", name, env={"PYTHONPATH": whole})
    assert result.returncode == 0, result.stderr
    ends = re.findall(r"compiler True ends with (.*)", result.stdout)
    assert len(ends) == 2 and ends[0] == ends[1], result.stdout


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


def locks_are_told(folder: pathlib.Path) -> bool:
    """Whether /proc/locks shows a lock there by the numbers that stat has: not on btrfs, some of overlayfs."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = os.fstat(held)
        numbers = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
        locks = pathlib.Path("/proc/locks")
        return locks.exists() and f" {os.getpid()} {numbers} " in locks.read_text()
    finally:
        os.close(held)


# Stands at the half until it is told to go on.
STANDS = """
import pathlib, time


def epochs():
    yield 0
    print("halfway", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    yield from (1, 2)


train_and_compare(epochs())
"""


def test_two_jobs_with_one_run_folder(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    words = ("-n", "2", "--name", "a", "--checkpoint-every", "3", "--keep", "9", "--log-rank", "all")
    job = start(*words, script(TRAINING + STANDS), monitor=True)
    job.wait_for("halfway", times=2)
    other = script("raise SystemExit('it ran')", "other.py")
    for further in ((), ("--resume", "auto")):
        second = run("-n", "1", "--name", "a", *further, other)
        assert second.returncode == 5 and "it ran" not in second.stderr + second.stdout
        said = r"run folder runs/a belongs to a job that is running"
        said += r" on host \S+: process \d+ \(.* --name a " if locks_are_told(tmp_path) else ""
        assert re.search(said, second.stderr), second.stderr
        assert "fix: choose another --name" in second.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    (tmp_path / "go").touch()
    code, text = job.finish()
    assert code == 0, text
    found = re.findall(r"\[rank (\d)\] apart (\S+) after 18 steps", text)
    assert {rank for rank, _ in found} == {"0", "1"} and all(float(apart) < 1e-12 for _, apart in found), text
    kept = sorted(path.name for path in (tmp_path / "runs/a/checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (3, 6, 9, 12, 15, 18)]
    with sqlite3.connect(tmp_path / "runs/a/run.db") as history:
        counted = history.execute("SELECT rank, COUNT(DISTINCT step) FROM steps GROUP BY rank").fetchall()
    assert dict(counted) == {0: 18, 1: 18}


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
            timeout=150,
        )
    assert result.returncode == 5, result.stderr
    assert str(port) in result.stderr and "  fix: " in result.stderr and "ran" not in result.stdout
    assert not (tmp_path / "runs").exists()


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
    assert process.wait(timeout=150) == 0
    rows = screen(data.decode())
    for rank in range(2):
        shown = [row for row in rows if row.startswith(f"[rank {rank}] ")]
        assert shown == [f"[rank {rank}] line {number} {'x' * 40}" for number in range(20)]
    assert data.count(b"\x1b[J") >= 2  # drawn and erased
    assert sum("live" in row and "ended" not in row and "http" not in row for row in rows) <= 2  # and not left over
