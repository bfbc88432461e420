"""Gradients that travel as fewer bytes: what p.grad is then, how training goes, what a checkpoint keeps of it."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_hosts import TCP, needs_ucx, on_hosts
from torch import nn

import evenstep as es
from evenstep import _core
from evenstep.adasum_engine import AdasumEngine
from evenstep.checkpoint import _forget_exchanges
from evenstep.compressed_engine import CompressedEngine
from evenstep.compression import Compression, Int8, OneBit, encoding_of, in_parts, parse_compression, parse_way
from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import EngineOptions
from evenstep.exchange_state import restore_exchange
from evenstep.saved_bytes import SavedBytes

SCRIPT = pathlib.Path(__file__).parent / "compression_cases.py"


def test_on_two_ranks_with_changing_shares(run_ranks: Callable[..., list[Any]]) -> None:
    lines = run_ranks(SCRIPT)[0].stdout.splitlines()
    cases = dict(json.loads(line) for line in lines if line.startswith("["))
    for name, case in cases.items():
        kind, choice, *_ = name.split()
        if kind == "equal":
            check_equal(choice, case, parts=False)
        elif kind == "step":  # each rank's part is known to the bit but for a mean (onebit) and dot products (adasum)
            bound = {"int8": 1.0, "onebit": 1e-6, "adasum": 1e-6}.get(choice, 0.0)
            assert case["alike"] and case["worst"] <= bound, (name, case)
            assert case["absent"] == (10 if "unused" in name else 0)
        elif kind == "back":
            assert case["same"] and case["moved"] > 1, (name, case)
    trained = {name: case["loss"] for name, case in cases.items() if name.startswith("train")}
    assert all(case["alike"] for name, case in cases.items() if name.startswith("train"))
    plain = trained.pop("train none None")
    assert plain < 0.1 and trained.pop("train none accumulated") < 0.1
    bounds = {"onebit": 1.15, "adasum": 1.0}
    for name, loss in trained.items():
        if "accumulated" not in name:
            assert loss <= plain * bounds.get(name.split()[1], 1.01), (name, loss, plain)
    assert cases["train topk:0.1 accumulated"]["loss"] <= cases["train none accumulated"]["loss"] * 1.01
    assert trained["train bf16 torch"] == trained["train bf16 None"]  # the engine in C and torch's: the same bits
    assert {name.split()[0] for name in cases} == {"step", "train", "back", "equal"} and len(cases) == 32


def check_equal(choice: str, case: dict[str, Any], parts: bool) -> None:
    assert case["same"] and case["alike"] and case["kept"], (choice, case)
    assert case["kinds"] == ["EncodedEngine", "CompressedEngine"]
    kinds = {name.split()[0] for name in case["left"]}
    assert kinds == (set() if choice == "int8" else {"left", "sum"} if parts else {"left"}), (choice, case)


def test_sums_of_parts_on_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    way = {"EVENSTEP_COMPRESSION_WAY": "parts"}
    lines = run_ranks(SCRIPT, 3, args=("parts",), env=way)[0].stdout.splitlines()
    cases = dict(json.loads(line) for line in lines if line.startswith("["))
    for name, case in cases.items():
        kind, choice, *_ = name.split()
        if kind == "equal":
            check_equal(choice, case, parts=True)
        elif kind == "back":
            assert case["same"] and case["moved"] > 1, (name, case)
            assert case["order"] == ([[1, 0, 5, 4], [3, 2]] if "order" in name else None)
        else:
            assert case["alike"] and case["loss"] <= cases["train none None"]["loss"] * 1.2, (name, case)
    assert len(cases) == 12


@pytest.mark.parametrize("way", ["parts", pytest.param("gather", marks=pytest.mark.more)])
def test_another_process_goes_on_to_the_last_bit(run_ranks: Callable[..., list[Any]], way: str) -> None:
    """With the buckets' order that the first one had learned, and what each rank had left out."""

    def run(*more: str) -> dict[str, Any]:
        ranks = run_ranks(SCRIPT, 2, args=("on", *more), env={"EVENSTEP_COMPRESSION_WAY": way})
        facts: dict[str, Any] = json.loads(next(line for line in ranks[0].stdout.splitlines() if line[:1] == "["))[1]
        return facts

    written = run()
    went_on = run(written["path"])
    assert written["step"] == went_on["step"] == 15
    assert written["order"] == went_on["order"] and written["order"][1] == [3, 2]
    assert written["end"] == went_on["end"]


