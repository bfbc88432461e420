"""What the ranks tell one another at the end of every synchronised backward, and what they check in it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from evenstep._core import EvenstepError
from evenstep.memory import UNKNOWN as UNKNOWN

_FORMAT = struct.Struct("<qqqqdddQQQQIIiqqdQdqdQid")
BYTES = _FORMAT.size

WANTS_CHECKPOINT = 1
TAKEN = 2  # a hook took a gradient away before this rank's backward ended
SPARED = 8  # this rank had no samples, and no backward either, since the last optimizer step
FAILED = 4  # this rank's backward raised an error before it made a gradient
LOSS = 16  # a loss of this rank was not finite
GRADIENT = 32  # a gradient, where ranks keep theirs (es.LocalSGD, es.DiLoCo)
CHECKED = 64  # `parameters` is told
STANDS = 128  # rank 0: the agent asks the ranks to stand at the end of this step, for somebody can join
SAVES = 256  # the same, after a checkpoint: they are too few
VOTES = 1024  # this rank needs a vote in the next step, too (evenstep.quiet_passes)
FAILED_BEFORE = 2048  # as FAILED, in a pass since the last vote, in which no rank heard of another
LEAD = 16  # from this bit on a byte: so many steps ahead this rank's loading has to know its shares
ENDS = 512  # rank 0: the agent asks the ranks to save their state at the end of this step, and to end


@dataclass(frozen=True)
class Ballot:
    """One rank's record; what counts up does so since the last optimizer step that had a vote."""

    backward: int  # how many synchronised backward passes this rank has made
    step: int
    samples: int  # this rank's, of `batches`
    total: int  # the same of all ranks together
    busy_seconds: float  # for these
    loss: float  # sum over backward passes of weight * loss; NaN where one is not known, or is not a number (LOSS)
    weight: float  # of the batch now in backward
    enabled: int  # a bit for each model: not under no_sync
    fired: int  # a bit for each model: has gradients
    refired: int
    checksum: int  # of the global batches drawn
    buffers: int  # checksum of which buffers changed
    flags: int
    batches: int  # since the shares changed
    cap: int = -1  # of samples, by a limit of this rank's own (evenstep.memory)
    room: int = UNKNOWN  # so many more samples than it had its memory holds
    growth: float = 0.0  # bytes by which this rank's peak is above what it holds now
    parameters: int = 0  # sum of what all ranks must have alike (evenstep.parameter_checks), where CHECKED
    exchange_seconds: float = 0.0  # of the step before, a batch: for the exchange, by itself (evenstep.step_times)
    micro_batch: int = 0  # a larger share runs in pieces of so many samples; 0: in one …
    piece_samples: float = 0.0  # … each of which costs as much as so many more than its own (evenstep.piece_times)
    changed: int = (
        0  # a bit for each model: static_graph was said, and it has gradients of other parameters than before
    )
    drawn: int = 0  # batches, of any shares
    pass_seconds: float = 0.0  # as busy_seconds, with what was waited for others before the vote; 0: nothing was

    @property
    def lead(self) -> int:
        return self.flags >> LEAD & 255

    def pack(self) -> bytes:
        return _FORMAT.pack(
            self.backward,
            self.step,
            self.samples,
            self.total,
            self.busy_seconds,
            self.loss,
            self.weight,
            self.enabled,
            self.fired,
            self.refired,
            self.checksum,
            self.buffers,
            self.flags,
            self.batches,
            self.cap,
            self.room,
            self.growth,
            self.parameters,
            self.exchange_seconds,
            self.micro_batch,
            self.piece_samples,
            self.changed,
            self.drawn,
            self.pass_seconds,
        )


def unpack(record: bytes) -> Ballot:
    return Ballot(*_FORMAT.unpack(record))


def _odd_ranks(values: Sequence[object]) -> str:
    """Which ranks differ from the majority (from rank 0 where there is none)."""
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    odd = [str(rank) for rank, value in enumerate(values) if value != usual]
    return f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(odd)} differ"


def failed(ballots: Sequence[Ballot]) -> list[int]:
    """The ranks whose backward raised an error, where not all did alike."""
    for flag in (FAILED, FAILED_BEFORE):
        found = [rank for rank, ballot in enumerate(ballots) if ballot.flags & flag]
        if 0 < len(found) < len(ballots):
            return found
    return []


def refuse_failed(ranks: Sequence[int], rank: int) -> EvenstepError:
    """What rank `rank` raises where these have failed, and others have not."""
    before = "since the last synchronisation, and not on all ranks" if rank in ranks else f"not on rank {rank}"
    return EvenstepError(
        f"backward failed on rank {ranks[0]}, {before}, so the ranks are no longer in step\n"
        "  fix: the error is in that rank's output; where a batch may fail, catch it before backward"
    )


def fired(ballots: Sequence[Ballot]) -> int:
    """A bit for each model that some rank has gradients of."""
    return functools.reduce(int.__or__, (one.fired for one in ballots))


def spared(ballots: Sequence[Ballot]) -> list[int]:
    """The ranks that had no samples, and left backward out."""
    return [rank for rank, ballot in enumerate(ballots) if ballot.flags & SPARED]


def not_finite(ballots: Sequence[Ballot], what: int) -> list[int]:
    """The ranks whose loss (LOSS), or gradient (GRADIENT), was not."""
    return [rank for rank, ballot in enumerate(ballots) if ballot.flags & what]


def took(ballots: Sequence[Ballot]) -> list[int]:
    """The ranks on which a hook took a gradient away."""
    return [rank for rank, ballot in enumerate(ballots) if ballot.flags & TAKEN]


def changed(ballots: Sequence[Ballot], model: int) -> list[int]:
    """The ranks that have gradients of other parameters of this model than they had."""
    return [rank for rank, ballot in enumerate(ballots) if ballot.changed >> model & 1]


def check(ballots: Sequence[Ballot]) -> None:
    """Raises where the ranks are not doing the same thing."""
    first = ballots[0]
    if all(
        b.backward == first.backward
        and b.step == first.step
        and b.checksum == first.checksum
        and b.enabled == first.enabled
        and b.batches == first.batches
        and b.drawn == first.drawn
        for b in ballots
    ):
        return
    batches = [b.batches for b in ballots]
    for what, values, fix in (
        (
            "have drawn different numbers of batches",
            batches if len(set(batches)) > 1 else [b.drawn for b in ballots],
            "iterate over the prepared loader equally often on every rank; where the script passes over a batch by its loss, let "
            "es.reduce_mean(loss.detach()) decide it",
        ),
        (
            "see the samples in different orders, or split them differently",
            [b.checksum for b in ballots],
            "the sampler must depend only on torch's, random's and numpy's random numbers or set_epoch, and the "
            "dataset must be the same on every rank (an IterableDataset must give each the whole stream, not a part); a policy of your own must depend on what it is told alone",
        ),
        ("call optimizer.step() at different times", [b.step for b in ballots], "step on every rank alike"),
        (
            "use no_sync differently",
            [b.enabled for b in ballots],
            "enter es.no_sync for the same backward passes on every rank",
        ),
        (
            "call backward at different times",
            [b.backward for b in ballots],
            "call backward equally often on every rank",
        ),
    ):
        if len(set(values)) > 1:
            raise EvenstepError(f"the ranks {what}: {_odd_ranks(values)} ({values})\n  fix: {fix}")
