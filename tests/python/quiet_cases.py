"""Ranks that train on their own without a vote in every step (test_quiet_passes.py): what each rank does between two
synchronisations, and at the next. Prints what was found, as JSON, from every rank.

    python quiet_cases.py CASE [ARGUMENT …]
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep.checkpoint import _background

RANK, RANKS = es.rank(), es.world_size()
CALLS = ("exchange", "sum_", "broadcast_", "gather_rows", "norm_statistics", "norm_sums", "barrier")
MODES: dict[str, Callable[[], Any]] = {
    "local": lambda: es.LocalSGD(every=4),
    "diloco": lambda: es.DiLoCo(every=4),
}


def say(facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def uneven(number: int, batch: int) -> list[int]:
    return [batch - 2 - number % 3, 2 + number % 3]


def prepared(mode: Any, steps: int, norm: bool = False, adam: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(5)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4)] if norm else [nn.Linear(3, 4)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 1)).double()
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05)
    x = torch.randn(8 * steps, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    return es.prepare(
        model, optimizer, DataLoader(TensorDataset(x), batch_size=8), sync=mode, **{"shares": uneven, **options}
    )


class Meetings:
    """In which steps this rank's group, or its model's engine, was called."""

    def __init__(self, model: Any) -> None:
        self.steps: list[int] = []
        self.now = -1
        current = es.session()
        sync = next(one for one in current.steps.syncs if one.model is model)
        for owner, names in ((current.group, CALLS), (sync.engine, ("begin",))):
            for name in names:
                if hasattr(owner, name):
                    self._watch(owner, name)

    def _watch(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            if self.now >= 0 and self.now not in self.steps:
                self.steps.append(self.now)
            return call(*args, **options)

        setattr(owner, name, counted)

    def end(self, model: Any) -> None:
        current = es.session()
        sync = next(one for one in current.steps.syncs if one.model is model)
        for owner, names in ((current.group, CALLS), (sync.engine, ("begin",))):
            for name in names:
                if name in vars(owner):
                    delattr(owner, name)


def train(
    mode: Any,
    steps: int = 12,
    before: Callable[[int, Any], None] | None = None,
    micro: int = 1,
    after: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> tuple[list[int], str]:
    """In which steps the ranks met, and the parameters, the buffers and the loss in the end."""
    model, optimizer, loader = prepared(mode, steps, **options)
    met = Meetings(model)
    for number, (x,) in enumerate(loader):
        met.now = number
        if before is not None:
            before(number, model)
        for _ in range(micro):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        met.now = -1
        after(number)
    met.end(model)
    return met.steps, _digest([*model.parameters(), *model.buffers()])


def _digest(tensors: list[torch.Tensor]) -> str:
    return "".join(t.detach().double().numpy().tobytes().hex() for t in tensors)


def counts() -> None:
    current = es.session()
    facts: dict[str, Any] = {}
    for name, make in MODES.items():
        for how, options in (
            ("", {}),
            (" adam", {"adam": True}),
            (" twice", {"micro": 2}),
            (" torch", {"engine": "torch"}),
        ):
            met, values = train(make(), **options)
            allowed, current.steps.quiet.allowed = current.steps.quiet.allowed, lambda: False
            voted, same = train(make(), **options)
            current.steps.quiet.allowed = allowed
            facts[name + how] = {"met": met, "voted": voted, "same": values == same}
            current.steps.syncs.clear()
    say(facts)


def stays() -> None:
    """Where something needs a vote in every step."""
    current = es.session()
    facts: dict[str, Any] = {}

    def note(name: str, **options: Any) -> None:
        facts[name] = train(es.LocalSGD(every=4), steps=6, **options)[0]
        current.steps.syncs.clear()
        current.models.clear()

    note("norm", norm=True)
    note("norm of its own", norm=True, broadcast_buffers=False)
    current.nonfinite.policy = "skip"
    note("skip")
    current.nonfinite.policy = "report"
    note("report")
    facts["buffer in another pass"] = two_passes()
    current.steps.syncs.clear()
    current.models.clear()
    other = es.prepare(nn.Linear(1, 1))
    facts["another"] = train(es.LocalSGD(every=4), steps=6)[0]
    with es.no_sync(other):
        facts["another under no_sync"] = train(es.LocalSGD(every=4), steps=6)[0]
    current.steps.syncs.clear()
    es.prepare(torch.amp.GradScaler("cpu"))
    note("scaler")
    say(facts)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += 0.1 * (x.detach().mean() - self.mean)
        return x - self.mean


def two_passes() -> list[int]:
    """Two models, each with a backward of its own in every step; only the second has buffers."""
    models = [nn.Linear(3, 1).double(), nn.Sequential(nn.Linear(3, 4), Centred()).double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    es.prepare(*models, *optimizers, sync=es.LocalSGD(every=4))
    met = Meetings(models[0])
    for number in range(6):
        for model in models:
            y = model(torch.full((2, 3), float(RANK), dtype=torch.float64))
            met.now = number
            y.square().mean().backward()
            met.now = -1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    met.end(models[0])
    return met.steps


class Raises(torch.autograd.Function):
    """In backward, with these words."""

    @staticmethod
    def forward(context: Any, y: torch.Tensor, words: str) -> torch.Tensor:
        context.words = words
        return y.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise ValueError(context.words)


def with_failing_backwards(mode: Any, steps: int, who: str) -> dict[str, Any]:
    """Trains; in step 5 backward fails before the model has a gradient, on all ranks or on rank `who`."""
    model, optimizer, loader = prepared(mode, steps)
    made, error = 0, ""
    try:
        for number, (x,) in enumerate(loader):
            y = model(x)
            if number == 5 and (who == "all" or int(who) == RANK):
                y = Raises.apply(y, "the script's own")
            try:
                y.square().mean().backward()
            except ValueError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            made += 1
    except es.EvenstepError as raised:
        error = str(raised)
    return {"made": made, "error": error}


def refused(who: str) -> None:
    """Backward fails in step 5, between two synchronisations, on all ranks or on one; who fails makes its step later."""
    say({**with_failing_backwards(es.LocalSGD(every=4), 16, who), "step": es.step()})


def ends(how: str) -> None:
    """Rank 1 fails halfway in its backward of step 5, or dies there; the others end with an error, not by the time limit."""
    model, optimizer, loader = prepared(es.LocalSGD(every=4), 16)
    made, error, status = 0, "", ""
    try:
        for number, (x,) in enumerate(loader):
            if number == 5 and RANK == 1 and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            hidden = model[1](model[0](x))
            if number == 5 and RANK == 1:
                hidden = Raises.apply(hidden, "halfway")  # once the last layer has its gradients
            model[2](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
    except (es.EvenstepError, ValueError) as raised:
        error, status = str(raised), getattr(raised, "status", "")
    say({"made": made, "error": error, "status": status})


def draws() -> None:
    """Rank 1 draws a batch more in step 5."""
    model, optimizer, loader = prepared(es.LocalSGD(every=4), 16)
    error, number, batches = "", 0, iter(loader)
    try:
        for number in range(12):
            (x,) = next(batches)
            if number == 5 and RANK == 1:
                (x,) = next(batches)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except es.EvenstepError as raised:
        error = str(raised)
    say({"at": number, "error": error})


def nonfinite(micro: str) -> None:
    """Rank 1 has a loss that is not finite in step 5, whose gradients it uses; all ranks are told at the next vote. micro:
    backwards a step."""

    def before(number: int, model: Any) -> None:
        if number == 5 and RANK == 1:
            model[0].bias.data.fill_(math.nan)
        if number == 6 and RANK == 1:
            for p in model.parameters():
                p.data.fill_(0.5)

    met, _ = train(es.LocalSGD(every=4), before=before, steps=16, micro=int(micro))
    say({"met": met})


def nonfinite_of_two() -> None:
    """Two models, each with a backward and an optimizer's step in turn, of which the second leaves every fourth turn out. On rank
    1 its gradients are not finite in turn 5; turn 7 has a vote in the first one's pass alone, turn 9 in both."""
    models = {name: nn.Linear(3, 1).double() for name in ("first", "second")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05) for name, model in models.items()}
    es.prepare(*models.values(), *optimizers.values(), sync=es.LocalSGD(every=4))
    for number in range(14):
        for name, model in models.items():
            if name == "second" and number % 4 == 2:
                continue
            bad = name == "second" and RANK == 1
            if bad and number == 7:
                for p in model.parameters():
                    p.data.fill_(0.5)
            y = model(torch.ones((2, 3), dtype=torch.float64))
            if bad and number == 5:
                y.register_hook(lambda gradient: gradient * math.nan)
            y.square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
    say({"step": es.step()})


