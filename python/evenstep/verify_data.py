"""The global batches of es.verify, and each rank's part of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenstep import plain, sampler_state
from evenstep._core import EvenstepError
from evenstep.group import Group, broadcast_bytes, gather_objects
from evenstep.loader import EvenLoader, check_loader
from evenstep.order import GlobalOrder
from evenstep.share_samples import Place, ShareSamples, Task
from evenstep.shares import none_alone


@dataclass(frozen=True)
class Batches:
    """What one device would be given step by step; the same on all ranks."""

    sizes: list[int]
    _samples: ShareSamples | None = None  # where the indices are of its data set
    _indices: list[list[Any]] | None = None
    _batch: Any = None  # where one is used in all steps

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def has_dataset(self) -> bool:
        return self._indices is not None

    def part(self, step: int, first: int, count: int) -> Any:
        """Samples first … first + count - 1 of the step's global batch."""
        if self._indices is None:
            return slice_of(self._batch, self.sizes[step], first, count)
        assert self._samples is not None
        mine = self._indices[step][first : first + count]
        place = Place(0, 0, step, sum(self.sizes[:step]) + first)
        return self._samples[Task(-1, (count,), mine, 0, 1, place)].batch

    def whole(self, step: int) -> Any:
        return self.part(step, 0, self.sizes[step])

    @property
    def collating_draws(self) -> bool:
        """Random numbers, in a batch that was fetched."""
        return self._samples is not None and self._samples.collating_draws


def batches_of(group: Group, data: Any, steps: int, seeded: bool = True) -> Batches:
    """Rank 0 draws them. seeded: samples have random numbers of their own, as in training. Collective."""
    if not isinstance(data, (DataLoader, EvenLoader)):
        batch = _of_rank_0(group, data)
        return Batches([samples_in(batch, "es.verify")] * steps, _batch=batch)
    loader = data.loader if isinstance(data, EvenLoader) else data
    check_loader(loader)
    drawn = on_rank_0(group, lambda: plain.dumps(_draw(loader, group.ranks, steps)))
    indices = plain.loads(broadcast_bytes(group, drawn))
    if not indices:
        raise EvenstepError("es.verify: the loader has no batch\n  fix: give one with samples, or one collated batch")
    indices = [indices[step % len(indices)] for step in range(steps)]
    samples = ShareSamples(loader.dataset, loader.collate_fn, None, 0 if seeded else None)
    return Batches([len(one) for one in indices], samples, indices)


def _of_rank_0(group: Group, batch: Any) -> Any:
    """Its collated batch. Of one with classes of the script's own, its tensors, in this rank's."""

    def told() -> bytes:
        try:
            return plain.dumps((True, batch))
        except TypeError:
            return plain.dumps((False, list(_tensors(batch))))

    whole, theirs = plain.loads(broadcast_bytes(group, on_rank_0(group, told)))
    if whole:
        return theirs
    mine = len(list(_tensors(batch)))
    if any(count != len(theirs) for count in gather_objects(group, mine)):
        raise EvenstepError(
            f"es.verify: rank 0's batch, a {type(batch).__name__}, has {len(theirs)} tensors, another rank's has others\n"
            "  fix: give every rank a batch of one form, or the DataLoader"
        )
    following = iter(theirs)
    return mapped(batch, lambda _: next(following))


def on_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """Its result there, None on the others; what it raises is raised on all. Collective."""
    result, failure = None, None
    if group.rank == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    words = gather_objects(group, f"{type(failure).__name__}: {failure}" if failure else "")[0]
    if failure is not None:
        raise failure
    if words:
        raise EvenstepError(f"es.verify on one device, rank 0: {words}\n  fix: the reason is in that rank's output")
    return result


def _draw(loader: DataLoader[Any], ranks: int, steps: int) -> list[list[Any]]:
    order = GlobalOrder(loader, ranks)
    if isinstance(order.batch_sampler, Iterator):
        raise EvenstepError(
            "es.verify: the loader's batch sampler is an iterator, which would be used up\n"
            "  fix: give es.verify one collated batch instead of the loader"
        )
    owners = [order.batch_sampler, order.sampler]
    state = sampler_state.save(owners)
    drawn = [batch for batch, _ in zip(order.batches(0, 0), range(steps)) if batch]
    sampler_state.load(owners, state)
    return drawn


def uneven(samples: int, ranks: int, number: int, alone: bool) -> list[int]:
    """Shares, other ones for each number, zeros among them. alone: a share may be a single sample."""
    draw = random.Random(number)
    cuts = sorted(draw.randint(0, samples) for _ in range(ranks - 1))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, samples])]
    if number == 1 and ranks > 1:  # a rank without samples, whatever was drawn
        shares[0], shares[-1] = shares[0] + shares[-1], 0
    return shares if alone else none_alone(shares)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def samples_in(batch: Any, call: str) -> int:
    """Of a collated batch. Raises EvenstepError."""
    count = next((tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()), 0)
    if count == 0:
        raise EvenstepError(
            f"{call} found no tensor of samples in the batch, a {type(batch).__name__}\n"
            "  fix: give a DataLoader, or a batch of tensors (in a tuple, list or dict) whose first dimension counts samples"
        )
    return count


def mapped(batch: Any, change: Any) -> Any:
    """The batch with its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


def slice_of(batch: Any, samples: int, first: int, count: int) -> Any:
    """Samples first … first + count - 1 of a batch of so many."""
    if isinstance(batch, list) and len(batch) == samples and not any(isinstance(one, torch.Tensor) for one in batch):
        return batch[first : first + count]  # words, one a sample

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first : first + count] if tensor.dim() and tensor.shape[0] == samples else tensor

    if isinstance(batch, Mapping):
        return {key: slice_of(value, samples, first, count) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_of(value, samples, first, count) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(slice_of(value, samples, first, count) for value in batch)
    return mapped(batch, part)


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same tensors, bit by bit."""
    pairs = list(zip(_tensors(one), _tensors(other)))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def shares_of(batches: Batches, ranks: int, alone: bool) -> list[list[int]]:
    return [uneven(size, ranks, number, alone) for number, size in enumerate(batches.sizes)]


def columns(rows: Sequence[Sequence[int]]) -> str:
    return ", ".join("+".join(map(str, row)) for row in rows)
