"""Ranks that train on their own meet where they synchronise and nowhere else; what happened since is told there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import _core, vote
from evenstep.group import Alone
from evenstep.steps import Steps

CASES = Path(__file__).with_name("quiet_cases.py")
GLOO = {"EVENSTEP_COMM_ENGINE": "gloo"}
EVERY = list(range(6))


def told(rank: Any) -> Any:
    return json.loads(rank.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("env", [{}, GLOO])
def test_between_two_synchronisations_no_rank_meets_another(run_ranks: Callable[..., Any], env: dict[str, str]) -> None:
    for rank in run_ranks(CASES, args=("counts",), env=env):
        cases = told(rank)
        assert len(cases) == 8
        for name, case in cases.items():
            assert case["met"] == [0, 3, 7, 11], (name, case)
            assert case["voted"] == list(range(12)), (name, case)
            assert case["same"], name


def test_a_rank_may_be_ahead_of_another_until_they_synchronise(run_ranks: Callable[..., Any]) -> None:
    assert [told(rank)["step"] for rank in run_ranks(CASES, args=("apart",))] == [8, 8]


def test_what_needs_a_vote_in_every_step_keeps_it(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("stays",)):
        cases = told(rank)
        quiet = [cases.pop(name) for name in ("report", "norm of its own", "another under no_sync")]
        assert quiet == [[0, 3]] * 3
        assert cases == dict.fromkeys(("norm", "buffer in another pass", "skip", "another", "scaler"), EVERY)


def test_a_batch_that_all_ranks_refuse_is_passed_over(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("refused", "all")):
        assert told(rank) == {"made": 15, "error": "", "step": 15}


@pytest.mark.parametrize("env", [{}, GLOO])
def test_a_batch_that_one_rank_refuses_ends_all_where_they_meet(
    run_ranks: Callable[..., Any], env: dict[str, str]
) -> None:
    well, failed = map(told, run_ranks(CASES, args=("refused", "1"), env=env))
    assert (well["made"], failed["made"]) == (7, 7)
    assert "backward failed on rank 1, not on rank 0, so the ranks are no longer in step" in well["error"]
    assert "backward failed on rank 1, since the last synchronisation, and not on all ranks" in failed["error"]


@pytest.mark.parametrize("env", [{}, GLOO])
def test_a_backward_that_fails_halfway_ends_the_others_where_they_meet(
    run_ranks: Callable[..., Any], env: dict[str, str]
) -> None:
    well, failed = map(told, run_ranks(CASES, args=("ends", "fails"), env=env))
    assert failed == {"made": 5, "error": "halfway", "status": ""}
    assert well["made"] == 7 and "another rank's backward failed: " in well["error"]


@pytest.mark.parametrize("env", [{}, GLOO])
def test_a_rank_that_dies_is_named_where_the_others_meet(run_ranks: Callable[..., Any], env: dict[str, str]) -> None:
    ranks = run_ranks(CASES, args=("ends", "dies"), env=env, check=False)
    assert [rank.returncode for rank in ranks] == [0, -9]
    well = told(ranks[0])
    assert well["made"] == 7 and well["status"] == "EVEN_ERR_PEER_LOST" and "rank 1" in well["error"]


def test_a_rank_that_draws_more_is_found_where_they_meet(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("draws",)):
        case = told(rank)
        assert case["at"] == 7 and "have drawn different numbers of batches: rank 1 differs ([4, 5])" in case["error"]


@pytest.mark.parametrize("micro", ["1", "2"])
def test_what_was_not_finite_is_told_where_they_meet(run_ranks: Callable[..., Any], micro: str) -> None:
    ranks = run_ranks(CASES, args=("nonfinite", micro))
    said = [line for line in ranks[0].stderr.splitlines() if line.startswith("evenstep: step")]
    assert len(said) == 2, said
    assert said[0].startswith("evenstep: step 7: the loss and gradients on rank 1 are not finite")
    assert said[1] == "evenstep: step 11: loss and gradients are finite again after 4 steps, from step 7 on"
    assert told(ranks[1])["met"] == [0, 3, 7, 11, 15]


def test_what_was_not_finite_is_told_by_the_step_of_its_own_optimizer(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("nonfinite_of_two",))
    said = [line for line in ranks[0].stderr.splitlines() if line.startswith("evenstep: step")]
    assert len(said) == 2, said
    assert said[0] == "evenstep: step 10: gradients on rank 1 are not finite", said
    assert "finite again" in said[1]


def test_what_was_not_finite_passes_where_its_optimizer_stops(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("nonfinite_and_stops",))
    said = [line for line in ranks[0].stderr.splitlines() if line.startswith("evenstep: step")]
    assert len(said) == 2, said
    assert said[0] == "evenstep: step 7: gradients are not finite" and "finite again" in said[1]


def test_samples_count_where_this_rank_trained_the_model_on_them(run_ranks: Callable[..., Any]) -> None:
    seen = []
    for rank in run_ranks(CASES, args=("left_out",)):
        cases = told(rank)
        for mode in ("local", "diloco"):
            quiet, voted = cases[f"{mode} quiet"], cases[f"{mode} voted"]
            assert (quiet.pop("met"), voted.pop("met")) == ([0, 3, 7], list(range(8)))
            assert quiet == voted
        seen.append(cases["local quiet"]["seen"])
    assert seen == [[41.0, 41.0], [23.0, 19.0]]


def test_an_optimizer_that_stops_before_its_synchronisation_has_all_vote(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("stops",)):
        assert told(rank) == {"met": [0, 3, 7, 8, 12]}


def test_what_was_not_finite_and_not_used_is_no_fault(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, args=("unused",)):
        assert told(rank) == {"step": 15} and "not finite" not in rank.stderr


def test_checkpoints_and_the_end_come_with_the_synchronisation(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    env = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "saved")}
    case = told(run_ranks(CASES, args=("checkpoints", "end"), env=env)[0])
    assert case == {"step": 12, "checkpoints": [4, 8, 12]}


def test_no_checkpoint_comes_that_no_vote_asked_for(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    env = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "saved")}
    case = told(run_ranks(CASES, args=("checkpoints", "one"), env=env)[0])
    assert case == {"step": 14, "checkpoints": [4, 11]}


def test_parameters_are_compared_once_a_synchronisation_has_come(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, args=("differs",))
    assert "evenstep: step 8: ranks 0, 1 differ in 0.bias: 1 value, by up to 1" in ranks[0].stderr


def _plan(samples: int, shares: list[int]) -> Any:
    return SimpleNamespace(samples=samples, total=sum(shares), shares=shares, checksum=samples)


def test_what_was_measured_since_is_told_together_where_the_shares_were_the_same() -> None:
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    part, checksums = steps._part, []
    for shares, busy in (([4, 4], 5), ([5, 3], 10), ([5, 3], 30)):
        part.batch_arrives(_plan(shares[0], shares))
        checksums.append(part.checksum)
        part.begins_anew(told=False, busy_ns=busy)
    part.batch_arrives(_plan(5, [5, 3]))
    ballot = part.ballot(steps, 1.0, 20, 0)
    assert (ballot.samples, ballot.total, ballot.batches) == (15, 24, 3)
    assert ballot.busy_seconds == 60 / 1e9
    assert ballot.drawn == 4 and len({*checksums, ballot.checksum}) == 4
    part.begins_anew()
    part.batch_arrives(_plan(5, [5, 3]))
    ballot = part.ballot(steps, 1.0, 7, 0)
    assert (ballot.samples, ballot.batches, ballot.drawn, ballot.busy_seconds) == (5, 1, 1, 7 / 1e9)


def test_a_ballot_tells_who_failed_before_where_not_all_did() -> None:
    def ballots(*flags: int) -> list[vote.Ballot]:
        return [vote.Ballot(1, 0, 0, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0, 0, one, 0) for one in flags]

    assert vote.failed(ballots(0, vote.FAILED_BEFORE, 0)) == [1]
    assert vote.failed(ballots(vote.FAILED_BEFORE, vote.FAILED_BEFORE)) == []
    assert vote.failed(ballots(vote.FAILED | vote.FAILED_BEFORE, vote.FAILED)) == [0]
