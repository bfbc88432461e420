"""The ranks' own group over Gloo: a rank that fails, dies or does not come is named on all others, whether or not its process
lives, and no process waits for it at its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

from evenstep import group_end
from evenstep.group_end import GroupEnd

CASES = Path(__file__).with_name("torch_group_cases.py")
GLOO = {"EVENSTEP_COMM_ENGINE": "gloo"}
HOSTS = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate("abc")}


def told(rank: Any) -> Any:
    return json.loads(rank.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_backward_that_fails_is_told_while_its_process_goes_on(
    run_ranks: Callable[..., Any], compression: str
) -> None:
    ranks = run_ranks(CASES, 3, args=("fails", compression), env=GLOO, rank_env=HOSTS)
    own, heard, process = told(ranks[1])
    assert own == ["ValueError", "the script's own", ""] and heard
    for rank in (0, 2):
        _, words, fix = told(ranks[rank])[0]
        assert words == (
            f"another rank's backward failed: rank 1 (process {process} on host b) ended what the ranks wait for: "
            "backward failed on rank 1 (ValueError) (EVEN_ERR_REVOKED)"
        )
        assert fix == "the reason is in that rank's output"


@pytest.mark.parametrize("hosts", [{}, HOSTS])
def test_a_rank_that_dies_is_named_on_all_others(run_ranks: Callable[..., Any], hosts: dict[int, Any]) -> None:
    ranks = run_ranks(CASES, 3, args=("dies",), env=GLOO, rank_env=hosts, check=False)
    assert [rank.returncode for rank in ranks] == [0, -9, 0], ranks
    for rank in (0, 2):
        (status, words, fix), again = told(ranks[rank])
        assert status == "EVEN_ERR_PEER_LOST" and words.startswith("rank 1 (process ")
        assert " has ended, or cannot be reached any more: found by rank " in words
        assert (" on host b)" in words) == bool(hosts)
        assert fix.startswith("the end of its own output says why")
        assert "no longer in step: rank 1 (process " in again[1]


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_rank_that_dies_in_the_exchange_is_named(run_ranks: Callable[..., Any], compression: str) -> None:
    ranks = run_ranks(CASES, 3, args=("dies_in_sums", compression), env=GLOO, rank_env=HOSTS, check=False)
    assert [rank.returncode for rank in ranks] == [0, -9, 0], ranks
    for rank in (0, 2):
        status, words, _ = told(ranks[rank])[0]
        assert status == "EVEN_ERR_PEER_LOST" and words.startswith("rank 1 (process ") and " on host b)" in words


def test_a_rank_that_dies_in_an_exchange_after_backward_is_named(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, 3, args=("dies_after_backward",), env=GLOO, rank_env=HOSTS, check=False)
    assert [rank.returncode for rank in ranks] == [0, -9, 0], ranks
    for rank in (0, 2):
        status, words, _ = told(ranks[rank])[0]
        assert status == "EVEN_ERR_PEER_LOST" and words.startswith("rank 1 (process ") and " on host b)" in words


def test_a_rank_that_does_not_come_is_named_after_the_limit(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, 3, args=("late",), rank_env=HOSTS)
    heard, process = told(ranks[1])
    assert heard
    for rank in (0, 2):
        (status, words, fix), again = told(ranks[rank])
        assert status == "EVEN_ERR_TIMEOUT"
        assert words.startswith(
            f"rank 1 (process {process} on host b) did not come to a barrier within the time limit: "
        )
        assert f"rank {rank} on host {'abc'[rank]}, in call 2 of the ranks' group over Gloo (a barrier)" in words
        assert "py-spy dump --pid PROCESS" in fix and again[:2] == [status, words]


def test_a_rank_that_ends_the_group_says_why(run_ranks: Callable[..., Any]) -> None:
    ranks = run_ranks(CASES, 3, args=("revokes",), rank_env=HOSTS)
    heard, process, own = told(ranks[1])
    assert heard
    for words in (told(ranks[0])[0], told(ranks[2])[0], own):
        assert words[:2] == [
            "EVEN_ERR_REVOKED",
            f"rank 1 (process {process} on host b) ended what the ranks wait for: enough (EVEN_ERR_REVOKED)",
        ]


def test_ranks_in_different_calls_are_told_so(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(CASES, 2, args=("apart",), rank_env=HOSTS):
        status, words, _ = told(rank)[0]
        assert status == "EVEN_ERR_MISMATCH"
        assert "rank 0 in call 2 (an exchange of 6 bytes), rank 1 in call 2 (a barrier)" in words


# -- of what no real group does at will --


class Played:
    """The end of a group of three, on one of its ranks, in a store that all of these share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.closed, self.ended = 0, [], 0
        monkeypatch.setattr(dist, "get_rank", lambda group: self.at)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
        monkeypatch.setattr(group_end, "closed_peers", lambda group: self.closed)
        monkeypatch.setattr(group_end, "end_calls", lambda group: setattr(self, "ended", self.ended + 1))
        monkeypatch.setattr(group_end, "_GRACE_SECONDS", 0.0)
        monkeypatch.setattr(group_end, "_PATIENCE_SECONDS", 0.1)
        monkeypatch.setattr(group_end, "_STAY_SECONDS", 0.0)
        self.store = dist.HashStore()
        self.ends = [self.of(rank) for rank in range(3)]

    def of(self, rank: int) -> GroupEnd:
        self.at = rank
        return GroupEnd("group", self.store, "place")


def test_who_heard_of_it_by_another_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    for end in played.ends:
        end.begins("a barrier")
    played.at, played.closed = 0, [2]
    first = played.ends[0].heard(RuntimeError("Connection closed by peer"))
    played.at, played.closed = 1, [0]  # the first has closed its connections
    second = played.ends[1].heard(RuntimeError("Connection reset"))
    assert str(first).startswith("rank 2 (") and str(second).startswith("rank 2 (")
    assert (first.status, first.rank, second.status, second.rank) == ("EVEN_ERR_PEER_LOST", 2) * 2
    assert played.ended >= 2


def test_a_rank_that_is_silent_is_not_said_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.at = 0
    error = played.ends[0].heard(RuntimeError("No route to host"))
    assert error.status == "EVEN_ERR_PEER_LOST" and error.rank is None
    assert "does not answer: ended, cut off, or in a long computation" in str(error)
    assert str(error).startswith("rank 1 (") and " and rank 2 (" in str(error)


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)

    class Gone:
        def set(self, *words: str) -> None:
            raise RuntimeError("Connection reset by peer")

    played.ends[1]._store = Gone()
    error = played.ends[1].heard(RuntimeError("Connection closed by peer"))
    assert error.status == "EVEN_ERR_PEER_LOST" and "so has the process that keeps the job's store" in str(error)
    assert "rank 0's own output" in str(error) and played.ended


def test_a_store_that_does_not_answer_keeps_no_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    monkeypatch.setattr(group_end, "_STORE_SECONDS", 0.05)
    let_go = threading.Event()

    class Cut:
        def set(self, *words: str) -> None:
            let_go.wait()
            raise RuntimeError("Connection reset by peer")

    played.ends[1]._store = Cut()
    assert "cannot be reached" in str(played.ends[1].heard(RuntimeError("Connection reset"))) and played.ended
    let_go.set()


def test_an_abort_of_nccls_that_hangs_keeps_no_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(group_end, "_ABORT_SECONDS", 0.05)
    let_go, calls = threading.Event(), []

    class Hangs:
        def abort(self) -> None:
            calls.append("abort")
            let_go.wait()

    group_end.end_calls(Hangs())
    assert calls == ["abort"]
    let_go.set()
