"""Losses that are sums over samples, as of a VAE: es.prepare(reduction="sum") trains as one device does (lost ranks: test_recovery_exchange.py)."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hosts import TCP, needs_ucx
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

import evenstep as es
from evenstep.whole_sums import WholeSums

CASES = pathlib.Path(__file__).parent / "prepare_cases.py"
HEAD = """
import contextlib, json, sys
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(57, 6), torch.randn(57, 3))
ranks = es.world_size()


def shares(number, batch):
    if ranks == 1:
        return [batch]
    first = [0, batch, 1, batch - 1, batch // 3][number % 5]
    return [first, *[0] * (ranks - 2), batch - first]


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def squares(model, batch):
    return 0.1 * functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def vector(*models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def compare(ours, alone):
    print("APART", float((ours - alone).norm() / alone.norm()), flush=True)
"""


def apart(runs: list[Any]) -> list[float]:
    return [float(line.split()[1]) for run in runs for line in run.stdout.splitlines() if line.startswith("APART")]


def assert_exact(runs: list[Any], bound: float = 1e-12) -> None:
    found = apart(runs)
    assert len(found) >= len(runs) and max(found) < bound, found
    assert all("UserWarning" not in run.stderr for run in runs), [run.stderr for run in runs]


TWO = """
from evenstep.gradients import GradientSync

@contextlib.contextmanager
def twice():  # as after a gradient that changed once it had been handed over, on any rank
    real, GradientSync.refired = GradientSync.refired, True
    yield
    GradientSync.refired = real

def train(prepares):
    one, other = make(), make()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (one, other)]
    loader = DataLoader(data, batch_size=8)
    if prepares:
        es.prepare(one, optimizers[0], reduction="sum")
        es.prepare(other, optimizers[1])
        loader = es.prepare(loader, shares=shares)
    told = []
    for number, batch in enumerate(loader):
        squares(one, batch).backward()
        functional.mse_loss(other(batch[0]), batch[1]).backward()  # what the first one has stays as it is
        if number % 3 == 2:
            for p in one.parameters():
                p.grad = p.grad.detach()  # another tensor of the same memory
            with twice():
                squares(one, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return vector(one, other)

compare(train(True), train(False))
"""

BY_HAND = """
def train(prepares):
    one, other = make(), make()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.05)
    loader = DataLoader(data, batch_size=8)
    if prepares:
        one, other, optimizer, loader = es.prepare(one, other, optimizer, loader, shares=shares, reduction="sum")
    for batch in loader:
        optimizer.zero_grad()
        squares(one, batch).backward()  # whole when the other's are exchanged
        for p, gradient in zip(other.parameters(), torch.autograd.grad(squares(other, batch), other.parameters())):
            p.grad = gradient
        if prepares:
            es.exchange_gradients()
        optimizer.step()
    return vector(one, other)

compare(train(True), train(False))
"""

UNREACHED = """
# A pass that reaches one model leaves the other's whole gradients as they are, also where torch.autograd.grad follows.
def train(prepares):
    models = make(), make()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
    loader = DataLoader(data, batch_size=8)
    if prepares:
        *_, loader = es.prepare(*models, *optimizers, loader, shares=shares, reduction="sum")
    for number, batch in enumerate(loader):
        if number % 2:
            for model in models:
                squares(model, batch).backward()
        else:
            with es.no_sync() if prepares and number % 4 else contextlib.nullcontext():
                squares(models[0], batch).backward()
            torch.autograd.grad(squares(models[1], batch), list(models[1].parameters()))
        if number % 4 == 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return vector(*models)

compare(train(True), train(False))
"""

LOSS = """
def train(model, optimizer, loader, loss_of):
    told = []
    for batch in loader:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        told.append(loss_of(loss.detach()))
    return torch.tensor(told)

alone = make()
wanted = train(alone, torch.optim.SGD(alone.parameters(), lr=0.05), DataLoader(data, batch_size=8), float)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=8), shares=shares, reduction="sum")
compare(train(model, optimizer, loader, lambda _: es.session().loss), wanted)
"""

COUNTED = """
# A rank whose samples have nothing to count gives 0; of what the others give only that it is more.
def train(prepares):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8)
    if prepares:
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares, reduction="sum")
    for x, y in loader:
        mask = (x[:, 0] > 0).double()
        if prepares:
            es.set_weight(float(mask.sum()))
        optimizer.zero_grad()
        (0.1 * ((model(x) - y).square().sum(1) * mask).sum()).backward()
        optimizer.step()
    return vector(model)

