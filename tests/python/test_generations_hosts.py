"""Going on without ranks on several hosts, which processes of one machine play: each has UCX between it and those of the
others, and sees of the agent's memory what an agent of its own host would show it."""

from __future__ import annotations

import os
import re
from typing import Callable

import generation_cases as cases
import generation_optimizer_cases as optimizer_cases
import pytest
import recovery_form_cases as forms
from generation_gloo_cases import over_gloo
from run_jobs import Run
from test_generations import SHRINK, assert_right, bits
from test_replacement import REPLACE, assert_replaced

from evenstep import hosts

Script = Callable[[str], str]
UCX, WHY_NONE = hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
ON_HOSTS = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")
pytestmark = ON_HOSTS


def played(names: str, **more: str) -> dict[str, str]:
    return {"PLAYED_HOSTS": names, "PLAYED_HOSTS_CODE": cases.ON_HOSTS, **more}


def _more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("names", "case", "deaths", "left"),
    [
        # a host's first rank, of three; the job's first, of two that are alone on their hosts
        ("a,b,b", cases.PLAIN_LOOP, "1@voted:4,0@commit:9", [2]),
        # a host's first rank, the job's first while others recover, and what is left of a host
        _more("a,a,b,b", optimizer_cases.ADVERSARIAL, "2@ready:5,0@meeting:5,1@fooled:13", [3]),
        _more("a,a,b,b", cases.PLAIN_LOOP, "0@forward:3,1@forward:3", [2, 3]),  # a whole host at once
        _more("a,b,b", over_gloo(cases.PLAIN_LOOP, 2), "0@summing:3,1@connecting:3", [2]),
        _more("a,b,a", cases.PLAIN_LOOP, "1@commit:4,0@applied:9", [2]),
        _more("a,b,c", cases.PLAIN_LOOP, "1@vote:4,0@committed:9", [2]),  # UCX between all
        _more("a,a,b,b", cases.PLAIN_LOOP, "3@forward:17,0@applied:17", [1, 2]),
        _more("a,b,b", cases.PLAIN_LOOP, "0@voted:5,1@met:5", [2]),
        _more("a,b", cases.PLAIN_LOOP, "0@vote:0", [1]),
        _more("a,b,c,a", cases.PLAIN_LOOP, "1@forward:5,2@forward:5,3@forward:5", [0]),
        _more("a,b,a", cases.HALF_COMMITTED, "", [0, 2]),
        _more("a,b,a,b", cases.EVALUATED, "1@judging:5,3@gathering:6,0@applied:13", [2]),
        _more("a,b,a,b", cases.NORMS, "1@counted:3,0@statistics:7,3@applied:11", [2]),  # and a GradScaler
        _more("a,a,b", cases.NORMS, "0@forward:8,1@met:8", [2]),
        _more("a,b,b,a", optimizer_cases.ADVERSARIAL, "0@first:6,3@commit:12", [1, 2]),
        _more("a,b,b", optimizer_cases.ADVERSARIAL, "0@committed:3,2@committed:4", [1]),
        _more("a,b,b,a", optimizer_cases.SHARED, "2@committed:6,3@voted:9,0@applied:18", [1]),
    ],
)
def test_whoever_dies_on_whatever_host_the_others_train_on(
    run: Run, script: Script, names: str, case: str, deaths: str, left: list[int]
) -> None:
    result = run("-n", str(names.count(",") + 1), *SHRINK, script(case), deaths, env=played(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_a_trainer_shows_nothing_of_it(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.TRAINER), "0@forward:7", env=played("a,b,a"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [1, 2])
    assert text.count("steps told once each") == 2, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "names", "deaths", "began", "joined"),
    [
        (("-n", "3"), "a,b,b", "1@applied:2", [0, 2], 1),  # on a host that is not the first rank's
        (("-n", "4", "--spares", "2"), "a,b,a,b,a,b", "0@forward:2,1@forward:2", [2, 3], 2),  # a giver on each
        (("-n", "5", "--spares", "2"), "a,b,a,b,b,a,b", "0@forward:2,1@forward:2,3@giving:3", [2, 4], 2),
        (("-n", "3", "--spares", "1"), "a,b,a,a", "0@forward:2,3@met:3", [1, 2], 0),
        (("-n", "3", "--spares", "1"), "a,b,a,b", "1@forward:2", [0, 2], 1),  # to a host where nobody is left
        (("-n", "3", "--spares", "1"), "a,b,a,b", "1@forward:2,0@given:3", [2], 0),
    ],
)
def test_newcomers_get_the_state_wherever_they_are(
    run: Run, script: Script, options: tuple[str, ...], names: str, deaths: str, began: list[int], joined: int
) -> None:
    result = run(*options, *REPLACE, script(cases.REPLACED), deaths, "2", env=played(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, began)
    assert len(re.findall("began at step [1-9]", text)) >= joined, text


@pytest.mark.more
def test_the_bits_are_those_of_a_run_in_which_nobody_died(run: Run, script: Script) -> None:
    path = script(cases.BITWISE)
    alone = run("-n", "1", *SHRINK[:-2], path, "", "")
    wanted = bits(alone.stdout + alone.stderr, 1)
    result = run("-n", "4", *SHRINK, path, "2@forward:3,0@vote:5", "", env=played("a,b,b,a"))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    assert bits(text, 2) == wanted, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("names", "case", "form", "deaths", "left"),
    [
        ("a,b,a", forms.CLOSURE, "lbfgs", "1@forward3:3,0@commit:7", 1),
        ("a,a,b,b", forms.MODES, "local:3", "0@forward:4,3@adding:6,1@added:9", 1),
        ("a,b,a,b", forms.MODES, "diloco:3", "0@adding:3,2@forward:8", 2),
        ("a,b,b", forms.MODES, "stale:2", "0@vote:5,2@commit:8", 1),
    ],
)
def test_other_forms_of_training_go_on_too(
    run: Run, script: Script, names: str, case: str, form: str, deaths: str, left: int
) -> None:
    count = str(names.count(",") + 1)
    result = run("-n", count, *SHRINK, script(case), deaths, form, "", env=played(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    found = re.findall(rf"rank \d of {left} at step 18: (\S+) apart, rate kept", text)
    assert len(found) == left and all(float(far) < 1e-8 for far in found), text


@pytest.mark.more
@pytest.mark.parametrize(
    ("names", "form", "deaths", "left"),
    [
        ("a,a,b", "topk:0.4", "0@backward:5", 2),  # the one who encodes for its host
        ("a,a,b,b", "onebit", "1@commit:5,2@forward:9", 2),
        ("a,b,b", "bf16", "0@backward:5", 2),  # a host's only one: the others are on one host
    ],
)
def test_gradients_that_travel_encoded_between_hosts(
    run: Run, script: Script, names: str, form: str, deaths: str, left: int
) -> None:
    count = str(names.count(",") + 1)
    result = run("-n", count, *SHRINK, script(forms.COMPRESSED), deaths, form, "", "1*18", env=played(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = re.findall(r"bits (\S+)", text)
    assert len(ends) == left and len(set(ends)) == 1, text
