"""Numbers over all ranks that equal one device's: weighted means, rows gathered in sample order, whole evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep import _core, script_exchanges
from evenstep._core import EvenstepError
from evenstep.group import gather_objects
from evenstep.loader import EvenLoader
from evenstep.mended_group import part_lost
from evenstep.session import Session, entered, inside_a_set, session, sessions, training_session

if TYPE_CHECKING:
    from evenstep.group import Group


def _default_weight() -> float:
    current = session()
    samples = current.latest.at_work.samples if current.latest is not None else current.steps.loop_samples
    return 1.0 if samples is None else float(samples)


def reduce_mean(value: Any, weight: float | None = None) -> Any:
    """The mean of `value` (a number or a tensor) over all ranks, weighted. Collective.

    weight: how many things this rank's value is a mean over; by default the samples of its share of the batch that the
    loop is at, after a training loop all that it had there (1 before the first). A rank with weight 0 counts nothing,
    NaN included: give 1 for a vote, or a time. Returns a number for a number, else a tensor without gradient.
    """
    current = training_session("es.reduce_mean")
    current.check_arrived("es.reduce_mean")
    script_exchanges.made()
    amount = _default_weight() if weight is None else float(weight)
    if not (amount >= 0 and math.isfinite(amount)):
        raise ValueError(f"es.reduce_mean(weight={weight!r}): give a number >= 0")
    if not current.in_job:
        return value.detach() if isinstance(value, torch.Tensor) else value
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
    flat = tensor.to("cpu", torch.float64).reshape(-1)
    packed = torch.zeros(flat.numel() + 1, dtype=torch.float64)
    if amount > 0:
        packed[:-1] = flat * amount
        packed[-1] = amount

    def make() -> torch.Tensor:
        sums = packed.clone()
        current.group.sum_(sums)
        return sums

    recovery = current.recovery
    with current.steps.blocking():
        packed = _of_all(current, make, lambda: recovery is not None and recovery.needs_all())
    mean = packed[:-1] / packed[-1]
    if not isinstance(value, torch.Tensor):
        return float(mean[0])
    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    return mean.reshape(tensor.shape).to(tensor.device, dtype)


def gather(tensor: torch.Tensor, *, batch: bool = True) -> torch.Tensor:
    """The ranks' rows (dimension 0, any number each) one after the other, on every rank. Collective.

    Rows of a prepared loader's batch come out in the order of the samples of the global batch. In the loop over one, the
    rows of a rank whose batch is a dummy sample are left out, however many it made of it: they are no sample's.

    batch: False where the rows are not those of the loop's batch (one value a rank, rows collected over several
    batches): every rank's come.
    """
    current = training_session("es.gather")
    current.check_arrived("es.gather")
    script_exchanges.made()
    if tensor.dim() == 0:
        raise EvenstepError("es.gather needs a tensor with rows\n  fix: give tensor[None] for a single number")
    if not current.in_job:
        return tensor.detach()
    latest = current.latest
    if batch and latest is not None and latest.at_work.samples == 0:
        tensor = tensor[:0]
    rows = tensor.detach().cpu().contiguous()
    with current.steps.blocking():
        everyone = _of_all(
            current, lambda: _gather_rows(current.group, rows), lambda: latest is None or not latest.trains
        )
    return everyone.to(tensor.device)


def _of_all(current: Session, make: Callable[[], torch.Tensor], asks: Callable[[], bool]) -> torch.Tensor:
    """make(), which asks for what each rank gives. RankLost on all that are left where some of that is in nobody's hands."""
    recovery = current.recovery
    if recovery is None or recovery.calling:  # in es.evaluate, which begins again
        return current.call(make, asks)
    found = current.call(lambda: None if recovery.lacks_parts() else make(), asks)
    if found is None:
        recovery.part_gone = None  # until a loop begins again
        raise part_lost()
    return found


def _gather_rows(group: Group, rows: torch.Tensor) -> torch.Tensor:
    shapes = gather_objects(group, (tuple(rows.shape), str(rows.dtype)))
    if len({(shape[1:], dtype) for shape, dtype in shapes}) > 1:
        raise EvenstepError(
            f"es.gather: the ranks' rows differ in shape or dtype: {shapes}\n"
            "  fix: pad the rows to one shape on all ranks, and give all one dtype"
        )
    width = math.prod(rows.shape[1:])
    flat = group.gather_rows(rows.reshape(-1), [shape[0] * width for shape, _ in shapes])
    total = sum(shape[0] for shape, _ in shapes)
    return flat.reshape(total, *rows.shape[1:])


