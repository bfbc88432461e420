"""Losses and gradients that are not finite: seen in their step, on all ranks alike; told, left out, or the end."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_jobs import Job

import evenstep as es
from evenstep import _core
from evenstep.engine import SharedEngine
from evenstep.gradients import GradientSync
from evenstep.group import Alone
from evenstep.nonfinite import Look, all_finite
from evenstep.steps import Steps

CASES = pathlib.Path(__file__).parent / "nonfinite_cases.py"


def test_on_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(CASES, ranks=3)
    told = [dict(json.loads(line) for line in one.stdout.splitlines() if line.startswith("[")) for one in ranks]
    assert told[0] == told[1] == told[2]  # all ranks decide alike
    cases, said = told[0], ranks[0].stderr
    assert cases.pop("report") | {"kept": False} == {
        "unchanged": [], "finite": False, "steps": 5, "said": "", "kept": False
    }  # fmt: skip
    stopped = cases.pop("stop")
    assert stopped["finite"] and stopped["steps"] == 2
    assert "the loss and gradients on rank 1 are not finite: second.bias, second.weight and 2 more" in stopped["said"]
    assert "--on-nonfinite skip" in stopped["said"]
    for name in [name for name in cases if name.startswith("scaler")]:
        case = cases.pop(name)
        assert case["finite"] and case["scale"] < 2.0**126, (name, case)
    assert len(cases) == 10
    for name, case in cases.items():
        late = name == "stale"  # the gradients come one step after the loss; there are none in the first
        assert case["unchanged"] == ([0, 2, 3] if late else [2]), (name, case)
        assert case["finite"] and case["steps"] == 5 and (case["kept"] or late or name == "sparse"), (name, case)
    lines = [line for line in said.splitlines() if line.startswith("evenstep: step")]
    assert all("rank 1" in line or "finite again after" in line or "not finite" in line for line in lines), said
    assert sum("the step is left out" in line for line in lines) == 10  # once each, and none of a scaler's
    assert any("gradients on rank 1 are not finite: second.bias" in line for line in lines)  # and not the loss
    assert sum("finite again after 1 step," in line for line in lines) == 9
    assert sum("finite again after 2 steps," in line for line in lines) == 1
    assert not any("not finite" in one.stderr for one in ranks[1:])  # one says it


TRAIN = """
    import torch
    import evenstep as es
    torch.manual_seed(0)
    x = torch.ones(96, 4)
    x[40:48] = float("nan")                      # of the third batch
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    model, optimizer, loader = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch, in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if es.is_main():
        print("finite:", bool(model.weight.isfinite().all()), "steps:", es.step(), flush=True)
"""


@pytest.mark.more  # test_parameter_checks.py has a job with both
def test_a_job_leaves_the_step_out_and_keeps_it(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    words = ("-n", "2", "--name", "a", "--policy", "equal", "--on-nonfinite", "skip", script(TRAIN))
    code, text = start(*words, monitor=True).finish()
    assert code == 0 and "finite: True steps: 6" in text, text
    assert "step 2: the loss and gradients on rank 1 are not finite: bias, weight; the step is left out" in text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        rows = history.execute("SELECT rank, step, value, words FROM events WHERE event = 'nonfinite' ORDER BY rowid")
        told = rows.fetchall()
    assert [one[:3] for one in told] == [(1, 2, 1), (1, 3, 0)], told
    assert told[1][3] == "finite again after 1 step, from step 2 on"


@pytest.mark.more
def test_a_job_that_stops_keeps_what_was_before(start: Callable[..., Job], script: Callable[[str], str]) -> None:
    words = ("-n", "2", "--policy", "equal", "--on-nonfinite", "stop", "--checkpoint-every", "1", "--max-restarts", "0")
    code, text = start(*words, "--name", "a", script(TRAIN)).finish()
    assert code == 1 and "step 2: the loss and gradients on rank 1 are not finite" in text, text
    code, text = start("--name", "a", "--resume", "auto", "-n", "2", "--on-nonfinite", "skip", script(TRAIN)).finish()
    assert code == 0 and "finite: True steps: 6" in text, text


TRAINER = """
    import torch
    import evenstep as es
    torch.manual_seed(0)
    x = torch.ones(48, 4)
    x[24:28] = float("nan")                      # of the second batch, rank 1's
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    config = es.Config(on_nonfinite="skip", check_parameters=1, on_difference="stop", policy="equal")
    before = [p.clone() for p in model.parameters()]
    seen = []

    def changed(trainer):
        global before
        now = [p.clone() for p in model.parameters()]
        seen.append(any(not torch.equal(a, b) for a, b in zip(before, now)))
        before = now

    es.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b[0]).square().mean(), on_step=changed,
               config=config).fit(loader)
    checks = es.session().parameter_checks
    assert seen == [True, False, True] and model.weight.isfinite().all(), seen
    assert checks.every == 1 and checks.policy == "stop" and checks._last == 2
