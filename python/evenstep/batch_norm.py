"""BatchNorm whose statistics in training are those of the whole global batch, whatever part of it each rank has."""

from __future__ import annotations

import functools
import types
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.group import DTYPES, gather_objects
from evenstep.session import entered, session, session_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evenstep.session import Session

_NAME = "synchronised_as"  # among a module's attributes
_COMPUTED = (torch.float32, torch.float64)
_PLAIN = (torch.Tensor, nn.Parameter)
_THREADS = 4  # of torch's, which share a layer's channels out
_SHORTEST = 8  # numbers of a sample's channel
_FORWARD, _FUNCTION = _BatchNorm.forward, functional.batch_norm
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
    torchs = own is _FORWARD and functional.batch_norm is _FUNCTION  # and nobody has put another one in its place
    if torchs and len(arguments) == 1 and not options and not torch.compiler.is_compiling():
        owner = session_named(vars(self)[_SET])
        with nullcontext() if owner is session() else entered(owner):
            return _plain_in_training(self, arguments[0])
    assert _training is not None
    return _training(self, own, arguments, options)


def _plain_in_training(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """What torch's own forward does, without a look at each call that it makes (a third of a small layer's time)."""
    self._check_input_dim(x)
    kept = self.running_mean, self.running_var
    momentum = 0.0 if self.momentum is None else self.momentum
    if self.track_running_stats and self.num_batches_tracked is not None:
        if session().follows_statistics:
            self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
    mean, variance = kept if self.track_running_stats else (None, None)
    return batch_norm(vars(self)[_NAME], x, mean, variance, self.weight, self.bias, True, momentum, self.eps)


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
        for what, running in (("running_mean", running_mean), ("running_var", running_var)):
            if running is not None and running.numel() != x.shape[1]:
                raise RuntimeError(f"{what} should contain {x.shape[1]} elements not {running.numel()}")
        with torch.no_grad():
            _follow(running_mean, of_all.mean, 1.0, momentum)
            _follow(running_var, of_all.variance, of_all.total / (of_all.total - 1), momentum)
    mean, variance = of_all.on(x)
    result: torch.Tensor = _BatchNormOfAll.apply(x, weight, bias, mean, variance, eps, of_all.counts, own, name)
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: 16-bit numbers as torch does it, in 32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _follow(running: torch.Tensor | None, value: torch.Tensor, factor: float, momentum: float) -> None:
    """As torch's kernels: no new version, which a graph made in eval mode would refuse."""
    if running is None:
        return
    if _is_plain(running):
        dtype = DTYPES[running.dtype]
        _core.norm_follow(running.data_ptr(), dtype, value.data_ptr(), value.numel(), momentum, factor)
    else:
        running.data.mul_(1.0 - momentum).add_((value * factor).to(running), alpha=momentum)


class _OfAll:
    """Mean and biased variance of all ranks' values, in 64 bits, on the host; the same bits on all ranks. values: these two as
    rows. narrow: the same in 32 bits."""

    def __init__(self, counts: list[int], values: torch.Tensor, narrow: torch.Tensor | None = None) -> None:
        self.counts, self.total = counts, sum(counts)
        self.mean, self.variance = values.unbind()
        self._narrow = narrow
        self._on: tuple[torch.Tensor, torch.Tensor] | None = None

    def on(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance where x is, in what is computed in."""
        if self._on is None:
            wide = _wide(x.dtype)
            if self._narrow is not None and wide is torch.float32 and x.is_cpu:
                mean, variance = self._narrow.unbind()
            else:
                mean, variance = self.mean.to(x.device, wide), self.variance.to(x.device, wide)
            self._on = mean, variance
        return self._on


def _merged(rows: torch.Tensor) -> _OfAll:
    """From the ranks' (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
    eq. 2.1), in the order of the ranks. rows: of each rank its values a channel, the channels' means, their variances."""
    channels = rows.shape[1] // 2
    each, means, variances = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    counts = [int(count) for count in each.flatten().tolist()]
    total = max(sum(counts), 1)
    mean = (each * means).sum(0) / total
    squares = each * (variances + (means - mean).square())
    return _OfAll(counts, torch.stack([mean, squares.sum(0) / total]))


def _statistics(name: str, x: torch.Tensor) -> tuple[_OfAll, int]:
    """And how many values a channel are this rank's."""
    current = session()
    channels = x.shape[1]
    count = x.numel() // max(1, channels) if current.steps.has_samples(current.latest) else 0
    mine = _moments(x) if count > 0 else None
    call = _Call(current, "forward", name)
    found: _OfAll | None = None
    if call.fast is not None:
        own, values = _on_host(mine), _rows(channels, torch.float64)
        narrow = _rows(channels, torch.float32) if _wide(x.dtype) is torch.float32 else None
        counts = call.make(lambda: call.fast.norm_statistics(call.mark, count, own, values, narrow))
        if counts is not None:
            found = _OfAll([int(one) for one in counts], values, narrow)
    else:
        found = call.gathered(count, _or_zeros(mine, channels), _merged)
    if found is None:
        head = torch.tensor([count], dtype=torch.float64, device="cpu")
        found = _merged(torch.cat([head, *(one.cpu() for one in _or_zeros(mine, channels))])[None])
    return found, count


def _moments(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of each channel this rank's mean and biased variance."""
    layout = _layout_of(x)
    if layout is None:
        found: tuple[torch.Tensor, ...] = torch.batch_norm_update_stats(x.to(_wide(x.dtype)), None, None, 0.0)
        return found
    out = _rows(x.shape[1], torch.float64)
    _core.norm_moments(x.data_ptr(), *layout, out.data_ptr())
    return out.unbind()


def _layout_of(x: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Type, and how many samples, channels, and numbers of a sample's channel there are, where one thread of our own loops
    (include/evenstep/norm.h) does better than torch's: not where channels are innermost."""
    if not _is_plain(x) or x.dim() < 3 or x.numel() == 0 or torch.get_num_threads() > _THREADS:
        return None
    samples, channels = x.shape[:2]
    inner = x.numel() // (samples * channels)
    return (DTYPES[x.dtype], samples, channels, inner) if inner >= _SHORTEST else None


def _is_plain(x: torch.Tensor) -> bool:
    """Whether its numbers lie in the host's memory one after the other, as they are, in a type that is computed with."""
    own = type(x) in _PLAIN and x.is_cpu and x.dtype in _COMPUTED and x.layout is torch.strided and x.is_contiguous()
    return own and not x.is_neg() and not x._is_zerotensor()


def _rows(channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Two, on the host, whatever the script's defaults are."""
    return torch.empty(2, channels, dtype=dtype, device="cpu")


def _on_host(mine: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    if mine is None:
        return None
    first, second = (one if one.is_cpu else one.cpu() for one in mine)
    return first.contiguous(), second.contiguous()


def _or_zeros(mine: Sequence[torch.Tensor] | None, channels: int) -> Sequence[torch.Tensor]:
    return (torch.zeros(2 * channels, dtype=torch.float64, device="cpu"),) if mine is None else mine


def _counts_nothing(current: Session) -> bool:
    """Whether the pass under way is void: each rank makes it by itself."""
    return current.recovery is not None and current.recovery.void


@functools.lru_cache(maxsize=4096)
def _place(pass_: str, name: str) -> tuple[str, float]:
    """A layer's forward or backward in words, and as a number."""
    where = f"{pass_} of BatchNorm {name!r}"
    return where, float(zlib.crc32(where.encode()))


class _Call:
    """One in which the ranks tell one another of a layer. On the group of the votes, so that a rank that comes to a vote, or to
    another collective call of the script, is told from one that is late."""

    def __init__(self, current: Session, pass_: str, name: str) -> None:
        self._current = current
        current.norm_calls += 1
        self.where, place = _place(pass_, name)
        self.mark = float(current.norm_calls), place
        self.fast: Any = current.group if getattr(current.group, "adds_norms", False) else None

    def make(self, meet: Callable[[], Any]) -> Any:
        """meet(), where all ranks make this call; None in a pass that counts nothing."""
        try:
            found, met = self._meet(meet)
        except EvenstepError as error:
            if getattr(error, "status", "") != "EVEN_ERR_MISMATCH":
                raise
            rank, words = self._current.group.rank, str(error).splitlines()[0]
            raise EvenstepError(f"{self.where}, on rank {rank}: {words}\n{_FIX}") from None
        if met and found is None:
            self._refuse()
        return found

    def _meet(self, meet: Callable[[], Any]) -> tuple[Any, bool]:
        current, recovery = self._current, self._current.recovery
        if recovery is not None and recovery.norm_runs():
            return None, False
        try:
            with current.steps.blocking():
                return meet(), True
        except EvenstepError as error:
            if recovery is None or not current.in_pass or not recovery.mends(error):
                raise
        return None, False

    def _refuse(self) -> NoReturn:
        places = gather_objects(self._current.group, self.where)
        each = "; ".join(f"rank {rank} in {place}" for rank, place in enumerate(places))
        raise EvenstepError(f"the ranks are in different BatchNorms, or were: {each}\n{_FIX}")

    def gathered(self, number: float, values: Sequence[torch.Tensor], make: Callable[[torch.Tensor], Any]) -> Any:
        """make(a row for each rank: its number, then its values), over any group; None in a pass that counts nothing."""
        group = self._current.group
        head = torch.tensor([*self.mark, number], dtype=torch.float64, device="cpu")
        row = torch.cat([head, *(one if one.is_cpu else one.cpu() for one in values)])
        rows = self.make(lambda: group.gather_rows(row, [row.numel()] * group.ranks).view(group.ranks, -1))
        if rows is None:
            return None

        def made() -> tuple[bool, Any]:
            alike = not bool((rows[:, :2] != rows[0, :2]).any())
            return alike, make(rows[:, 2:]) if alike else None

        once = getattr(group, "once", None)  # of blocks that share a process
        alike, result = made() if once is None else once(made)
        if not alike:
            self._refuse()
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
        wide, gradient = x.to(dtype), gradient.to(dtype)
        factor = None if weight is None else weight.to(dtype).contiguous()  # torch's kernel takes others for that
        counts, needed = ctx.own > 0, ctx.needs_input_grad[0]
        layout = _layout_of(wide) if counts and needed and _is_plain(gradient) else None

        def from_torch(which: list[bool]) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
                gradient, wide, factor, mean, variance, None, None, False, ctx.eps, which
            )
            return found

        if counts:
            dx, dweight, dbias = from_torch([needed and layout is None, True, True])
        else:
            dx = torch.zeros_like(x) if needed else None
            dweight = dbias = mean.new_zeros(channels)
        if needed:
            part = current.steps.weight.of_model(ctx.name.partition(".")[0])
            through = _through_statistics(current, ctx, part, [dbias, dweight], variance, weight)
            if counts and layout is None and through is not None:
                slope, shift = through.unbind()
                dx.add_(_apply(wide, mean, variance, slope, shift, ctx.eps))
            elif layout is not None and through is None:
                dx = from_torch([True, False, False])[0]
            elif layout is not None:
                dx = _gradient_of_input(layout, gradient, wide, mean, variance, ctx.eps, factor, through)
            dx = dx.to(x.dtype)
        own = zip((dweight, dbias), ctx.dtypes, ctx.needs_input_grad[1:3])
        return dx, *(one.to(dtype) if needed else None for one, dtype, needed in own), *[None] * 6


def _gradient_of_input(
    layout: tuple[int, int, int, int],
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    through: torch.Tensor,
) -> torch.Tensor:
    """In one pass over both. (through: see _through_statistics.)"""
    out = torch.empty_like(x)
    mean, variance = mean.contiguous(), variance.contiguous()
    _core.norm_input(
        gradient.data_ptr(),
        x.data_ptr(),
        *layout,
        mean.data_ptr(),
        variance.data_ptr(),
        eps,
        0 if weight is None else weight.data_ptr(),
        through.data_ptr(),
        out.data_ptr(),
    )
    return out


def _through_statistics(
    current: Session,
    ctx: Any,
    part: float,
    sums: Sequence[torch.Tensor],
    variance: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """Each channel's -B and -A (see _BatchNormOfAll), times weight / sqrt(variance + eps), two rows; None where they are nothing,
    for this rank has no part in the loss or the pass counts nothing. sums: of this rank, the gradient's and the gradient's times
    x̂."""
    call = _Call(current, "backward", ctx.name)
    mine = sums if part > 0 else None
    channels = variance.numel()

    def check(parts: Sequence[float]) -> None:
        weightless = [rank for rank, count in enumerate(ctx.counts) if count > 0 and parts[rank] == 0]
        if weightless and any(parts):
            raise EvenstepError(
                f"{call.where}: rank {weightless[0]} has samples in its statistics, but es.set_weight(0), so that what the other "
                "ranks' losses owe to these samples has no weight to travel with\n"
                "  fix: give each rank that has samples a weight above 0, or es.prepare(…, batch_norm='local')"
            )

    def total(rows: torch.Tensor) -> torch.Tensor:
        check(rows[:, 0].tolist())
        weighed: torch.Tensor = (rows[:, 1:] * rows[:, :1]).sum(0).view(2, -1)
        return weighed

    both: torch.Tensor | None
    if call.fast is not None:
        own, both = _on_host(mine), _rows(channels, torch.float64)
        parts = call.make(lambda: call.fast.norm_sums(call.mark, part, own, both))
        if parts is None:
            return None
        check(parts)
    else:
        both = call.gathered(part, _or_zeros(mine, channels), total)
    if both is None or not part > 0:
        return None
    spread, factor = (None if one is None else one.detach().cpu().contiguous() for one in (variance, weight))
    assert spread is not None
    factor = None if factor is None else factor.to(spread.dtype)
    out = _rows(channels, spread.dtype)
    _core.norm_through(
        both.data_ptr(),
        spread.data_ptr(),
        0 if factor is None else factor.data_ptr(),
        DTYPES[spread.dtype],
        channels,
        ctx.eps,
        max(1, sum(ctx.counts)),
        part,
        out.data_ptr(),
    )
    return out.to(variance.device)


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
