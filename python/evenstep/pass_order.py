"""Which loaders a pass's batches came of, one after the other: made again, it must ask for the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstep._core import EvenstepError

if TYPE_CHECKING:
    from evenstep.data_course import DataCourse


class PassOrder:
    """Of the pass under way."""

    def __init__(self) -> None:
        self._came: list[DataCourse] = []
        self._wanted: list[DataCourse] = []  # of one that was void, what has not come again

    def begins(self) -> None:
        """Another pass, with the batch that came last."""
        self._came = self._came[-1:]

    def arrives(self, loader: DataCourse) -> None:
        """Raises EvenstepError where that is another one than came here before."""
        if self._wanted and self._wanted.pop(0) is not loader:
            raise EvenstepError(
                "a rank was lost in a step, whose batches come again, but the script asks another loader for its next one "
                "(EVEN_ERR_PEER_LOST)\n"
                "  fix: ask all loaders in each step, in the same order: for a, b in zip(first, second)"
            )
        self._came.append(loader)

    def comes_again(self) -> None:
        """It was void."""
        self._wanted, self._came = [*self._came, *self._wanted], []

    def drop(self, loader: DataCourse, count: int) -> None:
        """The last so many of its batches were only looked at."""
        places = [place for place, one in enumerate(self._came) if one is loader]
        for place in reversed(places[-count:]):
            del self._came[place]

    def forget(self, loader: DataCourse) -> None:
        """What came of it does not come again."""
        self._came = [one for one in self._came if one is not loader]
        self._wanted = [one for one in self._wanted if one is not loader]
