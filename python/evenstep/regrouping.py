"""A session that goes on among other ranks: what its members tell one another, and what begins anew with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from evenstep.caps import among_others, cap_of_joining
from evenstep.generation_told import adapted_by, late_weights
from evenstep.memory import RanksMemory
from evenstep.script_exchanges import is_known
from evenstep.share_schedule import places_among

if TYPE_CHECKING:
    from evenstep.engine import Engine
    from evenstep.environment import Environment
    from evenstep.generation_told import Told
    from evenstep.session import Session
    from evenstep.shares import Shares


def own_groups() -> list[Any]:
    """torch's process groups that the script has made beside the one of all ranks."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    made = (group for group in getattr(world, "pg_map", ()) if group is not dist.group.WORLD)
    return [group for group in made if not is_known(group)]


def end_torch_groups() -> None:
    """Ends every call in torch's process groups over engines of ours, those under way and those to come, also where all members
    live: one that waits there would never hear of the loss, and the others for ever for it. So it is with torch's group of all ranks
    where Gloo connects the hosts."""
    for group in [*own_groups(), dist.group.WORLD]:
        comm = getattr(group, "_comm", None)
        if comm is not None and not comm.closed:
            comm.revoke()
        elif comm is None and hasattr(group, "end_over_gloo"):
            group.end_over_gloo()


def memory_pool(session: Session) -> int:
    memory = session.steps.memory
    return 0 if memory is None else memory.watch.pool


def shares_in(session: Session) -> list[Shares]:
    """Those of training loaders, each once."""
    found = [one.shares for one in session.loaders.values() if one.train and one.shares is not None]
    return list({id(shares): shares for shares in found}.values())


def training_shares(session: Session) -> Shares | None:
    return next(iter(shares_in(session)), None)


def own_caps(session: Session) -> list[tuple[int | None, int | None]]:
    """The most samples that this rank has, and that its script lets it have. Where it joins after its device ran out of memory, no
    more than it has room for: who was there from the beginning has heard so in es.prepare."""
    rank, told = session.rank, session.environment.memory_cap if session.joining else None
    caps: list[tuple[int | None, int | None]] = []
    for shares in shares_in(session):
        cap = shares.given_caps[rank]
        if told is not None and shares.limited:
            cap = cap_of_joining(cap, told, shares.batch, session.place[1], shares.block)
        caps.append((cap, shares.said_caps[rank]))
    return caps


def _take_in(session: Session, shares: Shares, told: Sequence[Told], number: int, own: Any) -> Shares:
    """The loader of this number's among those that have told."""
    known = told[0].of_members()
    measured = [None if one is None else one[number] for one in known]
    buckets = [one.buckets[number] for one in told]
    given, said = [one.caps[number][0] for one in told], [one.caps[number][1] for one in told]
    held = sum(cap for cap in given if cap is not None)
    short = shares.shrinks and None not in given and held < shares.batch
    caps, why = ([None] * len(told), "") if short else among_others(given, said, shares.batch, shares.block)
    if why and session.rank == 0:
        sys.stderr.write(f"evenstep: {why}\n")
    made = shares.anew(own, caps, measured, buckets, session.places or ())
    too_few = made.crowded() if len(told) > shares.ranks else None
    if too_few is not None and session.rank == 0:
        sys.stderr.write(f"evenstep: warning: {too_few[0]}\n")
    made.said_caps = said
    if short:
        made.shrink_soon(given, held)
    return made


def own_buckets(session: Session) -> list[int | None]:
    """How many samples this rank's kernels work on at once, as its script says."""
    return [shares.given_buckets[session.rank] for shares in shares_in(session)]


def own_workers(session: Session) -> list[tuple[int, int] | None]:
    """Of each training loader's, with the batches that each is given ahead, where Evenstep has chosen them."""
    return [loader.chosen for loader in session.loaders.values() if loader.train]


def own_place(session: Session) -> int | None:
    """Among the ranks that the job began with; None of a process that has none yet."""
    if session.joining:
        return None
    return session.rank if session.places is None else session.places[session.rank]


def own_adapted(session: Session) -> dict[str, Any] | None:
    """Of the one training loader whose batch is adapted."""
    adapting = (loader.adapting for loader in session.loaders.values() if loader.adapting is not None)
    return next((one.told() for one in adapting), None)


def own_late(session: Session) -> list[dict[int, float]]:
    """Of each model under es.Stale: this rank's weight in each of the rounds that are late."""
    return [sync.stale.weights() for sync in session.steps.syncs if sync.stale is not None]


def timings_of(session: Session, members: Sequence[int]) -> dict[int, list[Any]]:
    """What was measured of each of the ranks, under these numbers."""
    found = [shares.of_each() for shares in shares_in(session)]
    return {} if not found else dict(zip(members, map(list, zip(*found))))


def regroup(
    session: Session,
    environment: Environment,
    met: Sequence[Sequence[Callable[[], Engine]]],
    told: Sequence[Told],
    committed: int = 0,
) -> None:
    """Goes on among the ranks of a new generation, by what they told. met: what makes each model's engines; committed: turns that
    stand."""
    speeds = [one.speed for one in told if one.speed is not None]
    usual = sum(speeds) / len(speeds) if speeds else 0.0
    own = tuple(usual if one.speed is None else one.speed for one in told) if speeds else None
    session.environment = replace(environment, speeds=own)
    session.rank, session.world_size = environment.rank, environment.world_size
    session.devices, session.hosts = [one.device for one in told], [one.host for one in told]
    session.last_step = None
    session.places = places_among([one.place for one in told], session.place[1])
    late = 0
    for sync, of_model in zip(session.steps.syncs, met):
        engines = [again() for again in of_model]
        sync.go_on(engines)
        if sync.stale is not None:
            sync.stale.go_on(engines, late_weights(told, late, committed, len(engines)), len(told))
            late += 1
    session.checks.begin_anew()
    session.nonfinite.begin_anew()
    session.parameter_checks.begin_anew()
    if session.steps.memory is not None:
        session.steps.memory = RanksMemory(session.steps.memory.watch, [one.pool for one in told], session.rank)
    adapted = adapted_by(told)
    for loader in session.loaders.values():
        if loader.adapting is not None and adapted is not None:
            loader.adapting.go_on(adapted)
    made: dict[int, Shares] = {}
    for number, shares in enumerate(shares_in(session)):
        made[id(shares)] = _take_in(session, shares, told, number, own)
    chosen = [
        next((one for one in of_each if one is not None), None) for of_each in zip(*(one.workers for one in told))
    ]
    for loader in session.loaders.values():
        own_shares = loader.shares
        if own_shares is not None and id(own_shares) not in made:
            made[id(own_shares)] = own_shares.anew(own, [None] * len(told), [None] * len(told), places=session.places)
        workers = chosen.pop(0) if loader.train and chosen else None
        loader.shrink(None if own_shares is None else made[id(own_shares)], workers)
