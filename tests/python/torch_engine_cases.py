"""What the ranks of test_torch_engine.py do: es.prepare(engine="torch") over Gloo, and what is written down of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import EvenstepError, sums_under_way
from evenstep.engine import SharedEngine
from evenstep.group_end import wait_for
from evenstep.torch_engine import TorchEngine

RANK = int(os.environ["RANK"])
LAYERS = 6


class Parts(nn.Module):
    """Branches that do not depend on one another: backward goes through them in the order that forward says."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))
        self.order = list(range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.tanh(self.parts[index](x)) for index in self.order)


class Events:
    """Of one engine: gradients as they come, buckets as they are handed on, the end of backward."""

    def __init__(self, engine: TorchEngine) -> None:
        self.seen: list[tuple[str, int]] = []
        ready, hand_on, finish = engine.ready, engine._begin_sum, engine.finish

        def watched_ready(index: int, gradient: torch.Tensor) -> None:
            self.seen.append(("gradient", index))
            ready(index, gradient)

        def watched_hand_on(flat: torch.Tensor, narrow: bool) -> Any:
            number = next(n for n, bucket in enumerate(engine._buckets) if bucket.flat is flat)
            self.seen.append(("bucket", number))
            return hand_on(flat, narrow)

        def watched_finish() -> Any:
            self.seen.append(("end", 0))
            return finish()

        engine.ready, engine._begin_sum, engine.finish = watched_ready, watched_hand_on, watched_finish  # type: ignore[method-assign]

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen


def prepared(model: nn.Module, samples: int = 24, **options: Any) -> tuple[nn.Module, Any, Any, TorchEngine]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(samples, 8, dtype=next(model.parameters()).dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"engine": "torch", "policy": "equal", "bucket_cap_mb": 0.0002, **options}
    model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=4), **options)
    engine = es.session().steps.syncs[-1].engine
    assert type(engine) is (SharedEngine if options["engine"] == "shared" else TorchEngine), engine
    return model, optimizer, loader, engine


def order() -> None:
    """Gradients come in another order on each rank, and in each step."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts().double())
    events, told = Events(engine), []
    for number, (x,) in enumerate(loader):
        model.order = [(index * (5 if RANK else 1) + number) % LAYERS for index in range(LAYERS)]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        told.append(events.take())
    print(json.dumps(told))


class Some(nn.Module):
    """`never` has no gradient on any rank, `rare` on rank 1 alone, and there once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.rare, self.last = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.rare(x) if rare else x)


def unused() -> None:
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Some())
    events, told = Events(engine), []
    for number, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x, rare=RANK == 1 and number == 2).square().mean().backward()
        has = [name for name, p in model.named_parameters() if p.grad is not None]
        optimizer.step()
        buckets = [list(bucket.indices) for bucket in engine._buckets]
        told.append([has, [n for kind, n in events.take() if kind == "bucket"], buckets])
    print(json.dumps([told, [float(p.double().sum()) for p in model.parameters()]]))


