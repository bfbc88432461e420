"""`evenstep run --recovery shrink` of a job that trains in process sets: a set goes on without its lost ranks, the others undisturbed."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import set_generation_cases as cases
from run_jobs import Run

from evenstep.set_generations import SetBoard

Script = Callable[[str], str]
SHRINK = ("-n", "4", "--no-pin", "--no-monitor", "--log-rank", "all", "--recovery", "shrink")
NOBODY = re.compile(r"process set '(\S+)' is lost with (ranks? [\d, and]+): nobody trains its model any more")


def train(run: Run, script: Script, deaths: str, sets: str, source: str = cases.SETS) -> str:
    result = run(*SHRINK, script(source), deaths, sets)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    return text


def assert_trained(text: str, sets: str, lost: set[int]) -> None:
    """Those that are left of each set have its whole model, and made a pass more where they lost a rank."""
    parts = [[int(rank) for rank in part] for part in sets.split(",")]
    ends = {
        int(rank): words for rank, *words in re.findall(r"rank (\d) of (\d) at step 18: (\S+) apart, rate kept", text)
    }
    made = {
        int(rank): tuple(map(int, words))
        for rank, *words in re.findall(r"rank (\d): (\d+) passes, generation (\d+), (\d)", text)
    }
    outside = dict(re.findall(r"rank (\d) ended outside as (\d of \d)", text))
    left = [rank for rank in range(4) if rank not in lost]
    assert sorted(outside) == [str(rank) for rank in left], text
    assert [outside[str(rank)] for rank in left] == [f"{place} of {len(left)}" for place in range(len(left))], text
    for part in parts:
        members = [rank for rank in part if rank not in lost]
        disturbed = 0 < len(members) < len(part)
        for rank in members:
            count, apart = ends[rank]
            passes, generation, size = made[rank]
            assert int(count) == size == len(members) and float(apart) < 1e-12, text
            assert (passes > 18) == (generation > 0) == disturbed, text
    assert sorted(ends) == sorted(made) == sorted(rank for part in parts for rank in part if rank not in lost), text


@pytest.mark.parametrize(
    ("sets", "deaths", "lost"),
    [
        ("012,3", "0@voted:3", {0}),  # who keeps the job's store
        pytest.param("01,23", "3@forward:3", {3}, marks=pytest.mark.more),
        pytest.param("01,23", "2@commit:3,1@applied:3", {1, 2}, marks=pytest.mark.more),
        pytest.param("23,01", "0@committed:4", {0}, marks=pytest.mark.more),
        pytest.param("012,3", "0@forward:3,1@met:3", {0, 1}, marks=pytest.mark.more),
        pytest.param("12,3", "0@forward:0,1@vote:5", {1}, marks=pytest.mark.more),  # rank 0 is in none
    ],
)
def test_a_set_goes_on_without_its_lost_ranks_and_the_others_undisturbed(
    run: Run, script: Script, sets: str, deaths: str, lost: set[int]
) -> None:
    text = train(run, script, deaths, sets)
    assert_trained(text, sets, lost)
    assert not NOBODY.findall(text), text


def test_a_set_that_is_lost_as_a_whole_is_told_once(run: Run, script: Script) -> None:
    text = train(run, script, "0@forward:3,1@forward:3", "01,23")
    assert_trained(text, "01,23", {0, 1})
    assert NOBODY.findall(text) == [("set-1", "ranks 0 and 1")], text


@pytest.mark.more
def test_a_barrier_of_all_waits_for_a_set_that_trains_on(run: Run, script: Script) -> None:
    assert_trained(train(run, script, "1@forward:8", "01,23", cases.WAITED), "01,23", {1})


@pytest.mark.more
def test_sets_that_share_a_rank_start_again(run: Run, script: Script) -> None:
    result = run(*SHRINK, script(cases.SHARED), "3@forward:3")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "the others cannot go on without rank 3: rank 0: it trains in process sets that share ranks" in text
    assert "restart 1 of 3" in text and text.count("] ended") == 4, text


class _Job:
    """The agent's memory of four ranks: `gone` says in which generation each went."""

    ranks = 4

    def __init__(self) -> None:
        self.gone: dict[int, int] = {}
        self.number = 0
        self.doubts: list[tuple[int, int]] = []

    def lose(self, rank: int) -> None:
        self.number += 1
        self.gone[rank] = self.number

    def number_of(self, ranks: tuple[int, ...]) -> int:
        return max(self.gone.get(rank, 0) for rank in ranks)

    def has(self, rank: int, number: int) -> bool:
        assert number > self.number - 64, "that row holds another generation by now"
        return self.gone.get(rank, number + 1) > number

    def wait(self, after: int, seconds: float) -> int:
        return self.number

    def doubt(self, rank: int, number: int) -> None:
        self.doubts.append((rank, number))


def _board(rank: int) -> tuple[SetBoard, _Job]:
    class Whole:
        memory, job_rank, number, hindrance = _Job(), rank, 0, ""

    whole: Any = Whole()
    return SetBoard(whole, {"a": (0, 1), "b": (2, 3)}, "ab"[rank // 2]), whole.memory


def test_what_happens_to_another_set_is_no_generation_of_this_one() -> None:
    board, job = _board(2)
    for number in range(1, 80):
        job.lose(1)
        assert job.number == number and board.number == 0
    assert [rank for rank in range(4) if board.has(rank, 0)] == [2, 3]
    job.lose(3)
    assert board.number == 80 and [rank for rank in range(4) if board.has(rank, 80)] == [2]


def test_who_waits_for_another_generation_says_so_in_each_of_the_jobs() -> None:
    board, job = _board(2)
    board.doubt(2, 0)
    job.lose(1)
    assert board.wait(0, 0.0) == 0 and job.doubts == [(2, 0), (2, 1)]
    job.lose(3)
    assert board.wait(0, 0.0) == 2 and len(job.doubts) == 2  # it waits no more
    job.lose(0)
    assert board.wait(2, 0.0) == 2 and len(job.doubts) == 2


def test_a_set_whose_groups_meet_at_rank_0s_store_goes_on_in_the_generation_without_it() -> None:
    board, job = _board(2)
    job.lose(0)
    assert board.number == 0  # as long as it opens no other group
    assert board.wait(0, 0.0) == 1 == board.number
    assert [rank for rank in range(4) if board.has(rank, 1)] == [2, 3]
    job.lose(3)
    assert board.number == 2
    job.lose(1)
    assert board.wait(2, 0.0) == 2  # it has a store of its own


def test_a_loss_of_its_own_comes_before_rank_0s() -> None:
    board, job = _board(2)
    job.lose(3)
    job.lose(0)
    assert board.wait(0, 0.0) == 1 == board.number
