"""A backward that counts nothing: on a rank without samples it is left out, where nothing else would come of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync


class IdleBackward:
    """Looks through a pass's graph before it is run."""

    def __init__(self) -> None:
        self._kinds: dict[type, bool] = {}  # of nodes -> whether they only compute

    def parameters_of(self, losses: Any, syncs: Iterable[GradientSync]) -> set[int] | None:
        """The parameters (ids) of which a backward from here would make gradients; None where it would do anything else:
        run a function of the script's own, or of a library, which may meet the other ranks; make a gradient of a tensor
        that is no prepared parameter; call a hook of the script's on one that is."""
        known: set[int] = set().union(*(sync.ids for sync in syncs))
        waiting = _nodes_of(losses)
        if not waiting:
            return None
        found: set[int] = set()
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            kind = type(node)
            if kind.__name__ == "AccumulateGrad":
                if not _is_ours(node.variable, known):
                    return None
                found.add(id(node.variable))
                continue
            computes = self._kinds.get(kind)
            if computes is None:
                computes = self._kinds[kind] = _computes(node)
            if not computes:
                return None
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return found


def _nodes_of(losses: Any) -> list[Any]:
    """Where the pass begins; [] where that cannot be seen."""
    tensors = (
        [losses] if isinstance(losses, torch.Tensor) else list(losses) if isinstance(losses, (list, tuple)) else []
    )
    nodes = [tensor.grad_fn if isinstance(tensor, torch.Tensor) else None for tensor in tensors]
    return [] if None in nodes else nodes


def _computes(node: Any) -> bool:
    """Whether it is one of torch's own operations on tensors."""
    if isinstance(node, torch._C._FunctionBase):
        return False
    name = node.name()
    return "::" not in name and "c10d" not in name.lower()


def _is_ours(parameter: torch.Tensor, known: set[int]) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return id(parameter) in known and not parameter._backward_hooks and (hooks is None or len(hooks) == 1)
