"""CUDA tensors on backend "evenstep" that NCCL cannot take go through the host; see device_host_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from test_backend_device import environment, fake  # noqa: F401

from evenstep import backend_staged

CASES = Path(__file__).with_name("device_host_cases.py")


@pytest.mark.parametrize(
    ("case", "ranks"), [("all_of_it", 2), ("all_of_it", 3), ("a_late_send", 2), ("differs", 2), ("breaks", 2)]
)
def test_through_the_host(run_ranks: Callable[..., Any], fake: Path, case: str, ranks: int) -> None:  # noqa: F811
    run_ranks(CASES, ranks, args=(case,), env=environment(fake))
    if case not in ("differs", "breaks"):
        assert not list(fake.parent.glob("fake-nccl-*")), "a group's file is left: a communicator was not closed"
    for left in fake.parent.glob("fake-nccl-*"):
        left.unlink()


def test_over_gloo(run_ranks: Callable[..., Any], fake: Path) -> None:  # noqa: F811
    variables = {**environment(fake), "EVENSTEP_COMM_ENGINE": "gloo"}
    run_ranks(CASES, 2, args=("over_gloo",), env=variables)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.more)])
def test_random_calls(run_ranks: Callable[..., Any], fake: Path, ranks: int) -> None:  # noqa: F811
    pytest.importorskip("hypothesis")
    cases = CASES.with_name("comm_properties.py")
    run_ranks(cases, ranks, args=("150", "device"), env=environment(fake))


def test_the_wrappers_of_torch(run_ranks: Callable[..., Any], fake: Path, tmp_path: Path) -> None:  # noqa: F811
    cases = CASES.with_name("device_pattern_cases.py")
    run_ranks(cases, 2, args=(str(tmp_path / "saved"),), env=environment(fake))


def test_it_says_what_goes_there_and_why(run_ranks: Callable[..., Any], fake: Path) -> None:  # noqa: F811
    variables = {**environment(fake), "EVENSTEP_COMM_DEBUG": "1"}
    first, second = run_ranks(CASES, 2, args=("messages",), env=variables)
    said = [line for line in first.stderr.splitlines() if "through the host" in line]
    assert said == [
        "evenstep: comm: group torch/0: send of CUDA tensors goes through the host: NCCL has no tags",
        "evenstep: comm: group torch/0: recv of CUDA tensors goes through the host: NCCL has no tags",
    ], first.stderr
    assert "through the host" not in second.stderr


def test_what_nccl_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours and of torch's, which knows fewer dtypes; what the CPU engine has not goes to NCCL, which refuses it."""
    monkeypatch.setattr(backend_staged, "is_on_gpu", lambda tensor: True)
    ones, op = torch.ones(2), dist.ReduceOp
    wanted = [
        (ones, op.SUM, "", ""),
        (ones.int(), op.BAND, "BAND", "BAND"),
        (ones.bool(), op.BXOR, "BXOR", "BXOR"),
        (ones, op.BOR, "", ""),
        (ones.short(), op.SUM, "reductions of torch.int16", "reductions of torch.int16"),
        (ones.short(), op.AVG, "", ""),
        (ones.to(torch.uint16), op.MAX, "reductions of torch.uint16", "reductions of torch.uint16"),
        (ones.to(torch.uint64), op.SUM, "", "reductions of torch.uint64"),
        (ones.to_sparse(), op.SUM, "sparse tensors", "sparse tensors"),
        (ones.to_sparse(), op.MAX, "", ""),
        (ones.to(torch.complex64), op.SUM, "", ""),
        (ones.to(torch.float8_e5m2), op.SUM, "", ""),
        (ones.short(), dist._make_nccl_premul_sum(2.0), "", ""),
    ]
    for tensor, operation, ours, torchs in wanted:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        assert backend_staged.lacking([tensor], options, False) == ours, (tensor, operation)
        assert backend_staged.lacking([tensor], options, True) == torchs, (tensor, operation)
    assert backend_staged.lacking([ones, ones.short()], None, False) == "reductions of torch.int16"
    monkeypatch.undo()
    assert backend_staged.lacking([ones.short()], None, False) == "", "a CPU tensor"
