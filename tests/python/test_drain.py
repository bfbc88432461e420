"""`--notice`: a job that is told that it must end soon saves its state and ends with 75, and another goes on with it."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
from run_jobs import Job, alive
from test_run_launched import Launched
from test_run_launched import launched as launched  # a fixture

Script = Callable[..., str]

# Says each step, and in a run of its own what one device comes to. Its sixth step waits for the signal.
TRAINING = """
    import os, signal, sys, time
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    told = os.path.exists("told")

    def train(prepare, epochs):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(data, batch_size=12, num_workers=int(os.environ.get("WORKERS", "0")))
        model, optimizer, loader = prepare(model, optimizer, loader)
        for _ in epochs:
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if prepare is es.prepare and not told and es.step() == 8:
                    print("at step 8 as process", os.getpid(), flush=True)
                    while not os.path.exists("told"):
                        time.sleep(0.01)
        return [p.detach().clone() for p in model.parameters()]

    together = train(es.prepare, es.epochs(3))
    alone = train(lambda *parts: parts, range(3))
    apart = max(float((a - b).abs().max()) for a, b in zip(together, alone))
    print(f"apart {apart:.1e} after {es.step()} steps", flush=True)
"""


def _with_workers(process: int) -> list[int]:
    children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *map(int, children)]


def drain(job: Job, process: int, number: signal.Signals, said: str, folder: pathlib.Path, to_all: bool) -> None:
    """to_all: as a scheduler does that gives the signal to each process of a job's step."""
    ranks = [int(one) for one in job.wait_for(r"at step 8 as process (\d+)", times=2)]
    for each in [each for rank in ranks for each in _with_workers(rank)] if to_all else []:
        os.kill(each, number)
    os.kill(process, number)
    job.wait_for(said)
    if number == signal.SIGUSR1:
        os.kill(process, number)  # as a scheduler may that gives it to all processes, and another that passes it on
    (folder / "told").touch()
    code, text = job.finish()
    assert code == 75 and text.count("saves its state") == 1, text
    assert re.search(r"the training is saved in \S+/step-0000000(8|9) and has ended", text), text
    assert "was saved and has ended" in text and "Traceback" not in text and "exited with" not in text


def goes_on(result: tuple[int, str]) -> None:
    code, text = result
    assert code == 0, text
    found = re.findall(r"apart (\S+) after 18 steps", text)
    assert len(found) == 2 and max(float(one) for one in found) < 1e-12, text


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.more),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.more),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.more),
    ],
)
def test_a_job_with_notice_is_saved_and_another_goes_on(
    start: Callable[..., Job],
    script: Script,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    number: signal.Signals,
    workers: int,
) -> None:
    environment["WORKERS"] = str(workers)
    words = ("-n", "2", "--no-pin", "--name", "a", "--notice", "120", "--log-rank", "all")
    job = start(*words, script(TRAINING))
    drain(job, job.process.pid, number, f"{number.name}: the training saves its state", tmp_path, True)
    goes_on(start(*words, "--resume", "auto", "train.py").finish())


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The part of Amazon's metadata service that is asked; `ends`: the instance is to be terminated in 100 s."""

    ends = False

    def _answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self) -> None:
        proper = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(*((200, "a-token") if proper else (400,)))

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "a-token":
            self._answer(401)
        elif self.path == "/latest/meta-data/spot/instance-action" and type(self).ends:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 100))
            self._answer(200, json.dumps({"action": "terminate", "time": when}))
        else:
            self._answer(404)

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.more
def test_a_machine_whose_end_is_announced_saves_and_another_goes_on(
    start: Callable[..., Job], script: Script, tmp_path: pathlib.Path
) -> None:
    class Played(_Metadata):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Played) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        words = ("-n", "2", "--no-pin", "--name", "a", "--log-rank", "all")
        job = start(*words, "--notice-from", f"aws=127.0.0.1:{service.server_address[1]}", script(TRAINING))
        job.wait_for(r"at step 8 as process (\d+)", times=2)
        Played.ends = True
        job.wait_for(r"aws announces the machine's end \(terminate\): the training saves its state after the step")
        (tmp_path / "told").touch()
        code, text = job.finish()
        service.shutdown()
    assert code == 75 and text.count("saves its state") == 1, text
    assert re.search(r"the training is saved in \S+/step-0000000(8|9) and has ended", text), text
    assert "was saved and has ended" in text and "Traceback" not in text
    goes_on(start(*words, "--resume", "auto", "train.py").finish())


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_notice_to_a_host_saves_the_job(
    launched: Launched, script: Script, tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    words = ("--no-pin", "--name", "a", "--notice", "120", "--log-rank", "all")
    leader, follower = launched.both(*words, script(TRAINING))
    drain(leader, follower.process.pid, number, rf"host \S+#1: {number.name}: the training saves", tmp_path, False)
    assert follower.finish() == (0, "")
    leader, follower = launched.both(*words, "--resume", "auto", "train.py")
    goes_on(leader.finish())
    assert follower.finish() == (0, "")


def test_who_does_not_end_in_time_is_ended(start: Callable[..., Job], script: Script, tmp_path: pathlib.Path) -> None:
    name = script('#!/bin/sh\necho "process $$"\nexec sleep 600\n', "wait.sh")
    (tmp_path / name).chmod(0o755)
    job = start("--no-python", "--notice", "0.2", f"./{name}")
    (rank,) = job.wait_for(r"process (\d+)")
    job.process.send_signal(signal.SIGUSR1)
    code, text = job.finish()
    assert code == 143, text
    assert "the time of --notice is over, and 1 rank has not ended" in text and not alive(int(rank))


def test_a_second_signal_ends_it_without_waiting(
    start: Callable[..., Job], script: Script, tmp_path: pathlib.Path
) -> None:
    name = script('#!/bin/sh\necho "process $$"\nexec sleep 600\n', "wait.sh")
    (tmp_path / name).chmod(0o755)
    job = start("--no-python", "--notice", "600", f"./{name}")
    job.wait_for(r"process (\d+)")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("again: without waiting")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143


@pytest.mark.parametrize("words", [["--notice", "0"], ["--notice", "soon"], ["--notice", "-5"], ["--notice", "nan"]])
def test_a_notice_that_is_no_time_is_refused(
    run: Callable[..., subprocess.CompletedProcess[str]], script: Script, words: list[str]
) -> None:
    result = run(*words, script("", "t.py"))
    assert result.returncode == 2 and "is no time" in result.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("ec2", "give aws, gcp, azure, auto, http://ADDRESS[:PORT]/PATH, exec:COMMAND or off"),
        ("http://metadata.google.internal/", "names are not looked up"),
        ("https://127.0.0.1/", "only plain http:// is spoken"),
    ],
)
def test_who_announces_nothing_is_refused(
    run: Callable[..., subprocess.CompletedProcess[str]], script: Script, place: str, said: str
) -> None:
    result = run("--notice-from", place, script("", "t.py"))
    assert result.returncode == 2 and "--notice-from: nobody announces" in result.stderr and said in result.stderr
