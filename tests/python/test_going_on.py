"""What ranks that go on without others, and processes that join them, take for known: in one process, without ranks that die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_prepare_gradients import Hasty

import evenstep as es
from evenstep import _core, checkpoint_last, vote
from evenstep.apart import Apart
from evenstep.checkpoint import _restore_random
from evenstep.environment import read_environment
from evenstep.errors import error_of
from evenstep.generation_told import Told
from evenstep.generations import Recovery
from evenstep.gradients import GradientSync
from evenstep.mended_group import MendedGroup
from evenstep.prepare import _take_place
from evenstep.regrouping import regroup
from evenstep.session import Session, in_place_of_session


@pytest.fixture
def session() -> Iterator[Any]:
    one = Session(read_environment())
    with in_place_of_session(one):
        yield one


def go_on(session: Any) -> None:
    """Among two ranks."""
    told = Told([0, 1], (1, 1, 0, True, False), 0, b"", None, "cpu:0", "box", 0, [], [], [], {})
    regroup(session, session.environment, [], [told, told])


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


def test_parameters_that_differ_are_looked_at_anew_with_those_that_join(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, looks = session.parameter_checks, []
    monkeypatch.setattr(checks, "_find", lambda: looks.append(session.step))
    checks._since, checks._asked_from, session.steps.step = 3, 20, 20
    ballots: Any = [SimpleNamespace(parameters=one, step=19) for one in (1, 2)]
    checks.heard(ballots)
    assert not looks  # they are known to differ
    go_on(session)
    checks.heard(ballots)  # as one that joined, which knows nothing of it
    assert looks == [20]


class Board:
    """What agents and ranks share: rank 1 joins rank 0 in generation 1, whose state lies in `gift`."""

    ranks, number, refused, gift = 2, 1, False, -1

    def has(self, rank: int, number: int) -> bool:
        return rank == 0 or number > 0

    def given(self, number: int) -> tuple[int, int]:
        return os.getpid(), self.gift

    def process(self, rank: int) -> int:
        return os.getpid()

    def offer(self, rank: int) -> None: ...

    def take(self, rank: int, number: int) -> None: ...


def recovery_of(session: Any, board: Board) -> Any:
    session.recovery = session.steps.recovery = recovery = Recovery(session, board)  # type: ignore[arg-type]
    recovery._said = ""
    return recovery


def test_who_joins_knows_which_checkpoint_is_due(session: Any) -> None:
    """Where ranks train on their own it may be that of some steps before."""
    board = Board()
    session.step, session.checkpointed, session.in_memory = 23, 10, 18
    giver = recovery_of(session, board)
    giver._committed = 23
    board.gift = giver._wrap(1)
    try:
        other = session_that_joins(1)
        other.environment = replace(other.environment, rank=1)
        with in_place_of_session(other):
            recovery_of(other, board)
            _take_place(other)
        assert other.step == 23 and other.recovery._committed == 23
        assert (other.checkpointed, other.in_memory) == (10, 18)
    finally:
        os.close(board.gift)


class Losing:
    """The script's only rank that is left, of some."""

    def __init__(self, session: Any) -> None:
        self.session = session
        session.environment = replace(session.environment, in_job=True)
        session.bootstrap = SimpleNamespace(environment=session.environment, met=lambda: None)
        session.telemetry = SimpleNamespace(event=lambda *_: None)
        self.recovery = recovery_of(session, Board())
        session.group = session.steps.group = MendedGroup(self._comm(), self.recovery)

    @staticmethod
    def _comm() -> Any:
        return _core.Comm(_core.Comm.create_segment(1, 1 << 16), 0, 1, 1 << 16)

    def lose(self, **position: int) -> None:
        """In whatever call of all ranks."""
        at = self.recovery
        where = {"committed": at.committed, "passes": at._passes, "calls": at._calls, **position}
        told = Told([0], (*where.values(), False, False), 0, b"", None, "cpu:0", "box", 0, [], [], [], {})  # type: ignore[arg-type]
        at.members = [0, 1 + at.number]
        at._go_on(at.number + 1, self._comm(), [told], 0.0, "calls" in position, "committed" in position)


