"""`bench/comm_numbers.py`: every number that communication is to reach, with its verdict, and what was not measured."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def numbers(bench_module: Callable[[str], ModuleType]) -> ModuleType:
    return bench_module("comm_numbers")


def verdicts(found: Any) -> dict[str, bool | None]:
    return {one.what: one.reached for one in found}


def test_one_of_two_ranks_is_held_beside_its_aim(numbers: ModuleType) -> None:
    large = {"bytes": 1 << 26, "arena_of_bound": 0.79, "arena_times_gloo": 8.0, "plain_times_gloo": 6.4}
    small = {"dist, empty override": 1e-6, "dist, evenstep": 5.9e-6, "dist, gloo": 80e-6, "C": 1.6e-6}
    small |= {"Open MPI, C": 2e-6, "MPICH, C": 1.5e-6, "Open MPI, C, in place": 2e-6}
    found = verdicts(numbers.of_two({"sizes": [large], "small": small}))
    assert found["64 MB, arena: of the memory-traffic bound"] is False
    assert found["64 MB, arena: times Gloo"] is True
    assert found["64 MB, arena: times MPI"] is None
    assert found["64 MB, plain tensors: times Gloo"] is False
    assert found["1 KB, dist.all_reduce: more than an override that does nothing"] is True
    assert found["1 KB, dist.all_reduce: times as fast as Gloo"] is False  # 13.6
    assert found["1 KB, from C"] is False and found["1 KB, from C: beside Open MPI from C"] is True
    assert found["1 KB, from C: beside MPICH from C"] is False
    assert not [name for name in found if "in the arena: beside" in name]  # ours was not measured
    assert found["1 KB, es.comm, tensor"] is None
    assert set(verdicts(numbers.of_two(None)).values()) == {None}
    large |= {"arena_times_mpi": 4.9, "mpi_library": "MPICH 5"}
    assert verdicts(numbers.of_two({"sizes": [large]}))["64 MB, arena: times MPICH 5"] is False


def test_each_way_of_the_other_benches_is_named(numbers: ModuleType) -> None:
    seconds = {"arena": 1.0, "plain": 2.0, "gloo": 9.0}
    found = verdicts(numbers.of_four({"rows": [{"collective": "all_reduce", "bytes": 1 << 26, "seconds": seconds}]}))
    assert list(found.values()) == [True, False]
    busy = {"arena quiet": 1.0, "arena each": 2.0, "plain quiet": 1.0, "plain each": 3.0}
    assert list(verdicts(numbers.of_busy({"sizes": [{"bytes": 1024, "seconds": busy}]})).values()) == [True, False]
    row = {"bytes": 9e5, "gloo": 1.0, "evenstep": 1.1, "last": 0.3, "evenstep open": 0.2, "evenstep alone": 1.0}
    ddp, faster, hidden = numbers.of_ddp({"rows": [row]}, {"rows": [row]})
    assert (ddp.reached, faster.reached, hidden.reached) == (False, False, False) and hidden.figure == "80 %"
    for nothing in (numbers.of_four(None), numbers.of_busy(None), numbers.of_ddp(None, None), numbers.of_faults("")):
        assert set(verdicts(nothing).values()) == {None}


def test_faults_are_read_from_what_that_bench_prints(numbers: ModuleType, tree: pathlib.Path) -> None:
    text = (tree / "docs" / "results" / "comm-faults-2026-11-22-quiet.txt").read_text()
    found = list(numbers.of_faults(text))
    assert [one.reached for one in found] == [True] * 5
    wrong = numbers.of_faults(text.replace("      0\n", "      1\n"))
    assert [one.reached for one in wrong] == [False, False, False, False, True]
    late = list(numbers.of_faults(text.replace("22.9", "201.0").replace("end): 0", "end): 3")))
    assert [one.reached for one in late] == [False, True, True, True, False]


def test_all_are_in_one_table(
    numbers: ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = {"arena quiet": 1.0, "arena each": 2.0, "plain quiet": 1.0, "plain each": 3.0}
    (tmp_path / "busy").write_text(json.dumps({"sizes": [{"bytes": 1024, "seconds": busy}]}))
    monkeypatch.setattr(
        sys, "argv", ["comm_numbers.py", "--busy", str(tmp_path / "busy"), "--two", str(tmp_path / "no")]
    )
    numbers.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("1024 bytes, arena" in line and line.endswith(" reached") for line in lines)
    assert any("1024 bytes, plain" in line and line.endswith("NOT reached") for line in lines)
    assert lines[-1].strip() == "1 reached, 1 not reached, 15 not measured"
