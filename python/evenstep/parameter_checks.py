"""Silent corruption: what all ranks must have alike, compared every so many steps by sums of the parameters' bytes, which
travel in the vote. Frozen parameters, too, which nobody trains and nobody would mend. Not compared is what ranks may have apart: parameters while
ranks train on their own, then those that are frozen, and buffers.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.group import gather_objects

if TYPE_CHECKING:
    from evenstep.steps import Steps
    from evenstep.vote import Ballot

POLICIES = ("report", "stop")
_MOST_NAMES = 2
_MOST_RARE = 64  # times `every`, for ranks that round differently
_ROUNDING = 256  # units in the last place; of 16-bit types fewer, whose units are large: as in evenstep.agreement
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of so many bytes
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64 bits of each one's bytes, which any changed bit changes. Of devices of one kind the same for the same bytes."""
    found = [0] * len(tensors)
    on_host: list[tuple[int, torch.Tensor]] = []
    elsewhere: list[tuple[int, torch.Tensor]] = []
    for index, tensor in enumerate(tensors):
        value = tensor.detach()
        if not (value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))):
            value = value.contiguous()
        if value.numel():
            (on_host if value.is_cpu else elsewhere).append((index, value))
    places = [(value.data_ptr(), value.numel() * value.element_size()) for _, value in on_host]
    for (index, _), one in zip(on_host, _core.content_sums(places)):
        found[index] = one
    if elsewhere:
        of_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, value in elsewhere:
            of_device.setdefault(value.device, []).append((index, _sum_on_device(value)))
        for sums in of_device.values():  # one wait for each
            for (index, _), one in zip(sums, torch.stack([one for _, one in sums]).tolist()):
                found[index] = int(one) & _MASK
    return found


def _sum_on_device(value: torch.Tensor) -> torch.Tensor:
    """Of its words, as whole numbers: exact in any order."""
    flat = value.as_strided((value.numel(),), (1,))
    size = flat.numel() * flat.element_size()
    if flat.storage_offset() * flat.element_size() % 4 != 0:
        flat = flat.clone()  # part of another tensor, between two of its words; ranks must add up the same words
    return flat.view(torch.int32 if size % 4 == 0 else torch.uint8).sum(dtype=torch.int64)


def _together(sums: Sequence[int]) -> int:
    total = 0
    for one in sums:
        total = ((total ^ one) * _FACTOR) & _MASK
    return total


@dataclass(frozen=True)
class Difference:
    """Of one parameter, between this rank and the one that it is measured by."""

    values: int  # that are others
    largest: float
    rounding: bool  # no value is further away than rounding explains


@torch.no_grad()
def difference(mine: torch.Tensor, theirs: torch.Tensor) -> Difference:
    bits = _BITS.get(mine.element_size(), torch.int64)
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (mine, theirs))
    same = (
        one.reshape(-1).view(bits) == other.reshape(-1).view(bits)
        if not mine.is_complex()
        else (one == other).reshape(-1)
    )
    count = int((~same).sum())
    if count == 0:
        return Difference(0, 0.0, True)
    a, b = one.double(), other.double()
    apart = (a - b).abs()
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    scale = torch.maximum(b.abs(), b.square().mean().sqrt())
    near = bool((apart <= min(_ROUNDING * eps, max(4 * eps, 1e-3)) * scale).all())  # false where one is NaN
    return Difference(count, float(apart.max()), near)


