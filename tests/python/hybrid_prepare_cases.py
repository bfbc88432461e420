"""What the ranks of test_hybrid_prepare.py do: es.prepare where the ranks' devices are of several makers, for which CPUs
stand, each with a memory of its own in the makers' place. Trains beside one process and compares after every step."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator import FakeAccelerators
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import bucket_sizes, crossing, device_places, hybrid_engine, over_hosts
from evenstep.group import Bootstrap

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MAKERS = sys.argv[2].split(",")  # "cpu": the host's own; "a", "cuda": an accelerator's; "x": one without collectives
BUCKETS, PINNED = "buckets" in sys.argv, "pinned" in sys.argv


class Staged(hybrid_engine.HostStage):
    """Writes down what comes and goes, and on which thread."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self.memory = [(one.data_ptr(), one.data_ptr() + one.numel()) for one in memory]
        self.log: list[str] = []

    def land(self, copies: Any, mark: Any, works: Any) -> None:
        assert threading.current_thread().name == "evenstep-hybrid"
        for target, _ in copies:
            inside = any(begin <= target.data_ptr() < end for begin, end in self.memory)
            assert inside or not target.numel(), "not into the group's memory"
        super().land(copies, mark, works)
        self.log.append("down")

    def rise(self, copies: Any) -> None:
        super().rise(copies)
        self.log.append("up")


def stand_in() -> None:
    module = importlib.import_module("evenstep.prepare")  # es.prepare, the function, hides it
    maker = MAKERS[RANK]
    collectives = "evenstep" if maker in ("a", "cuda") else ""
    if maker == "xpu":
        collectives = "xccl"
        xccl_over_gloo()
    device, host = "cpu" if maker == "cpu" else f"{maker}:{RANK}", os.environ.get("EVENSTEP_HOST_ID", "here")
    wanted = device_places.wanted_over_hosts()
    place = device_places.Place(device, host, maker, collectives, over_hosts=wanted)
    module.place_of = lambda parameters: place
    hybrid_engine.stage_of = lambda device, memory: Staged(memory)
    if PINNED:
        pin()


def xccl_over_gloo() -> None:
    """Gloo in the place of torch's XCCL, which the build of torch may not have."""
    new_group = dist.new_group

    def made(*given: Any, backend: str, **named: Any) -> Any:
        return new_group(*given, backend="gloo" if backend == "xccl" else backend, **named)

    dist.new_group = made


