"""The balancer through the extension: exact splits, learning, and errors that say what to do."""

import functools
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenstep as es
from evenstep import _core
from evenstep.prepare_options import check_bucket
from evenstep.shares import Shares


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
    for segment in zip(points, points[1:]):
        if samples <= segment[1][0]:
            break
    (b0, t0), (b1, t1) = segment
    return t0 + (t1 - t0) * (samples - b0) / (b1 - b0)


@settings(max_examples=150, deadline=None)
@given(tables(max_ranks=3), st.integers(1, 12))
def test_no_split_is_faster(some_tables, batch):
    shares, step = _core.balance(some_tables, batch)
    assert len(shares) == len(some_tables) and sum(shares) == batch and min(shares) >= 0
    best = min(
        max(seconds_of(table, b) for table, b in zip(some_tables, split))
        for split in itertools.product(range(batch + 1), repeat=len(some_tables))
        if sum(split) == batch
    )
    assert step == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert max(seconds_of(t, b) for t, b in zip(some_tables, shares)) == pytest.approx(best, rel=1e-9, abs=1e-12)


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
    assert len(shares) == len(caps) and sum(shares) == batch
    assert all(cap is None or share <= cap for share, cap in zip(shares, caps))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.05, 20.0), min_size=2, max_size=6),
    st.sampled_from(["auto", "equal", "proportional", "dynamic", "hybrid"]),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_every_rank_computes_the_same_shares(slowness, policy, batch, random):
    ranks = len(slowness)
    copies = [_core.Balancer(policy, ranks, batch, speeds=[1 / s for s in slowness]) for _ in range(2)]
    for _ in range(12):
        shares = copies[0].shares()
        assert shares == copies[1].shares()
        assert len(shares) == ranks and sum(shares) == batch and min(shares) >= 0
        timings = [(b, (0.01 + s * max(b, 1)) * random.uniform(0.8, 1.2)) for s, b in zip(slowness, shares)]
        for copy in copies:
            copy.observe(timings)


@pytest.mark.parametrize("policy", ["auto", "dynamic", "hybrid"])
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


