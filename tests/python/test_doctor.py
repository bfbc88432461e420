"""`evenstep doctor`: what it finds, what it says is missing, and its exit code."""

from __future__ import annotations

import json
import pathlib
import stat
import subprocess
import sys
from typing import Any

import pytest


def doctor(program: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, "doctor", *arguments], capture_output=True, text=True, timeout=300, check=False)


def checks(program: pathlib.Path, *arguments: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(doctor(program, "--json", *arguments).stdout)["checks"]}


def fake_python(folder: pathlib.Path, answer: str, code: int = 0) -> str:
    """An interpreter that answers the probe with these lines."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\nexit {code}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_this_interpreter_can_train(program: pathlib.Path) -> None:
    answer = doctor(program, "--python", sys.executable)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "Training can work on this host." in answer.stdout
    assert "\x1b" not in answer.stdout
    found = checks(program, "--python", sys.executable)
    for name in ("python", "torch", "evenstep package", "CPU", "shared memory"):
        assert found[name]["state"] == "ok"
        assert found[name]["cost"] is None
    assert "ptrace" not in json.dumps(found)  # nobody is told to weaken a host for what nothing uses
    for check in found.values():  # whoever is told that something lacks is told what that costs
        assert (check["state"] == "ok") == (check["cost"] is None), check


def test_a_python_without_torch(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    answer = {"python": "3.11.2", "minor": 11, "executable": "/p", "torch_error": "No module named 'torch'"}
    python = fake_python(tmp_path, json.dumps(answer | {"evenstep_error": "No module named 'evenstep'"}))
    result = doctor(program, "--python", python)
    assert result.returncode == 8
    assert "2 parts are missing" in result.stdout
    assert "pip install 'torch>=2.6'" in result.stdout


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"torch": "2.5.1"}, "torch", "2.5.1"),
        ({"torch": "1.13.0"}, "torch", "1.13.0"),
        ({"evenstep": "0.0.9"}, "evenstep package", "0.0.9"),
        ({"python": "3.8.1", "minor": 8}, "python", "3.8.1"),
    ],
)
def test_versions_that_do_not_fit(
    program: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, Any], name: str, words: str
) -> None:
    import evenstep

    good = {
        "python": "3.11.2",
        "minor": 11,
        "executable": "/p",
        "torch": "2.6.0",
        "cuda": "12.4",
        "nccl": "2.21.5",
        "evenstep": evenstep.__version__,
        "folder": "/f",
    }
    noise = "a library greets\n"
    found = checks(program, "--python", fake_python(tmp_path, noise + json.dumps(good)))
    assert found[name]["state"] == "ok"
    assert found["NCCL"]["found"].startswith("2.21.5")
    found = checks(program, "--python", fake_python(tmp_path, noise + json.dumps(good | change)))
    assert found[name]["state"] == "missing"
    assert words in found[name]["found"]


def test_an_interpreter_that_is_none(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = checks(program, "--python", str(tmp_path / "absent"))
    assert found["python"]["state"] == "missing"
    found = checks(program, "--python", fake_python(tmp_path, "no answer", 1))
    assert found["python"]["state"] == "missing"
    assert "not valid JSON" in found["python"]["found"]
    assert doctor(program, "--python", str(tmp_path / "absent")).returncode == 8


def test_wrong_words(program: pathlib.Path) -> None:
    assert doctor(program, "--helm").returncode == 2
    assert doctor(program, "all").returncode == 2
    assert doctor(program, "--help").returncode == 0
