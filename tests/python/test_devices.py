"""`evenstep devices` on this host, on invented ones, and with invented GPUs."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

TWO_SOCKETS = "pack:2 [numa(memory=8GiB)] l3:1(size=16MiB) core:4 pu:2"


def devices(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, "devices", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def facts(program: Path, **environment: str) -> dict:
    answer = devices(program, "--json", **environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_this_host(program: Path) -> None:
    host = facts(program)
    assert host["format"] == "evenstep-devices-1"
    cores = [device for device in host["devices"] if device["name"].startswith("cpu:")]
    assert len(cores) == host["cpu"]["cores"]
    assert {cpu for core in cores for cpu in core["cpus"]} == os.sched_getaffinity(0)
    assert 0 < host["memory"]["available_bytes"] <= host["memory"]["total_bytes"]
    assert "lo" in [interface["name"] for interface in host["network"]]
    table = devices(program)
    assert table.returncode == 0
    assert "cpu:0" in table.stdout
    assert "\x1b" not in table.stdout


def test_affinity_hides_cores(program: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    answer = subprocess.run(
        ["taskset", "-c", str(cpu), program, "devices", "--json"],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    host = json.loads(answer.stdout)
    assert [device["cpus"] for device in host["devices"] if device["name"].startswith("cpu:")] == [[cpu]]


def test_two_sockets_with_hardware_threads(program: Path) -> None:
    host = facts(program, HWLOC_SYNTHETIC=TWO_SOCKETS)
    assert (host["cpu"]["sockets"], host["cpu"]["cores"], host["cpu"]["hardware_threads"]) == (2, 8, 16)
    assert host["cpu"]["l3_bytes"] == 16 << 20
    by_name = {device["name"]: device for device in host["devices"]}
    assert by_name["cpu:7"]["cpus"] == [14, 15]
    assert by_name["numa:1"]["numa_node"] == 1


def test_a_large_machine_is_cut_short_unless_asked(program: Path) -> None:
    large = {"HWLOC_SYNTHETIC": "pack:2 core:16 pu:2"}
    assert "cpu:20" not in devices(program, **large).stdout
    assert "23 more cores" in devices(program, **large).stdout
    assert "cpu:20" in devices(program, "--all", **large).stdout


def test_gpus_of_a_made_up_driver(program: Path) -> None:
    fake = program.parent.parent / "tests/device/fake_gpu"
    if not fake.exists():
        pytest.skip("an installed program has no made-up driver beside it; tests/device tests the same in C")
    gpus = {"LD_LIBRARY_PATH": str(fake), "EVENSTEP_FAKE_GPUS": "2", "CUDA_VISIBLE_DEVICES": "1,0"}
    host = facts(program, **gpus)
    assert host["nvidia"]["driver"] == "570.86.10"
    first, second = (device for device in host["devices"] if device["kind"] == "cuda")
    assert (first["name"], first["model"], first["temperature_celsius"]) == ("cuda:0", "Fake GPU 1", 41)
    assert first["power_watts"] is None
    assert second["power_watts"] == 98.5
    assert "98 W of 700 W" in devices(program, **gpus).stdout


def test_wrong_words(program: Path) -> None:
    answer = devices(program, "--jsn")
    assert answer.returncode == 2
    assert "did you mean --json" in answer.stderr
    answer = devices(program, "cpu:0")
    assert answer.returncode == 2
    assert "one word too many" in answer.stderr
    assert devices(program, "--help").returncode == 0


def test_output_that_is_not_taken_is_told(program: Path) -> None:
    for word in ("devices", "version", "--version", "--help"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([program, word], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 5 and "standard output has not taken all that was printed" in done.stderr, word
    closed = subprocess.run(["sh", "-c", 'exec "$0" devices >&-', program], stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 0 and closed.stderr == ""
    pipe = [os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"))]
    ignoring = ["sh", "-c", 'trap "" PIPE; exec "$0" devices', program]
    for gone, end in (pipe, socket.socketpair()):
        gone.close()  # its reader went away; Python's children begin with SIGPIPE as it was by default
        left = subprocess.run(ignoring, stdout=end.fileno(), stderr=subprocess.PIPE)
        end.close()
        assert left.returncode == 0 and left.stderr == b""
