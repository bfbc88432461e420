"""State on its way into a checkpoint."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import torch

from evenstep.checkpoint_files import total_bytes

Tensors = dict[str, torch.Tensor]

# Names that no model's, optimizer's or scheduler's file has.
RANDOM_FILE = "random.safetensors"
OTHER_FILE = "state.safetensors"


class Snapshot:
    """State on its way to the disk: files of tensors, their metadata, and the JSON for the manifest."""

    def __init__(self) -> None:
        self.files: dict[str, Tensors] = {}
        self.metadata: dict[str, list[tuple[str, str]]] = {}
        self.tables: dict[str, bytes] = {}  # files that are no tensors: which shard has which
        self.state: dict[str, Any] = {}

    @cached_property
    def size(self) -> int:
        """Bytes of all tensors, once they are there."""
        return sum(total_bytes(tensors) for tensors in self.files.values())

    @cached_property
    def text(self) -> str:
        """The state in JSON, once it is whole."""
        return json.dumps(self.state, ensure_ascii=False, allow_nan=False)

    def detach(self) -> None:
        """Copies every tensor to host memory, so that training may go on while they are written."""
        for tensors in self.files.values():
            for name, tensor in tensors.items():
                tensors[name] = tensor.detach().to("cpu", copy=True)
