"""`evenstep run` in a run folder that other hosts see: the program's calls say that its disk is NFS, and of some tests
that no time of a file can be moved, or that it was, which is not true (then 15 s are 0.15 s)."""

from __future__ import annotations

import pathlib
import re
import signal

import pytest
from run_jobs import compile_library
from script_parts import AGENT

SAYS_NFS = """
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

static int times(const char *word) {
  const char *said = getenv("TIMES");
  return said != NULL && strcmp(said, word) == 0;
}

int futimens(int fd, const struct timespec *values) {
  if (times("refused")) {
    errno = ENOSYS;
    return -1;
  }
  return times("ignored") ? 0 : (int)syscall(SYS_utimensat, fd, NULL, values, 0);
}

int clock_gettime(clockid_t clock, struct timespec *out) {
  int failed = (int)syscall(SYS_clock_gettime, clock, out);
  if (times("ignored") && clock == CLOCK_BOOTTIME) {
    long long ns = 100 * (1000000000LL * out->tv_sec + out->tv_nsec);
    *out = (struct timespec){ns / 1000000000, ns % 1000000000};
  }
  return failed;
}

int fstatfs(int fd, struct statfs *out) {
  int failed = (int)syscall(SYS_fstatfs, fd, out);
  out->f_type = 0x6969;
  return failed;
}
"""

TAKEN_OVER = """
    import os, pathlib, sys, time

    sign = pathlib.Path(sys.argv[1])
    print("held", sign.read_text().split("\\n")[2], "agent", os.getppid(), flush=True)
    other = sign.with_name("other")
    other.write_text("boot pid:[1]\\nfar\\n4711\\nsomebody\\n0\\nmark\\n")
    other.rename(sign)
    if sys.argv[2] == "waits":
        time.sleep(600)
"""


@pytest.fixture
def preload(tmp_path: pathlib.Path) -> str:
    source, library = tmp_path / "nfs.c", tmp_path / "nfs.so"
    source.write_text(SAYS_NFS)
    compile_library(library, source)
    return f"LD_PRELOAD={library}"


@pytest.mark.parametrize("ends", ["waits", "ends"])
def test_a_job_whose_folder_was_taken_over_writes_nothing_more(
    start, script, tmp_path: pathlib.Path, preload: str, ends: str
) -> None:
    """While it trains, and in its very end, when its thread has not looked for seconds."""
    sign = tmp_path / "runs/a/evenstep.running"
    words = ["-n", "1", "--name", "a", "--log-rank", "all", script(TAKEN_OVER), str(sign), ends]
    job = start(*words, before=["env", preload], monitor=True)
    code, text = job.finish()
    held = re.search(r"held (\d+) agent (\d+)", text)
    assert held and held[1] == held[2], text
    assert "is not this process's any more: it was taken over from host far (process 4711)" in text
    assert code == (5 if ends == "waits" else 0), text
    assert sign.read_text().endswith("mark\n")
    assert not (tmp_path / "runs/a/report.html").exists() and (tmp_path / "runs/a/agent.json").exists()


def test_the_next_agent_of_a_killed_one_has_the_folder(start, script, tmp_path: pathlib.Path, preload: str) -> None:
    """Its ranks train on, and what they then write is not another job's."""
    name = script(
        AGENT
        + """
import signal, sys, time

import torch

import evenstep as es

model = torch.nn.Linear(2, 1)
model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
first = agent()
os.kill(first, signal.SIGKILL)
while agent() in (0, first):
    time.sleep(0.01)
sign = open(sys.argv[1]).read().split("\\n")
print("held", sign[2], "agent", agent(), flush=True)
es.checkpoint("runs/a/checkpoints/after")
"""
    )
    sign = tmp_path / "runs/a/evenstep.running"
    words = ["-n", "1", "--name", "a", "--log-rank", "all", name, str(sign)]
    code, text = start(*words, before=["env", preload], monitor=True).finish()
    assert code == 0 and "rank 0 trains on" in text, text
    held = re.search(r"held (\d+) agent (\d+)", text)
    assert held and held[1] == held[2], text
    assert (tmp_path / "runs/a/checkpoints/after/manifest.json").exists() and not sign.exists()


