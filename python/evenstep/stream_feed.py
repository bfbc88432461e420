"""Where a prepared loader's batches come from where its data set is a stream (an IterableDataset): every rank draws all of
it and keeps its share. Batches come from the workers in turn, as in torch, where each has a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from evenstep._core import EvenstepError
from evenstep.feeds import BatchPlan, TaskSampler, options
from evenstep.loading_ahead import Ahead, Drawn, Lead, Loading
from evenstep.order import epoch_seed
from evenstep.share_table import ShareTable
from evenstep.stream import BATCH, END, OTHER, Begin, Opening, Reply, StreamDataset, Task, WorkerInit, as_it_is, left

if TYPE_CHECKING:
    from evenstep.loader import EvenLoader


@dataclass
class _Position:
    """Where an epoch stands: each worker's stream, and whose turn it is."""

    workers: list[Begin]
    turn: int = 0

    def take(self, reply: Reply) -> None:
        self.workers[reply.worker] = reply.begin
        self.turn = (reply.worker + 1) % len(self.workers)


@dataclass
class _Turn:
    """One iteration."""

    number: int
    epoch: int
    begin: _Position
    ended: set[int] = field(default_factory=set)  # workers


class StreamFeed:
    """Of an IterableDataset. Its length is what torch says of it."""

    unwrapped = False
    most_workers = 1  # of those that Evenstep chooses: more would each have a stream of its own, in another order

    def __init__(self, owner: EvenLoader, loader: DataLoader[Any]) -> None:
        self._owner, self._loader = owner, loader
        self._session = owner.prepared_in
        self._workers = max(1, loader.num_workers)
        self._options = options(loader)
        self._position = self._fresh()
        self._turns = 0
        self._sampler = TaskSampler()
        self._generator = torch.Generator()
        self._make()

    def _make(self) -> None:
        """The inner loader, and what its workers hear of shares by."""
        owner, loader = self._owner, self._loader
        size, ranks = int(loader.batch_size or 1), self._session.world_size
        # of an evaluation, small ones are joined so that every rank has a sample of each
        self.batch_size = size if owner.train else size * -(-ranks // size)
        self._ranks = ranks
        chosen = self._options
        waits = owner.train and chosen["num_workers"] > 0 and ranks > 1
        self.lead = Lead(self._workers * (chosen.get("prefetch_factor") or 2))
        self._table = ShareTable(ranks) if waits else None
        self._ahead: Ahead | None = None  # of the last iteration
        self._dataset = StreamDataset(loader.dataset, loader.collate_fn, self._table)
        replaced = {
            "collate_fn": as_it_is,
            "worker_init_fn": WorkerInit(chosen["worker_init_fn"]),
            "generator": self._generator,
        }
        self._inner: DataLoader[Any] = DataLoader(
            self._dataset, batch_size=None, sampler=self._sampler, **{**chosen, **replaced}
        )

    def _fresh(self) -> _Position:
        return _Position([Begin() for _ in range(self._workers)])

    def __len__(self) -> int:
        size = int(self._loader.batch_size or 1)
        return -(-len(self._loader) * size // self.batch_size)

    def first_batch_size(self) -> int:
        return self.batch_size

    def resize(self, workers: int, prefetch: int) -> None:
        """Iterations that are opened from now on are drawn in one worker, which stays, or in this process: the same stream."""
        assert workers <= self.most_workers
        further = {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
        self._options = {**options(self._loader), **further}
        self._make()

    @property
    def reopens(self) -> bool:
        """Whether the stream says where it is: one that would have to be drawn again may be one that cannot."""
        return all(one.kept is not None for one in self._position.workers)

    # -- where it stands --

    def state(self) -> str:
        """A stream keeps nothing from epoch to epoch."""
        return ""

    def load_state(self, state: str) -> None: ...

    def position(self) -> dict[str, Any] | None:
        """In the epoch, beside the number of batches had."""
        return asdict(self._position)

    def check_position(self, position: dict[str, Any] | None) -> None:
        if position is None:
            raise EvenstepError(
                "the checkpoint's data position is that of a map-style data set, but this loader's is a stream (an "
                "IterableDataset)\n  fix: resume with the data set of the checkpoint"
            )
        workers = len(position["workers"])
        if workers != self._workers:
            raise EvenstepError(
                f"the checkpoint's data position is that of a stream in {workers} workers, each with a part of its own, but "
                f"this loader has {self._workers}\n  fix: resume with num_workers={workers}"
            )

    def load_position(self, position: dict[str, Any] | None) -> None:
        self._position = self._fresh()
        if position is not None:
            self._position = _Position([Begin(**one) for one in position["workers"]], position["turn"])

    def here(self) -> _Position:
        """As position, in this process."""
        return _Position(list(self._position.workers), self._position.turn)

    def go_to(self, here: _Position) -> None:
        self._position = _Position(list(here.workers), here.turn)

    # -- drawing --

    def open(
        self, epoch: int, skip: int = 0, expected: int | None = None, apart: bool = False
    ) -> Iterator[tuple[BatchPlan, Any]]:
        """The epoch's batches from the position on, or from the first where `skip` is 0. See IndexFeed.open."""
        if self._ranks != self._session.world_size:  # workers that stay know only those of before
            lead = self.lead
            self._make()
            self.lead = lead  # what was heard since the ranks changed
        self._turns += 1
        begin = self._position if skip else self._fresh()
        position = _Position(list(begin.workers), begin.turn)
        turn = _Turn(self._turns, epoch, _Position(list(begin.workers), begin.turn))
        if not apart:
            self._position = position
        # what workers are told of a seed is the same on all ranks; those that stay are told of one once
        stays = bool(self._options.get("persistent_workers", False))
        self._generator.manual_seed(epoch_seed(self._owner.seed, 0 if stays else epoch))
        if stays and self._ahead is not None:
            self._ahead.close()  # its workers are wanted now
        table = None if apart else self._table
        self._ahead = ahead = Ahead(self._owner, self._draw(turn), table, self.lead)
        self._sampler.tasks = self._tasks(turn, ahead)
        loading = Loading(self._owner, ahead, iter(self._inner), self.lead)
        return self._batches(turn, loading, position, skip)

    def _draw(self, turn: _Turn) -> Iterator[Drawn]:
        owner, session, begin = self._owner, self._session, turn.begin
        for number in count():
            if len(turn.ended) == self._workers:
                return
            opening = None
            if number < self._workers:
                opening = Opening(
                    turn.epoch,
                    owner.seed,
                    session.rank,
                    self.batch_size,
                    self._loader.drop_last,
                    owner.train and (session.rank == 0 or session.recovery is not None or owner.sizing_workers),
                    begin.workers[number],
                    not owner.train,
                )
            yield Drawn(self.batch_size if number >= begin.turn else 0, opening)

    def _tasks(self, turn: _Turn, ahead: Ahead) -> Iterator[Task]:
        while (one := ahead.give()) is not None:
            number = -1 if one.shares else one.number
            dummies = self._session.dummy_samples
            yield Task(turn.number, one.total > 0, number, tuple(one.shares), dummies, one.content)

    def _batches(
        self, turn: _Turn, loading: Loading, position: _Position, skip: int
    ) -> Iterator[tuple[BatchPlan, Any]]:
        number, dataset = skip, self._dataset
        try:
            for one, reply in loading:
                if reply.kind == OTHER:
                    raise self._other_stream(turn.epoch, skip)
                if reply.kind == END:
                    turn.ended.add(reply.worker)
                if reply.kind == BATCH:
                    position.take(reply)
                    yield self._plan(turn.epoch, number, reply, one), reply.batch
                    number += 1
        finally:
            dataset.close(turn.number)

    def _plan(self, epoch: int, number: int, reply: Reply, one: Drawn) -> BatchPlan:
        shares, predicted = list(one.shares), one.predicted
        if reply.samples < self.batch_size:
            shares = left(shares, reply.samples, self._session.dummy_samples == 1, reply.everyone)
            predicted = float("nan")
        mine = shares[self._session.rank]
        return BatchPlan(self._owner, epoch, number, reply.samples, shares, mine, reply.begin.checksum, predicted)

    def _other_stream(self, epoch: int, skip: int) -> EvenstepError:
        return EvenstepError(
            f"the stream {type(self._loader.dataset).__name__} does not give the samples of before the checkpoint: the first "
            f"{skip} batches of epoch {epoch} differ, so going on would train some samples twice and others never\n"
            "  fix: resume with the same data; or give the data set (or its iterator) state_dict() and load_state_dict(); or "
            "let its order depend on set_epoch(), or on torch's, random's or NumPy's global generators"
        )