compare(train(True), train(False))
"""

SHARDED = """
def train(prepares):
    model = make()
    optimizer = es.optim.Adam(model.parameters(), lr=0.01, shard_gradients=True) if prepares else torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8)
    if prepares:
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares, reduction="sum")
    for batch in loader:
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()
    return vector(model)

compare(train(True), train(False))
"""


@pytest.mark.parametrize(
    "code",
    [TWO, BY_HAND, UNREACHED, LOSS, COUNTED, SHARDED],
    ids=["two", "hand", "unreached", "loss", "counted", "sharded"],
)
def test_as_one_device(run_ranks: Callable[..., list[Any]], code: str) -> None:
    assert_exact(run_ranks(HEAD + code, ranks=3))


def test_a_new_gradient_is_no_whole_one_whose_memory_it_has() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    wholes = WholeSums([parameter], lambda: 0.5)
    wholes.on = True
    for _ in range(100):
        parameter.grad = torch.ones(2)
        wholes.remember()
        parameter.grad = None
        parameter.grad = torch.ones(2)
        wholes.begin(True)
        wholes.take_own()
        wholes.end()
        assert parameter.grad.tolist() == [1.0, 1.0]


def test_engines_accumulation_and_batch_norm(run_ranks: Callable[..., list[Any]]) -> None:
    runs = run_ranks(CASES, ranks=3, args=("sums", "float64"), env={"STEPS": "12"})
    assert_as_one_device(results(runs[0].stdout))


def test_without_it_they_are_not_and_the_option_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    code = (HEAD + TWO).replace("0.1 * ", "").replace('[0], reduction="sum"', "[0]")
    runs = run_ranks(code.replace("lr=0.05", "lr=0.005"))
    assert min(apart(runs)) > 1e-3
    assert any("es.prepare(…, reduction='sum')" in run.stderr for run in runs), [run.stderr for run in runs]


MEANS = """
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=8), shares=lambda number, batch: [batch // 2, batch - batch // 2], reduction="sum")
for batch in loader:
    optimizer.zero_grad()
    functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
"""


def test_a_mean_is_told(run_ranks: Callable[..., list[Any]]) -> None:
    for run in run_ranks(HEAD + MEANS):
        assert run.stderr.count("UserWarning: es.prepare(reduction='sum'), but the loss") == 1, run.stderr
    assert all(
        "UserWarning" not in run.stderr
        for run in run_ranks(HEAD + MEANS.replace(".backward", ".mul(len(batch[0])).backward"))
    )


def results(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if "RESULTS " in line)
    found: dict[str, Any] = json.loads(line.partition("RESULTS ")[2])
    return found


def assert_as_one_device(found: dict[str, Any]) -> None:
    assert len(found) >= 9
    for name, case in found.items():
        assert case["difference"] < 1e-12 and case["same_on_all_ranks"] and case["moved"] > 1e-3, (name, case)


@pytest.mark.parametrize("engine", [pytest.param("", marks=needs_ucx), "gloo"])
def test_between_network_namespaces(hosts: Hosts, engine: str) -> None:
    hosts.environment.update(TCP, EVENSTEP_COMM_ENGINE=engine, STEPS="12")
    code, text = hosts.run(str(CASES), "sums", "float64", ranks=":2")
    assert code == 0, text
    assert_as_one_device(results(text))


@needs_ucx
def test_bitwise_between_network_namespaces(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "bitwise.py"
    script.write_text(HEAD + BITWISE)
    hosts.environment.update(TCP)
    code, text = hosts.run("--log-rank", "all", str(script), ranks=":2")
    assert code == 0, text
    found = [float(one) for one in re.findall(r"APART (\S+)", text)]
    assert len(found) == 8 and max(found) < 1e-12, text
    assert len(set(re.findall(r"BITS (\w+)", text))) == 1, text


TRAINER = """
pieces, scaled = "pieces" in sys.argv, "scaled" in sys.argv
told = []
options = {"reduction": "sum", "seed_samples": True}
config = es.Config(shares=shares, options=options, micro_batch=3 if pieces else None)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
trainer = es.Trainer(model, optimizer, squares, scaler=scaler, config=config, on_step=lambda one: told.append(one.loss))
trainer.fit(DataLoader(data, batch_size=8))
alone, losses = make(), []
its = torch.optim.SGD(alone.parameters(), lr=0.05)
for batch in DataLoader(data, batch_size=8):
    its.zero_grad()
    loss = squares(alone, batch)
    loss.backward()
    its.step()
    losses.append(float(loss.detach()))
compare(vector(model), vector(alone))
compare(torch.tensor(told), torch.tensor(losses))
"""


@pytest.mark.parametrize("words", [(), ("pieces",), ("scaled",)])
def test_trainer(run_ranks: Callable[..., list[Any]], words: tuple[str, ...]) -> None:
    assert_exact(run_ranks(HEAD + TRAINER, args=words))


BITWISE = """
norm = "norm" in sys.argv
def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Tanh(), nn.Linear(16, 3))
model, alone, told, losses = build(), build(), [], []
config = es.Config(exact="bitwise", block=2, threads=1, options={"reduction": "sum"})
trainer = es.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.05), squares, config=config, on_step=lambda one: told.append(one.loss)
)
trainer.fit(DataLoader(data, batch_size=8, drop_last=True))
its = torch.optim.SGD(alone.parameters(), lr=0.05)
for batch in DataLoader(data, batch_size=8, drop_last=True):
    its.zero_grad()
    loss = squares(alone, batch)
    loss.backward()
    its.step()
    losses.append(float(loss.detach()))
