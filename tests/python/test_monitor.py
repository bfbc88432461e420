"""A run watched from outside: the page's server, `evenstep top`, `evenstep report`, and the page in a browser."""

from __future__ import annotations

import json
import os
import pathlib
import re
import select
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

# Ranks that write the records of 40 steps at once and then stay until the file "end" is there.
RANKS = """
    import os, pathlib, time
    from evenstep import _core
    rank = int(os.environ["RANK"])
    ring = _core.Telemetry(int(os.environ["EVENSTEP_TELEMETRY_FD"]), rank)
    now = _core.clock_ns()
    ring.event(_core.EVENT_TOTAL_STEPS, 0, 60)
    ring.event(_core.EVENT_JOINING, 0, words="waits for all in es.prepare")
    ring.event(_core.EVENT_JOINED, 0, words="all ranks have come")
    if rank == 0:
        ring.event(_core.EVENT_BALANCING, 7, 1, "21.5 ms, equal 18.2 ms")
    for step in range(40):
        busy = 40_000_000 if rank == 1 else 10_000_000
        now += 42_000_000
        ring.span(_core.SPAN_FORWARD, step, now - 42_000_000, busy)
        ring.span(_core.SPAN_WAIT, step, now - 42_000_000 + busy, 42_000_000 - busy)
        ring.step(step, 0, now, 42_000_000, busy, 8, 16, 2.5)
    while not pathlib.Path("end").exists():
        time.sleep(0.05)
"""


