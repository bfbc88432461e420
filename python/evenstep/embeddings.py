"""Embeddings whose forward or gradient depends on which rows are looked up together: on a rank these are its own samples' alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from evenstep._core import EvenstepError

_KINDS = (nn.Embedding, nn.EmbeddingBag)
_NAMES = tuple(kind.__name__ for kind in _KINDS)  # of scripted ones


def _embeddings_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(module, _KINDS) or getattr(module, "original_name", "") in _NAMES:
            yield path or type(module).__name__, module


def check_embeddings(name: str, model: nn.Module, apart: bool, exact: bool, tells: bool) -> None:
    """Of a model that several ranks train, or blocks. apart: ranks train on their own. Raises EvenstepError; tells: warns, too."""
    for path, module in _embeddings_of(model):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue  # a scripted class of the same name
        trained = weight.requires_grad
        most = getattr(module, "max_norm", None)
        if most is not None and (exact or (trained and not apart)):
            raise EvenstepError(
                f"embedding {path!r} of model {name!r} has max_norm={most:g}: forward shortens in place the rows that are looked up, on "
                "each rank those of its own samples alone, so that parameters would differ between ranks from the first step on\n"
                "  fix: build it without max_norm, and once before training, and after each optimizer.step(): with torch.no_grad(): "
                f"{path}.weight.renorm_({module.norm_type:g}, 0, {most:g})"
            )
        if getattr(module, "scale_grad_by_freq", False) and trained and not apart and tells:
            warnings.warn(
                f"embedding {path!r} of model {name!r} has scale_grad_by_freq: gradients are divided by how often a row comes in a "
                "part of the batch, not in all of it, so it trains otherwise than on one device\n  fix: build it without",
                stacklevel=6,
            )
