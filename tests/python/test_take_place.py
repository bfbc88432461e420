"""A process that takes a lost rank's place, and to which the state of training never comes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from evenstep import generation_joining, generations
from evenstep._core import EvenstepError


class Memory:
    """Of three ranks, of which rank 2 has joined in generation 1; waiting lets time pass."""

    ranks, refused = 3, False

    def __init__(self, far: bool) -> None:
        self.far, self.now, self.number, self.offered = far, 0.0, 1, False
        self.later: Callable[[], None] = lambda: None

    def offer(self, rank: int) -> None:
        self.offered = rank == 2

    def has(self, rank: int, number: int) -> bool:
        return rank < 2 or number > 0

    def given(self, number: int) -> None:
        return None

    def ungiven(self, number: int) -> None:
        return None

    def process(self, rank: int) -> int:
        return 0 if self.far else 100 + rank

    def wait(self, number: int, seconds: float) -> None:
        self.now += 50
        self.later()


def _recovery(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(generation_joining.time, "monotonic", lambda: memory.now)
    phases = SimpleNamespace(during=lambda phase: contextlib.nullcontext())
    environment = SimpleNamespace(rank=2, speeds=None, joins=True)
    session = SimpleNamespace(
        steps=SimpleNamespace(phases=phases), environment=environment, scheduler_steps=SimpleNamespace()
    )
    recovery = generations.Recovery(session, memory)  # type: ignore[arg-type]
    recovery._said = ""
    return recovery


@pytest.mark.parametrize(("far", "where"), [(True, "of another host"), (False, "of this host")])
def test_it_ends_with_who_has_not_given_it(far: bool, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(far)
    recovery = _recovery(memory, monkeypatch)
    with pytest.raises(EvenstepError) as error:
        recovery.take_place()
    text = str(error.value)
    assert (
        f"rank 2 cannot take a lost rank's place: the state of the training, which one of ranks 0, 1 {where} has"
        in text
    )
    assert "has not come within 600 s" in text and "EVENSTEP_STATE_PATIENCE" in text
    assert ("the hosts reach one another" in text) == far
    assert memory.offered and 600 < memory.now < 700


def test_each_generation_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_STATE_PATIENCE", "300")
    memory = Memory(True)

    def another() -> None:
        memory.number = 2 if memory.now >= 200 else 1

    memory.later = another
    with pytest.raises(EvenstepError, match="within 300 s"):
        _recovery(memory, monkeypatch).take_place()
    assert 500 < memory.now < 600