class Watched:
    """A run of two such ranks under `evenstep run`, and where it is watched."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path) -> None:
        self.program = program
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(RANKS))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVENSTEP_") or "_TEST" in k}
        self.process = subprocess.Popen(
            [str(program), "run", "-n", "2", "--name", "w", "--policy", "equal", "--no-pin", "train.py"],
            cwd=folder,
            env={**environment, "EVENSTEP_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.url, self.token = self._address()
        self.until(lambda: self.summary()["state"] == "training")

    def _address(self) -> tuple[str, str]:
        assert self.process.stdout is not None
        seen = b""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 1)[0]:
                seen += os.read(self.process.stdout.fileno(), 65536)
            found = re.search(rb"(http://127\.0\.0\.1:\d+)/\?token=([0-9a-f]{32})", seen)
            if found:
                return found[1].decode(), found[2].decode()
        raise AssertionError(f"no address was printed: {seen!r}")

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, "the run did not come so far in 300 s"
            time.sleep(0.05)

    def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=150) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    def ask(self, path: str) -> tuple[int, str, str]:
        return self.get(path, Authorization=f"Bearer {self.token}")

    def summary(self) -> dict[str, Any]:
        return json.loads(self.ask("/api/v1/summary")[2])

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), *words], cwd=self.folder, capture_output=True, text=True, timeout=150, check=False
        )

    def end(self) -> int:
        (self.folder / "end").touch()
        if self.process.stdout is not None:
            self.process.stdout.read()
            self.process.stdout.close()
        return self.process.wait(150)


@pytest.fixture
def watched(program: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Watched]:
    run = Watched(program, tmp_path)
    yield run
    if run.process.poll() is None:
        run.end()


def test_a_living_run(watched: Watched) -> None:
    assert watched.get("/api/v1/summary")[0] == 401
    assert watched.ask("/nothing")[0] == 404
    summary = watched.summary()
    assert summary["verdict"]["kind"] == "imbalance"
    assert "rank 0" in summary["verdict"]["limit"] and "auto" in summary["verdict"]["advice"]
    assert summary["ranks"][0]["wait_fraction"] == pytest.approx(1 - 10 / 42, abs=0.01)
    status, content_type, metrics = watched.ask("/metrics")
    assert status == 200 and content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert metrics.endswith("# EOF\n")
    agent = watched.folder / "runs/w/agent.json"
    assert agent.stat().st_mode & 0o777 == 0o600
    assert json.loads(agent.read_text())["token"] == watched.token
    watched.until(lambda: "share   8.0" in watched.call("top", "w", "--once").stdout)
    assert json.loads(watched.call("top", "--once", "--json").stdout)["run"] == "w"


def test_a_finished_run_is_reported(watched: Watched) -> None:
    assert watched.end() == 0
    folder = watched.folder / "runs/w"
    assert not (folder / "agent.json").exists()
    assert (folder / "report.html").stat().st_size > 10_000
    numbers = json.loads(watched.call("report", "w", "--json").stdout)["run"]
    assert numbers["steps"] == 40 and numbers["steady_steps"] == 32
    assert numbers["samples_per_second"] == pytest.approx(16 / 0.042, rel=1e-3)
    assert numbers["best_samples_per_second"] == pytest.approx(8 / 0.010 + 8 / 0.040, rel=1e-3)
    traced = watched.call("report", "w", "--timeline", "trace.json")
    assert "the timeline: trace.json" in traced.stdout
    trace = json.loads((watched.folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"M", "X", "i"} and {event["pid"] for event in trace} == {0, 1}
    spans = [event for event in trace if event["ph"] == "X"]
    assert sum(event["name"].startswith("step ") for event in spans) == 80  # 40 of each rank
    assert min(event["ts"] for event in trace if "ts" in event) == 0 and all(event["dur"] >= 0 for event in spans)
    assert any(event["name"] == "forward" and event["args"]["step"] == 39 for event in spans)
    nowhere = watched.call("report", "w", "-o", "nowhere/page.html")
    assert nowhere.returncode == 5 and "fix: -o FILE names one in a folder that is there" in nowhere.stderr
    both = watched.call("report", str(folder), "--compare", "w", "-o", "both.html")
    assert "equal shares (21.5 ms, equal 18.2 ms): went back at step 7" in both.stdout
    assert both.returncode == 0 and "1.00 times the samples per second of w" in both.stdout
    assert (watched.folder / "both.html").exists()
    assert "done" in watched.call("top", "w").stdout  # ends by itself


def test_bad_runs_are_one_error_each(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "runs/broken").mkdir(parents=True)
    (tmp_path / "runs/broken/run.db").write_bytes(b"no database" * 1000)
    for day in range(1, 10):
        (tmp_path / f"runs/a{10 - day}").mkdir()
        with sqlite3.connect(tmp_path / f"runs/a{10 - day}/run.db") as history:
            history.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value)")
            history.execute("INSERT INTO meta VALUES ('started_wall_ns', ?)", (day * 86_400 * 10**9,))
    for words, code, said in [
        (["report", "nosuch"], 3, "the newest first: a1, a2, a3, a4, a5, a6, a7, a8 …"),
        (["top", "nosuch", "--once"], 3, "is no run"),
        (["report", "broken"], 6, "not a database"),
        (["report", "a", "b"], 2, "--compare"),
        (["report", "--jsn"], 2, "--json"),
        (["report", "nosuch"], 3, "a1, a2, a3, a4, a5, a6, a7, broken\n"),
    ]:
        if said.endswith("broken\n"):  # that is all
            for name in ("a8", "a9"):
                shutil.rmtree(tmp_path / f"runs/{name}")
        ended = subprocess.run([str(program), *words], cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert ended.returncode == code, ended
        assert said in ended.stderr
        assert ended.stderr.count("evenstep:") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_the_page_draws_in_a_browser(watched: Watched, tmp_path: pathlib.Path) -> None:
    def drawn(address: str) -> str:
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        more = "--disable-component-update --disable-sync --virtual-time-budget=4000 --dump-dom"
        return subprocess.run(
            ["chromium", *flags.split(), *more.split(), f"--user-data-dir={tmp_path / 'browser'}", address],
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        ).stdout

    live = drawn(f"{watched.url}/?token={watched.token}")
    watched.end()
    stored = drawn((watched.folder / "runs/w/report.html").as_uri())
    for page in (live, stored):
        assert "step 40 of 60" in page
        assert "equal shares: rank 0" in page
        assert len(re.findall(r'<path d="M', page)) >= 4  # one line or area at least in each chart
        assert page.count('aria-label="Throughput, last:') == 1
        assert "381" in page  # samples a second
        for rank in range(2):
            assert f"rank {rank} waits for all in es.prepare" in page
            assert f"rank {rank}: all ranks have come" in page
        assert "slower than equal shares (21.5 ms, equal 18.2 ms): went back" in page
    assert "steady steps counted" in stored
