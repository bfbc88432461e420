"""`evenstep plan`: the job ends after its measuring steps, the prediction is shown and kept, nothing else changes."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

# One rank that measures without a model: what the command does with a plan is the subject here.
MEASURE = """
    import os
    from evenstep.plan import Plan
    assert os.environ["WORLD_SIZE"] == "1"
    plan = Plan.from_environment(rank=0, world_size=1, batch=32, device=os.environ["EVENSTEP_DEVICE"])
    print("SOMETHING THE SCRIPT SAYS")
    while True:
        (samples,) = plan.shares(plan_step := len(plan._timings))
        plan.observe([(samples, 0.001 + 0.0005 * samples)], 0.018)
        if plan.done:
            plan.finish(lambda data: [data])
"""


@pytest.fixture
def plan(program, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENSTEP_")}

    def call(script, *words, arguments=()):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        return subprocess.run(
            [str(program), "plan", "-n", "1", *words, "train.py", *arguments],
            cwd=tmp_path,
            env={**environment, "EVENSTEP_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )

    return call


def test_table_and_file(plan, tmp_path):
    done = plan(MEASURE)
    assert done.returncode == 0, done.stderr
    assert "SHARE" in done.stdout and "samples/s" in done.stdout and "SOMETHING" not in done.stdout
    assert "equal split is as good" in done.stdout
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["format"] == "evenstep-plan-1" and written["ranks"][0]["share"] == 32
    assert [path.name for path in tmp_path.glob("plan.json*")] == ["plan.json"]


def test_json_and_output(plan, tmp_path):
    done = plan(MEASURE, "--json", "-o", "other.json", "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "other.json").read_text())
    assert json.loads(done.stdout)["steps"] == 4


def test_a_script_that_ends_early_keeps_the_old_plan(plan, tmp_path):
    (tmp_path / "plan.json").write_text("OLD")
    done = plan("print('nothing to train')")
    assert done.returncode == 3
    assert "ended before its 8 measuring steps" in done.stderr and "fix:" in done.stderr
    assert (tmp_path / "plan.json").read_text() == "OLD"


def test_a_failing_script_fails_the_plan(plan, tmp_path):
    done = plan("raise SystemExit(7)")
    assert done.returncode == 7
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_that_is_damaged_is_refused(plan):
    done = plan("import os, pathlib; pathlib.Path(os.environ['EVENSTEP_PLAN']).write_text('{\"format\": 1}')")
    assert done.returncode == 3
    assert "is not a plan" in done.stderr


def test_wrong_options(plan):
    assert plan(MEASURE, "--steps", "2").returncode == 2
    done = plan(MEASURE, "--stepps", "8")
    assert done.returncode == 2 and "--steps" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["--max-restarts", "2"], ["--port", "8080"], ["--no-monitor"], ["--whole-history"], ["--timeline"], ["-q"]],
)
def test_what_a_plan_decides_itself_is_no_option(plan, words):
    done = plan(MEASURE, *words)
    assert done.returncode == 2 and f"unknown option {words[0]}" in done.stderr


# The two lines of a user's script; the second rank does four times the work on each sample.
TRAIN = """
    import torch
    from torch import nn
    import evenstep as es

    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 256)
        def forward(self, x):
            for _ in range(24 if es.rank() == 0 else 96):
                x = torch.tanh(self.layer(x))
            return x

    torch.manual_seed(0)
    model = Uneven()
    data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    raise SystemExit("the plan did not end the job")
