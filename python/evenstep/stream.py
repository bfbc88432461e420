"""A stream (an IterableDataset) where it is drawn: a worker, or the rank itself, draws each global batch and collates this
rank's part of it. Every rank draws the same stream, so that nobody needs to be told what a batch is."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Callable, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from evenstep._core import EvenstepError
from evenstep.order import RandomState, chained, epoch_seed
from evenstep.share_table import ShareTable
from evenstep.shares import at_least_one

_LOOKED_AT = 4  # samples of a batch that its checksum is of
_VALUES = 16  # of each tensor of these

BATCH, END, IDLE, OTHER = "batch", "end", "idle", "other"


@dataclass(frozen=True)
class Begin:
    """Where one worker's stream stood. No tuple: pinning memory would make lists of the tuples in it."""

    batches: int = 0  # that it had given
    checksum: int = 0  # of these
    ended: bool = False
    kept: Any = None  # [whose, state]: the state_dict of the iterator or of the data set; None: it has none
    random: Any = None  # of its random numbers; None: never drawn


class Opening(NamedTuple):
    """With the first task of each worker."""

    epoch: int
    seed: int  # of the loader
    rank: int
    samples: int  # of a global batch
    drop_last: bool
    keeps_state: bool  # whether replies have the stream's state
    begin: Begin
    evaluates: bool = False


class Task(NamedTuple):
    """One global batch to draw."""

    turn: int  # of the iteration over the loader
    draws: bool  # False: only to open the stream
    number: int  # in the table of shares; -1: they are known
    shares: tuple[int, ...]
    dummies: int  # samples of a rank without any
    opening: Opening | None


class Reply(NamedTuple):
    kind: str
    worker: int
    batch: Any = None
    samples: int = 0  # of all ranks
    begin: Begin = Begin()  # the worker's stream after it
    seconds: float = 0.0  # that drawing and collating took
    everyone: bool = False  # `left`, of this batch


def cut(shares: Sequence[int], samples: int, alone: bool) -> list[int]:
    """What is left of the shares where the batch has only so many samples: each rank keeps those of its own that there
    are, so that none works longer than on a whole batch. alone: a share may be a single sample."""
    firsts = accumulate(shares, initial=0)
    left = [min(share, max(0, samples - first)) for share, first in zip(shares, firsts)]
    if not alone:
        had = [rank for rank, share in enumerate(left) if share]
        if len(had) > 1 and left[had[-1]] == 1 < shares[had[-1]]:
            left[had[-1]] = 0
            left[had[-2]] += 1
    return left


def left(shares: Sequence[int], samples: int, alone: bool, everyone: bool) -> list[int]:
    """As `cut`. everyone: no rank is without a sample where there are enough; each must have drawn all of them."""
    found = cut(shares, samples, alone)
    return at_least_one(found) if everyone else found


