"""Ranks that exchange less often (LocalSGD, DiLoCo) or later (Stale): as plain loops that do what the mode says."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, use
from torch import nn

import evenstep as es
from evenstep import _core
from evenstep.checkpoint_models import parameter_names
from evenstep.engine import Report
from evenstep.exchange_state import capture_exchange, put_inner_state, restore_exchange
from evenstep.generation_passes import Passes
from evenstep.group import Alone
from evenstep.inner_states import own_state, put_own_state
from evenstep.local_training import LocalTraining
from evenstep.stale import StaleRounds
from evenstep.steps import Steps

SCRIPT = pathlib.Path(__file__).parent / "mode_cases.py"
sessions = importlib.import_module("evenstep.session")  # es.session, the function, hides the module of that name


@pytest.fixture(autouse=True)
def own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what tests of other files have prepared in this process."""
    monkeypatch.setattr(sessions, "_session", None)


def test_on_two_ranks_with_changing_shares(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    lines = run_ranks(SCRIPT, env={"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "due")})[0].stdout.splitlines()
    cases = dict(json.loads(line) for line in lines if line.startswith("["))
    assert cases.pop("due") == {"steps": [6, 9, 12]}
    assert "accumulate under es.no_sync" in cases.pop("twice")["words"]
    back = {name: cases.pop(name) for name in list(cases) if name.startswith("back")}
    assert len(back) == 3 and all(case == {"same": True, "alike_at_checkpoint": True} for case in back.values()), back
    assert len(cases) == 8
    for name, case in cases.items():
        assert case["difference"] <= 1e-12 and case["moved"] > 0.01 and case["alike"], (name, case)
        assert case["apart_before"] is (not name.startswith("Stale")), name
    told = [case["told"] for name, case in cases.items() if name.startswith("Stale")]
    assert told == [[f"gradients {late} late: as many bytes"] for late in ("1 step", "3 steps", "2 steps")], told
    assert all("fewer bytes" in case["told"][0] for name, case in cases.items() if not name.startswith("Stale")), cases


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: es.LocalSGD(every=0), "at least 1"),
        (lambda: es.DiLoCo(every=2.5), "at least 1"),
        (lambda: es.DiLoCo(outer_lr=0), "outer_lr=0"),
        (lambda: es.DiLoCo(outer_momentum=1), "outer_momentum=1"),
        (lambda: es.Stale(steps=9), "from 1 to 8"),
    ],
)
def test_modes_that_make_no_sense(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": es.LocalSGD(), "compression": "bf16"}, "the parameters themselves would be rounded"),
        ({"sync": es.DiLoCo(), "compression": "topk"}, "only at every step"),
        ({"sync": es.Stale(steps=2), "compression": "onebit"}, "the very next exchange"),
        (
            {"sync": es.Stale(), "static_graph": True},
            "static_graph=True, sync=.*where all ranks exchange them at every step",
        ),
        ({"sync": es.LocalSGD(), "reduction": "adasum"}, "gradients, which do not travel here"),
    ],
)
def test_combinations_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}\n  fix: "):
        es.prepare(nn.Linear(1, 1), **options)


def test_late_gradients_and_a_scaler_are_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"with a GradScaler: .*\n  fix: train in bf16"):
        es.prepare(nn.Linear(1, 1), scaler, sync=es.Stale())
    es.prepare(nn.Linear(1, 1), torch.amp.GradScaler("cpu", enabled=False), sync=es.Stale())  # one that scales nothing


def test_a_mode_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"give es.LocalSGD\(every=8\)"):
        es.prepare(nn.Linear(1, 1), sync="local")
    assert es.prepare(model := nn.Linear(1, 1), sync=es.LocalSGD()) is model  # outside a job


class Going:
    """A session that goes on from a checkpoint written without its modes."""

    rank, world_size = 0, 1

    def __init__(self, local: Any, stale: Any) -> None:
        self.name, self.local, self.stale, self.engine, self.parameters = "model", local, stale, None, []
        self.engines: list[Any] = []
        self.steps, self.syncs = self, [self]


def test_a_checkpoint_of_another_mode_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    parameter = nn.Parameter(torch.ones(2))
    local = LocalTraining(es.DiLoCo(), None, [parameter], steps)  # type: ignore[arg-type]
    restore_exchange(Going(local, None), {"modes": {"model": {"mode": "LocalSGD", "momentum": {}}}})
    assert "no outer momentum for 'model': that of DiLoCo every 32 steps begins at zero" in capsys.readouterr().err
    restore_exchange(Going(None, StaleRounds([])), {"modes": {"model": {"mode": "Stale", "results": [{}]}}})
    assert "no late gradients for 'model': its first steps change nothing" in capsys.readouterr().err
    restore_exchange(Going(LocalTraining(es.LocalSGD(), None, [parameter], steps), None), {})  # type: ignore[arg-type]
    assert not capsys.readouterr().err


