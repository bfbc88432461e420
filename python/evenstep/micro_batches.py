"""es.Config(micro_batch="auto"): how many samples each rank runs at once, by trial steps on samples of the loader before the first
step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.batch_search import Trial
from evenstep.batch_size import DeviceBatchSize, find_batch_size
from evenstep.group import gather_objects
from evenstep.session import Session

AUTO = "auto"
SECONDS = 10.0  # of trial steps
_NEAR = 0.95  # of the fastest's samples a second: a share in one piece is exchanged while backward runs, one in pieces after it


def all_want(current: Session, wanted: bool) -> bool:
    """Whether this Trainer is to measure; all ranks must say the same. Collective."""
    everybody = gather_objects(current.group, wanted)
    if all(everybody) or not any(everybody):
        return wanted
    has, has_not = everybody.index(True), everybody.index(False)
    raise EvenstepError(
        f"rank {has} has es.Config(micro_batch='auto') and rank {has_not} has not: all ranks measure at the same time, as they train\n"
        "  fix: give 'auto' on all ranks or on none"
    )


def measured(
    current: Session,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batch: int | None,
) -> int | None:
    """For this rank; None: its share as it is. batch: the global one, which no share exceeds. Rank 0 says what it came to.
    Collective."""
    if isinstance(loader.dataset, IterableDataset):
        raise EvenstepError(
            "es.Config(micro_batch='auto'): the samples are a stream, of which those that are measured with would be missing\n"
            "  fix: give micro_batch a number, or leave it out"
        )
    began: list[bool] = []

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        """A micro-batch is forward and backward; the optimizer's states are made once, for they take memory."""
        optimizer.zero_grad()
        loss(model, batch).backward()
        if not began:
            began.append(True)
            optimizer.step()

    found = find_batch_size(model, optimizer, loader, step=step, most=batch, seconds=SECONDS)
    sizes = [size_of(one) for one in found.ranks]
    if current.rank == 0:
        words = ", ".join(f"rank {one.rank} {in_words(one, size)}" for one, size in zip(found.ranks, sizes))
        sys.stderr.write(f"evenstep: micro_batch='auto': {words}\n")
    return sizes[current.rank]


def size_of(device: DeviceBatchSize) -> int | None:
    """The most samples at once up from the fastest size that are about as fast; None where nothing speaks against more."""
    fitting = [trial for trial in device.trials if trial.fits and trial.seconds > 0]
    if not fitting:
        return None
    largest = fitting[-1].samples
    best = _core.best_micro_batch(rising(fitting), largest)
    fastest = max(one.samples_per_second for one in fitting if one.samples <= best)
    size = best
    for one in fitting:
        if one.samples > best:
            if one.samples_per_second < _NEAR * fastest:
                return size
            size = one.samples
    return largest if device.stopped_by == "memory" else None


def rising(trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """Samples and seconds. What a smaller one took longer than a larger one is chance."""
    table: list[tuple[int, float]] = []
    least = float("inf")
    for one in reversed(trials):
        least = min(least, one.seconds)
        table.append((one.samples, least))
    return table[::-1]


def in_words(device: DeviceBatchSize, size: int | None) -> str:
    if size is None:
        return "runs its share in one"
    rates = {one.samples: one.samples_per_second for one in device.trials if one.fits}
    most = max(rates)
    why = "which memory holds" if size == most else f"{rates[size]:.0f} a second, of {most} {rates[most]:.0f}"
    return f"runs {size} samples at once ({why})"
