"""Loading into memory that is there: parameters and optimizers' states stay where they are, and are as they were wherever anything is
wrong with the checkpoint."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, same, use  # noqa: F401
from ckpt_samples import forge
from torch import nn

from evenstep import EvenstepError

reading = importlib.import_module("evenstep.checkpoint_reading")
FILES = ("model.safetensors", "optimizer.safetensors")


class Net(nn.Module):
    """More than is read at once, of odd sizes, a buffer, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1024, 1100), nn.Linear(1100, 3)
        self.phase = nn.Parameter(torch.randn(17, dtype=torch.complex64))
        self.register_buffer("mean", torch.randn(301, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x)).square().mean() + self.phase.abs().sum()


def training(steps: int = 1, model: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).backward()
        optimizer.step()
    return model, optimizer


def prepared(monkeypatch: pytest.MonkeyPatch, steps: int, model: nn.Module | None = None) -> Any:
    model, optimizer = training(steps, model)
    return use(monkeypatch, OneProcess(model=model, optimizer=optimizer))


def tensors(session: Any) -> list[torch.Tensor]:
    states = session.optimizers["optimizer"].state.values()
    return [*session.models["model"].state_dict().values(), *(t for s in states for t in s.values())]


_written: list[Path] = []  # once for all tests of this file


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    if not _written:
        prepared(monkeypatch, 3)
        _written.append(Path(ck.checkpoint(tmp_path_factory.mktemp("homes") / "one")))
    return Path(shutil.copytree(_written[0], tmp_path / "one"))


@pytest.fixture(params=["cached", "disk"])
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """All into memory that is there; or none, for a disk would be read twice."""
    monkeypatch.setattr(reading._core, "file_is_cached", lambda path: request.param != "disk")
    return str(request.param)


@pytest.fixture
def session(saved: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose values are others, and its memory there."""
    return prepared(monkeypatch, 1)


def test_all_comes_to_where_it_was(saved: Path, session: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training(3)
    before = [(t.data_ptr(), t._version) for t in tensors(session)]
    compared: list[str] = []
    compare = reading.compare_all
    monkeypatch.setattr(
        reading,
        "compare_all",
        lambda folder, of, *partly: (compared.extend(one["name"] for one, _ in of), compare(folder, of, *partly)),
    )
    monkeypatch.setattr(session, "all_gather_bytes", lambda data: (compared.append("met"), [data])[1], raising=False)
    ck.load_checkpoint(saved, loaders=False)
    same(session.models["model"].state_dict(), model.state_dict())
    same(session.optimizers["optimizer"].state_dict(), optimizer.state_dict())
    twice = {name for name in FILES if compared.count(name) == 2}
    in_place = compared[len(compared) - compared[::-1].index("met") :]
    assert {*in_place} == twice  # no rank waits for another there
    assert twice == ({*FILES} if way == "cached" else set())
    after = tensors(session)
    stays = len(after) if way == "cached" else len(model.state_dict())
    assert [t.data_ptr() for t in after[:stays]] == [place for place, _ in before[:stays]]
    assert all(t._version > version for t, (_, version) in zip(after[:stays], before))
    for net, steps in ((model, optimizer), (session.models["model"], session.optimizers["optimizer"])):
        steps.zero_grad()
        net(torch.ones(4, 1024)).backward()
        steps.step()
    same(session.models["model"].state_dict(), model.state_dict())


def test_a_damage_anywhere_leaves_all_as_it_was(saved: Path, session: Any) -> None:
    before = [t.clone() for t in tensors(session)]
    for name in FILES:
        whole = (saved / name).read_bytes()
        for at in (9, 4 << 20, len(whole) - 1):  # the header; the middle, and the end, behind a chunk that is right
            (saved / name).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(EvenstepError, match=name):
                ck.load_checkpoint(saved, loaders=False)
            assert all(torch.equal(old, new) for old, new in zip(before, tensors(session))), (name, at)
        (saved / name).write_bytes(whole)
    ck.load_checkpoint(saved, loaders=False)


def test_what_does_not_fit_leaves_all_as_it_was(saved: Path, session: Any) -> None:
    session.models["model"].last = nn.Linear(1100, 4)
    before = [t.clone() for t in tensors(session)]
    with pytest.raises(EvenstepError, match=r"'last.bias' has the shape \[3\] in the checkpoint and \[4\] here"):
        ck.load_checkpoint(saved, loaders=False)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(session)))


def test_a_file_that_changes_after_it_was_right_is_told(
    saved: Path, session: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = reading.compare_all, []

    def compare_and_alter(folder: Path, wanted: Any, *partly: Any) -> None:
        compare(folder, wanted, *partly)
        if FILES[0] in [entry["name"] for entry, _ in wanted] and not compared:
            compared.append(wanted)
            with (saved / FILES[0]).open("r+b") as file:
                file.seek(4 << 20)
                file.write(b"torn")

    monkeypatch.setattr(reading, "compare_all", compare_and_alter)
    if way == "disk":  # it is read once
        ck.load_checkpoint(saved, loaders=False)
        return
    versions = [t._version for t in tensors(session)]
    with pytest.raises(
        EvenstepError, match=r"model.safetensors .*it changed while it was loaded.*holds parts.*\n *fix: load"
    ):
        ck.load_checkpoint(saved, loaders=False)
    assert compared
    assert all(t._version > version for t, version in zip(tensors(session), versions))  # a backward is not to use them


@pytest.mark.parametrize("error", ["gone", "memory"])
def test_a_second_reading_that_fails_is_told_as_that(saved: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    monkeypatch.setattr(reading._core, "file_is_cached", lambda path: True)
    prepared(monkeypatch, 1)
    fill, file, away = reading.StoredFiles.fill, saved / FILES[1], saved / "away"

    def no_memory(folder: Path, wanted: Any, *partly: Any) -> None:
        raise MemoryError

    def fails(self: Any, names: Any) -> None:
        if error == "memory":
            monkeypatch.setattr(reading, "compare_all", no_memory)
        else:
            file.rename(away)
        fill(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(reading.StoredFiles, "fill", fails)
        with pytest.raises(
            EvenstepError, match=r"could not be read a second time; .* may hold parts.*\n *fix: load"
        ) as told:
            ck.load_checkpoint(saved, loaders=False)
    assert ("there is no memory" if error == "memory" else FILES[1]) in str(told.value)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            '"$tensor": "optimizer/last.bias/exp_avg"',
            '"$tensor": "optimizer/last.bias/exp_avh"',
            "has no tensor 'optimizer/last.bias/exp_avh'",
        ),
        (
            '"$tensor": "optimizer/last.bias/exp_avg"',
            '"$tensoR": "optimizer/last.bias/exp_avg"',
            r"unknown kind '\$tensoR'",
        ),
        ('"last.bias": {"step"', '"lost.bias": {"step"', "it has states of lost.bias"),
    ],
    ids=["no tensor", "no kind", "no parameter"],
)
def test_a_state_that_makes_no_sense_leaves_all_as_it_was(
    saved: Path, session: Any, before: str, after: str, said: str
) -> None:
    forge(saved, before, after)
    old, lr = [t.clone() for t in tensors(session)], session.optimizers["optimizer"].param_groups[0]["lr"]
    session.optimizers["optimizer"].param_groups[0]["lr"] = lr * 2
    with pytest.raises(EvenstepError, match=said):
        ck.load_checkpoint(saved, loaders=False)
    assert all(torch.equal(a, b) for a, b in zip(old, tensors(session)))
    assert session.optimizers["optimizer"].param_groups[0]["lr"] == lr * 2


def test_an_optimizer_that_refuses_leaves_the_model_as_it_was(saved: Path, session: Any) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not this state")

    session.optimizers["optimizer"].register_load_state_dict_pre_hook(refuse)
    before = {key: value.clone() for key, value in session.models["model"].state_dict().items()}
    with pytest.raises(ValueError, match="not this state"):
        ck.load_checkpoint(saved, loaders=False)
    same(dict(session.models["model"].state_dict()), before)


class Odd(nn.Module):
    """Of its parameters two are one memory, and a buffer is a part of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(600, 1024))
        self.same = self.one
        self.flat = nn.Parameter(torch.randn(700, 1024))
        self.register_buffer("part", self.flat.data[:5])

    def forward(self, x: torch.Tensor) -> Any:
        return (x @ self.one.t()).square().mean() + (x @ self.flat.t()).square().mean()


