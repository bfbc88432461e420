"""Ranks of tests that start as programs are there in 0.8 s of a core, not in 2.8: torch with less of what tests do not use.

Every `optimizer.step()` of torch imports its compiler, `torch._dynamo`, to tell it where a graph would break, which is
nothing outside `torch.compile`: here it does not, nor where deterministic kernels are asked for. And the garbage collector does not go over torch's modules while they are
loaded, nor at the end. `tests/python/conftest.py` puts this folder on PYTHONPATH; EVENSTEP_TEST_FRESH=1 leaves it out. All
else of torch is as it is, torch.compile too; ranks forked by rank_server.py have the compiler, and are tested with it.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any


def _without_graph_breaks(step: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's `_use_grad_for_differentiable` does, without asking the compiler."""
    import torch

    @functools.wraps(step)
    def with_gradients_as_asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return step(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return with_gradients_as_asked


class _Torch(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        try:
            super().exec_module(module)
            gc.freeze()
        finally:
            gc.enable()
        vars(module)["use_deterministic_algorithms"] = _deterministic(vars(module)["use_deterministic_algorithms"])


def _deterministic(whole: Callable[..., None]) -> Callable[..., None]:
    """torch's own, once the compiler is there, which it tells."""
    import torch

    def use(mode: bool, *, warn_only: bool = False) -> None:
        if "torch._inductor" in sys.modules:
            whole(mode, warn_only=warn_only)
        else:
            torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)

    return use


class _Optimizers(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["_use_grad_for_differentiable"] = _without_graph_breaks
        for method in vars(module.Optimizer).values():
            disabled = getattr(method, "__wrapped__", None)
            if isinstance(disabled, FunctionType):  # where torch._disable_dynamo keeps what the compiler gave it
                vars(disabled)["__dynamo_disable"] = disabled


LOADERS = {"torch": _Torch, "torch.optim.optimizer": _Optimizers}


class _Finder:
    """Finds these modules as Python would, and has them loaded by the above."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in LOADERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = LOADERS[name](spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
