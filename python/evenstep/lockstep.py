"""Several ranks played by one process: threads of which one runs at a time, and that meet as a group of ranks does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep._core import EvenstepError
from evenstep.session import Session, in_place_of_session


class LockstepGroup:
    """One played rank's place. The turn goes round, in rank order, at every collective call."""

    def __init__(self, play: Play, rank: int) -> None:
        self._play, self.rank, self.ranks = play, rank, play.ranks
        self._calls = 0

    def everyone(self, value: Any) -> list[Any]:
        """What each played rank gave."""
        self._calls += 1
        given = self._play.calls.setdefault(self._calls, {})
        given[self.rank] = value
        self._play.pass_on(self.rank)
        if len(given) < self.ranks:
            raise EvenstepError(
                f"rank {self.rank} of those that one process plays is in a call that not all come to\n"
                "  fix: all ranks must make the same calls: look for a branch that depends on the data"
            )
        self._play.calls.pop(self._calls - 1, None)
        return [given[rank] for rank in range(self.ranks)]

    def exchange(self, record: bytes) -> list[bytes]:
        return self.everyone(record)

    def sum_(self, values: torch.Tensor) -> None:
        values.copy_(torch.stack(self.everyone(values.clone())).sum(0))

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        values.copy_(self.everyone(values.clone())[root])

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return torch.cat(self.everyone(values.clone()))

    def barrier(self) -> None:
        self.everyone(None)

    def revoke(self, why: str = "") -> None: ...


def taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Ended(BaseException):
    """Another played rank failed: this one has nothing to wait for."""


class Play:
    """The turns of a scene: `start`, and `act` on a thread for each played rank."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.ranks = len(sessions)
        self.calls: dict[int, dict[int, Any]] = {}  # number of the call -> rank -> what it gave
        self.failure: BaseException | None = None
        self._sessions = sessions
        self._turns = [taken_lock() for _ in sessions]  # the one whose turn it is has its own
        self._over = [False] * self.ranks

    def start(self) -> None:
        self._turns[0].release()

    def act(self, rank: int, run: Callable[[int], Any]) -> Any:
        """This rank's whole part."""
        self._turns[rank].acquire()
        try:
            if self.failure is None:
                self._sessions[rank].take_place()
                return run(rank)
        except _Ended:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            self._over[rank] = True
            self._next(rank)

    def pass_on(self, rank: int) -> None:
        if not all(self._over[:rank] + self._over[rank + 1 :]):
            self._next(rank)
            self._turns[rank].acquire()
        if self.failure is not None:
            raise _Ended
        self._sessions[rank].take_place()

    def _next(self, rank: int) -> None:
        for other in (*range(rank + 1, self.ranks), *range(rank)):
            if not self._over[other]:
                self._turns[other].release()
                return


def play(sessions: Sequence[Session], run: Callable[[int], Any]) -> list[Any]:
    """run(rank) for each rank, as if each had a process, with its session and its place in a group. Raises what the first
    one that fails raises."""
    scene = Play(sessions)
    results: list[Any] = [None] * scene.ranks

    def one(rank: int) -> None:
        results[rank] = scene.act(rank, run)

    for rank, session in enumerate(sessions):
        session.group = session.steps.group = LockstepGroup(scene, rank)
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(scene.ranks)]
    with in_place_of_session(sessions[0]):
        for thread in threads:
            thread.start()
        scene.start()
        for thread in threads:
            thread.join()
    if scene.failure is not None:
        raise scene.failure
    return results
