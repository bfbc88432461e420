"""What es.prepare(static_graph=True) and find_unused_parameters=False promise of a model, checked in every exchanged pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.prepare_options import DDPOptions


class UsedParameters:
    """used[i] is 1 where some rank had a gradient of names[i]: the same on all ranks, and so is what is raised."""

    def __init__(self, model: str, names: Sequence[str], options: DDPOptions) -> None:
        self._model, self._names, self._options = model, names, options
        self._first: bytes | None = None

    def check(self, used: Sequence[int]) -> None:
        if self._options.find_unused_parameters is False:
            self._check_all(used)
        if self._options.static_graph:
            self._check_same(bytes(used))

    def _check_all(self, used: Sequence[int]) -> None:
        without = [name for name, one in zip(self._names, used) if not one]
        if without:
            more = f" and {len(without) - 4} more" if len(without) > 4 else ""
            raise EvenstepError(
                f"es.prepare(find_unused_parameters=False): no rank had a gradient of {', '.join(without[:4])}{more} of model "
                f"{self._model!r}\n  fix: use them in the loss, or freeze them by requires_grad_(False) before es.prepare; or "
                "leave find_unused_parameters out"
            )

    def _check_same(self, used: bytes) -> None:
        if self._first is None:
            self._first = used
        if used != self._first:
            name, now = next((n, b) for n, a, b in zip(self._names, self._first, used) if a != b)
            was, is_now = ("had none", "has one") if now else ("had one", "has none")
            raise EvenstepError(
                f"es.prepare(static_graph=True): parameter {name!r} of model {self._model!r} {was} of the gradients of the first "
                f"backward pass and {is_now} now\n  fix: leave static_graph out where the graph changes"
            )
