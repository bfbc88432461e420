"""A rank is killed, or stopped, in a call of all ranks before es.prepare: with `--recovery` those that are left make it again, or the
job starts again and says why."""

from __future__ import annotations

import re
from typing import Any, Callable

import generation_cases as cases
import pytest
from run_jobs import Run
from test_generations import SHRINK, assert_right
from test_generations_hosts import ON_HOSTS, played
from test_replacement import REPLACE, assert_replaced

Script = Callable[[str], str]

# "came" to the barrier and waits, has "left" it (not yet the call), is in its "own" code after it; es.load_checkpoint is "finding" what
# is meant, or has "read" it; "preparing" with the others.
EARLY = """
import importlib
from evenstep.group import SharedGroup

around(SharedGroup, "barrier", "came", "left")
es.barrier()
here("own")
assert es.checkpoint("kept", extra={"words": 1}).name == "kept"
around(importlib.import_module("evenstep.checkpoint"), "_agree", "finding", "read")
assert es.load_checkpoint("kept")["extra"] == {"words": 1}
es.barrier()
around(importlib.import_module("evenstep.prepare"), "_prepare_models", "preparing", "prepared")
"""


def _with_calls(case: str, calls: str = EARLY) -> str:
    made, times = re.subn(r"\n(?=[^\n]* = es\.prepare\(\*make\(\), )", lambda _: calls, case)
    assert times == 1
    return made


# Rank 0 has come out of the last meeting, and is not in the next call yet.
STAYS = """
import time


def stays_until_one_is_lost():
    while rank == "0" and deaths and es.session().recovery._memory.number == 0:
        time.sleep(0.005)


"""

PLAIN = _with_calls(cases.PLAIN_LOOP)

# Why a job starts again is the subject then; that it trains to the end when it has is one test's.
AGAIN = """
import os

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    raise SystemExit(print("begun again", flush=True))
"""


def _more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("ranks", "deaths", "left"),
    [
        _more(3, "1@came:0", [0, 2]),
        _more(3, "2@came:0", [0, 1]),
        (3, "1@finding:0", [0, 2]),
        (4, "3@came:0,1@preparing:0,2@forward:3", [0]),
        _more(3, "2@read:0", [0, 1]),
        _more(4, "1@came:0,2@came:0", [0, 3]),
        _more(4, "1@came:0,3@meeting:0,2@finding:0", [0]),
    ],
)
def test_those_that_are_left_make_the_call_again(
    run: Run, script: Script, ranks: int, deaths: str, left: list[int]
) -> None:
    result = run("-n", str(ranks), *SHRINK, script(PLAIN), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)
    if "forward" not in deaths:
        assert set(re.findall(r"made (\d+) passes", text)) == {"18"}, text


def test_a_process_takes_the_place_of_a_rank_that_died_in_a_barrier(run: Run, script: Script) -> None:
    """It makes the calls of before es.prepare alone: es.load_checkpoint only reads there."""
    case = _with_calls(cases.REPLACED)
    result = run("-n", "3", "--spares", "1", *REPLACE, script(case), "2@came:0", "2")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [0, 1])


# Who comes after the loss runs the script from its beginning: what it did there must stay what all made of it.
KEPT = """
words = {"by": rank, "joined": joined}
assert es.checkpoint("start", extra=words).name == "start"
assert joined and "--spares" in sys.argv or es.load_checkpoint("start")["world_size"] == 3
"""
READ = """
import json, pathlib

for name in ("start", "ready"):
    state = json.loads(pathlib.Path(name, "manifest.json").read_text())["state"]
    print(name, "is", state["world_size"], sorted(state["extra"].items()), flush=True)
"""


@pytest.mark.parametrize("spares", [(), _more(("--spares", "1"))])
def test_an_early_checkpoint_of_a_process_that_takes_a_place_writes_nothing(
    run: Run, script: Script, spares: tuple[str, ...]
) -> None:
    case = _with_calls(cases.REPLACED, KEPT) + READ
    case = case.replace(
        'here("prepared")\n', 'here("prepared")\nassert es.checkpoint("ready", extra=words).name == "ready"\n'
    )
    result = run("-n", "3", *spares, *REPLACE, script(case), "1@forward:2", "2", *spares)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [0, 2])
    for name in ("start", "ready"):
        assert text.count(f"{name} is 3 [('by', '0'), ('joined', False)]") == 3, text
    assert text.count("es.checkpoint writes nothing before the first batch of a process that takes a place") == 1, text


