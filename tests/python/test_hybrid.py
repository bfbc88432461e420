"""One all-reduce over devices of two makers, with a second group of CPUs in the other maker's place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_hosts import TCP, needs_ucx

from evenstep import EvenstepError, device_places, hybrid

CASES = Path(__file__).with_name("hybrid_cases.py")


@pytest.mark.parametrize("makers", ["a,b", "a,b,a,a"])
def test_sums_over_makers(run_ranks: Callable[..., Any], makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=(makers,))


def test_makers_without_collectives_go_through_the_host(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 3, args=("a,a,b", "without"))


@pytest.mark.parametrize("engine", [pytest.param("", marks=needs_ucx), pytest.param("gloo", marks=pytest.mark.more)])
def test_sums_over_makers_on_several_hosts(run_ranks: Callable[..., Any], engine: str) -> None:
    """Each maker's ranks of each host are together."""
    hosts = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate("xxyy")}
    variables = {**TCP, "EVENSTEP_COMM_ENGINE": engine, "EVENSTEP_COMM_COSTS": "off", "HOSTS": "xxyy"}
    run_ranks(CASES, 4, args=("a,b,a,a",), env=variables, rank_env=hosts)


@pytest.mark.parametrize("makers", ["a,b", pytest.param("a,b,a", marks=pytest.mark.more)])
def test_pieces_in_pinned_memory(run_ranks: Callable[..., Any], makers: str) -> None:
    """The stage of accelerators itself, over a made-up one whose streams are as late as they may be."""
    run_ranks(CASES, makers.count(",") + 1, args=(makers, "pinned"))


Told = tuple[str, int, str, bool]


def group_of(
    monkeypatch: pytest.MonkeyPatch, device: str, others: list[Told], hosts: str = "", wanted: str = ""
) -> hybrid.HybridGroup:
    """The last rank's, whose device is none of this machine's; no collective is made. hosts: a letter for each rank's."""
    where = hosts or "h" * (len(others) + 1)
    told = [(*one, host, wanted) for one, host in zip(others, where)]
    monkeypatch.setenv("EVENSTEP_HOST_ID", where[-1])
    monkeypatch.setenv("EVENSTEP_DEVICE_HOSTS", wanted)
    monkeypatch.setattr(hybrid.dist, "get_rank", lambda: len(others))
    monkeypatch.setattr(hybrid.dist, "get_world_size", lambda: len(others) + 1)
    monkeypatch.setattr(hybrid, "_everyone", lambda group, own: [*told, own])
    monkeypatch.setattr(hybrid.dist, "new_group", lambda ranks=(), **_: ranks)
    monkeypatch.setattr(hybrid.dist, "destroy_process_group", lambda group: None)
    return hybrid.HybridGroup(device)


def test_nvidia_and_amd_are_two_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    nvidia, amd = ("cuda", hybrid.PIECE_BYTES, "cuda", True), ("cuda-hip", hybrid.PIECE_BYTES, "cuda", True)
    group = group_of(monkeypatch, "cuda", [nvidia, amd])
    assert group.makers == {"cuda": [0], "cuda-hip": [1, 2]}
    monkeypatch.setattr(torch.version, "hip", None)
    assert group_of(monkeypatch, "cuda", [nvidia, amd]).makers == {"cuda": [0, 2], "cuda-hip": [1]}


def test_each_device_without_collectives_is_a_maker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu, cpu = ("xpu", hybrid.PIECE_BYTES, "xpu", False), ("cpu", hybrid.PIECE_BYTES, "cpu", True)
    group = group_of(monkeypatch, "cpu", [xpu, cpu, xpu])
    assert group.makers == {"cpu": [1, 3], "xpu of rank 0": [0], "xpu of rank 2": [2]}
    assert group._between == [1, 0, 2]
    assert group_of(monkeypatch, "cpu", [cpu, xpu]).makers == {"cpu": [0, 2], "xpu": [1]}


def test_xpus_have_torchs_collectives_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu, cpu = ("xpu", hybrid.PIECE_BYTES, "xpu", True), ("cpu", hybrid.PIECE_BYTES, "cpu", True)
    monkeypatch.setattr(hybrid, "_PinnedStage", lambda device, piece: device)
    for available, makers in (
        (True, {"xpu": [0, 2], "cpu": [1]}),
        (False, {"xpu of rank 0": [0], "xpu of rank 2": [2]}),
    ):
        monkeypatch.setattr(hybrid.dist, "is_xccl_available", lambda a=available: a)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
        assert group_of(monkeypatch, "xpu", [xpu, cpu]).makers == {**makers, "cpu": [1]}


def test_xccl_of_a_torch_that_has_no_options_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __init__(self, *given: Any) -> None:
            self.given = given

    class New(Old):
        class Options:
            pass

    for kind, more in ((Old, 0), (New, 1)):
        monkeypatch.setattr(device_places.dist, "ProcessGroupXCCL", kind, raising=False)
        made = device_places.open_xccl("store", 1, 2, timedelta(seconds=5))
        assert made.given[:3] == ("store", 1, 2) and len(made.given) == 3 + more
        assert not more or made.given[3]._timeout == timedelta(seconds=5)


XCCL = """
    import torch
    import torch.distributed as dist
    import evenstep

    made = []

    def xccl(store, rank, size, options):
        made.append((rank, size, options._timeout.total_seconds()))
        return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)

    xccl.Options = type("Options", (), {})
    dist.ProcessGroupXCCL = xccl
    dist.is_xccl_available = torch.xpu.is_available = lambda: True
    dist.init_process_group("evenstep")
    group = dist.group.WORLD
    assert made == [(dist.get_rank(), 2, 1800.0)], made
    data = torch.full((3,), dist.get_rank() + 1.0)
    group._for_device(torch.device("xpu", 0)).allreduce([data]).wait()
    assert data.tolist() == [3.0] * 3
    assert "xpu" in {device.type for device in group._device_types}
    dist.destroy_process_group()
"""


def test_tensors_of_xpus_go_to_torchs_xccl(run_ranks: Callable[..., Any]) -> None:
    run_ranks(XCCL, 2)


def test_each_host_has_parts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = ("cuda", hybrid.PIECE_BYTES, "cuda", True), ("cpu", hybrid.PIECE_BYTES, "cpu", True)
    mixed = [cuda, cuda, cpu, cuda, cuda]
    group = group_of(monkeypatch, "cpu", mixed, "xxxyyy")
    assert list(group.makers.values()) == [[0, 1], [2], [3, 4], [5]] and group._between == [0, 2, 3, 5]
    assert list(group_of(monkeypatch, "cpu", mixed, "xxxyyy", "nccl").makers.values()) == [[0, 1, 3, 4], [2, 5]]
    assert list(group_of(monkeypatch, "cuda", [cuda] * 3, "xxyy").makers.values()) == [[0, 1, 2, 3]]
    assert list(group_of(monkeypatch, "cuda", [cuda] * 3, "xxyy", "legs").makers.values()) == [[0, 1], [2, 3]]
    assert list(group_of(monkeypatch, "cpu", [cpu] * 3, "xxyy", "legs").makers.values()) == [[0, 1, 2, 3]]
    with pytest.raises(
        EvenstepError, match="EVENSTEP_DEVICE_HOSTS is 'best'; choose 'nccl', 'legs', 'needed' or 'measure'"
    ):
        group_of(monkeypatch, "cuda", [cuda], wanted="best")
