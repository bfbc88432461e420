"""Going on without ranks where only Gloo connects the hosts, which processes of one machine play (as in test_generations_hosts.py)."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Callable

import generation_cases as cases
import generation_optimizer_cases as optimizer_cases
import pytest
import recovery_form_cases as forms
import test_early_deaths as early
import test_run_hosts as two_hosts
from run_jobs import Run, alive, wait_until
from test_generations import SHRINK, assert_right
from test_recovery_hosts import HOST_IS_LOST, _lose_agent, _on_without_host, _waiting
from test_run_hosts import Hosts, _ip

torch = pytest.importorskip("torch")

from evenstep import EvenstepError, generations
from evenstep.errors import error_of
from evenstep.mended_group import is_lost
from evenstep.mended_hosts import MendedHosts, open_mended_hosts

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
Script = Callable[[str], str]
PLAYS = 'import os\nexec(os.environ["PLAYED_HOSTS_CODE"])\n'


def over_gloo(names: str, engine: str = "hosts-gloo") -> dict[str, str]:
    return {"PLAYED_HOSTS": names, "PLAYED_HOSTS_CODE": cases.ON_HOSTS, "EVENSTEP_COMM_ENGINE": engine}


def of_torch(case: str) -> str:
    """A case whose ranks die in an engine of ours: here gradients go through torch's."""
    case = case.replace("from evenstep.engine import SharedEngine", "from evenstep.torch_engine import TorchEngine")
    return case.replace("around(SharedEngine,", "around(TorchEngine,")


