"""The ranks' own group over Gloo: a rank that fails, dies or does not come is named on all others, whether or not its process
lives, and no process waits for it at its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_jobs import wait_until

torch = pytest.importorskip("torch")
import torch.distributed as dist

from evenstep import exchange, group_end
from evenstep.group import Alone
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


@pytest.mark.parametrize("how", ["ended", "failed"])
@pytest.mark.parametrize("hosts", [{}, HOSTS])
def test_a_rank_whose_script_has_ended_is_not_said_to_be_lost(
    run_ranks: Callable[..., Any], hosts: dict[int, Any], how: str
) -> None:
    ranks = run_ranks(CASES, 3, args=("leaves", how), rank_env=hosts, check=False)
    assert [rank.returncode for rank in ranks] == [0, how == "failed", 0], ranks
    for rank in (0, 2):
        (status, words, fix), again = told(ranks[rank])
        assert status == "EVEN_ERR_PEER_LOST" and words.startswith("rank 1 (process ") and again[:2] == [status, words]
        if how == "ended":
            assert " has left the job: its script has ended: found by rank " in words
            assert fix.startswith("let the scripts of all ranks make the same steps")
        else:
            assert " has ended, or cannot be reached any more: found by rank " in words


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


def test_ranks_that_end_take_no_other_set_of_ranks_along(run_ranks: Callable[..., Any]) -> None:
    """With rank 0 the job's store ends."""
    ranks = run_ranks(CASES, 4, args=("sets",))
    assert told(ranks[2]) == told(ranks[3]) == [[]]


def test_a_call_that_torch_refuses_ends_no_group(run_ranks: Callable[..., Any]) -> None:
    first, second = map(told, run_ranks(CASES, 2, args=("refused",)))
    assert second == [["RuntimeError", "no such type", ""], [2.0] * 3, 2] and first == [[], [2.0] * 3, 2]


def test_a_message_of_which_half_came_holds_nobody_up(run_ranks: Callable[..., Any]) -> None:
    """Gloo forgets it: the call goes on until the group's time limit of half an hour, and the end of the process waits for it. The
    sender is told of its bad memory, ends by a thread of Gloo's, or waits as well."""
    ranks = run_ranks(CASES, 2, args=("half",), fresh=True, check=False)
    assert ranks[0].returncode == 0, ranks
    (_, words, _), ended = told(ranks[0])
    assert words == "Connection closed by rank 1, which this call was to hear from" and not ended


# -- of what no real group does at will --


class Played:
    """The end of a group of three, on one of its ranks, in a store that all of these share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.closed, self.ended = 0, [], 0
        monkeypatch.setattr(dist, "get_rank", lambda group: self.at)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
        monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
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


@pytest.mark.parametrize("last", ["ahead", "of another group"])
def test_a_network_that_fails_is_no_mismatch(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """All ranks have heard of an end, and none is lost: they were in the same call, one in the next, or one in another group's."""
    played = Played(monkeypatch)
    for end in played.ends:
        end.begins("a barrier")
    if last == "ahead":
        played.ends[2].begins("an exchange of 6 bytes")
    else:
        played.ends[2]._what, played.ends[2]._own = "the sum of bucket 1 of 2 of the gradients", False
    for rank in (1, 2):
        played.ends[rank]._hear()
    assert played.ends[0].heard(RuntimeError("Connection reset")).status == "EVEN_ERR_SYSTEM"


def test_a_rank_that_died_before_its_group_was_made_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.store.delete_key("place/who/2")
    played.at, played.closed = 0, [2]
    assert str(played.ends[0].heard(RuntimeError("Connection reset"))).startswith("rank 2 has ended, or cannot")


class Slow:
    """A call that is looked at some times before it is done."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def wait(self, timeout: Any) -> None:
        self.left -= 1
        if self.left > 0:
            raise RuntimeError("Timed out waiting")

    def is_completed(self) -> bool:
        return False


def test_a_call_goes_on_without_the_store_which_is_asked_once_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    monkeypatch.setattr(group_end, "_LOOK_SECONDS", 0.01)
    let_go, asked = threading.Event(), []

    class Cut:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            let_go.wait()
            raise ConnectionError("gone")

    played.ends[1]._store = Cut()
    played.ends[1].wait(Slow(5))
    wait_until(lambda: asked)  # by a thread, which may not have come so far
    assert len(asked) == 1
    let_go.set()
    assert played.ends[1]._look is not None
    played.ends[1]._look.within(60)
    played.ends[1].wait(Slow(5))
    wait_until(lambda: len(asked) > 1)


def test_a_store_that_is_slow_to_answer_hears_that_a_rank_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its process has no CPU for a while: else the others would hear of a rank that is lost."""
    played = Played(monkeypatch)
    plain = played.store.set

    class Late:
        def set(self, *words: str) -> None:
            threading.Event().wait(1.5)
            plain(*words)

        def check(self, keys: list[str]) -> bool:
            return bool(played.store.check(keys))

    played.ends[2]._store = Late()
    played.ends[2].leaves()
    assert played.store.check(["place/left/2"])


