"""Gradients through a process group of torch's (Gloo, NCCL, or our own of CUDA tensors), bucket by bucket while backward goes on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.bucket_engine import BUCKET_BYTES, Bucket, BucketEngine
from evenstep.compression import WIRES
from evenstep.device_memory import is_out_of_memory
from evenstep.engine import EngineOptions, Report
from evenstep.generation_torch import let_go
from evenstep.group import DTYPES, Group, TorchGroup
from evenstep.group_end import closed_peers, end_calls, first_line, is_late, raise_instead
from evenstep.mended_group import heed_over, is_lost
from evenstep.sums_under_way import NarrowSum, NarrowSumBeside, PlainSum, Room, SideStreams, SumUnderWay

if TYPE_CHECKING:
    from evenstep.group import Bootstrap

NCCL_BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's: what torch's NCCL is known to be fast with."""


_UNNAMED = ("EVEN_ERR_PEER_LOST", "EVEN_ERR_REVOKED", "EVEN_ERR_TIMEOUT")


class _Recorded:
    """The sums of a process group of torch's in telemetry, as a group of ours records its calls."""

    def __init__(self, telemetry: _core.Telemetry, process_group: Any, rank: int) -> None:
        self._telemetry, self._rank = telemetry, rank
        self._ranks = 1 if process_group is None else dist.get_world_size(process_group)
        self._name = f"torch/gradients/{getattr(process_group, 'group_name', '')}"
        self._mark = zlib.crc32(self._name.encode())
        self._backend = "" if process_group is None else dist.get_backend(process_group)
        self._itself = self._backend == "evenstep"  # such a group records its calls
        self._number = 0  # the same on all ranks
        self._named = False

    def add(self, dtype: torch.dtype, start_ns: int, duration_ns: int, count_bytes: int) -> None:
        if self._itself:
            return
        if not self._named and self._telemetry.wants_calls:
            self._named = True
            words = f"{self._backend} {self._ranks} {self._name}"
            self._telemetry.event(_core.EVENT_GROUP, 0, self._mark, words)
        self._number += 1
        place = self._mark, self._number, self._ranks, self._rank
        self._telemetry.all_reduce(*place, DTYPES.get(dtype, -1), start_ns, duration_ns, count_bytes)


class _Handed:
    """A bucket that has been handed on, and the bytes that travel."""

    def __init__(self, number: int, bucket: Bucket, sum_: SumUnderWay, moved: int) -> None:
        self.number, self.bucket, self.sum, self.moved = number, bucket, sum_, moved
        self.since_ns = _core.clock_ns()


