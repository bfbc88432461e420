"""Caps and es.find_batch_size on a GPU's memory: what is asked of torch's allocator, and what is made of it. The GPU is made
up (made_up_gpu.py); the real one's answers are torch's affair."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_gpu import Gpu

from evenstep import device_memory, memory
from evenstep.batch_search import Limits, search
from evenstep.memory import UNKNOWN, MemoryWatch

MIB = 1 << 20
DEVICE = torch.device("cuda:1")


def step(gpu: Gpu, samples: int) -> None:
    """Ten MiB for weights from the first on, and one for each sample as long as the step takes."""
    if not gpu.allocated:
        gpu.take(10 * MIB)
    gpu.take(samples * MIB)
    gpu.free(samples * MIB)


def test_caps_follow_what_torch_allocates_and_not_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(120 * MIB, others=10 * MIB)
    gpu.use(monkeypatch)
    source = memory.memory_of(DEVICE)
    assert isinstance(source, memory.DeviceMemory) and source.pool == "gpu GPU-1"
    watch = MemoryWatch(source)
    assert (watch.cap, watch.room) == (-1, UNKNOWN)
    for number, samples in enumerate((8, 16, 16), 1):
        step(gpu, samples)
        watch.stepped(number, samples, [samples])
    use = source.read()
    assert (use.held, use.peak, use.limit) == (26 * MIB, use.peak, 120 * MIB) and use.available == 84 * MIB
    # 110 MiB are this rank's to have, of which 8 % of the whole GPU stay free: ten are weights, and each sample takes one
    most = 16 + watch.room
    assert 85 <= most <= 90, most
    assert watch.cap == -1 and gpu.asked == {"cuda:1"}
    limited = MemoryWatch(source, limit=30 * MIB)  # the user's own
    for number, samples in enumerate((8, 16, 24), 1):
        step(gpu, samples)
        limited.stepped(number, samples, [samples])
    assert limited.cap == 20


def test_ranks_of_one_gpu_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(MIB)
    gpu.use(monkeypatch)
    pools = [memory.DeviceMemory(DEVICE).pool]
    gpu.uuid = "GPU-2"
    pools.append(memory.DeviceMemory(DEVICE).pool)
    gpu.uuid = ""  # of a torch that tells none: its number, of this container
    pools += [memory.DeviceMemory(torch.device("cuda", index)).pool for index in (0, 1, 1)]
    assert len(set(pools)) == 4 and pools[3] == pools[4]


class Runs:
    """Trials as evenstep.batch_trials makes them: peaks by the device's memory, seconds that are made up."""

    least, extra_bytes, floor_bytes = 1, 0, 10 * MIB
    now = 0.0

    def __init__(self, gpu: Gpu, memory_of_gpu: device_memory.DeviceMemory) -> None:
        self.gpu, self.memory = gpu, memory_of_gpu

    def run(self, samples: int, limit_bytes: int) -> tuple[int | None, float]:
        self.memory.start()
        self.now += 1.0
        try:
            with self.memory.bounded(limit_bytes):
                step(self.gpu, samples)
            self.memory.settle()
            return self.memory.peak(), 0.001 * (samples + 5)
        except Exception as error:
            assert device_memory.is_out_of_memory(error)
            return None, math.nan


def test_the_batch_size_that_a_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(80 * MIB, others=10 * MIB)
    gpu.use(monkeypatch)
    module: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=DEVICE)]))
    found = device_memory.memory_of([module])
    assert found.device == "cuda:1" and found.place.endswith(" GPU-1")
    gpu.take(10 * MIB)
    step(gpu, 30)
    assert gpu.reserved == 40 * MIB  # what torch keeps
    limit = found.limit(1, None)
    assert (limit.bytes, limit.source) == (70 * MIB, "the memory of the GPU")
    shared = found.limit(3, None)
    assert (shared.bytes, shared.source) == (10 * MIB + 60 * MIB // 3, "the memory of the GPU, divided among 3 ranks")
    asked = found.limit(1, 30 * MIB)
    assert (asked.bytes, asked.source) == (30 * MIB, "memory_bytes")
    assert found.limit(1, 90 * MIB).bytes == 70 * MIB
    runs: Any = Runs(gpu, found)
    result = search(runs, Limits(limit.bytes, 0.0, None, 1e9))
    assert 58 <= result.largest <= 60 and all(trial.fits for trial in result.trials if trial.samples <= 60)
    assert gpu.settled > 0 and gpu.reserved <= 70 * MIB


def test_what_runs_out_of_a_gpu_is_known_by_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(MIB)
    gpu.use(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as told:
        gpu.take(2 * MIB)
    assert device_memory.is_out_of_memory(told.value)
