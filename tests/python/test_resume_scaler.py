"""torch.amp.GradScaler, given to es.prepare, goes on after a resume; what es.prepare takes for its state, and what not."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import evenstep as es

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

stop = int(sys.argv[1])
torch.manual_seed(3)
data = TensorDataset(torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, shuffle=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
model, optimizer, loader, same = es.prepare(model, optimizer, loader, scaler, shares=lambda n, b: [b - 2, 2])
assert same is scaler
for epoch in range(2):
    for x, y in loader:
        if es.step() == stop:
            raise SystemExit(0)
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if es.is_main():
            values = [v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()]
            print("SCALE", es.step(), scaler.get_scale(), *values)
"""


def scales(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith("SCALE")]


def test_a_scaler_goes_on(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    whole = scales(run_ranks(SCRIPT, args=("-1",)))
    assert len(whole) == 16 and whole[-1].split()[2] == "64.0"
    folder = tmp_path / "checkpoints"
    cadence = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "5"}
    run_ranks(SCRIPT, args=("6",), env=cadence)
    resumed = scales(run_ranks(SCRIPT, args=("-1",), env={"EVENSTEP_RESUME": str(folder / "step-00000005")}))
    assert resumed == whole[5:]


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loaderlike(Counter):
    def __iter__(self) -> Any:
        return iter(())


class Optimizerlike(Counter):
    param_groups = ()


def test_what_has_a_state_is_taken() -> None:
    scaler, counter = torch.amp.GradScaler("cpu"), Counter()
    assert es.prepare(scaler, counter) == (scaler, counter)
    assert [one for one in es.session().objects.values() if one in (scaler, counter)] == [scaler, counter]
    with pytest.raises(es.EvenstepError, match=r"argument 1 of es.prepare \(Counter\) was prepared before"):
        es.prepare(counter)


@pytest.mark.parametrize("wrong", [Counter, Loaderlike(), Optimizerlike(), object(), 3])
def test_what_looks_like_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"and what has state_dict\(\) and load_state_dict\(\)"):
        es.prepare(wrong)
