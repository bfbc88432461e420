"""Collectives and messages of more than 4 GiB between two ranks, each checked to the last byte: `make large`. Takes 9 GB of
memory and a minute or two for each engine; not a part of `make test`.

    python scripts/large.py [shm] [ucx] [mpi]     # without names: shm, and the others where they are found

MPI needs a launcher: EVENSTEP_TEST_MPIRUN, else an `mpirun` on the path.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from typing import Any

RANKS = 2
BYTES = (4 << 30) + 70_001  # one more than 32 bits can count, and no round number
PIECE = 64 << 20


def pattern(begin: int, length: int, rank: int) -> Any:
    """Bytes that tell their place, beyond 32 bits too, and their rank."""
    import numpy as np

    places = np.arange(begin // 8, (begin + length) // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (places + np.uint64(rank)).view(np.uint8)[begin % 8 : begin % 8 + length]


def fill(data: Any, rank: int, begin: int = 0) -> None:
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        part[:] = pattern(begin + at, len(part), rank)


def check(data: Any, wanted: Any, what: str) -> None:
    """`wanted(begin, length)` says what must be there."""
    for at in range(0, len(data), PIECE):
        part = data[at : at + PIECE]
        if not (part == wanted(at, len(part))).all():
            raise SystemExit(f"large: {what}: wrong between bytes {at} and {at + len(part)}")
    print(f"  ok  {what}", flush=True)


def run_rank() -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open(arena_bytes=0, timeout=600) as group:
        rank = group.rank
        data = np.empty(BYTES, dtype=np.uint8)

        def say(what: str) -> str:
            return f"{os.environ['EVENSTEP_COMM_ENGINE']}, rank {rank}: {what}"

        fill(data, rank)
        group.all_reduce(data, "bxor")
        check(data, lambda at, n: pattern(at, n, 0) ^ pattern(at, n, 1), say("all_reduce"))

        fill(data, rank)
        group.all_reduce(data.view(np.int8), "max")
        check(
            data.view(np.int8),
            lambda at, n: np.maximum(pattern(at, n, 0).view(np.int8), pattern(at, n, 1).view(np.int8)),
            say("all_reduce of signed bytes"),
        )

        fill(data, rank)
        group.broadcast(data, root=1)
        check(data, lambda at, n: pattern(at, n, 1), say("broadcast"))

        # All but ten bytes are rank 0's; either part is in place.
        counts = [BYTES - 10, 10]
        own = data[: BYTES - 10] if rank == 0 else data[BYTES - 10 :]
        begin = 0 if rank == 0 else BYTES - 10
        data[:] = 0
        fill(own, rank, begin)
        group.all_gather(own, data, counts)
        check(data[: BYTES - 10], lambda at, n: pattern(at, n, 0), say("all_gather, the large part"))
        check(data[BYTES - 10 :], lambda at, n: pattern(BYTES - 10 + at, n, 1), say("all_gather, the small one"))

        fill(data, rank)
        group.reduce_scatter(data, own, counts, "bxor")
        check(
            own,
            lambda at, n: pattern(begin + at, n, 0) ^ pattern(begin + at, n, 1),
            say("reduce_scatter"),
        )

        # Rank 0 gives, rank 1 takes, in two ways.
        nothing = np.empty(0, dtype=np.uint8)
        for what in ("all_to_all", "send and receive"):
            fill(data, rank)
            if what == "all_to_all":
                parts = [nothing, data] if rank == 0 else [nothing, nothing]
                group.all_to_all(parts, [nothing, nothing] if rank == 0 else [data, nothing])
            elif rank == 0:
                group.send(data, 1)
            else:
                group.recv(data, 0)
            check(data, lambda at, n: pattern(at, n, 0), say(what))


def mpirun() -> str | None:
    return os.environ.get("EVENSTEP_TEST_MPIRUN", "").split(":")[0] or shutil.which("mpirun")


def found() -> list[str]:
    """The engines that can be had here."""
    from evenstep.hosts import ucx_state

    engines = ["shm"]
    version, why = ucx_state()
    if version:
        engines.append("ucx")
    else:
        print(f"large: not over UCX: {why}")
    return [*engines, "mpi"] if mpirun() else engines


def run(engine: str) -> int:
    """The worst exit code of its ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "EVENSTEP_COMM_ENGINE": engine}
    environment = {**os.environ, **place, "EVENSTEP_COMM_COSTS": "off"}
    own = [sys.executable, __file__, "rank"]
    if engine == "mpi":
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        launcher = mpirun()
        if launcher is None:
            raise SystemExit("large: no mpirun (EVENSTEP_TEST_MPIRUN)")
        return subprocess.run([launcher, "-n", str(RANKS), *own], env={**environment, **allowed}).returncode
    ranks = [
        subprocess.Popen(own, env={**environment, "WORLD_SIZE": str(RANKS), "RANK": str(rank)}) for rank in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def main() -> int:
    if sys.argv[1:] == ["rank"]:
        run_rank()
        return 0
    wrong = [engine for engine in sys.argv[1:] or found() if run(engine) != 0]
    print(f"large: wrong over {', '.join(wrong)}" if wrong else "large: all well")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
