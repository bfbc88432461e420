"""A rank's blocks side by side, for models with BatchNorm: each in a thread of its own, of which one runs at a time, and
which meet with all other blocks of the batch, of all ranks, at every BatchNorm."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from evenstep.environment import Environment
from evenstep.feeds import BatchPlan
from evenstep.lockstep import LockstepGroup, Play
from evenstep.session import Session, in_place_of_session

if TYPE_CHECKING:
    from evenstep.steps import Steps


class _Turns(Play):
    """Each block has its random numbers to itself."""

    def pass_on(self, rank: int) -> None:
        numpy = sys.modules.get("numpy")
        state = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
        super().pass_on(rank)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        if numpy is not None:
            numpy.random.set_state(state[2])


class _BlockGroup:
    """One block's place among all blocks of the batch. `inside`: among those of its rank. A rank without blocks has a dummy
    one, which hears what the others say and is not heard."""

    def __init__(self, inside: LockstepGroup, rows: _Rows, number: int) -> None:
        self._inside, self._rows = inside, rows
        self.rank, self.ranks = number, sum(rows.counts)
        self._calls = 0

    def gather_rows(self, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
        mine = self._inside.everyone(values.clone())
        self._calls += 1
        return self._rows.gather(self._calls, mine).clone()

    def exchange(self, record: bytes) -> list[bytes]:
        rows = self.gather_rows(torch.frombuffer(bytearray(record), dtype=torch.uint8), []).view(self.ranks, -1)
        return [bytes(row.tolist()) for row in rows]

    def sum_(self, values: torch.Tensor) -> None:
        total = torch.zeros_like(values)
        for row in self.gather_rows(values, []).view(self.ranks, -1):
            total += row
        values.copy_(total)

    def broadcast_(self, values: torch.Tensor, root: int = 0) -> None:
        values.copy_(self.gather_rows(values, []).view(self.ranks, -1)[root])

    def barrier(self) -> None:
        self.exchange(b"\0")

    def revoke(self) -> None:
        self._rows.steps.group.revoke()


class _Rows:
    """What the blocks of this rank say goes to the other ranks once, whichever block asks first."""

    def __init__(self, steps: Steps, counts: Sequence[int]) -> None:
        self.steps, self.counts = steps, counts
        self._call, self._last = 0, torch.empty(0)

    def gather(self, call: int, mine: list[torch.Tensor]) -> torch.Tensor:
        if call != self._call:
            group = self.steps.group
            size = mine[0].numel()
            heard = torch.cat(mine) if self.counts[group.rank] else mine[0].new_empty(0)
            with self.steps.blocking():
                self._last = group.gather_rows(heard, [count * size for count in self.counts])
            self._call = call
        return self._last


class Stage:
    """Runs this rank's blocks of one batch after the other; keeps what a block's place costs to make."""

    def __init__(self) -> None:
        self._places: list[Session] = []

    def run(
        self,
        steps: Steps,
        plan: BatchPlan,
        sizes: Sequence[int],
        counts: Sequence[int],
        work: Callable[[int, Session], Any],
    ) -> list[Any]:
        """work(k, its session) for this rank's k-th block, the dummy one where it has none. `sizes`: samples of all blocks;
        `counts`: blocks of each rank."""
        first, own = sum(counts[: steps.group.rank]), counts[steps.group.rank]
        played = max(1, own)
        while len(self._places) < played:
            self._places.append(Session(dataclasses.replace(Environment(), world_size=played)))
        places = self._places[:played]
        scene, rows = _Turns(places), _Rows(steps, counts)
        results: list[Any] = [None] * played
        for number, place in enumerate(places):
            samples = sizes[first + number] if own else 0
            place.rank, place.world_size = first + number if own else 0, len(sizes)
            place.group = place.steps.group = _BlockGroup(LockstepGroup(scene, number), rows, place.rank)
            place.latest = place.steps.plan = dataclasses.replace(plan, shares=list(sizes), samples=samples)
            place.follows_statistics = number == 0
            place.norm_calls = 0
            place.steps.forget_weight()

        def one(number: int) -> None:
            results[number] = scene.act(number, lambda _: work(number, places[number]))

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(played)]
        with in_place_of_session(places[0]):
            for thread in threads:
                thread.start()
            scene.start()
            for thread in threads:
                thread.join()
        if scene.failure is not None:
            raise scene.failure
        return results
