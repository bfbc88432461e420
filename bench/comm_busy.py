"""What a busy neighbour takes from an all-reduce between two ranks, one core each: without neighbours, with one on the second
rank's core, and with one on each core, in turn, in one job. A neighbour computes for ever at the ranks' own priority, and is
stopped (SIGSTOP) while it is not wanted. Medians of rounds that take at least as long as --seconds says, so that each meets
many of the scheduler's slices.

    python bench/comm_busy.py [--json FILE] [--rounds N] [--sizes 1024,1048576,67108864]

0.35 of the quiet speed with a neighbour on each core is the aim: a half is what the scheduler gives a rank by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
from datetime import timedelta
from typing import Any

from comm_bench import RANKS, all_reduces, run_ranks
from heading import print_heading

from evenstep.bench_comm import timed

STATES = ("quiet", "one", "each")  # cores with a neighbour: none, the second rank's, both
AIM = 0.35
MOST = 20000  # calls of a round


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rounds", type=int, default=9, help="of each state, in turn (default 9)")
    parser.add_argument("--seconds", type=float, default=0.3, help="that a round takes at least (default 0.3)")
    parser.add_argument("--sizes", default="1024,1048576,67108864", help="bytes, separated by commas")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--neighbours", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def neighbour(core: int) -> subprocess.Popen[bytes]:
    """A process that computes for ever on `core`, stopped."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True:\n    pass\n"
    process = subprocess.Popen([sys.executable, "-c", code])
    process.send_signal(signal.SIGSTOP)
    return process


def disturb(neighbours: list[int], state: str) -> None:
    """Lets those go on who belong to `state`, and stops the others. `neighbours`: their process numbers, by core."""
    wanted = {"quiet": [], "one": neighbours[-1:], "each": neighbours}[state]
    for pid in neighbours:
        os.kill(pid, signal.SIGCONT if pid in wanted else signal.SIGSTOP)


def run_rank(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.rank]})
    import torch
    import torch.distributed as dist

    from evenstep.rendezvous import open_group

    torch.set_num_threads(1)
    sizes = [int(size) for size in options.sizes.split(",")]
    neighbours = [int(pid) for pid in options.neighbours.split(",")]
    store = dist.TCPStore("127.0.0.1", options.port, RANKS, options.rank == 0, timedelta(seconds=60))
    dist.init_process_group("evenstep", store=store, rank=options.rank, world_size=RANKS)
    gloo = dist.new_group(backend="gloo")
    comm = open_group(store, options.rank, RANKS, name="bench", arena_bytes=max(sizes))
    assert comm is not None
    rows = []
    for size in sizes:
        ways = all_reduces(comm, gloo, size)
        seconds: dict[str, list[float]] = {f"{way} {state}": [] for way in ways for state in STATES}
        counts = {}
        for way, call in ways.items():
            call()
            took = torch.tensor([timed(call, 3, comm.barrier)], dtype=torch.float64)
            dist.all_reduce(took)  # all ranks must call equally often
            counts[way] = max(2, min(MOST, round(options.seconds * RANKS / took.item())))
        for _ in range(options.rounds):
            for state in STATES:
                comm.barrier()
                if options.rank == 0:
                    disturb(neighbours, state)
                for way, call in ways.items():
                    seconds[f"{way} {state}"].append(timed(call, counts[way], comm.barrier))
        comm.barrier()
        if options.rank == 0:
            disturb(neighbours, "quiet")
        rows.append({"bytes": size, "seconds": {name: statistics.median(times) for name, times in seconds.items()}})
    if options.rank == 0:
        print(json.dumps(rows))
    comm.barrier()
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"all-reduce, fp32, {RANKS} ranks, one core each; a busy neighbour on no core, on the second, on each; medians"
    )
    print(
        f"{'bytes':>9} {'way':<8} {'quiet us':>10} {'one us':>10} {'each us':>10} {'one':>6} {'each':>6}  times Gloo with each"
    )
    for row in rows:
        seconds = row["seconds"]
        for way in ("arena", "plain", "gloo", "traffic"):
            quiet, one, each = (seconds[f"{way} {state}"] for state in STATES)
            beside = f"{seconds['gloo each'] / each:7.1f}" if way in ("arena", "plain") else ""
            print(
                f"{row['bytes']:>9} {way:<8}" + "".join(f" {took * 1e6:>10.1f}" for took in (quiet, one, each)), end=""
            )
            print(f" {quiet / one:>6.2f} {quiet / each:>6.2f}  {beside}".rstrip())
    reached = min(
        row["seconds"][f"{way} quiet"] / row["seconds"][f"{way} each"] for row in rows for way in ("arena", "plain")
    )
    print(f"\nof the quiet speed with a neighbour on each core, at the least: {reached:.2f} (aim {AIM})")


def main() -> int:
    options = arguments()
    if options.rank is not None:
        run_rank(options)
        return 0
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    if len(cores) < RANKS:
        sys.exit("comm_busy: two ranks need a core each")
    print_heading("What busy neighbours take from an all-reduce")
    neighbours = [neighbour(core) for core in cores]
    words = [__file__, "--rounds", str(options.rounds), "--seconds", str(options.seconds), "--sizes", options.sizes]
    words += ["--neighbours", ",".join(str(one.pid) for one in neighbours)]
    try:
        rows = run_ranks(words, "comm_busy", 1200)
    finally:
        for process in neighbours:
            process.kill()
            process.wait()
    if rows is None:
        return 1
    show(rows)
    if options.json:
        report = {"format": "evenstep-comm-busy-1", "sizes": rows}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
