"""Going on from checkpoints at another place: a fresh disk, a lost one, `--resume URL`."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_run_hosts
from checkpoint_session import OneProcess, ck, empty_place, files, names, use  # noqa: F401
from run_jobs import Run, wait_until
from torch import nn

from evenstep import EvenstepError
from evenstep.checkpoint_remote import Altered, Remote, Wish, bring


def save(monkeypatch: pytest.MonkeyPatch, step: int, lineage: str = "ab" * 8, job: str = "") -> Path:
    monkeypatch.setenv("EVENSTEP_JOB", job)
    session = use(monkeypatch, OneProcess(model=nn.Linear(30, 30)))
    session.step, session.lineage = step, lineage
    path: Path = ck.checkpoint()
    return path


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """Three of them there, none here."""
    remote = Remote(f"file://{tmp_path}/far")
    for step in (1, 2, 3):
        remote.put(save(monkeypatch, step))
    return remote


def turn(remote: Remote, name: str) -> None:
    """One bit of a file there."""
    place = f"{remote._root}/{name}/model.safetensors"
    whole = remote._files.cat_file(place)
    remote._files.pipe_file(place, whole[:-1] + bytes([whole[-1] ^ 1]))


def test_the_newest_that_is_wanted(far: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    got = bring(Wish(far.url, "new"), told.append)
    assert got == Path("new/step-00000003") and len(told) == 1 and "MB) is fetched from file://" in told[0]
    orders = [one.order for one in far.whole()]
    assert bring(Wish(far.url, "b", after=orders[0]), told.append) is None
    assert bring(Wish(far.url, "b", after=orders[1]), told.append) == Path("b/step-00000003")
    assert bring(Wish(f"{far.url}/step-00000001", "b"), told.append) == Path("b/step-00000001")
    # a restart: what this job wrote, and what its training had before
    far.put(save(monkeypatch, 4, lineage="cd" * 8, job="e" * 32))
    far.put(save(monkeypatch, 5, lineage="ef" * 8, job="f" * 32))
    own = Wish(far.url, "c", job="e" * 32)
    assert bring(own, told.append) == Path("c/step-00000004")
    assert bring(own._replace(job="0" * 32), told.append) is None
    before = Wish(far.url, "d", job="0" * 32, lineage="ab" * 8, until=orders[1])
    assert bring(before, told.append) == Path("d/step-00000002")
    assert bring(Wish(f"file://{tmp_path}/nothing", "d"), told.append) is None


def test_what_is_damaged_there_is_passed_over_and_told(far: Remote) -> None:
    told: list[str] = []
    turn(far, "step-00000003")
    assert bring(Wish(far.url, "a"), told.append) == Path("a/step-00000002") and names("a") == ["step-00000002"]
    assert any("passed over" in line and "chunk 0 of model.safetensors" in line for line in told)
    for name in ("step-00000002", "step-00000001"):
        turn(far, name)
    with pytest.raises(Altered, match="none of the 3 checkpoints there is whole"):
        bring(Wish(far.url, "b"), told.append)
    assert names("b") == []


def test_half_an_upload_is_not_taken(far: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it has come through, and also where it replaces another one while it is read."""
    path = save(monkeypatch, 4)
    far._files.makedirs(f"{far._root}/step-00000004")
    for file in sorted(os.listdir(path)):  # the manifest among the first of them
        assert bring(Wish(far.url, f"at-{file}"), lambda _: None) == Path(f"at-{file}/step-00000003")
        far._files.put_file(path / file, f"{far._root}/step-00000004/{file}")
    assert bring(Wish(far.url, "all"), lambda _: None) == Path("all/step-00000004")
    real = type(far._files).get_file

    def replaced_meanwhile(self: Any, source: str, to: str, **named: Any) -> Any:
        real(self, source, to, **named)
        if source.endswith("step-00000004/manifest.json"):
            turn(far, "step-00000004")

    monkeypatch.setattr(type(far._files), "get_file", replaced_meanwhile)
    assert bring(Wish(far.url, "while"), lambda _: None) == Path("while/step-00000003")


