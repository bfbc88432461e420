"""How large the buckets of gradients are: as the script says, in MiB or in elements, or as what was measured says."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from evenstep import _core, bucket_sizes, comm_costs
from evenstep.bucket_sizes import ROUNDS, WARM, BucketSizes, sizes_of
from evenstep.compression import parse_compression
from evenstep.engine import EngineOptions, Report, SharedEngine
from evenstep.environment import Environment
from evenstep.gradients import GradientSync
from evenstep.group import Alone
from evenstep.prepare_options import engine_options
from evenstep.steps import Steps
from evenstep.torch_engine import TorchEngine

MIB = 1 << 20


def shared_engine(parameters: list[nn.Parameter], options: EngineOptions | None = None) -> SharedEngine:
    options = options or EngineOptions()
    size = SharedEngine.arena_bytes(parameters, options)
    return SharedEngine(parameters, _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size), None, options)


def buckets(engine: SharedEngine) -> int:
    engine.begin(1.0, 0)
    return int(engine._sync.finish()[6])


# ---- as the script says ----


def options_of(models: list[nn.Module], cap: float | None, elements: Any) -> EngineOptions:
    return engine_options(Environment(), None, None, "mean", cap, elements, models)


@pytest.mark.parametrize(("elements", "shared", "torchs"), [(1 << 16, 8, 8), (2.0**18, 3, 2), (5e8, 2, 1)])
def test_elements_of_any_dtype(elements: float, shared: int, torchs: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parameters = [nn.Parameter(torch.zeros(1 << 16, dtype=dtype)) for _ in range(8)]
        options = options_of([], None, elements)
        engine = shared_engine(parameters, options)
        assert buckets(engine) == shared  # the first is of 256 KiB at most
        torch_engine = TorchEngine(parameters, None, Alone(), _core.Telemetry(-1, 0), options)
        assert len(torch_engine._buckets) == torchs
        assert not engine.chooses_sizes


def test_both_are_an_error_where_they_differ() -> None:
    narrow, wide = nn.Linear(2, 2), nn.Linear(2, 2).double()
    assert options_of([narrow], 1, 1 << 18).bucket_bytes == MIB
    assert options_of([wide], 1, 1 << 17).bucket_bytes == MIB
    for models, elements in (([narrow], 1 << 17), ([narrow, wide], 1 << 18), ([wide], 5e8)):
        with pytest.raises(ValueError, match=r"elements of [48] bytes are .* MiB\n  fix: give one of the two"):
            options_of(models, 1, elements)


@pytest.mark.parametrize("wrong", [0, -5, 1.5, float("nan"), float("inf")])
def test_a_number_of_elements(wrong: float) -> None:
    with pytest.raises(ValueError, match="reduce_bucket_size="):
        options_of([], None, wrong)
    for other in ("5e8", True):
        with pytest.raises(TypeError, match="reduce_bucket_size="):
            options_of([], None, other)


def test_what_is_said_is_not_measured() -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 19))]
    for options, chooses in (
        (EngineOptions(), True),
        (EngineOptions(compression=parse_compression("bf16")), True),
        (EngineOptions(bucket_bytes=4 * MIB), False),
        (EngineOptions(bucket_elements=MIB), False),
    ):
        engine = shared_engine(parameters, options)
        assert sizes_of(engine, "model") is None  # a rank alone
        engine._comm = Two(engine._comm)  # type: ignore[assignment]
        assert (sizes_of(engine, "model") is not None) is chooses
        engine._comm = engine._comm.of  # type: ignore[attr-defined]
    small = shared_engine([nn.Parameter(torch.zeros(1 << 10))])
    small._comm = Two(small._comm)  # type: ignore[assignment]
    assert sizes_of(small, "model") is None


class Two:
    """A group of one that says it is of two."""

    ranks = 2

    def __init__(self, of: _core.Comm) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


# ---- as measured ----


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> _core.CommCosts:
    """The table of this process: calls take a millisecond for a MiB, and hardly any time to begin."""
    monkeypatch.setattr(comm_costs, "_kept", None)
    monkeypatch.setattr(comm_costs, "atexit", SimpleNamespace(register=lambda call: call))
    table = comm_costs.table()
    for power in range(10, 26):
        table.add("all_reduce", "not known", "shm", "call", 1 << power, 1e-6 + (1 << power) / MIB * 1e-3)
    return table


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What _core.clock_ns says."""
    now = [0]
    monkeypatch.setattr(bucket_sizes._core, "clock_ns", lambda: now[0])
    return now


