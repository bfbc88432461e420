"""The hooks of one model with an engine that copies each gradient the moment it is handed over."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep import EvenstepError, _core
from evenstep.backward import observe_backward
from evenstep.engine import Report
from evenstep.gradients import GradientSync
from evenstep.group import Alone
from evenstep.kept import KeptGradients
from evenstep.steps import Steps


class Hasty:
    """Takes weight * gradient at once: what comes later for a parameter is missed."""

    def __init__(self, parameters: list[torch.Tensor]):
        self.views = [torch.zeros_like(p) for p in parameters]
        self.used = bytearray(len(parameters))
        self.memory: list[torch.Tensor] = []
        self.rounds: list[bool] = []  # whether each counts

    def begin(self, weight: float, step: int) -> None:
        self.rounds.append(True)
        self.weight = weight
        self.used = bytearray(len(self.views))

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        assert not self.used[index], "handed over twice"
        self.used[index] = 1
        self.views[index].copy_(gradient.detach() * self.weight)

    def discard(self) -> None:
        self.rounds[-1] = False

    def finish(self) -> tuple[bytes, Report]:
        return bytes(self.used), Report(0, 0, 0, 0)


class Shared(nn.Module):
    """`gate` gets a gradient after the checkpointed block's and one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda h: torch.tanh(self.gate(self.first(h))), x.requires_grad_(), use_reentrant=True)
        return self.gate(x)


@pytest.fixture
def watched() -> Iterator[tuple[Shared, Steps]]:
    torch.manual_seed(0)
    model = Shared().double()
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    steps.syncs.append(GradientSync("model", model, Hasty(list(model.parameters())), steps))
    observe_backward(steps)
    yield model, steps
    observe_backward(None)


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(5, 3, dtype=torch.float64, generator=generator)).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def plain_gradients(model: nn.Module, passes: int = 1) -> torch.Tensor:
    twin = Shared().double()
    twin.load_state_dict(model.state_dict())
    observe_backward(None)
    for number in range(passes):
        loss_of(twin, number + 1).backward()
    return gradients(twin)


def test_second_gradient_of_reentrant_checkpointing_is_not_lost(watched: tuple[Shared, Steps]) -> None:
    model, steps = watched
    expected = plain_gradients(model)
    observe_backward(steps)
    loss_of(model).backward()
    assert torch.allclose(gradients(model), expected, rtol=1e-14, atol=0)
    engine = steps.syncs[0].engine
    assert isinstance(engine, Hasty) and engine.rounds == [False, True]
    model.zero_grad()
    loss_of(model).backward()  # from now on everything is handed over at the end, once
    assert torch.allclose(gradients(model), expected, rtol=1e-14, atol=0)
    assert engine.rounds == [False, True, True]


def test_accumulates_over_passes(watched: tuple[Shared, Steps]) -> None:
    model, steps = watched
    expected = plain_gradients(model, passes=3)
    observe_backward(steps)
    steps.nested_backward()  # as after a first such pass
    for number in range(3):
        loss_of(model, number + 1).backward()
    assert torch.allclose(gradients(model), expected, rtol=1e-13, atol=0)


def test_create_graph_keeps_its_graph(watched: tuple[Shared, Steps]) -> None:
    model, _ = watched
    with pytest.warns(UserWarning, match="create_graph"):
        model.first(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward(create_graph=True)
    assert model.first.weight.grad.requires_grad
    model.zero_grad()


def test_autograd_grad_is_left_alone(watched: tuple[Shared, Steps]) -> None:
    model, _ = watched
    loss = model.first(torch.ones(1, 3, dtype=torch.float64)).sum()
    (gradient,) = torch.autograd.grad(loss, [model.first.bias])
    assert torch.equal(gradient, torch.ones(3, dtype=torch.float64)) and model.first.bias.grad is None


def test_a_hook_that_takes_the_gradient_is_refused(watched: tuple[Shared, Steps]) -> None:
    """Registered after es.prepare: it runs when the gradient is with the engine."""
    model, _ = watched
    model.first.bias.register_post_accumulate_grad_hook(take)
    with pytest.raises(
        EvenstepError, match=r"parameter 'first\.bias' of model 'model' was gone .*a hook of yours took it"
    ):
        model.first(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("enabled", [True, False], ids=["", "under no_sync"])
def test_a_hook_that_was_there_first_is_refused(enabled: bool) -> None:
    """Registered before es.prepare: no rank ever hands the gradient over."""
    model = nn.Linear(3, 1)
    model.bias.register_post_accumulate_grad_hook(take)
    steps = Steps(Alone(), _core.Telemetry(-1, 0))
    steps.syncs.append(GradientSync("model", model, Hasty(list(model.parameters())), steps))
    steps.syncs[0].enabled = enabled
    observe_backward(steps)
    try:
        with pytest.raises(EvenstepError, match="parameter 'bias' of model 'model' was gone when backward ended"):
            model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(EvenstepError, match="no longer in step"):
            model(torch.ones(1, 3)).sum().backward()
    finally:
        observe_backward(None)


def take(parameter: torch.Tensor) -> None:
    parameter.grad = None


def test_loss_that_is_no_number_is_unknown(watched: tuple[Shared, Steps]) -> None:
    model, steps = watched
    y = model.first(torch.ones(2, 3, dtype=torch.float64))
    torch.autograd.backward([y], [torch.ones_like(y)])
    assert steps.commit() == [] and steps.loss != steps.loss and steps.step == 1


def test_a_tensor_that_cpp_let_go_of_does_not_stop_the_search_for_kept_gradients() -> None:
    """Whatever has one meanwhile, as the collector's list has, keeps with torch 2.6 an object without a tensor."""
    parameter, given = nn.Parameter(torch.ones(2)), torch.ones(2)
    found = weakref.ref(given)
    parameter.grad = given
    del given
    left = found()
    parameter.grad = None
    memory = torch.zeros(2)
    views = [memory.view(2)]
    kept = KeptGradients(views, [memory])
    mine = views[0]
    kept.let_go([parameter])
    memory.fill_(7)
    assert left is not None and kept.own == {0} and mine.tolist() == [0, 0]
