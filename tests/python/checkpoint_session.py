"""What the tests of checkpoints share: a session of one process, a small training, deep comparison."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import EvenstepError, _core

# es.checkpoint, the function, hides the module of that name
ck = importlib.import_module("evenstep.checkpoint")
files = importlib.import_module("evenstep.checkpoint_files")


class Cursor:
    train, resuming, replaying = True, False, False

    def __init__(self) -> None:
        self.state = {"epoch": 0, "batch": 0, "seed": 1}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def check_state_dict(self, state: dict[str, int]) -> None:
        if state["batch"] < 0:
            raise EvenstepError("a cursor that does not fit")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class OneProcess:
    """What es.checkpoint needs of a session."""

    rank, world_size, epoch, telemetry = 0, 1, 0, _core.Telemetry(-1, 0)
    seen_rank = property(lambda self: self.rank)
    in_job, name, joining = True, "", False

    def __init__(self, **objects: Any) -> None:
        self.steps = self
        self.models = {k: v for k, v in objects.items() if isinstance(v, nn.Module)}
        self.optimizers = {k: v for k, v in objects.items() if isinstance(v, torch.optim.Optimizer)}
        self.loaders = {k: v for k, v in objects.items() if isinstance(v, Cursor)}
        self.objects = {k: v for k, v in objects.items() if k.startswith("object")}
        others = (self.models, self.optimizers, self.loaders, self.objects)
        self.schedulers = {k: v for k, v in objects.items() if not any(k in group for group in others)}
        self.user_state: Any = {}
        self.lineage = ""
        self.turn = self.number = 0
        self.recovery = None
        self.exchange_state: dict[str, Any] = {}
        self.syncs: list[Any] = []
        self.resumed_from: Path | None = None
        self.loaded: Any = None
        self.pending_random: Any = None
        self.pending_objects: Any = None
        self.replayed = self.iterating = False
        self.step = 0

    def synchronise_models(self) -> None: ...

    def call_by_all(self, make: Any) -> Any:
        return make()

    def join(self) -> None: ...

    def check_arrived(self, call: str) -> None: ...

    def begin_pass_anew(self, models: bool) -> None: ...

    def apart(self, span: int) -> Any:
        return contextlib.nullcontext()

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EVENSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    ck._told.clear()


def use(monkeypatch: pytest.MonkeyPatch, session: Any) -> Any:
    monkeypatch.setattr(ck, "_session", lambda call: session)
    return session


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: Any, steps: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def same(a: Any, b: Any, where: str = "") -> None:
    """Deep and exact, types included."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(
            torch.nan_to_num(a) if a.is_floating_point() else a, torch.nan_to_num(b) if b.is_floating_point() else b
        ), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}/{i}")
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b), where
    else:
        assert a == b, where


def names(folder: str | Path = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
