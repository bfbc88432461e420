"""What a rank waits for others within a step (statistics of all ranks' samples, the script's own collectives) is told in its vote,
beside how long it was busy. How long anything takes decides nothing here: numbers are given, or compared with zero."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import _core, vote
from evenstep.exact_blocks import BlockShares
from evenstep.group import Alone
from evenstep.shares import Shares
from evenstep.step_times import StepTimes
from evenstep.steps import Steps

MS = 1_000_000


class Waits:
    """A step's times, whose waits are given."""

    def __init__(self) -> None:
        self.ns = 0
        self.times = StepTimes(_core.Telemetry(-1, 0), lambda: self.ns)

    def told(self) -> int:
        """At a pass's end."""
        self.times.busy_until(_core.clock_ns())
        return self.times.waited


def test_what_is_waited_before_the_vote_is_told() -> None:
    of = Waits()
    assert of.told() == 0
    of.times.synchronised(0, 0)
    of.times.committed(batches=1)
    of.times.stepped(0)
    of.ns += 3 * MS
    assert of.told() == 3 * MS


def test_votes_exchanges_and_what_commits_a_step_are_none() -> None:
    of = Waits()
    of.ns += 3 * MS
    assert of.told() == 3 * MS
    of.ns += 50 * MS  # the vote, and gradients
    of.times.synchronised(0, 0)
    of.ns += 2 * MS
    assert of.told() == 5 * MS  # a second pass of the step
    of.ns += 50 * MS
    of.times.synchronised(0, 0)
    of.ns += 20 * MS  # meets to commit the step
    of.times.committed(batches=2)
    of.ns += 20 * MS  # and within the optimizer's step
    of.times.stepped(0)
    assert of.told() == 0
    of.ns += 1 * MS
    assert of.told() == 1 * MS


def test_evaluation_and_void_steps_are_none() -> None:
    of = Waits()
    since = of.times.mark()
    of.ns += 9 * MS
    of.times.apart_since(since)
    of.ns += 2 * MS
    assert of.told() == 2 * MS
    of.times.begin_anew()
    assert of.told() == 0
    of.times.pause()
    of.ns += 9 * MS
    of.times.unpause()
    assert of.told() == 0


def test_the_vote_tells_it() -> None:
    ballot = vote.Ballot(1, 2, 3, 4, 0.5, 0.0, 1.0, 0, 0, 0, 0, 0, 0, 1, pass_seconds=0.75, drawn=7)
    assert vote.unpack(ballot.pack()) == ballot


def test_steps_without_a_vote_add_up() -> None:
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    part = steps._part
    part.batch_arrives(SimpleNamespace(samples=5, total=8, shares=[5, 3], checksum=1))  # type: ignore[arg-type]
    part.begins_anew(told=False, busy_ns=20 * MS, seen_ns=20 * MS, waited_ns=0)
    part.batch_arrives(SimpleNamespace(samples=5, total=8, shares=[5, 3], checksum=1))  # type: ignore[arg-type]
    steps.times.seen, steps.times.waited = 30 * MS, 4 * MS
    ballot = part.ballot(steps, 1.0, 30 * MS, 0)
    assert ballot.busy_seconds == pytest.approx(0.050) and ballot.pass_seconds == pytest.approx(0.054)
    steps.times.waited = 0
    assert part.ballot(steps, 1.0, 30 * MS, 0).pass_seconds == 0.0  # met nobody
    steps.times.waited = 4 * MS
    part.begins_anew()
    assert part.ballot(steps, 1.0, 0, 0).pass_seconds == 0.0  # of a pass that failed


# -- what is made of it --


def seconds(shares: list[int]) -> tuple[list[tuple[int, float]], list[float]]:
    """Two ranks that meet often; of the second each meeting takes much, which is no work of its own."""
    busy = [0.010 + 0.0034 * shares[0], 0.010 + 0.014 * shares[1]]
    lasted = max(busy[0], busy[1] + 0.1)
    return list(zip(shares, busy)), [lasted, lasted]


def train(shares: Shares, told: bool, steps: int) -> list[int]:
    drawn: list[int] = []
    for _ in range(steps):
        drawn = shares.draw(shares.batch)
        timings, lasted = seconds(drawn)
        shares.observe(timings, 1.0, (), (), lasted if told else ())
    return drawn


def test_a_rank_that_keeps_the_others_waiting_gets_less() -> None:
    best = min(range(65), key=lambda slow: seconds([64 - slow, slow])[1][0])
    shares = Shares("auto", 2, 64)
    assert abs(train(shares, True, 1500)[1] - best) <= 1
    splits = [tuple(train(shares, True, 1)) for _ in range(500)]
    assert sum(map(tuple.__ne__, splits[1:], splits)) <= 8  # a trial or two: it stays, though nobody waits with it
    assert train(Shares("auto", 2, 64), False, 1500)[1] > best + 3


