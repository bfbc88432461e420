"""Hosts that Gloo alone connects: shared memory inside each, Gloo between their first ranks. One host's processes take each other
for strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parent
CASES = FOLDER / "hosts_over_gloo_cases.py"
WITHOUT_UCX = {"EVENSTEP_UCX_LIBRARY": "/nowhere/libucp.so.0"}

Run = Callable[..., Any]


def on_hosts(run_ranks: Run, script: Path, hosts: str, *words: str, **variables: str) -> Any:
    """A letter for each rank's host."""
    where = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(hosts)}
    env = {"HOSTS": hosts, **(variables or {"EVENSTEP_COMM_ENGINE": "hosts-gloo"})}
    return run_ranks(script, len(hosts), args=words, env=env, rank_env=where)


# one host with a rank alone; ranks of a host that are not neighbours, and three hosts
@pytest.mark.parametrize("hosts", ["aab", "abac", pytest.param("abba", marks=pytest.mark.more)])
def test_sums_are_formed_host_by_host(run_ranks: Run, hosts: str) -> None:
    on_hosts(run_ranks, CASES, hosts, "bits")


@pytest.mark.parametrize("hosts", ["abab", pytest.param("aabc", marks=pytest.mark.more)])
def test_as_gloo_between_all_ranks(run_ranks: Run, hosts: str) -> None:
    """Where UCX is missing nothing has to be asked for."""
    parts = ("reductions", "premultiplied", "movements", "objects")
    ranks = on_hosts(
        run_ranks, FOLDER / "backend_conformance_cases.py", hosts, *parts, EVENSTEP_COMM_DEBUG="1", **WITHOUT_UCX
    )
    said = ranks[0].stderr
    assert said.count("the hosts talk through Gloo: rank 0 on host") == 1, said
    ways = "shared memory on each host, Gloo through torch between them"
    assert f"at its opening: {ways}, {len(hosts)} ranks: rank 0 on" in said


# a rank by which its host meets the others; another one
@pytest.mark.parametrize(("hosts", "gone"), [("aabb", 2), ("aabb", 3)])
def test_a_rank_that_is_lost_or_late_ends_the_calls_of_all_hosts(run_ranks: Run, hosts: str, gone: int) -> None:
    ranks = on_hosts(run_ranks, CASES, hosts, "lost", str(gone))
    for rank in {*range(len(hosts))} - {gone}:
        late, again, died, after = json.loads(ranks[rank].stdout.strip().splitlines()[-1])
        if hosts[rank] == "b":  # on its own host it is named, by its number in the group
            assert late[0] == "EVEN_ERR_TIMEOUT" and late[1] == gone, late
            assert died[0] == "EVEN_ERR_PEER_LOST" and died[1] == gone, died
        else:
            assert late[0] in ("EVEN_ERR_TIMEOUT", "EVEN_ERR_PEER_LOST", "EVEN_ERR_REVOKED"), late
            assert died[0] == ("EVEN_ERR_PEER_LOST" if rank == 0 else "EVEN_ERR_REVOKED"), died
            assert "by which host a meets the other hosts over Gloo, could not do so: " in died[2], died
            assert after[0] == died[0] and again[0] == late[0]


def test_gradients_go_host_by_host(run_ranks: Run) -> None:
    cases = FOLDER / "hybrid_prepare_cases.py"
    env = {"HOSTS": "a,a,b", "EVENSTEP_COMM_ENGINE": "hosts-gloo", "EVENSTEP_COMM_DEBUG": "1", "BY_HOSTS": "1"}
    where = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate("aab")}
    ranks = run_ranks(cases, 3, args=("bits", "cpu,cpu,cpu"), env=env, rank_env=where)
    assert [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks] == ["TorchEngine"] * 3
    words = "es.prepare: gradients go by shared memory on each of 2 hosts, Gloo through torch between their first ranks, during"
    assert words in ranks[0].stderr, ranks[0].stderr


def test_a_rank_that_dies_in_a_sum_of_gradients_is_named_on_all_hosts(run_ranks: Run) -> None:
    """Rank 2 by the engine on its own host, and by a closed connection on the other."""
    for rank in on_hosts(run_ranks, CASES, "baa", "lost_in_a_sum")[:2]:
        status, number, words = json.loads(rank.stdout.strip().splitlines()[-1])
        assert status == "EVEN_ERR_PEER_LOST" and number == 2, words
        assert words.startswith("rank 2 (process ") and " on host a) has ended" in words, words
