"""What the ranks of exact="bitwise" compare of their places, and what is said of the first difference."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import evenstep as es
from evenstep import exact_place
from evenstep.exact_place import ExactState, check_alike, difference, place_of

PLACE = {
    "torch": "2.13.0",
    "machine": "x86_64",
    "processor: vendor_id": "GenuineIntel",
    "processor: model": "143",
    "instruction set": "0a1b2c3d",
    "torch's kernels": "AVX512",
    "threads": "1",
    "environment: MKL_CBWR": "AVX2",
    "probe": "deadbeef",
}


def test_the_first_difference_is_named() -> None:
    assert difference(PLACE, dict(PLACE)) == ""
    assert difference(PLACE, {**PLACE, "probe": "0", "threads": "2"}) == "threads"
    without = {name: value for name, value in PLACE.items() if name != "environment: MKL_CBWR"}
    assert difference(PLACE, without) == difference(without, PLACE) == "environment: MKL_CBWR"


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"torch": "2.12.1"}, "in torch: 2.12.1, rank 0: 2.13.0", "install the same versions everywhere"),
        ({"machine": "aarch64"}, "in machine: aarch64, rank 0: x86_64", "run on machines of one kind"),
        ({"processor: vendor_id": "AuthenticAMD"}, "in processor: vendor_id: AuthenticAMD", "machines of one kind"),
        ({"processor: model": "85"}, "in processor: model: 85, rank 0: 143", "run on machines of one kind"),
        ({"instruction set": "ffffffff"}, "in instruction set: ffffffff, rank 0: 0a1b2c3d", "machines of one kind"),
        ({"torch's kernels": "AVX2"}, "in torch's kernels: AVX2, rank 0: AVX512", "the same ATEN_CPU_CAPABILITY"),
        ({"threads": "2"}, "in threads: 2, rank 0: 1", "es.Config(threads=1)"),
        (
            {"environment: MKL_CBWR": None},
            "in environment: MKL_CBWR: None, rank 0: AVX2",
            "set MKL_CBWR to the same value for all ranks and all runs, or for none",
        ),
        (
            {"environment: ONEDNN_MAX_CPU_ISA": "AVX2"},
            "in environment: ONEDNN_MAX_CPU_ISA: AVX2, rank 0: None",
            "set ONEDNN_MAX_CPU_ISA to the same value",
        ),
        ({"probe": "0"}, "in what it computes in a small network (probe)", "run on machines of one kind"),
    ],
)
def test_a_rank_that_differs_is_refused_by_all(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], words: str, fix: str
) -> None:
    other = {name: value for name, value in {**PLACE, **change}.items() if value is not None}
    places = [PLACE, PLACE, other]
    monkeypatch.setattr(exact_place, "gather_objects", lambda group, mine: places)
    for mine in places:
        with pytest.raises(es.EvenstepError) as told:
            check_alike(None, mine)  # type: ignore[arg-type]
        said, _, advice = str(told.value).partition("\n  fix: ")
        assert f"the same bits on equal machines alone, and rank 2 differs {words}" in said and fix in advice


def test_ranks_that_are_alike_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_place, "gather_objects", lambda group, mine: [mine, dict(mine)])
    check_alike(None, PLACE)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_place_is_refused() -> None:
    state = ExactState(4, {**PLACE, "torch": "2.12.1"}).state_dict()
    with pytest.raises(
        es.EvenstepError, match=r"differs from the checkpoint's in torch: 2\.13\.0, the checkpoint's: 2\.12\.1"
    ):
        ExactState(4, PLACE).load_state_dict(state)


def made() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    model = nn.Linear(2, 1)
    return [model], [torch.optim.SGD(model.parameters(), lr=0.1)]


def test_a_place_has_what_chooses_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = place_of(*made())
    assert before == place_of(*made())  # nothing in it is chance
    assert before["torch"] == torch.__version__ and before["threads"] == str(torch.get_num_threads())
    assert before["torch's kernels"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert difference(place_of(*made()), before) == "environment: ONEDNN_MAX_CPU_ISA"


def test_processors_are_told_apart(tmp_path: pathlib.Path) -> None:
    def read(**lines: str) -> dict[str, Any]:
        given = {"processor": "0", "vendor_id": "GenuineIntel", "model": "143", "flags": "fpu sse2 avx2", **lines}
        text = "\n".join(f"{name}\t: {value}" for name, value in given.items())
        (tmp_path / "cpuinfo").write_text(f"{text}\n\nprocessor\t: 1\nmodel\t: 7\n")
        return exact_place._processor(str(tmp_path / "cpuinfo"))

    one = read()
    assert one["processor: model"] == "143" and "processor" not in one
    assert difference(read(flags="avx2 fpu sse2"), one) == ""  # in another order
    assert difference(read(flags="fpu sse2"), one) == "instruction set"
    assert difference(read(model="85"), one) == "processor: model"
    assert exact_place._processor(str(tmp_path / "missing")) == {}
