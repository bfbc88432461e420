"""Small trainings that must give the same parameters on several ranks with changing shares as in one process.

Run as a script in every rank by test_prepare_exact.py: trains each case plainly (rank 0), then prepared, and prints the
relative differences as JSON (rank 0).
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "50"))


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Tied head; `reentrant` runs its block under reentrant checkpointing."""

    def __init__(self, reentrant: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = Attention(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.tokens.weight
        self.gate = nn.Linear(16, 16)  # used in the block and after it: two gradients where checkpointing is reentrant
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x)) + 0.1 * self.gate(x)
        return x + 0.01 * functional.linear(x, self.tokens.weight).sum(-1, keepdim=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = checkpoint(self.block, x, use_reentrant=True) if self.reentrant else self.block(x)
        return self.head(self.gate(x))


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 5),
    )
    return model.to(memory_format=torch.channels_last)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20, bias=False), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))


class Branches(nn.Module):
    """Which branch is used depends on the data; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right, self.never = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.trunk(x))
        chosen = x[:, :1] > 0  # each sample its branch; a rank whose samples all go left never touches `right`
        parts = []
        if chosen.any():
            parts.append((chosen, self.left))
        if (~chosen).any():
            parts.append((~chosen, self.right))
        return sum(torch.where(mask, branch(h), torch.zeros_like(h)) for mask, branch in parts)[:, :3]


class Mixed(nn.Module):
    """Parameters of two dtypes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def to_dtype(self, dtype: torch.dtype) -> None:
        self.first.to(torch.float64)
        self.second.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x.double())) * self.frozen
        return self.second(h.to(self.second.weight.dtype))


class Bags(nn.Module):
    """Sparse embeddings, one of which only some data use, before dense layers."""

    def __init__(self, only: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 4, sparse=True)
        self.rare = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.head = None if only else nn.Linear(4, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        rows = tokens[:, 0] % 5 == 0
        if bool(rows.any()):
            x = torch.cat([x[~rows], x[rows] + self.rare(tokens[rows])[:, None]])
        return torch.tanh(x if self.head is None else self.head(x))


class Lookup(nn.Module):
    """A sparse gradient that no layer announces, and a weight with a sparse and a dense gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 4))
        self.tokens = nn.Embedding(50, 4, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(tokens, self.table, sparse=True) + self.tokens(tokens)
        return x @ self.tokens.weight.t()


def ids(count: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(50, (count, 6))
    tokens[::3, 0] = 0
    return tokens, tokens


def vectors(count: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(count, 6), torch.randn(count, 3)


def images(count: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(count, 3, 8, 8), torch.randint(5, (count,))


def texts(count: int) -> tuple[torch.Tensor, ...]:
    text = torch.randint(31, (count, 9))
    return text[:, :-1], text[:, 1:]


def square(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)


def predict(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def spread(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() - model(x).mean()


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum over samples."""
    return 0.1 * functional.mse_loss(model(x), y, reduction="sum")


def spreads(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.01 * (model(x).square().sum() - model(x).sum())


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.01)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=2e-3)


