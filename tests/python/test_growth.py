"""Hosts that join a job while its ranks train on: `evenstep run --max-ranks N --recovery shrink|replace`, `evenstep join`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import generation_cases as cases
import pytest
from run_jobs import Job, Run
from test_elastic import Alone
from test_elastic import alone as alone  # a fixture
from test_replacement import assert_replaced

from evenstep import hosts as of_hosts

Script = Callable[..., str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")


def started(alone: Alone, recovery: str, most: int, *script: str) -> Job:
    """One rank, which stands where the script's arguments say until somebody can join; it restarts never."""
    own = ("--max-ranks", str(most), "--max-restarts", "0", "--recovery", recovery)
    return alone.run(*own, *script, FULL=str(most), UCX_TLS="tcp,self")


def joined(alone: Alone, job: Job, ranks: int, most: int, host: str = "b") -> Job:
    return alone.join(job, "-n", str(ranks), host=host, FULL=str(most), UCX_TLS="tcp,self")


# A BatchNorm, whose statistics are of all ranks' samples; a bias before it would have no gradient.
NORMS = cases.REPLACED.replace(
    "torch.nn.Linear(6, 16), torch.nn.Tanh()",
    "torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh()",
).replace("found = es.evaluate", "model.eval()\nfound = es.evaluate")


def test_a_host_joins_while_the_others_train(alone: Alone, script: Script) -> None:
    assert "BatchNorm" in NORMS and "model.eval()" in NORMS
    job = started(alone, "shrink", 3, script(NORMS), "", "3,4")
    join = joined(alone, job, 2, 3)
    code, text = job.finish()
    assert code == 0, text
    assert_replaced(text, [0])
    assert "joins with 2 ranks: processes start there while the others train" in text
    assert (
        len(re.findall(r"rank \d of 3 at step 18", text)) == 3 and "rank 0 began at step 0 and made 18 passes" in text
    ), text
    code, text = join.finish()
    assert code == 0 and "this host takes part: ranks 1 and 2, while the others train" in text, text


@pytest.mark.more
@pytest.mark.parametrize("model", ["", "norms"])
def test_its_ranks_change_no_bit(alone: Alone, run: Run, script: Script, model: str) -> None:
    path = script(cases.BITWISE)
    one = run("-n", "1", "--no-pin", "--no-monitor", path, "", "", model)
    job = started(alone, "replace", 3, path, "", "3,4", model)
    joined(alone, job, 2, 3)
    code, text = job.finish()
    assert code == 0 and re.search(r"generation \d: ranks? .* joins? ", text), text
    bits = re.findall(r"bits (\w{64})", one.stdout + text)
    assert len(bits) == 4 and len(set(bits)) == 1, text


@pytest.mark.more
@pytest.mark.parametrize("model", ["", "norms"])
def test_more_of_them_than_blocks_have_none_and_the_training_goes_on(
    alone: Alone, run: Run, script: Script, model: str
) -> None:
    path = script(cases.BITWISE)
    one = run("-n", "1", "--no-pin", "--no-monitor", path, "", "", model, env={"BLOCK": "6"})
    job = alone.run(*("--max-ranks", "3", "--max-restarts", "0", "--recovery", "shrink"), path, "", "3,4", model,
                    FULL="3", BLOCK="6", UCX_TLS="tcp,self")  # fmt: skip
    alone.join(job, "-n", "2", host="b", FULL="3", BLOCK="6", UCX_TLS="tcp,self")
    code, text = job.finish()
    assert code == 0 and "has 2 blocks of 6 samples, fewer than the 3 ranks" in text, text
    bits = re.findall(r"bits (\w{64})", one.stdout + text)
    assert len(bits) == 4 and len(set(bits)) == 1, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("recovery", "deaths", "waits", "left"),
    [
        ("replace", "1@prepared:4", "3,6", 2),  # once it is a member; another process starts in its place
        ("replace", "1@met:4", "3,6", 2),
        ("shrink", "1@meeting:4", "3", 1),
        ("shrink", "1@forward:5", "3", 1),
        ("shrink", "0@forward:6", "3", 1),  # the one who gave it the state
    ],
)
def test_whoever_of_them_dies_the_others_train_on(
    alone: Alone, script: Script, recovery: str, deaths: str, waits: str, left: int
) -> None:
    job = started(alone, recovery, 2, script(cases.REPLACED), deaths, waits)
    joined(alone, job, 1, 2)
    code, text = job.finish()
    assert code == 0, text
    ends = re.findall(r"rank \d of (\d) at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == left and all(int(ranks) == left and float(far) < 1e-12 for ranks, far in ends), text
    assert re.search(r"generation \d: rank \d goes on without rank \d", text), text


@pytest.mark.more
def test_a_host_is_lost_while_its_processes_start_and_another_one_joins(alone: Alone, script: Script) -> None:
    job = started(alone, "shrink", 2, script(cases.REPLACED), "", "3")
    first = joined(alone, job, 1, 2)
    job.wait_for("rank 1: a process starts for it")
    first.process.kill()
    job.wait_for(r"host \S+ is lost")
    joined(alone, job, 1, 2, host="c")
    code, text = job.finish()
    assert code == 0, text
    assert_replaced(text, [0])
    assert len(re.findall(r"joins with 1 rank: processes start there", text)) == 2


@pytest.mark.more
def test_a_host_without_ucx_is_refused_and_harms_nobody(alone: Alone, script: Script) -> None:
    job = started(alone, "shrink", 2, script(cases.REPLACED), "", "")
    join = alone.join(job, "-n", "1", host="b", EVENSTEP_UCX_LIBRARY="/nowhere/libucp.so.0")
    code, text = join.finish()
    assert code != 0 and "has no UCX, which connects the ranks of this job" in text, text
    code, text = job.finish()
    assert code == 0 and "generation" not in text, text


@pytest.mark.more
def test_a_spare_takes_the_place_of_one_that_joined(alone: Alone, script: Script) -> None:
    """It adds none: where all places are taken it waits."""
    job = started(alone, "replace", 2, "--spares", "1", script(cases.REPLACED), "2@forward:6", "3,7")
    joined(alone, job, 1, 2)
    code, text = job.finish()
    assert code == 0, text
    assert_replaced(text, [0])
    assert re.search(r"1 rank on 1 host: \S+ 1; 1 spare\n", text) and "generation 1: rank 2 joins rank 0" in text, text
    assert re.search(r"generation \d: rank 1 joins rank 0", text), text
