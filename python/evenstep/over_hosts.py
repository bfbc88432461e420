"""How the gradients of accelerators on several hosts go: over one communicator of all, or by legs between the hosts
(evenstep.leg_engine). By the user's word, by a measurement, or by whether the one communicator can be had."""

from __future__ import annotations

import statistics
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.device_places import HostParts, Place, agreed_over_hosts, first_call_seconds, parts_of_hosts
from evenstep.engine import Engine, EngineOptions
from evenstep.group import Bootstrap, Group, gather_objects
from evenstep.group_end import end_calls, first_line, within
from evenstep.leg_engine import LegEngine, leg_engine

_WARM, _ROUNDS = 2, 3  # of a measurement


class OverHosts:
    """Of ranks that all have an accelerator of their own, on several hosts. Every method is collective."""

    def __init__(
        self,
        parts: HostParts,
        wanted: str,
        parameters: Sequence[torch.Tensor],
        bootstrap: Bootstrap,
        group: Group,
        options: EngineOptions,
        telemetry: _core.Telemetry,
        say: Callable[[str], None],
    ) -> None:
        self._parts, self._wanted = parts, wanted
        self._parameters, self._bootstrap, self._group = parameters, bootstrap, group
        self._options, self._telemetry, self._say = options, telemetry, say

    def _make_legs(self) -> tuple[LegEngine, str]:
        made, over = leg_engine(
            self._parameters, self._bootstrap, self._group, self._parts, self._options, self._telemetry
        )
        return made, f"by each host's own collectives, and {self._parts.lanes} legs between the hosts over {over}"

    def wanted_legs(self) -> Engine | None:
        """Where the user's word is for them."""
        if self._wanted != "legs":
            return None
        made, words = self._make_legs()
        self._say(f"{words}: EVENSTEP_DEVICE_HOSTS=legs")
        return made

    def legs_in_need(self, process_group: Any) -> Engine | None:
        """Where the first call of the group of all fails, and nobody has said that it is to be used."""
        if hasattr(process_group, "over_hosts"):
            process_group.over_hosts = "nccl"  # which is what is tried here
        if self._wanted == "nccl":
            return None
        why = first_failure(process_group, self._parameters[0].device, self._group)
        if not why:
            return None
        made, words = self._make_legs()
        self._say(f"{words}: the first call over all hosts failed ({why})")
        if self._group.rank == 0:
            warnings.warn(
                f"the GPUs' collectives do not connect the job's hosts ({why}): gradients go {words}\n"
                "  fix: see what NCCL says (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); or EVENSTEP_DEVICE_HOSTS=legs, if it is "
                "to be so",
                stacklevel=4,
            )
        return made

    def faster(self, across: Engine, process_group: Any) -> Engine:
        """`across`, or legs where EVENSTEP_DEVICE_HOSTS=measure finds these faster."""
        if self._wanted != "measure":
            return across
        legs, words = self._make_legs()
        seconds = [seconds_of_round(one, self._parameters, self._group) for one in (across, legs)]
        self._say(
            f"{'over all hosts at once' if seconds[0] <= seconds[1] else words}: a round took {seconds[0]:.4f} s at once "
            f"and {seconds[1]:.4f} s by legs (EVENSTEP_DEVICE_HOSTS=measure)"
        )
        if seconds[0] <= seconds[1]:
            legs.close()
            return across
        dist.destroy_process_group(process_group)
        return legs


def over_hosts(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    places: Sequence[Place],
    options: EngineOptions,
    telemetry: _core.Telemetry,
    say: Callable[[str], None],
) -> OverHosts | None:
    """Of ranks that each have an accelerator of their own; None where there is one way alone."""
    parts = parts_of_hosts(places)
    if parts is None or options.engine is not None or options.gathers or options.unsummed or not parameters:
        return None
    wanted = agreed_over_hosts([place.over_hosts for place in places])
    return OverHosts(parts, wanted, parameters, bootstrap, group, options, telemetry, say)


def first_failure(process_group: Any, device: torch.device, group: Group) -> str:
    """Which rank's first call in the process group failed, or did not end in time, and why; "" where none did. Where one did, all
    ranks leave the process group, a call that hangs with a thread of its own."""
    seconds = first_call_seconds()
    words = within(seconds, lambda: _first_call(process_group, device, group.ranks))
    if words is None:
        words = f"its first call did not end within {seconds:g} s (EVENSTEP_DEVICE_HOSTS_SECONDS)"
    why = next((f"rank {rank}: {one}" for rank, one in enumerate(gather_objects(group, words)) if one), "")
    if why:
        end_calls(process_group)
    return why


def _first_call(process_group: Any, device: torch.device, ranks: int) -> str:
    """What is wrong with it."""
    try:
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=process_group)
        return "" if one.item() == ranks else f"a sum of {ranks} ones was {one.item():g}"
    except Exception as error:
        return first_line(error)


def seconds_of_round(engine: Engine, parameters: Sequence[torch.Tensor], group: Group) -> float:
    """What the exchange of gradients, all there at once, takes on the rank where it takes longest: the median of rounds."""
    device, took = parameters[0].device, []
    for _ in range(_WARM + _ROUNDS):
        group.barrier()
        start = _core.clock_ns()
        engine.begin(0.0, 0)
        for index in reversed(range(len(parameters))):
            engine.ready(index, engine.views[index])
        engine.finish()
        if device.type in ("cuda", "xpu"):
            getattr(torch, device.type).synchronize(device)
        took.append((_core.clock_ns() - start) / 1e9)
    mine = struct.pack("<d", statistics.median(took[_WARM:]))
    return float(max(struct.unpack("<d", one)[0] for one in group.exchange(mine)))
