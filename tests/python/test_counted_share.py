"""Loops over a prepared loader of which every rank counts its share: it is said where the ranks told one another nothing, and not where
they did, in whatever way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from test_hosts import on_hosts

HEAD = """
import contextlib, json, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
model = nn.Sequential(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
model, optimizer, loader, test = es.prepare(model, optimizer, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8), policy="equal", **options)
valid = es.prepare(loader=DataLoader(data, batch_size=8), train=False)
plain = DataLoader(data, batch_size=8)


def train():
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def count(loader):
    hits = 0
    for x, y in loader:
        hits += int((model(x).argmax(1) == y).sum())
    return hits


def evaluate(loader=test):
    with torch.no_grad():
        return count(loader)

"""
SEVERAL = """
PREFIX = "a loop over a prepared loader trained nothing"
found = {}
for name, case in CASES.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case()
        before = len(caught)
        train()
    found[name] = [before, [[str(one.message), one.filename, one.lineno] for one in caught if str(one.message).startswith(PREFIX)]]
    es.session().counted_share = type(es.session().counted_share)(es.session())  # as though nothing had been said
print("FOUND " + json.dumps(found))
"""
TOLD = """
def in_eval_mode():
    model.eval()
    count(test)
    model.train()

def for_inference():
    with torch.inference_mode():
        count(test)

def with_torchs_barrier():
    evaluate()
    dist.barrier()

def with_a_barrier():
    evaluate()
    es.barrier()

def with_a_message_before():
    es.reduce_mean(1.0)
    dist.all_reduce(torch.ones(1))
    evaluate()

class Bar:  # a progress bar's module
    code = "def through(loader):\\n    for batch in loader:\\n        yield batch\\n"
    names = {"__name__": "tqdm.std"}
    exec(code, names)

CASES = {
    "no gradients": evaluate,
    "eval mode": in_eval_mode,
    "inference": for_inference,
    "an evaluation loader": lambda: count(valid),
    "torch's barrier": with_torchs_barrier,
    "a barrier": with_a_barrier,
    "before it": with_a_message_before,
    "a progress bar": lambda: evaluate(Bar.names["through"](test)),
}
"""
NOT_TOLD = """
group = dist.new_group(backend="gloo")
norms = nn.BatchNorm1d(3)
es.prepare(norms)
rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
es.prepare(rate)

def by_es_gather():
    return es.gather(torch.tensor([evaluate()]), batch=False).sum()

def in_each_batch():
    with torch.no_grad():
        for x, y in test:
            es.reduce_mean(F.cross_entropy(model(x), y))

def by_messages(group=None):
    hits = torch.tensor([evaluate()])
    if es.rank() == 1:
        dist.send(hits, 0, group=group)
    else:
        dist.recv(hits, 1, group=group)

def of_objects():
    dist.all_gather_object([None, None], evaluate())

def functional():
    import torch.distributed._functional_collectives as functional
    functional.all_reduce(torch.tensor([evaluate()]), "sum", dist.group.WORLD).sum()

def of_another_group():
    dist.all_reduce(torch.tensor([evaluate()]), group=group)

def of_a_new_group():
    hits = torch.tensor([evaluate()])
    dist.all_reduce(hits, group=dist.new_group(backend="gloo"))

def later():
    evaluate()
    evaluate(valid)
    es.reduce_mean(1.0)

def left_early():
    with torch.no_grad():
        for x, y in test:
            break
        next(iter(valid))

def without_the_last():
    with torch.no_grad():
        for (x, y), _ in zip(test, range(2)):
            pass

def by_statistics():
    torch.optim.swa_utils.update_bn(test, nn.Sequential(Rows(), norms))

class Rows(nn.Module):
    def forward(self, x):
        return x

def with_gradients():
    for x, y in test:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    model.zero_grad()

def silenced():
    warnings.filterwarnings("ignore", "a loop over a prepared loader trained nothing")
    evaluate()

