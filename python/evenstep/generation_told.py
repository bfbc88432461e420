"""What the members of a new generation tell one another before they go on, and the words for who goes and who comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from evenstep._core import EvenstepError

Turn = tuple[int, int]  # void passes that its rank has come to the end of, and turns of the pass under way


class Told(NamedTuple):
    """What a member of a new generation says of itself to the others."""

    members: list[int]
    position: tuple[int, int, int, bool, bool]
    begun: int  # the pass in which it has begun the next turn; 0: it has not
    result: bytes | str  # of its last call; words: why nobody can be given it
    speed: float | None
    device: str
    host: str
    pool: int  # of memory
    caps: list[
        tuple[int | None, int | None]
    ]  # of samples, its own and as its script says, of evenstep.regrouping.shares_in
    buckets: list[int | None]  # the same
    workers: list[tuple[int, int] | None]  # of evenstep.regrouping.own_workers
    timings: dict[int, list[Any]]  # by ranks' numbers in the job: what was measured of each, of the same
    place: int | None = None  # among the ranks that the job began with; None: it has none yet
    closures: tuple[int, int, int] = (0, 0, 0)  # its turn, and how many closures it has begun in it
    late: Sequence[dict[int, float]] = ()  # of each model under es.Stale: its weight in each of the late rounds
    adapted: dict[str, Any] | None = None  # where the global batch is adapted: what was decided of it
    has_values: bool = False  # in es.prepare: it has got the values that the first of all gives
    through_torch: Sequence[bool] = ()  # of each model: whether its gradients go through torch's Gloo

    def of_members(self) -> list[list[Any] | None]:
        """The timings of each member; of one that took a lost rank's place, what was measured of the last one lost."""
        lost = [rank for rank in self.timings if rank not in self.members]
        return [self.timings.get(rank) or (self.timings[lost.pop()] if lost else None) for rank in self.members]


def late_weights(told: Sequence[Told], model: int, committed: int, most: int) -> dict[int, float]:
    """Of the last rounds that stand, each with the sum of what all who tell weigh in it."""
    rounds: dict[int, float] = {}
    for one in told:
        for number, weight in one.late[model].items():
            if number < committed:
                rounds[number] = rounds.get(number, 0.0) + weight
    return {number: rounds[number] for number in sorted(rounds)[-most:]}


def adapted_by(told: Sequence[Told]) -> dict[str, Any] | None:
    """What was decided of the global batch by whoever has come furthest; None where it is not adapted."""
    known = [(one.adapted["looked"], one.position[1], one.adapted) for one in told if one.adapted is not None]
    return max(known, key=lambda one: one[:2])[2] if known else None


def closures_due(told: Sequence[Told], committed: int) -> dict[Turn, int]:
    """How many closures each must begin in each void turn after so many committed ones: as many as any has."""
    due: dict[Turn, int] = {}
    for one in told:
        if one.position[0] == committed:
            *turn, begun = one.closures
            key = (turn[0], turn[1])
            due[key] = max(begun, due.get(key, 0))
    return due


def name(ranks: Sequence[int], verb: str = "go") -> str:
    """ "rank 0 goes", "ranks 0, 2 and 3 go"."""
    if verb:
        verb = f" {verb}" + (("es" if verb.endswith("o") else "s") if len(ranks) == 1 else "")
    words = [str(rank) for rank in ranks]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{verb}"


def changed(number: int, gone: Sequence[int], new: Sequence[int], members: Sequence[int], seconds: float) -> str:
    """Who goes on without whom, and who has come, in one line: a rank may be lost while another one joins."""
    old = [rank for rank in members if rank not in new]
    without = f"without {name(gone, '')}" if gone else ""
    words = " ".join(filter(None, (f"{name(new, 'join')} {name(old, '')}" if new else f"{name(members)} on", without)))
    return f"generation {number}: {words} after {1e3 * seconds:.0f} ms"


def not_in_step() -> EvenstepError:
    return EvenstepError(
        "the ranks that are left are at different calls of the script, so they cannot go on without the one that was lost\n"
        "  fix: let all ranks make the same calls in the same order"
    )
