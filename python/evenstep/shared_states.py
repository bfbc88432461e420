"""Which ranks have one copy of an optimizer's states (evenstep.optim): those of a host, where they step together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from evenstep import _core
from evenstep.group import gather_objects
from evenstep.hosts import this_host
from evenstep.optim import InPieces, is_ours

if TYPE_CHECKING:
    from evenstep.session import Session


def share_states(session: Session, optimizers: Iterable[Optimizer], apart: bool) -> None:
    """Collective; the ranks have the same optimizers. apart: ranks have gradients of their own (es.LocalSGD).

    Under recovery each rank keeps all states: a rank that is lost in a step would leave those that all have half changed."""
    ours = [one for one in optimizers if isinstance(one, InPieces)]
    if not ours or apart or session.recovery is not None or session.bootstrap is None:
        return
    possible = all(is_ours(p) for one in ours for group in one.param_groups for p in group["params"])
    places: list[tuple[str, bool]] = [
        (host, can) for host, can in gather_objects(session.group, (this_host(), possible))
    ]
    mine: _core.Comm | None = None
    for host in dict.fromkeys(host for host, _ in places):
        ranks = [rank for rank, place in enumerate(places) if place == (host, True)]
        if len(ranks) > 1:
            comm = session.bootstrap.shared(0, "optimizer", ranks=ranks)
            mine = comm if comm is not None and comm.engine == "shm" else mine
    steps = session.steps
    if mine is not None:
        for one in ours:
            one.share(mine, lambda: steps.phases.during(_core.AT_COLLECTIVE), steps.times.blocks)
