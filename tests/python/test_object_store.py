"""Checkpoints in an object store that answers as S3 does (moto's server), through the driver that users have (s3fs)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import object_store
import pytest
from object_store import Store
from run_jobs import Job, Run

server, store, bucket = object_store.server, object_store.store, object_store.bucket
pytestmark = pytest.mark.more
Script = Callable[..., str]

# Trains for as many steps as its first word says. paced: each upload has ended before the next step; frozen: most weights do not change.
TRAINS = """
    import importlib, os, pathlib, sys, time
    import torch
    import evenstep as es
    from evenstep.checkpoint_uploads import under_way

    writing = importlib.import_module("evenstep.checkpoint").is_writing
    steps = int(sys.argv[1])
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2)).double()
    for parameter in model[0].parameters():
        parameter.requires_grad = "frozen" not in sys.argv
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    print("began at", es.step(), flush=True)
    for epoch in es.epochs(9):
        for x, y in loader:
            while "paced" in sys.argv and (writing() or under_way()):
                time.sleep(0.01)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", es.step(), flush=True)
            if es.step() == steps:
                break
        if es.step() == steps:
            break
    print("norm", float(sum(p.detach().norm() for p in model.parameters())).hex(), flush=True)
"""


@pytest.fixture
def ckpt(program: Path, tmp_path: Path, environment: dict[str, str], store: Store) -> Any:
    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "ckpt", *words],
            cwd=tmp_path,
            env={**environment, **store.environment(), **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )

    return call


def norm(text: str) -> float:
    found = re.search(r"norm (\S+)", text)
    assert found is not None, text
    return float.fromhex(found[1])


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def same_there(store: Store, place: str, folder: Path) -> bool:
    return all(store.get(f"{place}/{file.name}") == file.read_bytes() for file in folder.iterdir())


def test_a_training_there_and_on_with_other_ranks(
    run: Run,
    script: Script,
    ckpt: Any,
    store: Store,
    bucket: str,
    tmp_path: Path,
) -> None:
    """What is kept there, the commands on it, and a job on a fresh disk and three ranks that ends where one that never stopped does."""
    url, trains = f"s3://{bucket}/run", script(TRAINS)
    words = ("--log-rank", "0", "--checkpoint-every", "2", "--keep", "2", "--keep-every", "6")
    whole = run("-n", "2", "--name", "whole", "--log-rank", "0", trains, "12", timeout=300)
    done = run("-n", "2", "--name", "a", *words, "--checkpoint-to", url, trains, "9", "paced", env=store.environment())
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert store.checkpoints(bucket) == ["step-00000006", "step-00000008"]
    here = tmp_path / "runs/a/checkpoints"
    assert same_there(store, f"{bucket}/run/step-00000008", here / "step-00000008")
    assert not [name for name in store.names(bucket) if name.endswith(".claim")] and store.uploads(bucket) == []

    fetched = ckpt("fetch", url, "back")
    assert fetched.returncode == 0 and fetched.stdout.strip().endswith("back/step-00000008"), fetched.stderr
    assert ckpt("verify", "back/step-00000008").returncode == 0
    assert ckpt("diff", "back/step-00000008", "runs/a/checkpoints/step-00000008").returncode == 0
    assert ckpt("convert", "back/step-00000008", "all.pt").returncode == 0
    broken = tmp_path / "back/step-00000008/model.safetensors"
    broken.write_bytes(flipped(broken.read_bytes()))
    assert ckpt("verify", "back/step-00000008").returncode == 6
    assert ckpt("fetch", f"{url}/step-00000006", "copy").returncode == 0
    assert ckpt("fetch", f"{url}/step-00000008", "copy").returncode == 0
    assert ckpt("repair", "back/step-00000008", "--from", "copy/step-00000008").returncode == 0
    pushed = ckpt("push", "back/step-00000008", f"s3://{bucket}/other")
    assert pushed.stdout.strip() == f"s3://{bucket}/other/step-00000008", pushed.stderr

    (tmp_path / "runs/a").rename(tmp_path / "lost")
    more = run(
        *("-n", "3", "--name", "a", *words, "--checkpoint-to", url, "--resume", "auto", trains, "12", "paced"),
        env=store.environment(),
        timeout=300,
    )
    assert more.returncode == 0, more.stderr
    assert "step-00000008" in more.stderr and f"is fetched from {url}" in more.stderr
    assert "began at 8" in more.stdout
    assert abs(norm(more.stdout) - norm(whole.stdout)) < 1e-12
    assert store.checkpoints(bucket) == ["step-00000006", "step-00000010", "step-00000012"]


def train(run: Run, script: Script, store: Store, url: str, *words: str, steps: str = "7", **more: str) -> Any:
    """A checkpoint every second step, the last by the end of the process."""
    command = ("-n", "1", "--checkpoint-every", "2", "--keep", "9", "--checkpoint-to", url, *words)
    return run(*command, script(TRAINS), steps, "paced", env=store.environment(**more), timeout=300)


@pytest.mark.parametrize("how", ["InternalError", "SlowDown", "AccessDenied", "close"])
@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_server_that_fails_in_an_upload(
    run: Run,
    script: Script,
    ckpt: Any,
    store: Store,
    bucket: str,
    how: str,
    file: str,
) -> None:
    """It is told once, training goes on, and what is there is whole."""
    store.fail(how, "PUT", f"step-00000004/{file}", times=1000)
    url = f"s3://{bucket}/run"
    done = train(run, script, store, url, "--name", "a", AWS_MAX_ATTEMPTS="1")
    assert done.returncode == 0 and "step 7" in done.stdout, done.stderr
    assert done.stderr.count("step-00000004 was not uploaded") == 1 and "Traceback" not in done.stderr, done.stderr
    assert any(one.startswith(f"{how}: PUT") for one in store.seen())
    assert store.checkpoints(bucket) == ["step-00000002", "step-00000006"]
    store.release()
    pushed = ckpt("push", "runs/a/checkpoints/step-00000004", url)
    assert pushed.stdout.strip() == f"{url}/step-00000004", pushed.stderr
    assert store.checkpoints(bucket) == ["step-00000002", "step-00000004", "step-00000006"]
    assert not [name for name in store.names(bucket) if name.endswith(".claim")]


def test_a_connection_that_is_reset_once_costs_nothing(run: Run, script: Script, store: Store, bucket: str) -> None:
    store.fail("close", "PUT", "step-00000004/model.safetensors")
    done = train(run, script, store, f"s3://{bucket}/run")
    assert done.returncode == 0 and "not uploaded" not in done.stderr, done.stderr
    assert len([one for one in store.seen() if one.startswith("close: PUT") and bucket in one]) == 1
    assert store.checkpoints(bucket) == ["step-00000002", "step-00000004", "step-00000006"]


def test_training_waits_for_no_server(
    start: Callable[..., Job],
    script: Script,
    store: Store,
    bucket: str,
) -> None:
    """One that stands still in an upload: the last step is made meanwhile, and what was taken last goes up once it answers."""
    before = ("env", *(f"{name}={value}" for name, value in store.environment().items()))
    store.fail("stall", "PUT", "step-00000002/model.safetensors")
    words = ("-n", "1", "--checkpoint-every", "2", "--checkpoint-to", f"s3://{bucket}/run", "--log-rank", "0")
    job = start(*words, script(TRAINS), "9", before=before)
    job.wait_for("step 9")
    job.wait_for("is still on its way")
    assert store.checkpoints(bucket) == []
    store.release()
    code, text = job.finish()
    assert code == 0 and "warning" not in text, text
    assert store.checkpoints(bucket)[-1] == "step-00000008"


def test_the_last_checkpoint_goes_up_while_the_process_ends(
    run: Run, script: Script, store: Store, bucket: str
) -> None:
    """The driver has made no connection for it by then, and cannot begin a thread to make one."""
    words = ("-n", "1", "--checkpoint-every", "7", "--keep", "1", "--checkpoint-to", f"s3://{bucket}/run")
    for steps, kept in (("7", ["step-00000007"]), ("14", ["step-00000014"])):
        resumed = ("--name", "a", "--resume", "auto")
        done = run(*words, *resumed, script(TRAINS), steps, env=store.environment(), timeout=300)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        assert store.checkpoints(bucket) == kept


def test_an_upload_that_fails_while_the_process_ends_is_told(
    run: Run, script: Script, store: Store, bucket: str
) -> None:
    store.fail("AccessDenied", "PUT", "step-00000007", times=1000)
    words = ("-n", "1", "--name", "a", "--checkpoint-every", "7", "--checkpoint-to", f"s3://{bucket}/run")
    done = run(*words, script(TRAINS), "7", env=store.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"step-00000007 is not at s3://{bucket}/run: " in done.stderr and "credentials" in done.stderr, done.stderr
    assert re.search(r"; then `evenstep ckpt push \S+/runs/a/checkpoints/step-00000007 URL`", done.stderr), done.stderr


def test_older_ones_that_may_not_be_removed_are_told_as_such(
    run: Run, script: Script, store: Store, bucket: str
) -> None:
    """Also by the process that sends the last one: that is up."""
    url = f"s3://{bucket}/run"
    words = ("-n", "1", "--name", "a", "--checkpoint-every", "2", "--keep", "1", "--checkpoint-to", url)
    assert run(*words, script(TRAINS), "2", env=store.environment(), timeout=300).returncode == 0
    assert store.checkpoints(bucket) == ["step-00000002"]
    store.fail("AccessDenied", "DELETE|POST", "step-00000002|delete", times=1000)
    done = run(*words, "--resume", "auto", script(TRAINS), "4", env=store.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"older ones stay: {url}: step-00000002 cannot be removed" in done.stderr, done.stderr
    assert "credentials" in done.stderr and "is not at s3" not in done.stderr, done.stderr
    assert store.checkpoints(bucket) == ["step-00000002", "step-00000004"]


def test_an_upload_that_stands_still_is_given_up(run: Run, script: Script, store: Store, bucket: str) -> None:
    store.fail("stall", "PUT", "step-00000002/manifest.json")
    done = train(run, script, store, f"s3://{bucket}/run", EVENSTEP_UPLOAD_TIMEOUT="3")
    assert done.returncode == 0 and "step 7" in done.stdout, done.stderr
    assert "takes nothing from host" in done.stderr and "nothing came of it for 3 s" in done.stderr, done.stderr
    assert store.checkpoints(bucket) == ["step-00000004", "step-00000006"]


def test_a_server_that_stands_still_ends_no_wait_but_with_its_name(
    run: Run,
    script: Script,
    ckpt: Any,
    store: Store,
    bucket: str,
) -> None:
    url = f"s3://{bucket}/run"
    assert train(run, script, store, url, steps="3").returncode == 0
    store.fail("stall", "GET", "safetensors", times=1000)
    fetched = ckpt("fetch", url, "back", EVENSTEP_FETCH_TIMEOUT="2")
    assert fetched.returncode == 3, fetched.stderr
    assert f"{url} does not answer on host" in fetched.stderr and "EVENSTEP_FETCH_TIMEOUT" in fetched.stderr
    done = train(run, script, store, url, "--name", "new", "--resume", "auto", EVENSTEP_FETCH_TIMEOUT="2")
    assert done.returncode == 3 and "does not answer" in done.stderr, done.stderr
    store.release()
    assert ckpt("fetch", url, "back").returncode == 0


def test_a_bucket_that_is_not_there(run: Run, script: Script, ckpt: Any, store: Store) -> None:
    """It is named, and not made: its name may be wrong."""
    before = store.buckets()
    url = "s3://no-such-bucket/run"
    done = train(run, script, store, url, "--name", "a")
    assert done.returncode == 0 and "step 7" in done.stdout, done.stderr
    assert done.stderr.count("there is no bucket no-such-bucket") == 1 and "fix: " in done.stderr, done.stderr
    for words in (("fetch", url, "back"), ("push", "runs/a/checkpoints/step-00000004", url), ("ls", url)):
        failed = ckpt(*words)
        assert failed.returncode == 3 and "there is no bucket no-such-bucket" in failed.stderr, failed.stderr
        assert "fix: make it" in failed.stderr
    done = train(run, script, store, url, "--name", "b", "--resume", "auto")
    assert done.returncode == 3 and "there is no bucket no-such-bucket" in done.stderr, done.stderr
    assert store.buckets() == before


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "none"])
def test_wrong_credentials(run: Run, script: Script, ckpt: Any, store: Store, bucket: str, code: str) -> None:
    url, more = f"s3://{bucket}/run", {"AWS_MAX_ATTEMPTS": "1"}
    if code == "none":
        more |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        store.fail("AccessDenied", times=100000)  # what it says to who comes without a name
    else:
        store.fail(code, times=100000)
    done = train(run, script, store, url, "--name", "a", **more)
    assert done.returncode == 0 and "step 7" in done.stdout, done.stderr
    assert done.stderr.count("was not uploaded") == 1, done.stderr
    assert "credentials" in done.stderr and "fix: " in done.stderr
    for words in (("fetch", url, "back"), ("push", "runs/a/checkpoints/step-00000004", url), ("ls", url)):
        failed = ckpt(*words, **more)
        assert failed.returncode == 3 and "credentials" in failed.stderr, failed.stderr
    done = train(run, script, store, url, "--name", "b", "--resume", "auto", **more)
    assert done.returncode == 3 and "credentials" in done.stderr, done.stderr


def test_what_is_damaged_there_is_passed_over(run: Run, script: Script, ckpt: Any, store: Store, bucket: str) -> None:
    url = f"s3://{bucket}/run"
    assert train(run, script, store, url).returncode == 0
    path = f"{bucket}/run/step-00000006/model.safetensors"
    whole = store.get(path)
    store.put(path, flipped(whole))
    fetched = ckpt("fetch", url, "back")
    assert fetched.returncode != 0 and "step-00000006 is damaged" in fetched.stderr, fetched.stderr
    store.put(f"{bucket}/run/step-00000004/optimizer.safetensors", b"short")
    done = train(run, script, store, url, "--name", "new", "--resume", "auto", "--log-rank", "0")
    assert done.returncode == 0 and "passed over" in done.stderr and "began at 2" in done.stdout, done.stderr


def test_two_trainings_at_one_place(run: Run, script: Script, store: Store, bucket: str) -> None:
    url = f"s3://{bucket}/run"
    assert train(run, script, store, url, "--name", "a", steps="3").returncode == 0
    done = train(run, script, store, url, "--name", "b", steps="3")
    assert done.returncode == 0 and "another training's" in done.stderr, done.stderr
    first, second = store.checkpoints(bucket)
    assert first == "step-00000002" and second.startswith("step-00000002-")


SAYS = """
    import sys
    import torch
    import evenstep as es

    model = es.prepare(torch.nn.Linear(2, 2))
    for call in (es.checkpoint, es.load_checkpoint):
        try:
            print("given", call(sys.argv[1]))
        except es.EvenstepError as error:
            print("refused", error)
