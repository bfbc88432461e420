"""Ranks without samples: no backward where nothing would come of it, and what is said of ranks that are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.idle_backward import IdleBackward
from evenstep.left_out import Exchange, before_start, unknown_before_start
from evenstep.shares import Shares

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(0)
kind = sys.argv[1]
passes = [0]


class Counted(torch.autograd.Function):  # as a library's function that may meet the other ranks
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        passes[0] += 1
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        norm = [nn.BatchNorm1d(8)] if kind == "norm" else []
        self.body = nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 1)).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, x):
        x = self.body(x)
        return Counted.apply(x) if kind == "function" else x


original = torch.autograd.backward
calls = [0]


def counting(*arguments, **options):
    calls[0] += 1
    return original(*arguments, **options)


torch.autograd.backward = counting
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(96, 4, dtype=torch.float64), torch.randn(96, 1, dtype=torch.float64))


def shares(number, batch):  # rank 1 has samples in every fourth step alone
    return [batch, 0] if number % 4 else [batch - 3, 3]


alone = "alone" in sys.argv
set_to_none = "zeros" not in sys.argv
loader = DataLoader(data, batch_size=8)
if es.world_size() > 1:
    model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares)
if kind == "hook" and es.rank() == 1:
    model.body[0].weight.register_hook(lambda gradient: passes.__setitem__(0, passes[0] + 1))
for x, y in loader:
    if kind == "input":
        x.requires_grad_()
    optimizer.zero_grad(set_to_none=set_to_none)
    loss = nn.functional.mse_loss(model(x), y)
    if kind == "retain":
        loss.backward(retain_graph=True)
    else:
        loss.backward()
    if kind == "input":
        assert x.grad is not None
    assert model.unused.weight.grad is None
    optimizer.step()
names = [p.double() for p in model.parameters()] + [b.double() for b in model.buffers()]
print(calls[0], passes[0], [round(one.sum().item(), 12) for one in names])
"""

STEPS, WITH = 12, 3


def ran(run_ranks: Callable[..., list[Any]], ranks: int, *args: str) -> tuple[list[list[str]], list[float]]:
    """What each rank counted, and what became of the model, the same on all."""
    out = [rank.stdout.split(maxsplit=2) for rank in run_ranks(SCRIPT, ranks=ranks, args=list(args))]
    assert len({one[2] for one in out}) == 1, out
    return [one[:2] for one in out], json.loads(out[0][2])


_alone: dict[bool, list[float]] = {}


def on_one_device(run_ranks: Callable[..., list[Any]], kind: str) -> list[float]:
    norm = kind == "norm"
    if norm not in _alone:
        _alone[norm] = ran(run_ranks, 1, "norm" if norm else "plain")[1]
    return _alone[norm]


@pytest.mark.parametrize("zeros", [[], pytest.param(["zeros"], marks=pytest.mark.more)])
def test_a_rank_without_samples_runs_no_backward(run_ranks: Callable[..., list[Any]], zeros: list[str]) -> None:
    (first, second), model = ran(run_ranks, 2, "plain", *zeros)
    assert (first[0], second[0]) == (str(STEPS), str(WITH))
    assert model == pytest.approx(on_one_device(run_ranks, "plain"), abs=1e-9)


@pytest.mark.parametrize(
    "kind", ["norm", "function", "input", *(pytest.param(one, marks=pytest.mark.more) for one in ("hook", "retain"))]
)
def test_a_backward_of_which_something_else_comes_is_run(run_ranks: Callable[..., list[Any]], kind: str) -> None:
    (first, second), model = ran(run_ranks, 2, kind)
    assert (first[0], second[0]) == (str(STEPS), str(STEPS))
    assert second[1] == (str(STEPS) if kind in ("function", "hook") else "0")
    assert model == pytest.approx(on_one_device(run_ranks, kind), abs=1e-8)


class Sync:
    def __init__(self, *models: nn.Module) -> None:
        self.ids = {id(p) for model in models for p in model.parameters()}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def parameters_of(losses: object, *models: nn.Module) -> set[int] | None:
    syncs: Any = [Sync(*models)]
    return IdleBackward().parameters_of(losses, syncs)


def test_what_a_pass_would_do_is_seen_in_its_graph() -> None:
    model, other = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 1)), nn.Linear(3, 1)
    x = torch.randn(2, 3)
    everything = {id(p) for p in model.parameters()}
    assert parameters_of(model(x).mean(), model) == everything
    assert parameters_of([model(x).mean(), model[0](x).sum()], model) == everything
    assert parameters_of(model[0](x).sum(), model) == {id(p) for p in model[0].parameters()}
    assert parameters_of((model(x) + other(x)).mean(), model) is None  # another's gradients
    assert parameters_of(torch.ones(1, requires_grad=True), model) is None
    assert parameters_of(None, model) is None
    assert parameters_of({"loss": model(x).mean()}, model) is None
    handle = model[0].weight.register_hook(lambda gradient: None)
    assert parameters_of(model(x).mean(), model) is None
    handle.remove()
    assert parameters_of(model(x).mean(), model) == everything
    assert parameters_of(Own.apply(model(x)).mean(), model) is None  # as reentrant checkpointing, which runs forward


