"""es.optim with shard_gradients and max_grad_norm: the bits of whole gradients, and errors where these are wanted."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_jobs import Run
from torch import nn

import evenstep as es

CASES = pathlib.Path(__file__).parent / "sharded_cases.py"


def test_the_same_bits_as_with_whole_gradients(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(CASES, ranks=3, env={"EVENSTEP_ON_NONFINITE": "skip"})
    told = [dict(json.loads(line) for line in one.stdout.splitlines() if line.startswith("[")) for one in ranks]
    for name in ("adamw", "adam", "sgd", "plain", "skip", "accumulated"):
        whole, sharded = told[0][f"{name} False"], told[0][f"{name} True"]
        assert whole == sharded and whole["shares"], (name, whole, sharded)
        assert all(one[f"{name} True"] == sharded for one in told), name
    assert told[0]["adam True"]["norms"][0] > 0.4 and told[0]["adamw True"]["norms"] == [None] * 6
    assert told[0]["skip True"]["norms"][3] is None  # a step of no gradients
    misuse = told[1]["misuse"]
    for name in ("clip", "norm", "scale", "torch"):
        assert "each rank has a part" in misuse[name] and "max_grad_norm" in misuse[name], (name, misuse[name])
    assert "set_to_none" in misuse["zero"] and "no_sync" in misuse["again"], misuse
    assert "1 parameters have a gradient of the script's own, of the 7 others" in misuse["mixed"]
    assert "a second time" in misuse["twice"]
    assert "in parts, on 3 ranks" in misuse["shown"]


PREPARE = """
import torch
from torch import nn

import evenstep as es

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
table = nn.Embedding(4, 6, sparse=True)
data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randn(16, 2))
loader = torch.utils.data.DataLoader(data, batch_size=8)


def optimizer_of(*models, **options):
    parameters = [p for model in models for p in model.parameters()]
    return es.optim.SGD(parameters, lr=0.1, shard_gradients=True, **options)


def refused(words, *objects, **options):
    try:
        es.prepare(*objects, **options)
    except es.EvenstepError as error:
        assert words in str(error), error
        print("refused", words)
    else:
        raise AssertionError(words)


"""


def test_what_needs_whole_gradients_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    """Each in its own call: models that were prepared in one that failed are not prepared again."""
    calls = [
        'refused("sync=", model, optimizer_of(model), loader, sync=es.LocalSGD(every=2))',
        'refused("compression=", model, optimizer_of(model), loader, compression="bf16")',
        'refused("adasum", model, optimizer_of(model), loader, reduction="adasum")',
        "refused(\"engine='torch'\", model, optimizer_of(model), loader, engine='torch')",
        'refused("adapt_batch", model, optimizer_of(model), loader, adapt_batch=es.AdaptBatch(most=64, lr_rule="sqrt"))',
        'refused("gradient_as_bucket_view", model, optimizer_of(model), loader, gradient_as_bucket_view=False)',
        "refused(\"parameter '2.weight' of model 'model' is stepped on by none\", model, optimizer_of(model[0]), loader)",
        'refused("has sparse gradients", table, optimizer_of(table), loader)',
    ]
    adapting = 'es.prepare(loader, adapt_batch=es.AdaptBatch(most=64, lr_rule="sqrt"))'
    calls.append(
        f"es.prepare(model, optimizer_of(model))\ntry:\n    {adapting}\nexcept ValueError as error:\n    print('refused', error)"
    )
    calls.append(f"{adapting}\nrefused('adapt_batch', model, optimizer_of(model))")
    for call in calls:
        ranks = run_ranks(PREPARE + call, ranks=2)
        assert all("refused" in one.stdout for one in ranks), call


def test_several_hosts_and_recovery_are_refused(
    run_ranks: Callable[..., list[Any]], run: Run, script: Callable[[str], str]
) -> None:
    call = 'refused("--recovery", model, optimizer_of(model), loader)'
    result = run("-n", "2", "--no-pin", "--no-monitor", "--recovery", "shrink", script(PREPARE + call))
    assert result.returncode == 0 and "refused --recovery" in result.stdout, result.stdout + result.stderr
    places = {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(("here", "there"))}
    call = 'refused("the ranks are on several hosts (here, there)", model, optimizer_of(model), loader)'
    assert all("refused" in one.stdout for one in run_ranks(PREPARE + call, ranks=2, rank_env=places))


def step_on(parameters: list[nn.Parameter], optimizer: Any, most: float | None) -> Any:
    norms = []
    for number in range(6):
        source = torch.Generator().manual_seed(number)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype) * (number - 2)
        if most is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, most)))
        optimizer.step()
        if most is None:
            norms.append(optimizer.grad_norm)
    return norms


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("most", [1e-2, 30.0, 1e6, float("inf")])
def test_clipping_is_torchs(dtype: torch.dtype, near: float, most: float) -> None:
    shapes = ((3, 5), (20000,), (0,), (), (7, 1))
    ours, theirs = ([nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1}
    mine = es.optim.AdamW(ours, max_grad_norm=most, **options)
    norms = step_on(ours, mine, None), step_on(theirs, torch.optim.AdamW(theirs, **options), most)
    assert norms[0] == pytest.approx(norms[1], rel=near)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=near, atol=near)
    assert ours[1].grad is not None and ours[1].grad.norm() > 100  # as it was


def test_clipping_where_the_step_is_torchs_own() -> None:
    """Of complex numbers; with a closure, too."""
    ours, theirs = (nn.Parameter(torch.ones(4, dtype=torch.complex64)) for _ in range(2))
    mine = es.optim.SGD([ours], lr=0.1, max_grad_norm=0.5)
    other = torch.optim.SGD([theirs], lr=0.1)
    for p in (ours, theirs):
        p.grad = torch.full((4,), 3 + 4j, dtype=torch.complex64)

    def closure() -> float:
        ours.grad = torch.full((4,), 3 + 4j, dtype=torch.complex64)
        return 7.0

    assert mine.step(closure) == 7.0 and mine.grad_norm == pytest.approx(10)
    torch.nn.utils.clip_grad_norm_([theirs], 0.5)
    other.step()
    assert torch.equal(ours, theirs)


def test_options_of_the_optimizer() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    for kind in (es.optim.SGD, es.optim.Adam, es.optim.AdamW):
        for wrong in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="max_grad_norm"):
                kind(parameters, lr=0.1, max_grad_norm=wrong)
        one = kind(parameters, lr=0.1, max_grad_norm=2.0, shard_gradients=True)
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert other.max_grad_norm == 2.0 and other.shard_gradients
        plain = getattr(torch.optim, kind.__name__)(parameters, lr=0.1)
        assert plain.state_dict()["param_groups"][0].keys() == one.state_dict()["param_groups"][0].keys()
    alone = es.optim.SGD(parameters, lr=0.1, shard_gradients=True)  # one rank: its gradients are whole
    parameters[0].grad = torch.ones(3)
    alone.step()
    assert torch.equal(parameters[0], torch.full((3,), 0.9)) and alone.grad_norm is None
