"""The ranks' group where some of them may be lost: calls of the script's that are made again by those that are left, or fail on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.call_results import Packs, packed
from evenstep.errors import error_as
from evenstep.group import SharedGroup, as_bytes

if TYPE_CHECKING:
    from evenstep.generations import Recovery
    from evenstep.mended_hosts import MendedHosts

T = TypeVar("T")

Heed = Optional[Callable[[], None]]
"""Raises where a call waits for a rank that is lost (evenstep.group_end.wait_for)."""

_LOST = ("EVEN_ERR_PEER_LOST", "EVEN_ERR_REVOKED")


class RankLost(EvenstepError):
    """A rank was lost before it gave its part to a call of the script's, and that part is in nobody's hands. Those that are left
    all raise it at that call, and can go on from there."""


def is_lost(error: BaseException) -> bool:
    """Whether it says that a rank has gone, or that another one has heard so, and nobody has dealt with it yet."""
    told = isinstance(error, RankLost)  # those that are left go on together already
    return isinstance(error, EvenstepError) and not told and getattr(error, "status", "") in _LOST


def rank_lost(what: str, fix: str) -> RankLost:
    return error_as(RankLost, "EVEN_ERR_PEER_LOST", what, fix)


def part_lost() -> RankLost:
    return rank_lost(
        "a rank was lost before it gave its part to this call, and that part is in nobody's hands",
        "catch es.RankLost and begin again what the call belongs to: all that are left raise it here; uncaught, the job "
        "starts again from its last checkpoint",
    )


class MendedGroup(SharedGroup):
    """The job's own group, over the memory of whoever is left.

    A call in which a rank is lost is made again by the others, or ends with what one of them had got from it already. Where
    it asks for what the lost rank would have given, it raises RankLost on all: outside the training loop, whose figures are
    then those of whoever is left.
    """

    def __init__(self, comm: _core.Comm | MendedHosts, recovery: Recovery) -> None:
        super().__init__(comm)
        self._recovery = recovery

    def heed(self) -> None:
        """For who waits for the others by means that say nothing of a loss: raises where one is lost, or stands still for too long."""
        self._recovery.heed()

    def take(self, comm: _core.Comm | MendedHosts) -> None:
        """Goes on over another one."""
        if not isinstance(self.comm, _core.Comm):
            self.comm.leave()
        self.comm = comm
        self.rank, self.ranks = comm.rank, comm.ranks
        self._bytes = -1

    def call(
        self,
        make: Callable[[], T],
        keep: Callable[[T], Packs],
        unpack: Callable[[bytes], T],
        asks: Callable[[], bool],
    ) -> T:
        """make(), to which all ranks come. keep: what packs its result for a rank that lacks it. asks: whether it needs what each
        of them gives."""
        recovery = self._recovery
        if recovery.calling:  # part of another one
            return make()
        recovery.begin_call()
        try:
            while True:
                try:
                    result = make()
                    kept = keep(result)
                except EvenstepError as error:
                    given = recovery.mend_call(error, asks)
                    if given is not None:
                        return unpack(given)
                else:
                    recovery.call_ended(kept)
                    return result
        finally:
            recovery.end_call()

    def barrier(self) -> None:
        self.call(super().barrier, lambda _: bytes, lambda _: None, lambda: False)

    def sum_(self, values: torch.Tensor) -> None:
        plain, mine = super().sum_, values.clone()

        def make() -> torch.Tensor:
            values.copy_(mine)
            plain(values)
            return values

        def unpack(given: bytes) -> torch.Tensor:
            return values.copy_(torch.frombuffer(bytearray(given), dtype=values.dtype).view(values.shape))

        self.call(make, lambda sums: packed(as_bytes(sums)), unpack, self._recovery.needs_all)

    def meet(self) -> None:
        """The meeting that commits a step: no call of the script's."""
        super().barrier()


def heed_over(group: Any, backend: str) -> Heed:
    """For calls of a process group of torch's with this backend, of the ranks of `group`: where one may be lost, and the others go on
    over another one."""
    return group.heed if isinstance(group, MendedGroup) and backend == "gloo" else None
