"""Parameters that differ between ranks: found by a flipped bit, named, told or the end; and what may differ is let be."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_jobs import Job

import evenstep as es
from evenstep.device_places import kinds_of
from evenstep.parameter_checks import _sum_on_device, difference, sums_of

CASES = pathlib.Path(__file__).parent / "parameter_cases.py"


def said_in(text: str, name: str) -> list[str]:
    part = text.partition(f"BEGIN {name}\n")[2].partition(f"END {name}\n")[0]
    return [re.sub(r"step \d+", "step N", line) for line in part.splitlines() if line.startswith("evenstep: step")]


def test_a_flipped_bit_on_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(CASES, ranks=3)
    told = [dict(json.loads(line) for line in one.stdout.splitlines() if line.startswith("[")) for one in ranks]
    assert told[0] == told[1] == told[2]
    said = {name: said_in(ranks[0].stderr, name) for name in told[0]}
    for apart in ("plain", "local frozen", "local", "diloco", "stale"):
        assert said[apart] == [], apart
    (line,) = said["high bit"]  # once, though it stays
    assert re.fullmatch(r"evenstep: step N: rank 1 differs in second\.weight: 1 value, by up to 0\.\d+", line), line
    (line,) = said["frozen"]  # nobody trains it, and it is compared, too
    assert re.fullmatch(r"evenstep: step N: rank 1 differs in first\.weight: 1 value, by up to .*", line), line
    assert said["another shape"] == ["evenstep: step N: rank 1 differs in unused: 4 values, by up to inf"]
    (line,) = said["low bit"]
    assert "rank 1 differs in second.weight: 1 value" in line and "no more than rounding makes" in line
    (line,) = said["bf16"]
    assert "rank 1 differs in second.weight" in line and "rounding" not in line
    first, last = said["back"]
    assert "rank 1 differs" in first and "the ranks have the same parameters again" in last
    stopped = told[0]["stop"]
    assert stopped["steps"] == 6 and "rank 1 differs in second.weight" in stopped["said"]  # at the next comparison
    assert "--resume auto" in stopped["said"]
    assert all(case["said"] == "" and case["steps"] == 9 for name, case in told[0].items() if name != "stop")
    assert not any("differs" in one.stderr for one in ranks[1:])  # one says it


TRAIN = """
    import ctypes, os
    import torch
    import evenstep as es
    torch.manual_seed(0)
    x = torch.randn(160, 4)
    x[40:44] = float("nan")                      # of the third batch, rank 1's
    model = torch.nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    model, optimizer, loader = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch, in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == 5 and es.rank() == 0 and not os.path.exists("flipped"):
            open("flipped", "w").close()
            ctypes.c_ubyte.from_address(model.weight.data_ptr() + 2).value ^= 0x80
    if es.is_main():
        print("steps:", es.step(), "finite:", bool(model.weight.isfinite().all()), flush=True)