@pytest.mark.parametrize("kind", ["samples", "blocks"])
def test_checkpoints_keep_it(kind: str) -> None:
    def made() -> Any:
        return Shares("auto", 2, 64) if kind == "samples" else BlockShares("auto", 2, 64, None, None, 4)

    shares, again = made(), made()
    train(shares, True, 10)
    state = json.loads(json.dumps(shares.state()))
    assert state[-1][0][2:4] == [0, 0.0] and state[-1][0][4] > state[-1][0][1]
    again.learn(state)
    assert again.state() == shares.state()
    assert train(again, True, 60) == train(shares, True, 60)


@pytest.mark.parametrize("kind", ["samples", "blocks"])
@pytest.mark.parametrize("before", [70, 500])  # in the first trial; after some, what they found is known
def test_what_trials_found_is_in_checkpoints(kind: str, before: int) -> None:
    """A run that goes on from one draws what the one that went on draws, to the bit."""

    def made() -> Any:
        return Shares("auto", 2, 64) if kind == "samples" else BlockShares("auto", 2, 64, None, None, 2)

    shares, again, before_that = made(), made(), made()
    train(shares, True, before)
    saved = json.loads(json.dumps((shares.state(), shares.caps, shares.learned(), shares.units)))
    assert again.go_on(*saved) == ""
    assert (again.state(), again.learned()) == (saved[0], saved[2])
    assert before_that.go_on(*saved[:2], "", []) == ""  # a checkpoint of before there was any
    differ = 0
    for _ in range(400):
        drawn = train(shares, True, 1)
        assert train(again, True, 1) == drawn
        differ += train(before_that, True, 1) != drawn
    assert again.learned() == shares.learned() and differ > 0
    assert again.turned() is None


@pytest.mark.parametrize("damage", ["cut", "no base64", "another", "version"])
def test_what_is_damaged_leaves_the_timings(damage: str) -> None:
    shares, again, alike = (Shares("auto", 2, 64) for _ in range(3))
    train(shares, True, 70)
    raw = bytearray(zlib.decompress(base64.b64decode(shares.learned())))
    raw[8] += damage == "version"
    learned = base64.b64encode(zlib.compress(bytes(raw))).decode()
    learned = {"cut": learned[: len(learned) // 8 * 4], "no base64": "é" + learned}.get(damage, learned)
    if damage == "another":
        learned = Shares("auto", 2, 32).learned()  # beside units that are not its own
    why = {
        "cut": "cut",
        "no base64": "ASCII",
        "another": "another batch",
        "version": "of version 2, and this build knows 1",
    }
    assert why[damage] in again.go_on(shares.state(), shares.caps, learned, shares.units)
    alike.learn(shares.state())
    assert again.learned() == alike.learned() and again.draw(64) == alike.draw(64)


def test_no_trial_begins_of_what_a_checkpoint_remembers() -> None:
    shares, told, silent = (Shares("auto", 2, 64) for _ in range(3))
    train(shares, True, 24)  # at the last split of a run that went on for long
    last = shares.state()[-1]
    told.learn([last] * 24)
    silent.learn([[one[:2] for one in last]] * 24)
    assert told.draw(64) == silent.draw(64)
    train(told, True, 4)
    assert told.draw(64) != silent.draw(64)


def test_of_ranks_that_are_not_known_it_is_the_mean() -> None:
    shares = Shares("auto", 2, 64)
    train(shares, True, 10)
    three = shares.anew(None, [None] * 3, [*shares.of_each(), None])
    row = three.state()[-1]
    assert row[0][4] == row[1][4] == pytest.approx(row[2][4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_wrong_numbers_are_refused(bad: float) -> None:
    balancer = _core.Balancer("auto", 2, 64)
    with pytest.raises(_core.EvenstepError, match=r"rank 1 reports .* seconds of work with its waits"):
        balancer.observe([(32, 0.1), (32, 0.1)], (), None, [0.0, bad])
    with pytest.raises(ValueError, match="passes"):
        balancer.observe([(32, 0.1), (32, 0.1)], (), None, [0.0])


# -- in a job --

MEETS = """
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, even = es.prepare(model, optimizer, DataLoader(data, batch_size=8), policy="equal", batch_norm=sys.argv[1])
told = []
for epoch in range(2):
    for x, y in even:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if epoch == 1:
            es.reduce_mean(loss.detach())
        loss.backward()
        optimizer.step()
        told.append([(one.busy_seconds, one.pass_seconds) for one in es.session().steps.told])
print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("norm", ["sync", "local"])
def test_ranks_tell_what_they_wait_in_meetings_alone(run: Any, script: Callable[..., str], norm: str) -> None:
    ended = run("-n", "2", "--no-pin", "--log-rank", "all", script(MEETS), norm)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"\[\[\[.*\]\]\]", ended.stdout)
    assert len(lines) == 2 and lines[0] == lines[1], ended.stdout  # all ranks have heard the same
    steps = [[lasted for _, lasted in step] for step in json.loads(lines[0])]
    assert len(steps) == 16
    for step, passes in enumerate(steps):
        if norm == "local" and step < 8:  # nobody meets before the vote
            assert passes == [0.0, 0.0]
        else:
            assert any(passes)  # somebody came first