class Gathering:
    """A group whose ranks all have what this one has; as pieces of a gathered row come, it notes their bytes."""

    ranks = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pieces: list[int] = []

    def exchange(self, record: bytes) -> list[bytes]:
        return [record] * self.ranks

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        assert [values.numel()] * self.ranks == counts
        self.pieces.append(values.numel())
        return torch.cat([values] * self.ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_states_of_all_ranks_come_to_the_one_that_writes(
    monkeypatch: pytest.MonkeyPatch, rank: int, capsys: Any
) -> None:
    monkeypatch.setattr("evenstep.exchange_state._AT_ONCE", 16)
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(()))]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight) * 3
    optimizer.step()
    local: Any = LocalTraining(es.LocalSGD(), None, weights, Steps(Alone(), _core.Telemetry(-1, 0)))  # type: ignore[arg-type]
    sync = SimpleNamespace(local=local, stale=None, engine=None, name="m", has_any=lambda ids: True)
    model = nn.Module()
    model.a, model.b = weights
    session: Any = SimpleNamespace(world_size=2, rank=rank, optimizers={"o": optimizer}, group=Gathering(rank))
    session.models = {"m": model}
    names = parameter_names(session.models)
    session.steps = SimpleNamespace(syncs=[sync])
    saved = capture_exchange(session)["optimizers"]["o"]
    assert max(session.group.pieces[-4:]) <= 16
    mine = own_state(optimizer, names)
    assert sorted(mine) == [
        f"{name}/{key}" for name in sorted(names.values()) for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    if rank > 0:
        assert saved == {"ranks": [{}, {}]}
        return
    assert [sorted(one) for one in saved["ranks"]] == [sorted(mine)] * 2
    assert all(torch.equal(one[name], mine[name]) for one in saved["ranks"] for name in mine)

    other = torch.optim.Adam(weights[::-1])  # as where groups were made from a set
    for weight in weights:
        other.state[weight] = dict(optimizer.state[weight])
    saved["ranks"][0] = {
        f"{names[id(weights[0])]}/exp_avg": torch.full((3, 2), 5.0)
    }  # of a rank that has not trained the second one
    put_inner_state(session, "o", other, saved)
    assert own_state(other, names).keys() == {f"{names[id(weights[0])]}/exp_avg"} and torch.equal(
        other.state[weights[0]]["exp_avg"], torch.full((3, 2), 5.0)
    )
    put_own_state(other, names, mine)
    assert (
        all(torch.equal(value, mine[name]) for name, value in own_state(other, names).items())
        and len(own_state(other, names)) == 6
    )
    saved["ranks"].append({})
    put_inner_state(session, "o", other, saved)
    assert len(own_state(other, names)) == 6
    assert "3 ranks had states of 'o' of their own: 2 go on with rank 0's" in capsys.readouterr().err


class OneRank:
    """An engine whose sum is what this rank gives."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.views = [torch.zeros_like(p) for p in parameters]
        self.rounds = 0

    def begin(self, weight: float, step: int) -> None: ...

    def ready(self, index: int, value: torch.Tensor) -> None:
        self.views[index].copy_(value)

    def finish(self) -> tuple[list[bool], Report]:
        self.rounds += 1
        return [True] * len(self.views), Report(0, 0, 0, 0)


class OneModel:
    """A model under es.DiLoCo in one process; `round` trains until the next synchronisation and moves by `move` a step."""

    def __init__(self, **mode: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.weight = self.model.weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        steps = Steps(Alone(), _core.Telemetry(-1, 0))
        self.local = LocalTraining(es.DiLoCo(every=2, **mode), OneRank([self.weight]), [self.weight], steps)  # type: ignore[arg-type]

    def set(self, value: float) -> None:
        self.weight.data.fill_(value)

    def step(self, move: float, backward: bool = True) -> None:
        if backward:
            self.local.saw(1.0)
        self.weight.data.add_(move)
        self.local.after_step(self.optimizer)


def test_weights_that_are_loaded_between_two_rounds_are_where_the_next_begins() -> None:
    one = OneModel(outer_lr=0.5, outer_momentum=0.0)
    one.set(0.0)
    one.step(1.0)
    one.step(1.0)
    assert one.weight.item() == 1.0  # half the way
    one.set(10.0)
    one.step(2.0)
    one.step(0.0)
    assert one.weight.item() == 11.0
    one.step(2.0, backward=False)  # what no backward has come before is no load: other ranks may have moved otherwise
    one.step(0.0)
    assert one.weight.item() == 12.0


def test_parameters_that_an_optimizer_gets_later_become_one_as_well() -> None:
    first, later = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    steps, engine = Steps(Alone(), _core.Telemetry(-1, 0)), OneRank([first, later])
    local = LocalTraining(es.DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.0), engine, [first, later], steps)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([first], lr=1.0)
    for number in range(4):
        if number == 1:
            later.data.fill_(4.0)  # loaded before the optimizer has it: no movement
            optimizer.add_param_group({"params": [later]})
        local.saw(1.0)
        first.data.add_(1.0)
        later.data.add_(float(number > 0))
        local.after_step(optimizer)
    assert first.item() == 2.0  # half of each way: 1, then 1
    assert later.item() == 5.5  # from 4 half of 1, then 1


def test_weights_alone_loaded_within_a_round(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    one = OneModel(outer_lr=0.5, outer_momentum=0.0)
    stale = StaleRounds([OneRank([one.weight])])  # type: ignore[list-item]
    session = use(monkeypatch, OneProcess(model=one.model, optimizer=one.optimizer))
    one.set(10.0)
    ck.checkpoint(tmp_path / "best")
    session.syncs = [*Going(one.local, None).syncs, *Going(None, stale).syncs]
    one.set(0.0)
    one.step(1.0)
    assert stale.turn({0: torch.ones(1, 1)}, 1.0, 0)[0] == {}
    ck.load_checkpoint(tmp_path / "best", optimizers=False, schedulers=False, loaders=False, random=False)
    assert one.local.whole
    one.step(2.0)
    one.step(0.0)
    assert one.weight.item() == 11.0
    assert stale.turn({0: torch.ones(1, 1)}, 1.0, 1)[0] == {}, "a gradient of the weights that are gone"


class Weighing(OneRank):
    """The sum of what one rank of several gives."""

    def begin(self, weight: float, step: int) -> None:
        self.weight = weight

    def ready(self, index: int, value: torch.Tensor) -> None:
        self.views[index].copy_(self.weight * value)


def test_late_gradients_are_made_again_by_those_that_are_left() -> None:
    def engines() -> list[Any]:
        return [Weighing([torch.zeros(1)]) for _ in range(2)]

    def turn(stale: StaleRounds, gradient: float, weight: float) -> float | None:
        due = stale.turn({0: torch.tensor([gradient])}, weight, 0)[0]
        return due[0].item() if due else None

    passes = Passes()
    stale = StaleRounds(engines(), passes)
    for gradient in (1.0, 2.0, 3.0):
        turn(stale, gradient, 0.25)
        passes._commits()
        stale.stands()
    assert stale.weights() == {1: 0.25, 2: 0.25}  # the first has been used
    assert turn(stale, 9.0, 0.25) == 0.5  # a void turn
    assert "the gradients of rank 1 that were late are lost" in stale.lost_with([1])
    stale.go_on(engines(), {1: 0.25, 2: 0.25}, 1)  # the others are gone
    assert [turn(stale, 4.0, 1.0), turn(stale, 5.0, 1.0), turn(stale, 6.0, 1.0)] == [2.0, 3.0, 4.0]
    joins = StaleRounds(engines(), passes)
    joins.go_on(engines(), {1: 0.25, 2: 0.25}, 1)
    assert turn(joins, 4.0, 1.0) == 0.0  # of its own it has nothing to give


def test_gradients_that_a_checkpoint_had_are_late_on_whoever_is_left() -> None:
    passes = Passes()
    stale = StaleRounds([Weighing([torch.zeros(1)])], passes)
    assert stale.load({"mode": "Stale", "results": [{"0": torch.tensor([6.0])}]}, [torch.device("cpu")])
    (number,) = stale.weights()
    assert stale.own_state()["late"] == 1
    stale.go_on([Weighing([torch.zeros(1)])], {number: 3.0}, 3)  # three ranks that all have it
    assert stale.turn({}, 1.0, 0)[0][0].item() == 6.0, "the sum itself"


def test_samples_of_a_step_that_counts_nothing_weigh_nothing() -> None:
    one = OneModel(outer_lr=0.5, outer_momentum=0.0)
    one.local.saw(4.0)
    one.local.stands()
    one.local.saw(2.0)
    one.local.take_back()
    assert one.local._seen == 4.0
    one.local.after_step(one.optimizer)
    assert "what rank 2 trained in the step since the last exchange is lost" in one.local.lost_with([2])
