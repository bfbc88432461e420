"""A rank's blocks side by side, for models with BatchNorm: each in a thread of its own, of which one runs at a time, and
which meet with all other blocks of the batch, of all ranks, at every BatchNorm."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evenstep.environment import Environment
from evenstep.exact_random import NumPyGenerator, PythonGenerator, Randoms
from evenstep.feeds import BatchPlan
from evenstep.lockstep import LockstepGroup, Play, taken_lock
from evenstep.session import Session, in_place_of_session

if TYPE_CHECKING:
    from evenstep.steps import Steps


class _Turns(Play):
    """Each block has its random numbers to itself, and no 16-bit copies of weights from another: all threads have one cache of
    autocast, which a block then finds empty at each turn, whoever runs beside it."""

    def __init__(self, sessions: Sequence[Session], randoms: Sequence[Randoms]) -> None:
        super().__init__(sessions)
        self._randoms = randoms

    def act(self, rank: int, run: Callable[[int], Any]) -> Any:
        def begin(rank: int) -> Any:
            self._randoms[rank].begin()
            torch.clear_autocast_cache()
            return run(rank)

        return super().act(rank, begin)

    def pass_on(self, rank: int) -> None:
        self._randoms[rank].take()
        super().pass_on(rank)
        self._randoms[rank].put()
        torch.clear_autocast_cache()


class _BlockGroup:
    """One block's place among all blocks of the batch. `inside`: among those of its rank. A rank without blocks has a dummy
    one, which hears what the others say and is not heard."""

    def __init__(self, inside: LockstepGroup, rows: _Rows, number: int) -> None:
        self._inside, self._rows = inside, rows
        self.rank, self.ranks = number, sum(rows.counts)
        self._calls = 0

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """All blocks of a rank are given one tensor, which none may change."""
        mine = self._inside.everyone(values)
        self._calls += 1
        return self._rows.gather(self._calls, mine)

    def once(self, make: Callable[[], Any]) -> Any:
        """make(), which is the same for all blocks after the last call, made by one block of each rank."""
        return self._rows.once(self._calls, make)

    def exchange(self, record: bytes) -> list[bytes]:
        rows = self.gather_rows(torch.frombuffer(bytearray(record), dtype=torch.uint8), []).view(self.ranks, -1)
        return [bytes(row.tolist()) for row in rows]

    def sum_(self, values: torch.Tensor) -> None:
        rows = self.gather_rows(values.clone(), []).view(self.ranks, -1)
        values.copy_(self.once(lambda: rows.sum(0)))

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        values.copy_(self.gather_rows(values.clone(), []).view(self.ranks, -1)[root])

    def barrier(self) -> None:
        self.exchange(b"\0")

    def revoke(self, why: str = "") -> None:
        self._rows.steps.group.revoke(why)


class _Rows:
    """What the blocks of this rank say goes to the other ranks once, whichever block asks first; and so does what all of
    them make of the answer."""

    def __init__(self, steps: Steps, counts: Sequence[int]) -> None:
        self.steps, self.counts = steps, counts
        self._call, self._last = 0, torch.empty(0)
        self._made_of, self._made = 0, None

    def gather(self, call: int, mine: list[torch.Tensor]) -> torch.Tensor:
        if call != self._call:
            group = self.steps.group
            size = mine[0].numel()
            heard = torch.cat(mine) if self.counts[group.rank] else mine[0].new_empty(0)
            with self.steps.blocking():
                self._last = group.gather_rows(heard, [count * size for count in self.counts])
            self._call = call
        return self._last

    def once(self, call: int, make: Callable[[], Any]) -> Any:
        if call != self._made_of:
            self._made = make()
            self._made_of = call
        return self._made


class _Hand:
    """A thread that stays between steps, and with it what its kernels and the allocator keep for a thread. It has the
    number of threads and the treatment of denormals of whoever gives it something to do."""

    def __init__(self) -> None:
        self._given, self._done = taken_lock(), taken_lock()
        self._task: Callable[[], Any] | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def begin(self, task: Callable[[], Any]) -> None:
        """task() on this thread; it does not raise."""
        self._task = task
        self._given.release()

    def wait(self) -> None:
        self._done.acquire()

    def _serve(self) -> None:
        while True:
            self._given.acquire()
            assert self._task is not None
            self._task()
            self._task = None
            self._done.release()


class _Settings(NamedTuple):
    threads: int
    flushes: bool  # denormals
    autocast: torch.dtype | None  # of a context around the training


def _autocast_dtype() -> torch.dtype | None:
    """Of the CPU, where alone blocks run side by side."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _flushes_denormals() -> bool:
    return bool(torch.tensor(2.0**-1060, dtype=torch.float64).mul(1.0) == 0)


