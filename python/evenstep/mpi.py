"""MPI between ranks that mpirun has started: which library, whether it can be used, and groups over it."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import warnings
from pathlib import Path

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.hosts import Gather, joined
from evenstep.launcher import Place, find_place, launcher_process

_said = False
_opened: tuple[str, str] | None = None  # the version, and the library that has it

_NAMES = {
    "Open MPI": ("libmpi.so.40",),
    "MPICH": ("libmpi.so.12", "libmpich.so.12"),
    "PMIx": ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12"),
}
_FIX = (
    "start the script with `mpirun -n N python script.py` and name that mpirun's library where it is not found "
    "(EVENSTEP_MPI_LIBRARY), or unset EVENSTEP_COMM_ENGINE"
)


def _loaded() -> list[str]:
    """The MPI library that this process has already: mpi4py's."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and re.fullmatch(r"libmpi(ch|_abi)?\.so[.0-9]*", path[0].rsplit("/", 1)[-1]) and path[0] not in found:
            found.append(path[0])
    return found


def _beside(names: tuple[str, ...]) -> list[str]:
    """In the launcher's prefix, and in this Python's (wheels put both there)."""
    prefixes = []
    process = launcher_process()
    try:
        prefixes.append(Path(f"/proc/{process}/exe").resolve(strict=True).parent.parent)
    except OSError:
        pass  # another user's, or none
    prefixes.append(Path(sys.prefix))
    paths = [prefix / "lib" / name for prefix in prefixes for name in names]
    return [str(path) for path in paths if path.exists()]


def candidates(place: Place | None) -> list[str]:
    """The libraries to try, in order."""
    forced = os.environ.get("EVENSTEP_MPI_LIBRARY")
    if forced:
        return [forced]
    loaded = _loaded()
    if loaded:
        return loaded[:1]
    names = _NAMES[place.launcher if place and place.launcher in _NAMES else "PMIx"]
    return [*_beside(names), *names]


def _open_library(place: Place | None) -> tuple[str, str]:
    global _opened
    why: EvenstepError | None = None
    for library in candidates(place) if _opened is None else []:
        try:
            _opened = (_core.mpi_version(library), library)
            break
        except EvenstepError as error:
            why = why or error
    if _opened is None:
        raise why or EvenstepError("there is no MPI library")
    return _opened


def state() -> tuple[str, str]:
    """The library's version and "", or "" and why MPI cannot be used here."""
    place = find_place(os.environ)
    if (place is None or place.launcher == "Slurm") and not _loaded():
        return "", (
            "it was not started by mpirun: none of OMPI_COMM_WORLD_RANK, PMI_RANK and PMIX_RANK is set (srun does so with "
            "--mpi=pmi2 or --mpi=pmix)"
        )
    if os.environ.get("EVENSTEP_COMM_INTERFACE"):
        return "", "EVENSTEP_COMM_INTERFACE is set, which is for UCX; tell MPI itself which network to use"
    try:
        version, library = _open_library(place)
    except EvenstepError as error:
        return "", str(error).splitlines()[0]
    ours = "Open MPI" if version.startswith("Open MPI") else "MPICH"
    if place is not None and place.launcher == "Open MPI" and ours != "Open MPI":
        return "", f"mpirun is Open MPI's, but the library {library} is {version}"
    if place is not None and place.launcher == "MPICH" and ours == "Open MPI":
        return "", f"mpirun is of MPICH's kind, but the library {library} is {version}"
    return version, ""


def record() -> dict[str, str]:
    """What a rank tells the others of its MPI."""
    version, why = state()
    return {"mpi": version, "why": why, "host": socket.gethostname()}


def choose(host_of: list[int], ranks: list[dict[str, str]]) -> str:
    """The engine for ranks that want MPI: "mpi", or "hosts", with MPI between them."""
    for rank, said in enumerate(ranks):
        if not said["mpi"]:
            raise EvenstepError(
                f"EVENSTEP_COMM_ENGINE=mpi, but rank {rank} on host {said['host']} cannot use MPI ({said['why']})\n"
                f"  fix: {_FIX}"
            )
    hosts = max(host_of) + 1
    return "mpi" if hosts in (1, len(host_of)) else "hosts"


def say() -> None:
    """Once a process: what MPI does not promise."""
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "the ranks talk through MPI (EVENSTEP_COMM_ENGINE=mpi). When a rank dies, mpirun ends the whole job; where it "
            "does not, a dead rank on another host is noticed only at the time limit. While a group is opened MPI itself "
            "waits for the others, without a limit, and the memory of a call that failed may be written until the "
            "process ends.",
            stacklevel=3,
        )


def open_mpi(
    gather: Gather,
    subject: str,
    rank: int,
    ranks: int,
    *,
    arena_bytes: int = 0,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
    number: int = -1,
) -> _core.Comm:
    """A group of `ranks` ranks over MPI; `number` is what this one is called in errors."""
    library = _open_library(find_place(os.environ))[1]
    call = joined(gather, subject, rank, ranks)
    return _core.Comm.open_mpi(call, rank, ranks, arena_bytes, timeout_seconds, spin, library, number)


# ---- where rank 0 is ----


def _own_address() -> str:
    """An address of this host that others can reach: its name's, or the first that is not its own alone."""
    try:
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    except OSError:
        pass  # the name has none
    from evenstep.hosts import addresses

    return next((one for one in addresses().values() if not one.startswith("127.")), socket.gethostname())


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def tell_address(place: Place) -> tuple[str, int]:
    """Rank 0's address and a free port there, told to all ranks of the job through MPI. Collective."""
    library = _open_library(place)[1]
    rank, ranks = _core.mpi_place(library)
    words = ctypes.create_string_buffer(256)
    if rank == 0:
        words.value = f"{_own_address()} {_free_port()}".encode()
    group = _core.Comm.open_mpi(None, rank, ranks, 0, 300.0, -1, library)
    try:
        group.broadcast(ctypes.addressof(words), len(words), 0)
    finally:
        group.close()
    address, port = words.value.decode().split()
    return address, int(port)
