"""Batches that were fetched and that no backward has had yet. A backward has one weight, so where it may be over several
of them, all ranks' parts of these must be the same."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep import forward_end, sites
from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.data_course import DataCourse
    from evenstep.loader import BatchPlan

_MOST = 64  # parts of a batch that are looked at
_ENOUGH = 2  # a script has the last one anyway, in the loop's variables
_KNOWN = 16  # batches of which it is known when they came
_AGAIN = (
    "a backward without a new batch, while the script keeps those of a loop that has ended (itertools.cycle(loader), a list of batches): "
    "each rank counts alike, but their samples were shared out unequally ({0} of {1}), so where it is over these, it is not what one "
    "device trains\n  fix: iterate over the prepared loader in every epoch (for epoch in …: for batch in loader: …)"
)


def _references(batch: Any) -> list[weakref.ref[Any]]:
    """To the batch's tensors, and to objects that hold some."""
    found: list[weakref.ref[Any]] = []
    waiting = [batch]
    for _ in range(_MOST):
        if not waiting:
            break
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        else:
            with contextlib.suppress(TypeError):  # numbers and words
                found.append(weakref.ref(one))
            fields = getattr(one, "__dict__", {}).values()
            waiting.extend(field for field in fields if isinstance(field, (torch.Tensor, Mapping, list, tuple)))
    return found


@dataclass(frozen=True, eq=False)
class _Batch:
    plan: BatchPlan
    references: list[weakref.ref[Any]]

    @property
    def gone(self) -> bool:
        """Whether the script holds nothing of it; False where that cannot be seen."""
        return bool(self.references) and all(reference() is None for reference in self.references)

    @property
    def held(self) -> bool:
        """Whether the script holds some of it; False where that cannot be seen."""
        return bool(self.references) and not self.gone


class Pace:
    """How many batches come before each backward, over a whole script: one that makes its backwards later than it fetches holds a
    batch that cannot be told from those that come again after a loss."""

    def __init__(self) -> None:
        self.ahead = False  # it has begun an iteration with more batches than it went on with
        self.between = False  # it has fetched a batch between forward and backward
        self._unsure = False  # whether it will, once an iteration has begun with several
        self._several = False  # for each backward: the one has as many as the next

    @property
    def may_be_ahead(self) -> bool:
        return self.ahead or self.between or self._unsure

    def is_behind(self, waiting: int, first: int) -> bool:
        """Whether the next backward, before which so many new batches of one loader came (before the first one of the iteration
        `first`), is over one that came before these, or may be."""
        return self.ahead or (not self._several and 0 < waiting < first)

    def backward(self, number: int, first: int, latest: int, suspected: bool) -> None:
        """An iteration's backward of this number with new batches of one loader: so many at the first, at this one. suspected:
        the script holds what may be an older one's."""
        if self._several:
            return
        if number == 1:
            self._unsure = first > 1
            return
        self.ahead = self.ahead or suspected or (number == 2 and latest < first)
        if number == 2:
            self._several = not self.ahead and first > 1
            self._unsure = False


