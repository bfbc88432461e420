"""Loading ahead: when shares are decided, that workers fetch just these, and that nobody waits for a rank that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep import vote
from evenstep.environment import read_environment
from evenstep.loader import EvenLoader
from evenstep.loading_ahead import LEAST_LEAD, MOST_LEAD, Lead
from evenstep.session import Session, in_place_of_session
from evenstep.share_samples import Place, ShareSamples, Task, part
from evenstep.share_table import ShareTable, Untold
from evenstep.steps import Steps

NOBODYS = vote.Ballot(1, 0, 0, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0, 0, 0, 0)

TRAINING = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import evenstep as es
from evenstep.loading_ahead import Lead

def measured(self, *_):  # these steps are shorter than loading
    self.needed = 4 if workers == 4 and rank == 1 else 2

Lead.measured = measured
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAMPLES, BATCH, EPOCHS = 58, 6, 2

class Counting(Dataset):
    def __init__(self, name): self.name = name
    def __len__(self): return SAMPLES
    def __getitem__(self, index):
        with open(self.name, "ab", buffering=0) as file:
            file.write(bytes([index]))
        return torch.tensor([float(index)])
    def fetched(self): return list(open(self.name, "rb").read())

def run(workers, idle=False, **options):
    asked = []  # steps that were observed when the shares of each step were decided
    def policy(view):
        if view.batch == BATCH:
            asked.append(view.steps)
        if idle:
            return [view.batch, *[0] * (view.ranks - 1)]
        one = view.steps % (view.batch - 1) + 1
        return [one, view.batch - one, *[0] * (view.ranks - 2)]
    name = f"fetched.{workers}.{idle}"
    data = Counting(name)
    torch.manual_seed(5)
    model = nn.Linear(1, 1)
    model, optimizer, loader = es.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, **options), policy=policy)
    mine = []
    for epoch in range(EPOCHS):
        for x in loader:
            mine.append(len(x))
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    es.barrier()
    return data.fetched(), asked, mine, loader

if __name__ == "__main__":
    kinds = [(0, {}), (2, dict(persistent_workers=True)), (4, {})]
    if len(sys.argv) > 1:
        kinds = [(2, dict(multiprocessing_context=way, persistent_workers=True, prefetch_factor=5)) for way in sys.argv[1:]]
    steps = EPOCHS * (SAMPLES // BATCH)  # of whole batches
    for workers, options in kinds:
        fetched, asked, mine, loader = run(workers, **options)
        assert sorted(fetched) == sorted(list(range(SAMPLES)) * EPOCHS), (workers, fetched)
        assert len(asked) == steps and len(set(mine)) > 3, (asked, mine)
        late = [number + number // (SAMPLES // BATCH) - seen for number, seen in enumerate(asked)]
        # with four workers rank 1 needs four steps, and all ranks decide so early
        assert max(late) == workers and min(late) == 0, (workers, asked)
        if workers != 2 or len(sys.argv) > 1:
            continue
        # a rank without samples fetches the first of each batch
        fetched, _, mine, _ = run(workers, idle=True, **options)
        dummies = len(fetched) - EPOCHS * SAMPLES
        assert dummies == len(mine) * (ranks - 1), dummies
        assert rank == 0 or set(mine) == {1}
    left = iter(loader)
    next(left)
    es.barrier()  # the script ends in the middle of an epoch
"""


