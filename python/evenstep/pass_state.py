"""What a pass of training changes before it is known to count, kept from its beginning on, so that a void one leaves no trace:
the models' buffers, what was prepared for its state alone (a GradScaler), parameters that no optimizer trains (an average of
others), and schedulers that were stepped in it, behind a step that was skipped."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from evenstep.late_copies import LateCopies, untrained
from evenstep.schedulers import SchedulerSteps

_SMALL_BYTES = 1 << 16
_LARGEST_STATE = 1 << 20
_COPIED_LATE = 1 << 10  # bytes of a tensor, in states that are larger together
_ENTRY_BYTES = 64  # that an entry of a container costs to copy
_NUMBERS = (int, float, bool, type(None))


@dataclass
class _Kept:
    buffer: torch.Tensor | None
    version: int
    values: torch.Tensor | None


@dataclass
class _OfModule:
    """Its buffers by name, in its order, at the last keep()."""

    kept: dict[str, _Kept | None]
    passing: set[str]  # those that no state_dict has


class PassState:
    """Of one session. Buffers above 64 KiB are copied where their version says that they have changed; smaller ones, and
    running statistics, each time: `.data` and torch's kernels change them without a version."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        objects: Mapping[str, Any],
        optimizers: Mapping[str, Optimizer],
        schedulers: SchedulerSteps | None = None,
    ) -> None:
        self._schedulers = schedulers
        self._models, self._objects, self._optimizers = models, objects, optimizers
        self._late = LateCopies()
        self._untrained: list[torch.Tensor] = []
        self._modules: dict[nn.Module, _OfModule] = {}
        self._states: dict[str, Any] = {}

    @torch.no_grad()
    def keep(self) -> str:
        """As it is now. Gives why that cannot be, in a few words; "" where it is done."""
        if self._schedulers is not None:
            self._schedulers.stands()
        states = {name: one.state_dict() for name, one in self._objects.items()}
        late = _late_tensors(states)
        why = _too_large(self._objects, states, late)
        if why:
            return why
        self._untrained = untrained(self._models, self._optimizers.values())
        self._late.keep([*self._untrained, *late.values()])
        self._find_buffers()
        kept: list[torch.Tensor] = []
        now: list[torch.Tensor] = []
        for module, of_module in self._modules.items():
            for name, before in of_module.kept.items():
                buffer = module._buffers[name]
                version = _version(buffer)
                if before is None or before.buffer is not buffer or not _alike(before.values, buffer):
                    values = None if buffer is None or _has_no_values(buffer) else buffer.detach().clone()
                    of_module.kept[name] = _Kept(buffer, version, values)
                elif before.values is not None and self._may_differ(module, before, version):
                    assert buffer is not None
                    before.version = version
                    kept.append(before.values)
                    now.append(buffer.detach())
        if kept:
            torch._foreach_copy_(kept, now)
        self._states = copy.deepcopy(states, dict(late))  # with the large tensors themselves
        return ""

    def want(self) -> None:
        """What was kept will be put back: the pass under way is void. Before the script changes anything more."""
        self._late.want()

    @torch.no_grad()
    def put_back(self) -> None:
        """What was kept; it stays kept. Raises EvenstepError where large tensors had changed before they were wanted."""
        late = self._late.copies()
        if self._schedulers is not None:
            self._schedulers.put_back()
        for module, of_module in self._modules.items():
            if list(module._buffers) != list(of_module.kept):
                self._put_names_back(module, of_module)
            for name, kept in of_module.kept.items():
                if kept is not None:
                    self._put_buffer_back(module, name, kept)
        for one in self._untrained:
            one.data.copy_(late[id(one)])
        for name, state in self._states.items():
            given = {key: late[key].clone() for key in _late_tensors({name: state})}
            self._objects[name].load_state_dict(copy.deepcopy(state, dict(given)))

    def _put_buffer_back(self, module: nn.Module, name: str, kept: _Kept) -> None:
        if module._buffers[name] is not kept.buffer:
            module._buffers[name] = kept.buffer
        if kept.values is None or kept.buffer is None:
            return
        if not _alike(kept.values, kept.buffer) or _overlaps(kept.buffer):  # resized, or cannot be written
            module._buffers[name] = kept.values.clone()
        elif self._may_differ(module, kept, _version(kept.buffer)):
            kept.buffer.data.copy_(kept.values)  # no new version, which a graph made in eval mode would refuse

    @staticmethod
    def _put_names_back(module: nn.Module, of_module: _OfModule) -> None:
        """Without those that came since, with those that went."""
        buffers = {name: kept.buffer for name, kept in of_module.kept.items() if kept is not None}
        module._buffers.clear()
        module._buffers.update(buffers)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(of_module.passing)

    def _find_buffers(self) -> None:
        """Modules and buffers come and go: lazy ones, caches that forward makes."""
        found: dict[nn.Module, _OfModule] = {}
        for model in self._models.values():
            for module in model.modules():
                known = self._modules.get(module)
                if known is None or list(module._buffers) != list(known.kept):
                    before: dict[str, _Kept | None] = {} if known is None else known.kept
                    kept = {name: before.get(name) for name in module._buffers}
                    known = _OfModule(kept, set(module._non_persistent_buffers_set))
                found[module] = known
        self._modules = found

    @staticmethod
    def _may_differ(module: nn.Module, kept: _Kept, version: int) -> bool:
        assert kept.values is not None
        small = kept.values.numel() * kept.values.element_size() <= _SMALL_BYTES
        return small or kept.version != version or isinstance(module, _NormBase)