def cost_of(table, samples, constant, bucket, micro_batch):
    """The documented meaning: micro-batch after micro-batch, each padded to whole buckets."""
    seconds = constant + (seconds_of(table, 0) if samples == 0 else 0)
    while samples > 0:
        now = min(samples, micro_batch or samples)
        seconds += seconds_of(table, -(-now // bucket) * bucket if bucket else now)
        samples -= now
    return seconds


@settings(max_examples=150, deadline=None)
@given(tables(max_ranks=3), st.integers(1, 12), st.data())
def test_no_split_is_faster_whatever_a_share_costs(some_tables, batch, data):
    ranks = len(some_tables)
    constants = data.draw(st.lists(st.floats(0, 5), min_size=ranks, max_size=ranks))
    buckets = data.draw(st.lists(st.none() | st.integers(1, 8), min_size=ranks, max_size=ranks))
    micro_batches = data.draw(st.lists(st.none() | st.integers(1, 8), min_size=ranks, max_size=ranks))
    shares, step = _core.balance(
        some_tables, batch, constant_seconds=constants, buckets=buckets, micro_batches=micro_batches
    )
    assert sum(shares) == batch and min(shares) >= 0

    def step_of(split):
        costs = zip(some_tables, split, constants, buckets, micro_batches)
        return max(cost_of(table, b, constant, bucket, micro) for table, b, constant, bucket, micro in costs)

    splits = itertools.product(range(batch + 1), repeat=ranks)
    best = min(step_of(split) for split in splits if sum(split) == batch)
    assert step == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert step_of(shares) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_best_micro_batch():
    table = [(1, 1.0), (8, 1.2), (16, 2.0), (32, 4.8)]  # 0.15, 0.125 and 0.15 seconds a sample
    assert _core.best_micro_batch(table, 64) == 16
    assert _core.best_micro_batch(table, 12) == 12
    with pytest.raises(ValueError, match="at least 1"):
        _core.best_micro_batch(table, 0)
    with pytest.raises(es.EvenstepError, match="fall at point 1"):
        _core.best_micro_batch([(1, 2.0), (2, 1.0)], 4)


def test_caps_change_and_buckets_are_kept():
    balancer = _core.Balancer("auto", 2, 64, buckets=[16, None])
    for _ in range(8):
        first, second = balancer.shares()
        balancer.observe([(first, 0.016 * -(-first // 16)), (second, 0.002 * second)])
    assert balancer.shares() == [48, 16]
    balancer.set_caps([32, None])
    assert balancer.shares() == [32, 32]
    with pytest.raises(es.EvenstepError, match="2 fewer than the batch"):
        balancer.set_caps([31, 31])
    balancer.set_caps(None)
    balancer.observe([(32, 0.032), (32, 0.064)])
    assert balancer.shares() == [48, 16]


class Told:
    """A policy that keeps what it was told and returns what it was set to."""

    def __init__(self, answer):
        self.answer, self.views = answer, []

    def __call__(self, view):
        self.views.append(view)
        return self.answer(view) if callable(self.answer) else self.answer


def test_policy_of_ones_own():
    policy = Told(lambda view: [view.batch - view.batch // 4, view.batch // 4])
    shares = Shares(policy, 2, 40, speeds=(3.0, 1.0))
    assert shares.draw(40, step=0) == [30, 10]
    assert shares.draw(40, step=0) == [30, 10]
    assert len(policy.views) == 1  # all batches of a step have the same shares
    view = policy.views[0]
    assert (view.batch, view.steps, view.ranks, view.last, view.caps) == (40, 0, 2, None, [None, None])
    assert view.proposed == [30, 10] and math.isnan(view.seconds(0, 8))
    for _ in range(4):
        shares.observe([(30, 0.030), (10, 0.020)], 0.03)
    assert shares.draw(8, step=4) == [6, 2]
    view = policy.views[-1]
    assert (view.batch, view.steps, view.last) == (8, 4, [(30, 0.030), (10, 0.020)])
    assert view.seconds(1, 10) == pytest.approx(0.020, rel=0.01)
    assert view.proposed == [5, 3]
    assert shares.turned() is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 2], r"Told gave 2 ranks \[1, 2\] for a batch of 40 after 0 steps"),
        ([41, -1], r"Told gave 2 ranks \[41, -1\]"),
        ([40], r"Told gave 2 ranks \[40\]"),
        ([], r"Told gave 2 ranks \[\]"),
        (lambda view: itertools.repeat(20), r"Told gave 2 ranks 3 shares or more: \[20, 20, 20\]"),
        (lambda view: view.proposed.append(4) or view.proposed, r"Told gave 2 ranks 3 shares or more: \[20, 20, 4\]"),
        (lambda view: view.proposed.pop() and [38], r"Told gave 2 ranks \[38\]"),
        ([20.5, 19.5], "Told failed .*: 20.5 is no whole number of samples"),
        ([float("nan"), 40], "Told failed .*: ValueError"),
        (["a", "b"], "ValueError"),
        (None, r"TypeError: it returned nothing \(None\)"),
        ({0: 20, 40: 20}, "TypeError: it returned a dict"),
        ({0, 40}, "TypeError: it returned a set"),
        (lambda view: view.nothing, "has no attribute 'nothing'"),
    ],
)
def test_nonsense_of_a_policy_of_ones_own(answer, words):
    shares = Shares(Told(answer), 2, 40)
    with pytest.raises((es.EvenstepError, ValueError), match=words):
        shares.draw(40, step=0)


def test_a_policy_of_ones_own_is_held_to_caps_and_named_with_its_place():
    shares = Shares(functools.partial(lambda view, rest: [view.batch - rest, rest], rest=8), 2, 40, caps=[None, 6])
    where = r"<lambda> \(test_balancer.py:\d+\) gave rank 1 8 samples, more than its cap of 6"
    with pytest.raises(es.EvenstepError, match=where):
        shares.draw(40, step=0)


def test_buckets_stay_with_their_rank():
    """Through another batch size, and among other ranks."""
    shares = Shares("hybrid", 2, 66, speeds=(3.0, 1.0), buckets=[8, None])
    assert shares.draw(66) == [48, 18]
    assert shares.of_batch(40).draw(40)[0] % 8 == 0
    other = shares.anew(None, [None] * 3, [None] * 3, [None, 16, None])
    assert other.given_buckets == [None, 16, None] and other.draw(66)[1] == 16


@pytest.mark.parametrize(
    ("bucket", "trains", "schedule", "exact", "error"),
    [
        ("8", True, None, False, TypeError),
        (True, True, None, False, TypeError),
        (0, True, None, False, ValueError),
        (2**21, True, None, False, ValueError),
        (8, False, None, False, ValueError),
        (8, True, len, False, ValueError),
        (8, True, None, True, ValueError),
    ],
)
def test_buckets_that_make_no_sense(bucket, trains, schedule, exact, error):
    with pytest.raises(error, match="bucket"):
        check_bucket(bucket, trains, schedule, exact)
    check_bucket(8, True, None, False)


def test_the_solver_has_a_public_name():
    tables = [[(16, 0.020), (32, 0.036)], [(4, 0.032), (8, 0.048)]]
    shares, seconds = es.balance(tables, 64, buckets=[8, None], constant_seconds=[0.002, 0], micro_batches=[None, 6])
    assert (shares, seconds) == _core.balance(tables, 64, None, [0.002, 0], [8, None], [None, 6])
    assert shares[0] % 8 == 0 and sum(shares) == 64
    with pytest.raises(es.EvenstepError, match="caps"):
        es.balance(tables, 64, caps=[8, 8])
    assert es.balance(tables, 64, caps=[None, 0])[0] == [64, 0]
    for name, numbers in (("caps", [None, -1]), ("buckets", [8, 0]), ("micro_batches", (-8, 0))):
        with pytest.raises(ValueError, match=rf"es.balance\({name}=…\): rank . has (-1|0|-8); give"):
            es.balance(tables, 64, **{name: numbers})


def test_no_policy():
    with pytest.raises(TypeError, match="name of one, or a function"):
        _core.Balancer(3, 2, 10)
    with pytest.raises(es.EvenstepError, match="choose auto"):
        _core.Balancer("callback", 2, 10)
    with pytest.raises(ValueError, match="'hybird'"):
        es.prepare(object(), policy="hybird")
    with pytest.raises(TypeError, match="not a int"):
        es.prepare(object(), policy=3)


def test_turns_are_told_once():
    """A profile that is right about a pair of ranks that suit one split alone."""
    shares = Shares("auto", 2, 64, speeds=(3.0, 1.0))
    drawn = [shares.draw(64, step=step) for step in range(3)]
    told = []
    for step in range(600):
        first, second = drawn.pop(0)
        tilt = 1 + 4 * abs(first - 48) / 64
        noise = 1 + 0.02 * math.sin(step)
        shares.observe([(first, 0.001 * first * tilt), (second, 0.0014 * second * tilt * noise)], math.nan)
        drawn.append(shares.draw(64, step=step + 3))
        told += [turned] if (turned := shares.turned()) is not None else []
    assert len(told) == 1
    number, words = told[0]
    assert number == 2 and ", profile 48" in words
    assert drawn[-1] == [48, 16]


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
