"""es.checkpoint and es.load_checkpoint on one process: what is saved is what comes back, and nothing half stays."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import EvenstepError, _core

# es.checkpoint, the function, hides the module of that name
ck = importlib.import_module("evenstep.checkpoint")
encoding = importlib.import_module("evenstep.checkpoint_encoding")
files = importlib.import_module("evenstep.checkpoint_files")


class Cursor:
    def __init__(self) -> None:
        self.state = {"epoch": 0, "batch": 0, "seed": 1}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class OneProcess:
    """What es.checkpoint needs of a session."""

    rank, world_size, epoch, telemetry = 0, 1, 0, _core.Telemetry(-1, 0)

    def __init__(self, **objects: Any) -> None:
        self.steps = self
        self.models = {k: v for k, v in objects.items() if isinstance(v, nn.Module)}
        self.optimizers = {k: v for k, v in objects.items() if isinstance(v, torch.optim.Optimizer)}
        self.loaders = {k: v for k, v in objects.items() if isinstance(v, Cursor)}
        others = (self.models, self.optimizers, self.loaders)
        self.schedulers = {k: v for k, v in objects.items() if not any(k in group for group in others)}
        self.user_state: Any = {}
        self.step = 0

    def apart(self, span: int) -> Any:
        return contextlib.nullcontext()

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EVENSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    ck._told.clear()


def use(monkeypatch: pytest.MonkeyPatch, session: Any) -> Any:
    monkeypatch.setattr(ck, "_session", lambda: session)
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


# -- encoding --


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encoding.encode(value, "x", tensors), allow_nan=False)
    return encoding.decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 63),
        1 << 63,
        (1 << 64) - 1,
        0.1,
        1e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "naïve \0 \ud800 \u2028",
        b"\x00\xff",
        1 + 2j,
        [],
        (),
        {},
        [1, (2.0, [None, {"a": ()}])],
        {"$tensor": 1},
        {1: 2, "b": {(1, 2): 3}},
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({30: 1, 60: 2}),
        {1, 2, 3},
        torch.bfloat16,
        torch.arange(3),
        {"a": torch.zeros(()), "b": [torch.empty(0, 3)]},
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    same(value, round_trip(value))


def test_numpy_values_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    back = round_trip({"a": numpy.float32(0.5), "b": numpy.int64(7), "c": numpy.arange(6).reshape(2, 3)})
    assert back["a"] == 0.5 and type(back["a"]) is numpy.float32
    assert back["b"] == 7 and type(back["b"]) is numpy.int64
    assert (back["c"] == numpy.arange(6).reshape(2, 3)).all()


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(EvenstepError, match=r"'optimizer/weight/thing/1'.*object"):
        encoding.encode({"thing": [1, object()]}, "optimizer/weight", {})


def test_code_is_kept_from_the_loading_object() -> None:
    tensors: dict[str, torch.Tensor] = {}
    saved = encoding.encode({"f": math.sin, "n": [1]}, "x", tensors)
    assert encoding.decode(saved, tensors.__getitem__, {"f": math.cos, "n": [2]}) == {"f": math.cos, "n": [1]}
    assert encoding.decode(saved, tensors.__getitem__, {"n": [2]}) == {"n": [1]}


# -- models --


class Odd(nn.Module):
    """Every kind of tensor that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.fp16 = nn.Parameter(torch.randn(3).half())
        self.bf16 = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.turned = nn.Parameter(torch.randn(3, 5).t())  # not contiguous
        self.scale = nn.Parameter(torch.tensor(2.0))  # 0-dim
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("octets", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("part", torch.arange(20.0)[::2])
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"words": ["a", "b"], "table": torch.arange(4)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_every_kind_of_tensor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = Odd()
    use(monkeypatch, OneProcess(model=model))
    path = ck.checkpoint("here")
    want = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.manual_seed(2)
    other = Odd()
    use(monkeypatch, OneProcess(model=other))
    ck.load_checkpoint(path)
    have = other.state_dict()
    for key, value in want.items():
        assert torch.equal(value, have[key]) and value.dtype == have[key].dtype, key
    assert other.head.weight is other.embedding.weight
    same(other.extra, {"words": ["a", "b"], "table": torch.arange(4)})


def test_files_are_read_by_the_safetensors_package(monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Odd()
    optimizer = torch.optim.AdamW(small().parameters())
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    have = safetensors.load_file(path / "model.safetensors")
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and key != "head.weight" and not value.is_complex():
            assert torch.equal(have[key], value) and have[key].dtype == value.dtype, key
    assert "head.weight" not in have  # tied: once
    # and its own loader of tied models understands the file
    tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    use(monkeypatch, OneProcess(model=tied))
    path = ck.checkpoint("tied")
    fresh = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    fresh["b"].weight = fresh["a"].weight
    safetensors.load_model(fresh, path / "model.safetensors")
    same(dict(fresh.state_dict()), dict(tied.state_dict()))


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    want = {"b": torch.randn(3, 2), "a": torch.arange(5), "c": torch.zeros(()).bool()}
    safetensors.save_file(want, tmp_path / "x.safetensors")
    with files.TensorFile(tmp_path / "x.safetensors") as file:
        same({name: file.read(name) for name in want}, want)


def expect_misfit(monkeypatch: pytest.MonkeyPatch, path: Path, match: str, **objects: Any) -> None:
    use(monkeypatch, OneProcess(**objects))
    with pytest.raises(EvenstepError, match=match):
        ck.load_checkpoint(path)


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    expect_misfit(
        monkeypatch, path, r"models \['model', 'model_1'\]", model=model, model_1=small(), optimizer=optimizer
    )
    wide = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    sgd = torch.optim.SGD(wide.parameters(), 0.1, momentum=0.9)
    expect_misfit(
        monkeypatch,
        path,
        r"'1.weight' has the shape \[2, 3\] in the checkpoint and \[5, 3\]",
        model=wide,
        optimizer=sgd,
    )
    expect_misfit(
        monkeypatch,
        path,
        r"'0.weight' has the type torch.float32 in the checkpoint and torch.float64",
        model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double(),
        optimizer=sgd,
    )
    deep = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    expect_misfit(monkeypatch, path, r"lacks 2.bias, 2.weight", model=deep, optimizer=sgd)
    flat = nn.Sequential(nn.Linear(4, 3))
    expect_misfit(monkeypatch, path, r"has, unknown here, 1.bias, 1.weight", model=flat, optimizer=sgd)
    expect_misfit(
        monkeypatch, path, r"was torch.optim.sgd.SGD", model=model, optimizer=torch.optim.Adam(model.parameters())
    )
    part = torch.optim.SGD(model[0].parameters(), 0.1)
    expect_misfit(monkeypatch, path, r"has, unknown here, 1.bias, 1.weight", model=model, optimizer=part)
    two = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], 0.1)
    expect_misfit(monkeypatch, path, r"had 1 parameter groups .* and has 2", model=model, optimizer=two)


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


