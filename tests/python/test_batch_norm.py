"""Synchronised BatchNorm with unequal shares: training as on one device (the cases: batch_norm_cases.py), and what is
refused."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "batch_norm_cases.py"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, "float64"), *(pytest.param(*each, marks=pytest.mark.more) for each in ((4, "float64"), (3, "float32")))],
)
def test_same_parameters_and_statistics_as_one_process(
    run_ranks: Callable[..., list[Any]], ranks: int, dtype: str
) -> None:
    results = run_ranks(SCRIPT, ranks=ranks, args=(dtype,))
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert len(cases) > 20
    limits = {name: 1e-5 if name == "autocast" else TOLERANCE[dtype] for name in cases}
    wrong = {name: case for name, case in cases.items() if not (case["difference"] <= limits[name] and case["same"])}
    assert not wrong


def test_moments_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own loops and by torch's, as the numbers lie."""
    import torch

    from evenstep import batch_norm
    from evenstep.batch_norm import _layout_of, _moments

    monkeypatch.setattr(batch_norm, "_THREADS", torch.get_num_threads())
    x = torch.randn(3, 5, 7, 6, dtype=torch.float64) * 2 + 30
    ours = [x, x.float(), x.flatten(2), x.unsqueeze(2), x[1:]]
    theirs = [
        x[:, :, 0, :4],
        torch._neg_view(x),
        x[:, :, :, 0, None].flatten(1),
        x.to(memory_format=torch.channels_last),
        x[:, 1:4],
        x.bfloat16(),
        x.transpose(2, 3),
    ]
    for one, own in [*((one, True) for one in ours), *((one, False) for one in theirs)]:
        assert (_layout_of(one) is not None) is own, one.stride()
        mean, variance = _moments(one)
        wide = one.double().transpose(0, 1).flatten(1)
        assert torch.allclose(mean.double(), wide.mean(1), rtol=1e-5), one.stride()
        assert torch.allclose(variance.double(), wide.var(1, unbiased=False), rtol=2e-4), one.stride()