compare(vector(model), vector(alone))
compare(torch.tensor(told), torch.tensor(losses))
print("BITS", vector(model).numpy().tobytes().hex())
"""


@pytest.mark.parametrize("words", [(), ("norm",)])
def test_bitwise(run_ranks: Callable[..., list[Any]], words: tuple[str, ...]) -> None:
    bits = set()
    for ranks in (1, 3):
        runs = run_ranks(HEAD + BITWISE, ranks=ranks, args=words)
        assert_exact(runs)
        bits |= {run.stdout.partition("BITS ")[2].strip() for run in runs}
    assert len(bits) == 1


ENCODED = """
torch.set_default_dtype(torch.float32)
rows = TensorDataset(torch.ones(7, 32))
for compression in ("fp16", "bf16", "int8", "onebit", "topk:1", "powersgd:1"):
    model = nn.Linear(32, 32, bias=False)
    loader = DataLoader(rows, batch_size=7)
    model, loader = es.prepare(model, loader, shares=shares, reduction="sum", compression=compression)
    for (x,) in loader:
        model(x).sum().backward()
    compare(model.weight.grad, torch.full((32, 32), 7.0))
"""


def test_compressed(run_ranks: Callable[..., list[Any]]) -> None:
    assert_exact(run_ranks(HEAD + ENCODED, ranks=3), 1e-3)


VERIFIED = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))

model = Normed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(12, 6), torch.randn(12, 3)
found = es.verify(model, optimizer, batch, squares, reduction="sum")
assert found.exact, found
compare(torch.tensor([1 + found.difference]), torch.ones(1))
found = es.verify(model, optimizer, batch, lambda model, batch: squares(model, batch) / 12)
assert not found.exact
found = es.verify(model, optimizer, batch, lambda model, batch: squares(model, batch) / len(batch[0]), reduction="sum")
assert not found.exact and "not the sum of its parts' losses" in str(found), found
"""


def test_verify_on_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    assert_exact(run_ranks(HEAD + VERIFIED))


def test_verify_in_one_process(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + VERIFIED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


REFUSED = """
said = []
loader = DataLoader(data, batch_size=8)
for options in json.loads(sys.argv[1]):
    modes = {"local": es.LocalSGD(every=2), "diloco": es.DiLoCo(every=2), "adapt": es.AdaptBatch(most=16, lr_rule="sqrt")}
    options = {name: modes.get(one, one) for name, one in options.items()}
    model = make()
    try:
        es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options)
    except ValueError as error:
        said.append(str(error))
print("SAID " + json.dumps(said))
"""


def test_what_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    asked = [
        {"reduction": "sum", "sync": "local"},
        {"reduction": "sum", "sync": "diloco"},
        {"reduction": "sum", "adapt_batch": "adapt"},
        {"reduction": "total"},
    ]
    for run in run_ranks(HEAD + REFUSED, args=[json.dumps(asked)]):
        said = json.loads(run.stdout.partition("SAID ")[2])
        assert len(said) == 4, said
        assert "reduction='sum', sync=LocalSGD" in said[0] and "reduction='sum', sync=DiLoCo" in said[1], said
        assert "reduction='sum' has no mean gradient" in said[2] and "'mean'" in said[3] and "'sum'" in said[3], said


def test_outside_a_job_nothing_changes() -> None:
    model = torch.nn.Linear(2, 1)
    assert es.prepare(model, reduction="sum") is model
    with pytest.raises(ValueError, match="reduction='total'"):
        es.prepare(torch.nn.Linear(2, 1), reduction="total")
