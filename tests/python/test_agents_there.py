"""Ranks of another host go on where their agent is killed (docs/hosts.md)."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable

from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

Script = Callable[..., str]

# Rank 1, on the other host, waits in step 6 until its agent is gone, and in step 12 until it is told that the next one
# has come.
OUTLASTING = """
    import os, sys, time
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = es.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader)
    tag, rank, parent = sys.argv[1], os.environ["RANK"], os.getppid()
    with open(f"ranks-{tag}-{rank}", "a") as ranks:
        print(os.getpid(), file=ranks)
    for _ in es.epochs(3):
        for x, y in loader:
            if tag == "killed" and rank == "1" and es.step() in (6, 12):
                print("in step", es.step(), flush=True)
                while os.getppid() == parent if es.step() == 6 else not os.path.exists("on"):
                    time.sleep(0.01)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    torch.save([es.step(), [p.detach() for p in model.parameters()]], f"end-{tag}-{rank}.pt")
"""


def _children(pid: int) -> set[int]:
    return set(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_ranks_there_outlast_their_agent(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """It is killed twice while they train, once after the leader's: the same processes come to the same bits."""
    import torch

    words = ("--policy", "equal", "--log-rank", "all", script(OUTLASTING))  # else each run measures its own shares
    assert hosts.run(*words, "whole")[0] == 0
    job = hosts.start(*words, "killed")
    before: set[int] = set()
    for number, step in enumerate((6, 12), 1):
        job.wait_for(f"in step {step}\n")
        if number == 2:
            (leader,) = _children(job.process.pid)
            os.kill(leader, signal.SIGKILL)
            job.wait_for("the agent before was killed: ranks 0 and 1 train on")
        (first,) = hosts.agents()
        (agent,) = _children(first) - before
        before |= _children(agent) | {agent}
        os.kill(agent, signal.SIGKILL)
        job.wait_for("its agent was killed, and another one goes on with its 1 rank", times=number)
    (tmp_path / "on").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "is lost" not in text and "restart" not in text
    for rank in range(2):
        (steps, have), (all_steps, wanted) = (
            torch.load(tmp_path / f"end-{tag}-{rank}.pt") for tag in ("killed", "whole")
        )
        assert steps == all_steps == 18 and all(map(torch.equal, have, wanted))
        assert len((tmp_path / f"ranks-killed-{rank}").read_text().split()) == 1