def pin() -> None:
    """The stage of accelerators itself, over a made-up one whose streams are as late as they may be. What torch would put on
    the stream after it waits for that here."""
    where = torch.device("cuda", RANK)
    fake = FakeAccelerators(where)
    tell, finish = dist.broadcast, hybrid_engine.HybridEngine.finish

    def tell_later(*given: Any, **named: Any) -> Any:
        fake.current(where).finish()
        return tell(*given, **named)

    def finish_all(self: Any) -> Any:
        found = finish(self)
        fake.own.finish()
        copies = [line.split() for line in fake.log if line.startswith("a copy")]
        if self._host is not None:
            assert {words[2] for words in copies} == {"down", "up"}, fake.log
            # each way on a stream of its own, and of what goes up after all a rest on the caller's
            assert len({words[-1] for words in copies if words[2] == "down"}) == 1, fake.log
            assert not {words[-1] for words in copies if words[2] == "down"} & {
                words[-1] for words in copies if words[2] == "up"
            }
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
    reduction = options.get("reduction", "mean")

    def loss_of(of: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(of(x), y, reduction=reduction) / (24 if reduction == "sum" else 1)

    for step in range(5):
        for (x, y), (wx, wy) in zip(even, loader):
            optimizer.zero_grad(set_to_none=step != 2)
            loss = loss_of(model, x, y)
            if step == 3:  # accumulated over two passes, the first of them kept on the rank
                with es.no_sync(model):
                    loss.backward()
                loss = loss_of(model, x, y)
            if step == 4:  # the same, exchanged in each
                loss.backward()
                loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            plain.zero_grad(set_to_none=step != 2)
            for _ in range(2 if step >= 3 else 1):
                loss_of(twin, wx, wy).backward()
            plain.step()
    sync = es.session().steps.syncs[-1]
    assert type(sync.engine).__name__ == ENGINES[MAKERS[RANK]], type(sync.engine)
    log = getattr(getattr(sync.engine, "stage", None), "log", None)
    if log and kind != "branches":  # where a rank lacks gradients, more comes up than went down
        check_order(log, len(sync.engine._buckets))
    values = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    theirs = values.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(values, theirs), "the ranks' parameters differ"
    return distance(model, twin)


HOSTS = os.environ.get("HOSTS", ",".join(["here"] * RANKS)).split(",")
TEAM = any(MAKERS[i] == MAKERS[k] in ("a", "xpu") and HOSTS[i] == HOSTS[k] for i in range(RANKS) for k in range(i))
ENGINES = {
    "cpu": "BesideTeams" if TEAM else "SharedEngine",
    "a": "HybridEngine",
    "x": "HybridEngine",
    "xpu": "HybridEngine",
    "cuda": os.environ.get("ENGINE", "LegEngine"),
}


def check_order(log: list[str], buckets: int) -> None:
    """Of the last round: nothing comes up that is not down, and all does."""
    last = log[-2 * buckets :]
    assert last.count("down") == buckets and last[0] == "down" and last[-1] == "up", last
    assert all(last[:k].count("up") <= last[:k].count("down") for k in range(len(last))), last


def exact(**options: Any) -> None:
    stand_in()
    bounds = {"double": 1e-12, "float": 1e-5, "branches": 1e-12}
    found = {kind: trains(kind, **options) for kind in bounds}
    print(json.dumps(found), flush=True)
    assert all(found[kind] <= bound for kind, bound in bounds.items()), found


def sums() -> None:
    """The same of losses that are sums over samples."""
    exact(reduction="sum")


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


def ends(waiter: crossing.Waiter) -> bool:
    """Whether it comes to the end of what it has."""
    done = threading.Event()
    waiter._jobs.put(done)
    return done.wait(60)


def meet(words: str) -> None:
    """In the store, which no failure ends."""
    store = dist.PrefixStore("cases/", dist.distributed_c10d._get_default_store())
    store.set(f"{words}/{RANK}", "")
    store.wait([f"{words}/{rank}" for rank in range(RANKS)], timedelta(seconds=100))


def fails() -> None:
    """Backward of one rank fails when some of its buckets have been handed on, and its script goes on: all that the ranks have
    begun among them ends all the same, while each of them still lives."""
    stand_in()
    failing = int(sys.argv[3])
    if "gloo" in sys.argv:
        shared = Bootstrap.shared
        Bootstrap.shared = lambda self, room, kind, *given, **named: (
            None if kind == "leg" else shared(self, room, kind, *given, **named)
        )
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(5)])
    es.prepare(model, bucket_cap_mb=0.008)
    x = torch.ones(2, 40)
    model(x).sum().backward()  # learns the order
    model.zero_grad()
    engine: Any = es.session().steps.syncs[-1].engine
    seen: list[int] = []

    def fail(_: torch.Tensor) -> None:
        seen.append(getattr(engine, "_next", 1))
        raise ValueError("the script's own")

    handle = model[1].weight.register_hook(fail) if failing == RANK else None
    words = ""
    try:
        model(x).sum().backward()
    except (ValueError, es.EvenstepError) as error:
        words = str(error).splitlines()[0]
    del handle
    staged = isinstance(engine, hybrid_engine.StagedEngine)
    waiters = [engine._down, engine._up] if staged else []
    waiters += [leg._calls for leg in getattr(engine, "_legs", {}).values() if hasattr(leg, "_calls")]
    ended = [ends(waiter) for waiter in waiters]
    spread = len(engine._told) if staged and engine._team is not None else None
    whole = not staged or engine._next == len(engine._buckets)
    parts = len(engine._buckets) * len(engine._team.carriers) if spread is not None else None
    meet("ended")
    if all(ended):  # what does not come would not be waited for
        for work in engine._told if staged else ():
            work.wait()
    assert ("gloo" in sys.argv) == (len(waiters) > 2), waiters
    print(json.dumps([words, seen, whole, ended, [spread, parts]]), flush=True)
    meet("waited")


