"""Whether a group's CUDA tensors cross hosts over one communicator of NCCL or by legs, where that is to be found out: by whether the
first can be had, or by a measurement, at the first collective of the group that legs carry."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable
from typing import Any

import torch

from evenstep import _core, sites
from evenstep.comm_debug import note
from evenstep.device_groups import DeviceGroups
from evenstep.device_places import first_call_seconds
from evenstep.device_streams import CudaStreams, Watch
from evenstep.group_end import first_line, within

_BYTES = 4 << 20
_WARM, _ROUNDS = 2, 3

AllReduce = Callable[[torch.Tensor], Any]
"""Begins it, and returns its Work."""

Said = tuple[int, str]
"""What a rank's first call came to: words, and of which kind. Where one rank has a cause, others have its aftermath."""
_GOOD, _CAUSE, _AFTERMATH = range(3)


class WayOverHosts:
    def __init__(self, groups: DeviceGroups, streams: CudaStreams, measures: bool, words: str) -> None:
        """`words`: how they go by legs."""
        self._groups, self._streams, self._measures, self._words = groups, streams, measures, words
        self._error: BaseException | None = None
        self.captured = False
        """Whether a CUDA graph has calls over the communicator: it is not taken from under that."""

    def by_legs(self, like: torch.Tensor, over_nccl: AllReduce, by_legs: AllReduce) -> bool:
        """Whether it is legs; collective, and the same on all ranks. Who is late may come to it again, and so may who has waited; an
        error after all had come stays, for others may have gone on by what this rank has said."""
        if self._error is not None:
            raise self._error
        self._groups.exchange("here", b"")  # who is late has the group's limit, not the trial's
        try:
            return self._found(like, over_nccl, by_legs)
        except BaseException as error:
            self._error = error
            raise

    def _found(self, like: torch.Tensor, over_nccl: AllReduce, by_legs: AllReduce) -> bool:
        device = self._streams.device(like)
        why = self._first_failure(device, like.device)
        if why:
            if not self.captured:
                self._groups.drop(device)
            self._say(f"{self._words}: the first call over all hosts failed ({why})")
            if self._groups.rank == 0:
                sites.warn(
                    f"the GPUs' collectives do not connect the hosts of {self._groups.name} ({why}): CUDA tensors go {self._words}\n"
                    "  fix: see what NCCL says (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); or EVENSTEP_DEVICE_HOSTS=legs, if it "
                    "is to be so"
                )
            return True
        self._groups.open(device).go_beside(self._groups.beside)
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

    def _first_failure(self, device: int, where: torch.device) -> str:
        """Which rank's first call failed, or did not end in time, and why; "" where none did."""
        seconds = min(first_call_seconds(), self._groups.timeout_seconds / 2)
        given_up = threading.Event()
        stream = self._streams.side(device, "trial")  # where it waits for nothing of the caller's

        def call() -> Said:
            try:
                return self._first_call(device, where, stream, given_up)
            except Exception as error:
                return _CAUSE, first_line(error)

        found = within(seconds, call)
        if found is None:
            given_up.set()
            found = _AFTERMATH, f"its first call did not end within {seconds:g} s (EVENSTEP_DEVICE_HOSTS_SECONDS)"
        every = self._groups.exchange("first call", json.dumps(found).encode(), seconds)
        failed = [(kind, rank, words) for rank, (kind, words) in enumerate(map(json.loads, every)) if kind != _GOOD]
        if not failed:
            return ""
        _, rank, words = min(failed)
        return f"rank {rank}: {words}"

    def _first_call(self, device: int, where: torch.device, stream: Any, given_up: threading.Event) -> Said:
        comm = self._groups.open(device, given_up=given_up)
        with self._streams.use(stream):
            one = torch.ones(1, device=where)
            if given_up.is_set():
                return _AFTERMATH, ""  # nobody hears it
            comm.all_reduce(one.data_ptr(), one.data_ptr(), 1, _core.DTYPE_F32, _core.OP_SUM, None, stream.cuda_stream)
            self._streams.mark(stream, blocking=True).synchronize()
            Watch(lambda: [comm]).check()
            total = one.item()
        if total == self._groups.size:
            return _GOOD, ""
        return _AFTERMATH, f"a sum of {self._groups.size} ones was {total:g}"

    def _seconds(self, device: int, name: str, data: torch.Tensor, all_reduce: AllReduce) -> float:
        """The median of rounds on the rank where it is longest."""
        took = []
        for _ in range(_WARM + _ROUNDS):
            start = _core.clock_ns()
            all_reduce(data).wait()
            self._streams.mark(self._streams.current(device), blocking=True).synchronize()
            took.append((_core.clock_ns() - start) / 1e9)
        mine = statistics.median(took[_WARM:])
        return max(float(one) for one in self._groups.exchange(f"seconds/{name}", repr(mine).encode()))
