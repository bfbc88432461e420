"""Samples that cannot be read, where they are to be left out (es.prepare(skip_unreadable=True)): each rank leaves out its own,
the ranks tell one another how many samples they have, and the average is over those."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.device_memory import is_out_of_memory

if TYPE_CHECKING:
    from evenstep.feeds import BatchPlan
    from evenstep.session import Session

_COUNT = struct.Struct("<q")
_TRIED = 64  # further indices, where none of a rank's own can be read


class Fetched(NamedTuple):
    """A batch, and what is not in it. A tuple: workers send it, and pinning goes through it."""

    batch: Any
    missing: list[tuple[int, str]]  # (index, -1 where it is no number; which one and why)


class _Missing(NamedTuple):
    number: int
    words: str


class ReadableSamples:
    """A map-style data set in whose batches the samples that cannot be read are marked. Workers have copies of it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._last: list[Any] = []  # that could be read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            try:
                return self._remembered(list(many(indices)))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
        return self.whole([self.read(index) for index in indices])

    def whole(self, found: list[Any]) -> list[Any]:
        """What was read of one batch, with a sample to collate where there is none."""
        if all(isinstance(one, _Missing) for one in found):
            found.append(self._any())
        return self._remembered(found)

    def read(self, index: Any) -> Any:
        """One sample; where it cannot be read, a mark in its place."""
        try:
            return self._dataset[index]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            number = index if isinstance(index, int) and not isinstance(index, bool) else -1
            return _Missing(number, f"sample {index!r} cannot be read: {type(error).__name__}: {error}")

    def _any(self) -> Any:
        """Some sample, which counts nothing: a rank without any still goes through the step."""
        if self._last:
            return _Spare(self._last[0])
        words = "it has none"
        for index in range(min(len(self._dataset), _TRIED)):
            sample = self.read(index)
            if not isinstance(sample, _Missing):
                return _Spare(sample)
            words = sample.words
        raise EvenstepError(
            f"none of this rank's samples of a batch can be read, nor any of the first {_TRIED} of the data set: {words}\n"
            "  fix: mend the data set; skip_unreadable is for single damaged samples"
        )

    def _remembered(self, found: list[Any]) -> list[Any]:
        sample = next((one for one in found if not isinstance(one, (_Missing, _Spare))), None)
        if sample is not None:
            self._last = [sample]
        return found


class _Spare(NamedTuple):
    sample: Any


class CollateReadable:
    """A collate function for batches of ReadableSamples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, found: list[Any]) -> Fetched:
        missing = [(one.number, one.words) for one in found if isinstance(one, _Missing)]
        samples = [one for one in found if not isinstance(one, (_Missing, _Spare))]
        spare = [one.sample for one in found if isinstance(one, _Spare)]
        return Fetched(self.collate(samples or spare), missing)


class Unreadable:
    """Of one loader on one rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False
        self._of_step: tuple[int, set[tuple[int, int, str]]] = (-1, set())  # told in it: epoch, batch, words

    def settled(self, pairs: Iterator[tuple[BatchPlan, Fetched]]) -> Iterator[tuple[BatchPlan, Any]]:
        """The batches, with plans of what is in them. Collective at each."""
        for plan, fetched in pairs:
            missing = fetched.missing if plan.samples else []
            for index, words in missing:
                self._tell(plan, index, words)
            counts = self._counts(plan.samples - len(missing))
            if counts is not None and counts != plan.shares:
                plan = self._without(plan, counts)
            yield plan, fetched.batch

    def _counts(self, mine: int) -> list[int] | None:
        """Of each rank. None where one was lost: the pass that the batch is of counts nothing, and each makes it by itself."""
        recovery = self._session.recovery
        if recovery is not None and recovery.fetches_void():
            return None
        try:
            with self._session.steps.blocking():
                return [int(_COUNT.unpack(one)[0]) for one in self._session.group.exchange(_COUNT.pack(mine))]
        except EvenstepError as error:
            if recovery is None or not recovery.mends(error):
                raise
            return None

    def _without(self, plan: BatchPlan, counts: list[int]) -> BatchPlan:
        total = sum(counts)
        if total == 0:
            raise EvenstepError(
                f"none of the {plan.total} samples of batch {plan.batch} of epoch {plan.epoch} can be read\n"
                "  fix: mend the data set; skip_unreadable is for single damaged samples (the history names them)"
            )
        return replace(plan, total=total, shares=counts, samples=counts[self._session.rank])

    def _tell(self, plan: BatchPlan, index: int, words: str) -> None:
        """Once, also of a batch that comes again since a rank was lost."""
        session = self._session
        step, told = self._of_step if self._of_step[0] == session.step else (session.step, set())
        this = (plan.epoch, plan.batch, words)
        if this in told:
            return
        self._of_step = step, {*told, this}
        session.telemetry.event(_core.EVENT_SKIPPED, session.step, index, words)
        if not self._told:
            self._told = True
            sys.stderr.write(
                f"evenstep: warning: rank {session.rank}: {words}; it is left out, as was asked for. Further ones of this rank "
                "are in the history alone (event `skipped`)\n"
            )
