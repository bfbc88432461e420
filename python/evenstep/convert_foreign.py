"""Objects of libraries that need not be here, in files of torch.save: written as the name of their class and their
attributes, which is all that a pickle has of an object. Nothing is imported, here or when this project reads them."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, BinaryIO, ClassVar

import torch


@dataclasses.dataclass
class Foreign:
    """What the reader makes of it: module.name.__new__(), with these attributes."""

    module: str
    name: str
    attributes: dict[str, Any]


def _write(pickler: Any, value: Foreign) -> None:
    pickler.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
    pickler.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    pickler.save(value.attributes)
    pickler.write(pickle.BUILD)


class _Pickler(pickle._Pickler):
    """The one in C looks up each class that it names."""

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, Foreign: _write}


class _Module:
    """Stands for pickle, as torch.save takes it."""

    Pickler = _Pickler


def save(value: Any, file: BinaryIO) -> None:
    torch.save(value, file, pickle_module=_Module)