# -- the rest of the state --


def test_generators_cursor_step_and_extra_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    cursor = Cursor()
    cursor.state = {"epoch": 3, "batch": 17, "seed": (1 << 63) + 5}
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1), loader=cursor))
    session.step = 120
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    random.gauss(0, 1), numpy.random.normal()
    path = ck.checkpoint(extra={"best": 0.25, "ema": torch.ones(3)})
    assert path == Path("checkpoints/step-00000120").absolute()
    draws = [torch.rand(3).tolist(), random.gauss(0, 1), random.random(), numpy.random.normal(), numpy.random.rand()]
    other = Cursor()
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1), loader=other))
    loaded = ck.load_checkpoint("checkpoints")  # the newest in it
    assert loaded["step"] == session.step == 120
    assert other.state == cursor.state
    same(session.user_state, {"best": 0.25, "ema": torch.ones(3)})
    again = [torch.rand(3).tolist(), random.gauss(0, 1), random.random(), numpy.random.normal(), numpy.random.rand()]
    assert again == draws
    torch.manual_seed(99)  # what a script draws before its loop
    session.pending_random()
    assert torch.rand(3).tolist() == draws[0]


def test_ranks_that_were_not_there_derive_their_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    path = ck.checkpoint("here")
    draws = []
    for rank in (1, 2, 1):
        session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
        session.broadcast_bytes = lambda data, root=0: b"{}"  # type: ignore[method-assign]
        session.rank = rank  # type: ignore[misc]
        ck.load_checkpoint(path)
        draws.append((torch.rand(2).tolist(), random.random()))
    assert draws[0] == draws[2] != draws[1]


