"""Freed memory that a rank on a CPU keeps for its next step, instead of giving it back to the system and taking it again.

glibc's allocator gives large blocks back as they are freed, and a step that takes them again waits for the kernel to fill
them with zeros, page by page: page faults. It is kept where half of the memory stays free beside it (EVENSTEP_KEEP_MEMORY:
on, wherever it fits; off): docs/balancing.md has what that costs, and what memory grows to.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping

from evenstep._core import EvenstepError, Memory
from evenstep.environment import Environment, kind_of_device

# By these the user has decided: mallopt(3) and glibc's tunables.
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def set_by_user(variables: Mapping[str, str]) -> bool:
    """Whether the environment says already what the allocator keeps."""
    return "glibc.malloc." in variables.get("GLIBC_TUNABLES", "") or any(name in variables for name in _OF_THE_USER)


def addresses_are_limited() -> bool:
    """Gaps between blocks take no memory once they are given back, but count where addresses do (ulimit -v, -d)."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in limits)


def asked_for(environment: Environment, parameters_on: str) -> bool:
    """parameters_on: the kind of device; "": they are not there yet. Gaps between blocks would count under the user's limit,
    and lower what a rank takes for good."""
    kinds = {kind_of_device(environment.device), parameters_on} - {""}
    return environment.keep_memory != "off" and environment.memory_limit is None and kinds == {"cpu"}


# Of a step's peak: by so much gaps between blocks may make it grow before what is kept goes back once.
_GROWTH, _GROWTH_BYTES = 1.25, 32 << 20
_STEPS = (
    128  # whose peaks tell what steps need, at first and after all went back: a whole of MemoryWatch's 64 among them
)


class PeakGrowth:
    """Whether peaks have grown, though no step had more samples, since what was kept went back last. It may be the script that
    needs more now (longer sequences): then all went back once for nothing, and the new peaks are what later ones are compared
    with."""

    def __init__(self) -> None:
        self._samples, self._most, self._until = -1, 0, 0

    def seen(self, step: int, samples: int, peak: int) -> bool:
        """The peak of a step, or of all since the last look; True: what is kept is to go back."""
        if samples > self._samples:
            self._samples, self._most, self._until = samples, 0, step + _STEPS
        if step <= self._until:
            self._most = max(self._most, peak)
            return False
        if peak <= self._most * _GROWTH + _GROWTH_BYTES:
            return False
        self._most, self._until = 0, step + _STEPS
        return True


class KeptMemory:
    """Of the whole process, whose allocator is one."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._sees_forks = self._given_back = False
        self._least = 0  # what the process held right after all had gone back
        self.on = False
        self.ended_for = self._untold = ""
        self.half_stays_free = (
            False  # what is kept goes back for good where less than half of the memory is free beside it
        )

    def begin(self, variables: Mapping[str, str] | None = None, *, half_stays_free: bool = False) -> bool:
        """From now on what is freed is kept; False: the allocator is none of glibc's, the user has set what it keeps, or
        the process has so many addresses and no more."""
        self.half_stays_free = half_stays_free
        told = os.environ if variables is None else variables
        if not self.on and not set_by_user(told) and not addresses_are_limited():
            self.on = self._memory.keep(True)
            self._given_back = False
            if self.on and not self._sees_forks:
                os.register_at_fork(before=self.give_back, after_in_child=self._in_child)
                self._sees_forks = True
        return self.on

    def end(self, why: str = "memory is short") -> None:
        """Nothing is kept any more, and what was kept goes back."""
        if self.on:
            self.on, self.ended_for, self._untold = False, why, why
            self._memory.keep(False)
            self._give_back()

    def take_end(self) -> str:
        """Why nothing is kept any more, once; "": nothing to say."""
        why, self._untold = self._untold, ""
        return why

    def give_back(self) -> None:
        """What is kept goes back once; what is freed later is kept again."""
        if self.on:
            self._give_back()

    def take_given_back(self) -> bool:
        """Whether that was since the last call."""
        was, self._given_back = self._given_back, False
        return was

    def of(self, held: int) -> int:
        """Of so many bytes that the process holds; 0 where nothing is kept on purpose. The allocator counts what went back as
        free until it is taken again: no more is kept than has come since."""
        return min(self._memory.kept(), max(0, held - self._least)) if self.on else 0

    def _give_back(self) -> None:
        self._memory.give_back()
        self._given_back, self._least = True, 0
        with contextlib.suppress(EvenstepError):
            self._least = self._memory.read()[0]

    def _in_child(self) -> None:
        """A worker of a DataLoader's, say: it is no rank that makes steps."""
        if self.on:
            self.on = False
            self._memory.keep(False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was, told = self.on, (self.ended_for, self._untold)
        self.end()
        try:
            yield
        finally:
            self.ended_for, self._untold = told
            if was:
                self.begin(half_stays_free=self.half_stays_free)


kept_memory = KeptMemory()


def begin_where_asked(environment: Environment, parameters_on: str) -> bool:
    """parameters_on: as of `asked_for`."""
    asked = asked_for(environment, parameters_on)
    return asked and kept_memory.begin(half_stays_free=environment.keep_memory == "auto")
