"""How the ranks of a group find each other's shared memory: through torch's store, once, when the group is made."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.comm_debug import explain

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_ELSEWHERE = "elsewhere"


def _place() -> str:
    """The same for all processes that can open each other's memory, different for any others."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{host} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


def _get(store: Store, key: str, timeout_seconds: float) -> str:
    store.wait([key], timedelta(seconds=timeout_seconds))
    return store.get(key).decode()


def _announce(store: Store, prefix: str, ranks: int, arena_bytes: int, timeout_seconds: float) -> int | None:
    """Rank 0: makes the segment and says where it is, once all ranks are known to be on this host."""
    try:
        places = {_place()}
        places.update(_get(store, f"{prefix}/{rank}", timeout_seconds) for rank in range(1, ranks))
        fd = _core.Comm.create_segment(ranks, arena_bytes) if len(places) == 1 else None
    except Exception as error:
        store.set(f"{prefix}/segment", f"error {error}")
        raise
    store.set(f"{prefix}/segment", _ELSEWHERE if fd is None else f"{os.getpid()}:{fd}")
    return fd


def _find(store: Store, prefix: str, rank: int, timeout_seconds: float) -> int | None:
    """The other ranks: the descriptor of the segment that rank 0 announces."""
    store.set(f"{prefix}/{rank}", _place())
    words = _get(store, f"{prefix}/segment", timeout_seconds)
    if words == _ELSEWHERE:
        return None
    if words.startswith("error "):
        raise RuntimeError(f"rank 0 could not make the group's shared memory: {words[6:]}")
    process, fd = words.split(":")
    return _core.open_peer_fd(int(process), int(fd))


def open_group(
    store: Store,
    rank: int,
    ranks: int,
    *,
    name: str = "group",
    arena_bytes: int = 0,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
) -> _core.Comm | None:
    """Opens a group over `store`; collective over its `ranks` ranks. None where they are not all on one host.

    `name` tells groups of one store apart; a restarted job (TORCHELASTIC_RESTART_COUNT) has names of its own.
    """
    if ranks == 1:
        fd: int | None = _core.Comm.create_segment(1, arena_bytes)
    else:
        prefix = f"evenstep/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if rank == 0:
            fd = _announce(store, prefix, ranks, arena_bytes, timeout_seconds)
        else:
            fd = _find(store, prefix, rank, timeout_seconds)
    if fd is None:
        return None
    try:
        comm = _core.Comm(fd, rank, ranks, arena_bytes, timeout_seconds, spin)
    finally:
        os.close(fd)
    if ranks > 1:
        # All have come: nobody needs the keys, and a later group of this name must not find them, nor lose its own.
        if rank == 0:
            for key in ("segment", *map(str, range(1, ranks))):
                store.delete_key(f"{prefix}/{key}")
        comm.barrier()
        explain(name, comm, "at its opening")
    return comm
