"""Which models, optimizers and train_steps `exact="bitwise"` refuses: what a block computes must depend on nothing but the
parameters and its samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep._core import EvenstepError
from evenstep.batch_norm import is_synchronised


def check_model(name: str, model: nn.Module, sparse: bool) -> None:
    """Of a model whose BatchNorms were synchronised where they can be. sparse: it has sparse gradients."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    left = [path for path, m in model.named_modules() if m in norms and not is_synchronised(m)]
    if left:
        raise EvenstepError(
            f"exact='bitwise': the statistics of {left[0]} of model {name!r} depend on the shares: it has a forward or a group "
            "of ranks of its own\n  fix: give it torch's BatchNorm as it is"
        )
    if norms and any(not p.is_cpu for p in model.parameters()):
        raise EvenstepError(
            f"exact='bitwise': model {name!r} has BatchNorm and is not on the CPU, where alone blocks can wait for one "
            "another in backward\n  fix: use LayerNorm or GroupNorm; or train on CPUs"
        )
    if sparse:
        raise EvenstepError(
            f"exact='bitwise': model {name!r} has sparse gradients, which this version does not sum block by block\n"
            "  fix: build its embeddings with sparse=False"
        )


def check_not_compiled(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], train_steps: Sequence[Any]
) -> None:
    """What torch.compile made chooses its kernel by the sizes that its process has seen: a first one is compiled for that size
    alone, another one for any size, and after some more of them nothing is compiled. What torch.jit made runs as it is written
    in its first calls, and otherwise from then on. A process that takes another one's place begins anew."""
    named = [("the model", one) for one in models]
    if len(models) > 1:
        named = [(f"model {number}", one) for number, one in enumerate(models)]
    found = [_compiled_in(*one) for one in named] + [_compiled_step(*one) for one in zip(optimizers, train_steps)]
    what = next(filter(None, found), "")
    if what:
        raise EvenstepError(
            f"exact='bitwise': {what} is compiled (torch.compile, torch.jit): what computes a block depends on the sizes and the "
            "number of the blocks that its process had before, and so on the shares and on restarts\n  fix: give it as it is, not "
            "compiled; or leave exact='bitwise' out, and results agree to 1e-12 (fp64) and 1e-5 (fp32)"
        )


def _compiled_in(name: str, model: nn.Module) -> str:
    """Which part of it, in words; "" for none."""
    for path, module in model.named_modules():
        where = f"{name}'s {path}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            return where
        if module._compiled_call_impl is not None or _is_compiled(module.forward):
            return where
        own = next((own for own, value in _own_of(module).items() if _is_compiled(value)), "")
        if own:
            return f"{own!r} of {where}"
    return ""


def _compiled_step(optimizer: Optimizer, train_step: Any) -> str:
    while isinstance(train_step, functools.partial):
        train_step = train_step.func
    if _is_compiled(train_step) or _is_compiled(_own_of_class(type(train_step)).get("__call__")):
        return "train_step"
    return "the optimizer's step" if _is_compiled(optimizer.step) else ""


def _own_of(module: nn.Module) -> dict[str, Any]:
    """Its attributes, and those of its classes that are none of torch's."""
    return _own_of_class(type(module)) | vars(module)


def _own_of_class(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if not each.__module__.startswith("torch."):
            found.update(vars(each))
    return found


def _is_compiled(given: Any) -> bool:
    """Whether torch.jit made it, or torch.compile: marks that it leaves, as torch.compiler.disable does, with one more."""
    if isinstance(given, (staticmethod, classmethod)):
        given = given.__func__
    if isinstance(given, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        return True
    return (
        callable(given)
        and getattr(given, "_torchdynamo_orig_callable", None) is not None
        and not getattr(given, "_torchdynamo_disable", False)
    )
