"""`evenstep run`: wrong input is named with its fix, and nothing is started."""

from __future__ import annotations

import pathlib

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
