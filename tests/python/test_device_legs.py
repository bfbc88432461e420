"""CUDA tensors' collectives on backend "evenstep" over several hosts, by NCCL inside each and legs between them; see
device_leg_cases.py. One host's processes that take each other for strangers stand for hosts, made-up libraries for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from test_backend_device import environment, fake  # noqa: F401
from test_hosts import TCP, needs_ucx

from evenstep import _core, backend_legs
from evenstep.backend_tensors import op_of
from evenstep.device_places import hosts_apart

CASES = Path(__file__).with_name("device_leg_cases.py")
Run = Callable[..., Any]


def on_hosts(run_ranks: Run, fake: Path, cases: Path, hosts: str, *words: str, **variables: str) -> Any:  # noqa: F811
    """A letter for each rank's host."""
    legs = {**TCP, "EVENSTEP_COMM_COSTS": "off", "EVENSTEP_DEVICE_HOSTS": "legs", "HOSTS": hosts}
    where: dict[int, Mapping[str, str]] = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(hosts)}
    env = {**environment(fake), **legs, **variables}
    try:
        return run_ranks(cases, len(hosts), args=words, env=env, rank_env=where, timeout=170, check="lost" not in words)
    finally:
        for left in fake.parent.glob("fake-nccl-*"):  # where a communicator ended with its ranks' last call
            left.unlink()


# hosts whose ranks are not one behind the other; one with a rank alone; each rank on a host of its own
@pytest.mark.parametrize("hosts", ["xyyx", pytest.param("xxy", marks=pytest.mark.more), "xy"])
@needs_ucx
def test_collectives(run_ranks: Run, fake: Path, hosts: str) -> None:  # noqa: F811
    on_hosts(run_ranks, fake, CASES, hosts, "all_of_it")


@pytest.mark.parametrize("hosts", ["xxy", pytest.param("xyxx", marks=pytest.mark.more)])
@needs_ucx
def test_random_calls(run_ranks: Run, fake: Path, hosts: str) -> None:  # noqa: F811
    pytest.importorskip("hypothesis")
    on_hosts(run_ranks, fake, CASES.with_name("comm_properties.py"), hosts, "150", "device")


@pytest.mark.more
@needs_ucx
def test_the_wrappers_of_torch(run_ranks: Run, fake: Path, tmp_path: Path) -> None:  # noqa: F811
    cases = CASES.with_name("device_pattern_cases.py")
    on_hosts(run_ranks, fake, cases, "xy", str(tmp_path / "saved"))


@pytest.mark.parametrize("case", ["differs", "limited", "aborted"])
@needs_ucx
def test_one_gpu_a_host(run_ranks: Run, fake: Path, case: str) -> None:  # noqa: F811
    on_hosts(run_ranks, fake, CASES, "xy", case)


@pytest.mark.parametrize("hosts", ["xy", "xyyx"])
@needs_ucx
def test_a_rank_of_another_host_that_dies(run_ranks: Run, fake: Path, hosts: str) -> None:  # noqa: F811
    ranks = on_hosts(run_ranks, fake, CASES, hosts, "lost")
    ended = [rank.returncode for rank in ranks]
    assert ended == [0] * (len(hosts) - 1) + [-9], [rank.stderr for rank in ranks]


@pytest.mark.parametrize(
    ("wanted", "case"),
    [
        ("", "connected"),
        ("", "unconnected"),
        pytest.param("", "hanging", marks=pytest.mark.more),
        ("measure", "quick_legs"),
        ("measure", "slow_legs"),
    ],
)
@needs_ucx
def test_which_way(run_ranks: Run, fake: Path, wanted: str, case: str) -> None:  # noqa: F811
    debug = {"EVENSTEP_DEVICE_HOSTS": wanted, "EVENSTEP_COMM_DEBUG": "1"}
    said = on_hosts(run_ranks, fake, CASES, "xxy", case, **debug)[0].stderr
    if case == "unconnected":
        assert "do not connect the hosts of stand-in (rank 1: no route to host)" in said
    if case == "hanging":
        assert "rank 1: its first call did not end within 0.05 s (EVENSTEP_DEVICE_HOSTS_SECONDS)" in said
    assert ("EVENSTEP_DEVICE_HOSTS=measure" in said) == (wanted == "measure")
    legs = case not in ("connected", "slow_legs")
    assert ("CUDA tensors go by 2 legs between 2 hosts, NCCL inside each" in said) == legs, said


def test_without_an_engine_of_ours(run_ranks: Run, fake: Path) -> None:  # noqa: F811
    on_hosts(run_ranks, fake, CASES, "xy", "over_gloo", EVENSTEP_COMM_ENGINE="gloo")


def test_what_legs_carry() -> None:
    """Of reductions, what both NCCL and the CPU engine know."""
    ones, op = torch.ones(2), dist.ReduceOp
    wanted = [
        (ones, op.SUM, True),
        (ones.half(), op.AVG, True),
        (ones.bool(), op.MAX, True),
        (ones.int(), op.AVG, True),
        (ones.to(torch.uint32), op.SUM, True),
        (ones.to(torch.uint32), op.AVG, False),
        (ones.bool(), op.AVG, False),
        (ones.to(torch.float8_e5m2), op.SUM, False),
        (ones, dist._make_nccl_premul_sum(2.0), True),
        (ones.int(), dist._make_nccl_premul_sum(2.0), False),
    ]
    for tensor, operation, carried in wanted:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        number = op_of(options)
        assert backend_legs.carries([tensor], number, options) is carried, (tensor, operation)
    assert not backend_legs.carries([ones, ones.to(torch.float8_e5m2)], _core.OP_SUM, None)


def test_teams_and_legs_by_hosts() -> None:
    parts = hosts_apart(["b", "a", "b", "b"], "evenstep")
    assert parts is not None and parts.teams == ((0, 2, 3), (1,)) and parts.lanes == 3
    assert sorted(parts.legs) == [[0, 1], [2, 1], [3, 1]]
    assert hosts_apart(["a", "a"], "evenstep") is None
