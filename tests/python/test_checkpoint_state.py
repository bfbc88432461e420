"""What es.checkpoint saves comes back as it was: values, models, generators, cursors, the user's own."""

from __future__ import annotations

import copy
import json
import math
import random
import threading
from collections import Counter, OrderedDict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from checkpoint_session import Cursor, OneProcess, ck, empty_place, files, same, small, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError, _core
from evenstep import checkpoint_encoding as encoding

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
        {frozenset({1, 2}): 3, (4, frozenset({frozenset({5})})): 6},
        {frozenset({1}), frozenset({1, 2})},
        {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "a/b~2": torch.full((2,), 2.0)},
        {1: torch.zeros(2), "1": torch.ones(2), 1.5: {"1": [torch.ones(3)]}},
        torch.bfloat16,
        torch.arange(3),
        {"a": torch.zeros(()), "b": [torch.empty(0, 3)]},
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    same(value, round_trip(value))


@pytest.mark.parametrize(
    "held",
    [
        {"$dtype": "save"},  # a function
        {"$dtype": ["float32"]},
        {"$dtype": "float3"},
        {"$complex": []},
        {"$int": "9" * 20000},
        {"$float": {}},
        {"$bytes": "a"},
        {"$text": [1 << 40]},
        {"$device": "nowhere"},
        {"$numpy": ["float3", 1]},
        {"$tuple": 3},
        {"$set": [[1]]},
        {"$dict": [[1]]},
    ],
    ids=repr,
)
def test_a_value_that_is_none_of_its_kind_is_damage(held: Any) -> None:
    with pytest.raises(EvenstepError, match=r"is damaged: what it holds as '\$"):
        encoding.decode({"lr": [held]}, {}.__getitem__)


def test_numpy_values_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    back = round_trip({"a": numpy.float32(0.5), "b": numpy.int64(7), "c": numpy.arange(6).reshape(2, 3)})
    assert back["a"] == 0.5 and type(back["a"]) is numpy.float32
    assert back["b"] == 7 and type(back["b"]) is numpy.int64
    assert (back["c"] == numpy.arange(6).reshape(2, 3)).all()


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(EvenstepError, match=r"'optimizer/weight/thing/1'.*object"):
        encoding.encode({"thing": [1, object()]}, "optimizer/weight", {})
    called = Called(3)
    for one in (nn.Linear(1, 1), called, partial(called)):
        with pytest.raises(EvenstepError, match=r"(?s)'x/thing'.*fix: .* its state_dict\(\)"):
            encoding.encode({"thing": one}, "x", {})


class Called:
    """Can be called, and has a state."""

    def __init__(self, value: Any) -> None:
        self.__dict__.update({"value": value} if value else {})

    def __call__(self) -> Any:
        return self

    @lru_cache  # noqa: B019
    def cached(self) -> int:
        return 1


def test_code_is_kept_from_the_loading_object() -> None:
    numpy = pytest.importorskip("numpy")
    tensors: dict[str, torch.Tensor] = {}
    saved = encoding.encode({"f": math.sin, "n": [1]}, "x", tensors)
    assert encoding.decode(saved, tensors.__getitem__, {"f": math.cos, "n": [2]}) == {"f": math.cos, "n": [1]}
    assert encoding.decode(saved, tensors.__getitem__, {"n": [2]}) == {"n": [1]}
    code = [lambda: 1, nn.Linear, nn.Linear(1, 1).forward, torch.relu, torch.nn.functional.relu, torch.ops.aten.relu]
    code += [torch.ops.aten.relu.default, partial(math.pow, 2)]
    code += [Called(0), Called(1).cached, Called.cached, len, [].append, numpy.add, list[int], Optional[int]]
    for one in code:
        assert list(encoding.encode(one, "x", tensors)) == ["$kept"], one


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
    """An error, and nothing is loaded half."""
    session = use(monkeypatch, OneProcess(**objects))
    before = {name: copy.deepcopy(one.state_dict()) for name, one in objects.items()}
    with pytest.raises(EvenstepError, match=match):
        ck.load_checkpoint(path)
    for name, one in objects.items():
        same(before[name], one.state_dict(), name)
    assert session.step == 0 and session.loaded is None


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    path = ck.checkpoint("here")
    with torch.no_grad():
        model[0].weight.zero_()
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


