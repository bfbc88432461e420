"""Copies of a model that were made before es.prepare (a teacher, an average of weights, a target network, a list of
clones): on one device they have the model's first values, so on ranks that are seeded differently they get rank 0's, as
the model does."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from evenstep.group import Group, broadcast_bytes


def _values(models: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """By their ids, all that rank 0 gives."""
    return {id(one): one for model in models for one in (*model.parameters(), *model.buffers()) if one.numel() > 0}


def _first_ones(values: Iterable[torch.Tensor]) -> bytes:
    """Of each tensor one number: what is drawn by chance differs there, too."""
    found = [one.detach().flatten()[:1].cpu().view(torch.uint8) for one in values if one.layout is torch.strided]
    return bytes(torch.cat(found).tolist()) if found else b""


def _key(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _may_change(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and 0 not in tensor.stride()


class CopiedValues:
    """Made before the models get rank 0's values; `follow()` after it. Collective: rank 0 says what it begins with, and
    only where that is another do the others look for copies: through all tensors that Python knows, some hundredths of a
    second."""

    def __init__(self, group: Group, models: Iterable[nn.Module]) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        values = _values(models)
        if group.ranks == 1 or not values:
            return
        mine = _first_ones(values.values())
        if broadcast_bytes(group, mine) != mine:
            self._find(values)

    @torch.no_grad()
    def _find(self, values: dict[int, torch.Tensor]) -> None:
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for one in values.values():
            if one.layout is torch.strided and not one.is_meta:
                alike.setdefault(_key(one), []).append(one)
        for other in gc.get_objects():
            # a subclass may make of a comparison whatever it likes
            if type(other) not in (torch.Tensor, nn.Parameter) or id(other) in values:
                continue
            if other.layout is not torch.strided or _key(other) not in alike or not _may_change(other):
                continue
            same = (one for one in alike[_key(other)] if one.data_ptr() != other.data_ptr() and torch.equal(one, other))
            copied = next(same, None)
            if copied is not None:
                self.pairs.append((other, copied))

    @torch.no_grad()
    def follow(self) -> None:
        """The copies get what the models have now; what does not differ between ranks (zeros, what was read from a file)
        is not written to."""
        for other, copied in self.pairs:
            if not torch.equal(other, copied):
                other.detach().copy_(copied)
        self.pairs.clear()