def fails() -> None:
    """Backward of rank 1 fails when some of its buckets have been handed on; its script goes on. Rank 0's threads wait for
    none of them then: it ends, which rank 1 waits for."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts(), compression=sys.argv[2])
    x = next(iter(loader))[0]
    model(x).square().mean().backward()  # learns the order
    optimizer.step()
    optimizer.zero_grad()
    seen: list[int] = []

    def fail(_: torch.Tensor) -> None:
        seen.append(engine._next)
        raise ValueError("the script's own")

    handle = model.parts[0].weight.register_hook(fail) if RANK == 1 else None
    words = ""
    try:
        model(x).square().mean().backward()
    except (ValueError, EvenstepError) as error:
        words = str(error).splitlines()[0]
    open_works = [one for one in engine._handed if not works_end(one.sum)]
    try:
        again = ""
        model(x).square().mean().backward()
    except EvenstepError as error:
        again = str(error).splitlines()[0]
    del handle
    print(json.dumps([words, seen, len(engine._handed), len(open_works), again]))


def fails_one_of_two() -> None:
    """Rank 1 fails in its first model, and rank 0 has no gradients of the second: what is handed on is the same."""
    torch.manual_seed(0)
    engines, models = [], [Parts(), Parts()]
    for number, model in enumerate(models):
        models[number], _, loader, engine = prepared(model)
        engines.append(engine)
    x = next(iter(loader))[0]

    def fail(_: torch.Tensor) -> None:
        raise ValueError("the script's own")

    if RANK == 1:
        models[0].parts[0].weight.register_hook(fail)
    try:
        models[0](x).square().mean().backward()
    except (ValueError, EvenstepError):
        pass
    handed = [one.sum for engine in engines for one in engine._handed]
    print(json.dumps([*(len(engine._handed) for engine in engines), sum(not works_end(one) for one in handed)]))


def settles_one_of_two() -> None:
    """Rank 1 lacks what the end of its first model's round needs; rank 0 has begun with the second as well."""
    torch.manual_seed(0)
    engines, models = [], [Parts(), Parts()]
    for number, model in enumerate(models):
        models[number], _, loader, engine = prepared(model)
        engines.append(engine)
    x = next(iter(loader))[0]

    def settle() -> None:
        raise MemoryError("out of memory")

    if RANK == 1:
        engines[0].settle = settle  # type: ignore[method-assign]
    words = ""
    try:
        sum(model(x).square().mean() for model in models[: 2 - RANK]).backward()
    except (MemoryError, EvenstepError) as error:
        words = str(error).splitlines()[0]
    handed = [one.sum for engine in engines for one in engine._handed]
    print(json.dumps([words, [len(engine._handed) for engine in engines], sum(not works_end(one) for one in handed)]))


def short() -> None:
    """Rank 1 has no memory for one bucket, in backward or where its round ends: it hands that on when it gives the round up."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts())
    x = next(iter(loader))[0]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    begin_sum, begun = engine._begin_sum, []

    def begin(flat: torch.Tensor, narrow: bool) -> Any:
        begun.append(flat)
        if len(begun) == 3:
            raise RuntimeError("out of memory")
        return begin_sum(flat, narrow)

    if RANK == 1:
        engine._begin_sum = begin  # type: ignore[method-assign]
        if sys.argv[2] == "finish":  # the first bucket lacks its gradient until then
            model.order.remove(engine._buckets[0].indices[0])
    told = []
    try:
        for _ in range(2):  # in the second, who had all of the first hears of it
            model(x).square().mean().backward()
    except RuntimeError as error:
        told = [type(error).__name__, str(error).splitlines()[0]]
    print(json.dumps([*told, len(engine._handed), sum(not works_end(one.sum) for one in engine._handed)]))


def short_in_16_bits() -> None:
    """Rank 1 has no memory for a sum in 16 bits of a round that ends: for its room, once or for ever, or when it adds up. No rank
    makes the step."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts(), compression="bf16")
    x = next(iter(loader))[0]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    moment, made = sys.argv[2], []

    def refuse(original: Any, times: int) -> Any:
        def refused(*given: Any) -> Any:
            made.append(given)
            if len(made) <= times:
                raise RuntimeError("out of memory")
            return original(*given)

        return refused

    if RANK == 1:
        if moment == "add_up":
            sums_under_way.Room.add_up = refuse(sums_under_way.Room.add_up, 1)  # type: ignore[method-assign]
            engine._look = lambda: None  # type: ignore[method-assign]  # not before the round ends
        else:
            engine._make_room = refuse(engine._make_room, {"once": 1, "always": 99}[moment])  # type: ignore[method-assign]
            model.order.remove(engine._buckets[0].indices[0])  # all buckets wait for the first until the round ends
    before = [p.detach().clone() for p in model.parameters()]
    words = ""
    try:
        model(x).square().mean().backward()
        optimizer.step()
    except EvenstepError as error:
        words = str(error).splitlines()[0]
    same = all(torch.equal(p, was) for p, was in zip(model.parameters(), before))
    print(json.dumps([words, same, sum(not works_end(one.sum) for one in engine._handed)]))


def works_end(one: Any) -> bool:
    """Whether who waits for its calls comes to an end: for both of one in two halves."""
    group = (one._second if one._added else one._first) if isinstance(one, sums_under_way.NarrowSum) else one._group
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            wait_for(one._work, group)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended.wait(60)


