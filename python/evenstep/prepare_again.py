"""es.prepare where a rank is lost in it (`--recovery`): those that are left begin its collective part again, among themselves.

All of that part is one call of theirs, which ends with a meeting. Whoever has come out of that knows that all had prepared
everything; so where one has, it stands on all. Else it is undone on all, and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evenstep._core import EvenstepError
from evenstep.call_results import packed
from evenstep.environment import kind_of_device
from evenstep.generation_limits import LACKS, ON_GPUS, why_no_groups
from evenstep.mended_group import MendedGroup
from evenstep.optim import InPieces
from evenstep.sample_cache import has_caches

if TYPE_CHECKING:
    from evenstep.engine import EngineOptions
    from evenstep.session import Session

T = TypeVar("T")

_CANNOT = "es.prepare, where it was lost, cannot begin again: "


def prepare_together(
    session: Session, make: Callable[[], T], given: Sequence[object], options: EngineOptions, special: str
) -> T:
    """make(): what the ranks prepare together of what es.prepare was given. special: what of the call cannot be undone, in words."""
    recovery, group, bootstrap = session.recovery, session.group, session.bootstrap
    if recovery is None or recovery.joining or bootstrap is None or not isinstance(group, MendedGroup):
        return make()
    why = why_no_groups(session) or _why_not(session, given, options, special) or _still(recovery.hindrance)
    before = _Before(session, any(isinstance(one, (nn.Module, Optimizer)) for one in given))
    made: list[T] = []

    def attempt() -> T:
        made[:] = [make()]
        group.meet()
        return made[0]

    recovery.say(_CANNOT + why if why else "")
    if not why:
        recovery.undo, bootstrap.heeds = before.put_back, recovery.look
    try:  # a call also where it cannot be made again, which is each rank's own to say: all count it
        return group.call(attempt, lambda _: packed(b""), lambda _: made[0], lambda: False)
    finally:
        recovery.undo = bootstrap.heeds = None
        recovery.has_values = False


def _still(said: str) -> str:
    """What an earlier es.prepare, or the training since, has said that hinders this one, too."""
    return "" if said in LACKS or said.startswith(_CANNOT) else said


def _why_not(session: Session, given: Sequence[object], options: EngineOptions, special: str) -> str:
    tensors = [p for model in given if isinstance(model, nn.Module) for p in (*model.parameters(), *model.buffers())]
    elsewhere = any(kind_of_device(device) not in ("", "cpu", "spare") for device in session.devices)
    if elsewhere or not all(tensor.is_cpu for tensor in tensors):
        return ON_GPUS
    if any(isinstance(one, InPieces) for one in given):
        return "an optimizer of es.optim shares its states"
    if any(isinstance(one, DataLoader) and has_caches(one.dataset) for one in given):
        return "an es.SampleCache is shared"
    return special


class _Before:
    """What the collective part of es.prepare changes in its session."""

    def __init__(self, session: Session, values: bool) -> None:
        """values: all get rank 0's of something."""
        self._session, self._values = session, values
        self._syncs, self._loaders, self._memory = len(session.steps.syncs), dict(session.loaders), session.steps.memory

    def put_back(self, before: Sequence[int], members: Sequence[int], given: bool) -> None:
        """before, members: ranks of the job, with those that were lost and without; given: the first of the members had got what
        the first of them all gave, and now gives it itself. Raises on all alike where what all were to get is gone."""
        if self._values and before[0] not in members and not given:
            raise EvenstepError(
                f"rank {before[0]} was lost in es.prepare, and with it the values of the model and the optimizer that all begin "
                f"with, which rank {members[0]} had not got yet (EVEN_ERR_PEER_LOST)\n  fix: the end of its own output says why; the job starts again"
            )
        steps = self._session.steps
        for sync in steps.syncs[self._syncs :]:
            sync.close()
        del steps.syncs[self._syncs :]
        self._session.loaders.clear()
        self._session.loaders.update(self._loaders)
        steps.memory = self._memory
