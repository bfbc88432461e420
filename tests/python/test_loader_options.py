"""What a script's DataLoader was given for its loading reaches the loader that fetches in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory

from evenstep.environment import read_environment
from evenstep.loader import EvenLoader
from evenstep.session import Session, in_place_of_session
from evenstep.share_samples import Loaded
from evenstep.stream import BATCH, Reply


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(8.0)


class Batch:
    """As a script's collate_fn may make it: it pins itself, as torch documents."""

    pinned = False

    def pin_memory(self) -> Batch:
        self.pinned = True
        return self


def inner_of(data: Any, **options: Any) -> DataLoader[Any]:
    session: Any = Session(read_environment())
    with in_place_of_session(session):
        even = EvenLoader(session, DataLoader(data, batch_size=4, **options), train=True, shares=None, seed=1)
        inner: DataLoader[Any] = even.feed._inner
        return inner


DATA = [TensorDataset(torch.arange(8.0)), Stream()]
WORKING: dict[str, Any] = {
    "prefetch_factor": 3,
    "persistent_workers": True,
    "timeout": 7.0,
    "multiprocessing_context": "spawn",
}


@pytest.mark.parametrize("data", DATA, ids=["indices", "stream"])
@pytest.mark.parametrize("pinned", [False, True])
def test_pinning_is_passed_on(data: Any, pinned: bool) -> None:
    for workers in (0, 2):
        assert inner_of(data, pin_memory=pinned, num_workers=workers).pin_memory is pinned


@pytest.mark.skipif(
    "pin_memory_device" not in inspect.signature(DataLoader).parameters, reason="this torch pins for its accelerator"
)
@pytest.mark.parametrize("data", DATA, ids=["indices", "stream"])
def test_for_which_device_is_pinned_is_passed_on(data: Any) -> None:
    assert inner_of(data, pin_memory=True, pin_memory_device="cuda:1").pin_memory_device == "cuda:1"
    assert not inner_of(data, pin_memory=True).pin_memory_device


@pytest.mark.parametrize("data", DATA, ids=["indices", "stream"])
def test_what_is_of_workers_is_passed_on(data: Any) -> None:
    inner = inner_of(data, num_workers=2, **WORKING)
    assert inner.num_workers == 2
    assert (inner.prefetch_factor, inner.persistent_workers, inner.timeout) == (3, True, 7.0)
    assert inner.multiprocessing_context.get_start_method() == "spawn"
    plain = inner_of(data, num_workers=2)
    assert (plain.prefetch_factor, plain.persistent_workers, plain.timeout) == (2, False, 0)
    assert inner_of(data).prefetch_factor is None


STAYING = """
    import os
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    import evenstep as es

    class Stream(IterableDataset):
        def __iter__(self):
            yield from torch.arange(8.0)

    def process(_samples):  # in place of a batch: who collated it
        return torch.tensor([os.getpid()])

    for data in (TensorDataset(torch.arange(8.0)), Stream()):
        for stay in (True, False):
            loader = es.prepare(
                loader=DataLoader(data, batch_size=4, num_workers=1, persistent_workers=stay, collate_fn=process)
            )
            first, second = ({int(one) for one in loader} for _ in range(2))
            assert len(first) == len(second) == 1 and os.getpid() not in first | second
            assert (first == second) is stay, (first, second, data, stay)
"""


def test_workers_stay_where_they_are_asked_to(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(STAYING)


def test_pinning_reaches_the_batch_in_what_workers_send() -> None:
    """torch goes through named tuples; what stands beside the batch stays as it is."""
    loaded = pin_memory(Loaded(Batch(), 0.25))
    assert loaded.batch.pinned and loaded.seconds == 0.25
    reply = pin_memory(Reply(BATCH, 1, [Batch()], 4))
    assert reply.batch[0].pinned and (reply.kind, reply.worker, reply.samples) == (BATCH, 1, 4)
    assert reply.begin == Reply(BATCH, 1).begin
