"""`evenstep run`: wrong input is named with its fix, and nothing is started."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sysconfig
import tempfile

import pytest
from run_jobs import Run, write_checkpoint


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["missing.py"], 3, ["missing.py does not exist"]),
        (["-n", "0", "train.py"], 2, ["-n 0", "auto"]),
        (["-n", "two", "train.py"], 2, ["-n two"]),
        (["--polcy", "equal", "train.py"], 2, ["did you mean --policy"]),
        (["--policy", "hybird", "train.py"], 2, ["hybird", "did you mean hybrid"]),
        (["--devices", "cuda:77", "train.py"], 4, ["cuda:77"]),
        (["--profile", "train.py", "train.py"], 3, ["train.py", "JSON"]),
        (["--profile", "none.json", "train.py"], 3, ["none.json"]),
        (["--resume", "nowhere", "train.py"], 3, ["nowhere", "ckpt ls"]),
        (["--cpu-quota", "9:0.5", "train.py"], 2, ["9:0.5", "no such rank"]),
        (["--cpu-quota", "0:1.5", "train.py"], 2, ["0:1.5"]),
        (["--log-rank", "7", "train.py"], 2, ["--log-rank 7"]),
        (["--checkpoint-every", "soon", "train.py"], 2, ["soon", "30s"]),
        (["--python", "/no/python", "train.py"], 3, ["/no/python"]),
        (["--name", "a/b", "train.py"], 2, ["a/b"]),
        ([], 2, ["no script"]),
        ([""], 3, ["script"]),
        ([".."], 3, ["..", "__main__.py"]),
        (["-n", "-1", "train.py"], 2, ["-n -1"]),
        (["-n", "5000", "train.py"], 2, ["5000", "4096"]),
        (["-n"], 2, ["--ranks wants N|auto", "--help"]),
        (["--port", "train.py"], 2, ["--port wants a whole number", "--help"]),
        (["--port", "99999", "train.py"], 2, ["99999", "65535"]),
        (["--port", "8080", "train.py"], 2, ["--port 8080", "--no-monitor"]),
        (["--no-monitor", "--whole-history", "train.py"], 2, ["--whole-history", "--no-monitor"]),
        (["--no-monitor", "--timeline", "train.py"], 2, ["--timeline", "--no-monitor"]),
        (["--timeline-calls", "0", "train.py"], 2, ["--timeline-calls"]),
        (["--quiet=yes", "train.py"], 2, ["--quiet takes no value"]),
        (["--devices", "cpu:9999", "train.py"], 4, ["cpu:9999", "this host has"]),
        (["--devices", "tpu:0", "train.py"], 2, ["tpu:0", "cuda:K"]),
        (["--checkpoint-every", "0", "train.py"], 2, ["--checkpoint-every 0"]),
        (["--max-restarts", "-1", "train.py"], 2, ["-1 is out of range"]),
        (["--keep", "0", "train.py"], 2, ["--keep 0"]),
        (["--name", "..", "train.py"], 2, [".."]),
        (["--checkpoint-dir", "train.py", "train.py"], 5, ["--checkpoint-dir train.py is no folder"]),
        (["--runs-dir", "train.py", "train.py"], 5, ["folder train.py cannot be made", "--runs-dir"]),
        (["--resume", ".", "train.py"], 3, ["--resume", "manifest.json"]),
    ],
)
def test_wrong_input_is_named_and_nothing_is_made(
    run: Run, script, tmp_path: pathlib.Path, words: list[str], code: int, told: list[str]
) -> None:
    script("print('ran')")
    result = run(*words)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("evenstep: ") and "  fix: " in result.stderr
    for text in told:
        assert text in result.stderr
    assert "ran" not in result.stdout and not (tmp_path / "runs").exists()


def damage(folder: pathlib.Path) -> None:
    """Alters one byte of a tensor; the size stays."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_to_resume_from_is_6(run: Run, script, tmp_path: pathlib.Path) -> None:
    name = script("import os; print('from', os.environ.get('EVENSTEP_RESUME'))")
    for step in (1, 2):
        write_checkpoint(tmp_path / f"runs/a/checkpoints/step-{step}", tensor=True)
    newest = tmp_path / "runs/a/checkpoints/step-2"
    damage(newest)
    told = "step-2 is damaged: chunk 0 of model.safetensors (bytes 0"
    refused = run("-n", "1", "--name", "b", "--resume", str(newest), name)
    assert refused.returncode == 6 and told in refused.stderr and "  fix: " in refused.stderr
    assert "from" not in refused.stdout and not (tmp_path / "runs/b").exists()
    older = run("-n", "1", "--name", "a", "--resume", "auto", name)
    assert older.returncode == 0 and "step-1\n" in older.stdout
    assert f"passed over: checkpoint {newest}" in older.stderr and told in older.stderr
    damage(tmp_path / "runs/a/checkpoints/step-1")
    none = run("-n", "1", "--name", "a", "--resume", "auto", name)
    assert none.returncode == 6 and told in none.stderr and "  fix: " in none.stderr and "from" not in none.stdout