def test_all_of_another_models_tensors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    use(monkeypatch, OneProcess(model=model))
    path = ck.checkpoint("here")
    other = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 6, bias=False), nn.Linear(2, 2), nn.Linear(2, 1)).double()
    expect_misfit(
        monkeypatch,
        path,
        r"model 'model' lacks 3.bias, 3.weight; it has, unknown here, 1.bias; model 'model': tensor "
        r"'0.bias' has the type torch.float32 .*, '0.weight' has the shape \[3, 4\] in the checkpoint and \[3, 5\] here, "
        r"'1.weight' has the shape \[2, 3\] in the checkpoint and \[6, 3\] here, '2.bias' has the type .* here, "
        r"'2.weight' has the type torch.float32 in the checkpoint and torch.float64 here\n  fix: build the model",
        model=other,
    )
    much = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    expect_misfit(monkeypatch, path, r"lacks 10.bias, 10.weight, .* and 38 more; model 'model': tensor", model=much)


def test_a_cursor_that_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = Cursor()
    cursor.state["batch"] = -1
    use(monkeypatch, OneProcess(model=nn.Linear(2, 2), loader=cursor))
    path = ck.checkpoint("here")
    expect_misfit(monkeypatch, path, "a cursor that does not fit", model=nn.Linear(2, 2), loader=Cursor())


class Pickled(nn.Module):
    """As layers of eight bits keep their scales: bytes in a tensor, more or fewer each time, none at first."""

    def __init__(self, words: bytes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.words = words

    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(self.words), dtype=torch.uint8) if self.words else None

    def set_extra_state(self, state: Any) -> None:
        self.words = bytes(state.tolist()) if state is not None else b""


@pytest.mark.parametrize("here", [b"longer than before", b""])
@pytest.mark.parametrize("there", [b"saved", b""])
def test_a_modules_extra_state_may_be_of_any_size(here: bytes, there: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Sequential(Pickled(there))))
    path = ck.checkpoint("here")
    model = nn.Sequential(Pickled(here))
    use(monkeypatch, OneProcess(model=model))
    ck.load_checkpoint(path)
    assert model[0].words == there


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
        told = json.dumps({"path": str(path)}).encode()
        session.broadcast_bytes = lambda data, root=0, told=told: told  # type: ignore[misc]
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


def test_a_checkpoint_before_the_first_batch_keeps_what_that_will_find(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    path = ck.checkpoint("here")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.load_checkpoint(path)
    torch.manual_seed(99), random.seed(99)  # the script's own, until the first batch
    again = ck.checkpoint("again")
    assert random.random() == random.Random(99).random()  # and left alone
    session.pending_random()
    want = torch.rand(3).tolist(), random.random()
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.load_checkpoint(again)
    session.pending_random()
    assert (torch.rand(3).tolist(), random.random()) == want


# -- what else has a state --


class Average:
    """A running average of weights, as users write them."""

    def __init__(self, value: float, size: int = 3) -> None:
        self.values, self.count = torch.full((size,), value), int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["values"].shape != self.values.shape:
            raise ValueError(f"{len(state['values'])} values")
        self.values, self.count = state["values"], state["count"]


def test_a_checkpoint_of_before_objects_were_kept_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(2, 2)))
    path = ck.checkpoint("here")
    session = OneProcess(model=nn.Linear(2, 2), object=Average(3.0))
    old = ck.read_manifest(path)
    del old["state"]["objects"]
    monkeypatch.setattr(ck, "read_manifest", lambda folder: old)
    resume = ck.Resume(use(monkeypatch, session), path)
    resume.take()
    resume.finish()
    assert session.objects["object"].count == 3
    assert capsys.readouterr().err.count("kept no other objects: object begin as the script made them") == 1


def test_other_objects_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    model = nn.Linear(2, 2)
    use(monkeypatch, OneProcess(model=model, object=scaler, object_1=Average(3.0)))
    path = ck.checkpoint("here")
    other, average = torch.amp.GradScaler("cpu"), Average(1.0)
    use(monkeypatch, OneProcess(model=nn.Linear(2, 2), object=other, object_1=average))
    ck.load_checkpoint(path)
    same(other.state_dict(), scaler.state_dict())
    assert other.get_scale() == 8.0 and average.count == 3 and average.values.tolist() == [3.0] * 3
    expect_misfit(monkeypatch, path, r"objects \['object'\]", model=model, object=scaler)
    expect_misfit(
        monkeypatch, path, "object 'object' was torch.amp.* and is", model=model, object=average, object_1=other
    )
    with torch.no_grad():
        model.weight.zero_()
    wider = Average(1.0, 4)
    want = r"Average does not take the state .*: ValueError: 3 values"
    expect_misfit(monkeypatch, path, want, model=model, object=scaler, object_1=wider)
    use(monkeypatch, OneProcess(model=model))
    ck.load_checkpoint(path, objects=False)
    # one that was written before there were any
    manifest = files.read_manifest(path)
    del manifest["state"]["objects"]
    monkeypatch.setattr(ck, "read_manifest", lambda folder: manifest)
    ck.load_checkpoint(path)


