"""BatchNorm whose statistics in training are those of the whole global batch, whatever part of it each rank has."""

from __future__ import annotations

import types
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from evenstep._core import EvenstepError
from evenstep.group import gather_objects
from evenstep.session import entered, session, session_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evenstep.session import Session

_NAME = "synchronised_as"  # among a module's attributes
_SET = "synchronised_in"  # the process set that computes it; "": all ranks
_FIX = (
    "  fix: run every BatchNorm on all ranks alike, equally often and in the same order (a branch that the data choose: on "
    "an empty batch where a rank has none of it); or es.prepare(…, batch_norm='local'), each rank by its own statistics"
)


def is_synchronised(module: nn.Module) -> bool:
    return _NAME in vars(module) and _replaced(module)


def _replaced(module: nn.Module) -> bool:
    """Whether its forward is not its class's. (Of an unpickled one it is, by name.)"""
    found = vars(module).get("forward")
    return found is not None and getattr(found, "__func__", found) is not type(module).forward


def synchronise(called: str, model: nn.Module, process_set: str = "") -> list[str]:
    """Makes the model's BatchNorm layers compute as one, where they can; the names of those that cannot.

    The modules stay the objects that they are, with their class, parameters and buffers: what is put in is their
    `forward`. Copies of them (copy.deepcopy) do the same; a pickled one is plain again.
    """
    global _training
    left = []
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            if getattr(module, "original_name", "").startswith("BatchNorm"):
                left.append(path)  # scripted: its forward is no longer Python's
        elif not is_synchronised(module):
            if _replaced(module) or getattr(module, "process_group", None) is not None:
                left.append(path)  # the script's own forward, or its own group of ranks
                continue
            _training = _training or torch.compiler.disable(_forward_in_training)  # here: it imports the compiler
            vars(module)[_NAME] = f"{called}.{path}" if path else called
            vars(module)[_SET] = process_set
            vars(module)["forward"] = types.MethodType(forward, module)
    return left


def make_local(model: nn.Module) -> None:
    """Undoes `synchronise`."""
    for module in model.modules():
        if is_synchronised(module):
            del vars(module)[_NAME], vars(module)[_SET], vars(module)["forward"]


def forward(self: _BatchNorm, *arguments: Any, **options: Any) -> torch.Tensor:
    """A BatchNorm's own forward, whatever its class; only the normalisation in it is that of all ranks' samples. (Its
    name is by what pickle finds a bound method again: in a process without evenstep that is the class's.)"""
    own = _BatchNorm.forward if isinstance(self, nn.SyncBatchNorm) else type(self).forward
    if not self.training:
        return own(self, *arguments, **options)
    assert _training is not None
    return _training(self, own, arguments, options)


def _forward_in_training(self: _BatchNorm, own: Any, arguments: Any, options: Any) -> torch.Tensor:
    owner = session_named(vars(self)[_SET])
    with nullcontext() if owner is session() else entered(owner), _Normalising(vars(self)[_NAME]):
        result: torch.Tensor = own(self, *arguments, **options)
    return result


_training: Callable[..., torch.Tensor] | None = None
"""The same, but between two compiled parts, so that the ranks' order of calls is the script's."""


