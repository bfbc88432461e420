"""What the ranks of test_process_sets.py do: `alone` is a whole job, the other cases train in process sets. Prints JSON."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 12


def data_of(seed: int, count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.tanh(x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3)).double()


def plain_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).double()


def schedule(ranks: int, seed: int) -> Any:
    def shares(number: int, batch: int) -> list[int]:
        drawn = random.Random(seed * 1000 + number)  # no single samples, of which a BatchNorm has no variance
        cuts = sorted(2 * drawn.randint(0, batch // 2) for _ in range(ranks - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, batch])]

    return shares


def bits(model: nn.Module) -> str:
    return b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values()).hex()


def train(
    seed: int, ranks: int, model: nn.Module, engine: str | None = None, compression: str | None = None
) -> dict[str, Any]:
    """The same lines in a job and in a set of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(data_of(seed), batch_size=10, shuffle=True)
    prepared = es.prepare(
        model, optimizer, loader, scheduler, shares=schedule(ranks, seed), engine=engine, compression=compression
    )
    loader = prepared[2]
    losses = []
    for _ in es.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(es.reduce_mean(loss))
        scheduler.step()
    rows = es.gather(torch.full((2, 2), float(es.rank())), batch=False)
    means = es.evaluate(
        model, DataLoader(data_of(seed + 1, 23), batch_size=7), lambda m, b: {"loss": (m(b[0]) - b[1]).square().mean(1)}
    )
    return {
        "bits": bits(model),
        "losses": [float(loss).hex() for loss in losses],
        "step": es.step(),
        "rows": rows.tolist(),
        "evaluated": means["loss"].hex(),
        "rank": es.rank(),
        "size": es.world_size(),
        "main": es.is_main(),
    }


def told(result: Any) -> None:
    print(json.dumps(result), flush=True)


def alone() -> None:
    seed = int(sys.argv[2])
    told(train(seed, RANKS, model_of(seed), *sys.argv[3:]))


def sets() -> None:
    """argv: one list of ranks a set. Each rank trains in the first that it is in; those in none wait at the end."""
    made = [es.ProcessSet(json.loads(words)) for words in sys.argv[2].split(";")]
    assert [one.name for one in made] == [f"set-{n + 1}" for n in range(len(made))]
    mine = next((seed for seed, one in enumerate(made) if one.included), None)
    if mine is None:
        told(None)
    else:
        assert (
            made[mine].rank == made[mine].ranks.index(RANK)
            and RANK in made[mine]
            and len(made[mine]) == made[mine].size
        )
        with made[mine] as current:
            assert es.session().name == current.name
            result = train(mine, current.size, model_of(mine), *sys.argv[3:])
        assert es.session().name == "" and es.world_size() == RANKS and es.rank() == RANK
        told({"set": mine, **result})
    es.barrier()


