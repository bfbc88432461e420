"""What measured speeds are true of: these ranks' devices on their hosts, as a checkpoint keeps them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.session import Session
    from evenstep.shares import Shares


def host_name() -> str:
    """Of this one, as its ranks are known by after a restart."""
    return os.environ.get("EVENSTEP_HOST_ID") or os.uname().nodename


def place_of(session: Session) -> dict[str, Any]:
    speeds = session.environment.speeds
    priors = None if speeds is None else list(speeds)
    return {"devices": list(session.devices), "hosts": list(session.hosts), "priors": priors}


def same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Also where every host has another name by now, as containers do after a restart."""
    hosts, others = one.get("hosts"), other["hosts"]
    same_hosts = hosts is None or hosts == others or set(hosts).isdisjoint(others)
    return bool(same_hosts and one["devices"] == other["devices"]) and _alike(one["priors"], other["priors"])


def matched(one: dict[str, Any], other: dict[str, Any]) -> list[int | None]:
    """For each rank of `other` the rank of `one` that had its device; None: there was none, or it is not known."""
    nobody: list[int | None] = [None] * len(other["devices"])
    if one.get("hosts") is None or (one["priors"] is None) != (other["priors"] is None):
        return nobody
    left = list(zip(one["hosts"], one["devices"], range(len(one["devices"]))))
    found = list(nobody)
    for rank, device in enumerate(zip(other["hosts"], other["devices"])):
        was = next((each for each in left if each[:2] == device and device[1]), None)
        if was is not None:
            left.remove(was)
            found[rank] = was[2]
    pairs = [(was, rank) for rank, was in enumerate(found) if was is not None]
    if one["priors"] is not None and pairs:
        before, now = [one["priors"][was] for was, _ in pairs], [other["priors"][rank] for _, rank in pairs]
        return found if _alike(before, now) else nobody
    return found


def _alike(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Prior speeds within a fifth: the same devices measured again."""
    if one is None or other is None:
        return one == other
    return all(0.8 < (a / max(one)) / (b / max(other)) < 1.25 for a, b in zip(one, other))


def in_words(place: dict[str, Any]) -> str:
    names = ", ".join(place["devices"]).strip(", ")
    priors = place["priors"]
    speeds = "" if priors is None else f" of speeds {', '.join(f'{speed:.3g}' for speed in priors)}"
    ranks = len(place["devices"])
    return f"{ranks} rank{'' if ranks == 1 else 's'}{f' on {names}' if names else ''}{speeds}"


def speeds_of(session: Session, shares: Shares | None) -> dict[str, Any]:
    """For a checkpoint: what was measured, and of whom."""
    if shares is None:
        return {}
    measured = {"timings": shares.state(), "caps": shares.caps, "learned": shares.learned()}
    return {**place_of(session), **measured, "units": shares.units}


def take_speeds(session: Session, shares: Shares | None, state: dict[str, Any]) -> None:
    """Goes on from the speeds that were measured before the checkpoint: of all ranks where they are the same, else of those
    that are on a device of before."""
    if shares is None or session.planning or not state.get("timings"):
        return
    mine = place_of(session)
    if same_place(state, mine):
        learned, units = state.get("learned", ""), state.get("units", [])
        why = shares.go_on(state["timings"], state.get("caps", []), learned, units)
        if why and session.rank == 0:
            sys.stderr.write(f"evenstep: shares go on from the last steps before the checkpoint alone: {why}\n")
        return
    before = matched(state, mine)
    known = [rank for rank, was in enumerate(before) if was is not None]
    if known:
        shares.learn_some([None if was is None else [row[was] for row in state["timings"]] for was in before])
    if session.rank == 0 and known:
        sys.stderr.write(
            f"evenstep: of the speeds measured before the checkpoint, which had {in_words(state)}, "
            f"those of {len(known)} of this job's {len(before)} ranks are used"
            f"{': the others count as their mean' if len(known) < len(before) else ''}\n"
        )
    elif session.rank == 0:
        sys.stderr.write(
            f"evenstep: the speeds measured before the checkpoint are not used: it had {in_words(state)}, this job "
            f"has {in_words(mine)}; the shares start from what is known of these\n"
        )
