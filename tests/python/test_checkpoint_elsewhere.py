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

import ckpt_samples as samples
import fsspec
import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, use  # noqa: F401
from ckpt_samples import STATE, ckpt
from torch import nn

from evenstep import checkpoint_elsewhere
from evenstep._core import EvenstepError
from evenstep.checkpoint_elsewhere import Place, work
from evenstep.checkpoint_remote import Remote, fetch_newest
from evenstep.convert_contents import Refused

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["memory", "file"])
def url(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield "memory://far/run" if request.param == "memory" else f"file://{tmp_path}/far/run"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
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
    assert command("verify", "--", two)[0] == 6
    code, _, err = command("verify", "--bogus", two)
    assert code == 2 and "unknown option --bogus" in err


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
    code, _, err = command("convert", "--as", "hf", one, one, "--force")
    assert code == 2 and "is the input" in err and command("verify", one)[0] == 0


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


def names(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in files.find(root))


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "file"])
def test_force_leaves_the_new_alone(kind: str, url: str, empty_place: None) -> None:  # noqa: F811
    """As on a disk: nothing of the old lies in it, or beside it."""
    state, tensors = {**STATE, "lineage": "0123456789abcdef"}, {"a": torch.zeros(3)}
    for folder in ("old", "new"):
        Path(folder).mkdir()
    old = samples.save(Path("old/one").absolute(), {"a.safetensors": tensors, "b.safetensors": tensors}, state)
    new = Path("new/one").absolute()
    if kind == "checkpoint":
        samples.save(new, {"a.safetensors": tensors}, state)
    elif kind == "folder":
        (new / "part").mkdir(parents=True)
        (new / "part/0.bin").write_bytes(b"weights")
    else:
        new.write_bytes(b"weights")
    place = Place(f"{url}/one")
    assert place.send(old, False) == place.shown
    with pytest.raises(Refused, match="exists"):
        place.send(new, False)
    assert place.send(new, True) == place.shown
    assert names(url) == sorted(
        one.relative_to(new.parent).as_posix() for one in (new, *new.rglob("*")) if one.is_file()
    )
    if kind == "file":
        with pytest.raises(Refused, match="is a file, and is not replaced"):
            place.send(old, True)
        assert place._files.cat_file(place._place) == b"weights" and names(url) == ["one"]
    elif kind == "folder":
        place._files.pipe_file(f"{place._place}/manifest.json", b'{"name": "a page"}')
        with pytest.raises(Refused, match="no checkpoint"):
            place.send(old, True)
    else:
        assert place.send(old, True) == place.shown and place.problems(Path("again")) == []


