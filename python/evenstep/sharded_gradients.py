"""p.grad where no rank has the whole gradient: each has its part in shared memory, and es.optim's step adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenstep import _core
from evenstep._core import EvenstepError


class ShardedGradient(torch.Tensor):
    """Shape, strides and dtype of a gradient, and where its parts lie: at `address` on this rank, at the same place in the
    arena of `comm` on the others. Whatever asks for its numbers raises EvenstepError, for there are none."""

    comm: _core.Comm
    address: int
    spent: bool  # a step has had it, and may have written sums where the parts were

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, stride: Sequence[int], comm: _core.Comm, address: int) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(parameter.shape), strides=tuple(stride), dtype=parameter.dtype, device=parameter.device
        )
        made.comm, made.address, made.spent = comm, address, False
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__ if hasattr(func, "__name__") else str(func)
        fix = "give es.optim its max_grad_norm for clipping; leave shard_gradients out where the script reads or writes gradients"
        if name.startswith("add") and args and isinstance(args[0], ShardedGradient):  # what backward does with it
            fix = (
                "call optimizer.zero_grad() before backward, and all but the last backward of a step under es.no_sync(); or "
                "leave shard_gradients out"
            )
        elif "zero_" in name:
            fix = "call zero_grad() with set_to_none=True, its default"
        raise EvenstepError(
            f"{name} on a gradient of which each rank has a part (shard_gradients=True of es.optim): its sum is formed in "
            f"optimizer.step() alone\n  fix: {fix}"
        )

    def __repr__(self, **_: Any) -> str:
        return f"ShardedGradient({tuple(self.shape)}, {self.dtype}: in parts, on {self.comm.ranks} ranks)"