"""


def test_a_checkpoint_is_never_of_parameters_that_differ(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    """Rank 0's are what is written, and it is rank 0's bit that flips: the comparison before the checkpoint ends the job, which
    goes on from the one before. A step before that is left out, for its loss is no number."""
    words = ("-n", "2", "--policy", "equal", "--checkpoint-every", "1")
    asked = ("--on-nonfinite", "skip", "--on-difference", "stop")
    code, text = start("--name", "a", *words, *asked, script(TRAIN), monitor=True).finish()
    assert code == 0 and "steps: 10 finite: True" in text, text
    assert "step 2: the loss and gradients on rank 1 are not finite: bias, weight; the step is left out" in text
    assert "ranks 0, 1 differ in weight: 1 value, by up to " in text and "who is right is not known" in text
    assert "restart 1 of 3 from" in text and "step-00000004" in text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        query = "SELECT rank, step, value FROM events WHERE event = ? ORDER BY rowid"
        told = [history.execute(query, (event,)).fetchall() for event in ("nonfinite", "parameters")]
    assert told == [[(1, 2, 1), (1, 3, 0)], [(0, 5, 1)]], told


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4, 5), (0,)])
def test_sums_see_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=dtype)
    other = values.clone()
    assert sums_of([values]) == sums_of([other])
    if values.numel() == 0:
        return
    real = torch.view_as_real(other) if dtype.is_complex else other
    flat = real.reshape(-1).view(torch.uint8)
    for byte in (0, len(flat) // 2, len(flat) - 1):
        flat[byte] ^= 4
        assert sums_of([values]) != sums_of([other])
        assert difference(values, other).values == 1
        flat[byte] ^= 4
    assert difference(values, other).values == 0
    if len(shape) == 4:
        lasting = values.to(memory_format=torch.channels_last)
        assert sums_of([lasting]) == sums_of([lasting.clone()]) and sums_of([lasting.transpose(2, 3)])[0] != 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_a_part_of_another_tensor_has_the_sum_of_its_bytes(dtype: torch.dtype) -> None:
    """On a device: one rank's parameter may begin between two words of memory, and another's not."""
    whole = torch.arange(9).remainder(2).to(dtype)
    part = whole[1:9]
    assert part.storage_offset() == 1 and torch.equal(_sum_on_device(part), _sum_on_device(part.clone()))
    assert sums_of([part]) == sums_of([part.clone()])
    other = part.clone()
    other.view(torch.uint8)[-1] ^= 1
    assert not torch.equal(_sum_on_device(part), _sum_on_device(other))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_types_of_one_byte_are_compared_value_by_value(dtype: torch.dtype) -> None:
    mine = torch.ones(3, dtype=dtype)
    theirs = mine.clone()
    assert difference(mine, theirs).values == 0
    theirs[1] = 0
    found = difference(mine, theirs)
    assert found.values == 1 and found.largest == 1 and not found.rounding


def test_parameters_of_one_rank_may_be_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(torch.Tensor):
        is_cpu = False  # type: ignore[assignment]
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    class Second(First):
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    def stack_of_one_device(tensors: list[torch.Tensor]) -> torch.Tensor:
        assert len({one.device for one in tensors}) == 1  # as torch asks
        return stack(tensors)

    values, stack = [torch.full((4,), float(n)) for n in range(5)], torch.stack
    spread = [value.as_subclass(kind) for value, kind in zip(values, (First, Second, First, Second, torch.Tensor))]
    wanted = [int(_sum_on_device(value)) & (2**64 - 1) for value in values[:4]] + sums_of(values[4:])
    monkeypatch.setattr(torch, "stack", stack_of_one_device)
    assert sums_of(spread) == wanted and len(set(wanted)) == 5


CHECKPOINT = """
    import sys
    import torch
    import evenstep as es
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    es.session().parameter_checks.policy = "stop"
    es.checkpoint("good")
    if es.rank() == 1:
        with torch.no_grad():
            model.weight[1, 2] += 1
    try:
        es.checkpoint("bad")
    except es.EvenstepError as error:
        print("refused:", error)
"""


def test_a_checkpoint_of_the_scripts_own_is_compared_too(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    for one in run_ranks(CHECKPOINT):
        assert "refused: step 0: ranks 0, 1 differ in weight: 1 value, by up to 1" in one.stdout, one.stdout
    assert (tmp_path / "good").exists() and not (tmp_path / "bad").exists()


def test_frozen_parameters_are_compared_where_all_ranks_have_them_on_alike_devices() -> None:
    here, there = torch.empty(1), torch.empty(1, device="meta")
    assert kinds_of([here, here, there]) == [("cpu", 2), ("meta", 1)] != kinds_of([here, there, here])
    assert kinds_of([]) == []


def test_what_rounding_makes_is_told_apart() -> None:
    torch.manual_seed(0)
    mine = torch.randn(1000)
    near = mine * (1 + 1e-6)
    assert difference(mine, near).rounding and difference(mine, near).values > 500
    far = mine.clone()
    far[7] *= 1.001
    assert not difference(mine, far).rounding
    far[7] = float("nan")
    assert not difference(mine, far).rounding


def test_wrong_words_are_refused(run: Any, script: Callable[[str], str]) -> None:
    for words, said in (
        (("--check-parameters", "often"), "--check-parameters often is no number of steps"),
        (("--on-difference", "skip"), "give report or stop"),
    ):
        result = run(*words, script("pass"))
        assert result.returncode == 2 and said in result.stderr, result.stderr
    with pytest.raises(ValueError, match="on_difference='skip'"):
        es.Config(on_difference="skip")
    with pytest.raises(ValueError, match="check_parameters=-1"):
        es.Config(check_parameters=-1)