def too_large(objects: Mapping[str, Any]) -> str:
    """Why what was prepared for its state alone cannot be kept at each pass, in a few words; "" where it can."""
    states = {name: one.state_dict() for name, one in objects.items()}
    return _too_large(objects, states, _late_tensors(states))


def _too_large(objects: Mapping[str, Any], states: Mapping[str, Any], late: Mapping[int, torch.Tensor]) -> str:
    for name, state in states.items():
        if _bytes_above(state, _LARGEST_STATE, late):
            return (
                f"the state of {name} ({type(objects[name]).__name__}) is above 1 MiB without its large tensors, too much to be "
                "kept at each step"
            )
    return ""


def _late_tensors(states: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Those that are copied once they are wanted, by their ids: of states above 1 MiB."""
    found: dict[int, torch.Tensor] = {}
    for state in states.values():
        if _bytes_above(state, _LARGEST_STATE, {}):
            _find_tensors(state, found)
    return found


def _find_tensors(state: Any, found: dict[int, torch.Tensor]) -> None:
    open_ones, looked = [state], 0
    while open_ones and looked <= _LARGEST_STATE // _ENTRY_BYTES:
        one = open_ones.pop()
        looked += 1
        if isinstance(one, torch.Tensor):
            if one.nbytes >= _COPIED_LATE and not _has_no_values(one):
                found[id(one)] = one
        elif isinstance(one, (dict, list, tuple)):
            open_ones += one.values() if isinstance(one, dict) else one


def _bytes_above(state: Any, limit: int, late: Mapping[int, torch.Tensor]) -> bool:
    """Whether it takes more, about, without these tensors; it looks no further than it must."""
    open_ones, total = [state], 0
    seen: set[int] = set()
    while open_ones and total <= limit:
        one = open_ones.pop()
        if isinstance(one, (dict, list, tuple, set, frozenset)):
            total += _ENTRY_BYTES * len(one)
            if id(one) in seen or total > limit:
                continue
            seen.add(id(one))
            within = one.values() if isinstance(one, dict) else one
            open_ones += [inner for inner in within if type(inner) not in _NUMBERS]
        else:
            size = 0 if id(one) in late else getattr(one, "nbytes", None)
            total += size if isinstance(size, int) else len(one) if isinstance(one, (bytes, bytearray, str)) else 0
    return total > limit


def _has_no_values(buffer: torch.Tensor) -> bool:
    """That could be copied."""
    return is_lazy(buffer) or buffer.is_inference()


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or _has_no_values(buffer) else buffer._version


def _alike(values: torch.Tensor | None, buffer: torch.Tensor | None) -> bool:
    """Whether the one can be copied into the other."""
    if values is None or buffer is None:
        return values is None and (buffer is None or _has_no_values(buffer))
    return values.shape == buffer.shape and values.dtype == buffer.dtype and values.device == buffer.device


def _overlaps(buffer: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory (expand)."""
    return any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride()))
