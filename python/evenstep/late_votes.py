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
        self._free = deque(engines)
        self._under_way: deque[SharedEngine] = deque()  # the oldest first
        self._read: deque[list[vote.Ballot]] = deque()  # before those, not heard yet
        self.open = False  # a pass with such a vote was made since the last commit
        self.missed = False  # and gave this rank's model no gradient: its vote, and its turn, are still to come
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

    def pass_ends(self, end_ns: int, weight: float, last: bool = False) -> None:
        """Gives what this rank has to all, and takes what is due: the ballots, and where these find nothing wrong the gradients.
        last: the step comes."""
        steps, empty = self._steps, self._steps.weight.empty
        busy = steps.times.busy_until(end_ns)
        if not (self.sync.fired or empty or last):
            # another backward of the step may give the model gradients, or other ranks' did
            steps.passes(busy)
            self.sync.abandon()
            self.open = self.missed = True
            return
        ballot = steps.votes.late_ballot(weight, busy)
        ballots = self._due()
        self._begin(ballot)
        if ballots:
            steps.votes.hear(ballots)
        if not empty:
            steps.exchanged_gradients(self.sync, self.sync.finish(again=False))

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
        self.open, self.missed = True, False

    def _due(self) -> list[vote.Ballot]:
        """Before `begin`: the ballots about the gradients that are due; of none in the first passes. Waits for all ranks'."""
        if len(self._read) + len(self._under_way) < self._late:
            return []
        if not self._read:
            self._read_oldest()
        return self._read.popleft()

    def rest(self) -> list[list[vote.Ballot]]:
        """All that were not heard: votes are no longer late. Collective."""
        self.read_all()
        left = list(self._read)
        self._read.clear()
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
        self._read.append(ballots)

    def forget(self) -> None:
        """Training goes on from elsewhere. Collective."""
        self.rest()
        self.asked_from = 0

    def commits(self) -> None:
        self.open = self.missed = False

    def revoke(self) -> None:
        """Ends what the other ranks wait for."""
        for engine in (*self._under_way, *self._free):
            engine.revoke()

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
