"""EVENSTEP_USE_PLAN=plan.json: a training begins with what `evenstep plan` measured, as one that is resumed does with what was
measured before. What the ranks need then corrects it in a few steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep._core import EvenstepError
from evenstep.group import broadcast_bytes
from evenstep.plan import FORMAT

if TYPE_CHECKING:
    from evenstep.session import Session
    from evenstep.shares import Shares

# Each size so often: from its second step on it counts, and no rank is believed to be without noise (src/balancer/shape.c).
TIMES = 2
MOST_SAMPLES = 2**40  # of a step


def start_from_plan(current: Session, shares: Shares, path: str) -> None:
    """Collective, with rank 0's path alike on all. Not where a checkpoint has newer measurements, nor on who joins others,
    nor where another training loader shares these and steps have told of them: what was observed is the same on all."""
    environment = current.environment
    if not path or environment.plan or environment.resume or environment.restart > 0 or current.joining:
        return
    if shares.last:
        return
    told = broadcast_bytes(current.group, _read(path) if current.rank == 0 else None)
    devices = [device or "cpu" for device in current.devices]  # as evenstep.plan names them
    try:
        shares.learn_plan(rows_of(json.loads(told), current.world_size, devices))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvenstepError(
            f"EVENSTEP_USE_PLAN={path}: {error}\n  fix: make it with `evenstep plan -o {path}` and as many ranks, or leave it out"
        ) from None


def _read(path: str) -> bytes:
    """What cannot be read is told as JSON, for all ranks."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        return json.dumps({"error": f"it cannot be read ({error.strerror})"}).encode()


def rows_of(plan: Mapping[str, Any], ranks: int, devices: Sequence[str] | None = None) -> list[list[tuple[int, float]]]:
    """The plan's measurements as steps: of each rank (samples, seconds). devices: of the ranks, to tell that they are those that the
    plan leaves. Raises ValueError."""
    if "error" in plan:
        raise ValueError(plan["error"])
    if plan.get("format") != FORMAT:
        raise ValueError(f"it is no plan of this version ({FORMAT})")
    measured = [_measured(one["samples"], one["seconds"]) for one in plan["ranks"]]
    left_out = plan.get("predicted", {}).get("without", {}).get("ranks", [])  # by evenstep run, cli/run_plan.h
    left = [one.get("device") for rank, one in enumerate(plan["ranks"]) if rank not in left_out]
    if left_out and len(left) == ranks and devices in (None, left):
        measured = [one for rank, one in enumerate(measured) if rank not in left_out]
    if len(measured) != ranks:
        raise ValueError(f"it was made for {len(measured)} ranks, and these are {ranks}")
    if any(not of_rank for of_rank in measured):
        raise ValueError("a rank in it has no measured size")
    sizes = max(map(len, measured))
    return [[of_rank[number % len(of_rank)] for of_rank in measured] for number in range(sizes) for _ in range(TIMES)]


def _measured(samples: Sequence[Any], seconds: Sequence[Any]) -> list[tuple[int, float]]:
    if len(samples) != len(seconds):
        raise ValueError(f"a rank in it has {len(samples)} sizes and {len(seconds)} times")
    return [(_samples(one), _above_zero(other)) for one, other in zip(samples, seconds)]


def _samples(told: Any) -> int:
    samples = _above_zero(told)
    if samples > MOST_SAMPLES or samples != int(samples):
        raise ValueError(f"{samples:g} in it is no number of samples")
    return int(samples)


def _above_zero(told: Any) -> float:
    try:
        number = float(told)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{number:g} in it is no finite number above 0")
    return number
