"""Why ranks and one device differ: each suspicion is tried out on one device, on copies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from evenstep.backward import observed_backward
from evenstep.environment import Environment
from evenstep.session import Session, in_place_of_session
from evenstep.verify_data import Batches, same
from evenstep.verify_runs import Outcome, Start, Step, alone, modules_in

Loss = Callable[[Any, Any], torch.Tensor]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: list[str] | None = None) -> float:
    """The relative norm of the difference over all these tensors; infinite where one is not finite."""
    chosen = list(other) if names is None else names
    apart = math.fsum(float((one[name] - other[name]).square().sum()) for name in chosen)
    size = math.fsum(float(other[name].square().sum()) for name in chosen)
    if not math.isfinite(apart) or not math.isfinite(size):
        return math.inf
    return math.sqrt(apart) / (math.sqrt(size) or 1.0)


def reasons(
    start: Start, step: Step, loss: Loss | None, batches: Batches, ours: Outcome, reference: Outcome, sums: bool = False
) -> list[str]:
    """What was found, the surest first. Of rank 0. sums: the loss was said to be one over samples."""
    lost = [name for name, one in reference.parameters.items() if not bool(one.isfinite().all())]
    if lost:  # nothing can be compared, and no other reason be tried
        return [
            f"one device's own parameters are no finite numbers after these steps: {_some(lost)}; its loss or gradients are not: a smaller "
            "learning rate, or look at the data and the loss first"
        ]
    found = []
    if ours.local_norms:
        found.append(
            f"BatchNorm by each rank's own samples: {_some(ours.local_norms)}; with batch_norm='sync' (the default) its "
            "statistics are those of the whole batch"
        )
    if _samples_change(batches):
        found.append(
            "the data set gives another sample when it is asked again for the same one: random augmentation, whose random "
            "numbers come from generators of its own, or, with seed_samples=False, depend on what was drawn before"
        )
    if batches.collating_draws:
        found.append("the loader's collate_fn draws random numbers, which are others where a batch is split otherwise")
    if _draws(start, step, batches):
        found.append(f"random numbers are drawn in the step: {_some(droppers(start.model)) or 'dropout, or noise'}")
    if start.hooks and _hooks_matter(start, step, batches):
        found.append(
            f"hooks change gradients of parameters, on each rank those of its own samples alone: {_some(list(start.hooks))}; change "
            "p.grad between backward() and optimizer.step()"
        )
    if loss is not None and not _is_whole(start, loss, batches, 0.03 if reference.rounded else 1e-4, sums):
        found.append(
            "the loss of a batch is not the sum of its parts' losses, as reduction='sum' has it: a mean, one divided by a batch's "
            "size, with a term that is over no samples, or between the samples of a batch"
            if sums
            else "the loss of a batch is not the mean of its parts' losses, weighted by samples: a mean over tokens (call "
            "es.set_weight(their number) in it), a sum, or a loss between the samples of a batch, which each rank then has of its "
            "own samples alone"
        )
    if reference.rounded:
        found.append(f"activations are rounded to {reference.rounded}: differences of 1e-3 and more are the rounding's")
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _samples_change(batches: Batches) -> bool:
    return batches.has_dataset and not same(batches.whole(0), batches.whole(0))


def _draws(start: Start, step: Step, batches: Batches) -> bool:
    """Whether a step comes out otherwise from other random numbers."""

    def from_seed(seed: int) -> dict[str, torch.Tensor]:
        def seeded(model: Any, optimizer: Any, batch: Any) -> None:
            torch.manual_seed(seed)
            random.seed(seed)
            step(model, optimizer, batch)

        return alone(start, seeded, batches, steps=1).parameters

    first = from_seed(1)
    rounding = distance(from_seed(1), first)  # what differs without any drawing
    return distance(from_seed(2), first) > 10 * rounding


def _hooks_matter(start: Start, step: Step, batches: Batches) -> bool:
    """Whether a step on one device comes out otherwise without them."""
    without = alone(replace(start, hooks={}), step, batches, steps=1).parameters
    return distance(alone(start, step, batches, steps=1).parameters, without) > 0


def droppers(model: Any) -> list[str]:
    found = []
    for module in modules_in(model):
        for path, one in module.named_modules():
            rate = one.p if isinstance(one, nn.modules.dropout._DropoutNd) else getattr(one, "dropout", 0.0)
            if one.training and isinstance(rate, float) and rate > 0:
                found.append(f"{type(one).__name__} {path!r}")
    return found


def _is_whole(start: Start, loss: Loss, batches: Batches, tolerance: float, sums: bool) -> bool:
    """Whether one loss is the weighted mean of its parts', or their sum, everything else in eval mode."""
    model, _ = start.again()
    for module in modules_in(model):
        module.eval()

    def value(first: int, count: int) -> tuple[float, float]:
        session = Session(Environment())
        with in_place_of_session(session), torch.no_grad():
            number = float(loss(model, start.batch(batches.part(0, first, count))))
            return number, session.steps.weight.amount() if session.steps.weight.is_given else float(count)

    size = batches.sizes[0]
    with observed_backward(None):
        whole, _ = value(0, size)
        for cut in {1, size // 3} - {0, size}:
            parts = [value(0, cut), value(cut, size - cut)]
            weights = math.fsum(weight for _, weight in parts)
            mean = math.fsum(number * weight for number, weight in parts if weight) / (weights or 1.0)
            mean = math.fsum(number for number, weight in parts if weight) if sums else mean
            if not abs(mean - whole) <= tolerance * max(abs(whole), abs(mean), 1e-30):
                return False
    return True
