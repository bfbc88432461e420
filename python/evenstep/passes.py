"""Which trainings a backward pass is of: the whole job's, those of process sets, in one order on all ranks.

Inside the `with` of a process set a pass is of that set alone. Outside, it is of all in which this rank prepared models,
the whole job first, then its sets as they were made. Each holds its vote in turn, so that ranks of several sets never
wait for one another in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evenstep._core import EvenstepError
from evenstep.process_sets import explain
from evenstep.session import inside_a_set, session, sessions

if TYPE_CHECKING:
    from evenstep.session import Session


@contextmanager
def _explained(one: Session) -> Iterator[None]:
    try:
        yield
    except EvenstepError as error:
        explain(error, one)
        raise


class Passes:
    """Told of every backward pass of this process (evenstep.backward)."""

    def __init__(self) -> None:
        self._now: list[Session] = []

    def before_backward(self, losses: Any) -> None:
        self._now = [session()] if inside_a_set() else [one for one in sessions() if one.steps.syncs]
        begun: list[Session] = []
        try:
            for one in self._now:
                one.counted_share.goes_on()
                with _explained(one):
                    one.steps.before_backward(losses)
                begun.append(one)
        except BaseException as error:
            self._now = begun  # those that were refused wait for nothing
            self.failed_backward(error)
            raise

    def spares_backward(self, losses: Any) -> bool:
        return len(self._now) == 1 and self._now[0].steps.spares_backward(losses)

    def nested_backward(self) -> None:
        for one in self._now:
            one.steps.nested_backward()

    def failed_backward(self, error: BaseException) -> None:
        failed, self._now = self._now, []
        for one in failed:
            one.steps.failed_backward(error)

    def after_backward(self) -> None:
        self._check_no_other()
        while self._now:
            one = self._now.pop(0)
            try:
                with _explained(one):
                    one.steps.after_backward()
            except BaseException as error:
                self.failed_backward(error)  # the sets whose turn has not come
                raise

    def _check_no_other(self) -> None:
        """Ranks of a set whose `with` is not open would wait for a vote that does not come."""
        others = [one for one in sessions() if one not in self._now and one.steps.syncs]
        for one in others:
            begun = next((sync for sync in one.steps.syncs if sync.begun), None)
            if begun is None:
                continue
            whose = f"the process set {one.name!r}" if one.name else "the whole job"
            error = EvenstepError(
                f"a backward inside the `with` of the process set {self._now[0].name!r} made gradients of model "
                f"{begun.name!r}, which was prepared for {whose}\n"
                "  fix: call backward outside the `with` where a pass is of several sets, on all their ranks alike"
            )
            self._now.append(one)
            self.failed_backward(error)
            raise error


passes = Passes()
