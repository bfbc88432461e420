"""es.prepare(workers="auto"): who gets how many workers, and that the samples stay what they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import evenstep as es
from evenstep import worker_sizing
from evenstep.worker_sizing import Measured, WorkerSizing, _cores, _Look, most_workers, sizes


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([Measured(0.004, 0.1, 1, 8)], []),  # less than a twentieth of the step
        ([Measured(0.1, 0.1, 1, 8)], [(2, 2)]),
        ([Measured(0.3, 0.1, 1, 8)], [(4, 2)]),
        ([Measured(0.3, 0.1, 1, 3)], [(2, 2)]),  # two cores beside its own
        ([Measured(0.3, 0.1, 1, 1)], []),  # they would take its core
        ([Measured(0.3, 0.1, 0.1, 1)], [(1, 2)]),  # it waits for a disk
        ([Measured(0.3, 0.1, 0.1, 0.25)], [(1, 2)]),
        ([Measured(0.1, 0.1, 1, 8), Measured(0.1, 0.4, 1, 8)], [(1, 2), (1, 2)]),  # by the slowest rank's work
        ([Measured(0.4, 0.2, 1, 8), Measured(0.001, 0.2, 1, 1)], [(3, 2), (1, 6)]),
        ([Measured(0.4, 0.1, 1, 6), Measured(0.3, 0.1, 1, 5)], [(5, 4), (4, 5)]),
        ([Measured(0.9, 0.1, 1, 8), Measured(9, 0.1, 1, 7)], [(6, 3), (6, 3)]),
    ],
)
def test_who_gets_how_many(ranks: list[Measured], expected: list[tuple[int, int]]) -> None:
    assert sizes(ranks) == expected


times = st.floats(0, 100)


@settings(deadline=None)
@given(st.lists(st.builds(Measured, times, times, st.floats(0, 1), st.floats(0.01, 128)), min_size=1, max_size=12))
def test_never_more_than_the_cores_give(ranks: list[Measured]) -> None:
    chosen = sizes(ranks)
    assert not chosen or len({workers * prefetch for workers, prefetch in chosen}) == 1  # drawn ahead
    for (workers, _), one in zip(chosen, ranks):
        assert 1 <= workers <= most_workers(one.cores) <= max(1, one.cores)


def test_cores_of_a_rank() -> None:
    everybody = [
        _Look(0, 0, 0, 0, 0, math.inf, "one", [0, 1, 2, 3]),
        _Look(0, 0, 0, 0, 0, 1.5, "one", [0, 1, 2, 3]),
        _Look(0, 0, 0, 0, 0, math.inf, "one", [4, 5]),
        _Look(0, 0, 0, 0, 0, math.inf, "two", [0, 1, 2, 3]),
    ]
    assert [_cores(one, everybody) for one in everybody] == [2, 1.5, 2, 4]


def test_accumulated_batches_are_one_step() -> None:
    asked: list[Any] = []
    sizing = WorkerSizing(1, lambda value: asked.append(value) or [(0.0, *value[1:])], lambda: "", print)
    for number in range(33):
        sizing.ask()
        sizing.arrive()
        assert sizing.step(number // 3, lambda: 0) is None
        assert len(asked) == (number >= 30)


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


def steps(sizing: WorkerSizing, clock: Clock, first: int, loading: float, work: float) -> tuple[int, Any]:
    """Until something is chosen or decided: at which step, and what."""
    for number in range(first, first + 40):
        sizing.ask()
        clock.now += loading
        sizing.arrive()
        chosen = sizing.step(number, lambda: 0)
        if chosen is not None or sizing.decided or sizing._rest:
            return number, chosen
        clock.now += work
    raise AssertionError("not decided")


@pytest.mark.parametrize(("after", "stays"), [(0.15, True), (0.31, False), (0.5, False)])
def test_workers_stay_only_where_steps_are_shorter_so(
    monkeypatch: pytest.MonkeyPatch, after: float, stays: bool
) -> None:
    clock, told = Clock(), list[str]()
    monkeypatch.setattr(worker_sizing, "time", clock)
    monkeypatch.setattr(worker_sizing, "_cores", lambda *_: 8)
    sizing = WorkerSizing(0, lambda value: [value], lambda: "", told.append)
    number, chosen = steps(sizing, clock, 0, 0.2, 0.1)
    assert (number, chosen, sizing.decided) == (10, [(3, 2)], False)
    for later in range(11, 31):  # of a sampler that cannot be asked again: its epoch goes on without workers
        assert sizing.step(later, lambda: 0) is None and sizing.may_change
    sizing.open()
    number, chosen = steps(sizing, clock, 31, 0.0, after)
    assert number == 41 and not sizing.may_change and chosen == (None if stays else [])
    assert told[0] == "loading took 67% of the first steps of rank 0: from now on 3 workers load for the ranks"
    assert told[1].startswith(f"steps with workers take {1e3 * after:.3g} ms, 300 ms before")
    assert told[1].endswith("before") == stays and len(told) == 2


class Training:
    """Steps of one rank, simulated: its work, and what loading a batch takes in whichever process, by the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int = 8) -> None:
        self.clock, self.told, self.looks = Clock(), list[str](), 0
        monkeypatch.setattr(worker_sizing, "time", self.clock)
        monkeypatch.setattr(worker_sizing, "_cores", lambda *_: cores)
        monkeypatch.setattr(worker_sizing, "allowed_cores", lambda: math.inf)
        self.fetched, self.number, self.workers = 0.0, 0, 0
        self.sizing = WorkerSizing(0, self._gather, lambda: "", self.told.append, fetched=lambda: self.fetched)
        self.changes: list[tuple[int, int]] = []  # at which step how many workers came

    def _gather(self, value: Any) -> list[Any]:
        self.looks += len(value) > 2
        return [value]

    def run(self, steps: int, loading: Callable[[int, int], float], work: float = 0.1) -> None:
        """loading: by the step and the workers."""
        for _ in range(steps):
            took = loading(self.number, self.workers)
            self.sizing.ask()
            self.clock.now += max(0.0, took / self.workers - work) if self.workers else took
            self.fetched += took
            self.sizing.arrive()
            self.clock.now += work
            chosen = None if self.sizing.decided else self.sizing.step(self.number, lambda: 0)
            self.number += 1
            if chosen is not None:
                self.workers = chosen[0][0] if chosen else 0
                self.changes.append((self.number, self.workers))
                self.sizing.open()


