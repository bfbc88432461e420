"""es.optim: what torch.optim gives, with one copy of the states a host."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import pathlib
import re
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import generation_cases
import pytest
import torch
from run_jobs import Run
from torch import nn

import evenstep as es
from evenstep import EvenstepError, _core, optim
from evenstep.errors import error_of

CASES = pathlib.Path(__file__).parent / "optim_cases.py"
DECOUPLES = issubclass(torch.optim.AdamW, torch.optim.Adam)  # since torch 2.7
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": torch.tensor(0.02, dtype=torch.float64), "amsgrad": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-3}),
    ("Adam", {"maximize": True}),
    *([("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True})] if DECOUPLES else []),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
]
SHAPES = ((3, 5), (20000,), (4, 3, 8, 8), (0,), (), (7, 1))


def make(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """One of them in the channels' order, the last one with gaps."""
    torch.manual_seed(1)
    values = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]
    values[2] = values[2].to(memory_format=torch.channels_last)
    values[5] = torch.cat([values[5], values[5]], 1)[:, :1]
    return [nn.Parameter(value) for value in values]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """The third has none in the second step; the second's are laid out otherwise."""
    source = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        values = torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = None if (number, step) == (2, 2) else values


def test_what_this_torchs_adam_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert es.optim._DECOUPLES == DECOUPLES
    monkeypatch.setattr(es.optim, "_DECOUPLES", False)
    with pytest.raises(EvenstepError, match=r"has no Adam with decoupled_weight_decay\n  fix: use es.optim.AdamW"):
        es.optim.Adam(make(), decoupled_weight_decay=True)


def run(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, first: int = 0, last: int = 12) -> None:
    for step in range(first, last):
        give_gradients(parameters, step)
        optimizer.step()


