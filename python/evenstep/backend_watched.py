"""What watches torch's calls sees those of the backend, too: torch.profiler, and modes of its dispatcher (CommDebugMode),
which a process group that is written in Python goes past."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined,no-any-return"

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.utils import _python_dispatch

from evenstep.backend_forms import in_full, usual_form
from evenstep.backend_messages import MessageWork
from evenstep.backend_tensors import as_real, is_ours, op_of
from evenstep.backend_work import LaterWork

_SHOWN = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
"""A group's methods: what the profiler calls them, and which argument's sizes it shows."""
_GLOOS = ("gather", "scatter", "all_to_all", "send", "recv")
"""What is Gloo's also where shared memory connects the ranks of each host."""
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")

_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
_UNEQUAL = ("allgather", "allgather_coalesced", "alltoall", "all_to_all_single")
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Within(threading.local):
    """Whether this thread is in a call that is watched: what that calls of its own group is a part of it."""

    call = False


within = _Within()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    for one in [given] if isinstance(given, torch.Tensor) else given or ():
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _recorded(group: Any, shown: str, tensors: list[torch.Tensor], call: Callable[[], Any]) -> Any:
    """Makes the call inside two records: one that lasts until its Work is done, and one of the call itself with its sizes, as
    torch keeps none of a record that may end on another thread. (Gloo's are gloo:all_reduce and c10d::allreduce_.)"""
    record = profiler.record_function(f"evenstep:{shown}")
    words = {"group": group.group_name, "ranks": group.size()}
    with record:
        with torch._C._profiler._RecordFunctionFast(f"evenstep:{shown}.call", tensors, words):
            work = call()
        if isinstance(work, (LaterWork, MessageWork)):
            work.keep_record(record)
    return work


# -- modes of the dispatcher --


def _like(given: Any, written: bool = False) -> Any:
    """What stands in for tensors, of any form; None, numbers and options as they are. Memory for all elements is there where
    they will be written, else for one."""
    if isinstance(given, torch.Tensor):
        size = given.numel()
        return torch.empty(size if written else 1, dtype=given.dtype, device=given.device).expand(size)
    return [_like(one, written) for one in given] if isinstance(given, (list, tuple)) else given


def _stand_ins(method: str, given: Sequence[Any]) -> list[Any]:
    """Arguments of the group that moves nothing, and copies inputs to outputs as though all ranks' were alike."""
    writes = _SHOWN[method][1] == 1 or method == "scatter"
    ready = [_like(one, writes and at == 0) for at, one in enumerate(given)]
    if method in _UNEQUAL and len(ready) > 1:
        inputs = given[1]
        if method == "allgather":
            ready[0] = [[_like(own, True) for _ in outputs] for own, outputs in zip(inputs, given[0])]
        elif method == "allgather_coalesced":
            ready[0] = [_like(inputs, True) for _ in given[0]]
        else:
            ready[0] = _like(inputs, True)
    return ready


def _moves_nothing(group: Any) -> Any:
    """torch's group for playing, as large as this one: its calls go through the dispatcher, and end at once."""
    made = group.__dict__.get("_for_modes")
    if made is None:
        kind = torch._C._distributed_c10d.FakeProcessGroup
        fake = getattr(kind, "_create_internal", kind)(group.rank(), group.size())
        made = dist.ProcessGroup(group.rank(), group.size())
        for device in ("cpu", "cuda", "xpu"):
            made._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)
        group._for_modes = made
    return made


def _show_to_modes(group: Any, method: str, given: Sequence[Any], named: dict[str, Any]) -> None:
    """Has the modes that are on see the call that Gloo's group would make, on stand-ins. Nothing where one of them is torch's
    own for tensors without data (fake, functional): these take no stand-in."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if any(getattr(mode, "_mode_key", None) is not None for mode in stack):
        return
    with _python_dispatch._disable_current_modes():
        ready, other = _stand_ins(method, given), _moves_nothing(group)
    theirs = getattr(other, method, None) or getattr(other, _OLDER[method])
    theirs(*ready, **named)


def _by_gloo(group: Any, shown: str, tensors: list[torch.Tensor], options: Any) -> bool:
    """Whether Gloo makes the call, and records it. Where its hosts' ranks share memory it has some of them."""
    if group._engine is None or group._comm is not None:
        return group._engine is None
    if shown in _GLOOS or not all(map(is_ours, tensors)):
        return True
    if shown not in _REDUCES:
        return False
    op = op_of(options)
    return any(group._reducible(tensor, op) is None for tensor in as_real(tensors, op))


def _made(group: Any, method: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
    if not profiler._is_profiler_enabled:
        return method(group, *given, **named)
    shown, at = _SHOWN[method.__name__]
    tensors = list(_tensors(given[at] if len(given) > at and shown != "barrier" else None))
    by_gloo = _by_gloo(group, shown, tensors, given[at + 1] if len(given) > at + 1 else None)
    if by_gloo and not any(tensor.is_cuda for tensor in tensors):
        return method(group, *given, **named)  # Gloo records its own
    return _recorded(group, shown, tensors, lambda: method(group, *given, **named))


def seen(group: Any, method: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
    """Makes the call for what watches; for a thread that is not `within` one already."""
    within.call = True
    try:
        work = _made(group, method, given, named)
        if modes():  # once the call was accepted: errors of what it was given are its own
            _show_to_modes(group, method.__name__, given, named)
        return work
    finally:
        within.call = False


def _watchable(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__
    moves = name != "barrier"
    count, kind = usual_form(name)
    names = inspect.signature(method)

    @functools.wraps(method)
    def call(group: Any, *given: Any, **named: Any) -> Any:
        if kind is not None and (named or len(given) != count or type(given[-1]) is not kind):
            given, named = in_full(name, given, named), {}
        elif named:  # who watches asks for each by its place
            given, named = names.bind(group, *given, **named).args[1:], {}
        group.calls_made += moves
        if (profiler._is_profiler_enabled or modes()) and not within.call:
            return seen(group, method, given, named)
        return method(group, *given, **named)

    return call


def let_watch(group: type) -> None:
    """All calls but all-reduce, which looks itself: there a function more would be felt."""
    group.calls_made = 0
    for name in _SHOWN.keys() - {"allreduce"}:
        setattr(group, name, _watchable(getattr(group, name)))
