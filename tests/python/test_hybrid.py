"""One all-reduce over devices of two makers, with a second group of CPUs in the other maker's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import EvenstepError, hybrid

CASES = Path(__file__).with_name("hybrid_cases.py")


@pytest.mark.parametrize("makers", ["a,b", "a,b,a,a"])
def test_sums_over_makers(run_ranks: Callable[..., Any], makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=(makers,), timeout=120)


def group_of(monkeypatch: pytest.MonkeyPatch, device: str, others: list[tuple[str, int, str]]) -> hybrid.HybridGroup:
    """The last rank's, whose device is none of this machine's; no collective is made."""

    def gather(everyone: list[Any], own: Any) -> None:
        everyone[:] = [*others, own]

    monkeypatch.setattr(hybrid.dist, "get_rank", lambda: len(others))
    monkeypatch.setattr(hybrid.dist, "get_world_size", lambda: len(others) + 1)
    monkeypatch.setattr(hybrid.dist, "all_gather_object", gather)
    monkeypatch.setattr(hybrid.dist, "new_group", lambda ranks, **_: ranks)
    return hybrid.HybridGroup(device)


def test_nvidia_and_amd_are_two_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    nvidia, amd = ("cuda", hybrid.PIECE_BYTES, "cuda"), ("cuda-hip", hybrid.PIECE_BYTES, "cuda")
    group = group_of(monkeypatch, "cuda", [nvidia, amd])
    assert group.makers == {"cuda": [0], "cuda-hip": [1, 2]}
    monkeypatch.setattr(torch.version, "hip", None)
    assert group_of(monkeypatch, "cuda", [nvidia, amd]).makers == {"cuda": [0, 2], "cuda-hip": [1]}


def test_devices_without_collectives_of_ours_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu, cpu = ("xpu", hybrid.PIECE_BYTES, "xpu"), ("cpu", hybrid.PIECE_BYTES, "cpu")
    with pytest.raises(EvenstepError, match=r"maker 'xpu'.*: rank 0 xpu, rank 2 xpu\n  fix: start one rank"):
        group_of(monkeypatch, "xpu", [xpu, cpu])
    with pytest.raises(EvenstepError, match="rank 0 xpu, rank 1 xpu"):
        group_of(monkeypatch, "cpu", [xpu, xpu])
    assert group_of(monkeypatch, "cpu", [cpu, xpu]).makers == {"cpu": [0, 2], "xpu": [1]}
