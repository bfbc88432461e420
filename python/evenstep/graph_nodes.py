"""Nodes of autograd's graph, as what looks at a loss knows them."""

from __future__ import annotations

import math
from typing import Any


def kind_of(node: Any) -> str:
    """ "Mul" of a MulBackward0."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def is_number(node: Any) -> bool:
    """Whether what it gave is one."""
    given: Any = getattr(node, "_input_metadata", ())
    return len(given) == 1 and math.prod(given[0].shape) == 1
