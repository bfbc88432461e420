"""The forms in which torch's process groups take a call: with options, or a root, an operation and a time limit in their place."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

_FORMS: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "allreduce": (1, c10d.AllreduceOptions, ("op",)),
    "broadcast": (1, c10d.BroadcastOptions, ("root",)),
    "reduce": (1, c10d.ReduceOptions, ("root", "op")),
    "allgather": (2, c10d.AllgatherOptions, ()),
    "gather": (2, c10d.GatherOptions, ("root",)),
    "scatter": (2, c10d.ScatterOptions, ("root",)),
    "reduce_scatter": (2, c10d.ReduceScatterOptions, ("op",)),
    "alltoall": (2, c10d.AllToAllOptions, ()),
    "all_to_all_single": (4, c10d.AllToAllOptions, ()),
    "barrier": (0, c10d.BarrierOptions, ()),
}
"""A group's methods: how many arguments are data, its options, and what may stand in their place before a time limit."""

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_MISSING = object()


def usual_form(method: str) -> tuple[int, Any]:
    """How many arguments torch's own functions, and C++, give a call, and the type of the last one; None where it has one form."""
    data, kind, _ = _FORMS.get(method, (0, None, ()))
    return data + 1, kind


def _place(word: str) -> int:
    """Which of the data an argument of this name is: torch's names differ from form to form (`tensor`, `output_tensors`)."""
    if "split" in word:
        return 2 if word.startswith("output") else 3
    return 1 if word.startswith("input") else 0


def _listed(method: str, data: list[Any]) -> list[Any]:
    """Tensors that stand alone, or lists of them, as the lists that the form with options has."""
    if method in ("allreduce", "broadcast", "reduce"):
        return [[data[0]] if isinstance(data[0], torch.Tensor) else data[0]]
    if method in ("allgather", "gather") and isinstance(data[1], torch.Tensor):
        return [[data[0]] if data[0] else [], [data[1]]]
    if method in ("scatter", "reduce_scatter") and isinstance(data[0], torch.Tensor):
        return [[data[0]], [data[1]] if data[1] else []]
    return data


def in_full(method: str, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments in the form with options; None in place of these where the call says nothing that they would."""
    count, kind, words = _FORMS[method]
    names = (*words, "timeout")
    data, rest = list(given[:count]), list(given[count:])
    data += [_MISSING] * (count - len(data))
    said: dict[str, Any] = {}
    for word, value in named.items():
        if word in names or word == "opts":
            said[word] = value
        elif _place(word) < count and data[_place(word)] is _MISSING:
            data[_place(word)] = value
        else:
            raise TypeError(f"{method}() takes no argument {word!r}, or has it already")
    if any(one is _MISSING for one in data):
        raise TypeError(f"{method}() needs {count} arguments before its options; got {len(given)}")
    if rest and (hasattr(rest[0], "timeout") or (rest[0] is None and len(rest) == 1)):
        said["opts"] = rest.pop(0)
    if len(rest) > len(names):
        raise TypeError(f"{method}() takes at most {count + len(names)} arguments")
    said.update((word, value) for word, value in zip(names, rest) if value is not None)
    options = said.pop("opts", None)
    if isinstance(options, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
        options, said["op"] = None, options
    said = {word: value for word, value in said.items() if value is not None}
    if options is None and said:
        options = kind()
    for word, value in said.items():
        if word == "timeout" and not isinstance(value, timedelta):
            raise TypeError(f"{method}(): timeout is a datetime.timedelta, not {value!r}")
        setattr(options, _FIELDS[word], value)
    return (*_listed(method, data), options)
