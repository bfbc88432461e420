"""What ranks that go on without others, and processes that join them, take for known: in one process, without ranks that die."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from evenstep.checkpoint import _restore_random
from evenstep.environment import read_environment
from evenstep.session import Session


def session_that_joins(rank: int, ranks: int = 4) -> Any:
    session: Any = Session(read_environment())
    session.environment = replace(session.environment, joins=True)
    session.place = (rank, ranks)
    assert session.joining and session.rank == 0
    return session


def test_those_that_join_at_once_draw_other_numbers() -> None:
    drawn = []
    before = torch.get_rng_state()
    for rank in (2, 3, 2):
        session = session_that_joins(rank)
        loader: Any = SimpleNamespace(files=None)
        _restore_random(session, loader, {"random": {}, "seed": 1, "step": 7})
        torch.manual_seed(0)
        session.pending_random()
        drawn.append(torch.rand(3).tolist())
    torch.set_rng_state(before)
    assert drawn[0] == drawn[2] != drawn[1]
