"""`evenstep drain HOST --to …`: the ranks of a host that is drained get places on others, where their processes wait before
the training is asked to save its state. Hosts are network namespaces of this machine."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest
from run_jobs import Job, end_soon, wait_until
from test_elastic import drain_of
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

Script = Callable[..., str]

# Leaves a file where it has come up to es.prepare; the sixth step of the first attempt waits for the test's word.
TRAINING = """
    import os, pathlib, time
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    attempt, seen = os.environ["TORCHELASTIC_RESTART_COUNT"], []

    def train(prepare, epochs):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=prepare is es.prepare)
        pathlib.Path(f"came-{es.rank()}-{attempt}").write_text(str(os.getpid()))
        model, optimizer, loader = prepare(model, optimizer, loader)
        for _ in epochs:
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if prepare is es.prepare:
                    seen.append(es.step())
                    if attempt == "0" and es.step() == 6:
                        print("at step 6", flush=True)
                        while not os.path.exists("told"):
                            time.sleep(0.01)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    print("starts", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in", attempt, flush=True)
    together = train(es.prepare, es.epochs(3))
    print("steps", seen[0], "to", seen[-1], "process", os.getpid(), "sum", together.sum().item().hex(), flush=True)
"""


def start(hosts: Hosts, script: Script, *words: str, ranks: str = "") -> Job:
    own = ("--name", "a", "--max-restarts", "0", "--log-rank", "all")
    job = hosts.start(*own, *words, script(TRAINING), ranks=ranks)
    job.wait_for("at step 6", times=4 if ranks == ":2" else 2)
    return job


def came(folder: pathlib.Path, ranks: int) -> list[int]:
    """The processes that wait for the second attempt."""
    files = [folder / f"came-{rank}-1" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def undisturbed(hosts: Hosts, script: Script) -> str:
    """What one rank alone comes to, in the same order of samples."""
    hosts.jobs.append(
        Job(
            [str(hosts.program), "run", "-n", "1", "--no-pin", "--no-monitor", "--name", "alone", script(TRAINING)],
            hosts.folder,
            hosts.environment,
        )
    )
    code, text = hosts.jobs[-1].finish()
    assert code == 0, text
    return re.findall(r"sum (\S+)", text)[0]


def near(one: str, other: str) -> bool:
    return abs(float.fromhex(one) - float.fromhex(other)) < 1e-12


def ends_as_alone(hosts: Hosts, script: Script, text: str, waiting: list[int]) -> None:
    """Each of the processes that waited has made the steps that were left, and come to what one rank comes to."""
    ended = re.findall(r"steps (\d+) to 18 process (\d+) sum (\S+)", text)
    assert [first for first, _, _ in ended] in (["7"] * len(waiting), ["8"] * len(waiting)), text
    assert sorted(int(process) for _, process, _ in ended) == sorted(waiting), text
    alone = undisturbed(hosts, script)
    assert all(near(total, alone) for _, _, total in ended), (alone, text)


def test_ranks_move_to_a_new_host_and_wait_before_the_others_end(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """The new one is played by the network of the one that is drained."""
    here, there = hosts.names
    job = start(hosts, script)
    (agent,) = hosts.agents()
    plays = f'name=$1; shift; exec 3<&0; EVENSTEP_HOST_ID=$name ip netns exec {there} "$@" <&3 3<&- & wait $!'
    pathlib.Path(hosts.folder / "shell.sh").write_text(f"#!/bin/sh\n{plays}\n")
    drain = drain_of(hosts, there, "--to", "new")
    waiting = came(tmp_path, 2)  # while the others stand in their sixth step
    job.wait_for(f"host {there} is drained: the training saves its state .* and goes on with 2 ranks")
    (tmp_path / "told").touch()
    code, text = drain.finish()
    assert code == 0, text
    assert f"of host {there} 1 of 1 rank moves: to new (1)" in text
    assert "the processes that are to go on wait in es.prepare after" in text
    assert f"host {there} is out of the job, and its agent has ended; the job goes on with 2 ranks" in text
    assert end_soon([agent])
    code, text = job.finish()
    assert code == 0 and "Traceback" not in text, text
    assert f"2 ranks on 2 hosts: {here} 1, new 1" in text, text
    for rank in (0, 1):  # what they printed while they waited is in their logs, too
        assert f"starts {rank} of 2 in 1" in (tmp_path / f"runs/a/logs/rank-{rank}.log").read_text()
    ends_as_alone(hosts, script, text, waiting)


@pytest.mark.more
def test_ranks_move_to_where_a_core_is_left(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    here, there = hosts.names
    job = start(hosts, script)
    drain = drain_of(hosts, there)
    waiting = came(tmp_path, 2)
    job.wait_for(f"host {there} is drained: ")
    (tmp_path / "told").touch()
    code, text = drain.finish()
    assert code == 0 and f"of host {there} 1 of 1 rank moves: to {here} (1)" in text, text
    code, text = job.finish()
    assert code == 0 and f"2 ranks on 1 host: {here} 2" in text, text
    ends_as_alone(hosts, script, text, waiting)


@pytest.mark.more
def test_a_host_that_cannot_be_reached_disturbs_nothing(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    _, there = hosts.names
    job = start(hosts, script)
    pathlib.Path(hosts.folder / "shell.sh").write_text("#!/bin/sh\necho No route to host >&2\nexit 255\n")
    code, text = drain_of(hosts, there, "--to", "nowhere").finish()
    assert code == 7 and "host nowhere: its agent ended before it came here: No route to host" in text, text
    job.wait_for(f"host {there} is not drained, and the job goes on as it is: host nowhere")
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0 and "the hosts change" not in text, text
    assert len(re.findall(r"steps 1 to 18", text)) == 2, text
