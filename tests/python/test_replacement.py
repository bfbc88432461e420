"""`evenstep run --recovery replace`: a rank is killed, the others go on, and a process takes its place."""

from __future__ import annotations

import re
from typing import Callable

import generation_cases as cases
import pytest
from generation_gloo_cases import over_gloo
from run_jobs import Run

Script = Callable[[str], str]
REPLACE = ("--no-pin", "--no-monitor", "--log-rank", "all", "--recovery", "replace")


def assert_replaced(text: str, began: list[int]) -> None:
    """began: the ranks that lived from the training's beginning to its end."""
    ends = {int(rank): words for rank, words in re.findall(r"rank (\d) of (\d at step .*)", text)}
    assert ends, text
    for words in ends.values():
        found = re.match(r"(\d) at step 18: (\S+) apart, rate kept", words)
        assert found and int(found[1]) == len(ends) and float(found[2]) < 1e-12, text
    firsts = {int(rank): int(step) for rank, step in re.findall(r"rank (\d) began at step (\d+)", text)}
    assert sorted(firsts) == sorted(ends), text
    assert sorted(rank for rank, step in firsts.items() if step == 0) == began, text
    assert text.count(f"evaluated True on {len(ends)}") == len(ends), text
    assert re.search(r"generation \d: ranks? .* joins? ranks? ", text) and "restart" not in text


@pytest.mark.parametrize(
    ("options", "deaths", "waits", "began"),
    [
        # the agent, and rank 0 itself, for which a spare comes that an earlier agent has started
        (("-n", "2", "--spares", "1"), "1!forward:1,0@forward:3", "3", [1]),
        pytest.param(("-n", "3"), "1@applied:2", "2", [0, 2], marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "2"), "1@vote:2,0@forward:6", "2,6", [2],
                     marks=pytest.mark.more),
        # the giver, before, while and after it gives; another survivor; both sides of the meeting
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,0@giving:3", "2", [2], marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,0@given:3", "2", [2], marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,2@meeting:3", "2", [0], marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,2@met:3", "2", [0], marks=pytest.mark.more),
        # who joins, at any point of it
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,3@prepared:3", "2", [0, 2],
                     marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,3@meeting:3", "2", [0, 2],
                     marks=pytest.mark.more),
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,3@met:3", "2", [0, 2], marks=pytest.mark.more),
        # who joined, in its first step
        pytest.param(("-n", "3", "--spares", "1"), "1@forward:2,3@commit:3", "2", [0, 2],
                     marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_a_process_takes_the_place_of_a_killed_rank(
    run: Run, script: Script, options: tuple[str, ...], deaths: str, waits: str, began: list[int]
) -> None:
    result = run(*options, *REPLACE, script(cases.with_workers(cases.REPLACED)), deaths, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, began)


@pytest.mark.more
@pytest.mark.parametrize("deaths", ["1@handed:2,3@connecting:3", "1@summing:2,0@met:3", "2@handed:2,3@summing:3"])
def test_a_process_joins_those_whose_sums_go_over_torchs_gloo(run: Run, script: Script, deaths: str) -> None:
    source = over_gloo(cases.with_workers(cases.REPLACED), 2)
    result = run("-n", "3", "--spares", "1", *REPLACE, script(source), deaths, "2")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [rank for rank in (0, 1, 2) if f"{rank}@" not in deaths])


def test_who_comes_evaluates_the_others_samples_no_second_time(run: Run, script: Script) -> None:
    """Its loaders have been gone through less often; those of who begins an evaluation again, once more."""
    deaths = "1@forward:8,0@judging:12"
    result = run("-n", "3", "--spares", "1", *REPLACE, script(cases.SHUFFLED), deaths, "8")
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    found = re.findall(r"rank (\d) at (\d+): (.*), on \d", text)
    came = {(rank, step) for rank, step, _ in found}
    assert {("0", "6"), ("1", "6"), *((rank, step) for rank in "23" for step in ("12", "18"))} <= came, text
    assert {words for _, _, words in found} == {"once True, alike True, anew True"}, text


@pytest.mark.more
def test_too_few_wait_with_their_state_saved(run: Run, script: Script) -> None:
    result = run("-n", "2", "--min-ranks", "2", *REPLACE, script(cases.REPLACED), "1@forward:2", "")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [0])
    assert "1 rank is left, and --min-ranks is 2: the training saves its state after this step, and waits" in text
    assert "rank 1 began at step 3" in text, text  # the others made one step meanwhile
    assert re.search(r"state saved: \['step-00000003'\]", text), text


@pytest.mark.more
def test_where_processes_end_again_and_again_others_wait_longer(run: Run, script: Script) -> None:
    result = run("-n", "3", *REPLACE, script(cases.REPLACED), "1@forward:2,1@prepared:3", "2")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert re.search(r"rank 1 \(cpu:\d\) is set aside for 10 s: its process has ended 2 times", text), text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--spares", "1"), "--spares is of --recovery replace"),
        (("--spares", "there:1", *REPLACE), "--spares there:1: there is one host"),
        (("--spares", "-1", *REPLACE), "--spares -1: not a number, nor HOST:NUMBER"),
        (("--spares", "1001", *REPLACE), "not a number, nor HOST:NUMBER"),
    ],
)
def test_spares_that_make_no_sense_are_refused(run: Run, script: Script, words: tuple[str, ...], said: str) -> None:
    result = run("-n", "2", *words, script("pass"))
    assert result.returncode == 2 and said in result.stderr, result.stderr


@pytest.mark.more
def test_who_joins_may_have_room_for_less_than_a_batch(run: Run, script: Script) -> None:
    held = cases.REPLACED.replace("es.prepare(*make(), loader)", "es.prepare(*make(), loader, most_samples=8)")
    held += "print('caps', es.session().loaders['loader'].shares.given_caps, flush=True)\n"
    result = run("-n", "3", "--spares", "1", *REPLACE, script(held), "1@forward:2", "2")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert_replaced(text, [0, 2])
    assert text.count("caps [8, 8, 8]") == 3, text
