"""es.verify: whether training on the ranks of this job gives what one device gives, for a model of the user's; if not, where
it differs and why."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenstep import checkpoint_random, plain
from evenstep._core import EvenstepError
from evenstep.group import broadcast_bytes, gather_objects
from evenstep.prepare_options import check_seed_samples
from evenstep.session import Session, training_session
from evenstep.verify_data import Batches, batches_of, columns, on_rank_0, shares_of
from evenstep.verify_reasons import distance, reasons
from evenstep.verify_runs import (
    Outcome,
    Start,
    Step,
    alone,
    local_norms,
    loss_of,
    modules_in,
    on_cpu,
    on_ranks,
    optimizers_in,
    played,
    take,
)

Loss = Callable[[Any, Any], torch.Tensor]

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
_OF_16_BITS = 1e-2
_NO_GRADIENT = 64  # times eps of the largest gradient: what is left of a gradient that is zero
_PLAYED = 3  # ranks that one process plays


@dataclass(frozen=True)
class Verification:
    """What es.verify found; the same on all ranks. str() of it is a report for people."""

    exact: bool  # parameters and buffers within the bound (see without_gradient), and the same on all ranks
    difference: float  # from one device: relative norm over all parameters but what has no gradient
    bound: float
    parameter: str  # with the largest part in the difference
    parameter_difference: float  # its own relative norm
    buffers_difference: float  # over all floating-point buffers (running statistics)
    without_gradient: dict[
        str, float
    ]  # parameters whose true gradient is zero: their own relative norms; buffers follow
    same_on_all_ranks: bool
    reasons: list[str]  # what makes the difference, as far as found
    ranks: int
    played: bool  # by one process
    shares: list[list[int]]  # of each step's batch
    dtype: str
    seconds: float
    steps: int

    def __str__(self) -> str:
        where = "played by one process" if self.played else "of this job"
        lines = [
            f"{'exact' if self.exact else 'not exact'}: after {self.steps} steps on {self.ranks} ranks {where} parameters differ from "
            f"one device's by {self.difference:.1e} ({self.dtype}; bound {self.bound:.0e}), most in {self.parameter} "
            f"({self.parameter_difference:.1e})",
        ]
        if self.shares:
            lines.append(f"  shares: {columns(self.shares[:8])}{', …' if len(self.shares) > 8 else ''}")
        if self.buffers_difference:
            lines.append(f"  buffers: {self.buffers_difference:.1e}")
        if not self.same_on_all_ranks:
            lines.append("  the ranks' own parameters differ")
        if self.without_gradient:
            worst = max(self.without_gradient, key=self.without_gradient.__getitem__)
            lines.append(
                f"  left out, as their true gradient is zero: {len(self.without_gradient)} parameters, most in {worst} "
                f"({self.without_gradient[worst]:.1e})"
            )
        return "\n".join([*lines, *(f"  because: {reason}" for reason in self.reasons)])


def verify(
    model: Any,
    optimizer: Any,
    data: Any,
    loss: Loss | None = None,
    *,
    step: Step | None = None,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Verification:
    """Trains copies `steps` steps on one device and on all ranks, and compares. Collective.

    model, optimizer: one, or a list, tuple or dict of them; before es.prepare or after. data: a DataLoader (its batch_size
    is the global batch), prepared or not, or one collated batch, which is used in every step (rank 0's).
    loss(model, batch) gives the loss that backward begins with, a mean over the samples; step(model, optimizer, batch)
    instead of it makes a whole step (several losses, clipping, accumulation) on what it is given.
    dtype=torch.float64 casts the copies and the batches: rounding then hides nothing. `options` are es.prepare's, for the
    models (batch_norm=, engine=, compression=, …).

    One device is rank 0, by torch alone. The ranks get parts of each batch, uneven on purpose. In one process, or on one rank,
    three ranks are played, which needs `loss`. Model, optimizer, samplers and random numbers are left as they were.
    """
    if (loss is None) == (step is None):
        raise TypeError("es.verify needs either loss(model, batch) or step=…(model, optimizer, batch)")
    if steps < 1:
        raise ValueError(f"es.verify(steps={steps}): at least 1 is needed")
    if "group" in options:
        raise TypeError("es.verify takes no group: call it inside the `with` of the process set")
    check_models("es.verify", model, optimizer)
    current = training_session("es.verify")
    current.join()
    plays = current.world_size == 1
    if plays and loss is None:
        raise EvenstepError(
            "es.verify(step=…) in one process: where the step's gradients would be exchanged is not known\n"
            "  fix: start it on two ranks (`evenstep run -n 2`, torchrun), or give loss= instead"
        )
    seeded = check_seed_samples(options.get("seed_samples"), current.environment)
    began = time.monotonic()
    random = checkpoint_random.capture()
    try:
        start, batches = take(model, optimizer, dtype), batches_of(current.group, data, steps, seeded)
        check = _Check(current, start, step or _step_of(loss), loss, batches, options, plays)
        found = check.run()
        if not found.exact and not found.reasons and dtype is None:
            found = check.without_rounding(found)
    finally:
        checkpoint_random.restore(random[0], random[1].__getitem__)
    gc.collect()  # the copies' hooks and engines know one another; the engines hold shared memory
    return replace(found, seconds=time.monotonic() - began)


def check_models(call: str, model: Any, optimizer: Any) -> None:
    """Raises TypeError for what is neither one of them nor a list, tuple or dict of such."""
    if not modules_in(model):
        raise TypeError(
            f"{call}: {type(model).__name__} is no model: give a torch.nn.Module, or a list or dict of them"
        )
    if not optimizers_in(optimizer):
        raise TypeError(
            f"{call}: {type(optimizer).__name__} is no optimizer: give one of torch.optim, or a list of them"
        )


def _step_of(loss: Loss | None) -> Step:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        assert loss is not None
        for one in optimizers_in(optimizer):
            one.zero_grad()
        loss_of("es.verify", loss, model, batch).backward()
        for one in optimizers_in(optimizer):
            one.step()

    return step


@dataclass
class _Check:
    current: Session
    start: Start
    step: Step
    loss: Loss | None
    batches: Batches
    options: dict[str, Any]
    plays: bool

    @property
    def _sums(self) -> bool:
        return self.options.get("reduction") == "sum"

    def run(self) -> Verification:
        reference = on_rank_0(self.current.group, lambda: alone(self.start, self.step, self.batches))
        if self.plays:
            assert self.loss is not None
            alone_too = not local_norms(self.start.model) or all(map(on_cpu, modules_in(self.start.model)))
            shares = shares_of(self.batches, _PLAYED, alone=alone_too)
            ours, same = played(self.start, self.loss, self.batches, shares, self._sums), True
        else:
            ours, shares = on_ranks(self.current, self.start, self.step, self.batches, self.options)
            same = self._same(ours)
        return self._shared(lambda: self._compare(ours, reference, shares, same))

    def without_rounding(self, found: Verification) -> Verification:
        """Nothing was found: once more in 64 bits, to tell rounding from what is really different."""
        wide = replace(self, start=replace(self.start, dtype=torch.float64))
        try:
            exact = wide.run()
        except RuntimeError as error:
            if isinstance(error, EvenstepError):
                raise
            return replace(found, reasons=["not found; in float64 the model does not run"])
        if exact.exact:
            return replace(
                found,
                reasons=[
                    f"rounding alone: in float64 the difference is {exact.difference:.1e}. It grows where a step turns on the "
                    "sign of small numbers: adaptive optimizers with gradients near zero, ReLU, a large learning rate"
                ],
            )
        reason = f"not rounding: in float64 the difference is {exact.difference:.1e}, most in {exact.parameter}"
        return replace(found, reasons=[reason, *exact.reasons])

    def _same(self, ours: Outcome) -> bool:
        sums = [(name, float(one.sum()), float(one.square().sum())) for name, one in ours.parameters.items()]
        everyone = gather_objects(self.current.group, sums)
        return all(repr(one) == repr(everyone[0]) for one in everyone)

    def _shared(self, work: Callable[[], Verification]) -> Verification:
        found = on_rank_0(self.current.group, work)
        data = plain.dumps(found) if self.current.rank == 0 else None
        return plain.loads(broadcast_bytes(self.current.group, data))  # type: ignore[no-any-return]

    def _compare(self, ours: Outcome, reference: Outcome, shares: list[list[int]], same: bool) -> Verification:
        dtypes = {p.dtype for p in _parameters(self.start.model)} if self.start.dtype is None else {self.start.dtype}
        found = compared(ours, reference, dtypes, shares, same)
        return replace(found, played=self.plays, reasons=[] if found.exact else self._reasons(ours, reference))

    def _reasons(self, ours: Outcome, reference: Outcome) -> list[str]:
        asked = [
            f"es.prepare({name}={self.options[name]!r}) does not promise it"
            for name, plain in (("compression", (None, "none")), ("sync", (None,)), ("reduction", ("mean", "sum")))
            if name in self.options and self.options[name] not in plain
        ]
        return asked + reasons(self.start, self.step, self.loss, self.batches, ours, reference, self._sums)


def compared(
    ours: Outcome, reference: Outcome, dtypes: set[torch.dtype], shares: list[list[int]], same: bool
) -> Verification:
    """Of the ranks of a job, without reasons."""
    bound = max(BOUNDS.get(dtype, _OF_16_BITS) for dtype in dtypes)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    still = _without_gradient(reference.gradients, eps)
    mine, whole = (_left_out(one.parameters, still) for one in (ours, reference))
    apart = {name: float((mine[name] - one).norm()) for name, one in whole.items()}
    worst = max(apart, key=apart.__getitem__, default="")
    without = {}
    for name, mask in still.items():
        count = int(mask.sum())
        ours_alone, its_alone = ({name: one.parameters[name][mask]} for one in (ours, reference))
        words = name if count == mask.numel() else f"{name} ({count} of {mask.numel()})"
        without[words] = distance(ours_alone, its_alone)
    difference, buffers = distance(mine, whole), distance(ours.buffers, reference.buffers)
    # A bias before a norm is such a one, and is part of the norm's running mean.
    carried = any(one > bound for one in without.values())
    return Verification(
        exact=difference <= bound and (buffers <= bound or carried) and same,
        difference=difference,
        bound=bound,
        parameter=worst,
        parameter_difference=distance(mine, whole, [worst]) if worst else 0.0,
        buffers_difference=buffers,
        without_gradient=without,
        same_on_all_ranks=same,
        reasons=[],
        ranks=len(shares[0]) if shares else 0,
        played=False,
        shares=shares,
        dtype=" and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        seconds=0.0,
        steps=len(shares),
    )


def _without_gradient(gradients: Mapping[str, torch.Tensor], eps: float) -> dict[str, torch.Tensor]:
    """Which elements of each parameter have only had what rounding leaves of a zero."""
    largest = max((float(one.square().mean().sqrt()) for one in gradients.values() if one.numel()), default=0.0)
    masks = {name: (one > 0) & (one <= _NO_GRADIENT * eps * largest) for name, one in gradients.items()}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def _left_out(parameters: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.masked_fill(masks[name], 0.0) if name in masks else one for name, one in parameters.items()}


def _parameters(model: Any) -> list[torch.Tensor]:
    return [p for module in modules_in(model) for p in module.parameters() if p.is_floating_point()]
