"""es.AdaptBatch: a global batch that follows the gradient noise scale, between bounds, with a learning-rate rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenstep._core import EvenstepError

RULES = ("linear", "sqrt", "adascale", "none")
_TIMES = 2  # the batch doubles once the noise scale is so many times as large, and halves once it is as much smaller
_NOTEWORTHY = 1.05  # a gain of AdaScale that has changed by less stays


@dataclass(frozen=True)
class AdaptBatch:
    """es.prepare(adapt_batch=…): how the global batch follows the gradient noise scale (docs/balancing.md).

    least, most: bounds in samples of the global batch (least: None, the loader's batch_size). lr_rule: what the learning
    rates are multiplied by when the batch becomes k times the loader's: "linear" k, "sqrt" the root of k, "adascale" the
    gain that is measured, "none" 1. every: optimizer steps between two decisions, or "epoch".
    """

    most: int
    lr_rule: str
    least: int | None = None
    every: int | str = 100

    def __post_init__(self) -> None:
        for name in ("most", "least"):
            value = getattr(self, name)
            if not (name == "least" and value is None) and not _is_count(value):
                raise ValueError(f"es.AdaptBatch({name}={value!r}): give a whole number of samples, at least 1")
        if self.least is not None and self.least > self.most:
            raise ValueError(f"es.AdaptBatch(least={self.least}, most={self.most}): the bounds are the wrong way round")
        if self.lr_rule not in RULES:
            raise ValueError(f"es.AdaptBatch(lr_rule={self.lr_rule!r}): choose {', '.join(map(repr, RULES))}")
        if self.every != "epoch" and not _is_count(self.every):
            raise ValueError(f"es.AdaptBatch(every={self.every!r}): give a number of steps, at least 1, or 'epoch'")

    @property
    def stride(self) -> int:
        """Steps from one measurement to the next: some twenty for each decision, every tenth at least."""
        return min(10, max(1, self.every // 20)) if isinstance(self.every, int) else 10

    @property
    def enough(self) -> int:
        """Measurements before the first decision."""
        return min(10, max(1, self.every // self.stride)) if isinstance(self.every, int) else 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_adapt(text: str) -> AdaptBatch:
    """ "64:1024,lr=sqrt,every=100"; the last part may be missing. Raises EvenstepError."""
    bounds, *rest = text.split(",")
    least, colon, most = bounds.partition(":")
    given = dict(part.split("=", 1) for part in rest if "=" in part)
    try:
        if not colon or len(given) != len(rest) or not set(given) <= {"lr", "every"}:
            raise ValueError("not LEAST:MOST,lr=RULE[,every=N|epoch]")
        if "lr" not in given:
            raise ValueError("no learning-rate rule")
        every: int | str = given.get("every", "100")
        every = every if every == "epoch" else int(every)
        return AdaptBatch(int(most), given["lr"], int(least), every)
    except ValueError as error:
        raise EvenstepError(
            f"EVENSTEP_BATCH_ADAPT (--batch-adapt) is {text!r}: {error}\n"
            f"  fix: give bounds and a learning-rate rule ({', '.join(RULES)}): 64:1024,lr=sqrt,every=100"
        ) from None


@dataclass(frozen=True)
class Decision:
    batch: int
    why: str = ""  # where the batch is not what the noise scale asks for; "": nothing to say

    @property
    def words(self) -> str:
        return f"; {self.why}" if self.why else ""


def decide(now: int, wanted: float, least: int, most: int, memory: int | None) -> Decision:
    """The batch after `now` where the noise scale asks for `wanted` samples. memory: the most that the ranks together are
    known to hold."""
    if math.isnan(wanted):
        return Decision(now)
    if now > most or now < least:  # the loader's own is outside the bounds
        return _within(now, min(max(now, least), most), memory)
    if wanted >= _TIMES * now and now < most:
        return _within(now, min(_TIMES * now, most), memory)
    if wanted <= now / _TIMES and now > least:
        return Decision(max(-(-now // _TIMES), least))
    return Decision(now)


def _within(now: int, batch: int, memory: int | None) -> Decision:
    if memory is None or batch <= memory or batch <= now:
        return Decision(batch)
    return Decision(max(now, memory), f"memory holds {memory} samples")


def factor_of(rule: str, base: int, batch: int, gain: float, before: float) -> float:
    """What the learning rates are multiplied by. gain: AdaScale's, as measured; before: the factor until now."""
    if rule == "linear":
        return batch / base
    if rule == "sqrt":
        return math.sqrt(batch / base)
    if rule == "none" or batch == base:
        return 1.0
    return gain if not 1 / _NOTEWORTHY < gain / before < _NOTEWORTHY else before
