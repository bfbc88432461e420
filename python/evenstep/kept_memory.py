"""Freed memory that a rank on a CPU keeps for its next step, instead of giving it back to the system and taking it again.

glibc's allocator gives large blocks back as they are freed, and a step that takes them again waits for the kernel to fill
them with zeros, page by page: page faults. docs/balancing.md has what that costs, and what memory grows to.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping

from evenstep._core import Memory

# By these the user has decided: mallopt(3) and glibc's tunables.
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def set_by_user(variables: Mapping[str, str]) -> bool:
    """Whether the environment says already what the allocator keeps."""
    return "glibc.malloc." in variables.get("GLIBC_TUNABLES", "") or any(name in variables for name in _OF_THE_USER)


def addresses_are_limited() -> bool:
    """Gaps between blocks take no memory once they are given back, but count where addresses do (ulimit -v, -d)."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in limits)


class KeptMemory:
    """Of the whole process, whose allocator is one."""

    def __init__(self) -> None:
        self._memory = Memory()
        self.on = False

    def begin(self, variables: Mapping[str, str] | None = None) -> bool:
        """From now on what is freed is kept; False: the allocator is none of glibc's, the user has set what it keeps, or
        the process has so many addresses and no more."""
        told = os.environ if variables is None else variables
        if not self.on and not set_by_user(told) and not addresses_are_limited():
            self.on = self._memory.keep(True)
        return self.on

    def end(self) -> None:
        """Nothing is kept any more, and what was kept goes back."""
        if self.on:
            self.on = False
            self._memory.keep(False)
            self._memory.give_back()

    def give_back(self) -> None:
        """What is kept goes back once; what is freed later is kept again."""
        if self.on:
            self._memory.give_back()

    @property
    def bytes(self) -> int:
        """0 where nothing is kept on purpose."""
        return self._memory.kept() if self.on else 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was = self.on
        self.end()
        try:
            yield
        finally:
            if was:
                self.begin()


kept_memory = KeptMemory()
