"""Copies of a model from before es.prepare, on ranks that are seeded differently: one device's are like its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
