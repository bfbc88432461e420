"""What an all-reduce of 1 KB costs, whoever asks for it: rows for comm_bench.py. Microseconds of one call, medians of
alternating rounds; C and MPI run in processes of their own, before and after the others, and those from C take turns.
`python bench/latency.py c` measures these alone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BYTES = 1024
CALLS = 1000
ROUNDS = 21
TURNS = 7  # of programs in C, which cannot alternate call by call
C_WAYS = ("C", "C, in place")  # of MPI; a row's name is the library's, a comma, and one of these
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TREE = Path(__file__).resolve().parent.parent


def measured(ways: dict[str, Callable[[], Any]], meet: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            calls = CALLS // 10 if "gloo" in name else CALLS
            meet()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


def empty_group(rank: int, ranks: int) -> Any:
    """A process group whose all-reduce does nothing: what torch itself costs."""
    import torch.distributed as dist

    class Empty(dist.ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any = None) -> None:
            return None

    return Empty(rank, ranks)


def from_python(rank: int, ranks: int, gloo: Any) -> dict[str, float]:
    """Every way from Python, in one run. torch.distributed is up, with backend "evenstep"."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import evenstep as es

    tensor, array = torch.zeros(BYTES // 4), np.zeros(BYTES // 4, dtype=np.float32)
    empty = empty_group(rank, ranks)
    with es.comm.open("latency") as group:
        shared = group.empty(BYTES // 4)
        shared[:] = 0
        return measured(
            {
                "dist, empty override": lambda: dist.all_reduce(tensor, group=empty),
                "dist, evenstep": lambda: dist.all_reduce(tensor),
                "dist, gloo": lambda: dist.all_reduce(tensor, group=gloo),
                "es.comm, NumPy": lambda: group.all_reduce(array),
                "es.comm, NumPy in the arena": lambda: group.all_reduce(shared),
                "es.comm, tensor": lambda: group.all_reduce(tensor),
            },
            group.barrier,
        )


def _told(command: list[str], name: str = "", seconds: float = 120, **variables: str) -> dict[str, Any]:
    """The JSON that a bench in processes of its own prints; {} where it fails, which is said under `name` (the command)."""
    environment = {**os.environ, **ALLOWED, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        print(f"comm_bench: {name or ' '.join(command)} failed: {done.stderr[-500:]}", file=sys.stderr)
        return {}
    told: dict[str, Any] = json.loads(lines[-1])
    return told


class Mpi(NamedTuple):
    """One that is measured, by an interpreter whose mpi4py is of it."""

    python: str
    mpirun: str | None
    library: str = ""  # its name and version, as it says them itself; "": it was not found, or failed


def _build_mpi(mpirun: str, folder: str) -> list[str]:
    """The words that run MPI's bench from C; [] where its compiler is not beside mpirun."""
    compiler, program = Path(mpirun).parent / "mpicc", f"{folder}/mpi_latency"
    os.makedirs(folder)
    sources = [str(Path(__file__).parent / name) for name in ("mpi_latency.c", "two_ranks.c")]
    if not compiler.exists():
        return []
    built = subprocess.run([compiler, "-O2", "-D_GNU_SOURCE", *sources, "-o", program], capture_output=True, text=True)
    if built.returncode != 0:
        print(f"comm_bench: {compiler} failed: {built.stderr[-500:]}", file=sys.stderr)
        return []
    return [mpirun, "-n", "2", program, str(BYTES), str(ROUNDS)]


def from_c(mpis: Sequence[Mpi] = ()) -> dict[str, float]:
    """By the program `comm_latency`, where a build with EVENSTEP_BENCH=ON has made it, and in turn with it by each MPI whose
    mpirun has its mpicc beside it. Medians."""
    found = [path for path in TREE.glob("build/*/bench/comm_latency") if os.access(path, os.X_OK)]
    if not found:
        return {}
    newest = max(found, key=lambda path: path.stat().st_mtime)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = [
            ([str(newest), str(BYTES), str(ROUNDS)], {"C": "plain_seconds", "C, in the arena": "arena_seconds"})
        ]
        for number, mpi in enumerate(mpis):
            words = _build_mpi(str(Path(mpi.mpirun).resolve()), f"{folder}/{number}") if mpi.mpirun is not None else []
            names = (f"{mpi.library or 'MPI'}, {way}" for way in C_WAYS)
            programs.append((words, dict(zip(names, ("apart_seconds", "in_place_seconds")))))
        for _ in range(TURNS):
            for words, keys in programs:
                told = _told(words) if words else {}
                for name, key in keys.items():
                    if key in told:
                        seconds.setdefault(name, []).append(told[key])
    return {name: statistics.median(times) for name, times in seconds.items()}


def mpi_rank() -> None:
    """One rank under mpirun."""
    import numpy as np
    from mpi4py import MPI

    from evenstep.bench_comm import library_name

    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    source, target = np.zeros(BYTES // 4, dtype=np.float32), np.zeros(BYTES // 4, dtype=np.float32)
    library = library_name(MPI.Get_library_version())
    ways = {
        f"{library}, mpi4py": lambda: world.Allreduce(source, target),
        f"{library}, mpi4py, in place": lambda: world.Allreduce(MPI.IN_PLACE, target),
    }
    rows = measured(ways, world.Barrier)
    if world.rank == 0:
        print(json.dumps({"library": library, "rows": rows}))


def package_folder() -> Path:
    """Of the evenstep that this interpreter has."""
    found = importlib.util.find_spec("evenstep")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{sys.executable} has no evenstep: scripts/install.sh puts it there")
    return Path(found.origin).parent


def find_mpirun(python: str) -> str | None:
    """The one beside `python`, else the one on the path."""
    beside = Path(python).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def run_mpi(mpi: Mpi, words: list[str]) -> dict[str, Any]:
    """What two ranks of its interpreter report; {} where that has no mpi4py or there is no mpirun.

    They take this interpreter's evenstep, and nothing else of its packages, which another MPI may be among. Programs that mpirun itself starts
    are found beside it.
    """
    if mpi.mpirun is None or subprocess.run([mpi.python, "-c", "import mpi4py, numpy"], capture_output=True).returncode:
        return {}
    command = [mpi.mpirun, "-n", "2", mpi.python, *words]
    programs = f"{Path(mpi.mpirun).parent}:{os.environ.get('PATH', os.defpath)}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "evenstep").symlink_to(package_folder())
        report = _told(command, f"MPI of {mpi.python}", 600, PATH=programs, PYTHONPATH=folder)
    return {**report, "command": " ".join(command)} if report else {}


def from_mpi(mpi: Mpi) -> tuple[Mpi, dict[str, float]]:
    """The same with its library's name, and its rows; no name and none where it fails."""
    report = run_mpi(mpi, [__file__, "mpi"])
    return mpi._replace(library=report.get("library", "")), report.get("rows", {})


def sizes_from_mpi(mpi: Mpi, sizes: str, rounds: int) -> tuple[str, dict[int, float]]:
    """(the command, MPI's seconds by size) of its all-reduce in place on plain memory."""
    words = ["-m", "evenstep.bench_comm", "--mpi", "--sizes", sizes, "--collectives", "all_reduce"]
    report = run_mpi(mpi, [*words, "--rounds", str(rounds)])
    return report.get("command", ""), {row["bytes"]: row["seconds"]["mpi"] for row in report.get("rows", [])}


def fastest(seconds: Mapping[str, float]) -> tuple[str, float] | None:
    """(name, seconds) of the one that takes the least time; None of none."""
    return min(seconds.items(), key=lambda one: one[1]) if seconds else None


def show(rows: dict[str, float]) -> None:
    print(f"\nall-reduce of {BYTES} bytes, 2 ranks; medians")
    print(f"{'asked from':<36} {'us':>8}  aim")
    empty = rows.get("dist, empty override", 0.0)
    gloo = rows.get("dist, gloo", 0.0)
    for name, seconds in rows.items():
        aim = {"C": "1.5", "C, in the arena": "1.5", "dist, evenstep": f"{empty * 1e6 + 5:.1f}"}.get(name, "")
        aim = "3" if name.startswith("es.comm") else aim
        note = f"   Gloo takes {gloo / seconds:.0f} times as long (15 at least)" if name == "dist, evenstep" else ""
        print(f"{name:<36} {seconds * 1e6:>8.2f}  {aim}{note}")


if __name__ == "__main__":
    if sys.argv[1:] == ["c"]:
        show(from_c([Mpi(sys.executable, find_mpirun(sys.executable), "the MPI on the path")]))
    else:
        mpi_rank()