"""


def test_a_prepared_training_is_planned(plan, tmp_path):
    done = plan(TRAIN, "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    ranks = written["ranks"]
    assert written["batch"] == 64 and [rank["rank"] for rank in ranks] == [0, 1]
    assert sum(rank["share"] for rank in ranks) == 64
    assert [rank["share_equal"] for rank in ranks] == [32, 32]
    for rank in ranks:
        assert len(rank["samples"]) >= 2 and len(rank["seconds"]) == len(rank["samples"])
        assert rank["peak_memory_bytes"] > 1 << 20
    predicted = written["predicted"]
    assert 0 < predicted["balanced"]["step_seconds"] <= predicted["equal"]["step_seconds"]
    assert predicted["overhead_seconds"] >= 0


def test_ranks_that_are_better_left_out(plan):
    """An invented device that needs longer for one sample than the other for all."""
    script = """
    import json, os
    ranks = [
        dict(device="cuda:0", share=32, share_equal=16, predicted_seconds=0.012, predicted_seconds_equal=0.006),
        dict(device="cpu:0", share=0, share_equal=16, predicted_seconds=0.001, predicted_seconds_equal=0.6),
    ]
    ranks[1]["predicted_seconds_of_one"] = 0.041
    pace = lambda seconds: dict(step_seconds=seconds, samples_per_second=32 / seconds)
    predicted = dict(balanced=pace(0.012), equal=pace(0.6), bound_samples_per_second=3000.0)
    with open(os.environ["EVENSTEP_PLAN"], "w") as file:
        json.dump(dict(format="evenstep-plan-1", batch=32, steps=8, ranks=ranks, predicted=predicted), file)
    """
    done = plan(script)
    assert done.returncode == 0, done.stderr
    said = "rank 1 (cpu:0) gets no samples: one would take 41 ms where the others need 12 for all; --devices cuda:0 leaves it out"
    assert said in done.stdout.splitlines()


FASTER_WITHOUT = """
    import json, os, sys
    devices, left = sys.argv[1].split(","), json.loads(sys.argv[2])
    rank = dict(share_equal=8, predicted_seconds_equal=0.006)
    ranks = [dict(rank, device=device, share=16, predicted_seconds=0.012) for device in devices]
    if "--zero" in sys.argv:
        ranks[-1].update(share=0, predicted_seconds_of_one=0.041)
    pace = lambda seconds: dict(step_seconds=seconds, samples_per_second=32 / seconds)
    predicted = dict(balanced=pace(0.0143), equal=pace(0.6), bound_samples_per_second=3000.0)
    if "--zero" in sys.argv:
        predicted["waits_seconds"] = 0.0021
    predicted["without"] = dict(ranks=left, **pace(0.0119))
    with open(os.environ["EVENSTEP_PLAN"], "w") as file:
        json.dump(dict(format="evenstep-plan-1", batch=32, steps=8, ranks=ranks, predicted=predicted), file)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["cuda:0,cpu:0", "[1]"],
            "Without rank 1 (cpu:0) a step takes 11.9 ms instead of 14.3, for one rank alone exchanges nothing; "
            "--devices cuda:0 starts it so",
        ),
        (
            ["cpu:0,cuda:0,cpu:1,cuda:1", "[0, 2]"],
            "Without ranks 0 (cpu:0), 2 (cpu:1) a step takes 11.9 ms instead of 14.3; --devices cuda:0,cuda:1 starts it so",
        ),
        (
            ["cpu:0,cpu:0,cpu:1", "[2]"],
            "Without rank 2 (cpu:1) a step takes 11.9 ms instead of 14.3; -n 2 starts so many",
        ),
        (
            ["cpu:0,cpu:1,cpu:0,cpu:1", "[2, 3]"],
            "Without ranks 2 (cpu:0), 3 (cpu:1) a step takes 11.9 ms instead of 14.3; -n 2 starts so many",
        ),
        # -n would start others
        (["cpu:0,cpu:0,cpu:1", "[0]"], "Without rank 0 (cpu:0) a step takes 11.9 ms instead of 14.3"),
        (
            ["cpu:0,cpu:0,cpu:1,cpu:1", "[1, 3]"],
            "Without ranks 1 (cpu:0), 3 (cpu:1) a step takes 11.9 ms instead of 14.3",
        ),
    ],
)
def test_ranks_without_which_steps_are_shorter(plan, words, said):
    done = plan(FASTER_WITHOUT, arguments=words)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout.splitlines()


def test_one_way_is_told_where_a_rank_has_no_samples_and_steps_are_shorter_without_another_too(plan):
    done = plan(FASTER_WITHOUT, arguments=["cuda:0,cpu:0,cpu:1", "[1, 2]", "--zero"])
    assert done.returncode == 0, done.stderr
    assert "rank 2 (cpu:1) gets no samples: one would take 41 ms where the others need 12 for all\n" in done.stdout
    assert done.stdout.count("--devices") == 1 and "--devices cuda:0 starts it so" in done.stdout
    assert "Ranks wait for one another within steps, as BatchNorm's do: 2.1 ms of a balanced one." in done.stdout


