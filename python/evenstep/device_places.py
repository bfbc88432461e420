"""Where each rank's parameters are, whose make the device is, which ranks have collectives of that make among them, and how
sums of several hosts meet."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.hosts import MOST_LANES, this_host


def maker_of(device: torch.device) -> str:
    """ROCm's torch calls its devices "cuda", too; their collectives do not talk to NVIDIA's."""
    return "cuda-hip" if device.type == "cuda" and torch.version.hip else device.type


@dataclass(frozen=True)
class Place:
    """Of one rank."""

    device: str  # "cuda:1"
    host: str
    maker: str
    collectives: str  # torch's backend for several such devices; "": none
    identity: str = ""  # what the driver calls the device, where it says: containers of one host may all have a cuda:0
    over_hosts: str = ""  # EVENSTEP_DEVICE_HOSTS

    @property
    def name(self) -> str:
        """No two devices have the same."""
        return f"{self.identity or self.device}@{self.host}"

    @property
    def on_host(self) -> bool:
        """Whether its memory is the host's, and all of the ranks with such devices share one engine."""
        return self.maker == "cpu"


def place_of(parameters: Sequence[torch.Tensor]) -> Place:
    """By the first parameter."""
    device = parameters[0].device if parameters else torch.device("cpu")
    where = (str(device), this_host(), maker_of(device), _collectives_of(device), _identity_of(device))
    return Place(*where, wanted_over_hosts())


