"""What es.verify must say about models that are exact, and about those that are not and why; run in every rank, or alone, by
test_verify.py."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstep as es

JOB = es.world_size() > 1


def loader_of(dataset: Dataset | None = None, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = 3 + torch.randn(40, 6, generator=generator)
    y = torch.randint(3, (40,), generator=generator)
    return DataLoader(dataset or TensorDataset(x, y), batch_size=12, shuffle=True, **options)


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def classify(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check_exact_models() -> None:
    for dtype, bound in ((torch.float64, 1e-12), (None, 1e-5)):
        model = conv()
        found = es.verify(model, adam(model), loader_of(), classify, steps=6, dtype=dtype)
        assert found.exact and found.difference <= bound == found.bound and not found.reasons, str(found)
        assert found.played is not JOB and found.ranks == (es.world_size() if JOB else 3)
        assert len(found.shares) == 6 and all(sum(one) in (12, 4) for one in found.shares)
        assert any(0 in one for one in found.shares) and len({tuple(one) for one in found.shares}) > 1
        assert str(found).startswith("exact: after 6 steps on ")


def check_nothing_is_touched() -> None:
    class Counting(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.random = random.Random(1)

        def __len__(self) -> int:
            return 40

        def __iter__(self):
            return iter([self.random.randrange(40) for _ in range(40)])

    sampler = Counting()
    model = conv()
    optimizer = adam(model)
    classify(model, next(iter(loader_of()))).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    drawn = sampler.random.getstate(), random.getstate(), torch.get_rng_state()
    loader = DataLoader(loader_of().dataset, batch_size=12, sampler=sampler)
    assert es.verify(model, optimizer, loader, classify, steps=3, dtype=torch.float64).exact
    assert drawn[:2] == (sampler.random.getstate(), random.getstate()) and torch.equal(drawn[2], torch.get_rng_state())
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    assert repr(before) == repr(after)
    assert not es.session().models and es.step() == 0


def check_prepared_objects() -> None:
    model = conv()
    model, optimizer, loader = es.prepare(model, sgd(model), loader_of())
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        if number == 1:
            step = es.step()
            assert es.verify(model, optimizer, loader, classify, dtype=torch.float64).exact
            assert es.step() == step
    if JOB:
        rows = es.gather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None])
        assert bool((rows == rows[0]).all())


def check_one_batch_and_several_models() -> None:
    makers = {"generator": nn.Linear(6, 6), "critic": conv()}
    optimizers = [sgd(one) for one in makers.values()]

    def step(models, optimizers, batch) -> None:
        x, y = batch["x"], batch["y"]
        optimizers[1].zero_grad()
        (
            classify(models["critic"], (x, y)) + models["critic"](models["generator"](x).detach()).square().mean()
        ).backward()
        nn.utils.clip_grad_norm_(models["critic"].parameters(), 0.5)
        optimizers[1].step()
        optimizers[0].zero_grad()
        models["critic"](models["generator"](x)).mean().backward()
        optimizers[0].step()

    x, y = next(iter(loader_of()))
    batch = {"x": x, "y": y, "name": "of no sample"}
    if JOB:
        found = es.verify(makers, optimizers, batch, step=step, dtype=torch.float64)
        assert found.exact and found.parameter.startswith(("0.", "1.")), str(found)
    else:
        refused("in one process", lambda: es.verify(makers, optimizers, batch, step=step))
    tokens = torch.arange(12) % 4

    def by_tokens(model, batch):
        es.set_weight(float(batch[1].sum()))
        losses = functional.cross_entropy(model(batch[0]), y[: len(batch[0])], reduction="none")
        return (losses * batch[1]).sum() / batch[1].sum().clamp(min=1)

    def not_said(model, batch):
        losses = functional.cross_entropy(model(batch[0]), y[: len(batch[0])], reduction="none")
        return (losses * batch[1]).sum() / batch[1].sum().clamp(min=1)

    y = torch.zeros(12, dtype=torch.long)
    model = nn.Linear(6, 3)
    found = es.verify(model, sgd(model), (x, tokens), by_tokens, dtype=torch.float64)
    assert found.exact, str(found)
    told(es.verify(model, sgd(model), (x, tokens), not_said), "es.set_weight(their number)")


class Noisy(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        return index / 20 + torch.randn(6), index % 3


def collate_noisily(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.randn(len(x), 1), y


class Attending(nn.Module):
    """A key's bias has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 3, 2)
        scores = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return self.head((scores @ x).mean(1))


