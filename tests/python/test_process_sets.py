"""Process sets: several trainings in one job, each on some of its ranks, as jobs of their own with these ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("process_set_cases.py")

Run = Callable[..., Any]


def results(run_ranks: Run, ranks: int, *args: str, **options: Any) -> list[Any]:
    variables = {
        "EVENSTEP_POLICY": "equal",
        **options.pop("env", {}),
    }  # how an evaluation is split follows no measured times
    done = run_ranks(CASES, ranks, args=args, timeout=300, env=variables, **options)
    return [json.loads(rank.stdout.strip().splitlines()[-1]) for rank in done]


def compare(run_ranks: Run, ranks: int, chosen: list[list[int]], *options: str) -> None:
    """Each set's ranks give, to the bit, what a job of as many ranks gives."""
    told = results(run_ranks, ranks, "sets", ";".join(map(json.dumps, chosen)), *options)
    for seed, one in enumerate(chosen):
        members = sorted(one)
        mine = [told[rank] for rank in members]
        if any(result["set"] != seed for result in mine):
            continue
        for own, result in zip(results(run_ranks, len(members), "alone", str(seed), *options), mine):
            assert result == {"set": seed, **own}
    inside = {rank for one in chosen for rank in one}
    assert all(told[rank] is None for rank in range(ranks) if rank not in inside)


def test_a_call_whose_name_is_taken_makes_no_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep import process_sets

    monkeypatch.setattr(process_sets, "_ranks", {"b": (0, 1)})
    wishes = [process_sets._Wish(ranks, name, "") for ranks, name in (((0,), "a"), ((1,), "b"))]
    with pytest.raises(process_sets.EvenstepError, match="there is a set 'b' already"):
        process_sets._agree(wishes)
    assert process_sets._ranks == {"b": (0, 1)}
    wishes[1] = process_sets._Wish((1,), "c", "")
    assert [made.name for made in process_sets._agree(wishes)] == ["a", "c"]


def test_two_sets_train_as_jobs_of_their_own(run_ranks: Run) -> None:
    compare(run_ranks, 5, [[2, 0], [1, 3]])


@pytest.mark.parametrize(
    "options", [("torch",), ("shared", "int8"), pytest.param(("torch", "bf16"), marks=pytest.mark.more)]
)
def test_with_other_engines_and_compression(run_ranks: Run, options: tuple[str, ...]) -> None:
    compare(run_ranks, 3, [[2, 0], [1]], *options)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.more)])
def test_any_partition(run_ranks: Run, seed: int) -> None:
    drawn = random.Random(seed)
    ranks = list(range(drawn.randint(3, 5)))
    drawn.shuffle(ranks)
    cut = drawn.randint(1, len(ranks) - 1)
    compare(run_ranks, len(ranks), [ranks[:cut], ranks[cut:]])


def test_groups_of_a_device_mesh(run_ranks: Run) -> None:
    told = results(run_ranks, 4, "handed_over")
    for seed in range(2):
        own = results(run_ranks, 2, "alone", str(seed))
        for result, alone in zip((told[seed], told[seed + 2]), own):
            assert result == {key: alone[key] for key in result}


def test_overlapping_sets(run_ranks: Run) -> None:
    assert results(run_ranks, 4, "overlapping") == ["ok"] * 4


def test_bad_input(run_ranks: Run) -> None:
    assert results(run_ranks, 3, "refused") == ["ok"] * 3


def test_a_member_that_never_calls(run_ranks: Run) -> None:
    first = run_ranks(CASES, 3, args=("never",))[0]
    words = json.loads(first.stdout)
    assert "process set 'pair': its ranks 0 … 1 are the job's 0, 2" in words
    assert "rank 1" in words


def test_each_set_has_its_checkpoints(run_ranks: Run, tmp_path: Path) -> None:
    whole = results(run_ranks, 3, "resumed", "3", env={"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "whole")})
    half = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "half")}
    results(run_ranks, 3, "resumed", "1", env=half)
    left, right = ([*(tmp_path / "half" / name).iterdir()] for name in ("left", "right"))
    assert [path.name for path in left] == ["step-00000004"] and [path.name for path in right] == ["step-00000003"]
    for named in (left[0], right[0], tmp_path / "half"):
        folder = tmp_path / f"again-{named.name}-{named.parent.name}"
        again = {"EVENSTEP_RESUME": str(named), "EVENSTEP_CHECKPOINT_DIR": str(folder)}
        told = results(run_ranks, 3, "resumed", "3", env=again)
        assert [one["began"] for one in told] == [4, 4, 3]
        assert [one["bits"] for one in told] == [one["bits"] for one in whole]


@pytest.mark.more
def test_a_restarted_set_goes_on(run_ranks: Run, tmp_path: Path) -> None:
    job = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "job"), "EVENSTEP_JOB": "0123456789abcdef"}
    results(run_ranks, 3, "resumed", "2", env=job)
    told = results(run_ranks, 3, "resumed", "3", env={**job, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert [one["began"] for one in told] == [8, 8, 6]
    other = {**job, "EVENSTEP_JOB": "fedcba9876543210", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert [one["began"] for one in results(run_ranks, 3, "resumed", "1", env=other)] == [0, 0, 0]


def test_alone_in_a_plain_process() -> None:
    import subprocess
    import sys

    script = """
        import torch, evenstep as es
        one = es.ProcessSet([0])
        model = torch.nn.Linear(2, 2)
        with one:
            assert es.prepare(model) is model and es.world_size() == 1
        try:
            es.ProcessSet([0, 1])
        except es.EvenstepError as error:
            assert "rank 1 is none of the job's, which are 0 … 0" in str(error)
    """
    import textwrap

    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=150)
