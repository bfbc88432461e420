"""Makes torch know the backend "evenstep", and its compiler leave that alone, without importing either: at once where they
are there, else when they come."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from evenstep.backend_lists import hear_lists

if TYPE_CHECKING:
    from evenstep._core import Telemetry

_MODULE = "torch.distributed.distributed_c10d"
_COMPILER = "torch._dynamo.trace_rules"
_COMPILERS_GROUPS = "torch._dynamo.variables.distributed"
_NOT_COMPILED = ("backend", "device", "comm", "sites", "errors", "exits", "rendezvous", "ring")
"""How files begin that calls of the backend run through."""


def _create(options: Any, backend_options: Any) -> Any:
    from evenstep.backend import create_group

    return create_group(options, backend_options)


def _register(c10d: ModuleType) -> None:
    backend = getattr(c10d, "Backend", None)  # absent where torch was built without distributed
    if backend is not None and "evenstep" not in backend.backend_list:
        usual = getattr(backend, "default_device_backend_map", None)
        before = dict(usual or {})
        backend.register_backend("evenstep", _create, extended_api=True, devices=["cpu", "cuda", "xpu"])
        if (
            usual is not None
        ):  # else init_process_group() without a name gets this one where torch knows none, or overwrites it
            usual.clear()
            usual.update(before)
        _limit_ours(c10d)
        hear_lists(c10d)
        ranks = os.environ.get("WORLD_SIZE", "")
        if ranks.isdigit() and os.environ.get("EVENSTEP_TELEMETRY_FD"):
            _watch(c10d, int(ranks))
        if os.environ.get("EVENSTEP_JOINS") == "1" and ranks.isdigit() and _has_the_agents_memory():
            c10d.rendezvous = _refusing(c10d.rendezvous, int(ranks))  # type: ignore[attr-defined]


def _limit_ours(c10d: ModuleType) -> None:
    """torch's own sets the limit of backends that it knows: of a group of ours, of the Gloo beneath alone."""
    plain: Callable[..., Any] | None = getattr(c10d, "_set_pg_timeout", None)
    if plain is None:
        return

    @wraps(plain)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        given = c10d._get_default_group() if group is None else group
        ours: Any = getattr(sys.modules.get("evenstep.backend"), "EvenstepGroup", ())
        if isinstance(given, ours):
            given.set_timeout(timeout)
        else:
            plain(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout  # type: ignore[attr-defined]


def _leave_out(rules: ModuleType) -> None:
    """torch.compile runs the backend's calls as they are, as those of backends in C++: it takes a process group for an object
    that only has what it knows, and fails where it compiles methods that are Python."""
    here = Path(__file__).parent
    files: set[str] = getattr(rules, "FORCE_SKIP_FILES", set())
    files.update(str(file) for file in here.glob("*.py") if file.stem.split("_")[0] in _NOT_COMPILED)


def _know_as_group(variables: ModuleType) -> None:
    """A compiler that takes none but torch's own two kinds for process groups (2.7; not 2.13) would trace what it asks ours (its name,
    its rank), which it is to leave alone."""
    kind: Any = getattr(variables, "ProcessGroupVariable", None)
    theirs = getattr(kind, "is_process_group", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def is_process_group(value: Any) -> bool:
        return bool(theirs(value)) or type(value) is getattr(sys.modules.get("evenstep.backend"), "EvenstepGroup", None)

    kind.is_process_group = staticmethod(is_process_group)


def _has_the_agents_memory() -> bool:
    """Not a process that a rank has started: its variables are the rank's, its descriptors are not."""
    from evenstep._core import EvenstepError, Generation

    try:
        Generation(int(os.environ.get("EVENSTEP_GENERATION_FD") or -1))
    except (EvenstepError, ValueError):
        return False
    return True


def _refusing(plain: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """torch's rendezvous, for init_process_group in a process that takes a lost rank's place: in the group of all ranks it
    would wait for those that met long ago, at a store that may be gone."""
    process = os.getpid()

    def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        if os.getpid() == process and _asked(url, world_size) == ranks and _joining():
            from evenstep._core import EvenstepError

            raise EvenstepError(
                "torch.distributed.init_process_group: a process that takes a lost rank's place (--recovery replace) cannot come "
                "into the group of all ranks, which the others opened without it\n"
                "  fix: leave init_process_group to es.prepare; with --recovery shrink nobody takes a place"
            )
        return plain(url, rank, world_size, **options)

    return rendezvous


class _Opening:
    """What the agent is told of this rank's init_process_group for all ranks. Each end once: whoever comes first, the call's
    or, where the script has torch's own function from before this was imported, that of what the call held."""

    def __init__(self) -> None:
        self._ring: Telemetry | None = None
        self._time = 0

    def begin(self, ring: Telemetry) -> int:
        from evenstep import _core

        self._time += 1
        self._ring = ring
        ring.event(_core.EVENT_OPENING, 0, self._time, "waits in init_process_group for all ranks")
        return self._time

    def end(self, time: int | None = None) -> None:
        from evenstep import _core

        if self._ring is not None and time in (None, self._time):
            ring, self._ring = self._ring, None
            ring.event(_core.EVENT_OPENED, 0, self._time, "has left init_process_group")


def _watch(c10d: ModuleType, ranks: int) -> None:
    """The agent is told while this rank is in init_process_group for the group of all ranks, so that it ends one that is
    stopped (or has ended) before it, for which the others would wait half an hour."""
    opening = _Opening()
    plain: Callable[..., Any] = c10d.init_process_group

    @wraps(plain)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        try:
            return plain(*arguments, **options)
        finally:  # not left to the call's frame: who keeps its exception keeps that, too
            opening.end()

    for module in (c10d, sys.modules.get("torch.distributed")):
        if getattr(module, "init_process_group", None) is plain:
            module.init_process_group = init_process_group  # type: ignore[union-attr]
    c10d.rendezvous = _told(c10d.rendezvous, ranks, opening)  # type: ignore[attr-defined]


def _told(plain: Callable[..., Any], ranks: int, opening: _Opening) -> Callable[..., Any]:
    """torch's rendezvous, which init_process_group calls."""
    process = os.getpid()

    def come(ring: Telemetry, meeting: Iterator[Any]) -> Iterator[Any]:
        time = opening.begin(ring)
        try:
            yield from meeting
        finally:  # when it is let go of
            opening.end(time)

    def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        from evenstep.ring import watched_ring

        meeting = plain(url, rank, world_size, **options)
        of_all = os.getpid() == process and _asked(url, world_size) == ranks
        ring = watched_ring() if of_all else None
        return meeting if ring is None else come(ring, meeting)

    return rendezvous


def _asked(url: Any, world_size: int) -> int:
    """How many ranks the group is to have; -1: torch will say that it is not told."""
    if world_size != -1:
        return world_size
    parts = urlsplit(str(url))
    told = parse_qs(parts.query).get("world_size", [os.environ.get("WORLD_SIZE", "") if parts.scheme == "env" else ""])[
        0
    ]
    return int(told) if told.isdigit() else -1


def _joining() -> bool:
    """Whether it has not met the others yet; before the first call of Evenstep's there is no session."""
    module = sys.modules.get("evenstep.session")
    current = getattr(module, "_session", None)
    return current is None or bool(current.joining)


class _Loader(importlib.abc.Loader):
    """Runs the module as its own loader does, then what is to be done with it."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of one of torch's modules and then steps aside."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


def register() -> None:
    """Does so now or when torch is imported. Cheap; may be called again."""
    awaited = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name, then in ((_MODULE, _register), (_COMPILER, _leave_out), (_COMPILERS_GROUPS, _know_as_group)):
        module = sys.modules.get(name)
        if module is not None:
            then(module)
        elif name not in awaited:
            sys.meta_path.insert(0, _Finder(name, then))
