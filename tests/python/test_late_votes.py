"""es.Stale: a rank that stalls stops the others only once gradients are due that it has not made; what votes tell comes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("late_cases.py")
K, STEPS = 3, 16
EVERY = list(range(STEPS))


def told(rank: Any) -> Any:
    return json.loads(rank.stdout.strip().splitlines()[-1])


def test_a_rank_that_stalls_stops_the_others_once_its_gradients_are_due(run_ranks: Callable[..., Any]) -> None:
    ranks = list(map(told, run_ranks(CASES, args=("ahead",))))
    for case in ranks:
        assert case["undisturbed"]["met"] == case["disturbed"]["met"] == [0]
        assert case["voted"]["met"] == EVERY
        values = {one["values"] for one in case.values()}
        assert values == {ranks[0]["voted"]["values"]}, "the same to the bit, however ranks were disturbed"
        shares = [[6 - n % 3, 2 + n % 3] for n in EVERY]
        assert case["voted"]["seen"] == shares
        assert case["disturbed"]["seen"] == [shares[0]] * (K + 1) + shares[1 : STEPS - K]


def test_a_rank_that_is_ahead_at_the_end_stays_until_it_is_not_needed(run_ranks: Callable[..., Any]) -> None:
    assert list(map(told, run_ranks(CASES, args=("ends",)))) == [{"met": [0], "there": True}] * 2


@pytest.mark.more
def test_epochs_and_what_was_measured(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("epochs",)):
        assert told(rank) == {"met": [0], "known": [2] * 2 * STEPS, "step": 2 * STEPS}


def test_checkpoints_and_the_end_come_with_the_votes_that_asked(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    env = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "saved")}
    case = told(run_ranks(CASES, args=("checkpoints",), env=env)[0])
    assert case == {"step": 12 + K + 1, "checkpoints": [10, 15, 16]}  # and 5, of which three are kept


@pytest.mark.more
def test_parameters_that_differ_are_told_with_the_vote_that_has_their_sums(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("differs",))
    assert f"evenstep: step {6 + K}: ranks 0, 1 differ in 0.bias: 1 value, by up to 1" in ranks[0].stderr


def test_what_needs_a_vote_in_every_step_keeps_it(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("stays",)):
        cases = told(rank)
        assert [cases.pop(name) for name in ("norm of its own", "again")] == [[0]] * 2
        assert cases == dict.fromkeys(("adasum", "torch", "norm", "skip", "another"), EVERY)


@pytest.mark.more
def test_a_batch_that_all_ranks_refuse_is_passed_over(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("refused", "all")):
        assert told(rank) == {"made": STEPS - 1, "error": ""}


def test_a_batch_that_one_rank_refuses_ends_all_before_its_gradient_is_used(run_ranks: Callable[..., Any]) -> None:
    well, failed = map(told, run_ranks(CASES, args=("refused", "1")))
    assert (well["made"], failed["made"]) == (5 + K, 5 + K)
    assert "backward failed on rank 1, not on rank 0, so the ranks are no longer in step" in well["error"]
    assert "and not on all ranks" in failed["error"]


@pytest.mark.more
def test_a_backward_that_fails_halfway_ends_the_others(run_ranks: Callable[..., Any]) -> None:
    well, failed = map(told, run_ranks(CASES, args=("fails", "halfway")))
    assert failed == {"made": 5, "error": "halfway", "status": ""}
    assert 5 <= well["made"] <= 5 + K and "another rank's backward failed: " in well["error"]


@pytest.mark.more
def test_a_rank_that_dies_is_named_where_its_gradients_are_due(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("fails", "dies"), check=False)
    assert [rank.returncode for rank in ranks] == [0, -9]
    well = told(ranks[0])
    assert 5 <= well["made"] <= 5 + K and well["status"] == "EVEN_ERR_PEER_LOST" and "rank 1" in well["error"]


@pytest.mark.more
def test_a_rank_that_draws_more_is_found_before_its_gradient_is_used(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("draws",)):
        case = told(rank)
        assert case["at"] == 5 + K and "have drawn different numbers of batches: rank 1 differs" in case["error"]


@pytest.mark.more
def test_a_loss_that_is_not_finite_is_told_with_its_gradient(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("nonfinite",))
    said = [line for line in ranks[0].stderr.splitlines() if line.startswith("evenstep: step")]
    assert said[0].startswith(f"evenstep: step {5 + K}: the loss and gradients on rank 1 are not finite"), said


def test_gradients_that_some_ranks_do_not_have(run_ranks: Callable[..., Any]) -> None:
    first, second = map(told, run_ranks(CASES, args=("unused",)))
    assert first == second and first["step"] == STEPS


def test_ranks_that_clip_what_one_of_them_has_no_gradient_of(run_ranks: Callable[..., Any]) -> None:
    """Who has none has the gradients that are due once its backward is over, and waits for the others in that step alone."""
    first, second = map(told, run_ranks(CASES, args=("clipped",)))
    assert first["values"] == second["values"] and first["norms"] == second["norms"] and first["step"] == STEPS
    assert first["met"] == second["met"] == [0] and first["norms"][5] > 0 and first["norms"][7] == 0


def test_a_rank_that_has_said_to_give_gradients_and_breaks_off_ends_the_others(run_ranks: Callable[..., Any]) -> None:
    well, failed = map(told, run_ranks(CASES, args=("breaks_off",)))
    assert failed == {"made": 5, "error": "no room"}
    assert 5 <= well["made"] <= 5 + K and "another rank's backward failed: " in well["error"]


@pytest.mark.more
def test_parameters_that_differed_for_a_while(run_ranks: Callable[..., Any]) -> None:
    first, _ = run_ranks(CASES, args=("passes_by",))
    assert told(first) == {"step": STEPS}
    assert "the ranks had different parameters some steps before, and have the same again" in first.stderr


@pytest.mark.more
def test_sums_of_before_parameters_were_compared_tell_nothing(run_ranks: Callable[..., Any]) -> None:
    first, _ = run_ranks(CASES, args=("stays_apart",))
    assert told(first) == {"step": STEPS}
    assert "ranks 0, 1 differ in 0.bias" in first.stderr and "again" not in first.stderr


@pytest.mark.more
def test_a_buffer_that_changes_later_is_averaged_from_then_on(run_ranks: Callable[..., Any]) -> None:
    first, second = map(told, run_ranks(CASES, args=("buffers",)))
    assert first == second
    assert first["met"] == [0, *range(5 + K + 1, STEPS)]
