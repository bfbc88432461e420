"""Processes that join ranks whose hosts only Gloo connects. Each makes its engine alone, where nothing needs Gloo."""

from __future__ import annotations

import re
from typing import Callable

import generation_cases as cases
import pytest
import recovery_exchange_cases as exchanges
import recovery_form_cases as forms
import test_run_hosts as two_hosts
from run_jobs import Run
from test_elastic import Alone
from test_elastic import alone as alone  # a fixture
from test_generations_over_gloo import of_torch, over_gloo
from test_recovery_forms import REPLACE as WITH_A_SPARE
from test_recovery_forms import assert_as_one_device
from test_recovery_hosts import HOST_RETURNS, _lose_agent
from test_replacement import REPLACE, assert_replaced
from test_run_hosts import Hosts

pytest.importorskip("torch")

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
Script = Callable[[str], str]


def _more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("options", "names", "deaths", "waits", "began", "joined"),
    [
        # one on a host where nobody is left; then the first of all ranks is lost, and another one comes
        (("-n", "3", "--spares", "2"), "a,b,a,b,a", "1@forward:2,0@forward:6", "2,6", [2], 2),
        _more(("-n", "3"), "a,b,b", "1@applied:2", "2", [0, 2], 1),
        _more(("-n", "4", "--spares", "2"), "a,b,a,b,a,b", "0@forward:2,1@forward:2", "2", [2, 3], 2),
        _more(("-n", "3", "--spares", "1"), "a,b,a,b", "1@forward:2,0@given:3", "2", [2], 0),
        _more(("-n", "3", "--spares", "1"), "a,b,a,a", "0@forward:2,3@met:3", "2", [1, 2], 0),
        _more(("-n", "3", "--spares", "1"), "a,b,a,b", "1@forward:2,3@meeting:3", "2", [0, 2], 0),
        _more(("-n", "3", "--spares", "1"), "a,b,c,d", "1@forward:2", "2", [0, 2], 1),  # Gloo between all
        # those of one host alone are left, whose gradients go on through torch; then one of another host joins
        _more(("-n", "3", "--spares", "1"), "a,a,b,b", "2@forward:2", "4", [0, 1], 1),
    ],
)
def test_the_others_train_on_with_them(
    run: Run,
    script: Script,
    options: tuple[str, ...],
    names: str,
    deaths: str,
    waits: str,
    began: list[int],
    joined: int,
) -> None:
    result = run(*options, *REPLACE, script(cases.REPLACED), deaths, waits, env=over_gloo(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, began)
    assert len(re.findall("began at step [1-9]", text)) >= joined, text


@pytest.mark.more
def test_one_joins_where_gloo_between_all_ranks_was_asked_for(run: Run, script: Script) -> None:
    given = (script(cases.REPLACED), "1@forward:2", "2")
    result = run("-n", "3", "--spares", "1", *REPLACE, *given, env=over_gloo("a,b,b,b", "gloo"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [0, 2])


@pytest.mark.more
@pytest.mark.parametrize(
    ("form", "deaths", "waits", "rounds"),
    [
        ("topk:0.4", "1@vote:5", "5", "0.1.2*5,0.2*1,0.2.3*12"),  # a process that is alone encodes them in C
        ("onebit", "0@vote:5", "5", "0.1.2*5,1.2*1,1.2.3*12"),
        ("powersgd:1", "1@vote:6", "6", "0.1.2*6,0.2*1,0.2.3*11"),
        ("adasum", "0@voted:4", "4", "0.1.2*4,1.2*1,1.2.3*13"),
        ("late topk:0.4", "1@vote:5", "5", "0.1.2*4,0.1.2>0.2*1,0.2>0.2.3*1,0.2.3*12"),
        ("late2 none", "3@forward:5", "5", "0.1.2.3*3,0.1.2.3>0.1.2*2,0.1.2*1,0.1.2.4*12"),
    ],
)
def test_gradients_that_go_other_ways_count_too(
    run: Run, script: Script, form: str, deaths: str, waits: str, rounds: str
) -> None:
    ranks = re.split("[*>]", rounds)[0].count(".") + 1
    given = (script(exchanges.EXCHANGED), deaths, form, waits, rounds)
    result = run("-n", str(ranks), *WITH_A_SPARE, *given, env=over_gloo("a,b,a,b,a"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, sorted(map(int, rounds.split(",")[-1].split("*")[0].split("."))), 2e-5)
    assert len(set(re.findall(r"\] bits (\S+)", text))) == 1, text


@pytest.mark.more
@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_sums_in_16_bits_count_too(run: Run, script: Script, form: str) -> None:
    given = (script(forms.COMPRESSED), "1@vote:5", form, "5", "3*5,2*1,3*12")
    result = run("-n", "3", *WITH_A_SPARE, *given, env=over_gloo("a,b,a"))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = re.findall(r"at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == 3 and all(float(far) < 1e-2 for far in ends), text


@pytest.mark.more
def test_ranks_on_their_own_take_them_in(run: Run, script: Script) -> None:
    given = (script(of_torch(forms.MODES)), "2@forward:4", "local:3", "5")
    result = run("-n", "4", *WITH_A_SPARE, *given, env=over_gloo("a,a,b,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_as_one_device(text, [0, 1, 3, 4], 1e-12)


@pytest.mark.more
@pytest.mark.parametrize(
    "without", [{"EVENSTEP_UCX_LIBRARY": "/nowhere/libucp.so.0"}, {"EVENSTEP_COMM_ENGINE": "gloo"}]
)
def test_a_host_joins_one_that_trained_alone(alone: Alone, script: Script, without: dict[str, str]) -> None:
    """The ranks that train had no need of Gloo either."""
    own = ("--max-ranks", "3", "--max-restarts", "0", "--recovery", "shrink")
    job = alone.run(*own, script(cases.REPLACED), "", "3,4", FULL="3", **without)
    alone.join(job, "-n", "2", host="b", FULL="3", **without)
    code, text = job.finish()
    assert code == 0, text
    assert_replaced(text, [0])
    assert len(re.findall(r"rank \d of 3 at step 18", text)) == 3, text


# On hosts that network namespaces play, each with an agent of its own.


@pytest.mark.more
def test_a_lost_host_is_back_while_the_others_go_on(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_COMM_ENGINE": "hosts-gloo"}
    job = _lose_agent(hosts, "--recovery", "replace", "--log-rank", "all", script(HOST_RETURNS), "", "7,7")
    code, text = job.finish()
    assert code == 0, text
    assert f"host {hosts.names[1]} is back: processes take the places of its 2 ranks" in text
    assert_replaced(text, [0, 1])