@pytest.mark.parametrize("error", [OSError("the network is unreachable"), SystemExit(130)])
def test_what_fails_leaves_the_old(
    error: BaseException,
    url: str,
    empty_place: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first byte; and what somebody has put there meanwhile."""
    Path("new").write_bytes(b"new")
    place = Place(f"{url}/w")
    for force in (True, False):

        def fail(self: Place, source: Path, to: str) -> None:
            self._make(self._root)
            self._pipe(self._place, b"old")
            raise error

        with monkeypatch.context() as change, pytest.raises((EvenstepError, SystemExit)):
            change.setattr(Place, "_send", fail)
            place.send(Path("new"), force)
        assert place._files.cat_file(place._place) == b"old" and names(url) == ["w"]
        place._files.rm_file(place._place)
    send = Place._send

    def slow(self: Place, source: Path, to: str) -> None:
        send(self, source, to)
        self._pipe(self._place, b"another's")

    monkeypatch.setattr(Place, "_send", slow)
    with pytest.raises(Refused, match="exists"):
        place.send(Path("new"), False)
    assert place._files.cat_file(place._place) == b"another's" and names(url) == ["w"]


@pytest.mark.parametrize("call", ["rm", "mv"])
@pytest.mark.parametrize("error", [OSError("the network is unreachable"), SystemExit(130)])
@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_the_new_is_kept_once_the_old_goes(
    error: BaseException,
    call: str,
    url: str,
    empty_place: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The old is removed, or in part, and a later file cannot be moved: what was sent is all there is. The error says where."""
    for name in ("new/a", "new/b"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(name.encode())
    place = Place(f"{url}/w")
    place._pipe(place._place, b"old")
    files = type(place._files)
    do = getattr(files, call)

    def fail(self: Any, path: str, *words: Any, **named: Any) -> None:
        if call == "rm" or path.endswith("/b"):
            raise error
        do(self, path, *words, **named)

    with monkeypatch.context() as change, pytest.raises((Refused, SystemExit)) as raised:
        change.setattr(files, call, fail)
        place.send(Path("new"), True)
    found = names(url)
    part = next(name for name in found if name.endswith(".evenstep.partial/b")).rpartition("/")[0]
    assert found == ["w", f"{part}/a", f"{part}/b"] if call == "rm" else {"w/a", f"{part}/b"} <= set(found)
    said = raised.value.what if isinstance(raised.value, Refused) else capsys.readouterr().err
    assert f"what is not whole at {place.shown} is at {url}/{part}" in said


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_stays_of_the_way_is_no_failure(
    url: str,
    empty_place: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new is whole in its place; and large files have time to be moved, which may be a copy."""
    sizes, tell = [], Place._tell

    def told(self: Place, what: str, call: Any, *words: Any, **named: Any) -> Any:
        if what == "its folder is removed":
            raise OSError("the network is unreachable")
        if "is put in its place" in what:
            sizes.append(named["size"])
        return tell(self, what, call, *words, **named)

    monkeypatch.setattr(Place, "_tell", told)
    Path("new").mkdir()
    Path("new/a").write_bytes(b"12345")
    place = Place(f"{url}/w")
    place._pipe(place._place, b"old")
    assert place.send(Path("new"), True) == place.shown and sizes == [5]
    assert place._files.cat_file(f"{place._place}/a") == b"12345"


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_names_that_drivers_take_for_patterns(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that these match is removed or moved."""
    one = f"{url}/{Remote(url).put(save(monkeypatch))}"
    for name in ("oa", "ob"):
        fsspec.filesystem("memory").pipe_file(f"/far/run/{name}", b"another's")
    before = names(url)
    for name in ("o[ab]", "o?", "o*", "o[ab]/w"):
        code, _, err = command("export", one, "--to", f"{url}/{name}", "--force")
        assert code == 2 and "for a pattern" in err
    Path("new").mkdir()
    Path("new/o[ab]").write_bytes(b"new")
    with pytest.raises(Refused, match="for a pattern"):
        Place(f"{url}/new").send(Path("new"), False)
    assert names(url) == before
    monkeypatch.setattr(Place, "_is_store", lambda self: True)

    def fail(self: Place, source: Path, to: str) -> None:
        self._pipe(f"{self._place}/oa", b"another's")
        raise OSError("the network is unreachable")

    monkeypatch.setattr(Place, "_send", fail)
    with pytest.raises(EvenstepError, match="was not uploaded"):
        Place(f"{url}/new").send(Path("new"), False)
    assert names(url) == sorted([*before, "new/oa"])


def test_the_input_in_another_spelling(
    command: Command,
    empty_place: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its path, through a link, from the other side: it is not replaced."""
    path = save(monkeypatch)
    Path("link").symlink_to(path.parent)
    spellings = [
        f"file://{path}",
        f"local://{path.parent}/./{path.name}",
        f"file://{Path('link').absolute()}/{path.name}",
    ]
    for one in spellings:
        for source, to in ((path, one), (one, path), (one, Path("link", path.name)), (one, spellings[0])):
            code, _, err = command("export", source, "--to", to, "--force")
            assert code == 2 and f"{source} is the input" in err, err
    assert command("verify", spellings[0])[0] == 0
    code, _, err = command("export", path, "--to", f"file://{path}-other")
    assert code == 0, err


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_store_is_written_at_once(url: str, empty_place: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It shows no half of a file, and would have to copy to move. What is replaced goes under another name there, too."""
    monkeypatch.setattr(Place, "_is_store", lambda self: True)
    moved, send = [], Place._send
    mv = fsspec.filesystem("memory").mv
    monkeypatch.setattr(
        type(fsspec.filesystem("memory")), "mv", lambda self, a, b: (moved.append(b.rpartition("/")[2]), mv(a, b))
    )
    for name in ("new/a", "new/b"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"new")

    def fail(self: Place, source: Path, to: str) -> None:
        send(self, source, to)
        if source.name == "b":
            raise OSError("the network is unreachable")

    place = Place(f"{url}/w")
    with monkeypatch.context() as change, pytest.raises(EvenstepError, match="was not uploaded"):
        change.setattr(Place, "_send", fail)
        place.send(Path("new"), False)
    assert names(url) == []
    place = Place(f"{url}/v")
    place.send(Path("new/a"), False)
    assert names(url) == ["v"] and moved == []
    place.send(Path("new"), True)
    assert names(url) == ["v/a", "v/b"] and moved == ["a", "b"]


def test_a_whole_run_is_not_fetched(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        Remote(url).put(save(monkeypatch, step))
    monkeypatch.setattr(Place, "bring", None)
    code, _, err = command("show", url)
    assert code == 3 and "holds 2" in err and f"such as {url}/step-00000002" in err
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    code, _, err = command("diff", f"{url}/step-00000001", f"{url}/step-00000002")
    assert code == 5 and "has room for 0.0 MB" in err and "TMPDIR" in err


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
    assert [one.rpartition("/")[2] for one in files.ls(root, detail=False)] == ["step-00000001"]


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


@pytest.fixture
def main_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The code that main() ends with."""

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    def run() -> int:
        with pytest.raises(Ended) as ended:
            checkpoint_elsewhere.main()
        return int(ended.value.args[0])

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "argv", ["", "program", "diff", "file:///a/b", "c"])
    yield run
    for one, handler in before.items():
        signal.signal(one, handler)


def test_a_bug_is_told(
    main_in_process: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a difference: 1 is the code of that."""

    def fail(*words: object) -> int:
        raise KeyError("s3://user:secret@b/size")

    monkeypatch.setattr(checkpoint_elsewhere, "work", fail)
    assert main_in_process() == 5
    err = capsys.readouterr().err
    assert "Traceback" in err and "s3://b/size" in err and "secret" not in err


def test_what_nohup_keeps_away_stays_away(main_in_process: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def go_on(*words: object) -> int:
        for one in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), one)
        return 0

    monkeypatch.setattr(checkpoint_elsewhere, "work", go_on)
    assert main_in_process() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_driver_that_does_not_say_sizes(url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    one = f"{url}/{Remote(url).put(save(monkeypatch))}"
    files, _ = fsspec.core.url_to_fs(url)
    find = type(files).find
    monkeypatch.setattr(type(files), "find", lambda *words, **named: {one: {} for one in find(*words, **named)})
    assert command("verify", one)[0] == 0 and command("show", one)[0] == 0


def test_the_top_of_a_place_is_not_the_working_folder(monkeypatch: pytest.MonkeyPatch, empty_place: None) -> None:  # noqa: F811
    path = save(monkeypatch)
    monkeypatch.chdir(path.parent)
    with pytest.raises(EvenstepError, match="holds no whole checkpoint"):
        fetch_newest(f"file:///{path.name}", Path("into"))


def test_the_program(program: Path, tmp_path: Path, empty_place: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = save(monkeypatch)
    url = f"file://{tmp_path}/far/{Remote(f'file://{tmp_path}/far').put(path)}"
    done = ckpt(program, "diff", url, path)
    assert done.returncode == 0 and done.stdout.startswith("the same: "), done.stderr
    alter(url, -1)
    assert ckpt(program, "verify", url).returncode == 6
    assert "usage" in ckpt(program, "verify", url, "--help").stdout
    for words in (("show", "--", "--x=s3://b/c"), ("show", "+://b/c")):  # one started the other without end
        assert ckpt(program, *words).returncode == 3
    beside = {**os.environ, "EVENSTEP_CKPT_BESIDE_URLS": "1"}
    assert "takes no URL there" in ckpt(program, "show", url, env=beside).stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run([program, "ckpt", "verify", url], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5 and "standard output cannot be written: No space left" in done.stderr
