"""`evenstep bench balance`: trains really, simulates the rest, says which is which, and beside what."""

from __future__ import annotations

import csv
import json
import pathlib
import re
import signal
import subprocess
import weakref
from types import SimpleNamespace

import pytest

from evenstep import bench_balance, bench_balance_report, bench_modes
from evenstep import bench_balance_bound as bounds
from evenstep import bench_balance_courses as courses
from evenstep import bench_balance_noise as noise
from evenstep import bench_balance_steady as steady
from evenstep.bench_balance_minutes import Length
from evenstep.bench_modes import Turn
from evenstep.bench_work import IMAGES, SMALL, Work
from evenstep.environment import read_environment

POLICIES = ["equal", "auto"]


@pytest.fixture
def bench(program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path):
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "bench", "balance", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return call


def test_real_ranks_are_slowed_trained_and_compared(bench, tmp_path):
    words = ["--only", "real", "--quick", "--speeds", "2:1", "--policies", "equal,auto", "--batch", "16"]
    done = bench(*words, "-o", "figures.json", "--csv", "figures.csv", "--plots", "drawn")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["format"] == "evenstep-bench-balance-1" and figures["simulated"] is None and figures["quick"]
    real = figures["real"]
    assert real["ranks"] == 2
    assert set(real["overhead"]) == {"deciding_seconds", "telling_seconds", "vote_seconds"}
    assert all(seconds > 0 for seconds in real["overhead"].values())
    assert [row["policy"] for row in real["rows"]] == [*POLICIES, "ddp", "hand", "single"]
    for row in real["rows"]:
        assert row["case"] == "2:1" and row["samples_per_second"] > 0 and row["of_bound"] > 0
        assert len(row["utilisation"]) == 2 and all(0 <= part <= 1 for part in row["utilisation"])
        assert sum(row["shares"]) == sum(row["best_split"]) == 16 and row["imbalance"] >= 0
        low, high = row["of_bound_interval"]
        assert low <= row["of_bound"] <= high and len(row["of_bound_turns"]) == len(row["rates"]) == 1
        assert row["bound_moments"] == 6, "before the first turn, and after each"
    by_policy = {row["policy"]: row for row in real["rows"]}
    assert by_policy["equal"]["shares"] == by_policy["ddp"]["shares"] == [8, 8]
    assert by_policy["single"]["shares"] == [16, 0] and by_policy["single"]["utilisation"] == [1, 0]
    (change,) = real["changes"]
    assert change["policy"] == "auto" and len(change["efficiency"]) == len(change["shares"])
    lines = list(csv.DictReader((tmp_path / "figures.csv").open()))
    noisy = real["noise"]
    assert [line["policy"] for line in lines] == [
        row["policy"] for row in (*real["rows"], *real["courses"], change, *noisy)
    ]
    assert all(line[name] for line in lines for name in ("course", "ranks", "of_bound", "utilisation", "imbalance"))
    assert [row["policy"] for row in noisy] == ["fixed", "auto"] and noisy[0]["lost"] == 0
    for row in (change, *noisy):
        assert row["samples_per_second"] > 0 and len(row["utilisation"]) == 2 and row["imbalance"] >= 0
    assert all(sum(row["fixed_split"]) == 16 for row in noisy) and noisy[0]["shares"] == noisy[0]["fixed_split"]
    model = real["model"]
    assert (
        model["name"] == "gpt2" and model["scaled_down"] and "GPT-2 of" in done.stdout and "scaled down" in done.stdout
    )
    assert [row["course"] for row in real["courses"]] == ["drifting"] * 2 + ["bursty"] * 2
    for row in real["courses"]:
        assert row["samples_per_second"] > 0 and row["of_bound"] > 0 and 0 < row["of_splits"] <= 1.0001
        assert all(sum(shares) == 16 for shares in row["shares"]) and len(row["shares"]) == 16
    assert "the last rank's speed does not stay" in done.stdout and "noise alone" in done.stdout
    assert lines[0]["part"] == "real" and len(lines[0]["utilisation"].split()) == 2
    page = (tmp_path / "drawn" / "balance.html").read_text()
    assert '"evenstep-bench-balance-1"' in page and "Chart.draw" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?:""", page)
    assert "REAL: 2 ranks" in done.stdout and "SIMULATED" not in done.stdout and "no figures to keep" in done.stdout
    assert next(iter(real["minutes"])) == "speeds 2:1" and len(real["minutes"]) == 5
    assert figures["left"] == [] and "NOT MEASURED" not in done.stdout
    assert not list(tmp_path.glob("runs/bench-balance*"))


@pytest.mark.more
def test_a_bench_that_is_interrupted_tells_what_it_had_measured(program, environment, tmp_path):
    words = ["--only", "real", "--quick", "--speeds", "2:1,4:1", "--policies", "equal", "--no-peers", "--batch", "16"]
    command = [program, "bench", "balance", *words, "--courses", "steady,drifting", "-o", "figures.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as job:
        try:
            assert any("4:1" in line for line in iter(job.stderr.readline, ""))
            job.send_signal(signal.SIGINT)
            table, _ = job.communicate(timeout=300)
        finally:
            job.kill()
    assert job.returncode == 130
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["case"] for row in figures["real"]["rows"]} == {"2:1"}
    assert figures["left"] == ["speeds 4:1", courses.NAMES["drifting"]]
    assert "NOT MEASURED: speeds 4:1; the last rank drifts" in table
    assert not list(tmp_path.glob("runs/bench-balance*.json"))


def test_simulated_ranks_say_so_and_reach_their_aims(bench):
    done = bench("--only", "simulated", "--policies", "equal,proportional,auto", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["real"] is None
    rows = {(row["case"], row["policy"]): row for row in figures["simulated"]["rows"]}
    assert {row["ranks"] for row in rows.values()} == {2, 3, 4, 5}
    assert {row["course"] for row in rows.values()} == {"steady", "drifting", "bursty", "slowing"}
    for (case, policy), row in rows.items():
        assert len(row["utilisation"]) == row["ranks"]
        if policy == "auto":
            # bursts: nine seeds, of which each scatters by 0.03 (the mean of 80 is 0.90)
            least = 0.87 if row["course"] == "bursty" else 0.97
            assert row["of_bound"] >= least, (case, row)
            assert row["of_bound"] >= rows[case, "equal"]["of_bound"] - 0.01
            assert row["imbalance"] <= rows[case, "equal"]["imbalance"] + 0.02
    assert rows["16:1", "equal"]["of_bound"] < 0.2 and rows["16:1", "equal"]["utilisation"][0] < 0.1
    assert rows["4:1", "single"]["utilisation"] == [1, 0]
    noise = [one for one in figures["simulated"]["noise"] if one["policy"] == "auto"]
    assert len(noise) == 2 and all(-0.001 <= one["lost"] <= 0.01 for one in noise)
    changes = {(one["case"], one["policy"]): one for one in figures["simulated"]["changes"]}
    for (_, policy), one in changes.items():
        for steps in (one["steps_after_slowing"], one["steps_after_recovery"]):
            back = [step for step in steps if step is not None]
            if policy == "auto":
                assert (
                    len(back) == len(steps) and 2 <= sorted(back)[len(back) // 2] <= 5
                )  # one seed is at 0.9 all along
        if policy == "equal":
            assert one["steps_after_slowing"] == [None] * len(steps)
    told = {aim["what"] for aim in figures["aims"]}
    assert any("noise" in what for what in told) and all(aim["part"] == "simulated" for aim in figures["aims"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "equal,dynamc"], '"dynamc" in --policies is no policy'),
        (["--speeds", "4:x"], "not numbers above 0"),
        (["--speeds", "4:0"], "not numbers above 0"),
        (["--speeds", "4:nan"], "not numbers above 0"),
        (["--speeds", "4:1,2:1:1"], "another number of ranks than -n says"),
        (["-n", "3", "--speeds", "4:1"], "each of the 3 ranks"),
        (["-n", "1"], "-n 1 is no number of ranks from 2"),
        (["--only", "half"], "--only half"),
        (["--slow-by", "sleep"], "--slow-by sleep"),
        (["--courses", "drifting,burst"], '"burst" in --courses is no course'),
        (["--courses", ""], '"" in --courses is no course'),
        (["--batch", "2", "-n", "3"], "less than a sample for each rank"),
        (["--seconds", "nan"], "--seconds"),
        (["--model", "resnet"], "did you mean resnet50"),
        (["--model-sizes", "layers=0"], '"layers=0" in --model-sizes is no size of gpt2'),
        (["--model", "bert", "--model-sizes", "width=8,side=4"], '"side=4" in --model-sizes'),
        (["--model-sizes", "layers=2x"], "layers, width, heads, length, words"),
        (["--model-sizes", ""], "--model-sizes"),
        (["--data", "."], "gpt2 reads text"),
        (["--model", "simplecnn", "--data", "nowhere"], "nowhere cannot be read"),
        (["--batch-norm", "half"], "neither sync nor local"),
        (["more"], "evenstep bench balance"),
    ],
)
def test_wrong_words(bench, words, said):
    done = bench(*words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert done.stdout == ""


# ---- the parts ----


def test_speeds_that_do_not_stay_and_their_bound():
    drift = courses.parts_of("drifting", 61)
    assert (
        drift[0] == 1.0
        and drift[-1] == 0.25
        and drift[20] == pytest.approx(0.5)
        and sorted(drift, reverse=True) == drift
    )
    assert set(courses.parts_of("drifting", 61, whole=True)) == {1.0, 1 / 2, 1 / 3, 1 / 4}
    bursts = courses.parts_of("bursty", 400)
    ends = [step for step in range(1, 400) if bursts[step] != bursts[step - 1]]
    assert set(bursts) == {1.0, courses.BURST} and all(10 <= b - a <= 40 for a, b in zip([0, *ends], ends))
    levels, measured = [0.25, 0.5, 1.0], [[(0.0, 1.0), (4.0, 4.0)], [(0.0, 1.0), (2.0, 2.0)], [(0.0, 1.0), (1.0, 1.0)]]
    for part in (0.1, 0.25, 0.3, 0.5, 0.7, 1.0):
        (_, same), (start, slope) = courses.lines_at(part, levels, measured)
        assert same == 1.0 and start == slope == pytest.approx(1 / max(part, 0.25))
    lines = [[(0.0, 1.0), (0.0, 1.0)], [(0.0, 1.0), (0.0, 4.0)]]  # best: 5:5 in 5 s, 8:2 in 8 s
    turn = Turn([6.0, 30.0], [[5, 5], [5, 5]], [[5.0, 5.0], [5.0, 20.0]])
    row = courses.row_of("drifting", "auto", [turn], lines, 10)
    assert row["of_bound"] == pytest.approx(13 / 36) and row["of_splits"] == pytest.approx(13 / 25)
    assert row["utilisation"] == pytest.approx([5 / 18, 12.5 / 18]) and row["imbalance"] == pytest.approx(0.3)


class Machine:
    """Ranks whose times are straight lines, and whose speed moves from one moment to the next."""

    def __init__(self, lines, level=lambda at: 1.0):
        self.lines, self.level, self.asked = lines, level, []

    def measure(self, sizes, seconds):
        self.asked.append((list(sizes), seconds))
        level = self.level(len(self.asked))
        return [level * bounds.seconds_of(line, size) for line, size in zip(self.lines, sizes)]


def test_the_bound_is_the_best_split_at_the_speeds_of_its_moment():
    machine = Machine([(0.010, 0.005), (0.030, 0.020)])
    bound = bounds.Bound(machine.measure, 64, 1.0)
    bound.learn([32, 32])
    assert all(one == pytest.approx(true) for one, true in zip(bound.lines, machine.lines))
    best, seconds = bounds.best_split(machine.lines, 64)
    assert bound.split == best and bound.now().seconds == pytest.approx(seconds)
    assert machine.asked[-1] == (best, 1.0)
    machine.lines = [(0.010, 0.005), (0.060, 0.040)]  # the second is half as fast from now on
    slower, longer = bounds.best_split(machine.lines, 64)
    moment = bound.now()
    assert machine.asked[-1][0] == best and moment.split == slower and moment.seconds == pytest.approx(longer)
    bound.now()
    bound.follow()
    assert bound.split == slower, "what most moments say is measured at from then on"


def test_a_rank_without_samples_is_measured_with_one():
    machine = Machine([(0.001, 0.001), (0.5, 0.5)])
    bound = bounds.Bound(machine.measure, 64, 1.0)
    bound.learn([63, 1])
    bound.split = [64, 0]
    bound.now()
    assert machine.asked[-1][0] == [64, 1]


def test_what_the_machine_does_meets_a_turn_and_its_bound_alike():
    """A machine that becomes slower all the time: by one bound a round a turn would be off by up to all that it moved in it."""
    machine = Machine([(0.010, 0.005), (0.020, 0.010)], lambda at: 1.0 + 0.02 * at)
    bound = bounds.Bound(machine.measure, 64, 1.0)
    bound.learn([43, 21])
    _, ideal = bounds.best_split(machine.lines, 64)
    before = bound.now()
    for _ in range(20):
        now = len(machine.asked) + 0.5
        after = bound.now()
        between = bounds.between(before, after)
        assert between.seconds == pytest.approx(ideal * machine.level(now), rel=0.005)
        before = after
    assert bound.moments[-1].seconds > 1.3 * bound.moments[0].seconds


def test_a_slope_is_none_of_the_machines_own_speed():
    lines = [(0.010, 0.005), (0.020, 0.010)]
    moving = bounds.Bound(Machine(lines, lambda at: 1.0 + 0.02 * at).measure, 64, 1.0)
    moving.learn([43, 21])
    for (fixed, slope), (true_fixed, true_slope) in zip(moving.lines, lines):
        assert fixed / slope == pytest.approx(true_fixed / true_slope, rel=0.01)


def test_numbers_run_among_the_others_and_seldom_what_takes_long():
    numbers, others = ["auto", "hand"], ["equal", "ddp", "single"]
    names = steady.names_of([*others, *numbers], numbers, ["ddp"], 0)
    assert names == ["auto", "hand", "equal", "hand", "auto", "ddp", "auto", "hand", "single"]
    for number in range(1, 9):
        names = steady.names_of([*others, *numbers], numbers, ["ddp"], number)
        assert names.count("auto") == names.count("hand") == steady.TIMES
        assert names.count("equal") == names.count("single") == 1 and names.count("ddp") == (
            number % steady.SELDOM == 0
        )
    forth, back = (steady.order_of(numbers, [], number) for number in (0, 1))
    assert forth == back[::-1]
    assert steady.order_of(["auto"], [], 5, 1) == ["auto"]


def test_the_figures_that_count_are_of_one_policy_everywhere():
    assert steady.judged(["equal", "auto", "dynamic"]) == "auto"
    assert steady.judged(["dynamic", "equal"]) == "dynamic" and steady.judged(["dynamic", "hybrid"]) == "hybrid"
    assert steady.judged(["proportional", "equal"]) == "equal"
    rows = [{"policy": policy} for policy in ("auto", "equal", "ddp")]
    report = {"real": {"rows": rows}, "simulated": None}
    assert bench_balance_report._policy({**report, "judged": "dynamic"}) == "dynamic"
    assert bench_balance_report._policy(report) == "auto", "of a report of before"
    options = bench_balance.arguments(["--policies", "dynamic,equal"])
    assert bench_balance.report_of(options, {}, None)["judged"] == "dynamic"


def test_a_split_tuned_by_hand_is_no_matter_of_luck():
    """The machine's speed differs from scan to scan, and it disturbs the best split in the first two."""
    ran = []

    def turn(_count, split):
        scan = ran.count(split)
        ran.append(split)
        disturbed = 1.1 if split == [40, 24] and scan < 2 else 1.0
        beside = split[1] - 24
        return Turn([(1.0 + max(0.03 * beside, -0.06 * beside)) * disturbed * (1.0 + scan % 2)])

    machine = SimpleNamespace(
        options=SimpleNamespace(quick=False, seconds=1.0),
        policies=["auto"],
        plain=SimpleNamespace(turn=turn),
        turn=lambda _mode, call, _seconds: call(1),
        agreed=lambda value: value,
    )
    assert steady.Steady(machine)._hand_tuned([40, 24]) == [40, 24]
    assert len(ran) == steady.SCANS * (5 + steady.AGAIN), "the best two again"
    assert ran.count([40, 24]) == 2 * steady.SCANS


