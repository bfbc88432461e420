"""Who gets how many samples of a batch: the balancer, the caller's schedule, or the plan's measuring steps."""

from __future__ import annotations

import base64
import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from evenstep._core import Balancer, EvenstepError, balance
from evenstep.caps import Caps
from evenstep.left_out import Exchange, LeftOut, before_start, unknown_before_start
from evenstep.memory import Report
from evenstep.policies import Policy, for_balancer
from evenstep.share_schedule import Schedule, ShareSchedule

# what runs instead of the models' split where that was measured slower -> its name in the event
_FIXED = {"equal": "equal", "proportional": "profile"}
_MEASURED = ("dynamic", "hybrid", "auto")
_DECIDED = 1024  # more than any loader draws ahead
_MOST_LEARNED = 1 << 28  # bytes of what a balancer has learned: of some 50,000 ranks
_REMEMBERED = 24  # steps whose timings a checkpoint keeps: enough to draw lines by, too few to begin a trial


def equal_shares(batch: int, ranks: int) -> list[int]:
    return [batch // ranks + (1 if rank < batch % ranks else 0) for rank in range(ranks)]


def at_least_one(shares: Sequence[int]) -> list[int]:
    """No zero share where there are enough samples: taken from the largest."""
    mended = list(shares)
    if sum(mended) >= len(mended):
        for rank, share in enumerate(mended):
            if share == 0:
                mended[mended.index(max(mended))] -= 1
                mended[rank] = 1
    return mended


def none_alone(shares: Sequence[int], caps: Sequence[int | None] | None = None) -> list[int]:
    """No share of a single sample, of which a BatchNorm in training has no variance: it goes to the largest other that
    its cap lets have it."""
    mended = list(shares)
    for rank, share in enumerate(mended):
        if share == 1:
            mended[rank] = 0
            others = [r for r, other in enumerate(mended) if other > 0 and (caps is None or _fits(other + 1, caps[r]))]
            mended[max(others, key=lambda r: (mended[r], -r), default=rank)] += 1
    return mended


def _fits(samples: int, cap: int | None) -> bool:
    return cap is None or samples <= cap


def crowded(batch: int, ranks: int) -> tuple[str, str]:
    """What a batch that is too small for the ranks is called, and the way out."""
    return (
        f"the global batch of {batch} is smaller than the {ranks} ranks: in every step some rank would only keep the others company",
        f"give the DataLoader a batch_size of at least {ranks}, or start fewer ranks",
    )


def remembered(timing: tuple[float, ...], spared: bool, own: float, lasted: float) -> tuple[float, ...]:
    """One rank's step as checkpoints have it: no longer than it has to be."""
    if lasted > 0:
        return (*timing, int(spared), own, lasted)
    if own > 0:
        return (*timing, int(spared), own)
    return (*timing, 1) if spared else timing


def _unpacked(learned: str) -> bytes:
    inflated = zlib.decompressobj()
    saved = inflated.decompress(base64.b64decode(learned, validate=True), _MOST_LEARNED)
    if not inflated.eof:
        raise ValueError("what was saved of a balancer is cut")
    return saved


def _in_words(batch: int, block: int) -> str:
    return f"a global batch of {batch}{f' in blocks of {block}' if block > 1 else ''}"


def _own_part(remembered: Sequence[float]) -> float:
    return float(remembered[3]) if len(remembered) > 3 else 0.0


def _pass(remembered: Sequence[float]) -> float:
    return float(remembered[4]) if len(remembered) > 4 else 0.0


class Shares:
    """Shares of one loader's batches; the same calls give the same shares on every rank."""

    block = 1  # shares are whole multiples of so many samples

    def __init__(
        self,
        policy: Policy,
        ranks: int,
        batch: int,
        speeds: Sequence[float] | None = None,
        schedule: ShareSchedule | Schedule | None = None,
        plan: Any = None,
        caps: Sequence[int | None] | None = None,
        buckets: Sequence[int | None] | None = None,
    ) -> None:
        """caps: the most samples of each rank, as the script says; others are learned (take_memory). buckets: of how many
        samples a rank's kernels work at once, as the script says."""
        self.ranks, self.batch = ranks, batch
        given = schedule is None or isinstance(schedule, Schedule)
        self._schedule: Schedule | None = schedule if given else Schedule(schedule, ranks)  # type: ignore[assignment, arg-type]
        self._plan = plan
        self.policy = policy
        self._speeds = speeds
        self.given_caps = list(caps or [None] * ranks)
        self.said_caps = self.given_caps  # by the scripts alone, where ranks have run out of memory
        self.given_buckets = list(buckets or [None] * ranks)
        self._caps = self._make_caps(self.given_caps, batch)
        self._balancer = Balancer(for_balancer(policy), ranks, batch, speeds, self._caps.now, self.given_buckets)
        self._left_out = LeftOut(ranks, batch)
        self._timings: deque[list[tuple[float, ...]]] = deque(maxlen=_REMEMBERED)
        self._planned: list[list[list[float]]] = []  # its state() when a plan was all that it knew
        self._drawn = 0
        self._decided: dict[tuple[int, int], list[int]] = {}  # (step, samples of the batch) -> shares
        self._micro_batches = [(0, 0.0)] * ranks  # that the balancer knows of
        self._choice = self._balancer.choice[0]

    def _make_caps(self, given: Sequence[int | None], batch: int) -> Caps:
        return Caps(given, batch)

    def of_each(self) -> list[list[tuple[float, ...]]]:
        """What was measured of each rank in the last steps."""
        return [[timings[rank] for timings in self._timings] for rank in range(self.ranks)]

    def anew(
        self,
        speeds: Sequence[float] | None,
        caps: Sequence[int | None],
        known: Sequence[Sequence[Any] | None],
        buckets: Sequence[int | None] | None = None,
        places: Sequence[int | None] = (),
    ) -> Shares:
        """The same among other ranks, with what is known of each (of_each; None: nothing) but for their memory, which shows
        again. Where nothing is known of a rank in a step, it is taken for as fast as the others. places: in the schedule, as
        Schedule has them."""
        schedule = None if self._schedule is None else self._schedule.among(places)
        other = self._among(len(caps), speeds, caps, buckets, schedule)
        other._caps.in_pieces, other._caps.may_shrink = self._caps.in_pieces, self._caps.may_shrink
        other.learn_some(known)
        return other

    def crowded(self) -> tuple[str, str] | None:
        """Where more ranks are there than can have samples: in words, and the way out."""
        return crowded(self.batch, self.ranks) if self.batch < self.ranks else None

    def learn_some(self, known: Sequence[Sequence[Any] | None]) -> None:
        """Takes what was measured of some of these ranks; the others count as their mean."""
        rows = []
        for back in range(max((len(one) for one in known if one), default=0), 0, -1):
            row = [one[-back] if one is not None and len(one) >= back else None for one in known]
            there = [pair for pair in row if pair is not None]
            usual = tuple(sum(pair[i] for pair in there) / len(there) for i in range(2))
            own, lasted = (sum(map(part, there)) / len(there) for part in (_own_part, _pass))
            rows.append([remembered(usual, False, own, lasted) if pair is None else pair for pair in row])
        self.learn(rows)

    def _among(
        self,
        ranks: int,
        speeds: Sequence[float] | None,
        caps: Sequence[int | None],
        buckets: Sequence[int | None] | None,
        schedule: Schedule | None,
    ) -> Shares:
        return Shares(self.policy, ranks, self.batch, speeds, schedule, caps=caps, buckets=buckets)

    def of_batch(self, batch: int) -> Shares:
        """The same for another global batch, with what is known of the ranks."""
        given = {"caps": self.given_caps, "buckets": self.given_buckets}
        other = Shares(self.policy, self.ranks, batch, self._speeds, self._schedule, **given)
        other._caps.in_pieces, other._caps.may_shrink = self._caps.in_pieces, self._caps.may_shrink
        other._drawn = self._drawn
        if self._schedule is None:
            (other.learn_plan if self._only_planned else other.learn)(self.state())
            other.learn_caps(self.caps)
        return other

    @property
    def room(self) -> int | None:
        """Samples that the ranks are known to hold together; None where one may hold any number."""
        return self._caps.room

    def let_shrink(self) -> None:
        """The global batch follows what memory holds: the same on all ranks."""
        self._caps.may_shrink = True

    @property
    def shrinks(self) -> bool:
        return self._caps.may_shrink

    def shrink_soon(self, caps: Sequence[int | None], holds: int) -> None:
        """These hold so many samples, fewer than the global batch; until that is smaller they do not count."""
        self.given_caps, self._caps.short = list(caps), holds

    @property
    def short(self) -> int | None:
        """Samples that the ranks hold together, where the global batch has more and is to shrink."""
        return self._caps.short

    def let_come_in_pieces(self) -> None:
        """A rank makes more samples than fit its memory one piece after the other (es.Trainer): the same on all ranks."""
        self._caps.in_pieces = True

    @property
    def scheduled(self) -> bool:
        return self._schedule is not None

    @property
    def limited(self) -> bool:
        """Whether what memory holds counts."""
        return self._schedule is None

    def draw(self, batch: int, alone: bool = True, step: int | None = None, number: int | None = None) -> list[int]:
        """Shares of the next batch of `batch` samples. alone: a share may be a single sample.

        step: the optimizer step that the batch is expected in. All batches of one size in one step have the same
        shares, whichever loader they come from and when: a backward over several has one weight. number: of the batch, for a
        schedule; None: one more than that drawn before.
        """
        drawn = self._drawn
        self._drawn += 1
        if self._schedule is not None:
            return self._by_schedule(drawn if number is None else number, batch)
        shares = self._decide(batch, step) if self._plan is None else list(self._plan.shares(drawn, batch))
        return shares if alone else none_alone(shares, self._caps.now)

    def _by_schedule(self, number: int, batch: int) -> list[int]:
        assert self._schedule is not None
        return self._schedule.shares(number, batch)

    def take_news(self) -> str:
        """What became of a lost rank's part of a schedule, to be told; "" where that is nothing, or was."""
        return self._schedule.take_news() if self._schedule is not None else ""

    def _decide(self, batch: int, step: int | None) -> list[int]:
        if step is None:
            return self._ask(batch)
        key = (step, batch)
        if key not in self._decided:
            self._decided[key] = self._ask(batch)
            while len(self._decided) > _DECIDED:
                del self._decided[min(self._decided)]
        return list(self._decided[key])

    def _ask(self, batch: int) -> list[int]:
        """Of a batch that is larger than the global one, what memory holds was never asked: the script's caps count."""
        return list(self._balancer.shares(batch)) if self._caps.hold(batch) else self._alike(batch, self.given_caps)

    def split(self, batch: int) -> list[int]:
        """Shares by the speeds known now, for work outside training steps, of which caps say nothing; no rank idle where
        that can be."""
        larger = batch > self.batch and any(cap is not None for cap in self._caps.now)
        return at_least_one(self._alike(batch, None) if larger else self._balancer.shares(batch))

    @property
    def _handed_out(self) -> int:
        """What the balancer hands out of the global batch."""
        return self.batch

    def _alike(self, batch: int, caps: Sequence[int | None] | None) -> list[int]:
        """In proportion to those of the global batch."""
        tables = [[(1, 1.0 / share if share else 1e9)] for share in self._balancer.shares(self._handed_out)]
        return balance(tables, batch, caps)[0]

    def observe(
        self,
        timings: Sequence[tuple[int, float]],
        step_seconds: float,
        spared: Sequence[int] = (),
        exchange: Sequence[float] = (),
        passes: Sequence[float] = (),
    ) -> None:
        """spared: ranks without samples that left out backward. exchange: seconds of each rank's own part of the exchange.
        passes: as the busy seconds, with what was waited for others within the step; 0: nothing was."""
        if self._plan is not None:
            self._plan.observe(timings, step_seconds, passes)
            return
        own = exchange if any(exchange) else None
        lasted = passes if any(passes) else None
        self._balancer.observe(timings, spared, own, lasted)
        none = [0.0] * self.ranks
        rows = zip(timings, own or none, lasted or none)
        self._timings.append([remembered(pair, rank in spared, *more) for rank, (pair, *more) in enumerate(rows)])

    def take_micro_batches(self, told: Sequence[tuple[int, float]]) -> None:
        """What the ranks told in a step, before that is observed: of how many samples the pieces are that they run a larger share
        in (0: none), and as how many more samples than its own each counts. The same on all."""
        if self.scheduled or self._plan is not None or list(told) == self._micro_batches:
            return
        self._micro_batches = list(told)
        self._balancer.set_micro_batches([size for size, _ in told], [more for _, more in told])

    def take_memory(self, reports: Sequence[Report]) -> tuple[int, str] | None:
        """Takes what the ranks told of their memory in a step; the same on all. Where that is news: on how many ranks
        memory now holds fewer samples than would be best, and in words."""
        if self.scheduled or self._plan is not None or sum(samples for _, samples, _, _ in reports) != self.batch:
            return None
        return self._caps.take(self._balancer, reports)

    def left_out(self, timings: Sequence[tuple[int, float]]) -> tuple[int, str] | None:
        """After a step was observed. Where that is news: how many ranks have no samples since steps are shorter so, and in
        words."""
        if self.scheduled or self._plan is not None or self.policy not in _MEASURED:
            return None
        return self._left_out.take(self._balancer, timings, self._caps.now)

    def left_out_at_start(
        self, devices: Sequence[str], hosts: Sequence[str], exchange: Callable[[], Exchange | None] = lambda: None
    ) -> str:
        """Before the first step: which ranks have no samples by the profile, or that it is not known; "" where nothing is to be said.
        exchange: measures what that of a step's gradients takes; asked on all ranks alike."""
        follows = self.policy in ("proportional", "hybrid", "auto") and not self.scheduled and self._plan is None
        if not follows or self._timings:
            return ""
        if self._speeds is None:
            return unknown_before_start(devices)
        return before_start(self._balancer.shares(), self._speeds, devices, hosts, exchange)

    @property
    def caps(self) -> list[int]:
        """What memory was measured to hold, for a checkpoint; -1: unknown."""
        return list(self._caps.learned)

    def learn_caps(self, caps: Sequence[int]) -> None:
        """Of an earlier run of the same ranks."""
        if not self.scheduled and self._plan is None and len(caps) == self.ranks:
            learned = [int(cap) for cap in caps]
            if self._caps.may_shrink or self._caps.hold_with(learned):  # else what memory holds shows again
                self._caps.apply(self._balancer, learned)

    @property
    def last(self) -> list[tuple[float, ...]]:
        """Of the last observed step: (samples, busy seconds) of each rank; empty before the first."""
        return self._timings[-1] if self._timings else []

    def state(self) -> list[list[list[float]]]:
        """The last steps' timings, (samples, seconds) for each rank, 1 or 0 where it left out backward or not, the seconds of its
        own part of the exchange, and those with what it waited within the step; these may be missing. What the balancer knows,
        whatever it makes of it."""
        return [[list(pair) for pair in timings] for timings in self._timings]

    def learn(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Takes the timings of an earlier run of the same ranks; once where several loaders share them."""
        if self.state() == [[list(pair) for pair in timings] for timings in state]:
            return
        for timings in state:
            spared = [rank for rank, one in enumerate(timings) if len(one) > 2 and one[2]]
            told = [(int(one[0]), float(one[1])) for one in timings]
            self.observe(told, math.nan, spared, list(map(_own_part, timings)), list(map(_pass, timings)))

    def learn_plan(self, rows: Sequence[Sequence[Sequence[float]]]) -> None:
        """Before the first step: what a plan measured, which gives way to what a checkpoint has (go_on)."""
        self.learn(rows)
        self._planned = self.state()

    @property
    def _only_planned(self) -> bool:
        """No step is known but a plan's, or none at all."""
        return self.state() == self._planned

    @property
    def units(self) -> list[int]:
        """What `learned` counts in, for a checkpoint: samples of the global batch, and of a block."""
        return [self.batch, self.block]

    def learned(self) -> str:
        """All that the balancer has learned, its trials and what they found, for a checkpoint."""
        return base64.b64encode(zlib.compress(self._balancer.save(), 1)).decode("ascii")

    def go_on(
        self, state: Sequence[Sequence[Sequence[float]]], caps: Sequence[int], learned: str, units: Sequence[int]
    ) -> str:
        """From an earlier run of the same ranks: what its state(), caps, learned() and units were ("", and none: it kept none). As if
        this were that run, to the bit; where that cannot be, from the timings alone: then why, in words, else ""."""
        kept = bool(learned and units)  # an older version's checkpoint has less
        if not self._only_planned or self._plan is not None or not kept:  # this run knows more by now, or that one less
            self.learn(state)
            self.learn_caps(caps)
            return ""
        self.learn_caps(caps)
        try:
            self._check_units(*units)
            self._balancer.restore(_unpacked(learned))
        except (EvenstepError, ValueError, zlib.error) as error:
            self.learn(state)
            return str(error).splitlines()[0]
        self._timings.clear()  # of a plan
        self._timings.extend([tuple(pair) for pair in timings] for timings in state)
        self._micro_batches = []  # what the ranks tell is compared with what the balancer knows
        self._choice = self._balancer.choice[0]
        return ""

    def _check_units(self, batch: int, block: int) -> None:
        """Raises ValueError where what was learned counts in others: blocks are as many, whatever the batch."""
        if [batch, block] != self.units:
            raise ValueError(
                f"the balancer was saved with {_in_words(batch, block)}, and this one has {_in_words(*self.units)}"
            )

    def turned(self) -> tuple[int, str] | None:
        """(1, measured times) once the models' split was measured slower than equal shares, which run from now on; (2,
        times) the same of the profile's; (0, times) once the models' runs again; else None."""
        choice, seconds, other = self._balancer.choice
        if choice == self._choice:
            return None
        before, self._choice = self._choice, choice
        name = _FIXED.get(choice) or _FIXED[before]
        balanced, fixed = (other, seconds) if choice in _FIXED else (seconds, other)
        number = list(_FIXED).index(choice) + 1 if choice in _FIXED else 0
        return number, f"{1e3 * balanced:.4g} ms, {name} {1e3 * fixed:.4g} ms"

    def predict(self, shares: Sequence[int]) -> float:
        """Seconds of a step with these shares; NaN while unknown."""
        seconds = [self._balancer.predict(rank, share) for rank, share in enumerate(shares)]
        return max(seconds) if not any(math.isnan(s) for s in seconds) else math.nan
