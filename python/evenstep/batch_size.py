"""es.find_batch_size: how many samples each device holds at once, and with how many it is fastest, by trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from evenstep import checkpoint_random
from evenstep._core import EvenstepError
from evenstep.batch_search import Found, Limits, Trial, search
from evenstep.batch_trials import TrialRuns, one_batch
from evenstep.device_memory import memory_of
from evenstep.group import Group, gather_objects
from evenstep.kept_memory import kept_memory
from evenstep.loader import EvenLoader
from evenstep.session import training_session
from evenstep.verify import check_models
from evenstep.verify_runs import Step, modules_in

Loss = Callable[[Any, Any], torch.Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True)
class DeviceBatchSize:
    """What one rank's device can do. Bytes are of a whole step of training: weights, gradients, optimizer, batch,
    activations, on a CPU the rest of the process too."""

    rank: int
    device: str  # as `evenstep devices` names it
    largest: int  # that was tried and stayed within the limit; 0: not one sample does
    fastest: int  # the size with the most samples a second; the smallest of those within 2% of it
    room_for: int | None  # that memory should hold by the peaks measured; None: not enough was measured to tell
    limit_bytes: int
    limit: (
        str  # what sets it: "control group /sys/fs/cgroup/…", "RLIMIT_AS", "memory of the host", "memory of the GPU", …
    )
    stopped_by: str  # why no larger size was tried: "memory", "most" or "seconds"
    trials: tuple[Trial, ...]  # rising

    def __str__(self) -> str:
        head = f"rank {self.rank} ({self.device}): largest {self.largest}, fastest {self.fastest}"
        more = f", memory for {self.room_for}" if self.room_for is not None and self.room_for > self.largest else ""
        lines = [f"{head}{more}; {_mib(self.limit_bytes)} by {self.limit}; ended by {self.stopped_by}"]
        lines.append(f"  {'samples':>9} {'samples/s':>12} {'predicted':>12} {'measured':>12}")
        for trial in self.trials:
            mark = "  out of memory" if trial.peak_bytes is None else "" if trial.fits else "  too large"
            speed = "-" if math.isnan(trial.seconds) else f"{trial.samples_per_second:.1f}"
            lines.append(
                f"  {trial.samples:>9} {speed:>12} {_mib(trial.predicted_bytes):>12} {_mib(trial.peak_bytes):>12}{mark}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class BatchSizes:
    """What es.find_batch_size found; the same on all ranks. str() of it is a report for people."""

    ranks: tuple[DeviceBatchSize, ...]

    @property
    def largest(self) -> int:
        """The largest global batch: what all devices hold together."""
        return sum(one.largest for one in self.ranks)

    @property
    def fastest(self) -> int:
        """The global batch with which each device has its own fastest size. Balanced shares of a batch are those that
        end together, not these; from this size on no device is slowed down by too little work."""
        return sum(one.fastest for one in self.ranks)

    def __str__(self) -> str:
        lines = [str(one) for one in self.ranks]
        if len(self.ranks) > 1:
            lines.append(f"all {len(self.ranks)} ranks together: largest {self.largest}, fastest {self.fastest}")
        return "\n".join(lines)


def find_batch_size(
    model: Any,
    optimizer: Any,
    data: Any,
    loss: Loss | None = None,
    *,
    step: Step | None = None,
    most: int | None = None,
    memory_bytes: int | None = None,
    margin: float = 0.05,
    seconds: float = 60.0,
) -> BatchSizes:
    """Trains trial steps of growing size on each rank's device and says which size is the largest and which the fastest.
    Collective.

    model, optimizer, loss, step: as es.verify takes them: loss(model, batch) gives the loss that backward begins with;
    step(model, optimizer, batch) makes a whole step instead. data: a DataLoader with a map-style data set, whose samples
    are taken evenly from all of it, or one collated batch of tensors. They are repeated to make each size: where samples
    differ in length, give a batch of the longest.

    Sizes are doubled from two. What a size will need is predicted first, from the peaks of those before
    (even_memory_curve), and a size that would leave less than `margin` of the limit free is not tried but brought nearer
    until it fits; then the sizes around the fastest are tried too. The limit of a CPU rank is what control groups, the
    process's limits and the host leave it, divided among the ranks on that host that make the call; of a GPU what is free, divided among
    the ranks that share it; memory_bytes sets a lower one. A trial that runs out of memory all the same is given up, its
    memory is given back, and a smaller size is tried. most: the largest size to try; for a DataLoader at most the number of
    its samples. seconds: no trial begins that would end later than this, by what the last one took.

    All ranks try at the same time, as they train; nothing is exchanged, and times are of forward, backward and the optimizer
    alone. Each rank's figures are gathered: all get the same result.

    The trials train the model's own memory, whose contents are kept on the host meanwhile and put back. Models, optimizers,
    buffers, gradients and random numbers are then bit for bit as before; samplers are not touched. What the kept copy
    takes of a CPU's memory is not counted as the training's, but is missing for the largest trials: see
    `DeviceBatchSize.room_for`. Call it before es.prepare or between two steps.

    Raises TypeError and ValueError for arguments, EvenstepError where a trial fails by something else than memory (on every
    rank; the failing one is named).
    """
    _check_arguments(loss, step, most, memory_bytes, margin, seconds)
    check_models("es.find_batch_size", model, optimizer)
    current = training_session("es.find_batch_size")
    current.join()
    random = checkpoint_random.capture()
    try:
        memory = _everyones(current.group, lambda: memory_of(modules_in(model)))
        places = gather_objects(current.group, memory.place)
        limit = _everyones(current.group, lambda: memory.limit(places.count(memory.place), memory_bytes))

        def search_here() -> Found:  # nobody's first trial is in another one's limit: all have read theirs
            batch = one_batch(data)
            limits = Limits(limit.bytes, margin, _most(data, most), seconds)
            # each trial's peak is to be its own
            with kept_memory.paused(), TrialRuns(model, optimizer, batch, loss, step, memory, random) as runs:
                return search(runs, limits)

        found = _everyones(current.group, search_here)
    finally:
        checkpoint_random.restore(random[0], random[1].__getitem__)
    mine = DeviceBatchSize(
        rank=current.rank,
        device=current.environment.device or memory.device,
        largest=found.largest,
        fastest=found.fastest,
        room_for=found.room_for,
        limit_bytes=limit.bytes,
        limit=limit.source,
        stopped_by=found.stopped_by,
        trials=found.trials,
    )
    return BatchSizes(tuple(gather_objects(current.group, mine)))


def _everyones(group: Group, work: Callable[[], Result]) -> Result:
    """What it gives here; where it fails on any rank, all raise. Collective."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = gather_objects(group, f"{type(failure).__name__}: {failure}" if failure is not None else "")
    if failure is not None:
        raise failure
    for rank, words in enumerate(told):
        if words:
            raise EvenstepError(
                f"es.find_batch_size failed on rank {rank}: {words}\n  fix: the reason is in that rank's output"
            )
    return result  # type: ignore[return-value]


def _most(data: Any, most: int | None) -> int | None:
    if not isinstance(data, (DataLoader, EvenLoader)):
        return most
    samples = len((data.loader if isinstance(data, EvenLoader) else data).dataset)
    return samples if most is None else min(most, samples)


def _check_arguments(
    loss: Loss | None, step: Step | None, most: int | None, memory_bytes: int | None, margin: float, seconds: float
) -> None:
    if (loss is None) == (step is None):
        raise TypeError("es.find_batch_size needs either loss(model, batch) or step=…(model, optimizer, batch)")
    for name, value in (("most", most), ("memory_bytes", memory_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"es.find_batch_size({name}={value!r}): at least 1 is needed")
    if not 0 <= margin < 1:
        raise ValueError(
            f"es.find_batch_size(margin={margin!r}): give the part of memory that stays free, from 0 to below 1"
        )
    if not seconds > 0:
        raise ValueError(f"es.find_batch_size(seconds={seconds!r}): give more than 0")


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 20):,.1f} MiB"
