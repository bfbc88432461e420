"""The most samples of each rank: what the script says, and what memory is measured to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenstep._core import Balancer, EvenstepError, memory_caps
from evenstep.memory import Report

_LOOSER = 8  # caps rise when they are so much (an eighth) larger: each change begins the balancer's trials anew
_LOOK_EVERY = 16  # steps between two looks at what the caps keep from running
_NAMED = 3  # ranks that an event names


class Caps:
    """Of one balancer, whose ranks all see the same reports and so have the same caps at the same step."""

    unit = "samples"  # of what it counts

    def __init__(self, given: Sequence[int | None], batch: int) -> None:
        self.in_pieces = False  # a rank may have more than fits at once: where no split fits, nothing is limited
        self._given = list(given)
        self._batch = batch
        self.learned = [-1] * len(given)  # -1: unknown; not cut to the batch
        self._reports: list[Report] = []
        self._bound: dict[int, int] = {}  # rank -> the cap by which it has fewer samples than would be best
        self._looks = 0
        self.may_shrink = False  # the global batch follows what memory holds (es.AdaptBatch)
        self.short: int | None = None  # then: so many samples are held, and the batch has more

    @property
    def now(self) -> list[int | None]:
        """As a balancer takes them: those that limit something."""
        return self._limiting(self.learned)

    def _both(self, learned: Sequence[int]) -> list[int | None]:
        return [_least(mine, cap) for mine, cap in zip(self._given, learned)]

    def _limiting(self, learned: Sequence[int]) -> list[int | None]:
        return [None if cap is None or cap >= self._batch else cap for cap in self._both(learned)]

    def hold_with(self, learned: Sequence[int]) -> bool:
        """Whether these, beside what the script and the agent say, hold the global batch."""
        return _hold(self._both(learned), self._batch)

    @property
    def room(self) -> int | None:
        """Samples that all ranks together are known to hold; None where some rank's room is not known."""
        known = [cap for cap in self._both(self.learned) if cap is not None]
        return None if self.in_pieces or len(known) < len(self.learned) else sum(known)

    def hold(self, batch: int) -> bool:
        """Whether they let the ranks have a batch of so many samples."""
        return _hold(self._both(self.learned), batch)

    def take(self, balancer: Balancer, reports: Sequence[Report]) -> tuple[int, str] | None:
        """What the ranks told of a step with a whole batch. Where that is news: how many ranks have less than would be
        best, and which."""
        self._looks += 1
        if self.short is not None:
            return None  # the next batches are smaller
        changed = list(reports) != self._reports
        if changed:
            self._reports = list(reports)
            self._follow(balancer)
        if (changed or self._looks % _LOOK_EVERY == 0) and (self._bound or any(cap is not None for cap in self.now)):
            return self._news(balancer)
        return None

    def _follow(self, balancer: Balancer) -> None:
        if all(cap < 0 and room is None for _, _, cap, room in self._reports):
            return
        wanted = [samples for _, samples, _, _ in self._reports]
        learned = memory_caps(self._reports, self._batch, wanted)
        if all(cap < 0 or cap >= self._batch for cap in learned) and not any(cap is not None for cap in self.now):
            self.learned = learned  # nothing is limited: the usual case
            return
        wanted, _ = balancer.without_caps()
        learned = memory_caps(self._reports, self._batch, wanted)
        if not _hold(self._both(learned), self._batch):
            # this step's shares did fit in the memory, whatever else takes of it now; not in a limit of the script's
            relaxed = [
                (pool, had, cap, None if room is None else max(0, room)) for pool, had, cap, room in self._reports
            ]
            learned = memory_caps(relaxed, self._batch, wanted)
        learned = [new if new >= 0 else old for new, old in zip(learned, self.learned)]
        if self.in_pieces and not _hold(self._both(learned), self._batch):
            learned = [-1] * len(learned)
        if self._worth(learned) or (self.in_pieces and max(learned) < 0 <= max(self.learned)):
            self.apply(balancer, learned)

    def _worth(self, learned: Sequence[int]) -> bool:
        """Less room than was thought counts at once, more where it is clearly more."""
        for new, old in zip(learned, self.learned):
            if old < 0 <= new or 0 <= new < old or (old >= 0 and new >= old + max(1, old // _LOOSER)):
                return True
        return False

    def apply(self, balancer: Balancer, learned: Sequence[int]) -> None:
        """Raises EvenstepError where the caps cannot hold the global batch, and it may not shrink."""
        both = self._limiting(learned)
        if both != self.now:
            try:
                balancer.set_caps(both)
            except EvenstepError as error:
                if self.may_shrink:
                    self.short, self.learned = sum(cap or 0 for cap in both), list(learned)
                    return
                raise self.too_little(both, str(error)) from None
        self.learned = list(learned)

    def too_little(self, caps: Sequence[int | None], why: str) -> EvenstepError:
        """Of caps that do not hold the global batch. why: by how much, and the way out."""
        return EvenstepError(f"memory does not hold the global batch ({in_words(caps)} {self.unit}): {why}")

    def _news(self, balancer: Balancer) -> tuple[int, str] | None:
        wanted, _ = balancer.without_caps()
        bound = {}
        for rank, (cap, wants) in enumerate(zip(self.now, wanted)):
            if cap is not None and (wants > cap or (wants == cap and rank in self._bound)):
                bound[rank] = cap
        if bound == self._bound:
            return None
        self._bound = bound
        if not bound:
            return 0, "memory holds the best share of every rank again"
        named = [f"{cap} of {wanted[rank]} on rank {rank}" for rank, cap in list(bound.items())[:_NAMED]]
        named[0] = named[0].replace(" on", f" {self.unit} on")
        more = f" and {len(bound) - _NAMED} more" if len(bound) > _NAMED else ""
        return len(bound), f"memory holds {', '.join(named)}{more}"


def _least(given: int | None, learned: int) -> int | None:
    if learned < 0 or given is None:
        return given if learned < 0 else learned
    return min(given, learned)


def in_words(caps: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank} {cap}" for rank, cap in enumerate(caps) if cap is not None)


def whole_blocks(caps: Sequence[int | None], block: int, batch: int) -> list[int | None]:
    """What of these a rank can have whose shares are whole blocks of so many samples."""
    return [cap if cap is None or cap >= batch else cap - cap % block for cap in caps]


def _hold(caps: Sequence[int | None], batch: int) -> bool:
    known = [cap for cap in caps if cap is not None]
    return len(known) < len(caps) or sum(known) >= batch


def among_others(
    caps: Sequence[int | None], said: Sequence[int | None], batch: int, block: int = 1
) -> tuple[list[int | None], str]:
    """The most samples of each rank where others train than before, and in words why they are not `caps`, in which what ran
    out of memory counts ("": they are). said: by the scripts alone. As where an attempt begins: what is left does not hold the
    batch, so nothing but what the scripts say is limited. block: shares are whole multiples of so many."""
    caps, said = whole_blocks(caps, block, batch), whole_blocks(said, block, batch)
    if _hold(caps, batch) or caps == said:
        return caps, ""
    return said, (
        f"what ranks had room for after they ran out of memory does not hold the global batch of {batch} on those that train now "
        f"({in_words(caps)}): they have shares as before\n  fix: more ranks, a smaller batch_size, or es.Trainer, which makes such steps in "
        "pieces"
    )


def after_shortage(
    given: Sequence[int | None],
    told: Sequence[tuple[int, int] | None],
    begins: Callable[[], Sequence[int]],
    batch: int,
    shrinks: bool = False,
    block: int = 1,
) -> tuple[list[int | None], str]:
    """The most samples of each rank where some ran out of memory in attempts before, and in words why that cannot be
    ("": it can).

    told: of each rank, (samples, of how many in a step), or (0, n): the n-th part of what it would begin with; None: it
    never ran out; of an adapted batch a step may have been larger than `batch`. begins: what all would begin with. Where what is left does not hold the batch, nothing is limited, unless the
    batch then `shrinks`: it fails, or fits, as it did. block: shares are whole multiples of so many.
    """
    if not any(told):
        return list(given), ""
    first = begins() if any(one is not None and one[0] == 0 for one in told) else []
    caps = list(given)
    for rank, one in enumerate(told):
        if one is not None:
            of = max(batch, one[1]) if shrinks else batch
            most = one[0] * of // one[1] if one[0] > 0 else first[rank] // one[1]
            caps[rank] = _least(given[rank], max(block, most))  # a block runs whole, or not at all
    caps = whole_blocks(caps, block, batch)
    if shrinks or _hold(caps, batch):
        return caps, ""
    return list(given), (
        f"all ranks ran out of memory before, and less of each does not hold the global batch of {batch} ({in_words(caps)}): they begin as "
        "before\n  fix: a smaller batch_size, accumulation (es.no_sync), es.AdaptBatch, or es.Trainer, which makes such steps in pieces"
    )


def cap_of_joining(given: int | None, told: tuple[int, int], batch: int, ranks: int, block: int = 1) -> int:
    """after_shortage of a process that joins, which would have begun with one of so many equal parts."""
    most = told[0] * batch // told[1] if told[0] > 0 else batch // (ranks * told[1])
    return min(max(block, most), batch if given is None else given)
