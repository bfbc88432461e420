"""A session that goes on among other ranks: what its members tell one another, and what begins anew with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evenstep.engine import SharedEngine
from evenstep.exact_engine import ExactEngine
from evenstep.memory import RanksMemory

if TYPE_CHECKING:
    from evenstep import _core
    from evenstep.environment import Environment
    from evenstep.generations import Told
    from evenstep.session import Session
    from evenstep.shares import Shares


def memory_pool(session: Session) -> int:
    memory = session.steps.memory
    return 0 if memory is None else memory.watch.pool


def training_shares(session: Session) -> Shares | None:
    return next((one.shares for one in session.loaders.values() if one.train and one.shares is not None), None)


def own_cap(session: Session) -> int | None:
    """The most samples that this rank's script lets it have."""
    shares = training_shares(session)
    return None if shares is None else shares.given_caps[session.rank]


def own_bucket(session: Session) -> int | None:
    """How many samples this rank's kernels work on at once, as its script says."""
    shares = training_shares(session)
    return None if shares is None else shares.given_buckets[session.rank]


def timings_of(session: Session, members: Sequence[int]) -> dict[int, list[Any]]:
    """What was measured of each of the ranks, under these numbers."""
    shares = training_shares(session)
    return {} if shares is None else dict(zip(members, shares.of_each()))


def regroup(
    session: Session,
    environment: Environment,
    arenas: Sequence[_core.Comm],
    told: Sequence[Told],
) -> None:
    """Goes on among the ranks of a new generation, by what they told. arenas: of each model's gradients."""
    speeds = [one.speed for one in told if one.speed is not None]
    usual = sum(speeds) / len(speeds) if speeds else 0.0
    own = tuple(usual if one.speed is None else one.speed for one in told) if speeds else None
    session.environment = replace(environment, speeds=own)
    session.rank, session.world_size = environment.rank, environment.world_size
    session.devices, session.hosts = [one.device for one in told], [one.host for one in told]
    session.last_step = None
    for sync, arena in zip(session.steps.syncs, arenas):
        assert isinstance(sync.engine, (SharedEngine, ExactEngine))
        sync.go_on(sync.engine.again(arena))
    session.checks.begin_anew()
    session.nonfinite.begin_anew()
    if session.steps.memory is not None:
        session.steps.memory = RanksMemory(session.steps.memory.watch, [one.pool for one in told], session.rank)
    made: dict[int, Shares] = {}
    for loader in session.loaders.values():
        shares = loader.shares
        if shares is not None and id(shares) not in made:
            made[id(shares)] = shares.anew(
                own, [one.cap for one in told], told[0].of_members(), [one.bucket for one in told]
            )
        loader.shrink(None if shares is None else made[id(shares)])
