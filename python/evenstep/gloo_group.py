"""A Gloo group of torch's that all ranks have when the first of them goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep.errors import error_of
from evenstep.group_end import closed_peers

_LOOK = timedelta(seconds=2)  # who waits for longer looks whether a connection is closed


def _all_have_it(store: Any) -> bool:
    try:
        return bool(store.check(["all"]))
    except RuntimeError:  # the rank that has the store has ended
        return False


def told_to_all(broadcast: Callable[[torch.Tensor], object]) -> str:
    """A word that no other group has; `broadcast` brings rank 0's bytes to all."""
    word = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
    broadcast(word)
    return bytes(word.tolist()).hex()


def open_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, str]:
    """The group, and a word that no other group has. Collective over its ranks.

    Gloo alone returns on each rank when this rank is connected: where one then ends the group at once, as after a call that differs,
    others that are connected and have not been woken yet find their connection closed, and have no group (gloo,
    transport/tcp/pair.cc: `waitUntilConnected`). Raises what Gloo raises while it connects; then EvenstepError: EVEN_ERR_PEER_LOST, a
    rank ended meanwhile; EVEN_ERR_TIMEOUT."""
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    life = told_to_all(lambda word: group.broadcast([word], dist.BroadcastOptions()).wait())
    store = dist.PrefixStore(f"made/{life}/", store)
    if store.add("ranks", 1) == size:
        store.set("all", "")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait(["all"], min(_LOOK, left))
            return group, life
        except RuntimeError:
            closed = closed_peers(group)
            if _all_have_it(store):  # so they may have ended the group since
                return group, life
            if closed:
                which = ", ".join(map(str, closed))
                words = f"rank {which} has ended while rank {rank} and others made a Gloo group"
                raise error_of("EVEN_ERR_PEER_LOST", words, "see what it says", closed[0]) from None
            if left <= _LOOK:
                words = f"not all of {size} ranks have made their Gloo group after {timeout.total_seconds():g} s"
                raise error_of(
                    "EVEN_ERR_TIMEOUT", words, "see what the other ranks say, or give a longer timeout"
                ) from None
