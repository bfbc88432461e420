"""`--recovery shrink|replace` where the script's loops are others than one over one loader."""

from __future__ import annotations

import re
from typing import Callable

import pytest
import recovery_loop_cases as cases
from run_jobs import Run

Script = Callable[[str], str]
WATCHED = ("--no-pin", "--no-monitor", "--log-rank", "all")


def assert_as_one_device(text: str, left: int, steps: int) -> None:
    found = re.findall(rf"rank \d of {left} at step {steps}: (\S+) apart, rate kept", text)
    assert len(found) == left and all(float(far) < 1e-12 for far in found), text
    assert "restart" not in text, text


@pytest.mark.parametrize(
    ("recovery", "deaths", "waits", "stream", "left"),
    [
        # beside two loaders, in a stream's accumulated pass, in a loop before its step
        (("shrink",), "0@forward:3,2@between:13,3@between:17", "", ("0",), 1),
        pytest.param(("shrink",), "3@committed:9,1@applied:15,0@forward:21", "", ("2",), 1, marks=pytest.mark.more),
        pytest.param(("shrink",), "0@vote:12,1@applied:18,2@applied:22", "", ("0", "skip"), 1, marks=pytest.mark.more),
        pytest.param(("shrink",), "0@forward:11,3@met:11,1@voted:18", "", ("2", "state"), 1, marks=pytest.mark.more),
        pytest.param(
            ("replace", "--spares", "1"),
            "1@forward:2,0@between:12,2@between:17",
            "3,13,18",
            ("0", "state"),
            4,
            marks=pytest.mark.more,
        ),
    ],
)
def test_each_loop_gives_the_lost_batches_again(
    run: Run, script: Script, recovery: tuple[str, ...], deaths: str, waits: str, stream: tuple[str, ...], left: int
) -> None:
    result = run("-n", "4", *WATCHED, "--recovery", *recovery, script(cases.LOOPS), deaths, waits, *stream)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 24)


@pytest.mark.more
def test_loaders_that_take_turns_start_again(run: Run, script: Script) -> None:
    result = run("-n", "2", *WATCHED, "--recovery", "shrink", script(cases.IN_TURNS), "1@forward:5")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "but the script asks another loader for its next one" in text and "restart 1 of 3" in text
    assert text.count("ended with 2 ranks at step 36") == 2


@pytest.mark.parametrize(
    ("deaths", "left"),
    [
        # rank 0 in the write of an automatic one, a rank in the script's, one while the last is remembered
        ("0@written:4,2@packed:6,3@remembered:8", 1),
        pytest.param("0@packing:4,1@writing:6,2@remembering:12", 1, marks=pytest.mark.more),
        pytest.param("1@remembering:4,0@remembered:8,2@packed:16", 1, marks=pytest.mark.more),
    ],
)
def test_a_checkpoint_is_written_by_those_that_are_left(run: Run, script: Script, deaths: str, left: int) -> None:
    saved = ("--checkpoint-every", "4", "--keep", "9")
    result = run("-n", "4", *WATCHED, *saved, "--recovery", "shrink", script(cases.CHECKPOINTED), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 18)
    assert text.count("whole checkpoints of steps [4, 6, 8, 12, 16]") == left, text


@pytest.mark.more
def test_groups_of_the_script_end_with_a_loss_and_hold_nobody_up(run: Run, script: Script) -> None:
    result = run("-n", "3", *WATCHED, "--recovery", "shrink", script(cases.OWN_GROUPS), "")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, 2, 18)
    assert text.count("made 19 passes, ended 1 group") == 2, text
