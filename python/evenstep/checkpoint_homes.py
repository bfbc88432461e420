"""Where a checkpoint's tensors belong: memory that is there already, of models and of optimizers' states. A file may be read
straight into it once all is known to be right; such a load needs no memory of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from evenstep.checkpoint_block import is_plain, range_of, ranges_apart
from evenstep.checkpoint_files import TensorFile

Tensors = dict[str, torch.Tensor]


def homes_in_model(model: Any) -> Tensors:
    """By key of its state_dict."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return {}
    live = model.state_dict(keep_vars=True)
    return {key: value for key, value in live.items() if isinstance(value, torch.Tensor)}


def homes_in_state(saved: Any, live: Any) -> Tensors:
    """By the file's names, of one parameter's state as the manifest has it, beside what the optimizer has now."""
    if not isinstance(saved, dict):
        return {}
    name = saved.get("$tensor") if len(saved) == 1 else None
    if name is not None:
        return {name: live} if isinstance(name, str) and isinstance(live, torch.Tensor) else {}
    if not isinstance(live, dict):
        return {}
    found: Tensors = {}
    for key, value in saved.items():
        found.update(homes_in_state(value, live.get(key)))
    return found


def fitting(file: TensorFile, homes: Tensors) -> Tensors:
    """Those of plain memory that have the type and shape of the file's tensor. Nothing of a file of which most is new: it is
    read once, to memory of its own."""
    fit = {}
    for name in file.names():
        home = homes.get(name)
        if home is None or file.bytes_of(name) == 0 or not is_plain(home):
            continue
        if (home.dtype, tuple(home.shape)) == file.describe(name):
            fit[name] = home
    whole = sum(map(file.bytes_of, file.names()))
    return fit if 2 * sum(map(file.bytes_of, fit)) > whole else {}


def without_shared(homes: Iterable[tuple[str, Tensors]]) -> dict[str, Tensors]:
    """Of several files, by their names: what shares no byte with another one's. The rest is left to torch, in its order."""
    homes = list(homes)
    counts = Counter(range_of(home) for _, tensors in homes for home in tensors.values())
    apart = ranges_apart(set(counts))
    found = {
        name: {key: home for key, home in tensors.items() if range_of(home) in apart and counts[range_of(home)] == 1}
        for name, tensors in homes
    }
    return {name: tensors for name, tensors in found.items() if tensors}


__all__ = ["fitting", "homes_in_model", "homes_in_state", "without_shared"]
