"""Whether a script's ranks have told one another anything by calls of its own: es.gather and what is like it, and calls of
torch.distributed on groups other than those that Evenstep makes for itself."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

_UNSEEN = ("mpi4py.MPI", "horovod.torch", "evenstep.comm")
"""Modules of which nobody counts the calls here."""

_ours: set[str] = set()  # names of torch's groups that the script does not know of
_made = 0

Moment = tuple[int, dict[str, int]]
"""How often es.gather and the like were called, and torch's groups by their names."""


def made() -> None:
    """The script has called what brings numbers of all ranks together."""
    global _made
    _made += 1


def is_ours(group: Any) -> None:
    """Calls of this group of torch's are none of the script's."""
    name = getattr(group, "group_name", None)  # a rank outside it has another object
    if isinstance(name, str):
        _ours.add(name)


def is_known(group: Any) -> bool:
    """Whether it is one of Evenstep's own."""
    return getattr(group, "group_name", None) in _ours


def so_far() -> Moment | None:
    """To be compared with a later moment; None: it cannot be told."""
    if any(name in sys.modules for name in _UNSEEN):
        return None
    try:
        return _made, _calls()
    except (AttributeError, RuntimeError):  # a backend that does not count, another torch
        return None


def none_between(before: Moment, after: Moment | None) -> bool:
    """Whether it is certain that nothing was called in between; not where a group has ended since."""
    if after is None or before[0] != after[0] or not before[1].keys() <= after[1].keys():
        return False
    return all(count == before[1].get(name, 0) for name, count in after[1].items())


def _calls() -> dict[str, int]:
    """By the groups' names."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    known = dist.distributed_c10d._world.pg_map
    return {group.group_name: _calls_of(group) for group in list(known) if group.group_name not in _ours}


def _calls_of(group: Any) -> int:
    own = getattr(group, "calls_made", 0)  # of ours: what C++ calls goes past it, to those beneath
    beneath = {id(one): one for one in (group._get_backend(device) for device in group._device_types)}
    return own + sum(one._get_sequence_number_for_group() for one in beneath.values())
