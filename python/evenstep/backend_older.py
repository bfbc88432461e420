"""What older versions of torch need of a process group that is written in Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from evenstep.backend_futures import is_python

_FROM_CPP = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
)
"""The collectives that their PyProcessGroup calls in Python (torch/csrc/distributed/c10d/PyProcessGroup.hpp)."""


class OlderNamesMixin:
    """The names of torch before 2.13."""

    all_gather_single: Callable[..., Any]
    all_gather_single_coalesced: Callable[..., Any]
    reduce_scatter_single: Callable[..., Any]
    reduce_scatter_single_coalesced: Callable[..., Any]

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)

    def allgather_into_tensor_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced(output_lists, input_list, opts)

    def _reduce_scatter_base(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def reduce_scatter_tensor_coalesced(self, outputTensors: Any, inputTensors: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced(outputTensors, inputTensors, opts)


_kept: set[dist.Work] = set()


class _Kept:
    """Of a Work that C++ has: Python's half stays until C++ has waited for it, or has its future."""

    __slots__ = ()
    is_for_cpp = True

    def wait(self, *limit: Any) -> bool:
        try:
            return bool(super().wait(*limit))  # type: ignore[misc]
        finally:
            if self.is_completed():  # type: ignore[attr-defined]
                _kept.discard(self)  # type: ignore[arg-type]

    def get_future(self) -> Any:
        _kept.discard(self)  # type: ignore[arg-type]
        return super().get_future()  # type: ignore[misc]


@functools.cache
def _kept_kind(kind: Any) -> Any:
    return type(kind)(f"Kept{kind.__name__}", (_Kept, kind), {"__slots__": ()})


def _outlives_python(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*words: Any, **named: Any) -> Any:
        work = method(*words, **named)
        kind: Any = type(work)
        if isinstance(work, dist.Work) and kind is not dist.Work and not is_python(sys._getframe().f_back, name):
            work.__class__ = _kept_kind(kind)
            _kept.add(work)
        return work

    return call


def keep_works_for_cpp(group: type) -> None:
    """C++ keeps only its own half of a Work that is written in Python, and waits for ever once Python's is gone, which nobody else
    holds (the first call of DistributedDataParallel, `torch.distributed._functional_collectives`): here it is held."""
    for name in _FROM_CPP:
        setattr(group, name, _outlives_python(getattr(group, name), name))


def shut_down_with_torch(group: type) -> None:
    """Their destroy_process_group shuts nobody down but NCCL, by a function of its own for each group."""
    c10d: Any = dist.distributed_c10d
    theirs = getattr(c10d, "_shutdown_backend", None)
    if theirs is None:
        return

    def shut_down(one: Any) -> None:
        if isinstance(one, group):
            one.shutdown()  # type: ignore[attr-defined]
        else:
            theirs(one)

    c10d._shutdown_backend = shut_down


def ended(backend: Any, call: str) -> None:
    """`shutdown` or `abort` of a backend of torch's: theirs of NCCL has another name, Gloo's none, and ends with its object."""
    for name in (call, f"_{call}"):
        if hasattr(backend, name):
            getattr(backend, name)()
            return
