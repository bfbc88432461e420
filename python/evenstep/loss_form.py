"""Whether the loss that backward begins from can be what es.prepare weighs by samples: their mean. A sum, or a mean over
something else, trains otherwise than on one device, and nothing else would say so. The other way round where losses are to be sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evenstep import sites
from evenstep.graph_nodes import is_number, kind_of, shape_of
from evenstep.loss_among import Among
from evenstep.loss_of_gradients import OfGradients

if TYPE_CHECKING:
    from evenstep.feeds import BatchPlan

_DEPTH = 8  # nodes behind a mean that are looked at
_LOOKS = 20  # backwards that are looked at: tokens may be a multiple of the samples in some
_NODES = 32  # of a graph: those next to the loss
_PASSES_ON = ("Add", "Sub", "Neg", "Clone", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze")
_LEAST_FACTOR = 0.25  # less may be what makes a mean of a sum
_CHAIN = 8  # nodes between a reduction and a parameter
_ELEMENTWISE = ("Pow", "Abs", "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Clone", "ToCopy", "Sqrt", "Exp", "Log")
_SUM = (
    "the loss is a sum over samples ({0}), not their mean: a rank's part of it counts by its part of the batch once more, so "
    "parameters become others than on one device\n  fix: es.prepare(…, reduction='sum'), where every loss of the models is such a sum; or "
    "loss / len(x) before backward(), and with an optimizer whose steps grow with gradients (SGD) the learning rate times the batch size"
)
_WHOLE = (
    "the loss is a sum over this rank's {1} samples divided by {2:g}: a rank's part counts by its part of the "
    "batch once more, so parameters become others than on one device\n  fix: divide it by this rank's number of samples: "
    "loss.sum() / len(x); or, where the divisor is a constant, es.prepare(…, reduction='sum')"
)
_OTHERS = (
    "the loss is a mean over {2:g} tokens, weights of classes, or elements left by a mask ({0}), where this rank has {1} samples: "
    "ranks count by samples, so parameters become others than on one device\n  fix: call es.set_weight(n) before backward(), n: "
    "what this rank's loss is a mean over"
)
_MEAN = (
    "es.prepare(reduction='sum'), but the loss, or a term of it, is a mean ({0}, on this rank over {1} samples): ranks' means are added up "
    "as though they were sums over their samples, so parameters become others than on one device\n  fix: leave reduction out, where losses "
    "are means; or make it a sum, loss * len(x)"
)


class _Place(NamedTuple):
    """Where in a graph, and what lies between it and the loss."""

    path: tuple[int, ...] = ()
    divisor: float = 1.0
    divisions: int = 0
    scale: float = 1.0  # the divisor by factors, too: a part of a batch that the script cuts is weighed by them
    is_constant: bool = True  # the divisor: numbers of the script's, no tensors
    is_alone: bool = True  # neither a factor nor another term


class LossForm:
    """Looks at the first backwards of this rank, and warns once. What one look cannot tell for certain, two must: of
    batches that this rank had other numbers of samples of, or that gave other numbers at one place of the graph."""

    def __init__(self) -> None:
        self._left = _LOOKS
        self._plan: BatchPlan | None = None  # of the backward before
        self._several = False  # backwards in one batch: parts of it, regularisers or other models
        self._among = Among()
        self._of_gradients = OfGradients()
        self._sums: dict[Any, set[tuple[int, float]]] = {}  # by kind and path: this rank's samples, and the scale
        self._means: dict[Any, set[float]] = {}  # what they were over, where that is no multiple of the samples
        self._wants_sums = False
        self._whole_means: dict[
            Any, tuple[int, float]
        ] = {}  # as _sums, of means where sums are wanted: the first of each

    def expect_sums(self, of_all: bool) -> None:
        """The script has said that its losses are sums. of_all: those of all its models; else nothing is looked at any more."""
        self._left, self._plan, self._wants_sums = _LOOKS if of_all else 0, None, of_all

    def look(self, losses: Any, plan: BatchPlan) -> None:
        if self._left == 0 or not isinstance(losses, torch.Tensor) or losses.numel() != 1:
            return
        self._left -= 1
        self._several = self._several or plan is self._plan
        self._plan = plan
        found = ""
        if plan.samples > 1 and losses.grad_fn is not None:  # of one sample, a sum is a mean
            found = self._found(losses.grad_fn, plan)
            found = found or ("" if self._wants_sums else self._of_gradients.look(losses.grad_fn, plan.samples))
        if found:
            self._left = 0
            sites.warn(found)
        if self._left == 0:
            self._plan = None

    def _found(self, root: Any, plan: BatchPlan) -> str:
        waiting: list[tuple[Any, _Place]] = [(root, _Place())]
        for _ in range(_NODES):
            if not waiting:
                break
            node, place = waiting.pop()
            if node is None:
                continue
            kind = kind_of(node)
            if kind in _PASSES_ON and is_number(node):
                alone = place.is_alone and sum(following is not None for following, _ in node.next_functions) == 1
                for number, (following, _) in enumerate(node.next_functions):
                    waiting.append((following, place._replace(path=(*place.path, number), is_alone=alone)))
            elif kind in ("Mul", "Div"):
                below = _below(kind, *_constant(node), place)
                if below:
                    waiting.append((node.next_functions[0][0], below))
            else:
                found = self._at_reduction(node, kind, place, plan)
                if found:
                    return found
        return ""

    def _at_reduction(self, node: Any, kind: str, place: _Place, plan: BatchPlan) -> str:
        how = getattr(node, "_saved_reduction", None)  # 1: mean, 2: sum, as torch's functions of losses keep it
        if how not in (None, 1, 2) or not is_number(node) or _is_of_parameter(node):
            return ""
        name = type(node).__name__
        if self._wants_sums:
            is_mean = how == 1 or (how is None and kind == "Mean")
            return self._at_mean(node, kind, place, plan).format(name, plan.samples) if is_mean else ""
        if how == 2 or (how is None and kind == "Sum"):
            return self._at_sum(node, kind, place, plan).format(name, plan.samples, place.divisor)
        if how == 1 and "NllLoss" in kind:
            if among := self._among.look(_given(node)[1], plan.samples, plan.total):
                return among
            targets = _targets(node)
            over = _value(node, "total_weight")[0]  # without ignore_index's; of classes' weights their sum
            if over and abs(over - targets) > 1e-6 * targets:
                some = not _is_multiple(over, plan.samples) and not _is_multiple(over * place.scale, plan.samples)
                return _OTHERS.format(name, plan.samples, over) if some else ""
            over = targets
        elif how == 1:
            over = _elements(node)
        else:
            over = float(getattr(node, "_saved_self_sym_numel", 0)) if kind == "Mean" else 0.0
        if over < plan.samples or self._several:  # several losses, or a part of the batch
            return ""
        if _stacks(node) or any(
            _is_multiple(times * over, plan.samples) for times in (1, 2, place.scale)
        ):  # 2: of pairs
            return ""
        if _is_multiple(over, plan.samples - 1):  # of neighbours
            return ""
        numbers = self._means.setdefault((kind, place.path), set())
        numbers.add(over)
        return _OTHERS.format(name, plan.samples, over) if len(numbers) > 1 else ""  # of parameters it stays the same

    def _at_mean(self, node: Any, kind: str, place: _Place, plan: BatchPlan) -> str:
        """Where sums are wanted. A factor may make one of it, and a term be one sample's: not where it stays while this rank's share
        changes."""
        times, rest = divmod((*_given(node)[1], 1)[0], plan.samples)
        if (
            times == 0
            or rest
            or plan.samples == plan.total
            or self._several
            or _stacks(node)
            or _is_sum_within(node, plan.samples)
        ):
            return ""
        now = plan.samples, place.scale
        before = self._whole_means.setdefault((kind, place.path, times), now)
        if before is now or before[1] != place.scale:
            return ""
        return _MEAN if place.is_alone or before[0] != plan.samples else ""

    def _at_sum(self, node: Any, kind: str, place: _Place, plan: BatchPlan) -> str:
        samples, divisor = plan.samples, place.divisor
        summed = _summed_losses(node)
        if summed is not None:
            elements = _targets(summed) if "NllLoss" in type(summed).__name__ else _elements(summed)
            rows = (*_given(summed)[1], 1)[0]
            is_over_samples = rows >= samples and rows % samples == 0  # else it may be a part of the batch
        else:
            sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
            elements = float(math.prod(sizes))
            is_over_samples = bool(sizes) and sizes[0] == samples and not _stacks(node)
        is_whole = divisor == plan.total != samples
        if not is_over_samples or divisor == elements:
            return ""
        if divisor != 1.0 and not is_whole and (divisor < samples or _is_multiple(divisor, samples)):
            return ""
        if summed is not None and place.scale == divisor and place.is_constant:
            if divisor == 1.0:
                return _SUM
            is_half = "MseLoss" in type(summed).__name__ and divisor == 2 * samples  # of a mean of squares
            if is_whole and place.divisions == 1 and not is_half:
                return _WHOLE
        before = self._sums.setdefault((kind, place.path, divisor == 1.0), set())
        before.add((samples, place.scale))
        if (
            place.is_constant
        ):  # of parameters there may be as many rows as samples, by chance; and 2 / len(x) may be any
            is_sum = any(one != samples and scale == place.scale for one, scale in before)
            return (_SUM if divisor == 1.0 else _WHOLE) if is_sum else ""
        varies = any(scale != place.scale for _, scale in before)
        return _OTHERS if varies and not is_whole and not self._several else ""


def _below(kind: str, factor: float, is_constant: bool, place: _Place) -> _Place | None:
    """The place of what a number is multiplied with or divided by; None where nothing can be said of it."""
    path = (*place.path, 0)
    if kind == "Mul":
        return (
            place._replace(path=path, scale=place.scale / factor, is_alone=False)
            if abs(factor) >= _LEAST_FACTOR
            else None
        )
    if factor == 0.0:
        return None
    return _Place(
        path,
        place.divisor * factor,
        place.divisions + 1,
        place.scale * factor,
        place.is_constant and is_constant,
        False,
    )


def _constant(node: Any) -> tuple[float, bool]:
    """What a number is multiplied with or divided by, and whether the script gave a number for it; 0 where it is no constant."""
    if not is_number(node) or any(following is not None for following, _ in node.next_functions[1:]):
        return 0.0, False
    if hasattr(node, "_raw_saved_other"):
        return _value(node, "other")
    other = getattr(node, "_saved_other", None)
    return (float(other), True) if isinstance(other, (int, float)) else (0.0, False)


def _value(node: Any, name: str) -> tuple[float, bool]:
    """That of a tensor that backward needs, and whether it is a number of the script's; 0 where looking would cost something:
    hooks would run (torch's checkpoint computes its function again in them), or a device be waited for."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:  # or this torch does not say it
        return 0.0, False
    try:
        value = getattr(node, f"_saved_{name}")
    except RuntimeError:  # changed in place: backward will say so
        return 0.0, False
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() != 1 or value.is_complex():
        return 0.0, False
    narrow = torch.float16 if value.is_floating_point() else torch.int8
    is_number = torch.result_type(value, torch.zeros((), dtype=narrow)) != value.dtype  # it gives way to tensors
    if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):  # counts are rounded
        return 0.0, False
    return float(value), is_number


