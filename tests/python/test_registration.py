"""The script's own init_process_group: in a process that takes a lost rank's place its group of all ranks is refused, while
they have not met, and no other one; in any rank the agent is told while it is there."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest

from evenstep import _core, registration

OF_THE_AGENT = 7


class _Backend:
    def __init__(self) -> None:
        self.backend_list: list[str] = []

        self.default_device_backend_map = {"cpu": "gloo", "cuda": "nccl"}

    def register_backend(self, name: str, *_: Any, devices: Sequence[str], **__: Any) -> None:
        """As torch 2.6's, of devices whose backend it does not have in its list."""
        self.backend_list.append(name)
        self.default_device_backend_map.update({device: name for device in devices if device not in ("cpu", "cuda")})


def _generation(fd: int) -> object:
    if fd != OF_THE_AGENT:
        raise _core.EvenstepError("no generations")
    return object()


def _plain(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> tuple[Any, ...]:
    return url, rank, world_size, options


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that takes a place in a job of 3, before its first call of Evenstep's."""
    variables = {"EVENSTEP_JOINS": "1", "EVENSTEP_GENERATION_FD": str(OF_THE_AGENT), "RANK": "1", "WORLD_SIZE": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_core, "Generation", _generation)
    monkeypatch.setitem(sys.modules, "evenstep.session", types.SimpleNamespace(_session=None))
    return monkeypatch


def _registered() -> Any:
    """torch.distributed.distributed_c10d, of which this is all that counts here."""
    c10d = types.SimpleNamespace(Backend=_Backend(), rendezvous=_plain)
    registration._register(c10d)  # type: ignore[arg-type]
    assert c10d.Backend.backend_list == ["evenstep"]
    return c10d


def test_torch_chooses_the_backend_as_before_where_none_is_named() -> None:
    assert _registered().Backend.default_device_backend_map == {"cpu": "gloo", "cuda": "nccl"}


def _refused(c10d: Any, url: str, *arguments: int) -> bool:
    try:
        assert c10d.rendezvous(url, *arguments, timeout=5) == (url, *(*arguments, -1, -1)[:2], {"timeout": 5})
    except _core.EvenstepError as error:
        assert "a process that takes a lost rank's place (--recovery replace) cannot come into the group" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("url", "asked", "refused"),
    [
        ("env://", (), True),
        ("env://", (1, 3), True),
        ("tcp://host:29500", (1, 3), True),
        ("tcp://host:29500?rank=1&world_size=3", (), True),
        ("file:///tmp/private", (0, 1), False),
        ("tcp://host:29500?rank=0&world_size=2", (), False),
        ("tcp://host:29500", (), False),  # torch says what is missing
    ],
)
def test_the_group_of_all_ranks_alone_is_refused(
    in_place: Any, url: str, asked: tuple[int, ...], refused: bool
) -> None:
    assert _refused(_registered(), url, *asked) == refused


def test_who_is_a_member_comes_into_all_groups(in_place: Any) -> None:
    c10d, session = _registered(), types.SimpleNamespace(joining=True)
    in_place.setattr(sys.modules["evenstep.session"], "_session", session)
    assert _refused(c10d, "env://")
    session.joining = False
    assert not _refused(c10d, "env://")


def test_so_do_processes_that_it_starts(in_place: Any) -> None:
    c10d = _registered()
    process = os.getpid()
    in_place.setattr(os, "getpid", lambda: process + 1)  # forked
    assert not _refused(c10d, "env://")
    in_place.setenv("EVENSTEP_GENERATION_FD", "99")  # with its variables, without its descriptors
    assert not _refused(_registered(), "env://")


@pytest.mark.parametrize(("name", "value"), [("EVENSTEP_JOINS", "0"), ("EVENSTEP_GENERATION_FD", "")])
def test_torchs_own_is_left_alone_elsewhere(in_place: Any, name: str, value: str) -> None:
    in_place.setenv(name, value)
    assert _registered().rendezvous is _plain


