"""Models with BatchNorm that must train on several ranks with changing shares as in one process.

Run as a script in every rank by test_batch_norm.py, which gives the dtype; prints the relative differences as JSON (rank 0).
With "inductor" after it: torch.compile with its own backend, against one process that compiles nothing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from prepare_cases import share_schedule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 12, 12
Tensors = dict[str, torch.Tensor]


class Activated(nn.BatchNorm2d):
    """As timm's: a BatchNorm with more in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(super().forward(x)) + 0.1 * x


class ByTorch(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.3, self.eps, False
        )


def conv(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 5),
    )


class Written(nn.Module):
    """Line by line: of a Sequential, a loop with a BatchNorm in it, torch.compile compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(8)])
        self.head = nn.Linear(72, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.first(x).tanh() * 1.5)
        x = self.norms[1](self.second(functional.gelu(x)) + 0.25)
        return self.head(functional.silu(x).flatten(1))


def lazy() -> nn.Module:
    model = conv(lambda n: nn.LazyBatchNorm2d())
    model.eval()(torch.zeros(1, 3, 8, 8))
    return model.train()


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(3, (4, 2)), nn.Conv3d(3, 4, 2, bias=False), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(84, 5)
    )


class Sequences(nn.Module):
    """(N, C, L), then (N, C), the first on the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(3), nn.BatchNorm1d(64, momentum=None)
        self.mix, self.head = nn.Conv1d(3, 1, 1, bias=False), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.mix(self.first(x.flatten(2))).flatten(1)))


class Twice(nn.Module):
    """One BatchNorm, used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(k, 6, 3, padding=1, bias=False) for k in (3, 6, 6))
        self.norm, self.frozen = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.a(x)))
        x = self.frozen(torch.tanh(self.norm(self.b(x))))
        return self.head(self.c(x).mean((2, 3)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.tail = nn.Conv2d(3, 6, 3), conv()[3:]
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 5)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)
        return self.head(x.mean((2, 3)))


class Empty(nn.Module):
    """A branch that the data choose, run on an empty batch where a rank has none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        chosen = x[:, 0] > 3
        both = torch.cat([self.left(x[chosen]), self.right(x[~chosen])])
        return both[torch.argsort(torch.cat([chosen.nonzero(), (~chosen).nonzero()])[:, 0])]


def few(n: int) -> nn.Module:
    return nn.BatchNorm2d(n, affine=False, momentum=None)


def untracked(n: int) -> nn.Module:
    return nn.BatchNorm2d(n, track_running_stats=False)


def channels_last() -> nn.Module:
    return conv().to(memory_format=torch.channels_last)


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = 3 + 2 * torch.randn(samples, 3, 8, 8)
    x[:, 0, 0, 0] = torch.where(torch.arange(samples) % 2 == 0, 1.0, 5.0)  # what a branch is chosen by
    return x, torch.randint(5, (samples,))


class Case:
    def __init__(self, build: Callable[[], nn.Module], **options: Any) -> None:
        self.build, self.options = build, options


CASES: dict[str, Case] = {
    "conv": Case(conv),
    "conv_adam": Case(conv, optimizer=torch.optim.Adam, lr=1e-3),
    "conv_torch_engine": Case(conv, prepare={"engine": "torch"}),
    "conv_channels_last": Case(channels_last),
    "conv_accumulated": Case(conv, accumulate=2),
    "conv_no_sync": Case(conv, accumulate=3, no_sync=True),
    "conv_by_tokens": Case(conv, tokens=True),
    "conv_scaled": Case(conv, scaled=True),
    "conv_clipped": Case(conv, clip=0.3),
    "conv_by_hand": Case(conv, by_hand=True),
    "conv_poisoned_dummies": Case(conv, poison=True),
    "conv_compiled": Case(conv, compiled={"backend": "aot_eager"}),
    "written_compiled": Case(Written, compiled={"backend": "aot_eager"}),
    "not_affine_cumulative": Case(lambda: conv(few)),
    "untracked": Case(lambda: conv(untracked)),
    "lazy": Case(lazy),
    "volumes": Case(volumes),
    "sequences": Case(Sequences),
    "twice_and_frozen": Case(Twice),
    "checkpointed": Case(lambda: Checkpointed(False)),
    "checkpointed_reentrant": Case(lambda: Checkpointed(True)),
    "activated": Case(lambda: conv(Activated)),
    "by_torch": Case(lambda: conv(ByTorch)),
    "torch_sync": Case(lambda: conv(nn.SyncBatchNorm), plain=conv),
    "empty_branches": Case(Empty),
    "recomputed_statistics": Case(conv, recompute=True),
    "averaged_model": Case(conv, average=True),
}


INDUCTOR = {
    f"written, dynamic={dynamic}": Case(Written, compiled={"backend": "inductor", "dynamic": dynamic})
    for dynamic in (None, True)
}


