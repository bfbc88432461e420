"""Exchanges of gradients that are made again since a rank was lost, in one process: what engines have left out is as it was before,
late rounds are those of who is left, and counts as much as it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compression import Place, exchanged, on_ranks

from evenstep import _core
from evenstep.adasum_engine import AdasumEngine
from evenstep.batch_noise import NoiseProbe
from evenstep.compression import parse_compression
from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import EngineOptions
from evenstep.exchange import SharedExchange
from evenstep.generation_passes import Passes
from evenstep.group import Alone
from evenstep.powersgd_engine import PowerSGDEngine
from evenstep.stale import StaleRounds
from evenstep.steps import Steps

NAMES = ["topk:0.4", "onebit", "powersgd:1"]


def comm(size: int = 1 << 20) -> Any:
    return _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size)


def engine_of(name: str) -> Any:
    """Of one rank."""
    options = EngineOptions(compression=parse_compression(name))
    parameters = [torch.zeros(16, 16), torch.zeros(3, 5)]
    if name.startswith("powersgd"):
        return PowerSGDEngine(parameters, SharedExchange(comm()), Alone(), _core.Telemetry(-1, 0), options)
    return EncodedEngine(parameters, comm(), None, options)


def gradients(number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return [torch.randn(16, 16, generator=draw), torch.randn(3, 5, generator=draw)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_step_that_counts_nothing_leaves_powersgd_as_it_was() -> None:
    engine = engine_of("powersgd:1")
    engine.takes_back = True
    for number in range(13):
        exchanged(engine, gradients(number), 1.0)
    engine.stands()
    known = engine.feedback_state()
    assert known["0"].any() and known["q0"].any()
    for rounds in (1, 2):
        for number in range(rounds):
            exchanged(engine, gradients(20 + number), 1.0)
        assert not same(engine.feedback_state(), known)
        if rounds == 1:
            engine.take_back()
        else:
            engine = engine.again(comm())
        assert same(engine.feedback_state(), known)
    exchanged(engine, gradients(30), 1.0)
    engine.stands()
    engine.take_back()
    assert not same(engine.feedback_state(), known)


def test_what_powersgd_has_left_out_counts_as_much_among_others() -> None:
    engine = engine_of("powersgd:1")
    for number in range(12):
        exchanged(engine, gradients(number), 1.0)
    kept = engine.feedback_state()
    of_one = engine.of_ranks(kept, 3)  # of three, of which this one is left: each had brought a third of the mean
    assert torch.allclose(3 * of_one["0"], kept["0"], rtol=1e-6) and torch.equal(of_one["q0"], kept["q0"])
    told = engine.shared_state()  # to one that joins
    assert not told["0"].any() and torch.equal(told["p0"], kept["p0"]) and int(told["iter"]) == 12


@pytest.mark.parametrize("name", NAMES)
def test_late_rounds_are_made_again_as_they_were(name: str) -> None:
    ends = []
    for disturbed in (False, True):
        passes = Passes()
        rounds = StaleRounds([engine_of(name)], passes, 1)
        used: list[dict[int, torch.Tensor]] = []
        for number in range(15):
            given = dict(enumerate(gradients(number)))
            if disturbed and number in (0, 5, 13, 14):  # a turn that counts nothing, as it was until the ranks go on
                rounds.turn(given, 1.0, number)
            if disturbed and number in (0, 5, 9, 13, 14):
                totals = {one: weight for one, weight in rounds.weights().items() if one < passes.committed}
                rounds.go_on([rounds.engines[0].again(comm())], totals, 1)  # type: ignore[attr-defined]
            used.append(rounds.turn(given, 1.0, number)[0])
            passes._commits()
            rounds.stands()
        rounds.wait()
        engine: Any = rounds.engines[0]
        ends.append((used, engine.feedback_state()))
    (used, left), (used_again, left_again) = ends
    assert len(used[-1]) == 2 and all(torch.equal(a[index], b[index]) for a, b in zip(used, used_again) for index in a)
    assert same(left, left_again) and any(values.any() for values in left.values())


def test_late_sums_of_a_checkpoint_are_not_made_again() -> None:
    """They are whole: encoded once more, they would not be what they were."""
    devices = [torch.device("cpu")] * 2
    saved = {"mode": "Stale", "results": [{str(index): one for index, one in enumerate(gradients(0))}]}
    ends = []
    for disturbed in (False, True):
        passes = Passes()
        rounds = StaleRounds([engine_of("topk:0.4")], passes, 1)
        assert rounds.load(saved, devices)
        if disturbed:
            rounds.turn(dict(enumerate(gradients(1))), 1.0, 1)
            totals = {one: weight for one, weight in rounds.weights().items() if one < passes.committed}
            told = rounds.own_state()["results"]
            assert len(told) == 1 and same(told[0], saved["results"][0])
            rounds.go_on([rounds.engines[0].again(comm())], totals, 1)  # type: ignore[attr-defined]
        ends.append(rounds.turn(dict(enumerate(gradients(1))), 1.0, 1)[0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values())) and len(ends[0]) == 2


@pytest.mark.parametrize("ranks", [3, 5])
def test_adasum_of_an_odd_number_of_ranks(ranks: int) -> None:
    parameters = [torch.zeros(ranks), torch.zeros(3, dtype=torch.float64)]
    axes = torch.eye(ranks)
    weights = [0.5, *[0.5 / (ranks - 1)] * (ranks - 1)]

    def work(place: Place) -> list[torch.Tensor]:
        engine = AdasumEngine(parameters, place, place, _core.Telemetry(-1, place.rank), EngineOptions(adasum=True))  # type: ignore[arg-type]
        given = [axes[place.rank], torch.full((3,), 1.0 + place.rank, dtype=torch.float64)]
        return exchanged(engine, given, weights[place.rank])

    mean = sum(weight * (1 + rank) for rank, weight in enumerate(weights))
    for rank in on_ranks(ranks, work):  # orthogonal: the sum; parallel: the weighted mean
        assert torch.allclose(rank[0], ranks * torch.tensor(weights), rtol=1e-6)
        assert torch.allclose(rank[1], torch.full((3,), mean, dtype=torch.float64), rtol=1e-13)


def test_noise_that_was_measured_in_a_step_that_counts_nothing_is_forgotten() -> None:
    probe = NoiseProbe(Steps(Alone(), _core.Telemetry(-1, 0)), 1)
    probe.known.add(4.0, 2.0)
    probe.stands()
    probe.known.add(100.0, 1.0)
    probe.take_back()
    assert probe.known.state() == [4.0, 2.0, 1]
    probe.load([1.0, 1.0, 7])  # of a checkpoint
    probe.known.add(100.0, 1.0)
    probe.take_back()
    assert probe.known.state() == [1.0, 1.0, 7]


def test_a_batch_that_is_fetched_after_a_loop_was_left_begins_another_pass() -> None:
    passes = Passes()
    assert passes.begins_pass() and not passes.fetches_void()
    passes._void_passes = 1  # a rank is lost
    assert passes.fetches_void()
    passes.turn_ended(counts=False)
    assert not passes.fetches_void() and passes._passes == 1  # what the others hear of, if one is lost in the fetch
    assert passes.begins_pass() and passes._passes == 1 and not passes.void
