"""Which iterations over a training loader there were, so that a resumed script's are told apart: those that trained
are over, those that only looked are repeated, and the one under way goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from evenstep._core import EvenstepError

TRAINED, LOOKED, TAKEN = "trained", "looked", "taken"  # taken: left before the step that used its batch


class EpochDone(EvenstepError, StopIteration):
    """An epoch that was done before the checkpoint: a `for` loop ends, and a bare next() has a clear error."""


class Iterations:
    """The iterations of one loader; a checkpoint keeps them."""

    def __init__(self) -> None:
        self._past: list[list[Any]] = []  # runs [first epoch, how many, kind, tag] of those before the current one
        self._epoch: int | None = None  # of the current one, until it is filed
        self._tag = 0  # of the current one: its es.epochs loop (evenstep.loops)
        self._open = False
        self._commits = 0  # optimizer steps while it was open
        self._committed = 0  # optimizer steps
        self._used = False  # a step after it was left used its batch
        self._saved: dict[str, Any] | None = None  # the checkpoint's, until its cursor is reached
        self._at = 0  # iterations of this script so far
        self._loaded_at = 0  # how many there were when the checkpoint was loaded
        self.trained = False  # a step was made in this script

    # -- in a run --

    def begin(self, epoch: int, tag: int = 0, stepped: bool = False) -> None:
        """stepped: it goes on with one of before a checkpoint that had trained, even where no batch of it is left."""
        self._file()
        self._epoch, self._open, self._commits, self._used = epoch, True, int(stepped), False
        self._tag = tag
        self._at += 1

    def take_back(self) -> None:
        """The one that ended last had no batch left, and the script's iteration goes on with another epoch."""
        self._epoch = None
        self._at -= 1

    def moved(self, epoch: int, stepped: bool) -> None:
        """The one under way goes on in another epoch."""
        self._epoch = epoch
        self._commits += stepped

    def end(self) -> None:
        self._open = False

    def reopen(self) -> None:
        """It was not ended after all."""
        self._open = True

    def committed(self, mine: bool) -> None:
        """An optimizer step was made; mine: with a batch of this loader."""
        self.trained = self.trained or self._open or mine
        self._committed += 1
        if self._open:
            self._commits += 1
        elif mine:
            self._used = True

    def _file(self) -> None:
        if self._epoch is None:
            return
        _append(self._past, self._epoch, self._kind(), self._tag)
        self._epoch = None

    @property
    def stepped(self) -> bool:
        """Whether a step has used a batch of the last one to begin."""
        return self._commits > 0 or self._used

    def _kind(self) -> str:
        return TRAINED if self._commits else TAKEN if self._used else LOOKED

    def state(self) -> list[list[Any]]:
        """All before the cursor's."""
        if self._saved is not None:
            return list(self._saved["past"])
        past = [list(run) for run in self._past]
        if self._epoch is not None and not self._open:
            _append(past, self._epoch, self._kind(), self._tag)
        return past

    @property
    def first(self) -> bool:
        """Whether the last one to begin was the first of all."""
        return not self._past

    @property
    def before(self) -> int:
        """How many there were before the cursor's."""
        return _count(self.state())

    # -- where a pass comes again --

    def kept(self) -> dict[str, Any]:
        """All of it, as it is now."""
        return {**vars(self), "_past": [list(run) for run in self._past]}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Steps that were committed since then stay counted: of the batches that come again."""
        since, trained = self._committed - kept["_committed"], self.trained
        vars(self).update(kept, _past=[list(run) for run in kept["_past"]])
        self._commits += since
        self._committed += since
        self.trained = trained

    # -- in a resumed run --

    @property
    def resuming(self) -> bool:
        return self._saved is not None

    @property
    def replaying(self) -> bool:
        """Whether the script has come by an iteration of before the checkpoint, and not yet to the cursor's."""
        return self.resuming and self._at > self._loaded_at

    def load(self, past: list[list[Any]], epoch: int) -> None:
        self._saved = {"past": [[*run, 0][:4] for run in past], "epoch": epoch}
        self._loaded_at = self._at

    def go_to(self, epoch: int) -> None:
        """The next one is of this epoch, a cursor's; what came before it in this script stays."""
        self.load(self.state(), epoch)
        self.skip()
        self._loaded_at = self._at

    def next(self) -> tuple[str, int]:
        """What the script's next iteration is: its kind ("cursor": the one to go on with), and its epoch."""
        assert self._saved is not None
        left = self._at
        for first, count, kind, _ in self._saved["past"]:
            if left < count:
                # next() again, in answer to the end that it was told: the loop counts steps, not epochs
                if kind == TAKEN or (kind == TRAINED and isinstance(sys.exc_info()[1], EpochDone)):
                    return "jump", self._saved["epoch"]
                self._at += 1
                return kind, first + left
            left -= count
        return "jump" if isinstance(sys.exc_info()[1], EpochDone) else "cursor", self._saved["epoch"]

    def reached(self) -> None:
        """The cursor's iteration begins."""
        assert self._saved is not None
        self._past = [list(run) for run in self._saved["past"]]
        self._saved, self._epoch = None, None

    def skip(self, left: int = 0) -> None:
        """The script goes on with the cursor's, or with the last `left` before it."""
        if self._saved is not None:
            self._at = _count(self._saved["past"]) - left

    def skip_to(self, tag: int) -> None:
        """The script has passed all up to this tag."""
        if self._saved is not None:
            self._at = max(self._at, _count(run for run in self._saved["past"] if run[3] <= tag))

    @property
    def replayed(self) -> bool:
        """Whether the script has come by all that were before the cursor."""
        return self._saved is None or self._at >= _count(self._saved["past"])


def _append(runs: list[list[Any]], epoch: int, kind: str, tag: int) -> None:
    if runs and runs[-1][2:] == [kind, tag] and runs[-1][0] + runs[-1][1] == epoch:
        runs[-1][1] += 1
    else:
        runs.append([epoch, 1, kind, tag])


def _count(runs: Iterable[list[Any]]) -> int:
    return sum(count for _, count, _, _ in runs)


def epoch_done(epoch: int) -> EpochDone:
    return EpochDone(
        f"epoch {epoch} was done before the checkpoint that this run goes on from, so it has no batch\n"
        "  fix: loop with `for … in loader`, over epochs of es.epochs(n), or as long as es.step() < n"
    )
