"""`evenstep run --recovery shrink`: a rank is stopped, or hangs, and costs no process but its own."""

from __future__ import annotations

import re
from typing import Callable

import generation_cases as cases
import pytest
from generation_gloo_cases import over_gloo
from run_jobs import Run
from test_generations import SHRINK, assert_right

from evenstep import generations

Script = Callable[[str], str]


@pytest.mark.parametrize(
    ("ranks", "stops", "left"),
    [
        (3, "0~forward:3", [1, 2]),
        pytest.param(4, "1~vote:3,3~vote:3", [0, 2], marks=pytest.mark.more),  # two at once
        pytest.param(3, "2~committed:5", [0, 1], marks=pytest.mark.more),  # what it has committed stands on all
        pytest.param(3, "1~forward:3,0~meeting:3", [2], marks=pytest.mark.more),  # one while the others recover
    ],
)
def test_a_stopped_rank_alone_is_lost(run: Run, script: Script, ranks: int, stops: str, left: list[int]) -> None:
    result = run("-n", str(ranks), *SHRINK, script(cases.HELD_UP), stops)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)
    assert re.search(r"rank \d \(cpu:\d on \S+, process \d+\) was stopped \(SIGSTOP, SIGTSTP\)", text), text


@pytest.mark.more
@pytest.mark.parametrize(("stops", "left"), [("1~summing:3", [0, 2]), ("1^summing:3,0^handed:6", [0, 1, 2])])
def test_one_that_is_stopped_over_torchs_gloo_holds_nobody_up(
    run: Run, script: Script, stops: str, left: list[int]
) -> None:
    patience = "120" if "^" in stops else "1"
    source = script(over_gloo(cases.HELD_UP, 2))
    result = run("-n", "3", *SHRINK, source, stops, env={"EVENSTEP_STOP_PATIENCE": patience})
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.more
@pytest.mark.parametrize("stops", ["1^forward:3,0^vote:7", "1^commit:4,2^committed:9", "0^in:3,0^in:4,1^in:4"])
def test_who_goes_on_in_time_is_not_lost(run: Run, script: Script, stops: str) -> None:
    result = run("-n", "3", *SHRINK, script(cases.HELD_UP), stops, env={"EVENSTEP_STOP_PATIENCE": "120"})
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 1, 2])
    assert "the stopped rank goes on, and the step under way is made again by all" in text, text


@pytest.mark.parametrize("silence", [2, 4, 10, 20, 60, 600])
def test_ranks_wait_for_longer_than_another_leader_takes(monkeypatch: pytest.MonkeyPatch, silence: int) -> None:
    monkeypatch.setenv("EVENSTEP_HOST_TIMEOUT", str(silence))
    election = min(silence, 20) / 4  # leadership.h; 8 s: succession_take.c
    assert generations.far_doubt() >= 1.375 * silence + 2 * election + 8 - 0.5
    monkeypatch.delenv("EVENSTEP_HOST_TIMEOUT")
    assert generations.far_doubt() == 15


@pytest.mark.more
def test_a_hung_rank_alone_is_lost(run: Run, script: Script) -> None:
    hangs = ("--hang-timeout", "2", "--on-hang", "restart")
    result = run("-n", "3", *SHRINK, *hangs, script(cases.HELD_UP), "1!in:5")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    ends = re.findall(r"rank (\d) of 2 at step 18", text)
    assert sorted(ends) == ["0", "2"] and "restart 1" not in text, text
    assert "hung, and was ended for it: no progress" in text, text
    assert "generation 1: ranks 0 and 2 go on without rank 1" in text, text


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    [
        ((), {"EVENSTEP_STOP_PATIENCE": "long"}, "EVENSTEP_STOP_PATIENCE long is no time"),
        ((), {"EVENSTEP_STOP_GRACE": "never"}, "EVENSTEP_STOP_GRACE never is no time"),
        (("--loss-spike", "0.5"), {}, "--loss-spike 0.5 is no limit"),
        ((), {"EVENSTEP_LOSS_SPIKE": "never"}, "EVENSTEP_LOSS_SPIKE never is no limit"),
        (
            ("--hosts", "a,b"),
            {"EVENSTEP_HOST_TIMEOUT": "1.9"},
            "EVENSTEP_HOST_TIMEOUT=1.9 is too short: the kernel asks",
        ),
        (("--hosts", "a,b"), {"EVENSTEP_HOST_TIMEOUT": "soon"}, "EVENSTEP_HOST_TIMEOUT=soon is no time"),
        (("--hosts", "a,b,c"), {"EVENSTEP_HOST_TIMEOUT": "601"}, "EVENSTEP_HOST_TIMEOUT=601 is no time"),
        (
            ("--hosts", "a,b", "--witness", "c"),
            {"EVENSTEP_HOST_TIMEOUT": "20", "EVENSTEP_MAJORITY_PATIENCE": "39"},
            "EVENSTEP_MAJORITY_PATIENCE=39 is too short: hosts are lost after 20 s",
        ),
    ],
)
def test_odd_limits_are_named(
    run: Run, script: Script, options: tuple[str, ...], variable: dict[str, str], words: str
) -> None:
    result = run("-n", "2", *options, script("pass"), env=variable)
    assert result.returncode == 2 and words in result.stderr, result.stderr
