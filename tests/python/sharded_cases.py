"""One job that trains with gradients in parts and beside them with whole ones; prints what came of it as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn

import evenstep as es

BATCH, BATCHES = 12, 6
torch.manual_seed(5)
inputs = torch.randn(BATCH * BATCHES, 6)
targets = torch.randn(BATCH * BATCHES, 3)


class Model(nn.Module):
    """`seldom` is used by the ranks with more than two samples, `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 3))
        self.seldom, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return self.seldom(y) if len(x) > 2 else y


def loader_of(values: torch.Tensor = inputs) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values, targets), batch_size=BATCH)


def uneven(number: int, samples: int) -> list[int]:
    return [2, 3, samples - 5]


def prepared(kind: str, values: torch.Tensor = inputs, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = Model().to(dtype)
    optimizer = getattr(es.optim, kind)(model.parameters(), **options)
    return es.prepare(model, optimizer, loader_of(values.to(dtype)), shares=uneven)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1].to(batch[0].dtype))


def told(name: str, **what: Any) -> None:
    print(json.dumps([name, what]))


def outcome(model: nn.Module, optimizer: Any, norms: list[Any]) -> dict[str, Any]:
    numbers = [p.detach() for p in model.parameters()]
    numbers += [v for one in optimizer.state.values() for k, v in sorted(one.items()) if k != "step" and v is not None]
    plain = b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in numbers if one.numel())
    return {"digest": hashlib.sha256(plain).hexdigest(), "norms": norms, "shares": optimizer.shares}


def train(name: str, kind: str, dtype: torch.dtype, values: torch.Tensor = inputs, **options: Any) -> None:
    for sharded in (False, True):
        model, optimizer, loader = prepared(kind, values, dtype, shard_gradients=sharded, **options)
        norms = []
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            assert model.never.weight.grad is None
            assert (type(model.body[0].weight.grad) is torch.Tensor) != sharded
            if number == 4 and options.get("max_grad_norm"):
                optimizer.max_grad_norm = 1e9
            optimizer.step()
            norms.append(optimizer.grad_norm)
        told(f"{name} {sharded}", **outcome(model, optimizer, norms))


def accumulate() -> None:
    """Two passes of each step stay on the rank."""
    for sharded in (False, True):
        model, optimizer, loader = prepared("AdamW", lr=0.01, shard_gradients=sharded, max_grad_norm=0.5)
        for number, batch in enumerate(loader):
            if number % 3 != 2:
                with es.no_sync(model):
                    loss_of(model, batch).backward()
                continue
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        told(f"accumulated {sharded}", **outcome(model, optimizer, []))


def error_of(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except es.EvenstepError as error:
        return str(error)
    return ""


def misuse() -> None:
    model, optimizer, loader = prepared("SGD", lr=0.01, shard_gradients=True)
    found: dict[str, str] = {}
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        weight = model.body[0].weight
        if number == 0:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.tensor(1.0))
            found["clip"] = error_of(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
            found["norm"] = error_of(weight.grad.norm)
            found["zero"] = error_of(optimizer.zero_grad, set_to_none=False)
            found["scale"] = error_of(scaler.unscale_, optimizer)
            found["torch"] = error_of(torch.optim.SGD([weight], lr=0.1).step)
            found["shown"] = repr(weight.grad)
            assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        if number == 1:
            whole = weight.grad
            weight.grad = torch.zeros_like(weight)
            found["mixed"] = error_of(optimizer.step)
            weight.grad = whole
        optimizer.step()
        if number == 1:
            found["twice"] = error_of(optimizer.step)
        if number == BATCHES - 1:  # the last, for the ranks do not go on from here alike
            found["again"] = error_of(loss_of(model, batch).backward)
    told("misuse", **found)


train("adamw", "AdamW", torch.float32, lr=0.01, weight_decay=0.1)
train("adam", "Adam", torch.float64, lr=0.01, amsgrad=True, maximize=True, max_grad_norm=0.4)
train("sgd", "SGD", torch.bfloat16, lr=0.05, momentum=0.9, nesterov=True, max_grad_norm=0.4)
train("plain", "SGD", torch.float16, lr=0.05)
spoilt = inputs.clone()
spoilt[3 * BATCH + BATCH - 1, 2] = float("nan")
train("skip", "AdamW", torch.float32, spoilt, lr=0.01, max_grad_norm=0.4)  # EVENSTEP_ON_NONFINITE=skip
accumulate()
misuse()
sys.stdout.flush()
