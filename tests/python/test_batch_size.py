"""es.find_batch_size: the search on a made-up device, and the real one under real limits (batch_size_cases.py)."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evenstep as es
from evenstep import _core
from evenstep.batch_search import Limits, search
from evenstep.batch_trials import resized
from evenstep.device_memory import is_out_of_memory

SCRIPT = pathlib.Path(__file__).parent / "batch_size_cases.py"


@dataclasses.dataclass
class Device:
    """Memory and time as functions of the size; what is beyond `holds` cannot be had."""

    bytes_of: Callable[[int], float]
    holds: float
    seconds_of: Callable[[int], float] = lambda samples: 0.001 + 0.001 * samples
    least: int = 1
    extra_bytes: int = 0
    now: float = 0.0
    tried: list[int] = dataclasses.field(default_factory=list)
    failed: list[int] = dataclasses.field(default_factory=list)

    @property
    def floor_bytes(self) -> int:
        return round(self.bytes_of(0)) + self.extra_bytes

    def run(self, samples: int, limit_bytes: int) -> tuple[int | None, float]:
        assert samples >= self.least
        self.tried.append(samples)
        seconds, peak = self.seconds_of(samples), round(self.bytes_of(samples)) + self.extra_bytes
        self.now += 4 * seconds
        if peak > self.holds:
            self.failed.append(samples)
            return None, math.nan
        return peak, seconds


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 10**7),
    st.integers(1, 20_000),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(1, 2),
)
def test_of_memory_that_grows_evenly_the_largest_size_is_found_without_running_out(
    fixed: int, each: int, holds: int, margin: float, least: int
) -> None:
    limit = fixed + each * holds
    device = Device(lambda samples: fixed + each * samples, limit, least=least)
    found = search(device, Limits(limit, margin, None, math.inf), lambda: device.now)
    truth = math.floor((limit * (1 - margin) - fixed) / each + 1e-9)
    truth = truth if truth >= least else 0
    assert truth - truth // 32 - 1 <= found.largest <= truth
    assert found.stopped_by == "memory"
    assert all(size <= 4 for size in device.failed)  # of one size alone nothing is known
    assert len(device.tried) == len(set(device.tried)) < 40
    if found.largest > 2:
        assert found.room_for is not None and abs(found.room_for - truth) <= 1
        told = [trial for trial in found.trials if trial.predicted_bytes is not None]
        assert all(abs(trial.predicted_bytes - trial.peak_bytes) <= 2 for trial in told if trial.peak_bytes)


def test_what_runs_out_all_the_same_is_closed_in_on() -> None:
    device = Device(lambda samples: 1000.0 if samples < 777 else 1e9, 1e6)
    found = search(device, Limits(10**6, 0.05, None, math.inf), lambda: device.now)
    assert 777 - 777 // 32 - 1 <= found.largest < 777
    assert found.stopped_by == "memory" and 777 <= min(device.failed) < 810


def test_the_fastest_size_between_two_doublings() -> None:
    device = Device(
        lambda s: float(s), 1e9, lambda s: 0.01 + 0.001 * s if s <= 100 else 0.01 + 0.001 * s + 0.0001 * (s - 100) ** 2
    )
    found = search(device, Limits(2048, 0.0, None, math.inf), lambda: device.now)
    assert found.largest == 2048 and found.fastest == 96, found
    flat = Device(lambda s: float(s), 1e9, lambda s: 0.001 * s if s >= 8 else 0.004 + 0.001 * s)
    assert (
        search(flat, Limits(512, 0.0, None, math.inf), lambda: flat.now).fastest == 8
    )  # the smallest of equally fast ones


def test_the_search_ends_in_time_and_at_the_most_asked_for() -> None:
    device = Device(lambda s: 100.0 + s, 1e12)
    found = search(device, Limits(10**12, 0.0, None, 10.0), lambda: device.now)
    assert found.stopped_by == "seconds" and device.now <= 10.0 and found.largest > 500
    assert found.room_for is not None and found.room_for > 10**11
    device = Device(lambda s: 100.0 + s, 1e12)
    found = search(device, Limits(10**12, 0.0, 100, math.inf), lambda: device.now)
    assert found.largest == 100 and found.stopped_by == "most" and max(device.tried) == 100


def test_what_is_there_for_the_trials_alone_is_not_the_trainings() -> None:
    device = Device(lambda s: 1000.0 + 10 * s, 11_000, extra_bytes=500)
    found = search(device, Limits(11_000, 0.0, None, math.inf), lambda: device.now)
    assert found.room_for == 1000 and 920 <= found.largest <= 950
    assert all(trial.peak_bytes == 1000 + 10 * trial.samples for trial in found.trials)


def test_the_curve_in_python() -> None:
    peaks = [(8, 400.0), (16, 480.0)]
    assert _core.memory_cap([], 1e9) is None and math.isnan(_core.memory_bytes([], 4))
    assert _core.memory_cap(peaks, 1000.0) == 68 and _core.memory_bytes(peaks, 68) == 1000.0
    with pytest.raises(ValueError, match="pairs"):
        _core.memory_cap([(1, 2, 3)], 4.0)


def test_batches_of_any_size() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "words": ["a", "b", "c"], "rate": torch.tensor(0.5), "n": 3}
    five = resized(batch, 3, 5)
    assert five["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]] and five["words"] == ["a", "b", "c", "a", "b"]
    assert five["rate"] is batch["rate"] and five["n"] == 3
    assert [len(one) for one in resized((torch.ones(3), [torch.ones(3)]), 3, 2)[1]] == [2]


def test_what_running_out_of_memory_looks_like() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied")) and not is_out_of_memory(ValueError())


@pytest.mark.parametrize("status, own", [("EVEN_ERR_REVOKED", False), ("EVEN_ERR_MEMORY", True), ("", True)])
def test_memory_that_another_rank_lacks_is_not_ones_own(status: str, own: bool) -> None:
    error = es.EvenstepError("out of memory")
    error.status = status
    assert is_out_of_memory(error) == own


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": None}, "needs either loss"),
        ({"step": print}, "needs either loss"),
        ({"most": 0}, r"most=0\): at least 1"),
        ({"memory_bytes": -1}, r"memory_bytes=-1\): at least 1"),
        ({"margin": 1.0}, "from 0 to below 1"),
        ({"margin": math.nan}, "from 0 to below 1"),
        ({"seconds": 0}, "give more than 0"),
        ({"seconds": math.nan}, "give more than 0"),
        ({"model": 3}, "es.find_batch_size: int is no model"),
        ({"optimizer": 3}, "es.find_batch_size: int is no optimizer"),
        ({"data": 3}, "es.find_batch_size found no tensor of samples"),
        ({"data": DataLoader(Stream())}, "give one collated batch of it"),
        ({"model": nn.Linear(1, 1, device="meta")}, "the memory of meta cannot be measured"),
    ],
)
def test_wrong_use_says_what_to_do(options: dict[str, Any], words: str) -> None:
    model = nn.Linear(1, 1)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": DataLoader(TensorDataset(torch.ones(4, 1))),
        "loss": lambda model, batch: model(batch[0]).mean(),
        **options,
    }
    with pytest.raises((TypeError, ValueError, es.EvenstepError), match=words):
        es.find_batch_size(**given)


@pytest.mark.parametrize(
    "case", ["all_is_as_before", "the_process_limit_is_found", "memory_that_runs_out_is_recovered"]
)
def test_under_a_limit_of_the_process(run_ranks: Callable[..., list[Any]], case: str) -> None:
    (rank,) = run_ranks(SCRIPT, ranks=1, args=[case])
    assert "FOUND" in rank.stdout


def test_in_a_group(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["each_rank_has_its_own_figures"]):
        assert "FOUND" in rank.stdout
