"""The global order of a loader's samples: the user's sampler, its random numbers depending only on (seed, epoch),
so that every rank and every world size sees the same batches."""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from evenstep import sampler_state
from evenstep._core import EvenstepError

_CHUNK = 16  # batches drawn from the sampler at a time


def epoch_seed(seed: int, epoch: int) -> int:
    """63 well-mixed bits (the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def batch_hash(indices: list[Any], before: int = 0) -> int:
    """A checksum of a global batch, the same in every process."""
    try:
        data = array("q", indices).tobytes()
    except (TypeError, OverflowError):
        plain = all(isinstance(index, (str, bytes, int, float, tuple)) for index in indices)
        data = repr(indices).encode() if plain else str(len(indices)).encode()
    return zlib.crc32(data, before)


def chained(before: int, checksum: int) -> int:
    """The checksum of several global batches, one after the other."""
    return zlib.crc32(checksum.to_bytes(8, "little"), before)


class RandomState:
    """The random numbers of what draws samples, swapped in while it draws and kept apart from the user's."""

    def __init__(self, seed: int, generators: list[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *(g for g in generators if g is not torch.default_generator)]
        self._numpy = sys.modules.get("numpy")
        user = self._save()
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if self._numpy is not None:
            self._numpy.random.seed(seed & 0xFFFFFFFF)
        self._own = self._seeded = self._save()
        self._load(user)

    def drawn(self) -> list[Any] | None:
        """Where they stand, for a checkpoint; None where they are as they were seeded."""
        (torchs, python, numpy), (seeded, python_seeded, numpy_seeded) = self._own, self._seeded
        if (
            all(map(torch.equal, torchs, seeded))
            and python == python_seeded
            and (numpy is None or ((numpy[1] == numpy_seeded[1]).all() and numpy[2:] == numpy_seeded[2:]))
        ):
            return None
        return [list(torchs), python, None if numpy is None else (numpy[0], numpy[1].tolist(), *numpy[2:])]

    def load(self, drawn: list[Any]) -> None:
        """What drawn() gave."""
        torchs, python, numpy = drawn
        self._own = torchs, python, self._own[2] if numpy is None else numpy

    def _save(self) -> tuple[Any, ...]:
        states = [generator.get_state() for generator in self._generators]
        return states, random.getstate(), None if self._numpy is None else self._numpy.random.get_state()

    def _load(self, state: tuple[Any, ...]) -> None:
        for generator, one in zip(self._generators, state[0]):
            generator.set_state(one)
        random.setstate(state[1])
        if self._numpy is not None:
            self._numpy.random.set_state(state[2])

    def __enter__(self) -> None:
        self._user = self._save()
        self._load(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = self._save()
        self._load(self._user)


class _WholeSampler(Sampler[int]):
    """What a DistributedSampler splits, not split: its shuffle, seed and epoch kept."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.inner = sampler
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.inner.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        if not self.inner.shuffle:
            return iter(range(len(self)))
        generator = torch.Generator()
        generator.manual_seed(self.inner.seed + self.epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())


@dataclass
class _Begun:
    """An epoch 0 whose first batch was drawn."""

    seed: int
    sampler_state: str  # before it
    first: list[Any]
    rest: Iterator[list[Any]]


class GlobalOrder:
    """The batches of a user's DataLoader as lists of indices."""

    def __init__(self, loader: DataLoader[Any], ranks: int) -> None:
        self.unwrapped = False
        if isinstance(loader.dataset, IterableDataset):
            raise EvenstepError(
                "the loader's data set is an IterableDataset, which has no indices to draw\n"
                "  fix: give a map-style data set; es.verify takes one collated batch, too: next(iter(loader))"
            )
        sampler = loader.sampler
        batch_sampler: Any = loader.batch_sampler
        if batch_sampler is None:
            raise EvenstepError(
                "the DataLoader has batch_size=None, so Evenstep cannot see which samples make a batch\n"
                "  fix: give batch_size, or a batch_sampler that yields lists of indices"
            )
        inner = getattr(batch_sampler, "sampler", sampler)
        if isinstance(inner, DistributedSampler) and type(batch_sampler) is BatchSampler:
            self.unwrapped = True
            whole = _WholeSampler(inner)
            batch_sampler = BatchSampler(whole, batch_sampler.batch_size * inner.num_replicas, batch_sampler.drop_last)
            inner = whole
        self.sampler: Any = inner
        self.batch_sampler = batch_sampler
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size: int | None = size if isinstance(size, int) else None
        self._begun: _Begun | None = None

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def _owners(self) -> list[Any]:
        """The user's objects that may draw."""
        return list({id(owner): owner for owner in (self.batch_sampler, self.sampler)}.values())

    def sampler_state(self) -> str:
        """What the samplers keep from epoch to epoch."""
        return sampler_state.save(self._owners()) if self._begun is None else self._begun.sampler_state

    def load_sampler_state(self, state: str) -> None:
        if state:
            self._forget()
        sampler_state.load(self._owners(), state)

    def begin(self, seed: int) -> list[Any]:
        """The first batch of epoch 0, [] where there is none. It is drawn once: batches() goes on from it."""
        state = self.sampler_state()
        batches = self._draw(seed, 0)
        first = next(batches, None)
        if first is None:
            sampler_state.load(self._owners(), state)
            return []
        self._begun = _Begun(seed, state, first, batches)
        return first

    def _forget(self) -> None:
        """What was begun is not gone on with."""
        begun, self._begun = self._begun, None
        if begun is not None:
            sampler_state.load(self._owners(), begun.sampler_state)

    def batches(self, seed: int, epoch: int) -> Iterator[list[Any]]:
        """The epoch's batches, from the first."""
        begun = self._begun
        if begun is None:
            return self._draw(seed, epoch)
        # An iterator has each batch once, for whatever epoch.
        if (begun.seed, 0) == (seed, epoch) or isinstance(self.batch_sampler, Iterator):
            self._begun = None
            return chain([begun.first], begun.rest)
        self._forget()
        return self._draw(seed, epoch)

    def _draw(self, seed: int, epoch: int) -> Iterator[list[Any]]:
        found = [getattr(owner, "generator", None) for owner in (self.batch_sampler, self.sampler)]
        state = RandomState(epoch_seed(seed, epoch), [g for g in found if isinstance(g, torch.Generator)])
        for owner in self._owners():
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with state:
            source = iter(self.batch_sampler)
        for size in chain([1], repeat(_CHUNK)):  # the first may be all that is asked for
            with state:
                chunk = [list(batch) for batch in islice(source, size)]
            yield from chunk
            if len(chunk) < size:
                return