def test_parts_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    session = use(monkeypatch, OneProcess(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    session.step = 5
    path = ck.checkpoint()
    other = nn.Linear(2, 2)
    session = use(monkeypatch, OneProcess(model=other, optimizer=torch.optim.Adam(other.parameters())))
    ck.load_checkpoint(path, optimizers=False, schedulers=False, loaders=False, random=False)
    assert torch.equal(other.weight, model.weight) and session.step == 0


# -- keeping, failing --


def names(folder: str | Path = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (100, 200, 300):
        ck.checkpoint()
    assert names() == ["step-00000200", "step-00000300"]
    (Path("checkpoints") / "notes.txt").write_text("mine")
    session.step = 50  # went back: newest is what was written last
    ck.checkpoint()
    assert names() == ["notes.txt", "step-00000050", "step-00000300"]
    assert ck.newest_checkpoint().name == "step-00000050"
    ck.checkpoint("elsewhere")  # a path of its own is nobody's to remove
    session.step = 51
    ck.checkpoint()
    assert Path("elsewhere/manifest.json").exists()


def test_damaged_ones_do_not_count_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (1, 2):
        ck.checkpoint()
    os.truncate("checkpoints/step-00000002/model.safetensors", 10)
    session.step = 3
    ck.checkpoint()
    assert names() == ["step-00000001", "step-00000003"]


def test_a_checkpoint_is_replaced_but_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (1, 2):
        ck.checkpoint("best")
    assert files.read_manifest(Path("best"))["state"]["step"] == 2
    Path("mine").mkdir()
    with pytest.raises(EvenstepError, match="not a checkpoint"):
        ck.checkpoint("mine")
    assert names(".") == ["best", "mine"]


def test_altered_and_truncated_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(64, 64)))
    path = ck.checkpoint("here")
    file = path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    with pytest.raises(EvenstepError, match=r"chunk 0 of model.safetensors \(bytes 0–\d+\) is altered"):
        ck.load_checkpoint(path)
    file.write_bytes(good[:100])
    with pytest.raises(EvenstepError, match=rf"model.safetensors is truncated: 100 of {len(good)} bytes"):
        ck.load_checkpoint(path)
    file.write_bytes(good)
    manifest = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(manifest.replace(b'"step": 0', b'"step": 9'))
    with pytest.raises(EvenstepError, match="its checksum does not match"):
        ck.load_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(EvenstepError, match="not a checkpoint"):
        ck.load_checkpoint(path)
    with pytest.raises(EvenstepError, match="does not exist"):
        ck.load_checkpoint("nowhere")


@pytest.fixture
def full_disk(tmp_path: Path) -> Any:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_loses_nothing(full_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", str(full_disk / "checkpoints"))
    small_one = use(monkeypatch, OneProcess(model=nn.Linear(8, 8)))
    small_one.step = 1
    old = ck.checkpoint()
    large = use(monkeypatch, OneProcess(model=nn.Linear(512, 512)))
    large.step = 2
    with pytest.raises(EvenstepError, match=r"(?s)No space left on device.*free at least \d+ bytes.*--checkpoint-dir"):
        ck.checkpoint()
    assert names(full_disk / "checkpoints") == [old.name]
    files.verify(old, files.read_manifest(old))
    assert ck.automatic(large) is None and ck.automatic(large) is None  # training goes on
    assert capsys.readouterr().err.count("was not written, training goes on") == 1
    assert names(full_disk / "checkpoints") == [old.name]


def test_a_limit_on_file_sizes_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(8, 8)))
    old = ck.checkpoint()
    session.models["model"] = nn.Linear(512, 512)
    session.step = 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(EvenstepError, match=r"(?s)File too large.*ulimit -f"):
            ck.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names() == [old.name]


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    Path("file").write_text("")
    with pytest.raises(EvenstepError, match=r"file.* cannot be made"):
        ck.checkpoint("file/below/here")


