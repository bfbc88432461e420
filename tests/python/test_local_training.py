"""Ranks that train on their own, or with late gradients: several models, and what a long training leaves in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOTH = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    def prepared(models, batches, **options):
        torch.manual_seed(3)
        made = [nn.Linear(2, 1) for _ in range(models)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in made]
        loader = DataLoader(TensorDataset(torch.ones(4 * batches, 2)), batch_size=4)
        result = es.prepare(*made, *optimizers, loader, **options)
        return result[:models], result[models:-1], result[-1]

    def values(model):
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def step(optimizers):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_rank_without_samples_in_one_step_trains_all_its_models_in_the_next(
    run_ranks: Callable[..., list[Any]],
) -> None:
    code = """
    moved = []
    shares = [[2, 2], [4, 0], [2, 2], [1, 3]]
    models, optimizers, loader = prepared(2, 4, sync=es.LocalSGD(every=100), shares=lambda number, batch: shares[number])
    for (x,) in loader:
        before = [values(model) for model in models]
        for model in models:  # each loss is the pass of one model; the other has no part in it
            model(x).mean().backward()
        step(optimizers)
        moved.append([not torch.equal(values(model), was) for model, was in zip(models, before)])
    assert moved == [[True, True], [es.rank() == 0] * 2, [True, True], [True, True]], moved
    """
    run_ranks(BOTH + code)


def test_gradients_that_come_are_not_noted_for_ever(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    for mode in (es.LocalSGD(every=2), es.DiLoCo(every=2), es.Stale(), None):
        (model,), optimizers, loader = prepared(1, 6, sync=mode)
        for (x,) in loader:
            model(x).mean().backward()
            step(optimizers)
        sync = es.session().steps.syncs[-1]
        assert len(sync._layout._order.seen) <= len(sync.parameters), (mode, len(sync._layout._order.seen))
    """
    run_ranks(BOTH + code)


def test_a_scaler_that_is_prepared_after_a_model_with_late_gradients_is_refused(
    run_ranks: Callable[..., list[Any]],
) -> None:
    code = """
    prepared(1, 1, sync=es.Stale())
    try:
        es.prepare(torch.amp.GradScaler("cpu"))
    except ValueError as error:
        assert "with a GradScaler" in str(error)
    else:
        raise SystemExit(1)
    """
    run_ranks(BOTH + code)
