"""What the ranks of test_device_prepare.py do: es.prepare over our NCCL engine, with CPU tensors and made-up streams in
CUDA's place. Trains beside one process."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from fake_streams import FakeStreams, stand_in
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import device_places, torch_engine
from evenstep.group import Bootstrap

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STREAMS: list[FakeStreams] = []


def pretend() -> None:
    """Each rank's parameters are on a GPU of its own, and the groups of gradients send theirs to the made-up NCCL."""
    module = importlib.import_module("evenstep.prepare")  # es.prepare, the function, hides it
    place = device_places.Place(
        f"cuda:{RANK}", "here", "cuda", device_places._collectives_of(torch.device("cuda", RANK))
    )
    module.place_of = lambda parameters: place
    torch_group = Bootstrap.torch_group

    def on_gpus(self: Bootstrap, backend: str, ranks: Any = None) -> Any:
        assert backend == "evenstep"
        group = torch_group(self, backend, ranks)
        STREAMS.append(stand_in(group))
        STREAMS[-1].careful = True
        return group

    Bootstrap.torch_group = on_gpus  # type: ignore[method-assign]


def shares(number: int, batch: int) -> list[int]:
    first = (3 * number) % (batch + 1)
    return [first, batch - first, *[0] * (RANKS - 2)]


def main() -> None:
    dtype = torch.float32 if sys.argv[1] == "float" else torch.float64
    pretend()
    torch.manual_seed(3)
    model, twin = (nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    dataset = TensorDataset(torch.randn(40, 6, dtype=dtype), torch.randn(40, 3, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(dataset, batch_size=8)
    _, _, even = es.prepare(model, optimizer, loader, shares=shares, bucket_cap_mb=0.0005)
    engine = es.session().steps.syncs[0].engine
    assert type(engine) is torch_engine.TorchEngine, engine
    early = []
    finish = engine.finish

    def watched() -> Any:
        early.append(len(engine._handed))
        return finish()

    engine.finish = watched
    for _ in range(4):
        for (x, y), (wx, wy) in zip(even, loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            plain.zero_grad()
            nn.functional.mse_loss(twin(wx), wy).backward()
            plain.step()
    assert len(engine._buckets) > 1 and min(early) == len(engine._buckets), "buckets did not leave during backward"
    pairs = list(zip(model.parameters(), twin.parameters()))
    off = (
        float(sum((a - b).double().norm() ** 2 for a, b in pairs) / sum(b.double().norm() ** 2 for _, b in pairs))
        ** 0.5
    )
    assert off <= (1e-5 if dtype is torch.float32 else 1e-12), off
    assert "side waits for current" in STREAMS[0].log and STREAMS[0].violation() == "", STREAMS[0].violation()
    es.barrier()


main()
