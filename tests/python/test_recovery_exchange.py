"""`--recovery shrink|replace` of trainings whose ranks settle more than one sum of gradients: Adasum, PowerSGD, encoded gradients
that are late, an adapted global batch, samples that cannot be read; and a death in es.load_checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import recovery_exchange_cases as cases
from run_jobs import Run
from test_generations_hosts import ON_HOSTS, played
from test_recovery_forms import REPLACE, SHRINK, assert_as_one_device

Script = Callable[[str], str]


@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "rounds"),
    [
        pytest.param(SHRINK, "powersgd:1", "0@backward:6,1@commit:11", "", "0.1.2*6,1.2*5,2*7", marks=pytest.mark.more),
        pytest.param(SHRINK, "powersgd:1", "2@vote:2,0@committed:9", "", "0.1.2*2,0.1*8,1*8", marks=pytest.mark.more),
        pytest.param(REPLACE, "powersgd:1", "1@vote:6", "6", "0.1.2*6,0.2*1,0.2.3*11", marks=pytest.mark.more),
        pytest.param(SHRINK, "adasum", "0@forward:3,3@commit:8", "", "0.1.2.3*3,1.2.3*5,1.2*10", marks=pytest.mark.more),
        pytest.param(REPLACE, "adasum", "0@voted:4", "4", "0.1.2*4,1.2*1,1.2.3*13", marks=pytest.mark.more),
        pytest.param(SHRINK, "late adasum", "1@vote:5", "", "0.1.2*4,0.1.2>0.2*1,0.2*13", marks=pytest.mark.more),
        pytest.param(SHRINK, "late topk:0.4", "0@vote:5,1@committed:9", "", "0.1.2*4,0.1.2>1.2*1,1.2*4,1.2>2*1,2*8",
                     marks=pytest.mark.more),
        pytest.param(SHRINK, "late onebit", "2@commit:1,0@forward:7", "", "0.1.2>0.1*1,0.1*5,0.1>1*1,1*11",
                     marks=pytest.mark.more),
        pytest.param(SHRINK, "late powersgd:1", "1@vote:8", "", "0.1.2*7,0.1.2>0.2*1,0.2*10", marks=pytest.mark.more),
        pytest.param(REPLACE, "late topk:0.4", "1@vote:5", "5", "0.1.2*4,0.1.2>0.2*1,0.2>0.2.3*1,0.2.3*12",
                     marks=pytest.mark.more),
        pytest.param(REPLACE, "late powersgd:1", "1@vote:8", "8", "0.1.2*7,0.1.2>0.2*1,0.2>0.2.3*1,0.2.3*9",
                     marks=pytest.mark.more),
        pytest.param(SHRINK, "late2 none", "1@vote:6", "", "0.1.2.3*4,0.1.2.3>0.2.3*2,0.2.3*12", marks=pytest.mark.more),
        pytest.param(SHRINK, "late2 none", "0@commit:1", "", "0.1.2.3>1.2.3*1,1.2.3*17", marks=pytest.mark.more),
        pytest.param(REPLACE, "late2 none", "3@forward:5", "5", "0.1.2.3*3,0.1.2.3>0.1.2*2,0.1.2*1,0.1.2.4*12",
                     marks=pytest.mark.more),
        (SHRINK, "sum", "0@backward:6", "", "0.1.2.3*6,1.2.3*12"),
        pytest.param(SHRINK, "late2 sum", "1@vote:6", "", "0.1.2.3*4,0.1.2.3>0.2.3*2,0.2.3*12", marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_gradients_that_go_other_ways(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, rounds: str
) -> None:
    ranks = re.split("[*>]", rounds)[0].count(".") + 1
    left = rounds.split(",")[-1].split("*")[0].split(".")
    result = run("-n", str(ranks), *how, script(cases.EXCHANGED), deaths, form, waits, rounds)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, sorted(map(int, left)), 2e-5)
    assert len(set(re.findall(r"bits (\S+)", text))) == 1, text
    compression, first = form.rpartition(" ")[2], deaths[0]
    assert (f"the gradients of rank {first} that were late are lost" in text) is form.startswith("late"), text
    if compression not in ("adasum", "none", "sum"):
        said = f"what {compression} left out of the gradients of rank {first} is lost"
        assert (said in text) is (compression != "powersgd:1" or int(deaths.partition(":")[2].partition(",")[0]) > 4), (
            text
        )


@pytest.mark.parametrize(
    ("how", "form", "deaths", "waits", "rounds"),
    [
        # in a gathering that the others wait for
        (SHRINK, "topk:0.4", "0@gathering:6,1@commit:11", "", "0.1.2*6,1.2*5,2*7"),
        pytest.param(SHRINK, "onebit", "1@gathered:5,0@forward:9", "", "0.1.2*5,0.2*4,2*9", marks=pytest.mark.more),
        pytest.param(REPLACE, "topk:0.4", "1@vote:5", "5", "0.1.2*5,0.2*1,0.2.3*12", marks=pytest.mark.more),
        pytest.param(SHRINK, "powersgd:1", "0@summing:6,1@commit:11", "", "0.1.2*6,1.2*5,2*7", marks=pytest.mark.more),
        pytest.param(SHRINK, "powersgd:1", "2@vote:2,0@committed:9", "", "0.1.2*2,0.1*8,1*8", marks=pytest.mark.more),
        pytest.param(REPLACE, "powersgd:1", "1@summed:6", "6", "0.1.2*6,0.2*1,0.2.3*11", marks=pytest.mark.more),
        pytest.param(SHRINK, "adasum", "0@gathering:3,3@commit:8", "", "0.1.2.3*3,1.2.3*5,1.2*10", marks=pytest.mark.more),
        pytest.param(REPLACE, "adasum", "0@voted:4", "4", "0.1.2*4,1.2*1,1.2.3*13", marks=pytest.mark.more),
        pytest.param(SHRINK, "late adasum", "1@vote:5", "", "0.1.2*4,0.1.2>0.2*1,0.2*13", marks=pytest.mark.more),
        pytest.param(SHRINK, "late topk:0.4", "0@gathering:5,1@committed:9", "",
                     "0.1.2*4,0.1.2>1.2*1,1.2*4,1.2>2*1,2*8", marks=pytest.mark.more),
        pytest.param(SHRINK, "late powersgd:1", "1@summing:8", "", "0.1.2*7,0.1.2>0.2*1,0.2*10", marks=pytest.mark.more),
        pytest.param(SHRINK, "sum", "0@backward:6", "", "0.1.2.3*6,1.2.3*12", marks=pytest.mark.more),
        pytest.param(SHRINK, "late2 none", "1@vote:6", "", "0.1.2.3*4,0.1.2.3>0.2.3*2,0.2.3*12", marks=pytest.mark.more),
        pytest.param(REPLACE, "late2 none", "3@forward:5", "5", "0.1.2.3*3,0.1.2.3>0.1.2*2,0.1.2*1,0.1.2.4*12",
                     marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_gradients_that_go_these_ways_over_torchs_gloo(
    run: Run, script: Script, how: tuple[str, ...], form: str, deaths: str, waits: str, rounds: str
) -> None:
    ranks = re.split("[*>]", rounds)[0].count(".") + 1
    result = run("-n", str(ranks), *how, script(cases.over_gloo(cases.EXCHANGED)), deaths, form, waits, rounds)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, sorted(map(int, rounds.split(",")[-1].split("*")[0].split("."))), 2e-5)
    assert len(set(re.findall(r"bits (\S+)", text))) == 1, text


@ON_HOSTS
def test_losses_that_are_sums_on_several_hosts(run: Run, script: Script) -> None:
    words = script(cases.EXCHANGED), "0@backward:6", "sum", "", "0.1.2.3*6,1.2.3*12"
    result = run("-n", "4", *SHRINK, *words, env=played("a,a,b,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, [1, 2, 3], 2e-5)


@pytest.mark.more
def test_late_gradients_in_int8_go_on(run: Run, script: Script) -> None:
    result = run(
        "-n", "3", *SHRINK, script(cases.EXCHANGED), "0@backward:5", "late int8", "", "0.1.2*4,0.1.2>1.2*1,1.2*13"
    )
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    assert len(re.findall(r"at step 18: ", text)) == 2 and len(set(re.findall(r"bits (\S+)", text))) == 1, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "deaths", "waits", "per_step", "left"),
    [
        # while the ranks tell one another what they could read, between two of them, and after
        (SHRINK, "1@counting:4,0@counted:9,3@commit:12", "", 1, 1),
        (SHRINK, "2@counting:0,0@counting:17", "", 1, 2),
        (SHRINK, "0@counting:3,3@forward:3,1@counted:5", "", 2, 1),
        (REPLACE, "1@counting:4,0@vote:9", "4,9", 1, 4),
    ],
)
def test_samples_that_cannot_be_read(
    run: Run, script: Script, how: tuple[str, ...], deaths: str, waits: str, per_step: int, left: int
) -> None:
    result = run("-n", "4", *how, script(cases.UNREADABLE), deaths, waits, str(per_step))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    found = re.findall(rf"rank \d of {left} at step {18 // per_step}: (\S+) apart, rate kept", text)
    assert len(found) == left and all(float(far) < 1e-12 for far in found), text


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "deaths", "waits", "left"),
    [
        (SHRINK, "0@measuring:2,3@commit:5", "", [1, 2]),
        (SHRINK, "half", "", [0, 2]),
        (SHRINK, "1@committed:5,2@forward:6", "", [0, 3]),
        (SHRINK, "1@applied:2,0@measured:8,2@vote:11", "", [3]),
        (REPLACE, "0@measured:4", "7", [1, 2, 3, 4]),
    ],
)
def test_an_adapted_global_batch(
    run: Run, script: Script, how: tuple[str, ...], deaths: str, waits: str, left: list[int]
) -> None:
    ranks = "3" if deaths == "half" else "4"
    result = run("-n", ranks, *how, script(cases.ADAPTED), deaths, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = dict(re.findall(rf"rank (\d) of {len(left)} at step (\d+): bits", text))
    assert sorted(map(int, ends)) == left and len(set(ends.values())) == 1, text
    assert len(set(re.findall(r"bits (\S+)", text))) == 1, text
    exact = re.findall(r"rank \d: (\S+) apart after \[(.*)\]", text)
    assert len(exact) == len([one for one in left if one < 4]) and len({sizes for _, sizes in exact}) == 1, text
    assert all(float(far) < 1e-11 for far, _ in exact), text
    sizes = list(map(int, exact[0][1].split(", ")))
    assert sizes[0] == 12 and max(sizes) == 48 and sum(sizes) == 1200, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("deaths", "left"),
    [
        ("1@agreeing:10,0@read:10", [2]),
        ("0@agreed:10,2@forward:8", [1]),
        ("0@reading:10", [1, 2]),
        ("2@loaded:8,0@read:10", [1]),
    ],
)
def test_a_death_while_a_checkpoint_is_loaded(run: Run, script: Script, deaths: str, left: list[int]) -> None:
    result = run("-n", "3", *SHRINK, script(cases.LOADING), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, left, 1e-12)
