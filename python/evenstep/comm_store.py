"""How the ranks of `es.comm` meet where they may be on several hosts: at torch's store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.comm_data import argument_error

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class OverStore:
    """How a group whose ranks may be on several hosts was opened: over torch's store. `members` are its ranks' numbers in
    the job."""

    def __init__(self, store: Store, name: str, members: list[int]) -> None:
        self._store, self._name, self._members = store, name, members
        self._parts = 0

    def open(self, rank: int, arena_bytes: int, timeout: float) -> _core.Comm:
        """`rank` is this process's in the group. Collective over the members."""
        from evenstep.rendezvous import open_group

        comm = open_group(
            self._store,
            rank,
            len(self._members),
            name=self._name,
            arena_bytes=arena_bytes,
            timeout_seconds=timeout,
            members=self._members,
        )
        if comm is None:
            raise argument_error(
                "only Gloo can connect the group's ranks (hosts without UCX, or EVENSTEP_COMM_ENGINE=gloo or hosts-gloo), and es.comm "
                "does not use it",
                "apt-get install libucx0 on every host and unset EVENSTEP_COMM_ENGINE, or use torch.distributed",
            )
        return comm

    def part(self, chosen: list[int]) -> OverStore:
        """Some of the members, who are to open it. Every member calls it, so that all number the parts alike."""
        self._parts += 1
        members = [self._members[one] for one in chosen]
        return OverStore(self._store, f"{self._name}/part{self._parts}", members)


_kept_store: tuple[int, Store] | None = None


def torch_store() -> Store:
    """What ranks of several hosts share. Ours is kept: rank 0's serves the others, who may be at the next group already
    when it has opened this one. A forked process opens its own."""
    global _kept_store
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if _kept_store is None or _kept_store[0] != os.getpid():
        _kept_store = (os.getpid(), next(iter(dist.rendezvous("env://")))[0])
    return _kept_store[1]
