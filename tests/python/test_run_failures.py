"""`evenstep run`: the cause of a failure, and restarts."""

from __future__ import annotations

import json
import os
import pathlib
import re
import select
import signal
import subprocess

import pytest
from run_jobs import Run, own_cgroup, write_checkpoint


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
        code, text = start("-n", "2", "--max-restarts", "0", name, before=into).finish(timeout=150)
    finally:
        group.rmdir()
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(.*\) was killed by the kernel's out-of-memory killer \(it held up to \d+ MiB\)", text)


# ---- ranks that end with code 0, too early ----

TRAINS = """
    import os, sys
    rank, who, how = os.environ["RANK"], sys.argv[1], sys.argv[2]
    if how == "before" and rank == who:
        sys.exit(0)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(160, 4), torch.randn(160, 1)), batch_size=16)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    print("pid", os.getpid(), flush=True)
    for number, (x, y) in enumerate(loader):
        if number == 5 and how == "break" and rank == who:
            break
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if how == "later" and rank != who:
        sys.stdin.read()  # until the test has seen the other one gone
        print("whole", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("break", "1"),
        ("before", "0"),
        pytest.param("break", "0", marks=pytest.mark.more),
        pytest.param("before", "1", marks=pytest.mark.more),
    ],
)
def test_a_rank_that_ends_too_early_is_named(run: Run, script, who: str, how: str) -> None:
    result = run("-n", "2", "--json", script(TRAINS), who, how)
    outcome = json.loads(result.stdout)
    why = "at step 5 while the others were still training" if how == "break" else "without es.prepare"
    assert result.returncode == 7 == outcome["exit_code"], result.stderr
    assert re.match(rf"rank {who} \(cpu:\d+ on \S+, process \d+\) ended with code 0 {why}", outcome["cause"])
    assert outcome["cause"] in result.stderr


@pytest.mark.slow
def test_a_rank_may_be_done_before_the_others(
    program: pathlib.Path, script, tmp_path: pathlib.Path, environment: dict[str, str]
) -> None:
    command = [str(program), "run", "-n", "2", "--no-monitor", "--log-rank", "all", script(TRAINS), "1", "later"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        text = b""
        while not (found := re.search(rb"\[rank 1\] pid (\d+)\n", text)):
            text += job.stdout.readline()
        pidfd = None
        try:
            pidfd = os.pidfd_open(int(found[1]))
            select.select([pidfd], [], [], 150)
        except ProcessLookupError:
            pass
        finally:
            if pidfd is not None:
                os.close(pidfd)
        job.stdin.close()
        text += job.stdout.read()
    assert job.returncode == 0 and b"[rank 0] whole" in text, text.decode()


@pytest.mark.more
def test_restarts_count_anew_once_there_is_a_newer_checkpoint(run: Run, script) -> None:
    """Attempts 0 to 2 come a step further each and are killed; attempts 3 and 4 are killed where they begin."""
    name = script("""
        import os, signal
        import torch
        import evenstep as es
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        model = torch.nn.Linear(2, 1)
        loader = torch.utils.data.DataLoader(torch.ones(64, 2), batch_size=2)
        model, optimizer, loader = es.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for batch in loader:
            if attempt > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch).mean().backward()
            optimizer.step()
            es.checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = run("-n", "1", "--max-restarts", "2", "--json", name)
    assert result.returncode == 128 + signal.SIGKILL, result.stderr
    assert json.loads(result.stdout)["restarts"] == 4
    assert re.findall(r"restart (\d) of 2 from \S+/step-0*(\d)", result.stderr) == [
        ("1", "1"), ("1", "2"), ("1", "3"), ("2", "3")
    ]  # fmt: skip
    assert "no restart is left (--max-restarts 2): none of them has led to a newer checkpoint" in result.stderr
