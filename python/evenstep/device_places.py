"""Where each rank's parameters are, whose make the device is, and which ranks have collectives of that make among them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evenstep._core import EvenstepError
from evenstep.hosts import this_host


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
    return Place(str(device), this_host(), maker_of(device), _collectives_of(device), _identity_of(device))


def _identity_of(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def wanted_device_engine() -> str:
    """EVENSTEP_DEVICE_ENGINE: "evenstep" (our NCCL engine), "torch", or ""."""
    wanted = os.environ.get("EVENSTEP_DEVICE_ENGINE", "")
    if wanted not in ("", "torch", "evenstep"):
        raise EvenstepError(
            f"EVENSTEP_DEVICE_ENGINE is {wanted!r}; choose 'torch' or 'evenstep'\n  fix: unset it, and it is chosen"
        )
    return wanted


def _collectives_of(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    if wanted_device_engine() == "evenstep":
        from evenstep.device_groups import engine_version

        if engine_version():
            return "evenstep"
        raise EvenstepError(
            "EVENSTEP_DEVICE_ENGINE=evenstep, but NCCL was not found\n"
            "  fix: pip install nvidia-nccl-cu12, or name the library in EVENSTEP_NCCL_LIBRARY; or unset the variable"
        )
    return "nccl" if dist.is_nccl_available() else ""


@dataclass(frozen=True)
class Makers:
    """How the ranks' gradients meet: those of one maker with collectives among themselves, and their first rank for all of
    them with every other rank, through the host's memory."""

    teams: tuple[tuple[int, ...], ...]  # of two ranks and more
    backends: tuple[str, ...]  # of the teams
    host: tuple[int, ...]  # the ranks that meet in the host's memory

    def team_of(self, rank: int) -> int | None:
        return next((number for number, team in enumerate(self.teams) if rank in team), None)


def makers_among(places: Sequence[Place]) -> Makers | None:
    """The same on all ranks; None where all have devices of one maker."""
    makers: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        makers.setdefault(place.maker, []).append(rank)
    if len(makers) < 2:
        return None
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
