"""int8, onebit and topk of gradients on CPUs: encoded and exchanged bucket by bucket by the engine's thread, in C, without
the GIL, while backward goes on; and what both engines that encode tell checkpoints of what they leave out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from evenstep.engine import SharedEngine
from evenstep.generation_told import name

if TYPE_CHECKING:
    from evenstep import _core
    from evenstep.engine import Report

State = dict[str, torch.Tensor]


class KeepsLeftovers(Protocol):
    """An engine with error feedback."""

    views: list[torch.Tensor]

    def left_out(self, index: int, of_sums: bool) -> tuple[torch.Tensor, int] | None:
        """Where it keeps what it has left out of a parameter so far (flat, fp32, to be read and written between rounds)
        and from which of its elements on: of this rank's own gradients, or of sums that it encodes for all ranks."""

    def forget(self) -> None:
        """Nothing has been left out so far, and no step has had a round."""


def leftover_name(index: int, of_sums: bool, first: int) -> str:
    return f"sum {index} {first}" if of_sums else f"left {index}"


def named_leftovers(engine: KeepsLeftovers) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's own memory, by the names of a checkpoint."""
    for index in range(len(engine.views)):
        for of_sums in (False, True):
            kept = engine.left_out(index, of_sums)
            if kept is not None:
                values, first = kept
                yield leftover_name(index, of_sums, first), values


class Leftovers:
    """ "left I": what this rank has left out of parameter I; "sum I F": of sums, from its element F on. Numbers are those of
    the parameters, so that they mean the same in engines with other buckets."""

    feedback_counts_as_mean = False  # whether what is still to come is the mean of the ranks' leftovers; else their sum

    def feedback_state(self: KeepsLeftovers) -> State:
        """What this rank has left out so far, for a checkpoint."""
        return {key: values.cpu().clone() for key, values in named_leftovers(self)}

    def of_ranks(self, state: State, ranks: int) -> State:
        """What was left out while there were so many, for those that there are now."""
        return state

    def shared_state(self) -> State:
        """Of that what all ranks have alike, for one that joins."""
        return {}

    def load_feedback(self: KeepsLeftovers, state: State) -> None:
        """In place of all that is there: what is not in `state` begins at zero. What was left out of sums elsewhere counts
        with what this rank has left out."""
        self.forget()
        for key, saved in state.items():
            kind, _, numbers = key.partition(" ")
            if kind not in ("left", "sum"):
                continue
            index, first = map(int, numbers.split()) if kind == "sum" else (int(numbers), 0)
            whole = self.left_out(index, False) if index < len(self.views) else None
            if whole is None or whole[0].numel() < first + saved.numel():
                continue  # of another model
            part = self.left_out(index, True) if kind == "sum" else None
            if part is not None and part[1] == first and part[0].numel() == saved.numel():
                whole, first = part, 0
            whole[0][first : first + saved.numel()] += saved.to(whole[0].device)


def split_leftovers(ranks: Sequence[State], parts: int) -> State:
    """What all ranks have left out, a part of it for each of so many: as much is still to come."""
    total: State = {}
    for state in ranks:
        for key, values in state.items():
            if key.startswith("left "):
                total[key] = total[key] + values if key in total else values.clone()
    for state in ranks:
        for key, values in state.items():
            if key.startswith("sum "):
                _, index, first = key.split()
                total[f"left {index}"][int(first) : int(first) + values.numel()] += values  # every rank has that, too
    return {key: values / parts for key, values in total.items()}


Order = tuple[list[int], list[int]]


def order_of(state: State) -> Order | None:
    """In which buckets hold the gradients, as SharedEngine.reorder: what is left out, and the bits of a training that goes
    on, depend on it. None: the model's."""
    return (state["order"].tolist(), state["late"].tolist()) if "order" in state else None


class EncodedEngine(Leftovers, SharedEngine):
    """Parameters on the CPU of every rank. Between hosts the first rank of each sends one encoding for all that are there,
    and leaves out for all; the others have nothing left."""

    order: Order | None = None
    coming: Order | None = None  # that the next round will have
    takes_back = False  # rounds may have to count nothing
    _before: list[tuple[int, bool, int, int, int]] | None = (
        None  # where that lies which was before the first round since `stands`
    )
    _copies: State | None = None  # of it, where more rounds came
    _rounds = 0  # since then
    _in_round = False  # where what is left out lies is not known then

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._leaves_out = any(self.left_out(index, False) for index in range(len(self.views)))

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        kept, self.coming = self.feedback_state(), None
        self._copy_before()  # the memory goes
        if not super().reorder(order, late):
            return False
        whole = list(order) == list(reversed(range(len(self.views))))
        self.order = None if whole else (list(order), list(late))
        self.load_feedback(kept)
        return True

    def feedback_state(self) -> State:
        state = super().feedback_state()
        order = self.coming or self.order
        if order is not None:
            state["order"], state["late"] = (torch.tensor(part, dtype=torch.int64) for part in order)
        return state

    def left_out(self, index: int, of_sums: bool) -> tuple[torch.Tensor, int] | None:
        address, first, count = self._sync.left_out(self._place[index], of_sums)
        if count == 0:
            return None
        return _floats(address, count), first

    def forget(self) -> None:
        self._sync.forget()

    def discard(self) -> None:
        self._sync.discard()

    def keep(self, indices: Iterable[int]) -> None:
        self._copy_before()
        for index in indices:
            self._sync.keep(self._place[index])

    # -- where ranks may be lost --

    def begin(self, weight: float, step: int) -> None:
        if self.takes_back:
            self._remember()
        super().begin(weight, step)
        self._in_round = True

    def finish(self) -> tuple[Sequence[int], Report]:
        ended = super().finish()
        self._in_round = False
        return ended

    def _remember(self) -> None:
        """What is left out lies in one of two memories, and a round writes the other: the second round is the first that needs
        a copy."""
        self._rounds += 1
        if self._rounds == 1:
            where, places = self._sync.left_out, self._place
            self._before = [(i, s, *where(place, s)) for i, place in enumerate(places) for s in (False, True)]
        elif self._rounds == 2:
            self._copy_before()

    def _copy_before(self) -> None:
        if self._before is not None and self._copies is None:
            self._copies = {
                leftover_name(index, of_sums, first): _floats(address, count).clone()
                for index, of_sums, address, first, count in self._before
                if count
            }

    def stands(self) -> None:
        """The rounds since the last call count."""
        self._before, self._copies, self._rounds = None, None, 0

    def take_back(self) -> None:
        """They do not: what they had left out is as it was before."""
        self._copy_before()
        if self._copies is not None:
            self.load_feedback(self._copies)
        self.stands()

    def lost_with(self, ranks: Sequence[int]) -> str:
        if not self._leaves_out:
            return ""
        return f"what {self._options.compression} left out of the gradients of {name(ranks, '')} is lost"

    def take_leftovers(self) -> State:
        """For an engine that comes after this one: what this rank has left out in the rounds that count."""
        self._copy_before()
        kept = self._copies
        if kept is None:  # es.Stale knows it of each round
            kept = {} if self._in_round else {key: values.clone() for key, values in named_leftovers(self)}
        self.stands()
        return kept

    def again(self, comm: _core.Comm) -> EncodedEngine:
        """Another one for the same parameters; what this rank has left out goes with it."""
        kept = self.take_leftovers()
        other = super().again(comm)
        assert isinstance(other, EncodedEngine)
        other.takes_back = self.takes_back
        other.load_feedback(kept)
        return other


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
