"""`evenstep run`: signals and exit codes, and that nothing of a job stays behind."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
from run_jobs import Job, Run, alive, own_cgroup


def test_the_scripts_exit_code(run: Run, script) -> None:
    name = script("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    assert run("-n", "2", name).returncode == 7
    assert run("-n", "1", name).returncode == 0


def test_ctrl_c_lets_the_ranks_end(start, script) -> None:
    name = script("""
        import time
        try:
            print("up", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
    """)
    job = start("-n", "2", "--log-rank", "all", name)
    job.wait_for("up", times=2)
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 130 and text.count("saved") == 2 and "restart" not in text


INTERRUPTED_IN_A_STEP = """
    import os, sys, time
    import torch
    import evenstep as es

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(100000, 4), torch.randn(100000, 2))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    try:
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step == 3:
                print("training", flush=True)
            if step > 3:
                time.sleep(0.01)
    except BaseException:
        if len(sys.argv) > 1 and os.environ["RANK"] == "0":
            raise OSError("the disk is full")
        raise
"""


def test_ctrl_c_in_a_training_is_told_as_such_and_no_failure(start, script, tmp_path: pathlib.Path) -> None:
    job = start("-n", "2", "--log-rank", "all", "--name", "a", script(INTERRUPTED_IN_A_STEP))
    job.wait_for("training", times=2)
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 130 and "evenstep: a was interrupted after" in text
    for word in ("failed", "Traceback", "KeyboardInterrupt", "PEER_LOST", "REVOKED"):
        assert word not in text, text
    logs = "".join((tmp_path / f"runs/a/logs/rank-{rank}.log").read_text() for rank in range(2))
    assert "Traceback" in logs


def test_what_fails_while_a_job_is_interrupted_is_shown(start, script) -> None:
    job = start("-n", "2", "--log-rank", "all", script(INTERRUPTED_IN_A_STEP), "save")
    job.wait_for("training", times=2)
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 130 and "was interrupted after" in text
    assert "OSError: the disk is full" in text, text


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
    code, text = job.finish()
    assert code == 130 and "interrupted again: killing" in text
    assert "sending SIGTERM" not in text  # as after the first alone, in 10 s


def test_ctrl_c_twice_ends_at_once_after_a_hang_up(start, script) -> None:
    name = script("""
        import signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, lambda *_: print("stubborn", flush=True))
        print("up", flush=True)
        while True:
            time.sleep(1)
    """)
    job = start("-n", "1", name)
    job.wait_for("up")
    job.process.send_signal(signal.SIGHUP)
    job.wait_for("stubborn")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("again: at once")
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 129 and "interrupted again: killing" in text


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
        print("job", os.environ["EVENSTEP_JOB"], "pids", plain.pid, far.pid, bare.pid, orphan.pid, flush=True)
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


def guardian_of(job: Job) -> int:
    """The process of the agent's own program that the agent has started, which another one of that has started itself."""
    program = pathlib.Path(f"/proc/{job.process.pid}/exe").resolve()

    def started_by(process: int) -> int:
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if parent == str(process) and (entry / "exe").resolve() == program:
                    found.append(int(entry.name))
            except OSError:
                continue
        (one,) = found
        return one

    return started_by(started_by(job.process.pid))


def test_a_guardian_that_is_killed_is_replaced_by_one_that_knows_all(start, script) -> None:
    job = start("-n", "2", "--log-rank", "all", script(LEAVES_PROCESSES), "killed")
    pids = pids_of(job)
    os.kill(guardian_of(job), signal.SIGKILL)
    job.wait_for("another one watches now")
    job.process.kill()
    code, _ = job.finish()  # returns when the last process that holds the output has ended
    assert code == -9
    assert [pid for pid in pids if alive(pid)] == []


def cgroups_of(job: str) -> list[str]:
    folder = own_cgroup("cpu")
    return [path.name for path in folder.glob(f"evenstep-{job[:12]}-rank-*")] if folder else []


@pytest.mark.parametrize("how", ["ends", "fails", "interrupted", "killed"])
def test_nothing_stays_behind(start, script, how: str, tmp_path: pathlib.Path) -> None:
    job = start("-n", "2", "--log-rank", "all", "--cpu-quota", "1:0.5", script(LEAVES_PROCESSES), how)
    pids = pids_of(job)
    name = job.wait_for(r"job (\S+) pids")[0]
    if how == "interrupted":
        job.process.send_signal(signal.SIGINT)
    if how == "killed":
        job.process.kill()
    # communicate() returns when the last process that holds the output has ended: the guardian, too
    code, _ = job.finish()
    assert code == {"ends": 0, "fails": 3, "interrupted": 130, "killed": -9}[how]
    assert [pid for pid in pids if alive(pid)] == []
    assert cgroups_of(name) == []
