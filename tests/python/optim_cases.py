"""One job that trains with es.optim in several ways, each beside one process with torch.optim; prints what came of it as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any, Callable

import torch
from torch import nn

import evenstep as es

BATCH, BATCHES = 12, 8
torch.manual_seed(5)
inputs = torch.randn(BATCH * BATCHES, 6, dtype=torch.float64)
targets = torch.randn(BATCH * BATCHES, 3, dtype=torch.float64)

Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 3)).double()


def loader_of(values: torch.Tensor = inputs) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values, targets), batch_size=BATCH)


def uneven(number: int, samples: int) -> list[int]:
    return [2, 3, samples - 5]


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def alone(make: Make, skips: int = -1) -> nn.Module:
    """What one process has with torch.optim."""
    model = make_model()
    optimizer = make(model.parameters())
    for number in range(BATCHES):
        here = slice(number * BATCH, (number + 1) * BATCH)
        if number != skips:
            step_on(model, optimizer, (inputs[here], targets[here]))
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters()))


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def told(name: str, model: nn.Module, **more: Any) -> None:
    print(json.dumps([name, {"digest": digest(*model.parameters()), **more}]))


def is_one_memory(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all ranks of this host see what one of them writes: the lowest one's number."""
    state = next(iter(optimizer.state.values()))
    numbers = state.get("exp_avg", state.get("momentum_buffer")).view(-1)
    before = numbers[0].clone()
    es.barrier()
    numbers[0] = 1000 + es.rank()
    es.barrier()
    seen = numbers[0].item() != 1000 + es.rank()
    es.barrier()
    numbers[0] = before
    others = es.reduce_mean(torch.tensor(float(seen)), weight=1.0).item() * es.world_size()
    return round(others) == es.world_size() - 1


def train(name: str, kind: str, options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = getattr(es.optim, kind)(model.parameters(), **options)
    model, optimizer, loader = es.prepare(model, optimizer, loader_of(), shares=uneven)
    for batch in loader:
        step_on(model, optimizer, batch)
    reference = alone(lambda parameters: getattr(torch.optim, kind)(parameters, **options))
    told(name, model, apart=apart(model, reference), shares=optimizer.shares, one_memory=is_one_memory(optimizer))


def leave_a_step_out() -> None:
    """EVENSTEP_ON_NONFINITE=skip: nothing of the states is touched in it."""
    spoilt = inputs.clone()
    spoilt[3 * BATCH + BATCH - 1, 2] = float("nan")
    model = make_model()
    optimizer = es.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, loader_of(spoilt), shares=uneven)
    for batch in loader:
        step_on(model, optimizer, batch)
    reference = alone(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), skips=3)
    steps = {state["step"].item() for state in optimizer.state.values()}
    told("skip", model, apart=apart(model, reference), steps=sorted(steps))


def go_back() -> None:
    """Loaded states take the place of the shared ones, and a group that comes later has its own."""
    model = make_model()
    first, last = list(model[0].parameters()), [p for layer in (model[2], model[4]) for p in layer.parameters()]
    optimizer = es.optim.AdamW(first, lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, loader_of(), shares=uneven)
    digests, kept = [], None
    for turn in range(2):
        for number, batch in enumerate(loader):
            if number == 2 and turn == 0:
                optimizer.add_param_group({"params": last, "lr": 0.02})
            if number == 4:
                if kept is None:
                    values = [p.detach().clone() for p in model.parameters()]
                    states = json.dumps(plain(optimizer.state_dict()))
                    kept = values, states
                else:
                    with torch.no_grad():
                        for p, value in zip(model.parameters(), kept[0]):
                            p.copy_(value)
                    optimizer.load_state_dict(tensors(json.loads(kept[1])))
            step_on(model, optimizer, batch)
        digests.append(digest(*model.parameters()))
    told("back", model, same=digests[0] == digests[1], shares=optimizer.shares, one_memory=is_one_memory(optimizer))


def plain(state: Any) -> Any:
    """A state_dict as JSON has it."""
    values = {index: {key: value.tolist() for key, value in one.items()} for index, one in state["state"].items()}
    return {"state": values, "param_groups": state["param_groups"]}


def tensors(state: Any) -> Any:
    values = {
        int(index): {
            key: torch.tensor(value, dtype=torch.float32 if key == "step" else torch.float64)
            for key, value in one.items()
        }
        for index, one in state["state"].items()
    }
    return {"state": values, "param_groups": state["param_groups"]}


def step_before() -> None:
    """A rank that has made steps before es.prepare waits for nobody who has not, and has what rank 0 had."""
    model = make_model()
    optimizer = es.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2 * int(os.environ["RANK"])):
        step_on(model, optimizer, (inputs[:BATCH] + 1, targets[:BATCH]))
    model, optimizer, loader = es.prepare(model, optimizer, loader_of(), shares=uneven)
    shares = []
    for batch in loader:
        step_on(model, optimizer, batch)
        shares.append(optimizer.shares)
    reference = alone(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    told("before", model, apart=apart(model, reference), shares=all(shares), one_memory=is_one_memory(optimizer))


def keep_apart() -> None:
    """Where ranks train on their own each has its own states."""
    model = make_model()
    optimizer = es.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = es.prepare(model, optimizer, loader_of(), shares=uneven, sync=es.LocalSGD(every=4))
    for batch in loader:
        step_on(model, optimizer, batch)
    told("local", model, shares=optimizer.shares)


if os.environ.get("EVENSTEP_ON_NONFINITE") == "skip":
    step_before()  # nothing is prepared yet: each rank may go its own way
for name, (kind, options) in MAKES.items():
    train(name, kind, options)
if os.environ.get("EVENSTEP_ON_NONFINITE") == "skip":
    leave_a_step_out()
    go_back()
    keep_apart()
sys.stdout.flush()
