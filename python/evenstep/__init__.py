"""Evenstep: trains any PyTorch model on unequal devices, each with the work it can finish in the same time.

    import evenstep as es

    model, optimizer, loader = es.prepare(model, optimizer, loader)

What needs torch is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from evenstep._core import EvenstepError
from evenstep._core import version as __version__
from evenstep.registration import register as _register_backend

if TYPE_CHECKING:
    from evenstep import comm
    from evenstep.checkpoint import checkpoint, load_checkpoint
    from evenstep.evaluation import evaluate, gather, reduce_mean
    from evenstep.loader import EvenLoader
    from evenstep.modes import DiLoCo, LocalSGD, Stale
    from evenstep.prepare import prepare
    from evenstep.session import (
        Session,
        barrier,
        epochs,
        exchange_gradients,
        is_main,
        local_rank,
        log,
        no_sync,
        rank,
        session,
        set_weight,
        synchronise_models,
        world_size,
    )
    from evenstep.session import print_main as print
    from evenstep.session import step_count as step

__all__ = [
    "DiLoCo",
    "EvenLoader",
    "EvenstepError",
    "LocalSGD",
    "Session",
    "Stale",
    "__version__",
    "barrier",
    "checkpoint",
    "comm",
    "epochs",
    "evaluate",
    "exchange_gradients",
    "gather",
    "is_main",
    "load_checkpoint",
    "local_rank",
    "log",
    "no_sync",
    "prepare",
    "print",
    "rank",
    "reduce_mean",
    "session",
    "set_weight",
    "step",
    "synchronise_models",
    "world_size",
]

# name -> (module, its name there)
_LAZY = {
    "DiLoCo": ("evenstep.modes", "DiLoCo"),
    "LocalSGD": ("evenstep.modes", "LocalSGD"),
    "Stale": ("evenstep.modes", "Stale"),
    "synchronise_models": ("evenstep.session", "synchronise_models"),
    "EvenLoader": ("evenstep.loader", "EvenLoader"),
    "Session": ("evenstep.session", "Session"),
    "barrier": ("evenstep.session", "barrier"),
    "checkpoint": ("evenstep.checkpoint", "checkpoint"),
    "epochs": ("evenstep.session", "epochs"),
    "evaluate": ("evenstep.evaluation", "evaluate"),
    "exchange_gradients": ("evenstep.session", "exchange_gradients"),
    "gather": ("evenstep.evaluation", "gather"),
    "is_main": ("evenstep.session", "is_main"),
    "load_checkpoint": ("evenstep.checkpoint", "load_checkpoint"),
    "local_rank": ("evenstep.session", "local_rank"),
    "log": ("evenstep.session", "log"),
    "no_sync": ("evenstep.session", "no_sync"),
    "prepare": ("evenstep.prepare", "prepare"),
    "print": ("evenstep.session", "print_main"),
    "rank": ("evenstep.session", "rank"),
    "reduce_mean": ("evenstep.evaluation", "reduce_mean"),
    "session": ("evenstep.session", "session"),
    "set_weight": ("evenstep.session", "set_weight"),
    "step": ("evenstep.session", "step_count"),
    "world_size": ("evenstep.session", "world_size"),
}
_MODULES = ("comm",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"evenstep.{name}")
    place = _LAZY.get(name)
    if place is None:
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
    value = getattr(import_module(place[0]), place[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})


_register_backend()


class _Package(ModuleType):
    """Keeps `es.prepare` the function although `evenstep.prepare` is also a module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
