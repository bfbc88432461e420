"""Where a prepared loader's batches come from: of map-style data sets, each rank fetches its slice of a global batch's indices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from evenstep._core import EvenstepError
from evenstep.end_signal import held_in_workers
from evenstep.loading_ahead import Ahead, Drawn, Lead, Loading
from evenstep.order import GlobalOrder, batch_hash, chained
from evenstep.share_samples import Place, ShareSamples, Task, part
from evenstep.share_table import ShareTable
from evenstep.stream import WorkerInit, as_it_is
from evenstep.unreadable import CollateReadable, ReadableSamples, Unreadable
from evenstep.worker_sizing import MANY

if TYPE_CHECKING:
    from evenstep.loader import EvenLoader


_PIPES: Any = getattr(torch.utils.data, "IterDataPipe", ())  # torch means to drop them


@dataclass(frozen=True)
class BatchPlan:
    """One global batch and this rank's part of it."""

    loader: EvenLoader
    epoch: int
    batch: int  # its number in the epoch
    total: int  # samples of all ranks
    shares: list[int]
    samples: int  # of this rank; 0: a dummy sample that counts nothing
    checksum: int
    predicted_seconds: float
    beside: BatchPlan | None = None  # of an evaluation that is held in a training loop: the batch of that

    @property
    def weight(self) -> float:
        return self.samples / self.total

    @property
    def trains(self) -> bool:
        return self.at_work.loader.train

    @property
    def at_work(self) -> BatchPlan:
        """Whose samples the script computes with: where gradients are on, those of the training that it is beside."""
        return self.beside if self.beside is not None and torch.is_grad_enabled() else self


class TaskSampler:
    """What the inner DataLoader asks for tasks; one after the other goes to the workers in turn."""

    def __init__(self) -> None:
        self.tasks: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.tasks

    def __len__(self) -> int:
        raise TypeError("the loader knows how many batches there are")


def _grouped(batches: Iterator[list[Any]], least: int) -> Iterator[list[Any]]:
    """Joins batches until each has `least` samples; what is left over joins the last."""
    ready: list[Any] | None = None
    group: list[Any] = []
    for batch in batches:
        group = group + batch
        if len(group) >= least:
            if ready is not None:
                yield ready
            ready, group = group, []
    if ready is not None:
        yield ready + group
    elif group:
        yield group