def test_who_is_left_out_is_said_once_with_gain_and_way_back() -> None:
    shares = Shares("hybrid", 3, 12)
    told = []

    def train(steps: int, slower: float) -> None:
        for _ in range(steps):
            split = shares.draw(12)
            timings = []
            for rank, share in enumerate(split):
                seconds = 0.001 + 0.001 * max(1, share)
                timings.append((share, seconds * (slower if rank == 2 else 1.0) * (1.0 if share else 0.3)))
            shares.observe(timings, 0.1, [2] if split[2] == 0 else [])
            news = shares.left_out(timings)
            if news is not None:
                told.append(news)

    train(200, 12.0)
    assert shares.draw(12)[2] == 0
    assert len(told) == 1 and told[0][0] == 1, told
    words = told[0][1]
    assert words.startswith("rank 2 has no samples: 7.2 ms a step instead of ") and len(words) < 128, words
    assert words.endswith("; some again once it needs less than 7.2 for one"), words
    train(60, 1.0)
    assert told[1:] == [(0, "rank 2 has samples again")], told


def test_nothing_is_said_where_a_policy_or_a_cap_gives_no_samples() -> None:
    for shares in (Shares("proportional", 2, 8, speeds=[1.0, 1e-6]), Shares("hybrid", 2, 8, caps=[None, 0])):
        for _ in range(50):
            split = shares.draw(8)
            assert split == [8, 0]
            timings = [(8, 0.01), (0, 0.02)]
            shares.observe(timings, 0.1)
            assert shares.left_out(timings) is None


# -- before the first step --


def test_what_a_profile_says_of_a_rank_before_it_starts() -> None:
    said = before_start([64, 0], [100.0, 1.0], ["cuda:0", "cpu:0"], ["a", "a"])
    assert said == (
        "rank 1 (cpu:0) gets no samples: by the profile it would need 1.56 times as long for one as the others for all 64; "
        "--devices cuda:0 leaves it out"
    )
    assert before_start([48, 16], [3.0, 1.0], ["cuda:0", "cpu:0"], ["a", "a"]) == ""
    assert before_start([64, 0], [100.0, 50.0], ["cuda:0", "cpu:0"], ["a", "a"]) == ""  # a cap, not its speed
    two = before_start([0, 64, 0], [1.0, 100.0, 1.0], ["cpu:0", "cuda:0", "cpu:1"], ["a", "a", "a"]).splitlines()
    assert len(two) == 2 and all(line.endswith("--devices cuda:0 leaves them out") for line in two)
    assert "--devices" not in before_start([64, 0], [100.0, 1.0], ["cuda:0", "cpu:0"], ["a", "b"])
    many = before_start([64, *[0] * 5], [100.0, *[1.0] * 5], [""] * 6, ["a"] * 6).splitlines()
    assert len(many) == 4 and many[-1] == "the same is true of 2 more ranks" and "rank 3 gets no" in many[2]


def test_what_a_profile_does_not_count_is_said_of_ranks_that_save_little() -> None:
    said = before_start([60, 4], [15.0, 1.0], ["cuda:0", "cpu:0"], ["a", "a"])
    assert said == (
        "rank 1 (cpu:0) shortens a step by 6.2% by the profile, which counts neither the exchange nor what a step costs whatever "
        "its samples: `evenstep plan` measures whether it is shorter without it"
    )
    assert before_start([54, 10], [5.4, 1.0], ["cuda:0", "cpu:0"], ["a", "a"]) == ""  # 16%
    many = before_start([116, *[1] * 12], [116.0, *[1.0] * 12], [""] * 13, ["a"] * 13)
    assert many.startswith("rank 1 and 11 more shorten a step by 9.4% by") and many.endswith("shorter without them")
    assert before_start([64, *[4] * 16], [16.0, *[1.0] * 16], [""] * 17, ["a"] * 17) == ""  # together they are as fast
    both = before_start([31, 1, 0], [31.0, 1.0, 0.1], ["cuda:0", "cpu:0", "cpu:1"], ["a"] * 3).splitlines()
    assert [line[:30] for line in both] == ["rank 2 (cpu:1) gets no samples", "rank 1 (cpu:0) shortens a step"]


