"""What each rank has of its own between steps, in checkpoints: what compression has left out so far of its gradients, and states of
optimizers where ranks train on their own.

With other ranks than it was written by, what all had left out is added up and split evenly: as much is still to come; and all go
on with rank 0's states.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from evenstep.checkpoint_models import parameter_names
from evenstep.encoded_engine import order_of, split_leftovers
from evenstep.group import Group, gather_objects
from evenstep.inner_states import State, is_own, own_state, put_own_state

_AT_ONCE = 4 << 20  # bytes of each rank's state under way


def capture_exchange(session: Any) -> dict[str, Any]:
    """Collective. Every model's and optimizer's states, one a rank, on rank 0, which writes, and what a model's mode (es.DiLoCo,
    es.Stale) keeps."""
    models = {}
    modes = {}
    for sync in session.steps.syncs:
        if sync.local is not None or sync.stale is not None:
            modes[sync.name] = (sync.local or sync.stale).state()
        if hasattr(sync.engine, "feedback_state"):
            ranks = _gather_states(session.group, sync.engine.feedback_state())
            models[sync.name] = {"compression": sync.compression, "ranks": ranks}
    own = {name: optimizer for name, optimizer in session.optimizers.items() if is_own(session, optimizer)}
    names = parameter_names(session.models) if own else {}
    optimizers = {
        name: {"ranks": _gather_states(session.group, own_state(optimizer, names))} for name, optimizer in own.items()
    }
    found = {"models": models, "modes": modes, **({"optimizers": optimizers} if optimizers else {})}
    return found if any(found.values()) else {}


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
    """Everyone's, on rank 0; others have no more than a piece of each rank's at a time."""
    everyone: list[list[tuple[str, tuple[int, ...], torch.dtype]]]
    everyone = gather_objects(group, [(name, tuple(one.shape), one.dtype) for name, one in state.items()])
    sizes = [[math.prod(shape) * dtype.itemsize for _, shape, dtype in theirs] for theirs in everyone]
    states: list[State] = [{} for _ in everyone]
    for place in range(max(map(len, sizes))):
        mine = list(state.values())[place] if place < len(state) else torch.empty(0)
        flat = mine.detach().cpu().contiguous().view(-1).view(torch.uint8)
        left = [size[place] if place < len(size) else 0 for size in sizes]
        pieces: list[list[torch.Tensor]] = [[] for _ in everyone]
        for at in range(0, max(left), _AT_ONCE):
            counts = [min(max(size - at, 0), _AT_ONCE) for size in left]
            rows = group.gather_rows(flat[at : at + _AT_ONCE], counts).split(counts)
            if group.rank == 0:
                for parts, row in zip(pieces, rows):
                    parts.append(row.clone())
        for known, theirs, parts in zip(states, everyone, pieces):
            if group.rank == 0 and place < len(theirs):
                name, shape, dtype = theirs[place]
                whole = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
                known[name] = whole.view(dtype).view(shape)
    return states


def put_inner_state(session: Any, name: str, optimizer: Any, saved: dict[str, Any] | None) -> None:
    """After rank 0's was loaded: this rank's own, where as many ranks wrote it. saved: that optimizer's part of `capture_exchange`."""
    if saved is None or not is_own(session, optimizer):
        return
    ranks = saved["ranks"]
    if len(ranks) == session.world_size:
        put_own_state(optimizer, parameter_names(session.models), ranks[session.rank])
    else:
        _tell(
            session, f"{len(ranks)} ranks had states of {name!r} of their own: {session.world_size} go on with rank 0's"
        )


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
            anew = sync.engine.load_feedback(ranks[session.rank])
        else:
            parts = len(ranks) if sync.engine.feedback_counts_as_mean else session.world_size
            anew = sync.engine.load_feedback(_split(ranks, parts))
            _tell(
                session,
                f"what {sync.compression} had left out of the gradients of {sync.name!r} on {len(ranks)} ranks is added "
                f"up and split evenly between {session.world_size}",
            )
        if anew:
            _tell(
                session,
                f"{sync.name!r} has other buckets than when the checkpoint was written: the factors of {sync.compression} "
                "begin anew, with what was left out",
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
