"""Process groups of torch's among the ranks of one generation: made without torch's own group of all ranks, which a loss ends,
and left behind when the next one comes. Today of Gloo, in the host's memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep import script_exchanges
from evenstep._core import EvenstepError
from evenstep.errors import error_of
from evenstep.exits import left_in_children, stop_at_exit
from evenstep.group_end import first_line

MAKERS: dict[str, Callable[[Any, int, int, timedelta], Any]] = {
    "gloo": lambda store, rank, ranks, timeout: dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)
}
"""Of each backend that a generation's groups can have, what makes its part of one. Called on a thread of its own."""

_CONNECT_SECONDS = 60.0  # Gloo waits five times as long for a rank that died while it connected
_LOOK_SECONDS = 0.01
_LEAVE_SECONDS = 0.5


class UnderWay(Protocol):
    @property
    def over(self) -> bool: ...


def open_torch_group(
    backend: str,
    store: Any,
    rank: int,
    ranks: int,
    *,
    name: str,
    timeout_seconds: float,
    look: Callable[[], None] | None = None,
) -> Any:
    """Collective over its ranks, which meet in `store` under `name`. look: called while they come together; raises where the group is
    to be made no more. EvenstepError: EVEN_ERR_PEER_LOST, a rank ended meanwhile, or does not come."""
    made = make_backend(backend, store, rank, ranks, name=name, timeout_seconds=timeout_seconds, look=look)
    return _as_group(backend, made, store, rank, ranks, name)


def make_backend(
    backend: str,
    store: Any,
    rank: int,
    ranks: int,
    *,
    name: str,
    timeout_seconds: float,
    look: Callable[[], None] | None = None,
) -> Any:
    """The same, without what torch.distributed's functions ask of a group: for calls of its own methods."""
    limit = timeout_seconds if look is None else min(timeout_seconds, _CONNECT_SECONDS)
    making = _Making(MAKERS[backend], dist.PrefixStore(f"{name}/", store), rank, ranks, timedelta(seconds=limit))
    try:
        while not making.over.wait(_LOOK_SECONDS):
            if look is not None:
                look()
        made = making.result()
    except RuntimeError as error:
        if isinstance(error, EvenstepError):
            raise
        words = (
            f"rank {rank} of {ranks} could not make the process group {name} of torch ({backend}): {first_line(error)}"
        )
        fix = "another rank has ended meanwhile, or cannot be reached: see what it says"
        raise error_of("EVEN_ERR_PEER_LOST", words, fix) from error
    made._set_default_timeout(timedelta(seconds=timeout_seconds))
    return left_in_children(made)


class _Making:
    """On a thread of its own: where a rank dies while the others connect, Gloo waits for it, and nothing ends that."""

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        self.over = threading.Event()
        self._made: Any = None
        self._error: BaseException | None = None
        self._ask = lambda: make(*given)
        self._thread = threading.Thread(target=self._run, name="evenstep-torch-group", daemon=True)
        self._thread.start()
        stop_at_exit(self)

    def _run(self) -> None:
        try:
            self._made = self._ask()
        except BaseException as error:
            self._error = error
        finally:
            self.over.set()

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made

    def stop(self, seconds: float) -> None:
        """For `exits`."""
        self._thread.join(seconds)


def _as_group(backend: str, made: Any, store: Any, rank: int, ranks: int, name: str) -> Any:
    """With what torch.distributed's functions ask of a group; torch's list of groups has it, as one that is none of the script's."""
    group = dist.ProcessGroup(store, rank, ranks)
    kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
    group._set_default_backend(kind)
    for device in dist.Backend.backend_capability.get(backend, ["cpu"]):
        group._register_backend(torch.device(device), kind, made)
    group._set_group_name(name)
    left_in_children(group)
    script_exchanges.is_ours(group)
    dist.distributed_c10d._world.pg_map[group] = (backend, store)
    return group


def forget(groups: Iterable[Any]) -> None:
    """They are of a generation that is over, and in torch's list no more: their end comes when nobody refers to them."""
    for group in groups:
        dist.distributed_c10d._world.pg_map.pop(group, None)


def let_go(groups: Iterable[Any], under_way: Iterable[UnderWay]) -> None:
    """Before nobody refers to them, once their calls have ended or were made to: a group's end waits for them. Where one goes on all the
    same (its message was half read when the connection ended: evenstep.group_end.wait_for), its group has no end."""
    begun = list(under_way)
    until = time.monotonic() + _LEAVE_SECONDS
    while not (over := all(one.over for one in begun)) and time.monotonic() < until:
        time.sleep(0.001)
    for group in groups if not over else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
