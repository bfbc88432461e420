"""monitored_barrier; of ranks whose data goes over Gloo they meet in the store: Gloo's own names absent ranks on rank 0 alone, lets
the others wait for the group's whole limit, and leaves the connections broken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from evenstep import _core
from evenstep.backend_tensors import WAITS_UNASKED
from evenstep.backend_work import absent
from evenstep.errors import error_of
from evenstep.rendezvous import has_ended

if TYPE_CHECKING:
    from torch.distributed import Store

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_PATIENCE_SECONDS = 2.0


def meet(
    store: Store, place: str, number: int, rank: int, ranks: int, seconds: float, ended: Callable[[int], bool]
) -> tuple[list[int], float]:
    """The ranks that did not come, none where all did, and how long was waited for them. All ranks hear the same, also those
    that come when it has been said.

    `number` counts a group's barriers, `place` has a name that no other group of the store has. `ended` knows of some ranks
    that they will never come.
    """
    try:
        return _meet(store, place, number, rank, ranks, seconds, ended)
    except RuntimeError as error:
        if type(error).__name__ != "DistNetworkError":
            raise
        raise _store_lost() from error


def _meet(
    store: Store, place: str, number: int, rank: int, ranks: int, seconds: float, ended: Callable[[int], bool]
) -> tuple[list[int], float]:
    keys = [f"{place}/{number}/{other}" for other in range(ranks)]
    said = f"{place}/{number}/said"
    begin, pause = time.monotonic(), _SHORTEST_PAUSE
    store.set(keys[rank], "here")
    while not store.check([said]):
        missing = [] if store.check(keys) else [other for other in range(ranks) if not store.check([keys[other]])]
        waited, dead = time.monotonic() - begin, [other for other in missing if ended(other)]
        if not missing or dead or waited >= seconds:
            words = json.dumps([dead or missing, min(waited, seconds)])
            store.compare_set(said, "", words)  # the first one says it
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    missing, waited = json.loads(store.get(said))
    if not missing:  # all are here, so nobody is in the barrier before this one any more
        store.delete_key(f"{place}/{number - 1}/{rank}")
        store.delete_key(f"{place}/{number - 1}/heard/{rank}")
        if rank == 0:
            store.delete_key(f"{place}/{number - 1}/said")
    heard = f"{place}/{number}/heard"
    if rank != 0:
        store.set(f"{heard}/{rank}", "yes")
    else:  # the store may be its own, and go with it before the others have heard
        until = time.monotonic() + _PATIENCE_SECONDS
        others = [other for other in range(1, ranks) if other not in missing]
        while any(not store.check([f"{heard}/{other}"]) and not ended(other) for other in others):
            if time.monotonic() >= until:
                break
            time.sleep(_SHORTEST_PAUSE)
    return missing, waited


def _store_lost() -> _core.EvenstepError:
    fix = "the end of rank 0's own output says why; where it says nothing, see that MASTER_ADDR can be reached"
    words = "the process that keeps the job's store (rank 0, or the launcher) ended during monitored_barrier"
    return error_of("EVEN_ERR_PEER_LOST", words, fix, 0)


class MonitoredMixin:
    """Of a group."""

    _comm: _core.Comm | None
    _life: str
    _members: Sequence[int] | None
    _monitored: int
    _rank: int
    _size: int
    _store: Store
    _timeout: timedelta
    barrier: Callable[..., Any]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a time limit of its own, whose error names a rank that did not come, all of them with
        `wait_all_ranks`. (torch's function of this name is for Gloo alone: call it on the group.)"""
        self._monitored += 1
        if self._comm is None:
            self._monitored_by_store((timeout or self._timeout).total_seconds(), wait_all_ranks)
            return
        options = dist.BarrierOptions()
        if not WAITS_UNASKED:
            options.asyncOp = False
        if timeout is not None:
            options.timeout = timeout
        keys = [f"evenstep-monitored/{self._life}/{self._monitored}/{rank}" for rank in range(self._size)]
        if wait_all_ranks:
            self._store.set(keys[self._rank], "here")
        try:
            work = self.barrier(options)
            if work is not None:
                work.wait()
        except _core.EvenstepError as error:
            missing = [rank for rank, key in enumerate(keys) if wait_all_ranks and not self._store.check([key])]
            if error.status != "EVEN_ERR_TIMEOUT" or not missing:
                raise
            raise absent(missing, (timeout or self._timeout).total_seconds()) from error
        if wait_all_ranks:
            self._store.delete_key(keys[self._rank])

    def _monitored_by_store(self, seconds: float, wait_all_ranks: bool) -> None:
        place = f"evenstep-monitored/{self._life}"
        members = self._members or range(self._size)
        missing, waited = meet(
            self._store,
            place,
            self._monitored,
            self._rank,
            self._size,
            seconds,
            lambda rank: has_ended([members[rank]]),
        )
        if missing:
            raise absent(missing if wait_all_ranks else missing[:1], waited)