class Holding(Staged):
    """The last bucket goes down when the first is up again: else never."""

    buckets = 0

    def __init__(self, memory: list[torch.Tensor]) -> None:
        super().__init__(memory)
        self.first_is_up = threading.Event()

    def land(self, copies: Any, mark: Any, works: Any) -> None:
        number = self.log.count("down") % self.buckets
        if number == 0:
            self.first_is_up.clear()
        elif number == self.buckets - 1:
            assert self.first_is_up.wait(60), "nothing came up while buckets were on their way down"
        super().land(copies, mark, works)

    def rise(self, copies: Any) -> None:
        assert threading.current_thread().name == "evenstep-hybrid-up"
        super().rise(copies)
        self.first_is_up.set()


def early() -> None:
    """Sums come up while later ones are on their way."""
    stand_in()
    hybrid_engine.stage_of = lambda device, memory: Holding(memory)
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(5)])
    es.prepare(model, bucket_cap_mb=0.008)
    engine: Any = es.session().steps.syncs[-1].engine
    Holding.buckets = len(getattr(engine, "_buckets", ())) or 1
    assert not hasattr(engine, "stage") or Holding.buckets >= 4, Holding.buckets
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 40)).sum().backward()


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def bits() -> None:
    """Sums are formed in rank order in each team, then in rank order of those who meet: to the last bit."""
    stand_in()
    torch.manual_seed(5)
    counts = (1, 70, 500, 63, 64, 65, 1200, 2)
    values = [[torch.randn(count) for count in counts] for _ in range(RANKS)]
    model = nn.ParameterList([nn.Parameter(torch.zeros(count)) for count in counts])
    es.prepare(model, bucket_cap_mb=0.002)
    teams: dict[tuple[str, str], list[int]] = {}
    for rank, (maker, host) in enumerate(zip(MAKERS, HOSTS)):
        by_host = maker in ("a", "cuda") or "BY_HOSTS" in os.environ
        teams.setdefault((maker, host) if by_host else (maker, str(rank)), []).append(rank)
    for number in range(3):
        model.zero_grad()
        sum((p * (number + 1.0) * mine).sum() for p, mine in zip(model, values[RANK])).backward()
        for index, p in enumerate(model):
            scaled = [one[index] * (number + 1.0) * (1 / RANKS) for one in values]
            met = sorted(teams.values())
            want = sum_in_order([sum_in_order([scaled[rank] for rank in team]) for team in met])
            assert torch.equal(p.grad, want), (number, index, (p.grad - want).abs().max())
    print(json.dumps(type(es.session().steps.syncs[-1].engine).__name__), flush=True)


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
    model(torch.full((1, 2), float(RANK))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), sum(range(RANKS)) / RANKS)), model.weight.grad
    print(json.dumps(type(es.session().steps.syncs[-1].engine).__name__), flush=True)


def unconnected() -> None:
    """The first call over all hosts fails on one rank."""
    all_reduce = dist.all_reduce

    def first(tensor: torch.Tensor, **named: Any) -> Any:
        dist.all_reduce = all_reduce
        if RANK == 2:
            raise RuntimeError("no route to host\nand more")
        tensor.fill_(RANKS)

    dist.all_reduce = first
    same_device("")


def hanging() -> None:
    """The first call over all hosts does not end, on one rank; on the others it does."""
    all_reduce = dist.all_reduce
    over_hosts.first_call_seconds = lambda: 0.05 if RANK == 1 else 100.0

    def first(tensor: torch.Tensor, **named: Any) -> Any:
        dist.all_reduce = all_reduce
        if RANK == 1:
            threading.Event().wait()
        tensor.fill_(RANKS)

    dist.all_reduce = first
    same_device("")


def measured(legs: float) -> None:
    """Rounds are run and timed; what is compared are other times."""
    took = over_hosts.seconds_of_round

    def seconds(engine: Any, *given: Any) -> float:
        assert took(engine, *given) > 0
        return legs if type(engine).__name__ == "LegEngine" else 1.0

    over_hosts.seconds_of_round = seconds
    same_device("")


def quick_legs() -> None:
    measured(0.5)


def slow_legs() -> None:
    measured(2.0)


if sys.argv[1].startswith("engine"):
    same_device(sys.argv[1][6:])
else:
    globals()[sys.argv[1]]()
