"""What a checkpoint of any format holds, in one form between the readers and the writers of `evenstep ckpt convert`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Union

import torch

from evenstep.checkpoint_files import find_tied

Tensors = dict[str, torch.Tensor]
Key = Union[str, int]  # a parameter: its name, or its place in the optimizer where no name is known

# Exit codes of the program.
USAGE, INPUT, SYSTEM, DAMAGED, UNSUPPORTED = 2, 3, 5, 6, 8


class Refused(Exception):
    """What cannot be converted, how to go on, and the exit code."""

    def __init__(self, what: str, fix: str = "", code: int = INPUT) -> None:
        super().__init__(what)
        self.what, self.fix, self.code = what, fix, code


@dataclasses.dataclass
class Optimizer:
    """An optimizer's state_dict() taken apart."""

    groups: list[dict[str, Any]]  # settings, without the parameters
    members: list[list[Key]]  # the parameters of each group, in order
    state: dict[Key, dict[str, Any]]
    class_name: str | None = None
    other: dict[str, Any] = dataclasses.field(default_factory=dict)

    def keys(self) -> list[Key]:
        return [key for group in self.members for key in group]

    def is_named(self) -> bool:
        return all(isinstance(key, str) for key in self.keys())


@dataclasses.dataclass
class Scheduler:
    state: dict[str, Any]
    class_name: str | None = None


@dataclasses.dataclass
class Contents:
    format: str
    models: dict[str, Tensors] = dataclasses.field(default_factory=dict)  # the first is "model"
    model_extra: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # what is no tensor in them
    optimizers: dict[str, Optimizer] = dataclasses.field(default_factory=dict)  # "optimizer", "optimizer_1" …
    schedulers: dict[str, Scheduler] = dataclasses.field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # the user's own entries
    files: list[Path] = dataclasses.field(default_factory=list)  # beside the weights: config.json, tokenizers
    left: list[str] = dataclasses.field(default_factory=list)  # what was not carried over, a line each
    notes: list[str] = dataclasses.field(default_factory=list)  # what the user should know of what was

    def leave(self, what: str) -> None:
        if what not in self.left:
            self.left.append(what)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def model(self) -> Tensors:
        return self.models["model"]


def numbered(kind: str, index: int) -> str:
    """The name that es.prepare gives the index-th model, optimizer, scheduler."""
    return kind if index == 0 else f"{kind}_{index}"


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def parameter_order(tensors: Tensors) -> list[str]:
    """The names in a state_dict() that look like parameters', in the order of model.parameters(): one name for tied ones,
    no statistics of normalisations, no integers. Other buffers cannot be told from parameters."""
    tied = find_tied(tensors)
    return [
        name
        for name, tensor in tensors.items()
        if name not in tied and name.rpartition(".")[2] not in _BUFFERS and tensor.is_floating_point()
    ]


def _fits(names: list[str], keys: list[Key], optimizer: Optimizer, tensors: Tensors) -> bool:
    for name, key in zip(names, keys):
        values = [v for v in optimizer.state.get(key, {}).values() if isinstance(v, torch.Tensor) and v.dim() > 0]
        if values and all(value.shape != tensors[name].shape for value in values):
            return False
    return True


def _orders(names: list[str], optimizer: Optimizer, tensors: Tensors) -> list[tuple[str, list[str]]]:
    """In which order the names may stand in the optimizer."""
    orders = [("the model's", names)]
    if len(optimizer.members) == 2:  # weights decay, biases and the scales of norms do not
        wide = [name for name in names if tensors[name].dim() >= 2]
        narrow = [name for name in names if tensors[name].dim() < 2]
        sizes = [len(group) for group in optimizer.members]
        orders = [
            (what, [*first, *second])
            for what, first, second in (
                ("matrices first, then vectors", wide, narrow),
                ("vectors first, then matrices", narrow, wide),
            )
            if [len(first), len(second)] == sizes
        ]
    return orders if len(optimizer.members) <= 2 else []


def name_parameters(optimizer: Optimizer, tensors: Tensors) -> str | None:
    """Gives the optimizer's parameters, where they have only numbers, the names of the model's, by their order. Returns
    that order in words; None where it does not fit (another number of them, or other shapes): nothing is changed then."""
    keys, names = optimizer.keys(), parameter_order(tensors)
    if len(keys) != len(names):
        return None
    for what, order in _orders(names, optimizer, tensors):
        if _fits(order, keys, optimizer, tensors):
            name_of: dict[Key, Key] = dict(zip(keys, order))
            optimizer.state = {name_of.get(key, key): value for key, value in optimizer.state.items()}
            optimizer.members = [[name_of[key] for key in group] for group in optimizer.members]
            return what
    return None


def name_optimizers(contents: Contents) -> None:
    """For a format that keeps states by name: those that cannot be named are left, and listed."""
    for name, optimizer in list(contents.optimizers.items()):
        if optimizer.is_named():
            continue
        order = name_parameters(optimizer, contents.model())
        if order is None:
            contents.leave(
                f"the state of {name}: its {len(optimizer.keys())} parameters have no names, and their number, shapes or "
                f"groups do not fit the model's {len(parameter_order(contents.model()))}"
            )
            del contents.optimizers[name]
        else:
            contents.note(f"the parameters of {name} had no names; they were named by their order: {order}")