def test_each_sample_is_fetched_once(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(TRAINING):
        assert "Traceback" not in rank.stderr, rank.stderr


@pytest.mark.more
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(run_ranks: Callable[..., list[Any]], way: str) -> None:
    run_ranks(TRAINING, args=(way,), fresh=True)


# -- the table --


def _child(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return process


def test_a_worker_waits_for_shares_and_for_no_rank_that_is_gone() -> None:
    table = ShareTable(3)
    said, other = os.pipe()
    ready, steady = os.pipe()

    def worker() -> None:
        os.write(steady, b".")
        for number in range(3):
            try:
                os.write(other, bytes(table.wait(number)))
            except Untold:
                os.write(other, b"no ")

    def rank() -> None:
        table.hold()
        table.number(), table.number(), table.number()
        _child(worker)
        os.close(other)  # whoever writes there alone holds it: a read knows when that one has ended
        os.close(steady)
        os.read(ready, 1)
        table.say(0, [5, 6, 7])
        table.leave(1)
        signal.pause()

    process = _child(rank)
    os.close(other)
    os.close(steady)
    got = b""
    while len(got) < 6 and (more := os.read(said, 64)):
        got += more
    assert got == bytes([5, 6, 7]) + b"no "
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert os.read(said, 64) == b"no "
    os.close(said)
    os.close(ready)


def test_a_place_that_has_another_batch_by_now_says_nothing() -> None:
    table = ShareTable(1)
    table.say(3, [1])
    assert table.wait(3) == [1]
    table.say(259, [2])
    with pytest.raises(Untold):
        table.wait(3)


# -- how far ahead --


def lead_after(loading: float, work: float, most: int = 64, per_step: int = 1) -> int:
    lead = Lead(most)
    for _ in range(32):
        lead.measured(loading, work, per_step)
    return lead.needed


@pytest.mark.parametrize(
    ("loading", "work", "expected"),
    [(0.0, 0.1, 2), (0.1, 0.1, 2), (0.15, 0.1, 3), (0.8, 0.1, 9), (9.0, 1e-9, 65 - 1), (1e9, 0.0, 64)],
)
def test_shares_are_decided_as_early_as_loading_needs(loading: float, work: float, expected: int) -> None:
    assert lead_after(loading, work) == expected


def test_accumulated_batches_count_as_one_step() -> None:
    assert lead_after(0.8, 0.1, per_step=4) == 3
    assert lead_after(1e9, 0, most=9999) == MOST_LEAD


def test_the_slowest_loading_of_all_ranks_counts_and_is_forgotten_among_others() -> None:
    lead = Lead(8)
    lead.heard([SimpleNamespace(lead=one) for one in (0, 5, 3)])  # type: ignore[misc]
    assert lead.steps == 5
    lead.begin_anew()
    assert lead.steps == LEAST_LEAD


# -- what is fetched --


def _fetch(samples: ShareSamples, shares: tuple[int, ...], indices: list[int], rank: int = 1) -> Any:
    chosen = part(indices, shares, rank, 1)
    return samples[Task(-1, shares, chosen, rank, 1, Place(0, 0, 0))].batch


def test_dummy_samples_are_of_the_batch() -> None:
    """Those of another one may take another way through the model, and give gradients where no sample gives any."""
    samples = ShareSamples(range(100), list, None)
    assert [_fetch(samples, (2, 0), [at, 9]) for at in (4, 6)] == [[4], [6]]
    assert _fetch(samples, (1, 1), [8, 9]) == [9]


def test_loaders_side_by_side_say_the_slowest_one_and_hear_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def exchange(_steps: Steps, weight: float, _busy: int, flags: int) -> list[vote.Ballot]:
        said.append(flags >> vote.LEAD & 255)
        return [replace(NOBODYS, weight=weight, flags=flags)]

    monkeypatch.setattr(Steps, "_exchange", exchange)
    session: Any = Session(read_environment())
    with in_place_of_session(session):
        data = TensorDataset(torch.arange(8.0))
        loaders = [
            EvenLoader(session, DataLoader(data), train=name != "evaluation", shares=None, seed=1)
            for name in ("slow", "quick", "evaluation")
        ]
        session.loaders.update({str(number): loader for number, loader in enumerate(loaders)})
        loaders[0].lead.needed, loaders[2].lead.needed = 7, 9
        for _ in zip(*loaders[:2]):
            session.steps._synchronise(0, 1.0, "")
    assert set(said) == {7} and [loader.lead.steps for loader in loaders] == [7, 7, LEAST_LEAD]