def test_unsavable_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    with pytest.raises(EvenstepError, match="'extra/when'"):
        ck.checkpoint("here", extra={"when": object()})
    with pytest.raises(EvenstepError, match="sparse"):
        ck.checkpoint("here", extra={"t": torch.eye(3).to_sparse()})
    assert not names(".")


def test_background_write_sees_the_state_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(300, 300)
    use(monkeypatch, OneProcess(model=model))
    want = model.weight.detach().clone()
    path = ck.checkpoint("here", wait=False)
    with torch.no_grad():
        model.weight.zero_()
    ck.checkpoint("next", wait=False)  # waits for the first
    with files.TensorFile(path / "model.safetensors") as file:
        assert torch.equal(file.read("weight"), want)
    assert ck._background.join() is None


def test_a_failed_background_write_is_told_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    Path("mine").mkdir()
    ck.checkpoint("mine", wait=False)
    with pytest.raises(EvenstepError, match=r"before this one was not written.*mine already exists"):
        ck.checkpoint("next")
    ck.checkpoint("next")


KILLED = """
import importlib, os, signal, sys, threading, torch
from evenstep import _core
ck = importlib.import_module("evenstep.checkpoint")
sys.path.insert(0, {tests!r})
from test_checkpoint import OneProcess
session = OneProcess(model=torch.nn.Linear(64, 64))
ck._session = lambda: session
ck.checkpoint()
session.step = 1
session.models["model"] = torch.nn.Linear(4000, 4000)
write = ck.write_tensors
def then_die(writer, *rest):
    write(writer, *rest)
    os.kill(os.getpid(), signal.SIGKILL)
ck.write_tensors = then_die
ck.checkpoint()
"""


def test_killed_in_the_middle_leaves_the_older_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert names() == ["step-00000000", "step-00000001.evenstep.partial"]
    old = Path("checkpoints/step-00000000")
    files.verify(old, files.read_manifest(old))
    assert ck.newest_checkpoint() == old.absolute()
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    session.step = 2
    ck.checkpoint()
    assert names() == ["step-00000000", "step-00000002"]  # what the dead writer left is gone


def test_bad_keep_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "none")
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    with pytest.raises(EvenstepError, match="EVENSTEP_CHECKPOINT_KEEP"):
        ck.checkpoint()
    assert not Path("checkpoints").exists()


# -- the writer in C, from Python --


def test_the_writer_refuses_misuse(tmp_path: Path) -> None:
    writer = _core.CheckpointWriter(tmp_path / "a")
    for bad in (
        [1],
        [("a", "U8", (1,), 0)],
        [("a", "U8", [1], 0, 1)],
        [("a", "U8", ("x",), 0, 1)],
        [("a", "U8", (1,), 0, -1)],
    ):
        with pytest.raises((TypeError, ValueError)):
            writer.add("x", [bad])  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        writer.add("x", [("a", "U8", (1,), 0, 1)], fetch=lambda i: 1 // 0)
    writer.abandon()
    with pytest.raises(RuntimeError, match="committed or abandoned"):
        writer.add("x", [])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError):
        _core.file_checksums(__file__, 0)
