"""A place with checkpoints that does not answer is given up, and told; one that goes on sending is waited for."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_session import empty_place  # noqa: F401
from run_jobs import Run

from evenstep import EvenstepError
from evenstep.answering import Silent, answer_of, limit
from evenstep.checkpoint_remote import Remote, Wish, bring


def silent(seconds: float) -> Silent:
    return Silent(f"nothing for {seconds:g} s")


@pytest.fixture
def never() -> Any:
    """What nobody sets while a test runs; threads that wait for it end with the test."""
    event = threading.Event()
    yield event
    event.set()


def test_what_never_answers_is_given_up(never: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", "0.05")
    with pytest.raises(Silent, match=r"nothing for 0\.05 s"):
        answer_of(never.wait, silent)
    with pytest.raises(Silent):
        answer_of(never.wait, silent, lambda: 7)  # some came, and no more does
    monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", "100")
    assert answer_of(lambda: 3, silent) == 3
    with pytest.raises(KeyError, match="mine"):
        answer_of(lambda: {}["mine"], silent)


def test_what_goes_on_coming_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many times the limit."""
    monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", "0.02")
    looks, done = 0, threading.Event()

    def arrived() -> int:
        nonlocal looks
        looks += 1
        if looks == 20:
            done.set()
        return looks

    assert answer_of(done.wait, silent, arrived) is True and looks >= 20


def test_how_long_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("", 120.0), ("7", 7.0), ("inf", math.inf)):
        monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", text)
        assert limit() == seconds
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", text)
        with pytest.raises(EvenstepError, match="is no time to wait"):
            limit()


@pytest.mark.parametrize("call", ["ls", "cat_file", "get_file"])
def test_who_does_not_answer_is_named(
    call: str, tmp_path: Path, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far/step-1").mkdir(parents=True)
    remote = Remote(f"file://{tmp_path}/far")
    monkeypatch.setenv("EVENSTEP_FETCH_TIMEOUT", "0.05")
    monkeypatch.setattr(type(remote._files), call, lambda *words, **named: never.wait())
    with pytest.raises(Silent) as told:
        if call == "get_file":
            remote._get("step-1", "model.safetensors", tmp_path)
        else:
            bring(Wish(remote.url, "here"), lambda _: None)
    words = str(told.value)
    assert f"file://{tmp_path}" in words and f" does not answer on host {socket.gethostname()}" in words
    assert "nothing came for 0.05 s" in words
    assert "fix: look whether it can be reached" in words and "EVENSTEP_FETCH_TIMEOUT" in words
    assert ("0.0 MB of it are here" in words) == (call == "get_file")
    assert not Path("here").exists()


@pytest.fixture
def mute(tmp_path: Path) -> str:
    """A place whose checkpoint's manifest is a pipe that nobody writes: whoever opens it waits."""
    (tmp_path / "far/step-00000001").mkdir(parents=True)
    os.mkfifo(tmp_path / "far/step-00000001/manifest.json")
    return f"file://{tmp_path}/far"


def test_a_job_says_so_and_ends(run: Run, script: Any, mute: str) -> None:
    done = run("-n", "1", "--resume", mute, script("print('it began')"), env={"EVENSTEP_FETCH_TIMEOUT": "0.5"})
    assert done.returncode == 3 and not done.stdout, done.stderr
    assert "does not answer on host" in done.stderr and "EVENSTEP_FETCH_TIMEOUT waits longer" in done.stderr
    wrong = run("-n", "1", "train.py", env={"EVENSTEP_FETCH_TIMEOUT": "soon"})
    assert wrong.returncode == 2 and "EVENSTEP_FETCH_TIMEOUT=soon is no time" in wrong.stderr
    wrong = run("-n", "1", "train.py", env={"EVENSTEP_UPLOAD_TIMEOUT": "-1"})
    assert wrong.returncode == 2 and "EVENSTEP_UPLOAD_TIMEOUT=-1 is no time" in wrong.stderr


@pytest.mark.more
def test_so_does_ckpt_fetch(program: Path, tmp_path: Path, environment: dict[str, str], mute: str) -> None:
    done = subprocess.run(
        [program, "ckpt", "fetch", mute, "here"],
        cwd=tmp_path,
        env={**environment, "EVENSTEP_FETCH_TIMEOUT": "0.5"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 3 and "does not answer on host" in done.stderr


LOSES = """
    import os, pathlib, shutil, signal, time
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    print("began at", es.step(), "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    for batch, in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == 4:
            far = pathlib.Path("far/step-00000003/manifest.json")
            while not far.exists():
                time.sleep(0.01)
            far.unlink()
            os.mkfifo(far)
            shutil.rmtree(os.environ["EVENSTEP_CHECKPOINT_DIR"])
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
def test_steps_that_may_be_there_alone_are_not_made_again(run: Run, script: Any, tmp_path: Path) -> None:
    words = ("-n", "1", "--name", "a", "--checkpoint-every", "1", "--checkpoint-to", f"file://{tmp_path}/far")
    done = run(*words, script(LOSES), timeout=300, env={"EVENSTEP_FETCH_TIMEOUT": "1"})
    assert done.returncode == 3, done.stderr
    assert "no checkpoint of the job is left here, and it is not begun anew" in done.stderr
    assert "that place is asked again for 1 s" in done.stderr, done.stderr
    assert "--resume auto goes on from there" in done.stderr, done.stderr
    assert done.stdout.count("began at") == 1
