"""Collectives and messages of more than 4 GiB, and of more than 2^31 elements, between two or three ranks, gradients, states of
an optimizer and checkpoints of as much, each checked to the last byte: `make large`. Each part has ranks of its own, one after
the other, and takes a minute or two; not a part of `make test`.

    python scripts/large.py [PART …]     # without names: all that can be had here

Parts: `plain`, `arena` and `chain` (es.comm in shared memory: of the ranks' own memory, of the group's, and of ranks that share one
core), `torch` (torch.distributed on backend evenstep), `ucx`, `hosts`, `hosts-scatter` (its reduce-scatter), `torch-hosts` and
`torch-hosts-two` (torch.distributed on three ranks of two hosts, and on two: network namespaces, for which root is needed), `mpi`,
`prepare` (gradients of es.prepare), `optim` and `optim-elements` (es.optim, on two ranks and on one), `checkpoint` and
`checkpoint-ranks` (of one rank, and of two, in other files then). What memory each needs stands below; where that is not free the
part is not run, and that is said; so it is of what is not installed. MPI needs a launcher: EVENSTEP_TEST_MPIRUN, else an `mpirun` in
build/mpi or on the path. A checkpoint goes where temporary files do, or to EVENSTEP_LARGE_FOLDER.
EVENSTEP_LARGE_SCALE=16 makes a sixteenth of everything, to try a part out.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

SCRIPTS = pathlib.Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path.insert(0, str(ROOT / "bench"))

from heading import print_heading  # noqa: E402
from shaped_hosts import FIRST_ADDRESS, PORT, ShapedHosts  # noqa: E402
from shaped_hosts import missing as no_namespaces  # noqa: E402

BESIDE_SCATTER = ("all_reduce", "broadcast", "all_gather", "all_to_all", "send")
ALL = (*BESIDE_SCATTER, "reduce_scatter")
TORCH_CALLS = ("all_reduce", "all_reduce_bf16", "broadcast", "send")
TORCH_OTHERS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "both_ways")


@dataclass(frozen=True)
class Part:
    """Ranks of one program, and what they need."""

    gib: float
    """Of free memory, all ranks together."""
    words: tuple[str, ...]
    engine: str = "shm"
    hosts: str = "aa"
    """Where each rank is."""
    one_core: bool = False
    namespaces: bool = False
    """Each host is one, else they are only called so."""


def comm(gib: float, *calls: str, memory: str = "plain", engine: str = "shm", hosts: str = "aa") -> Part:
    return Part(gib, ("large_comm.py", memory, *calls), engine, hosts)


PARTS = {
    "plain": comm(9.5, *ALL),
    "arena": comm(9.5, *ALL, memory="arena"),
    "chain": Part(9.5, ("large_comm.py", "plain", *ALL), one_core=True),
    "torch": Part(13, ("large_torch.py",)),
    "ucx": comm(9.5, *ALL, engine="ucx"),
    "hosts": comm(13, *BESIDE_SCATTER, engine="hosts", hosts="aab"),
    "hosts-scatter": comm(13.5, "reduce_scatter", engine="hosts", hosts="aab"),
    "torch-hosts": Part(14, ("large_torch.py", *TORCH_CALLS), "hosts", "aab", namespaces=True),
    "torch-hosts-two": Part(13, ("large_torch.py", *TORCH_OTHERS), "hosts", "ab", namespaces=True),
    "mpi": comm(9.5, *ALL, engine="mpi"),
    "prepare": Part(14, ("large_prepare.py",)),
    "optim": Part(16.5, ("large_optim.py", "momentum")),
    "optim-elements": Part(16.5, ("large_optim.py", "elements"), hosts="a"),
    "checkpoint": Part(9.5, ("large_checkpoint.py",), hosts="a"),
    "checkpoint-ranks": Part(14, ("large_ranks.py",)),
}


def mpirun() -> str | None:
    built = sorted(str(path) for path in (ROOT / "build" / "mpi").glob("*/bin/mpirun"))
    return os.environ.get("EVENSTEP_TEST_MPIRUN", "").split(":")[0] or shutil.which("mpirun") or next(iter(built), None)


def free_gib() -> float:
    """What the machine has, and what this process's control group allows."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) / 2**20
    group = pathlib.Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else "max"
    if limit != "max":
        free = min(free, (int(limit) - int(group.with_name("memory.current").read_text())) / 2**30)
    return free


def missing(part: Part) -> str | None:
    """Why it cannot run here."""
    from evenstep.hosts import ucx_state

    version, why = ucx_state()
    if part.engine in ("ucx", "hosts") and not version:
        return f"no UCX: {why}"
    if part.namespaces and no_namespaces():
        return no_namespaces()
    if part.engine == "mpi" and mpirun() is None:
        return "no mpirun (EVENSTEP_TEST_MPIRUN, scripts/install_mpi.sh)"
    free, needed = free_gib(), part.gib / int(os.environ.get("EVENSTEP_LARGE_SCALE", "1"))
    return f"{needed:g} GiB of memory are needed, {free:.1f} are free" if free < needed else None


def run(part: Part) -> int:
    """The worst exit code of the ranks."""
    with contextlib.ExitStack() as stack:
        names = [""] * len(set(part.hosts))
        if part.namespaces:
            names = stack.enter_context(ShapedHosts(len(names), None)).names
        return run_on(part, names)


def run_on(part: Part, names: list[str]) -> int:
    """names: of the hosts' namespaces."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "EVENSTEP_COMM_ENGINE": part.engine}
    environment = {**os.environ, **place, "EVENSTEP_COMM_COSTS": "off"}
    own = [sys.executable, str(SCRIPTS / part.words[0]), *part.words[1:]]
    if part.engine == "mpi":
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        launcher = mpirun()
        assert launcher is not None
        return subprocess.run([launcher, "-n", str(len(part.hosts)), *own], env={**environment, **allowed}).returncode
    ranks = []
    for rank, host in enumerate(part.hosts):
        at = {"WORLD_SIZE": str(len(part.hosts)), "RANK": str(rank)}
        at |= {"EVENSTEP_HOST_ID": host} if part.engine == "hosts" else {}
        words = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *own] if part.one_core else own
        if part.namespaces:
            words = ["ip", "netns", "exec", names["ab".index(host)], *words]
            at |= {
                "MASTER_ADDR": FIRST_ADDRESS,
                "MASTER_PORT": str(PORT),
                "UCX_TLS": "tcp,self",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
        ranks.append(subprocess.Popen(words, env={**environment, **at}))
    return max(abs(rank.wait()) for rank in ranks)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"large: no part {', '.join(unknown)}: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    print_heading("More than 4 GiB on each rank, checked byte by byte")
    wrong, left = [], []
    for name in names or PARTS:
        part = PARTS[name]
        why = missing(part)
        if why is not None:
            print(f"{name}: not run: {why}", flush=True)
            left.append(name)
            continue
        print(f"{name} ({part.gib} GiB):", flush=True)
        began = time.monotonic()
        if run(part) != 0:
            wrong.append(name)
        print(f"      {time.monotonic() - began:.0f} s", flush=True)
    print(f"large: wrong: {', '.join(wrong)}" if wrong else "large: all well", flush=True)
    if left:
        print(f"large: not run: {', '.join(left)}")
    return int(bool(wrong) or bool(names and left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
