"""The fixed blocks of `exact="bitwise"`: shares that are whole blocks, batches that come as their blocks, random numbers of
each block's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from evenstep._core import EvenstepError
from evenstep.loader import check_loader
from evenstep.memory import Report
from evenstep.order import epoch_seed
from evenstep.policies import Policy
from evenstep.random_generators import seed_generators
from evenstep.share_samples import Place
from evenstep.share_schedule import Schedule, ShareSchedule
from evenstep.shares import Shares, at_least_one

_FETCH, _COLLATE, FORWARD = range(3)  # what a block's random numbers are for


def default_block(batch: int) -> int:
    """Sixteen blocks a batch: shares in steps of 6%."""
    return -(-batch // 16)


def blocks_in(samples: int, block: int) -> int:
    return -(-samples // block)


def block_seed(seed: int, epoch: int, batch: int, block: int, purpose: int) -> int:
    for number in (epoch, batch, 3 * block + purpose):
        seed = epoch_seed(seed, number)
    return seed


class BlockShares(Shares):
    """Shares of whole blocks: the balancer hands out blocks, and a policy of the user's is told of blocks. What goes in and
    out are samples."""

    def __init__(
        self,
        policy: Policy,
        ranks: int,
        batch: int,
        speeds: Sequence[float] | None,
        schedule: ShareSchedule | Schedule | None,
        block: int,
    ) -> None:
        super().__init__(policy, ranks, blocks_in(batch, block), speeds, schedule)
        self.batch, self._block = batch, block

    def crowded(self) -> tuple[str, str] | None:
        count = blocks_in(self.batch, self._block)
        if count >= self.ranks:
            return None
        return (
            f"es.Config(exact='bitwise'): the global batch of {self.batch} has {count} blocks of {self._block} samples, fewer than the "
            f"{self.ranks} ranks: in every step some rank would only keep the others company",
            f"es.Config(block={max(1, self.batch // self.ranks)}) or smaller, a larger batch, or fewer ranks",
        )

    limited = False  # a rank holds one block at a time, however many it has

    def _among(
        self,
        ranks: int,
        speeds: Sequence[float] | None,
        caps: Sequence[int | None],
        buckets: Sequence[int | None] | None,
        schedule: Schedule | None,
    ) -> Shares:
        return BlockShares(self.policy, ranks, self.batch, speeds, schedule, self._block)

    def _samples(self, blocks: Sequence[int], batch: int) -> list[int]:
        shares, left = [], batch
        for count in blocks:
            shares.append(min(left, count * self._block))
            left -= shares[-1]
        return shares

    def draw(self, batch: int, alone: bool = True, step: int | None = None, number: int | None = None) -> list[int]:
        if not self.scheduled:
            self._drawn += 1
            return self._samples(self._decide(blocks_in(batch, self._block), step), batch)
        shares = super().draw(batch, True, step, number)
        end = 0
        for rank, share in enumerate(shares):
            end += share
            if share and end % self._block and end != batch:
                raise EvenstepError(
                    f"the share schedule gave {shares} for a batch of {batch} samples: rank {rank}'s share ends within a "
                    f"block of {self._block}\n  fix: return multiples of {self._block}; only the batch's last block is smaller"
                )
        return shares

    def _by_schedule(self, number: int, batch: int) -> list[int]:
        assert self._schedule is not None
        return self._schedule.shares(number, batch, self._block)

    def split(self, batch: int) -> list[int]:
        return at_least_one(self._samples(self._balancer.shares(blocks_in(batch, self._block)), batch))

    def observe(self, timings: Sequence[tuple[int, float]], step_seconds: float, spared: Sequence[int] = ()) -> None:
        """spared: ranks whose backward was left out; a block's never is, and a rank without blocks tells its time as it is."""
        self._balancer.observe([(blocks_in(samples, self._block), seconds) for samples, seconds in timings])
        self._timings.append([tuple(pair) for pair in timings])

    def take_memory(self, reports: Sequence[Report]) -> None:
        """A rank holds one block at a time, however many it has."""

    def left_out(self, timings: Sequence[tuple[int, float]]) -> None:
        """A rank without blocks idles."""

    def left_out_at_start(self, devices: Sequence[str], hosts: Sequence[str]) -> str:
        """A rank without blocks idles, and costs nothing."""
        return ""

    def predict(self, shares: Sequence[int]) -> float:
        return super().predict([blocks_in(share, self._block) for share in shares])


class BlockIndices(list[Any]):
    """The indices that a rank fetches at once, and which blocks they are."""

    seed: int
    epoch: int
    batch: int
    first: int  # block


class InBlocks:
    """What EvenLoader fetches in blocks: indices that know which they are."""

    def __init__(self, block: int) -> None:
        self._block = block

    def __call__(self, indices: list[Any], shares: Sequence[int], rank: int, place: Place) -> BlockIndices:
        given = BlockIndices(indices)
        given.seed, given.epoch, given.batch = place.seed, place.epoch, place.batch
        given.first = sum(shares[:rank]) // self._block
        return given


class _Blocks:
    """The data set of a loader whose samples come block by block, each with random numbers of its own: what they are cannot
    depend on who fetches what else."""

    def __init__(self, dataset: Any, block: int) -> None:
        self._dataset, self._block = dataset, block

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: BlockIndices) -> list[tuple[int, list[Any]]]:
        many = getattr(self._dataset, "__getitems__", None)
        found = []
        for number, at in enumerate(range(0, len(indices), self._block), indices.first):
            part = list(indices[at : at + self._block])
            seed_generators(block_seed(indices.seed, indices.epoch, indices.batch, number, _FETCH))
            samples = many(part) if many is not None else [self._dataset[index] for index in part]
            found.append((block_seed(indices.seed, indices.epoch, indices.batch, number, _COLLATE), samples))
        return found


class _Collate:
    """The loader's own collate_fn, block by block."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, blocks: list[tuple[int, list[Any]]]) -> list[Any]:
        batches = []
        for seed, samples in blocks:
            seed_generators(seed)
            batches.append(self._collate(samples))
        return batches


def in_blocks(loader: DataLoader[Any], block: int) -> DataLoader[Any]:
    """The same loader, each of whose batches is a list of collated blocks."""
    check_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise EvenstepError(
            "exact='bitwise': the loader's dataset is an IterableDataset, whose samples have no random numbers of their own\n"
            "  fix: use a map-style data set (__len__ and __getitem__)"
        )
    copied = copy.copy(loader)
    copied.__dict__["dataset"] = _Blocks(loader.dataset, block)
    copied.collate_fn = _Collate(loader.collate_fn)
    return copied
