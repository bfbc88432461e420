"""`--recovery shrink|replace` in other forms of training than one plain gradient a step: closures and a split of the script's own,
ranks that train on their own or with late gradients, gradients that travel encoded."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import recovery_form_cases as cases
from run_jobs import Run

Script = Callable[[str], str]
WATCHED = ("--no-pin", "--no-monitor", "--log-rank", "all")
SHRINK = (*WATCHED, "--recovery", "shrink")
REPLACE = (*WATCHED, "--recovery", "replace", "--spares", "1")


def over_gloo(source: str) -> str:
    """The same with the engine of torch's process groups."""
    assert source.count('policy="equal")') == 1
    return (
        source.replace("SharedEngine", "TorchEngine")
        .replace("evenstep.engine import TorchEngine", "evenstep.torch_engine import TorchEngine")
        .replace('policy="equal")', 'policy="equal", engine="torch")')
    )


def assert_as_one_device(text: str, left: list[int], nearer: float) -> None:
    found = dict(re.findall(rf"rank (\d) of {len(left)} at step 18: (\S+) apart, rate kept", text))
    assert sorted(map(int, found)) == left and all(float(far) < nearer for far in found.values()), text
    assert "restart" not in text, text


@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "left", "split"),
    [
        # in the third closure of a step, and in the meeting that commits one
        (SHRINK, "lbfgs", "1@forward3:3,0@commit:7", "", [2], [(6, 4, 2), (9, 3), (12,)]),
        pytest.param(SHRINK, "lbfgs", "0@backward1:2,1@committed:9", "", [2], [(6, 4, 2), (8, 4), (12,)], marks=pytest.mark.more),
        pytest.param(SHRINK, "lbfgs", "2@vote:5,1@applied:6", "", [0], [(6, 4, 2), (7, 5), (12,)], marks=pytest.mark.more),
        pytest.param(SHRINK, "wolfe", "1@forward2:3,2@backward1:8", "", [0], [(6, 4, 2), (9, 3), (12,)], marks=pytest.mark.more),
        pytest.param(SHRINK, "adam", "0@forward1:3,2@commit:8", "", [1], [(6, 4, 2), (8, 4), (12,)], marks=pytest.mark.more),
        pytest.param(REPLACE, "lbfgs", "0@forward2:3", "4", [1, 2, 3], [(4, 2, 6), (6, 4, 2), (8, 4)],
                     marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_closures_and_a_split_of_the_scripts_own(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, left: list[int],
    split: list[tuple[int, ...]],
) -> None:  # fmt: skip
    result = run("-n", "3", *how, script(cases.CLOSURE), deaths, form, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 1e-8)
    used = set(re.findall(r"rank \d used (.*)", text))
    wanted = {str(sorted(split))} | (
        {"[(4, 2, 6)]"} if how is REPLACE else set()
    )  # who took rank 0's place has its share
    assert used == wanted, text
    assert re.search(r"es.prepare\(shares=…\) is of 3 ranks: the share of rank \d goes to the others", text), text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "left", "said"),
    [
        (SHRINK, "local:3", "1@forward:4,0@adding:6,3@added:9", "", [2], "rank 1 trained in the step since the last"),
        (SHRINK, "local:1", "0@commit:4,2@committed:7", "", [1, 3], ""),
        (SHRINK, "diloco:3", "0@adding:3,2@forward:8,3@vote:9", "", [1], "trained in the 2 steps since the last"),
        (REPLACE, "local:3", "1@forward:4", "5", [0, 2, 3, 4], "rank 1 trained in the step since the last exchange"),
        (SHRINK, "stale:1", "0@forward:4,1@adding:7,3@commit:9", "", [2], "the gradients of rank 0 that were late"),
        (SHRINK, "stale:2", "1@vote:1,0@added:7,3@committed:9", "", [2], "the gradients of rank 0 that were late"),
        (REPLACE, "stale:2", "0@forward:5", "6", [1, 2, 3, 4], "the gradients of rank 0 that were late are lost"),
    ],
)
def test_ranks_on_their_own_and_late_gradients(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, left: list[int], said: str
) -> None:
    result = run("-n", "4", *how, script(cases.MODES), deaths, form, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 1e-12)
    assert said in text, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "ranks"),
    [
        (SHRINK, "fp16", "0@backward:5,1@commit:9", "", "3*5,2*4,1*9"),
        (SHRINK, "topk:0.4", "0@backward:5,1@commit:9", "", "3*5,2*4,1*9"),
        (SHRINK, "onebit", "1@commit:5,0@forward:9", "", "3*5,2*4,1*9"),
        (SHRINK, "onebit", "2@committed:5", "", "3*6,2*12"),
        (REPLACE, "topk:0.4", "1@vote:5", "5", "3*5,2*1,3*12"),
    ],
)
def test_gradients_that_travel_encoded(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, ranks: str
) -> None:
    result = run("-n", "3", *how, script(cases.COMPRESSED), deaths, form, waits, ranks)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    ends = re.findall(r"at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == int(ranks.split(",")[-1].split("*")[0]) and "restart" not in text, text
    assert all(float(far) < 1e-3 for far in ends), text
    assert len(set(re.findall(r"bits (\S+)", text))) == 1, text
    if form != "fp16":
        assert re.search(rf"what {form} left out of the gradients of rank \d is lost", text), text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "left"),
    [
        (SHRINK, "local:3", "1@forward:4,0@adding:6,3@added:9", "", [2]),
        (SHRINK, "diloco:3", "0@adding:3,2@forward:8,3@vote:9", "", [1]),
        (SHRINK, "stale:1", "0@forward:4,1@adding:7,3@commit:9", "", [2]),
        (REPLACE, "stale:2", "0@forward:5", "6", [1, 2, 3, 4]),
    ],
)
def test_ranks_on_their_own_over_torchs_gloo(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, left: list[int]
) -> None:
    result = run("-n", "4", *how, script(over_gloo(cases.MODES)), deaths, form, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 1e-12)


@pytest.mark.more
def test_sums_in_16_bits_over_torchs_gloo(run: Run, script: Script) -> None:
    words = script(over_gloo(cases.COMPRESSED)), "0@backward:5,1@commit:9", "bf16", "", "3*5,2*4,1*9"
    result = run("-n", "3", *SHRINK, *words)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = re.findall(r"at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == 1 and float(ends[0]) < 1e-2, text


@pytest.mark.more
def test_int8_goes_on(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.COMPRESSED), "0@backward:5", "int8", "", "3*5,2*13")
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    assert len(re.findall(r"at step 18: ", text)) == 2 and len(set(re.findall(r"bits (\S+)", text))) == 1, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "left"),
    [
        (SHRINK, "local:1", "0@vote:4,3@commit:7", "", 2),  # nothing is lost: no step of theirs stands unexchanged
        (SHRINK, "local:3", "0@adding:6,3@forward:8", "", 2),
        (SHRINK, "diloco:3", "3@added:9,0@forward:10", "", 2),
        (REPLACE, "local:3", "1@forward:4", "4", 4),
    ],
)
def test_ranks_on_their_own_exchange_by_their_samples(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, left: int
) -> None:
    result = run("-n", "4", *how, script(cases.UNEQUAL), deaths, form, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = re.findall(rf"rank \d of {left} at step 18: (\S+) apart", text)
    assert len(ends) == left and (form != "local:1" or all(float(far) < 1e-12 for far in ends)), text
    bits = re.findall(r"bits (\S+)", text)
    assert len(bits) == left and len(set(bits)) == 1, text