@pytest.mark.parametrize(("loading", "workers"), [(0.001, []), (0.2, [3]), (0.9, [7])])
def test_a_steady_run_is_looked_at_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, loading: float, workers: list[int]
) -> None:
    training = Training(monkeypatch)
    training.run(100_000, lambda *_: loading)
    assert [number for _, number in training.changes] == workers
    assert training.looks - len(workers) == 8 + (100_000 - 12_800) // 12_810  # 100, 200, ... 12,800, and so on
    assert len(training.told) == 2 * len(workers)


@pytest.mark.parametrize(
    ("before", "after", "workers", "words"),
    [
        (0.001, 0.3, [4], "loading took 75% of the last steps of rank 0: from now on 4 workers load for the ranks"),
        (0.2, 0.5, [3, 7], "waiting for its workers takes 40% of the steps of rank 0 by now: from now on 7 workers"),
        (0.2, 0.0005, [3, 0], "loading takes the workers less than 1% of a step by now: from now on none load"),
        (0.2, 0.1, [3], ""),  # workers that sleep cost nothing
        (0.2, 0.3, [3], ""),  # nobody waits
    ],
)
def test_what_has_changed_lastingly_is_sized_again(
    monkeypatch: pytest.MonkeyPatch, before: float, after: float, workers: list[int], words: str
) -> None:
    training = Training(monkeypatch)
    training.run(2_000, lambda step, _: after if step >= 1_000 else before)
    training.run(20_000, lambda *_: after)
    assert [number for _, number in training.changes] == workers
    later = [one for one in training.told if one.startswith(words)] if words else training.told[2:]
    assert len(later) == bool(words)
    if words:
        assert 1_000 < training.changes[-1][0] < 2_000


def test_what_passes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.run(100_000, lambda step, _: 0.3 if 1_000 <= step % 4_000 < 1_020 or 111 < step < 125 else 0.001)
    assert training.changes == [] and training.told == []


def test_what_gained_nothing_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    # what is loaded stays in the workers
    training.run(400_000, lambda step, workers: 0.2 if step < 500 or not workers else 0.0005)
    assert [number for _, number in training.changes] == [3, 0, 3]
    assert training.told[-1].startswith("steps without workers take 300 ms, 100 ms before: 3 workers load from now on")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5_000), st.sampled_from([0.0005, 0.004, 0.05, 0.3, 2.0])), max_size=60))
