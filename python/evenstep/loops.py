"""es.epochs: where the script's loops over epochs are, so that a resumed script passes those that were over and goes on
in the one that was under way."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from evenstep._core import EvenstepError
from evenstep.exits import ended_by_exception
from evenstep.schedulers import SchedulerSteps

if TYPE_CHECKING:
    from evenstep.loader import EvenLoader

Position = tuple[int, "int | None"]  # the loop's number and its epoch; None: after that loop


@dataclass(frozen=True)
class Place:
    """Of the script, in its es.epochs loops."""

    number: int = 0  # of the loop, the first is 1; 0: before it
    inside: bool = False
    epoch: int | None = None  # with which the loop goes on; None: nothing is left of it
    calls: dict[str, int] | None = None  # scheduler steps that the script had come by there
    counts: list[int] = field(default_factory=list)  # epochs of each loop so far; older checkpoints have none

    @property
    def position(self) -> Position:
        return self.number, self.epoch if self.inside else None

    @property
    def tag(self) -> int:
        """Grows from loop to loop: odd in one, even between two."""
        return 2 * self.number - int(self.inside)


class Loops:
    """The es.epochs loops of one script. `loaders`: the session's, as they come. One inside another is as range(): its
    iterations are told apart by their number in the outer one's epoch."""

    def __init__(self, loaders: dict[str, EvenLoader], schedulers: SchedulerSteps, rank: int) -> None:
        self._loaders, self._schedulers, self._rank = loaders, schedulers, rank
        self._now = Place()
        self._saved: Place | None = None  # the checkpoint's, until the script is there
        self._counts: list[int] = []  # epochs of this script's loops so far
        self._passed = False  # over one that was over before the checkpoint

    def _training(self) -> list[EvenLoader]:
        return [loader for loader in self._loaders.values() if loader.train]

    @property
    def now(self) -> Place:
        """Of this script."""
        return self._now

    @property
    def trained(self) -> bool:
        """Whether this script is past its beginning: a checkpoint that it loads now moves the data, not the script."""
        return any(loader.trained for loader in self._training())

    @property
    def iterating(self) -> bool:
        """Whether an iteration is open: one that trains, or a look whose iterator is still referenced."""
        return any(loader.iterating for loader in self._training())

    def settle(self, beginning: bool) -> None:
        """It shows now what the iteration was in which a checkpoint was loaded before any step: a look, so that this is
        the script's beginning, or the loop that trains, which goes on."""
        for loader in self._training():
            loader.settle(beginning)

    # -- the checkpoint's --

    def state(self) -> dict[str, Any]:
        return asdict(self.place())

    def place(self) -> Place:
        """Where a script that resumes from here goes on. Between two iterations the epoch's body is taken for done."""
        now = self._saved or self._now
        if self._saved is None and now.inside and now.epoch is not None:
            loaders = self._training()
            done = any(loader.last_position == now.position for loader in loaders)
            if done and not any(loader.iterating or loader.waits_in for loader in loaders):
                return self._place(now.number, True, now.epoch + 1)
        return now

    def _place(self, number: int, inside: bool, epoch: int | None) -> Place:
        return Place(number, inside, epoch, self._schedulers.made(), list(self._counts))

    def load(self, state: dict[str, Any]) -> Place:
        self._saved = Place(**state)
        return self._saved

    def reached(self) -> None:
        """The script is where the checkpoint was written."""
        self._saved = None

    def back_to(self, place: Place) -> None:
        """At the script's end: an iteration that was begun there goes on."""
        self._now = place

    # -- es.epochs --

    def run(self, count: int) -> Iterator[int]:
        if self._now.inside:
            yield from range(count)
            return
        self.settle(beginning=True)
        start = self._begin(count)
        number = self._now.number
        end = None  # where it is left before its end
        try:
            epoch = start
            while epoch < count:
                self._now = self._place(number, True, epoch)
                yield epoch
                again = self._epoch_again(number)
                epoch = epoch + 1 if again is None else again
            end = max(start, count)
        finally:
            self._now = self._place(number, False, end)

    def _epoch_again(self, number: int) -> int | None:
        """The loop's epoch whose iterations come again, since a rank was lost in the step on their batches."""
        places = [loader.waits_in for loader in self._training()]
        return min(
            (one.epoch for one in places if one and one.number == number and one.epoch is not None), default=None
        )

    def _begin(self, count: int) -> int:
        number = self._now.number + 1
        saved = self._saved
        if saved is not None and number < saved.number:
            self._check_passed(number, count, saved)
        self._counts.append(count)
        self._now = self._place(number, True, None)
        if saved is None:
            return 0
        if number < saved.number:
            for loader in self._training():
                loader.skip_loop(self._now.tag)
            if self._rank == 0:
                sys.stderr.write(
                    f"evenstep: es.epochs loop {number} of the script was over before the checkpoint; training goes on "
                    f"{'in' if saved.inside else 'after'} loop {saved.number}\n"
                )
            return count
        self.reached()
        if number > saved.number:
            start = max((loader.skip_to_cursor() for loader in self._training()), default=0)
            if start:
                self._schedulers.go_on()
            return start if saved.number == 0 else 0  # 0: the checkpoint's script had none
        self._schedulers.go_on(saved.calls or {})
        for loader in self._training():
            loader.skip_to_position()
        return count if saved.epoch is None else saved.epoch

    def _check_passed(self, number: int, count: int, saved: Place) -> None:
        """Loops are told apart by their number, so one that was left out in this attempt moves the others: what can be
        seen of that is an error now, the rest is said at the script's end."""
        if not self._passed:
            self._passed = True
            atexit.register(self._at_exit, os.getpid())
        before = saved.counts[number - 1] if number <= len(saved.counts) else count
        if before != count:
            raise EvenstepError(
                f"es.epochs loop {number} of the script has {count} epochs, that of the checkpoint's had {before}, and "
                f"training stood in or after loop {saved.number}: it cannot be told which loop goes on\n"
                "  fix: call es.epochs for the same loops with the same counts in every attempt, without an `if` around one "
                "that was over: it yields nothing then"
            )

    def _at_exit(self, process: int) -> None:
        if self._saved is None or self._rank != 0 or process != os.getpid() or ended_by_exception():
            return
        sys.stderr.write(
            f"evenstep: warning: the script ended before es.epochs loop {self._saved.number}, in which its checkpoint was "
            "written: nothing was trained\n  fix: call es.epochs for the same loops in every attempt, without an `if` "
            "around one that was over: it yields nothing then\n"
        )
