"""`evenstep bench comm`: measures what it was asked to, beside its peers, and says what it could not find."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

ROWS = ["all_reduce", "broadcast"]


@pytest.fixture
def mpirun(tmp_path: pathlib.Path) -> pathlib.Path:
    """A made-up MPI first on PATH, which prints what a real one's ranks would, and what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "mpirun"
    rows = [{"collective": name, "bytes": 1024, "seconds": {"mpi": 0.000123}} for name in ROWS]
    answer = json.dumps({"library": "Made-up MPI 1.0", "rows": rows})
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" > {tmp_path}/asked\necho hello\necho '{answer}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_measures_beside_its_peers(program, environment, tmp_path, mpirun):
    words = ["bench", "comm", "--sizes", "1K", "--collectives", ",".join(ROWS), "--rounds", "1", "-o", "figures.json"]
    done = subprocess.run(
        [program, *words],
        cwd=tmp_path,
        env={**environment, "PATH": f"{mpirun}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["format"] == "evenstep-bench-comm-1" and figures["ranks"] == 2
    assert [(row["collective"], row["bytes"]) for row in figures["rows"]] == [(name, 1024) for name in ROWS]
    for row in figures["rows"]:
        ways = {"arena", "plain", "gloo"} | ({"memory"} if row["collective"] == "all_reduce" else set())
        assert set(row["seconds"]) == ways and all(took > 0 for took in row["seconds"].values())
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(tuple(ROWS))] == ROWS
    assert "123.0" in done.stdout and "Made-up MPI 1.0" in done.stdout
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["-n", "2"]
    assert asked[-6:] == ["--sizes", "1024", "--collectives", ",".join(ROWS), "--rounds", "1"]
    assert not list(tmp_path.glob("runs/bench-comm*"))


def made_up_mpi(folder: pathlib.Path, answer: dict) -> str:
    """An interpreter's path, beside which an mpirun prints this."""
    folder.mkdir()
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder / "python")