# The first one that takes the place says so, and the others go on.
REFUSED = """
import pathlib, subprocess, sys
import torch.distributed as dist

if os.environ.get("EVENSTEP_JOINS") == "1":  # a group of its own, and what a process that it starts is
    dist.init_process_group("gloo", init_method=f"file://{pathlib.Path('own').absolute()}", rank=0, world_size=1)
    dist.destroy_process_group()
    has = "from evenstep.registration import _has_the_agents_memory as has; raise SystemExit(has())"
    subprocess.run([sys.executable, "-c", has], check=True)
try:
    dist.init_process_group("evenstep")
except es.EvenstepError:
    pathlib.Path("refused").touch()
    raise
dist.barrier()
"""
AWAITED = """
import time

while not pathlib.Path("refused").exists():
    time.sleep(0.005)
"""
PLACE = "a process that takes a lost rank's place (--recovery replace) cannot"
NO_MEMBER = "that was no member of the training yet: the others go on as they are"


def test_nobody_comes_into_the_scripts_own_group_of_all_ranks_later(run: Run, script: Script) -> None:
    case = _with_calls(cases.PLAIN_LOOP, REFUSED).replace("\nes.barrier()\ncompare", AWAITED + "es.barrier()\ncompare")
    result = run("-n", "3", *REPLACE, script(case), "1@forward:2")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert f"init_process_group: {PLACE} come into the group of all ranks" in text and NO_MEMBER in text, text
    assert_right(text, [0, 2])


def test_a_spare_makes_no_process_set_by_itself(run: Run, script: Script) -> None:
    """Its set of rank 0 would be itself, and write over that one's checkpoints."""
    case = (
        """
import os, pathlib
import evenstep as es

try:
    first = es.ProcessSet([0])
except es.EvenstepError:
    pathlib.Path("refused").touch()
    raise
if first.included:
    with first:
        es.checkpoint("mine")
"""
        + AWAITED
        + 'es.barrier()\nprint("over", flush=True)\n'
    )
    result = run("-n", "2", "--spares", "1", *REPLACE, script(case))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert f"es.ProcessSet before the first batch: {PLACE} make this call again" in text and NO_MEMBER in text, text
    assert text.count("] over") == 2, text


@pytest.mark.parametrize(
    ("stop", "left"), [_more("1^came:0", [0, 1, 2]), ("2~came:0", [0, 1]), _more("1~read:0", [0, 2])]
)
def test_one_that_is_stopped_goes_on_or_is_ended(run: Run, script: Script, stop: str, left: list[int]) -> None:
    env = {"EVENSTEP_STOP_PATIENCE": "120" if "^" in stop else "1"}
    result = run("-n", "3", *SHRINK, script(_with_calls(cases.HELD_UP)), stop, env=env)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.parametrize(
    ("death", "why"),
    [
        (
            "1@came:0",
            "EvenstepError: es.gather before es.prepare, after a rank was lost: a process that takes a place could not",
        ),
        (
            "1@asked:0",
            "the others cannot go on without rank 1: rank [02]: a process that takes a place could not make the es.gather",
        ),
    ],
)
def test_where_nobody_could_take_its_place_the_job_starts_again(run: Run, script: Script, death: str, why: str) -> None:
    calls = (
        'from evenstep.group import SharedGroup\naround(SharedGroup, "barrier", "came", "left")\nes.barrier()\n'
        'es.gather(torch.tensor([es.rank()]))\naround(SharedGroup, "barrier", "asked", "left")\nes.barrier()\n'
    )
    assert_begun_again(run("-n", "3", *REPLACE, script(AGAIN + _with_calls(cases.PLAIN_LOOP, calls)), death), why)


