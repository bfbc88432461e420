"""What bench/compression_bench.py and bench/modes_bench.py train: wide layers, whose gradients are many bytes for little
computing, and a small net, whose loss says what a choice costs in learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

LAYERS = 8


def width_of(million: float) -> int:
    """Of wide layers that have so many million parameters together."""
    return round((million * 1e6 / LAYERS) ** 0.5)


def prepare_wide(width: int, samples: int, batch: int, **options: Any) -> tuple[nn.Module, Any, Any]:
    """A model of wide layers with its optimizer and loader; `options` of es.prepare."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(samples, width))
    return es.prepare(model, optimizer, DataLoader(data, batch_size=batch), **options)


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def describe(width: int) -> str:
    return f"{LAYERS * width * width / 1e6:.1f} million fp32 parameters, {es.world_size()} ranks"


def loss_after(steps: int, **options: Any) -> float:
    """Of a small net that learns what another one computes; on all of its data."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    student = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    x = torch.randn(2048, 32)
    data = TensorDataset(x, teacher(x).detach())
    loader = DataLoader(data, batch_size=64, shuffle=True)
    student, optimizer, loader = es.prepare(student, optimizer, loader, engine="shared", **options)
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(student(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    if "sync" in options:
        es.synchronise_models()
    with torch.no_grad():
        return float(nn.functional.mse_loss(student(data.tensors[0]), data.tensors[1]))
