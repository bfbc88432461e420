"""Compressed exchanges of gradients, on every rank of one job (test_compression.py): each step's p.grad against a plain
reference made of all ranks' own gradients, trainings against the uncompressed one, a checkpoint that is gone back to.

Prints one line a case: NAME and what was measured, as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from prepare_cases import Branches, mlp, share_schedule, vector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

RANKS, RANK = es.world_size(), es.rank()
BATCH = 12


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.tanh(x[:, :3] * 2) + 0.1 * x[:, 3:])


def prepared(build: Any, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(BATCH * steps), batch_size=BATCH)
    return es.prepare(model, optimizer, loader, **{"shares": share_schedule(RANKS, 3), **options})


def flat_of(gradients: list[Any], parameters: list[nn.Parameter]) -> torch.Tensor:
    """As the engines that gather lay them out: the last parameter first; zeros where there is none."""
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters)]
    return torch.cat([part.reshape(-1) for part in reversed(parts)])


class Reference:
    """The sum of what the ranks send, by the simplest means."""

    def __init__(self, name: str) -> None:
        self.name, _, number = name.partition(":")
        self.number = float(number or 0)
        self.left = [torch.zeros(()) for _ in range(RANKS)]

    def total(self, flats: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        """`places`: where what is encoded together lies, in the bucket's order; the rest has no gradient."""
        if self.name in ("fp16", "bf16"):
            short = torch.float16 if self.name == "fp16" else torch.bfloat16
            total = flats[0].to(short).float()
            for flat in flats[1:]:
                total = total + flat.to(short).float()
            return total.to(short).float()
        if self.name == "adasum":
            raise AssertionError("by parameter: see adasum_of")
        total = torch.zeros_like(flats[0])
        for rank, flat in enumerate(flats):
            values, sent = flat + self.left[rank], torch.zeros_like(flat)
            sent[places] = self.top(values[places]) if self.name == "topk" else self.signs(values[places])
            self.left[rank] = values - sent
            total = total + sent
        return total

    def top(self, values: torch.Tensor) -> torch.Tensor:
        count = math.ceil(self.number * values.numel())
        order = sorted(range(values.numel()), key=lambda i: -abs(float(values[i])))
        sent = torch.zeros_like(values)
        for place in order[:count]:
            sent[place] = values[place]
        return sent

    @staticmethod
    def signs(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.where(b >= 0, 1.0, -1.0) * b.abs().mean() for b in values.split(1024)])


