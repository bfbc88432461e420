"""The sizes of gradient buckets by measurement, where nobody said which (bucket_cap_mb, reduce_bucket_size).

Some steps run with the engine's own sizes. Where they wait for their exchange, rank 0 asks a model of it which sizes would end it
first: by when gradients come, and what an all-reduce costs in this group (the table of costs, measured where it lacks that). As
many steps run with those, and they stay where the steps were shorter. Ranks meet twice for it; sums are the same bits.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenstep import _core, comm_costs
from evenstep.comm_debug import note
from evenstep.engine import FIRST_BUCKET_BYTES, Engine, Report, SharedEngine
from evenstep.group import broadcast_bytes, gather_bytes

if TYPE_CHECKING:
    from evenstep.group import Group

WARM = 2
"""Rounds that say nothing: in the first the order of gradients is learned, in the next memory is new."""
ROUNDS = 8
LEAST = 1 << 20
"""Bytes of gradients: fewer are a bucket or two, whatever their size."""
WORTH = 0.02
"""Of backward and what is exchanged after it: less is not worth a look, nor a change."""
FORMER = (4 << 20, FIRST_BUCKET_BYTES)
"""The engine's own, in words only."""


class _Rounds:
    """What some of them took on this rank, in seconds."""

    def __init__(self, parameters: int) -> None:
        self._count = parameters
        self.backward: list[float] = []  # until the last gradient
        self.exposed: list[float] = []  # what the exchange took after it
        self._ready: list[list[float]] = []  # one a round: each parameter's gradient; 0: none
        self.begin()

    def begin(self) -> None:
        self._began = _core.clock_ns()
        self._came = [0.0] * self._count

    def saw(self, index: int) -> None:
        if index < self._count:
            self._came[index] = (_core.clock_ns() - self._began) / 1e9

    def end(self, exposed_ns: int) -> None:
        self.backward.append(max(self._came, default=0.0))
        self.exposed.append(exposed_ns / 1e9)
        self._ready.append(self._came)

    def pack(self) -> bytes:
        """The same length on all ranks."""
        ready = [statistics.median(moments) for moments in zip(*self._ready)]
        return array("d", [*self.backward, *self.exposed, *ready]).tobytes()


class Seen:
    """What such rounds took on all ranks: typical seconds."""

    def __init__(self, packed: Sequence[bytes], parameters: int) -> None:
        rows = [array("d", one) for one in packed]
        rounds = (len(rows[0]) - parameters) // 2
        # A rank that is early waits for the others in the exchange: what it is, the last one sees.
        exposed = [min(row[rounds + k] for row in rows) for k in range(rounds)]
        backward = [max(row[k] for row in rows) for k in range(rounds)]
        self.exposed = statistics.median(exposed)
        self.whole = statistics.median(a + b for a, b in zip(exposed, backward))
        self.ready = [max(row[2 * rounds + p] for row in rows) for p in range(parameters)]


