"""Lists of backends, as "cpu:gloo,cuda:evenstep": which one each kind of device has. torch gives the whole group to a backend that is
written in Python, and tells it nothing of the list: that is heard where torch makes the group."""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

_CHOICES = {"cpu": ("evenstep", "gloo"), "cuda": ("evenstep", "nccl"), "xpu": ("evenstep", "xccl")}

_heard: ContextVar[dict[str, str]] = ContextVar("evenstep_backends")


def heard() -> dict[str, str]:
    """Of the group that torch is making: the backend of each kind of device that its list names; {}: it has none."""
    return _heard.get({})


def backends_in(words: str) -> dict[str, str]:
    """{}: no list, or one without us. Raises EvenstepError where we cannot make what it asks for."""
    pairs = [pair.partition(":") for pair in words.lower().split(",")]
    backends = {kind: name for kind, colon, name in pairs if colon}
    if "evenstep" not in backends.values():
        return {}
    for kind, name in backends.items():
        choices = _CHOICES.get(kind, ())
        if name not in choices:
            from evenstep._core import EvenstepError

            fix = f"give '{kind}:{choices[0]}' or '{kind}:{choices[1]}'" if choices else f"leave '{kind}' out"
            raise EvenstepError(
                f"torch.distributed: {words!r}: backend evenstep has no {name} for tensors on {kind}, and torch lets it make the "
                f"whole group\n  fix: {fix}; or make a group of its own for them: dist.new_group(backend='{kind}:{name}')"
            )
    return backends


def hear_lists(c10d: ModuleType) -> None:
    """From now on."""
    plain: Any = getattr(c10d, "_new_process_group_helper", None)
    if plain is None:
        return

    @wraps(plain)
    def make(*given: Any, **named: Any) -> Any:
        before = _heard.set(backends_in(str(given[3] if len(given) > 3 else named.get("backend", ""))))
        try:
            return plain(*given, **named)
        finally:
            _heard.reset(before)

    c10d._new_process_group_helper = make  # type: ignore[attr-defined]
