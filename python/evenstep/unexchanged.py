"""Parameters that a script changes by itself where no backward was made (torch.func, torch.autograd.grad and updates by hand): the
ranks exchange nothing, and each trains a model of its own on its share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstep import sites
from evenstep.parameter_checks import sums_of

if TYPE_CHECKING:
    from evenstep.session import Session

ALONE = (
    "the parameters of a prepared model were changed in a loop over the prepared loader, but no backward() was made, and the ranks "
    "have exchanged nothing: where the changes came of its samples (not of a file), each has trained on its own share alone, and their "
    "models are others\n  fix: call loss.backward() and optimizer.step(); or, with gradients of torch.func or torch.autograd.grad, p.grad = gradient for each "
    "parameter, then es.exchange_gradients() before the update, and update by p.grad"
)


class Unexchanged:
    """Looks at iterations over training loaders, from their first batch to their end, until a backward was made in the job."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False
        self._waited = (0, 0)
        self._before: list[int] = []

    def begins(self) -> None:
        session = self._session
        if session.rank == 0 and session.world_size > 1 and not session.planning and self._is_open():
            self._waited, self._before = self._waits(), self._sums()

    def ends(self) -> None:
        """Ranks that waited for one another, or met, where none may have waited, may have made their models one by collectives
        of the script's own."""
        before, self._before = self._before, []
        if before and self._is_open() and self._waits() == self._waited and before != self._sums():
            self._told = True
            sites.warn(ALONE)

    def _waits(self) -> tuple[int, int]:
        steps = self._session.steps
        return steps.blocked_ns(), steps.times.meetings

    def _is_open(self) -> bool:
        """Whether neither a backward nor es.exchange_gradients has come."""
        return not self._told and self._session.steps.begun_backwards == 0 and self._session.step == 0

    def _sums(self) -> list[int]:
        return sums_of([parameter for sync in self._session.steps.syncs for parameter in sync.parameters])
