"""Which ranks have one copy of an optimizer's states (evenstep.optim): those of a host, where they step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from evenstep import _core
from evenstep.group import Bootstrap, Group, gather_objects
from evenstep.hosts import this_host
from evenstep.optim import InPieces, is_ours

if TYPE_CHECKING:
    from evenstep.session import Session


def share_states(session: Session, optimizers: Iterable[Optimizer], apart: bool) -> None:
    """Collective; the ranks have the same optimizers. apart: ranks have gradients of their own (es.LocalSGD)."""
    ours = [one for one in optimizers if isinstance(one, InPieces)]
    if not ours or apart or session.bootstrap is None:
        return
    session.sharing += ours
    _share(session, ours, *meet_to_share(ours, session.group, session.bootstrap))


def share_again(session: Session, group: Group) -> tuple[_core.Comm | None, list[int]]:
    """Collective, in a new generation: what `take_again` wants once all else has been done."""
    assert session.bootstrap is not None
    return meet_to_share(session.sharing, group, session.bootstrap) if session.sharing else (None, [])


def take_again(session: Session, comm: _core.Comm | None, made: Sequence[int]) -> None:
    _share(session, session.sharing, comm, made)


def meet_to_share(
    optimizers: Sequence[InPieces], group: Group, bootstrap: Bootstrap
) -> tuple[_core.Comm | None, list[int]]:
    """The group of this host's ranks, None where there is none; and the most steps that a rank has made with each."""
    possible = all(is_ours(p) for one in optimizers for each in one.param_groups for p in each["params"])
    told = gather_objects(group, (this_host(), possible, [one.made for one in optimizers]))
    mine: _core.Comm | None = None
    for host in dict.fromkeys(one[0] for one in told):
        ranks = [rank for rank, one in enumerate(told) if one[0] == host and one[1]]
        if len(ranks) > 1:
            comm = bootstrap.shared(0, "optimizer", ranks=ranks)
            mine = comm if comm is not None and comm.engine == "shm" else mine
    return mine, [max(counts) for counts in zip(*(one[2] for one in told))]


def _share(session: Session, optimizers: Sequence[InPieces], comm: _core.Comm | None, made: Sequence[int]) -> None:
    steps = session.steps
    for one, after in zip(optimizers, made):
        one.share(
            comm,
            lambda: steps.phases.during(_core.AT_COLLECTIVE),
            steps.times.blocks,
            survives=session.recovery is not None,
            after=after,
            joins=session.joining,
        )