class _Normalising(TorchFunctionMode):
    """Puts the normalisation over all ranks in the place of torch's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.add_ and not session().follows_statistics:
            return args[0]  # num_batches_tracked, which another block of this model counts
        if function is functional.batch_norm:
            return batch_norm(self._name, *args, **kwargs)
        if function is torch.batch_norm:  # in another order
            x, weight, bias, mean, variance, *rest = args
            return batch_norm(self._name, x, mean, variance, weight, bias, *rest[:3])
        return function(*args, **kwargs)


def batch_norm(
    name: str,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """torch.nn.functional.batch_norm of all ranks' samples together. Collective where `training`."""
    if not training or eps <= 0.0:  # torch says what is wrong
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    of_all, own = _statistics(name, x.detach())
    if of_all.total == 1 and not _counts_nothing(session()):
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.size()} on all ranks together"
        )
    if of_all.total > 1 and session().follows_statistics:
        with torch.no_grad():
            _follow(running_mean, of_all.mean, momentum)
            _follow(running_var, of_all.variance * (of_all.total / (of_all.total - 1)), momentum)
    mean, variance = of_all.on(x)
    result: torch.Tensor = _BatchNormOfAll.apply(x, weight, bias, mean, variance, eps, of_all.counts, own, name)
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: 16-bit numbers as torch does it, in 32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _follow(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:  # as torch's kernels: no new version, which a graph made in eval mode would refuse
        running.data.mul_(1.0 - momentum).add_(value.to(running), alpha=momentum)


class _OfAll:
    """Mean and biased variance of all ranks' values, from the ranks' (Chan, Golub, LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979, eq. 2.1), in 64 bits and in the order of the ranks, so that all have the
    same bits. rows: of each rank its values a channel, the channels' means, their variances."""

    def __init__(self, rows: torch.Tensor) -> None:
        channels = rows.shape[1] // 2
        each, means, variances = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
        self.counts = [int(count) for count in each.flatten().tolist()]
        self.total = sum(self.counts)
        self.mean = (each * means).sum(0) / max(self.total, 1)
        squares = each * (variances + (means - self.mean).square())
        self.variance = squares.sum(0) / max(self.total, 1)
        self._on: tuple[torch.Tensor, torch.Tensor] | None = None

    def on(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance where x is, in what is computed in."""
        if self._on is None:
            self._on = (self.mean.to(x.device, _wide(x.dtype)), self.variance.to(x.device, _wide(x.dtype)))
        return self._on


def _statistics(name: str, x: torch.Tensor) -> tuple[_OfAll, int]:
    """And how many values a channel are this rank's."""
    current = session()
    channels = x.shape[1]
    count = x.numel() // max(1, channels) if current.steps.has_samples(current.latest) else 0
    if count > 0:
        mine = torch.batch_norm_update_stats(x.to(_wide(x.dtype)), None, None, 0.0)
    else:
        mine = (torch.zeros(2 * channels, dtype=torch.float64),)
    found: _OfAll | None = _meet(current, f"forward of BatchNorm {name!r}", count, mine, _OfAll)
    if found is None:
        found = _OfAll(torch.cat([torch.tensor([count], dtype=torch.float64), *(one.cpu() for one in mine)])[None])
    return found, count


def _counts_nothing(current: Session) -> bool:
    """Whether the pass under way is void: each rank makes it by itself."""
    return current.recovery is not None and current.recovery.void


def _gather_rows(current: Session, row: torch.Tensor) -> torch.Tensor | None:
    """None in a pass that counts nothing."""
    group, recovery = current.group, current.recovery
    if recovery is not None and recovery.norm_runs():
        return None
    try:
        with current.steps.blocking():
            return group.gather_rows(row, [row.numel()] * group.ranks).view(group.ranks, -1)
    except EvenstepError as error:
        if recovery is None or not current.in_pass or not recovery.mends(error):
            raise
    return None


def _meet(
    current: Session, where: str, number: float, values: Sequence[torch.Tensor], make: Callable[[torch.Tensor], Any]
) -> Any:
    """make(a row for each rank: its number, then its values); None in a pass that counts nothing. On the group of the votes,
    so that a rank that comes to a vote, or to another collective call of the script, is told from one that is late."""
    group = current.group
    current.norm_calls += 1
    head = torch.tensor([current.norm_calls, zlib.crc32(where.encode()), number], dtype=torch.float64)
    row = torch.cat([head, *(one if one.is_cpu else one.cpu() for one in values)])
    try:
        rows = _gather_rows(current, row)
    except EvenstepError as error:
        if getattr(error, "status", "") != "EVEN_ERR_MISMATCH":
            raise
        raise EvenstepError(f"{where}, on rank {group.rank}: {str(error).splitlines()[0]}\n{_FIX}") from None
    if rows is None:
        return None

    def made() -> tuple[bool, Any]:
        alike = not bool((rows[:, :2] != rows[0, :2]).any())
        return alike, make(rows[:, 2:]) if alike else None

    once = getattr(group, "once", None)  # of blocks that share a process
    alike, result = made() if once is None else once(made)
    if not alike:
        places = gather_objects(group, where)
        each = "; ".join(f"rank {rank} in {place}" for rank, place in enumerate(places))
        raise EvenstepError(f"the ranks are in different BatchNorms, or were: {each}\n{_FIX}")
    return result


class _BatchNormOfAll(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, whose gradient also goes through mean and variance.

    With M values a channel on all ranks, of which rank s gives its loss the weight w_s, and g = dL_s/dy on it:
      dL/dx = w_r * weight / sqrt(variance + eps) * (g - A - x̂ B),
      A = sum_s w_s sum g / (M w_r),  B = sum_s w_s sum (g x̂) / (M w_r),
    whatever the weights add up to
    (Ioffe, Szegedy, "Batch Normalization", 2015, section 3, the sums over all ranks). The factor w_r comes with the
    exchange of the parameters' gradients. torch's kernels compute with a given mean and variance, so x̂ is never stored.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        counts: list[int],
        own: int,
        name: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.counts, ctx.own, ctx.name = eps, counts, own, name
        ctx.session = session()
        ctx.dtypes = [None if one is None else one.dtype for one in (weight, bias)]
        return _apply(x.to(mean.dtype), mean, variance, weight, bias, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, variance = ctx.saved_tensors
        current = ctx.session
        dtype, channels = mean.dtype, x.shape[1]
        wide = x.to(dtype)
        counts = ctx.own > 0
        if counts:
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                gradient.to(dtype),
                wide,
                None if weight is None else weight.to(dtype),
                mean,
                variance,
                None,
                None,
                False,
                ctx.eps,
                [ctx.needs_input_grad[0], True, True],
            )
        else:
            dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
            dweight = dbias = mean.new_zeros(channels)
        if dx is not None:
            part = current.steps.weight.of_model(ctx.name.partition(".")[0])
            through = _through_statistics(current, ctx, part, [dbias, dweight], variance, weight)
            if through is not None and counts and part > 0:
                slope, shift = (through / part).to(mean)
                dx = dx.add_(_apply(wide, mean, variance, slope, shift, ctx.eps))
            dx = dx.to(x.dtype)
        own = zip((dweight, dbias), ctx.dtypes, ctx.needs_input_grad[1:3])
        return dx, *(one.to(dtype) if needed else None for one, dtype, needed in own), *[None] * 6


def _through_statistics(
    current: Session,
    ctx: Any,
    part: float,
    sums: Sequence[torch.Tensor],
    variance: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """Each channel's -w_r B and -w_r A, times weight / sqrt(variance + eps), two rows in 64 bits. sums: of this rank, the
    gradient's and the gradient's times x̂."""
    where = f"backward of BatchNorm {ctx.name!r}"
    if part <= 0:
        sums = [torch.zeros(2 * variance.numel(), dtype=torch.float64)]

    def make(rows: torch.Tensor) -> torch.Tensor:
        parts = rows[:, 0].tolist()
        weightless = [rank for rank, count in enumerate(ctx.counts) if count > 0 and parts[rank] == 0]
        if weightless and any(parts):
            raise EvenstepError(
                f"{where}: rank {weightless[0]} has samples in its statistics, but es.set_weight(0), so that what the other "
                "ranks' losses owe to these samples has no weight to travel with\n"
                "  fix: give each rank that has samples a weight above 0, or es.prepare(…, batch_norm='local')"
            )
        scale = (variance.double().cpu() + ctx.eps).rsqrt() / -max(1, sum(ctx.counts))
        if weight is not None:
            scale = scale * weight.double().cpu()
        total: torch.Tensor = (rows[:, 1:] * rows[:, :1]).sum(0).view(2, -1).flip(0)
        return total * scale

    found: torch.Tensor | None = _meet(current, where, part, sums, make)
    return found


def _apply(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    weight, bias = (None if one is None else one.to(x.dtype) for one in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)