def adasum_of(rows: list[torch.Tensor]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0]
    merged = []
    for a, b in zip(rows[::2], rows[1::2]):
        dot = float((a * b).sum())
        aa, bb = float((a * a).sum()), float((b * b).sum())
        merged.append((1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b)
    return adasum_of(merged)


def steps_against_reference(name: str, engine: str | None, build: Any = mlp, steps: int = 5) -> dict[str, Any]:
    adasum = name == "adasum"
    options: dict[str, Any] = {"reduction": "adasum"} if adasum else {"compression": name}
    model, optimizer, loader = prepared(build, steps, engine=engine, bucket_cap_mb=1, **options)
    parameters = list(model.parameters())
    reference, worst, alike, absent = Reference(name), 0.0, True, 0
    for x, y in loader:
        weight = es.session().steps.weight.now()
        mine = torch.autograd.grad((model(x) - y).square().mean(), parameters, allow_unused=True)
        mine = [g if weight > 0 else None for g in mine]
        flats = [row * w for row, w in zip(gathered(flat_of(mine, parameters)), gathered(torch.tensor([weight])))]
        (model(x) - y).square().mean().backward()
        got = flat_of([p.grad for p in parameters], parameters)
        if adasum:
            sizes = [p.numel() for p in reversed(parameters)]
            parts = zip(*(flat.mul(RANKS).double().split(sizes) for flat in flats))
            wanted = torch.cat([adasum_of(list(rows)) for rows in parts]).float()
        elif name == "int8":
            wanted = sum(flats[1:], flats[0])
            steps_of = [b.abs().amax() / 127 * torch.ones_like(b) for flat in flats for b in flat.split(256)]
            bound = sum(torch.cat(steps_of).view(RANKS, -1))
            worst = max(worst, float(((got - wanted).abs() / bound.clamp(min=1e-30)).max()))
            alike = alike and not torch.equal(got, wanted)  # it is rounded
        else:
            wanted = reference.total(flats, places_of(model, parameters))
        if name != "int8":
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
        alike = alike and all(torch.equal(row, got) for row in gathered(got))
        absent += sum(p.grad is None for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
    return {"worst": worst, "alike": alike, "absent": absent}


def places_of(model: nn.Module, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Where the gradients lie that the engine has in one bucket, in its order; what nobody has is in one of its own."""
    engine = next(s for s in es.session().steps.syncs if s.model is model).engine
    order = list(reversed(range(len(parameters))))
    numbers = flat_of([torch.full_like(p, float(i)) for i, p in enumerate(parameters)], parameters)
    chosen = getattr(engine, "order", None)
    return torch.cat([(numbers == index).nonzero()[:, 0] for index in (chosen[0] if chosen else order)])


def gathered(row: torch.Tensor) -> list[torch.Tensor]:
    return list(es.gather(row[None], batch=False))


def several_buckets() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 3))


class Narrow(nn.Module):
    """bf16 in the middle, and a parameter that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 64)
        self.middle = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.last = nn.Linear(64, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        return self.last(self.middle(h.bfloat16()).float() if self.calls % 3 else h)


def engine_in_c_as_torch(name: str, build: Any = several_buckets, steps: int = 8) -> dict[str, Any]:
    """Both, in turns, on models that begin alike: the same bits in p.grad, and a leftover that grows."""
    runs = []
    for engine in (None, "torch"):
        model, optimizer, loader = prepared(build, steps, engine=engine, compression=name, bucket_cap_mb=0.01)
        runs.append((model, optimizer, iter(loader)))
    same = alike = True
    for _ in range(steps):
        flats = []
        for model, _, batches in runs:
            x, y = next(batches)
            (model(x) - y).square().mean().backward()
            flats.append(torch.cat([p.grad.float().reshape(-1) for p in model.parameters() if p.grad is not None]))
        for _, optimizer, _ in runs:  # after both: the number of the step is in int8's seed
            optimizer.step()
            optimizer.zero_grad()
        same = same and torch.equal(*flats)
        alike = alike and all(torch.equal(row, flats[0]) for row in gathered(flats[0]))
    syncs = [next(s for s in es.session().steps.syncs if s.model is model) for model, _, _ in runs]
    states = [sync.engine.feedback_state() for sync in syncs]
    kept = states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    kinds = [type(sync.engine).__name__ for sync in syncs]
    return {"same": same, "alike": alike, "kept": kept, "left": sorted(states[0]), "kinds": kinds}


def training(name: str | None, engine: str | None = None, no_sync: bool = False, **more: Any) -> dict[str, Any]:
    reduction = {"reduction": "adasum"} if name == "adasum" else {"compression": name}
    model, optimizer, loader = prepared(mlp, 160, engine=engine, **reduction, **more)
    for number, (x, y) in enumerate(loader):
        if no_sync and number % 2 == 0:
            with es.no_sync(model):
                ((model(x) - y).square().mean() / 2).backward()
            continue
        ((model(x) - y).square().mean() / (2 if no_sync else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = data(400).tensors
    with torch.no_grad():
        loss = float((model(x) - y).square().mean())
    values = vector(model)
    return {"loss": loss, "alike": all(torch.equal(row, values) for row in gathered(values)), "values": values}


class Backwards(nn.Module):
    """Layers stand in another order than they are used in, and one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.never, self.first = nn.Linear(64, 3), nn.Linear(64, 64), nn.Linear(6, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def most_on_rank_0(number: int, batch: int) -> list[int]:
    return [batch - RANKS + 1, *[1] * (RANKS - 1)]


def going_on(path: str | None) -> dict[str, Any]:
    """Writes a checkpoint in the middle; or, from one, makes the second half in another process."""
    # In the model's order `first.bias` has a bucket of its own, in that of the gradients it shares one with `last`.
    options = {"compression": "onebit", "shares": most_on_rank_0, "bucket_cap_mb": 0.0015}
    model, optimizer, loader = prepared(Backwards, 30, **options)
    if path is not None:
        es.load_checkpoint(path)
    for x, y in loader:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == 9 and path is None:
            path = str(es.checkpoint("going_on"))
        if es.step() == 15:
            break
    sync = es.session().steps.syncs[0]
    return {"path": path, "end": vector(model).tolist(), "order": sync.engine.order, "step": es.step()}


def going_back(name: str, engine: str | None = None, build: Any = mlp, at: int = 15) -> dict[str, Any]:
    """Goes on for some steps after a checkpoint, goes back to it, and makes them again."""
    cap = 0.0015 if build is Backwards else 0.0008  # as in going_on
    options = {"engine": engine, "compression": name, "shares": most_on_rank_0, "bucket_cap_mb": cap}
    model, optimizer, loader = prepared(build, 40, **options)
    first, path, ends = es.step(), None, []

    def some(until: int) -> None:
        nonlocal path
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if es.step() == first + at and path is None:
                path = es.checkpoint(f"going_back_{name.replace(':', '_')}_{engine}_{at}")
            if es.step() == until:
                break
        ends.append(vector(model))

    some(first + 21)
    facts = es.load_checkpoint(path)
    assert facts["step"] == first + at == es.step()
    some(first + 21)
    sync = next(s for s in es.session().steps.syncs if s.model is model)
    order = getattr(sync.engine, "order", None)
    return {"same": torch.equal(*ends), "moved": float(ends[0].norm()), "order": order}


def by_parts() -> None:
    for name in ("topk:0.1", "onebit", "int8"):
        tell(f"equal {name}", engine_in_c_as_torch(name))
        tell(f"equal {name} narrow", engine_in_c_as_torch(name, Narrow))
    tell("train none None", training(None))
    for name in ("onebit", "int8"):
        tell(f"train {name} None", training(name))
    tell("back topk:0.1", going_back("topk:0.1"))
    tell("back onebit order", going_back("onebit", build=Backwards))
    tell("back onebit order learned", going_back("onebit", build=Backwards, at=1))  # and not yet in force


def main() -> None:
    if sys.argv[1:] == ["parts"]:
        by_parts()
        return
    if sys.argv[1:2] == ["on"]:
        tell("on", going_on(sys.argv[2] if len(sys.argv) > 2 else None))
        return
    for name in ("topk:0.1", "onebit", "int8"):
        tell(f"equal {name}", engine_in_c_as_torch(name))
    for engine in (None, "torch"):
        for name in ("fp16", "bf16", "topk:0.1", "onebit", "int8", "adasum"):
            tell(f"step {name} {engine}", steps_against_reference(name, engine))
    tell("step topk:0.1 unused", steps_against_reference("topk:0.1", None, Branches))
    tell("step bf16 unused", steps_against_reference("bf16", None, Branches))
    plain = training(None)
    tell("train none None", plain)
    for name in ("fp16", "bf16", "int8", "onebit", "topk:0.1", "powersgd:2", "adasum"):
        tell(f"train {name} None", training(name))
    tell("train bf16 torch", training("bf16", "torch"))
    tell("train powersgd:2 torch", training("powersgd:2", "torch"))
    tell("train none accumulated", training(None, no_sync=True))
    tell("train topk:0.1 accumulated", training("topk:0.1", no_sync=True))
    for name in ("topk:0.1", "int8", "powersgd:2"):
        tell(f"back {name}", going_back(name))


def tell(name: str, facts: dict[str, Any]) -> None:
    facts.pop("values", None)
    if es.is_main():
        sys.stdout.write(json.dumps([name, facts]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
