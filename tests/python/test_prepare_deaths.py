"""A rank is killed in es.prepare: with `--recovery` those that are left begin it again among themselves, or the job starts again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Callable, cast

import generation_cases as cases
import pytest
from generation_gloo_cases import over_gloo
from run_jobs import Run
from test_generations import SHRINK, assert_right
from test_generations_hosts import ON_HOSTS, played
from test_replacement import REPLACE, assert_replaced

from evenstep import prepare_again
from evenstep.engine import EngineOptions

Script = Callable[[str], str]

# Only rank 0 has the values that training begins with. Where it prepares, a rank may die: "coming" before it meets the others,
# then "began", "described", "sent" (half of the parameters), "opening" and "opened" (the engine; on several hosts in it "choosing"), "loading", "loaded", "commit" (before the
# meeting at the end of it), "committed" (after it); in the second call "judged".
POINTS = """
import importlib
from evenstep.session import Session

module = importlib.import_module("evenstep.prepare")
around(Session, "join", "coming", "came")
around(module, "_prepare_models", "began", "models")
around(module, "check_same_model", "compared", "described")
around(module, "choose_engine", "opening", "opened")
around(importlib.import_module("evenstep.rendezvous"), "_choose", "choosing", "chosen")
around(module, "prepare_loader", "loading", "loaded")
plain_broadcast, sent = MendedGroup.broadcast_, []


def broadcast(group, values, root=0):
    plain_broadcast(group, values, root)
    sent.append(values)
    if len(sent) == 2:
        here("sent")


MendedGroup.broadcast_ = broadcast


def own(made):
    if rank != "0":
        with torch.no_grad():
            for values in made[0].parameters():
                values.normal_()
    return made

"""


def _with_points(case: str) -> str:
    end = "loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)\n"
    assert case.count(end) == case.count("es.prepare(*make(), ") == 1
    once = (
        "assert len(es.session().steps.syncs) == len(es.session().loaders) == 1\n"
        "assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())\n"
    )
    case = re.sub(r"(\n[^\n]* = es.prepare\(\*make\(\).*\n)", r"\1" + once, case)
    return case.replace(end, end + POINTS).replace("es.prepare(*make(), ", "es.prepare(*own(make()), ")


PLAIN = _with_points(cases.PLAIN_LOOP)
OVER_GLOO = _with_points(over_gloo(cases.PLAIN_LOOP, 2))
NORMS = _with_points(cases.NORMS)
SECOND = (
    PLAIN.replace(
        "passes = 0",
        """around(importlib.import_module("evenstep.prepare_loader"), "check_same_loader", "judging", "judged")
seen = es.prepare(loader=torch.utils.data.DataLoader(data, batch_size=5), train=False)
passes = 0""",
    )
    + """
found = es.evaluate(model, seen, loss_of)
assert abs(found - float(loss_of(model, data[:]).detach())) < 1e-12
"""
)

# The optimizer comes by itself.
APART = PLAIN.replace(
    "model, optimizer, scheduler, loader = es.prepare(*own(make()), loader)",
    """made = own(make())
model, loader = es.prepare(made[0], loader)
around(module, "check_same_optimizer", "comparing", "judged")
optimizer, scheduler = es.prepare(*made[1:])""",
)
# A second one while the script holds a batch more than it has made steps on.
AHEAD = SECOND.replace(
    "seen = es.prepare(",
    """batches = iter(loader)
held = [next(batches), next(batches)]
for _ in range(3):
    loss_of(model, held.pop(0)).backward()
    optimizer.step()
    held.append(next(batches))
