"""What each rank's exchange of gradients remembers between steps, in checkpoints: what compression has left out so far.

With other ranks than it was written by, what all had left out is added up and split evenly: as much is still to come.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from evenstep.encoded_engine import order_of, split_leftovers
from evenstep.group import Group, gather_objects

State = dict[str, torch.Tensor]


def capture_exchange(session: Any) -> dict[str, Any]:
    """Collective. Every model's states, one a rank, and what its mode (es.DiLoCo, es.Stale) keeps."""
    models = {}
    modes = {}
    for sync in session.steps.syncs:
        if sync.local is not None or sync.stale is not None:
            modes[sync.name] = (sync.local or sync.stale).state()
        if hasattr(sync.engine, "feedback_state"):
            ranks = _gather_states(session.group, sync.engine.feedback_state())
            models[sync.name] = {"compression": sync.compression, "ranks": ranks}
    return {"models": models, "modes": modes} if models or modes else {}


def own_exchange(session: Any) -> dict[str, Any]:
    """What this rank gives one that joins, without asking the others: all ranks have it alike. What compression leaves out of a
    rank's gradients begins at zero there, and gradients that are late come from all once it has joined."""
    models, modes = {}, {}
    for sync in session.steps.syncs:
        if sync.local is not None:
            modes[sync.name] = sync.local.state()
        elif sync.stale is not None:
            modes[sync.name] = sync.stale.own_state()
        if hasattr(sync.engine, "feedback_state"):
            models[sync.name] = {"compression": sync.compression, "ranks": [sync.engine.shared_state()]}
    return {"models": models, "modes": modes} if models or modes else {}


def _gather_states(group: Group, state: State) -> list[State]:
    """Everyone's, on every rank."""
    everyone: list[list[tuple[str, tuple[int, ...], torch.dtype]]]
    everyone = gather_objects(group, [(name, tuple(one.shape), one.dtype) for name, one in state.items()])
    states: list[State] = [{} for _ in everyone]
    for place in range(max(map(len, everyone))):
        theirs = [known[place] if place < len(known) else None for known in everyone]
        mine = list(state.values())[place] if place < len(state) else torch.empty(0)
        flat = mine.detach().cpu().contiguous().view(-1).view(torch.uint8)
        counts = [0 if one is None else math.prod(one[1]) * one[2].itemsize for one in theirs]
        rows = group.gather_rows(flat, counts).split(counts)
        for known, row, one in zip(states, rows, theirs):
            if one is not None:
                known[one[0]] = row.clone().view(one[2]).view(one[1])
    return states


def restore_exchange(session: Any, saved: dict[str, Any] | None) -> None:
    """Puts it back into the engines of what was prepared; tells (rank 0) what could not be as it was."""
    models = (saved or {}).get("models", {})
    _restore_modes(session, (saved or {}).get("modes", {}))
    for sync in session.steps.syncs:
        if not hasattr(sync.engine, "load_feedback"):
            continue
        there = models.get(sync.name)
        if there is None or there["compression"] != sync.compression:
            was = "without compression" if there is None else f"with compression {there['compression']}"
            _tell(
                session,
                f"the checkpoint was written {was}: what {sync.compression} leaves out of the gradients of "
                f"{sync.name!r} begins at zero",
            )
            sync.engine.load_feedback({})
            continue
        ranks = there["ranks"]
        if len(ranks) == session.world_size:
            sync.take_order(order_of(ranks[session.rank]))  # by which a rank knows its parts
            sync.engine.load_feedback(ranks[session.rank])
            continue
        parts = len(ranks) if sync.engine.feedback_counts_as_mean else session.world_size
        sync.engine.load_feedback(_split(ranks, parts))
        _tell(
            session,
            f"what {sync.compression} had left out of the gradients of {sync.name!r} on {len(ranks)} ranks is added up "
            f"and split evenly between {session.world_size}",
        )


def _restore_modes(session: Any, saved: dict[str, Any]) -> None:
    for sync in session.steps.syncs:
        there = saved.get(sync.name)
        if sync.local is not None and not sync.local.load(there):
            _tell(
                session,
                f"the checkpoint has no outer momentum for {sync.name!r}: that of {sync.local.mode} begins at zero",
            )
        if sync.stale is not None and not sync.stale.load(there, [p.device for p in sync.parameters]):
            _tell(session, f"the checkpoint has no late gradients for {sync.name!r}: its first steps change nothing")


def _split(ranks: list[State], parts: int) -> State:
    """PowerSGD's numbered entries are buckets' errors, its others the same on all ranks."""
    if any(name.startswith("left ") for name in ranks[0]):
        return split_leftovers(ranks, parts)
    split = dict(ranks[0])
    for name in {name for state in ranks for name in state if name.isdigit()}:
        split[name] = sum(state[name] for state in ranks if name in state) / parts  # type: ignore[assignment]
    return split


def _tell(session: Any, words: str) -> None:
    if session.rank == 0:
        sys.stderr.write(f"evenstep: {words}\n")
