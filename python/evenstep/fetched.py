"""Batches that were fetched and that no backward has had yet. A backward has one weight, so where it may be over several
of them, all ranks' parts of these must be the same."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.data_course import DataCourse
    from evenstep.loader import BatchPlan

_MOST = 64  # parts of a batch that are looked at


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
        self._unsure = False  # whether it will, once an iteration has begun with several
        self._several = False  # for each backward: the one has as many as the next

    @property
    def may_be_ahead(self) -> bool:
        return self.ahead or self._unsure

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
        self._newest: _Batch | None = None  # of these
        self._of_graph: _Batch | None = None  # what the backward to come may be over, held by its graph or by more
        self._by_graph = False  # such a one was let go in its backward
        self._last: _Batch | None = None  # to come
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

    def add(self, plan: BatchPlan, batch: Any) -> None:
        self._ended = []  # they were only looked at
        self._last = _Batch(plan, _references(batch))
        self._waiting.append(self._last)
        self._alike = len(self._waiting) == 1

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
        return last is not None and last.plan is plan and not backwards and last in self._ahead and last.gone

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
        if self._newest is not None and self._newest.gone:
            self._newest = None

    def used(self) -> None:
        """A backward has had them; or the oldest of those that the script holds, where it fetches ahead."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return  # once more over the same, or over another of those that came together
        self._together, self._newest = waiting, waiting[-1]
        self._by_graph = self._by_graph or (self._of_graph is not None and self._of_graph.gone)
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

    def _older(self, last: _Batch) -> _Batch | None:
        """Which batch the next backward is over where the script fetches the next one between forward and backward: the graph
        alone holds the older one then, and until that backward. Where the script works on copies, nothing is held, and it is
        taken for one that does."""
        waiting = [one for one in self._waiting if one.plan.loader is last.plan.loader]
        older = waiting[-2] if len(waiting) > 1 else self._newest
        self._of_graph = older if older is not None and older.held else None
        if older is None or older is last or len(waiting) > 1 or older.plan.loader is not last.plan.loader:
            return None  # those that wait together are compared below
        if not self.pace.is_behind(_most_of_one_loader(self._waiting), self._counts[1]):
            return None
        return older if (older.held and self._by_graph) or (older.gone and last.gone) else None

    def check_one_weight(self) -> None:
        """Raises where the next backward may be over batches of which a rank has different parts."""
        last = self._last
        if last is None:
            return
        older = self._older(last)
        for one in (*self._suspects(self._waiting), *([] if older is None else [older])):
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