def test_results_that_need_all_are_lost_on_all(run: Run, script: Script) -> None:
    calls = EARLY + (
        'around(SharedGroup, "exchange", "giving", "given")\n'
        "try:\n    es.gather(torch.tensor([es.rank()]))\n    assert es.world_size() == 3\n"
        'except es.RankLost as error:\n    assert error.status == "EVEN_ERR_PEER_LOST" and error.fix.startswith("catch es.RankLost")\n'
        '    print("lost a part", flush=True)\n'
    )
    result = run("-n", "3", *SHRINK, script(_with_calls(cases.PLAIN_LOOP, calls)), "1@giving:0")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert text.count("] lost a part") == 2, text
    assert_right(text, [0, 2])


@pytest.mark.more
def test_what_one_rank_has_loaded_with_all_stands(run: Run, script: Script) -> None:
    """Rank 2 hears of the loss in the last meeting, out of which rank 0 has come."""
    calls = (
        STAYS
        + """
from evenstep.checkpoint_state import Loader

plain_read = Loader.read


def read(loader, *arguments, **options):
    wanted = plain_read(loader, *arguments, **options)
    here("loaded")
    stays_until_one_is_lost()
    if rank == "2" and deaths and len(es.session().recovery.members) == 3:
        error = es.EvenstepError("as if it had heard of it here")
        error.status = "EVEN_ERR_PEER_LOST"
        raise error
    return wanted


Loader.read = read
"""
        + EARLY
    )
    result = run("-n", "3", *SHRINK, script(_with_calls(cases.PLAIN_LOOP, calls)), "1@loaded:0")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 2])


def test_es_load_checkpoint_may_be_the_first_call(run: Run, script: Script) -> None:
    """Also where there is nothing else to read, and rank 2 hears of the loss in the last meeting, out of which rank 0 has come."""
    made = run("-n", "1", script('import evenstep as es\nes.checkpoint("before", extra={"words": 1})\n'))
    assert made.returncode == 0, made.stdout + made.stderr
    calls = (
        STAYS
        + """
from evenstep.checkpoint_state import Loader

plain_first = Loader.read_first


def read_first(loader, *arguments):
    plain_first(loader, *arguments)
    here("loaded")
    stays_until_one_is_lost()
    if rank == "2" and deaths and len(es.session().recovery.members) == 3:
        raise error_of("EVEN_ERR_PEER_LOST", "as if it had heard of it here")


Loader.read_first = read_first
nothing = dict.fromkeys(("models", "optimizers", "schedulers", "loaders", "random", "objects"), False)
assert es.load_checkpoint("before", **nothing)["extra"] == {"words": 1}
"""
    )
    result = run("-n", "3", *SHRINK, script(_with_calls(cases.PLAIN_LOOP, calls)), "1@loaded:0")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 2])


# Another one waits in the next call when "left" comes, so that rank 1 has not done what it does between the two.
BEHIND = """
import pathlib, time
from evenstep.group import SharedGroup

plain_barrier, come = SharedGroup.barrier, []


def barrier(group):
    come.append(1)
    if len(come) == 2:
        pathlib.Path("next").touch()
    plain_barrier(group)
    while len(come) == 1 and rank == "1" and deaths and not pathlib.Path("next").exists():
        time.sleep(0.005)
    if len(come) == 1:
        here("left")


SharedGroup.barrier = barrier
es.barrier()
if rank == "1":
    pathlib.Path("done").touch()
es.barrier()
assert pathlib.Path("done").exists()
es.barrier()
"""
IN_OWN_CODE = "rank 1: it was in the script's own code before es.prepare"
GLOO = "import torch.distributed as dist\nes.barrier()\ndist.new_group([0, 1, 2], backend='gloo')\n" + EARLY
TORCH = """
import torch.distributed as dist
dist.init_process_group("evenstep")
here("own")
around(dist, "barrier", "joining", "joined")
dist.barrier()
around(dist, "broadcast", "giving", "given")
values = torch.full((4,), float(rank))
dist.broadcast(values, 0)
assert values.tolist() == [0.0] * 4
"""
FIRST = 'here("first")\n' + EARLY
NO_CALL = "it is not training yet, and in no call of Evenstep's"


