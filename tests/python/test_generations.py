"""`evenstep run --recovery shrink`: a rank is killed, and the others go on in their processes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Callable

import generation_cases as cases
import generation_optimizer_cases as optimizer_cases
import pytest
from generation_gloo_cases import over_gloo
from run_jobs import Run

from evenstep import EvenstepError, generation_joining, generations, plain
from evenstep.generation_gift import Gift
from evenstep.rendezvous import Overtaken

Script = Callable[[str], str]
SHRINK = ("--no-pin", "--no-monitor", "--log-rank", "all", "--recovery", "shrink")


def _ends(text: str) -> dict[int, str]:
    """What ranks said at their end."""
    return {int(rank): words for rank, words in re.findall(r"rank (\d) of (\d at step .*)", text)}


def assert_right(text: str, left: list[int]) -> None:
    ends = _ends(text)
    assert sorted(ends) == left, text
    for words in ends.values():
        found = re.match(r"(\d) at step 18: (\S+) apart, rate kept", words)
        assert found and int(found[1]) == len(left) and float(found[2]) < 1e-12, text
    assert "restart" not in text


def test_the_output_of_the_next_main_rank_is_shown(run: Run, script: Script) -> None:
    result = run("-n", "3", "--no-pin", "--recovery", "shrink", script(cases.PLAIN_LOOP), "0@forward:3")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert re.findall(r"\[rank (\d)\] .*at step 18", result.stdout) == ["1"] and "[rank 2]" not in text, text
    words = r"evenstep: rank 1 is the main rank now, and its output is shown \(\S+/logs/rank-1\.log\)"
    assert len(re.findall(words, result.stderr)) == 1, text


@pytest.mark.parametrize(
    ("ranks", "deaths", "left"),
    [
        (4, "0@forward:3,3@voted:3,1@met:3", [2]),  # two in one step, one while the others recover
        pytest.param(3, "2@committed:4,1@applied:9", [0], marks=pytest.mark.more),
        pytest.param(2, "0@vote:0", [1], marks=pytest.mark.more),
        pytest.param(3, "0@commit:5,2@meeting:5", [1], marks=pytest.mark.more),
        pytest.param(3, "1@forward:17,0@applied:17", [2], marks=pytest.mark.more),  # in the last step
        pytest.param(4, "1@forward:5,2@forward:5,3@forward:5", [0], marks=pytest.mark.more),  # all at once
    ],
)
def test_whoever_dies_the_others_train_on(run: Run, script: Script, ranks: int, deaths: str, left: list[int]) -> None:
    result = run("-n", str(ranks), *SHRINK, script(cases.PLAIN_LOOP), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)
    passes = {int(count) for count in re.findall(r"made (\d+) passes", text)}
    assert len(passes) == 1 and 18 < passes.pop() <= 18 + deaths.count("@"), text


@pytest.mark.parametrize(
    ("ranks", "deaths", "options"),
    [
        # before the vote, in a sum that the others wait for; workers of the data loader hold a dead rank's connections open
        (3, "1@summing:3,0@handed:6", ""),
        pytest.param(4, "0@handing:0,3@summed:5,1@met:5", "", marks=pytest.mark.more),
        pytest.param(4, "0@vote:3,1@summing:3,3@commit:9", ", compression='bf16'", marks=pytest.mark.more),
        pytest.param(3, "1@committed:4,0@applied:9", "", marks=pytest.mark.more),
    ],
)
def test_sums_over_torchs_gloo_go_on_among_those_that_are_left(
    run: Run, script: Script, ranks: int, deaths: str, options: str
) -> None:
    source = over_gloo(cases.PLAIN_LOOP, 2, options)
    result = run("-n", str(ranks), *SHRINK, script(cases.with_workers(source)), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [2])


@pytest.mark.more
def test_an_average_of_the_parameters_is_as_if_nobody_had_died(run: Run, script: Script) -> None:
    path, ends = script(cases.AVERAGED), []
    for deaths in ("", "1@forward:3,0@voted:8"):
        result = run("-n", "3", *SHRINK, path, deaths)
        text = result.stdout + result.stderr
        assert result.returncode == 0 and "restart" not in text, text
        found = re.findall(r"average (\S+) (\S+) (\S+)", text)
        assert len(found) == (1 if deaths else 3), text
        ends.append([float(one) for one in found[0]])
    assert ends[0] == pytest.approx(ends[1], rel=1e-10)


def test_what_one_rank_has_committed_stands_on_all(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.HALF_COMMITTED), "")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [0, 2])
    assert re.findall(r"made (\d+) passes", text) == ["19", "19"]  # one more than steps


@pytest.mark.parametrize(
    ("deaths", "left", "told"),
    [
        ("1@judging:5,3@gathering:6,0@applied:13", [2], 1),  # the last: in es.reduce_mean
        pytest.param("0@judging:11,3@judging:11,1@judging:17", [2], 0, marks=pytest.mark.more),
        pytest.param("0@gathering:6,1@meeting:6,2@gathering:12", [3], 2, marks=pytest.mark.more),
    ],
)
def test_an_evaluation_begins_again_and_figures_of_all_raise(
    run: Run, script: Script, deaths: str, left: list[int], told: int
) -> None:
    result = run("-n", "4", *SHRINK, script(cases.EVALUATED), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)
    assert text.count(f"evaluated right after 3 steps, told {told} times") == len(left), text


@pytest.mark.more
def test_accumulated_batches_come_again_together(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.ACCUMULATING), "1@between:4")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    found = re.findall(r"of 2 at step 9: (\S+) apart, rate kept", text)
    assert len(found) == 2 and all(float(far) < 1e-12 for far in found), text


@pytest.mark.more
def test_a_trainer_shows_nothing_of_it(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, script(cases.TRAINER), "0@forward:7")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, [1, 2])
    assert text.count("steps told once each") == 2, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "deaths", "left"),
    [
        (4, "1@counted:3,0@statistics:7,3@applied:11", [2]),  # in a BatchNorm's backward, in its forward
        (3, "0@vote:0,1@commit:1", [2]),
        (3, "1@voted:6,2@committed:9", [0]),
        (3, "0@forward:8,1@met:8", [2]),
    ],
)
def test_buffers_and_scalers_are_as_if_nobody_had_died(
    run: Run, script: Script, ranks: int, deaths: str, left: list[int]
) -> None:
    result = run("-n", str(ranks), *SHRINK, script(cases.NORMS), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.parametrize(
    ("ranks", "deaths", "left"),
    [
        (4, "1@ready:5,0@second:9,3@fooled:13", [2]),  # between the two steps of a pass, after both, in a BatchNorm
        pytest.param(4, "0@first:6,3@commit:12", [1, 2], marks=pytest.mark.more),
        pytest.param(3, "0@committed:3,2@committed:4", [1], marks=pytest.mark.more),
        pytest.param(4, "1@voted:5,2@meeting:5,0@fooled:6", [3], marks=pytest.mark.more),
    ],
)
def test_two_optimizers_make_no_step_twice(run: Run, script: Script, ranks: int, deaths: str, left: list[int]) -> None:
    result = run("-n", str(ranks), *SHRINK, script(optimizer_cases.ADVERSARIAL), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.more
@pytest.mark.parametrize(
    ("deaths", "left"), [("0@commit:3,1@applied:8", [2, 3]), ("2@committed:6,3@voted:9,0@applied:18", [1])]
)
def test_optimizers_that_share_a_backward_step_together(run: Run, script: Script, deaths: str, left: list[int]) -> None:
    result = run("-n", "4", *SHRINK, script(optimizer_cases.SHARED), deaths)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_what_cannot_go_on_starts_again(run: Run, script: Script) -> None:
    result = run("-n", "2", *SHRINK, script(cases.OWN_GLOO), "1@forward:3")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert (
        "the others cannot go on without rank 1: rank 0: the script has process groups of Gloo or NCCL of its own"
        in text
    )
    assert "restart 1 of 3" in text and "ended with 2 ranks" in text


def test_where_one_rank_lacks_the_agents_memory_nobody_goes_on_without_another(run: Run, script: Script) -> None:
    """Its groups would be others than theirs, and they would meet without it."""
    result = run("-n", "2", *SHRINK, script(cases.WRAPPED))
    text = result.stdout + result.stderr
    assert result.returncode == 0 and text.count("ended at step 2") == 2, text
    assert re.search(
        r"starts again where a rank is lost, whatever --recovery says: rank 1 on host \S+: without the agent's memory",
        text,
    )


@pytest.mark.more
def test_fewer_than_the_least_start_again(run: Run, script: Script) -> None:
    result = run("-n", "3", *SHRINK, "--min-ranks", "2", script(cases.PLAIN_LOOP), "0@forward:3,1@forward:6")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "generation 1: ranks 1 and 2 go on without rank 0" in text
    assert "cannot go on without rank 1: 1 are left, and --min-ranks is 2" in text
    assert "restart 1 of 3" in text and sorted(_ends(text)) == [0, 1, 2]


@pytest.mark.more
def test_the_record_says_who_went_on(
    script: Script, program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    words = ("run", "-n", "3", "--no-pin", "--name", "a", "--json", "--recovery", "shrink", script(cases.PLAIN_LOOP))
    ran = subprocess.run(
        [program, *words, "0@forward:5"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout.splitlines()[-1])
    assert outcome["restarts"] == 0 and "rank 0" in outcome["cause"]
    report = subprocess.run(
        [program, "report", "runs/a"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert report.returncode == 0, report.stderr
    assert re.search(r"generation 1: ranks 1 and 2 go on without rank 0 after \d+ ms", report.stdout), report.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--recovery", "shrug"), "--recovery shrug is no way to go on"),
        (("--min-ranks", "2"), "--min-ranks is of --recovery shrink"),
        (("--recovery", "shrink", "--min-ranks", "9"), "--min-ranks 9 is more than the 2 ranks"),
    ],
)
def test_wrong_options_are_named(run: Run, script: Script, options: tuple[str, ...], words: str) -> None:
    result = run("-n", "2", *options, script("pass"))
    assert result.returncode == 2 and words in result.stderr


def bits(text: str, ranks: int) -> str:
    """Of the parameters and the last loss, the same on all that are left."""
    found = set(re.findall(r"(?:bits|loss) (\S+)", text))
    assert text.count("bits ") == ranks and len(found) == 2, text
    assert len(re.findall(rf"in 18 steps, told \d+ on {ranks}", text)) == ranks, text
    return " ".join(sorted(found))


@pytest.mark.parametrize(
    ("recovery", "deaths", "waits", "left", "model"),
    [
        # where all have met in a BatchNorm, in the commit of a step, before they meet in one
        # the agent, too: from then on another one says who goes on
        (("shrink",), "3@counted:2,0!counted:4,1@commit:6,0@statistics:11", "", 1, "norms"),
        pytest.param(("shrink",), "3@vote:2,1@commit:6,0@voted:11", "", 1, "", marks=pytest.mark.more),
        pytest.param(("shrink",), "0@commit:4,2@met:4", "", 2, "", marks=pytest.mark.more),
        pytest.param(("shrink",), "0@vote:0,1@statistics:1,2@counted:17", "", 1, "norms", marks=pytest.mark.more),
        pytest.param(("shrink",), "1@committed:5,2@vote:5,0@applied:9", "", 2, "norms", marks=pytest.mark.more),
        pytest.param(("replace", "--spares", "1"), "1@vote:2,0@vote:7", "2,7", 4, "", marks=pytest.mark.more),
        pytest.param(("replace", "--spares", "1"), "1@counted:2,0@vote:7", "2,7", 4, "norms", marks=pytest.mark.more),
    ],
)
def test_the_bits_are_those_of_a_run_in_which_nobody_died(
    run: Run, script: Script, recovery: tuple[str, ...], deaths: str, waits: str, left: int, model: str
) -> None:
    """They die where every rank comes: one without samples has no forward in this mode."""
    path = script(cases.BITWISE)
    alone = run("-n", "1", *SHRINK[:-2], path, "", "", model)
    wanted = bits(alone.stdout + alone.stderr, 1)
    result = run("-n", "4", *SHRINK[:-1], *recovery, path, deaths, waits, model)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    assert bits(text, left) == wanted, text


class _Board:
    """What agents and ranks share, as one that gives sees it: rank 1 is new in generation 1."""

    ranks = 2

    def __init__(self) -> None:
        self.why: dict[int, str] = {}

    def has(self, rank: int, number: int) -> bool:
        return rank == 0 or number > 0

    def process(self, rank: int) -> int:
        return 1

    def fail_giving(self, number: int, why: str) -> None:
        self.why[number] = why


def _giver() -> tuple[Any, _Board]:
    board = _Board()
    steps = SimpleNamespace(phases=SimpleNamespace(during=lambda _: nullcontext()), syncs=[])
    environment = SimpleNamespace(rank=0, speeds=None, joins=False)
    session: Any = SimpleNamespace(
        environment=environment, user_state=None, steps=steps, scheduler_steps=SimpleNamespace()
    )
    return generations.Recovery(session, board), board  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("no room"), TypeError("no room")])
def test_who_cannot_give_says_why_and_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def capture(*_: object) -> None:
        raise error

    monkeypatch.setattr(generation_joining, "capture", capture)
    recovery, board = _giver()
    recovery._give(1)
    assert board.why == {1: f"rank 0 cannot give it: {type(error).__name__}: no room"}
    error = Overtaken()
    with pytest.raises(Overtaken):
        recovery._give(1)


def test_a_gift_that_is_none_leaves_no_descriptor(tmp_path: pathlib.Path) -> None:
    index = plain.dumps(1)  # not what a gift's is
    total = (32 + len(index) + 63) // 64 * 64
    file = tmp_path / "gift"
    numbers = b"".join(one.to_bytes(8, "little") for one in (3, len(index), total))
    file.write_bytes((b"evengift" + numbers + index).ljust(total, b"\0"))
    descriptor = os.open(file, os.O_RDWR)
    with pytest.raises(EvenstepError, match="cannot be read"):
        Gift(descriptor, 3)
    with pytest.raises(OSError):
        os.fstat(descriptor)
