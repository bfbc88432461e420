"""Futures whose value C++ reads as a list of tensors: one that Python made holds an object to it."""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any

import torch

_SOURCE = """
def wait(done: Future[None], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def follow(done: Future[None], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(wait, done, tensors)
"""


@functools.cache
def _compiled() -> Any:
    return torch.jit.CompilationUnit(_SOURCE)  # type: ignore[no-untyped-call]


def is_python(caller: FrameType | None, name: str) -> bool:
    """Whether a method was called by this frame's code, not by C++ that this code has called: it then has the name, or is of
    ours, which calls nothing of C++ that would."""
    if caller is None:  # a thread of C++
        return False
    return name in caller.f_code.co_names or caller.f_globals.get("__name__", "").startswith("evenstep.")


def for_cpp(future: Any, result: Any) -> Any:
    """The future, for C++, of a call that has written `result`, or one that ends after it, with it. DDP's built-in hook
    FP16_COMPRESS alone asks for a list of tensors, and all-reduces a float16 one. The detour is by TorchScript's threads,
    which alone make such a future, and is not for callbacks that wait: a pool of one thread would never end them."""
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], torch.Tensor):
        return future
    return _compiled().follow(future, result) if result[0].dtype == torch.float16 else future
