"""What cannot go on without a rank that was killed, and why: the job is started again from its checkpoint then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evenstep.engine import Engine, SharedEngine
from evenstep.exact_engine import ExactEngine
from evenstep.feeds import IndexFeed
from evenstep.mended_group import MendedGroup
from evenstep.pass_state import too_large
from evenstep.regrouping import own_groups
from evenstep.session import of_sets

if TYPE_CHECKING:
    from evenstep.session import Session


def why_not(session: Session) -> str:
    """In a few words; "" where nothing hinders. After es.prepare."""
    if not isinstance(session.group, MendedGroup) or session.group.comm.engine not in ("shm", "ucx", "hosts"):
        return "the ranks talk through MPI, which may end them all, and makes no group without a rank that was lost"
    if of_sets:
        return "it trains in process sets"
    if session.plan is not None or session.watch is not None:
        return "it measures for a plan, or is verified"
    return _of_models(session) or _of_loops(session) or _of_groups(session) or too_large(session.objects)


def _of_models(session: Session) -> str:
    for sync in session.steps.syncs:
        if sync.local is not None or sync.stale is not None:
            return "sync= lets ranks have parameters, or gradients, of their own"
        if not _adds_up_here(sync.engine):
            return "gradients are compressed, on GPUs, or summed by torch"
    return "" if session.steps.syncs else "no model is prepared"


def _adds_up_here(engine: Engine) -> bool:
    """In groups of ours, the gradients as they are."""
    if isinstance(engine, ExactEngine):
        return engine.plain
    return type(engine) is SharedEngine and engine.plain


def _of_loops(session: Session) -> str:
    training = [loader for loader in session.loaders.values() if loader.train]
    if not training:
        return "it needs a prepared training loader, to give a batch again"
    if any(loader.adapting is not None for loader in training):
        return "the global batch is adapted, from gradients of all ranks"
    if any(isinstance(loader.feed, IndexFeed) and loader.feed.skips for loader in training):
        return "samples that cannot be read are left out, which the ranks settle before each batch"
    if any(loader.shares is None or loader.shares.scheduled for loader in training):
        return "es.prepare(shares=…) says how samples are shared out among all ranks"
    if not session.optimizers:
        return "it needs a prepared optimizer, whose step commits"
    if any(isinstance(one, torch.optim.LBFGS) for one in session.optimizers.values()):
        return "LBFGS makes several backward passes in one step"
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
