"""The balancer through the extension: exact splits, learning, and errors that say what to do."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenstep as es
from evenstep import _core


def tables(max_ranks, max_points=5):
    point = st.tuples(st.integers(1, 4), st.floats(0, 10, allow_nan=False))

    def table(start, steps):
        samples, seconds, points = start, 0.0, []
        for more_samples, more_seconds in steps:
            seconds += more_seconds
            points.append((samples, seconds))
            samples += more_samples
        return points

    one = st.builds(table, st.integers(0, 3), st.lists(point, min_size=1, max_size=max_points))
    return st.lists(one, min_size=1, max_size=max_ranks)


def seconds_of(table, samples):
    """The table's documented meaning, written once more."""
    points = list(table)
    if samples <= points[0][0]:
        return points[0][1] if samples == points[0][0] else points[0][1] * samples / points[0][0]
    if len(points) == 1:
        return points[0][1] if points[0][0] == 0 else points[0][1] * samples / points[0][0]
    segment = ((0, 0.0), (1, 0.0))
    for segment in itertools.pairwise(points):
        if samples <= segment[1][0]:
            break
    (b0, t0), (b1, t1) = segment
    return t0 + (t1 - t0) * (samples - b0) / (b1 - b0)


@settings(max_examples=150, deadline=None)
@given(tables(max_ranks=3), st.integers(1, 12))
def test_no_split_is_faster(some_tables, batch):
    shares, step = _core.balance(some_tables, batch)
    assert sum(shares) == batch and min(shares) >= 0
    best = min(
        max(seconds_of(table, b) for table, b in zip(some_tables, split, strict=True))
        for split in itertools.product(range(batch + 1), repeat=len(some_tables))
        if sum(split) == batch
    )
    assert step == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert max(seconds_of(t, b) for t, b in zip(some_tables, shares, strict=True)) == pytest.approx(
        best, rel=1e-9, abs=1e-12
    )


@settings(max_examples=60, deadline=None)
@given(tables(max_ranks=8), st.integers(1, 10**9), st.data())
def test_caps_hold(some_tables, batch, data):
    caps = data.draw(st.lists(st.none() | st.integers(0, batch), min_size=len(some_tables), max_size=len(some_tables)))
    room = sum(batch if cap is None else cap for cap in caps)
    if room < batch:
        with pytest.raises(es.EvenstepError, match="fewer than the batch"):
            _core.balance(some_tables, batch, caps)
        return
    shares, _ = _core.balance(some_tables, batch, caps=caps)
    assert sum(shares) == batch
    assert all(cap is None or share <= cap for share, cap in zip(shares, caps, strict=True))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.05, 20.0), min_size=2, max_size=6),
    st.sampled_from(["equal", "proportional", "dynamic", "hybrid"]),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_every_rank_computes_the_same_shares(slowness, policy, batch, random):
    ranks = len(slowness)
    copies = [_core.Balancer(policy, ranks, batch, speeds=[1 / s for s in slowness]) for _ in range(2)]
    for _ in range(12):
        shares = copies[0].shares()
        assert shares == copies[1].shares()
        assert sum(shares) == batch and min(shares) >= 0
        timings = [
            (b, (0.01 + s * max(b, 1)) * random.uniform(0.8, 1.2)) for s, b in zip(slowness, shares, strict=True)
        ]
        for copy in copies:
            copy.observe(timings)


@pytest.mark.parametrize("policy", ["dynamic", "hybrid"])
def test_quarter_speed_gets_a_fifth(policy):
    balancer = _core.Balancer(policy, 2, 100)
    assert balancer.policy == policy
    assert balancer.shares() == [50, 50]
    for _ in range(6):
        fast, slow = balancer.shares()
        balancer.observe([(fast, 0.001 * fast), (slow, 0.004 * slow)])
    assert balancer.shares() == [80, 20]
    assert balancer.predict(1, 20) == pytest.approx(0.08, rel=0.01)
    assert balancer.shares(10) == [8, 2]


def test_proportional_believes_the_profile_only():
    balancer = _core.Balancer("proportional", 2, 100, speeds=[1, 0.25])
    for _ in range(6):
        balancer.observe([(80, 1.0), (20, 9.0)])
    assert balancer.shares() == [80, 20]


def test_wrong_input():
    with pytest.raises(es.EvenstepError, match="hybrid"):
        _core.Balancer("hybird", 2, 10)
    with pytest.raises(es.EvenstepError, match="speed of rank 1"):
        _core.Balancer("hybrid", 2, 10, speeds=[1, -1])
    with pytest.raises(ValueError, match="3 speeds were given for 2 ranks"):
        _core.Balancer("hybrid", 2, 10, speeds=[1, 1, 1])
    with pytest.raises(es.EvenstepError, match="at least 1"):
        _core.Balancer("hybrid", 2, 0)
    with pytest.raises(TypeError):
        _core.Balancer("hybrid", 2, 10, caps=["a", 1])
    balancer = _core.Balancer("hybrid", 2, 10)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(es.EvenstepError, match="rank 1"):
            balancer.observe([(5, 1.0), (5, bad)])
    with pytest.raises(ValueError, match="1 timings"):
        balancer.observe([(5, 1.0)])
    with pytest.raises(ValueError, match="pairs"):
        balancer.observe([(5, 1.0), (5,)])
    with pytest.raises(ValueError, match="no rank 2"):
        balancer.predict(2, 1)
    assert math.isnan(balancer.predict(0, 1))
    with pytest.raises(es.EvenstepError, match="no points"):
        _core.balance([[]], 1)
    with pytest.raises(es.EvenstepError, match="no ranks"):
        _core.balance([], 1)
