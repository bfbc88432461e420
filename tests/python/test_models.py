"""evenstep.models: the published sizes by default, smaller ones by arguments, and all of them learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from evenstep import data, models


@pytest.fixture(autouse=True)
def one_thread():
    """So small tensors gain nothing by more, and lose where other work holds the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL_TEXT = {"words": 16, "length": 12, "layers": 1, "width": 32, "heads": 2, "dropout": 0.0}


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (models.SimpleCNN, 94_762),
        (models.ResNet, 25_557_032),
        (models.BERT, 109_514_298),
        (models.GPT2, 124_439_808),
    ],
)
def test_defaults_have_the_published_number_of_parameters(build, parameters):
    with torch.device("meta"):  # shapes alone
        model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters


def trained(model: nn.Module, dataset, loss_of, steps: int = 60) -> tuple[float, float]:
    """The loss of the first and of the last ten of some steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    batches = iter(DataLoader(dataset, batch_size=16))
    for _ in range(steps):
        loss = loss_of(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[:3]) / 3, sum(losses[-10:]) / 10


def word_loss(model: nn.Module, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "build",
    [
        lambda: models.SimpleCNN(classes=4, width=8),
        lambda: models.SimpleCNN(classes=4, width=8, batch_norm=False),
        lambda: models.ResNet(4, (1, 1), 4, small_images=True),
        lambda: models.ResNet(4, (1, 1), 4),
    ],
    ids=["cnn", "cnn without norms", "resnet of small images", "resnet"],
)
def test_models_of_images_learn(build):
    torch.manual_seed(1)
    first, last = trained(
        build(), data.SyntheticImages(960, 4, 16, noise=0.5), lambda m, x, y: functional.cross_entropy(m(x), y)
    )
    assert last < 0.7 * first, (first, last)


def test_gpt_learns_what_comes_next():
    torch.manual_seed(1)
    first, last = trained(models.GPT2(**SMALL_TEXT), data.SyntheticText(960, 12, 16), word_loss)
    assert last < 0.7 * first, (first, last)


def test_bert_learns_what_was_taken_out():
    torch.manual_seed(1)
    text = data.SyntheticText(1280, 12, 16, mask=16)
    first, last = trained(models.BERT(**{**SMALL_TEXT, "words": 17}), text, word_loss, 80)
    assert last < 0.9 * first, (first, last)


def test_gpt_does_not_see_what_comes_later_and_bert_does():
    words = torch.arange(12)[None] % 16
    other = words.clone()
    other[0, -1] = 3
    for build, sees in ((models.GPT2, False), (models.BERT, True)):
        torch.manual_seed(1)
        model = build(**SMALL_TEXT).eval()
        assert torch.equal(model(words)[0, :-1], model(other)[0, :-1]) is not sees


def test_bert_passes_over_padding():
    torch.manual_seed(1)
    model = models.BERT(**SMALL_TEXT).eval()
    words = torch.arange(12)[None] % 16
    there = torch.arange(12)[None] < 8
    other = torch.where(there, words, torch.tensor(1))
    assert torch.equal(model(words, attended=there)[0, :8], model(other, attended=there)[0, :8])
    assert not torch.equal(model(words), model(words, types=torch.ones_like(words)))


def test_wrong_sizes_are_said():
    with pytest.raises(ValueError, match="multiple of heads"):
        models.GPT2(width=30, heads=4, layers=1, words=8, length=4)
    with pytest.raises(ValueError, match="13 tokens are more than the 12 places"):
        models.BERT(**SMALL_TEXT)(torch.zeros(1, 13, dtype=torch.long))
