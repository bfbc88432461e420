"""es.prepare on devices of several makers: CPUs with a memory of their own stand for accelerators."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import EvenstepError, device_places, engine_choice
from evenstep.device_groups import engine_version
from evenstep.device_places import Place, makers_among

CASES = Path(__file__).with_name("hybrid_prepare_cases.py")

Run = Callable[..., Any]


# one accelerator and the host; a team beside the host; two makers without the host; one without collectives twice; a team
# over torch's collectives
@pytest.mark.parametrize(
    "makers", [pytest.param("a,cpu", marks=pytest.mark.more), "cpu,a,a", "a,x", "x,cpu,x", "xpu,cpu,xpu"]
)
def test_equals_one_device(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=("exact", makers), timeout=200)


@pytest.mark.parametrize("makers", ["a,cpu,a", pytest.param("x,cpu", marks=pytest.mark.more)])
def test_many_buckets(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=("exact", makers, "buckets"), timeout=200)


@pytest.mark.parametrize("makers", ["cpu,a,a", "x,cpu,x"])
def test_losses_that_are_sums(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, 3, args=("sums", makers, "buckets"), timeout=200)


@pytest.mark.parametrize("makers", ["x,cpu", pytest.param("a,cpu,a", marks=pytest.mark.more)])
def test_gradients_in_pinned_memory(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=("exact", makers, "buckets", "pinned"), timeout=200)


@pytest.mark.parametrize("makers", ["a,cpu", "cpu,a,a", pytest.param("a,x", marks=pytest.mark.more)])
def test_sums_come_up_while_others_are_on_their_way(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=("early", makers))


@pytest.mark.parametrize("makers", ["x,cpu", "a,cpu,a,cpu"])
def test_sums_are_formed_in_order(run_ranks: Run, makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=("bits", makers))


@pytest.mark.parametrize("makers", ["x,cpu", "cpu,a,a"])
def test_the_hosts_ranks_measure_no_sizes_of_buckets(run_ranks: Run, makers: str) -> None:
    """The others' engines take no part in that."""
    run_ranks(CASES, makers.count(",") + 1, args=("many_rounds", makers))


def test_compression_between_the_makers(run_ranks: Run) -> None:
    run_ranks(CASES, 3, args=("rounded", "a,cpu,a"))


def test_parameters_are_averaged_alike(run_ranks: Run) -> None:
    run_ranks(CASES, 3, args=("local", "a,cpu,a"))


@pytest.mark.parametrize("makers", ["cpu,a,a", pytest.param("a,cpu", marks=pytest.mark.more)])
def test_a_rank_that_dies(run_ranks: Run, makers: str) -> None:
    ranks = makers.count(",") + 1
    told = run_ranks(CASES, ranks, args=("lost", makers))
    for rank in told[:-1]:
        words = json.loads(rank.stdout.strip().splitlines()[-1])
        assert f"rank {ranks - 1}" in words and "EVEN_ERR_PEER_LOST" in words


def check_failed(told: list[Any], failing: int) -> None:
    for number, rank in enumerate(told):
        words, seen, whole, ended, (spread, parts) = json.loads(rank.stdout.strip().splitlines()[-1])
        if number == failing:
            assert words == "the script's own" and seen[0] > 0, (number, words, seen)
        else:
            assert "another rank's backward failed: " in words, (number, words)
        assert whole and all(ended) and spread == parts, (number, whole, ended, spread, parts)


# a rank of a team that carries nothing; one that does; the host's; two makers without teams
@pytest.mark.parametrize(("makers", "failing"), [("cpu,a,a", 2), ("cpu,a,a", 1), ("cpu,a,a", 0), ("x,cpu", 0)])
def test_a_backward_that_fails_leaves_no_rank_waiting(run_ranks: Run, makers: str, failing: int) -> None:
    told = run_ranks(CASES, makers.count(",") + 1, args=("fails", makers, str(failing)))
    check_failed(told, failing)


@pytest.mark.parametrize(
    ("case", "makers", "engine"),
    [("engine", "cpu,cpu", "SharedEngine"), ("enginetorch", "a,cpu", "TorchEngine"), ("engineshared", "x,cpu", "")],
)
def test_which_engine(run_ranks: Run, case: str, makers: str, engine: str) -> None:
    told = [json.loads(rank.stdout) for rank in run_ranks(CASES, 2, args=(case, makers))]
    assert told == ([engine] * 2 if engine else ["HybridEngine", "SharedEngine"])


def places(*words: str) -> list[Place]:
    made = []
    for word in words:
        device, _, host = word.partition("@")
        maker = device.partition(":")[0]
        made.append(Place(device, host or "one", maker, {"cuda": "nccl"}.get(maker, "")))
    return made


