"""Sparse gradients (nn.Embedding(sparse=True)): the rows that any rank has, weighted and added up, the same on all ranks.

They travel when backward has ended, as (indices, values) of unequal numbers; only rows that were used cost anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from evenstep.group import DTYPES

if TYPE_CHECKING:
    from evenstep.group import Group

_NONE, _SPARSE, _DENSE = 0, 1, 2
_ENTRY = struct.Struct("<qq")  # which of these, rows


def sparse_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> set[int]:
    """ids of the parameters whose gradients are expected to be sparse: of embeddings made so, and of SparseAdam."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            found.add(id(module.weight))
    for optimizer in optimizers:
        if isinstance(optimizer, SparseAdam):
            found.update(id(p) for group in optimizer.param_groups for p in group["params"])
    return found


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    """What values are added in: the short types in fp32."""
    return dtype if dtype in (torch.float32, torch.float64) or dtype not in DTYPES else torch.float32


def _describe(parameter: torch.Tensor, weight: float) -> tuple[int, int]:
    gradient = parameter.grad
    if gradient is None:
        return _NONE, 0
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():
            gradient = parameter.grad = gradient.coalesce()
        return _SPARSE, gradient._nnz() if weight > 0 else 0
    return _DENSE, 0


@torch.no_grad()
def sum_sparse(group: Group, parameters: Sequence[torch.Tensor], weight: float) -> int:
    """p.grad = sum over ranks of weight_r * p.grad_r, coalesced; None where no rank has one. Collective.

    Where some rank's gradient is dense (a weight tied to a dense layer), the sum is. Returns the bytes
    that this rank sent.
    """
    mine = [_describe(p, weight) for p in parameters]
    records = group.exchange(b"".join(_ENTRY.pack(*one) for one in mine))
    everyone = [list(_ENTRY.iter_unpack(record)) for record in records]
    moved = 0
    for index, parameter in enumerate(parameters):
        kinds = {entries[index][0] for entries in everyone}
        if kinds == {_NONE}:
            continue
        if _DENSE in kinds:
            moved += _sum_dense(group, parameter, weight)
        else:
            moved += _sum_rows(group, parameter, weight, [entries[index][1] for entries in everyone])
    return moved


def _sum_dense(group: Group, parameter: torch.Tensor, weight: float) -> int:
    gradient = parameter.grad
    total = torch.zeros(parameter.shape, dtype=_sum_type(parameter.dtype))
    if gradient is not None and weight > 0:
        dense = gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient
        total.copy_(dense).mul_(weight)
    group.sum_(total)
    parameter.grad = total.to(parameter.device, parameter.dtype)
    return total.numel() * total.element_size()


def _sum_rows(group: Group, parameter: torch.Tensor, weight: float, rows: list[int]) -> int:
    gradient = parameter.grad
    # every rank knows these from the parameter: an embedding's gradient has one sparse dimension
    tail = parameter.shape[1:]
    dtype = _sum_type(parameter.dtype)
    indices = torch.empty(0, dtype=torch.int64)
    values = torch.empty(0, dtype=dtype)
    if gradient is not None and rows[group.rank] > 0:
        indices = gradient.indices()[0].cpu().contiguous()
        values = gradient.values().to("cpu", dtype).mul(weight).reshape(-1)
    width = tail.numel()
    all_indices = group.gather_rows(indices, rows)
    all_values = group.gather_rows(values, [count * width for count in rows])
    total = torch.sparse_coo_tensor(
        all_indices[None], all_values.reshape(-1, *tail), tuple(parameter.shape), check_invariants=False
    )
    total = total.coalesce()  # on the CPU, in the order of the ranks: the same bits everywhere
    parameter.grad = total.to(parameter.device, parameter.dtype).coalesce()
    return indices.numel() * 8 + values.numel() * values.element_size()
