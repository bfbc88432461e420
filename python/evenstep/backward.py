"""Wraps torch.autograd.backward, once, so that the end of a backward pass is known and gradients are finished there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class BackwardObserver(Protocol):
    def before_backward(self, losses: Any) -> None: ...
    def spares_backward(self, losses: Any) -> bool:
        """Told before_backward: whether nothing would come of the pass, so that it need not run."""

    def nested_backward(self) -> None: ...
    def after_backward(self) -> None: ...
    def failed_backward(self, error: BaseException) -> None: ...


_observer: BackwardObserver | None = None
_installed = False
_active = False


def in_backward() -> bool:
    """Whether an observed pass is under way."""
    return _active


@contextmanager
def observed_backward(observer: BackwardObserver | None) -> Iterator[None]:
    """Another one is told inside."""
    before = _observer
    observe_backward(observer)
    try:
        yield
    finally:
        observe_backward(before)


_OPTIONS = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def _is_plain(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether it is asked for the gradients of all leaves, and for nothing else."""
    given = dict(zip(_OPTIONS, arguments)) | options
    return not (given.get("retain_graph") or given.get("create_graph") or given.get("inputs") is not None)


def observe_backward(observer: BackwardObserver | None) -> None:
    """Sets who is told; wraps the function on first use. Passes inside a pass (reentrant checkpointing) only report
    themselves as nested."""
    global _observer, _installed
    _observer = observer
    if _installed or observer is None:
        return
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*arguments: Any, **options: Any) -> None:
        global _active
        watcher = _observer
        if watcher is None:
            return original(*arguments, **options)
        if _active:  # inside another one, maybe on one of autograd's own threads
            watcher.nested_backward()
            return original(*arguments, **options)
        _active = True
        try:
            tensors = arguments[0] if arguments else options.get("tensors")
            watcher.before_backward(tensors)
            try:
                if not (_is_plain(arguments, options) and watcher.spares_backward(tensors)):
                    original(*arguments, **options)
            except BaseException as error:
                watcher.failed_backward(error)
                raise
            watcher.after_backward()
        finally:
            _active = False

    torch.autograd.backward = backward
    _installed = True
