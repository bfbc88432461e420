"""Ranks that have no samples because a step with one of theirs would take longer: who, what it gains, when they return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenstep._core import Balancer
from evenstep.environment import kind_of_device

_SURE = 8  # steps in a row: not a trial, nor the one sample that a rank gets now and then to be looked at
_LATE = 1.05  # a rank whose empty steps take so much longer than the others' work still holds them up


class LeftOut:
    """Of one balancer's ranks; the same on all."""

    def __init__(self, ranks: int, batch: int) -> None:
        self._batch = batch
        self._without = [0] * ranks  # steps in a row without samples; below 0: with some
        self._out: dict[int, str] = {}  # rank -> in words

    def take(
        self, balancer: Balancer, timings: Sequence[tuple[int, float]], caps: Sequence[int | None]
    ) -> tuple[int, str] | None:
        """After a step. Where that is news: how many ranks have no samples now, and in words."""
        if sum(samples for samples, _ in timings) != self._batch:
            return None
        back = None
        for rank, (samples, _) in enumerate(timings):
            before = self._without[rank]
            now = self._without[rank] = max(1, before + 1) if samples == 0 else min(-1, before - 1)
            if now == -_SURE and rank in self._out:
                del self._out[rank]
                back = rank
        sure = (rank for rank, steps in enumerate(self._without) if steps == _SURE)
        new = [rank for rank in sure if caps[rank] != 0 and rank not in self._out]
        for rank in new:
            words = _why(balancer, rank, [samples for samples, _ in timings])
            if words:
                self._out[rank] = words
        told = next((rank for rank in new if rank in self._out), None)
        if told is None and back is None:
            return None
        more = len(self._out) - 1
        if told is None and self._out:
            told = next(iter(self._out))
        if told is None:
            return 0, f"rank {back} has samples again"
        return len(self._out), self._out[told] + (f" ({more} more without)" if more else "")


def unknown_before_start(devices: Sequence[str]) -> str:
    """Said of CPUs beside other devices that no profile knows; "" elsewhere."""
    kinds = [kind_of_device(device) for device in devices]
    slow = [rank for rank, kind in enumerate(kinds) if kind == "cpu"]
    if not slow or not any(kind not in ("", "cpu") for kind in kinds):
        return ""
    more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return (
        f"rank {slow[0]} ({devices[slow[0]]}){more} beside other devices: whether steps are shorter with "
        f"{'them' if more else 'it'} shows in the first steps; `evenstep profile` tells before the start, `evenstep plan` by your model"
    )


_NAMED = 3  # ranks that are told of one by one
_SLOW = 0.25  # of the fastest rank's speed: slower ones are asked what they are good for
_HELP = 0.1  # of a step: what they save of it may be less than the exchange and the like take, which no profile knows


class Exchange(NamedTuple):
    """Of a step's gradients, among all ranks."""

    bytes: int
    seconds: float


def before_start(
    shares: Sequence[int],
    speeds: Sequence[float],
    devices: Sequence[str],
    hosts: Sequence[str],
    exchange: Callable[[], Exchange | None] = lambda: None,
) -> str:
    """Which ranks the profile gives no samples, and why, a line each; then of slow ones that have some: where one rank would be left
    without them, which exchanges nothing, how long a step must be for them to make it shorter; else whether they save so little
    that what a profile does not count may be more. "" where there is nothing to say. Speeds are in no unit. `exchange` measures, or
    knows nothing; it is asked on all ranks alike."""
    without = [rank for rank, share in enumerate(shares) if share == 0]
    others = max(share / speed for share, speed in zip(shares, speeds))
    slow = [rank for rank in without if 1 / speeds[rank] > others]
    kept = [device for device, share in zip(devices, shares) if share > 0]
    fix = f"; --devices {','.join(kept)} leaves {'it' if len(slow) == 1 else 'them'} out"
    if len(set(hosts)) > 1 or not all(kept) or len(slow) < len(without):
        fix = ""
    lines = []
    for rank in slow[:_NAMED]:
        named = f" ({devices[rank]})" if devices[rank] else ""
        times = 1 / speeds[rank] / others
        lines.append(
            f"rank {rank}{named} gets no samples: by the profile it would need {times:.3g} times as long for one as the others "
            f"for all {sum(shares)}{fix}"
        )
    if len(slow) > _NAMED:
        lines.append(f"the same is true of {len(slow) - _NAMED} more ranks")
    little = _saves_little(shares, speeds, devices, exchange)
    return "\n".join(lines + ([little] if little else []))


def _saves_little(
    shares: Sequence[int], speeds: Sequence[float], devices: Sequence[str], measure: Callable[[], Exchange | None]
) -> str:
    fastest = max(speed for share, speed in zip(shares, speeds) if share > 0)
    slow = [rank for rank, share in enumerate(shares) if share > 0 and speeds[rank] < _SLOW * fastest]
    if not slow:
        return ""
    step = max(share / speed for share, speed in zip(shares, speeds))
    alone = sum(shares) / math.fsum(speed for rank, speed in enumerate(speeds) if shares[rank] > 0 and rank not in slow)
    saved = max(0.0, 1 - step / alone)
    named = f" ({devices[slow[0]]})" if devices[slow[0]] else ""
    more = f" and {len(slow) - 1} more shorten" if len(slow) > 1 else " shortens"
    them = "them" if len(slow) > 1 else "it"
    says = f"rank {slow[0]}{named}{more} a step by {100 * saved:.2g}% by the profile, which counts"
    exchange = measure() if saved > 0 and len(slow) == len(shares) - 1 else None
    if exchange is not None:
        return (
            f"{says} no exchange: with {them} {exchange.bytes / 1e6:.3g} MB of gradients take {1e3 * exchange.seconds:.3g} ms "
            f"(measured now), so steps are shorter with {them} where one without {them} takes more than "
            f"{1e3 * exchange.seconds / saved:.3g} ms, or less as far as backward hides the exchange; `evenstep plan` measures that"
        )
    if saved >= _HELP:
        return ""
    return (
        f"{says} neither the exchange nor what a step costs whatever its samples: `evenstep plan` measures whether it is shorter "
        f"without {them}"
    )


def _why(balancer: Balancer, rank: int, shares: Sequence[int]) -> str:
    """Empty where it is not the time of a step: a batch too small for all, say."""
    others = max(balancer.predict(other, share) for other, share in enumerate(shares) if share > 0)
    idle, one = balancer.predict(rank, 0), balancer.predict(rank, 1)
    step = max(others, idle)
    if math.isnan(one) or math.isnan(step) or one <= step:
        return ""
    if idle > _LATE * others:
        return (
            f"rank {rank} has no samples, and still takes {1e3 * idle:.3g} ms a step where the others need "
            f"{1e3 * others:.3g} ms: start without it"
        )
    return (
        f"rank {rank} has no samples: {1e3 * step:.3g} ms a step instead of {1e3 * one:.3g}; some again once it needs less "
        f"than {1e3 * step:.3g} for one"
    )
