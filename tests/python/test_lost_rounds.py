"""Exchanges of gradients that are made again since a rank was lost, in one process: what engines have left out is as it was before,
late rounds are those of who is left, and counts as much as it did."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_compression import Place, exchanged, on_ranks

from evenstep import EvenstepError, _core
from evenstep.adasum_engine import AdasumEngine
from evenstep.batch_noise import NoiseProbe
from evenstep.compressed_engine import CompressedEngine
from evenstep.compression import parse_compression
from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import EngineOptions
from evenstep.errors import error_of
from evenstep.exchange import Exchange, SharedExchange, TorchExchange
from evenstep.generation_passes import Passes
from evenstep.generation_torch import forget, open_torch_group
from evenstep.group import Alone
from evenstep.mended_group import is_lost
from evenstep.powersgd_engine import PowerSGDEngine
from evenstep.stale import StaleRounds
from evenstep.steps import Steps

NAMES = ["topk:0.4", "onebit", "powersgd:1", "gloo topk:0.4", "gloo onebit", "gloo powersgd:1"]


def comm(size: int = 1 << 20) -> Any:
    return _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size)


def heed() -> None:
    """Of a job in which nobody is lost."""


def gloo() -> Exchange:
    return TorchExchange(open_torch_group("gloo", dist.HashStore(), 0, 1, name="a", timeout_seconds=60), heed)


def engine_of(name: str) -> Any:
    """Of one rank."""
    over, _, kind = name.rpartition(" ")
    options = EngineOptions(compression=parse_compression(kind))
    parameters = [torch.zeros(16, 16), torch.zeros(3, 5)]
    if not over and not kind.startswith("powersgd"):
        return EncodedEngine(parameters, comm(), None, options)
    exchange = gloo() if over else SharedExchange(comm())
    make = PowerSGDEngine if kind.startswith("powersgd") else CompressedEngine
    return make(parameters, exchange, Alone(), _core.Telemetry(-1, 0), options)


def again(engine: Any) -> Any:
    """Among those that are left: itself."""
    if isinstance(engine, EncodedEngine):
        return engine.again(comm())
    engine.revoke()
    return engine.again(gloo() if isinstance(engine._exchange, TorchExchange) else SharedExchange(comm()))


def gradients(number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return [torch.randn(16, 16, generator=draw), torch.randn(3, 5, generator=draw)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_counts_nothing_leaves_nothing_out(name: str) -> None:
    engine = engine_of(name)
    assert engine.plain or not name.startswith("gloo")
    engine.takes_back = True
    for number in range(13):
        exchanged(engine, gradients(number), 1.0)
    engine.stands()
    known = engine.feedback_state()
    assert known["0"].any() and known["q0"].any() if "powersgd" in name else any(one.any() for one in known.values())
    for rounds in (1, 2):
        for number in range(rounds):
            exchanged(engine, gradients(20 + number), 1.0)
        assert not same(engine.feedback_state(), known)
        if rounds == 1:
            engine.take_back()
        else:
            engine = again(engine)
        assert same(engine.feedback_state(), known)
    engine.begin(1.0, 0)
    engine.discard()  # its sums are gradients of a second round
    for index, one in enumerate(gradients(25)):
        engine.ready(index, one)
    engine.finish()
    engine.keep([0])
    assert not same(engine.feedback_state(), known)
    engine.take_back()
    assert same(engine.feedback_state(), known)
    exchanged(engine, gradients(30), 1.0)
    engine.stands()
    engine.take_back()
    assert not same(engine.feedback_state(), known)


class Among:
    """A place among others, of whom none is asked anything."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Between:
    """An exchange of so many."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def leave(self) -> None: ...


@pytest.mark.parametrize("kind", ["onebit", "topk:0.4"])
def test_what_was_left_out_of_sums_stays_with_its_parameters(kind: str) -> None:
    """The third of four ranks has the third part of each bucket; the group calls it the second before its engine ends."""
    count = 16384
    options, group = EngineOptions(compression=parse_compression(kind), way="parts"), Among(2)
    make: Any = CompressedEngine
    engine = make([torch.zeros(count)], Between(4), group, _core.Telemetry(-1, 0), options)
    whole, first = engine.left_out(0, True)
    assert (whole.numel(), first) == (count // 4, count // 2)
    whole.copy_(torch.arange(whole.numel()))
    group.rank = 1
    state = engine.again(Between(3)).feedback_state()
    got = torch.zeros(count)
    for key, values in state.items():
        at = int(key.split()[2]) if key.startswith("sum") else 0
        got[at : at + values.numel()] += values
    wanted = torch.zeros(count)
    wanted[first : first + whole.numel()] = torch.arange(whole.numel())
    assert torch.equal(got, wanted)


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
                rounds.go_on([again(rounds.engines[0])], totals, 1)
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
            rounds.go_on([again(rounds.engines[0])], totals, 1)
        ends.append(rounds.turn(dict(enumerate(gradients(1))), 1.0, 1)[0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values())) and len(ends[0]) == 2


@pytest.mark.parametrize("kind", ["topk:0.4", "powersgd:1", "adasum"])
def test_an_exchange_over_gloo_that_waits_for_a_lost_rank_ends(kind: str) -> None:
    """And so does its group, where it is left."""

    def lost() -> None:
        raise error_of("EVEN_ERR_PEER_LOST", "another rank was lost")

    store = dist.HashStore()
    groups = on_ranks(
        2, lambda one: open_torch_group("gloo", store, one.rank, 2, name="a", timeout_seconds=60)
    )  # the second one never comes to a round
    exchange, parameters = TorchExchange(groups[0], lost), [torch.zeros(40, 9), torch.zeros(3, dtype=torch.float64)]
    options = EngineOptions(compression=None if kind == "adasum" else parse_compression(kind), adasum=kind == "adasum")
    make = {"adasum": AdasumEngine, "powersgd:1": PowerSGDEngine}.get(kind, CompressedEngine)
    engine: Any = make(parameters, exchange, Alone(), _core.Telemetry(-1, 0), options)
    with pytest.raises(EvenstepError, match="another rank was lost") as found:
        exchanged(engine, [torch.ones(40, 9), torch.ones(3, dtype=torch.float64)], 1.0)
    assert is_lost(found.value) and exchange.under_way
    engine.revoke()
    forget(groups)
    before = sys.getrefcount(groups[0])
    engine.again(gloo())
    after = sys.getrefcount(groups[0])
    assert all(one.over for one in exchange.under_way) and after == before
    closed = TorchExchange(groups[0], lost).failed(Alone(), RuntimeError("Connection closed by peer [a]:1\nmore"))
    assert is_lost(closed) and "Connection closed by peer" in str(closed)


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