def handed_over() -> None:
    """group= instead of the `with`: loops, backward, step and evaluate need none."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if dist.is_initialized() else None
    assert groups is None
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    seed = RANK % 2
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(data_of(seed), batch_size=10, shuffle=True)
    _, _, loader, _ = es.prepare(model, optimizer, loader, scheduler, shares=schedule(2, seed), group=group)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    means = es.evaluate(
        model, DataLoader(data_of(seed + 1, 23), batch_size=7), lambda m, b: {"loss": (m(b[0]) - b[1]).square().mean(1)}
    )
    told({"bits": bits(model), "evaluated": means["loss"].hex()})
    for call in (
        lambda: es.reduce_mean(1.0),
        lambda: es.set_weight(1),
        lambda: es.checkpoint(),
        lambda: next(es.epochs(1)),
    ):
        try:
            call()
        except es.EvenstepError as error:
            assert "outside any `with`: this rank trains in the process set 'set-" in str(error), error
        else:
            raise AssertionError("taken outside the with")
    es.barrier()


def overlapping() -> None:
    """Trunk on all ranks, experts on pairs of ranks that overlap the trunk: one backward makes both gradients. And a ring
    of sets, each rank in two, trained in turn."""
    x = torch.randn(RANKS, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pairs = [[r for r in range(RANKS) if r % 2 == kind] for kind in range(2)]
    made = [es.ProcessSet(pair) for pair in pairs]
    trunk, expert = plain_of(1), nn.Linear(3, 2).double()
    with torch.no_grad():
        for p in expert.parameters():
            p.copy_(torch.full_like(p, 0.1 * (1 + RANK % 2)))
    reference = plain_of(1), [nn.Linear(3, 2).double() for _ in range(2)]
    for kind, one in enumerate(reference[1]):
        with torch.no_grad():
            for p in one.parameters():
                p.copy_(torch.full_like(p, 0.1 * (1 + kind)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (trunk, expert)]
    es.prepare(trunk, optimizers[0])
    es.prepare(expert, optimizers[1], group=made[RANK % 2])
    plain = torch.optim.SGD([p for m in (reference[0], *reference[1]) for p in m.parameters()], lr=0.1)
    for step in range(5):
        for optimizer in (*optimizers, plain):
            optimizer.zero_grad()
        expert(trunk(x[RANK] + step)).square().sum().backward()
        # the trunk's gradient is the mean over all ranks, an expert's that over its pair
        total = [reference[1][r % 2](reference[0](x[r] + step)).square().sum() for r in range(RANKS)]
        grads = torch.autograd.grad(sum(total) / RANKS, list(reference[0].parameters()), retain_graph=True)
        for p, g in zip(reference[0].parameters(), grads):
            p.grad = g
        for kind, one in enumerate(reference[1]):
            mine = [total[r] for r in pairs[kind]]
            for p, g in zip(
                one.parameters(), torch.autograd.grad(sum(mine) / len(mine), list(one.parameters()), retain_graph=True)
            ):
                p.grad = g
        for got, want in zip(trunk.parameters(), reference[0].parameters()):
            assert torch.allclose(got.grad, want.grad, rtol=1e-12, atol=1e-15)
        for got, want in zip(expert.parameters(), reference[1][RANK % 2].parameters()):
            assert torch.allclose(got.grad, want.grad, rtol=1e-12, atol=1e-15)
        for optimizer in (*optimizers, plain):
            optimizer.step()
    for got, want in zip(
        (*trunk.parameters(), *expert.parameters()), (*reference[0].parameters(), *reference[1][RANK % 2].parameters())
    ):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)
    ring(x)
    told("ok")


def ring(x: torch.Tensor) -> None:
    """Set k has the ranks k and k + 1: all wait for one another in a circle, and the order of the sets opens it."""
    edges = [es.ProcessSet([k, (k + 1) % RANKS], name=f"edge-{k}") for k in range(RANKS)]
    models = {}
    for k, edge in enumerate(edges):
        if edge.included:
            models[k] = plain_of(10 + k)
            es.prepare(models[k], group=edge)
    sum(m(x[RANK]).square().sum() for m in models.values()).backward()  # one pass of both of this rank's sets
    for k, model in models.items():
        twin = plain_of(10 + k)
        sum(twin(x[r]).square().sum() / 2 for r in edges[k].ranks).backward()
        for got, want in zip(model.parameters(), twin.parameters()):
            assert torch.allclose(got.grad, want.grad, rtol=1e-12, atol=1e-15)
    for k in models:  # and each on its own
        with edges[k]:
            models[k].zero_grad()
            models[k](x[RANK]).sum().backward()
    first = min(models)
    other = max(models)
    assert es.session().name == ""
    es.barrier()
    try:
        with edges[first]:
            models[other](x[RANK]).sum().backward()
    except es.EvenstepError as error:
        assert f"inside the `with` of the process set 'edge-{first}' made gradients" in str(error), error
        assert f"prepared for the process set 'edge-{other}'" in str(error), error
    else:
        raise AssertionError("a gradient of another set was taken")


def refused() -> None:
    def error_of(*given: Any, **options: Any) -> str:
        try:
            es.ProcessSet(*given, **options)
        except es.EvenstepError as error:
            return str(error)
        raise AssertionError(f"{given} was taken")

    assert "on rank 1: rank 1 is named twice in [0, 1, 1]" in error_of([0, 1, 1] if RANK == 1 else [0, 1])
    assert f"rank {RANKS} is none of the job's, which are 0 … {RANKS - 1}" in error_of([0, RANKS])
    assert "rank -1 is none of the job's" in error_of([-1])
    assert "it has no ranks" in error_of([])
    assert "neither a list of ranks nor a process group" in error_of("ab")
    assert "neither a list of ranks nor a process group" in error_of([0, 1.5])
    assert "neither a list of ranks nor a process group" in error_of([True])
    words = error_of([0, 1] if RANK == 0 else [0, 1, 2])
    assert "rank 0 makes a set of the ranks [0, 1], and its rank 1 a set of the ranks [0, 1, 2]" in words, words
    assert "its name is '../x'" in error_of([0, 1], name="../x")
    assert "its name is 'step-1'" in error_of([0, 1], name="step-1")
    pair = es.ProcessSet([1, 0], name="pair")
    assert pair.ranks == (0, 1)
    assert "there is a set 'pair' already, of the ranks [0, 1]" in error_of([1, 2], name="pair")
    model = plain_of(0)
    if RANK == 2:
        for call in (lambda: es.prepare(model, group=pair), lambda: pair.__enter__(), lambda: pair.session):
            try:
                call()
            except es.EvenstepError as error:
                assert "rank 2 is not in the process set 'pair' of the ranks [0, 1]" in str(error), error
            else:
                raise AssertionError("a rank outside was let in")
        assert not pair.included and pair.rank is None
    else:
        es.prepare(model, group=pair)
        twin = nn.Sequential(model[0], nn.Linear(17, 3).double())
        for given, want in ((model, "was prepared before"), (twin, "is trained by the process set 'pair' already")):
            try:
                es.prepare(given)
            except es.EvenstepError as error:
                assert want in str(error), error
            else:
                raise AssertionError("prepared twice")
        differs = nn.Linear(3 + RANK, 2)
        try:
            es.prepare(differs, group=pair)
        except es.EvenstepError as error:
            assert "of rank 1 differs from rank 0's" in str(
                error
            ) and "process set 'pair': its ranks 0 … 1 are the job's 0, 1" in str(error), error
        else:
            raise AssertionError("different models were taken")
    es.barrier()
    told("ok")


def never() -> None:
    """Rank 2 comes to its end instead of calling: its set's other rank is told which rank is missing."""
    made = es.ProcessSet([0, 2], name="pair")
    if RANK == 2:
        return
    if RANK == 0:
        try:
            es.prepare(plain_of(0), group=made)
        except es.EvenstepError as error:
            told(str(error))
        else:
            raise AssertionError("no error")


def resumed() -> None:
    """Trains two sets with checkpoints; stops after `argv[2]` epochs of three."""
    last = int(sys.argv[2])
    made = [es.ProcessSet([0, 1], name="left"), es.ProcessSet([2], name="right")]
    seed = 0 if RANK < 2 else 1
    with made[seed]:
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(100 + seed)
        loader = DataLoader(data_of(seed, 40 - 10 * seed), batch_size=10, shuffle=True)
        _, _, loader = es.prepare(model, optimizer, loader)
        began = es.step()
        for epoch in es.epochs(3):
            if epoch == last:
                break
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            es.checkpoint()
        path = os.path.relpath(es.checkpoint("shared" if RANK < 2 else "own"), os.getcwd())
        told({"bits": bits(model), "began": began, "step": es.step(), "path": path})
    es.barrier()
    with made[seed]:
        if RANK == 2:
            try:
                es.checkpoint("shared")
            except es.EvenstepError as error:
                assert "is a checkpoint of the process set 'left'" in str(error), error
            else:
                raise AssertionError("another set's checkpoint was replaced")


globals()[sys.argv[1]]()
