"""What `make soak` trains: a small network in bitwise mode, so that whatever happened on the way, the end is the same to the bit
on any number of ranks. Each step takes memory of its own, so that a lack of it is met. It steps with torch's AdamW, or, where the
second word is es.optim, with the one of which the ranks of a host share the states."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es


def main() -> None:
    epochs, batch = int(sys.argv[1]), 32
    torch.manual_seed(1)
    inputs = torch.randn(512, 64)
    data = TensorDataset(inputs, torch.tanh(inputs @ torch.randn(64, 8)))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    optimizers = es.optim if sys.argv[2:] == ["es.optim"] else torch.optim
    optimizer = optimizers.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        bytes(1 << 26)  # not touched (a bytearray is): it costs two system calls
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    config = es.Config(exact="bitwise", block=4, threads=1, clip_norm=1.0)
    es.Trainer(model, optimizer, step, config=config).fit(
        DataLoader(data, batch_size=batch, shuffle=True), epochs=epochs
    )


if __name__ == "__main__":
    main()
