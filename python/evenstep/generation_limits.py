"""What cannot go on without a rank that was killed, and why: the job is started again from its checkpoint then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import Engine, SharedEngine
from evenstep.exact_engine import ExactEngine
from evenstep.gathering_engine import GatheringEngine
from evenstep.mended_group import MendedGroup
from evenstep.pass_state import too_large
from evenstep.regrouping import own_groups
from evenstep.session import of_sets
from evenstep.torch_engine import TorchEngine

if TYPE_CHECKING:
    from evenstep.session import Session


NO_MODEL = "no model is prepared"
_NO_LOADER = "it needs a prepared training loader, to give a batch again"
_NO_OPTIMIZER = "it needs a prepared optimizer, whose step commits"
ON_GPUS = "gradients are on GPUs, or summed by torch otherwise than over Gloo"
LACKS = (NO_MODEL, _NO_LOADER, _NO_OPTIMIZER)
"""What a later es.prepare may bring."""


def why_not(session: Session) -> str:
    """In a few words; "" where nothing hinders. After es.prepare."""
    return why_no_groups(session) or _of_models(session) or _of_loops(session) or too_large(session.objects)


def why_no_groups(session: Session) -> str:
    """Why those that are left could not go on in groups of their own, whatever was prepared; "": they could."""
    group = session.group
    if not isinstance(group, MendedGroup) or group.comm.engine not in ("shm", "ucx", "hosts", "hosts-gloo", "gloo"):
        return "the ranks talk through MPI, which may end them all, and makes no group without a rank that was lost"
    if not session.name and (of_sets or (session.recovery is not None and session.recovery.beside_sets)):
        return "it trains in process sets"
    if session.environment.plan or session.plan is not None or session.watch is not None:
        return "it measures for a plan, or is verified"
    return _of_groups(session)


def _of_models(session: Session) -> str:
    for sync in session.steps.syncs:
        if not all(map(_goes_on, sync.engines)):
            return ON_GPUS
    return "" if session.steps.syncs else NO_MODEL


def _goes_on(engine: Engine) -> bool:
    """Whether it adds up in groups of ours, in the memory of hosts, or in Gloo's."""
    ours = type(engine) in (ExactEngine, SharedEngine, EncodedEngine)
    return (ours or isinstance(engine, (GatheringEngine, TorchEngine))) and engine.plain  # type: ignore[attr-defined]


def _of_loops(session: Session) -> str:
    training = [loader for loader in session.loaders.values() if loader.train]
    if not training:
        return _NO_LOADER
    if any(loader.shares is None for loader in training):
        return "a training loader has no shares"
    if not session.optimizers:
        return _NO_OPTIMIZER
    return ""


def _of_groups(session: Session) -> str:
    own = own_groups()
    if any(getattr(group, "_comm", None) is None for group in own):
        return "the script has process groups of Gloo or NCCL of its own, where a call may wait for ever for one that has left it"
    return (
        "the script has process groups of its own, and none of them has a process that joins"
        if own and session.joining
        else ""
    )
