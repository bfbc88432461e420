"""Before training: the ranks check that they have the same model and optimizer, and start from rank 0's values."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep._core import EvenstepError
from evenstep.group import broadcast_bytes, gather_objects

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


def check_same_optimizer(group: Group, name: str, optimizer: Optimizer) -> None:
    """Raises where the parameter groups differ in size or options."""

    def plain(value: Any) -> str:
        return f"{value.item()}" if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)

    mine = [
        (len(g["params"]), sorted((k, plain(v)) for k, v in g.items() if k != "params")) for g in optimizer.param_groups
    ]
    everyone = gather_objects(group, (type(optimizer).__name__, mine))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise EvenstepError(
                f"optimizer {name!r} of rank {rank} differs from rank 0's: {theirs} against {everyone[0]}\n"
                "  fix: give every rank the same optimizer with the same options"
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


def broadcast_optimizer(group: Group, optimizer: Optimizer) -> None:
    """Rank 0's optimizer state on all ranks, where it has any."""
    data: bytes | None = None
    if group.rank == 0 and optimizer.state:
        out = io.BytesIO()
        torch.save(optimizer.state_dict(), out)
        data = out.getvalue()
    received = broadcast_bytes(group, data)
    if received and group.rank != 0:
        optimizer.load_state_dict(torch.load(io.BytesIO(received), map_location="cpu", weights_only=True))
