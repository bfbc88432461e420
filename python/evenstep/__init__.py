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
from evenstep.exits import stop_threads_at_exit as _stop_threads_at_exit
from evenstep.launcher import adopt as _adopt_launcher
from evenstep.registration import register as _register_backend
from evenstep.stacks import tell_stacks_of_rank as _tell_stacks_of_rank

if TYPE_CHECKING:
    from evenstep import comm, data, models, optim
    from evenstep.balance import balance
    from evenstep.batch_adapt import AdaptBatch
    from evenstep.batch_size import BatchSizes, DeviceBatchSize, find_batch_size
    from evenstep.checkpoint import checkpoint, load_checkpoint
    from evenstep.evaluation import evaluate, gather, reduce_mean
    from evenstep.loader import EvenLoader
    from evenstep.mended_group import RankLost
    from evenstep.modes import DiLoCo, LocalSGD, Stale
    from evenstep.policies import PolicyView
    from evenstep.prepare import prepare
    from evenstep.process_sets import ProcessSet
    from evenstep.sample_cache import SampleCache
    from evenstep.session import Session, session
    from evenstep.session_calls import (
        barrier,
        epochs,
        exchange_gradients,
        is_main,
        local_rank,
        log,
        no_sync,
        rank,
        set_weight,
        synchronise_models,
        world_size,
    )
    from evenstep.session_calls import print_main as print
    from evenstep.session_calls import step_count as step
    from evenstep.trainer import Config, Trainer
    from evenstep.verify import Verification, verify

__all__ = [
    "AdaptBatch",
    "BatchSizes",
    "Config",
    "DeviceBatchSize",
    "DiLoCo",
    "EvenLoader",
    "EvenstepError",
    "LocalSGD",
    "PolicyView",
    "ProcessSet",
    "RankLost",
    "SampleCache",
    "Session",
    "Stale",
    "Trainer",
    "Verification",
    "__version__",
    "balance",
    "barrier",
    "checkpoint",
    "comm",
    "data",
    "epochs",
    "evaluate",
    "exchange_gradients",
    "find_batch_size",
    "gather",
    "is_main",
    "load_checkpoint",
    "local_rank",
    "log",
    "models",
    "no_sync",
    "optim",
    "prepare",
    "print",
    "rank",
    "reduce_mean",
    "session",
    "set_weight",
    "step",
    "synchronise_models",
    "verify",
    "world_size",
]

# name -> (module, its name there)
_LAZY = {
    "AdaptBatch": ("evenstep.batch_adapt", "AdaptBatch"),
    "BatchSizes": ("evenstep.batch_size", "BatchSizes"),
    "DeviceBatchSize": ("evenstep.batch_size", "DeviceBatchSize"),
    "find_batch_size": ("evenstep.batch_size", "find_batch_size"),
    "Config": ("evenstep.trainer", "Config"),
    "DiLoCo": ("evenstep.modes", "DiLoCo"),
    "LocalSGD": ("evenstep.modes", "LocalSGD"),
    "PolicyView": ("evenstep.policies", "PolicyView"),
    "ProcessSet": ("evenstep.process_sets", "ProcessSet"),
    "RankLost": ("evenstep.mended_group", "RankLost"),
    "Stale": ("evenstep.modes", "Stale"),
    "Trainer": ("evenstep.trainer", "Trainer"),
    "synchronise_models": ("evenstep.session_calls", "synchronise_models"),
    "EvenLoader": ("evenstep.loader", "EvenLoader"),
    "SampleCache": ("evenstep.sample_cache", "SampleCache"),
    "Session": ("evenstep.session", "Session"),
    "balance": ("evenstep.balance", "balance"),
    "barrier": ("evenstep.session_calls", "barrier"),
    "checkpoint": ("evenstep.checkpoint", "checkpoint"),
    "epochs": ("evenstep.session_calls", "epochs"),
    "evaluate": ("evenstep.evaluation", "evaluate"),
    "exchange_gradients": ("evenstep.session_calls", "exchange_gradients"),
    "gather": ("evenstep.evaluation", "gather"),
    "is_main": ("evenstep.session_calls", "is_main"),
    "load_checkpoint": ("evenstep.checkpoint", "load_checkpoint"),
    "local_rank": ("evenstep.session_calls", "local_rank"),
    "log": ("evenstep.session_calls", "log"),
    "no_sync": ("evenstep.session_calls", "no_sync"),
    "prepare": ("evenstep.prepare", "prepare"),
    "print": ("evenstep.session_calls", "print_main"),
    "rank": ("evenstep.session_calls", "rank"),
    "reduce_mean": ("evenstep.evaluation", "reduce_mean"),
    "session": ("evenstep.session", "session"),
    "Verification": ("evenstep.verify", "Verification"),
    "verify": ("evenstep.verify", "verify"),
    "set_weight": ("evenstep.session_calls", "set_weight"),
    "step": ("evenstep.session_calls", "step_count"),
    "world_size": ("evenstep.session_calls", "world_size"),
}
_MODULES = ("comm", "data", "models", "optim")


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
    """What is public, and what every module has; not what this one needs itself, nor modules that happen to be imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_stop_threads_at_exit()
_adopt_launcher()
_register_backend()
_tell_stacks_of_rank()


class _Package(ModuleType):
    """Keeps `es.prepare` the function although `evenstep.prepare` is also a module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
