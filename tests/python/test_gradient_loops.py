"""Loops that keep gradients, leave micro-batches empty or share parameters train as in one process (gradient_cases.py)."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.step_checks import StepChecks

SCRIPT = pathlib.Path(__file__).parent / "gradient_cases.py"


@pytest.mark.parametrize(
    ("ranks", "engine"), [pytest.param(2, "default", marks=pytest.mark.more), (3, "default"), (2, "torch")]
)
def test_same_parameters_as_one_process(run_ranks: Callable[..., list[Any]], ranks: int, engine: str) -> None:
    results = run_ranks(SCRIPT, ranks=ranks, args=(engine,))
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert cases
    wrong = {n: case for n, case in cases.items() if not (case["difference"] < 1e-12 and case["same_on_all_ranks"])}
    assert not wrong


def test_batches_of_unequal_parts_are_refused_in_one_backward(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    data = TensorDataset(torch.randn(48, 2))
    model = es.prepare(nn.Linear(2, 1))
    shares = [[6, 6], [3, 9], [3, 9]]
    loaders = [es.prepare(DataLoader(data, batch_size=12), shares=lambda n, b, s=s: s) for s in shares]
    for batches in zip(*loaders):
        sum(model(x).mean() for (x,) in batches).backward()
    """
    for result in run_ranks(code, check=False):
        assert "of which the ranks have different parts, [6, 6] and [3, 9] samples" in result.stderr
        assert "fix: call backward for each batch before the next is fetched" in result.stderr


KEPT = {
    "a list of the loader": "list(loader)",
    "copies": "[(x.double(),) for (x,) in loader]",
    "a class of its own": "list(map(Own, loader))",
    "flushed after the loop": "[next(batches), next(batches), *batches]",
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_batches_of_unequal_parts_kept_past_their_iteration_are_refused(
    run_ranks: Callable[..., list[Any]], kept: str
) -> None:
    code = f"""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    class Own:
        def __init__(self, batch):
            self.x = batch[0]
        def __iter__(self):
            return iter((self.x.double(),))

    model = nn.Linear(1, 1).double()
    data = TensorDataset(torch.arange(9.0)[:, None])
    loader = DataLoader(data, batch_size=4, collate_fn=lambda rows: [torch.stack([x for x, in rows]).float()])
    model, loader = es.prepare(model, loader)
    batches = iter(loader)
    kept = {kept}
    for (x,) in kept:
        model(x.double()).mean().backward()
    """
    for result in run_ranks(code, check=False):
        assert "a backward on batches that were kept from an iteration that has ended" in result.stderr
        assert "have different parts, [2, 2] and [1, 0] samples" in result.stderr
        assert "fix: iterate over the prepared loader in every epoch" in result.stderr


TAKERS = {
    "the tutorial's, before es.prepare": (
        "register(step); es.prepare(model)",
        "SGD.step() inside backward, in a hook, on parameters of model 'model'",
    ),
    "prepared, after es.prepare": (
        "es.prepare(model, *optimizers.values()); register(step)",
        "SGD.step() inside backward, in a hook, on parameters of model 'model'",
    ),
    "no optimizer, on one rank": (
        "if es.rank() == 1: register(descend)\nes.prepare(model)",
        "was gone when backward ended: a hook of yours took it before the ranks had exchanged it",
    ),
}


@pytest.mark.parametrize("name", TAKERS)
def test_steps_inside_backward_are_refused_on_all_ranks(run_ranks: Callable[..., list[Any]], name: str) -> None:
    code, words = TAKERS[name]
    head = """
import torch
from torch import nn
import evenstep as es

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

def descend(p):
    p.data.add_(p.grad, alpha=-0.1)
    p.grad = None

def register(hook):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

"""
    tail = "\nmodel(torch.full((3, 2), 1.0 + es.rank())).mean().backward()\n"
    for result in run_ranks(head + code + tail, check=False):
        assert result.returncode != 0
        assert words in result.stderr
        assert "fix: call optimizer.step() after backward" in result.stderr


@pytest.mark.parametrize("moves", [False, True])
def test_a_batch_fetched_ahead_has_its_own_weight_or_is_refused(
    run_ranks: Callable[..., list[Any]], moves: bool
) -> None:
    # from the third batch on the shares are others: the first backward with a batch of these ahead must not pass
    code = f"""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    data = TensorDataset(torch.randn(60, 2))
    model = es.prepare(nn.Linear(2, 1))
    loader = es.prepare(DataLoader(data, batch_size=12), shares=lambda n, b: [9, 3] if {moves} and n > 1 else [6, 6])
    batches = iter(loader)
    (ahead,) = next(batches)
    for done in range(4):
        x, (ahead,) = ahead, next(batches)
        try:
            model(x).mean().backward()
        except es.EvenstepError as error:
            assert done == 1 and "two batches came before one backward" in str(error), (done, error)
            print("refused")
            break
    """
    for result in run_ranks(code):
        assert ("refused" in result.stdout) == moves, result


def test_gradients_set_by_hand_are_refused_until_they_are_exchanged(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(2, 1)
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def set_gradients():
        for p, gradient in zip(model.parameters(), torch.autograd.grad(model(torch.ones(3, 2)).mean(), model.parameters())):
            p.grad = gradient * (es.rank() + 1)

    def refused():
        try:
            optimizer.step()
        except es.EvenstepError as error:
            return "parameter 'weight' of model 'model'" in str(error) and "es.exchange_gradients()" in str(error)

    set_gradients()
    assert refused()
    es.exchange_gradients()
    assert model.weight.grad.tolist() == [[1.5, 1.5]], model.weight.grad
    optimizer.step()
    optimizer.step()  # once more with the same: whole already
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as torch.distributed.checkpoint does, for the optimizer to make its state
    optimizer.step()
    set_gradients()
    assert refused()
    optimizer.zero_grad()
    optimizer.step()
    model(torch.ones(3, 2)).mean().backward()
    model.weight.grad = model.weight.grad.sign()  # gradients that backward made, changed
    optimizer.step()

    later = nn.Linear(2, 1)
    es.prepare(later)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(later.parameters())})
    for p in later.parameters():
        p.grad = torch.full_like(p, es.rank() + 1)
    try:
        optimizer.step()  # whose last step was before this model came
        raise SystemExit("not refused")
    except es.EvenstepError as error:
        assert "parameter 'weight' of model 'model_1'" in str(error), error
    """
    run_ranks(code)


def test_gradients_set_by_hand_where_earlier_ones_were_kept(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(2, 1)
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):  # found kept, each gets its gradients as memory of its own
        model(torch.ones(3, 2)).sum().backward()
        kept = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
    one = torch.full((1,), es.rank() + 1.0)
    model.weight.grad = one.expand(1, 2)  # as of a sum; and the same memory for both
    model.bias.grad = one
    es.exchange_gradients()
    assert model.weight.grad.tolist() == [[1.5, 1.5]] and model.bias.grad.tolist() == [1.5], model.weight.grad
    assert one.tolist() == [es.rank() + 1.0] and kept[0].tolist() == [[3.0, 3.0]]
    optimizer.step()
    optimizer.step()  # once more with the same, which lie outside the engine
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, es.rank() + 1)
    try:
        optimizer.step()
        raise SystemExit("not refused")
    except es.EvenstepError as error:
        assert "parameter 'weight' of model 'model'" in str(error) and "differ between them" in str(error), error
    """
    run_ranks(code)


