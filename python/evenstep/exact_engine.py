"""The engine of `exact="bitwise"`: blocks' gradients go into sums whose bits depend on the blocks alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.engine import Report, memory_format_of
from evenstep.group import DTYPES

if TYPE_CHECKING:
    from evenstep.group import Bootstrap

_SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ExactEngine:
    """A round: begin_blocks, add for each of this rank's blocks, finish. The other calls of an Engine do nothing: what is
    summed are blocks, not what a backward leaves."""

    def __init__(self, parameters: Sequence[torch.Tensor], comm: _core.Comm | None, telemetry: _core.Telemetry) -> None:
        wrong = sorted({str(p.dtype) for p in parameters if p.dtype not in _SUMMED})
        if wrong:
            raise EvenstepError(
                f"exact='bitwise' sums gradients of float32, float64, bfloat16 and float16, not of {', '.join(wrong)}"
            )
        self._telemetry, self._parameters = telemetry, parameters
        self._comm = comm  # lives as long as the sums
        self._exact = _core.Exact([(p.numel(), DTYPES[p.dtype]) for p in parameters], comm)
        self.views = [self._like(p, p.device) for p in parameters]
        # Where the sums are written: of parameters on the CPU the views themselves.
        self._targets = [view if view.is_cpu else self._like(view, torch.device("cpu")) for view in self.views]
        self._staged = list(self._targets)  # of gradients that lie in memory in another way; made when needed
        self._step = 0
        self.weight, self.loss = 0.0, math.nan  # of the last round

    @staticmethod
    def _like(one: torch.Tensor, device: torch.device) -> torch.Tensor:
        shape, stride = memory_format_of(one)
        return torch.empty(one.numel(), dtype=one.dtype, device=device).as_strided(shape, stride)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return ()

    @property
    def plain(self) -> bool:
        """Whether all parameters are in the host's memory."""
        return all(view is target for view, target in zip(self.views, self._targets))

    def revoke(self) -> None:
        """Ends what the other ranks wait for."""
        if self._comm is not None:
            self._comm.revoke()

    def meet_again(self, bootstrap: Bootstrap) -> _core.Comm:
        """The group in which another one for the same parameters adds up. Collective."""
        comm = bootstrap.shared(0, "exact", messages=True)
        assert comm is not None
        return comm

    def again(self, comm: _core.Comm) -> ExactEngine:
        """Another one for the same parameters; this one has ended, whatever round was open."""
        return ExactEngine(self._parameters, comm, self._telemetry)

    def begin_blocks(self, counts: Sequence[int]) -> None:
        self.weight, self.loss = 0.0, math.nan
        self._exact.begin(counts)

    @torch.no_grad()
    def add(self, weight: float, loss: float, gradients: Sequence[torch.Tensor | None]) -> None:
        """This rank's next block."""
        addresses, held = [], []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                addresses.append(0)
                continue
            gradient = gradient.detach()
            target = self._targets[index]
            if (
                gradient.device != target.device
                or gradient.dtype != target.dtype
                or gradient.stride() != target.stride()
            ):
                gradient = self._stage(index, gradient)
            held.append(gradient)
            addresses.append(gradient.data_ptr())
        self._exact.add(weight, loss, addresses)

    def _stage(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._staged[index] is self._targets[index]:
            self._staged[index] = self._like(self._targets[index], torch.device("cpu"))
        return self._staged[index].copy_(gradient)

    def begin(self, weight: float, step: int) -> None:
        self._step = step

    def ready(self, index: int, gradient: torch.Tensor) -> None: ...

    def finish(self) -> tuple[Sequence[int], Report]:
        start = _core.clock_ns()
        used, self.weight, self.loss, took, waited, moved = self._exact.finish([t.data_ptr() for t in self._targets])
        for view, target, one in zip(self.views, self._targets, used):
            if one and target is not view:
                view.copy_(target)
        self._telemetry.span(_core.SPAN_COMMUNICATION, self._step, start, _core.clock_ns() - start, moved)
        return used, Report(took, waited, took, moved)
