"""Copies of a model from before es.prepare, on ranks that are seeded differently: one device's are like its model."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import copied_values

_SCRIPT = """
    import copy, gc, hashlib, os
    import numpy as np
    import torch, evenstep as es
    from torch import nn

    def network():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    torch.manual_seed({seed})
    model = network()
    teacher = copy.deepcopy(model)                                  # a distillation's
    target = network()
    target.load_state_dict(model.state_dict())                      # reinforcement learning's
    average = torch.optim.swa_utils.AveragedModel(model)
    shadow = [p.detach().clone() for p in model.parameters()]       # an average by hand
    begun = copy.deepcopy(model.state_dict())                       # to go back to
    head = copy.deepcopy(model[2])
    other = nn.Linear(6, 8)                                         # drawn by itself: its own
    path = f"values-{{os.environ['RANK']}}.npy"
    np.save(path, model[0].bias.detach().numpy())
    file = torch.from_numpy(np.load(path, mmap_mode="r"))   # cannot be written to
    with torch.inference_mode():
        apart = model[0].bias.clone()                               # nor this
    left = [apart.tolist(), file.tolist()]
    counter, weights, labels = torch.tensor(0), torch.ones(8), [torch.tensor(n % 3) for n in range(6)]
    if os.environ["RANK"] == "0":                                   # constants of the model differ, too
        model[1].num_batches_tracked += 100
        model[1].weight.data += 0.5
        for one in (teacher, target, average.module):
            one.load_state_dict(model.state_dict())
        shadow[2] += 0.5
        begun = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared, optimizer = es.prepare(model, optimizer)

    def like(values, all_of=model):
        return all(torch.equal(a, b) for a, b in zip(values, [*all_of.parameters(), *all_of.buffers()], strict=True))

    def told(values):
        return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()[:16]

    assert like([*teacher.parameters(), *teacher.buffers()]), "teacher"
    assert like([*target.parameters(), *target.buffers()]), "target"
    assert like([*average.module.parameters(), *average.module.buffers()]), "average"
    assert like([*shadow, *model.buffers()]), "shadow"
    assert all(torch.equal(begun[name], one) for name, one in model.state_dict().items()), "state"
    assert like(head.parameters(), model[2]), "head"
    assert [apart.tolist(), file.tolist()] == left
    assert int(counter) == 0 and weights.tolist() == [1.0] * 8 and [int(n) for n in labels] == [0, 1, 2] * 2
    assert int(average.n_averaged) == 0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(float(os.environ["RANK"]))                       # as local training does
    ema = copy.deepcopy(model)
    before = told(model.parameters())
    es.prepare(ema)                                                 # whose copies' own values `model` trains
    assert told(model.parameters()) == before
    print("VALUES", told(teacher.parameters()), told(network().parameters()))
"""


def _values(ranks: list[Any]) -> list[list[str]]:
    return [next(line for line in one.stdout.splitlines() if line.startswith("VALUES")).split()[1:] for one in ranks]


def test_copies_are_rank_0s_too(run_ranks: Callable[..., list[Any]]) -> None:
    first, second, third = _values(run_ranks(_SCRIPT.format(seed="int(os.environ['RANK'])"), ranks=3))
    assert first[0] == second[0] == third[0]  # the teachers
    assert len({first[1], second[1], third[1]}) == 3  # what is no copy is each rank's own


def test_what_rank_0_has_read_since_is_its_models_alone(run_ranks: Callable[..., list[Any]]) -> None:
    """Its copy is of before: on the others, too, it stays what it was."""
    ranks = run_ranks("""
        import copy, os
        import torch, evenstep as es

        torch.manual_seed(3)
        model = torch.nn.Linear(4, 4)
        first = copy.deepcopy(model)
        if os.environ["RANK"] == "0":
            torch.nn.init.normal_(model.weight)  # as what is read from a file
        es.prepare(model)
        print("VALUES", *first.weight.flatten().tolist())
    """)
    first, second = _values(ranks)
    assert first == second


def test_ranks_that_are_seeded_alike_have_nothing_to_look_for(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("""
        import copy, gc
        import torch, evenstep as es

        torch.manual_seed(5)
        model = torch.nn.Linear(4, 4)
        teacher = copy.deepcopy(model)
        gc.get_objects = None
        es.prepare(model)
        print("VALUES", *teacher.weight.flatten().tolist())
    """)
    first, second = _values(ranks)
    assert first == second


def _second_rank(monkeypatch: pytest.MonkeyPatch, fewer: int = 0) -> Any:
    """A group in which rank 0 begins otherwise, and has as many copies as this rank but for so many."""
    monkeypatch.setattr(copied_values, "broadcast_bytes", lambda group, mine: b"other")
    monkeypatch.setattr(
        copied_values,
        "gather_objects",
        lambda group, told: [[(place, count - fewer) for place, count in told] if isinstance(told, list) else told],
    )
    return types.SimpleNamespace(ranks=2, rank=1)


def _set(model: nn.Module) -> None:
    with torch.no_grad():
        for number, one in enumerate(model.parameters()):
            one.fill_(float(number + 10))


def test_layers_that_are_copies_of_one_another_are_not_one_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(layer))
    teacher, alone = copy.deepcopy(model), copy.deepcopy(layer)  # of which layer the second is nobody knows
    before = alone.weight.tolist()
    copies = copied_values.CopiedValues(_second_rank(monkeypatch), [model])
    _set(model)
    wanted = [one.tolist() for one in model.parameters()]
    copies.follow()
    assert [one.tolist() for one in model.parameters()] == wanted
    assert [one.tolist() for one in teacher.parameters()] == wanted
    assert alone.weight.tolist() == before


def test_what_was_prepared_before_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    given, wanted = copy.deepcopy(trained), [one.tolist() for one in trained.parameters()]
    copies = copied_values.CopiedValues(_second_rank(monkeypatch), [given], [trained])
    _set(given)
    copies.follow()
    assert [one.tolist() for one in trained.parameters()] == wanted and optimizer.param_groups


def test_objects_of_the_script_are_not_asked_for_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unbound:
        def __str__(self) -> str:
            raise RuntimeError("working outside of a context")

    model = nn.Linear(4, 4)
    odd = {Unbound(): model.weight.detach().clone(), "bias": model.bias.detach().clone()}
    copied_values.CopiedValues(_second_rank(monkeypatch), [model]).follow()
    assert len(odd) == 2


def test_where_rank_0_has_fewer_none_follows_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    teacher, wanted = copy.deepcopy(model), model.weight.tolist()
    with pytest.warns(UserWarning, match="of 1 copies of a model that this rank has, rank 0 has fewer"):
        copies = copied_values.CopiedValues(_second_rank(monkeypatch, fewer=1), [model])
    _set(model)
    copies.follow()
    assert teacher.weight.tolist() == wanted
    del teacher
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied_values.CopiedValues(_second_rank(monkeypatch, fewer=1), [nn.Linear(4, 4)])