def close(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("number", range(len(OPTIONS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_is_torchs(number: int, dtype: torch.dtype) -> None:
    name, options = OPTIONS[number]
    ours, theirs = make(dtype), make(dtype)
    mine = getattr(es.optim, name)(ours, **options)
    torchs = getattr(torch.optim, name)(theirs, **options)
    assert isinstance(mine, type(torchs))
    run(ours, mine)
    run(theirs, torchs)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    close(ours, theirs, tolerance)
    mine_state, torchs_state = mine.state_dict()["state"], torchs.state_dict()["state"]
    assert mine_state.keys() == torchs_state.keys()
    for index, state in torchs_state.items():
        assert {key for key, value in state.items() if value is not None} == mine_state[index].keys()
        close(
            [mine_state[index][key] for key in mine_state[index]], [state[key] for key in mine_state[index]], tolerance
        )


def test_short_floats_step_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ours = make(dtype)
        masters = [nn.Parameter(p.detach().float()) for p in ours]
        mine, torchs = es.optim.AdamW(ours, lr=1e-4), torch.optim.AdamW(masters, lr=1e-4)
        before = [p.detach().clone() for p in ours]
        for step in range(12):
            give_gradients(ours, step)
            for p, master in zip(ours, masters):
                master.grad = None if p.grad is None else p.grad.float()
            mine.step()
            torchs.step()
        close([mine.state[p]["master"] for p in ours], masters, 2e-6)
        for p, old in zip(ours, before):
            assert torch.equal(p.detach(), mine.state[p]["master"].to(dtype))
            assert p.numel() < 10 or not torch.equal(p.detach(), old)
        with torch.no_grad():
            ours[1].fill_(300.0)  # the script's own hand: it goes on from there
        ours[1].grad = torch.zeros_like(ours[1])
        mine.param_groups[0]["weight_decay"], mine.param_groups[0]["lr"] = 0.0, 0.0
        mine.step()
        assert (mine.state[ours[1]]["master"] == 300.0).all() and (ours[1] == 300.0).all()
        other = es.optim.AdamW(make(dtype), lr=1e-4)
        other.load_state_dict(mine.state_dict())
        loaded = [other.state[p] for p in other.param_groups[0]["params"]]
        assert all(state["exp_avg"].dtype == state["master"].dtype == torch.float32 for state in loaded)


def test_states_go_to_torch_and_back() -> None:
    ours, theirs = make(), make()
    mine, torchs = es.optim.Adam(ours, amsgrad=True), torch.optim.Adam(theirs, amsgrad=True)
    run(ours, mine, 0, 4)
    run(theirs, torchs, 0, 4)
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
    torchs.load_state_dict(torch.load(file))
    run(ours, mine, 4, 8)
    run(theirs, torchs, 4, 8)
    close(ours, theirs, 2e-6)
    mine.load_state_dict({"state": {}, "param_groups": mine.state_dict()["param_groups"]})  # from the beginning
    torchs.load_state_dict({"state": {}, "param_groups": torchs.state_dict()["param_groups"]})
    run(ours, mine, 8, 10)
    run(theirs, torchs, 8, 10)
    close(ours, theirs, 2e-6)


def test_two_optimizers_with_one_loaded_state_go_their_own_ways() -> None:
    first, second = make(), make()
    one, other = es.optim.SGD(first, 0.1, momentum=0.9), es.optim.SGD(second, 0.1, momentum=0.9)
    run(first, one, 0, 3)
    other.load_state_dict(one.state_dict())
    kept = one.state[first[0]]["momentum_buffer"].clone()
    run(second, other, 3, 5)
    assert torch.equal(one.state[first[0]]["momentum_buffer"], kept)
    copied = copy.deepcopy(one)
    run(copied.param_groups[0]["params"], copied, 3, 5)
    assert torch.equal(one.state[first[0]]["momentum_buffer"], kept)
    assert not torch.equal(copied.state[copied.param_groups[0]["params"][0]]["momentum_buffer"], kept)


def test_groups_schedulers_closures_and_scalers() -> None:
    results = []
    for module in (es.optim, torch.optim):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))
        optimizer: Any = module.AdamW([{"params": model[0].parameters()}, {"params": [], "lr": 0.5}], lr=0.01)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=20)  # betas too
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02, "betas": (0.8, 0.9)})
                rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            x = torch.randn(5, 4)

            def loss(x: torch.Tensor = x, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                out: torch.Tensor = model(x).square().mean()
                out.backward()
                return out

            if step % 2:
                assert optimizer.step(loss).item() > 0
            else:
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            rates.step()
        results.append([p.detach() for p in model.parameters()])
    close(*results, 2e-6)


def test_hooks_run_once_and_versions_grow() -> None:
    torch.optim.AdamW(make())  # torch patches the step of the classes it has seen
    for device in ("ours", "torch's"):
        parameters = make() if device == "ours" else [nn.Parameter(torch.randn(3, dtype=torch.complex64))]
        optimizer = es.optim.AdamW(parameters)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        before = parameters[0]._version
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert calls == ["before", "after"] and parameters[0]._version > before
    x = parameters[0] * parameters[0]
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.abs().sum().backward()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="foreach"):
        es.optim.AdamW(make(), foreach=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="learning rate"):
        es.optim.SGD(make(), lr=-1.0)
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = es.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(EvenstepError, match="sparse=False"):
        optimizer.step()
    parameters = make()
    optimizer = es.optim.SGD(parameters, lr=float("inf"))
    give_gradients(parameters, 0)
    with pytest.raises(EvenstepError, match="finite"):
        optimizer.step()


def cases_of(ranks: list[Any]) -> list[dict[str, Any]]:
    told = [dict(json.loads(line) for line in one.stdout.splitlines() if line.startswith("[")) for one in ranks]
    for name in told[0]:
        assert len({one[name]["digest"] for one in told}) == 1 or name == "local", name  # equal to the bit
    return told


def test_on_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    told = cases_of(run_ranks(CASES, ranks=3, env={"EVENSTEP_ON_NONFINITE": "skip"}))
    assert len(told[0]) == 7
    for name, case in told[1].items():
        assert case.get("apart", 0) < 1e-12 and case.get("one_memory", True), (name, case)
        assert case.get("shares", True) == (name != "local"), (name, case)
    assert told[0]["skip"]["steps"] == [7.0] and told[0]["back"]["same"]


