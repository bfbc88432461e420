"""What the ranks of test_hybrid_prepare.py do: es.prepare where the ranks' devices are of several makers, for which CPUs
stand, each with a memory of its own in the makers' place. Trains beside one process and compares after every step."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator import FakeAccelerators
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import bucket_sizes, device_places, hybrid_engine

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MAKERS = sys.argv[2].split(",")  # "cpu": the host's own; "a": an accelerator's; "x": one without collectives
BUCKETS, PINNED = "buckets" in sys.argv, "pinned" in sys.argv


class Staged(hybrid_engine.HostStage):
    """Writes down what comes and goes, and on which thread."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.log: list[str] = []

    def land(self, copies: Any, mark: Any, work: Any) -> None:
        assert threading.current_thread().name == "evenstep-hybrid"
        begin, end = self.memory.data_ptr(), self.memory.data_ptr() + self.memory.numel()
        assert all(begin <= target.data_ptr() < end for target, _ in copies), "not into the group's memory"
        super().land(copies, mark, work)
        self.log.append("down")

    def rise(self, copies: Any) -> None:
        super().rise(copies)
        self.log.append("up")


def stand_in() -> None:
    module = importlib.import_module("evenstep.prepare")  # es.prepare, the function, hides it
    maker = MAKERS[RANK]
    collectives = "evenstep" if maker == "a" else ""
    place = device_places.Place("cpu" if maker == "cpu" else f"{maker}:{RANK}", "here", maker, collectives)
    module.place_of = lambda parameters: place
    hybrid_engine.stage_of = lambda device, memory: Staged(memory)
    if PINNED:
        pin()


def pin() -> None:
    """The stage of accelerators itself, over a made-up one whose streams are as late as they may be. What torch would put on
    the stream after it waits for that here."""
    where = torch.device("cuda", RANK)
    fake = FakeAccelerators(where)
    tell, finish = dist.broadcast, hybrid_engine.HybridEngine.finish

    def tell_later(*given: Any, **named: Any) -> Any:
        fake.own.finish()
        return tell(*given, **named)

    def finish_all(self: Any) -> Any:
        found = finish(self)
        fake.own.finish()
        copies = [line.split()[2] for line in fake.log if line.startswith("a copy")]
        assert copies == sorted(copies), fake.log  # all down, then all up
        assert not hasattr(self, "stage") or "up" in copies, fake.log
        fake.log.clear()
        return found

    dist.broadcast, hybrid_engine.HybridEngine.finish = tell_later, finish_all
    hybrid_engine.stage_of = lambda device, memory: hybrid_engine.DeviceStage(where, memory, fake)


class Branches(nn.Module):
    """Which branch is used depends on the samples; `never` is not used at all; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right, self.never = (nn.Linear(6, 40) for _ in range(4))
        self.head = nn.Linear(40, 3)
        self.frozen = nn.Parameter(torch.ones(40), requires_grad=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :1] > 0.6
        h = torch.tanh(self.trunk(x))
        for mask, branch in ((chosen, self.left), (~chosen, self.right)):
            if mask.any():
                h = h + torch.where(mask, branch(x), torch.zeros_like(h))
        return self.head(h * self.frozen)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "branches":
        return Branches()
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 3))
    return (model if kind == "float" else model.double()).to(memory_format=torch.channels_last)


def data_of(kind: str) -> TensorDataset:
    torch.manual_seed(4)
    dtype = torch.float32 if kind == "float" else torch.float64
    shape = (6,) if kind == "branches" else (2, 4, 4)
    return TensorDataset(torch.randn(48, *shape, dtype=dtype), torch.randn(48, 3, dtype=dtype))


def shares(number: int, batch: int) -> list[int]:
    cuts = sorted(random.Random(number).randint(0, batch) for _ in range(RANKS - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, batch])]


def distance(model: nn.Module, twin: nn.Module) -> float:
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(model.parameters(), twin.parameters())]
    return float(sum((a - b).norm() ** 2 for a, b in pairs) ** 0.5 / sum(b.norm() ** 2 for _, b in pairs) ** 0.5)


def trains(kind: str, **options: Any) -> float:
    """Relative distance from one process after all steps."""
    model, twin = model_of(kind), model_of(kind)
    dataset = data_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(dataset, batch_size=8)
    cap = 0.002 if BUCKETS else None
    _, _, even = es.prepare(model, optimizer, loader, shares=shares, bucket_cap_mb=cap, **options)
    for step in range(5):
        for (x, y), (wx, wy) in zip(even, loader):
            optimizer.zero_grad(set_to_none=step != 2)
            loss = nn.functional.mse_loss(model(x), y)
            if step == 3:  # accumulated over two passes, the first of them kept on the rank
                with es.no_sync(model):
                    loss.backward()
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            plain.zero_grad(set_to_none=step != 2)
            for _ in range(2 if step == 3 else 1):
                nn.functional.mse_loss(twin(wx), wy).backward()
            plain.step()
    sync = es.session().steps.syncs[-1]
    assert type(sync.engine).__name__ == ENGINES[MAKERS[RANK]], type(sync.engine)
    log = getattr(getattr(sync.engine, "stage", None), "log", None)
    if log is not None:
        check_order(log, len(sync.engine._buckets))
    values = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    theirs = values.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(values, theirs), "the ranks' parameters differ"
    return distance(model, twin)


TEAM = MAKERS.count("a") > 1
ENGINES = {"cpu": "BesideTeams" if TEAM else "SharedEngine", "a": "HybridEngine", "x": "HybridEngine"}


def check_order(log: list[str], buckets: int) -> None:
    """Of the last round."""
    assert log[-2 * buckets :] == ["down"] * buckets + ["up"] * buckets, log[-2 * buckets :]


def exact() -> None:
    stand_in()
    bounds = {"double": 1e-12, "float": 1e-5, "branches": 1e-12}
    found = {kind: trains(kind) for kind in bounds}
    print(json.dumps(found), flush=True)
    assert all(found[kind] <= bound for kind, bound in bounds.items()), found


def many_rounds() -> None:
    """Of a model that is large enough for the sizes of buckets to be looked at, were all ranks' engines of one kind."""
    stand_in()
    model = nn.Linear(512, 600)
    es.prepare(model)
    for number in range(2 * (bucket_sizes.WARM + bucket_sizes.ROUNDS) + 2):
        model.zero_grad()
        model(torch.full((2, 512), 1.0 + number)).sum().backward()
    assert es.session().steps.syncs[-1].rounds > 2 * bucket_sizes.ROUNDS
    assert sum(p.numel() * p.element_size() for p in model.parameters()) >= bucket_sizes.LEAST


