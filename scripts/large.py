"""Collectives and messages of more than 4 GiB between two or three ranks, each checked to the last byte: `make large`. Takes
9 GB of memory, 18 GB over `hosts`, and a minute or two for each engine; not a part of `make test`.

    python scripts/large.py [shm] [ucx] [hosts] [mpi]     # without names: shm, and the others where they are found

MPI needs a launcher: EVENSTEP_TEST_MPIRUN, else an `mpirun` on the path.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from typing import Any

BYTES = (4 << 30) + 70_001  # one more than 32 bits can count, and no round number
PIECE = 64 << 20

CALLS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send")

PLACES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "shm": (("aa", CALLS),),
    "ucx": (("aa", CALLS),),
    "mpi": (("aa", CALLS),),
    # A reduce-scatter takes as much memory again where a rank speaks for its host.
    "hosts": (("aab", tuple(call for call in CALLS if call != "reduce_scatter")), ("ab", ("reduce_scatter",))),
}
"""Of each engine: on which hosts its ranks are, and what they call."""


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


def xor(ranks: int, begin: int, length: int) -> Any:
    data = pattern(begin, length, 0)
    for rank in range(1, ranks):
        data = data ^ pattern(begin, length, rank)
    return data


def all_reduce(group: Any, data: Any, say: Any) -> None:
    import numpy as np

    signed = data.view(np.int8)
    fill(data, group.rank)
    group.all_reduce(data, "bxor")
    check(data, lambda at, n: xor(group.size, at, n), say("all_reduce"))
    fill(data, group.rank)
    group.all_reduce(signed, "max")

    def largest(at: int, n: int) -> Any:
        return np.max([pattern(at, n, rank).view(np.int8) for rank in range(group.size)], axis=0)

    check(signed, largest, say("all_reduce of signed bytes"))


def broadcast(group: Any, data: Any, say: Any) -> None:
    fill(data, group.rank)
    group.broadcast(data, root=1)
    check(data, lambda at, n: pattern(at, n, 1), say("broadcast"))


def divide(group: Any, data: Any) -> tuple[list[int], Any, int]:
    """All but ten bytes are rank 0's, ten rank 1's; each part is in place."""
    begin = [0, BYTES - 10, BYTES][group.rank]
    end = [BYTES - 10, BYTES, BYTES][group.rank]
    return [BYTES - 10, 10, 0][: group.size], data[begin:end], begin


def all_gather(group: Any, data: Any, say: Any) -> None:
    counts, own, begin = divide(group, data)
    data[:] = 0
    fill(own, group.rank, begin)
    group.all_gather(own, data, counts)
    check(data[: BYTES - 10], lambda at, n: pattern(at, n, 0), say("all_gather, the large part"))
    check(data[BYTES - 10 :], lambda at, n: pattern(BYTES - 10 + at, n, 1), say("all_gather, the small one"))


def reduce_scatter(group: Any, data: Any, say: Any) -> None:
    counts, own, begin = divide(group, data)
    fill(data, group.rank)
    group.reduce_scatter(data, own, counts, "bxor")
    check(own, lambda at, n: xor(group.size, begin + at, n), say("reduce_scatter"))


def all_to_all(group: Any, data: Any, say: Any) -> None:
    """Rank 0 gives, the last takes: another host's, where there are several."""
    nothing, last = data[:0], group.size - 1
    sent, taken = [nothing] * group.size, [nothing] * group.size
    fill(data, group.rank)
    if group.rank == 0:
        sent[last] = data
    elif group.rank == last:
        taken[0] = data
    group.all_to_all(sent, taken)
    check(data, lambda at, n: pattern(at, n, 0 if group.rank == last else group.rank), say("all_to_all"))


def send(group: Any, data: Any, say: Any) -> None:
    last = group.size - 1
    fill(data, group.rank)
    if group.rank == 0:
        group.send(data, last)
    elif group.rank == last:
        group.recv(data, 0)
        check(data, lambda at, n: pattern(at, n, 0), say("send and receive"))


def run_rank(calls: list[str]) -> None:
    import numpy as np

    import evenstep as es

    with es.comm.open(arena_bytes=0, timeout=600) as group:
        data = np.empty(BYTES, dtype=np.uint8)

        def say(what: str) -> str:
            return f"{os.environ['EVENSTEP_COMM_ENGINE']}, rank {group.rank} of {group.size}: {what}"

        for call in calls:
            globals()[call](group, data, say)
        group.barrier()


def mpirun() -> str | None:
    return os.environ.get("EVENSTEP_TEST_MPIRUN", "").split(":")[0] or shutil.which("mpirun")


def found() -> list[str]:
    """The engines that can be had here."""
    from evenstep.hosts import ucx_state

    engines = ["shm"]
    version, why = ucx_state()
    if version:
        engines += ["ucx", "hosts"]
    else:
        print(f"large: not over UCX: {why}")
    return [*engines, "mpi"] if mpirun() else engines


def run(engine: str, hosts: str, calls: tuple[str, ...]) -> int:
    """The worst exit code of the ranks, one on each of these hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "EVENSTEP_COMM_ENGINE": engine}
    environment = {**os.environ, **place, "EVENSTEP_COMM_COSTS": "off"}
    own = [sys.executable, __file__, "rank", *calls]
    if engine == "mpi":
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        launcher = mpirun()
        if launcher is None:
            raise SystemExit("large: no mpirun (EVENSTEP_TEST_MPIRUN)")
        return subprocess.run([launcher, "-n", str(len(hosts)), *own], env={**environment, **allowed}).returncode
    ranks = []
    for rank, host in enumerate(hosts):
        at = {"WORLD_SIZE": str(len(hosts)), "RANK": str(rank)}
        at |= {"EVENSTEP_HOST_ID": host} if engine == "hosts" else {}
        ranks.append(subprocess.Popen(own, env={**environment, **at}))
    return max(abs(rank.wait()) for rank in ranks)


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2:])
        return 0
    engines = sys.argv[1:] or found()
    wrong = [engine for engine in engines if any(run(engine, *part) != 0 for part in PLACES[engine])]
    print(f"large: wrong over {', '.join(wrong)}" if wrong else "large: all well")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
