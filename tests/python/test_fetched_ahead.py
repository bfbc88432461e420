"""Which weight a batch has in a script that fetches the next one before backward, and what is no such script."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep._core import EvenstepError
from evenstep.fetched import FetchedBatches
from evenstep.loader import BatchPlan
from evenstep.pass_weight import PassWeight


@pytest.mark.parametrize("kept", ["the loader's tensors", "copies"])
def test_the_last_batch_of_an_epoch_has_its_own_weight(run_ranks: Callable[..., list[Any]], kept: str) -> None:
    code = f"""
    import copy
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(36, 2, dtype=torch.float64))
    model = es.prepare(nn.Linear(2, 1).double())
    loader = es.prepare(DataLoader(data, batch_size=12), shares=lambda n, b: [9, 3])
    one = copy.deepcopy(nn.Linear(2, 1).double())
    one.load_state_dict(model.state_dict())

    def fetch(batches):
        batch = next(batches, None)
        return batch if batch is None or {kept!r} == "the loader's tensors" else [x.clone() for x in batch]

    def gradient_of(network, x):
        network.zero_grad()
        network(x).square().mean().backward()
        return network.weight.grad.clone()

    for _ in range(2):
        batches = iter(loader)
        batch, number = fetch(batches), 0
        while batch is not None:
            following = fetch(batches)
            whole = gradient_of(one, data.tensors[0][12 * number : 12 * (number + 1)])
            ours = gradient_of(model, batch[0])
            assert torch.allclose(ours, whole, rtol=1e-12), (number, ours, whole)
            batch, number = following, number + 1
        assert number == 3
    # no loader's batch: equal parts
    ours = gradient_of(model, torch.full((1, 2), es.rank() + 1.0, dtype=torch.float64))
    parts = [gradient_of(one, torch.full((1, 2), r + 1.0, dtype=torch.float64)) for r in range(2)]
    assert {kept!r} == "copies" or torch.allclose(ours, sum(parts) / 2, rtol=1e-12), (ours, parts)
    """
    run_ranks(code)


class Loop:
    """What Steps tells FetchedBatches of a script's loop. Shares are others from the third batch on."""

    def __init__(self) -> None:
        self.fetched, self.loader, self.number = FetchedBatches(), object(), 0

    def fetch(self, batch: Any = None) -> Any:
        shares = [6, 6] if self.number < 2 else [9, 3]
        batch = [torch.zeros(1)] if batch is None else batch
        plan = BatchPlan(self.loader, 0, self.number, 12, shares, shares[0], 0, 0.0)  # type: ignore[arg-type]
        self.number += 1
        self.fetched.add(plan, batch)
        return batch

    def backward(self) -> None:
        self.fetched.check_one_weight()
        self.fetched.used()


@pytest.mark.parametrize("backwards", [1, 2])
def test_one_fetched_ahead_is_watched_whatever_backwards_a_batch_has(backwards: int) -> None:
    loop = Loop()
    batch, ahead = loop.fetch(), loop.fetch()
    for _ in range(backwards):
        loop.backward()
    batch, ahead = ahead, loop.fetch()
    with pytest.raises(EvenstepError, match="two batches came before one backward"):
        loop.backward()
    assert batch and ahead


@pytest.mark.parametrize(
    ("trained", "kept", "comes", "told"),
    [(6, 6, False, True), (6, 1, False, False), (2, 2, False, False), (6, 6, True, False)],
    ids=["itertools.cycle", "the last one, in the loop's variables", "equal parts", "another batch is at work"],
)
def test_batches_trained_on_again_after_their_loop_are_told(trained: int, kept: int, comes: bool, told: bool) -> None:
    loop = Loop()
    batches = []
    for _ in range(trained):
        batches.append(loop.fetch())
        loop.backward()
    loop.fetched.end(loop.loader)  # type: ignore[arg-type]
    del batches[: trained - kept]
    batches += [loop.fetch()] if comes else []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        loop.fetched.check_one_weight(tells=False)
        assert not heard
        for _ in range(2):
            loop.fetched.check_one_weight(tells=True)
    words = [str(one.message) for one in heard]
    assert len(words) == told and all("unequally (9 + 3 of 12)" in one for one in words), words