CASES = {
    "gather": by_es_gather,
    "each batch": in_each_batch,
    "evaluate": lambda: es.evaluate(model, valid, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    "evaluate, plain": lambda: es.evaluate(model, plain, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    "all-reduce": lambda: dist.all_reduce(torch.tensor([evaluate()])),
    "in the background": lambda: dist.all_reduce(torch.tensor([evaluate()]), async_op=True).wait(),
    "reduce": lambda: dist.reduce(torch.tensor([evaluate()]), 0),
    "messages": by_messages,
    "messages of Gloo": lambda: by_messages(group),
    "objects": of_objects,
    "functional": functional,
    "another group": of_another_group,
    "a new group": of_a_new_group,
    "the scheduler's": lambda: rate.step(evaluate()),
    "later": later,
    "left early": left_early,
    "without the last": without_the_last,
    "statistics": by_statistics,
    "gradients": with_gradients,
    "one that is not prepared": lambda: evaluate(plain),
    "silenced": silenced,
    "nothing": lambda: None,
    "alone": evaluate,  # what is told, so that all of this was looked at
}
"""


def found(run: Any) -> dict[str, Any]:
    line = next(line for line in run.stdout.splitlines() if line.startswith("FOUND "))
    told: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return told


# what es.prepare makes: groups of ours alone; a group of Gloo for gradients; all of Gloo, as between hosts
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"args": ("{}",)},
    "torch": {"args": ('{"engine": "torch"}',)},
    "gloo": {"args": ("{}",), "env": {"EVENSTEP_COMM_ENGINE": "gloo"}, "rank_env": on_hosts("a", "b")},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_share_that_is_counted_alone_is_told(run_ranks: Callable[..., list[Any]], way: str) -> None:
    code = HEAD + TOLD + SEVERAL
    first, second = run_ranks(code, **WAYS[way])
    lines = code.splitlines()
    told = found(first)
    assert len(told) == 8
    if way == "gloo":  # whose barrier is a call as any other
        assert told.pop("torch's barrier") == [0, []]
    for name, (before, said) in told.items():
        assert before == 0 and len(said) == 1, (name, before, said)  # with the next backward
        words, path, line = said[0]
        assert "12 of 24 samples" in words and "es.gather(torch.tensor([hits]), batch=False).sum()" in words, words
        assert path.endswith(".py") and lines[line - 1] == "    for x, y in loader:", (name, path, line)
    assert not any(said for _, said in found(second).values())


@pytest.mark.parametrize("way", WAYS)
def test_what_has_been_exchanged_is_not(run_ranks: Callable[..., list[Any]], way: str) -> None:
    first, second = (found(run) for run in run_ranks(HEAD + NOT_TOLD + SEVERAL, **WAYS[way]))
    assert len(first) == 23 and [name for name, (_, said) in first.items() if said] == ["alone"], first
    assert not any(said for _, said in second.values()), second


ENDS = {
    "nothing": ("train(); evaluate(); train(); evaluate()", 1),
    "once": ("train(); evaluate()", 1),
    "gathered": ("train(); evaluate(); es.gather(torch.ones(1), batch=False)", 0),
    "by an error": ("train(); evaluate(); raise RuntimeError('the script')", 0),
    "without its group": ("train(); evaluate(); dist.destroy_process_group()", 0),
    "of a group of es.comm": (
        "group = es.comm.open(); train(); group.all_reduce(torch.tensor([evaluate()])); group.close()",
        0,
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_when_the_script_ends(run_ranks: Callable[..., list[Any]], case: str) -> None:
    code, times = ENDS[case]
    first, second = run_ranks(HEAD + code.replace("; ", "\n"), check="raise" not in code)
    assert first.stderr.count("UserWarning: a loop over a prepared loader trained nothing") == times, first.stderr
    assert "UserWarning" not in second.stderr, second.stderr


def test_one_rank_has_all_samples(run_ranks: Callable[..., list[Any]]) -> None:
    (run,) = run_ranks(HEAD + "train()\nevaluate()\n", ranks=1)
    assert "UserWarning" not in run.stderr, run.stderr


TRAINED = """
def judge(trainer):
    es.evaluate(model, plain, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))

torch.manual_seed(0)
model = nn.Linear(3, 2)
trainer = es.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), on_step=judge)
trainer.fit(plain, 2)
"""


def test_a_trainer_that_evaluates(run_ranks: Callable[..., list[Any]]) -> None:
    for run in run_ranks(HEAD.partition("model = ")[0] + "plain = DataLoader(data, batch_size=8)\n" + TRAINED):
        assert "UserWarning" not in run.stderr, run.stderr


def test_another_library_may_have_exchanged_it(run_ranks: Callable[..., list[Any]]) -> None:
    code = "import types\nsys.modules['mpi4py.MPI'] = types.ModuleType('mpi4py.MPI')\ntrain()\nevaluate()\n"
    assert all("UserWarning" not in run.stderr for run in run_ranks(HEAD + code))
