"""Ranks that exchange less often or later, on every rank of one job (test_modes.py), against plain loops in one process that
do what the mode says; checkpoints in the middle.

Prints one line a case: its name and what was measured, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections import deque
from typing import Any

import torch
from prepare_cases import mlp, share_schedule, vector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep.saved_bytes import SavedBytes

RANKS, RANK = es.world_size(), es.rank()
BATCH, STEPS = 10, 13


def data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randn(BATCH * batches, w, dtype=torch.float64, generator=generator) for w in (6, 3)))


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = mlp().double()
    make = torch.optim.Adam if kind == "adam" else torch.optim.SGD
    return model, make(model.parameters(), lr=0.02)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def parts(number: int, micro: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The micro-batches of optimizer step `number` for every rank."""
    x, y = data(STEPS * micro).tensors
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(RANKS)]
    for batch in range(number * micro, (number + 1) * micro):
        at = batch * BATCH
        for rank, share in enumerate(SHARES(batch, BATCH)):
            found[rank].append((x[at : at + share], y[at : at + share]))
            at += share
    return found


def SHARES(batch: int, samples: int) -> list[int]:
    # the same for the micro-batches of a step, as the balancer gives them
    return share_schedule(RANKS, 6)(batch // 2, samples)


def alone(mode: Any, kind: str, micro: int) -> torch.Tensor:
    """What LocalSGD and DiLoCo say, with a model a rank."""
    models, optimizers = zip(*(build(kind) for _ in range(RANKS)))
    seen, anchor, buffer = [0] * RANKS, vector(models[0]), None
    for number in range(STEPS):
        for rank, batches in enumerate(parts(number, micro)):
            optimizers[rank].zero_grad()
            for x, y in batches:
                if len(x):
                    (loss(models[rank], x, y) / micro).backward()
                seen[rank] += len(x)
            optimizers[rank].step()
        if (number + 1) % mode.every == 0 or number + 1 == STEPS:
            mean = sum(vector(m) * (s / sum(seen)) for m, s in zip(models, seen))
            if isinstance(mode, es.DiLoCo):
                moved = anchor - mean
                buffer = moved if buffer is None else mode.outer_momentum * buffer + moved
                mean = anchor - mode.outer_lr * (moved + mode.outer_momentum * buffer)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            seen, anchor = [0] * RANKS, mean
    return anchor


def late(mode: Any, kind: str, micro: int) -> torch.Tensor:
    """What Stale says: one process, whole batches, gradients of before."""
    model, optimizer = build(kind)
    waiting: deque[list[torch.Tensor]] = deque()
    for number in range(STEPS):
        batches = parts(number, micro)
        whole = [[torch.cat(t) for t in zip(*(batches[r][m] for r in range(RANKS)))] for m in range(micro)]
        total = sum(loss(model, x, y) for x, y in whole) / micro
        waiting.append(list(torch.autograd.grad(total, list(model.parameters()))))
        if len(waiting) > mode.steps:
            for p, g in zip(model.parameters(), waiting.popleft()):
                p.grad = g
            optimizer.step()
    return vector(model)


def prepared(kind: str, batches: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer = build(kind)
    loader = DataLoader(data(batches), batch_size=BATCH)
    return es.prepare(model, optimizer, loader, **{"shares": SHARES, **options})


class Told:
    """In the telemetry's place."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, kind: int, step: int, value: int, words: str) -> None:
        self.words.append(words)


def trained(mode: Any, kind: str, micro: int = 1, **options: Any) -> dict[str, Any]:
    model, optimizer, loader = prepared(kind, STEPS * micro, sync=mode, **options)
    told = Told()
    steps = es.session().steps
    steps.saved = SavedBytes(told)  # type: ignore[arg-type]
    steps.syncs[:-1] = []  # models of earlier cases that meet now and then would tell it
    for number, (x, y) in enumerate(loader):
        if (number + 1) % micro:
            with es.no_sync(model):
                (loss(model, x, y) / micro).backward()
            continue
        (loss(model, x, y) / micro).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind == "adam" or number % 4 < 2)
    apart = not alike(vector(model))
    es.synchronise_models()
    expected = late(mode, kind, micro) if isinstance(mode, es.Stale) else alone(mode, kind, micro)
    ours = vector(model)
    return {
        "difference": float((ours - expected).norm() / expected.norm()),
        "moved": float((ours - vector(build(kind)[0])).norm()),
        "alike": alike(ours),
        "apart_before": apart,
        "told": told.words,
    }


def alike(values: torch.Tensor) -> bool:
    return all(torch.equal(row, values) for row in es.gather(values[None], batch=False))


def going_back(mode: Any, kind: str, at: int, **options: Any) -> dict[str, Any]:
    """Goes on after a checkpoint, goes back to it, and makes the same steps again."""
    model, optimizer, loader = prepared(kind, 30, sync=mode, shares=lambda n, b: [b - 3, 3], **options)
    first, path, ends, whole = es.step(), None, [], False
    for _ in range(2):
        for x, y in loader:
            loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if es.step() == first + at and path is None:
                path = es.checkpoint(f"mode_{type(mode).__name__}_{kind}")
                whole = alike(vector(model))
            if es.step() == first + at + 7:
                break
        ends.append(vector(model))
        if len(ends) == 1:
            es.load_checkpoint(path)
    return {"same": torch.equal(*ends), "alike_at_checkpoint": whole}


def checkpoints_due_wait() -> list[int]:
    """--checkpoint-every 4 where the ranks meet every third step: at 6, 9 and 12."""
    session = es.session()
    before = session.environment
    session.step = 0
    session.environment = dataclasses.replace(before, checkpoint_steps=4)
    trained(es.LocalSGD(every=3), "sgd")
    session.environment = before
    folder = pathlib.Path(os.environ["EVENSTEP_CHECKPOINT_DIR"])
    while not (folder / "step-00000012").exists():  # the last one is written in the background
        time.sleep(0.01)
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def second_backward_in_a_step() -> str:
    model, _, loader = prepared("sgd", 3, sync=es.Stale())
    try:
        for x, y in loader:
            loss(model, x, y).backward()
    except es.EvenstepError as error:
        return str(error)
    return ""


def main() -> None:
    tell("due", {"steps": checkpoints_due_wait()})
    cases = [
        (es.LocalSGD(every=3), "sgd", 1, {}),
        (es.LocalSGD(every=5), "adam", 2, {}),
        (es.LocalSGD(every=4), "adam", 1, {"engine": "torch"}),
        (es.DiLoCo(every=4), "adam", 1, {}),
        (es.DiLoCo(every=3, outer_lr=1, outer_momentum=0), "sgd", 1, {"engine": "torch"}),
        (es.Stale(), "adam", 1, {}),
        (es.Stale(steps=3), "sgd", 2, {}),
        (es.Stale(steps=2), "sgd", 1, {"engine": "torch"}),
    ]
    for mode, kind, micro, options in cases:
        tell(f"{mode} {kind} {micro}", trained(mode, kind, micro, **options))
    tell("back DiLoCo", going_back(es.DiLoCo(every=5), "adam", 7))
    tell("back LocalSGD", going_back(es.LocalSGD(every=5), "adam", 8))
    tell("back Stale", going_back(es.Stale(steps=2), "adam", 6))
    tell("twice", {"words": second_backward_in_a_step()})


def tell(name: str, facts: dict[str, Any]) -> None:
    if es.is_main():
        sys.stdout.write(json.dumps([name, facts]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