def test_a_job_there_leaves_no_sign(start, script, tmp_path: pathlib.Path, preload: str) -> None:
    job = start("-n", "1", "--name", "a", script("print()"), before=["env", preload], monitor=True)
    code, text = job.finish()
    assert code == 0, text
    assert not (tmp_path / "runs/a/evenstep.running").exists() and (tmp_path / "runs/a/report.html").exists()


@pytest.mark.parametrize("times", ["refused", "ignored"])
def test_a_job_whose_times_cannot_be_moved_says_so_once(
    start, script, tmp_path: pathlib.Path, preload: str, times: str
) -> None:
    source = "import time; print('up', flush=True); time.sleep(600)"
    words = ["-n", "1", "--name", "a", "--log-rank", "all", script(source)]
    job = start(*words, before=["env", preload, f"TIMES={times}"], monitor=True)
    job.wait_for("jobs of other hosts do not see that run folder runs/a is in use")
    job.wait_for(r"\bup\b")
    job.process.send_signal(signal.SIGINT)
    code, text = job.finish()
    assert code == 130 and text.count("do not see") == 1, text
    assert not (tmp_path / "runs/a/evenstep.running").exists() and (tmp_path / "runs/a/report.html").exists()


LOSES_IT_WHILE_WRITING = """
    import importlib, os, pathlib
    import torch
    import evenstep as es

    sign = pathlib.Path(os.environ["EVENSTEP_RUN_SIGN"]) / "evenstep.running"
    model = torch.nn.Linear(1, 1)
    es.prepare(model)
    es.checkpoint("first")
    module = importlib.import_module("evenstep.checkpoint")
    write = module.write_tensors

    def write_and_lose(*words):
        write(*words)
        other = sign.with_name("other")
        other.write_text("boot pid:[1]\\nfar\\n4711\\nsomebody\\n0\\nmark\\n")
        other.rename(sign)

    module.write_tensors = write_and_lose
    es.checkpoint("second")
"""


def test_a_rank_whose_folder_was_taken_over_while_it_writes_puts_nothing_in_place(
    start, script, tmp_path: pathlib.Path, preload: str
) -> None:
    """Whoever finds out first, the rank or its agent, which kills it."""
    job = start("-n", "1", "--name", "a", script(LOSES_IT_WHILE_WRITING), before=["env", preload])
    code, text = job.finish()
    assert code != 0 and "it was taken over from host far (process 4711)" in text, text
    assert (tmp_path / "first/manifest.json").exists()
    assert not (tmp_path / "second").exists()


LOSES_IT_BEFORE = """
    import os, pathlib
    import torch
    import evenstep as es

    es.prepare(torch.nn.Linear(1, 1))
    sign = pathlib.Path(os.environ["EVENSTEP_RUN_SIGN"]) / "evenstep.running"
    other = sign.with_name("other")
    other.write_text("boot pid:[1]\\nfar\\n4711\\nsomebody\\n0\\nmark\\n")
    other.rename(sign)
    es.checkpoint("first")
"""


def test_a_rank_that_never_saw_its_own_jobs_sign_asks_for_it_too(
    start, script, tmp_path: pathlib.Path, preload: str
) -> None:
    job = start("-n", "1", "--name", "a", script(LOSES_IT_BEFORE), before=["env", preload])
    code, text = job.finish()
    assert code != 0 and "it was taken over from host far (process 4711)" in text, text
    assert not (tmp_path / "first").exists()


def test_a_job_on_a_disk_of_its_own_asks_for_no_sign(start, script) -> None:
    names = ("EVENSTEP_RUN_SIGN", "EVENSTEP_RUN_SIGN_SEEN")
    source = f"import os; print('asks', *map(os.environ.get, {names}), flush=True)"
    before = ["env", *(f"{name}=/old" for name in names)]
    job = start("-n", "1", "--name", "a", "--log-rank", "all", script(source), before=before)
    code, text = job.finish()
    assert code == 0 and "asks None None" in text, text
