"""Gradients of ranks whose devices are of different makers (GPUs and CPUs, or GPUs of two makers).

The ranks of one maker that have collectives add up among themselves, on their devices; the first of them meets the ranks
of the other makers in the host's memory, each of which brings its own. A bucket goes down to the host as soon as it is
complete, by a thread that waits for it, and is added there by the engine's thread; backward goes on meanwhile.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.accelerators import Accelerators
from evenstep.bucket_engine import Bucket, BucketEngine
from evenstep.device_places import Makers
from evenstep.engine import EngineOptions, Report, SharedEngine
from evenstep.exits import stop_at_exit
from evenstep.group import Bootstrap, Group

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (where to, from where)


class HostStage:
    """Of a device whose memory is the host's, but not the group's."""

    def mark(self) -> Any:
        """After what the caller has put on its stream."""
        return None

    def land(self, copies: Copies, mark: Any, work: Any) -> None:
        """On the waiting thread: returns when what comes from the device, after the mark and the work, is on the host."""
        if work is not None:
            work.wait()
        for target, source in copies:
            target.copy_(source)

    def rise(self, copies: Copies) -> None:
        """Begins the way back, on the caller's stream."""
        for target, source in copies:
            target.copy_(source)


class DeviceStage(HostStage):
    """Of an accelerator. Copies go straight between its memory and the group's, which is pinned where CUDA takes it; what
    lands does so on a stream of the waiting thread's own."""

    def __init__(self, device: torch.device, memory: torch.Tensor, accelerators: Accelerators | None = None) -> None:
        self._device, self._torch = device, accelerators or Accelerators()
        self._stream: Any = None
        unpin = self._torch.pin(device, memory.data_ptr(), memory.nbytes) if memory.nbytes else None
        if unpin is not None:
            weakref.finalize(self, unpin)

    def _event(self, stream: Any) -> Any:
        event = self._torch.event(self._device)
        event.record(stream)
        return event

    def mark(self) -> Any:
        return self._event(self._torch.current(self._device))

    def land(self, copies: Copies, mark: Any, work: Any) -> None:
        if self._stream is None:
            self._stream = self._torch.stream(self._device)
        self._torch.use(self._stream)
        self._stream.wait_event(mark)
        if work is not None:
            work.wait()
        for target, source in copies:
            self._torch.copy(target, source)
        self._event(self._stream).synchronize()

    def rise(self, copies: Copies) -> None:
        for target, source in copies:
            self._torch.copy(target, source)


def stage_of(device: torch.device, memory: torch.Tensor) -> HostStage:
    return HostStage() if device.type == "cpu" else DeviceStage(device, memory)


class Waiter:
    """A thread that does one job after the other: each waits for something. The first error ends all that follow."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="evenstep-hybrid", daemon=True)
        self._thread.start()
        stop_at_exit(self)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def join(self) -> None:
        """Waits for the jobs submitted so far; raises their error."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()
        error = self._error
        if error is not None:
            raise error

    def stop(self, seconds: float = 0) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            del job  # nothing is kept alive while the thread waits


