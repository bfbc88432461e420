"""What a pass of training changes before it is known to count, kept from its beginning on, so that a void one leaves no trace:
the models' buffers, and what was prepared for its state alone (a GradScaler)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_SMALL_BYTES = 1 << 16


@dataclass
class _Kept:
    buffer: torch.Tensor | None
    version: int
    values: torch.Tensor | None


class PassState:
    """Of one session. Buffers above 64 KiB are copied where their version says that they have changed; smaller ones, and
    running statistics, each time: `.data` and torch's kernels change them without a version."""

    def __init__(self, models: Mapping[str, nn.Module], objects: Mapping[str, Any]) -> None:
        self._models, self._objects = models, objects
        self._known = 0  # models whose buffers are in _places
        self._places: list[tuple[nn.Module, str]] = []
        self._buffers: list[_Kept | None] = []
        self._states: dict[str, Any] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """As it is now."""
        self._find_buffers()
        kept: list[torch.Tensor] = []
        now: list[torch.Tensor] = []
        for index, (module, name) in enumerate(self._places):
            buffer, before = module._buffers[name], self._buffers[index]
            version = _version(buffer)
            if before is None or before.buffer is not buffer or not _alike(before.values, buffer):
                values = None if buffer is None or buffer.is_inference() else buffer.detach().clone()
                self._buffers[index] = _Kept(buffer, version, values)
            elif before.values is not None and self._may_differ(module, before, version):
                assert buffer is not None
                before.version = version
                kept.append(before.values)
                now.append(buffer.detach())
        if kept:
            torch._foreach_copy_(kept, now)
        self._states = {name: copy.deepcopy(one.state_dict()) for name, one in self._objects.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """What was kept; it stays kept."""
        for (module, name), kept in zip(self._places, self._buffers):
            if kept is None:
                continue
            if module._buffers[name] is not kept.buffer:
                module._buffers[name] = kept.buffer
            if kept.values is None or kept.buffer is None:
                continue
            if not _alike(kept.values, kept.buffer):  # resized
                module._buffers[name] = kept.values.clone()
            elif self._may_differ(module, kept, _version(kept.buffer)):
                kept.buffer.data.copy_(kept.values)  # no new version, which a graph made in eval mode would refuse
        for name, state in self._states.items():
            self._objects[name].load_state_dict(copy.deepcopy(state))

    def _find_buffers(self) -> None:
        models: Sequence[nn.Module] = list(self._models.values())
        for model in models[self._known :]:
            places = [(module, name) for module in model.modules() for name, _ in module._buffers.items()]
            self._places += places
            self._buffers += [None] * len(places)
        self._known = len(models)

    @staticmethod
    def _may_differ(module: nn.Module, kept: _Kept, version: int) -> bool:
        assert kept.values is not None
        small = kept.values.numel() * kept.values.element_size() <= _SMALL_BYTES
        return small or kept.version != version or isinstance(module, _NormBase)


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _alike(values: torch.Tensor | None, buffer: torch.Tensor | None) -> bool:
    """Whether the one can be copied into the other."""
    if values is None or buffer is None:
        return values is None and (buffer is None or buffer.is_inference())
    return values.shape == buffer.shape and values.dtype == buffer.dtype and values.device == buffer.device