def lost() -> None:
    """The group of gradients fails on both ranks in the middle of backward."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts())
    x = next(iter(loader))[0]
    model(x).square().mean().backward()
    optimizer.step()
    begin_sum, begun = engine._begin_sum, []

    class Failed:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer [10.0.0.7]:41")

    def begin(flat: torch.Tensor, narrow: bool) -> Any:
        begun.append(begin_sum(flat, narrow))
        if len(begun) == 2:
            for one in begun:  # who looks finds the first done, and the second failed
                one._work.wait()
            begun[1]._work = Failed()
        return begun[-1]

    engine._begin_sum = begin  # type: ignore[method-assign]
    words = []
    for _ in range(2):
        try:
            model(x).square().mean().backward()
        except EvenstepError as error:
            words.append(str(error))
    print(json.dumps([words, len(begun)]))


def bits() -> None:
    """In 16 bits: as the engine in C has them, with buckets of any size."""
    found = {}
    for compression in ("fp16", "bf16"):
        for engine, cap in (("shared", None), ("torch", None), ("torch", 0.0002)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 3))
            data = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = es.prepare(
                model,
                optimizer,
                DataLoader(data, batch_size=5),
                engine=engine,
                compression=compression,
                bucket_cap_mb=cap,
                shares=lambda number, batch: [
                    number % (batch + 1),
                    batch - number % (batch + 1),
                    *[0] * (es.world_size() - 2),
                ],
            )
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            found[f"{compression} {engine} {cap}"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for compression in ("fp16", "bf16"):
        first, *others = (one for name, one in found.items() if name.startswith(compression))
        assert all(torch.equal(first, one) for one in others), compression
    assert not torch.equal(found["fp16 torch None"], found["bf16 torch None"])


def static() -> None:
    """static_graph: the flags of used parameters are left out once every rank's gradients have counted; what changes then is
    refused on all."""
    torch.manual_seed(0)
    shares = [[4, 0], [4, 0], [2, 2], [1, 3], [0, 4], [2, 2]]
    model, optimizer, loader, engine = prepared(
        Some(), static_graph=True, policy=None, shares=lambda number, batch: shares[number], engine=sys.argv[2]
    )
    del engine
    words, asked = "", []
    sync = es.session().steps.syncs[0]
    for number, (x,) in enumerate(loader):
        optimizer.zero_grad()
        before = sync._watch.settled is None
        try:
            model(x, rare=RANK == 1 and number == 5).square().mean().backward()
            optimizer.step()
        except EvenstepError as error:
            words = str(error)
        asked.append(before)
    print(json.dumps([asked, words]))


def static_kept() -> None:
    """`rare` is used on rank 1 in every step, and what rank 0 has of it is a sum that was left there."""
    torch.manual_seed(0)
    model, optimizer, loader, _ = prepared(Some(), static_graph=True, engine=sys.argv[2])
    words = ""
    sync = es.session().steps.syncs[0]
    try:
        for number, (x,) in enumerate(loader):
            with es.no_sync(model) if number == 3 else contextlib.nullcontext():
                model(x, rare=RANK == 1).square().mean().backward()
            if number != 3:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    except EvenstepError as error:
        words = str(error)
    print(json.dumps([words, sync._watch.settled is not None]))


def static_sparse() -> None:
    """static_graph of a model whose only parameters' gradients are sparse: its engine has none."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(8) % 4), batch_size=4)
    model, optimizer, loader = es.prepare(model, optimizer, data, static_graph=True, engine="shared")
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def spans() -> None:
    """Each bucket has its span, none of two at once, and all of them lie before the round's end."""
    torch.manual_seed(0)
    model, optimizer, loader, engine = prepared(Parts(), compression=sys.argv[2])
    noted: list[tuple[int, ...]] = []
    reports = []

    class Telemetry:
        def span(self, kind: int, step: int, start_ns: int, duration_ns: int, moved: int) -> None:
            noted.append((kind, step, start_ns, start_ns + duration_ns, moved))

    engine._telemetry = Telemetry()  # type: ignore[assignment]
    finish = engine.finish

    def watched() -> Any:
        used, report = finish()
        reports.append([report.communication_ns, report.exposed_ns, report.own_ns, report.bytes, report.full_bytes])
        return used, report

    engine.finish = watched  # type: ignore[method-assign]
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print(json.dumps([noted, reports]))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