class Stage:
    """Runs this rank's blocks of one batch after the other; keeps what a block's place costs to make."""

    def __init__(self) -> None:
        self._places: list[Session] = []
        self._hands: list[_Hand] = []
        self._numpy, self._python = NumPyGenerator(), PythonGenerator()

    def run(
        self,
        steps: Steps,
        plan: BatchPlan,
        sizes: Sequence[int],
        counts: Sequence[int],
        seeds: Sequence[int],
        work: Callable[[int, Session], Any],
    ) -> list[Any]:
        """work(k, its session) for this rank's k-th block, the dummy one where it has none, with generators that begin with
        seeds[k]. `sizes`: samples of all blocks; `counts`: blocks of each rank."""
        first, own = sum(counts[: steps.group.rank]), counts[steps.group.rank]
        played = max(1, own)
        while len(self._places) < played:
            self._places.append(Session(dataclasses.replace(Environment(), world_size=played)))
        places = self._places[:played]
        scene, rows = _Turns(places, [Randoms(seed, self._numpy, self._python) for seed in seeds]), _Rows(steps, counts)
        results: list[Any] = [None] * played
        for number, place in enumerate(places):
            samples = sizes[first + number] if own else 0
            place.rank, place.world_size = first + number if own else 0, len(sizes)
            place.group = place.steps.group = _BlockGroup(LockstepGroup(scene, number), rows, place.rank)
            place.latest = place.steps.plan = dataclasses.replace(plan, shares=list(sizes), samples=samples)
            place.follows_statistics = number == 0
            place.norm_calls = 0
            place.steps.weight.forget()

        settings = _Settings(torch.get_num_threads(), _flushes_denormals(), _autocast_dtype())

        def one(number: int) -> None:
            results[number] = scene.act(number, lambda _: self._play(settings, work, number))

        with in_place_of_session(places[0]):
            self._all_at_once(scene, one)
        if scene.failure is not None:
            raise scene.failure
        return results

    def _play(self, settings: _Settings, work: Callable[[int, Session], Any], number: int) -> Any:
        """These settings are a thread's own, and one that is kept does not hear of a change."""
        if torch.get_num_threads() != settings.threads:
            torch.set_num_threads(settings.threads)
        torch.set_flush_denormal(settings.flushes)
        torch.set_autocast_cache_enabled(False)  # it would be empty after each meeting
        if settings.autocast is None:
            return work(number, self._places[number])
        with torch.autocast("cpu", settings.autocast, cache_enabled=False):
            return work(number, self._places[number])

    def _all_at_once(self, scene: Play, one: Callable[[int], None]) -> None:
        while len(self._hands) < scene.ranks:
            self._hands.append(_Hand())
        hands = self._hands[: scene.ranks]
        for number, hand in enumerate(hands):
            hand.begin(lambda number=number: one(number))  # type: ignore[misc]
        scene.start()
        try:
            for hand in hands:
                hand.wait()
        except (
            BaseException
        ) as error:  # an interrupt: the blocks end at their next meeting, and others take their threads' place
            scene.failure = scene.failure or error
            self._hands = []
            raise