class IndexFeed:
    """Of a map-style data set. Its length is in global batches."""

    most_workers = MANY

    def __init__(self, owner: EvenLoader, loader: DataLoader[Any], skip_unreadable: bool = False) -> None:
        self._owner = owner
        self._session = owner.prepared_in
        self._loader = loader
        self._unreadable = Unreadable(self._session) if skip_unreadable else None
        self.order = GlobalOrder(loader, self._session.world_size)
        self.batch_size = self.order.batch_size
        self.unwrapped = self.order.unwrapped  # whether a DistributedSampler was taken away
        self._sampler = TaskSampler()
        self._make(options(loader))

    def _make(self, options: dict[str, Any]) -> None:
        """The inner loader, and what its workers hear of shares by."""
        dataset: Any = self._loader.dataset
        collate = options["collate_fn"]
        if self._unreadable is not None:
            dataset, collate = ReadableSamples(dataset), CollateReadable(collate)
        workers, self._stays = options["num_workers"], options.get("persistent_workers", False)
        self._options = options
        self._ahead: Ahead | None = None  # of the last iteration
        self._ranks = self._session.world_size
        self._table = ShareTable(self._ranks) if self._owner.train and workers and self._ranks > 1 else None
        self.lead = Lead(workers * (options.get("prefetch_factor") or 2))
        self._samples = ShareSamples(dataset, collate, self._table, self._owner.number)
        replaced = {"collate_fn": as_it_is, "worker_init_fn": WorkerInit(options["worker_init_fn"])}
        self._inner: DataLoader[Any] = DataLoader(
            self._samples,
            batch_size=None,
            sampler=self._sampler,
            **{**options, **replaced},
        )

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self._unreadable is not None

    def resize(self, workers: int, prefetch: int) -> None:
        """Iterations that are opened from now on have so many workers, which stay."""
        further = {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
        self._make({**options(self._loader), **further})

    @property
    def reopens(self) -> bool:
        """Whether an epoch may be opened again in its middle, and draws the same: where the samplers are torch's own."""
        owners = (self.order.sampler, self.order.batch_sampler)
        return all(type(owner).__module__.startswith(("torch.utils.data", "evenstep.")) for owner in owners)

    def __len__(self) -> int:
        ranks, size = self._session.world_size, self.order.batch_size
        count = len(self.order)
        if self._owner.train or ranks == 1:
            return count
        if size is None or size >= ranks:
            last_is_small = size is not None and not self._loader.drop_last and self._last_batch() < ranks
            return max(1, count - 1) if last_is_small and count else count
        return sum(1 for _ in self._batches(0))

    def _last_batch(self) -> int:
        size = self.order.batch_size or 1
        left = len(self.order.sampler) % size
        return left or size

    def first_batch_size(self) -> int:
        """Samples of a global batch; where a batch sampler does not say, of the first, with which training begins."""
        size = self.order.batch_size
        return max(1, len(self.order.begin(self._owner.seed)) if size is None else size)

    # -- where it stands --

    def state(self) -> str:
        """What the samplers keep from epoch to epoch."""
        return self.order.sampler_state()

    def load_state(self, state: str) -> None:
        self.order.load_sampler_state(state)

    def position(self) -> dict[str, Any] | None:
        """Beside the number of batches had in the epoch: nothing, they are drawn anew."""
        return None

    def check_position(self, position: dict[str, Any] | None) -> None:
        if position is not None:
            raise EvenstepError(
                "the checkpoint's data position is that of a stream (an IterableDataset), but this loader's data set is "
                "map-style\n  fix: resume with the data set of the checkpoint"
            )

    def load_position(self, position: dict[str, Any] | None) -> None: ...

    def here(self) -> None:
        """As position, in this process."""

    def go_to(self, here: None) -> None: ...

    # -- drawing --

    def open(
        self, epoch: int, skip: int = 0, expected: int | None = None, apart: bool = False
    ) -> Iterator[tuple[BatchPlan, Any]]:
        """The epoch's batches from number `skip` on. The inner loader's iterator is made at once. expected: the checksum
        of those before. apart: they train nothing, so the position stays."""
        if self._ranks != self._session.world_size:  # workers that stay know only those of before
            lead = self.lead
            self._make(self._options)
            self.lead = lead  # what was heard since the ranks changed
        if self._stays and self._ahead is not None:
            self._ahead.close()  # its workers are wanted now
        self._samples.fetch_as = self._owner.fetch_as
        self._samples.epoch_begins()
        table = None if apart else self._table
        self._ahead = ahead = Ahead(self._owner, self._draw(epoch, skip, expected), table, self.lead)
        self._sampler.tasks = self._tasks(ahead)
        loading = Loading(self._owner, ahead, iter(self._inner), self.lead)
        pairs = ((self._plan(one), reply.batch) for one, reply in loading)
        return pairs if self._unreadable is None else self._unreadable.settled(pairs)

    def _tasks(self, ahead: Ahead) -> Iterator[Task]:
        session = self._session
        while (one := ahead.give()) is not None:
            indices, place, _ = one.content
            to_come = not one.shares
            chosen = indices if to_come else part(indices, one.shares, session.rank, session.dummy_samples)
            number = one.number if to_come else -1
            yield Task(number, tuple(one.shares), chosen, session.rank, session.dummy_samples, place)

    def _plan(self, one: Drawn) -> BatchPlan:
        _, place, checksum = one.content
        mine = one.shares[self._session.rank]
        return BatchPlan(self._owner, place.epoch, place.batch, one.total, one.shares, mine, checksum, one.predicted)

    def _batches(self, epoch: int) -> Iterator[list[Any]]:
        batches = self.order.batches(self._owner.seed, epoch)
        return batches if self._owner.train else _grouped(batches, self._session.world_size)

    def _draw(self, epoch: int, skip: int, expected: int | None) -> Iterator[Drawn]:
        drawn = samples = 0
        for number, indices in enumerate(self._batches(epoch)):
            place, samples = Place(self._owner.seed, epoch, number, samples), samples + len(indices)
            if number < skip:
                drawn = chained(drawn, batch_hash(indices))
                continue
            if number == skip and skip and expected is not None and drawn != expected:
                raise self._other_order(epoch, skip)
            if indices:
                yield Drawn(len(indices), (indices, place, batch_hash(indices)))

    def _other_order(self, epoch: int, skip: int) -> EvenstepError:
        order = self.order
        name = type(order.sampler if order.sampler is not None else order.batch_sampler).__name__
        return EvenstepError(
            f"the sampler {name} does not give the samples of before the checkpoint: the first {skip} batches of epoch "
            f"{epoch} differ, so going on would train some samples twice and others never\n  fix: resume with the same "
            "data; or give the sampler state_dict() and load_state_dict(); or let its order depend on set_epoch(), on "
            "torch's, random's or NumPy's global generators, or on generators among its attributes"
        )


def check_loader(loader: DataLoader[Any]) -> None:
    """Says clearly what cannot be split."""
    if isinstance(loader.dataset, _PIPES):
        raise EvenstepError(
            "the loader's data set is an IterDataPipe, which torch shuffles and shards in ways of its own\n"
            "  fix: wrap it in a torch.utils.data.IterableDataset, or give a map-style data set"
        )
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is None:
        raise EvenstepError(
            "the DataLoader has batch_size=None, so its IterableDataset makes the batches itself, and Evenstep cannot share "
            "out their samples\n  fix: let the data set yield samples, and give the DataLoader batch_size"
        )
    if isinstance(loader.sampler, (SequentialSampler, RandomSampler)) and loader.batch_sampler is not None:
        try:
            len(loader.sampler)
        except (TypeError, NotImplementedError):
            raise EvenstepError(
                f"the loader's dataset, a {type(loader.dataset).__name__}, has no length, so its samples cannot be "
                "shared out among the ranks\n  fix: give it __len__, or the DataLoader a sampler that yields its indices"
            ) from None
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise EvenstepError(
            f"{type(loader).__name__} has its own __iter__, which Evenstep would not run\n"
            "  fix: give a plain torch.utils.data.DataLoader and put the change into collate_fn"
        )


def options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The user's options that do not say which samples make a batch."""
    found: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": held_in_workers(loader.worker_init_fn),
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
    }
    if loader.num_workers > 0:
        found["prefetch_factor"] = loader.prefetch_factor
        found["persistent_workers"] = loader.persistent_workers
    if getattr(loader, "pin_memory_device", ""):
        found["pin_memory_device"] = loader.pin_memory_device
    return found  # without in_order=False: a batch's weight is known by its place
