"""Ranks of tests that start as programs are there in 0.6 s of a core, not in 2.8: torch with less of what tests do not use.
They end in a tenth of a second less, too (`_leave_torch_whole`), but where EVENSTEP_TEST_WHOLE_END is set.

Every `optimizer.step()` of torch imports its compiler, `torch._dynamo`, to tell it where a graph would break, which is
nothing outside `torch.compile`: here it does not, nor where deterministic kernels are asked for. And the garbage collector does not go over torch's modules while they are
loaded, nor at the end. `tests/python/conftest.py` puts this folder on PYTHONPATH; EVENSTEP_TEST_FRESH=1 leaves it out. All
else of torch is as it is, torch.compile too; ranks forked by rank_server.py have the compiler, and are tested with it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery  # not importlib.abc, which reads twenty modules more, also where there is no torch
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

# What torch imports at its start and a training on CPUs does not use: quantisation, operations on tensors without
# values, distributions, masked tensors, words of documentation (numpy's, too), what fetches models.
LATER = (
    "numpy._core._add_newdocs",
    "numpy._core._add_newdocs_scalars",
    "torch._meta_registrations",
    "torch._tensor_docs",
    "torch._torch_docs",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.hub",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
)


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


def _give_generators_their_metaclass(torch: Any) -> None:
    """What `torch._prims.rng_prims` does, which is among what is read later. torch 2.12 and older has no such thing."""
    give = getattr(torch._C, "_set_generator_metaclass", None)
    if give is None or "torch._prims.rng_prims" in sys.modules:
        return
    try:
        from torch._custom_class_base import CustomClassBaseMeta as Metaclass  # since torch 2.14
    except ImportError:
        from torch._opaque_base import OpaqueBaseMeta as Metaclass
    give(Metaclass)


class _Torch(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        try:
            super().exec_module(module)
            _give_generators_their_metaclass(module)
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


class _Unread(ModuleType):
    """A module that is there, and is read when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__warningregistry__") or not _read(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class _Later(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Unread


class _There:
    """Of a module that has come while others were read for it. Python would run it a second time, by its own spec, and what has
    registered with the first would be missing from the second."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, self)

    def create_module(self, spec: Any) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_reading = threading.RLock()


def _read(module: ModuleType) -> bool:
    """Whether there was something to be read."""
    with _reading:
        own = vars(module)
        if "__being_read__" in own:  # by this thread: what is missing, is
            return False
        if type(module) is _Unread:
            own["__being_read__"] = True
            assert isinstance(module.__loader__, _Later)
            importlib.machinery.SourceFileLoader.exec_module(module.__loader__, module)
            del own["__being_read__"]
            module.__class__ = ModuleType
        return True


LOADERS = {"torch": _Torch, "torch.optim.optimizer": _Optimizers, **dict.fromkeys(LATER, _Later)}


class _Finder:
    """Finds these modules as Python would, and has them loaded by the above."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name in (
            "torch._decomp",
            "torch._dynamo",
            "torch._functorch.aot_autograd",
        ):  # they want to know all operations
            for late in LATER:
                if late in sys.modules:
                    _read(sys.modules[late])
            if name in sys.modules:
                _There(sys.modules[name])
                return sys.modules[name].__spec__
        if name not in LOADERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = LOADERS[name](spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def _leave_torch_whole() -> None:
    """The last of Python's functions at the end: what torch and numpy made is neither taken apart module by module, nor by the destructors
    of their libraries. The script's own and evenstep's are, and the exit status is the one that Python ends with."""
    if "torch" not in sys.modules:
        return
    import ctypes

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("numpy", "torch", "torchgen"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            sys.modules[name] = None  # type: ignore[assignment]  # as Python does: who imports it now is told
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called first of all by exit(), with its status
    libc.__cxa_atexit(libc.fflush, None, None)  # before that


if "EVENSTEP_TEST_WHOLE_END" not in os.environ:
    atexit.register(_leave_torch_whole)
