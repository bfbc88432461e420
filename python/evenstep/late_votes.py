"""The votes of es.Stale: each travels beside the gradients of its pass, and is heard before these are used, so that no rank waits for
another in between."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from evenstep import vote
from evenstep.engine import SharedEngine
from evenstep.exits import ended_by_exception
from evenstep.group import as_bytes, gather_objects
from evenstep.stale import ends_alone

if TYPE_CHECKING:
    from evenstep.engine import Engine
    from evenstep.gradients import GradientSync
    from evenstep.group import Bootstrap, Group
    from evenstep.steps import Steps

_WORDS = -(-vote.BYTES // 4)  # of 32 bits, each a number of its own in a sum: exact in 64-bit floats


def open_late_votes(
    steps: Steps, sync: GradientSync, engines: Sequence[Engine], group: Group, bootstrap: Bootstrap | None
) -> LateVotes | None:
    """For a model whose gradients go through these. None where some rank's engine ends no round before all ranks ask for it, or only
    torch connects the ranks. Collective."""
    can = bootstrap is not None and all(map(ends_alone, engines))
    if not all(gather_objects(group, can)) or group.ranks < 2:
        return None
    assert bootstrap is not None
    values = torch.zeros(group.ranks * _WORDS, dtype=torch.float64)
    size = SharedEngine.arena_bytes([values])
    comms = [bootstrap.shared(size, "votes") for _ in engines]
    made = [SharedEngine([values], comm) for comm in comms if comm is not None]
    return LateVotes(steps, sync, made, group.rank) if len(made) == len(engines) else None


class LateVotes:
    """Of the one model that a session trains. engines: one for each vote that is under way at most."""

    def __init__(self, steps: Steps, sync: GradientSync, engines: Sequence[SharedEngine], rank: int) -> None:
        self._steps, self.sync, self._rank = steps, sync, rank
        self._late = len(engines)
        self._engines, self._free = engines, deque(engines)
        self._under_way: deque[SharedEngine] = deque()  # the oldest first
        self._read: deque[list[list[vote.Ballot]]] = deque()  # before those, not heard yet: of each turn
        self._without: list[list[vote.Ballot]] = []  # after all that were read, of passes that gave no rank gradients
        self.open = False  # a pass with such a vote was made since the last commit
        self.asked_from = 0  # the step of the last checkpoint: what votes of before ask for is done
        if sync.stale is not None:
            sync.stale.votes = self
        _drain_at_exit(self)

    @property
    def able(self) -> bool:
        """Whether the session trains this model alone."""
        return self._steps.syncs == [self.sync]

    @property
    def comes(self) -> bool:
        """Whether the vote of the pass under way is one; the same on all ranks."""
        return self._steps.quiet.agreed and self.able and self.sync.enabled

    def pass_ends(self, end_ns: int, weight: float) -> None:
        """Gives what this rank has to all, and takes what is due: the ballots, and where these find nothing wrong the gradients. Where
        the pass gave the model none on this rank, the others' ballots of it tell whether it did elsewhere, so that all take a turn, or
        none does: only who has none waits for that."""
        steps = self._steps
        has_gradients = self.sync.fired
        ballot = steps.votes.late_ballot(weight, steps.times.busy_until(end_ns))
        if has_gradients:
            due = self._due()
            self._begin(ballot)
        else:
            due = self._after_all(ballot)
        for ballots in due:
            steps.votes.hear(ballots)
        if has_gradients or not self._without:
            steps.exchanged_gradients(self.sync, self.sync.finish(again=False))
        else:
            self.sync.abandon()

    def _begin(self, ballot: vote.Ballot) -> None:
        """Hands this rank's over."""
        engine = self._free.popleft()
        record = bytearray(ballot.pack().ljust(4 * _WORDS, b"\0"))
        values = torch.zeros_like(engine.views[0])
        at = self._rank * _WORDS
        values[at : at + _WORDS] = torch.frombuffer(record, dtype=torch.int32)
        engine.begin(1.0, ballot.step)
        engine.ready(0, values)
        engine.complete()
        self._under_way.append(engine)
        self.open = True

    def _due(self) -> list[list[vote.Ballot]]:
        """Before `begin`: the ballots about the gradients that are due; of none in the first passes. Waits for all ranks'."""
        if len(self._read) + len(self._under_way) < self._late:
            return []
        if not self._read:
            self._read_oldest()
        return self._read.popleft()

    def _after_all(self, ballot: vote.Ballot) -> list[list[vote.Ballot]]:
        """Hands this rank's over, and waits for the others' of this pass: the same as `_due`, or none where no rank takes a turn."""
        if not self._free:
            self._read_oldest()
        self._begin(ballot)
        self.read_all()
        return self._read.popleft() if len(self._read) > self._late else []

    def rest(self) -> list[list[vote.Ballot]]:
        """All that were not heard: votes are no longer late. Collective."""
        self.read_all()
        left = [ballots for turn in (*self._read, self._without) for ballots in turn]
        self._read.clear()
        self._without = []
        return left

    def read_all(self) -> None:
        """So that what is kept of gradients under way is known to be of ranks that are in step. Raises EvenstepError where they are
        not. Collective."""
        while self._under_way:
            self._read_oldest()

    def _read_oldest(self) -> None:
        engine = self._under_way.popleft()
        _, report = engine.finish()
        self._steps.times.blocks(report.exposed_ns)
        words = as_bytes(engine.views[0].to(torch.int32))
        self._free.append(engine)
        rows = (words[at : at + vote.BYTES] for at in range(0, len(words), 4 * _WORDS))
        ballots = [vote.unpack(row) for row in rows]
        self._steps.votes.check(ballots)
        self._without.append(ballots)
        if vote.fired(ballots):
            self._read.append(self._without)
            self._without = []

    def forget(self) -> None:
        """Training goes on from elsewhere. Collective."""
        self.rest()
        self.asked_from = 0

    def commits(self) -> None:
        self.open = False

    def revoke(self) -> None:
        """Ends what the other ranks wait for, be it a vote or gradients that this rank has said to give."""
        gradients = self.sync.stale.engines if self.sync.stale is not None else []
        for engine in (*self._engines, *gradients):
            engine.revoke()  # type: ignore[attr-defined]  # all have it that end alone

    def drain(self) -> None:
        """At the script's end: the others may be as many steps behind, and need what this rank has begun."""
        with suppress(RuntimeError):  # a rank is lost: none needs it
            for engine in self._under_way:
                engine.finish()
            self._under_way.clear()
            if self.sync.stale is not None:
                self.sync.stale.wait()


_open: weakref.WeakSet[LateVotes] = weakref.WeakSet()
_process = 0  # that is to drain them


def _drain_at_exit(one: LateVotes) -> None:
    global _process
    _open.add(one)
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_at_exit, _process)


def _at_exit(process: int) -> None:
    if process == os.getpid() and not ended_by_exception():
        for one in list(_open):
            one.drain()