def nonfinite_and_stops() -> None:
    """Two models share a backward. On rank 1 gradients of the second are not finite in step 5, which its optimizer uses; it makes no
    step after that one."""
    models = {name: nn.Linear(3, 1).double() for name in ("first", "second")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05) for name, model in models.items()}
    es.prepare(*models.values(), *optimizers.values(), sync=es.LocalSGD(every=4))
    for number in range(24):
        losses = []
        for name, model in models.items():
            y = model(torch.ones((2, 3), dtype=torch.float64))
            if name == "second" and number == 5 and RANK == 1:
                y.register_hook(lambda gradient: gradient * math.nan)
            losses.append(y.square().mean())
        sum(losses).backward()
        for name, optimizer in optimizers.items():
            if name == "first" or number <= 5:
                optimizer.step()
            optimizer.zero_grad()
        if number == 5:
            for p in models["second"].parameters():
                p.data.fill_(0.5)
    say({"step": es.step()})


def left_out() -> None:
    """In step 5 the backward of rank 1 leaves the second model out: it counts there without these samples, as with a vote."""
    current = es.session()
    facts: dict[str, Any] = {}
    for mode in ("local", "diloco"):
        for how in ("quiet", "voted"):
            torch.manual_seed(5)
            models = [nn.Linear(3, 1).double(), nn.Linear(3, 1).double()]
            optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
            x = torch.randn(64, 3, dtype=torch.float64)
            loader = DataLoader(TensorDataset(x), batch_size=8)
            *_, loader = es.prepare(*models, optimizer, loader, sync=MODES[mode](), shares=uneven)
            syncs = current.steps.syncs
            met = Meetings(models[0])
            allowed = current.steps.quiet.allowed
            if how == "voted":
                current.steps.quiet.allowed = lambda: False
            for number, (x,) in enumerate(loader):
                both = number != 5 or RANK == 0
                met.now = number
                sum(
                    (model(x).square().mean() for model in (models if both else models[:1])), torch.zeros(())
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
                met.now = -1
            met.end(models[0])
            current.steps.quiet.allowed = allowed
            facts[f"{mode} {how}"] = {
                "met": met.steps,
                "seen": [sync.local._seen for sync in syncs if sync.local is not None],
                "values": _digest([p for model in models for p in model.parameters()]),
            }
            syncs.clear()
            current.models.clear()
    say(facts)


def stops() -> None:
    """The second model's optimizer stops one step before it would synchronise; in step 9 the ranks are made one."""
    models = [nn.Linear(3, 1).double(), nn.Linear(3, 1).double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    es.prepare(*models, *optimizers, sync=es.LocalSGD(every=4))
    met = Meetings(models[0])
    for number in range(14):
        if number == 9:
            es.synchronise_models()
        x = torch.full((2, 3), float(RANK), dtype=torch.float64)
        met.now = number
        (models[0](x) + models[1](x)).square().mean().backward()
        optimizers[0].step()
        if number < 7:
            optimizers[1].step()
        met.now = -1
        for optimizer in optimizers:
            optimizer.zero_grad()
    met.end(models[0])
    say({"met": met.steps})


def unused() -> None:
    """The same, but no step uses them: nothing is told."""
    model, optimizer, loader = prepared(es.LocalSGD(every=4), 16)
    for number, (x,) in enumerate(loader):
        model(x * math.nan if number == 5 else x).square().mean().backward()
        if number != 5:
            optimizer.step()
        optimizer.zero_grad()
    say({"step": es.step()})


def checkpoints(how: str) -> None:
    """One is asked for all the time, and comes at each synchronisation. The end is asked for in step 9; or the ranks are made one
    after step 6, where no vote has asked for a checkpoint since the last."""
    current = es.session()
    current.environment = dataclasses.replace(current.environment, checkpoint_seconds=1e-9)
    before_ends = current.steps.telemetry

    class Asks:
        def __init__(self) -> None:
            self.asks_end = False

        def __getattr__(self, name: str) -> Any:
            return getattr(before_ends, name)

    asks = current.steps.telemetry = Asks()  # type: ignore[assignment]

    def before(number: int, _: Any) -> None:
        _background.join()  # so that each of them is there, and the next may be asked for
        asks.asks_end = (how == "end" and number == 9 and RANK == 0) or asks.asks_end

    def after(number: int) -> None:
        if how == "one" and number == 6:
            es.synchronise_models()

    try:
        train(es.LocalSGD(every=4), before=before, steps=20 if how == "end" else 14, after=after)
    except SystemExit:
        pass
    _background.join()
    folder = pathlib.Path(os.environ["EVENSTEP_CHECKPOINT_DIR"])
    es.barrier()
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-"))
    say({"step": es.step(), "checkpoints": steps})


def differs() -> None:
    """A parameter changes on rank 1 right after a synchronisation: found by the comparison that is due."""
    current = es.session()
    current.parameter_checks.every = 6
    after = current.after_synchronisation
    model, optimizer, loader = prepared(es.LocalSGD(every=4), 12)

    def spoiled() -> None:
        if RANK == 1 and current.step == 8:
            model[0].bias.data[0] += 1.0
        after()

    current.after_synchronisation = spoiled  # type: ignore[method-assign]
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    say({"step": es.step()})


def apart() -> None:
    """Rank 1 makes the three steps between two synchronisations only once rank 0 has made them."""
    model, optimizer, loader = prepared(es.DiLoCo(every=4), 8)
    done = pathlib.Path("done")
    for number, (x,) in enumerate(loader):
        if number == 4 and RANK == 1:
            while not done.exists():
                time.sleep(0.005)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 6 and RANK == 0:
            done.touch()
    say({"step": es.step()})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