def test_it_cannot_go_to_and_fro(course: list[tuple[int, float]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        training = Training(monkeypatch)
        for steps, loading in course:
            training.run(steps, lambda *_, now=loading: now)  # type: ignore[misc]
        assert len(training.changes) <= 2 * worker_sizing.MOST_TRIES
        for (early, _), (late, _) in zip(training.changes[1::2], training.changes[3::2]):
            assert late - early >= worker_sizing.DISTANCE


def test_tries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    for number in range(40):
        training.run(30_000, lambda *_, now=(0.3, 0.0005)[number % 2]: now)  # type: ignore[misc]
    assert [workers for _, workers in training.changes] == [4, 0] * 4
    assert training.sizing.decided


def test_a_data_set_that_cannot_go_to_workers_stays_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(), list[str]()
    monkeypatch.setattr(worker_sizing, "time", clock)
    monkeypatch.setattr(worker_sizing, "_cores", lambda *_: 8)
    sizing = WorkerSizing(0, lambda value: [value], lambda: "it holds a GPU's memory", told.append)
    assert steps(sizing, clock, 0, 0.2, 0.1) == (10, None) and sizing.decided
    assert told == [
        "loading took 67% of the first steps of rank 0, and no workers load for it: it holds a GPU's memory"
    ]


@pytest.mark.parametrize(("loading", "work", "said"), [(0.2, 0.1, True), (0.001, 0.001, False), (0.01, 0.5, False)])
def test_where_nobody_asked_one_rank_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch, loading: float, work: float, said: bool
) -> None:
    clock, told = Clock(), list[str]()
    monkeypatch.setattr(worker_sizing, "time", clock)
    monkeypatch.setattr(worker_sizing, "allowed_cores", lambda: 8.0)
    monkeypatch.setattr(worker_sizing.os, "sched_getaffinity", lambda _: set(range(8)))
    sizing = WorkerSizing(0, None, lambda: "", told.append)
    assert steps(sizing, clock, 0, loading, work)[1] is None
    assert len(told) == said and all("EVENSTEP_WORKERS=auto" in one for one in told)


def test_what_cannot_go_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    local = [lambda: 0]
    loader = DataLoader(local, collate_fn=lambda one: one)  # type: ignore[arg-type]
    assert worker_sizing.why_not_in_workers(loader) == ""
    spawned = DataLoader(local, multiprocessing_context=None)  # type: ignore[arg-type]
    monkeypatch.setattr(worker_sizing.multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    assert "cannot be pickled" in worker_sizing.why_not_in_workers(spawned)
    assert worker_sizing.why_not_in_workers(DataLoader([1, 2])) == ""  # type: ignore[arg-type]
    on_gpu = type("OnGPU", (torch.Tensor,), {"is_cuda": True})
    data = Subset(TensorDataset(torch.ones(1).as_subclass(on_gpu)), [0])
    assert worker_sizing.why_not_in_workers(DataLoader(data)).endswith("holds tensors of a GPU")


def test_only_auto() -> None:
    with pytest.raises(ValueError, match="give 'auto' or 'off', or set num_workers"):
        es.prepare(nn.Linear(1, 1), workers="many")


SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info
import evenstep as es
import evenstep.worker_sizing as sizing

sizing.sizes = lambda ranks, most: [(1, 4), (2, 2)]  # as if it had been measured

class Data(Dataset):
    def __len__(self): return 60
    def __getitem__(self, index):
        info = get_worker_info()
        return torch.tensor([float(index)], dtype=torch.float64), 0 if info is None else info.num_workers

class Own(RandomSampler):
    pass

def run(own, stays):
    # As if it had been measured, too.
    tried = sizing._Try
    sizing._Try = lambda before, seconds, demand: tried(before, float("inf" if stays else "-inf"), demand)
    data = Data()
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = dict(sampler=Own(data)) if own else dict(shuffle=True)
    loader = DataLoader(data, batch_size=4, **options)
    model, optimizer, loader = es.prepare(model, optimizer, loader, workers="auto")
    for epoch in range(3):
        seen, workers = [], []
        for x, who in loader:
            seen += es.gather(x).reshape(-1).tolist()
            workers.append(int(who.max()))
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sorted(seen) == list(range(60)), seen
        mine = [1, 2][es.rank()]
        before = 15 if own else 11
        if stays:
            wanted = [0] * before + [mine] * (15 - before) if epoch == 0 else [mine] * 15
        else:  # ten steps with them, of which an iteration's first has no beginning: three in the first epoch
            wanted = [[0] * 11 + [mine] * 4, [mine] * 8 + [0] * 7, [0] * 15][epoch]
        assert workers == wanted, (own, stays, epoch, workers)

    sizing._Try = tried

run(False, True)
run(True, True)
run(False, False)
"""


def test_workers_begin_in_the_middle_and_the_order_stays(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(SCRIPT, ranks=2, env={"EVENSTEP_SEED": "3"})


AGAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
import evenstep as es
import evenstep.worker_sizing as sizing

# As if all this had been measured, in looks 5, 10, 20 and 40 steps apart.
sizing.DISTANCE, sizing.AGAIN, sizing.MOST_TRIES = 5, 3, 3
wanted = [[(1, 4), (2, 2)], [(1, 4), (4, 1)], []]
sizing.WorkerSizing._other = lambda self, *_: (wanted[self._tries], "so it is")
tried = sizing._Try
sizing._Try = lambda before, seconds, demand: tried(before, float("inf"), demand)

class Data(Dataset):
    def __len__(self): return 60
    def __getitem__(self, index):
        info = get_worker_info()
        return torch.tensor([float(index)], dtype=torch.float64), 0 if info is None else info.num_workers

model = nn.Linear(1, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(Data(), batch_size=4, shuffle=True), workers="auto")
workers = []
for epoch in range(10):
    seen = []
    for x, who in loader:
        seen += es.gather(x).reshape(-1).tolist()
        workers.append(int(who.max()))
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(seen) == list(range(60)), seen
kinds = [workers[0]] + [now for now, before in zip(workers[1:], workers) if now != before]
assert kinds == [[0, 1, 0], [0, 2, 4, 0]][es.rank()], kinds
assert loader._sizing is None  # three were all
"""


def test_later_looks_change_workers_on_all_ranks_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(AGAIN, ranks=2, env={"EVENSTEP_SEED": "3"})


STREAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
import evenstep as es
import evenstep.worker_sizing as sizing

def sizes(ranks, most):  # as if it had been measured
    assert most == 1
    return [(1, 2), (1, 2)]
sizing.sizes = sizes

class Walk:
    def __init__(self): self.at = 0
    def __iter__(self): return self
    def __next__(self):
        if self.at == 60: raise StopIteration
        self.at += 1
        info = get_worker_info()
        drawn = torch.rand(1, dtype=torch.float64)
        return torch.cat([torch.tensor([self.at - 1.0], dtype=torch.float64), drawn]), 0 if info is None else info.num_workers

class Stated(Walk):
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

class Stream(IterableDataset):
    def __init__(self, kind): self.kind = kind
    def __iter__(self): return self.kind()

def run(kind, stays, workers):
    tried = sizing._Try
    sizing._Try = lambda before, seconds, demand: tried(before, float("inf" if stays else "-inf"), demand)
    torch.manual_seed(3)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(kind), batch_size=4, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = es.prepare(model, optimizer, loader, workers=workers)
    found, where = [], []
    for epoch in range(3):
        for x, who in loader:
            found.append(es.gather(x))
            where.append(int(who.max()))
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    sizing._Try = tried
    found = torch.cat(found)
    assert found[:, 0].reshape(3, 60).tolist() == [[float(i) for i in range(60)]] * 3
    return found, where

wanted, where = run(Stated, True, "off")
assert where == [0] * 45
found, where = run(Stated, True, "auto")
assert torch.equal(found, wanted) and where == [0] * 11 + [1] * 34, where
found, where = run(Walk, True, "auto")  # it does not say where it is: from the next epoch on
assert torch.equal(found, wanted) and where == [0] * 15 + [1] * 30, where
found, where = run(Stated, False, "auto")
assert torch.equal(found, wanted) and where == [0] * 11 + [1] * 12 + [0] * 22, where
"""


def test_a_stream_gets_one_worker_and_stays_what_it_was(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(STREAM, ranks=2, env={"EVENSTEP_SEED": "3"})


def test_no_more_than_are_allowed() -> None:
    ranks = [Measured(0.9, 0.1, 1, 8), Measured(9, 0.1, 1, 7)]
    assert sizes(ranks, 1) == [(1, 2), (1, 2)] and sizes(ranks, 2) == [(2, 2), (2, 2)]
