"""Batches that were fetched and that no backward has had yet. A backward has one weight, so where it may be over several
of them, all ranks' parts of these must be the same."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.loader import BatchPlan, EvenLoader

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


@dataclass(frozen=True)
class _Batch:
    plan: BatchPlan
    references: list[weakref.ref[Any]]

    @property
    def gone(self) -> bool:
        """Whether the script holds nothing of it; False where that cannot be seen."""
        return bool(self.references) and all(reference() is None for reference in self.references)


class FetchedBatches:
    """Those of iterations under way wait for the next backward; those of ended ones may be trained on again and again,
    until another batch comes."""

    def __init__(self) -> None:
        self._waiting: list[_Batch] = []
        self._ended: list[_Batch] = []
        self._last: _Batch | None = None  # to come
        self._alike = True  # as far as checked: what is held only becomes less
        self._ahead: _Batch | None = None  # had by a backward, or fetched ahead of it: the next one may be over this

    def add(self, plan: BatchPlan, batch: Any) -> None:
        self._ended = []  # they were only looked at
        self._last = _Batch(plan, _references(batch))
        self._waiting.append(self._last)
        self._alike = len(self._waiting) == 1

    def has(self, plan: BatchPlan) -> bool:
        return any(one.plan is plan for one in (*self._waiting, *self._ended))

    def end(self, loader: EvenLoader) -> None:
        """An iteration over this loader has ended."""
        ended = [one for one in self._waiting if one.plan.loader is loader]
        self._ended += ended
        self._waiting = [one for one in self._waiting if one.plan.loader is not loader]

    def used(self) -> None:
        """A backward has had them; or all but the last, where the script fetches one ahead."""
        several = len({id(one.plan.loader) for one in self._waiting}) < len(self._waiting)
        held = self._ahead is not None and not self._ahead.gone
        self._ahead = self._waiting[-1] if self._waiting and (several or held) else None
        self._waiting = []

    def check_one_weight(self) -> None:
        """Raises where the next backward may be over batches of which a rank has different parts."""
        last = self._last
        if last is None:
            return
        ahead = self._ahead
        if ahead is not None and ahead is not last and not ahead.gone and not _same_parts(ahead.plan, last.plan):
            raise _no_one_weight(ahead.plan, last.plan, False)
        if self._alike:
            return
        # One that is gone was skipped; where even the last one is, the script works on copies, and nothing is known.
        copies = last.gone
        for ended, batches in ((True, self._ended), (False, self._waiting)):
            for one in batches:
                if (copies or not one.gone) and not _same_parts(one.plan, last.plan):
                    raise _no_one_weight(one.plan, last.plan, ended)
        self._alike = True


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
