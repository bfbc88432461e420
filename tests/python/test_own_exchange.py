"""A rank's own part of the exchange of gradients: measured where no other rank waits for it, told in the vote, and made up for by
a smaller share. How long anything takes decides nothing here: numbers are given, or compared with zero."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_compression import Place, on_ranks

from evenstep import _core, vote
from evenstep.adasum_engine import AdasumEngine
from evenstep.compressed_engine import CompressedEngine
from evenstep.compression import parse_compression
from evenstep.engine import EngineOptions, SharedEngine
from evenstep.exact_blocks import BlockShares
from evenstep.shares import Shares
from evenstep.step_times import StepTimes

CASES = Path(__file__).with_name("hybrid_prepare_cases.py")
MS = 1_000_000


# -- measuring --


def times() -> StepTimes:
    return StepTimes(_core.Telemetry(-1, 0), lambda: 0)


def test_what_comes_after_the_last_meeting_is_told_with_the_next_step() -> None:
    of = times()
    of.works_alone(3 * MS)
    of.synchronised(0, 0)
    assert of.own_seconds == 0.0
    of.committed(batches=1)
    assert of.own_seconds == pytest.approx(0.003)
    of.synchronised(1, 0)  # a step without one
    of.committed(batches=1)
    assert of.own_seconds == 0.0


def test_what_lies_between_two_meetings_is_none() -> None:
    of = times()
    of.works_alone(3 * MS)
    of.meets()
    of.synchronised(0, 0)
    of.committed(batches=1)
    assert of.own_seconds == 0.0
    of.works_alone(3 * MS)
    of.synchronised(1, 0)
    of.meets()  # before the step counts: for buffers, or to commit it
    of.committed(batches=1)
    assert of.own_seconds == 0.0
    of.works_alone(3 * MS)  # of one model
    of.works_alone(1 * MS)  # of the one that meets after it
    of.synchronised(0, 0)
    of.committed(batches=1)
    assert of.own_seconds == pytest.approx(0.001)


def test_backward_passes_of_one_step_add_up_and_its_batches_share_them() -> None:
    of = times()
    for _ in range(4):
        of.backward_begins(0, forward=False)
        of.meets()  # to vote
        of.works_alone(3 * MS)
        of.synchronised(0, 0)
    of.committed(batches=2)
    assert of.own_seconds == pytest.approx(0.006)
    of.works_alone(3 * MS)
    of.synchronised(1, 0)
    of.begin_anew()  # the step is void
    of.committed(batches=1)
    assert of.own_seconds == 0.0


def test_the_vote_tells_it() -> None:
    ballot = vote.Ballot(1, 2, 3, 4, 0.5, 0.0, 1.0, 0, 0, 0, 0, 0, 0, 1, exchange_seconds=0.25, parameters=7)
    assert vote.unpack(ballot.pack()) == ballot


def test_sums_that_go_back_to_a_device_are_the_ranks_own() -> None:
    """CPU tensors stand for a device's."""
    parameters = [torch.zeros(1000), torch.zeros(50, 7)]
    engine = SharedEngine(parameters, _core.Comm(_core.Comm.create_segment(1, 1 << 16), 0, 1, 1 << 16))
    given = [torch.randn_like(p) for p in parameters]

    def round_() -> Any:
        engine.begin(1.0, 0)
        for index, gradient in enumerate(given):
            engine.ready(index, gradient)
        return engine.finish()[1]

    assert round_().own_ns == 0  # in the host's memory nothing is left to do
    engine._on_cpu = [False, False]
    engine.views = [torch.empty_like(p) for p in parameters]
    report = round_()
    assert 0 < report.own_ns < report.exposed_ns
    assert all(torch.equal(view, gradient) for view, gradient in zip(engine.views, given))


@pytest.mark.parametrize("name", ["topk:0.5", "int8", "onebit", "adasum"])
def test_sums_of_what_was_gathered_are_the_ranks_own(name: str) -> None:
    def exchange(place: Place) -> tuple[int, int]:
        kind, options = AdasumEngine, EngineOptions(adasum=True)
        if name != "adasum":
            kind, options = CompressedEngine, EngineOptions(compression=parse_compression(name), way="gather")
        engine: Any = kind([torch.zeros(64, 32)], place, place, _core.Telemetry(-1, 0), options)  # type: ignore[arg-type]
        engine.begin(0.5, 0)
        engine.ready(0, torch.ones(64, 32))
        report = engine.finish()[1]
        return report.own_ns, report.exposed_ns

    for own, exposed in on_ranks(2, exchange):
        assert 0 < own < exposed


# -- making up for it --


