"""Copies of a model from before es.prepare, on ranks that are seeded differently: one device's are like its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SCRIPT = """
    import copy, gc, hashlib, os
    import torch, evenstep as es
    from torch import nn

    torch.manual_seed({seed})
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    teacher = copy.deepcopy(model)                                  # a distillation's
    target = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    target.load_state_dict(model.state_dict())                      # reinforcement learning's
    average = torch.optim.swa_utils.AveragedModel(model)
    shadow = [p.detach().clone() for p in model.parameters()]       # an average by hand
    other = nn.Linear(6, 8)                                         # drawn by itself: its own
    mean = model[1].running_mean.clone()
    with torch.inference_mode():
        apart = model[0].bias.clone()
    before = apart.tolist()                                         # nothing can be written there
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared, optimizer = es.prepare(model, optimizer)

    def like(values):
        return all(torch.equal(a, b) for a, b in zip(values, [*model.parameters(), *model.buffers()], strict=True))

    def told(values):
        return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()[:16]

    assert like([*teacher.parameters(), *teacher.buffers()]), "teacher"
    assert like([*target.parameters(), *target.buffers()]), "target"
    assert like([*average.module.parameters(), *average.module.buffers()]), "average"
    assert like([*shadow, *model.buffers()]), "shadow"
    assert torch.equal(mean, torch.zeros(8)) and int(average.n_averaged) == 0
    assert apart.tolist() == before
    print("VALUES", told(teacher.parameters()), told(other.parameters()))
"""


def _values(ranks: list[Any]) -> list[list[str]]:
    return [next(line for line in one.stdout.splitlines() if line.startswith("VALUES")).split()[1:] for one in ranks]


def test_copies_are_rank_0s_too(run_ranks: Callable[..., list[Any]]) -> None:
    first, second, third = _values(run_ranks(_SCRIPT.format(seed="int(os.environ['RANK'])"), ranks=3))
    assert first[0] == second[0] == third[0]  # the teachers
    assert len({first[1], second[1], third[1]}) == 3  # what was no copy is left alone


def test_ranks_that_are_seeded_alike_have_nothing_to_look_for(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = _values(
        run_ranks(_SCRIPT.format(seed=5).replace("teacher = ", "gc.get_objects = None; teacher = "))
    )
    assert first == second
