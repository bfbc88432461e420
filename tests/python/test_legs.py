"""Accelerators on several hosts whose ranks add up on each host, and between the hosts by legs: CPUs with a memory of their
own stand for accelerators, one host's processes that take each other for strangers, or network namespaces, for hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_hosts import TCP, needs_ucx
from test_hybrid_prepare import check_failed
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

from evenstep import EvenstepError, device_places, leg_engine, over_hosts
from evenstep.device_places import HostParts, Place, parts_of_hosts
from evenstep.engine import EngineOptions

CASES = Path(__file__).with_name("hybrid_prepare_cases.py")
LEGS = {**TCP, "EVENSTEP_COMM_COSTS": "off", "EVENSTEP_DEVICE_HOSTS": "legs"}
OVER = [pytest.param("", marks=needs_ucx), pytest.param("gloo", marks=pytest.mark.more)]

Run = Callable[..., Any]


def on_hosts(run_ranks: Run, case: str, makers: str, hosts: str, *words: str, **variables: str) -> Any:
    """A letter for each rank's host."""
    where: dict[int, Mapping[str, str]] = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(hosts)}
    env = {**LEGS, "HOSTS": ",".join(hosts), **variables}
    return run_ranks(CASES, len(hosts), args=(case, makers, *words), env=env, rank_env=where, timeout=200)


def on_gpus(run_ranks: Run, case: str, hosts: str, *words: str, **variables: str) -> Any:
    return on_hosts(run_ranks, case, ",".join(["cuda"] * len(hosts)), hosts, *words, **variables)


# as many ranks on each host; one host with a rank alone; each rank on a host of its own
@pytest.mark.parametrize(
    "hosts", [pytest.param("xxyy", marks=pytest.mark.more), "xxy", pytest.param("xy", marks=pytest.mark.more)]
)
@needs_ucx
def test_equals_one_device(run_ranks: Run, hosts: str) -> None:
    on_gpus(run_ranks, "exact", hosts, "buckets")


@pytest.mark.parametrize("hosts", ["xxy", pytest.param("xxyy", marks=pytest.mark.more)])  # a rank in two legs
def test_equals_one_device_over_gloo(run_ranks: Run, hosts: str) -> None:
    on_gpus(run_ranks, "exact", hosts, "buckets", EVENSTEP_COMM_ENGINE="gloo")


@pytest.mark.parametrize("engine", OVER)
def test_losses_that_are_sums(run_ranks: Run, engine: str) -> None:
    on_gpus(run_ranks, "sums", "xxy", "buckets", EVENSTEP_COMM_ENGINE=engine)


@needs_ucx
def test_legs_of_pinned_memory(run_ranks: Run) -> None:
    """The stage of accelerators itself, over a made-up one whose streams are as late as they may be."""
    on_gpus(run_ranks, "exact", "xxyy", "buckets", "pinned")


@pytest.mark.parametrize("hosts", ["xxyy", pytest.param("xyxy", marks=pytest.mark.more), "xxxy"])
@needs_ucx
def test_sums_are_formed_host_by_host(run_ranks: Run, hosts: str) -> None:
    for rank in on_gpus(run_ranks, "bits", hosts):
        assert json.loads(rank.stdout.splitlines()[-1]) == "LegEngine"


@needs_ucx
def test_legs_between_network_namespaces(hosts: Hosts) -> None:
    hosts.environment.update(LEGS, HOSTS="x,x,y,y")
    code, text = hosts.run(str(CASES), "bits", "cuda,cuda,cuda,cuda", ranks=":2")
    assert code == 0 and '[rank 0] "LegEngine"' in text, text  # the others say so in their logs


@pytest.mark.parametrize("engine", OVER)
def test_sums_come_up_while_others_are_on_their_way(run_ranks: Run, engine: str) -> None:
    on_gpus(run_ranks, "early", "xxyy", EVENSTEP_COMM_ENGINE=engine)


@pytest.mark.parametrize("engine", OVER)
def test_what_crosses_between_hosts_in_16_bits(run_ranks: Run, engine: str) -> None:
    on_gpus(run_ranks, "rounded", "xxyy", EVENSTEP_COMM_ENGINE=engine)


@pytest.mark.parametrize(
    ("makers", "hosts"), [pytest.param("a,a,cpu,a,a,cpu", "xxxyyy", marks=pytest.mark.more), ("a,cpu,cpu,a", "xxyy")]
)
@needs_ucx
def test_makers_are_apart_on_each_host(run_ranks: Run, makers: str, hosts: str) -> None:
    on_hosts(run_ranks, "exact", makers, hosts, EVENSTEP_DEVICE_HOSTS="")
    on_hosts(run_ranks, "early", makers, hosts, EVENSTEP_DEVICE_HOSTS="")


