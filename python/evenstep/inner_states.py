"""Each rank's own state of an optimizer, where ranks train on their own (es.LocalSGD, es.DiLoCo): in checkpoints beside rank 0's,
which is stored as any other. Of that state the tensors that belong to a parameter: counts and options are alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

State = dict[str, torch.Tensor]


def is_own(session: Any, optimizer: Any) -> bool:
    """Whether the ranks' states of it may differ."""
    if session.world_size < 2 or not isinstance(optimizer, Optimizer):
        return False
    apart = [sync for sync in session.steps.syncs if sync.local is not None]
    ids = {id(p) for p in _parameters(optimizer)} if apart else set()
    return any(sync.has_any(ids) for sync in apart)


def own_state(optimizer: Optimizer, names: dict[int, str]) -> State:
    """By "name of the parameter/key". names: of parameters, by id; as in checkpoints an optimizer may have them in another order."""
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter in _parameters(optimizer)
        if id(parameter) in names
        for key, value in optimizer.state.get(parameter, {}).items()
        if _is_plain(value)
    }


@torch.no_grad()
def put_own_state(optimizer: Optimizer, names: dict[int, str], saved: State) -> None:
    """In the place of rank 0's, which was loaded."""
    of: dict[str, State] = {}
    for name, value in saved.items():
        parameter_name, _, key = name.rpartition("/")
        of.setdefault(parameter_name, {})[key] = value
    for parameter in _parameters(optimizer):
        mine = of.get(names.get(id(parameter), ""), {})
        theirs = optimizer.state.get(parameter, {})
        if not mine:
            if any(map(_is_plain, theirs.values())):  # this rank has not trained it yet
                del optimizer.state[parameter]
            continue
        for key in [key for key, value in theirs.items() if _is_plain(value) and key not in mine]:
            del theirs[key]
        for key, value in mine.items():
            there = theirs.get(key)
            like = there if isinstance(there, torch.Tensor) else parameter if value.dim() > 0 else value
            optimizer.state[parameter][key] = value.to(like.device, copy=True)


def _parameters(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