NEXT_IN_BETWEEN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

kept, loaders = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 2, dtype=torch.float64))
network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
one = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
one.load_state_dict(network.state_dict())
model, optimizer = es.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
shares = lambda number, batch: [[9, 3], [2, 10], [0, 12]][number % 3]
batches = [iter(es.prepare(DataLoader(data, batch_size=12), shares=shares)) for _ in range(loaders)]
plain = torch.optim.SGD(one.parameters(), lr=0.1)

def fetch(number):
    batch = next(batches[number % loaders], None)
    return batch if batch is None or kept == "tensors" else [x.clone() for x in batch]

number, batch = 0, fetch(0)
while batch is not None and number < 8:
    for part in range(2):  # two backwards a step
        loss = model(batch[0]).square().mean() / 2
        batch = fetch(number + 1)
        (loss * 4.0).backward()  # as a GradScaler does
        whole = data.tensors[0][12 * (number // loaders) : 12 * (number // loaders + 1)]
        wanted = torch.autograd.grad(one(whole).square().mean() * 2, one.parameters())
        for parameter, more in zip(one.parameters(), wanted):
            parameter.grad = more if parameter.grad is None else parameter.grad + more
        number += 1
    for ours, whole in zip(model.parameters(), one.parameters()):
        assert torch.allclose(ours.grad, whole.grad, rtol=1e-11), (number, ours.grad, whole.grad)
    for each in (optimizer, plain):
        each.step()
        each.zero_grad()
assert number == 8
if loaders == 1:  # whose iteration has ended; no loader's batch: equal parts
    parts = [torch.full((1, 2), rank + 1.0, dtype=torch.float64) for rank in range(2)]
    model(parts[es.rank()]).square().mean().backward()
    wanted = torch.autograd.grad(sum(one(x).square().mean() for x in parts) / 2, one.parameters())
    assert all(torch.allclose(p.grad, whole, rtol=1e-11) for p, whole in zip(model.parameters(), wanted))
"""


@pytest.mark.parametrize("loaders", ["1", "2"])
@pytest.mark.parametrize("kept", ["tensors", "copies"])
def test_one_that_is_fetched_between_forward_and_backward_waits_for_its_own(
    run_ranks: Callable[..., list[Any]], kept: str, loaders: str
) -> None:
    """`loss = model(x); x = next(batches); loss.backward()`: the shares are others in each batch."""
    run_ranks(NEXT_IN_BETWEEN, args=[kept, loaders])


def test_losses_of_several_batches_have_no_one_forward() -> None:
    weight = torch.ones(1, requires_grad=True)
    loop = Loop()
    losses = []
    for _ in range(2):
        (x,) = loop.fetch()
        losses.append((weight * (x + 1)).square().mean())
    assert loop.fetched.set_aside(losses[0] + losses[1]) is None
    assert loop.fetched.set_aside(losses[1]) is None  # the last one
    first = loop.fetched.set_aside([losses[0]])
    assert first is not None and first.batch == 0
    loop.fetched.used()
    assert loop.fetched.set_aside(2 * losses[1]) is None and not loop.fetched.unlike


def test_what_a_thread_of_the_script_fetches_says_nothing_of_forward() -> None:
    weight = torch.ones(1, requires_grad=True)
    loop = Loop()
    loop.fetch()
    loss = (weight * 2).square().mean()
    thread = threading.Thread(target=loop.fetch)
    thread.start()
    thread.join()
    assert loop.fetched.set_aside(loss) is None


@pytest.mark.parametrize("copies", [False, True])
def test_batches_that_are_skipped_are_not_trained_on(copies: bool) -> None:
    skips = Loop()
    held = [skips.fetch()]
    for _ in range(6):
        held = [None if copies else skips.fetch()]
        if copies:
            skips.fetch()
        skips.backward()
    assert held


def test_all_that_were_fetched_ahead_are_watched() -> None:
    loop = Loop()
    queue = [loop.fetch(), loop.fetch()]
    loop.number = 1
    queue.append(loop.fetch())
    loop.backward()
    queue.pop(0)
    loop.number = 2
    queue.append(loop.fetch())
    with pytest.raises(EvenstepError, match="two batches came before one backward"):
        loop.backward()


def test_what_is_no_fetching_ahead_goes_on_as_the_shares_move() -> None:
    kept = [[torch.zeros(1)] for _ in range(8)]  # the data set itself holds them
    skipped = Loop()
    batch = skipped.fetch(kept[0])
    for number in range(1, 8):
        batch = skipped.fetch(kept[number])
        skipped.backward()

    words = Loop()
    words.fetch(["no tensor"])
    for _ in range(4):
        words.fetch(["no tensor"])
        words.backward()

    pairs, history = Loop(), []
    for _ in range(4):
        batch, other = pairs.fetch(), pairs.fetch()
        pairs.backward()
        history.append(other)
    assert batch


def idle_loop(*samples: int) -> tuple[Loop, Callable[[], Any]]:
    """A loop whose batches have so many samples on this rank, and what fetches the next one."""
    loop, waiting = Loop(), list(samples)

    def fetch() -> Any:
        one = waiting.pop(0)
        plan = BatchPlan(loop.loader, 0, loop.number, 12, [one, 12 - one], one, 0, 0.0)  # type: ignore[arg-type]
        loop.number += 1
        batch = [torch.zeros(1)]
        loop.fetched.add(plan, batch)
        return batch

    return loop, fetch


def test_dummy_samples_are_known_where_each_batch_has_its_backward() -> None:
    loop, fetch = idle_loop(3, 0, 0, 3)
    for idle in (False, True, True, False):
        batch = fetch()
        for _ in range(2):  # the second of two losses, too
            assert loop.fetched.all_idle == idle
            loop.fetched.used()
        del batch


def test_a_batch_with_samples_is_never_taken_for_the_dummy_one_that_came_after_it() -> None:
    together, fetch = idle_loop(3, 3, 0, 0, 0, 0)
    for idle in (False, True):
        batches = [fetch() for _ in range(3)]
        for _ in batches:
            assert together.fetched.all_idle == idle
            together.fetched.used()
        del batches

    for copies in (False, True):
        ahead, fetch = idle_loop(3, 3, 3, 0, 0)
        held = [fetch()]
        for _ in range(3):
            held.append(fetch())
            if copies:
                held = [None, None]
            assert not ahead.fetched.all_idle
            ahead.fetched.used()
            held.pop(0)

    kept, fetch = idle_loop(3, 0)
    batches = [fetch(), fetch()]
    kept.fetched.end(kept.loader)  # type: ignore[arg-type]
    assert batches and not kept.fetched.all_idle


def test_set_weight_says_where_it_cannot_tell_dummy_samples() -> None:
    loop, fetch = idle_loop(3, 0, 3, 3)
    steps = SimpleNamespace(
        is_idle=False, blocking=contextlib.nullcontext, group=SimpleNamespace(sum_=lambda values: values.mul_(2))
    )
    weight = PassWeight(steps)  # type: ignore[arg-type]
    batches = [fetch(), fetch()]
    steps.may_be_idle = loop.fetched.unlike
    with pytest.warns(UserWarning, match="a dummy sample in place of some of them"):
        assert weight.give(5.0) == 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weight.give(0.0) == 0.0  # who gives that has looked
        loop.fetched.used()
        batches = [fetch(), fetch()]
        steps.may_be_idle = loop.fetched.unlike
        assert batches and weight.give(5.0) == 5.0
