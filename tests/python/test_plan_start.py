"""EVENSTEP_USE_PLAN: a training begins with what `evenstep plan` measured."""

from __future__ import annotations

import json

import pytest

from evenstep.plan import FORMAT
from evenstep.plan_start import rows_of
from evenstep.shares import Shares

BATCH = 64


def tiled(samples: int) -> float:
    """Whole tiles of 16."""
    return 0.004 + 0.016 * -(-samples // 16)


def slow(samples: int) -> float:
    return 0.010 + 0.004 * samples


def plan_of(ranks: list[list[tuple[int, float]]]) -> dict:
    measured = [{"samples": [b for b, _ in one], "seconds": [t for _, t in one]} for one in ranks]
    return {"format": FORMAT, "batch": BATCH, "ranks": measured}


PLAN = plan_of([[(b, tiled(b)) for b in (32, 40, 48, 56)], [(b, slow(b)) for b in (8, 16, 24, 32)]])


def step_of(shares: list[int]) -> float:
    return max(tiled(shares[0]), slow(shares[1]))


def test_the_first_step_has_the_split_that_was_measured_to_be_best():
    best = min(step_of([one, BATCH - one]) for one in range(BATCH + 1))
    planned, cold = Shares("auto", 2, BATCH), Shares("auto", 2, BATCH)
    planned.learn(rows_of(PLAN, 2))
    assert step_of(planned.draw(BATCH, step=0)) <= 1.06 * best
    assert step_of(cold.draw(BATCH, step=0)) > 1.5 * best


def test_what_no_step_of_the_training_had_is_known_by_the_plan():
    """Times that are no straight line: by the steps of one split alone only a line can be known."""
    planned, cold = Shares("auto", 2, BATCH), Shares("auto", 2, BATCH)
    planned.learn(rows_of(PLAN, 2))
    split, draw = [48, 16], [0.99, 1.01, 1.0, 1.005, 0.995]
    for step in range(24):
        for shares in (planned, cold):
            timings = [(split[0], tiled(split[0]) * draw[step % 5]), (split[1], slow(split[1]) * draw[(step + 2) % 5])]
            shares.observe(timings, 0.1)
    for size in (32, 40, 48, 56):
        assert planned._balancer.predict(0, size) == pytest.approx(tiled(size), rel=0.03)
    assert cold._balancer.predict(0, 40) != pytest.approx(tiled(40), rel=0.05)


@pytest.mark.parametrize("batch", [BATCH, BATCH // 2])  # es.AdaptBatch: the checkpoint's is another by then
def test_what_a_checkpoint_has_takes_the_plans_place(batch):
    before, planned, trained = (Shares("auto", 2, size) for size in (batch, BATCH, batch))
    for _ in range(30):
        drawn = before.draw(batch)
        before.observe([(drawn[0], tiled(drawn[0])), (drawn[1], slow(drawn[1]))], 0.1)
    saved = json.loads(json.dumps((before.state(), before.caps, before.learned(), before.units)))
    planned.learn_plan(rows_of(PLAN, 2))
    assert planned.state()
    planned = planned if batch == BATCH else planned.of_batch(batch)
    assert planned.go_on(*saved) == ""
    assert (planned.state(), planned.learned()) == (saved[0], saved[2])
    # not that of steps of this run
    trained.learn_plan(rows_of(PLAN, 2))
    trained.observe([(batch // 2, tiled(batch // 2)), (batch // 2, slow(batch // 2))], 0.1)
    assert trained.go_on(*saved) == "" and trained.learned() != saved[2]


def test_each_size_of_each_rank_counts_as_a_step():
    rows = rows_of(plan_of([[(8, 0.1), (16, 0.2), (24, 0.3)], [(4, 0.5)]]), 2)
    assert rows == [[(8, 0.1), (4, 0.5)]] * 2 + [[(16, 0.2), (4, 0.5)]] * 2 + [[(24, 0.3), (4, 0.5)]] * 2


def test_ranks_that_a_run_leaves_out_by_the_plan_are_none_of_its():
    plan = plan_of([[(8, 0.1)], [(4, 0.5)], [(12, 0.2)]]) | {"predicted": {"without": {"ranks": [1]}}}
    assert rows_of(plan, 2) == [[(8, 0.1), (12, 0.2)]] * 2
    assert rows_of(plan, 3) == [[(8, 0.1), (4, 0.5), (12, 0.2)]] * 2  # started on all of them all the same
    for one, device in zip(plan["ranks"], ("cuda:0", "cuda:1", "cpu:0")):
        one["device"] = device
    assert rows_of(plan, 2, ["cuda:0", "cpu:0"]) == rows_of(plan, 2)
    with pytest.raises(ValueError, match="made for 3 ranks, and these are 2"):
        rows_of(plan, 2, ["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match="made for 3 ranks, and these are 1"):
        rows_of(plan, 1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"format": "other", "ranks": []}, "no plan of this version"),
        (plan_of([[(8, 0.1)]]), "made for 1 ranks, and these are 2"),
        (plan_of([[(8, 0.1)], []]), "no measured size"),
        ({"error": "it cannot be read (No such file or directory)"}, "cannot be read"),
        (plan_of([[(float("inf"), 0.1)], [(8, 0.1)]]), "inf in it is no finite number above 0"),
        (plan_of([[(10**400, 0.1)], [(8, 0.1)]]), "inf in it is no finite number above 0"),
        (plan_of([[(8, 0.1)], [(8, float("nan"))]]), "nan in it is no finite number above 0"),
        (plan_of([[(8, 0.1)], [(8, float("inf"))]]), "inf in it is no finite number above 0"),
        (plan_of([[(8, -0.1)], [(8, 0.1)]]), "-0.1 in it is no finite number above 0"),
        (plan_of([[(0, 0.1)], [(8, 0.1)]]), "0 in it is no finite number above 0"),
        (plan_of([[(0.5, 0.1)], [(8, 0.1)]]), "0.5 in it is no number of samples"),
        (plan_of([[(1e18, 0.1)], [(8, 0.1)]]), r"1e\+18 in it is no number of samples"),
        ({"format": FORMAT, "ranks": [{"samples": [8, 16], "seconds": [0.1]}] * 2}, "2 sizes and 1 times"),
    ],
)
def test_a_plan_that_is_none_of_this_job_is_refused(plan, said):
    with pytest.raises(ValueError, match=said):
        rows_of(plan, 2)


SCRIPT = """
import torch
import evenstep as es

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(64, 4)), batch_size=64)
model, optimizer, loader = es.prepare(model, optimizer, loader)
print(*next(iter(loader))[0].shape[:1])
"""


def test_ranks_of_a_job_begin_with_rank_0s_plan(run_ranks, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    rank_env = {1: {"EVENSTEP_USE_PLAN": "elsewhere.json"}}
    ranks = run_ranks(SCRIPT, env={"EVENSTEP_USE_PLAN": "plan.json"}, rank_env=rank_env)
    expected = Shares("auto", 2, BATCH)
    expected.learn(rows_of(PLAN, 2))
    assert [int(rank.stdout.split()[-1]) for rank in ranks] == expected.draw(BATCH, step=0)
    # one that is resumed has newer measurements
    ranks = run_ranks(SCRIPT, env={"EVENSTEP_USE_PLAN": "plan.json", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert [int(rank.stdout.split()[-1]) for rank in ranks] == [32, 32]


TWO_LOADERS = """
import torch
import evenstep as es

def loader(samples):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(samples, 4)), batch_size=64)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, first = es.prepare(model, optimizer, loader(64 * 3))
for (batch,) in first:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
before = first.shares.state()
second = es.prepare(loader(64))
assert second.shares is first.shares
print("same", len(before) > 0 and second.shares.state() == before)
"""


def test_a_further_loader_does_not_learn_the_plan_over_what_was_measured_since(run_ranks, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    for rank in run_ranks(TWO_LOADERS, env={"EVENSTEP_USE_PLAN": "plan.json"}):
        assert rank.stdout.split()[-2:] == ["same", "True"], rank.stdout


def test_all_ranks_say_why_a_plan_is_refused(run_ranks):
    for rank in run_ranks(SCRIPT, env={"EVENSTEP_USE_PLAN": "nowhere.json"}, check=False):
        assert rank.returncode != 0 and "EVENSTEP_USE_PLAN=nowhere.json: it cannot be read" in rank.stderr, rank.stderr
        assert "evenstep plan -o nowhere.json" in rank.stderr


def test_a_number_that_no_plan_has_is_told_as_such(run_ranks, tmp_path):
    text = json.dumps(PLAN).replace("[32, 40,", "[1e999, 40,")
    assert "1e999" in text
    (tmp_path / "plan.json").write_text(text)
    for rank in run_ranks(SCRIPT, env={"EVENSTEP_USE_PLAN": "plan.json"}, check=False):
        assert rank.returncode != 0 and "EVENSTEP_USE_PLAN=plan.json: inf in it is no finite" in rank.stderr, (
            rank.stderr
        )
