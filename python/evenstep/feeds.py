"""Where a prepared loader's batches come from: of map-style data sets, each rank fetches its slice of a global batch's indices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from evenstep._core import EvenstepError
from evenstep.order import GlobalOrder, batch_hash, chained
from evenstep.unreadable import CollateReadable, ReadableSamples, Unreadable

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

    @property
    def weight(self) -> float:
        return self.samples / self.total


class _ShareSampler:
    """What the inner DataLoader asks for indices: this rank's slice of each global batch."""

    def __init__(self) -> None:
        self.drawn: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.drawn


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

    def __init__(self, owner: EvenLoader, loader: DataLoader[Any], skip_unreadable: bool = False) -> None:
        self._owner = owner
        self._session = owner.prepared_in
        self._loader = loader
        self._unreadable = Unreadable(self._session) if skip_unreadable else None
        self.order = GlobalOrder(loader, self._session.world_size)
        self.batch_size = self.order.batch_size
        self.unwrapped = self.order.unwrapped  # whether a DistributedSampler was taken away
        self._sampler = _ShareSampler()
        self._inner = self._make(options(loader))

    def _make(self, options: dict[str, Any]) -> DataLoader[Any]:
        dataset: Any = self._loader.dataset
        if self._unreadable is not None:
            dataset = ReadableSamples(dataset)
            options = {**options, "collate_fn": CollateReadable(options["collate_fn"])}
        return DataLoader(dataset, batch_sampler=self._sampler, **options)  # type: ignore[arg-type]

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self._unreadable is not None

    def resize(self, workers: int, prefetch: int) -> bool:
        """Iterations that are opened from now on have so many workers. Whether one may be opened again in its middle: where
        the samplers are torch's own, which draw the same again."""
        self._inner = self._make({**options(self._loader), "num_workers": workers, "prefetch_factor": prefetch})
        return self.redraws

    @property
    def redraws(self) -> bool:
        """Whether an epoch may be opened again in its middle, and draws the same."""
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

    # -- drawing --

    def open(
        self, epoch: int, skip: int = 0, expected: int | None = None, apart: bool = False
    ) -> Iterator[tuple[BatchPlan, Any]]:
        """The epoch's batches from number `skip` on. The inner loader's iterator is made at once. expected: the checksum
        of those before. apart: they train nothing, so the position stays."""
        plans: deque[BatchPlan] = deque()
        self._sampler.drawn = self._draw(epoch, skip, expected, plans)
        batches = iter(self._inner)
        pairs = ((plans.popleft(), batch) for batch in batches)
        return pairs if self._unreadable is None else self._unreadable.settled(pairs)

    def _batches(self, epoch: int) -> Iterator[list[Any]]:
        batches = self.order.batches(self._owner.seed, epoch)
        return batches if self._owner.train else _grouped(batches, self._session.world_size)

    def _draw(self, epoch: int, skip: int, expected: int | None, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        rank, ranks = self._session.rank, self._session.world_size
        drawn = 0
        for number, indices in enumerate(self._batches(epoch)):
            if number < skip:
                drawn = chained(drawn, batch_hash(indices))
                continue
            if number == skip and skip and expected is not None and drawn != expected:
                raise self._other_order(epoch, skip)
            total = len(indices)
            if total == 0:
                continue
            if self._session.world_size != ranks:
                raise _share_lost()
            shares, predicted = self._owner.share_out(total, len(plans))
            first = sum(shares[:rank])
            mine = indices[first : first + shares[rank]]
            checksum = batch_hash(indices)
            plans.append(BatchPlan(self._owner, epoch, number, total, shares, len(mine), checksum, predicted))
            chosen, as_wanted = mine or indices[: self._session.dummy_samples], self._owner.fetch_as
            yield chosen if as_wanted is None else as_wanted(chosen, plans[-1])

    def _other_order(self, epoch: int, skip: int) -> EvenstepError:
        order = self.order
        name = type(order.sampler if order.sampler is not None else order.batch_sampler).__name__
        return EvenstepError(
            f"the sampler {name} does not give the samples of before the checkpoint: the first {skip} batches of epoch "
            f"{epoch} differ, so going on would train some samples twice and others never\n  fix: resume with the same "
            "data; or give the sampler state_dict() and load_state_dict(); or let its order depend on set_epoch(), on "
            "torch's, random's or NumPy's global generators, or on generators among its attributes"
        )


def _share_lost() -> EvenstepError:
    from evenstep.mended_group import RankLost

    return RankLost(
        "a rank was lost while the others went through an evaluation, and its share of the samples with it (EVEN_ERR_PEER_LOST)\n"
        "  fix: catch es.RankLost, and begin the evaluation again; es.evaluate does so by itself"
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
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
    }
    if loader.num_workers > 0:
        found["prefetch_factor"] = loader.prefetch_factor
        found["persistent_workers"] = loader.persistent_workers
    if getattr(loader, "pin_memory_device", ""):
        found["pin_memory_device"] = loader.pin_memory_device
    return found  # without in_order=False: a batch's weight is known by its place
