"""es.ProcessSet: some ranks of the job that train together, as a job of their own with these ranks would."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.environment import Environment
from evenstep.group import Bootstrap, gather_objects
from evenstep.session import Session, enter, leave, of_sets, whole_session
from evenstep.set_generations import leave_word_to_sets, refuse_after_loss, train_apart

if TYPE_CHECKING:
    from typing_extensions import Self

_NAME = re.compile(r"(?!step-)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


class ProcessSet:
    """Ranks that train models of their own, beside what the other ranks train.

        teachers, students = es.ProcessSet([0, 1]), es.ProcessSet([2, 3])
        with teachers if teachers.included else students:
            model, optimizer, loader = es.prepare(model, optimizer, loader)

    Making one is collective over all ranks of the job, also those outside, in one order. Inside its `with` a rank is in a
    job of the set's ranks: es.rank() is its number in the set, and every call of es means the set. What was prepared
    belongs to the set for good: loops, backward passes and optimizer steps need no `with`.

    ranks: numbers in the job, in any order (the set has them sorted); or a process group of torch, such as one of a device
        mesh: each rank gives its own, so that one call makes the sets of all. A rank outside all groups gives what
        new_group has given it.
    name: of its checkpoints' folder; by default set-1, set-2, …, as they are made.
    """

    def __init__(self, ranks: Iterable[int] | Any, *, name: str | None = None) -> None:
        whole = whole_session()
        whole.join()
        whole.refuse_in_place("es.ProcessSet")
        refuse_after_loss(whole)
        told, problem = _ranks_of(ranks, whole.world_size)
        if not problem and name is not None and not _NAME.match(name):
            problem = f"its name is {name!r}: give up to 64 letters, digits, dots, dashes and underscores, not step-…"
        with whole.steps.blocking():
            everyone = gather_objects(whole.group, _Wish(told, name, problem))
        made = _agree(everyone)
        mine = next((known for known in made if known.ranks == told), None)
        self.ranks: tuple[int, ...] = told
        """Of the job, in order, as it was made."""
        self.name: str = mine.name if mine is not None else ""
        """Its checkpoints' folder."""
        self._session: Session | None = None
        included = mine is not None and whole.rank in told
        train_apart(whole, _ranks, self.name if included else "")
        if mine is not None and included:
            self._session = _open(whole, mine)
            of_sets.append(self._session)
            self._session.join()
        leave_word_to_sets(whole)

    def __repr__(self) -> str:
        return f"<evenstep.ProcessSet {self.name!r} of the ranks {list(self.ranks)}>"

    def __len__(self) -> int:
        return self.size

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    @property
    def included(self) -> bool:
        """Whether this process is in it."""
        return self._session is not None

    @property
    def size(self) -> int:
        """How many ranks it has; in a set that goes on without lost ones: that are left."""
        return len(self.ranks) if self._session is None else self._session.world_size

    @property
    def rank(self) -> int | None:
        """This process's number in it, 0 … size - 1, among those that are left; None outside."""
        return None if self._session is None else self._session.rank

    @property
    def session(self) -> Session:
        """Raises EvenstepError on a rank outside."""
        if self._session is None:
            raise EvenstepError(
                f"rank {whole_session().rank} is not in the process set {self.name!r} of the ranks {list(self.ranks)}\n"
                "  fix: ask its `included` before, and let the ranks outside do something else"
            )
        return self._session

    def __enter__(self) -> Self:
        enter(self.session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.session)
        if isinstance(error, EvenstepError):
            explain(error, self.session)


_of_groups: dict[int, tuple[Any, ProcessSet]] = {}
"""The sets that were made of process groups of torch, which stay as long."""


def process_set_of(group: Any) -> ProcessSet:
    """Itself, or the set of a process group of torch; making that is collective over all ranks of the job."""
    if isinstance(group, ProcessSet):
        return group
    known = _of_groups.get(id(group))
    if known is not None:
        return known[1]
    made = ProcessSet(group)
    if made.included:  # a rank outside has no group, but a number that stands for any
        _of_groups[id(group)] = (group, made)
    return made


def explain(error: EvenstepError, session: Session) -> None:
    """Says which ranks the numbers in an error of a set's collectives are."""
    words = whereabouts(session)
    text = str(error)
    if words and words not in text:
        first, newline, rest = text.partition("\n")
        error.args = (f"{first} ({words}){newline}{rest}", *error.args[1:])


