"""What all ranks must have alike: the model and the optimizer, which start from rank 0's values, and the gradients of a
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evenstep._core import EvenstepError
from evenstep.group import gather_objects
from evenstep.state_apart import CannotBeTold, broadcast_state

if TYPE_CHECKING:
    from evenstep.group import Group


def _describe(model: nn.Module) -> list[tuple[str, str]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}") for name, t in tensors]


def check_same_model(group: Group, name: str, model: nn.Module) -> None:
    """Raises, on every rank, where a rank's parameters or buffers differ from rank 0's in name, shape or dtype."""
    mine = _describe(model)
    everyone = gather_objects(group, mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        if len(theirs) != len(everyone[0]):
            detail = f"it has {len(theirs)} parameters and buffers, rank 0 has {len(everyone[0])}"
        else:
            (a, x), (b, y) = next((p, q) for p, q in zip(theirs, everyone[0]) if p != q)
            detail = f"its {a!r} is {x}, where rank 0 has {b!r}, {y}"
        raise EvenstepError(
            f"model {name!r} of rank {rank} differs from rank 0's: {detail}\n"
            "  fix: build the same model on every rank (no sizes that depend on the rank)"
        )


def check_same(everyone: Sequence[Any], otherwise: str, fix: str) -> None:
    """Raises, on every rank, where a rank was told otherwise than rank 0. `otherwise`: what was, `fix`: what to give, as the
    error says them."""
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise EvenstepError(
                f"rank {rank} was told {otherwise}: {theirs or 'nothing'}, rank 0: {everyone[0] or 'nothing'}\n"
                f"  fix: {fix}, on every rank alike"
            )


# How a step is computed, not what: ranks on unlike devices may differ.
_OWN_AFFAIR = ("foreach", "fused", "capturable")


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _comparable(value: Any) -> Any:
    """What can travel and be compared with ==: values as they are, tensors by value, code by its name."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return "NaN" if value != value else value
    if isinstance(value, torch.Tensor):
        return _comparable(value.item()) if value.numel() == 1 else _comparable(value.detach().cpu().tolist())
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _comparable(one) for key, one in value.items()}
    if hasattr(value, "__qualname__"):
        return _qualified(value)
    return _qualified(type(value))  # an object of the user's: its repr may hold an address


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group: how many parameters, and the options that all ranks must share."""
    return [
        {
            "params": f"{len(group['params'])} parameters",
            **{k: _comparable(v) for k, v in group.items() if k not in ("params", "param_names", *_OWN_AFFAIR)},
        }
        for group in optimizer.param_groups
    ]


def _difference(theirs: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    """The first difference of two optimizers of one class in words, or nothing."""
    if len(theirs) != len(first):
        return f"it has {len(theirs)} parameter groups, rank 0 has {len(first)}"
    for number, (mine, other) in enumerate(zip(theirs, first)):
        for key in (*other, *(key for key in mine if key not in other)):
            if key not in mine or key not in other:
                where, lacks = ("rank 0", "it") if key not in mine else ("it", "rank 0")
                return f"in parameter group {number} {where} has an option {key!r}, which {lacks} lacks"
            if mine[key] != other[key]:
                return f"in parameter group {number} its {key!r} is {mine[key]!r}, where rank 0 has {other[key]!r}"
    return ""


def check_same_optimizer(group: Group, name: str, optimizer: Optimizer) -> None:
    """Raises, on every rank, where a rank's optimizer is another one than rank 0's or has other options."""
    everyone = gather_objects(group, (_qualified(type(optimizer)), _options(optimizer)))
    first_class, first_options = everyone[0]
    for rank, (its_class, its_options) in enumerate(everyone):
        if its_class != first_class:
            detail = f"it is a {its_class}, rank 0's a {first_class}"
        else:
            detail = _difference(its_options, first_options)
        if detail:
            raise EvenstepError(
                f"optimizer {name!r} of rank {rank} differs from rank 0's: {detail}\n"
                "  fix: give every rank the same optimizer with the same options"
            )


def _loader_facts(loader: DataLoader[Any], seeded: bool) -> dict[str, Any]:
    """What all ranks must have alike for a global batch to be one, and its shares to be decided at one time."""
    dataset: Any = loader.dataset
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        length = None
    return {
        "data set": type(dataset).__qualname__,
        "samples": length,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "seed_samples": seeded,
    }


def check_same_loader(group: Group, loader: DataLoader[Any], seeded: bool) -> None:
    """Raises, on every rank, where a rank's loader is not like rank 0's. seeded: es.prepare(seed_samples=...)."""
    everyone = gather_objects(group, _loader_facts(loader, seeded))
    for rank, theirs in enumerate(everyone):
        for what, value in theirs.items():
            if value != everyone[0][what]:
                raise EvenstepError(
                    f"the loader of rank {rank} differs from rank 0's: its {what} is {value!r}, where rank 0 has "
                    f"{everyone[0][what]!r}\n  fix: give every rank the whole data set and the same DataLoader; es.prepare "
                    "shares out the samples"
                )


@torch.no_grad()
def broadcast_model(group: Group, model: nn.Module) -> None:
    """Rank 0's parameters and buffers on all ranks."""
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in seen or tensor.numel() == 0:
            continue
        seen.add(id(tensor))
        value = tensor.detach()
        if value.is_cpu and value.is_contiguous():
            group.broadcast_(value)
        else:
            staged = value.cpu().contiguous()
            group.broadcast_(staged)
            value.copy_(staged)