class FetchedBatches:
    """Those of iterations under way wait for the next backward; those of ended ones may be trained on again and again,
    until another batch comes."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._waiting: list[_Batch] = []
        self._ended: list[_Batch] = []
        self._together: list[_Batch] = []  # that waited for the last backward which had new ones
        self._last: _Batch | None = None  # to come, before those that are set aside
        self._known: deque[tuple[forward_end.Moment, _Batch | None]] = deque(
            maxlen=_KNOWN
        )  # as they came; None: an end
        self._later: list[_Batch] = []  # that wait, and came when the forward of the backward to come had ended
        self._newest: _Batch | None = None  # of these
        self._trained: _Batch | None = (
            None  # the last of an ended iteration: its forward came before the end, backward after it
        )
        self._alike = True  # as far as checked: what is held only becomes less
        # Of a script that seems to fetch ahead of backward:
        self._ahead: list[_Batch] = []  # fetched before the last backward, which had an older one
        self._had: _Batch | None = None  # that older one
        self._at_once = 0  # batches of its loader that came before the first such backward
        self._counts = (
            0,
            0,
            0,
        )  # of this iteration: backwards with new batches; of one loader at the first, at the last
        self._first: list[_Batch] = []  # of it, trained on, with unequal parts: two tell a script that keeps all
        self._told = False
        self._over: list[_Batch] = []  # the same of an iteration that has ended, until another batch comes

    def add(self, plan: BatchPlan, batch: Any) -> None:
        self._take_later()
        self._ended = []  # they were only looked at
        self._over = []
        self._last = _Batch(plan, _references(batch))
        self._known.append((forward_end.now(), self._last))
        self._waiting.append(self._last)
        self._alike = len(self._waiting) == 1

    def set_aside(self, losses: Any) -> BatchPlan | None:
        """Before a backward from these: batches that came when its forward had ended wait for a later one, and what is known of
        the others is of them alone. The last of the others; None where there are no such batches, or that is not known."""
        self._take_later()
        place = self._of_forward(losses)
        last = self._known[place][1] if place is not None else None
        if place is None or last is None or place == len(self._known) - 1:
            return None
        later = [one for _, one in list(self._known)[place + 1 :]]
        self._later = [one for one in self._waiting if one in later]
        self._waiting = [one for one in self._waiting if one not in later]
        self._newest, self._last = self._last, last
        self._alike = len(self._waiting) < 2
        self.pace.between = True
        return last.plan

    def _of_forward(self, losses: Any) -> int | None:
        """What of all that is known came last before the losses were made; None where it was not one for all, or not known."""
        numbers, thread = forward_end.forward_numbers(losses), forward_end.now().thread
        if not numbers or not self._known:
            return None
        newest = self._known[-1][0]
        if newest.thread == thread and min(numbers) >= newest.number:  # as most are
            return len(self._known) - 1
        if any(came.thread != thread for came, _ in self._known):
            return None
        places = {sum(came.number <= each for came, _ in self._known) - 1 for each in numbers}
        return places.pop() if len(places) == 1 and min(places) >= 0 else None

    def _take_later(self) -> None:
        """The backward is over, or did not come to its end: those that were set aside wait for the next one."""
        if self._newest is not None:
            self._waiting += self._later
            self._last, self._newest, self._later = self._newest, None, []
            self._alike = len(self._waiting) < 2

    def has(self, plan: BatchPlan) -> bool:
        """As its iteration ends: whether the batch may still come into a backward."""
        if any(one.plan is plan for one in (*self._waiting, *self._ended)):
            return True
        last, (backwards, first, latest) = self._last, self._counts
        if last is None or last.plan is not plan:
            return False
        if backwards > 1:
            return latest < first  # more at first than later, so it fetches ahead, if only copies are held
        return last in self._ahead and last.held

    def let_go(self, plan: BatchPlan) -> bool:
        """Whether this one outlived its iteration and the script holds nothing of it any more."""
        last, (backwards, _, _) = self._last, self._counts
        if last is None or last.plan is not plan or not last.gone:
            return False
        return last is self._trained or (not backwards and last in self._ahead)

    @property
    def may_be_ahead(self) -> bool:
        """At a step: whether the script may have a batch that is of a later one."""
        return bool(self._waiting) or self.pace.may_be_ahead

    @property
    def several(self) -> bool:
        """Whether the next backward may be over more than one."""
        return len(self._waiting) > 1 or self.pace.ahead

    @property
    def unlike(self) -> bool:
        """Whether this rank has samples of one batch that waits for backward, and a dummy one of another."""
        return len({one.plan.samples == 0 for one in self._waiting if not one.gone}) > 1

    @property
    def all_idle(self) -> bool:
        """Whether this rank has dummy samples alone of every batch that the next backward may be over; False where that cannot be
        told."""
        if self.pace.is_behind(_most_of_one_loader(self._waiting), self._counts[1]):
            return False
        possible = self._waiting or self._ended or self._together
        copies = all(one.gone for one in possible)
        return all(one.plan.samples == 0 for one in possible if copies or not one.gone)

    def end(self, loader: DataCourse) -> None:
        """An iteration over this loader has ended."""
        ended = [one for one in self._waiting if one.plan.loader is loader]
        self._ended += ended
        self._waiting = [one for one in self._waiting if one.plan.loader is not loader]
        self._counts = (0, 0, 0)
        self._first, self._over = [], self._first or self._over  # of a pair, the second one ends with no batch between
        self._known.append((forward_end.now(), None))

    def used(self) -> None:
        """A backward has had them; or the oldest of those that the script holds, where it fetches ahead."""
        self._count_used()
        self._trained = self._last if self._newest is self._last else None
        self._take_later()

    def _count_used(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return  # once more over the same, or over another of those that came together
        self._together = waiting
        if len(self._first) < _ENOUGH:
            self._first += [one for one in waiting if _unequal(one.plan)]
        backwards, first, _ = self._counts
        latest = _most_of_one_loader(waiting)
        self._counts = (backwards + 1, first or latest, latest)
        self.pace.backward(*self._counts, bool(self._suspects(waiting)))
        held = [one for one in waiting if one.held]
        at_once = _most_of_one_loader(held)
        if at_once < 2 and not self._suspects(waiting):
            self._ahead, self._had = [], None
            return
        if not self._ahead or at_once > 1:
            self._at_once = at_once
        had, *self._ahead = [*self._suspects(waiting), *held]
        self._had = had

    def _suspects(self, waiting: list[_Batch]) -> list[_Batch]:
        """Which of those fetched ahead the next backward may be over. None where the script holds also what it has
        trained on, or fetches as many before each backward: then what it holds says nothing."""
        if self._had is None or self._had.held or _most_of_one_loader(waiting) >= self._at_once:
            return []
        return [one for one in self._ahead if one.held]

    def check_one_weight(self, tells: bool = False) -> None:
        """Raises where the next backward may be over batches of which a rank has different parts. tells: no batch is at work, and this
        rank is to say so where the script holds those of an iteration that has ended."""
        if tells and len(held := [one for one in self._over if one.held]) >= _ENOUGH:
            self._over = []
            if not self._told:
                self._told = True
                sites.warn(_AGAIN.format(" + ".join(map(str, held[0].plan.shares)), held[0].plan.total))
        last = self._last
        if last is None:
            return
        for one in self._suspects(self._waiting):
            if not _same_parts(one.plan, last.plan):
                raise _no_one_weight(one.plan, last.plan, False)
        if self._alike:
            return
        # One that is gone was skipped; where even the last one is, the script works on copies, and nothing is known.
        copies = last.gone
        for ended, batches in ((True, self._ended), (False, self._waiting)):
            for one in batches:
                if (copies or not one.gone) and not _same_parts(one.plan, last.plan):
                    raise _no_one_weight(one.plan, last.plan, ended)
        self._alike = True


def _most_of_one_loader(batches: list[_Batch]) -> int:
    counts = Counter(id(one.plan.loader) for one in batches)
    return max(counts.values(), default=0)


def _same_parts(one: BatchPlan, other: BatchPlan) -> bool:
    """Whether every rank has the same part of both."""
    return all(a * other.total == b * one.total for a, b in zip(one.shares, other.shares))


def _unequal(one: BatchPlan) -> bool:
    """Whether it matters by how many samples a rank counts."""
    return any(share * len(one.shares) != one.total for share in one.shares)


def _no_one_weight(one: BatchPlan, last: BatchPlan, ended: bool) -> EvenstepError:
    parts = f"of which the ranks have different parts, {one.shares} and {last.shares} samples"
    options = "or give the loaders one batch_size and drop_last=True; or run with --policy equal"
    if ended:
        return EvenstepError(
            f"a backward on batches that were kept from an iteration that has ended, {parts}, so that it is not known "
            "which weight it has\n  fix: iterate over the prepared loader in every epoch, and call backward for each "
            f"batch before the next is fetched; {options}"
        )
    return EvenstepError(
        f"two batches came before one backward, {parts}, so its gradient has no one weight\n"
        f"  fix: call backward for each batch before the next is fetched; {options}"
    )


def which_counts(rank: int) -> EvenstepError:
    return EvenstepError(
        f"rank {rank} has samples of one of the batches that wait for backward and none of another, so a BatchNorm cannot tell "
        "whether those in forward count\n  fix: call es.set_weight before forward; or give the loaders one batch_size; or call "
        "backward for each batch before the next is fetched"
    )
