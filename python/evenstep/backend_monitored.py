"""monitored_barrier of ranks whose data goes over Gloo. They meet in the store: Gloo's own names absent ranks on rank 0 alone, lets
the others wait for the group's whole limit, and leaves the connections broken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.errors import error_of

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
