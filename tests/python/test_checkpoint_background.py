"""Automatic checkpoints: written while training goes on, in a bounded memory, also when the rank that took one is dead."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError, checkpoint_background
from evenstep import checkpoint_memory as in_memory
from evenstep.checkpoint_background import Background
from evenstep.checkpoint_keeping import Keep

SCRIPT = """
    import os, signal, torch
    import evenstep as es
    from evenstep.checkpoint_background import Background

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=4)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        write, begun = Background.write, []

        def dies(self):
            begun.append(es.step())
            if len(begun) == 1:
                return write(self)
            {death}

        Background.write = dies
    first = True
    for x in loader:
        if first and es.is_main():
            print(f"attempt {{attempt}} begins at step {{es.step()}}")
        first = False
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if es.is_main():
        print("trained", es.step())
"""


@pytest.mark.parametrize(
    "death", ["os.kill(os.getpid(), signal.SIGKILL)", pytest.param("os._exit(3)", marks=pytest.mark.more)]
)
def test_what_a_dead_rank_had_taken_is_written_by_the_agent(start, script, tmp_path: Path, death: str) -> None:
    name = script(SCRIPT.format(death=death))
    code, text = start("-n", "2", "--checkpoint-every", "4", "--name", "dies", name).finish()
    assert code == 0, text
    folder = tmp_path / "runs/dies/checkpoints/step-00000008"
    assert f"the agent has written it: {folder}" in text
    assert "attempt 1 begins at step 8" in text and "trained 16" in text


def test_training_goes_on_while_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    session = use(monkeypatch, OneProcess(model=model))
    go_on, write = threading.Event(), ck._background.write

    def slow() -> None:
        go_on.wait()
        write()

    monkeypatch.setattr(ck._background, "write", slow)
    want = model.weight.detach().clone()
    session.step = 1
    ck.automatic(session)  # and does not wait, or this would never end
    with torch.no_grad():
        model.weight.zero_()
    assert ck.is_writing() and names() == []
    go_on.set()
    session.step = 2
    ck.automatic(session)  # waits for the first
    assert "step-00000001" in names()
    assert ck._background.join() is None and not ck.is_writing()
    for step, values in ((1, want), (2, torch.zeros(4, 4))):
        with files.TensorFile(Path(f"checkpoints/step-{step:08d}/model.safetensors")) as file:
            assert torch.equal(file.read("weight"), values)


def test_the_write_begins_once_the_other_ranks_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for this one's answer, and the writer would take its core meanwhile. One that is lost changes nothing."""
    session = use(monkeypatch, OneProcess(model=nn.Linear(4, 4)))
    write, broadcast, begun = ck._background.write, session.broadcast_bytes, threading.Event()

    def told(data: bytes | None, root: int = 0) -> bytes:
        assert ck.is_writing() and ck._background._asked.locked() and not begun.is_set()
        if session.step == 2:
            raise RuntimeError("a rank is lost")
        return bytes(broadcast(data, root))

    monkeypatch.setattr(ck._background, "write", lambda: (begun.set(), write()))
    monkeypatch.setattr(session, "broadcast_bytes", told)
    session.step = 1
    ck.automatic(session)
    assert begun.wait(60)  # before `join`, which would begin it
    assert ck._background.join() is None and names() == ["step-00000001"]
    begun.clear()
    session.step = 2
    with pytest.raises(RuntimeError, match="a rank is lost"):
        ck.automatic(session)
    assert begun.wait(60)
    assert ck._background.join() is None and names() == ["step-00000001", "step-00000002"]


def test_a_write_that_was_prepared_is_waited_for() -> None:
    background, written = Background(), []
    background.write = lambda: written.append("write")  # type: ignore[method-assign]
    background.prepare(lambda: written.append("after"), lambda error: False)
    assert background.busy and written == []
    assert background.join() is None and not background.busy and written == ["write", "after"]
    background.begin()  # nothing is left to begin
    assert background.join() is None and written == ["write", "after"]


def test_a_state_that_fits_no_second_time_is_written_at_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(300, 300)))
    monkeypatch.setattr(ck._background, "_has_room", lambda size: False)
    for session.step in (1, 2):
        ck.automatic(session)
        assert f"step-{session.step:08d}" in names()
    assert capsys.readouterr().err.count("written while training stands still") == 1


def test_the_first_of_every_so_many_steps_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP_EVERY", "100")
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    for session.step in (40, 80, 120, 160, 200, 240, 280, 320):
        ck.checkpoint()
    assert names() == [f"step-{step:08d}" for step in (120, 200, 280, 320)]


