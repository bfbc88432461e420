"""Gradients that the script keeps past the next backward: it keeps its own memory, and the engine takes the arena back.

p.grad is a view of the engine's memory, which the next round writes. Who else holds it is seen by counting references.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch


class KeptGradients:
    """Watches an engine's `views` (`memory`: its own tensors of the same memory). A parameter whose gradient was once found kept is in `own` from then on: it is to
    get its gradients as memory of their own."""

    def __init__(self, views: list[torch.Tensor], memory: Sequence[torch.Tensor]) -> None:
        self._views, self._memory = views, memory
        self._storages = [view.untyped_storage() for view in views]
        self._addresses = [storage._cdata for storage in self._storages]
        self._alone = [self._holders(index) for index in range(len(views))]
        self.own: set[int] = set()

    def _holders(self, index: int) -> int:
        """A number that grows with everything that holds this gradient: the object, its tensor, or its memory."""
        view = self._views[index]
        return int(sys.getrefcount(view) + view._use_count() + torch._C._storage_Use_Count(self._addresses[index]))

    def let_go(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before a round: gives what is kept its own memory, except gradients that this backward adds to in place, as
        it would without Evenstep."""
        views, own, alone = self._views, self.own, self._alone
        kept = [
            index
            for index, parameter in enumerate(parameters)
            if parameter.grad is not views[index]
            and index not in own
            and self._holders(index) > alone[index]
            and _storage(parameter.grad) != self._addresses[index]
        ]
        if kept:
            self._move(kept, {id(p.grad) for p in parameters if p.grad is not None})

    def in_memory(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Those whose gradient lies in the engine's memory: as its own tensor, or as another one of it (p.grad.detach(), say)."""
        return [index for index, p in enumerate(parameters) if self.has(index, p.grad)]

    def has(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether this gradient of the parameter lies there."""
        return gradient is self._views[index] or _storage(gradient) == self._addresses[index]

    def _move(self, kept: list[int], added_to: set[int]) -> None:
        copies = {self._addresses[index]: self._storages[index].clone() for index in kept}
        held = [self._views[index] for index in kept]
        for index in kept:
            self._views[index] = self._views[index].detach()
        # Views, detached ones and slices share only the memory: the collector knows them.
        skip = added_to | {id(one) for one in (*self._views, *self._memory, *held)}
        held += [
            one
            for one in gc.get_objects()
            if issubclass(type(one), torch.Tensor) and id(one) not in skip and _storage(one) in copies
        ]
        for one, copy in [(one, copies[storage]) for one in held if (storage := _storage(one))]:
            empty = torch.empty(0, dtype=one.dtype, device=one.device)
            one.data = empty.set_(copy, one.storage_offset(), one.size(), one.stride())
        self.own.update(kept)


def _storage(tensor: torch.Tensor | None) -> int:
    """Which memory; 0 for none."""
    if tensor is None or tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # torch 2.6: C++, on a thread of its own, let go of a tensor that the collector gave us
        return 0