def broadcast_optimizer(group: Group, name: str, optimizer: Optimizer) -> None:
    """Rank 0's optimizer state on all ranks; none where it has none."""
    if group.ranks == 1:
        return
    mine = optimizer.state_dict() if group.rank == 0 and optimizer.state else None
    try:
        received = broadcast_state(group, mine)
    except CannotBeTold as error:
        raise EvenstepError(
            f"the state of optimizer {name!r} cannot go from rank 0 to all ranks: {error}\n"
            "  fix: keep numbers, strings, lists, dictionaries and dense tensors in its state and options, or load its state "
            "on every rank after es.prepare"
        ) from error
    if received is None:
        optimizer.state.clear()
    elif group.rank != 0:
        optimizer.load_state_dict(received)


@torch.no_grad()
def first_differing(group: Group, tensors: Mapping[int, torch.Tensor]) -> int | None:
    """The first key whose tensor is another on some rank, but for the rounding of sums over other numbers of threads; None
    where all are the same. The same answer on all. Collective."""
    forms = gather_objects(group, [(key, tuple(one.shape), str(one.dtype)) for key, one in tensors.items()])
    others = [form for theirs in forms for form in set(theirs) ^ set(forms[0])]
    if others:
        return int(min(others)[0])
    mine = [key for key, one in tensors.items() if not _is_rank_0s(group, one)]  # to the end: all are in each broadcast
    differing = [key for theirs in gather_objects(group, mine[:1]) for key in theirs]
    return min(differing, default=None)


def _is_rank_0s(group: Group, tensor: torch.Tensor) -> bool:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    mine = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).cpu().contiguous()
    if mine.numel() == 0:
        return True
    first = mine.clone()
    group.broadcast_(first)
    return same_but_for_rounding(mine, first)


def same_but_for_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are one sum, made in other orders. Two ranks' own gradients of a large batch are near each other too,
    so of 16-bit types, whose square root of eps is 3% and more, only some units in the last place are left."""
    if torch.equal(one, other):
        return True
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return False
    eps = torch.finfo(other.dtype).eps
    one, other = (torch.where(finite, each, 0).double() for each in (one, other))
    scale = float(other.abs().max()) or 1.0  # squares of large numbers are infinite
    return float(((one - other) / scale).norm()) <= min(eps**0.5, max(4 * eps, 1e-3)) * float((other / scale).norm())