@pytest.mark.parametrize(
    ("calls", "deaths", "why", "recovery"),
    [
        _more(EARLY, "0@came:0", "rank 0: rank 0: it may alone have the values that all begin with", REPLACE),
        (EARLY, "1@own:0", f"rank 1: {IN_OWN_CODE}", SHRINK),
        (BEHIND, "1@left:0", f"rank 1: {IN_OWN_CODE}", SHRINK),
        _more(
            GLOO, "1@finding:0", "rank 1: rank [02]: the script has process groups of Gloo or NCCL of its own", SHRINK
        ),
        _more(TORCH, "1@joining:0", f"rank 1: rank [02]: {NO_CALL}", SHRINK),
        _more(TORCH, "0@giving:0", f"rank 0: rank [12]: {NO_CALL}", SHRINK),
        (TORCH, "1@giving:0", f"rank 1: rank [02]: {NO_CALL}", REPLACE),
        _more(FIRST, "0@first:0", f"rank 0: rank [12]: {NO_CALL}", SHRINK),
        _more(FIRST, "1@first:0", f"rank 1: rank [02]: {NO_CALL}", REPLACE),
    ],
)
def test_else_the_job_starts_again_and_says_why(
    run: Run, script: Script, calls: str, deaths: str, why: str, recovery: tuple[str, ...]
) -> None:
    result = run("-n", "3", *recovery, script(AGAIN + _with_calls(cases.PLAIN_LOOP, calls)), deaths)
    assert_begun_again(result, f"without {why}")


def test_the_job_that_starts_again_trains_to_its_end(run: Run, script: Script) -> None:
    text = assert_restarted(
        run("-n", "3", *SHRINK, script(PLAIN), "0@came:0"),
        "without rank 0: rank 0: it may alone have the values that all begin with",
    )
    ends = re.findall(r"rank \d of 3 at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == 3 and all(float(far) < 1e-12 for far in ends), text


@pytest.mark.parametrize(
    ("calls", "stop", "why"),
    [
        (EARLY, "1~own:0", IN_OWN_CODE),
        _more(EARLY, "0~own:0", "rank 0: it may alone have the values that all begin with"),
        _more(BEHIND, "1~left:0", IN_OWN_CODE),
    ],
)
def test_one_that_is_stopped_where_others_may_wait_for_what_it_does_starts_the_job_again(
    run: Run, script: Script, calls: str, stop: str, why: str
) -> None:
    result = run("-n", "3", *SHRINK, script(AGAIN + _with_calls(cases.HELD_UP, calls)), stop)
    assert_begun_again(result, f"without the rank that stands still: {why}")


@pytest.mark.parametrize(
    ("calls", "stop", "recovery"),
    [
        (TORCH, "1~giving:0", SHRINK),
        _more(TORCH, "0~giving:0", REPLACE),
        _more(EARLY, "0~came:0", REPLACE),
        (FIRST, "0~first:0", SHRINK),  # the others wait for all to come together
        _more(FIRST, "1~first:0", REPLACE),
    ],
)
def test_one_that_is_stopped_where_no_call_can_be_made_again_starts_the_job_again(
    run: Run, script: Script, calls: str, stop: str, recovery: tuple[str, ...]
) -> None:
    result = run("-n", "3", *recovery, script(AGAIN + _with_calls(cases.HELD_UP, calls)), stop)
    words = r" \(cpu:\d on \S+, process \d+\) was stopped \(SIGSTOP, SIGTSTP\), sent from outside, and stood still while others"
    assert_begun_again(result, f"rank {stop[0]}{words}")


def assert_restarted(result: Any, why: str) -> str:
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert re.search(why, text), text
    assert text.count("restart 1 of 3 from the beginning") == 1, text
    return str(text)


def assert_begun_again(result: Any, why: str) -> None:
    text = assert_restarted(result, why)
    assert len(re.findall(r"\] begun again$", text, re.MULTILINE)) == 3, text


@ON_HOSTS
@pytest.mark.parametrize(
    ("names", "deaths", "left"), [("a,b,b", "1@came:0", [0, 2]), _more("a,b,c", "2@read:0", [0, 1])]
)
def test_on_several_hosts(run: Run, script: Script, names: str, deaths: str, left: list[int]) -> None:
    result = run("-n", str(names.count(",") + 1), *SHRINK, script(PLAIN), deaths, env=played(names))
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)
