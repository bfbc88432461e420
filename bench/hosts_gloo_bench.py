"""Collectives between hosts that Gloo alone connects: shared memory inside each host and Gloo between their first ranks, beside Gloo
between all ranks, in alternating rounds of one run.

    python bench/hosts_gloo_bench.py [--hosts 2] [--ranks 2] [--mbit 0] [--rounds 9] [--sizes 1024,65536,…] [--json FILE]

Hosts are network namespaces on one machine (root, ip and tc); --mbit shapes their links, 0: as fast as the machine makes them. Each
rank is pinned to a core, of which several may share one. Medians over rounds of the slowest rank's time for a call; `times`: Gloo's by ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from heading import print_heading
from shaped_hosts import ShapedHosts, missing

SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
CALLS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "barrier")
SECONDS = 1800.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, default=0, help="of each link, in either direction; 0: not shaped")
    parser.add_argument("--rounds", type=int, default=9, help="of each way (default 9)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument("--calls", default=",".join(CALLS), help="separated by commas")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def calls_of(size: int, ranks: int) -> dict[str, Callable[[Any], Any]]:
    """`size`: bytes of the larger tensor on a rank."""
    import torch
    import torch.distributed as dist

    count = max(ranks, size // 4 // ranks * ranks)
    whole, part = torch.zeros(count), torch.zeros(count // ranks)
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "reduce": lambda group: dist.reduce(whole, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def run_rank(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist

    from evenstep.bench_comm import calls_of_a_round, timed

    torch.set_num_threads(1)
    dist.init_process_group("evenstep")
    world: Any = dist.group.WORLD
    assert world.over_hosts_by_gloo, "the group is not made host by host"
    groups = {"hosts": None, "gloo": dist.new_group(backend="gloo")}
    rows = []
    for name in options.calls.split(","):
        for size in [0] if name == "barrier" else map(int, options.sizes.split(",")):
            call = calls_of(size, ranks)[name]
            seconds: dict[str, list[float]] = {way: [] for way in groups}
            for group in groups.values():
                call(group)
            for number in range(options.rounds):
                for way in list(groups)[:: 1 if number % 2 else -1]:
                    calls = max(2, calls_of_a_round(max(size, 1)) // 8)
                    took = torch.tensor(timed(functools.partial(call, groups[way]), calls, dist.barrier))
                    dist.all_reduce(took, dist.ReduceOp.MAX)  # a root may be done before the others
                    seconds[way].append(float(took))
            row: dict[str, Any] = {"call": name, "bytes": size}
            row.update({f"{way}_seconds": statistics.median(times) for way, times in seconds.items()})
            row["times"] = row["gloo_seconds"] / row["hosts_seconds"]
            rows.append(row)
            if rank == 0:
                ours, theirs = row["hosts_seconds"] * 1e6, row["gloo_seconds"] * 1e6
                print(f"{name:16} {size:10} {ours:12.1f} {theirs:12.1f} {row['times']:8.2f}", flush=True)
    if rank == 0 and options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    options = arguments()
    if options.rank:
        run_rank(options)
        return 0
    why = missing()
    if why:
        sys.stderr.write(f"collectives over Gloo between hosts were not measured: {why}\n")
        return 1
    speed = f"links of {options.mbit:g} Mbit/s" if options.mbit else "links that are not shaped"
    print_heading(
        f"Host by host over Gloo, and Gloo between all ranks: {options.hosts} hosts of {options.ranks} ranks, {speed}"
    )
    print(f"{'call':16} {'bytes':>10} {'hosts, µs':>12} {'Gloo, µs':>12} {'times':>8}", flush=True)
    with ShapedHosts(options.hosts, options.mbit or None, options.ranks) as hosts:
        command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        return hosts.run(command, {"EVENSTEP_COMM_ENGINE": "hosts-gloo"}, SECONDS)


if __name__ == "__main__":
    sys.exit(main())