def test_each_host_has_its_own(run_ranks: Callable[..., list[Any]]) -> None:
    """Three ranks, of which two are on one host: these share, and all are equal."""
    places = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(("here", "here", "there"))}
    told = cases_of(run_ranks(CASES, ranks=3, rank_env=places))
    for name, (rank, one) in itertools.product(told[0], enumerate(told)):
        assert one[name]["apart"] < 1e-12 and one[name]["shares"] == (rank < 2), (name, rank, one)


def test_a_lost_rank_ends_the_others_step(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(
        """
        import os, signal
        import torch
        import evenstep as es

        model = torch.nn.Linear(300, 300)
        optimizer = es.optim.AdamW(model.parameters())
        data = torch.utils.data.TensorDataset(torch.randn(64, 300), torch.randn(64, 300))
        model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if number == 3 and es.rank() == 1:
                optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            optimizer.step()
        """,
        ranks=2,
        check=False,
    )
    assert ranks[0].returncode != 0 and "rank 1" in ranks[0].stderr and "EVEN_ERR_PEER_LOST" in ranks[0].stderr


PREPARED = "model, optimizer, scheduler, loader = es.prepare(*make(), loader)\n"
# Of several pieces a step; dies also between a commit and its step, and somewhere in the step, or stands still there.
DYING_IN_STEPS = (
    PREPARED
    + """
import threading


def in_step(*_):
    here("stepping")
    for point, number in (("updating", 9), ("stopping", 19)):
        if f"{rank}@{point}:{es.step()}" in deaths:
            threading.Timer(0.0002, os.kill, (os.getpid(), number)).start()


optimizer.register_step_pre_hook(in_step)
es.print("shares at first" if optimizer.shares else "does not share")
"""
)


def recovering(source: str) -> str:
    """One of generation_cases, with es.optim."""
    assert source.count(PREPARED) == 1
    source = source.replace("torch.optim.Adam(", "es.optim.Adam(").replace(PREPARED, DYING_IN_STEPS)
    source = source.replace("Linear(6, 16)", "Linear(6, 9000)").replace("Linear(16, 2)", "Linear(9000, 2)")
    return source + 'print(f"rank {rank} shares at the end: {optimizer.shares}", flush=True)\n'


@pytest.mark.parametrize(
    ("ranks", "policy", "deaths", "waits", "left"),
    [
        (4, "shrink", "1@stepping:5,0@updating:9,2@stopping:12", "", 1),
        (2, "replace", "1@stepping:5", "6", 2),
        (3, "half committed", "", "", 2),  # one has made the step when the other hears that it stands
        pytest.param(3, "replace", "0@updating:4,2@committed:9", "5,10", 3, marks=pytest.mark.more),
        pytest.param(4, "shrink", "1@updating:5,2@updating:5,0@commit:7", "", 1, marks=pytest.mark.more),
        pytest.param(3, "shrink", "1@committed:0,0@applied:1", "", 1, marks=pytest.mark.more),
        pytest.param(3, "shrink", "1@stepping:1,0@meeting:1", "", 1, marks=pytest.mark.more),
    ],
)
def test_a_step_survives_those_that_end_in_it(
    run: Run, script: Callable[[str], str], ranks: int, policy: str, deaths: str, waits: str, left: int
) -> None:
    source = {"replace": generation_cases.REPLACED, "half committed": generation_cases.HALF_COMMITTED}.get(policy)
    policy = "replace" if policy == "replace" else "shrink"
    options = ("--no-pin", "--no-monitor", "--log-rank", "all", "--recovery", policy)
    source = source or generation_cases.PLAIN_LOOP
    result = run("-n", str(ranks), *options, script(recovering(source)), deaths, waits)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text and "shares at first" in text, text
    ends = re.findall(r"rank \d of (\d) at step 18: (\S+) apart, rate kept", text)
    assert len(ends) == left and all(int(size) == left and float(far) < 1e-12 for size, far in ends), text
    assert re.findall(r"shares at the end: (\S+)", text) == [str(left > 1)] * left, text


def test_a_closure_under_recovery_is_refused() -> None:
    optimizer = es.optim.SGD(make(), lr=0.1)
    optimizer.__dict__.update(_comm=SimpleNamespace(ranks=2), _survives=True)
    with pytest.raises(EvenstepError, match="without a closure"):
        optimizer.step(lambda: torch.tensor(0.0))


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 3)])
def test_copies_of_states_are_asked_for_where_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch, ranks: int, copies: int
) -> None:
    """All that are left on the host make one at the same time."""

    def lose() -> None:
        raise error_of("EVEN_ERR_PEER_LOST", "a rank was lost")

    asked: list[int] = []

    class Memory:
        def ask(self, size: int, what: str) -> None:
            asked.append(size)
            raise error_of(statuses[-1], f"{what} needs {size} bytes of memory, and 7 are free on host box")

    segment = _core.Comm.create_segment(1, 1 << 16)
    comm = _core.Comm(segment, 0, 1, 1 << 16)
    revoked: list[bool] = []
    proxy = SimpleNamespace(rank=0, ranks=ranks, barrier=lose, revoke=lambda: revoked.append(True))
    monkeypatch.setattr(_core, "Memory", Memory)
    store = optim._Store
    monkeypatch.setattr(optim, "_Store", lambda named, group, survives: store(named, group and comm, survives))
    optimizer = es.optim.Adam(make())
    statuses = ["EVEN_ERR_INPUT", "EVEN_ERR_MEMORY"]
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.__dict__.update(_comm=proxy, _survives=True)
    name = "a copy" if copies == 1 else f"{copies} copies"
    with pytest.raises(EvenstepError, match=rf"{name} of the optimizer's states needs \d+ bytes .* host box") as raised:
        optimizer.step()
    assert raised.value.status == "EVEN_ERR_MEMORY" and "fewer ranks" in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"]))
    statuses.pop()  # nobody can say
    optimizer.step()
    size = 2 * sum(p.numel() * max(4, p.element_size()) for p in before)
    assert asked == [copies * size] * 2
    # The next group's, beside the one that is there: the group's first rank asks.
    next_one = SimpleNamespace(rank=0, ranks=ranks, barrier=comm.barrier, revoke=proxy.revoke)
    optimizer.__dict__.update(_comm=next_one, _store=None)
    statuses.append("EVEN_ERR_MEMORY")
    with pytest.raises(EvenstepError, match=r"shared anew: a copy of the optimizer's states needs \d+ bytes") as raised:
        optimizer.step()
    assert raised.value.status == "EVEN_ERR_MEMORY" and revoked  # the others do not wait for its end
    next_one.rank = 1
    optimizer.step()
    assert asked == [copies * size] * 2 + [size]


def test_who_waits_in_a_step_for_one_that_stands_still_says_so() -> None:
    """It has taken a piece; who hears of it ends it."""
    segment = _core.Comm.create_segment(2, 1 << 16)
    count, pieces = 40000, 3
    other = os.fork()
    comm = _core.Comm(segment, 0 if other else 1, 2, 1 << 16)
    core = _core.Optim([(count, _core.DTYPE_F32, 1)], comm, True)
    if not other:
        words = torch.frombuffer(core.memory(), dtype=torch.int64, count=pieces)
        words[pieces - 1] = 1 << 17 | 1  # src/optim/pieces.c: in the first step, by rank 1
        comm.barrier()  # with which the step begins
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    told = []

    def waits() -> None:
        told.append(True)
        os.kill(other, signal.SIGKILL)
        raise KeyboardInterrupt  # as of a signal that comes meanwhile

    values, gradient = torch.zeros(count), torch.ones(count)
    rule = (_core.OPTIM_SGD, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, False, False, False)
    with pytest.raises(KeyboardInterrupt):
        core.step([rule], [values.data_ptr()], [gradient.data_ptr()], [0], [1], None, 0.0, waits)
    os.waitpid(other, 0)
    assert told and torch.equal(values, -gradient)  # the step is made