seen = es.prepare(""",
).replace("passes = 0", "raise SystemExit(0)", 1)
# One rank alone has said before that it could not go on.
UNLIKE = SECOND.replace("seen = ", 'if rank == "0":\n    es.session().recovery.say("of rank 0 alone")\nseen = ')
# Another model is prepared once a spare has taken a lost rank's place.
JOINED = _with_points(cases.REPLACED).replace(
    "es.barrier()\ncompare",
    """another = torch.nn.Linear(6, 2)
es.prepare(another, torch.optim.SGD(another.parameters(), lr=0.1))
es.barrier()
compare""",
)
JOINED_STOPS = JOINED.replace("\nwaits = ", f"{cases.STOPS}\nwaits = ")
# Rank 1 is stopped while the others wait for it at the store, until one of them has looked ten times.
LOOKED_AT = (
    POINTS
    + """
import signal
from evenstep import rendezvous

plain_look, looks = rendezvous._Meeting._look, []


def look(meeting, key):
    plain_look(meeting, key)
    looks.extend(process for process in meeting.processes.values() if rendezvous._state(process) == "T")
    if len(looks) == 10:
        os.kill(looks[0], signal.SIGCONT)


def here(point):
    if rank == "1" and point == "opening":
        os.kill(os.getpid(), signal.SIGSTOP)


rendezvous._Meeting._look = look
"""
)


def _more(*values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> object:
    return pytest.param(*values, marks=[pytest.mark.more, *marks])


def _on_hosts(*values: object) -> object:
    return pytest.param(*values, marks=ON_HOSTS)


def _told(run: Run, *words: str, hosts: str = "", **env: str) -> str:
    """What a job tells that comes to its end; hosts: those that its ranks and spares play."""
    result = run(*words, env=(played(hosts) if hosts else {}) | env)
    text: str = result.stdout + result.stderr
    assert result.returncode == 0, text
    return text


@pytest.mark.parametrize(
    ("case", "ranks", "deaths", "left"),
    [
        (PLAIN, 3, "1@began:0", [0, 2]),
        (PLAIN, 4, "1@sent:0,3@opening:0", [0, 2]),  # the second while the others begin again, or both at once
        (PLAIN, 3, "1@opened:0", [0, 2]),  # the others have hooked the parameters
        (PLAIN, 3, "2@commit:0", [0, 1]),
        (PLAIN, 4, "1@committed:0,2@forward:3", [0, 3]),
        (SECOND, 3, "1@judging:0", [0, 2]),
        (PLAIN, 3, "0@opening:0", [1, 2]),  # the others have got its values
        (SECOND, 3, "0@judged:0", [1, 2]),  # of a loader alone: nobody wants rank 0's values
        (UNLIKE, 3, "1@forward:3", [0, 2]),  # all have prepared as one
        (OVER_GLOO, 3, "1@connecting:0", [0, 2]),  # Gloo waits for it
        _more(OVER_GLOO, 4, "1@calling:0,0@connecting:0", [2, 3]),
        _more(PLAIN, 3, "1@described:0,0@forward:5", [2]),
        _more(PLAIN, 3, "1@loading:0", [0, 2]),
        _more(PLAIN, 3, "0@loaded:0", [1, 2]),
        _more(PLAIN, 4, "0@opening:0,1@meeting:0", [2, 3]),
        _more(NORMS, 3, "0@loading:0,1@forward:4", [2]),
        _more(PLAIN, "a,b,b", "0@opening:0", [1, 2], marks=[ON_HOSTS]),
        _more(PLAIN, 4, "2@loaded:0,1@meeting:0", [0, 3]),
        _more(PLAIN, 4, "1@began:0,2@began:0,3@began:0", [0]),
        _more(PLAIN, 4, "3@opened:0,2@met:0", [0, 1]),
        _more(NORMS, 3, "1@loaded:0,2@forward:4", [0]),
        _more(NORMS, 3, "2@sent:0", [0, 1]),
        _on_hosts(PLAIN, "a,b,b", "1@opening:0", [0, 2]),
        _more(PLAIN, "a,b,c", "2@sent:0", [0, 1], marks=[ON_HOSTS]),
        _more(PLAIN, "a,a,b,b", "2@loaded:0,3@began:0", [0, 1], marks=[ON_HOSTS]),
    ],
)
def test_those_that_are_left_prepare_again(
    run: Run, script: Script, case: str, ranks: int | str, deaths: str, left: list[int]
) -> None:
    """ranks: how many, or the hosts that they play."""
    count, hosts = (ranks, "") if isinstance(ranks, int) else (ranks.count(",") + 1, ranks)
    text = _told(run, "-n", str(count), *SHRINK, script(case), deaths, hosts=hosts)
    assert_right(text, left)
    if "forward" not in deaths and case is PLAIN:
        assert set(re.findall(r"made (\d+) passes", text)) == {"18"}, text


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["numa:0", "numa:1"], ""),
        (["cpu", "", "spare"], ""),
        (["numa:0", "cuda:0"], "gradients are on GPUs, or summed by torch otherwise than over Gloo"),
    ],
)
def test_on_which_devices_they_can(devices: list[str], said: str) -> None:
    assert prepare_again._why_not(cast(Any, SimpleNamespace(devices=devices)), [], EngineOptions(), "") == said


def test_what_one_rank_has_prepared_with_all_stands(run: Run, script: Script) -> None:
    """Rank 2 hears of the loss in the meeting, out of which rank 0 has come."""
    case = PLAIN.replace(
        "\nmodel, optimizer, scheduler, loader = es.prepare",
        """
prepared = []
around(module, "_prepare_models", "began", "models")
counted = module._prepare_models


def prepare_models(*arguments):
    prepared.append(1)
    counted(*arguments)


module._prepare_models = prepare_models
dies_in_the_meeting(step=0)
model, optimizer, scheduler, loader = es.prepare""",
    ).replace("passes = 0", 'print("prepared", len(prepared), flush=True)\npasses = 0', 1)
    text = _told(run, "-n", "3", *SHRINK, script(case), "")
    assert_right(text, [0, 2])
    assert re.findall(r"\[rank ([02])\] prepared 1", text), text
    assert "prepared 2" not in text, text


@pytest.mark.parametrize(
    ("case", "deaths", "waits", "began", "hosts"),
    [
        (_with_points(cases.REPLACED), "1@opening:0", "2", [0, 2], ""),  # it takes the place of one that died there
        _more(_with_points(cases.REPLACED), "0@opening:0", "2", [1, 2], ""),
        (JOINED, "1@forward:3,2@opening:18", "3", [0], ""),
        (JOINED_STOPS, "1~forward:3,2^opening:18", "3", [0, 2], ""),
        _on_hosts(JOINED, "1@forward:3,2@choosing:18", "3", [0], "a,b,b,a"),  # it hears of that loss at the store
    ],
)
def test_where_processes_join_they_prepare_again(
    run: Run, script: Script, case: str, deaths: str, waits: str, began: list[int], hosts: str
) -> None:
    patience = "5" if "^" in deaths else "1"  # in which a busy machine lets one go on; who does not is ended after it
    env = {"EVENSTEP_STOP_PATIENCE": patience}
    text = _told(run, "-n", "3", "--spares", "1", *REPLACE, script(case), deaths, waits, hosts=hosts, **env)
    assert_replaced(text, began)


@pytest.mark.parametrize(("stop", "left"), [("1^opening:0", [0, 1, 2]), _more("2~sent:0", [0, 1])])
def test_one_that_is_stopped_goes_on_or_is_ended(run: Run, script: Script, stop: str, left: list[int]) -> None:
    patience = "120" if "^" in stop else "1"
    text = _told(run, "-n", "3", *SHRINK, script(_with_points(cases.HELD_UP)), stop, EVENSTEP_STOP_PATIENCE=patience)
    assert_right(text, left)


@pytest.mark.parametrize(
    ("sync", "grace"),
    [("sync=es.LocalSGD(every=2)", "0.15"), ("sync=None", "inf")],  # cannot begin again; is never to
)
def test_one_that_is_stopped_is_waited_for(run: Run, script: Script, sync: str, grace: str) -> None:
    case = PLAIN.replace(POINTS, LOOKED_AT).replace("(make()), loader)", f"(make()), loader, {sync})")
    case = case.replace("passes = 0", 'print("prepared", flush=True)\nraise SystemExit(0)', 1)
    text = _told(run, "-n", "3", *SHRINK, script(case), "", EVENSTEP_STOP_GRACE=grace)
    assert text.count("] prepared") == 3 and "restart" not in text and "generation" not in text, text


@pytest.mark.parametrize(
    ("case", "death", "why"),
    [
        (PLAIN, "1@coming:0", "the others cannot go on without rank 1: rank [02]: it is not training yet"),
        (PLAIN, "0@sent:0", "rank 0 was lost in es.prepare, and with it the values of the model and the optimizer"),
        (APART, "0@judged:0", "rank 0 was lost in es.prepare, and with it the values of the model and the optimizer"),
    ],
)
def test_else_the_job_starts_again_and_says_why(run: Run, script: Script, case: str, death: str, why: str) -> None:
    text = _told(run, "-n", "3", *SHRINK, script(case), death)
    assert re.search(why, text), text
    assert re.search(rf"rank {death[0]} \(cpu:\d+ on \S+, process \d+\) was killed by SIGKILL", text), text
    assert "restart 1 of 3 from the beginning" in text, text
    ends = re.findall(r"rank \d of 3 at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == 3 and all(float(far) < 1e-12 for far in ends), text


def test_what_cannot_begin_again_is_said_at_once(run: Run, script: Script) -> None:
    case = PLAIN.replace("(make()), loader)", "(make()), loader, sync=es.LocalSGD(every=2))")
    text = _told(run, "-n", "3", *SHRINK, script(case), "1@loading:0")
    assert "es.prepare, where it was lost, cannot begin again: sync=LocalSGD(every=2" in text, text
    assert "restart 1 of 3 from the beginning" in text, text


@pytest.mark.parametrize(
    ("case", "death", "why"),
    [
        (AHEAD, "1@judging:3", "the script fetches a batch before it has made the step on an older one"),
        (UNLIKE, "1@judging:0", "of rank 0 alone"),
    ],
)
def test_what_was_said_before_holds_in_a_later_call(run: Run, script: Script, case: str, death: str, why: str) -> None:
    text = _told(run, "-n", "3", *SHRINK, script(case), death)
    assert f"es.prepare, where it was lost, cannot begin again: {why}" in text, text
    assert "restart 1 of 3 from the beginning" in text, text