class _Totals:
    """Weighted sums of named metrics in double precision."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[torch.Tensor, float]] = {}
        self.single = False

    def add(self, result: Any, samples: int) -> None:
        if not isinstance(result, dict):
            self.single, result = True, {"value": result}
        for name, value in result.items():
            tensor = torch.as_tensor(value).detach().to("cpu", torch.float64)
            if tensor.dim() == 0:
                total = tensor * samples
            elif tensor.shape[0] == samples:
                total = tensor.sum(dim=0)
            else:
                raise EvenstepError(
                    f"es.evaluate: metric {name!r} has shape {tuple(tensor.shape)} for {samples} samples\n"
                    "  fix: return one value a sample, or one mean over the samples"
                )
            before, count = self.sums.get(name, (torch.zeros_like(total), 0.0))
            self.sums[name] = (before + total, count + samples)


def evaluate(model: nn.Module, loader: Any, fn: Callable[[nn.Module, Any], Any]) -> Any:
    """Means over all samples of `loader`, as one device would compute them. Collective.

    fn(model, batch) gives a number or tensor, or a dict of them: one value a sample (first dimension), or one mean over
    the batch's samples. The model is in eval mode, without gradients, and goes back to the mode it had. A plain
    DataLoader is split among the ranks; one from es.prepare(loader=…, train=False) already is. Anything else that gives
    batches (a list) is each rank's own: its samples are counted by the batch's first tensor. A model (or loader) of a
    process set is evaluated by the ranks of the set.
    """
    current = _owner(model, loader)
    with entered(current) if current is not session() else nullcontext():
        return _evaluate(current, model, loader, fn)


def _owner(model: nn.Module, loader: Any) -> Session:
    """The session that either was prepared in."""
    if inside_a_set():
        return session()
    for one in sessions():
        if any(model is known for known in one.models.values()):
            return one
    return loader.prepared_in if isinstance(loader, EvenLoader) else training_session("es.evaluate")


def _evaluate(current: Session, model: nn.Module, loader: Any, fn: Callable[[nn.Module, Any], Any]) -> Any:
    current.join()
    if isinstance(loader, EvenLoader):
        _check_serves_evaluation(loader)
    seen = _Seen()
    once = hasattr(loader, "__next__")
    try:
        return current.call(lambda: _go_through(current, model, loader, fn, seen), lambda: once or seen.own)
    finally:
        script_exchanges.made()
        current.evaluated = None


class _Seen:
    own = False  # batches that are each rank's own: no other has those of a rank that is lost


def _go_through(
    current: Session, model: nn.Module, loader: Any, fn: Callable[[nn.Module, Any], Any], seen: _Seen
) -> Any:
    if current.evaluated is not None:
        current.evaluated.evaluate_again()
        current.evaluated = None
    if current.in_job and isinstance(loader, DataLoader):
        from evenstep.prepare import prepare

        loader = prepare(loader=loader, train=False)
    totals = _Totals()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    latest, current.latest = current.latest, None  # the training batch at work, which is none of these
    try:
        with current.steps.apart(_core.SPAN_EVALUATION), torch.no_grad():
            for batch in loader:
                current.steps.phases.goes_on()
                if current.recovery is not None:
                    current.recovery.look()
                seen.own = seen.own or session().latest is None
                samples = _samples(batch)
                if samples > 0:
                    totals.add(fn(model, batch), samples)
            means = _means(totals)
    finally:
        current.latest = latest
        for module, training in modes:
            module.training = training
    return means


def _check_serves_evaluation(loader: EvenLoader) -> None:
    if loader.train:
        raise EvenstepError(
            "es.evaluate was given a training loader, whose ranks may get dummy samples\n"
            "  fix: give the DataLoader itself, or es.prepare(loader=loader, train=False)"
        )


def _samples(batch: Any) -> int:
    """Of this rank's batch of an evaluation; 0 for a dummy sample."""
    plan = session().latest
    if plan is None:
        return _count(batch)
    _check_serves_evaluation(plan.loader)  # what was given may only wrap a prepared loader, as tqdm does
    return plan.samples


def _count(batch: Any) -> int:
    """Samples of a collated batch: the first dimension of its first tensor."""
    first = _first_tensor(batch)
    if first is None or first.dim() == 0:
        raise EvenstepError(
            f"es.evaluate found no tensor of samples in the batch, a {type(batch).__name__}, to count them by\n"
            "  fix: give batches of tensors (in a tuple, list or dict), or a DataLoader"
        )
    return first.shape[0]


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)


def _means(totals: _Totals) -> Any:
    current = session()
    if current.in_job:
        everyone = gather_objects(current.group, (totals.single, totals.sums))
        totals.single = any(single for single, _ in everyone)
        sums: dict[str, tuple[torch.Tensor, float]] = {}
        for _, theirs in everyone:
            for name, (total, count) in theirs.items():
                before, had = sums.get(name, (torch.zeros_like(total), 0.0))
                sums[name] = (before + total, had + count)
        totals.sums = sums
    if not totals.sums:
        raise EvenstepError("es.evaluate: the loader has no samples, so there is no mean\n  fix: give it some")
    means: dict[str, Any] = {}
    for name, (total, count) in totals.sums.items():
        mean = total / count
        means[name] = float(mean) if mean.dim() == 0 else mean
    return means.get("value", math.nan) if totals.single else means
