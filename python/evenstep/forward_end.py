"""When the forward that a loss comes from ended: before a batch was fetched, or after it. Autograd numbers its nodes in the
order in which a thread makes them (`torch.autograd._get_sequence_nr`, which its profiler ties forward to backward by)."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from evenstep.graph_nodes import is_number, kind_of

_NODES = 64  # of a graph: those next to the losses
# What a script does with a loss after forward, as it divides it by the steps that it accumulates over, or a GradScaler scales it
_AFTER = ("Add", "Sub", "Neg", "Mul", "Div", "Clone", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze")


class Moment(NamedTuple):
    """Between the nodes that a thread had made by then and those that it makes later."""

    thread: int
    number: int


def now() -> Moment:
    # torch's stubs do not have it
    return Moment(threading.get_ident(), torch.autograd._get_sequence_nr())  # type: ignore[attr-defined,no-untyped-call,unused-ignore]


def forward_numbers(losses: Any) -> list[int]:
    """Of the last nodes of forward that the losses come from, in no order; none where that is not known."""
    roots = losses if isinstance(losses, (list, tuple)) else [losses]
    waiting = [one.grad_fn for one in roots if isinstance(one, torch.Tensor)]
    found: list[int] = []
    for _ in range(_NODES):
        if not waiting:
            return found
        node = waiting.pop()
        if node is None:
            continue
        if _only_reckons(node):
            waiting.extend(following for following, _ in node.next_functions)
        elif node.next_functions:  # else it is a parameter's own, made long before
            found.append(node._sequence_nr())
    return []


def _only_reckons(node: Any) -> bool:
    """Whether it makes a number of numbers, as may also be done when forward has ended."""
    return kind_of(node) in _AFTER and is_number(node)