@pytest.mark.parametrize("opens", [False, True])
def test_a_call_ends_where_a_connection_stays_closed(monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    played = Played(monkeypatch)
    asked: list[Any] = []

    def closed(group: Any) -> list[int]:
        asked.append(group)
        return [] if opens and len(asked) % 5 == 0 else [2]

    monkeypatch.setattr(group_end, "closed_peers", closed)
    if opens:
        played.ends[1].wait(Slow(100))
        assert len(asked) == 24
    else:
        with pytest.raises(RuntimeError, match="Connection closed by rank 2, which"):
            played.ends[1].wait(Slow(100))
        assert len(asked) == 15  # of 60 looks


def test_who_has_made_the_call_and_left_ends_it_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    monkeypatch.setattr(group_end, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(group_end, "_ENDED_LOOKS", 3)
    for end in played.ends:
        end.begins("a barrier")
        end._ended = lambda rank: rank == 2
    played.at = 0
    with pytest.raises(RuntimeError, match="another rank has ended the group"):
        played.ends[0].wait(Slow(9))
    played.ends[2].leaves()
    slow = Slow(9)
    played.ends[0].wait(slow)
    assert slow.left == 0
    played.ends[1].begins("a sum of 1 values")  # which that one never makes
    played.at = 1
    with pytest.raises(RuntimeError, match="another rank has ended the group"):
        played.ends[1].wait(slow := Slow(9))
    assert slow.left == 8, "known at the first look"


def test_another_rank_that_died_is_named_and_not_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.ends[2].leaves()
    for end in played.ends[:2]:
        end.begins("a barrier")
    played.at, played.closed = 0, [1, 2]
    error = played.ends[0].heard(RuntimeError("Connection closed by peer"))
    assert error.rank == 1 and "has ended, or cannot be reached" in str(error)


def test_a_network_that_fails_once_a_rank_has_left_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    for end in played.ends:
        end.begins("a barrier")
    played.ends[1]._hear()
    played.ends[2].leaves()
    played.at, played.closed = 0, [2]
    assert played.ends[0].heard(RuntimeError("Connection reset")).status == "EVEN_ERR_SYSTEM"


def test_who_made_the_call_and_left_keeps_nobody_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    for end in played.ends:
        end.begins("a broadcast of 9 values of rank 2")
    played.ends[2].leaves()
    played.closed = [2]
    played.ends[1].wait(Slow(100))
    played.ends[1].begins("a barrier")
    with pytest.raises(RuntimeError, match="Connection closed by rank 2, which"):
        played.ends[1].wait(Slow(100))


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
    monkeypatch.setattr(group_end, "STORE_SECONDS", 0.05)
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
    monkeypatch.setattr(group_end, "ABORT_SECONDS", 0.05)
    let_go, calls = threading.Event(), []

    class Hangs:
        def abort(self) -> None:
            calls.append("abort")
            let_go.wait()

    group_end.end_calls(Hangs())
    assert calls == ["abort"]
    let_go.set()


def test_the_end_of_a_group_that_the_script_destroyed_keeps_no_error_back() -> None:
    group_end.end_calls(object())


def test_an_error_is_no_cause_of_itself() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    for made in (one, other):
        with pytest.raises(RuntimeError) as caught:
            group_end.raise_instead(made, one)
        assert caught.value is made
    assert one.__cause__ is None and other.__cause__ is one


def test_why_is_told_before_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear of the cause, not of closed connections; and an abort may take long."""
    order: list[str] = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(exchange, "end_calls", lambda group: order.append("ends"))

    class Told(Alone):
        def revoke(self, why: str = "") -> None:
            order.append(why)

    error = torch.OutOfMemoryError("CUDA out of memory")
    assert exchange.TorchExchange("group").failed(Told(), error) is error
    assert order == ["CUDA out of memory", "ends"]