"""


def test_a_place_where_a_folder_is_wanted(
    run: Run, script: Script, ckpt: Any, store: Store, bucket: str, tmp_path: Path
) -> None:
    """Not a folder of the name s3: here."""
    url = f"s3://{bucket}/best"
    refused = run("-n", "1", "--checkpoint-dir", url, script(SAYS), url)
    assert refused.returncode == 2 and "--checkpoint-to URL" in refused.stderr, refused.stderr
    done = run("-n", "1", "--log-rank", "0", script(SAYS), url, env=store.environment())
    assert (
        f"refused es.checkpoint: {url} is no folder of this host" in done.stdout
        and "EVENSTEP_CHECKPOINT_TO" in done.stdout
    ), done.stdout
    for words in (
        ("verify", url),
        ("show", url),
        ("diff", url, url),
        ("repair", url, "--from", url),
        ("convert", url, "x"),
    ):
        failed = ckpt(*words)
        assert failed.returncode in (2, 3) and "ckpt fetch" in failed.stderr, failed.stderr
    assert not (tmp_path / "s3:").exists()


LARGE = """
    import time
    import torch
    import evenstep as es
    from evenstep.checkpoint_uploads import under_way

    model = torch.nn.Linear(4000, 4000).double()  # 128 MB: in three parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(6, 4000).double())
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    for x, in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        es.checkpoint()
        while under_way():
            time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["close", "InternalError"])
def test_a_large_file_goes_in_parts_which_a_failure_takes_away(
    run: Run,
    script: Script,
    ckpt: Any,
    store: Store,
    bucket: str,
    tmp_path: Path,
    how: str,
) -> None:
    """Parts that are left in a bucket are paid for, and no list shows them."""
    store.fail(how, "PUT", "step-00000002/.*partNumber=2", times=1000)
    url = f"s3://{bucket}/run"
    words = ("-n", "1", "--name", "a", "--checkpoint-to", url)
    done = run(*words, script(LARGE), env=store.environment(AWS_MAX_ATTEMPTS="1"), timeout=380)
    assert done.returncode == 0 and done.stderr.count("step-00000002 was not uploaded") == 1, done.stderr
    assert store.checkpoints(bucket) == ["step-00000001", "step-00000003"] and store.uploads(bucket) == []
    assert any("partNumber=2" in one and "step-00000003" in one for one in store.seen())
    fetched = ckpt("fetch", url, "back")
    assert fetched.returncode == 0, fetched.stderr
    here, back = (tmp_path / place / "step-00000003/model.safetensors" for place in ("runs/a/checkpoints", "back"))
    assert here.read_bytes() == back.read_bytes()