def compiled(model: nn.Module, in_job: bool, backend: str, dynamic: bool | None = None) -> Any:
    """By torch's own backend in a job alone: one process then compiles nothing."""
    if backend == "inductor":
        torch.compiler.reset()  # else a case counts as a change of the sizes of the one before
    return torch.compile(model, backend=backend, dynamic=dynamic, disable=backend == "inductor" and not in_job)


def state(model: nn.Module) -> Tensors:
    return {name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()}


@contextlib.contextmanager
def maybe(when: bool, context: Callable[[], Any]) -> Iterator[None]:
    with context() if when else contextlib.nullcontext():
        yield


def train(case: Case, dtype: torch.dtype, es: Any, seed: int) -> Tensors:
    options = case.options
    torch.manual_seed(seed)
    build = options.get("plain", case.build) if es is None else case.build
    model: Any = build().to(dtype)
    x, y = images(BATCH * STEPS - 5)  # the last batch is smaller
    loader: Any = DataLoader(TensorDataset(x.to(dtype), y), batch_size=BATCH)
    make = options.get("optimizer", torch.optim.SGD)
    optimizer = make(model.parameters(), lr=options.get("lr", 0.05))
    if es is not None:
        given = options.get("prepare", {})
        shares = share_schedule(es.world_size(), seed)
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares, **given)
    run = compiled(model, es is not None, **options["compiled"]) if "compiled" in options else model
    average = torch.optim.swa_utils.AveragedModel(model) if options.get("average") else None
    accumulate = options.get("accumulate", 1)
    scaler = torch.amp.GradScaler("cpu", enabled=bool(options.get("scaled")))
    parameters = list(model.parameters())
    for number, (x, y) in enumerate(loader):
        mine = BATCH if es is None else es.session().latest.samples
        if options.get("poison") and mine == 0:
            x = x * math.nan
        losses = functional.cross_entropy(run(x), y, reduction="none")
        tokens = 1.0 + (y % 3) if options.get("tokens") else torch.ones_like(losses)
        if options.get("tokens") and es is not None:
            es.set_weight(float(tokens.sum()) if mine else 0.0)
        loss = (losses * tokens).sum() / tokens.sum() / accumulate
        last = (number + 1) % accumulate == 0
        if options.get("by_hand"):
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                p.grad = gradient
            if es is not None:
                es.exchange_gradients()
        else:
            with maybe(options.get("no_sync", False) and not last and es is not None, lambda: es.no_sync(model)):
                scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            if "clip" in options:
                nn.utils.clip_grad_norm_(parameters, options["clip"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
    if options.get("recompute"):
        torch.optim.swa_utils.update_bn(loader, model)
    if average is not None:
        torch.optim.swa_utils.update_bn(loader, average)
        return state(average.module)
    return state(model)


def relative(ours: Tensors, expected: Tensors) -> float:
    """The larger one of the parameters' and of the running statistics'."""
    assert list(ours) == list(expected), (list(ours), list(expected))
    found = []
    for kind in ("weight bias", "running_mean running_var"):
        names = [name for name in ours if name.split(".")[-1] in kind.split()]
        if names:
            a, b = (torch.cat([one[name].reshape(-1) for name in names]) for one in (ours, expected))
            found.append(float((a - b).norm() / b.norm()))
    counts = [name for name in ours if name.endswith("num_batches_tracked")]
    assert all(torch.equal(ours[name], expected[name]) for name in counts)
    return max(found)


def autocast(es: Any) -> float:
    """Statistics of bf16 activations are formed in 32 bits: their difference is that of fp32, the outputs' that of bf16."""
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(4), (5 + torch.randn(BATCH, 4)).bfloat16()
    plain = copy.deepcopy(norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
    es.prepare(norm)
    parts = share_schedule(es.world_size(), 5)(1, BATCH)
    mine = x.split(parts)[es.rank()].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(mine)
    assert y.dtype is torch.bfloat16
    assert torch.allclose(y, expected.split(parts)[es.rank()], atol=0.02)
    y.float().square().sum().backward()
    return relative(state(norm), state(plain))


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    import evenstep as es

    cases = INDUCTOR if "inductor" in sys.argv else CASES
    first = es.is_main()  # alone it trains plainly, and tells
    plain = {name: train(case, dtype, None, seed) for seed, (name, case) in enumerate(cases.items()) if first}
    results = {} if "inductor" in sys.argv else {"autocast": {"difference": autocast(es), "same": True}}
    for seed, (name, case) in enumerate(cases.items()):
        ours = train(case, dtype, es, seed)
        every = es.gather(torch.cat([tensor.reshape(-1) for tensor in ours.values()])[None])
        if first:
            same = bool((every == every[0]).all())
            results[name] = {"difference": relative(ours, plain[name]), "same": same}
    if first:
        print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