def whereabouts(session: Session) -> str:
    made = _ranks.get(session.name)
    if not session.name or made is None:
        return ""
    ranks = made if session.recovery is None else session.recovery.members
    return f"process set {session.name!r}: its ranks 0 … {len(ranks) - 1} are the job's {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class _Wish:
    """What one rank gives."""

    ranks: tuple[int, ...]
    name: str | None
    problem: str


@dataclass(frozen=True)
class _Made:
    ranks: tuple[int, ...]
    name: str
    number: int


_ranks: dict[str, tuple[int, ...]] = {}
"""Of every set of the job, by its name."""


def _ranks_of(given: Any, world_size: int) -> tuple[tuple[int, ...], str]:
    """The ranks in order, and what is wrong with them. Not raised here: the other ranks wait for this one's word."""
    if type(given).__module__.startswith("torch.") or isinstance(given, int):
        return _ranks_of_group(given)
    try:
        ranks = [_whole_number(rank) for rank in given]
    except TypeError:
        return (), f"{given!r} is neither a list of ranks nor a process group of torch"
    strangers = [rank for rank in ranks if not 0 <= rank < world_size]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if not ranks:
        return (), "it has no ranks"
    if strangers:
        return (), f"rank {strangers[0]} is none of the job's, which are 0 … {world_size - 1}"
    if twice:
        return (), f"rank {twice[0]} is named twice in {ranks}"
    return tuple(sorted(ranks)), ""


def _whole_number(rank: Any) -> int:
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError
    return int(rank.__index__())


def _ranks_of_group(group: Any) -> tuple[tuple[int, ...], str]:
    import torch.distributed as dist

    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return (), ""
    if not isinstance(group, dist.ProcessGroup):
        return (), f"{group!r} is neither a list of ranks nor a process group of torch"
    return tuple(sorted(dist.get_process_group_ranks(group))), ""


def _agree(everyone: Sequence[_Wish]) -> list[_Made]:
    """The sets that the call makes, the same on all ranks. Raises EvenstepError on all ranks alike."""
    for rank, wish in enumerate(everyone):
        if wish.problem:
            raise EvenstepError(
                f"es.ProcessSet on rank {rank}: {wish.problem}\n"
                "  fix: give every rank of the job the same ranks, each once; or its own process group of torch"
            )
    for rank, wish in enumerate(everyone):
        for other in wish.ranks:
            theirs = everyone[other]
            if (theirs.ranks, theirs.name) != (wish.ranks, wish.name):
                raise EvenstepError(
                    f"es.ProcessSet: rank {rank} makes {_words(wish)}, and its rank {other} {_words(theirs)}\n"
                    "  fix: make the same sets in the same order on every rank of the job"
                )
    made, known = [], dict(_ranks)
    for ranks, name in sorted({(wish.ranks, wish.name or "") for wish in everyone if wish.ranks}):
        number = len(known) + 1
        chosen = name or f"set-{number}"
        if chosen in known:
            raise EvenstepError(
                f"es.ProcessSet: there is a set {chosen!r} already, of the ranks {list(known[chosen])}\n"
                "  fix: give each set a name of its own"
            )
        known[chosen] = ranks
        made.append(_Made(ranks, chosen, number))
    _ranks.update(known)  # all of the call's, or none
    return made


def _words(wish: _Wish) -> str:
    named = "" if wish.name is None else f" named {wish.name!r}"
    return (f"a set of the ranks {list(wish.ranks)}" if wish.ranks else "none") + named


def _open(whole: Session, made: _Made) -> Session:
    environment = _environment_of(whole.environment, made.ranks)
    bootstrap = Bootstrap(environment, members=made.ranks, name=f"set/{made.number}") if whole.in_job else None
    # One training writes a rank's record of steps: the first that it is in.
    taken = whole.steps.syncs or of_sets
    ring = _core.Telemetry(-1, whole.rank) if taken else whole.telemetry
    return Session(environment, bootstrap, ring, made.name)


def _environment_of(whole: Environment, ranks: Sequence[int]) -> Environment:
    """As a launcher would tell it a job of these ranks."""
    speeds = None if whole.speeds is None else tuple(whole.speeds[rank] for rank in ranks)
    return replace(whole, rank=ranks.index(whole.rank), world_size=len(ranks), speeds=speeds)