def test_a_profile_with_a_negative_speed_is_refused(run: Run, script, tmp_path: pathlib.Path) -> None:
    profile = {"format": "evenstep-profile-1", "devices": [{"name": "cpu:0", "cpus": [0], "relative_score": -1}]}
    (tmp_path / "gpu_profiles.json").write_text(json.dumps(profile))
    result = run("-n", "1", script("print('ran')"))
    assert result.returncode == 3, result.stderr
    assert "gpu_profiles.json: the relative_score of cpu:0 is -1" in result.stderr and "  fix: " in result.stderr
    assert "ran" not in result.stdout and not (tmp_path / "runs").exists()


def test_a_profile_of_another_machine_is_named(run: Run, script, tmp_path: pathlib.Path) -> None:
    device = {"name": "cpu", "cpus": [0], "relative_score": 1, "model": "a processor of another machine"}
    profile = tmp_path / "old.json"
    profile.write_text(json.dumps({"format": "evenstep-profile-1", "devices": [{**device, "name": "cpu:0"}, device]}))
    result = run("-n", "1", "--profile", "old.json", script("print('ran')"))
    assert result.returncode == 0 and "ran" in result.stdout
    assert (
        "old.json has no score that holds for cpu" in result.stderr and "`evenstep profile` measures" in result.stderr
    )


@pytest.mark.parametrize("policy", ["equal", "dynamic"])
def test_a_profile_is_not_complained_of_where_none_counts(
    run: Run, script, tmp_path: pathlib.Path, policy: str
) -> None:
    device = {"name": "cpu", "cpus": [0], "relative_score": 1, "model": "a processor of another machine"}
    content = {"format": "evenstep-profile-1", "devices": [{**device, "name": "cpu:0"}, device]}
    (tmp_path / "gpu_profiles.json").write_text(json.dumps(content))
    result = run("-n", "1", "--policy", policy, script("print('ran')"))
    assert result.returncode == 0 and "ran" in result.stdout
    assert "has no score" not in result.stderr


PROPORTIONAL = (
    "--policy proportional shares by a profile, and {}: shares are equal, and stay so; `evenstep profile` makes one"
)


@pytest.mark.parametrize(
    ("words", "scores", "said"),
    [
        (["-n", "2", "--policy", "proportional"], None, "there is none"),
        (["-n", "2", "--policy", "proportional"], ["another processor"], "none tells of all devices"),
        (["-n", "2", "--policy", "proportional"], [None], ""),
        (["-n", "2", "--policy", "proportional", "--cpu-quota", "1:0.5"], None, ""),
        (["-n", "2", "--policy", "proportional", "--quiet"], None, ""),
        (["-n", "1", "--policy", "proportional"], None, ""),
        (["-n", "2", "--policy", "hybrid"], None, ""),
        (["-n", "2"], None, ""),
    ],
)
def test_a_policy_that_only_knows_a_profile_is_told_to_be_equal_without_one(
    run: Run, script, tmp_path: pathlib.Path, words: list[str], scores: list[str | None] | None, said: str
) -> None:
    if scores is not None:
        model = {"model": scores[0]} if scores[0] else {}
        cpus = sorted(os.sched_getaffinity(0))
        devices = [{"name": f"cpu:{n}", "cpus": [cpu], "relative_score": 1, **model} for n, cpu in enumerate(cpus)]
        (tmp_path / "gpu_profiles.json").write_text(json.dumps({"format": "evenstep-profile-1", "devices": devices}))
    result = run(*words, "--no-pin", script("import os; print('speeds', os.environ.get('EVENSTEP_SPEEDS'))"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("shares are equal, and stay so") == (1 if said else 0), result.stderr
    assert not said or PROPORTIONAL.format(said) in result.stderr
    assert not said or "speeds None" in result.stdout


def test_a_folder_with_a_main_is_a_script(run: Run, tmp_path: pathlib.Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__main__.py").write_text("print('main ran')")
    assert "main ran" in run("-n", "1", "training").stdout


def copied(program: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """A copy of the program, with the libraries that an installed one has beside it."""
    if program.read_bytes()[:2] != b"#!":
        return pathlib.Path(shutil.copy(program, place / "evenstep"))
    packages = pathlib.Path(sysconfig.get_path("platlib"))
    for folder in ("evenstep.scripts", "evenstep.libs"):
        shutil.copytree(packages / folder, place / folder)
    return place / "evenstep.scripts" / "evenstep"


@pytest.mark.skipif(os.getuid() != 0, reason="another user's folder is needed, so root")
def test_a_runs_folder_that_cannot_be_written_to_is_named(
    program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    # as nobody, in a folder of root's; the program's copy lies where nobody may run it
    place = pathlib.Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        mine = copied(program, place)
        (place / "train.py").write_text("print('ran')")
        result = subprocess.run(
            [str(mine), "run", "--no-monitor", "--python", "/bin/true", "train.py"],
            cwd=place,
            env=environment,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert result.returncode == 5, result.stderr
        assert "runs" in result.stderr and "Permission denied" in result.stderr and "  fix: --runs-dir" in result.stderr
    finally:
        shutil.rmtree(place)