def run(shares: Shares, own: Sequence[float], steps: int) -> list[int]:
    drawn: list[int] = []
    for _ in range(steps):
        drawn = shares.draw(shares.batch)
        timings = [(share, 0.002 + 0.001 * share) for share in drawn]
        shares.observe(timings, 1.0, (), own)
    return drawn


def test_a_smaller_share_makes_up_for_it() -> None:
    shares = Shares("auto", 2, 64)
    assert run(shares, [0.010, 0.0], 60) == [27, 37]
    assert run(shares, [0.0, 0.0], 60) == [32, 32]


def test_what_all_have_and_what_is_next_to_nothing_changes_nothing() -> None:
    for own in ([0.010, 0.010], [0.0002, 0.0], [0.0, 0.0]):
        told, silent = Shares("auto", 2, 64), Shares("auto", 2, 64)
        for _ in range(60):
            assert run(told, own, 1) == run(silent, [], 1)


def test_checkpoints_keep_it() -> None:
    shares = Shares("auto", 2, 64)
    run(shares, [0.010, 0.0], 60)
    state = json.loads(json.dumps(shares.state()))
    again = Shares("auto", 2, 64)
    again.learn(state)
    assert again.state() == shares.state()
    assert run(again, [0.010, 0.0], 20) == [27, 37]


def test_states_of_before_are_taken() -> None:
    """Pairs, and a third number where a rank had left out backward."""
    shares = Shares("auto", 3, 64)
    shares.learn([[[40, 0.040], [24, 0.048], [0, 0.001, 1]]] * 10)
    assert shares.state()[-1] == [[40, 0.040], [24, 0.048], [0, 0.001, 1]]
    shares.observe([(40, 0.040), (24, 0.048), (0, 0.001)], 1.0, [2], [0.0, 0.0, 0.004])
    assert shares.state()[-1] == [[40, 0.040], [24, 0.048], [0, 0.001, 1, 0.004]]


def test_of_ranks_that_are_not_known_it_is_the_mean() -> None:
    shares = Shares("auto", 2, 64)
    run(shares, [0.010, 0.0], 30)
    three = shares.anew(None, [None] * 3, [*shares.of_each(), None])
    row = three.state()[-1]
    assert row[0][2:] == [0, 0.010] and row[1][2:] == [] and row[2][2:] == [0, pytest.approx(0.005)]


def test_ranks_of_blocks_have_none() -> None:
    shares = BlockShares("auto", 2, 64, None, None, 4)
    assert run(shares, [0.010, 0.0], 60) == [32, 32]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_wrong_numbers_are_refused(bad: float) -> None:
    balancer = _core.Balancer("auto", 2, 64)
    with pytest.raises(_core.EvenstepError, match=r"rank 1 reports .* of its own in the exchange"):
        balancer.observe([(32, 0.1), (32, 0.1)], (), [0.0, bad])
    with pytest.raises(ValueError, match="exchange"):
        balancer.observe([(32, 0.1), (32, 0.1)], (), [0.0])


# -- in a job --


def test_a_rank_whose_gradients_go_through_the_hosts_memory_tells_what_that_takes(
    run_ranks: Callable[..., Any],
) -> None:
    """Its sums go back up by hundreds of copies; and it votes when its gradients are down."""
    told = [json.loads(rank.stdout.strip().splitlines()[-1]) for rank in run_ranks(CASES, 2, args=("own", "x,cpu"))]
    assert told[0] == told[1]  # all ranks have heard the same
    device, host = zip(*told[0])
    assert all(one > 0 for one in device[1:]) and set(host) == {0.0}


COMMITS = """
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

torch.manual_seed(3)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
_, _, even = es.prepare(model, optimizer, DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8))
steps = es.session().steps
told, synchronised = [], steps.times.synchronised


def late(step, end):
    steps.times.works_alone(3_000_000)
    synchronised(step, end)


steps.times.synchronised = late
for x, y in even:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    told.append(steps.times.own_seconds)
print(json.dumps([steps.recovery is not None, told]), flush=True)
"""


@pytest.mark.parametrize("recovery", ["shrink", "restart"])
def test_a_meeting_that_commits_the_step_is_one(run: Any, script: Callable[..., str], recovery: str) -> None:
    ended = run("-n", "2", "--no-pin", "--log-rank", "all", "--recovery", recovery, script(COMMITS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"\[(?:true|false), \[.*\]\]", ended.stdout)
    assert len(lines) == 2, ended.stdout
    for mends, told in map(json.loads, lines):
        assert mends == (recovery == "shrink")
        assert len(told) == 8 and set(told) == ({0.0} if mends else {0.003})