def rounded() -> None:
    """What travels between the makers has 16 bits."""
    stand_in()
    found = trains("float", compression="bf16")
    assert 1e-6 < found < 0.05, found


def local() -> None:
    """DiLoCo of one step, whose outer step is plain, is the mean of the ranks' own steps."""
    stand_in()
    model, twin = model_of("double"), model_of("double")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    es.prepare(model, optimizer, sync=es.LocalSGD(every=2))
    torch.manual_seed(4)
    x = torch.randn(RANKS, 2, 2, 2, 4, 4, dtype=torch.float64)
    moved = []
    for rank in range(RANKS):
        copy = model_of("double")
        step = torch.optim.SGD(copy.parameters(), lr=0.1)
        for pass_ in range(2):
            step.zero_grad()
            copy(x[rank, pass_]).square().mean().backward()
            step.step()
        moved.append(list(copy.parameters()))
    for pass_ in range(2):
        optimizer.zero_grad()
        model(x[RANK, pass_]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for p, *theirs in zip(twin.parameters(), *moved):
            p.copy_(torch.stack(theirs).mean(0))
    assert distance(model, twin) < 1e-12, distance(model, twin)


def lost() -> None:
    """A rank that dies between two buckets ends the others' wait with an error that names it."""
    stand_in()
    model = model_of("double")
    es.prepare(model)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    es.barrier()
    if RANK == RANKS - 1:
        os._exit(0)
    try:
        model(x).square().sum().backward()
    except es.EvenstepError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(0)
    raise AssertionError("no error")


class Dear(Staged):
    """Sums go back up by hundreds of copies."""

    def rise(self, copies: Any) -> None:
        for _ in range(300):
            super().rise(copies)


def own() -> None:
    """Prints what the ranks told one another of their own parts of the exchange, step by step."""
    stand_in()
    hybrid_engine.stage_of = lambda device, memory: Dear(memory)
    model = model_of("double")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _, _, even = es.prepare(model, optimizer, DataLoader(data_of("double"), batch_size=8), bucket_cap_mb=0.002)
    steps = es.session().steps
    engine: Any = steps.syncs[-1].engine
    exchange, heard = steps._exchange, []

    def at_vote(*given: Any) -> Any:
        if isinstance(engine, hybrid_engine.HybridEngine):
            assert engine.stage.log.count("down") == len(engine._buckets), "it votes before its gradients are down"
            engine.stage.log.clear()
        ballots = exchange(*given)
        heard.append([ballot.exchange_seconds for ballot in ballots])
        return ballots

    steps._exchange = at_vote  # type: ignore[method-assign]
    for x, y in even:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print(json.dumps(heard), flush=True)


def same_device(case: str) -> None:
    """Devices of one maker, and engines that were asked for, are as they were."""
    stand_in()
    model = nn.Linear(2, 2)
    es.prepare(model, engine=case or None)
    print(json.dumps(type(es.session().steps.syncs[-1].engine).__name__), flush=True)


if sys.argv[1].startswith("engine"):
    same_device(sys.argv[1][6:])
else:
    globals()[sys.argv[1]]()
