"""A loss of which the gradient of another loss's mean over the batch is a part (a penalty on that gradient's norm, a step that is looked
through): on a rank it is the gradient of its own samples' mean, unless the script has exchanged it."""

from __future__ import annotations

from typing import Any

from evenstep import script_exchanges
from evenstep.graph_nodes import shape_of

_NODES = 512  # that are looked at, those next to the loss first
_WORDS = (
    "the loss is computed from the gradient of a mean over this rank's {0} samples ({1}, by autograd with create_graph=True), where one "
    "device has that of the whole batch, so parameters become others than there\n  fix: have the ranks tell one another that gradient, as "
    "docs/exactness.md says under Gradients inside a loss; or leave it where a rank's own is meant"
)


class OfGradients:
    """Remembers what such means were over. As many rows as samples may be by chance; as many times as many of two numbers are not."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], int] = {}  # by kind and rows for a sample: the samples
        self._moment = script_exchanges.so_far()

    def look(self, root: Any, samples: int) -> str:
        """In the graph behind a loss over so many samples of this rank. Nothing where the script has exchanged anything since the look
        before."""
        before, self._moment = self._moment, script_exchanges.so_far()
        if before is None or not script_exchanges.none_between(before, self._moment):
            return ""
        waiting: list[tuple[Any, bool]] = [(root, False)]
        known: set[tuple[Any, bool]] = set()
        for node, is_of_all in waiting:
            if len(known) == _NODES:
                break
            name = type(node).__name__
            is_mean = "BackwardBackward" in name and getattr(node, "_saved_reduction", None) == 1
            found = self._found(name, _rows(node), samples) if is_mean and is_of_all else ""
            if found:
                return found
            for following, number in node.next_functions:
                if following is None:
                    continue
                shape = shape_of(following, number) or ()
                beside = is_of_all or (len(shape) > 0 and shape[0] % samples != 0)
                if (following, beside) not in known:
                    known.add((following, beside))
                    waiting.append((following, beside))
        return ""

    def _found(self, name: str, rows: int, samples: int) -> str:
        times, rest = divmod(rows, samples)
        if times == 0 or rest:
            return ""
        before = self._seen.setdefault((name, times), samples)
        return _WORDS.format(samples, name) if before != samples else ""


def _rows(node: Any) -> int:
    """Of what such a mean is over, which the gradient has the shape of."""
    return (*(shape_of(node, 0) or ()), 1)[0]
