"""What a launcher (mpirun, mpiexec, srun) told this process, put into the variables that torchrun sets."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from evenstep._core import EvenstepError
from evenstep.process_stat import process_stat

_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy", "orterun", "orted"}
_LAUNCHERS |= {"prterun", "prte", "prted", "slurmstepd"}

_VARIABLES = (  # whose, rank, ranks, rank on its host, ranks on that host
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIx", "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    (
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "",
    ),  # srun --mpi=none; a batch script is no step
)


@dataclass(frozen=True)
class Place:
    """A process's place in its MPI job. `local_ranks` is 0 where the launcher does not say it."""

    launcher: str
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def _number(variables: MutableMapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdigit() else None


def _slurm_local_ranks(variables: MutableMapping[str, str]) -> int:
    """Of "2(x3),1", the tasks of each node, this node's."""
    node = _number(variables, "SLURM_NODEID")
    counts: list[int] = []
    words = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", words):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else 0


def _is_typed() -> bool:
    """Whether this was started in a shell of a terminal: job control gives each of its jobs a group of its own there."""
    stat = process_stat("self")
    if not stat:
        return False
    group, session, terminal = stat[2:5]
    return terminal != "0" and group != session


def _is_of_a_terminals_shell(variables: MutableMapping[str, str], whose: str) -> bool:
    """Whether the place is that of the shell of `srun --pty`, which what is typed in it inherits: it has no other ranks.
    (What a further srun starts there inherits the variables of the terminal, too, but not the terminal; Hydra's ranks in such
    a shell have MPI_LOCALRANKID.)"""
    if whose == "Open MPI" or "MPI_LOCALRANKID" in variables:
        return False
    return any(name in variables for name in ("SLURM_PTY_PORT", "SLURM_PTY_WIN_COL")) and _is_typed()


def _is_off(variables: MutableMapping[str, str]) -> bool:
    text = variables.get("EVENSTEP_LAUNCHER", "")
    if text not in ("", "none"):
        raise EvenstepError(
            f"EVENSTEP_LAUNCHER={text} is not known\n  fix: give none (what mpirun or srun say is not taken), or leave it out"
        )
    return text == "none"


def find_place(variables: MutableMapping[str, str]) -> Place | None:
    """This process's place as its launcher says; None where it was started by none, or EVENSTEP_LAUNCHER is none."""
    if _is_off(variables):
        return None
    for whose, rank_name, ranks_name, local_name, local_ranks_name in _VARIABLES:
        rank, ranks = _number(variables, rank_name), _number(variables, ranks_name)
        if rank is None or ranks is None or rank >= ranks or _is_of_a_terminals_shell(variables, whose):
            continue
        local = _number(variables, local_name)
        local = _number(variables, "SLURM_LOCALID") if local is None else local
        local_ranks = _number(variables, local_ranks_name) or _slurm_local_ranks(variables)
        if ranks == 1:
            if whose == "Slurm":  # a shell that srun has started, say
                return None
            local, local_ranks = 0, 1
        return Place(whose, rank, ranks, local or 0, local_ranks)
    return None


# ---- where the ranks meet ----


def launcher_process() -> int | None:
    """The launcher's process on this host that started this one, the same for all its ranks; None: not found."""
    process = os.getppid()
    while process > 1:
        try:
            name = Path(f"/proc/{process}/comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None
        stat = process_stat(process)
        if not stat:
            return None
        if name in _LAUNCHERS:
            return process
        process = int(stat[1])
    return None


def _port(words: list[str]) -> int:
    """Below those that the kernel hands out by itself."""
    return 15000 + int(hashlib.sha256("\0".join(words).encode()).hexdigest()[:8], 16) % 15000


def _slurm_meeting(variables: MutableMapping[str, str], place: Place) -> tuple[str, int] | None:
    """Where the ranks of a step of Slurm's on several hosts meet: at the first of its hosts, which has rank 0 unless tasks
    were laid out otherwise (srun -m arbitrary), and a port made from the step's numbers. None: srun did not start it."""
    if (place.rank, place.ranks) != (_number(variables, "SLURM_PROCID"), _number(variables, "SLURM_STEP_NUM_TASKS")):
        return None
    names = re.match(r"(?:[^,\[]|\[[^\]]*\])+", variables.get("SLURM_STEP_NODELIST", ""))
    if names is None:
        return None
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", names[0])  # of "gpu[08-11,13]-a,login": gpu08-a
    return first, _port([variables.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")])


def _job_port(variables: MutableMapping[str, str]) -> int:
    """A port that the ranks of one host agree on without a word: from what is the job's own."""
    process = launcher_process() or os.getppid()
    words = [str(os.getuid()), str(process)]
    words += process_stat(process)[19:20]  # its starting time only tells it from one of the same number long ago
    words += [variables.get(name, "") for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    return _port(words)


def _meet(variables: MutableMapping[str, str], place: Place) -> None:
    if place.local_ranks == place.ranks:
        variables["MASTER_ADDR"] = "127.0.0.1"
        variables.setdefault("MASTER_PORT", str(_job_port(variables)))
        return
    if (meeting := _slurm_meeting(variables, place)) is not None:
        variables["MASTER_ADDR"] = meeting[0]
        variables.setdefault("MASTER_PORT", str(meeting[1]))
        return
    from evenstep.mpi import tell_address

    try:
        address, port = tell_address(place)
    except Exception as error:
        warnings.warn(
            f"mpirun does not say where rank 0 is, and MPI cannot be asked: {str(error).splitlines()[0]}. "
            "fix: set MASTER_ADDR and MASTER_PORT for all ranks (mpirun -x MASTER_ADDR=…, or -genv)",
            stacklevel=4,
        )
        return
    variables["MASTER_ADDR"] = address
    variables.setdefault("MASTER_PORT", str(port))


def _becomes_the_program() -> bool:
    """Whether this is `python -m evenstep …`, of which the package is imported before __main__.py makes it the program: that
    one starts ranks, and is none. (Until then sys.argv begins with "-m"; sys.orig_argv there is from Python 3.10 on.)"""
    if sys.argv[:1] != ["-m"]:
        return False
    try:
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return False
    module = words[-len(sys.argv)] if len(words) > len(sys.argv) else b""  # behind it, what is in sys.argv
    return re.fullmatch(rb"(-[A-Za-z]*m)?evenstep(\.__main__)?", module) is not None


def adopt(variables: MutableMapping[str, str] | None = None) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in a process of mpirun's or srun's that
    has none of its own. On several hosts without MASTER_ADDR, MPI is started to say where rank 0 is; srun says it itself."""
    v = os.environ if variables is None else variables
    if "RANK" in v or "WORLD_SIZE" in v or _becomes_the_program():
        return
    place = find_place(v)
    if place is None:
        return
    v["RANK"], v["WORLD_SIZE"] = str(place.rank), str(place.ranks)
    v["LOCAL_RANK"] = str(place.local_rank)
    v["LOCAL_WORLD_SIZE"] = str(place.local_ranks or 1)
    if "MASTER_ADDR" not in v:
        _meet(v, place)