BETWEEN_HOSTS = """
    import torch
    from torch import nn
    import evenstep as es

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 200))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model = nn.Linear(200, 200, bias=False)
    model, loader = es.prepare(model, loader, compression="onebit")
    sync = es.session().steps.syncs[0]
    finish, moved = sync.finish, []

    def watched(again):
        report = finish(again)
        moved.append(report.bytes)
        return report

    sync.finish = watched
    for (x,) in loader:
        model(x).square().mean().backward()
        assert all(torch.equal(row, model.weight.grad) for row in es.gather(model.weight.grad[None], batch=False))
        model.zero_grad()
    left = sync.engine.feedback_state()["left 0"]
    print("engine", es.session().group.comm.engine, type(sync.engine).__name__, moved, bool(left.any()))
"""


@needs_ucx
def test_one_encoding_a_host(run_ranks: Callable[..., list[Any]]) -> None:
    """Four ranks on two hosts: each host sends one encoding to the other, and its first rank keeps what that leaves out."""
    payload = -(-40000 // 1024) * (4 + 1024 // 8)
    ranks = run_ranks(BETWEEN_HOSTS, 4, env=TCP, rank_env=on_hosts("a", "a", "b", "b"))
    for number, rank in enumerate(ranks):
        assert f"engine hosts EncodedEngine {[payload] * 2} {number % 2 == 0}" in rank.stdout


@pytest.mark.parametrize(
    ("way", "ranks", "size", "parts"),
    [
        ("auto", 3, 1 << 20, False),
        ("auto", 4, 1 << 20, True),
        ("auto", 4, 1000, False),
        ("gather", 9, 1 << 20, False),
        ("parts", 2, 4, True),
    ],
)
def test_which_way_encodings_go(way: str, ranks: int, size: int, parts: bool) -> None:
    assert in_parts(way, ranks, size) is parts


def test_a_way_that_is_none() -> None:
    with pytest.raises(es.EvenstepError, match="EVENSTEP_COMPRESSION_WAY is 'fast'; choose one of auto, gather, parts"):
        parse_way("fast")
    assert parse_way("") == "auto" and parse_way("parts") == "parts"


class Ring:
    """Ranks that are threads: what torch's collectives would do."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rows = ranks, [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=150)

    def share(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        self.rows[rank] = value
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class Place:
    """One rank's exchange and group."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank, self.ranks = ring, rank, ring.ranks
        self.met_ns = 0

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        rows = torch.stack(self.ring.share(self.rank, payload))
        self.met_ns = _core.clock_ns()
        return rows

    def all_reduce(self, values: torch.Tensor) -> None:
        values.copy_(sum(row.clone() for row in self.ring.share(self.rank, values.clone())))

    def exchange(self, record: bytes) -> list[bytes]:
        rows = self.ring.share(self.rank, torch.frombuffer(bytearray(record), dtype=torch.uint8))
        return [bytes(row.tolist()) for row in rows]

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        values.copy_(self.ring.share(self.rank, values.clone())[root])


def on_ranks(count: int, work: Callable[[Place], Any]) -> list[Any]:
    ring, results = Ring(count), [None] * count

    def run(rank: int) -> None:
        results[rank] = work(Place(ring, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def exchanged(engine: Any, gradients: Sequence[torch.Tensor | None], weight: float) -> list[torch.Tensor]:
    engine.begin(weight, 0)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            engine.ready(index, gradient)
    engine.finish()
    return [view.clone() for view in engine.views]


def test_adasum_of_four_ranks_is_a_tree_of_pairs() -> None:
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    axes = torch.eye(4)

    def work(place: Place) -> list[torch.Tensor]:
        engine = AdasumEngine(parameters, place, place, _core.Telemetry(-1, place.rank), EngineOptions(adasum=True))
        weight = [0.4, 0.3, 0.2, 0.1][place.rank]
        return exchanged(engine, [axes[place.rank], torch.full((3,), 2.0, dtype=torch.float64)], weight)

    for rank in on_ranks(4, work):
        # orthogonal: the sum; parallel: the weighted mean, to the digits of the gradient's own type
        assert torch.allclose(rank[0], torch.tensor([1.6, 1.2, 0.8, 0.4]), rtol=1e-6)
        assert torch.allclose(rank[1], torch.full((3,), 2.0, dtype=torch.float64), rtol=1e-14)


@pytest.mark.parametrize("name", ["int8", "onebit", "topk"])
def test_overflow_is_seen_by_every_rank_and_leaves_no_trace(name: str) -> None:
    options = EngineOptions(compression=parse_compression(name))

    def work(place: Place) -> tuple[bool, bool]:
        engine = CompressedEngine([nn.Parameter(torch.zeros(9))], place, place, _core.Telemetry(-1, 0), options)
        bad = torch.arange(9.0)
        bad[4] = float("inf") if place.rank else 1.0
        seen = exchanged(engine, [bad], 0.5)[0]
        after = [exchanged(engine, [torch.arange(9.0)], 0.5)[0] for _ in range(3)]
        return bool(seen.isfinite().all()), all(bool(one.isfinite().all()) for one in after)

    assert on_ranks(2, work) == [(False, True), (False, True)]


@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_overflow_of_one_bucket_on_one_rank_leaves_what_was_left_out_as_it_was(name: str) -> None:
    options = EngineOptions(compression=parse_compression(name), bucket_bytes=4)  # a bucket for each parameter

    def work(place: Place) -> bool:
        parameters = [nn.Parameter(torch.zeros(9)) for _ in range(2)]
        engine = CompressedEngine(parameters, place, place, _core.Telemetry(-1, 0), options)
        exchanged(engine, [torch.arange(9.0), torch.arange(9.0)], 0.5)
        before = {name: left.clone() for name, left in engine.feedback_state().items()}
        bad = torch.arange(9.0)
        bad[4] = float("inf") if place.rank else 1.0
        exchanged(engine, [bad, torch.ones(9)], 0.5)
        after = engine.feedback_state()
        return before.keys() == after.keys() == {"left 0", "left 1"} and all(
            torch.equal(before[n], after[n]) for n in before
        )

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("name", ["onebit", "topk:0.1"])
def test_what_was_left_out_of_a_parameter_waits_until_it_is_used_again(name: str) -> None:
    options = EngineOptions(compression=parse_compression(name))
    gradient = torch.arange(1.0, 13.0)

    def work(place: Place) -> tuple[bool, float]:
        parameters = [nn.Parameter(torch.zeros(12)) for _ in range(2)]
        engine = CompressedEngine(parameters, place, place, _core.Telemetry(-1, 0), options)
        come = torch.zeros(12)
        for number in range(60):  # every third step both; else the other one alone, in the same bucket
            used = number % 3 == 0
            before = engine.feedback_state()["left 0"]
            got = exchanged(engine, [gradient if used else None, torch.ones(12)], 0.5)[0]
            if used:
                come += got
            elif not torch.equal(engine.feedback_state()["left 0"], before):
                return False, 0.0
        left = torch.stack(place.ring.share(place.rank, engine.feedback_state()["left 0"])).sum(0)
        return True, float((come + left - 20 * gradient).abs().max())

    for kept, lost in on_ranks(2, work):
        assert kept and lost < 1e-2


@pytest.mark.parametrize("name", ["int8", "onebit", "topk"])
def test_going_back_forgets_what_came_after(name: str) -> None:
    options = EngineOptions(compression=parse_compression(name))

    def work(place: Place) -> list[torch.Tensor]:
        engine = CompressedEngine([nn.Parameter(torch.zeros(9))], place, place, _core.Telemetry(-1, 0), options)
        ends = []
        for _ in range(2):
            engine.load_feedback({})  # a checkpoint of before the first exchange
            ends.append(torch.cat([exchanged(engine, [torch.arange(9.0) / 7], 0.5)[0] for _ in range(3)]))
        return ends

    for once, again in on_ranks(2, work):
        assert torch.equal(once, again)


def test_a_bucket_with_more_values_than_an_encoding_can_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.compression.MOST_VALUES", 9)

    def engine(*counts: int, **cap: int) -> None:
        options = EngineOptions(compression=Compression("topk", 0.1), **cap)
        place = Place(Ring(1), 0)
        CompressedEngine([nn.Parameter(torch.zeros(n)) for n in counts], place, place, _core.Telemetry(-1, 0), options)

    engine(9, 9, bucket_bytes=4)
    with pytest.raises(es.EvenstepError, match=r"a bucket of 18 elements, of 2 parameters,[^\n]*\n.*bucket_cap_mb"):
        engine(9, 9)
    with pytest.raises(es.EvenstepError, match=r"a bucket of 10 elements, of 1 .*\n.*without compression"):
        engine(10)


def test_what_has_no_type_to_encode_travels_as_it_is() -> None:
    wide = torch.full((5,), 1 / 3, dtype=torch.float64)
    options = EngineOptions(compression=Compression("onebit"))

    def work(place: Place) -> torch.Tensor:
        parameters = [nn.Parameter(torch.zeros(5, dtype=torch.float64)), nn.Parameter(torch.zeros(0))]
        engine = CompressedEngine(parameters, place, place, _core.Telemetry(-1, 0), options)
        return exchanged(engine, [wide, torch.zeros(0)], 0.5)[0]

    assert all(torch.equal(one, wide) for one in on_ranks(2, work))


def test_rounding_at_random_is_right_on_average_and_reproducible() -> None:
    values = torch.linspace(-1, 1, 700) ** 3
    total = torch.zeros(700)
    for seed in range(400):
        Int8().add(Int8().encode(values, seed), total)
    assert float((total / 400 - values).abs().max()) < 4 * (1 / 127) / 2 / 400**0.5
    assert torch.equal(Int8().encode(values, 7), Int8().encode(values, 7))
    assert not torch.equal(Int8().encode(values, 7), Int8().encode(values, 8))
    assert Int8().encode(values, 7).numel() == 3 * 4 + 3 * 256
    assert OneBit().encode(values, 0).numel() == 4 + 1024 // 8


@pytest.mark.parametrize("name", ["int8", "onebit", "topk:0.1"])
@pytest.mark.parametrize("count", [1, 5, 700, 2048])
def test_torch_encodes_as_c_does(name: str, count: int) -> None:
    compression = parse_compression(name)
    assert compression is not None
    encoding = encoding_of(compression)
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    decoded = {}
    for by in ("c", "torch"):
        encode, add = (
            (encoding.encode, encoding.add) if by == "c" else (encoding.encode_by_torch, encoding.add_by_torch)
        )
        payload = encode(values, 3)
        into = torch.zeros(count)
        add(payload, into, -1)
        both = -into
        encoding.add(payload, into, 1)  # each reads what the other has written
        assert torch.equal(into, torch.zeros(count))
        bad = values.clone()
        bad[count // 2] = float("nan")
        seen = torch.zeros(count)
        encoding.add(encode(bad, 3), seen)
        assert both.isfinite().all() and not seen.isfinite().all()
        decoded[by] = both
    bound = {"int8": float(values.abs().max()) / 126, "onebit": 1e-6}.get(compression.name, 0.0)
    assert float((decoded["c"] - decoded["torch"]).abs().max()) <= bound


class Fed:
    """An engine that has left something out."""

    feedback_counts_as_mean = anew = False

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def feedback_state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_feedback(self, state: dict[str, torch.Tensor]) -> bool:
        self.loaded = state
        return self.anew


class Going:
    """A session that goes on from a checkpoint."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size, self.engine, self.name, self.compression = world_size, Fed(), "model", "topk:0.1"
        self.local = self.stale = None
        self.engines = [self.engine, object()]
        self.steps, self.syncs = self, [self]
        self.orders: list[Any] = []

    def take_order(self, order: Any) -> None:
        self.orders.append(order)


def test_other_ranks_share_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [
        {"left 0": torch.tensor([4.0, 2.0])},
        {"left 0": torch.tensor([2.0, -8.0]), "sum 0 1": torch.tensor([6.0])},
    ]
    saved = {"models": {"model": {"compression": "topk:0.1", "ranks": ranks}}}
    going = Going(3)
    restore_exchange(going, saved)
    assert {name: left.tolist() for name, left in going.engine.loaded.items()} == {"left 0": [2.0, 0.0]}
    assert "on 2 ranks is added up and split evenly between 3" in capsys.readouterr().err
    ranks = [{"0": torch.tensor([4.0, 2.0]), "iter": torch.tensor(3)}, {"0": torch.tensor([2.0, -2.0])}]
    saved = {"models": {"model": {"compression": "topk:0.1", "ranks": ranks}}}
    going = Going(3)
    going.engine.feedback_counts_as_mean = True  # PowerSGD
    restore_exchange(going, saved)
    assert going.engine.loaded["0"].tolist() == [3.0, 0.0]  # whose mean over any number of ranks is that of before
    assert "on 2 ranks is added up and split evenly between 3" in capsys.readouterr().err
    going = Going(2)
    restore_exchange(going, saved)
    assert going.engine.loaded is ranks[0] and not capsys.readouterr().err
    assert going.orders == [None]
    going.engine.anew = True
    restore_exchange(going, saved)
    assert "'model' has other buckets than when the checkpoint was written: the factors" in capsys.readouterr().err
    saved["models"]["model"]["compression"] = "onebit"
    going = Going(2)
    going.engine.loaded = ranks[1]  # of the training that goes back
    restore_exchange(going, saved)
    assert not going.engine.loaded
    assert "written with compression onebit: what topk:0.1 leaves out" in capsys.readouterr().err
    restore_exchange(Going(2), {})
    assert "written without compression" in capsys.readouterr().err


def test_weights_that_are_loaded_alone_begin_without_what_was_left_out_of_others() -> None:
    going = Going(2)
    going.engine.loaded = {"left 0": torch.ones(2)}
    _forget_exchanges(going)
    assert not going.engine.loaded


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, str]] = []

    def event(self, *record: Any) -> None:
        self.events.append(record)


def test_saved_bytes_are_told_once_and_when_they_change() -> None:
    told: Any = Told()
    saved = SavedBytes(told)
    for step, moved in enumerate((50, 50, 50, 25, 100, 110)):
        saved.add("compression bf16", moved, 100)
        saved.add("", 0, 0)
        saved.tell(step, True)
    saved.tell(6, True)
    kind = _core.EVENT_COMPRESSION
    assert told.events == [
        (kind, 0, 50, "compression bf16: 50% fewer bytes"),
        (kind, 3, 75, "compression bf16: 75% fewer bytes"),
        (kind, 4, 0, "compression bf16: as many bytes"),
        (kind, 5, -10, "compression bf16: 10% more bytes"),
    ]


@pytest.mark.parametrize(
    "words", ["fast", "fp16:2", "topk:0", "topk:1.5", "topk:much", "powersgd:0", "powersgd:1.5", "", 7]
)
def test_choices_that_are_none(words: Any) -> None:
    with pytest.raises(ValueError, match=r"compression=….*\n  fix: choose 'fp16'"):
        es.prepare(nn.Linear(1, 1), compression=words)


def test_choices_with_numbers() -> None:
    assert str(parse_compression("topk")) == "topk:0.01" and str(parse_compression("powersgd:2")) == "powersgd:2"
    assert parse_compression("none") is None and parse_compression(None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "max"}, "choose 'mean'"),
        ({"reduction": "adasum", "compression": "bf16"}, "Adasum needs the gradients as they are"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        es.prepare(nn.Linear(1, 1), **options)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", ["topk:0.4", "onebit"])
def test_rounds_of_a_step_that_counts_nothing_leave_nothing_out(name: str, rounds: int) -> None:
    parameters = [torch.zeros(40), torch.zeros(3, 5)]
    options = EngineOptions(compression=parse_compression(name))
    size = EncodedEngine.arena_bytes(parameters, options)

    def comm() -> _core.Comm:
        return _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size)

    engine = EncodedEngine(parameters, comm(), None, options)
    engine.takes_back = True
    generator = torch.Generator().manual_seed(1)

    def turn(count: int) -> None:
        for _ in range(count):
            engine.begin(1.0, 0)
            for index, parameter in enumerate(parameters):
                engine.ready(index, torch.randn(parameter.shape, generator=generator))
            engine.finish()

    def same(state: dict[str, torch.Tensor]) -> bool:
        now = engine.feedback_state()
        return now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)

    turn(2)
    engine.stands()
    known = engine.feedback_state()
    assert any(values.any() for values in known.values())
    turn(rounds)
    assert not same(known)
    engine.take_back()
    assert same(known)
    turn(rounds)
    engine.begin(1.0, 0)  # a round in which a rank is lost
    engine = engine.again(comm())
    assert same(known)
    turn(1)
    engine.stands()
    after = engine.feedback_state()
    engine = engine.again(comm())
    assert same(after) and not same(known)
