"""exact="bitwise" and compiled code: how it computes follows from what its process computed before, so that it is refused."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evenstep as es
from evenstep.batch_norm import synchronise
from evenstep.exact_models import check_model, check_not_compiled
from evenstep.exact_training import deterministic


def compiled(given: Any) -> Any:
    """It compiles when it is called first, and leaves its marks at once."""
    return torch.compile(given, backend="eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


class Callable_:
    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss(model, x)


Given = tuple[nn.Module, torch.optim.Optimizer, Any]


def check(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
    check_not_compiled([model], [optimizer], [step])


def made(change: Callable[[nn.Module], Any] = lambda model: None, step: Any = loss) -> Given:
    """change gives another model, or changes the one that it is given."""
    model: Any = Net()
    changed = change(model)
    model = model if changed is None else changed
    return model, torch.optim.SGD(model.parameters(), lr=0.1), step


def in_place(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        call(model)

    return change


def layer_of_its_own(model: Any) -> None:
    model.layers[0] = compiled(model.layers[0])


def forward_of_its_own(model: Any) -> None:
    model.layers[2].forward = compiled(model.layers[2].forward)


def decorated_forward(model: Any) -> nn.Module:
    class Decorated(Net):
        forward = compiled(Net.forward)

    return Decorated()


def decorated_method(model: Any) -> nn.Module:
    class Decorated(Net):
        @staticmethod
        @compiled
        def mixed(x: torch.Tensor) -> torch.Tensor:
            return x + 1

    return Decorated()


def attribute(model: Any) -> None:
    model.layers[1].gate = compiled(torch.sigmoid)


def traced_layer(model: Any) -> None:
    model.layers[0] = torch.jit.trace(model.layers[0], torch.ones(2, 4))


def scripted_loss(x: torch.Tensor) -> torch.Tensor:
    return x.mean()


def scripted_attribute(model: Any) -> None:
    model.layers[1].gate = torch.jit.script(scripted_loss)


def compiled_step() -> Given:
    model, optimizer, step = made()
    optimizer.step = compiled(optimizer.step)  # type: ignore[method-assign]
    return model, optimizer, step


class CompiledCall(Callable_):
    __call__ = compiled(Callable_.__call__)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: made(compiled), "the model is compiled"),
        (lambda: made(in_place(lambda model: model.compile(backend="eager"))), "the model is compiled"),
        (lambda: made(layer_of_its_own), "the model's layers.0 is compiled"),
        (lambda: made(in_place(lambda model: model.layers[2].compile(backend="eager"))), "the model's layers.2 is"),
        (lambda: made(forward_of_its_own), "the model's layers.2 is compiled"),
        (lambda: made(decorated_forward), "the model is compiled"),
        (lambda: made(decorated_method), "'mixed' of the model is compiled"),
        (lambda: made(attribute), "'gate' of the model's layers.1 is compiled"),
        (lambda: made(step=compiled(loss)), "train_step is compiled"),
        (lambda: made(step=functools.partial(compiled(loss))), "train_step is compiled"),
        (lambda: made(step=CompiledCall()), "train_step is compiled"),
        (lambda: made(torch.jit.script), "the model is compiled"),
        (lambda: made(traced_layer), "the model's layers.0 is compiled"),
        (lambda: made(scripted_attribute), "'gate' of the model's layers.1 is compiled"),
        (lambda: made(step=torch.jit.script(scripted_loss)), "train_step is compiled"),
        (compiled_step, "the optimizer's step is compiled"),
    ],
)
def test_compiled_code_is_refused_wherever_it_shows(make: Callable[[], Given], words: str) -> None:
    with pytest.raises(es.EvenstepError, match=words) as told:
        check(*make())
    assert "the sizes and the number of the blocks" in str(told.value) and "fix: give it as it is" in str(told.value)


def disabled_module(model: Any) -> None:
    model.layers[0] = torch.compiler.disable(model.layers[0])


def disabled_method(model: Any) -> None:
    model.layers[2].forward = torch.compiler.disable(model.layers[2].forward)


@pytest.mark.parametrize(
    "make",
    [
        made,
        lambda: made(disabled_module),
        lambda: made(disabled_method),
        lambda: made(step=Callable_()),
        lambda: made(step=functools.partial(loss)),
        lambda: made(step=Net().layers),
    ],
)
def test_what_is_not_compiled_is_not_refused(make: Callable[[], Given]) -> None:
    check(*make())


def test_no_optimizer_of_torch_is_taken_for_compiled() -> None:
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    kinds = [
        kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass) if issubclass(kind, torch.optim.Optimizer)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        if kind is not torch.optim.Optimizer:
            check(model, kind(matrices), loss)


@pytest.mark.parametrize(
    ("cuda", "given", "exact", "then"),
    [
        ("12.8", None, "bitwise", ":4096:8"),
        ("12.8", ":16:8", "bitwise", ":16:8"),
        ("12.8", None, None, None),
        (None, None, "bitwise", None),
    ],
)
def test_a_trainer_fixes_what_cublas_works_in(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, given: str | None, exact: str | None, then: str | None
) -> None:
    """Of a torch that can use CUDA, where the script or the user has not; when it is made, for cuBLAS reads it once."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, given or "")  # so that what is set here goes with this test
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    model = Net()
    es.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, config=es.Config(exact=exact))
    assert os.environ.get(name) == then


def test_deterministic_kernels_are_not_chosen_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's: ranks would choose differently."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()


def test_batch_norm_on_a_device_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("meta")
    synchronise("model", model)
    with pytest.raises(
        es.EvenstepError, match="not on the CPU, where alone blocks can wait for one another in backward"
    ):
        check_model("model", model, sparse=False)
