"""Jobs that a real Slurm starts (slurm_cluster.py): agents, one a host, and ranks that srun itself places."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest
import slurm_cluster
from run_jobs import wait_until
from slurm_cluster import Typed
from test_run_hosts import SAYS_ITS_PLACE

slurm, typed = slurm_cluster.slurm, slurm_cluster.typed
pytestmark = pytest.mark.more
Script = Callable[..., str]

# Trains until a file is there, which nobody makes where the job is to be told to end.
LONG = """
    import os, pathlib, socket
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.ones(4096, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    print("rank", es.rank(), "of", es.world_size(), "on", socket.gethostname(), "began at", es.step(), flush=True)
    for epoch in es.epochs(1000000):
        for x, in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if es.step() % 20 == 0:
                print("rank", es.rank(), "step", es.step(), flush=True)
            if pathlib.Path("enough").exists():
                break
        if pathlib.Path("enough").exists():
            break
"""
AUTO = ("--no-monitor", "--no-pin", "--hosts", "auto", "-n", "1", "--log-rank", "all")


@pytest.fixture
def evenstep(program: pathlib.Path) -> str:
    return str(program)


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_agents_one_a_host_train_as_one_device_does(typed: Typed, script: Script, evenstep: str, mpi: str) -> None:
    words = ("srun", f"--mpi={mpi}", "-N", "2", "--ntasks-per-node=1")
    job = typed.start(*words, evenstep, "run", *AUTO, "--name", "a", script(SAYS_ITS_PLACE))
    code, text = job.finish()
    assert code == 0, text
    for rank, host in enumerate(("n1", "n2")):
        label = rf"\[rank {rank}( on n2)?\]"
        assert re.search(rf"{label} place {rank} 0 1 2 {rank} 2 10\.80\.0\.1 eth0", text), (host, text)
        found = re.search(rf"{label} apart (\S+) after 18 steps", text)
        assert found and float(found[2]) < 1e-12, text
    assert not list(typed.folder.glob(".evenstep*"))


@pytest.mark.parametrize(("mpi", "words"), [("none", ("-N", "1")), ("none", ("-N", "2")), ("pmi2", ("-N", "2"))])
def test_ranks_that_srun_places_are_one_job(
    typed: Typed,
    script: Script,
    environment: dict[str, str],
    mpi: str,
    words: tuple[str, ...],
) -> None:
    """`srun -n 4 python script.py`, with and without PMI."""
    python = environment["EVENSTEP_PYTHON"]
    (typed.folder / "enough").touch()
    job = typed.start("srun", "-n", "4", f"--mpi={mpi}", *words, python, script(LONG))
    code, text = job.finish()
    assert code == 0, text
    hosts = {1: "n1"} if words[1] == "1" else {2: "n2", 1: "n1"}
    placed = dict(re.findall(r"rank (\d) of 4 on (n\d) began at 0", text))
    assert sorted(placed) == ["0", "1", "2", "3"] and set(placed.values()) == set(hosts.values()), text


def test_a_batch_script_is_no_rank(typed: Typed, script: Script, environment: dict[str, str]) -> None:
    """And a shell that srun starts is none either: they train alone."""
    (typed.folder / "enough").touch()
    trains = f"{environment['EVENSTEP_PYTHON']} {script(LONG)}"
    code, text = typed.batch(f"{trains} && srun -n 1 sh -c '{trains}'", "-n", "2", "-N", "2").finish()
    assert code == 0, text + typed.out()
    assert typed.out().count("rank 0 of 1 on n1 began at 0") == 2, typed.out()


# A user at a terminal types into the shell that srun starts.
AT_A_TERMINAL = """
import os, pty, sys
shell, terminal = pty.fork()
if shell == 0:
    os.execvp("srun", ["srun", "-N", "2", "-n", "2", "--pty", "bash", "--norc", "-i"])
os.write(terminal, f"source {sys.argv[1]}; exit 0\\n".encode())
try:
    while chunk := os.read(terminal, 65536):
        os.write(1, chunk)
except OSError:
    pass  # its other end is closed
sys.exit(os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]))
"""


def test_a_shell_at_a_terminal_is_no_host_and_what_srun_starts_there_is(
    typed: Typed, script: Script, evenstep: str, environment: dict[str, str]
) -> None:
    (typed.folder / "enough").touch()
    python, name = environment["EVENSTEP_PYTHON"], script(LONG)
    run = f"{evenstep} run {' '.join(AUTO)}"
    lines = (
        f"{run} {name} > here.txt 2>&1 || echo ended with $? >> here.txt",
        f"{python} {name} > alone.txt 2>&1",
        f"srun --overlap -N 2 -n 2 {run} --name a {name} > agents.txt 2>&1",
        f"srun --overlap -N 2 -n 2 {python} {name} > ranks.txt 2>&1",
    )
    typed_there = typed.folder / "typed.sh"
    typed_there.write_text("".join(f"{line} < /dev/null\n" for line in lines))
    code, text = typed.start(python, "-c", AT_A_TERMINAL, str(typed_there)).finish(300)
    assert code == 0, text
    here, alone, agents, ranks = ((typed.folder / f"{n}.txt").read_text() for n in ("here", "alone", "agents", "ranks"))
    assert "typed in a shell that srun has started (srun --pty)" in here and "ended with 2" in here, here
    assert "rank 0 of 1 on n1 began at 0" in alone, alone
    for job in (agents, ranks):
        for rank, host in enumerate(("n1", "n2")):
            assert f"rank {rank} of 2 on {host} began at 0" in job, job


def test_two_steps_in_one_allocation_are_two_jobs(typed: Typed, script: Script, evenstep: str) -> None:
    """Both begin in one folder, at once; a rank of each is on each host."""
    run = f"srun --overlap -N 2 -n 2 {evenstep} run {' '.join(AUTO)} --name"
    lines = f"{run} a {script(LONG)} > a.txt 2>&1 &\n{run} b {script(LONG)} > b.txt 2>&1 &\nwait"
    job = typed.batch(lines, "-N", "2", "--ntasks-per-node=4")  # srun would take all of them
    texts = [typed.folder / f"{name}.txt" for name in "ab"]
    wait_until(lambda: all(path.exists() and "rank 1 step 20" in path.read_text() for path in texts), 300)
    (typed.folder / "enough").touch()
    code, text = job.finish()
    assert code == 0, text + typed.out()
    for path in texts:
        for rank, host in enumerate(("n1", "n2")):
            assert f"rank {rank} of 2 on {host} began at 0" in path.read_text(), path.read_text()


def number_of(typed: Typed) -> str:
    return typed.jobs[-1].wait_for(r"Submitted batch job (\d+)")[0]


@pytest.mark.parametrize("told", ["scancel", "time"])
def test_a_notice_saves_and_a_requeue_goes_on(typed: Typed, script: Script, evenstep: str, told: str) -> None:
    """SIGUSR1 that scancel, or the nearing end of the job's time (--signal), sends to all processes of the step; the batch script
    then has the job queued again, and it goes on from where it was saved."""
    words = f"{' '.join(AUTO)} --notice 60 --name a --resume auto"
    lines = (
        f"srun --kill-on-bad-exit=0 -N 2 --ntasks-per-node=1 {evenstep} run {words} {script(LONG)}\n"
        "code=$?\necho ended with $code\n"
        "if [ $code = 75 ]; then scontrol requeue $SLURM_JOB_ID; sleep 600; fi\nexit $code"
    )
    # the grain of --signal is a minute
    limits = ("--signal=USR1@120", "-t", "3") if told == "time" else ()
    job = typed.batch(lines, "-N", "2", "--ntasks-per-node=1", "--requeue", *limits)
    number = number_of(typed)
    wait_until(lambda: "rank 1 step 20" in typed.out())
    if told == "scancel":
        typed.cluster.ask("scancel", "--signal=USR1", number)
    wait_until(lambda: "ended with 75" in typed.out(), 300)
    saved = re.findall(r"checkpoints/step-(\d+) and has ended", typed.out())
    assert len(saved) == 1 and int(saved[0]) >= 20, typed.out()
    (typed.folder / "enough").touch()
    wait_until(lambda: "ended with 0" in typed.out(), 300)
    code, text = job.finish()
    assert code == 0, text + typed.out()
    for rank, host in enumerate(("n1", "n2")):
        assert f"rank {rank} of 2 on {host} began at {int(saved[0])}" in typed.out(), typed.out()