@needs_ucx
def test_a_rank_of_another_host_that_dies(run_ranks: Run) -> None:
    told = on_gpus(run_ranks, "lost", "xxyy")
    for rank in told[:-1]:
        words = json.loads(rank.stdout.strip().splitlines()[-1])
        assert "EVEN_ERR_PEER_LOST" in words or "EVEN_ERR_REVOKED" in words


@pytest.mark.parametrize("over", ["ucx", pytest.param("gloo", marks=pytest.mark.more)])
@needs_ucx
def test_a_backward_that_fails_leaves_no_rank_waiting(run_ranks: Run, over: str) -> None:
    check_failed(on_gpus(run_ranks, "fails", "xxyy", "1", over), 1)


# ---- which way ----


@pytest.mark.parametrize(
    ("wanted", "case", "engine"),
    [
        ("", "engine", "TorchEngine"),
        ("nccl", "engine", "TorchEngine"),
        ("legs", "engine", "LegEngine"),
        ("legs", "enginetorch", "TorchEngine"),
        ("", "unconnected", "LegEngine"),
        ("", "hanging", "LegEngine"),
        ("measure", "quick_legs", "LegEngine"),
        ("measure", "slow_legs", "TorchEngine"),
    ],
)
@needs_ucx
def test_which_way(run_ranks: Run, wanted: str, case: str, engine: str) -> None:
    ranks = on_gpus(run_ranks, case, "xxy", EVENSTEP_DEVICE_HOSTS=wanted, EVENSTEP_COMM_DEBUG="1")
    assert [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks] == [engine] * 3
    said = ranks[0].stderr
    if case == "unconnected":
        assert "the GPUs' collectives do not connect the job's hosts (rank 2: no route to host)" in said
    if case == "hanging":
        assert "rank 1: its first call did not end within 0.05 s (EVENSTEP_DEVICE_HOSTS_SECONDS)" in said
        assert "EVENSTEP_DEVICE_HOSTS=legs, if it is to be so" in said
    assert ("EVENSTEP_DEVICE_HOSTS=measure" in said) == (wanted == "measure")
    assert ("2 legs between the hosts over our engines" in said) == (engine == "LegEngine")


@pytest.mark.parametrize("words", ["0", "-1", "soon", "nan", "inf"])
def test_a_limit_of_the_first_call_that_is_none(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("EVENSTEP_DEVICE_HOSTS_SECONDS", words)
    with pytest.raises(EvenstepError, match=f"EVENSTEP_DEVICE_HOSTS_SECONDS is '{words}'\n  fix: give seconds"):
        over_hosts.first_call_seconds()


def places(*words: str) -> list[Place]:
    return [Place(device, host, "cuda", "nccl") for device, _, host in (word.partition("@") for word in words)]


def test_who_carries_what() -> None:
    assert parts_of_hosts(places("cuda:0@x", "cuda:1@x")) is None
    assert parts_of_hosts([*places("cuda:0@x"), Place("cuda:0", "y", "cuda", "")]) is None
    parts = parts_of_hosts(places("cuda:0@x", "cuda:1@x", "cuda:0@y", "cuda:1@y"))
    assert parts == HostParts(((0, 1), (2, 3)), "nccl", 2) and parts.legs == [[0, 2], [1, 3]]
    uneven = parts_of_hosts(places("cuda:0@x", "cuda:0@y", "cuda:1@y", "cuda:2@y"))
    assert uneven is not None and uneven.lanes == 3 and uneven.legs == [[0, 1], [0, 2], [0, 3]]
    many = parts_of_hosts(places(*[f"cuda:{n}@{host}" for host in "xy" for n in range(8)]))
    assert many is not None and many.legs == [[0, 8], [1, 9], [2, 10], [3, 11]]


def test_ranks_that_want_different_ways() -> None:
    with pytest.raises(EvenstepError, match="EVENSTEP_DEVICE_HOSTS differs among the ranks: rank 0 legs, rank 1 unset"):
        device_places.agreed_over_hosts(["legs", ""])


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_slots_have_room_in_any_order(lanes: int) -> None:
    torch.manual_seed(lanes)
    parameters = [
        torch.empty(int(n), dtype=t) for n in torch.randint(0, 900, (40,)) for t in (torch.float64, torch.bfloat16)
    ]
    for cap in (1, 3000, 0):
        options = EngineOptions(bucket_bytes=cap)
        room = leg_engine.room_bytes(parameters, lanes, options)
        engine = leg_engine.StagedEngine(parameters, None, [], options)
        for _ in range(5):
            engine.reorder(torch.randperm(len(parameters)).tolist(), [])
            parts = [leg_engine.cut(bucket.flat, lanes) for bucket in engine._buckets]
            assert all(torch.equal(torch.cat(one), bucket.flat) for one, bucket in zip(parts, engine._buckets))
            for lane in range(lanes):
                like = [one[lane] for one in parts]
                assert leg_engine.HostEngine.arena_bytes(like, EngineOptions(bucket_bytes=1)) <= room
