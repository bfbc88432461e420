"""Losses that are no means over samples: a rank says so, where training would otherwise come out as something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from evenstep import script_exchanges
from evenstep.loss_form import LossForm

SAMPLES, WHOLE = 6, 16
Y = torch.arange(SAMPLES) % 5
MASKED = Y.clone().masked_fill(Y == 2, -100)
KINDS = torch.tensor([0.1, 0.3, 0.2, 0.7, 0.9])
reads_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="this torch's saved tensors do not tell of hooks, so none is read",
)


def divergence(x: torch.Tensor) -> torch.Tensor:
    """As of a variational auto-encoder."""
    return F.binary_cross_entropy(x.sigmoid(), torch.rand_like(x), reduction="sum") - 0.5 * torch.sum(1 + x - x.exp())


def told(
    *losses: Callable[[torch.Tensor], torch.Tensor],
    samples: tuple[int, ...] = (SAMPLES,),
    total: int = WHOLE,
    sums: bool = False,
) -> str:
    """What is said of backwards from each of them in every batch, with so many samples each. sums: the script has said that they are
    sums."""
    form = LossForm()
    if sums:
        form.expect_sums(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in samples:
            plan: Any = SimpleNamespace(samples=count, total=total)
            for loss in losses:
                x = torch.randn(count, 3) @ torch.randn(3, 5, requires_grad=True)
                form.look(loss(x), plan)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.mse_loss(x, x.detach() + 1, reduction="sum"),
        lambda x: F.cross_entropy(x, Y, reduction="sum"),
        lambda x: F.cross_entropy(x, Y, reduction="none").sum(),
        divergence,
    ],
)
def test_a_sum_is_told(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    said = told(loss)
    assert "is a sum over samples" in said and "reduction='sum'" in said and "loss / len(x)" in said


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.l1_loss(x, x.detach() + 1, reduction="sum") + 0.5 * x.mean(),
        pytest.param(lambda x: 0.5 * F.mse_loss(x, x.detach() + 1, reduction="sum"), marks=reads_saved),
    ],
)
def test_what_has_as_many_rows_as_samples_is_a_sum_once_shares_have_differed(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert not told(loss, samples=(6, 6))
    assert "is a sum over samples" in told(loss, samples=(6, 7))


@reads_saved
def test_a_sum_divided_by_the_whole_batch_is_told_once_shares_have_differed() -> None:
    assert not told(lambda x: x.square().sum() / WHOLE, samples=(6, 6))
    assert "divided by 16" in told(lambda x: x.square().sum() / WHOLE, samples=(6, 7))


@reads_saved
def test_a_sum_divided_by_the_whole_batch_is_told_at_once_where_it_is_certain() -> None:
    said = told(lambda x: F.mse_loss(x, x.detach() + 1, reduction="sum") / WHOLE, samples=(4,))
    assert "divided by 16" in said and "loss.sum() / len(x)" in said
    assert "divided by 16" in told(
        lambda x: F.cross_entropy(x, x.argmax(1), reduction="none").sum() / WHOLE, samples=(8,)
    )


@reads_saved
def test_a_sum_divided_by_a_constant_in_a_smaller_last_batch_has_the_same_remedy() -> None:
    form = LossForm()
    with pytest.warns(UserWarning, match=r"divided by 16(.|\n)*loss.sum\(\) / len\(x\)"):
        for count, total in ((8, 16), (8, 16), (3, 5)):
            plan: Any = SimpleNamespace(samples=count, total=total)
            form.look((torch.randn(count, 3) @ torch.randn(3, 5, requires_grad=True)).square().sum() / 16, plan)


@reads_saved
@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (lambda x: F.cross_entropy(x, MASKED), 5),
        (lambda x: F.cross_entropy(x, MASKED, label_smoothing=0.1) / 2, 5),
        (lambda x: F.cross_entropy(x, Y, weight=KINDS), 2.3),
    ],
)
def test_a_mean_over_something_else_is_told(loss: Callable[[torch.Tensor], torch.Tensor], number: float) -> None:
    assert f"a mean over {number:g} " in told(loss) and "es.set_weight(n)" in told(loss)


def left(x: torch.Tensor) -> torch.Tensor:
    """As a mask leaves them."""
    return x.flatten()[: 4 * len(x) - 2]


def masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(x.numel()).reshape(x.shape) < 4 * len(x) - 2
    return (x.square() * mask).sum() / mask.sum()


def packed(x: torch.Tensor) -> torch.Tensor:
    tokens = left(x)[:, None] * torch.ones(5)
    return F.cross_entropy(tokens, torch.zeros(len(tokens), dtype=torch.long))


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x: 65536 * F.mse_loss(left(x), torch.zeros_like(left(x))), marks=reads_saved),
        lambda x: left(x).square().mean(),
        pytest.param(masked, marks=reads_saved),
        packed,
    ],
)
def test_a_mean_over_another_number_each_time_is_told(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss)  # it may be of weights
    said = told(loss, samples=(6, 7))
    assert "a mean over 26 " in said and "es.set_weight(n)" in said


def test_a_mean_over_weights_is_no_news() -> None:
    weights = [torch.ones(17, requires_grad=True), torch.ones(40, requires_grad=True)]
    assert not told(
        lambda x: F.mse_loss(x, x.detach() + 1) + sum(w.square().mean() for w in weights), samples=(6, 7, 8, 5)
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.mse_loss(x, x.detach() + 1),
        lambda x: F.cross_entropy(x, Y) / 4 + 0.1 * F.smooth_l1_loss(x, x.detach() + 1),
        lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
        lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
        lambda x: divergence(x) / len(x),
        lambda x: x.square().sum() / x.numel(),
        lambda x: x.square().sum(1).mean(),
        lambda x: (1 / len(x)) * x.square().sum(),
        lambda x: F.mse_loss(x, x.detach() + 1) + 1e-3 * torch.ones(9, 9, requires_grad=True).square().sum(),
        lambda x: torch.stack([x.mean(), x.std(), x.square().mean()]).sum(),
        lambda x: x.square().mean(1),  # no number: torch refuses it, or gets a gradient with it
    ],
)
def test_means_over_samples_are_no_news(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss)


def mse_sum(x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, x.detach() + 1, reduction="sum")


@pytest.mark.parametrize(
    "loss",
    [
        mse_sum,
        lambda x: mse_sum(x) / len(x),
        lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
        lambda x: F.cross_entropy(x, x.detach().softmax(1)),
        lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long), reduction="sum") / 1,
        lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long), weight=KINDS),
    ],
)
def test_one_sample_has_a_sum_for_its_mean(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss, samples=(1, 1))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (1 / len(x)) * mse_sum(x),
        lambda x: (1 / len(x)) * x.square().sum(),
        lambda x: (2.5 / len(x)) * mse_sum(x),
        lambda x: (0.5 / len(x)) * x.square().sum() + 3 * x.mean(),
        lambda x: mse_sum(x) / (2 * len(x)),
        lambda x: 0.5 * mse_sum(x) / len(x) / 4,
        lambda x: F.cross_entropy(x, x.argmax(1), reduction="sum") / len(x) / 2,
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_made_a_mean_is_no_news(loss: Callable[[torch.Tensor], torch.Tensor], ranks: int) -> None:
    for count in (2, 3, 4, 8):
        assert not told(loss, samples=(count, count), total=ranks * count)
    assert not told(loss, samples=(2, 3, 4, 5, 8))


def layers(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size, requires_grad=True) for size in sizes]


def test_a_regulariser_with_its_own_backward_is_no_news() -> None:
    few, more = layers(17, 40)
    assert not told(
        lambda x: x.square().mean(),
        lambda x: few.square().mean(),
        lambda x: (2 * more).square().sum() / 40 + F.mse_loss(3 * few, few.detach()),
        lambda x: (more[1:] - more[:-1]).square().mean(),
        samples=(6, 7, 8),
    )


def test_a_regulariser_that_begins_later_or_is_another_layers_each_time_is_no_news() -> None:
    steps = iter([None, *layers(17, 17, 40, 23)])

    def loss(x: torch.Tensor) -> torch.Tensor:
        layer = next(steps)
        return (
            x.square().mean() if layer is None else x.square().mean() + 0.1 * layer.abs().mean() + layer.square().sum()
        )

    assert not told(loss, samples=(6, 7, 17, 8, 23))

    changes = iter([None, *layers(17, 17, 17)])

    def smooth(x: torch.Tensor) -> torch.Tensor:
        layer = next(changes)
        return x.square().mean() if layer is None else x.square().mean() + (layer[1:] - layer[:-1]).square().mean()

    assert not told(smooth, samples=(6, 7, 8, 9))


def made_up(x: torch.Tensor) -> torch.Tensor:
    """As a generator's, always as many."""
    return torch.randn(64, 3) @ torch.randn(3, 1, requires_grad=True)


