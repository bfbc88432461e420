"""Which of two checkpoints is the newer: by what they know, whatever the clocks were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from ckpt_samples import forge
from torch import nn

from evenstep.checkpoint_keeping import Keep, order_beside
from evenstep.checkpoint_order import created_in, order_of
from evenstep.checkpoint_remote import Remote, Wish, bring


def manifest_of(path: Path | str) -> dict[str, Any]:
    return files.read_manifest(Path(path))


def order(path: Path | str) -> list[int]:
    return list(manifest_of(path)["state"]["order"])


def set_clock(path: Path, year: int) -> None:
    """As if it had been written then."""
    created = manifest_of(path)["created"]
    forge(path, created, f"{year}{created[4:]}")


def save(session: Any, monkeypatch: pytest.MonkeyPatch, step: int, to: Path | None = None) -> Path:
    use(monkeypatch, session).step = step
    return Path(ck.checkpoint(to))


def test_the_text_sorts_as_the_numbers_do() -> None:
    def text(numbers: Any, year: int) -> str:
        return order_of({"created": f"{year}-01-01T00:00:00.000000Z", "state": {"order": numbers}})

    older = [text(None, 2030), text([1, 0, 2], 2029), text([1, 0, 10], 2028), text([1, 1, 1], 2027)]
    newer = [text([2, 0, 1], 2026), text([10, 0, 1], 2025), text([10, 0, 1], 2026)]
    assert sorted(older + newer) == older + newer
    assert created_in(newer[0]) == "2026-01-01T00:00:00.000000Z"
    for wrong in ([1, 2], [1, 2, -1], [1, 2, 3.0], [1, 2, True], [1, 2, 10**10], "123", {}):
        assert text(wrong, 2030) == text(None, 2030)


def test_clocks_set_back_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is kept, what goes on, what is fetched; here and at another place."""
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    session = OneProcess(model=nn.Linear(3, 3))
    remote = Remote(f"file://{tmp_path}/far")
    for step in (1, 2, 3):
        path = save(session, monkeypatch, step)
        set_clock(path, 2030 - step)
        remote.put(path)
        assert ck.newest_checkpoint() == path
    assert names() == ["step-00000002", "step-00000003"]
    assert [one.step for one in remote.whole()] == [3, 2, 1]
    assert bring(Wish(remote.url, "new"), lambda _: None) == Path("new/step-00000003")
    second, third = (order_of(manifest_of(f"checkpoints/step-0000000{n}")) for n in (2, 3))
    assert bring(Wish(remote.url, "new", after=second), lambda _: None) == Path("new/step-00000003")
    assert bring(Wish(remote.url, "new", after=third), lambda _: None) is None
    before = Wish(remote.url, "b", job="0" * 32, lineage=session.lineage, until=second)
    assert bring(before, lambda _: None) == Path("b/step-00000002")
    remote.retain(Keep(1), session.lineage)
    assert [one.step for one in remote.whole()] == [3]


def test_an_attempt_is_newer_than_all_it_goes_on_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = save(OneProcess(model=nn.Linear(3, 3)), monkeypatch, 1)
    assert order(first) == [1, 0, 1]
    session = OneProcess(model=nn.Linear(3, 3))  # without an agent: by what the folder has
    assert order(save(session, monkeypatch, 1)) == [2, 0, 1] and order(save(session, monkeypatch, 2)) == [2, 0, 2]
    forge(first, '"order": [1, 0, 1]', '"order": [1000000000, 0, 1]')
    use(monkeypatch, session)
    ck.load_checkpoint(first, random=False)  # back to another's, whatever the agent knew
    assert order(save(session, monkeypatch, 3)) == [1000000001, 0, 3]
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_TURN", "5")  # the agent has looked
    monkeypatch.setenv("EVENSTEP_JOB", "ab" * 16)
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", str(tmp_path / "fresh"))
    told = OneProcess(model=nn.Linear(3, 3))
    own = save(told, monkeypatch, 4, tmp_path / "own")
    assert order(own) == [5, 0, 1]
    ck.load_checkpoint(own, random=False)  # its own: no other turn
    told.recovery = SimpleNamespace(number=2)
    assert order(save(told, monkeypatch, 5, tmp_path / "next")) == [5, 2, 2]


def test_what_is_put_beside_others_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_beside(Path("checkpoints/start")) == [1, 0, 0]
    save(OneProcess(model=nn.Linear(3, 3)), monkeypatch, 1)
    assert order_beside(Path("checkpoints/start")) == [2, 0, 0]


def test_manifests_of_before_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are older, whatever their clock said; among one another they go by it."""
    session = OneProcess(model=nn.Linear(3, 3))
    old = [save(session, monkeypatch, step) for step in (7, 8)]
    for path, year in zip(old, (2040, 2039)):
        forge(path, '"order": ', '"was": ')
        set_clock(path, year)
    assert ck.newest_checkpoint() == old[0]
    new = save(OneProcess(model=nn.Linear(3, 3)), monkeypatch, 1)
    assert order(new) == [1, 0, 1] and ck.newest_checkpoint() == new
    ck.load_checkpoint(old[0], random=False)
