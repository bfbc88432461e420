"""What `evenstep bench balance` lets take turns: the same model and step, trained by Evenstep with each policy, by plain
PyTorch, on one device alone, and by all ranks without any exchange, which tells their speeds.

Every rank of a job makes the same calls. A turn is some steps; between turns a mode stands still.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from evenstep import _core
from evenstep.data import SyntheticText
from evenstep.models import GPT2
from evenstep.prepare import prepare
from evenstep.session import Session, in_place_of_session
from evenstep.verify_runs import fresh

WARM_UP = 2  # steps of a turn that do not count
MOST_STEPS = 200  # of a turn
WORDS = 256


@dataclasses.dataclass
class Turn:
    """What a turn was like; all but `seconds` only where the mode knows it."""

    seconds: list[float]  # of each step that counts
    shares: list[list[int]] = dataclasses.field(default_factory=list)  # of each of these, one a rank
    busy: list[list[float]] = dataclasses.field(default_factory=list)  # seconds without waiting, one a rank

    @property
    def step(self) -> float:
        return statistics.fmean(self.seconds)


class Work:
    """The model, its data, a step."""

    def __init__(self, batch: int, small: bool) -> None:
        self.batch, self.small = batch, small
        self.length = 16 if small else 64
        text = SyntheticText(256, self.length, WORDS)
        self.data = TensorDataset(*(torch.stack(part) for part in zip(*(text[n] for n in range(len(text))))))
        self.parameters = 0

    def build(self) -> tuple[GPT2, torch.optim.Optimizer]:
        torch.manual_seed(1234)
        layers, width = (1, 16) if self.small else (4, 128)
        model = GPT2(WORDS, self.length, layers, width, heads=2 if self.small else 4, dropout=0.0)
        self.parameters = sum(p.numel() for p in model.parameters())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loader(self, batch: int) -> DataLoader[Any]:
        sampler = RandomSampler(self.data, num_samples=(MOST_STEPS + WARM_UP + 1) * batch)
        return DataLoader(self.data, batch_size=batch, sampler=sampler)

    @staticmethod
    def step(model: Any, optimizer: Any, words: torch.Tensor, targets: torch.Tensor, weight: float = 1.0) -> None:
        loss = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss * weight if weight != 1.0 else loss).backward()
        optimizer.step()


def _turn(batches: Any, count: int, step: Callable[[int, Any, Any], None]) -> Turn:
    """step(number of the step that counts, or below 0, words, targets)"""
    ends = []
    for number, (words, targets) in enumerate(batches, -WARM_UP):
        step(number, words, targets)
        ends.append(time.perf_counter())
        if number == count - 1:
            break
    return Turn([b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:])])


class Even:
    """es.prepare with a policy, in a session of its own. speeds: what a profile would say."""

    def __init__(self, work: Work, policy: str, speeds: Sequence[float], base: Session) -> None:
        self._work, self._session = work, fresh(base)
        self._session.environment = dataclasses.replace(
            self._session.environment, policy=policy, speeds=tuple(speeds), compression="", memory_limit=None
        )
        with in_place_of_session(self._session):
            self._model, self._optimizer, self._loader = prepare(*work.build(), work.loader(work.batch))

    def turn(self, count: int, before: Callable[[int], None] = lambda step: None) -> Turn:
        """before: called before each step that counts, with its number."""
        shares: list[list[int]] = []
        busy: list[list[float]] = []

        def step(number: int, words: torch.Tensor, targets: torch.Tensor) -> None:
            if number >= 0:
                before(number)
            self._work.step(self._model, self._optimizer, words, targets)
            if number >= 0:
                timings = self._loader.shares.last
                shares.append([int(one[0]) for one in timings])
                busy.append([float(one[1]) for one in timings])

        with in_place_of_session(self._session):
            found = _turn(self._loader, count, step)
        return dataclasses.replace(found, shares=shares, busy=busy)

    def close(self) -> None:
        self._session.checks.forget()
        for sync in self._session.steps.syncs:
            sync.close()


class Plain:
    """DistributedDataParallel over Gloo, any fixed split; each loss is weighted by hand where it is unequal."""

    def __init__(self, work: Work, group: Any) -> None:
        self._work, self._rank, self._ranks = work, dist.get_rank(), dist.get_world_size()
        model, self._optimizer = work.build()
        self._model = DistributedDataParallel(model, process_group=group)

    def turn(self, count: int, split: Sequence[int]) -> Turn:
        own = split[self._rank]
        weight = own * self._ranks / sum(split)  # DDP divides by the number of ranks

        def step(_: int, words: torch.Tensor, targets: torch.Tensor) -> None:
            self._work.step(self._model, self._optimizer, words, targets, weight)

        return _turn(self._work.loader(own), count, step)


class Single:
    """Rank 0 alone with the whole batch; the others wait."""

    def __init__(self, work: Work, group: Any) -> None:
        self._work, self._group, self._alone = work, group, dist.get_rank() == 0
        self._model, self._optimizer = work.build()

    def turn(self, count: int) -> Turn:
        found: list[Any] = [None]
        if self._alone:
            batches = self._work.loader(self._work.batch)
            found = [_turn(batches, count, lambda _, x, y: self._work.step(self._model, self._optimizer, x, y))]
        dist.broadcast_object_list(found, src=0, group=self._group)
        turn: Turn = found[0]
        return turn


class Alone:
    """Every rank by itself while all of them work: what its speed is."""

    def __init__(self, work: Work, group: Any) -> None:
        self._work, self._group = work, group
        self._model, self._optimizer = work.build()

    def lines(self, split: Sequence[int], seconds: float) -> list[tuple[float, float]]:
        """For each rank (fixed seconds, seconds a sample) of its steps at sizes around its part of `split`."""
        sizes = sizes_around(split[dist.get_rank()])
        took = [self._at(size, seconds / len(sizes)) for size in sizes]
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, line_through(sizes, took), group=self._group)
        return lines

    def _at(self, size: int, seconds: float) -> float:
        batches = iter(self._work.loader(size))
        self._work.step(self._model, self._optimizer, *next(batches))
        dist.barrier(group=self._group)
        began = time.perf_counter()
        count = 0
        while count < MOST_STEPS and (count < 2 or time.perf_counter() - began < seconds):
            self._work.step(self._model, self._optimizer, *next(batches))
            count += 1
        return (time.perf_counter() - began) / count


def sizes_around(share: int) -> list[int]:
    """Four different batch sizes: each rank measures as many, as all meet before each."""
    sizes = {max(1, round(share * f)) for f in (0.6, 0.8, 1.0, 1.25)}
    while len(sizes) < 4:
        sizes.add(max(sizes) + 1)
    return sorted(sizes)


def line_through(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The least-squares line, neither its start nor its slope below zero."""
    size, second = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((b - size) ** 2 for b in sizes)
    slope = sum((b - size) * (t - second) for b, t in zip(sizes, seconds)) / spread if spread else second / size
    slope = min(max(slope, 0.0), second / size)
    return second - slope * size, slope


def seconds_of(line: tuple[float, float], samples: int) -> float:
    """A rank without samples runs a dummy one."""
    return line[0] + line[1] * max(1, samples)


def best_split(lines: Sequence[tuple[float, float]], batch: int) -> tuple[list[int], float]:
    """The best integer split, and its seconds."""
    tables = [[(size, seconds_of(line, size)) for size in (0, 1, 4 * batch)] for line in lines]
    return _core.balance(tables, batch)


def split_seconds(lines: Sequence[tuple[float, float]], split: Sequence[int]) -> float:
    return max(seconds_of(line, share) for line, share in zip(lines, split))