def test_local_statistics_where_asked_for(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    sync, local, apart = (nn.BatchNorm1d(1) for _ in range(3))
    es.prepare(sync)
    es.prepare(local, batch_norm="local")
    es.prepare(apart, sync=es.LocalSGD(every=4))
    x = torch.tensor([[0.0], [4.0]]) + 10 * es.rank()
    means = [float((norm(x), norm.running_mean)[1]) * 10 for norm in (sync, local, apart)]
    own = 2 + 10 * es.rank()
    assert all(abs(mean - wanted) < 1e-5 for mean, wanted in zip(means, (7, own, own))), means
    sync.eval()
    sync(x[: es.rank()])  # no statistics of the batch, no other rank
    bare = nn.BatchNorm2d(2, affine=False)
    es.prepare(nn.Sequential(nn.Conv2d(2, 2, 1), bare))
    torch.set_default_dtype(torch.float64)  # what is computed in stays the layer's
    y = bare((5 + 3 * torch.randn(4, 2, 5, 7)).float())
    assert float(y.mean((0, 2, 3)).abs().max()) < 2 and 0.5 < float(y.var()) < 2, y
    before = bare.running_mean.clone()
    try:
        bare(torch.randn(4, 1, 5, 7).float())
        raise SystemExit("another number of channels is not refused")
    except RuntimeError as error:
        assert "running_mean should contain 1 elements not 2" in str(error), error
    assert torch.equal(bare.running_mean, before)
    for arguments in ({"batch_norm": "all"}, {"batch_norm": "sync", "sync": es.DiLoCo(every=8)},
                      {"batch_norm": "sync", "reduction": "adasum"}):
        try:
            es.prepare(nn.BatchNorm1d(1), **arguments)
            raise SystemExit(f"not refused: {arguments}")
        except ValueError as error:
            assert "es.prepare(batch_norm='" in str(error), error
    """
    run_ranks(code)


def test_a_process_set_has_the_statistics_of_its_own_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    def train(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        data = TensorDataset(torch.randn(48, 3, dtype=torch.float64))
        objects = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)
        model, optimizer, loader = prepare(*objects)
        for (x,) in loader:  # outside the `with`
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([one.double().reshape(-1) for one in model.state_dict().values()])

    expected = train(lambda *objects: objects)
    pair, single = es.ProcessSet([0, 2]), es.ProcessSet([1])
    own = pair if pair.included else single

    def prepare(*objects):
        with own:
            return es.prepare(*objects, shares=lambda n, b: [b - n % 4, n % 4] if pair.included else [b])

    assert torch.allclose(train(prepare), expected, rtol=1e-12, atol=1e-14)
    """
    run_ranks(code, ranks=3)


def test_the_modules_stay_what_they_are(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    code = """
    import copy, io, pickle
    import torch
    from torch import nn
    import evenstep as es

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)
        def forward(self, x):
            return self.head(self.norm(x))

    model = Own()
    norm, keys, words = model.norm, list(model.state_dict()), repr(model)
    es.prepare(model)
    assert model.norm is norm and type(norm) is nn.BatchNorm1d
    assert list(model.state_dict()) == keys and repr(model) == words
    x = torch.tensor([[0.0, 1.0], [4.0, 3.0]]) + 10 * es.rank()
    twin = copy.deepcopy(model)
    pickled = pickle.dumps(model.norm)
    out = model(x)
    assert torch.equal(twin(x), out) and torch.equal(twin.norm.running_mean, norm.running_mean)
    plain = pickle.loads(pickled)
    if es.rank() == 0:  # of this process alone
        plain(x)
        assert plain.running_mean.tolist() == [x[:, 0].mean() / 10, x[:, 1].mean() / 10]
        open("norm.pickle", "wb").write(pickled)
    again = es.prepare(nn.Sequential(plain))
    again(x)
    assert torch.allclose(es.gather(plain.running_mean[None])[0], plain.running_mean)
    """
    run_ranks(code)
    alone = """
    import pickle, sys, torch
    norm = pickle.load(open("norm.pickle", "rb"))
    assert norm(torch.ones(2, 2)).shape == (2, 2) and "evenstep" not in sys.modules
    """
    run_ranks(alone, ranks=1)


SKIPPED = {
    "another collective call": (
        "model.b(x) if es.rank() == 0 else es.barrier()",
        ["forward of BatchNorm 'model.b', on rank 0: "],
    ),
    "the end of backward": (
        "(model.b(x) if es.rank() == 0 else x).sum().backward()",
        ["forward of BatchNorm 'model.b', on rank 0: "],
    ),
    "another one of its size": (
        "(model.a if es.rank() == 0 else model.b)(x)",
        ["rank 0 in forward of BatchNorm 'model.a'; rank 1 in forward of BatchNorm 'model.b'"],
    ),
    "backward against forward": (
        "model.b(model.a(x)).sum().backward() if es.rank() == 0 else model.a(model.b(model.a(x)))",
        ["rank 0 in backward of BatchNorm 'model.b'; rank 1 in forward of BatchNorm 'model.a'"],
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_ranks_that_come_to_different_places_are_told(run_ranks: Callable[..., list[Any]], name: str) -> None:
    line, words = SKIPPED[name]
    code = f"""
    import torch
    from torch import nn
    import evenstep as es

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    model = es.prepare(Model())
    x = model.first(torch.randn(3, 5))
    {line}
    """
    results = run_ranks(code, check=False)
    assert all(result.returncode == 1 for result in results)
    everything = "".join(result.stderr for result in results)
    assert all(one in everything for one in words), everything
    assert "fix: run every BatchNorm on all ranks alike" in everything


def test_what_cannot_be_normalised_is_refused_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    def refused(words, what):
        try:
            what()
        except (ValueError, RuntimeError) as error:
            assert words in str(error), error
        else:
            raise SystemExit(f"not refused: {words}")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    es.prepare(model)
    one = torch.ones(1 - es.rank(), 2)  # one sample on both ranks together
    refused("Expected more than 1 value per channel", lambda: model(one))
    try:
        nn.BatchNorm1d(2, eps=0.0)(torch.ones(2, 2))  # torch 2.6 takes it
    except ValueError:
        refused("eps must be positive", lambda: setattr(model[1], "eps", 0.0) or model(torch.ones(2, 2)))
    model[1].eps = 1e-5
    x = torch.randn(3, 2)
    gradient = torch.autograd.grad(model(x).square().sum(), model[0].weight, create_graph=True)[0]
    refused("differentiate twice", lambda: gradient.sum().backward())
    es.set_weight(float(es.rank()))
    refused("has samples in its statistics, but es.set_weight(0)", lambda: model(x).square().sum().backward())
    """
    run_ranks(code)


def test_what_stays_local_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import warnings
    import torch
    from torch import nn
    import evenstep as es

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(nn.BatchNorm1d(2))
            self.replaced, self.norm = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
            self.replaced.forward = lambda x: x * 2

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = es.prepare(Own())
    words = [str(one.message) for one in found if "its own samples" in str(one.message)]
    assert len(words) == (es.rank() == 0), words
    assert all("statistics of scripted, replaced" in one for one in words), words
    assert model.replaced(3) == 6
    """
    run_ranks(code)


def test_a_batch_that_is_kept_beyond_its_iteration(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import copy, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    x = 3 + torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    alone = copy.deepcopy(model)

    def train(model, optimizer, x):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x), batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda number, batch: [8, 0])
    (mine,) = next(iter(loader))  # rank 1 has a dummy sample
    train(model, optimizer, mine)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, alone.state_dict()[name], rtol=1e-12), name
    """
    run_ranks(code)


def test_what_torch_allows_around_it(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import pickle, torch
    from torch import nn
    import evenstep as es

    model = es.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    x = torch.randn(3, 4)
    model.eval()
    evaluated = model(x).sum()
    model.train()
    (evaluated + model(x).sum()).backward()  # the running statistics that the first one saved have changed
    model.eval()
    expected = model(x)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    plain = pickle.loads(pickle.dumps(model))
    assert torch.equal(torch.jit.script(plain)(x), expected)
    """
    run_ranks(code)


def test_batches_of_two_loaders_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import copy, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    torch.manual_seed(1)
    x, other = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    alone = copy.deepcopy(model)
    alone(x).square().mean().backward()
    es.prepare(model)
    both = es.prepare(DataLoader(TensorDataset(x), batch_size=8), shares=lambda number, batch: [4, 4])
    first = es.prepare(DataLoader(TensorDataset(other), batch_size=4), shares=lambda number, batch: [4, 0])
    for (mine,), (beside,) in zip(both, first):  # rank 1's part of the second is a dummy sample
        if es.rank() == 1:
            try:
                model(mine)
            except es.EvenstepError as error:
                assert "a BatchNorm cannot tell" in str(error), error
            else:
                raise AssertionError("not refused")
        es.set_weight(len(mine))
        model(mine).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10), (p.grad, q.grad)
    """
    run_ranks(code)