def kinds_of(parameters: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    """Of their devices, one after the other: each with how many parameters are on it."""
    return [(kind, sum(1 for _ in run)) for kind, run in itertools.groupby(p.device.type for p in parameters)]


def _identity_of(device: torch.device) -> str:
    if device.type not in ("cuda", "xpu"):
        return ""
    return str(getattr(getattr(torch, device.type).get_device_properties(device), "uuid", ""))


def wanted_device_engine() -> str:
    """EVENSTEP_DEVICE_ENGINE: "evenstep" (our NCCL engine), "torch", or ""."""
    wanted = os.environ.get("EVENSTEP_DEVICE_ENGINE", "")
    if wanted not in ("", "torch", "evenstep"):
        raise EvenstepError(
            f"EVENSTEP_DEVICE_ENGINE is {wanted!r}; choose 'torch' or 'evenstep'\n  fix: unset it, and it is chosen"
        )
    return wanted


def said_over_hosts() -> str:
    """EVENSTEP_DEVICE_HOSTS, which may be no such word."""
    return os.environ.get("EVENSTEP_DEVICE_HOSTS", "")


def wanted_over_hosts() -> str:
    """EVENSTEP_DEVICE_HOSTS, how devices of several hosts add up: "nccl" (one communicator of all), "legs" (among those of
    each host, and between the hosts through their memory), "needed" (nccl, and legs where that cannot be had), "measure" (what
    is faster), or "" (gradients of es.prepare as "needed", the backend's own collectives as "nccl")."""
    return _known(said_over_hosts())


def _known(wanted: str) -> str:
    if wanted not in ("", "nccl", "legs", "needed", "measure"):
        raise EvenstepError(
            f"EVENSTEP_DEVICE_HOSTS is {wanted!r}; choose 'nccl', 'legs', 'needed' or 'measure'\n"
            "  fix: unset it, and NCCL connects the hosts where it can"
        )
    return wanted


def over_hosts_among(hosts: Sequence[str], wishes: Sequence[str]) -> str:
    """How the backend's own collectives cross the hosts of a group's ranks, by what each of these has been told. Groups of one
    host are asked nothing."""
    return _known(agreed_over_hosts(wishes)) if len(set(hosts)) > 1 else "nccl"


def agreed_over_hosts(wishes: Sequence[str]) -> str:
    """What all ranks want."""
    if len(set(wishes)) > 1:
        words = ", ".join(f"rank {rank} {wish or 'unset'}" for rank, wish in enumerate(wishes))
        raise EvenstepError(f"EVENSTEP_DEVICE_HOSTS differs among the ranks: {words}\n  fix: give all ranks the same")
    return wishes[0]


FIRST_CALL_SECONDS = 120.0
"""For the first call of a communicator over all hosts, which makes their connections; EVENSTEP_DEVICE_HOSTS_SECONDS."""


def first_call_seconds() -> float:
    words = os.environ.get("EVENSTEP_DEVICE_HOSTS_SECONDS", "")
    try:
        seconds = float(words or FIRST_CALL_SECONDS)
    except ValueError:
        seconds = 0.0
    if not (0 < seconds < threading.TIMEOUT_MAX):
        raise EvenstepError(
            f"EVENSTEP_DEVICE_HOSTS_SECONDS is {words!r}\n  fix: give seconds, more than 0, for the first call of the GPUs' "
            "collectives over all hosts; or unset it"
        )
    return seconds


def has_xccl() -> bool:
    """Whether torch has Intel's collectives for its XPUs."""
    return bool(getattr(dist, "is_xccl_available", lambda: False)()) and torch.xpu.is_available()


def open_xccl(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """torch's collectives between Intel GPUs. Not every torch lets this be told how long to wait."""
    kind: Any = dist.ProcessGroupXCCL  # type: ignore[attr-defined]
    if not hasattr(kind, "Options"):
        return kind(store, rank, ranks)
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, ranks, options)


def _collectives_of(device: torch.device) -> str:
    if device.type == "xpu":
        return "xccl" if has_xccl() else ""
    if device.type != "cuda":
        return ""
    if wanted_device_engine() == "evenstep" and maker_of(device) == "cuda":  # ROCm has torch's alone, which are RCCL
        from evenstep.device_groups import engine_version

        if engine_version():
            return "evenstep"
        raise EvenstepError(
            "EVENSTEP_DEVICE_ENGINE=evenstep, but NCCL was not found\n"
            "  fix: pip install nvidia-nccl-cu12, or name the library in EVENSTEP_NCCL_LIBRARY; or unset the variable"
        )
    return "nccl" if dist.is_nccl_available() else ""


def accelerators_alone(places: Sequence[Place]) -> bool:
    """Whether each rank has an accelerator of its own, all of one maker whose collectives torch has."""
    names = {place.name for place in places}
    one_maker = len({place.maker for place in places}) == 1 and len(names) == len(places)
    return one_maker and all(place.device.startswith("cuda") or place.collectives == "xccl" for place in places)


@dataclass(frozen=True)
class Makers:
    """How the ranks' gradients meet: those of one maker on one host with collectives among themselves, and their first rank
    for all of them with every other rank, through the hosts' memory."""

    teams: tuple[tuple[int, ...], ...]  # of two ranks and more
    backends: tuple[str, ...]  # of the teams
    host: tuple[int, ...]  # the ranks that meet in the host's memory


def makers_among(places: Sequence[Place]) -> Makers | None:
    """The same on all ranks; None where all have devices of one maker. EVENSTEP_DEVICE_HOSTS=nccl: a maker's ranks of all
    hosts are together."""
    if len({place.maker for place in places}) < 2:
        return None
    across = agreed_over_hosts([place.over_hosts for place in places]) == "nccl"
    makers: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        makers.setdefault((place.maker, "" if across else place.host), []).append(rank)
    teams, backends, host = [], [], []
    for ranks in makers.values():
        names = [places[rank].name for rank in ranks]
        known = {places[rank].collectives for rank in ranks}
        if len(ranks) > 1 and len(set(names)) == len(names) and len(known) == 1 and "" not in known:
            teams.append(tuple(ranks))
            backends.append(known.pop())
            host.append(ranks[0])
        else:
            host += ranks
    return Makers(tuple(teams), tuple(backends), tuple(sorted(host)))


@dataclass(frozen=True)
class HostParts:
    """How ranks that all have an accelerator meet over several hosts: those of a host among themselves, and as many of each
    as there are legs with their likes on the other hosts."""

    teams: tuple[tuple[int, ...], ...]  # one a host
    backend: str  # of the teams
    lanes: int

    @property
    def legs(self) -> list[list[int]]:
        """The ranks of each: one of each host. One of a host with fewer ranks than legs is in several."""
        carried = [[_core.lane_rank(lane, self.lanes, len(team)) for team in self.teams] for lane in range(self.lanes)]
        return [[team[place] for team, place in zip(self.teams, places)] for places in carried]


def parts_of_hosts(places: Sequence[Place]) -> HostParts | None:
    """The same on all ranks; None where all are on one host, or no collectives of one kind are there for each host's."""
    known = {place.collectives for place in places}
    parts = hosts_apart([place.host for place in places], "".join(known))
    return None if len(known) > 1 or "" in known else parts


def hosts_apart(hosts: Sequence[str], backend: str) -> HostParts | None:
    """Of ranks on these hosts; None where there is one alone."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    teams = tuple(map(tuple, ranks.values()))
    return HostParts(teams, backend, min(max(map(len, teams)), MOST_LANES)) if len(teams) > 1 else None
