"""Ranks on CPUs keep the memory that a step frees for the next one: by counts of page faults, and by what the process holds."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstep._core import Memory
from evenstep.kept_memory import KeptMemory, kept_memory, set_by_user
from evenstep.memory import HostMemory, MemoryWatch, Use

MIB = 1 << 20

# Its largest blocks are of 48 MiB, above what glibc keeps by itself.
TRAINING = """
import resource
import torch
import evenstep as es
from evenstep._core import Memory
from evenstep.kept_memory import kept_memory

torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8 * 1536, 8), torch.randn(8 * 1536, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 16384), torch.nn.ReLU(), torch.nn.Linear(16384, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=1536)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda number, batch: [batch // 2] * 2)
memory, faults, before = Memory(), [], None
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    del loss
    now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    faults.append(now - (now if before is None else before))
    held, before = memory.read()[0], now
print(sorted(faults[2:])[len(faults[2:]) // 2], kept_memory.on, held - memory.read()[0])
"""


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    kept_memory.end()


def result(run_ranks: Callable[..., list[Any]], **variables: str) -> tuple[int, bool, int]:
    """Of the rank with fewer: page faults of a step, whether memory is kept, and how much the end of an epoch gave back."""
    found = []
    for rank in run_ranks(TRAINING, ranks=2, env=variables):
        faults, kept, given = rank.stdout.split()
        found.append((int(faults), kept == "True", int(given)))
    return min(found)


def test_a_step_takes_hardly_a_page_fault(run_ranks: Callable[..., list[Any]]) -> None:
    faults, kept, given = result(run_ranks)
    assert kept and faults < 2000
    assert given > 48 * MIB  # when the loader's epoch has ended
    faults, kept, given = result(run_ranks, EVENSTEP_KEEP_MEMORY="0")
    assert not kept and faults > 12000 and given < 48 * MIB


def test_what_the_user_has_set_stays(run_ranks: Callable[..., list[Any]]) -> None:
    assert not result(run_ranks, MALLOC_TRIM_THRESHOLD_="1048576")[1]
    assert set_by_user({"GLIBC_TUNABLES": "glibc.cpu.x=1:glibc.malloc.trim_threshold=1"})
    assert not set_by_user({"GLIBC_TUNABLES": "glibc.cpu.x=1", "MALLOC_ARENA_MAX": "2"})
    assert not KeptMemory().begin({"MALLOC_MMAP_THRESHOLD_": "65536"})


def test_nothing_is_kept_where_addresses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (1 << 40, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda one: limits.get(one, unlimited))
    assert not KeptMemory().begin({})


def test_another_allocator_is_left_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, so no other allocator")
    (tmp_path / "other.c").write_text(
        "#include <stddef.h>\n"
        "extern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t bytes) { return __libc_malloc(bytes); }\n"
        "int mallopt(int parameter, int value) { (void)parameter; (void)value; return 1; }\n"
    )
    library = tmp_path / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")], check=True)
    words = "from evenstep._core import Memory; print(Memory().keep(True), Memory().kept())"
    of_glibc, other = (
        subprocess.run(
            [sys.executable, "-c", words], env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout.split()
        for more in ({}, {"LD_PRELOAD": str(library)})
    )
    assert of_glibc[0] == "True" and int(of_glibc[1]) > 0
    assert other == ["False", "0"]


def test_nothing_is_kept_where_memory_is_short(ended: None) -> None:
    assert kept_memory.begin({})
    MemoryWatch(HostMemory()).stepped(1, 1, [1])
    assert kept_memory.on
    MemoryWatch(HostMemory(), limit=MIB).stepped(1, 1, [1])
    assert not kept_memory.on


def test_nothing_is_kept_after_a_rank_ran_out_of_memory(ended: None) -> None:
    assert kept_memory.begin({})
    MemoryWatch(HostMemory()).ran_out(4)
    assert not kept_memory.on


def test_trials_keep_nothing(ended: None) -> None:
    assert kept_memory.begin({})
    with pytest.raises(ZeroDivisionError), kept_memory.paused():
        assert not kept_memory.on and kept_memory.bytes == 0
        _ = 1 // 0
    assert kept_memory.on
    kept_memory.end()
    with kept_memory.paused():
        pass
    assert not kept_memory.on


def test_samples_are_charged_with_what_is_kept_of_them() -> None:
    """As test_memory's line that the first step made too flat, where a step leaves nothing to be given back."""

    class Keeping:
        reserve, pool = 0.0, "invented"
        peak = kept = 0

        def read(self) -> Use:
            return Use(self.peak, self.peak, 2000 - self.peak, 2000, self.kept)

        def reset(self) -> bool:
            return True

        def give_back(self) -> None: ...

    memory = Keeping()
    watch = MemoryWatch(memory)
    memory.peak, memory.kept = 1290, 100  # of libraries that are loaded once 190
    watch.stepped(1, 10, [10])
    memory.peak, memory.kept = 1300, 300
    watch.stepped(2, 30, [30])
    assert 30 + watch.room <= 100


def test_a_host_says_what_is_kept(ended: None) -> None:
    assert HostMemory().read().kept == 0
    assert kept_memory.begin({})
    assert 0 < HostMemory().read().kept <= Memory().read()[0]
