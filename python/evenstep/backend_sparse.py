"""All-reduce of sparse tensors (COO): the ranks' indices and values are gathered, then added up where indices are equal."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evenstep import _core

_MOST_DIMENSIONS = 16
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def summable(tensor: torch.Tensor) -> bool:
    """Whether it is a sparse tensor of which the engine can make a sum, on whatever device."""
    return tensor.layout is torch.sparse_coo and tensor.dtype in _DTYPES and tensor.dim() <= _MOST_DIMENSIONS


def _gathered(comm: _core.Comm, mine: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Everyone's flat tensor of one dtype; rank r's has counts[r] elements."""
    everything = torch.empty(sum(counts), dtype=mine.dtype)
    mine = mine.contiguous()
    size = mine.element_size()
    comm.all_gather(mine.data_ptr(), everything.data_ptr(), [count * size for count in counts], _core.DTYPE_U8)
    return list(everything.split(counts))


def _facts(tensor: torch.Tensor) -> torch.Tensor:
    """What must be the same on all ranks, and then the number of values."""
    shape = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    kind = [tensor.sparse_dim(), tensor.dense_dim(), _DTYPES.index(tensor.dtype)]
    return torch.tensor([*kind, *shape, tensor._nnz()], dtype=torch.int64)


def _check(rows: list[list[int]], rank: int) -> None:
    for other, row in enumerate(rows):
        if row[:-1] != rows[rank][:-1]:
            raise ValueError(
                f"all_reduce of sparse tensors of different kinds: rank {rank} has {_described(rows[rank])}, "
                f"rank {other} {_described(row)}"
            )


def _described(row: list[int]) -> str:
    sparse, dense, dtype, *shape = row[:-1]
    return f"shape {shape[: sparse + dense]} with {sparse} sparse dimensions, {_DTYPES[dtype]}"


def sum_of(comm: _core.Comm, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, coalesced, the same on all."""
    mine = tensor.coalesce()
    facts = _facts(mine)
    rows = [row.tolist() for row in _gathered(comm, facts, [facts.numel()] * comm.ranks)]
    _check(rows, comm.rank)
    counts = [row[-1] for row in rows]
    sparse = mine.sparse_dim()
    values = mine.values()
    row = values[0].numel() if values.shape[0] else int(torch.tensor(values.shape[1:]).prod())
    indices = _gathered(comm, mine.indices().reshape(-1), [sparse * count for count in counts])
    parts = _gathered(comm, values.reshape(-1), [row * count for count in counts])
    return torch.sparse_coo_tensor(
        torch.cat([part.view(sparse, count) for part, count in zip(indices, counts)], 1),
        torch.cat([part.view(count, *values.shape[1:]) for part, count in zip(parts, counts)]),
        mine.shape,
        check_invariants=False,  # each part was a tensor
    ).coalesce()


def sparse_reduction(comm: _core.Comm | None, tensors: Any, op: int | None) -> Callable[[], None] | None:
    """The job of an all-reduce of one sparse tensor, in place; None where it is not for the engine. Sums only, as Gloo."""
    if comm is None or op != _core.OP_SUM or len(tensors) != 1:
        return None
    if not tensors[0].is_cpu or not summable(tensors[0]):
        return None

    tensor = tensors[0]

    def job() -> None:
        tensor.copy_(sum_of(comm, tensor))

    return job
