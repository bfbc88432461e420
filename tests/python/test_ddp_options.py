"""The options that users know from DistributedDataParallel: each does what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_prepare_gradients import Hasty
from torch import nn

from evenstep import EvenstepError, _core
from evenstep.backward import observe_backward
from evenstep.engine import EngineOptions, SharedEngine
from evenstep.gradients import GradientSync
from evenstep.group import Alone
from evenstep.prepare_options import DDPOptions, engine_options
from evenstep.steps import Steps
from evenstep.torch_engine import TorchEngine


class Two(nn.Module):
    """`second` is used when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return (self.second(x) if both else x).sum()


@pytest.fixture
def watched() -> Iterator[Callable[[DDPOptions], Two]]:
    def make(options: DDPOptions) -> Two:
        model, steps = Two(), Steps(Alone(), _core.Telemetry(-1, 0))
        sync = GradientSync("model", model, Hasty(list(model.parameters())), steps)
        sync.use_options(options)
        steps.syncs.append(sync)
        observe_backward(steps)
        return model

    yield make
    observe_backward(None)


X = torch.ones(2, 3)


def test_unused_parameters_are_found_without_asking(watched: Callable[[DDPOptions], Two]) -> None:
    for asked in (None, True):
        model = watched(DDPOptions(find_unused_parameters=asked))
        model(X, both=False).backward()
        assert model.first.weight.grad is not None and model.second.weight.grad is None


def test_unused_parameters_are_an_error_where_there_are_to_be_none(watched: Callable[[DDPOptions], Two]) -> None:
    model = watched(DDPOptions(find_unused_parameters=False))
    model(X, both=True).backward()
    model.zero_grad()
    with pytest.raises(EvenstepError, match=r"no rank had a gradient of second\.weight, second\.bias of model 'model'"):
        model(X, both=False).backward()


def test_a_static_graph_stays_what_it_was(watched: Callable[[DDPOptions], Two]) -> None:
    model = watched(DDPOptions(static_graph=True))
    for _ in range(2):
        model(X, both=False).backward()
        model.zero_grad()
    with pytest.raises(EvenstepError, match=r"parameter 'second\.weight' of model 'model' had none .* and has one now"):
        model(X, both=True).backward()


def test_gradients_of_their_own(watched: Callable[[DDPOptions], Two]) -> None:
    model = watched(DDPOptions(gradient_as_bucket_view=False))
    model(X, both=True).backward()
    kept = model.first.weight.grad
    assert kept is not None
    before = kept.clone()
    model.zero_grad()
    model(3 * X, both=True).backward()
    assert torch.equal(kept, before) and not torch.equal(model.first.weight.grad, before)


def shared_engine(parameters: list[nn.Parameter], options: EngineOptions) -> SharedEngine:
    size = SharedEngine.arena_bytes(parameters, options)
    return SharedEngine(parameters, _core.Comm(_core.Comm.create_segment(1, size), 0, 1, size), None, options)


def test_the_size_of_buckets() -> None:
    from evenstep.environment import Environment

    parameters = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(8)]  # of 256 KiB
    buckets = {}
    for cap in (None, 0.25, 1, 100):
        options = engine_options(Environment(), None, None, "mean", cap)
        engine = shared_engine(parameters, options)
        engine.begin(1.0, 0)
        buckets[cap] = engine._sync.finish()[6]
        torchs = TorchEngine(parameters, None, Alone(), _core.Telemetry(-1, 0), options)
        assert len(torchs._buckets) == {None: 1, 0.25: 8, 1: 2, 100: 1}[cap]
    assert buckets == {None: 2, 0.25: 8, 1: 3, 100: 2}  # the first one is small: it begins the overlap


BUFFERS = """
    import json
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("seen", torch.zeros(1))
        def forward(self, x):
            self.seen.fill_(10.0 + es.rank())
            return self.linear(x).square().mean()

    found = {}
    for rule in (None, True, False):
        for shares in ([1, 3], [0, 4]):
            model = Keeps()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
            model, optimizer, loader = es.prepare(
                model, optimizer, loader, shares=lambda n, b: shares, broadcast_buffers=rule,
                gradient_as_bucket_view=rule is None,
            )
            for (x,) in loader:
                model(x).backward()
                sync = es.session().steps.syncs[-1]
                views = all(p.grad is v for p, v in zip(sync.parameters, sync.engine.views))
                optimizer.step()
            found[f"{rule} {shares}"] = [es.gather(model.seen).tolist(), views]
    if es.is_main():
        print("FOUND " + json.dumps(found))
"""


def test_buffers_on_two_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    import json

    line = next(line for line in run_ranks(BUFFERS)[0].stdout.splitlines() if line.startswith("FOUND "))
    found = {name: (seen, views) for name, (seen, views) in json.loads(line.removeprefix("FOUND ")).items()}
    assert found == {
        "None [1, 3]": ([10.75, 10.75], True),
        "None [0, 4]": ([11.0, 11.0], True),
        "True [1, 3]": ([10.0, 10.0], False),
        "True [0, 4]": ([11.0, 11.0], False),  # rank 0 had no samples, so its buffer counts nothing
        "False [1, 3]": ([10.0, 11.0], False),
        "False [0, 4]": ([10.0, 11.0], False),
    }
