"""Whether a group's CUDA tensors cross hosts over one communicator of NCCL or by legs, where nobody has said it: by whether the first
can be had, or by a measurement, at the group's first collective."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from evenstep import _core, sites
from evenstep.comm_debug import note
from evenstep.device_groups import DeviceGroups
from evenstep.device_places import first_call_seconds
from evenstep.device_streams import CudaStreams
from evenstep.group_end import first_line, within

_BYTES = 4 << 20
_WARM, _ROUNDS = 2, 3

AllReduce = Callable[[torch.Tensor], Any]
"""Begins it, and returns its Work."""


class WayOverHosts:
    def __init__(self, groups: DeviceGroups, streams: CudaStreams, measures: bool, words: str) -> None:
        """`words`: how they go by legs."""
        self._groups, self._streams, self._measures, self._words = groups, streams, measures, words

    def by_legs(self, like: torch.Tensor, over_nccl: AllReduce, by_legs: AllReduce) -> bool:
        """Whether it is legs; collective, and the same on all ranks."""
        device = self._streams.device(like)
        self._groups.exchange("here", b"")  # who is late has the group's limit, not the trial's
        why = self._first_failure(device, torch.ones(1, device=like.device), over_nccl)
        if why:
            self._groups.drop(device)
            self._say(f"{self._words}: the first call over all hosts failed ({why})")
            if self._groups.rank == 0:
                sites.warn(
                    f"the GPUs' collectives do not connect the hosts of {self._groups.name} ({why}): CUDA tensors go {self._words}\n"
                    "  fix: see what NCCL says (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); or EVENSTEP_DEVICE_HOSTS=legs, if it "
                    "is to be so"
                )
            return True
        if not self._measures:
            return False
        data = torch.zeros(_BYTES // 4, device=like.device)
        nccl, legs = (self._seconds(device, name, data, way) for name, way in (("nccl", over_nccl), ("legs", by_legs)))
        way = self._words if legs < nccl else "over all hosts at once"
        self._say(
            f"{way}: {_BYTES >> 20} MB took {nccl:.4f} s at once and {legs:.4f} s by legs (EVENSTEP_DEVICE_HOSTS=measure)"
        )
        return legs < nccl

    def _say(self, words: str) -> None:
        note(f"{self._groups.name}: CUDA tensors go {words}", self._groups.rank)

    def _done(self, device: int, work: Any) -> None:
        work.wait()
        self._streams.mark(self._streams.current(device), blocking=True).synchronize()

    def _first_failure(self, device: int, one: torch.Tensor, all_reduce: AllReduce) -> str:
        """Which rank's first call failed, or did not end in time, and why; "" where none did."""

        def call() -> str:
            try:
                self._done(device, all_reduce(one))
                return (
                    "" if one.item() == self._groups.size else f"a sum of {self._groups.size} ones was {one.item():g}"
                )
            except Exception as error:
                return first_line(error)

        seconds = first_call_seconds()
        words = within(seconds, call)
        if words is None:
            words = f"its first call did not end within {seconds:g} s (EVENSTEP_DEVICE_HOSTS_SECONDS)"
        said = self._groups.exchange("first call", words.encode())
        return next((f"rank {rank}: {one.decode()}" for rank, one in enumerate(said) if one), "")

    def _seconds(self, device: int, name: str, data: torch.Tensor, all_reduce: AllReduce) -> float:
        """The median of rounds on the rank where it is longest."""
        took = []
        for _ in range(_WARM + _ROUNDS):
            start = _core.clock_ns()
            self._done(device, all_reduce(data))
            took.append((_core.clock_ns() - start) / 1e9)
        mine = statistics.median(took[_WARM:])
        return max(float(one) for one in self._groups.exchange(f"seconds/{name}", repr(mine).encode()))