def _more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("names", "case", "deaths", "left"),
    [
        # one of the other host; then the first of all, which meets that host for its own
        ("a,a,b,b", cases.PLAIN_LOOP, "3@forward:3,0@commit:8", [1, 2]),
        _more("a,a,b,b", cases.PLAIN_LOOP, "2@forward:3,3@forward:3", [0, 1]),  # a whole host at once
        _more("a,a,b,b", cases.PLAIN_LOOP, "0@voted:3,1@voted:3", [2, 3]),  # that of the first rank
        _more("a,b,b", cases.PLAIN_LOOP, "1@commit:4,0@meeting:4", [2]),  # the first while others recover
        _more("a,b,a", cases.HALF_COMMITTED, "", [0, 2]),
        _more("a,b,c", cases.PLAIN_LOOP, "1@vote:4,0@committed:9", [2]),  # Gloo between all
        _more("a,b,c,a", cases.PLAIN_LOOP, "1@met:5,2@forward:5,3@forward:5", [0]),
        _more("a,b,a,b", cases.EVALUATED, "1@judging:5,3@gathering:6,0@applied:13", [2]),
        _more("a,b,a,b", cases.NORMS, "1@forward:3,0@met:3,3@applied:11", [2]),
        _more("a,b,b,a", optimizer_cases.ADVERSARIAL, "0@first:6,3@commit:12", [1, 2]),
        _more("a,b,b,a", optimizer_cases.SHARED, "2@committed:6,3@voted:9,0@applied:18", [1]),
    ],
)
def test_whoever_dies_on_whatever_host_the_others_train_on(
    run: Run, script: Script, names: str, case: str, deaths: str, left: list[int]
) -> None:
    result = run("-n", str(names.count(",") + 1), *SHRINK, script(case), deaths, env=over_gloo(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "form", "deaths", "left"),
    [
        (forms.CLOSURE, "lbfgs", "1@forward3:3,0@commit:7", 1),
        (forms.MODES, "local:3", "0@forward:4,3@adding:6,1@added:9", 1),
        (forms.MODES, "diloco:3", "0@adding:3,2@forward:8", 2),
        (forms.MODES, "stale:2", "0@vote:5,2@commit:8", 2),
    ],
)
def test_other_forms_of_training_go_on_too(
    run: Run, script: Script, case: str, form: str, deaths: str, left: int
) -> None:
    names = "a,b,a" if case is forms.CLOSURE else "a,a,b,b"
    ranks = str(names.count(",") + 1)
    result = run("-n", ranks, *SHRINK, script(of_torch(case)), deaths, form, "", env=over_gloo(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    found = re.findall(rf"rank \d of {left} at step 18: (\S+) apart, rate kept", text)
    assert len(found) == left and all(float(far) < 1e-8 for far in found), text


@pytest.mark.more
@pytest.mark.parametrize("form", ["bf16", "int8", "topk:0.4", "onebit"])
def test_encoded_gradients_go_on_too(run: Run, script: Script, form: str) -> None:
    given = (script(forms.COMPRESSED), "1@backward:5,2@commit:9", form, "", "1*18")
    result = run("-n", "4", *SHRINK, *given, env=over_gloo("a,a,b,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    ends = re.findall(r"\] bits (\S+)", text)
    assert len(ends) == 2 and len(set(ends)) == 1, text


@pytest.mark.more
def test_a_rank_that_is_killed_before_prepare_is_done_without(run: Run, script: Script) -> None:
    result = run("-n", "4", *SHRINK, script(early.PLAIN), "3@came:0", env=over_gloo("a,a,b,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 1, 2])


@pytest.mark.more
def test_gloo_between_all_ranks_that_was_asked_for(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.PLAIN_LOOP), "1@forward:3", env=over_gloo("a,b,b", "gloo"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 2])


@pytest.mark.more
def test_a_rank_that_stands_alone_on_its_host_is_ended(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.HELD_UP), "2~in:5", env=over_gloo("a,a,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 1])


@pytest.mark.more
def test_a_rank_without_the_agents_memory_meets_the_others_all_the_same(run: Run, script: Script) -> None:
    result = run("-n", "2", *SHRINK, script(PLAYS + cases.WRAPPED), env=over_gloo("a,b"))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and text.count("ended at step") == 2, text
    assert text.count("without the agent's memory (a wrapper closes EVENSTEP_GENERATION_FD)") == 1, text


def test_steps_that_each_wait_a_little_are_not_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is told of a wait that is longer than a straggler's: from then on it ends who stands still."""
    clock, told = [0.0], []
    for asked in ("are_here", "has_ended", "stands_still"):
        monkeypatch.setattr(generations, asked, lambda members: False)
    monkeypatch.setattr(generations, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    memory = SimpleNamespace(number=0, doubt=lambda rank, number: told.append(clock[0]))
    known = {"_heeded": 0.0, "_doubted": 0.0, "_waits_since": 0.0, "_waits_at": (0, 0, 0)}
    rank: Any = SimpleNamespace(_memory=memory, _job_rank=0, _committed=0, _passes=0, _calls=0, **known)

    def look() -> None:
        clock[0] += 0.1
        assert generations.Recovery._why_lost(rank, 0, [0, 1]) == ""

    for _ in range(100):
        rank._committed += 1
        for _ in range(4):
            look()
    assert not told
    for _ in range(200):
        look()
    assert told


def test_who_waits_on_another_host_hears_of_a_loss_by_the_agents_word() -> None:
    """Rank 1 is there and makes no call: nothing of Gloo's would end this one."""
    store, over = torch.distributed.HashStore(), threading.Event()

    def heed() -> None:
        if over.is_set():
            raise error_of("EVEN_ERR_PEER_LOST", "the others go on without it")

    def opened(rank: int) -> MendedHosts:
        limits: Any = {"timeout_seconds": 60, "members": None, "over": None, "look": None, "heeds": None, "heed": heed}
        return open_mended_hosts(store, rank, [0, 1], name="a", **limits)

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(opened, range(2)))
        assert [one.engine for one in groups] == ["gloo", "gloo"]
        waits = pool.submit(groups[0].barrier)
        over.set()
        with pytest.raises(EvenstepError, match="go on without it") as found:
            waits.result()
        assert is_lost(found.value) and groups[0].wait_ns > 0
        with pytest.raises(EvenstepError) as also:  # its connection is closed
            groups[1].barrier()
        assert is_lost(also.value)
    for one in groups:
        one.leave()


# On hosts that network namespaces play, each with an agent of its own.


@pytest.mark.more
@pytest.mark.parametrize(("deaths", "left"), [("3@forward:3,0@voted:8", [1, 2]), ("0@forward:4,1@forward:4", [2, 3])])
def test_ranks_of_two_hosts_are_killed(hosts: Hosts, script: Script, deaths: str, left: list[int]) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_COMM_ENGINE": "hosts-gloo"}
    code, text = hosts.run("--recovery", "shrink", "--log-rank", "all", script(cases.PLAIN_LOOP), deaths, ranks=":2")
    assert code == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_an_agent_is_killed(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_COMM_ENGINE": "hosts-gloo"}
    job = _lose_agent(hosts, "--recovery", "shrink", "--log-rank", "all", script(HOST_IS_LOST), "")
    code, text = job.finish()
    assert code == 0, text
    assert_right(text, [0, 1])
    _on_without_host(hosts, text)


@pytest.mark.more
def test_a_host_is_cut_off(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_COMM_ENGINE": "hosts-gloo"}
    job = hosts.start("--recovery", "shrink", "--log-rank", "all", script(HOST_IS_LOST), "", ranks=":2")
    ranks = [process for process, _ in _waiting(job)]
    _ip(f"-n {hosts.names[1]} link set eth0 down")
    try:
        code, text = job.finish()
        assert code == 0, text
        assert_right(text, [0, 1])
        _on_without_host(hosts, text)
        wait_until(lambda: not any(alive(process) for process in ranks))  # by their own agent
    finally:
        _ip(f"-n {hosts.names[1]} link set eth0 up")