"""


def test_a_trainer_is_told_by_its_config(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(TRAINER)
    assert "the loss and gradients on rank 1 are not finite" in ranks[0].stderr


def test_ranks_that_were_told_otherwise_are_refused(run_ranks: Callable[..., list[Any]]) -> None:
    script = "import torch, evenstep as es\nes.prepare(torch.nn.Linear(1, 1))"
    given = {1: {"EVENSTEP_ON_NONFINITE": "skip"}}
    for one in run_ranks(script, rank_env=given, check=False):
        assert one.returncode == 1 and "rank 1 was told otherwise than rank 0 what to do" in one.stderr, one.stderr


def test_wrong_words_are_refused(run: Any, script: Callable[[str], str]) -> None:
    result = run("--on-nonfinite", "panic", script("pass"))
    assert result.returncode == 2 and "--on-nonfinite panic is none of" in result.stderr
    result = run(script("pass"), env={"EVENSTEP_ON_NONFINITE": "panic"})
    assert result.returncode == 2 and "give report, skip or stop" in result.stderr
    with pytest.raises(ValueError, match="on_nonfinite='panic'"):
        es.Config(on_nonfinite="panic")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_what_is_finite(dtype: torch.dtype) -> None:
    values = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)  # their sum is not
    assert all_finite([values, torch.zeros(0, dtype=dtype)]) and all_finite([])
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = values.clone()
        spoiled[2, 4] = bad
        assert not all_finite([values, spoiled])
        assert not all_finite([spoiled.to_sparse()])


def test_a_pass_that_is_void_leaves_nothing_to_tell() -> None:
    """A rank was lost in it, and its batches come again."""
    model = torch.nn.Linear(2, 1)
    parameters = list(model.parameters())
    size = SharedEngine.arena_bytes(parameters)
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    engine = SharedEngine(parameters, _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size))
    steps.syncs.append(GradientSync("model", model, engine, steps))
    steps.before_backward(torch.tensor(math.nan))
    model(torch.full((1, 2), math.nan)).sum().backward()
    steps.after_backward()
    assert steps.loss_ranks == [0] and {index for index, own in steps.syncs[0].nonfinite if own} == {0}  # the weight
    steps.forget_pass()
    assert steps.loss_ranks == [] and steps.syncs[0].nonfinite == []


MIXED = """
    import sys
    import torch
    import evenstep as es
    from evenstep import nonfinite

    class OnDevice(torch.Tensor):
        is_cpu = False

    stale = sys.argv[1] == "stale"
    if es.rank() == 1:  # has a made-up accelerator, the other rank a CPU
        largest = nonfinite.largest
        nonfinite.largest = lambda tensors: None if (norm := largest(tensors)) is None else norm.as_subclass(OnDevice)
        nonfinite.may_be_late = lambda parameters: True
        nonfinite.tells_by_itself = lambda engine: False
        import evenstep.gradients
        evenstep.gradients.tells_by_itself = nonfinite.tells_by_itself
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    options = {"sync": es.Stale(steps=1)} if stale else {"engine": "torch"} if sys.argv[1] == "torch" else {}
    net, made = es.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), **options)
    for number in range(6):
        loss = net(torch.ones(2, 3)).square().mean()
        if number == 2 and es.rank() == 0:  # not in the loss, which the vote tells of
            net.weight.register_hook(lambda g: g * float("nan") if number == 2 else g)
        loss.backward()
        seen = bool(es.session().steps.syncs[0].nonfinite)
        made.step()
        made.zero_grad()
        with torch.no_grad():
            [p.fill_(0.5) for p in net.parameters()]
        print("seen", number, seen, flush=True)
"""


@pytest.mark.parametrize("how", ["shared", "torch", "stale"])
def test_ranks_of_which_one_could_be_late_act_in_the_same_step(run_ranks: Callable[..., list[Any]], how: str) -> None:
    """On mixed devices: ranks that learned of it in different steps would wait for one another for ever."""
    ranks = run_ranks(MIXED, args=[how])
    told = [[line for line in one.stdout.splitlines() if line.startswith("seen")] for one in ranks]
    bad = 3 if how == "stale" else 2
    assert told[0] == told[1] == [f"seen {number} {number == bad}" for number in range(6)]
    assert f"step {bad}: gradients" in ranks[0].stderr and "are not finite: weight" in ranks[0].stderr
    if how == "shared":
        assert "gradients on rank 0 are not finite" in ranks[0].stderr  # its engine knows whose they were


def test_an_accelerators_answer_comes_a_round_later() -> None:
    class OnDevice(torch.Tensor):
        is_cpu = False  # type: ignore[assignment]

    def norm_on_device(tensors: Any) -> torch.Tensor:
        return torch.stack([t.abs().max() for t in tensors]).max().as_subclass(OnDevice)

    good, bad, look = torch.ones(2), torch.tensor([1.0, float("nan")]), Look()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstep.nonfinite.largest", norm_on_device)
        assert look.finite([bad], at_once=False)  # not known yet
        assert not look.finite([good], at_once=False)
        assert look.finite([good], at_once=False)
        assert not look.finite([bad], at_once=True)