def test_made_up_batches_of_a_fixed_size_are_no_news() -> None:
    def judged(x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(x, torch.ones_like(x))

    assert not told(judged, lambda x: judged(made_up(x)), lambda x: made_up(x).mean(), samples=(48, 50, 37))
    assert not told(lambda x: judged(x) + judged(made_up(x)), samples=(48, 50, 37))
    some, fewer = (lambda x: made_up(x).mean()), (lambda x: made_up(x)[:52].square().mean())
    assert not told(some, fewer, samples=(48, 50, 37))
    assert not told(lambda x: judged(x) + some(x) + fewer(x), samples=(48, 50, 37))
    kinds = torch.zeros(64, dtype=torch.long)
    assert not told(lambda x: F.cross_entropy(made_up(x) * torch.ones(5), kinds), samples=(48, 50))


def test_parts_of_the_batch_that_the_script_cuts_are_no_news() -> None:
    def part(weigh: Callable[[int, int], float], begin: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            piece = x.chunk(2)[begin]
            tokens = piece.repeat(5, 1)
            weight = weigh(len(piece), len(x))
            few = F.cross_entropy(piece, torch.zeros(len(piece), dtype=torch.long)) * weight
            return few + weight * F.cross_entropy(tokens, torch.zeros(len(tokens), dtype=torch.long))

        return loss

    for weigh in (lambda part, whole: 0.5, lambda part, whole: part / whole):
        assert not told(part(weigh, 0), part(weigh, 1), samples=(6, 7, 5, 9))
    assert not told(
        lambda x: mse_sum(x.chunk(2)[0]) / len(x),
        lambda x: mse_sum(x.chunk(2)[1]) / len(x.chunk(2)[1]) / 2,
        samples=(6, 7, 5, 9),
    )

    def first(x: torch.Tensor) -> torch.Tensor:
        piece = x[:, :1].repeat(1, 42).split(4)[0]
        return mse_sum(piece) / len(piece) / 2

    assert not told(first, samples=(6, 7))


def test_a_mean_over_several_losses_is_no_news() -> None:
    assert not told(lambda x: torch.stack([x.mean()] * (2 * len(x) - 5)).mean(), samples=(6, 7, 8))
    assert not told(lambda x: (x.mean() * torch.ones(len(x) - 2)).mean(), samples=(6, 7, 8))


def test_as_many_rows_as_samples_by_chance_are_no_news() -> None:
    weights = torch.ones(64, 10, requires_grad=True)
    assert not told(lambda x: x.mean() + 0.5 * weights.square().sum(), samples=(64, 64))
    assert not told(lambda x: x.mean() + F.mse_loss(weights, weights.detach() + 1, reduction="sum"), samples=(64, 48))

    def divergence_of_weights(x: torch.Tensor) -> torch.Tensor:
        return x.mean() + (weights.exp() - 1 - weights[:, :1]).sum() / 100

    assert not told(divergence_of_weights, samples=(64, 48, 64))
    assert not told(lambda x: (x.T @ x - torch.eye(5)).square().sum(), samples=(5, 6, 5))
    assert not told(lambda x: x.mean(0).sum(), samples=(5, 6, 5))


def test_pairs_of_samples_are_no_news() -> None:
    assert not told(lambda x: torch.pdist(x).mean(), samples=(6, 7, 8))
    assert not told(lambda x: (x[1:] - x[:-1]).relu().mean(), samples=(6, 7, 8))


def test_counts_in_bfloat16_are_not_taken_for_others() -> None:
    kinds = torch.zeros(303, dtype=torch.long)
    assert not told(lambda x: F.cross_entropy(x.bfloat16(), kinds), samples=(303,))


def test_looking_computes_nothing_again() -> None:
    calls = []

    def masked_loss(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return F.cross_entropy(x, MASKED) / torch.tensor(2.0)

    assert not told(lambda x: torch.utils.checkpoint.checkpoint(masked_loss, x, use_reentrant=False), samples=(6, 6))
    assert calls == [6, 6]
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: unpacked.append(kept) or kept):
        assert not told(masked_loss)
        assert "is a sum over samples" in told(mse_sum)  # which needs no tensor
    assert not unpacked


SCRIPT = """
    import warnings
    import torch
    import evenstep as es

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda number, batch: [6, 2])

    def said(form):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in loader:
                optimizer.zero_grad()
                form(torch.nn.functional.mse_loss(model(x), y, reduction="sum"), x).backward()
                optimizer.step()
        return [one for one in caught if "sum over samples" in str(one.message)]

    def weighed(loss, x):
        es.set_weight(1)  # the script says itself what counts
        return loss

    assert not said(lambda loss, x: loss / len(x))
    assert not said(weighed)
    (one,) = said(lambda loss, x: loss)
    assert one.filename == __file__, one.filename
"""


def test_a_script_is_told_at_its_line(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(SCRIPT)


def contrasted(views: int, offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """As SimCLR's and CLIP's: each sample's classes are the samples that this rank has."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x] * views)
        scores = (rows @ rows.T)[:, : len(rows) + offset]
        return F.cross_entropy(scores / 0.07, torch.arange(len(rows)).clamp(max=len(rows) + offset - 1))

    return loss


@pytest.mark.parametrize(("views", "offset"), [(1, 0), (2, -1), (2, -2), (1, -1)])
def test_samples_against_one_another_are_told_once_shares_were_of_two_sizes(views: int, offset: int) -> None:
    loss = contrasted(views, offset)
    assert "compares this rank's samples with one another" in told(loss, samples=(6, 4))
    assert told(loss, samples=(6, 6, 6)) == ""


@pytest.mark.parametrize(
    "samples",
    [
        (5, 4, 6),  # as many classes as samples, once
        (3, 4),
    ],
)
def test_classes_of_the_data_are_no_samples(samples: tuple[int, ...]) -> None:
    assert told(lambda x: F.cross_entropy(x, torch.arange(len(x)) % 5), samples=samples) == ""


@pytest.mark.parametrize("own", [False, True])
def test_those_of_the_whole_batch_are_gathered(own: bool) -> None:
    """Half of it each, on two ranks: as many classes as two views of a rank's samples have."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        everything = torch.cat([x, torch.randn_like(x)])
        scores = (x if own else everything) @ everything.T
        return F.cross_entropy(scores, torch.arange(len(scores))) * 2

    form = LossForm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (8, 5):
            x = torch.randn(count, 3) @ torch.randn(3, 5, requires_grad=True)
            form.look(loss(x), SimpleNamespace(samples=count, total=2 * count))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.mse_loss(x, x.detach() + 1),
        lambda x: F.cross_entropy(x, Y),
        lambda x: x.square().mean(),
        lambda x: x.square().sum(1).mean(),
        lambda x: F.mse_loss(x.repeat(3, 1), x.detach().repeat(3, 1) + 1),
    ],
)
def test_a_mean_is_told_where_sums_are_wanted(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss, sums=True)
    said = told(loss, samples=(6, 6), sums=True)
    assert "over 6 samples" in said and "leave reduction out" in said and "loss * len(x)" in said


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: mse_sum(x) + x.mean(),
        pytest.param(lambda x: F.mse_loss(x, x.detach() + 1) / 4, marks=reads_saved),
        pytest.param(lambda x: 65536 * x.square().mean(), marks=reads_saved),
    ],
)
def test_a_mean_with_a_factor_or_another_term_is_told_once_shares_have_differed(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert not told(loss, samples=(6, 6, 6), sums=True)
    assert "is a mean" in told(loss, samples=(6, 7), sums=True)


@pytest.mark.parametrize(
    "loss",
    [
        mse_sum,
        divergence,
        lambda x: mse_sum(x) / WHOLE,
        lambda x: F.mse_loss(x, x.detach() + 1) * len(x),
        lambda x: F.mse_loss(x, x.detach() + 1) * len(x) / WHOLE,
        lambda x: F.mse_loss(x, x.detach() + 1) * torch.tensor(len(x)),
        lambda x: x.square().mean() * x.numel(),
        lambda x: x.square().mean(1).sum(),
        lambda x: sum(F.mse_loss(row, row.detach() + 1) for row in x),
        lambda x: mse_sum(x) + len(x) / WHOLE * torch.ones(12, 9, requires_grad=True).square().mean(),
        lambda x: x.square().mean(1),
        pytest.param(lambda x: (x.square() * len(x)).mean(), marks=reads_saved),
        pytest.param(lambda x: (0.5 * (len(x) * x.square().sum(1))).mean(), marks=reads_saved),
        lambda x: x.repeat(1, 12).square().sum(0).mean(),  # as many columns as a multiple of the samples
    ],
)
def test_sums_are_no_news_where_they_are_wanted(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for samples in ((6, 6, 6), (3, 4, 6, 12, 5), (5, 5), (16, 16), (1, 1)):
        assert not told(loss, samples=samples, sums=True)


def test_samples_one_after_the_other_are_no_means_over_all() -> None:
    rows = [lambda x, row=row: x[row].repeat(6, 1).square().mean() for row in range(3)]
    assert not told(*rows, samples=(6, 7, 6), sums=True)


def test_means_are_not_looked_for_where_another_model_has_them() -> None:
    form = LossForm()
    form.expect_sums(True)
    form.expect_sums(False)
    for count in (6, 7):
        plan: Any = SimpleNamespace(samples=count, total=WHOLE)
        form.look(torch.ones(count, 5, requires_grad=True).mul(2).mean(), plan)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have imported."""
    monkeypatch.setattr(script_exchanges, "_UNSEEN", ())


CRITIC = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Tanh(), torch.nn.Linear(11, 5))


def gradient_of(loss: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, of, create_graph=True)])


def penalised(inner: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(x: torch.Tensor) -> torch.Tensor:
        mean = inner(CRITIC(x.detach()))
        return mean + 0.1 * gradient_of(mean, *CRITIC.parameters()).norm()

    return loss


def looked_through(x: torch.Tensor) -> torch.Tensor:
    """What a step on the batch would make better."""
    first, last = CRITIC[0], CRITIC[2]
    inner = F.mse_loss(CRITIC(x.detach()), x.detach())
    moved = last.weight - 0.1 * torch.autograd.grad(inner, last.weight, create_graph=True)[0]
    return F.mse_loss(torch.tanh(first(x.detach())) @ moved.T, x.detach())


@pytest.mark.parametrize(
    "loss",
    [
        penalised(lambda out: F.mse_loss(out, torch.ones_like(out))),
        penalised(lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))),
        penalised(lambda out: F.smooth_l1_loss(out, torch.ones_like(out))),
        looked_through,
    ],
)
@pytest.mark.usefixtures("counted")
def test_a_gradient_of_the_batchs_mean_is_told_once_shares_have_differed(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert not told(loss, samples=(6, 6))
    said = told(loss, samples=(6, 7))
    assert "computed from the gradient of a mean over this rank's 7 samples" in said and "create_graph=True" in said


def for_each_sample(x: torch.Tensor) -> torch.Tensor:
    """As WGAN-GP."""
    inside = x.detach().requires_grad_()
    gradient = torch.autograd.grad(CRITIC(inside).sum(), inside, create_graph=True)[0]
    return (gradient.norm(dim=1) - 1).square().mean() + CRITIC(inside).mean()


def along_the_gradient(x: torch.Tensor) -> torch.Tensor:
    inside = x.detach().requires_grad_()
    kinds = torch.zeros(len(x), dtype=torch.long)
    gradient = torch.autograd.grad(F.cross_entropy(CRITIC(inside), kinds), inside, create_graph=True)[0]
    return F.normalize(gradient, dim=1).square().sum(1).mean() + F.mse_loss(CRITIC(inside), inside.detach())


def of_tasks(x: torch.Tensor) -> torch.Tensor:
    """As MAML: a sample is a task, with a few rows of its own."""
    losses = []
    for row in x.detach():
        rows = row.repeat(6, 1)
        inner = F.mse_loss(CRITIC(rows), rows)
        gradient = torch.autograd.grad(inner, CRITIC[2].weight, create_graph=True)[0]
        losses.append(F.mse_loss(torch.tanh(CRITIC[0](rows)) @ (CRITIC[2].weight - 0.1 * gradient).T, rows))
    return torch.stack(losses).mean()


def exchanged(x: torch.Tensor) -> torch.Tensor:
    script_exchanges.made()
    return looked_through(x)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("loss", [for_each_sample, along_the_gradient, of_tasks, exchanged])
def test_gradients_for_each_sample_and_exchanged_ones_are_no_news(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss, samples=(6, 7, 3, 12, 2))