def test_how_many_steps_a_moment_has_is_known_before_they_run(monkeypatch):
    """Not by what they took: it would end with a long one too often."""
    clock, took = [0.0], iter([5.0, 1.0, 1.0, 1.0, 1.0, 9.0])

    def step(*_):
        clock[0] += next(took)

    work = SimpleNamespace(build=lambda: (None, None), loader=lambda size: [(size, size)] * 3, step=step)
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(bench_modes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(bench_modes, "dist", SimpleNamespace(get_rank=lambda: 0, barrier=lambda **_: done))
    monkeypatch.setattr(bench_modes, "TorchGroup", lambda group: group)
    monkeypatch.setattr(bench_modes, "gather_objects", lambda group, own: [own])
    alone = bench_modes.Alone(work, None, read_environment({"EVENSTEP_KEEP_MEMORY": "0"}))
    assert alone.step_seconds([8], 4.0) == [pytest.approx((1.0 + 1.0 + 1.0 + 9.0) / 4)]
    assert next(took, None) is None, "two that do not count, and four"


def test_how_sure_an_interval_is_is_said():
    sure = {2: 0.5, 3: 0.75, 4: 0.875, 5: 0.9375, 6: 0.96875}
    for count, confidence in sure.items():
        assert bench_balance_report.confidence(count) == pytest.approx(confidence)
    assert all(0.95 <= bench_balance_report.confidence(count) <= 1 for count in range(6, 200))
    told = bench_balance_report.told_interval
    assert told([0.9, 0.95], 12) == "0.900 to 0.950" and told([0.9, 0.95], 4) == "0.900 to 0.950, 88 %"
    assert told([0.9, 0.9], 1) == ""


def test_a_turn_is_compared_with_the_one_beside_it():
    assert bench_balance_report.ratios([[2.0, 3.0], [4.0]], [[1.0, 1.0], [2.0]]) == [2.0, 3.0, 2.0]
    assert bench_balance_report.ratios([[2.0, 4.0], [4.0, 4.0]], [[1.0], []]) == [3.0]
    values = [float(one) for one in range(12)]
    assert bench_balance_report.interval(values) == [2.0, 9.0], "the third and the tenth of twelve: 96.1 %"
    assert bench_balance_report.interval(values[:5]) == [0.0, 4.0] and bench_balance_report.interval([7.0]) == [
        7.0,
        7.0,
    ]
    assert bench_balance_report.quartiles([3.0]) == [3.0, 3.0] and bench_balance_report.quartiles([0, 1, 2, 3, 4]) == [
        1,
        3,
    ]


def test_how_long_it_takes_is_told_before():
    policies = ["equal", "proportional", "dynamic", "hybrid", "auto"]
    length = Length(200.0, 64, 2.4, 4, 6, policies, True)
    even, uneven = (length.steady([1.0, part]) for part in (1.0, 1 / 16))
    assert 120 < even < uneven < 600, "seconds"
    assert length.steady([1.0, 1.0]) > Length(200.0, 64, 2.4, 2, 6, policies, True).steady([1.0, 1.0])
    assert length.course("drifting", 2, True) > length.course("drifting", 2, False) > 60
    assert courses.different(policies) == ["equal", "dynamic", "auto"] and courses.different(["hybrid"]) == ["hybrid"]
    assert courses.different(["dynamic", "hybrid"]) == ["dynamic", "hybrid"], "the last one's figures count"


def test_steps_until_a_split_is_good_again():
    assert bench_balance.steps_until_back([0.5, 0.5, 0.95, 0.8, 0.95, 0.91, 0.9]) == 4
    assert bench_balance.steps_until_back([0.95, 0.95, 0.95]) == 0
    assert bench_balance.steps_until_back([0.95, 0.95, 0.5] * 9) is None
    assert bench_balance_report.median_steps([3, None, 4]) == 4
    assert bench_balance_report.median_steps([3, None, None]) == float("inf")


def test_a_change_is_judged_by_the_split_and_not_by_late_steps():
    fast, slow = [(0.0, 1.0), (0.0, 1.0)], [(0.0, 1.0), (0.0, 4.0)]
    good = [[8, 2]] * 2
    shares = [[5, 5]] * bench_balance.BEFORE + [[5, 5]] * 3 + good + [[8, 2]] * 5 + [[8, 2]] * 2 + [[5, 5]] * 8
    turn = Turn([10.0] * len(shares), shares, [[5.0, 2.5]] * len(shares))
    row = bench_balance.change_row("auto", [turn], fast, slow, 10)
    assert (row["steps_after_slowing"], row["steps_after_recovery"]) == ([3], [2])
    assert row["changes_at"] == [bench_balance.BEFORE, bench_balance.BEFORE + 10]
    assert row["utilisation"] == pytest.approx([0.5, 0.25]) and row["imbalance"] == pytest.approx(1 / 3)
    assert row["of_bound"] == pytest.approx((25 * 5 + 10 * 8) / 350) and row["samples_per_second"] == pytest.approx(1.0)
    assert row["efficiency"][0] == pytest.approx(1.0) and row["efficiency"][bench_balance.BEFORE] == pytest.approx(0.4)


def test_aims_that_are_missed_are_told():
    row = {
        "case": "4:1",
        "policy": "auto",
        "of_bound": 0.94,
        "rates": [[9.0, 11.0], [12.0]],
        "samples_per_second": 11.0,
    }
    ddp = {**row, "policy": "ddp", "rates": [[4.0], [4.0]], "of_bound": 0.3}
    cost = {"deciding_seconds": 90e-6, "vote_seconds": 20e-6}
    real = {"rows": [row, ddp], "changes": [], "overhead": cost, "batch": 10}
    found = bench_balance_report.aims({"quick": False, "real": real, "simulated": None})
    assert [(round(aim["figure"], 2), aim["reached"]) for aim in found] == [(0.94, False), (2.75, False), (110.0, True)]
    real["overhead"] = {"deciding_seconds": 1e-3, "telling_seconds": 2e-3, "vote_seconds": 0}
    assert not bench_balance_report.aims({"quick": False, "real": real, "simulated": None})[-1]["reached"]


def test_no_part_of_a_step_is_told_where_none_was_measured():
    cost = {"deciding_seconds": 20e-6, "telling_seconds": 20e-6, "vote_seconds": 20e-6}
    real = {"rows": [], "changes": [], "overhead": cost, "batch": 10}
    (aim,) = bench_balance_report.aims({"quick": False, "real": real, "simulated": None})
    assert not aim["reached"] and aim["aim"] == "≤ 50 µs" and "shortest step" not in aim["what"]
    real["overhead"] = {"deciding_seconds": 9e-6, "vote_seconds": 0}
    (aim,) = bench_balance_report.aims({"quick": False, "real": real, "simulated": None})
    assert aim["reached"]


def test_noise_is_the_same_for_all_that_run_under_it():
    found = noise.factors(3, 1, 400)
    assert found == noise.factors(3, 1, 400) != noise.factors(3, 0, 400) and found != noise.factors(4, 1, 400)
    assert min(found) >= 1 - noise.NOISE and max(found) <= 1 + noise.NOISE
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.03)
    assert noise.tried([40, 24]) == [[40 - by, 24 + by] for by in range(-noise.ASIDE, noise.ASIDE + 1)]
    assert noise.tried([10, 0]) == [[10, 0], [9, 1], [8, 2]]
    assert noise.tried([6, 2, 0]) == [[6, 2, 0], [7, 1, 0], [5, 3, 0], [5, 2, 1]]


