"""Policies of the user's own: what they are told, and what becomes of their mistakes."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Union

from evenstep._core import EvenstepError
from evenstep.environment import POLICIES


@dataclass(frozen=True)
class PolicyView:
    """What a policy is told; lists have one entry a rank. The same on every rank."""

    batch: int  # samples to be shared out now: the global batch, or a smaller last one
    steps: int  # observed so far
    caps: list[int | None]  # most samples
    last: list[tuple[int, float]] | None  # (samples, busy seconds) of the last observed step
    fixed_seconds: list[float]  # what is believed: a rank is busy for fixed_seconds + samples * seconds_per_sample;
    seconds_per_sample: list[float]  # nan while nothing was observed of it
    proposed: list[int]  # the best split by what is believed; before that by the prior speeds

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return len(self.proposed)

    def seconds(self, rank: int, samples: int) -> float:
        """What `rank` is believed to need for so many samples; nan while unknown."""
        return self.fixed_seconds[rank] + samples * self.seconds_per_sample[rank]


# Gives one share a rank, >= 0, that add up to view.batch. Every rank asks its own copy: it must depend on the view alone.
PolicyFunction = Callable[[PolicyView], Sequence[int]]
Policy = Union[str, PolicyFunction]


def check_policy(policy: object) -> None:
    """Raises TypeError or ValueError for what is no policy."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"es.prepare(policy={policy!r}): choose one of {', '.join(POLICIES)}, or give a function")
    elif policy is not None and not callable(policy):
        raise TypeError(
            f"es.prepare(policy=…) takes a name ({', '.join(POLICIES)}) or a function of a PolicyView that returns one "
            f"share a rank, not a {type(policy).__name__}"
        )


def for_balancer(policy: Policy) -> str | Callable[..., Sequence[int]]:
    """As _core.Balancer takes it."""
    if isinstance(policy, str):
        return policy
    name = named(policy)

    def ask(*told: object) -> list[int]:
        view = PolicyView(*told)  # type: ignore[arg-type]
        ranks, caps = view.ranks, list(view.caps)  # it may change its lists in place
        try:
            shares = whole_numbers(policy(view), ranks)
        except Exception as error:
            raise _wrong(name, view, "failed", f": {type(error).__name__}: {error}") from error
        if len(shares) != ranks or min(shares) < 0 or sum(shares) != view.batch:
            raise _wrong(name, view, f"gave {ranks} ranks {shown(shares, ranks)}")
        for rank, (share, cap) in enumerate(zip(shares, caps)):
            if cap is not None and share > cap:
                raise _wrong(name, view, f"gave rank {rank} {share} samples, more than its cap of {cap} (view.caps)")
        return shares

    return ask


def named(policy: Callable[..., Any]) -> str:
    """As errors name it, with its place: of many lambdas one is meant."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    code = getattr(inspect.unwrap(policy), "__code__", None)
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def whole_numbers(answer: Any, most: int) -> list[int]:
    """Whatever has one number a rank, in an order; of more than `most` numbers, which may be without end, one more. Raises
    TypeError or ValueError."""
    if answer is None:
        raise TypeError("it returned nothing (None)")
    if isinstance(answer, (Mapping, Set)):
        raise TypeError(
            f"it returned a {type(answer).__name__}, of which the order, or the keys, would be taken for shares"
        )
    return [_whole(share) for share in itertools.islice(answer, most + 1)]


def shown(shares: Sequence[int], most: int) -> str:
    """Those of whole_numbers, in an error."""
    return f"{shares}" if len(shares) <= most else f"{len(shares)} shares or more: {shares}"


def _whole(share: Any) -> int:
    """NumPy's and torch's numbers too, and 3.0; 2.5 is no share."""
    number = int(share)
    if number != share:
        raise ValueError(f"{share} is no whole number of samples")
    return number


def _wrong(name: str, view: PolicyView, did: str, why: str = "") -> EvenstepError:
    return EvenstepError(
        f"the policy {name} {did} for a batch of {view.batch} after {view.steps} steps{why}\n"
        "  fix: return one whole number >= 0 for each rank, within view.caps, that add up to view.batch; evaluation asks "
        "too, with its own batch sizes"
    )
