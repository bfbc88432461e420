"""Hosts that Gloo alone connects: shared memory inside each, Gloo between their first ranks. One host's processes take each other
for strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import _core, hosts_over_gloo
from evenstep.called import called

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
    parts = ("reductions", "premultiplied", "movements", "objects", "layouts")
    ranks = on_hosts(
        run_ranks, FOLDER / "backend_conformance_cases.py", hosts, *parts, EVENSTEP_COMM_DEBUG="1", **WITHOUT_UCX
    )
    said = ranks[0].stderr
    assert said.count("the hosts talk through Gloo: rank 0 on host") == 1, said
    ways = "shared memory on each host, Gloo through torch between them"
    assert f"at its opening: {ways}, {len(hosts)} ranks: rank 0 on" in said


def wants_told(rank: int, hosts: str, different: list[list[Any]]) -> None:
    """Ranks of one host hear both calls and both lines, those of other hosts that the call is over."""
    words = (
        ("all_reduce of 3 F32 elements with AVG", "all_reduce of 3 F32 elements with SUM"),
        ("broadcast of 12 bytes of F32 from rank 0", "broadcast of 12 bytes of F32 from rank 2"),
        ("all_reduce of 3 F32 elements with SUM", "reduce of 3 F32 elements with SUM to rank 0"),
    )
    for of_others, (status, number, said) in zip(words, different):
        if hosts[rank] != hosts[1]:
            assert status in ("EVEN_ERR_PEER_LOST", "EVEN_ERR_REVOKED"), said
            continue
        own, other = of_others if rank == 0 else of_others[::-1]
        assert status == "EVEN_ERR_MISMATCH" and number == 1 - rank, said
        assert said.startswith(f"rank {rank} called {own} at "), said
        assert f", but rank {1 - rank} called {other} at " in said, said
        assert said.count(CASES.name) == 2 and "(call 1 of the group)" in said, said
    status, _, said = different[3]
    assert status == ("EVEN_ERR_MISMATCH" if hosts.index(hosts[rank]) == rank else "EVEN_ERR_REVOKED"), said
    assert "elements with SUM" in said and "elements with MAX" in said, said


def test_what_ranks_compare_of_a_call() -> None:
    float32, uint8, total = _core.DTYPE_F32, _core.DTYPE_U8, _core.OP_SUM
    gathers = [called("all_gather", uint8, float32 + 1, 0, counts) for counts in ([4, 8], [8, 4])]
    assert str(gathers[0]) == str(gathers[1]) == "all_gather of 12 bytes of F32 in all" and gathers[0] != gathers[1]
    assert str(called("broadcast", uint8, 300, 1, [9])) == "broadcast of 9 bytes of another type (300) from rank 1"
    assert str(called("reduce_scatter", float32, total, 0, [2, 3])) == "reduce_scatter of 5 F32 elements with SUM"
    assert str(called("barrier")) == "barrier"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_integers_are_in_the_order_of_floats(dtype: str) -> None:
    inf, nan = torch.inf, torch.nan
    values = torch.tensor([-inf, -60000.0, -1.0, -0.0, 0.0, 2.0**-14, 1.0, inf], dtype=getattr(torch, dtype))
    for op in (_core.OP_MIN, _core.OP_MAX):
        keys = hosts_over_gloo.keys_of(values, op)
        assert keys.diff().gt(0).all() and torch.equal(hosts_over_gloo.values_of(keys).to(values.dtype), values)
        for one in (nan, -nan):
            key = hosts_over_gloo.keys_of(torch.tensor([one], dtype=values.dtype), op)
            assert bool((key > keys if op == _core.OP_MAX else key < keys).all())
            assert hosts_over_gloo.values_of(key).isnan().all()


# a rank by which its host meets the others; another one
@pytest.mark.parametrize(("hosts", "gone"), [("aabb", 2), ("aabb", 3)])
def test_a_rank_that_is_lost_or_late_ends_the_calls_of_all_hosts(run_ranks: Run, hosts: str, gone: int) -> None:
    ranks = on_hosts(run_ranks, CASES, hosts, "lost", str(gone))
    for rank in {*range(len(hosts))} - {gone}:
        different, late, again, died, after = json.loads(ranks[rank].stdout.strip().splitlines()[-1])
        wants_told(rank, hosts, different)
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
