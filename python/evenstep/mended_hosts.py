"""The group of all ranks where only Gloo connects the hosts, and a rank may be lost while the others go on (`evenstep run --recovery`):
one for each generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.generation_torch import let_go, make_backend
from evenstep.group_end import wait_for
from evenstep.hosts_over_gloo import HostsOverGloo
from evenstep.rendezvous import open_group


class _UnderWay:
    """A call between the hosts."""

    def __init__(self, work: Any) -> None:
        self._work = work

    @property
    def over(self) -> bool:
        return bool(self._work.is_completed())


class MendedHosts(HostsOverGloo):
    """heed: raises where a rank of the group is lost (evenstep.group_end.wait_for). Gloo says of one that a connection is closed, and
    to who waits for it alone; ranks of its own host hear of it by the engine, and those that wait on other hosts by the agent's word.
    Why calls end is the agent's to say, too: the ranks tell one another nothing."""

    def __init__(
        self,
        inside: _core.Comm,
        between: Any,
        rank: int,
        host_of: Sequence[int],
        timeout_seconds: float,
        heed: Callable[[], None],
    ) -> None:
        super().__init__(inside, between, rank, host_of, None, timeout_seconds)
        self._heed = heed
        self._heard: EvenstepError | None = None
        self._under_way_between: list[_UnderWay] = []
        self._waited_ns = 0

    @property
    def engine(self) -> str:
        return "hosts-gloo" if len(self._teams) < self.ranks else "gloo"

    @property
    def wait_ns(self) -> int:
        """Time that this rank has waited for others, as `_core.Comm` counts it."""
        return self._inside.wait_ns + self._waited_ns

    def leave(self) -> None:
        """After `revoke`, when no call of this rank's is under way: nobody refers to the group any more."""
        if self._leads:
            let_go((self._between,), self._under_way_between)

    def _begun(self, begin: Callable[[], Any]) -> Any:
        work = super()._begun(begin)
        self._under_way_between = [one for one in self._under_way_between if not one.over] + [_UnderWay(work)]
        return work

    def _wait_for(self, work: Any) -> None:
        began = _core.clock_ns()
        try:
            wait_for(work, self._between, heed=self._look)
        finally:
            self._waited_ns += _core.clock_ns() - began

    def _look(self) -> None:
        try:
            self._heed()
        except EvenstepError as error:
            self._heard = error
            raise

    def _told(self, error: EvenstepError) -> EvenstepError:
        return error if error is self._heard else super()._told(error)

    def _say_why(self, words: str) -> None: ...

    def _why_said(self) -> str | None:
        return None


def open_mended_hosts(
    store: Any,
    rank: int,
    host_of: Sequence[int],
    *,
    name: str,
    timeout_seconds: float,
    members: Sequence[int] | None,
    over: _core.Over,
    look: Callable[[], None] | None,
    heeds: Callable[[], None] | None,
    heed: Callable[[], None],
) -> MendedHosts:
    """Collective over the group's ranks. name: that no other group of the store has; members: the ranks' numbers in the job; over, look,
    heeds: as of rendezvous.open_group."""
    team = [other for other, host in enumerate(host_of) if host == host_of[rank]]
    inside = open_group(
        store,
        team.index(rank),
        len(team),
        name=f"{name}/{host_of[rank]}",
        timeout_seconds=timeout_seconds,
        members=[members[other] if members is not None else other for other in team],
        messages=False,
        measures=False,
        over=over,
        look=look,
        heeds=heeds,
    )
    if inside is None:
        raise EvenstepError("the ranks of a host do not share its memory, and did before")
    between = None
    if team[0] == rank:
        hosts = max(host_of) + 1
        between = make_backend(
            "gloo",
            store,
            host_of[rank],
            hosts,
            name=f"{name}/between",
            timeout_seconds=timeout_seconds,
            look=look or heed,
        )
    return MendedHosts(inside, between, rank, host_of, timeout_seconds, heed)