class Case:
    def __init__(
        self,
        build: Callable[[], nn.Module],
        data: Callable[[int], tuple[torch.Tensor, ...]],
        loss: Callable[..., torch.Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        batch: int = 12,
        samples: int = 12 * STEPS,
        **options: Any,
    ):
        self.build, self.data, self.loss, self.make_optimizer = build, data, loss, optimizer
        self.batch, self.samples, self.options = batch, samples, options


ENGINE = sys.argv[3] if len(sys.argv) > 3 else None  # of the cases that say none

CASES: dict[str, Case] = {
    "gpt_adamw_clipping_scheduler": Case(GPT, texts, predict, adamw, clip=0.5, scheduler=True),
    "gpt_torch_engine": Case(GPT, texts, predict, adamw, engine="torch"),
    "gpt_reentrant_checkpointing": Case(lambda: GPT(reentrant=True), texts, predict, adamw),
    "mlp_sgd": Case(mlp, vectors, square),
    "mlp_keeps_gradients": Case(mlp, vectors, square, set_to_none=False),
    "mlp_accumulation": Case(mlp, vectors, square, adamw, accumulate=3),
    "mlp_accumulation_keeps_gradients": Case(mlp, vectors, square, accumulate=2, set_to_none=False),
    "mlp_no_sync": Case(mlp, vectors, square, adamw, accumulate=3, no_sync=True),
    "mlp_no_sync_after_a_sum": Case(mlp, vectors, square, adamw, batch=3, accumulate=3, no_sync=True, unsynced=[1]),
    "mlp_last_batch_smaller_than_ranks": Case(mlp, vectors, square, batch=5, samples=5 * STEPS + 1, epochs=2),
    "mlp_batch_of_three": Case(mlp, vectors, square, batch=3, samples=3 * STEPS),
    "cnn_channels_last_two_groups": Case(cnn, images, classify, two_groups),
    "branches_of_the_data": Case(Branches, vectors, square, adamw),
    "branches_accumulated": Case(Branches, vectors, square, accumulate=2, batch=4),
    "branches_no_sync": Case(Branches, vectors, square, accumulate=2, batch=4, no_sync=True),
    "mixed_dtypes_and_frozen": Case(Mixed, vectors, square, adamw),
    "sparse_adam": Case(lambda: Bags(only=True), ids, spread, sparse_adam, batch=7),
    "sparse_sgd": Case(Bags, ids, spread, plain_sgd, batch=7),
    "sparse_accumulated": Case(Bags, ids, spread, plain_sgd, accumulate=2, batch=4, no_sync=True),
    "sparse_torch_engine": Case(Bags, ids, spread, plain_sgd, engine="torch"),
    "sparse_tied_and_unannounced": Case(Lookup, ids, spread, plain_sgd),
    "weights_by_tokens": Case(mlp, vectors, square, by_tokens=True),
    "dummy_sample_of_nan": Case(mlp, vectors, square, poison=True),
    "sum": Case(mlp, vectors, squares, reduction="sum"),
    "sum_keeps_gradients": Case(mlp, vectors, squares, reduction="sum", set_to_none=False),
    "sum_accumulation": Case(mlp, vectors, squares, batch=4, reduction="sum", accumulate=3),
    "sum_no_sync": Case(mlp, vectors, squares, batch=4, reduction="sum", accumulate=3, no_sync=True),
    "sum_no_sync_after_a_sum": Case(
        mlp, vectors, squares, batch=4, reduction="sum", accumulate=3, no_sync=True, unsynced=[1]
    ),
    "sum_branches_accumulated": Case(Branches, vectors, squares, batch=4, reduction="sum", accumulate=2),
    "sum_sparse_accumulated": Case(Bags, ids, spreads, plain_sgd, batch=4, reduction="sum", accumulate=2),
    "sum_batch_norm": Case(normed, vectors, squares, reduction="sum"),
    "sum_torch_engine": Case(mlp, vectors, squares, reduction="sum", accumulate=2, engine="torch"),
}


def share_schedule(ranks: int, seed: int) -> Callable[[int, int], list[int]]:
    """Other shares for every batch, zeros among them."""

    def shares(number: int, batch: int) -> list[int]:
        draw = random.Random(seed * 1000 + number)
        cuts = sorted(draw.randint(0, batch) for _ in range(ranks - 1))
        edges = [0, *cuts, batch]
        return [b - a for a, b in zip(edges, edges[1:])]

    return shares


def token_mask(x: torch.Tensor) -> torch.Tensor:
    return (x.sum(1) > -1).to(x.dtype)


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def train(case: Case, dtype: torch.dtype, es: Any, ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains; `es` None: plainly. Returns all parameters as one vector, before and after."""
    options = case.options
    torch.manual_seed(seed)
    model = case.build().to(dtype)
    if hasattr(model, "to_dtype"):
        model.to_dtype(dtype)
    before = vector(model)
    data = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.data(case.samples))
    loader: Any = DataLoader(TensorDataset(*data), batch_size=case.batch)
    optimizer = case.make_optimizer(model)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if options.get("scheduler") else None
    if es is not None:
        objects = [model, optimizer, loader] + ([scheduler] if scheduler is not None else [])
        shares = share_schedule(ranks, seed)
        chosen = {"engine": options.get("engine", ENGINE), "reduction": options.get("reduction", "mean")}
        model, optimizer, loader, *_ = es.prepare(*objects, shares=shares, **chosen)
    accumulate = options.get("accumulate", 1)
    for _ in range(options.get("epochs", 1)):
        for number, (x, y) in enumerate(loader):
            if options.get("poison") and es is not None and es.session().steps.plan.samples == 0:
                x = x * math.nan
            if options.get("by_tokens"):
                mask = token_mask(x)
                if es is not None:
                    es.set_weight(float(mask.sum()))  # of a dummy sample, too
                loss = (((model(x) - y) ** 2).mean(1) * mask).sum() / mask.sum().clamp(min=1)
            else:
                loss = case.loss(model, x, y)
            last = (number + 1) % accumulate == 0
            unsynced = options.get("unsynced", range(accumulate - 1))
            if options.get("no_sync") and number % accumulate in unsynced and es is not None:
                with es.no_sync(model):
                    (loss / accumulate).backward()
            else:
                (loss / accumulate).backward()
            if last:
                if "clip" in options:
                    nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad(set_to_none=options.get("set_to_none", True))
    return before, vector(model)


def main() -> None:
    sums = [name for name, case in CASES.items() if "reduction" in case.options]
    groups = {"all": [name for name in CASES if name not in sums], "sums": sums}
    names = groups.get(sys.argv[1]) or sys.argv[1].split(",")
    dtype = getattr(torch, sys.argv[2])
    import evenstep as es

    ranks = es.world_size()
    first = es.is_main()  # alone it trains plainly, and tells
    plain = {name: train(CASES[name], dtype, None, ranks, seed) for seed, name in enumerate(names) if first}
    results = {}
    for seed, name in enumerate(names):
        _, ours = train(CASES[name], dtype, es, ranks, seed)
        everywhere = es.gather(ours[None])
        if not first:
            continue
        before, expected = plain[name]
        results[name] = {
            "difference": float((ours - expected).norm() / expected.norm()),
            "moved": float((expected - before).norm() / before.norm()),
            "same_on_all_ranks": bool((everywhere == everywhere[0]).all()),
        }
    if first:
        print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
