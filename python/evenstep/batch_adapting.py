"""A global batch that is adapted while it trains: of one prepared loader, decided alike on all ranks from what they exchange."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.batch_adapt import AdaptBatch, Decision, decide, factor_of, parse_adapt
from evenstep.batch_noise import NoiseProbe
from evenstep.batch_sizes import SizedBatches
from evenstep.feeds import IndexFeed

if TYPE_CHECKING:
    from evenstep.engine import EngineOptions
    from evenstep.loader import EvenLoader
    from evenstep.modes import Mode
    from evenstep.session import Session


def adapt_asked(session: Session, given: AdaptBatch | None, trains: bool) -> AdaptBatch | None:
    """What a call of es.prepare is to do about its training loader. Raises TypeError, ValueError or EvenstepError."""
    if given is not None and not isinstance(given, AdaptBatch):
        raise TypeError(f"es.prepare(adapt_batch={given!r}): give es.AdaptBatch(most=1024, lr_rule='sqrt')")
    if given is not None and not trains:
        raise ValueError(
            "es.prepare(adapt_batch=…) is about training batches, but this call has no training DataLoader\n"
            "  fix: give it with the training loader"
        )
    if given is None and trains and session.environment.batch_adapt:
        return parse_adapt(session.environment.batch_adapt)
    return given


def check_adapt(options: EngineOptions, mode: Mode | None, exact: bool, sharded: bool) -> None:
    """Raises ValueError where the ranks' gradients, or their mean, are not what the noise is estimated from. sharded: of some
    model no rank has the mean."""
    why = ""
    if exact:
        why = "exact='bitwise' gives the same bits for any split, and the noise that is measured depends on the split"
    elif mode is not None:
        why = f"sync={mode!r} has no mean gradient of each step"
    elif options.adasum:
        why = "reduction='adasum' has no mean gradient"
    elif options.sums:
        why = "reduction='sum' has no mean gradient, and its steps grow with the batch"
    elif options.compression is not None:
        why = f"compression={str(options.compression)!r} adds an error of its own to the mean gradient"
    elif sharded:
        why = "no rank has the mean gradient of a model that was prepared with shard_gradients=True of es.optim"
    if why:
        raise ValueError(f"adapt_batch (--batch-adapt): {why}\n  fix: leave one of the two out")


class BatchAdapting:
    def __init__(self, session: Session, loader: EvenLoader, options: AdaptBatch, batches: SizedBatches) -> None:
        self._session, self._loader, self._options, self._batches = session, loader, options, batches
        self.base = batches.batch_size
        self._least = self.base if options.least is None else options.least
        self._probe = NoiseProbe(session.steps, options.stride, self._unit)
        self._mark = 0  # the last decision's number
        self._epoch = 0  # whose batches have these sizes
        self._looked = -1  # the step after which it has looked last whether the size is to change
        self._factor_then: float | None = None  # of the rates, from the next look on
        self._said = ""  # why it stays, once
        self._begun = False
        session.steps.noise = self._probe

    def _unit(self) -> float:
        """What a GradScaler multiplies losses by."""
        scales = (one for one in self._session.objects.values() if isinstance(one, torch.amp.GradScaler))
        return math.prod(one.get_scale() for one in scales if one.is_enabled())

    @property
    def batch(self) -> int:
        return self._batches.batch_size

    # -- in the loader's iterations --

    def epoch_begins(self, epoch: int, batch: int) -> None:
        """Before an iteration opens at this batch of the epoch."""
        if not self._begun:
            self._begun = True
            self._look()
        self._epoch = epoch
        if batch == 0:
            self._batches.begin_epoch()
        self.between(epoch, batch)

    def _look(self) -> None:
        steps = self._session.steps
        if any(
            sync.local is not None or sync.stale is not None or sync.compression or sync.adds or sync.wholes.on
            for sync in steps.syncs
        ):
            raise EvenstepError(
                "the global batch cannot be adapted: a prepared model's gradients are compressed, stay on their rank, come late, or "
                "are added up as they are or by Adasum (reduction=)\n  fix: leave adapt_batch (--batch-adapt) out, or the other"
            )
        if self._session.world_size == 1 and not self._session.joining:
            self._tell_once("one rank has no other to compare its gradients with, so that no noise is measured")

    def between(self, epoch: int, batch: int) -> bool:
        """Between two batches, of which the next has this number: whether from it on the size is another one."""
        if self._loader.fetched > 0 or self._session.joining:
            return False
        shares, recovery = self._loader.shares, self._session.recovery
        self._looked = self._session.step
        if self._factor_then is not None:
            self._session.rates.factor, self._factor_then = self._factor_then, None
        if shares is not None and shares.short is not None:
            return self._shrink(shares.short, batch)
        if recovery is not None and recovery.comes_again:
            return False
        every = self._options.every
        mark = epoch if every == "epoch" else self._session.step // int(every)
        can = batch == 0 or (every != "epoch" and self._may_reopen())
        if mark <= self._mark or not can:
            return False
        self._mark = mark
        known = self._probe.known
        if known.count < self._options.enough:
            if self._session.world_size > 1 and known.count == 0:
                self._tell_once(
                    "its noise was not measured: one rank has all samples, gradients of several backwards are added up, or "
                    "are not finite"
                )
            return False
        memory = None if shares is None else shares.room
        wanted = known.scale / self._loader.batches_per_step
        found = decide(self.batch, wanted, max(self._least, self._session.world_size), self._options.most, memory)
        return self._follow(found, batch)

    def fit(self, caps: Sequence[int | None]) -> int:
        """Before the first batch: the size that the script's caps of the ranks hold, at most the loader's."""
        known = [cap for cap in caps if cap is not None]
        if len(known) == len(caps) and sum(known) < self.batch and not self._session.joining:
            self._shrink(sum(known), 0)
        return self.batch

    def _shrink(self, holds: int, batch: int) -> bool:
        """From this batch on the ranks' memory is to hold it."""
        least = max(self._options.least or 1, self._session.world_size)
        short = (
            f"the ranks' memory holds {holds} samples, {self.batch - holds} fewer than the global batch of {self.batch}"
        )
        if holds < least:
            whose = f"es.AdaptBatch(least={least})" if self._options.least == least else f"{least} ranks"
            raise EvenstepError(
                f"{short}, and fewer than {whose}\n  fix: a smaller least (--batch-adapt), devices that hold more, or a smaller model"
            )
        if batch and not self._may_reopen():
            raise EvenstepError(
                f"{short}, which cannot change within an epoch that a sampler of the script's own draws\n"
                f"  fix: begin with a batch_size of {holds} at most, or give one of torch's samplers"
            )
        self._change(holds, batch, f"memory holds {holds}")
        return True

    def _may_reopen(self) -> bool:
        feed = self._loader.feed
        return isinstance(feed, IndexFeed) and feed.reopens

    def _follow(self, found: Decision, batch: int) -> bool:
        noise = f"noise scale {self._probe.known.scale:.4g}"
        if found.batch != self.batch:
            self._change(found.batch, batch, noise, found.words)
            return True
        factor = self._session.rates.factor
        self._session.rates.factor = self._factor(found.batch)
        if self._session.rates.factor != factor:
            self._tell(f"{self.batch} samples: {noise}{self._rate()}{found.words}")
        elif found.why:
            self._tell_once(f"{noise}{found.words}")
        return False

    def _change(self, size: int, batch: int, why: str, further: str = "") -> None:
        before = self.batch
        self._session.rates.factor = self._factor(size)
        self._batches.change(batch, size)
        self._use_size()
        self._tell(f"{before} -> {size} samples: {why}{self._rate()}{further}")
        if self._begun and self._loader.has_length and self._session.rank == 0:
            epochs = self._session.total_epochs or self._loader.epoch + 1
            total = self._loader.expected_batches(epochs)
            self._session.telemetry.event(_core.EVENT_TOTAL_STEPS, self._session.step, total)

    def _factor(self, batch: int) -> float:
        known = self._probe.known
        gain = known.gain(self.base, batch) if known.count else batch / self.base
        return factor_of(self._options.lr_rule, self.base, batch, gain, self._session.rates.factor)

    def _rate(self) -> str:
        rule = self._options.lr_rule
        return "" if rule == "none" else f"; learning rate x {self._session.rates.factor:.3g} ({rule})"

    def _use_size(self) -> None:
        loader = self._loader
        loader.feed.batch_size = self.batch
        if loader.shares is None or loader.shares.batch == self.batch:
            return
        if self._session.joining:  # its shares are those of one that is alone
            loader.shares.batch = self.batch
        else:
            loader.set_shares(loader.shares.of_batch(self.batch))

    def expected(self, epochs: int, epoch: int, batch: int) -> int:
        """Batches of so many epochs, those that were had included; from this batch on with the present size."""
        samples = len(self._batches.sampler)  # type: ignore[arg-type]
        whole = samples // self.batch if self._batches.drop_last else -(-samples // self.batch)
        had = self._session.step * self._loader.batches_per_step
        return had + len(self._batches) - batch + max(0, epochs - epoch - 1) * whole

    # -- what is said --

    def _tell(self, words: str) -> None:
        session = self._session
        if session.rank == 0 and not session.joining:
            session.telemetry.event(_core.EVENT_BATCH, session.step, self.batch, f"batch {words}")
            sys.stderr.write(f"evenstep: step {session.step}: global batch {words}\n")
            sys.stderr.flush()

    def _tell_once(self, why: str) -> None:
        kind = why.partition(" ")[0]  # a noise scale that is another one is no news
        if self._said != kind:
            self._said = kind
            self._tell(f"stays at {self.batch} samples: {why}")

    # -- where ranks may be lost --

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of the epoch under way: from which batch on which counts."""
        return self._batches.sizes

    def go_back(self, epoch: int, batch: int, sizes: Sequence[tuple[int, int]]) -> None:
        """To this batch of an epoch that had these sizes; of the epoch under way they have stayed, or memory has shrunk them."""
        if epoch != self._epoch:
            size = self.batch
            self._epoch, self._batches.sizes = epoch, list(sizes)
            if self.batch != size:
                self._batches.change(batch, size)

    def told(self) -> dict[str, Any] | None:
        """To the members of a new generation; None of a process that joins."""
        if self._session.joining:
            return None
        then = {} if self._factor_then is None else {"factor": self._factor_then}
        return {**self.state(True), **then, "epoch": self._epoch, "looked": self._looked, "said": self._said}

    def go_on(self, told: dict[str, Any]) -> None:
        """With what was decided by whoever has come furthest, among the ranks that were there then. The step under way may stand, and
        has the rates that it began with."""
        self._batches.sizes = [(int(begin), int(size)) for begin, size in told["sizes"]]
        self._factor_then = float(told["factor"])
        self._mark, self._epoch, self._looked = int(told["mark"]), int(told["epoch"]), int(told["looked"])
        self._said = told["said"]
        self._loader.feed.batch_size = self.batch
        if self._loader.shares is not None:  # others are made of them now
            self._loader.shares.batch = self.batch

    # -- checkpoints --

    def state(self, within: bool) -> dict[str, Any]:
        """Plain JSON. within: the cursor is in the middle of an epoch."""
        sizes = self._batches.sizes if within else [(0, self.batch)]
        return {
            "base": self.base,
            "sizes": [list(one) for one in sizes],
            "factor": self._session.rates.factor if self._factor_then is None else self._factor_then,
            "noise": self._probe.known.state(),
            "mark": self._mark,
        }

    def check(self, state: dict[str, Any]) -> None:
        if state["base"] != self.base:
            raise EvenstepError(
                f"the checkpoint's global batch was adapted from {state['base']} samples, but this loader's begins with {self.base}\n"
                "  fix: resume with the batch size of the script that wrote it"
            )

    def load(self, state: dict[str, Any], batch: int) -> None:
        """batch: the number of the next one in its epoch. Where the caps that are known by now do not hold the checkpoint's size, it
        shrinks from there on."""
        self._batches.sizes = [(int(begin), int(size)) for begin, size in state["sizes"]]
        self._session.rates.factor = float(state["factor"])
        self._probe.load(state["noise"])
        self._mark = int(state["mark"])
        caps = [] if self._loader.shares is None else self._loader.shares.given_caps
        known = [cap for cap in caps if cap is not None]
        if caps and len(known) == len(caps) and sum(known) < self.batch and not self._session.joining:
            self._shrink(sum(known), batch)
            return
        self._use_size()
        if self.batch != self.base:
            self._tell(f"{self.batch} samples, as in the checkpoint; learning rate x {self._session.rates.factor:.3g}")


def not_adapted(state: dict[str, Any], within: bool, batch: int | None, aloud: bool) -> None:
    """Of a checkpoint's cursor whose batch was adapted, where this run does not adapt it. Raises EvenstepError where it is in
    the middle of an epoch."""
    now = state["sizes"][-1][1]
    if now == batch and len(state["sizes"]) == 1:
        return
    if within:
        raise EvenstepError(
            f"the checkpoint is of a run that adapted its global batch, from {state['base']} to {now} samples, and of the middle of "
            "an epoch\n  fix: go on with --batch-adapt (adapt_batch in es.prepare), as then"
        )
    if aloud:
        sys.stderr.write(
            f"evenstep: the global batch was {now} samples before the checkpoint, adapted from {state['base']}, with learning rates x "
            f"{state['factor']:.3g}; this run does not adapt it: {batch} samples, learning rates as set\n"
        )


def adapt_batches(session: Session, loader: EvenLoader, options: AdaptBatch) -> BatchAdapting:
    """Raises EvenstepError or ValueError where this loader's batches cannot have another size."""
    feed = loader.feed
    if not isinstance(feed, IndexFeed):
        raise EvenstepError(
            "the global batch cannot be adapted: the data set is a stream (an IterableDataset)\n"
            "  fix: leave adapt_batch (--batch-adapt) out, or give a map-style data set"
        )
    batches = feed.order.batch_sampler
    if type(batches) is not BatchSampler:
        raise EvenstepError(
            f"the global batch cannot be adapted: the loader's batch sampler, a {type(batches).__name__}, says itself which samples "
            "make a batch\n  fix: give the DataLoader batch_size and a sampler, or leave adapt_batch (--batch-adapt) out"
        )
    if options.most < session.world_size:
        raise ValueError(
            f"es.AdaptBatch(most={options.most}) is less than a sample for each of the {session.world_size} ranks\n"
            "  fix: allow more, or start fewer ranks"
        )
    sized = SizedBatches(batches)
    feed.order.batch_sampler = sized
    return BatchAdapting(session, loader, options, sized)
