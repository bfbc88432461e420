"""Whether the loss that backward begins from can be what es.prepare weighs by samples: their mean. A sum, or a mean over
something else, trains otherwise than on one device, and nothing else would say so."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from evenstep import sites

if TYPE_CHECKING:
    from evenstep.feeds import BatchPlan

_LOOKS = 20  # backwards that are looked at: tokens may be a multiple of the samples in some
_NODES = 32  # of a graph: those next to the loss
_PASSES_ON = ("Add", "Sub", "Neg", "Clone", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze")
_LEAST_FACTOR = 0.25  # less may be what makes a mean of a sum
_SUM = (
    "the loss is a sum over samples ({0}), not their mean: a rank's part of it counts by its part of the batch once more, so "
    "parameters become others than on one device\n  fix: divide it by this rank's number of samples before backward(): "
    "loss / len(x); with an optimizer whose steps grow with gradients (SGD), the learning rate times the batch size"
)
_WHOLE = (
    "the loss is a sum over this rank's {1} samples divided by {2:g}, the whole batch: a rank's part counts by its part of the "
    "batch once more, so parameters become others than on one device\n  fix: divide it by this rank's number of samples: "
    "loss.sum() / len(x)"
)
_OTHERS = (
    "the loss is a mean over {2:g} tokens, weights of classes, or elements left by a mask ({0}), where this rank has {1} samples: "
    "ranks count by samples, so parameters become others than on one device\n  fix: call es.set_weight(n) before backward(), n: "
    "what this rank's loss is a mean over"
)


class LossForm:
    """Looks at the first backwards of this rank, and warns once."""

    def __init__(self) -> None:
        self._left = _LOOKS
        self._by_whole: set[int] = set()  # this rank's samples where a sum was divided by the whole batch's
        self._known: set[float] = set()  # what means were over before: of weights (a regulariser), it stays the same
        self._now: set[float] = set()  # and are over in the backward in hand

    def look(self, losses: Any, plan: BatchPlan) -> None:
        if self._left == 0 or not isinstance(losses, torch.Tensor) or losses.numel() != 1:
            return
        self._left -= 1
        self._now = set()
        found = self._found(losses.grad_fn, plan)
        self._known |= self._now
        if found:
            self._left = 0
            _warn(found)

    def _found(self, root: Any, plan: BatchPlan) -> str:
        waiting: list[tuple[Any, float]] = [(root, 1.0)]
        for _ in range(_NODES):
            if not waiting:
                break
            node, divisor = waiting.pop()
            if node is None:
                continue
            kind = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
            if kind in _PASSES_ON and _is_number(node):
                waiting.extend((following, divisor) for following, _ in node.next_functions)
            elif kind in ("Mul", "Div"):
                factor = _constant(node)
                if kind == "Div" and factor:
                    waiting.append((node.next_functions[0][0], divisor * factor))
                elif abs(factor) >= _LEAST_FACTOR:
                    waiting.append((node.next_functions[0][0], divisor))
            else:
                found = self._at_reduction(node, kind, divisor, plan)
                if found:
                    return found
        return ""

    def _at_reduction(self, node: Any, kind: str, divisor: float, plan: BatchPlan) -> str:
        summed, over = _reduced(node, kind, plan.samples)
        if summed:
            if divisor == 1.0:
                return _SUM.format(type(node).__name__)
            if divisor == plan.total != plan.samples:
                self._by_whole.add(plan.samples)  # once is chance: so may the number of a share's elements be
                return _WHOLE.format("", plan.samples, divisor) if len(self._by_whole) > 1 else ""
            over = divisor
        self._now.add(over)
        counted = "NllLoss" in kind  # by torch; else what is smaller than the share may be several losses,
        another = summed or (self._known and over not in self._known)  # and a mean one over weights
        if over and (counted or (over >= plan.samples and another)) and not _is_multiple(over, plan.samples):
            return _OTHERS.format(type(node).__name__, plan.samples, over)
        return ""


def _warn(words: str) -> None:
    path, line, _ = sites.of_caller() or (__file__, 0, "")
    warnings.warn_explicit(words, UserWarning, path, line)


def _reduced(node: Any, kind: str, samples: int) -> tuple[bool, float]:
    """Whether it is a sum over samples; else how many things it is a mean over, 0 where that is not known."""
    how = getattr(node, "_saved_reduction", None)  # 1: mean, 2: sum, as torch's functions of losses keep it
    if how is not None:
        return how == 2, _count(node) if how == 1 else 0.0
    following = next((type(following).__name__ for following, _ in node.next_functions), "")
    if following.startswith(("Stack", "Cat")):  # of several losses
        return False, 0.0
    if kind == "Sum":
        sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
        return bool(sizes) and sizes[0] == samples and _is_number(node), 0.0
    return False, float(getattr(node, "_saved_self_sym_numel", 0)) if kind == "Mean" and _is_number(node) else 0.0


def _count(node: Any) -> float:
    """What torch's own loss is a mean over."""
    try:
        total = getattr(
            node, "_saved_total_weight", None
        )  # without those of ignore_index; of classes' weights their sum
        return float(node._saved_self.numel()) if total is None else float(total)
    except (AttributeError, RuntimeError):  # changed in place: backward will say so
        return 0.0


def _constant(node: Any) -> float:
    """What a number is multiplied with or divided by; 0 where that is no constant."""
    if not _is_number(node) or any(following is not None for following, _ in node.next_functions[1:]):
        return 0.0
    try:
        other = node._saved_other
    except (AttributeError, RuntimeError):
        return 0.0
    if isinstance(other, torch.Tensor):
        return float(other) if other.numel() == 1 else 0.0
    return float(other) if isinstance(other, (int, float)) else 0.0


def _is_number(node: Any) -> bool:
    """Whether what it gave is one."""
    given: Any = getattr(node, "_input_metadata", ())
    return len(given) == 1 and math.prod(given[0].shape) == 1


def _is_multiple(over: float, samples: int) -> bool:
    times = over / samples
    return abs(times - round(times)) <= 1e-6 * times
