"""What `evenstep bench comm` measures on each rank: the collectives of backend "evenstep" beside Gloo's, in alternating
rounds of one job, and beside them the memory's own speed.

The program starts it as ``-m evenstep.bench_comm`` on every rank of a job; rank 0 writes what was measured to the file
that EVENSTEP_BENCH_OUT names. With ``--mpi`` it is started by `mpirun` instead and prints the same rows of MPI.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
WORK_BYTES = 1 << 24  # of a round: enough calls to time well, few enough to end soon
MOST_CALLS = 100

Call = Callable[[], Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", type=int, default=1)
    parser.add_argument("--mpi", action="store_true")
    return parser.parse_args()


def calls_of_a_round(size: int) -> int:
    return max(2, min(MOST_CALLS, WORK_BYTES // size))


def timed(call: Call, count: int, meet: Call) -> float:
    meet()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that must cross between ranks for each byte of the call's size, as NCCL's tests count them."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", "send") else (ranks - 1) / ranks


def rows_of(collective: str, size: int, ranks: int, ways: dict[str, Call], rounds: int, meet: Call) -> dict[str, Any]:
    """The median seconds of each way, measured in alternating rounds. `size`: bytes of the whole exchange on one rank, as
    NCCL's tests define it for each collective."""
    count = calls_of_a_round(size)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for way, call in ways.items():
            seconds[way].append(timed(call, count, meet))
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "collective": collective,
        "bytes": size,
        "seconds": medians,
        "bus_gb_per_second": {
            way: size * bus_factor(collective, ranks) / took / 1e9 for way, took in medians.items() if way != "memory"
        },
    }