class BucketSizes:
    """Of one model's engine; the same calls on all ranks."""

    def __init__(self, engine: SharedEngine, name: str) -> None:
        self._engine, self._name = engine, name
        self._parameters = len(engine.views)
        self._left = WARM + ROUNDS
        self._rounds = _Rounds(self._parameters)
        self._before: Seen | None = None  # with the engine's own; then others are on trial
        self.wanted: tuple[int, int] | None = None  # before the next round; to be taken
        self.done = False
        self.words = ""  # of the sizes that stay, where they are not the engine's own

    # -- in a round --

    @property
    def watching(self) -> bool:
        return not self.done and self._left <= ROUNDS

    def backward_begins(self) -> None:
        if self.watching:
            self._rounds.begin()

    def saw(self, index: int) -> None:
        self._rounds.saw(index)

    def round_ends(self, report: Report) -> None:
        if self.watching:
            self._rounds.end(report.exposed_ns)
        self._left -= 1

    # -- between rounds --

    @property
    def due(self) -> bool:
        return not self.done and self._left == 0

    def decide(self, group: Group) -> int:
        """Collective, when it is due. How many ns it took to measure calls."""
        seen = Seen(gather_bytes(group, self._rounds.pack()), self._parameters)
        if self._before is None:
            return self._look(group, seen)
        self._judge(seen, self._before)
        return 0

    def _say(self, words: str) -> None:
        if self._engine.comm.rank == 0:
            note(f"buckets of model {self._name!r}: {words}")

    def _look(self, group: Group, seen: Seen) -> int:
        took = f"{1e3 * seen.exposed:.3g} of {1e3 * seen.whole:.3g} ms"
        if seen.exposed < WORTH * seen.whole:
            self.done = True
            self._say(f"{_in_words(*FORMER)}, as always: the exchange takes {took} after backward, no size saves more")
            return 0
        measuring = self._measure(group)
        found = array("d", [0.0] * 4)
        shape = _shape(self._engine)
        if group.rank == 0 and _known(self._engine, shape):
            found = array("d", self._engine.better_sizes(seen.ready, max(seen.ready), comm_costs.table(), shape))
        found = array("d", broadcast_bytes(group, found.tobytes()))
        sizes, before, after = (int(found[0]), int(found[1])), found[2], found[3]
        if sizes == (0, 0) or before - after < WORTH * seen.whole:
            self.done = True
            self._say(
                f"{_in_words(*FORMER)}, as always: the exchange takes {took} after backward, and by what calls cost "
                f"{_in_words(*sizes) if any(sizes) else 'no others'} would save {1e3 * (before - after):.3g} ms"
            )
            return measuring
        self._say(
            f"{_in_words(*sizes)} on trial: the exchange takes {took} after backward, and by what calls cost would end "
            f"{1e3 * (before - after):.3g} ms sooner"
        )
        self._before, self.wanted, self._trial = seen, sizes, sizes
        self._left, self._rounds = 1 + ROUNDS, _Rounds(self._parameters)
        return measuring

    def _measure(self, group: Group) -> int:
        """What calls cost, where the table of rank 0 does not know it."""
        comm, shape = self._engine.comm, _shape(self._engine)
        lacks = group.rank == 0 and not _known(self._engine, shape)
        if broadcast_bytes(group, bytes([lacks])) == b"\0":
            return 0
        began = _core.clock_ns()
        comm.measure(comm_costs.table() if group.rank == 0 else None, shape, comm_costs.MEASURE_SECONDS)
        if group.rank == 0:
            comm_costs.keep()
        return _core.clock_ns() - began

    def _judge(self, seen: Seen, before: Seen) -> None:
        self.done = True
        took = f"a step's backward and exchange {1e3 * seen.whole:.4g} ms, not {1e3 * before.whole:.4g}"
        if seen.whole < before.whole:
            self.words = f"model {self._name!r}: {_in_words(*self._trial)}: {took} (measured)"
            self._say(f"{_in_words(*self._trial)} stay: they make {took}")
        else:
            self.wanted = 0, 0
            self._say(f"{_in_words(*FORMER)} again: others made {took}")


def sizes_of(engine: Engine, name: str) -> BucketSizes | None:
    """None where they stay as they are."""
    may = isinstance(engine, SharedEngine) and engine.chooses_sizes and _bytes(engine) >= LEAST
    return BucketSizes(engine, name) if may else None  # type: ignore[arg-type]


def _bytes(engine: SharedEngine) -> int:
    return sum(view.numel() * view.element_size() for view in engine.views)


def _shape(engine: SharedEngine) -> str:
    return engine.shape or "not known"


def _known(engine: SharedEngine, shape: str) -> bool:
    return comm_costs.table().find("all_reduce", shape, engine.comm.engine, "call", 1 << 20) is not None


def _in_words(cap: int, first: int) -> str:
    def size(count: int) -> str:
        return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"

    return f"buckets of {size(cap)}, the first of {size(first)}"