def test_of_an_interval_of_time_the_first_stays() -> None:
    keep = Keep(1, 0, 60.0)
    times = ["2026-11-22T10:00:01.000000Z", "2026-11-22T10:00:59.900000Z", "2026-11-22T10:01:00.000000Z"]
    first, same, next_ = (keep.period(7, time) for time in times)
    assert first == same and next_ == first + 1
    assert Keep(1).period(7, times[0]) is None


def test_the_last_one_that_was_read_back_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has loaded any: before the first goes, the newest is read back, and again when that one is to go."""
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_KEEP", "2")
    keeping = __import__("evenstep.checkpoint_keeping", fromlist=["verify"])
    session = use(monkeypatch, OneProcess(model=nn.Linear(1, 1)))
    read_back, verify = [], keeping.verify

    def watched(folder: Path, manifest: Any) -> None:
        read_back.append(folder.name)
        if folder.name == "step-00000005":
            (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
        verify(folder, manifest)

    monkeypatch.setattr(keeping, "verify", watched)
    for session.step in (1, 2, 3, 4):
        ck.checkpoint()
    assert read_back == ["step-00000003"] and names() == ["step-00000003", "step-00000004"]
    session.step = 5
    with pytest.warns(RuntimeWarning, match=r"an old checkpoint stays: .*step-00000005 is damaged"):
        ck.checkpoint()
    assert names() == ["step-00000003", "step-00000004", "step-00000005"]
    session.step = 6
    ck.checkpoint()
    assert read_back[1:] == ["step-00000005", "step-00000006"] and names() == ["step-00000005", "step-00000006"]


def test_a_process_without_memory_still_writes() -> None:
    """The thread was begun while there was memory; one that is begun now would not come (seen to hang in Thread.start)."""
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # one that hangs ends
        background = Background()
        background.begin_thread()
        written: list[str] = []
        background.write = lambda: written.append("write")  # type: ignore[method-assign]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        background.start(lambda: written.append("after"), lambda error: False)
        failed = background.join() is not None or background.busy
        os._exit(0 if written == ["write", "after"] and not failed else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_where_no_thread_can_begin_who_asks_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins none once the script has ended."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(checkpoint_background, "is_ending", lambda: True)
    background, told = Background(), []
    background.write = lambda: told.append("write")  # type: ignore[method-assign]
    background.start(lambda: told.append("after"), lambda error: False)
    assert told == ["write", "after"] and not background.busy and background.join() is None
    background.start(lambda: 1 / 0, lambda error: False)
    assert isinstance(background.join(), ZeroDivisionError) and background.join() is None

    def interrupted() -> None:
        raise KeyboardInterrupt

    failures: list[BaseException] = []
    with pytest.raises(KeyboardInterrupt):
        background.start(interrupted, lambda error: failures.append(error) or False)
    assert [type(one) for one in failures] == [KeyboardInterrupt]
    assert not background.busy and background.join() is None


def test_where_there_is_no_room_for_a_thread_the_save_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    background = Background()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        background.start(lambda: None, lambda error: False)
    assert not background.busy and background.join() is None


def test_a_fork_has_no_part_in_its_parents_write() -> None:
    background, go_on = Background(), threading.Event()
    background.write = go_on.wait  # type: ignore[method-assign]
    background.start(lambda: None, lambda error: False)
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        os._exit(1 if background.busy or background.join() is not None else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert background.busy
    go_on.set()
    assert background.join() is None and not background.busy


class _Broken:
    def state_dict(self) -> dict[str, int]:
        raise RuntimeError("an object that cannot say what it is")


def test_an_object_that_cannot_be_kept_in_memory_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENSTEP_CHECKPOINT_MEMORY", str(tmp_path))
    monkeypatch.setattr(in_memory, "_kept", in_memory._Kept())
    session = OneProcess(model=nn.Linear(2, 2), object_broken=_Broken())
    for _ in range(2):
        in_memory.keep(session)
    said = capsys.readouterr().err
    assert said.count("training goes on: an object that cannot say what it is") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_cannot_be_kept_is_told_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = use(monkeypatch, OneProcess(model=nn.Linear(2, 2), object_broken=_Broken()))
    told: list[bytes] = []
    monkeypatch.setattr(session, "broadcast_bytes", lambda data: told.append(data) or data, raising=False)
    with pytest.raises(EvenstepError, match=r"^RuntimeError: an object that cannot say what it is$") as raised:
        ck.checkpoint()
    assert isinstance(raised.value.__cause__, RuntimeError) and b"cannot say what it is" in told[0]
    for _ in range(2):
        ck.automatic(session)  # training goes on
    assert len(told) == 3
    assert capsys.readouterr().err.count("training goes on: RuntimeError: an object that cannot say what it is") == 1
