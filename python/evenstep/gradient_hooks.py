"""The script's own hooks on parameters' gradients: in backward they see what this rank's samples make, not the ranks' sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from evenstep import sites

_ON_A_PART = (
    "parameter {0!r} of model {1!r} has a hook (register_hook), which sees what this rank's samples make of its gradient, before the "
    "ranks' parts are added up: a mask or a constant factor is right so; clamping, noise, a norm are not what one device makes\n"
    "  fix: change p.grad after backward()"
)


def hooks_of(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Those that are none of ours."""
    found: Any = parameter._backward_hooks
    return [hook for hook in found.values() if not _is_ours(hook)] if found else []


def _is_ours(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("evenstep.")


def tell_of_hooks(model: str, names: Iterable[str], parameters: Iterable[torch.Tensor]) -> bool:
    """Warns at the script's line where a parameter has one. Whether one has."""
    name = next((name for name, one in zip(names, parameters) if hooks_of(one)), None)
    if name is not None:
        sites.warn(_ON_A_PART.format(name, model))
    return name is not None
