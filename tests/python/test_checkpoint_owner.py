"""A job that has lost its run folder to another host's puts no checkpoint in place there any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_session import OneProcess, ck, empty_place, names, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError

SIGN = Path("run/evenstep.running")


def put_sign(owner: str, host: str, process: int) -> None:
    SIGN.parent.mkdir(exist_ok=True)
    SIGN.write_text(f"boot pid:[1]\n{host}\n{process}\n{owner}\n0\nmark\n")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVENSTEP_RUN_SIGN", str(SIGN.parent.absolute()))
    monkeypatch.setenv("EVENSTEP_JOB", "mine")
    put_sign("mine", "near", 100)
    session = use(monkeypatch, OneProcess(model=nn.Linear(3, 3)))
    session.step = 1
    ck.checkpoint()
    assert names() == ["step-00000001"]
    session.step = 2
    return session


def taken_over_behind(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Once this has been called, another host's job has the folder."""
    call: Callable[..., Any] = getattr(owner, name)

    def then_lost(*words: Any, **options: Any) -> Any:
        result = call(*words, **options)
        put_sign("somebody", "far", 4711)
        return result

    monkeypatch.setattr(owner, name, then_lost)


LOST = "step-00000002 is not written: run folder .*run is not this process's any more: it was taken over from host far"


def test_a_folder_that_is_lost_while_its_checkpoint_is_written(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_over_behind(monkeypatch, ck, "write_tensors")
    with pytest.raises(EvenstepError, match=LOST) as caught:
        ck.checkpoint()
    assert "another --name and --resume" in str(caught.value)
    assert names() == ["step-00000001"]


def test_a_folder_that_is_lost_before_a_copy_is_written(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_over_behind(monkeypatch, ck._background, "take")
    ck.checkpoint(wait=False)
    with pytest.raises(EvenstepError, match=LOST):
        raise ck._background.join()
    assert names() == ["step-00000001"]


def test_a_folder_that_is_kept(session: Any) -> None:
    ck.checkpoint(wait=False)
    assert ck._background.join() is None
    session.step = 3
    put_sign("mine", "third", 300)  # the next leader's
    ck.checkpoint()
    assert names() == ["step-00000001", "step-00000002", "step-00000003"]
