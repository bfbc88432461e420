"""A backward pass of several trainings (the whole job's, process sets'), of which one fails: the others hear of it, so that
their ranks wait for nobody, and nothing of the pass is left for the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from evenstep import passes as module
from evenstep.passes import Passes


class Training:
    """One session and its steps, as the passes see them."""

    def __init__(self, fails: str = "") -> None:
        self.steps, self.syncs, self.name, self.fails = self, [], "set", fails
        self.syncs.append(self)  # what was prepared for it
        self.begun = False
        self.counted_share = SimpleNamespace(goes_on=lambda: None)
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Any:
        def record(*_: Any) -> None:
            self.calls.append(call)
            if call == self.fails:
                raise KeyError(call)

        return record


def trainings(monkeypatch: pytest.MonkeyPatch, *fails: str) -> tuple[Passes, list[Training]]:
    made = [Training(each) for each in fails]
    monkeypatch.setattr(module, "inside_a_set", lambda: False)
    monkeypatch.setattr(module, "sessions", lambda: made)
    return Passes(), made


def test_one_that_refuses_a_pass_ends_it_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, made = trainings(monkeypatch, "", "before_backward", "")
    with pytest.raises(KeyError):
        passes.before_backward(None)
    assert [one.calls for one in made] == [["before_backward", "failed_backward"], ["before_backward"], []]
    passes.nested_backward()  # of a pass that Evenstep was not told of: nobody's
    assert [len(one.calls) for one in made] == [2, 1, 0]


def test_one_that_fails_at_the_end_ends_it_for_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, made = trainings(monkeypatch, "", "after_backward", "")
    passes.before_backward(None)
    with pytest.raises(KeyError):
        passes.after_backward()
    assert [one.calls[1:] for one in made] == [["after_backward"], ["after_backward"], ["failed_backward"]]
    passes.failed_backward(KeyError())
    assert [len(one.calls) for one in made] == [2, 2, 2]


def test_a_pass_that_fails_is_over_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, made = trainings(monkeypatch, "", "")
    passes.before_backward(None)
    passes.failed_backward(ValueError())
    passes.failed_backward(ValueError())
    assert [one.calls for one in made] == [["before_backward", "failed_backward"]] * 2
