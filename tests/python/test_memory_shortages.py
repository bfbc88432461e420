"""Scripts with a loop of their own that run out of memory: the next attempt gives that rank less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from run_jobs import Run

from evenstep import EvenstepError
from evenstep.caps import after_shortage, among_others
from evenstep.environment import read_environment
from evenstep.regrouping import own_caps
from evenstep.shares import Shares


def test_what_the_agent_says() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "13", "EVENSTEP_MEMORY_CAPS": "1:12/64,12:/2"}
    assert read_environment(variables).memory_cap == (12, 64)
    assert read_environment({**variables, "RANK": "12"}).memory_cap == (0, 2)
    assert read_environment({**variables, "RANK": "2"}).memory_cap is None
    for wrong in ("1:12", "1:", "1:x/2", "1:2/0"):
        with pytest.raises(EvenstepError, match="EVENSTEP_MEMORY_CAPS"):
            read_environment({**variables, "EVENSTEP_MEMORY_CAPS": wrong})


def test_the_caps_of_the_next_attempt() -> None:
    def begins() -> list[int]:
        return [20, 12]

    nothing = (None, None)
    assert after_shortage([None, 9], nothing, begins, 32) == ([None, 9], "")
    assert after_shortage([None, None], [None, (8, 32)], begins, 32) == ([None, 8], "")
    assert after_shortage([None, 5], [None, (8, 32)], begins, 32) == ([None, 5], "")
    assert after_shortage([None, None], [None, (8, 64)], begins, 32) == ([None, 4], "")  # of an accumulated step
    assert after_shortage([None, None], [(0, 2), None], begins, 32) == ([10, None], "")
    assert after_shortage([None, None], [(0, 64), None], begins, 32) == ([1, None], "")
    assert after_shortage([None, None], [(24, 32), (8, 32)], begins, 32) == ([24, 8], "")
    caps, why = after_shortage([30, None], [(16, 32), (8, 32)], begins, 32)
    assert caps == [30, None] and "global batch of 32 (rank 0 16, rank 1 8)" in why
    assert after_shortage([30, None], [(16, 32), (8, 32)], begins, 32, shrinks=True) == ([16, 8], "")


def test_caps_that_do_not_hold_the_batch_among_those_that_are_left() -> None:
    """As at a start: what the scripts say counts, and a line says why."""
    assert among_others([8, None], [None, None], 32) == ([8, None], "")
    assert among_others([8, 24], [None, 24], 32) == ([8, 24], "")
    caps, why = among_others([8, 16], [None, 16], 32)
    assert caps == [None, 16] and "global batch of 32" in why and "(rank 0 8, rank 1 16)" in why
    assert among_others([8, 16], [8, 16], 32) == ([8, 16], "")  # the scripts' own: refused, as at a start
    shares = Shares("dynamic", 3, 32, caps=[8, 16, None])
    assert sum(shares.anew(None, caps, [None, None]).draw(32)) == 32
    with pytest.raises(EvenstepError, match="32"):
        shares.anew(None, [8, 16], [None, None])


PLAIN = """
    import os
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.ones(256, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=32))
    for batch, in loader:
        if es.rank() == 1 and len(batch) > 10:
            raise MemoryError(f"{len(batch)} rows")
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.rank() == 1 and es.step() == 1:
            print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "had", len(batch), flush=True)
"""


@pytest.mark.more
def test_a_plain_loop_goes_on_with_less(run: Run, script: Any) -> None:
    """16 of 32 samples, at first: half of them fit."""
    done = run("-n", "2", "--log-rank", "all", "--policy", "equal", script(PLAIN), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "attempt 1 had 8" in done.stdout and "attempt 0 had" not in done.stdout
    assert "ran out of memory before its first step: the next attempt gives it 1/2" in done.stderr


@pytest.mark.parametrize(
    ("given", "told", "wanted"),
    [
        (None, (8, 32), 8),  # samples of a step of 32
        (5, (8, 32), 5),
        (None, (8, 64), 4),  # of an accumulated one
        (None, (0, 2), 4),  # half of an equal part, of four ranks
        (None, (0, 64), 1),
    ],
)
def test_who_joins_has_no_more_than_its_device_had_room_for(
    given: int | None, told: tuple[int, int], wanted: int
) -> None:
    shares = Shares("auto", 1, 32)
    shares.given_caps = shares.said_caps = [given]
    loader = SimpleNamespace(train=True, shares=shares)
    environment = SimpleNamespace(memory_cap=told)
    session: Any = SimpleNamespace(rank=0, place=(4, 4), joining=True, environment=environment, loaders={"": loader})
    assert own_caps(session) == [(wanted, given)]
    session.joining = False
    assert own_caps(session) == [(given, given)]  # as es.prepare has heard
    session.joining, loader.shares = True, Shares("auto", 1, 32, schedule=lambda number, batch: [batch])
    assert own_caps(session) == [(None, None)]
