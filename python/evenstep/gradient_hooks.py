"""The script's own hooks on parameters' gradients: in backward they see what this rank's samples make, not the ranks' sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from evenstep import sites

Hook = Callable[..., Any]

_LOOKED_AT = 2  # rounds
_ON_A_PART = (
    "parameter {0!r} of model {1!r} has a hook (register_hook) that changes its gradient: it sees what this rank's samples make of it, "
    "before the ranks' parts are added up: a mask or a constant factor is right so; clamping, noise, a norm are not what one device "
    "makes\n  fix: change p.grad after backward()"
)


def hooks_of(parameter: torch.Tensor) -> list[Hook]:
    """Those that are none of ours."""
    return [hook for _, _, hook in _places(parameter)]


def _places(parameter: torch.Tensor) -> list[tuple[dict[Any, Hook], Any, Hook]]:
    """Of each of the script's: the dict that it is in, under which key, and it."""
    found: Any = parameter._backward_hooks or {}
    there = ((key, getattr(hook, "behind", hook)) for key, hook in found.items())
    return [(found, key, hook) for key, hook in there if not _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("evenstep.")


class HookLook:
    """Looks in a model's first rounds for hooks that give another gradient. Those that only look on, as loggers', are none."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[Any, Hook], Any, Hook]] = []
        self._changed: str | None = None  # the name of such a one's parameter

    def goes_on(self, model: str, names: Iterable[str], parameters: Iterable[torch.Tensor], rounds: int) -> bool:
        """Before a pass: warns, at the script's line, of what the passes before have shown. Whether to ask again before the next."""
        for hooks, key, hook in self._places:
            if getattr(hooks.get(key), "behind", None) is hook:
                hooks[key] = hook
        self._places.clear()
        if self._changed is not None:
            sites.warn(_ON_A_PART.format(self._changed, model))
        if self._changed is not None or rounds >= _LOOKED_AT:
            return False
        for name, parameter in zip(names, parameters):
            for hooks, key, hook in _places(parameter):
                hooks[key] = self._around(name, hook)
                self._places.append((hooks, key, hook))
        return True

    def _around(self, name: str, hook: Hook) -> Hook:
        def looked_at(gradient: torch.Tensor) -> Any:
            version = gradient._version
            given = hook(gradient)
            if (given is not None and given is not gradient) or gradient._version != version:
                self._changed = self._changed or name
            return given

        looked_at.behind = hook  # type: ignore[attr-defined]
        return looked_at
