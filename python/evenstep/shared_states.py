"""Which ranks have one copy of an optimizer's states (evenstep.optim): those of a host, where they step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.group import Bootstrap, Group, gather_objects
from evenstep.hosts import this_host
from evenstep.optim import InPieces, is_ours
from evenstep.sparse import sparse_parameters
from evenstep.used_parameters import trained_parameters

if TYPE_CHECKING:
    from evenstep.engine import EngineOptions
    from evenstep.modes import Mode
    from evenstep.prepare_options import DDPOptions
    from evenstep.session import Session


def share_states(session: Session, optimizers: Iterable[Optimizer], apart: bool) -> None:
    """Collective; the ranks have the same optimizers. apart: ranks have gradients of their own (es.LocalSGD)."""
    ours = [one for one in optimizers if isinstance(one, InPieces)]
    if not ours or apart or session.bootstrap is None:
        return
    session.sharing += ours
    comm, made = meet_to_share(ours, session.group, session.bootstrap)
    if comm is None and session.world_size > 1 and any(one.shard_gradients for one in ours):
        raise EvenstepError(
            "shard_gradients=True of es.optim: the ranks cannot open one another's memory\n"
            "  fix: start all ranks on one host as one user, or leave shard_gradients out"
        )
    _share(session, ours, comm, made, joins=True)  # steps of before were each rank's own


def shards(session: Session, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> bool:
    """Whether the gradients of these models are to stay in parts, one a rank."""
    wanted = any(isinstance(one, InPieces) and one.shard_gradients for one in optimizers.values())
    return wanted and bool(models) and session.world_size > 1


def check_sharding(
    session: Session,
    models: dict[str, nn.Module],
    optimizers: dict[str, Optimizer],
    options: EngineOptions,
    ddp: DDPOptions,
    mode: Mode | None,
    adapts: bool,
    exact: bool,
) -> None:
    """Collective: the ranks have the same arguments. EvenstepError where somebody needs sums that are whole."""
    for there, what in (
        (session.recovery is not None, "--recovery: a rank that ends takes its part of the gradients with it"),
        (mode is not None, f"sync={mode!r}"),
        (exact, 'exact="bitwise"'),
        (options.compression is not None, f"compression={str(options.compression)!r}"),
        (options.adasum, "reduction='adasum'"),
        (options.engine == "torch", "engine='torch'"),
        (adapts or session.steps.noise is not None, "adapt_batch, which looks at the gradients"),
        (not ddp.gradient_as_bucket_view, "gradient_as_bucket_view=False"),
    ):
        if there:
            raise EvenstepError(
                f"shard_gradients=True of es.optim does not go together with {what}\n  fix: leave one of the two out"
            )
    trained = {id(p): (name, each, p) for name, model in models.items() for each, p in trained_parameters(model)}
    sharding = [one for one in optimizers.values() if isinstance(one, InPieces) and one.shard_gradients]
    stepped = {id(p) for one in sharding for group in one.param_groups for p in group["params"]}
    sparse = {key for model in models.values() for key in sparse_parameters(model, optimizers.values())}
    for key, (name, each, p) in trained.items():
        why = (
            "is stepped on by none of the optimizers of this call that have it"
            if key not in stepped
            else "has sparse gradients"
            if key in sparse
            else "is no dense floating-point tensor in the host's memory"
            if not is_ours(p)
            else ""
        )
        if why:
            raise EvenstepError(
                f"shard_gradients=True of es.optim: parameter {each!r} of model {name!r} {why}\n"
                "  fix: give es.prepare one es.optim optimizer (or several, all with it) of all trained parameters, or leave "
                "shard_gradients out"
            )
    hosts = list(dict.fromkeys(gather_objects(session.group, this_host())))
    if len(hosts) > 1:
        raise EvenstepError(
            f"shard_gradients=True of es.optim: the ranks are on several hosts ({', '.join(hosts)}), and sums are formed in "
            "the memory of one\n  fix: leave shard_gradients out"
        )


def share_again(session: Session, group: Group) -> tuple[_core.Comm | None, list[int]]:
    """Collective, in a new generation: what `take_again` wants once all else has been done."""
    assert session.bootstrap is not None
    return meet_to_share(session.sharing, group, session.bootstrap) if session.sharing else (None, [])


def take_again(session: Session, comm: _core.Comm | None, made: Sequence[int]) -> None:
    _share(session, session.sharing, comm, made, session.joining)


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


def _share(
    session: Session, optimizers: Sequence[InPieces], comm: _core.Comm | None, made: Sequence[int], joins: bool
) -> None:
    steps = session.steps
    for one, after in zip(optimizers, made):
        one.share(
            comm,
            lambda: steps.phases.during(_core.AT_COLLECTIVE),
            steps.times.blocks,
            survives=session.recovery is not None,
            waits=None if session.recovery is None else session.recovery.doubt,
            after=after,
            joins=joins,
        )