def test_whole_gradients_that_the_script_replaced_are_stepped_on_again(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 1)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    encoder, decoder, optimizer = es.prepare(encoder, decoder, torch.optim.SGD(parameters, lr=0.1))
    x = torch.ones(3, 2) + es.rank()

    def halve():
        for p in parameters:
            p.grad = p.grad * 0.5

    decoder(encoder(x)).mean().backward()
    halve()
    optimizer.step()
    for _ in range(2):
        halve()
        optimizer.step()
    decoder.zero_grad()
    decoder(encoder(x).detach()).mean().backward()  # the encoder's gradient is still there
    optimizer.step()
    for p in parameters:  # as sums over other numbers of threads
        p.grad = p.grad * (1 + 1e-6 * es.rank())
    optimizer.step()

    optimizer.zero_grad()
    loss = decoder(encoder(x)).mean()
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters, create_graph=True)):
        p.grad = gradient
    try:
        optimizer.step()
        raise SystemExit("not refused")
    except es.EvenstepError as error:
        assert "of model 'model'" in str(error), error
    decoder(encoder(x)).mean().backward()  # all ranks are in step still
    optimizer.step()
    """
    run_ranks(code)


def test_a_step_after_backward_looks_at_no_gradient() -> None:
    class Round:
        name, unsynchronised, rounds = "model", False, 1

        def has_any(self, ids: set[int]) -> bool:
            raise AssertionError("looked at parameters")

    class Groups(list[Any]):
        looked_at = 0

        def __iter__(self) -> Any:
            self.looked_at += 1
            return super().__iter__()

    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    checks, sync = StepChecks(), Round()
    checks.watch(optimizer)
    group = optimizer.param_groups[0]
    group["params"] = Groups(group["params"])
    checks.check(optimizer, [], [sync])  # type: ignore[list-item]
    assert group["params"].looked_at == 0
    with pytest.raises(AssertionError, match="looked at parameters"):
        checks.check(optimizer, [], [sync])  # type: ignore[list-item]


def test_an_optimizer_that_was_not_prepared_and_a_hook_on_a_parameter_are_named(
    run_ranks: Callable[..., list[Any]],
) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = es.prepare(nn.Linear(2, 1))
    model.weight.register_hook(lambda gradient: None)  # a logger's
    model.bias.register_hook(lambda gradient: gradient.clamp_(-1, 1))
    forgotten = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 2)).mean().backward()
        forgotten.step()
    prepared = es.prepare(torch.optim.AdamW(model.parameters()))
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()

    class Outer(torch.optim.SGD):  # as SAM
        def step(self, closure=None):
            inner.step()

    inner = torch.optim.Adagrad(model.parameters())
    outer = es.prepare(Outer(model.parameters(), lr=0.1))
    for _ in range(2):
        outer.step()
    torch.optim.RMSprop(model.parameters()).step()  # of a later stage
    if es.rank():
        inner.step()
    """
    for rank, result in enumerate(run_ranks(code)):
        assert result.stderr.count("'bias' of model 'model' has a hook (register_hook) that") == (rank == 0)
        assert result.stderr.count("register_hook") == (rank == 0)
        told = ["SGD", "RMSprop", *["Adagrad"] * rank]
        assert re.findall(r"the (\w+) was not given to es.prepare, so its steps do not count", result.stderr) == told