def test_memory_of_several_names_comes_back(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training(2, Odd())
    use(monkeypatch, OneProcess(model=model, optimizer=optimizer))
    folder = Path(ck.checkpoint("odd"))
    mine = prepared(monkeypatch, 1, Odd())
    place = mine.models["model"].one.data_ptr()
    ck.load_checkpoint(folder, loaders=False)
    same(mine.models["model"].state_dict(), model.state_dict())
    same(mine.optimizers["optimizer"].state_dict(), optimizer.state_dict())
    assert mine.models["model"].one.data_ptr() == mine.models["model"].same.data_ptr() == place
    assert mine.models["model"].part.data_ptr() == mine.models["model"].flat.data_ptr()


def test_an_optimizer_that_has_no_state_yet_gets_one(saved: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training(3)
    fresh = prepared(monkeypatch, 0)
    place = fresh.models["model"].first.weight.data_ptr()
    ck.load_checkpoint(saved, loaders=False)
    same(fresh.optimizers["optimizer"].state_dict(), optimizer.state_dict())
    same(fresh.models["model"].state_dict(), model.state_dict())
    assert fresh.models["model"].first.weight.data_ptr() == place


def test_wider_state_than_its_parameter_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def bfloat(steps: int) -> Any:
        return prepared(monkeypatch, steps, nn.Sequential(nn.Linear(1024, 2048, bias=False)).bfloat16())

    def forward(module: Any, x: torch.Tensor) -> Any:
        return nn.functional.linear(x.bfloat16(), module[0].weight).float().square().mean()

    monkeypatch.setattr(nn.Sequential, "forward", forward)
    session = bfloat(1)
    for state in session.optimizers["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].float() / 3  # kept in fp32
    wanted = [t.clone() for t in tensors(session)]
    folder = Path(ck.checkpoint("wide"))
    session = bfloat(2)
    for state in session.optimizers["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].float()
    ck.load_checkpoint(folder, loaders=False)
    found = tensors(session)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
