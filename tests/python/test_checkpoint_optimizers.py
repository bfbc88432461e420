"""Training goes on from a checkpoint as if it had never stopped: optimizers, schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, same, small, train, use  # noqa: F401
from torch import nn

import evenstep as es
from evenstep import EvenstepError

# -- optimizers and schedulers --

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01), capturable=False, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "es-sgd": lambda p: es.optim.SGD(p, 0.1, momentum=0.9),
    "es-adamw": lambda p: es.optim.AdamW(p, 0.01, amsgrad=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, seed=1)
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    train(model, optimizer, seed=2)
    other = small()
    second = OPTIMIZERS[name](other.parameters())
    use(monkeypatch, OneProcess(model=other, optimizer=second))
    ck.load_checkpoint(path)
    train(other, second, seed=2)
    same(dict(other.state_dict()), dict(model.state_dict()))
    same(second.state_dict()["state"], optimizer.state_dict()["state"])


def test_parameters_are_matched_by_name_not_by_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(list(model.named_parameters()), 0.01)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    backwards = torch.optim.Adam(list(model.named_parameters())[::-1], 0.5)
    use(monkeypatch, OneProcess(model=model, optimizer=backwards))
    ck.load_checkpoint(path)
    assert backwards.param_groups[0]["lr"] == 0.01
    for parameter in model.parameters():
        same(backwards.state[parameter], optimizer.state[parameter])


def test_state_wider_than_its_parameter_stays_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("master", p.detach().double() + 1e-9)

    def make() -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 3).bfloat16()
        return model, Wide(model.parameters())

    model, optimizer = make()
    optimizer.step()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    other, second = make()
    use(monkeypatch, OneProcess(model=other, optimizer=second))
    ck.load_checkpoint(path)
    assert torch.equal(second.state[other.weight]["master"], optimizer.state[model.weight]["master"])
    assert second.state[other.weight]["master"].dtype == torch.float64


def test_optimizer_state_that_cannot_be_saved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.bias]["history"] = object()
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    with pytest.raises(EvenstepError, match="'optimizer/bias/history'"):
        ck.checkpoint("here")
    assert not Path("here").exists() and not list(Path().glob("*partial*"))


S = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda o: S.StepLR(o, 2),
    "multistep": lambda o: S.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: S.LambdaLR(o, lambda e: 0.9**e),
    "cosine": lambda o: S.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: S.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "sequential": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1), S.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: S.ChainedScheduler([S.LinearLR(o, 0.1), S.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
}


def step(scheduler: Any, times: int) -> list[float]:
    rates = []
    for i in range(times):
        scheduler.optimizer.step()
        scheduler.step(1.0 + i) if isinstance(scheduler, S.ReduceLROnPlateau) else scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_schedulers_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> OneProcess:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        scheduler.optimizer = optimizer
        return OneProcess(model=model, optimizer=optimizer, scheduler=scheduler)

    first = use(monkeypatch, make())
    step(first.schedulers["scheduler"], 5)
    path = ck.checkpoint("here")
    want = step(first.schedulers["scheduler"], 5)
    second = use(monkeypatch, make())
    ck.load_checkpoint(path)
    assert step(second.schedulers["scheduler"], 5) == want