def test_what_the_exchange_takes_is_counted_before_the_start() -> None:
    """Alone the other rank would exchange nothing: how long a step must be is computed, however much is saved."""
    place = (["cuda:0", "cpu:0"], ["a", "a"])

    def exchange() -> Exchange:
        return Exchange(51_000_000, 0.012)

    said = before_start([60, 4], [15.0, 1.0], *place, exchange)
    assert said == (
        "rank 1 (cpu:0) shortens a step by 6.2% by the profile, which counts no exchange: with it 51 MB of gradients take 12 ms "
        "(measured now), so steps are shorter with it where one without it takes more than 192 ms, or less as far as backward "
        "hides the exchange; `evenstep plan` measures that"
    )
    assert "takes more than 72 ms" in before_start([50, 10], [5.0, 1.0], *place, exchange)  # 17% of a step
    three = before_start([62, 1, 1], [62.0, 1.0, 1.0], ["cuda:0", "cpu:0", "cpu:1"], ["a"] * 3, exchange)
    assert three.startswith("rank 1 (cpu:0) and 1 more shorten a step by 3.1% by") and "with them 51 MB" in three
    assert before_start([48, 16], [3.0, 1.0], *place, exchange) == ""  # a third of its speed is nothing to ask about
    gpus = before_start([30, 30, 4], [15.0, 15.0, 2.0], ["cuda:0", "cuda:1", "cpu:0"], ["a"] * 3, exchange)
    assert "neither the exchange" in gpus  # two that stay exchange, too
    asked = Shares("auto", 2, 64, [15.0, 1.0]).left_out_at_start(*place, exchange)
    assert asked == said


def test_the_exchange_is_measured_where_that_is_asked(run_ranks) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import evenstep as es
        model = torch.nn.Linear(1000, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(128, 1000)), batch_size=64)
        model, optimizer, loader = es.prepare(model, optimizer, loader)
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
        """
    first, second = run_ranks(script, env={"EVENSTEP_SPEEDS": "15,1"})
    said = re.search(r"rank 1 shortens .* with it 4 MB of gradients take (\S+) ms .* more than (\S+) ms", first.stderr)
    assert said is not None and float(said[2]) == pytest.approx(16 * float(said[1]), rel=0.02), first.stderr
    assert "shortens" not in second.stderr
    rounded = script.replace("optimizer, loader)\n", "optimizer, loader, compression='bf16')\n")
    said_of = run_ranks(rounded, env={"EVENSTEP_SPEEDS": "15,1"})[0].stderr
    assert "counts neither the exchange nor" in said_of and "measured now" not in said_of, said_of
    assert "shortens" not in run_ranks(script, env={"EVENSTEP_SPEEDS": "3,1"})[0].stderr


def test_without_a_profile_it_is_said_that_nobody_knows() -> None:
    said = unknown_before_start(["cuda:0", "cpu:0", "cpu:1"])
    assert said.startswith(
        "rank 1 (cpu:0) and 1 more beside other devices: whether steps are shorter with them shows in"
    )
    assert "`evenstep profile`" in said and "`evenstep plan`" in said
    for alike in (["cpu:0", "cpu:1"], ["cpu", "numa:0"], ["cuda:0", "cuda:1"], ["", ""], ["", "cpu:0"]):
        assert unknown_before_start(alike) == ""


def test_only_policies_that_begin_from_a_profile_say_so() -> None:
    place = (["cuda:0", "cpu:0"], ["a", "a"])
    for policy, says in (
        ("auto", True),
        ("hybrid", True),
        ("proportional", True),
        ("dynamic", False),
        ("equal", False),
    ):
        assert bool(Shares(policy, 2, 64, [100.0, 1.0]).left_out_at_start(*place)) == says, policy
    assert Shares("auto", 2, 64).left_out_at_start(*place) == unknown_before_start(place[0]) != ""
    assert not Shares("dynamic", 2, 64).left_out_at_start(*place)
    assert not Shares("auto", 2, 64, [100.0, 1.0], lambda number, batch: [batch, 0]).left_out_at_start(*place)


def test_rank_0_says_it_before_the_first_step(run_ranks: Callable[..., list[Any]]) -> None:
    script = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es
    loader = es.prepare(loader=DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=32))
    assert es.step() == 0
    """
    places = {0: {"EVENSTEP_DEVICE": "cuda:0"}, 1: {"EVENSTEP_DEVICE": "cpu:0"}}
    first, second = run_ranks(script, env={"EVENSTEP_SPEEDS": "50,1"}, rank_env=places)
    assert first.stderr.count("evenstep: rank 1 (cpu:0) gets no samples: by the profile it would need 1.56 times") == 1
    assert "gets no samples" not in second.stderr