def test_a_figure_says_that_a_rank_was_lost_in_another_call(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Losing(session)
    monkeypatch.setattr("evenstep.evaluation.training_session", lambda _: session)

    def begins() -> None:
        """A loop of the script's own over a loader that was prepared with train=False."""
        Apart(session, None, None)

    one.lose()
    assert es.reduce_mean(3.0) == 3.0  # there was no loop
    begins()
    assert es.reduce_mean(3.0) == 3.0
    one.lose()
    for figure in (lambda: es.reduce_mean(3.0), lambda: es.gather(torch.ones(2, 1))):
        with pytest.raises(es.RankLost):
            figure()
        assert es.reduce_mean(3.0) == 3.0 and es.gather(torch.ones(2, 1)).tolist() == [[1.0], [1.0]]  # it is told once
        begins()
        one.lose()
    begins()  # and the figure is of this loop
    assert es.reduce_mean(3.0) == 3.0
    session.latest = SimpleNamespace(trains=True, beside=None, at_work=SimpleNamespace(samples=1))
    one.lose()
    session.latest = None
    assert es.reduce_mean(3.0) == 3.0  # in a step, which was made again


def test_what_all_heard_in_a_step_that_stands_is_done_by_all(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are at it when the others come out of the step's commit."""
    one, saved = Losing(session), []
    at = one.recovery
    monkeypatch.setattr(session, "checkpoint_now", lambda: saved.append(at.committed))
    monkeypatch.setattr(at, "_has_committed", at._commits)
    at.heard(vote.STANDS | vote.SAVES)
    one.lose(committed=1)
    at.between_steps()  # and nobody stands, for there is a newer generation
    at.between_steps()
    assert saved == [1]
    at.heard(vote.STANDS | vote.SAVES)
    at._commits()
    one.lose()  # in a call before it
    at.between_steps()
    assert saved == [1, 2]
    at.heard(vote.STANDS | vote.SAVES)
    one.lose()  # the step is made again
    at.between_steps()
    assert saved == [1, 2]


def test_calls_in_which_nobody_meets_are_none(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank could be two of them ahead of another, where those that are left agree on who has made which."""
    one, checked = Losing(session), []
    at, checks = one.recovery, session.parameter_checks
    monkeypatch.setattr("atexit.register", lambda *_: None)
    turns = (1, True, 1), (1, False, 1), (1, True, 2), (2, True, 3)  # the second is another optimizer's of one turn
    for step, ends, calls in turns:
        session.steps.step = step
        checkpoint_last.remember(session, ends)
        assert at._calls == calls and session.last_step.step == step
    one.lose(calls=3)  # in the call of that turn: who has come out of it makes no other one for it, either
    checkpoint_last.remember(session, False)
    assert at._calls == 3 and session.last_step is None
    for every, ranks, calls in ((0, 2, 0), (5, 1, 0), (5, 2, 1)):
        checks.every, session.steps.group = every, SimpleNamespace(ranks=ranks)
        checks.check_by(checked.append)
        assert len(checked) == calls
    assert checked == [checks.check_now]


def test_a_loss_while_gradients_are_looked_at_makes_the_step_void(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, weight, hidden = Losing(session).recovery, torch.nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    session.optimizer_steps.watch(optimizer)
    session.world_size = 2
    session.steps.syncs = [SimpleNamespace(local=None, take_back=lambda: None, open=False)]

    def lost(*_: object) -> None:
        raise error_of("EVEN_ERR_PEER_LOST", "a rank was lost")

    def mends(error: Exception) -> bool:
        at._void_passes = at._passes + 1
        return True

    monkeypatch.setattr(at, "mends", mends)
    monkeypatch.setattr(at, "commit", lambda leads: pytest.fail("it is void"))
    monkeypatch.setattr(session.optimizer_steps._hidden, "hide", hidden.append)
    for owner, name in ((session.checks, "check"), (session.nonfinite, "before_step")):
        monkeypatch.setattr(session.checks, "check", lambda *_: None)
        monkeypatch.setattr(owner, name, lost)
        at._passes = at._void_passes = 0
        session.steps.backwards = 1
        optimizer.step()
        assert at.redoing
    assert len(hidden) == 2
    session.nonfinite.policy, at._void_passes = "skip", 0  # another optimizer's, of a turn that stands
    assert session.optimizer_steps._look(optimizer, fresh=False) == (True, True)
    session.nonfinite.policy, at._void_passes = "stop", 0
    with pytest.raises(es.EvenstepError, match="comes second are not finite on some rank"):
        session.optimizer_steps._look(optimizer, fresh=False)
    monkeypatch.setattr(session.checks, "check", lost)
    with pytest.raises(es.EvenstepError, match="a rank was lost"):
        session.optimizer_steps._look(optimizer, fresh=False)


def test_gradients_of_a_step_that_stands_are_not_compared_again(session: Any) -> None:
    """Another optimizer steps on them: on some ranks it has done so before they heard of the loss."""
    model = torch.nn.Linear(3, 2)
    parameters = list(model.parameters())
    steps = session.steps
    sync = GradientSync("model", model, Hasty(parameters), steps)  # type: ignore[arg-type]
    for parameter, view in zip(parameters, sync.engine.views):
        parameter.grad = view  # as a round leaves it
    before = list(sync.engine.views)
    sync.go_on([Hasty(parameters)])  # type: ignore[list-item]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    session.checks.watch(optimizer)
    steps.group = SimpleNamespace()  # nobody may be asked
    session.checks.check(optimizer, [model], [sync])
    assert all(p.grad is not None and p.grad is not view for p, view in zip(parameters, before))
    sync.go_on([Hasty(parameters)])  # type: ignore[list-item]
    session.checks.check(optimizer, [model], [sync])
    parameters[0].grad = torch.ones(2, 3)  # the script's own
    with pytest.raises(AttributeError):
        session.checks.check(optimizer, [model], [sync])