class ParameterChecks:
    """Of the steps of one session."""

    def __init__(self, steps: Steps, every: int, policy: str) -> None:
        self.every, self.policy = every, policy  # every: 0: off
        self.one_kind = True  # whether the ranks' devices are: else they round differently, and rightly so
        self.frozen_too = True  # whether frozen parameters, too, are on devices of one kind: sums are of a kind's own
        self._steps = steps
        self._last = -1  # the step in which it was done last
        self._rare = 1
        self._asked_from = 0  # the step in which parameters themselves were looked at last: sums of before say no more
        self._since = -1  # the step at which they were first seen to differ; -1: they do not

    def begin_anew(self) -> None:
        """Among other ranks, of which some know nothing of it."""
        self._last = self._since = -1
        self._rare, self._asked_from = 1, 0

    def sum_when_due(self) -> int | None:
        """Before the vote: this rank's sum where this step is one that compares; the same steps on all ranks."""
        step = self._steps.step
        if self.every <= 0 or step % (self.every * self._rare) != 0 or step == self._last:
            return None
        self._last = step
        return self._sum()

    def check_when_due(self) -> None:
        """Where votes are as rare as synchronisations, after one of these. Collective."""
        often = self.every * self._rare
        if often > 0 and self._steps.step // often > self._last // often:
            self._last = self._steps.step
            self.check_now()

    def heard(self, ballots: Sequence[Ballot]) -> None:
        """After a vote in which sums travelled. Collective where they differ."""
        goes_back = self._steps.step < self._asked_from  # to an older checkpoint, in this process
        if goes_back or ballots[0].step >= self._asked_from:
            self._compare([ballot.parameters for ballot in ballots])

    def check_by(self, call: Callable[[Callable[[], None]], None]) -> None:
        """`check_now`, by a call of all where there is something to compare: one in which nobody meets is none."""
        if self.every > 0 and self._are_alike:
            call(self.check_now)

    def check_now(self) -> None:
        """Before a checkpoint is written. Collective."""
        mine = self._sum() if self.every > 0 else None
        if mine is not None:
            with self._steps.blocking():
                told = self._steps.group.exchange(mine.to_bytes(8, "little"))
            self._asked_from = self._steps.step
            self._compare([int.from_bytes(one, "little") for one in told])

    def _compared(self) -> list[tuple[str, torch.Tensor]]:
        """What all ranks must have alike now: the same parameters on all of them, in the same order."""
        syncs = self._steps.syncs
        trained = [
            (sync.name_of(index), parameter)
            for sync in syncs
            if sync.local is None or sync.local.whole
            for index, parameter in enumerate(sync.parameters)
        ]
        if not self.frozen_too:
            return trained
        # where ranks train on their own, a frozen average of a rank's parameters is its own, too, and nobody makes it one again
        frozen = {id(p): (name, p) for sync in syncs if sync.local is None for name, p in sync.frozen}
        return trained + list(frozen.values())

    @property
    def _are_alike(self) -> bool:
        """Whether there are others, whose devices round as this rank's does."""
        return self.one_kind and self._steps.group.ranks > 1

    def _sum(self) -> int | None:
        if not self._are_alike:
            return None
        return _together(sums_of([tensor for _, tensor in self._compared()]))

    def _compare(self, sums: Sequence[int]) -> None:
        if len(set(sums)) == 1:
            if self._since >= 0:
                self._tell(0, f"the ranks have the same parameters again, as before step {self._since}")
                self._since = -1
        elif self._since < 0 or self._rare > 1:
            self._find()

    # -- they differ --

    def _find(self) -> None:
        """Names parameters and ranks. Collective."""
        steps, compared = self._steps, self._compared()
        with steps.blocking():
            told = gather_objects(steps.group, sums_of([tensor for _, tensor in compared]))
            self._asked_from = steps.step
            numbers = [index for index in range(len(compared)) if len({theirs[index] for theirs in told}) > 1]
            if not numbers:
                self._tell(0, "the ranks had different parameters some steps before, and have the same again")
                return
            usual = Counter(tuple(theirs[index] for index in numbers) for theirs in told).most_common(1)[0]
            right = next(r for r, theirs in enumerate(told) if tuple(theirs[i] for i in numbers) == usual[0])
            found = [self._measure(compared[index][1], right) for index in numbers]
        odd = [r for r, theirs in enumerate(told) if tuple(theirs[i] for i in numbers) != usual[0]]
        known = usual[1] * 2 > len(told)
        rounding = all(one.rounding for theirs in found for one in theirs)
        words = self._words([compared[index][0] for index in numbers], found, odd if known else [right, *odd], known)
        if rounding:
            if self._rare == 1:
                self._tell(-1, f"{words}; no more than rounding makes, compared more rarely from now on")
            self._rare = min(2 * self._rare, _MOST_RARE)
            return
        self._since = steps.step
        self._tell(len(odd), words)
        if self.policy == "stop":
            raise EvenstepError(
                f"step {steps.step}: {words}\n"
                "  fix: a checkpoint is written only of parameters that are the same on all ranks: go on with --resume auto, "
                "and look at the memory of the host or device of the rank that differs"
            )

    def _measure(self, tensor: torch.Tensor, right: int) -> list[Difference]:
        """Each rank's difference from rank `right`. Collective."""
        mine = tensor.detach().cpu().contiguous()
        forms = gather_objects(self._steps.group, (tuple(mine.shape), str(mine.dtype)))
        if len(set(forms)) > 1:  # a script gave it other .data
            return [Difference(math.prod(shape), math.inf, False) for shape, _ in forms]
        theirs = mine.clone()
        self._steps.group.broadcast_(theirs, right)
        return gather_objects(self._steps.group, difference(mine, theirs))

    @staticmethod
    def _words(names: Sequence[str], found: Sequence[Sequence[Difference]], ranks: Sequence[int], known: bool) -> str:
        values = sum(max(one.values for one in theirs) for theirs in found)
        largest = max(one.largest for theirs in found for one in theirs)
        more = len(names) - _MOST_NAMES
        where = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} differ{'s' if len(ranks) == 1 else ''}"
        doubt = "" if known else "; who is right is not known"
        return f"{who} in {where}: {values} value{'s' if values > 1 else ''}, by up to {largest:.3g}{doubt}"

    def _tell(self, value: int, words: str) -> None:
        steps = self._steps
        if steps.group.rank == 0:
            steps.telemetry.event(_core.EVENT_PARAMETERS, steps.step, value, words)
            sys.stderr.write(f"evenstep: step {steps.step}: {words}\n")
            sys.stderr.flush()
