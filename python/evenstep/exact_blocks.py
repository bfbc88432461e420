"""The fixed blocks of `exact="bitwise"`: shares that are whole blocks, batches that come as their blocks, random numbers of
each block's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from evenstep._core import EvenstepError
from evenstep.caps import Caps, in_words
from evenstep.left_out import Exchange
from evenstep.loader import check_loader
from evenstep.memory import Report
from evenstep.order import epoch_seed
from evenstep.policies import Policy
from evenstep.random_generators import seed_generators
from evenstep.share_samples import Place
from evenstep.share_schedule import Schedule, ShareSchedule
from evenstep.shares import Shares, at_least_one, remembered

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


class _BlockCaps(Caps):
    """The most blocks of each rank, where it holds what all of them keep for backward."""

    unit = "blocks"

    def __init__(self, given: Sequence[int | None], batch: int, block: int) -> None:
        super().__init__(given, batch)
        self._block = block
        if not self.hold(batch):  # in words of its own
            raise self.too_little(self.now, "")

    def too_little(self, caps: Sequence[int | None], why: str) -> EvenstepError:
        held = sum(cap for cap in caps if cap is not None)
        return EvenstepError(
            f"memory does not hold the global batch: with BatchNorm a rank holds all of its blocks of {self._block} samples at once, "
            f"and of {self._batch} blocks there is room for {held} ({in_words(caps)})\n  fix: "
            f"{f'a batch_size of at most {held * self._block}, ' if held else ''}more ranks, or GroupNorm or LayerNorm, with which a rank holds one block at a time"
        )


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
        caps: Sequence[int | None] | None = None,
        held: bool = False,
    ) -> None:
        """caps: the most samples of each rank. held: a rank holds all of its blocks at once, so that memory may limit them."""
        self.block, self._held = block, held
        given = list(caps or [None] * ranks)
        of_blocks = [self._whole(cap, batch) for cap in given]
        super().__init__(policy, ranks, blocks_in(batch, block), speeds, schedule, caps=of_blocks)
        self.batch = batch
        self.given_caps = self.said_caps = given

    def _make_caps(self, given: Sequence[int | None], batch: int) -> Caps:
        return _BlockCaps(given, batch, self.block)

    def _whole(self, samples: int | None, batch: int) -> int | None:
        """Blocks among so many samples at most; the batch's last one may be smaller."""
        if samples is None:
            return None
        return blocks_in(batch, self.block) if samples >= batch else samples // self.block

    def crowded(self) -> tuple[str, str] | None:
        """Said, and no more: a rank without blocks idles, and the bits are those of any other number of ranks."""
        count = blocks_in(self.batch, self.block)
        if count >= self.ranks:
            return None
        return (
            f"es.Config(exact='bitwise'): the global batch of {self.batch} has {count} {'block' if count == 1 else 'blocks'} of {self.block} samples, fewer than the "
            f"{self.ranks} ranks: in every step some rank has none, and only keeps the others company",
            "fewer ranks; or smaller blocks (es.Config(block=…)) or a larger batch, either of which gives other bits",
        )

    @property
    def limited(self) -> bool:
        """Not where a rank holds one block at a time, however many it has."""
        return self._held and not self.scheduled

    @property
    def _handed_out(self) -> int:
        return blocks_in(self.batch, self.block)

    def _among(
        self,
        ranks: int,
        speeds: Sequence[float] | None,
        caps: Sequence[int | None],
        buckets: Sequence[int | None] | None,
        schedule: Schedule | None,
    ) -> Shares:
        return BlockShares(self.policy, ranks, self.batch, speeds, schedule, self.block, caps, self._held)

    def _samples(self, blocks: Sequence[int], batch: int) -> list[int]:
        shares, left = [], batch
        for count in blocks:
            shares.append(min(left, count * self.block))
            left -= shares[-1]
        return shares

    def draw(self, batch: int, alone: bool = True, step: int | None = None, number: int | None = None) -> list[int]:
        if not self.scheduled:
            self._drawn += 1
            return self._samples(self._decide(blocks_in(batch, self.block), step), batch)
        shares = super().draw(batch, True, step, number)
        end = 0
        for rank, share in enumerate(shares):
            end += share
            if share and end % self.block and end != batch:
                raise EvenstepError(
                    f"the share schedule gave {shares} for a batch of {batch} samples: rank {rank}'s share ends within a "
                    f"block of {self.block}\n  fix: return multiples of {self.block}; only the batch's last block is smaller"
                )
        return shares

    def _by_schedule(self, number: int, batch: int) -> list[int]:
        assert self._schedule is not None
        return self._schedule.shares(number, batch, self.block)

    def _ask(self, batch: int) -> list[int]:
        if self._caps.hold(batch):
            return list(self._balancer.shares(batch))
        return self._alike(batch, [self._whole(cap, self.batch) for cap in self.given_caps])

    def split(self, batch: int) -> list[int]:
        blocks = blocks_in(batch, self.block)
        larger = blocks > self._handed_out and any(cap is not None for cap in self._caps.now)
        return at_least_one(
            self._samples(self._alike(blocks, None) if larger else self._balancer.shares(blocks), batch)
        )

    def observe(
        self,
        timings: Sequence[tuple[int, float]],
        step_seconds: float,
        spared: Sequence[int] = (),
        exchange: Sequence[float] = (),
        passes: Sequence[float] = (),
    ) -> None:
        """spared: ranks whose backward was left out; a block's never is, and a rank without blocks tells its time as it is.
        exchange: in blocks no rank has a part of its own."""
        told = passes if any(passes) else None
        self._balancer.observe(
            [(blocks_in(samples, self.block), seconds) for samples, seconds in timings], (), None, told
        )
        rows = zip(timings, told or [0.0] * self.ranks)
        self._timings.append([remembered(pair, False, 0.0, lasted) for pair, lasted in rows])

    def take_micro_batches(self, told: Sequence[tuple[int, float]]) -> None:
        """Shares are counted in blocks, each of which runs by itself."""

    def take_memory(self, reports: Sequence[Report]) -> tuple[int, str] | None:
        if not self.limited or sum(samples for _, samples, _, _ in reports) != self.batch:
            return None
        return self._caps.take(self._balancer, [self._of_blocks(one) for one in reports])

    def _of_blocks(self, report: Report) -> Report:
        pool, samples, cap, room = report
        had = blocks_in(samples, self.block)
        if room is not None:
            more = (samples + room) // self.block - had
            room = more if room < 0 else max(0, more)  # the last block is no larger than its samples
        if cap >= 0:
            most = self._whole(cap, self.batch) or 0
            cap = max(most, had) if cap >= samples else most  # as above: what it had it holds
        return pool, had, cap, room

    @property
    def caps(self) -> list[int]:
        return [cap if cap < 0 else cap * self.block for cap in self._caps.learned]

    def learn_caps(self, caps: Sequence[int]) -> None:
        if self.limited:
            super().learn_caps([cap if cap < 0 else cap // self.block for cap in caps])

    def left_out(self, timings: Sequence[tuple[int, float]]) -> None:
        """A rank without blocks idles."""

    def left_out_at_start(
        self, devices: Sequence[str], hosts: Sequence[str], exchange: Callable[[], Exchange | None] = lambda: None
    ) -> str:
        """A rank without blocks idles, and costs nothing."""
        return ""

    def predict(self, shares: Sequence[int]) -> float:
        return super().predict([blocks_in(share, self.block) for share in shares])


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
