"""Process groups of torch's that some ranks make without the others. Their name has how many groups a rank is in already, so that ranks
that are in other numbers of groups, as one of a host with fewer ranks than another, would wait for one another under two names."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_made: Counter[tuple[int, ...]] = Counter()


@contextmanager
def named_by_ranks(ranks: Sequence[int]) -> Iterator[None]:
    """A group of these ranks of the job is made inside, by all of them: its name is theirs, and how many of these ranks there were."""
    key = tuple(ranks)
    _made[key] += 1
    words = f"evenstep/{'_'.join(map(str, key))}/{_made[key]}"
    name = hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()
    c10d: Any = dist.distributed_c10d
    theirs = getattr(c10d, "_hash_ranks_to_str", None)  # a torch without it has names of its own
    if theirs is not None:
        c10d._hash_ranks_to_str = lambda _: name
    try:
        yield
    finally:
        if theirs is not None:
            c10d._hash_ranks_to_str = theirs
