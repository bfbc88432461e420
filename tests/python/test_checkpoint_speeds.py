"""A resumed run starts from the speeds that were measured before, where its ranks are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.measured_place import matched, place_of, same_place, speeds_of, take_speeds
from evenstep.shares import Shares

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
        (2, {"EVENSTEP_SPEEDS": "1,1"}, "this job has 2 ranks on cpu:0, cpu:0 of speeds 1, 1"),
    ):
        results = run_ranks(SCRIPT, ranks=ranks, args=["go on"], env={**same, **change})
        assert shares(results)[0] == f"SHARES {[24 // ranks] * ranks}"
        assert results[0].stderr.count("are not used") == 1 and words in results[0].stderr
        assert all("are not used" not in result.stderr for result in results[1:])
    results = run_ranks(SCRIPT, ranks=3, args=["go on"], env=same)
    fast, slow, unknown = eval(shares(results)[0].removeprefix("SHARES "))
    assert fast > unknown > slow, shares(results)[0]
    assert results[0].stderr.count("those of 2 of this job's 3 ranks are used: the others count as their mean") == 1


def place(hosts: str, priors: list[float] | None = None) -> Any:
    """A letter a rank: its host; digits: devices of it."""
    names = hosts.split()
    return SimpleNamespace(
        environment=SimpleNamespace(speeds=priors),
        devices=[f"cpu:{name[1]}" for name in names],
        hosts=[name[0] for name in names],
        rank=0,
        planning=False,
    )


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("a0 a1 b0", "a0 a1", [0, 1]),  # a host was drained, or lost
        ("a0 a1 b0", "b0", [2]),
        ("a0 b0", "a0 b0 c0", [0, 1, None]),  # one has joined
        ("b0 c0", "a0 b0 c0", [None, 0, 1]),
        ("a0 b0", "a0 c0", [0, None]),  # another in its place
        ("a0 a1", "b0 b1 b2", [None, None, None]),
        ("a0 a0", "a0 a0 a0", [0, 1, None]),
        ("a1 a0", "a0 a2", [1, None]),
    ],
)
def test_ranks_are_known_by_host_and_device(before: str, now: str, expected: list[int | None]) -> None:
    assert matched(place_of(place(before)), place_of(place(now))) == expected


def test_priors_that_changed_make_a_rank_another_one() -> None:
    before = place_of(place("a0 a1 b0", [1.0, 0.5, 0.25]))
    assert matched(before, place_of(place("a0 a1", [2.0, 1.0]))) == [0, 1]
    assert matched(before, place_of(place("a0 a1", [2.0, 0.5]))) == [None, None]
    assert matched(before, place_of(place("a0 a1"))) == [None, None]


def test_hosts_that_all_have_other_names_are_those_of_before() -> None:
    """Containers that were started again. Not where some have kept theirs."""
    before = place_of(place("a0 b0"))
    assert same_place(before, place_of(place("c0 d0"))) and same_place(before, before)
    assert not same_place(before, place_of(place("a0 d0"))) and not same_place(before, place_of(place("b0 a0")))
    del before["hosts"]  # a checkpoint of an earlier version
    assert same_place(before, place_of(place("a0 d0")))
    assert matched(before, place_of(place("a0"))) == [None]


@pytest.mark.parametrize(
    ("before", "now", "slowest_first"),
    [
        ("a0 a1 b0", "b0 a0", [0, 1]),  # a1 was drained
        ("c0 b0 a0", "b0 a0", [0, 1]),
        ("a0 a1", "a0 a1 a2", [1, 2, 0]),  # a2 is taken for as fast as the mean of the others
        ("a0 b0", "c0 a0 b0", [2, 0, 1]),
    ],
)
def test_shares_after_hosts_changed(before: str, now: str, slowest_first: list[int]) -> None:
    cost = {"a0": 0.001, "a1": 0.004, "b0": 0.002, "c0": 0.004}  # seconds a sample
    names = before.split()
    measured = Shares("dynamic", len(names), 42)
    for _ in range(24):
        drawn = measured.draw(42)
        measured.observe([(share, cost[name] * share) for share, name in zip(drawn, names)], 0.0)
    shares = Shares("dynamic", len(slowest_first), 42)
    take_speeds(place(now), shares, speeds_of(place(before), measured))
    found = shares.draw(42)
    assert sorted(range(len(found)), key=found.__getitem__) == slowest_first and len(set(found)) == len(found), found


def test_what_was_learned_of_other_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch has sixteen, whatever its size, and no block of 8 samples takes what one of 4 did."""
    pytest.importorskip("torch")
    from evenstep.exact_blocks import BlockShares

    before, here = BlockShares("dynamic", 2, 64, None, None, 4), place("a0 a1")
    for _ in range(40):
        drawn = before.draw(64)
        before.observe([(share, cost * share) for share, cost in zip(drawn, (0.001, 0.003))], 0.0)
    saved = json.loads(json.dumps(speeds_of(here, before)))
    older = {name: value for name, value in saved.items() if name != "units"}
    why = "saved with a global batch of 64 in blocks of 4, and this one has a global batch of 128 in blocks of 8\n"
    for batch, block, state, said in (
        (64, 4, saved, ""),
        (128, 8, saved, why),
        (128, 8, older, ""),
        (64, 4, older, ""),
    ):
        shares, alike = (BlockShares("dynamic", 2, batch, None, None, block) for _ in range(2))
        take_speeds(here, shares, state)
        told = capsys.readouterr().err
        assert told.endswith(said) and bool(told) == bool(said), told
        alike.learn(saved["timings"])
        kept = block == 4 and state is saved
        assert shares.learned() == (saved["learned"] if kept else alike.learned())
        assert alike.learned() != saved["learned"]


def test_a_resume_starts_within_what_memory_held(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    learnt = shares(run_ranks(SCRIPT, args=["save", "caps"], env={"EVENSTEP_DEVICE": "cpu:0"}))
    assert learnt[-1] == "SHARES [15, 9]", learnt
    same = {"EVENSTEP_DEVICE": "cpu:0", "EVENSTEP_RESUME": str(tmp_path / "here")}
    assert shares(run_ranks(SCRIPT, args=["go on"], env=same))[0] == "SHARES [15, 9]"