def test_the_fastest_of_several_mpis_is_shown_for_each_exchange(program, environment, tmp_path):
    def of(library, *seconds):
        rows = [{"collective": name, "bytes": 1024, "seconds": {"mpi": took}} for name, took in zip(ROWS, seconds)]
        return made_up_mpi(tmp_path / library, {"library": library, "rows": rows})

    pythons = [of("First", 0.0005, 0.0001), made_up_mpi(tmp_path / "none", {"missing": "no mpi4py"})]
    pythons += [of("Second", 0.0002, 0.0007), of("Third", 0.0009, 0.0009)]
    words = ["bench", "comm", "--sizes", "1K", "--collectives", ",".join(ROWS), "--rounds", "1", "-o", "figures.json"]
    done = subprocess.run(
        [program, *words, "--mpi-python", ",".join(pythons)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith(tuple(ROWS))}
    assert shown["all_reduce"][-1] == "Second" and "200.0" in shown["all_reduce"]
    assert shown["broadcast"][-1] == "First" and "100.0" in shown["broadcast"]
    assert "First; Second; Third" in done.stdout
    assert f"MPI not measured: {pythons[1]}: no mpi4py\n" in done.stdout
    mpi = json.loads((tmp_path / "figures.json").read_text())["mpi"]
    assert [(row["library"], row["seconds"]["mpi"]) for row in mpi["rows"]] == [("Second", 0.0002), ("First", 0.0001)]
    assert [one["library"] for one in mpi["each"]] == ["First", "Second", "Third"]
    assert [row["seconds"]["mpi"] for row in mpi["each"][0]["rows"]] == [0.0005, 0.0001]


def test_an_mpi_is_called_by_its_version():
    from evenstep.bench_comm import library_name

    assert (
        library_name("Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11\0")
        == "Open MPI v5.0.11"
    )
    assert library_name("MPICH Version:      5.0.2\nMPICH Release date: now\nMPICH CC: gcc -O2, -g\n") == "MPICH 5.0.2"


@pytest.fixture
def comm_bench(bench_module):
    return bench_module("comm_bench")


def test_the_bench_compares_with_the_fastest_mpi_of_each_size(comm_bench, monkeypatch, capsys):
    row = {"bytes": 1024, "arena_seconds": 1e-6, "plain_seconds": 2e-6, "gloo_seconds": 9e-6, "traffic_seconds": 1e-6}
    row["mpi"] = {"Open MPI": 8e-6, "MPICH": 4e-6}
    comm_bench.judge(row)
    assert (row["mpi_library"], row["arena_times_mpi"], row["plain_times_mpi"]) == ("MPICH", 4.0, 2.0)
    comm_bench.show_mpis({"mpis": {"Open MPI": "mpirun a", "MPICH": "mpirun b"}, "sizes": [row]})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1024", "8.0", "4.0", "MPICH"]
    monkeypatch.setattr(
        "sys.argv", ["comm_bench", "--mpi-python", "/a/python", "--mpi-python", "/b/python", "--mpirun", "/c/mpirun"]
    )
    first, second = comm_bench.given_mpis(comm_bench.arguments())
    assert (first.python, first.mpirun) == ("/a/python", "/c/mpirun") and second.python == "/b/python"


def test_ranks_of_mpi_without_mpi4py_say_so(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('made up')")  # whatever is installed here
    command = [sys.executable, "-m", "evenstep.bench_comm", "--mpi", "--sizes", "1024"]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["missing"]
    assert sys.executable in said and "made up" in said


def test_what_mpi_lacks_stands_in_the_note(program, environment, tmp_path, mpirun):
    (mpirun / "mpirun").write_text('#!/bin/sh\necho \'{"missing": "no mpi4py"}\'\n')
    words = ["bench", "comm", "--sizes", "1K", "--collectives", "all_reduce", "--rounds", "1"]
    given = {**environment, "PATH": f"{mpirun}:{os.environ['PATH']}"}
    done = subprocess.run([program, *words], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "MPI not measured: no mpi4py\n" in done.stdout


@pytest.mark.more
def test_figures_are_kept_where_jobs_look_for_them(program, environment, tmp_path, mpirun):
    words = ["bench", "comm", "--sizes", "1K", "--collectives", "all_reduce", "--rounds", "1"]
    costs = tmp_path / "costs.json"

    def bench(*more, place=str(costs)):
        path = f"{mpirun}:{os.environ['PATH']}"
        given = {**environment, "PATH": path, "EVENSTEP_COMM_COSTS": place}
        return subprocess.run(
            [program, *words, *more], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120
        )

    done = bench("--save", "--json")
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout)["kept"]
    ways = {("shm", "arena"), ("shm", "torch"), ("gloo", "torch"), ("mpi", "mpi4py")}
    assert {(row["engine"], row["way"]) for row in kept if row["collective"] == "all_reduce"} == ways
    assert all(row["bytes"] == 1024 and row["samples"] == 1 and row["seconds"] > 0 for row in kept)
    shown = bench().stdout  # not kept without --save, but shown
    assert f"costs     {len(kept)} kept in {costs} for groups of 2 ranks; " in shown
    assert any(line.split()[:4] == ["all_reduce", "1024", "mpi", "mpi4py"] for line in shown.splitlines())
    refused = bench("--save", place="off")
    assert refused.returncode == 2 and "--save has no place" in refused.stderr and refused.stdout == ""
    costs.write_text("{}")
    damaged = bench()
    assert damaged.returncode == 3 and "its format is missing" in damaged.stderr and "all_reduce" in damaged.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["bench"], 2, "bench: of what?"),
        (["bench", "com"], 2, "there is no bench com"),
        (["bench", "comm", "--sizes", "1Q"], 2, '"1Q" in --sizes is no size'),
        (["bench", "comm", "--collectives", "allreduce"], 2, "did you mean all_reduce?"),
        (["bench", "comm", "--rounds", "0"], 2, "--rounds 0 is out of range"),
        (["bench", "comm", "-n", "0"], 2, "-n 0"),
    ],
)
def test_wrong_words(program, environment, tmp_path, words, code, said):
    done = subprocess.run([program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