def checksum(sample: Any, before: int = 0) -> int:
    """Of some of the sample, the same in every process."""
    if isinstance(sample, torch.Tensor):
        words = f"{sample.dtype}{tuple(sample.shape)}".encode()
        if sample.layout is torch.strided and sample.numel() and sample.is_contiguous() and sample.device.type == "cpu":
            flat = sample.detach().view(-1)
            words += flat[:: -(-len(flat) // _VALUES)].contiguous().view(torch.uint8).numpy().tobytes()
        return zlib.crc32(words, before)
    if isinstance(sample, Mapping):
        return checksum([item for pair in sample.items() for item in pair], before)
    if isinstance(sample, (list, tuple)):
        for item in sample[:_VALUES]:
            before = checksum(item, before)
        return zlib.crc32(str(len(sample)).encode(), before)
    if isinstance(sample, (str, bytes)):
        return zlib.crc32(repr((len(sample), sample[:256])).encode(), before)
    if sample is None or isinstance(sample, (bool, int, float, complex)):
        return zlib.crc32(repr(sample).encode(), before)
    if hasattr(sample, "dtype") and hasattr(sample, "tobytes"):  # NumPy's
        flat = sample.reshape(-1)
        words = f"{sample.dtype}{sample.shape}".encode()
        plain = sample.size and not sample.dtype.hasobject
        return zlib.crc32(words + (flat[:: -(-flat.size // _VALUES)].tobytes() if plain else b""), before)
    return zlib.crc32(type(sample).__qualname__.encode(), before)


class _Stream:
    """One worker's stream in one iteration."""

    def __init__(self, dataset: Any, worker: int, opening: Opening) -> None:
        self._worker, self._opening = worker, opening
        self._begin = opening.begin
        self._random = RandomState(epoch_seed(epoch_seed(opening.seed, opening.epoch), worker), [])
        self._spare: list[Any] = []  # of which a rank without samples gets its dummy ones
        if self._begin.ended:
            return
        with self._random:
            self._open(dataset)
        if self._begin.kept is not None and self._begin.random is not None:
            self._random.load(self._begin.random)

    def _open(self, dataset: Any) -> None:
        set_epoch = getattr(dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._opening.epoch)
        whose, state = self._begin.kept or ("", None)
        if whose == "dataset":
            self._has_state(dataset).load_state_dict(state)
        self._iterator = iter(dataset)
        if whose == "iterator":
            self._has_state(self._iterator).load_state_dict(state)
        self._stateful = next(
            (
                (name, one)
                for name, one in (("iterator", self._iterator), ("dataset", dataset))
                if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
            ),
            None,
        )
        self._skip = getattr(self._iterator, "skip", None)

    def _has_state(self, one: Any) -> Any:
        if not callable(getattr(one, "load_state_dict", None)):
            raise EvenstepError(
                f"the checkpoint holds the state of another stream: {type(one).__name__} has no load_state_dict\n"
                "  fix: resume with the data set that the checkpoint was written with"
            )
        return one

    def pass_over(self) -> bool:
        """Draws what was had before the checkpoint; False where it is not what it was. Nothing, where a state said it."""
        begin = self._begin
        if begin.ended or begin.kept is not None:
            return True
        drawn = 0
        with self._random:
            for _ in range(begin.batches):
                passed, samples = self._draw_batch(0, 0, 0)
                if passed + len(samples) < self._opening.samples:
                    return False
                drawn = chained(drawn, self._checksum(passed, samples))
        return drawn == begin.checksum

    def draw(self, task: Task, told: Callable[[int], Sequence[int]], collate: Callable[[list[Any]], Any]) -> Reply:
        """told: what waits for the shares of a batch. They are asked for once the samples are there, where all are drawn."""
        begin = self._begin
        if begin.ended:
            return Reply(END, self._worker, begin=begin)
        opening = self._opening
        start = time.perf_counter()
        shares: Sequence[int] = task.shares
        late = task.number >= 0
        first, last = 0, opening.samples
        waited = 0.0
        if self._skip is not None:
            if late:
                shares, waited, late = told(task.number), time.perf_counter() - start, False
            first, last = sum(shares[: opening.rank]), self._last(task, shares)
        with self._random:
            passed, samples = self._draw_batch(first, last, task.dummies)
        if late:
            asked = time.perf_counter()
            shares, waited = told(task.number), time.perf_counter() - asked
        total = passed + len(samples)
        ended = total < opening.samples
        if total == 0 or (ended and opening.drop_last):
            self._begin = replace(begin, ended=True, kept=None, random=None)
            return Reply(END, self._worker, begin=self._begin)
        self._begin = Begin(begin.batches + 1, chained(begin.checksum, self._checksum(passed, samples)), ended)
        if opening.keeps_state and not ended and self._stateful is not None:
            whose, one = self._stateful
            state = copy.deepcopy(one.state_dict())  # workers send it later
            self._begin = replace(self._begin, kept=[whose, state], random=self._random.drawn())
        everyone = ended and opening.evaluates and self._skip is None
        if ended:
            shares = left(shares, total, task.dummies == 1, everyone)
        first = sum(shares[: opening.rank]) - self._from
        mine = samples[first : first + shares[opening.rank]]
        batch = collate(mine or self._spare[: task.dummies])
        seconds = time.perf_counter() - start - waited
        return Reply(BATCH, self._worker, batch, total, self._begin, seconds, everyone)

    def _last(self, task: Task, shares: Sequence[int]) -> int:
        """One past this rank's last sample; one more where it may get a lone one of the next rank."""
        rank = self._opening.rank
        return sum(shares[: rank + 1]) + (task.dummies > 1 and shares[rank] > 0)

    def _draw_batch(self, first: int, last: int, dummies: int) -> tuple[int, list[Any]]:
        """The next global batch: how many samples were passed over, and those drawn, at least first … last - 1, the
        first of which is number `_from`."""
        size = self._opening.samples
        if self._skip is None:
            first, last = 0, size
        elif len(self._spare) < dummies:
            first, last = 0, max(last, dummies)
        last = min(last, size)
        self._from = first
        passed = self._pass(first)
        samples = list(islice(self._iterator, last - first)) if passed == first else []
        if passed == first and len(samples) == last - first:
            passed += self._pass(size - last)
        if len(self._spare) < dummies:
            self._spare = samples[:dummies]
        return passed, samples

    def _pass(self, count: int) -> int:
        if count == 0:
            return 0
        assert self._skip is not None
        passed = self._skip(count)
        if not isinstance(passed, int) or not 0 <= passed <= count:
            raise EvenstepError(
                f"{type(self._iterator).__name__}.skip({count}) returned {passed!r}\n"
                "  fix: return how many samples were passed over: all of them, or fewer where the stream ends"
            )
        return passed

    def _checksum(self, passed: int, samples: list[Any]) -> int:
        """Of a batch; where samples are passed over, ranks draw different ones, and only their number is known to all."""
        total = passed + len(samples)
        words = zlib.crc32(str(total).encode())
        if self._skip is None:
            for index in sorted({number * (total - 1) // (_LOOKED_AT - 1) for number in range(_LOOKED_AT)}):
                words = checksum(samples[index], words)
        return words


class StreamDataset(Dataset):
    """What the inner DataLoader asks for tasks."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], table: ShareTable | None) -> None:
        self.dataset, self._collate, self._table = dataset, collate, table
        self._streams: dict[int, _Stream] = {}  # of iterations under way

    def close(self, turn: int) -> None:
        self._streams.pop(turn, None)

    def __getitem__(self, task: Task) -> Reply:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if task.opening is not None:
            if info is not None:
                self._streams.clear()  # a worker that stays has one iteration after the other
            self._streams[task.turn] = stream = _Stream(self.dataset, worker, task.opening)
            if not stream.pass_over():
                return Reply(OTHER, worker)
        if not task.draws:
            return Reply(IDLE, worker)
        return self._streams[task.turn].draw(task, self._told, self._collate)

    def _told(self, number: int) -> Sequence[int]:
        assert self._table is not None
        return self._table.wait(number)


class WorkerInit:
    """The user's worker_init_fn, which finds the user's data set in the worker's facts, as in torch."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody set it
        if self._function is not None:
            self._function(worker)


def fresh(workers: int) -> list[Begin]:
    return [Begin() for _ in range(workers)]


def as_it_is(reply: Any) -> Any:
    return reply
