"""Pinned staging of devices, over a made-up accelerator: what is asked of it, with what, in which order."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_accelerator import FakeAccelerators

from evenstep import accelerators, hybrid, hybrid_engine

DEVICE = torch.device("cuda", 3)
BYTES = 1024


def test_pieces_go_down_and_come_up_in_order() -> None:
    fake = FakeAccelerators(DEVICE)
    stage = hybrid._PinnedStage(DEVICE, BYTES, fake)
    assert [size for _, size in fake.pins] == [BYTES] * 3
    piece = torch.zeros(256)
    fake.own.put(lambda: piece.fill_(7))  # the caller's, before the all-reduce
    stage.begin()
    with stage.going_down():
        staged = stage.down(piece, 0)
        assert fake.current(DEVICE) is fake.streams[1]
    assert fake.current(DEVICE) is fake.own
    stage.ready(0)
    assert staged.tolist() == [7] * 256
    staged.add_(1)
    stage.up(piece, 0)
    assert fake.log == [
        "side 1 waits for own",
        "a copy down on side 1",
        "an event on side 1",
        "the host waits for side 1",
        "a copy up on own",
        "an event on own",
    ]
    fake.log.clear()
    with stage.going_down():  # the next call's first piece: the slot is not free before its last one is up
        stage.down(torch.ones(100, dtype=torch.int64), 0)
    assert piece.tolist() == [8] * 256
    assert fake.log == ["the host waits for own", "a copy down on side 1", "an event on side 1"]


def test_the_callers_stream_is_current_again_after_an_error() -> None:
    fake = FakeAccelerators(DEVICE)
    stage = hybrid._PinnedStage(DEVICE, BYTES, fake)
    with pytest.raises(KeyError), stage.going_down():
        raise KeyError
    assert fake.current(DEVICE) is fake.own


class Work:
    def __init__(self, fake: FakeAccelerators, gradient: Any) -> None:
        self._fake, self._gradient = fake, gradient

    def wait(self) -> None:
        """As torch's: the waiting thread's stream goes on after it."""
        self._fake.log.append("the work is waited for")
        self._fake.current(DEVICE).put(lambda: self._gradient.mul_(2))


def on_a_thread(stage: hybrid_engine.DeviceStage, job: Any) -> None:
    def run() -> None:
        stage.enter()
        job(stage)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_gradients_land_in_memory_that_is_pinned_once() -> None:
    fake = FakeAccelerators(DEVICE)
    arena = torch.zeros(BYTES, dtype=torch.uint8)
    second, none = torch.zeros(64, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    stage = hybrid_engine.DeviceStage(DEVICE, [arena, second, none], fake)
    assert fake.pins == [(arena.data_ptr(), BYTES), (second.data_ptr(), 64)]
    slot, gradient = arena.view(torch.float32)[8:16], torch.zeros(8)
    fake.own.put(lambda: gradient.fill_(3))  # backward's
    mark = stage.mark()
    fake.own.put(lambda: pytest.fail("what comes after the mark is not waited for"))

    on_a_thread(stage, lambda entered: entered.land([(slot, gradient)], mark, [Work(fake, gradient)]))
    assert slot.tolist() == [6] * 8
    assert fake.log == [
        "an event on own",
        "side 1 waits for an event of own",
        "the work is waited for",
        "a copy down on side 1",
        "an event on side 1",
        "the host waits for side 1",
    ]
    assert fake.current(DEVICE) is fake.own  # of this thread
    fake.log.clear()
    fake.own.jobs.pop()
    slot.fill_(5)
    risen = []

    def come_up(entered: hybrid_engine.DeviceStage) -> None:
        entered.rise([(gradient, slot)])
        risen.append(entered.mark())

    on_a_thread(stage, come_up)
    stage.follow(risen[0])
    assert fake.log == ["a copy up on side 2", "an event on side 2", "own waits for an event of side 2"]
    assert gradient.tolist() == [6] * 8
    fake.own.finish()
    assert gradient.tolist() == [5] * 8
    del stage
    gc.collect()
    assert not fake.pins


def test_memory_that_is_not_there_is_not_pinned() -> None:
    fake = FakeAccelerators(DEVICE)
    hybrid_engine.DeviceStage(DEVICE, [torch.empty(0, dtype=torch.uint8)], fake)
    hybrid_engine.DeviceStage(DEVICE, [], fake)
    assert not fake.pins


def test_which_devices_get_which_stage() -> None:
    memory = [torch.empty(0, dtype=torch.uint8)]
    assert type(hybrid_engine.stage_of(torch.device("cpu"), memory)) is hybrid_engine.HostStage
    assert type(hybrid_engine.stage_of(DEVICE, memory)) is hybrid_engine.DeviceStage


class Cudart:
    """What CUDA's runtime is told."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, *given: int) -> int:
        self.calls.append(("register", *given))
        return self.answer

    def cudaHostUnregister(self, *given: int) -> int:
        self.calls.append(("unregister", *given))
        return 0


def test_what_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and arguments, which nothing else here would find wrong."""
    asked: list[Any] = []

    def record(name: str) -> Any:
        return lambda *given, **named: asked.append((name, *given, named)) or name

    monkeypatch.setattr(torch, "Stream", record("stream"))
    monkeypatch.setattr(torch, "Event", record("event"))
    assert hasattr(torch.accelerator, "current_stream") and hasattr(torch.accelerator, "set_stream")
    monkeypatch.setattr(torch.accelerator, "current_stream", record("current"))
    monkeypatch.setattr(torch.accelerator, "set_stream", record("use"))
    real = accelerators.Accelerators()
    assert (real.stream(DEVICE), real.event(DEVICE), real.current(DEVICE)) == ("stream", "event", "current")
    real.use("a stream")
    assert asked == [
        ("stream", DEVICE, {}),
        ("event", DEVICE, {}),
        ("current", DEVICE, {}),
        ("use", "a stream", {}),
    ]
    for answer in (0, 1):
        cudart = Cudart(answer)
        monkeypatch.setattr(torch.cuda, "cudart", lambda cudart=cudart: cudart)
        unpin = real.pin(DEVICE, 4096, 512)
        assert cudart.calls == [("register", 4096, 512, 0)] and (unpin is None) == (answer != 0)
        if unpin is not None:
            unpin()
            assert cudart.calls[1:] == [("unregister", 4096)]
    assert real.pin(torch.device("xpu", 0), 4096, 512) is None


def test_streams_and_events_have_what_stages_call() -> None:
    for name in ("wait_stream", "wait_event"):
        assert callable(getattr(torch.Stream, name)), name
    for name in ("record", "synchronize"):
        assert callable(getattr(torch.Event, name)), name