class TorchEngine(BucketEngine):
    """process_group: of all ranks, in which nobody else makes calls, for backward passes of two ranks may make calls of
    others in another order. second: another such one, where fp32 gradients travel in 16 bits and collectives run on
    threads of the host, whatever device the gradients are on.

    A group of torch's cannot be told to end a call that another rank never makes. So that none waits for ever, also at its
    process's end, a rank whose pass has failed hands the other buckets on all the same (`give_up`)."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: Any,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
        second: Any = None,
        streams: SideStreams | None = None,
    ) -> None:
        backend = "" if process_group is None else dist.get_backend(process_group)
        self._by_hosts = bool(getattr(process_group, "over_hosts_by_gloo", False))
        self._nccl, self._over_gloo = backend in ("nccl", "xccl"), backend == "gloo" or self._by_hosts
        super().__init__(parameters, options)
        self._process_group, self._second, self._group, self._telemetry = process_group, second, group, telemetry
        self._heed = heed_over(group, backend)
        self._wire = WIRES.get(options.compression.name) if options.compression is not None else None
        self._recorded = _Recorded(telemetry, process_group, group.rank)
        self._streams = streams or SideStreams()
        self._several = len({p.device for p in parameters}) > 1
        self._packed: dict[
            int, list[Any]
        ] = {}  # of each bucket, events after its gradients, where that says which stream
        self._known: bytes | None = None  # which parameters have gradients, where it is the same in every round
        self._error: BaseException | None = None
        self._failed_in = ""  # the sum that it is an error of
        self._sound = True  # the process group, as far as is known
        self._ended = False  # its calls, by this rank
        self._alone = False  # the others may have begun what failed here
        self._given_up: list[SumUnderWay] = []  # of rounds before, in which nobody waited for them: they go on
        self._forget_round()

    def _limit(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._options.bucket_limit(dtype.itemsize, NCCL_BUCKET_BYTES if self._nccl else BUCKET_BYTES)

    def _forget_round(self) -> None:
        self._handed: list[_Handed] = []
        self._begun = self._done = 0  # of those, nothing is left to begin of so many, and so many are done
        self._communication_ns = self._last_done_ns = 0
        self._packed.clear()
        self._rooms: dict[int, Room] = {}  # for buckets (id of their memory) that are handed on when the round ends
        self._totals: dict[torch.device, torch.Tensor] = {}

    # -- where ranks may be lost --

    @property
    def plain(self) -> bool:
        """Whether all parameters, and what adds them up, are in the host's memory."""
        return self._heed is not None and all(p.is_cpu for p in self._parameters)

    def revoke(self) -> None:
        """Ends what the other ranks wait for."""
        self.end_calls()

    def meet_again(self, bootstrap: Bootstrap) -> tuple[Any, Any]:
        """The process groups in which another one for the same parameters adds up. Collective."""
        return bootstrap.torch_group("gloo"), None if self._second is None else bootstrap.torch_group("gloo")

    def again(self, comm: tuple[Any, Any]) -> TorchEngine:
        """Another one for the same parameters; this one has ended, whatever round was open."""
        let_go((self._process_group, self._second), self._left_to_end())
        process_group, second = comm
        return TorchEngine(
            self._parameters, process_group, self._group, self._telemetry, self._options, second, self._streams
        )

    def _left_to_end(self) -> list[SumUnderWay]:
        return [*self._given_up, *(one.sum for one in self._handed)]

    # -- a round --

    def begin(self, weight: float, step: int) -> None:
        if self._error is not None and not (self._heed and is_lost(self._error)):
            raise self._error
        super().begin(weight, step)
        if self._error is None:  # else nothing is handed on, and the vote says of the loss
            self._given_up = [one for one in self._left_to_end() if not one.over] if self._heed is not None else []
            self._forget_round()

    @torch.no_grad()
    def ready(self, index: int, gradient: torch.Tensor) -> None:
        super().ready(index, gradient)
        self._look()

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        super()._pack(index, gradient)
        device = gradient.device
        if self._several and device.type != "cpu":  # autograd has a thread for each, and each its streams
            event = self._streams.torch.event(device)
            event.record(self._streams.torch.current(device))
            self._packed.setdefault(self._bucket_of[index], []).append(event)

    asks_once = True

    def know(self, used: bytes | None) -> None:
        self._known = used  # what this rank has of others goes nowhere

    def _is_unused(self, bucket: Bucket, used: Sequence[int] | None) -> bool:
        """On all ranks: it does not travel."""
        return bucket.flat.numel() == 0 or (used is not None and not any(used[index] for index in bucket.indices))

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        if not self._sound or self._is_unused(bucket, self._known):
            return
        for event in self._packed.get(number, ()):
            self._streams.torch.current(bucket.flat.device).wait_event(event)
        try:
            narrow = self._is_narrow(bucket)
            moved = bucket.bytes // 2 if narrow else bucket.bytes
            self._handed.append(_Handed(number, bucket, self._begin_sum(bucket.flat, narrow), moved))
            self._packed.pop(number, None)
        except RuntimeError as error:
            if _is_own(error):
                self._next = number  # it can still be handed on
                raise
            self._alone = True
            self._fails(number, error)

    def _is_narrow(self, bucket: Bucket) -> bool:
        return self._wire is not None and bucket.flat.dtype is torch.float32

    def _begin_sum(self, flat: torch.Tensor, narrow: bool) -> SumUnderWay:
        group = self._process_group
        if not narrow or self._wire is None:
            return PlainSum(flat, group, self._heed)
        room = self._rooms.pop(id(flat), None) or self._make_room(flat, self._wire)
        if self._second is not None:  # the same halves in the same groups on all ranks
            return NarrowSum(flat, self._wire, group, self._second, room, self._heed)
        return NarrowSumBeside(flat, self._wire, group, self._streams, room)

    def _make_room(self, flat: torch.Tensor, wire: torch.dtype) -> Room:
        """On the stream on which it is used."""
        device, ranks = flat.device, dist.get_world_size(self._process_group)
        with nullcontext() if self._second is not None else self._streams.beside(device):
            if device not in self._totals:
                most = max(one.flat.numel() for one in (*self._buckets, Bucket([], flat)) if self._is_narrow(one))
                self._totals[device] = torch.empty(-(-most // ranks), dtype=torch.float32, device=device)
            return Room(flat.numel(), wire, device, ranks, self._totals[device])

    @torch.no_grad()
    def settle(self) -> None:
        """Takes the memory that the end of the round needs. A rank that lacks it is heard of in the vote that follows, and no rank
        makes the step; what it lacked later, others would hear of when they have made theirs."""
        wire = self._wire
        if wire is None or not self._sound:
            return
        try:
            for bucket in self._buckets[self._next :]:
                if self._is_narrow(bucket) and not self._is_unused(bucket, self._known):
                    self._rooms[id(bucket.flat)] = self._make_room(bucket.flat, wire)
        except RuntimeError as error:
            self._fails_here(error)
            raise_instead(self._error or error, error)

    def _look(self) -> None:
        """Begins what can be, and notes what is done; waits for nothing. An error is raised where the round ends: the ranks
        vote before, and that says which of them is lost. But what this rank alone lacks is an error of its backward."""
        handed = self._handed
        if self._error is not None:
            return
        at = 0
        try:
            for at in range(self._begun, len(handed)):
                if not handed[at].sum.go_on():
                    break
                self._begun = at + 1
            for at in range(self._done, self._begun):
                if not handed[at].sum.done:
                    break
                self._is_done(handed[at])
        except RuntimeError as error:
            if _is_own(error):
                raise
            self._fails(handed[at].number, error)

    def _is_done(self, one: _Handed) -> None:
        """What this rank has seen. They are counted one after the other, as if each had its turn."""
        now = _core.clock_ns()
        since = max(one.since_ns, self._last_done_ns)
        self._telemetry.span(_core.SPAN_COMMUNICATION, self._step, since, now - since, one.moved)
        narrow = one.moved != one.bucket.bytes
        dtype = self._wire if narrow and self._wire is not None else one.bucket.flat.dtype
        self._recorded.add(dtype, since, now - since, one.moved)
        self._communication_ns += now - since
        self._last_done_ns = now
        self._done += 1

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        start = _core.clock_ns()
        if self._error is not None:
            if self._alone:
                self._group.revoke(first_line(self._error))
                self.end_calls()
                raise self._error
            raise self._explained(self._error)
        used = self.used_anywhere(self._group) if self._known is None else self._known
        met = _core.clock_ns()
        began = met if hasattr(self._group, "comm") else start  # such a group counts its waits itself
        try:
            self._hand_on_rest(used)
            met = max(met, self._wait())
        except RuntimeError as error:
            if _is_own(error):
                self._group.revoke(
                    f"out of memory, or a failed device, in the exchange of gradients: {first_line(error)}"
                )
                self._fails_here(error)
                self.end_calls()  # what others would get of it are no sums
                raise_instead(self._error or error, error)
            raise_instead(self._explained(error), error)
        moved, full = sum(one.moved for one in self._handed), sum(one.bucket.bytes for one in self._handed)
        communication = self._communication_ns
        self._forget_round()
        now = _core.clock_ns()
        return used, Report(communication, 0, now - began, moved, full, now - met)

    def _hand_on_rest(self, used: Sequence[int] | None) -> None:
        """What is not complete. A bucket that no rank uses is complete on none, so that all pass over the same ones."""
        while self._next < len(self._buckets):
            number, self._next = self._next, self._next + 1
            bucket = self._buckets[number]
            if not self._is_unused(bucket, used):
                self._fill_up(bucket)
                self._hand_on(number, bucket)

    def _wait(self) -> int:
        """For all sums. When the last of those came that were not there yet; 0: all were."""
        met, at = 0, 0
        handed = self._handed
        self._look()
        try:
            for at in range(self._begun, len(handed)):
                handed[at].sum.go_on(wait=True)
            self._begun = len(handed)
            for at, one in enumerate(handed):
                was_done = at < self._done or one.sum.done
                one.sum.wait()
                if not was_done:
                    met = _core.clock_ns()
                if at >= self._done:
                    self._is_done(one)
        except RuntimeError as error:
            if _is_own(error):
                raise
            self._fails(handed[at].number, error)
        if self._error is not None:
            raise self._error
        return met

    # -- when something fails --

    def _fails(self, number: int, error: BaseException) -> None:
        """No later bucket is handed on: it would fail, too, or wait for a rank that is lost."""
        self._sound = False
        if self._error is None and isinstance(error, EvenstepError):  # of our own engine: it says all
            self._error = error
            if self._by_hosts and error.status in _UNNAMED:  # but which rank of another host is lost
                self._failed_in = self._sum_of(number)
        elif self._error is None:
            fix = "another rank has ended, hangs, or the network between them has failed: see what the others say"
            if self._alone:
                fix = "torch refuses the call, or another rank has ended: see what the others say"
            self._error = self._failed(self._sum_of(number), error, fix, self._closed(error))
            self._failed_in = self._sum_of(number)

    def _sum_of(self, number: int) -> str:
        return f"bucket {number + 1} of {len(self._buckets)} of the gradients"

    def _closed(self, error: BaseException) -> str:
        """Which connections of Gloo's are, in words."""
        if not self._over_gloo or is_late(error):
            return ""
        ranks = closed_peers(self._process_group)
        one = len(ranks) == 1
        return (
            f" (closed: the connection{'' if one else 's'} with rank{'' if one else 's'} {', '.join(map(str, ranks))})"
            if ranks
            else ""
        )

    def _explained(self, error: BaseException) -> BaseException:
        """What is to be raised where sums have failed, and that of other ranks may not end: no rank is to wait for them."""
        self.end_calls()
        told = None
        if isinstance(self._group, TorchGroup) and self._failed_in:
            told = self._group.explained(error.__cause__ or error, f"the sum of {self._failed_in}")
        self._error = told or self._error
        return self._error or error

    def end_calls(self, by_others: bool = False) -> None:
        """A rank is lost, or hands no more on: no call of this one waits for it, and none of the others' for this one. by_others: all is
        handed on, and they will end theirs, by which over Gloo this one's end."""
        if self._ended or (by_others and self._over_gloo):
            return
        self._sound = False
        self._ended = True
        for process_group in (self._process_group, self._second):
            if process_group is not None:
                end_calls(process_group)

    def _fails_here(self, error: BaseException) -> None:
        """This rank lacks what it takes; the others and the process group are sound."""
        words = (
            "this rank's device has no memory left for a bucket, or has failed: take a smaller bucket_cap_mb or batch"
        )
        if self._error is None:
            self._error = self._failed("the gradients", error, words)

    def _failed(self, what: str, error: BaseException, fix: str, closed: str = "") -> EvenstepError:
        backend = dist.get_backend(self._process_group)
        made = EvenstepError(
            f"rank {self._group.rank}: torch ({backend}) could not add up {what}: {first_line(error)}{closed}\n  fix: {fix}"
        )
        made.__cause__ = error
        if self._heed is not None and not is_late(error) and not _is_own(error):
            made.status = "EVEN_ERR_PEER_LOST"  # as the agent will say, or there is no other generation
        return made

    def give_up(self) -> None:
        """The round under way counts nothing, on no rank. Each hands on what it has not, so that what others have handed on ends;
        nobody waits for it here."""
        try:
            self._hand_on_rest(self._known)
        except RuntimeError as error:
            self._fails_here(error)
            self.end_calls()
        try:
            for one in self._handed[self._begun :] if self._sound else ():
                one.sum.give_up()
        except RuntimeError as error:
            self._fails(len(self._buckets) - 1, error)
            self.end_calls()


def _is_own(error: BaseException) -> bool:
    """Whether this rank alone has failed, and neither the process group nor another."""
    return is_out_of_memory(error) or isinstance(error, getattr(torch, "AcceleratorError", ()))