class HybridEngine(BucketEngine):
    """Of a rank on an accelerator. `team`: the process group of the ranks whose devices add up among themselves, of which
    `leader` (its number in the job) meets the others; `comm`: the group in the host's memory, None where this rank is not
    in it."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        comm: _core.Comm | None,
        team: Any,
        leader: int,
        flags: Group | None,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, options)
        self._team, self._leader, self._flags, self._telemetry = team, leader, flags, telemetry
        self._works: list[Any] = []
        self._gradients: dict[int, torch.Tensor] = {}  # of this round, where they go down as they are
        self._host: SharedEngine | None = None
        if comm is not None:
            twins = [torch.empty_like(p, device="cpu") for p in parameters]
            self._host = SharedEngine(twins, comm, telemetry, options)
            device = parameters[0].device if parameters else torch.device("cpu")
            self.stage = stage_of(device, torch.frombuffer(comm.arena(), dtype=torch.uint8))
            self._waiter = Waiter()
            weakref.finalize(self, self._waiter.stop)

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        if self._host is not None:
            self._host.reorder(order, late)
        return super().reorder(order, late)

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        if self._host is not None:  # of a team, the weights are in the buckets
            self._host.begin(weight if self._team is None else 1.0, step)

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        if self._team is None:
            self._gradients[index] = gradient
        else:
            super()._pack(index, gradient)

    def _leave_out(self, index: int) -> None:
        if self._team is not None:
            super()._leave_out(index)

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        work = None
        if self._team is not None:
            work = dist.reduce(bucket.flat, dst=self._leader, group=self._team, async_op=True)
        if self._host is None:
            self._works.append(work)
            return
        indices = bucket.indices  # of a team, another rank may have what this one lacks
        if self._team is None:
            sources = {index: self._gradients[index] for index in indices if self._have[index]}
        else:
            sources = {index: self.views[index] for index in indices}
        mark, slots = self.stage.mark(), self._host.views
        host, stage = self._host, self.stage

        def go_down() -> None:
            with torch.no_grad():
                stage.land([(slots[index], source) for index, source in sources.items()], mark, work)
            for index in sources:
                host.ready(index, slots[index])

        self._waiter.submit(go_down)

    def settle(self) -> None:
        """Until what is complete is on the host. Not of a team, whose sums come from others."""
        if self._host is not None and self._team is None:
            self._waiter.join()

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        used = self.used_anywhere(self._flags) if self._flags is not None else b""
        start = _core.clock_ns()
        self._hand_on_complete(closing=True)
        if self._host is not None:
            self._waiter.join()
            summed, report = self._host.finish()
            met = _core.clock_ns()
            used = used or bytes(summed)
            for bucket in self._buckets:
                slots = self._host.views
                self.stage.rise([(self.views[index], slots[index]) for index in bucket.indices if used[index]])
                self._tell_team(bucket)
        else:
            moved = sum(flat.numel() * flat.element_size() for flat in self.memory)
            report = Report(0, 0, 0, moved)
            self._wait_for_works()
            for bucket in self._buckets:
                self._tell_team(bucket)
        self._wait_for_works()
        self._gradients.clear()
        now = _core.clock_ns()
        if self._host is not None and self._team is None:  # a team meets once more
            report.own_ns = now - met
        report.exposed_ns = now - start
        return used, report

    def _tell_team(self, bucket: Bucket) -> None:
        if self._team is not None:
            self._works.append(dist.broadcast(bucket.flat, src=self._leader, group=self._team, async_op=True))

    def _wait_for_works(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


class BesideTeams(SharedEngine):
    """Of a rank on the host, beside teams: which parameters have a gradient all ranks tell one another, since a team's
    leader brings all."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        comm: _core.Comm,
        flags: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, comm, telemetry, options)
        self._flags = flags
        self._have = bytearray(len(parameters))

    def begin(self, weight: float, step: int) -> None:
        self._have = bytearray(len(self._parameters))
        super().begin(weight, step)

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        self._have[index] = 1
        super().ready(index, gradient)

    def finish(self) -> tuple[Sequence[int], Report]:
        used = bytes(map(max, zip(*self._flags.exchange(bytes(self._have))))) if self._have else b""
        return used, super().finish()[1]


def hybrid_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    makers: Makers,
    on_host: bool,
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> BucketEngine | SharedEngine | None:
    """Collective over all ranks; None where the ranks that are to meet in the host's memory cannot."""
    needed = SharedEngine.arena_bytes(parameters, options)
    comm = bootstrap.shared(needed, "gradients", makers.host, measures=True)
    opened = group.exchange(bytes([group.rank not in makers.host or comm is not None]))
    if b"\0" in opened:
        return None
    team, leader = None, 0
    for ranks, backend in zip(makers.teams, makers.backends):
        if group.rank in ranks:
            team = bootstrap.torch_group(backend, ranks)
            leader = dist.get_global_rank(team, 0)
    flags = group if makers.teams else None
    if not on_host:
        return HybridEngine(parameters, comm, team, leader, flags, telemetry, options)
    assert comm is not None
    if flags is None:
        engine = SharedEngine(parameters, comm, telemetry, options)
    else:
        engine = BesideTeams(parameters, comm, flags, telemetry, options)
    engine.beside_others = True
    return engine