def test_hosts_of_one_name_and_containers_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a node's name nor a device's number tells whether two ranks have one device."""
    gpu, seen = SimpleNamespace(device=torch.device("cuda", 0)), []
    for host, uuid in (("one", "GPU-1"), ("two", "GPU-2"), ("two", "GPU-3"), ("two", "GPU-3")):
        monkeypatch.setenv("EVENSTEP_HOST_ID", host)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, u=uuid: SimpleNamespace(uuid=u))
        seen.append(device_places.place_of([gpu]))
    assert [one.device for one in seen] == ["cuda:0"] * 4
    names = [one.name for one in seen]
    assert len(set(names)) == 3 and names[2] == names[3]
    monkeypatch.setenv("EVENSTEP_HOST_ID", "")
    here = device_places.place_of(()).host
    assert here == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def test_who_meets_where() -> None:
    assert makers_among(places("cpu", "cpu")) is None
    assert makers_among(places("cuda:0", "cuda:1")) is None
    mixed = makers_among(places("cuda:0", "cpu", "cuda:1", "xpu:0", "xpu:1", "cpu"))
    assert mixed is not None
    assert mixed.teams == ((0, 2),) and mixed.backends == ("nccl",) and mixed.host == (0, 1, 3, 4, 5)
    one_gpu = makers_among(places("cuda:0", "cuda:0", "cpu"))  # NCCL wants a GPU for each rank
    assert one_gpu is not None and one_gpu.teams == () and one_gpu.host == (0, 1, 2)
    apart = makers_among(places("cuda:0@a", "cuda:1@a", "cpu@a", "cuda:0@b", "cuda:1@b"))
    assert apart is not None and apart.teams == ((0, 1), (3, 4)) and apart.host == (0, 2, 3)
    across = [replace(one, over_hosts="nccl") for one in places("cuda:0@a", "cuda:0@b", "cpu@a")]
    together = makers_among(across)
    assert together is not None and together.teams == ((0, 1),) and together.host == (0, 2)


def test_only_accelerators_of_one_maker_are_left_to_their_collectives() -> None:
    def told(*words: str) -> bool:
        return device_places.accelerators_alone([*places(*words)])

    assert told("cuda:0", "cuda:1") and not told("cuda:0", "cuda:0") and not told("cuda:0", "cpu")
    nvidia, amd = places("cuda:0", "cuda:1")
    assert not device_places.accelerators_alone([nvidia, replace(amd, maker="cuda-hip")])
    arcs = [replace(one, collectives="xccl") for one in places("xpu:0", "xpu:1")]
    assert device_places.accelerators_alone(arcs) and not told("xpu:0", "xpu:1")
    mixed = makers_among([*arcs, *places("cpu")])
    assert mixed is not None and mixed.teams == ((0, 1),) and mixed.backends == ("xccl",) and mixed.host == (0, 2)


@pytest.mark.parametrize(
    ("backend", "makers"), [("xccl", "xpu:0 xpu:1"), ("nccl", "cuda:0 cuda:1"), ("gloo", "xpu:0 cpu")]
)
def test_which_of_torchs_backends(monkeypatch: pytest.MonkeyPatch, backend: str, makers: str) -> None:
    """ROCm's devices are "cuda" in torch, and its RCCL is "nccl"."""
    monkeypatch.setattr(device_places.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device_places.dist, "is_xccl_available", lambda: True, raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    alike = []
    for hip in (None, "6.4"):
        monkeypatch.setattr(torch.version, "hip", hip)
        for name in makers.split():
            device = torch.device(name)
            maker = device_places.maker_of(device)
            alike.append(Place(name, "one", maker, device_places._collectives_of(device)))
        asked = SimpleNamespace(torch_group=lambda name: name)
        made = engine_choice._torch_group(asked, alike, device_places.accelerators_alone(alike))
        assert made == backend, alike
        alike.clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("EVENSTEP_DEVICE_ENGINE", "evenstep")
    assert device_places._collectives_of(torch.device("cuda", 0)) == "nccl" and engine_version() == 0


def test_the_engine_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_DEVICE_ENGINE", "best")
    with pytest.raises(EvenstepError, match="EVENSTEP_DEVICE_ENGINE is 'best'; choose 'torch' or 'evenstep'"):
        device_places.wanted_device_engine()
    monkeypatch.setenv("EVENSTEP_DEVICE_ENGINE", "evenstep")
    assert device_places._collectives_of(torch.device("cpu")) == ""
    monkeypatch.setenv("EVENSTEP_NCCL_LIBRARY", "libevenstep-absent.so")
    with pytest.raises(EvenstepError, match="EVENSTEP_DEVICE_ENGINE=evenstep, but NCCL was not found"):
        device_places._collectives_of(torch.device("cuda", 0))
