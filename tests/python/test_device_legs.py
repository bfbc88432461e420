"""CUDA tensors' collectives on backend "evenstep" over several hosts, by NCCL inside each and legs between them; see
device_leg_cases.py. One host's processes that take each other for strangers stand for hosts, made-up libraries for GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from test_backend_device import environment, fake  # noqa: F401
from test_hosts import TCP, needs_ucx

from evenstep import _core, backend_legs, device_legs, device_ways
from evenstep.backend_device import DeviceCollectives
from evenstep.backend_tensors import op_of
from evenstep.device_groups import DeviceGroups
from evenstep.device_places import hosts_apart, over_hosts_among
from evenstep.device_streams import CudaStreams
from evenstep.leg_calls import RECORD_BYTES, check_calls, record_of, words_of

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


@pytest.mark.parametrize("case", ["differs", "limited", "aborted", "no_room"])
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
        ("needed", "connected"),
        ("needed", "unconnected"),
        pytest.param("needed", "unconnected_by_itself", marks=pytest.mark.more),
        ("needed", "captured"),
        ("needed", "hanging"),
        ("measure", "quick_legs"),
        ("measure", "slow_legs"),
    ],
)
@needs_ucx
def test_which_way(run_ranks: Run, fake: Path, wanted: str, case: str) -> None:  # noqa: F811
    debug = {"EVENSTEP_DEVICE_HOSTS": wanted, "EVENSTEP_COMM_DEBUG": "1"}
    said = on_hosts(run_ranks, fake, CASES, "xxy", case, **debug)[0].stderr
    if "unconnected" in case:
        assert (
            "do not connect the hosts of stand-in (rank 1: all_reduce (1) on rank 1 of 3, cuda:1: NCCL says: " in said
        )
    if case == "hanging":
        assert "rank 1: its first call did not end within 0.05 s (EVENSTEP_DEVICE_HOSTS_SECONDS)" in said
    assert ("EVENSTEP_DEVICE_HOSTS=measure" in said) == (wanted == "measure")
    legs = case not in ("connected", "slow_legs")
    assert ("CUDA tensors go by 2 legs between 2 hosts, NCCL inside each" in said) == legs, said


@pytest.mark.parametrize("case", ["unlike", "late"])
@needs_ucx
def test_a_host_of_two(run_ranks: Run, fake: Path, case: str) -> None:  # noqa: F811
    on_hosts(run_ranks, fake, CASES, "xxy", case)


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


@pytest.mark.parametrize("said", ["", "nccl"])
def test_that_nobody_asked_for_legs(said: str) -> None:
    """NCCL connects the hosts, and nothing is told or tried."""
    groups = DeviceGroups(dist.HashStore(), 0, 2, 60.0, str)
    made = backend_legs.device_collectives(groups, CudaStreams(), ["a", "b"], said)
    assert type(made) is DeviceCollectives


def test_what_a_group_is_asked_for() -> None:
    assert over_hosts_among(["a", "a"], ["legs", "no such word"]) == "nccl"
    assert over_hosts_among(["a", "b"], ["", ""]) == "" and over_hosts_among(["a", "b"], ["needed"] * 2) == "needed"
    with pytest.raises(_core.EvenstepError, match="differs among the ranks: rank 0 legs, rank 1 unset"):
        over_hosts_among(["a", "b"], ["legs", ""])
    with pytest.raises(_core.EvenstepError, match="EVENSTEP_DEVICE_HOSTS is 'no'; choose"):
        over_hosts_among(["a", "b"], ["no", "no"])


class Told:
    """A group whose other ranks have said this."""

    timeout_seconds, size, rank, name = 10.0, 3, 0, "told"

    def __init__(self, said: list[tuple[int, str]]) -> None:
        self.said, self.waited = said, [0.0]

    def exchange(self, name: str, record: bytes, more_seconds: float = 0.0) -> list[bytes]:
        self.waited.append(more_seconds)
        return [json.dumps(one).encode() for one in self.said]


class NoStreams:
    def device(self, tensor: Any) -> int:
        return 0

    def side(self, *given: Any) -> None: ...


def test_the_cause_is_named_and_its_aftermath_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    good, cause, aftermath = device_ways._GOOD, device_ways._CAUSE, device_ways._AFTERMATH
    monkeypatch.setattr(device_ways.WayOverHosts, "_first_call", lambda *given: (good, ""))
    groups: Any = Told([(aftermath, "a sum of 3 ones was 1"), (good, ""), (cause, "no route to host")])
    streams: Any = NoStreams()
    way = device_ways.WayOverHosts(groups, streams, False, "by legs")
    assert way._first_failure(0, torch.device("cpu")) == "rank 2: no route to host"
    assert groups.waited[-1] == 5.0  # half of the group's limit, which is less than that of a first call
    groups.said = [(good, "")] * 3
    assert way._first_failure(0, torch.device("cpu")) == ""


def test_a_choice_that_failed_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have gone on by what this rank has said."""
    streams: Any = NoStreams()
    groups: Any = Told([])
    way, tried = device_ways.WayOverHosts(groups, streams, False, "by legs"), []

    def fails(*given: Any) -> None:
        tried.append(1)
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(way, "_found", fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the store is gone"):
            way.by_legs(torch.ones(1), lambda one: None, lambda one: None)
    assert tried == [1]


def test_a_cause_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looks for it for ever."""
    monkeypatch.setattr(device_legs, "TELLING_SECONDS", 0.02)
    legs: Any = object.__new__(device_legs.HostLegs)
    legs._told = dist.HashStore()
    assert legs._hear() is None


def test_whole_calls_are_compared() -> None:
    sizes = [([n], torch.float32) for n in range(200)]
    words = [words_of("all_reduce", [*sizes[:-1], ([last], torch.float32)], _core.OP_AVG) for last in (1, 2)]
    long = [record_of(one, "/a/file.py:3 in step" * 99) for one in words]
    assert {len(record) for record in long} == {RECORD_BYTES} and long[0] != long[1]
    check_calls([long[0], record_of(words[0], None)], [0, 4])
    with pytest.raises(
        _core.EvenstepError, match=r"rank 0 called all_reduce of 0 float32 .*, but rank 4 called all_reduce"
    ):
        check_calls(long, [0, 4])
    short = [
        record_of(words_of("reduce", sizes[3:4], _core.OP_SUM, root), f"f.py:{root} in step") for root in (0, 0, 1)
    ]
    words_said = r"rank 2 called reduce of 3 float32 elements with SUM to rank 0 at f.py:0 in step, but rank 7 called .* to rank 1"
    with pytest.raises(_core.EvenstepError, match=words_said):
        check_calls(short, [2, 5, 7])
    assert words_of("reduce_scatter", [([3, 3], torch.half)], 0) == words_of("reduce_scatter", [([6], torch.half)], 0)
