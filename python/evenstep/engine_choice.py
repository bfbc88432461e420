"""Which engine a model's gradients get, from where the ranks' parameters are and from what es.prepare was told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.adasum_engine import AdasumEngine
from evenstep.comm_debug import note
from evenstep.compressed_engine import CompressedEngine
from evenstep.compression import WIRES, in_parts
from evenstep.device_places import Place, accelerators_alone, makers_among, wanted_device_engine
from evenstep.encoded_engine import EncodedEngine
from evenstep.engine import Engine, EngineOptions, SharedEngine
from evenstep.exchange import SharedExchange, TorchExchange
from evenstep.group import DTYPES, Bootstrap, Group
from evenstep.hosts import wanted_engine
from evenstep.hybrid_engine import hybrid_engine
from evenstep.mended_group import heed_over
from evenstep.over_hosts import over_hosts
from evenstep.torch_engine import TorchEngine


def choose_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    places: Sequence[Place],
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> Engine:
    """On GPUs of one maker alone, one for each rank: NCCL (of XPUs XCCL) through torch, or our engine where
    EVENSTEP_DEVICE_ENGINE=evenstep asks for it.
    Over several hosts NCCL connects them all, or legs do between the hosts (EVENSTEP_DEVICE_HOSTS). On devices of several
    makers: each maker's own collectives, and the host's memory between them. Else shared memory, and torch's collectives
    where that cannot be had.

    `places` are those of all ranks' parameters, the same list on every rank. Raises EvenstepError, on every rank,
    where engine="shared" was asked for and cannot be had.
    """
    if wanted_device_engine() == "evenstep" and not any(place.device.startswith("cuda") for place in places):
        _say_no_device(group)
    engine = options.engine
    unsupported = sorted({str(p.dtype) for p in parameters if p.dtype not in DTYPES})
    on_gpus = accelerators_alone(places)
    use_torch = engine == "torch" or (engine is None and (bool(unsupported) or (on_gpus and len(places) > 1)))
    if engine == "shared" and unsupported:
        raise EvenstepError(
            f"es.prepare(engine='shared'): the model has parameters of {', '.join(unsupported)}, which the "
            "shared-memory engine does not add up\n  fix: leave engine out, or give engine='torch'"
        )

    def say(words: str) -> None:
        note(f"es.prepare: gradients go {words}", group.rank)

    if not use_torch:
        shared = _hybrid_engine(parameters, bootstrap, group, places, options, telemetry)
        if shared is not None:
            makers = sorted({place.maker for place in places})
            say(f"by each maker's own collectives, and through the host's memory between them ({', '.join(makers)})")
            return shared
        shared = _shared_engine(parameters, bootstrap, group, places, options, telemetry, say)
        if shared is not None:
            return shared
        if engine == "shared":
            raise EvenstepError(
                "es.prepare(engine='shared'): the ranks cannot open one another's memory: they are on several hosts, in "
                "containers with process numbers of their own, or of several users\n  fix: start all ranks on one host "
                "as one user; or leave engine out, and torch's collectives are used"
            )
    hosts = None
    if on_gpus and not unsupported:
        hosts = over_hosts(parameters, bootstrap, group, places, options, telemetry, say)
    legs = hosts.wanted_legs() if hosts is not None else None
    if legs is not None:
        return legs
    by_hosts = None if use_torch or on_gpus else _group_by_hosts(bootstrap, places, options)
    if by_hosts is not None:
        say(f"by {by_hosts.over_hosts_by_gloo}, during backward: {_why_torch(engine, unsupported, on_gpus, False)}")
        return TorchEngine(parameters, by_hosts, group, telemetry, options)
    process_group = _torch_group(bootstrap, places, on_gpus)
    legs = hosts.legs_in_need(process_group) if hosts is not None else None
    if legs is not None:
        return legs
    ours = on_gpus and _ours(places) and options.compression is None and not options.gathers and not unsupported
    through = "on our NCCL engine" if ours else f"through torch ({dist.get_backend(process_group)})"
    when = "after backward" if options.gathers else "during backward"
    say(f"{through}, {when}: {_why_torch(engine, unsupported, on_gpus, ours)}")
    if options.gathers:
        exchange = TorchExchange(process_group, heed_over(group, dist.get_backend(process_group)))
        return _gathering_engine(parameters, exchange, group, options, telemetry)
    narrow = options.compression is not None and options.compression.name in WIRES
    second = bootstrap.torch_group("gloo") if narrow and dist.get_backend(process_group) == "gloo" else None
    made = TorchEngine(parameters, process_group, group, telemetry, options, second)
    return made if hosts is None else hosts.faster(made, process_group)


def _why_torch(engine: str | None, unsupported: Sequence[str], on_gpus: bool, ours: bool) -> str:
    if ours:
        return "EVENSTEP_DEVICE_ENGINE=evenstep, and each rank has a GPU of its own"
    if engine == "torch":
        return "engine='torch' was asked for"
    if unsupported:
        return f"the model has parameters of {', '.join(unsupported)}"
    return "each rank has a GPU of its own" if on_gpus else "no engine of ours connects the ranks"


def _say_no_device(group: Group) -> None:
    if group.rank == 0:
        warnings.warn(
            "EVENSTEP_DEVICE_ENGINE=evenstep counts for nothing here: no rank's parameters are on a CUDA GPU\n"
            "  fix: move the model to its GPU before es.prepare, or unset the variable",
            stacklevel=3,
        )


def _ours(places: Sequence[Place]) -> bool:
    return all(place.collectives == "evenstep" for place in places)


def _torch_group(bootstrap: Bootstrap, places: Sequence[Place], on_gpus: bool) -> Any:
    if on_gpus and _ours(places):
        return bootstrap.torch_group("evenstep")
    # Of its own: what ranks tell one another during backward, as BatchNorm does, comes between buckets, not everywhere alike.
    if on_gpus and places[0].collectives == "xccl":
        return bootstrap.torch_group("xccl")
    return bootstrap.torch_group("nccl" if on_gpus and dist.is_nccl_available() else "gloo")


def _group_by_hosts(bootstrap: Bootstrap, places: Sequence[Place], options: EngineOptions) -> Any:
    """A process group of our own, in which shared memory connects the ranks of each host, and Gloo the hosts; None where a host has
    one rank of several, gradients go another way than an all-reduce in their own type, or a rank may be lost: torch's group of all
    ranks, without which such a group is not made, would be no more."""
    plain = options.compression is None and not options.adasum and all(place.on_host for place in places)
    hosts = len({place.host for place in places})
    known = "evenstep" in dist.Backend.backend_list
    if (
        bootstrap.heed is not None
        or not plain
        or not known
        or not 1 < hosts < len(places)
        or wanted_engine() not in ("", "hosts-gloo")
    ):
        return None
    made = bootstrap.torch_group("evenstep")
    if made.over_hosts_by_gloo:
        return made
    dist.destroy_process_group(made)  # containers of one host do not share its memory
    return None


def _hybrid_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    places: Sequence[Place],
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> Engine | None:
    """None where all devices are of one maker, or gradients go another way than an all-reduce."""
    makers = makers_among(places)
    if makers is None or options.gathers or not parameters:
        return None
    return hybrid_engine(parameters, bootstrap, group, makers, places[group.rank].on_host, options, telemetry)


def _shared_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    places: Sequence[Place],
    options: EngineOptions,
    telemetry: _core.Telemetry,
    say: Callable[[str], None],
) -> Engine | None:
    """None where the ranks share no memory."""

    def opened(comm: _core.Comm) -> _core.Comm:
        why = "engine='shared' was asked for" if options.engine == "shared" else "it connects all ranks"
        say(f"on our engine {comm.engine}: {why}")
        return comm

    if options.gathers and not (options.encodes and all(place.on_host for place in places)):
        messages = options.encodes and in_parts(options.way, group.ranks, 1 << 31)  # some bucket may be as large
        comm = bootstrap.shared(0, "gradients", messages=messages, measures=True)
        if comm is None:
            return None
        return _gathering_engine(parameters, SharedExchange(opened(comm)), group, options, telemetry)
    comm = bootstrap.shared(SharedEngine.arena_bytes(parameters, options), "gradients", measures=True)
    if comm is None:
        return None
    return (EncodedEngine if options.encodes else SharedEngine)(parameters, opened(comm), telemetry, options)


def _gathering_engine(
    parameters: Sequence[torch.Tensor],
    exchange: SharedExchange | TorchExchange,
    group: Group,
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> Engine:
    if options.adasum:
        return AdasumEngine(parameters, exchange, group, telemetry, options)
    assert options.compression is not None
    if options.compression.name != "powersgd":
        return CompressedEngine(parameters, exchange, group, telemetry, options)
    from evenstep.powersgd_engine import PowerSGDEngine  # wants a torch with torch.distributed

    return PowerSGDEngine(parameters, exchange, group, telemetry, options)