class Memory:
    """The tensors of one size: `whole` of the exchange, `part` of one rank; in the arena and outside of it."""

    def __init__(self, comm: Any, size: int, ranks: int) -> None:
        import torch

        self.count = max(1, size // 4 // ranks) * ranks
        self.whole, self.other = torch.zeros(self.count), torch.zeros(self.count)
        self.part = torch.zeros(self.count // ranks)
        self.arena = torch.frombuffer(comm.arena(), dtype=torch.float32, count=2 * self.count)
        self.arena.zero_()


def ways_of(collective: str, comm: Any, memory: Memory, peers: dict[str, Any], rank: int) -> dict[str, Call]:
    """What is timed: `arena` (C's collective on data in the arena), `plain` (through torch) and each peer."""
    import torch.distributed as dist

    from evenstep import _core

    ranks = comm.ranks
    counts = [memory.count // ranks] * ranks
    whole, second = memory.arena.data_ptr(), memory.arena[memory.count :].data_ptr()
    own = second + rank * counts[0] * 4
    through: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(memory.whole, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(memory.part, memory.whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(memory.whole, memory.part, group=group),
        "broadcast": lambda group: dist.broadcast(memory.whole, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(memory.other, memory.whole, group=group),
        "send": lambda group: send_round(memory.whole, rank, ranks, group),
    }
    direct: dict[str, Call] = {
        "all_reduce": lambda: comm.all_reduce(whole, memory.count, _core.DTYPE_F32, _core.OP_SUM),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, second, counts, _core.DTYPE_F32, _core.OP_SUM),
        "all_gather": lambda: comm.all_gather(own, second, counts, _core.DTYPE_F32),
        "broadcast": lambda: comm.broadcast(whole, 4 * memory.count, 0),
    }
    ways: dict[str, Call] = {}
    if collective in direct:
        ways["arena"] = direct[collective]
    ways["plain"] = lambda: through[collective](None)
    for name, group in peers.items():
        ways[name] = functools.partial(through[collective], group)
    if collective == "all_reduce":
        ways["memory"] = lambda: memory.other.add_(1.0)
    return ways


def send_round(data: Any, rank: int, ranks: int, group: Any) -> None:
    """Even ranks send to the next odd one; the last of an odd number rests."""
    import torch.distributed as dist

    if rank % 2 == 1:
        dist.recv(data, rank - 1, group=group)
    elif rank + 1 < ranks:
        dist.send(data, rank + 1, group=group)


def measured(options: argparse.Namespace, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows; `about` is told which group they are of."""
    import torch
    import torch.distributed as dist

    from evenstep import comm_costs
    from evenstep.rendezvous import open_group

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("evenstep")
    peers = {"gloo": dist.new_group(backend="gloo")} if options.peers and dist.is_gloo_available() else {}
    sizes = [int(size) for size in options.sizes.split(",")]
    room = 2 * 4 * ranks * max(max(1, size // 4 // ranks) for size in sizes)
    store = dist.distributed_c10d._get_default_store()
    comm = open_group(store, rank, ranks, name="bench", arena_bytes=room)
    if comm is None:
        sys.exit("evenstep bench comm: only Gloo connects the ranks (EVENSTEP_COMM_ENGINE=gloo)")
    about["engine"], about["shape"] = comm.engine, comm_costs.followed
    for size in sizes:
        memory = Memory(comm, size, ranks)
        for collective in options.collectives.split(","):
            if collective == "send" and ranks < 2:
                continue
            ways = ways_of(collective, comm, memory, peers, rank)
            yield rows_of(collective, 4 * memory.count, ranks, ways, options.rounds, comm.barrier)
    comm.barrier()
    dist.destroy_process_group()


def mpi_ways(collective: str, world: Any, size: int) -> dict[str, Call]:
    """The same exchange in MPI's own calls, on plain memory."""
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

    ranks, rank = world.size, world.rank
    whole, other, part = bytearray(size), bytearray(size), bytearray(size // ranks)
    calls: dict[str, Call] = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, [whole, MPI.FLOAT], MPI.SUM),
        "reduce_scatter": lambda: world.Reduce_scatter_block([whole, MPI.FLOAT], [part, MPI.FLOAT], MPI.SUM),
        "all_gather": lambda: world.Allgather([part, MPI.FLOAT], [whole, MPI.FLOAT]),
        "broadcast": lambda: world.Bcast([whole, MPI.FLOAT], 0),
        "all_to_all": lambda: world.Alltoall([whole, MPI.FLOAT], [other, MPI.FLOAT]),
    }
    if collective == "send":
        if rank % 2 == 1:
            return {"mpi": lambda: world.Recv([whole, MPI.FLOAT], rank - 1)}
        return {"mpi": (lambda: world.Send([whole, MPI.FLOAT], rank + 1)) if rank + 1 < ranks else (lambda: None)}
    return {"mpi": calls[collective]}


def library_name(version: str) -> str:
    """What an MPI says of itself, as a name: "Open MPI v5.0.11", "MPICH 5.0.2"."""
    first = version.strip("\0\n ").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", " ").split())


def measure_mpi(options: argparse.Namespace) -> None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # none, or one that finds no MPI
        print(json.dumps({"missing": f"no mpi4py for {sys.executable} ({str(error).splitlines()[0]})"}))
        return
    world = MPI.COMM_WORLD
    rows = []
    for size in map(int, options.sizes.split(",")):
        whole = max(1, size // 4 // world.size) * world.size * 4
        for collective in options.collectives.split(","):
            ways = mpi_ways(collective, world, whole)
            rows.append(rows_of(collective, whole, world.size, ways, options.rounds, world.Barrier))
    if world.rank == 0:
        print(json.dumps({"library": library_name(MPI.Get_library_version()), "rows": rows}))


def main() -> None:
    options = arguments()
    if options.mpi:
        measure_mpi(options)
        return
    about: dict[str, Any] = {}
    rows = list(measured(options, about))
    if os.environ["RANK"] == "0":
        import torch

        from evenstep import _core, comm_costs

        comm_costs.keep()  # what the calls themselves taught, for the program to read
        path = comm_costs.path()
        report = {
            **about,
            "costs": None if path is None else str(path.absolute()),
            "ranks": int(os.environ["WORLD_SIZE"]),
            "simd": _core.comm_simd(),
            "torch": torch.__version__,
            "rows": rows,
        }
        Path(os.environ["EVENSTEP_BENCH_OUT"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
