"""`evenstep ckpt verify | show | diff | convert | export | reshard | repair` with URLs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, use  # noqa: F401
from ckpt_samples import ckpt
from torch import nn

from evenstep.checkpoint_elsewhere import work
from evenstep.checkpoint_remote import Remote

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["memory", "file"])
def url(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield "memory://far/run" if request.param == "memory" else f"file://{tmp_path}/far/run"
    fsspec.filesystem("memory").store.clear()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def command(program: Path, empty_place: None, capsys: pytest.CaptureFixture[str]) -> Command:  # noqa: F811
    """In this process, where memory:// is."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = work(str(program), str(words[0]), [str(word) for word in words[1:]])
        return code, *capsys.readouterr()

    return run


def save(monkeypatch: pytest.MonkeyPatch, step: int = 1) -> Path:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 20))
    use(monkeypatch, OneProcess(model=model)).step = step
    path: Path = ck.checkpoint()
    return path.absolute()


def alter(url: str, at: int, name: str = "model.safetensors") -> None:
    files, path = fsspec.core.url_to_fs(f"{url}/{name}")
    data = bytearray(files.cat_file(path))
    data[at] ^= 1
    files.pipe_file(path, bytes(data))


def test_verify(url: str, command: Command, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words and the exit codes of one here."""
    for step in (1, 2):
        Remote(url).put(save(monkeypatch, step))
    one, two = f"{url}/step-00000001", f"{url}/step-00000002"
    assert command("verify", one, two) == (0, f"{one}: whole\n{two}: whole\n", "")
    for at in (5, -1):
        alter(one, at)
        here = Path("checkpoints/step-00000001/model.safetensors")
        data = bytearray(here.read_bytes())
        data[at] ^= 1
        here.write_bytes(data)
        code, out, _ = command("verify", one, two)
        local = ckpt(program, "verify", here.parent)
        assert code == local.returncode == 6
        assert out == local.stdout.replace(str(here.parent), one) + f"{two}: whole\n"
    assert [entry["whole"] for entry in json.loads(command("verify", one, two, "--json")[1])] == [False, True]
    alter(two, 40, "manifest.json")
    assert "manifest.json is damaged" in command("verify", two)[1]
    files, path = fsspec.core.url_to_fs(f"{one}/random.safetensors")
    files.rm_file(path)
    assert "random.safetensors is missing" in command("verify", one)[1]
    code, out, err = command("verify", f"{url}/none")
    assert code == 3 and "is no checkpoint" in err and out == ""
    assert command("verify", one, "checkpoints/step-00000001")[0] == 2


def test_diff_and_show(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(monkeypatch, step) for step in (1, 2)]
    one, two = (f"{url}/{Remote(url).put(path)}" for path in paths)
    assert command("diff", one, paths[0])[0] == 0
    code, out, _ = command("diff", "--json", one, two)
    assert code == 1 and json.loads(out)["a"] == one and json.loads(out)["b"] == two
    code, out, _ = command("show", one)
    assert code == 0 and out.startswith(f"{one}\n") and "1.weight" in out
    assert command("diff", one, f"{url}/none")[0] == 3
    alter(two, -1)
    code, _, err = command("diff", one, two)
    assert code == 6 and f"checkpoint {two} is damaged" in err


@pytest.mark.parametrize("url", ["memory", pytest.param("file", marks=pytest.mark.more)], indirect=True)
def test_convert_export_reshard(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(monkeypatch)
    one = f"{url}/{Remote(url).put(path)}"
    code, out, err = command("export", one, "--to", f"{url}/hf", "--python", sys.executable)
    assert code == 0 and out.startswith(f"{url}/hf: a Hugging Face folder") and one in out, err
    assert command("diff", one, f"{url}/hf/model.safetensors")[0] == 0
    assert command("convert", "--as", "six-key", one, f"{url}/all.pt")[0] == 0
    code, _, err = command("convert", one, f"{url}/all.pt")
    assert code == 3 and "--force" in err
    assert command("convert", "--force", one, f"{url}/all.pt")[0] == 0
    assert command("convert", f"{url}/all.pt", "here")[0] == 0
    assert command("diff", f"{one}/model.safetensors", "here")[0] == 0
    assert command("reshard", one, f"{url}/two", "--files=2")[0] == 0
    assert command("verify", f"{url}/two")[0] == 0 and command("diff", one, f"{url}/two")[0] == 0
    assert command("reshard", one, f"{url}/hf", "--files=2", "--force")[0] == 3  # a folder that is no checkpoint
    code, _, err = command("export", one, "--to", "here", "--config", f"{url}/config.json")
    assert code == 2 and "takes no URL there" in err


def test_repair(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(monkeypatch)
    one = f"{url}/{Remote(url).put(path)}"
    copy = shutil.copytree(path, "copy")
    alter(one, -1)
    code, out, err = command("repair", one, "--from", copy)
    assert code == 0 and out.startswith(f"{one}: whole again"), err
    assert command("verify", one)[0] == 0
    alter(one, 30, "manifest.json")
    assert command("repair", one, f"--from={copy}")[0] == 0 and command("verify", one)[0] == 0
    (path / "random.safetensors").unlink()
    alter(one, -1)  # both are damaged, in different places
    assert command("repair", path, "--from", one)[0] == 0
    assert command("repair", one, "--from", path)[0] == 0 and command("verify", one)[0] == 0


def test_an_upload_that_fails_leaves_nothing(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    one = f"{url}/{Remote(url).put(save(monkeypatch))}"
    files, root = fsspec.core.url_to_fs(url)
    put = type(files).put_file

    def fail(self: Any, source: str, to: str, **named: Any) -> None:
        put(self, source, to, **named)
        raise OSError("no more room")

    monkeypatch.setattr(type(files), "put_file", fail)
    code, out, err = command("export", one, "--to", f"{url}/hf")
    assert code == 3 and "hf was not uploaded" in err and out == ""
    assert files.find(f"{root}/hf") == []


STANDS_STILL = """
    import sys, threading
    from fsspec.implementations.local import LocalFileSystem
    from evenstep.checkpoint_elsewhere import main

    def get(self, *words, **named):
        print("begun", flush=True)
        threading.Event().wait()

    LocalFileSystem.get_file = get
    main()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.more) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_leaves_nothing(
    number: signal.Signals,
    program: Path,
    tmp_path: Path,
    empty_place: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a command that was killed, once the next one runs; what another one has is left alone."""
    path = save(monkeypatch)
    temporary = tmp_path / "temporary"
    killed, living = temporary / "evenstep-ckpt-killed", temporary / "evenstep-ckpt-living"
    for folder in (killed, living):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[4:] for line in STANDS_STILL.splitlines()))
    words = [sys.executable, str(script), str(program), "show", f"file://{path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)}) as child:
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        assert len(list(temporary.iterdir())) == 2 and not killed.exists()
        child.send_signal(number)
        assert child.wait(60) == 128 + number
    assert list(temporary.iterdir()) == [living]
    os.close(lock)


def test_the_program(program: Path, tmp_path: Path, empty_place: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = save(monkeypatch)
    url = f"file://{tmp_path}/far/{Remote(f'file://{tmp_path}/far').put(path)}"
    done = ckpt(program, "diff", url, path)
    assert done.returncode == 0 and done.stdout.startswith("the same: "), done.stderr
    alter(url, -1)
    assert ckpt(program, "verify", url).returncode == 6
    assert "usage" in ckpt(program, "verify", url, "--help").stdout
