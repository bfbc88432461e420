"""What automatic checkpoints wait for on a full disk: what the next one writes, not what it shares."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from test_checkpoint_shared import partly_frozen, train

from evenstep import checkpoint_room

MB = 10**6
FULL = OSError(errno.ENOSPC, "full")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made_up = SimpleNamespace(f_bavail=0, f_frsize=1)
    monkeypatch.setattr(checkpoint_room.os, "statvfs", lambda path: made_up)
    return made_up


@pytest.fixture
def session() -> Any:
    return SimpleNamespace(name="", telemetry=SimpleNamespace(event=lambda *words: None))


def lacks(room: Any, disk: Any, free: int) -> bool:
    disk.f_bavail = free
    return bool(room.is_lacking())


def test_what_the_last_one_wrote_is_waited_for(tmp_path: Path, disk: Any, session: Any, capsys: Any) -> None:
    room = checkpoint_room.Room()
    room.took(session, 10 * MB)
    disk.f_bavail = 9 * MB
    room.begin(session, tmp_path, 100 * MB, True)
    assert room.refused(session, 1, FULL)
    assert "once it has 10.1 MB of room" in capsys.readouterr().err
    assert lacks(room, disk, 9 * MB) and lacks(room, disk, 10 * MB) and not lacks(room, disk, 11 * MB)
    room.begin(session, tmp_path, 100 * MB, True)  # with 11 MB
    assert room.refused(session, 2, FULL)  # more has changed than before
    assert lacks(room, disk, 11 * MB) and lacks(room, disk, 20 * MB) and not lacks(room, disk, 101 * MB)
    room.written(session, 3)
    disk.f_bavail = 20 * MB
    room.begin(session, tmp_path, 100 * MB, False)  # nothing to share with
    assert room.refused(session, 4, FULL) and lacks(room, disk, 30 * MB) and not lacks(room, disk, 101 * MB)


def test_one_is_tried_where_the_disk_has_more_room_than_at_the_last_try(
    tmp_path: Path, disk: Any, session: Any
) -> None:
    """How much is shared is not known, as in a process that has just begun."""
    room = checkpoint_room.Room()
    disk.f_bavail = 5 * MB
    for free in (5 * MB, 25 * MB):
        room.begin(session, tmp_path, 100 * MB, True)
        assert room.refused(session, 1, FULL)
        assert lacks(room, disk, free) and lacks(room, disk, free + 12 * MB) and not lacks(room, disk, free + 13 * MB)
        disk.f_bavail = 25 * MB
    room.begin(session, tmp_path, 100 * MB, True)  # there was room, and then another process took it
    disk.f_bavail = 0
    assert room.refused(session, 2, FULL) and lacks(room, disk, MB) and not lacks(room, disk, 14 * MB)


def test_a_disk_on_which_only_what_changed_fits(
    small_disk: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place = small_disk("4m")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_DIR", str(place / "checkpoints"))
    monkeypatch.setattr(ck, "_room", checkpoint_room.Room())
    model, optimizer = partly_frozen()
    session = use(monkeypatch, OneProcess(model=model, optimizer=optimizer))

    def save() -> str:
        session.step += 1
        train(model, optimizer)
        ck.automatic(session)
        assert ck._background.join() is None
        return str(capsys.readouterr().err)

    def fill(left: int) -> None:
        """All but so many bytes."""
        (place / "filler").unlink(missing_ok=True)
        disk = checkpoint_room.os.statvfs(place)
        with (place / "filler").open("wb") as file:
            file.write(bytes(disk.f_bavail * disk.f_frsize - left))

    assert save() == save() == ""
    fill(1 << 13)
    assert "checkpoints wait from step 3 on" in save()
    fill(600_000)  # the frozen part has more than twice as many
    assert "the disk has room again: the checkpoint of step 4 is whole" in save()
    newest = place / "checkpoints" / names(place / "checkpoints")[-1]
    files.verify(newest, files.read_manifest(newest))
    assert torch.equal(model[0].weight, files.TensorFile(newest / "model-00002-of-00002.safetensors").read("0.weight"))
