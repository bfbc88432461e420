"""A split that the script gives, among ranks that are left, and others that have come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import EvenstepError
from evenstep.share_schedule import Schedule, ShareSchedule, in_proportion, places_among


@given(st.integers(0, 200), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_whole_numbers_as_near_to_the_proportions_as_can_be(total: int, weights: list[int]) -> None:
    shares = in_proportion(total, weights)
    assert sum(shares) == total and min(shares) >= 0
    whole = sum(weights)
    for share, weight in zip(shares, weights):
        if whole:
            assert abs(share - total * weight / whole) < 1
            assert weight or not share
        else:
            assert abs(share - total / len(weights)) < 1


def test_what_was_a_lost_ranks_goes_to_the_others_in_the_proportions_of_theirs() -> None:
    numbers: list[int] = []

    def split(number: int, batch: int) -> list[int]:
        numbers.append(number)
        return [6, 4, 2]

    whole = Schedule(split, 3)
    assert whole.shares(0, 12) == [6, 4, 2] and whole.take_news() == ""
    left = whole.among([0, 2])
    assert left.shares(7, 12) == [9, 3] and numbers == [0, 7]
    assert "the share of rank 1 goes to the others" in left.take_news()
    assert left.shares(8, 12) == [9, 3] and left.take_news() == ""  # told once
    assert left.among([2]).shares(9, 12) == [12]
    assert left.among([2, 0, 1]).shares(9, 12) == [2, 6, 4]  # others have taken the places: nobody's is missing


def test_blocks_stay_whole() -> None:
    left = Schedule(lambda number, batch: [5, 6, 4], 3).among([0, 1])
    assert left.shares(0, 15, block=2) == [8, 7]  # eight blocks, of which the last is smaller


def test_who_had_nothing_left_to_share_shares_alike() -> None:
    assert Schedule(lambda number, batch: [batch, 0, 0], 3).among([1, 2]).shares(0, 7) == [4, 3]


def test_one_that_asks_how_many_ranks_there_are_is_taken_at_its_word() -> None:
    left = Schedule(lambda number, batch: [batch - 1, 1], 3).among([1, 2])
    assert left.shares(0, 8) == [7, 1] and left.take_news() == ""


def test_who_comes_beyond_all_places_gets_the_mean_of_the_others() -> None:
    more = Schedule(lambda number, batch: [6, 2], 2).among([0, 1, None, None])
    assert more.shares(0, 8) == [3, 1, 2, 2]
    assert "the mean of the others' shares" in more.take_news()


@pytest.mark.parametrize("given", [[6, 4], [6, 4, 1], [13, -1, 0], [], [3, 3, 3, 3]])
def test_a_wrong_split_is_refused(given: list[int]) -> None:
    with pytest.raises(
        EvenstepError, match=r"gave .* for batch 5 of 12 samples on 3 ranks\n  fix: return 3 whole numbers"
    ):
        Schedule(lambda number, batch: given, 3).shares(5, 12)


def test_shares_without_end_are_refused() -> None:
    endless = Schedule(lambda number, batch: itertools.repeat(4), 3)  # type: ignore[arg-type, return-value]
    for ranks in (endless, endless.among([0])):
        with pytest.raises(EvenstepError, match=r"gave 4 shares or more: \[4, 4, 4, 4\] for batch 5 of 12 samples"):
            ranks.shares(5, 12)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda number, batch: None, r"TypeError: it returned nothing \(None\)"),
        (lambda number, batch: [4.5, 4, 3.5], r"ValueError: 4.5 is no whole number of samples"),
        (lambda number, batch: {12: 0, 0: 0}, r"TypeError: it returned a dict, .*"),
        (lambda number, batch: 1 // 0, r"ZeroDivisionError: .*"),
    ],
)
def test_a_function_that_fails_is_named_with_its_place(split: ShareSchedule, words: str) -> None:
    place = r"<lambda> \(test_share_schedule.py:\d+\) failed for batch 5 of 12 samples on 3 ranks: "
    with pytest.raises(EvenstepError, match=place + words + r"\n  fix: return 3 whole numbers"):
        Schedule(split, 3).shares(5, 12)


@pytest.mark.parametrize(
    ("told", "ranks", "wanted"),
    [
        ([0, 2], 3, [0, 2]),
        ([0, 2, None], 3, [0, 2, 1]),
        ([2, None, None], 3, [2, 0, 1]),
        ([0, 1, None, None], 3, [0, 1, 2, None]),
    ],
)
def test_who_comes_takes_a_place_that_is_free(told: list[int | None], ranks: int, wanted: list[int | None]) -> None:
    assert places_among(told, ranks) == wanted
