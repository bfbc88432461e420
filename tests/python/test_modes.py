"""Ranks that exchange less often (LocalSGD, DiLoCo) or later (Stale): as plain loops that do what the mode says."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evenstep as es
from evenstep import _core
from evenstep.exchange_state import restore_exchange
from evenstep.local_training import LocalTraining
from evenstep.session import _Alone
from evenstep.stale import StaleRounds
from evenstep.steps import Steps

SCRIPT = pathlib.Path(__file__).parent / "mode_cases.py"


def test_on_two_ranks_with_changing_shares(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    lines = run_ranks(SCRIPT, timeout=170, env={"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "due")})[
        0
    ].stdout.splitlines()
    cases = dict(json.loads(line) for line in lines if line.startswith("["))
    assert cases.pop("due") == {"steps": [6, 9, 12]}
    assert "accumulate under es.no_sync" in cases.pop("twice")["words"]
    back = {name: cases.pop(name) for name in list(cases) if name.startswith("back")}
    assert len(back) == 3 and all(case == {"same": True, "alike_at_checkpoint": True} for case in back.values()), back
    assert len(cases) == 8
    for name, case in cases.items():
        assert case["difference"] <= 1e-12 and case["moved"] > 0.01 and case["alike"], (name, case)
        assert case["apart_before"] is (not name.startswith("Stale")), name


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
        self.steps, self.syncs = self, [self]


def test_a_checkpoint_of_another_mode_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(_Alone(), _core.Telemetry(-1, 0))
    parameter = nn.Parameter(torch.ones(2))
    local = LocalTraining(es.DiLoCo(), None, [parameter], steps)  # type: ignore[arg-type]
    restore_exchange(Going(local, None), {"modes": {"model": {"mode": "LocalSGD", "momentum": {}}}})
    assert "no outer momentum for 'model': that of DiLoCo every 32 steps begins at zero" in capsys.readouterr().err
    restore_exchange(Going(None, StaleRounds([])), {"modes": {"model": {"mode": "Stale", "results": [{}]}}})
    assert "no late gradients for 'model': its first steps change nothing" in capsys.readouterr().err
    restore_exchange(Going(LocalTraining(es.LocalSGD(), None, [parameter], steps), None), {})  # type: ignore[arg-type]
    assert not capsys.readouterr().err
