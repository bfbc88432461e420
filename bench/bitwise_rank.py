"""One rank of what `bench/bitwise.py` compares: the same model and batch in four ways, a few steps at a time.

    alone      torch alone on this rank's share in one piece; nothing is exchanged
    blocks     the same in blocks, one after the other (BatchNorm by each block's own statistics): what no bitwise mode can do
               without
    lockstep   exact="bitwise" of a job of this rank alone: blocks, their sums, and BatchNorm's meetings; nothing is exchanged
    plain      es.Trainer, all ranks
    bitwise    the same with exact="bitwise"

It waits at a gate (train_gate.py) for each order and answers with the seconds and the CPU seconds of each step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from train_gate import Gate

WORDS, LENGTH, WIDTH, BATCH = 512, 64, 192, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(tokens) + self.places.weight, mask=self.mask, is_causal=True))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if inner != outer and inner > 3 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def task(name: str) -> tuple[nn.Module, TensorDataset, Any]:
    torch.manual_seed(3)
    if name == "gpt":
        tokens = torch.randint(WORDS, (512, LENGTH + 1))
        return GPT(), TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), predict
    return cnn(), TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,))), classify


def predict(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Times:
    """The steps of one order after the other. An order's first `warm` steps are not told."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._orders = gate.orders()
        self._left = 0
        self._told: list[list[float]] = []
        self.over = False

    def wait(self) -> None:
        """For the next order."""
        order = next(self._orders, None)
        if order is None:
            self.over = True
            return
        self._warm, self._left = order["warm"], order["warm"] + order["steps"]
        self._told.clear()
        self._now = time.perf_counter(), time.process_time()

    def step_done(self) -> None:
        before, self._now = self._now, (time.perf_counter(), time.process_time())
        if self._warm > 0:
            self._warm -= 1
        else:
            self._told.append([now - then for now, then in zip(self._now, before)])
        self._left -= 1
        if self._left == 0:
            self._gate.answer(self._told)
            self.wait()


class Enough(Exception):
    """The bench has no more orders."""


def by_trainer(name: str, exact: str | None, block: int, batch: int, times: Times) -> None:
    import evenstep as es

    model, data, loss = task(name)

    def on_step(_: es.Trainer) -> None:
        times.step_done()
        if times.over:
            raise Enough

    config = es.Config(exact=exact, block=block if exact and block else None, threads=1, policy="equal")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = es.Trainer(model, optimizer, loss, on_step=on_step, config=config)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    times.wait()
    if not times.over:
        try:
            trainer.fit(loader, epochs=1_000_000)
        except Enough:
            pass


def by_torch(name: str, block: int, share: int, times: Times) -> None:
    torch.set_num_threads(1)
    model, data, loss = task(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batches() -> Iterator[Any]:
        while True:
            yield from DataLoader(data, batch_size=share, shuffle=True)

    times.wait()
    for batch in batches():
        if times.over:
            return
        for parts in zip(*(one.split(block) for one in batch)):
            weight = len(parts[0]) / share
            (loss(model, parts) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.step_done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "cnn"], required=True)
    parser.add_argument("--kind", choices=["alone", "blocks", "lockstep", "plain", "bitwise"], required=True)
    parser.add_argument("--block", type=int, default=0, help="samples; 0: es.Trainer's own choice")
    parser.add_argument("--gate", required=True)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    share = BATCH // ranks
    times = Times(Gate(options.gate))
    if options.kind in ("alone", "blocks"):
        by_torch(options.model, share if options.kind == "alone" else options.block, share, times)
        return
    if options.kind == "lockstep":
        for variable in ("RANK", "WORLD_SIZE"):
            del os.environ[variable]
    exact = None if options.kind == "plain" else "bitwise"
    by_trainer(options.model, exact, options.block, share if options.kind == "lockstep" else BATCH, times)


if __name__ == "__main__":
    main()