def test_a_run_with_the_plan_leaves_out_whom_that_leaves_out(program, environment, tmp_path):
    """Of the devices that it would get by itself: here a rank on each of two invented NUMA nodes."""
    rank = {"share": 16, "share_equal": 16, "predicted_seconds": 0.012, "predicted_seconds_equal": 0.006}
    predicted = {
        "balanced": {"step_seconds": 0.0143},
        "equal": {"step_seconds": 0.6},
        "bound_samples_per_second": 3000.0,
    }
    predicted["without"] = {"ranks": [0], "step_seconds": 0.0119}
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'], os.environ['EVENSTEP_DEVICE'])")

    def run(*words, devices=("numa:0", "numa:1")):
        plan = {"format": "evenstep-plan-1", "batch": 32, "steps": 8, "predicted": predicted}
        (tmp_path / "plan.json").write_text(json.dumps(plan | {"ranks": [{**rank, "device": one} for one in devices]}))
        done = subprocess.run(
            [str(program), "run", "--no-pin", "--no-monitor", *words, "train.py"],
            cwd=tmp_path,
            env=environment | {"EVENSTEP_USE_PLAN": "plan.json", "HWLOC_SYNTHETIC": "numa:2 core:1 pu:1"},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
        return done

    told = "without rank 0 (numa:0) a step takes 11.9 ms instead of 14.3, by plan.json (EVENSTEP_USE_PLAN): it runs on numa:1 alone"
    found = run()
    assert "1 numa:1" in found.stdout and told + "; -n auto starts it on all\n" in found.stderr
    assert "1 numa:1" in (found := run("-q")).stdout and told not in found.stderr
    for words in (["-n", "auto"], ["--devices", "numa:0,numa:1"], ["--cpu-quota", "1:0.9"]):
        assert "2 numa:0" in (found := run(*words)).stdout and told not in found.stderr, words
    assert "2 numa:0" in (found := run(devices=("numa:0", "cuda:0"))).stdout and told not in found.stderr  # of others


@pytest.mark.parametrize("left", ["[2]", "[-1]", "[0, 1]", "[]", '["1"]', "7"])
def test_a_plan_that_leaves_out_who_is_not_there_is_refused(plan, left):
    done = plan(FASTER_WITHOUT, arguments=["cuda:0,cpu:0", left])
    assert done.returncode == 3
    assert "what the plan says of ranks to leave out is not complete" in done.stderr


def test_a_plan_tells_what_one_sample_would_take(tmp_path):
    from evenstep.plan import Plan

    plan = Plan(rank=0, world_size=2, batch=32, device="cpu:0", path=tmp_path / "plan.json")
    while not plan.done:
        shares = plan.shares(len(plan._timings))
        plan.observe([(shares[0], 0.0004 * shares[0]), (shares[1], 0.04 * max(1, shares[1]))])
    fast, slow = plan.result([{"device": "cpu:0", "memory": [], "first_memory": 0}] * 2)["ranks"]
    assert (fast["share"], slow["share"]) == (32, 0) and "predicted_seconds_of_one" not in fast
    assert slow["predicted_seconds_of_one"] == pytest.approx(0.04, rel=0.2)


# The optimizer's step over many parameters takes a rank at a twentieth of a core longer than all samples take the other one.
MANY_PARAMETERS = """
    import torch
    from torch import nn
    import evenstep as es

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 1))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 2048))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.more
def test_a_job_with_a_rank_that_holds_it_up_says_what_its_plan_has(plan, tmp_path):
    """Whether a step is shorter without that rank is test_plan's: steps of a busy machine may scatter by more than that."""
    done = plan(MANY_PARAMETERS, "-n", "2", "--cpu-quota", "1:0.05", "--steps", "6")
    assert done.returncode == 0, done.stderr
    predicted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    without = predicted.get("without")
    assert ("\nWithout rank " in done.stdout) == (without is not None)
    if without is not None:
        assert without["step_seconds"] < predicted["balanced"]["step_seconds"]
        assert f"\nWithout rank {without['ranks'][0]} (cpu:" in done.stdout
        assert ", for one rank alone exchanges nothing" in done.stdout
