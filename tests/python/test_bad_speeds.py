"""Speeds that are none: refused with the rank and the reason where somebody gives them, borne where they are measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenstep as es
from evenstep import _core
from evenstep.environment import read_environment

POLICIES = ("auto", "equal", "proportional", "dynamic", "hybrid")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_given_ones_are_refused(policy: str, bad: float) -> None:
    with pytest.raises(es.EvenstepError, match=r"the speed of rank 1 is .*\n.*fix: give each rank a positive speed"):
        _core.Balancer(policy, 3, 10, speeds=[1.0, bad, bad])


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "1e999", "", "fast"])
def test_a_launchers_are_refused(bad: str) -> None:
    with pytest.raises(es.EvenstepError, match="it needs 2 positive numbers"):
        read_environment({"RANK": "0", "WORLD_SIZE": "2", "EVENSTEP_SPEEDS": f"1,{bad}"})


def test_speeds_that_no_device_has_still_make_a_split() -> None:
    for speeds in ([1e-308, 1e308], [5e-324, 1.0], [1e308, 1e308]):
        for policy in POLICIES:
            shares = _core.Balancer(policy, 2, 64, speeds=speeds).shares()
            assert sum(shares) == 64 and min(shares) >= 0, (speeds, policy, shares)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(st.sampled_from([0.0, 5e-324, 1e-9, 0.01, 1.0, 1e9, 1e308]), min_size=6, max_size=6),
)
def test_measured_times_of_any_size_and_batches_smaller_than_the_ranks(
    policy: str, ranks: int, batch: int, seconds: list[float]
) -> None:
    balancer = _core.Balancer(policy, ranks, batch)
    for _ in range(20):
        shares = balancer.shares()
        assert len(shares) == ranks and sum(shares) == batch and min(shares) >= 0
        balancer.observe([(share, seconds[rank]) for rank, share in enumerate(shares)])
    assert sum(balancer.shares(1)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9])
def test_times_that_are_none_teach_nothing(bad: float) -> None:
    balancer, twin = (_core.Balancer("hybrid", 2, 64) for _ in range(2))
    for _ in range(12):
        shares = balancer.shares()
        timings = [(shares[0], 0.001 * shares[0] + 1e-4), (shares[1], 0.004 * shares[1] + 1e-4)]
        with pytest.raises(es.EvenstepError, match="rank 1"):
            balancer.observe([timings[0], (shares[1], bad)])
        for one in (balancer, twin):
            one.observe(timings)
    assert balancer.shares() == twin.shares() != [32, 32]
