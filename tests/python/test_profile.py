"""`evenstep profile`: measures for real, writes what it measured, and says what it could not measure."""

from __future__ import annotations

import json
import math
import os
import pathlib
import stat
import subprocess
import sys
from typing import Any


def profile(program: pathlib.Path, folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Measures one core, for as short as it can."""
    core = [] if "--devices" in arguments else ["--devices", "cpu:0"]
    return subprocess.run(
        [program, "profile", "--quick", *core, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def fake_python(folder: pathlib.Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def check_figures(content: dict[str, Any], torch: bool) -> None:
    assert content["format"] == "evenstep-profile-1"
    (device,) = content["devices"]
    assert device["name"] == "cpu:0"
    assert device["relative_score"] == 1
    assert isinstance(device["disturbed"], bool)
    assert device["matmul_fp32_gflops"] > 0
    assert (device["matmul_bf16_gflops"] is not None) == torch
    assert device["memory_bandwidth_gb_per_second"] > 0
    assert device["memory_read_gb_per_second"] > 0
    assert content["disk"]["write_mb_per_second"] > 0


def test_measures_with_torch(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = profile(program, tmp_path, "--python", sys.executable)
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "gpu_profiles.json").read_text())
    check_figures(content, torch=True)
    assert content["measured_with"].startswith("torch ")
    assert "written   gpu_profiles.json" in result.stdout
    assert result.stderr == ""  # progress is for terminals
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpu_profiles.json"]  # no scratch file stays


def test_without_torch_c_measures(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    python = fake_python(tmp_path, "echo 'No module named torch' >&2; exit 1")
    result = profile(program, tmp_path, "--python", python, "--json", "-o", "p.json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    check_figures(content, torch=False)
    assert content["measured_with"] == "C"
    assert "No module named torch" in content["note"]
    assert json.loads((tmp_path / "p.json").read_text()) == content


def test_a_worker_that_dies_between_devices(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Scores must be of one measure: what torch said is measured again in C."""
    answer = json.dumps({"name": "cpu:0", "matmul_fp32_gflops": 1e9, "matmul_bf16_gflops": 1e9})
    python = fake_python(
        tmp_path,
        f"""echo '{{"torch": "2.6.0", "cuda": false}}'; read x <&"$EVENSTEP_REQUESTS_FD"; echo '{answer}'; exit 9""",
    )
    cores = min(2, len(os.sched_getaffinity(0)))
    devices = ",".join(f"cpu:{core}" for core in range(cores))
    result = profile(program, tmp_path, "--python", python, "--json", "--devices", devices)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    if cores == 2:
        assert content["measured_with"] == "C"
        assert all(device["matmul_fp32_gflops"] < 1e6 for device in content["devices"])


def test_a_quota_shows_in_cores(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = profile(program, tmp_path, "--python", fake_python(tmp_path, "exit 1"), "--json")
    content = json.loads(result.stdout)
    quota = content["cpu_quota_cores"]
    assert content["devices"][0]["cores"] == (1 if quota is None else min(1, quota))


def test_bad_words_measure_nothing(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for arguments, code, words in (
        (("--devices", "cuda:77"), 4, "cuda:77 does not exist"),
        (("--devices", "cpu:0,cpu:0"), 2, "named twice"),
        (("-o", "absent/p.json"), 3, "absent"),
        (("--python", str(tmp_path / "absent")), 3, "no executable file"),
        (("--quik",), 2, "did you mean --quick"),
        (("cpu:0",), 2, "one word too many"),
    ):
        result = profile(program, tmp_path, *arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert words in result.stderr
        assert "fix:" in result.stderr
        assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_keeps_the_old_one(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "p.json").mkdir()
    result = profile(program, tmp_path, "--python", fake_python(tmp_path, "exit 1"), "-o", "p.json")
    assert result.returncode in (3, 5)
    assert "p.json" in result.stderr
    assert (tmp_path / "p.json").is_dir()
    assert not (tmp_path / "p.json.tmp").exists()


def test_the_worker_answers_errors_and_goes_on() -> None:
    read, write = os.pipe()
    requests = [
        {"name": "cuda:0", "kind": "cuda", "cpus": [min(os.sched_getaffinity(0))], "index": 99, "seconds": 0.01},
        {
            "name": "cpu:0",
            "kind": "cpu",
            "cpus": [min(os.sched_getaffinity(0))],
            "index": -1,
            "threads": 1,
            "seconds": 0.05,
        },
    ]
    os.write(write, b"".join(json.dumps(request).encode() + b"\n" for request in requests) + b"no JSON\n")
    os.close(write)
    result = subprocess.run(
        [sys.executable, "-m", "evenstep.profile_worker"],
        env={**os.environ, "EVENSTEP_REQUESTS_FD": str(read)},
        pass_fds=[read],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    os.close(read)
    first, broken, good, nonsense = (json.loads(line) for line in result.stdout.splitlines())
    assert "torch" in first
    assert "error" in broken
    assert good["name"] == "cpu:0"
    assert math.isfinite(good["matmul_fp32_gflops"])
    assert good["matmul_fp32_gflops"] > 0
    assert "error" in nonsense
