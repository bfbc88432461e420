"""Buffers that forward changes (BatchNorm's running statistics): kept the same on all ranks, step by step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from evenstep.batch_norm import is_synchronised

if TYPE_CHECKING:
    from evenstep.group import Group


Change = tuple[int, tuple[int, ...]]  # a buffer's number, its shape


class BufferSync:
    """Of the buffers that some rank's forward changed: floating ones become the average weighted by samples, all
    others those of rank 0. Where a model's rule is True, all are those of the first rank that had samples; where it is
    False they stay each rank's own.

    Left out: buffers that are no part of the state (persistent=False: caches of masks or positions), those whose shape
    differs between ranks, and those of synchronised BatchNorms, which all ranks have alike.
    """

    def __init__(self, models: Sequence[tuple[nn.Module, bool | None]]) -> None:
        self._owners: list[tuple[nn.Module, str]] = []
        self._sent: set[int] = set()  # those that are sent, by their number
        for model, rule in models:
            if rule is False:
                continue
            for module in model.modules():
                if is_synchronised(module):
                    continue
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                        if rule:
                            self._sent.add(len(self._owners))
                        self._owners.append((module, name))
        self._versions = [self._version(i) for i in range(len(self._owners))]

    def _get(self, index: int) -> torch.Tensor | None:
        module, name = self._owners[index]
        buffers = module._buffers  # of a scripted module no dict
        return buffers[name] if name in buffers else None  # noqa: SIM401

    def _version(self, index: int) -> tuple[int, int]:
        buffer = self._get(index)
        if buffer is None:
            return (0, 0)
        return (id(buffer), 0 if buffer.is_inference() else buffer._version)

    def changed(self) -> list[Change]:
        """Which buffers this rank changed since the last call of `synchronise`."""
        return [
            (i, self._shape(i))
            for i in range(len(self._owners))
            if self._is_statistic(i) or self._version(i) != self._versions[i]
        ]

    def names(self, changes: Sequence[Change]) -> list[str]:
        """Of these buffers: "running_mean of an InstanceNorm1d"."""
        owners = [self._owners[index] for index, _ in changes]
        return [f"{name} of a {type(module).__name__}" for module, name in owners]

    def _shape(self, index: int) -> tuple[int, ...]:
        buffer = self._get(index)
        return (-1,) if buffer is None else tuple(buffer.shape)

    def _is_statistic(self, index: int) -> bool:
        """Running statistics of a norm in training: torch's kernels write them without counting a version."""
        return self._owners[index][0].training and self._is_running(index)

    def _is_running(self, index: int) -> bool:
        module, name = self._owners[index]
        return isinstance(module, _NormBase) and name in ("running_mean", "running_var")

    def _put(self, index: int, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Running statistics as torch's kernels do, without a version: of a graph that outlives this step (a GAN's samples, on
        which the critic steps first) backward looks at their versions, but not at their values."""
        (buffer.data if self._is_running(index) else buffer).copy_(value)

    @staticmethod
    def checksum(changed: Sequence[Change]) -> int:
        """0 for none."""
        return zlib.crc32(",".join(map(str, changed)).encode()) | 1 if changed else 0

    @torch.no_grad()
    def synchronise(
        self, group: Group, changed: list[Change], checksums: Sequence[int], weights: Sequence[float]
    ) -> None:
        """Collective where any checksum is not 0. `weights`: each rank's say."""
        if group.ranks == 1:  # its own are the average
            self._versions = [self._version(i) for i in range(len(self._owners))]
            return
        weight, total = weights[group.rank], math.fsum(weights)
        root = next((rank for rank, one in enumerate(weights) if one > 0), 0)
        if len(set(checksums)) > 1:
            from evenstep.group import gather_objects

            mine = ([index for index, _ in changed], [self._shape(i) for i in range(len(self._owners))])
            everyone = gather_objects(group, mine)
            union = sorted(set().union(*(theirs for theirs, _ in everyone)))
            indices = [i for i in union if len({shapes[i] for _, shapes in everyone}) == 1]
        else:
            indices = [index for index, _ in changed]
        there = [(i, b) for i, b in ((i, self._get(i)) for i in indices) if b is not None]
        floating = [(i, b) for i, b in there if b.is_floating_point() and i not in self._sent]
        if floating and total > 0:
            flat = torch.cat([b.detach().to("cpu", torch.float64).reshape(-1) for _, b in floating])
            flat = flat * (weight / total) if weight > 0 else torch.zeros_like(flat)
            group.sum_(flat)
            at = 0
            for index, buffer in floating:
                self._put(index, buffer, flat[at : at + buffer.numel()].view(buffer.shape))
                at += buffer.numel()
        for index, buffer in there:
            if index in self._sent or not buffer.is_floating_point():
                value = buffer.detach().cpu().contiguous()
                group.broadcast_(value, root if index in self._sent else 0)
                self._put(index, buffer, value)
        self._versions = [self._version(i) for i in range(len(self._owners))]
