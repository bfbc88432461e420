"""Rounds that are made a second time, since on some rank a gradient changed after it had been handed over."""

from __future__ import annotations

from collections.abc import Sequence, Set

from evenstep._core import EvenstepError
from evenstep.group import Group, gather_objects


def sums_of_all(group: Group, mine: Sequence[int], changed: Set[int], names: Sequence[str]) -> list[int]:
    """Parameters of which the first round's sum lies in p.grad itself on some rank, which has its own gradient no more: the sum counts
    on every rank then. Collective. mine: those of this rank; changed: whose gradients changed on this rank. Raises, on every rank,
    where one changed that is the sum on another: nobody has all of it."""
    rows = gather_objects(group, [list(mine), sorted(changed)])
    holders: dict[int, int] = {}
    for rank, (there, _) in enumerate(rows):
        for index in there:
            holders.setdefault(index, rank)
    for rank, (_, again) in enumerate(rows):
        lost = next((index for index in again if index in holders), None)
        if lost is not None:
            raise EvenstepError(
                f"on rank {rank} parameter {names[lost]!r} got a second gradient in one backward (reentrant checkpointing) after "
                f"its first was already being reduced, into the p.grad that rank {holders[lost]} had kept from the last step\n"
                "  fix: use torch.utils.checkpoint with use_reentrant=False, or zero_grad(set_to_none=True) on every rank"
            )
    return sorted(holders)
