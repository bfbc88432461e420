"""Makes torch know the backend "evenstep" without importing torch: at once where torch is there, else when it comes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"


def _create(options: Any, backend_options: Any) -> Any:
    from evenstep.backend import create_group

    return create_group(options, backend_options)


def _register(c10d: ModuleType) -> None:
    backend = getattr(c10d, "Backend", None)  # absent where torch was built without distributed
    if backend is not None and "evenstep" not in backend.backend_list:
        backend.register_backend("evenstep", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get("EVENSTEP_JOINS") == "1":
            c10d.rendezvous = _refuse  # type: ignore[attr-defined]


def _refuse(*_: Any, **__: Any) -> None:
    """In a process that takes a lost rank's place: it would wait there for ranks that met long ago, at a store that may be gone."""
    from evenstep._core import EvenstepError

    raise EvenstepError(
        "torch.distributed.init_process_group: a process that takes a lost rank's place (--recovery replace) cannot come into "
        "the group of all ranks, which the others opened without it\n"
        "  fix: leave init_process_group to es.prepare; with --recovery shrink nobody takes a place"
    )


class _Loader(importlib.abc.Loader):
    """Runs the module as its own loader does, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of torch's module and then steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register() -> None:
    """Registers the backend now or when torch is imported. Cheap; may be called again."""
    c10d = sys.modules.get(_MODULE)
    if c10d is not None:
        _register(c10d)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
