"""`evenstep run`: wrong input is named with its fix, and nothing is started."""

from __future__ import annotations

import pathlib

import pytest
from run_jobs import Run


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
