"""Engines of which the next generation's go through torch's Gloo, and theirs did not: those of a process that joins, which was alone
when it made them; and of ranks of one host, where others join that no engine of ours connects with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.compressed_engine import CompressedEngine
from evenstep.compression import WIRES
from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import Engine, LastingEngine, SharedEngine
from evenstep.exchange import TorchExchange
from evenstep.gathering_engine import GatheringEngine
from evenstep.group import Bootstrap, Group
from evenstep.mended_group import heed_over
from evenstep.torch_engine import TorchEngine

if TYPE_CHECKING:
    from evenstep.generation_told import Told
    from evenstep.session import Session


def goes_through_torch(engine: Engine) -> bool:
    return isinstance(engine, TorchEngine) or (isinstance(engine, GatheringEngine) and engine.over_torch)


class _Moves:
    """A LastingEngine for one that did not go there. group: of the ranks that live."""

    def __init__(self, engine: SharedEngine | GatheringEngine, group: Group) -> None:
        self._engine, self._group = engine, group

    def revoke(self) -> None:
        self._engine.revoke()

    def meet_again(self, bootstrap: Bootstrap) -> Any:
        process_group = bootstrap.torch_group("gloo")
        engine = self._engine
        if isinstance(engine, (GatheringEngine, EncodedEngine)):
            return TorchExchange(process_group, heed_over(self._group, "gloo"))
        compression = engine.made_of[-1].compression
        narrow = compression is not None and compression.name in WIRES
        return process_group, bootstrap.torch_group("gloo") if narrow else None

    def again(self, comm: Any) -> Engine:
        engine = self._engine
        if isinstance(engine, GatheringEngine):
            return engine.again(comm)
        parameters, telemetry, options = engine.made_of
        assert telemetry is not None
        if isinstance(engine, EncodedEngine):
            kept = engine.take_leftovers()
            engine.close()
            made = CompressedEngine(parameters, comm, self._group, telemetry, options)
            made.takes_back = engine.takes_back
            made.load_feedback(kept)
            return made
        engine.close()
        process_group, second = comm
        return TorchEngine(parameters, process_group, self._group, telemetry, options, second)


def _lasting(engine: Engine, through_torch: bool, group: Group) -> LastingEngine:
    """evenstep.generation_limits has seen to it that it goes on."""
    assert isinstance(engine, LastingEngine)
    if not through_torch or goes_through_torch(engine):
        return engine
    if isinstance(engine, GatheringEngine):
        return _Moves(engine, group)
    if isinstance(engine, SharedEngine) and engine.made_of[-1].engine != "shared":
        return _Moves(engine, group)
    what = "engine='shared'" if isinstance(engine, SharedEngine) else "exact='bitwise'"
    raise EvenstepError(
        f"es.prepare({what}): a rank has joined from another host, and only torch's Gloo connects it with this one\n"
        "  fix: install UCX on all hosts (pip install 'evenstep[ucx]')"
    )


def meet_again(
    session: Session, bootstrap: Bootstrap, comm: Any, told: Sequence[Told]
) -> list[list[Callable[[], Engine]]]:
    """Of each model what makes its engines among the ranks that have told, over communicators that have been made here. comm: the ranks'
    own. Collective; raises what ends it where a rank is lost meanwhile."""
    over_gloo = not isinstance(comm, _core.Comm)
    made: list[list[Callable[[], Engine]]] = []
    for number, sync in enumerate(session.steps.syncs):
        through_torch = over_gloo or any(one.through_torch[number] for one in told)
        engines = [_lasting(engine, through_torch, session.group) for engine in sync.engines]
        made.append([partial(engine.again, engine.meet_again(bootstrap)) for engine in engines])
    return made