# -- outside a job, and from there into one --


def outside(**objects: Any) -> OneProcess:
    session = OneProcess(**objects)
    session.in_job = False
    return session


def test_a_jobs_checkpoint_loads_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    session = use(monkeypatch, OneProcess(model=model, loader=Cursor()))
    session.step = 5
    path = ck.checkpoint("here")
    other = nn.Linear(2, 2)
    session = use(monkeypatch, outside(model=other))
    assert ck.load_checkpoint(path)["step"] == session.step == 5
    assert torch.equal(other.weight, model.weight)


def test_a_checkpoint_from_outside_loads_in_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    use(monkeypatch, outside(model=model)).step = 5
    path = ck.checkpoint("here")
    assert files.read_manifest(path)["state"]["job"] == ""
    other, cursor = nn.Linear(2, 2), Cursor()
    session = use(monkeypatch, OneProcess(model=other, loader=cursor))
    ck.load_checkpoint(path)
    assert torch.equal(other.weight, model.weight) and session.step == 5 and cursor.state == Cursor().state
    assert "holds no data position" in capsys.readouterr().err
    # but one that has a position wants the loader
    use(monkeypatch, OneProcess(model=model, loader=cursor))
    expect_misfit(monkeypatch, ck.checkpoint("there"), r"loaders none, the checkpoint has \['loader'\]", model=other)


# -- what several ranks load --


def test_the_ranks_load_what_the_first_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (1, 2):
        ck.checkpoint()
    found = Path("checkpoints/step-00000001").absolute()  # when it looked, the second was not there
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    session.broadcast_bytes = lambda data, root=0: json.dumps({"path": str(found)}).encode()  # type: ignore[method-assign]
    session.rank = 1  # type: ignore[misc]
    assert ck.load_checkpoint("checkpoints")["path"] == found and session.step == 1


def test_what_is_still_being_written_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.checkpoint("best")
    go_on, write, join = threading.Event(), ck._background.write, ck._background.join

    def slow_write() -> None:
        go_on.wait()
        write()

    def waits() -> Any:
        go_on.set()
        return join()

    monkeypatch.setattr(ck._background, "write", slow_write)
    session.step = 7
    ck.checkpoint("best", wait=False)
    monkeypatch.setattr(ck._background, "join", waits)
    try:
        assert ck.load_checkpoint("best")["step"] == 7
    finally:
        waits()


def test_a_write_that_failed_is_told_when_its_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    ck.checkpoint("best")

    write = ck._background.write

    def full() -> None:
        write()
        raise EvenstepError("no space")

    monkeypatch.setattr(ck._background, "write", full)
    ck.checkpoint("best", wait=False)
    with pytest.raises(EvenstepError, match="the checkpoint before this one was not written: no space"):
        ck.load_checkpoint("best")
    assert ck.load_checkpoint("best")["step"] == 0  # told once


def test_a_tensor_that_is_two_keys_here_may_be_stored_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As other libraries store it, who say of one key alone; a key that is nobody's else is missing all the same."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.other = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.last.weight = self.first.weight

    saved = Tied()
    use(monkeypatch, OneProcess(model=saved))
    path = ck.checkpoint("here")
    for kept, lost in (("first.weight", "last.weight"), ("last.weight", "first.weight")):
        tensors = {key: value for key, value in saved.state_dict().items() if key != lost}
        writer = _core.CheckpointWriter(tmp_path / f"of-{kept}", True, 0)
        files.write_tensors(writer, "model.safetensors", tensors)
        state = files.read_manifest(path)["state"]
        state["models"]["model"]["tied"] = {}
        state.update(random={}, objects={})
        writer.commit(json.dumps(state))
        other = Tied()
        use(monkeypatch, OneProcess(model=other))
        ck.load_checkpoint(tmp_path / f"of-{kept}", random=False)
        assert torch.equal(other.first.weight, saved.first.weight) and other.last.weight is other.first.weight
        assert torch.equal(other.last.bias, saved.last.bias)
        apart = Tied()
        apart.last.weight = nn.Parameter(torch.zeros(3, 3))
        use(monkeypatch, OneProcess(model=apart))
        with pytest.raises(EvenstepError, match=f"lacks {lost}"):
            ck.load_checkpoint(tmp_path / f"of-{kept}", random=False)