def test_what_noise_costs_is_beside_the_fixed_split_of_the_same_round():
    def turn(seconds, shares):
        return Turn([seconds] * 2, [shares] * 2, [[seconds, seconds / 2]] * 2)

    rounds = [
        {"fixed": turn(1.0, [6, 4]), "auto": turn(1.01, [5, 5])},
        {"fixed": turn(2.0, [6, 4]), "auto": turn(2.04, [6, 4])},
        {"fixed": turn(1.5, [6, 4]), "auto": turn(1.5, [6, 4])},
    ]
    row = noise.row_of("2:1, noise", "auto", rounds, [6, 4], 10)
    assert row["lost"] == pytest.approx(1 - 1 / 1.01) and row["of_bound"] == pytest.approx(1 / 1.01)
    assert row["utilisation"] == pytest.approx([1.0, 0.5]) and row["imbalance"] == pytest.approx(1 / 3)
    real = {"rows": [], "courses": [], "changes": [], "noise": [row], "batch": 10}
    real["overhead"] = {"deciding_seconds": 1e-6, "vote_seconds": 1e-6}
    (lost, _) = bench_balance_report.aims({"quick": False, "real": real, "simulated": None})
    assert lost["part"] == "real" and lost["figure"] == pytest.approx(0.990, abs=0.001) and lost["reached"]
    row["lost"] = 0.02
    assert not bench_balance_report.aims({"quick": False, "real": real, "simulated": None})[0]["reached"]


