"""How one model's buckets lie in its engine: in the order in which gradients come, and of the sizes that a measurement chose. Both
are learned in rounds and put in force between two, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.bucket_sizes import BucketSizes, sizes_of
from evenstep.learned_order import LearnedOrder

if TYPE_CHECKING:
    from evenstep.engine import Engine, Report
    from evenstep.steps import Steps


class BucketLayout:
    """`move(anew)`: anew() moves the engine's views; gradients that lie in its memory are to stay what they are."""

    def __init__(self, engine: Engine, name: str, steps: Steps, move: Callable[[Callable[[], bool]], None]) -> None:
        self._engine, self._steps, self._move = engine, steps, move
        self._order = LearnedOrder()
        self._sizes: BucketSizes | None = sizes_of(engine, name)
        self.watches = True  # when gradients come

    def saw(self, index: int) -> None:
        if self._order.learning:
            self._order.seen.append(index)
        if self._sizes is not None:
            self._sizes.saw(index)

    def between_rounds(self) -> None:
        """Before backward."""
        if self._order.wanted is not None:
            self._reorder(*self._order.wanted)
        sizes = self._sizes
        if sizes is None:
            return
        if sizes.wanted is not None:
            wanted, sizes.wanted = sizes.wanted, None
            self._move(lambda: self._engine.resize(*wanted))  # type: ignore[attr-defined]
        if sizes.done:
            self._sizes = None
        else:
            sizes.backward_begins()

    def round_ends(self, used: Sequence[int], report: Report) -> None:
        """Collective."""
        if self._order.learning and hasattr(self._engine, "reorder"):
            with self._steps.blocking():
                self._order.agree(self._steps.group, used)
            if hasattr(self._engine, "coming"):
                self._engine.coming = self._order.wanted  # a checkpoint may come first
        self._order.learning = False
        if self._sizes is not None:
            self._size(self._sizes, report)

    def _size(self, sizes: BucketSizes, report: Report) -> None:
        sizes.round_ends(report)
        if sizes.due:
            with self._steps.blocking():
                measuring = sizes.decide(self._steps.group)
            self._steps.times.blocks(measuring)  # in a group that counts none of its waiting there
            if sizes.words and self._steps.group.rank == 0:
                self._steps.telemetry.event(_core.EVENT_MESSAGE, self._steps.step, 0, sizes.words)
        self.watches = sizes.watching

    def take_order(self, order: tuple[list[int], list[int]] | None, parameters: int) -> None:
        """Of an engine whose bits depend on it: the order that a checkpoint was written with (None: the model's; the next
        round learns another). Between rounds; the same on all ranks. parameters: so many has the engine."""
        if not hasattr(self._engine, "order") or (self._engine.order == order and self._order.wanted is None):
            return
        if order is not None and sorted((*order[0], *order[1])) != list(range(parameters)):
            return  # of another model
        self._order = LearnedOrder()
        self._order.learning = order is None
        self._reorder(*(order or (list(reversed(range(parameters))), [])))

    def _reorder(self, order: list[int], late: list[int]) -> None:
        """Before the round after the first: the buckets in the order in which gradients come."""
        self._order.wanted = None
        self._move(lambda: self._engine.reorder(order, late))  # type: ignore[attr-defined]