def rounds(sizes: BucketSizes, clock: list[int], count: int, every_ms: float, exposed_ms: float) -> None:
    """The gradients of 16 parameters come one after the other, the last first."""
    for _ in range(count):
        assert not sizes.due
        sizes.backward_begins()
        for index in reversed(range(16)):
            clock[0] += int(every_ms * 1e6)
            sizes.saw(index)
        sizes.round_ends(Report(0, 0, int(exposed_ms * 1e6), 0))


def sixteen() -> SharedEngine:
    engine = shared_engine([nn.Parameter(torch.zeros(MIB // 4)) for _ in range(16)])  # of 1 MiB
    engine.shape = ""
    return engine


def test_what_hides_behind_backward_stays(costs: _core.CommCosts, clock: list[int]) -> None:
    sizes = BucketSizes(sixteen(), "model")
    rounds(sizes, clock, WARM + ROUNDS, every_ms=2, exposed_ms=0.5)  # of 32: nobody looks
    assert sizes.due and sizes.decide(Alone()) == 0
    assert sizes.done and sizes.wanted is None and not sizes.watching and not sizes.due and sizes.words == ""


@pytest.mark.parametrize("shorter", [True, False])
def test_a_trial(costs: _core.CommCosts, clock: list[int], shorter: bool, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("EVENSTEP_COMM_DEBUG", "1")
    sizes = BucketSizes(sixteen(), "model")
    rounds(sizes, clock, WARM + ROUNDS, every_ms=2, exposed_ms=4)
    assert sizes.decide(Alone()) == 0
    wanted, sizes.wanted = sizes.wanted, None
    assert wanted is not None and wanted[0] <= MIB  # the last bucket is one parameter then, and not four
    assert "on trial" in capfd.readouterr().err and not sizes.done
    rounds(sizes, clock, 1, every_ms=9, exposed_ms=9)  # its memory is new: it says nothing
    rounds(sizes, clock, ROUNDS, every_ms=2 if shorter else 2.3, exposed_ms=1)
    assert sizes.due
    sizes.decide(Alone())
    assert sizes.done and sizes.wanted == (None if shorter else (0, 0))
    assert ("33 ms, not 36 (measured)" in sizes.words) is shorter
    assert ("stay" if shorter else "again") in capfd.readouterr().err


def test_a_model_that_finds_none(costs: _core.CommCosts, clock: list[int]) -> None:
    """All gradients come at once: the exchange begins at its end, whatever the size."""
    sizes = BucketSizes(sixteen(), "model")
    rounds(sizes, clock, WARM + ROUNDS, every_ms=0.0001, exposed_ms=4)
    sizes.decide(Alone())
    assert sizes.done and sizes.wanted is None


def test_costs_are_measured_where_they_are_not_known(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_costs, "_kept", None)
    monkeypatch.setattr(comm_costs, "atexit", SimpleNamespace(register=lambda call: call))
    sizes = BucketSizes(sixteen(), "model")
    rounds(sizes, clock, WARM + ROUNDS, every_ms=2, exposed_ms=4)
    sizes.decide(Alone())
    assert comm_costs.table().find("all_reduce", "not known", "shm", "call", MIB) is not None


def test_sums_are_the_same_bits_with_all_sizes() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(MIB // 4) for _ in range(16)]
    engine = sixteen()
    assert engine.reorder([*range(3, 16), 0, 1], [2])
    found = []
    for sizes, count in (((0, 0), 6), ((MIB, MIB), 16), ((16 * MIB, 4 * MIB), 3), ((0, 0), 6)):
        assert engine.resize(*sizes)
        assert buckets(engine) == count
        engine.begin(0.3, 0)
        for index, gradient in enumerate(gradients):
            if index != 2:
                engine.ready(index, gradient)
        used, _ = engine.finish()
        assert used == bytes(0 if index == 2 else 1 for index in range(16))
        found.append([engine.views[index].clone() for index in range(16) if index != 2])
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one))


RANKS = """
    import json
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es
    from evenstep import bucket_sizes, comm_costs
    from evenstep.engine import Report

    MIB = 1 << 20

    def train(gains, **options):
        # As if the exchange took a fifth of each step after backward, and, where that gains, nothing with other sizes.
        took = bucket_sizes.BucketSizes.round_ends
        def round_ends(sizes, report):
            other = sizes._engine._sizes != (0, 0)
            sizes._rounds._came = [0.001 * (index + 1) for index in reversed(range(len(sizes._rounds._came)))]
            took(sizes, Report(0, 0, 0 if other and gains else 9_000_000 if other else 2_000_000, 0))
        bucket_sizes.BucketSizes.round_ends = round_ends
        torch.manual_seed(es.rank())
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 512))
        model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=4), policy="equal", **options)
        engine = es.session().steps.syncs[-1].engine
        if es.rank() == 0:
            for power in range(10, 26):
                comm_costs.table().add(
                    "all_reduce", engine.shape, engine.comm.engine, "call", 1 << power, 1e-5 + 2e-3 * (1 << power) / MIB
                )
        sizes = []
        for _ in range(2):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                sizes.append(engine._sizes)
        bucket_sizes.BucketSizes.round_ends = took
        return sizes, [float(p.double().sum()) for p in model.parameters()], [p.detach().clone() for p in model.parameters()]

    fixed, sums, values = train(True, bucket_cap_mb=4)
    kept, sums_kept, values_kept = train(True)
    left, sums_left, values_left = train(False)
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(values, values_kept, values_left))
    print(json.dumps([fixed, kept, left, same, sums]))
"""


def test_ranks_choose_alike_and_the_bits_stay(run_ranks: Callable[..., Any]) -> None:
    first, second = (json.loads(rank.stdout) for rank in run_ranks(RANKS))
    assert first == second
    fixed, kept, left, same, _ = first
    assert same
    assert fixed == [[0, 0]] * 24
    looks, trial = WARM + ROUNDS, 1 + ROUNDS
    assert kept[:looks] == [[0, 0]] * looks and kept[looks][0] and kept[looks:] == [kept[looks]] * (24 - looks)
    back = looks + trial
    assert (
        left[:looks] == kept[:looks] and left[looks:back] == kept[looks:back] and left[back:] == [[0, 0]] * (24 - back)
    )


def test_after_a_loss_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it begins in a process that comes then."""
    monkeypatch.setattr(SharedEngine, "chooses_sizes", property(lambda engine: True))
    model = nn.Linear(512, 512, bias=False)
    engine = shared_engine(list(model.parameters()))
    sync = GradientSync("model", model, engine, Steps(Alone(), _core.Telemetry(-1, 0)))
    begun, engine._sizes = sync._layout._sizes, (MIB, MIB)
    assert begun is not None
    begun.round_ends(Report(0, 0, 0, 0))
    size = SharedEngine.arena_bytes(list(model.parameters()))
    sync.go_on([engine.again(_core.Comm(_core.Comm.create_segment(1, size), 0, 1, size))])
    anew = sync._layout._sizes
    assert anew is not None and anew is not begun and anew._left == WARM + ROUNDS
    assert sync.engine._sizes == (0, 0)  # type: ignore[attr-defined]
    sync.close()