class _Ring:
    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []

    def event(self, event: int, step: int, value: int, words: str) -> None:
        self.events.append((event, value))


def _watched(monkeypatch: pytest.MonkeyPatch, meeting: Any) -> tuple[Any, _Ring]:
    """torch's rendezvous in a rank of three, of which an agent reads, and what that reads."""
    from evenstep import ring

    written = _Ring()
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("EVENSTEP_TELEMETRY_FD", "5")
    monkeypatch.delenv("EVENSTEP_JOINS", raising=False)
    monkeypatch.setattr(ring, "watched_ring", lambda: written)
    c10d = types.SimpleNamespace(Backend=_Backend(), rendezvous=meeting, init_process_group=lambda: None)
    registration._register(c10d)  # type: ignore[arg-type]
    return c10d, written


@pytest.mark.parametrize("fails", [False, True])
def test_the_agent_is_told_for_as_long_as_the_call_takes(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def meeting(url: str, rank: int, world_size: int, **_: Any) -> Any:
        assert written.events[-1][0] == _core.EVENT_OPENING
        yield "store", 1, 3

    def init_process_group() -> None:
        met = c10d.rendezvous("env://", timeout=5)
        assert next(met) == ("store", 1, 3)
        assert written.events[-1][0] == _core.EVENT_OPENING  # what comes after the store may wait for others, too
        if fails:
            raise RuntimeError("no such interface")

    c10d, written = _watched(monkeypatch, meeting)
    for time in (1, 2):
        try:
            init_process_group()
        except RuntimeError:
            assert fails
        assert written.events[-2:] == [(_core.EVENT_OPENING, time), (_core.EVENT_OPENED, time)]


def test_who_keeps_the_exception_has_left_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the call's frame, which holds what torch met by."""
    from evenstep import ring

    written, kept = _Ring(), []

    def meeting(*_: Any, **__: Any) -> Any:
        yield "store", 1, 3

    def init_process_group() -> None:
        met = c10d.rendezvous("env://", timeout=5)
        next(met)
        raise RuntimeError("no such interface")

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("EVENSTEP_TELEMETRY_FD", "5")
    monkeypatch.delenv("EVENSTEP_JOINS", raising=False)
    monkeypatch.setattr(ring, "watched_ring", lambda: written)
    c10d = types.SimpleNamespace(Backend=_Backend(), rendezvous=meeting, init_process_group=init_process_group)
    torch_distributed = types.SimpleNamespace(init_process_group=init_process_group)  # which was imported before
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed)
    registration._register(c10d)  # type: ignore[arg-type]
    told = []
    for time, module in ((1, c10d), (2, torch_distributed)):
        with pytest.raises(RuntimeError, match="no such interface") as caught:
            module.init_process_group()
        kept.append(caught)
        told += [(_core.EVENT_OPENING, time), (_core.EVENT_OPENED, time)]
        assert written.events == told
    kept.clear()
    del caught
    gc.collect()
    assert written.events == told  # each once


def test_of_a_group_of_some_ranks_the_agent_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d, written = _watched(monkeypatch, _plain)
    assert c10d.rendezvous("file:///tmp/private", 0, 2) == ("file:///tmp/private", 0, 2, {})
    assert written.events == []


# -- torch's compiler --


def test_older_compilers_take_it_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Variable:  # as torch 2.7 has it
        @staticmethod
        def is_process_group(value: object) -> bool:
            return value == "torch's own"

    class Group:
        pass

    monkeypatch.setitem(sys.modules, "evenstep.backend", types.SimpleNamespace(EvenstepGroup=Group))
    module = types.SimpleNamespace(ProcessGroupVariable=Variable)
    for _ in range(2):
        registration._know_as_group(module)  # type: ignore[arg-type]
        asked = Variable.is_process_group
        assert [asked("torch's own"), asked(Group()), asked("another"), asked(None)] == [True, True, False, False]
        assert not hasattr(asked.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    registration._know_as_group(types.SimpleNamespace())  # type: ignore[arg-type]  # later ones have none