@pytest.mark.parametrize("model", SMALL)
def test_each_model_trains_on_its_data(model):
    work = Work(8, True, model)
    net, optimizer = work.build()
    before = [p.detach().clone() for p in net.parameters()]
    given, targets = next(iter(work.loader(8)))
    assert len(given) == 8 and (work.counts(targets) is not None) == (model == "bert")
    work.step(net, optimizer, given, targets)
    assert any(not one.equal(p) for one, p in zip(before, net.parameters()))
    about = work.about()
    assert about["scaled_down"] and 0 < about["parameters"] < about["published_parameters"]
    assert about["batch_norm"] == ("sync" if model in IMAGES else None)
    assert "scaled down" in bench_balance_report.title_of(about) and work.data_name.startswith("synthetic")


def test_sizes_are_chosen():
    assert Work(2, True, "gpt2", "layers=2,words=64").sizes == {
        "layers": 2,
        "width": 16,
        "heads": 2,
        "length": 16,
        "words": 64,
    }
    about = Work(2, False, "simplecnn").about()
    assert not about["scaled_down"] and about["parameters"] == about["published_parameters"] == 94762


def test_local_images_are_read(tmp_path):
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(b"".join(bytes([n] + [9 * n] * 3072) for n in range(10)))
    work = Work(4, True, "simplecnn", data=str(tmp_path))
    assert work.data_name == f"CIFAR-10 from {tmp_path.name}" and work.sizes["side"] == 32
    images, labels = next(iter(work.loader(16)))
    assert images.shape == (16, 3, 32, 32) and images[0, 0, 0, 0] == pytest.approx((9 * int(labels[0]) / 255 - 0.5) * 4)
    work.step(*work.build(), images, labels)
    hundred = tmp_path / "hundred"
    hundred.mkdir()
    (hundred / "train.bin").write_bytes(b"".join(bytes([0, 99] + [n] * 3072) for n in range(4)))
    assert Work(4, True, "resnet50", data=str(hundred)).sizes["classes"] == 100
    with pytest.raises(Exception, match="has no CIFAR-10"):
        Work(4, True, "simplecnn", data=str(tmp_path / "nothing"))


def test_the_end_frees_ddps_model_before_its_group():
    """Its parts hold one another, as DDP's do."""
    bench = object.__new__(bench_balance.Bench)
    bench.plain = object.__new__(bench_modes.Plain)
    bench.plain.itself = bench.plain  # type: ignore[attr-defined]
    lives = weakref.ref(bench.plain)
    bench.close()
    assert lives() is None
