"""Nodes of autograd's graph, as what looks at a loss knows them."""

from __future__ import annotations

import math
from typing import Any


def kind_of(node: Any) -> str:
    """ "Mul" of a MulBackward0."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def is_number(node: Any) -> bool:
    """Whether what it gave is one."""
    shape = shape_of(node, 0)
    return shape is not None and len(node._input_metadata) == 1 and math.prod(shape) == 1


def shape_of(node: Any, number: int) -> tuple[int, ...] | None:
    """Of what it gave there; None where it gave nothing, or a nested tensor, which has none."""
    given: Any = getattr(node, "_input_metadata", ())
    try:
        return tuple(given[number].shape) if number < len(given) else None
    except RuntimeError:
        return None