def told(found: es.Verification, *words: str) -> None:
    assert not found.exact and found.difference > found.bound, str(found)
    assert all(any(one in reason for reason in found.reasons) for one in words), str(found)
    assert str(found).startswith("not exact: after ")


def refused(words: str, what) -> None:
    try:
        what()
    except (ValueError, TypeError, es.EvenstepError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def check_reasons() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    told(es.verify(model, sgd(model), loader_of(), classify), "random numbers are drawn in the step: Dropout '1'")
    model = nn.Linear(6, 3)
    found = es.verify(model, sgd(model), loader_of(Noisy()), classify, dtype=torch.float64)
    assert found.exact, str(found)
    told(es.verify(model, sgd(model), loader_of(Noisy()), classify, seed_samples=False), "random augmentation")
    noisy = DataLoader(Noisy(), batch_size=12, collate_fn=collate_noisily)
    told(es.verify(model, sgd(model), noisy, classify), "collate_fn draws random numbers")

    def contrast(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h = functional.normalize(model(batch[0]), dim=1)
        return functional.cross_entropy(h @ h.T, torch.arange(len(h)))

    told(es.verify(model, sgd(model), loader_of(), contrast), "between the samples of a batch")

    def half(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(batch[0]).float(), batch[1])

    model = nn.Linear(6, 3)
    doubled = model.bias.register_hook(lambda gradient: 2 * gradient)
    found = es.verify(model, sgd(model), loader_of(), classify, dtype=torch.float64)
    assert found.exact, str(found)  # what is linear changes nothing
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    told(es.verify(model, sgd(model), loader_of(), classify), "hooks change gradients of parameters", "weight, bias")
    assert len(model.bias._backward_hooks) == 1
    doubled.remove()

    model = nn.Linear(6, 3)
    found = es.verify(model, sgd(model), loader_of(), lambda model, batch: classify(model, batch) * float("nan"))
    told(found, "one device's own parameters are no finite numbers after these steps: weight, bias;")
    assert len(found.reasons) == 1, found

    deep = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    found = es.verify(deep, adam(deep), loader_of(), half)
    assert found.exact or any("rounded to bfloat16" in one for one in found.reasons), str(found)
    if JOB:
        model = conv()
        told(
            es.verify(model, sgd(model), loader_of(), classify, batch_norm="local"),
            "BatchNorm by each rank's own samples: 1;",
        )
        told(es.verify(model, sgd(model), loader_of(), classify, compression="topk:0.1"), "compression='topk:0.1'")


def check_parameters_without_gradient() -> None:
    model = Attending()
    found = es.verify(model, adam(model), loader_of(), classify, dtype=torch.float64)
    assert found.exact and list(found.without_gradient) == ["key.bias"], str(found)
    assert "left out, as their true gradient is zero: 1 parameters, most in key.bias" in str(found)
    joint = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)  # one bias for query, key and value
    x = torch.randn(6, 3, 4)
    found = es.verify(joint, adam(joint), x, lambda model, x: model(x)[:, 0, 0].square().mean(), dtype=torch.float64)
    assert found.exact and "self_attn.in_proj_bias (4 of 12)" in found.without_gradient, str(found)


def check_what_is_refused() -> None:
    model = conv()
    optimizer, loader = sgd(model), loader_of()
    refused("either loss", lambda: es.verify(model, optimizer, loader))
    refused("at least 1", lambda: es.verify(model, optimizer, loader, classify, steps=0))
    refused("list is no model", lambda: es.verify([], optimizer, loader, classify))
    refused("Sequential is no optimizer", lambda: es.verify(model, model, loader, classify))
    refused("no tensor of samples", lambda: es.verify(model, optimizer, {"words": ["a"]}, classify))
    refused(
        "is an iterator",
        lambda: es.verify(model, optimizer, DataLoader(loader.dataset, batch_sampler=iter([[1]])), classify),
    )

    def broken(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if len(batch[0]) == 12:  # a whole batch
            raise ValueError("too large for me")
        return classify(model, batch)

    refused("too large for me", lambda: es.verify(model, optimizer, loader, broken))
    with_amount = lambda model, batch: (classify(model, batch), 3)  # noqa: E731
    refused("loss(model, batch) gave a tuple", lambda: es.verify(model, optimizer, loader, with_amount))
    assert es.verify(model, optimizer, loader, classify, dtype=torch.float64).exact


def main() -> None:
    torch.manual_seed(1)
    check_exact_models()
    check_nothing_is_touched()
    check_one_batch_and_several_models()
    check_reasons()
    check_parameters_without_gradient()
    check_what_is_refused()
    check_prepared_objects()
    print("VERIFIED")


if __name__ == "__main__":
    main()
