"""What es.prepare(static_graph=True) and find_unused_parameters=False promise of a model, checked in every exchanged pass; and with
static_graph what need not be asked for any more: which parameters have gradients on some rank."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from torch import nn

    from evenstep.prepare_options import DDPOptions


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter that gets a gradient, once (tied ones too)."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


class UsedParameters:
    """used[i] is 1 where some rank had a gradient of names[i]: the same on all ranks, and so is what is raised."""

    def __init__(self, model: str, names: Sequence[str], options: DDPOptions) -> None:
        self._model, self._names, self._options = model, names, options
        self._first: bytes | None = None
        self.asks_once = False  # every rank's engine can do without being told again (Engine.know)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Among other ranks."""
        self._own: frozenset[int] | None = None  # what this rank had gradients of where they counted first
        self._counted: set[int] = set()  # the ranks whose gradients have counted
        self.settled: bytes | None = None  # what is used from now on
        self._difference: tuple[str, bool] | None = None  # a parameter, and whether this rank has a gradient of it now

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
            raise EvenstepError(self._words(name, bool(now)) + _FIX)

    def _words(self, name: str, now: bool, where: str = "") -> str:
        was, is_now = ("had none", "has one") if now else ("had one", "has none")
        return (
            f"es.prepare(static_graph=True): parameter {name!r} of model {self._model!r} {was} of the gradients of the first "
            f"backward pass{where} and {is_now} now"
        )

    # -- once all ranks' gradients have counted --

    def saw(self, used: Sequence[int], own: Set[int], weights: Sequence[float], rank: int) -> None:
        """At the end of a round in which the ranks told one another. own: what this rank had gradients of; weights: of all ranks'.
        The first of one without samples may be of fewer than those to come."""
        if not (self._options.static_graph and self.asks_once) or self.settled is not None:
            return
        if self._own is None and weights[rank] > 0:
            self._own = frozenset(own)
        self._counted.update(one for one, weight in enumerate(weights) if weight > 0)
        if len(self._counted) == len(weights):
            self.settled = bytes(used)

    def differs(self, own: Set[int], counts: bool) -> bool:
        """Whether this rank has gradients of other parameters than it had. Of one that counts nothing only such are others as no
        rank had."""
        self._difference = None
        if self.settled is None or self._own is None or own == self._own:
            return False
        extra = [index for index in own if not self.settled[index] or (counts and index not in self._own)]
        less = self._own - own if counts else frozenset()
        if not (extra or less):
            return False
        index = min(extra or less)
        self._difference = self._names[index], bool(extra)
        return True

    def refuse(self, ranks: Sequence[int], rank: int) -> EvenstepError:
        """What all raise where these have said that theirs differ."""
        if self._difference is not None:
            return EvenstepError(self._words(*self._difference, f" on rank {rank}") + _FIX)
        return EvenstepError(
            f"es.prepare(static_graph=True): rank {ranks[0]} has gradients of other parameters of model {self._model!r} than in the "
            f"first backward pass: which, it says itself{_FIX}"
        )


_FIX = "\n  fix: leave static_graph out where the graph changes"
