"""The result of a rank's last collective call, kept as it is, and packed once a rank lacks it: most calls end on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import torch

from evenstep import plain

Packs = Callable[[], Union[bytes, str]]  # str: a result that it was given, which could not be packed, and why


def packed(result: bytes | str) -> Packs:
    """Of what is packed already."""
    return lambda: result


def packs_later(result: Any) -> Packs:
    """Of an object that the script has as well. Its tensors are not copied, but where nothing would say that the script has
    changed them."""
    held = dict(result) if isinstance(result, dict) else result
    if isinstance(held, torch.Tensor) and held.is_inference():
        held = held.clone()
    tensors = [one for one in (held.values() if isinstance(held, dict) else [held]) if _has_version(one)]
    versions = [tensor._version for tensor in tensors]

    def pack() -> bytes:
        if [tensor._version for tensor in tensors] != versions:
            raise ValueError("the script has changed it since")
        return plain.dumps(held)

    return pack


def told_result(packs: Packs) -> bytes | str:
    """For the others, once ranks were lost; words where it cannot be packed."""
    try:
        return packs()
    except Exception as error:  # whatever the script's own classes raise
        return f"the result of a call cannot be given to a rank that lacks it: {error}"


def _has_version(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and not one.is_inference()