def test_names_that_are_taken_here(far: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged copy is replaced; another checkpoint stays as it is, and so does what nobody can tell."""
    here = Path("here/step-00000003")
    assert bring(Wish(far.url, "here"), lambda _: None) == here
    tensors = here / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:100])
    assert bring(Wish(far.url, "here"), lambda _: None) == here
    assert tensors.read_bytes() == whole and names("here") == ["step-00000003"]
    manifest = (here / "manifest.json").read_bytes()
    (here / "manifest.json").write_bytes(manifest.replace(b"model", b"m0del"))
    beside = bring(Wish(far.url, "here"), lambda _: None)
    assert beside is not None and beside.name.startswith("step-00000003-") and beside != here
    files.verify(beside, files.read_manifest(beside))
    assert bring(Wish(far.url, "here"), lambda _: None) == beside  # once
    assert len(names("here")) == 2 and b"m0del" in (here / "manifest.json").read_bytes()


def test_a_place_that_fails_is_no_empty_one(far: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is an older checkpoint taken for the newest, where that cannot be read at the moment."""
    real = type(far._files).cat_file

    def fails(self: Any, path: str, *words: Any, **named: Any) -> Any:
        if "step-00000003" in path:
            raise OSError("the network is gone, says sftp://me:secret@host")
        return real(self, path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(far._files), "cat_file", fails)
        with pytest.raises(EvenstepError, match=r"network is gone, says sftp://host") as told:
            bring(Wish(far.url, "a"), lambda _: None)
        assert "secret" not in str(told.value)
    monkeypatch.setattr(type(far._files), "get_file", fails)
    with pytest.raises(EvenstepError, match="step-00000003 could not be fetched"):
        bring(Wish(far.url, "a"), lambda _: None)
    assert names("a") == []


@pytest.mark.more
def test_the_agents_question(far: Remote) -> None:
    def ask(**wish: str) -> list[dict[str, Any]]:
        reader, writer = os.pipe()
        os.write(writer, json.dumps({"folder": "new", **wish}).encode() + b"\n")
        os.close(writer)
        done = subprocess.run(
            [sys.executable, "-m", "evenstep.checkpoint_remote", "bring"],
            env={**os.environ, "EVENSTEP_REQUESTS_FD": str(reader)},
            pass_fds=[reader],
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(reader)
        return [json.loads(line) for line in done.stdout.splitlines()]

    said = ask(url=far.url)
    assert list(said[0]) == ["notice"] and said[-1]["report"] == "new/step-00000003"
    wrong = ask(url="nonsense://me:secret@host/x")
    assert "nonsense://host/x" in wrong[-1]["what"] and wrong[-1]["code"] == 3 and "s3fs" in wrong[-1]["fix"]


TRAINS = """
    import os, pathlib, shutil, signal, sys, time
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    began = es.step()
    print("began at", began, "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    for batch, in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "loses" in sys.argv:
            far = pathlib.Path("far/step-00000003/manifest.json")
            while not far.exists():
                time.sleep(0.01)
            shutil.rmtree(os.environ["EVENSTEP_CHECKPOINT_DIR"])
            os.kill(os.getpid(), signal.SIGKILL)
        if es.step() == began + 6:
            break
"""


two_names = test_run_hosts.names


def test_a_job_that_loses_its_disk_goes_on_from_there(run: Run, script: Any, tmp_path: Path) -> None:
    """And so does another one, on a machine that never had one."""
    url = f"file://{tmp_path}/far"
    words = ("-n", "1", "--checkpoint-every", "1", "--checkpoint-to", url)
    done = run(*words, "--name", "a", script(TRAINS), "loses", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step-00000003" in done.stderr and "is fetched from file://" in done.stderr
    assert "began at 0 in attempt 0" in done.stdout and "began at 3 in attempt 1" in done.stdout


@pytest.mark.more
@pytest.mark.parametrize("named", [False, True])
def test_a_job_on_a_fresh_disk(run: Run, script: Any, tmp_path: Path, named: bool) -> None:
    url = f"file://{tmp_path}/far"
    to = () if named else ("--checkpoint-to", url)
    words = ("-n", "1", "--checkpoint-every", "1")
    first = run(*words, "--checkpoint-to", url, "--name", "a", script(TRAINS), timeout=300)
    assert first.returncode == 0, first.stderr
    newest = Remote(url).whole()[0].step
    resume = f"{url}/step-{newest:08}" if named else "auto"
    second = run(*words, *to, "--name", "b", "--resume", resume, "train.py", timeout=300)
    assert second.returncode == 0, second.stderr
    assert f"began at {newest} in attempt 0" in second.stdout and "is fetched from" in second.stderr


@pytest.mark.more
def test_errors_before_the_ranks_start(run: Run, script: Any, tmp_path: Path) -> None:
    name = script("print('it began')")
    nothing = run("-n", "1", "--resume", f"file://{tmp_path}/far", name)
    assert nothing.returncode == 3 and "far holds no whole checkpoint" in nothing.stderr and not nothing.stdout
    wrong = run("-n", "1", "--resume", "auto", "--checkpoint-to", "nonsense://me:secret@host/x", name)
    assert wrong.returncode == 3 and "secret" not in wrong.stderr and "nonsense://host/x" in wrong.stderr
    assert not wrong.stdout
    anew = run("-n", "1", "--resume", "auto", "--checkpoint-to", f"file://{tmp_path}/far", name)
    assert anew.returncode == 0 and "it began" in anew.stdout


HOLDS_BACK = """
            far.rename(far.with_name("kept"))
            os.mkfifo(far)
            shutil.rmtree(os.environ["EVENSTEP_CHECKPOINT_DIR"])
"""


@pytest.mark.more
def test_other_hosts_wait_while_a_slow_place_answers(
    two_names: tuple[str, str], script: Any, program: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """It is asked again after more time than a host that says nothing is given."""
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    removes = '            shutil.rmtree(os.environ["EVENSTEP_CHECKPOINT_DIR"])\n'
    assert removes in TRAINS
    loses = TRAINS.replace(removes, HOLDS_BACK.removeprefix("\n"))
    name = script(loses.replace('"loses" in sys.argv', 'es.is_main() and "loses" in sys.argv'))
    words = ["--name", "a", "--checkpoint-every", "1", "--checkpoint-to", f"file://{tmp_path}/far", "--log-rank", "all"]
    job = hosts.start(*words, name, "loses")
    try:
        folder = tmp_path / "far/step-00000003"
        manifest, kept = folder / "manifest.json", folder / "kept"
        wait_until(lambda: kept.exists() and manifest.exists() and stat.S_ISFIFO(manifest.stat().st_mode))
        job.wait_for("has ended by SIGKILL")  # its uploads read there, too
        found: list[int] = []

        def is_read() -> bool:
            try:
                found.append(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody reads it yet
                return False
            return True

        wait_until(is_read)
        os.close(found[0])  # it cannot be read so
        job.wait_for("that place is asked again")
        kept.replace(manifest)
        code, text = job.finish()
        assert code == 0, text
        assert len(re.findall(r"began at 3 in attempt 1", text)) == 2, text
        assert "has said nothing" not in text and "is lost" not in text, text
    finally:
        job.process.kill()
