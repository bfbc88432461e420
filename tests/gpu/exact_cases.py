"""exact="bitwise" with parameters on GPUs. Part of cases.py, which starts it. Not run on a GPU yet: seen on CPUs alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import torch
from cases import HERE, RANK, RANKS, own_gpu, row
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es


def _bits(device: str) -> str:
    """Of a model's parameters after training in blocks, with other shares at every step."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.GELU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 10)]
    model = nn.Sequential(*layers)
    data = TensorDataset(torch.randn(80, 3, 8, 8), torch.randint(10, (80,)))
    model.to(device)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = (one.to(device) for one in batch)
        return nn.functional.cross_entropy(model(images), labels)

    def shares(number: int, batch: int) -> list[int]:
        first = min(batch, 3 * (number % 9)) if RANKS > 1 else batch
        return [first, batch - first, *[0] * RANKS][:RANKS]

    config = es.Config(exact="bitwise", block=3, threads=1, clip_norm=1.0, shares=shares)
    es.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, config=config).fit(
        DataLoader(data, batch_size=26, shuffle=True), epochs=4
    )
    values = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(values).hexdigest()


def bitwise_reference() -> None:
    row(bits=_bits(os.environ["DEVICE"]))


def bitwise_pair() -> None:
    """exact="bitwise" on two ranks, which may have one GPU, against one rank in a process of its own."""
    device = os.environ.get("DEVICE", "") or f"cuda:{own_gpu()}"
    bits = _bits(device)
    if RANK > 0:
        return
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {**{k: v for k, v in os.environ.items() if k not in own}, "DEVICE": device}
    words = [sys.executable, str(HERE / "cases.py"), "bitwise_reference"]
    done = subprocess.run(words, check=True, env=variables, timeout=60, capture_output=True, text=True)
    assert json.dumps({"bits": bits}) in done.stdout, (bits, done.stdout)
    row(bits=bits)
