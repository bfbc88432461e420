"""Policies of the user's own: what they are told, and what becomes of their mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    name = getattr(policy, "__qualname__", type(policy).__qualname__)

    def ask(*told: object) -> list[int]:
        view = PolicyView(*told)  # type: ignore[arg-type]
        try:
            shares = [_whole(share) for share in policy(view)]
        except Exception as error:
            raise _wrong(name, view, "failed", f": {type(error).__name__}: {error}") from error
        if len(shares) != view.ranks or min(shares) < 0 or sum(shares) != view.batch:
            raise _wrong(name, view, f"gave {view.ranks} ranks {shares}")
        return shares

    return ask


def _whole(share: Any) -> int:
    """NumPy's and torch's numbers too, and 3.0; 2.5 is no share."""
    number = int(share)
    if number != share:
        raise ValueError(f"{share} is no whole number of samples")
    return number


def _wrong(name: str, view: PolicyView, did: str, why: str = "") -> EvenstepError:
    return EvenstepError(
        f"the policy {name} {did} for a batch of {view.batch} after {view.steps} steps{why}\n"
        "  fix: return one whole number >= 0 for each rank, that add up to view.batch; evaluation asks too, with its own "
        "batch sizes"
    )
