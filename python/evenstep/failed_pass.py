"""What a rank does of the exchange when a pass has failed on it, or on another, so that none waits for what will not come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync


def give_up(syncs: Sequence[GradientSync], begun: int = 0) -> None:
    """What engines exchange of this pass counts nothing on any rank. begun: a bit for each model that others may have handed gradients
    of over."""
    for index, sync in enumerate(syncs):
        if sync.enabled:
            with suppress(RuntimeError):  # why it ends is known
                sync.give_up(bool(begun >> index & 1))


def end_calls(syncs: Sequence[GradientSync], by_others: bool = False) -> None:
    """Where training has ended: who of the ranks could not hand all on is waited for by none. by_others: they hear why, and end theirs."""
    for sync in syncs:
        sync.end_calls(by_others)
