"""The checkpoint that is due at a script's last step. It is written when the next batch is asked for; where none is, rank
0 writes it when its process ends.

Rank 0 alone, since nobody may be left to talk to then: what it needs of the others, their generators, comes with the
step. Nothing is written where an exception ended the script, or where the models are no longer those of that step (an
average put in their place, a conversion for export): a checkpoint of the step must be of the step."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NamedTuple

import torch

from evenstep import _core
from evenstep.checkpoint_keeping import folder_of, lineage_of, step_folder
from evenstep.checkpoint_state import pack_random
from evenstep.errors import words_of
from evenstep.exchange_state import capture_exchange
from evenstep.exits import ended_by_exception


class LastStep(NamedTuple):
    """What rank 0 has to remember of a step at which a checkpoint is due."""

    step: int
    random_states: list[bytes]
    models: list[str]
    exchange: dict[str, Any]  # on rank 0
    process: int  # a forked child has no right to write


def remember(session: Any, ends_turn: bool) -> None:
    """After each optimizer's step while a checkpoint is due. ends_turn: the first on its gradients, which is collective; others are
    no call of all. That is the same on all ranks, whatever each has heard of a loss: one that came out of the call before it has
    what was collected, another may not."""
    known = session.last_step
    with session.steps.apart(_core.SPAN_CHECKPOINT):
        if ends_turn:
            session.call_by_all(lambda: _collect(session))
        elif known is not None and known.step == session.step:
            _note(session, known.random_states, known.exchange)


def _collect(session: Any) -> None:
    _note(session, session.all_gather_bytes(pack_random(session.pending_random)), capture_exchange(session))


def _note(session: Any, states: list[bytes], exchange: dict[str, Any]) -> None:
    if session.rank == 0:
        if session.last_step is None:
            atexit.register(_at_exit, session)
        session.last_step = LastStep(session.step, states, _describe(session.models), exchange, os.getpid())
    else:
        session.last_step = LastStep(session.step, states, [], {}, os.getpid())


@torch.no_grad()
def _describe(models: dict[str, Any]) -> list[str]:
    """Values that change with the models: each tensor's norm."""
    return [_norm(t) for model in models.values() for t in (*model.parameters(), *model.buffers())]


def _norm(tensor: torch.Tensor) -> str:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point():
        return str(values.sum().item())
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).item()).hex()


def _at_exit(session: Any) -> None:
    last = session.last_step
    if last is None or last.process != os.getpid() or last.step != session.step:
        return  # None: nothing is due since others went on without a rank
    if not session.checkpoint_waits or ended_by_exception():
        return
    if _describe(session.models) != last.models:
        return
    _, written = step_folder(folder_of(session), last.step, lineage_of(session))
    if written:  # by the script itself
        return
    for loader in session.loaders.values():
        if loader.train:
            loader.reopen()
    from evenstep.checkpoint import write_here

    session.exchange_state = last.exchange
    try:
        write_here(session, last.random_states)
    except Exception as error:  # whatever an object's state_dict raises
        sys.stderr.write(
            f"evenstep: warning: the checkpoint at the last step, {last.step}, was not written: {words_of(error)}\n"
        )
