"""Iterations whose batches train nothing: which batch the script is at while such ones go on beside training, or beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep.feeds import BatchPlan
    from evenstep.session import Session


class Apart:
    """One of them. It is held where its iterator is older than the training's batch: it goes on beside that, and so does the next one
    that the script begins, at that batch, once it has ended."""

    def __init__(self, session: Session, made_at: BatchPlan | None, before: Apart | None) -> None:
        """made_at: the training's batch when the iterator was made; before: the loader's last one that has ended."""
        self._session = session
        recovery = session.recovery
        if recovery is not None and not recovery.calling:  # but es.evaluate's, of which the script has nothing yet
            recovery.part_gone = False
        self._made_at = made_at
        self.held: bool = before is not None and before.held and before._at is not None and before._at is made_at
        self._at: BatchPlan | None = None  # the training's batch at the last one's
        self._plan: BatchPlan | None = None

    def gives(self, plan: BatchPlan) -> None:
        session = self._session
        self._at = session.trains_on
        self.held = self.held or (self._at is not None and self._at is not self._made_at)
        session.latest = self._plan = replace(plan, beside=self._at) if self.held else plan
        others = [one for one in session.apart if one is not self]
        session.apart = [*others, self]

    def ends(self) -> None:
        """The script is at the last batch of those that are still open, or at the training's."""
        session = self._session
        session.apart = [one for one in session.apart if one is not self]
        if self._plan is not None and session.latest is self._plan:
            open_ones = [one._plan for one in session.apart if not one.held and one._at is session.trains_on]
            session.latest = open_ones[-1] if open_ones else session.trains_on
        self._at = session.trains_on