def _given(node: Any) -> tuple[Any, tuple[int, ...]]:
    """The first node that it goes on to, and the shape of what came from there."""
    for following, number in getattr(node, "next_functions", ()):
        shape = shape_of(following, number)
        if shape is not None:
            return following, shape
    return None, ()


def _is_sum_within(node: Any, samples: int) -> bool:
    """Whether what a mean is over was added up over the samples before, or multiplied with their number."""
    for _ in range(_DEPTH):
        following, shape = _given(node)
        kind = kind_of(following)
        if kind == "Sum" and _given(following)[1][:1] != shape[:1]:
            return True
        if kind == "Mul" and _value(following, "other")[0] == samples:
            return True
        node = following
    return False


def _summed_losses(node: Any) -> Any:
    """torch's function of losses that it is the sum of; None where it is another sum."""
    if getattr(node, "_saved_reduction", None) == 2:
        return node
    following, _ = _given(node)
    return following if getattr(following, "_saved_reduction", None) == 0 else None


def _elements(node: Any) -> float:
    """Of what torch's function of losses was given."""
    return float(math.prod(_given(node)[1]))


def _targets(node: Any) -> float:
    """How many a cross-entropy was given: classes are the second dimension."""
    shape = _given(node)[1]
    return float(math.prod(shape) / shape[1]) if len(shape) > 1 and shape[1] else 1.0


def _stacks(node: Any) -> bool:
    """Whether it is over several losses."""
    return type(_given(node)[0]).__name__.startswith(("Stack", "Cat"))


def _is_of_parameter(node: Any) -> bool:
    """Whether it is over a parameter's elements, as a regulariser is."""
    node, shape = _given(node)
    for _ in range(_CHAIN):
        kind = kind_of(node)
        if kind not in _ELEMENTWISE:
            return kind == "AccumulateGrad"
        node, given = _given(node)
        if given != shape:
            return False
    return False


def _is_multiple(over: float, samples: int) -> bool:
    times = over / samples
    return times > 0.5 and abs(times - round(times)) <= 1e-6 * times
