"""A resumed run starts from the speeds that were measured before, where its ranks are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.ones(240, 4))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=24))
    session = es.session()
    commit, cost = session.steps.commit, [0.1, 0.3, 0.3]

    def at_these_speeds():  # instead of the clock
        commit()
        return [(share, cost[rank] * share) for rank, share in enumerate(session.steps.plan.shares)]

    session.steps.commit = at_these_speeds
    if sys.argv[1:] == ["save", "caps"]:
        session.steps.memory = None  # nothing but this is known of it
        loader.shares.learn_caps([15, -1])
    for (x,) in loader:
        if es.is_main():
            print("SHARES", session.latest.shares, flush=True)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1] == "save" and es.step() == 6:
            es.checkpoint("here")
            break
"""


def shares(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith("SHARES")]


def test_a_resume_starts_from_what_was_learnt(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    learnt = shares(run_ranks(SCRIPT, args=["save"], env={"EVENSTEP_DEVICE": "cpu:0"}))
    assert learnt[0] == "SHARES [12, 12]" and learnt[-1] == "SHARES [18, 6]", learnt
    same = {"EVENSTEP_DEVICE": "cpu:0", "EVENSTEP_RESUME": str(tmp_path / "here")}
    assert shares(run_ranks(SCRIPT, args=["go on"], env=same))[0] == "SHARES [18, 6]"
    for ranks, change, words in (
        (2, {"EVENSTEP_DEVICE": "cuda:0"}, "it had 2 ranks on cpu:0, cpu:0, this job has 2 ranks on cuda:0, cuda:0"),
        (3, {}, "this job has 3 ranks on cpu:0, cpu:0, cpu:0"),
        (2, {"EVENSTEP_SPEEDS": "1,1"}, "this job has 2 ranks on cpu:0, cpu:0 of speeds 1, 1"),
    ):
        results = run_ranks(SCRIPT, ranks=ranks, args=["go on"], env={**same, **change})
        assert shares(results)[0] == f"SHARES {[24 // ranks] * ranks}"
        assert results[0].stderr.count("are not used") == 1 and words in results[0].stderr
        assert all("are not used" not in result.stderr for result in results[1:])


def test_a_resume_starts_within_what_memory_held(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    learnt = shares(run_ranks(SCRIPT, args=["save", "caps"], env={"EVENSTEP_DEVICE": "cpu:0"}))
    assert learnt[-1] == "SHARES [15, 9]", learnt
    same = {"EVENSTEP_DEVICE": "cpu:0", "EVENSTEP_RESUME": str(tmp_path / "here")}
    assert shares(run_ranks(SCRIPT, args=["go on"], env=same))[0] == "SHARES [15, 9]"
