"""What measured speeds are true of: these ranks' devices, as a checkpoint keeps them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.session import Session
    from evenstep.shares import Shares


def place_of(session: Session) -> dict[str, Any]:
    speeds = session.environment.speeds
    return {"devices": list(session.devices), "priors": None if speeds is None else list(speeds)}


def same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["devices"] == other["devices"]) and _alike(one["priors"], other["priors"])


def _alike(one: list[float] | None, other: list[float] | None) -> bool:
    """Prior speeds within a fifth: the same devices measured again."""
    if one is None or other is None:
        return one == other
    return all(0.8 < (a / max(one)) / (b / max(other)) < 1.25 for a, b in zip(one, other))


def in_words(place: dict[str, Any]) -> str:
    names = ", ".join(place["devices"]).strip(", ")
    priors = place["priors"]
    speeds = "" if priors is None else f" of speeds {', '.join(f'{speed:.3g}' for speed in priors)}"
    return f"{len(place['devices'])} ranks{f' on {names}' if names else ''}{speeds}"


def speeds_of(session: Session, shares: Shares | None) -> dict[str, Any]:
    """For a checkpoint: what was measured, and of whom."""
    return {} if shares is None else {**place_of(session), "timings": shares.state(), "caps": shares.caps}


def take_speeds(session: Session, shares: Shares | None, state: dict[str, Any]) -> None:
    """Goes on from the speeds that were measured before the checkpoint, where the ranks are the same."""
    if shares is None or session.planning or not state.get("timings"):
        return
    mine = place_of(session)
    if same_place(state, mine):
        shares.learn(state["timings"])
        shares.learn_caps(state.get("caps", []))
    elif session.rank == 0:
        sys.stderr.write(
            f"evenstep: the speeds measured before the checkpoint are not used: it had {in_words(state)}, this job "
            f"has {in_words(mine)}; the shares start from what is known of these\n"
        )
