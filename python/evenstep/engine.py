"""The engines that form sum_r weight_r * gradient_r: in shared memory, or as the fallback through torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.group import DTYPES, Bootstrap, Group

BUCKET_BYTES = 25 << 20


class Report:
    """What one round cost, in nanoseconds."""

    __slots__ = ("bytes", "communication_ns", "exposed_ns", "peer_wait_ns")

    def __init__(self, communication_ns: int, peer_wait_ns: int, exposed_ns: int, moved: int) -> None:
        self.communication_ns = communication_ns
        self.peer_wait_ns = peer_wait_ns
        self.exposed_ns = exposed_ns
        self.bytes = moved


class Engine(Protocol):
    """A round: begin, ready for each gradient as it comes, finish. views[i] is where parameter i's sum will lie."""

    views: list[torch.Tensor]

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """What else of its own shares the memory of the views."""

    def begin(self, weight: float, step: int) -> None: ...

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient's memory must stay as it is until finish."""

    def finish(self) -> tuple[Sequence[int], Report]:
        """used[i] is 1 where some rank had a gradient for parameter i; collective."""


def memory_format_of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a gradient as autograd lays it out: the parameter's own where it is dense."""
    with torch.no_grad():
        like = torch.empty_like(parameter, device="meta")
    return tuple(like.shape), tuple(like.stride())


def _shapes(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(p.numel(), DTYPES[p.dtype]) for p in parameters]


class SharedEngine:
    """Buckets in the group's arena, reduced by a thread without the GIL while backward runs.

    Gradients that lie elsewhere (another device, other strides) are copied into their slot first.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], comm: _core.Comm, telemetry: _core.Telemetry | None = None
    ) -> None:
        self._comm = comm
        self._sync = _core.Sync(comm, _shapes(parameters), telemetry=telemetry)
        arena = comm.arena()
        self._on_cpu = [p.device.type == "cpu" for p in parameters]
        self._held: list[Any] = [None] * len(parameters)
        self.views: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._addresses: list[int] = []
        for index, parameter in enumerate(parameters):
            flat = torch.empty(0, dtype=parameter.dtype)
            if parameter.numel():
                at = self._sync.offset(index)
                flat = torch.frombuffer(arena, dtype=parameter.dtype, count=parameter.numel(), offset=at)
            shape, stride = memory_format_of(parameter)
            slot = flat.as_strided(shape, stride)
            self._slots.append(slot)
            self._addresses.append(slot.data_ptr())
            self.views.append(slot.detach() if self._on_cpu[index] else torch.empty_like(parameter))

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return self._slots

    @staticmethod
    def arena_bytes(parameters: Sequence[torch.Tensor]) -> int:
        return _core.Sync.arena_bytes(_shapes(parameters))

    def begin(self, weight: float, step: int) -> None:
        self._sync.begin(weight, step)

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        slot = self._slots[index]
        address = gradient.data_ptr()
        if (
            address != self._addresses[index]
            and self._on_cpu[index]
            and gradient.dtype == slot.dtype
            and gradient.stride() == slot.stride()
        ):
            self._held[index] = gradient
            self._sync.ready(index, address)
            return
        if address != self._addresses[index]:
            slot.copy_(gradient)
        self._sync.ready(index, self._addresses[index])

    def finish(self) -> tuple[Sequence[int], Report]:
        used, _, communication_ns, peer_wait_ns, exposed_ns, moved, _ = self._sync.finish()
        for index, on_cpu in enumerate(self._on_cpu):
            self._held[index] = None
            if not on_cpu and used[index]:
                self.views[index].copy_(self._slots[index])
        return used, Report(communication_ns, peer_wait_ns, exposed_ns, moved)


class TorchEngine:
    """Flat buffers for each device and dtype, all-reduced by torch after backward; gradients end as views of them."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], process_group: Any, group: Group, telemetry: _core.Telemetry
    ) -> None:
        self._process_group, self._group, self._telemetry = process_group, group, telemetry
        self._weight, self._step = 0.0, 0
        self._ready: list[Any] = [None] * len(parameters)
        self.views = [torch.empty(0)] * len(parameters)
        self._buckets: list[tuple[torch.Tensor, list[int]]] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index in reversed(range(len(parameters))):
            kinds.setdefault((parameters[index].device, parameters[index].dtype), []).append(index)
        for (device, dtype), indices in kinds.items():
            bucket: list[int] = []
            size = 0
            for index in indices:
                parameter = parameters[index]
                if bucket and size + parameter.numel() * parameter.element_size() > BUCKET_BYTES:
                    self._add_bucket(parameters, bucket, device, dtype)
                    bucket, size = [], 0
                bucket.append(index)
                size += parameter.numel() * parameter.element_size()
            self._add_bucket(parameters, bucket, device, dtype)

    def _add_bucket(
        self, parameters: Sequence[torch.Tensor], indices: list[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        flat = torch.zeros(sum(parameters[i].numel() for i in indices), device=device, dtype=dtype)
        at = 0
        for index in indices:
            shape, stride = memory_format_of(parameters[index])
            count = parameters[index].numel()
            self.views[index] = flat[at : at + count].as_strided(shape, stride)
            at += count
        self._buckets.append((flat, indices))

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return [flat for flat, _ in self._buckets]

    def begin(self, weight: float, step: int) -> None:
        self._weight, self._step = weight, step

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        self._ready[index] = gradient

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        start = _core.clock_ns()
        mine = bytes(0 if gradient is None else 1 for gradient in self._ready)
        used = bytes(map(max, zip(*self._group.exchange(mine)))) if mine else b""
        works = []
        moved = 0
        for flat, indices in self._buckets:
            for index in indices:
                view, gradient = self.views[index], self._ready[index]
                if gradient is None or self._weight == 0.0:
                    view.zero_()
                elif gradient is view:
                    view.mul_(self._weight)
                else:
                    torch.mul(gradient, self._weight, out=view)
            if any(used[index] for index in indices):
                moved += flat.numel() * flat.element_size()
                works.append(dist.all_reduce(flat, group=self._process_group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()
        self._ready = [None] * len(self._ready)
        now = _core.clock_ns()
        self._telemetry.span(_core.SPAN_COMMUNICATION, self._step, start, now - start, moved)
        return used, Report(now - start, 0, now - start, moved)


def choose_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    devices: Sequence[str],
    engine: str | None,
    telemetry: _core.Telemetry,
) -> Engine:
    """The shared-memory engine where all ranks are on one host, unless all have a CUDA device of their own for NCCL.

    `devices` are those of all ranks' parameters, the same list on every rank. Raises EvenstepError, on every rank,
    where engine="shared" was asked for and cannot be had.
    """
    unsupported = sorted({str(p.dtype) for p in parameters if p.dtype not in DTYPES})
    on_gpus = all(d.startswith("cuda") for d in devices) and len(set(devices)) == len(devices)
    use_torch = engine == "torch" or (engine is None and (bool(unsupported) or (on_gpus and len(devices) > 1)))
    if engine == "shared" and unsupported:
        raise EvenstepError(
            f"es.prepare(engine='shared'): the model has parameters of {', '.join(unsupported)}, which the "
            "shared-memory engine does not add up\n  fix: leave engine out, or give engine='torch'"
        )
    if not use_torch:
        comm = bootstrap.shared(SharedEngine.arena_bytes(parameters), "gradients")
        if comm is not None:
            return SharedEngine(parameters, comm, telemetry)
        if engine == "shared":
            raise EvenstepError(
                "es.prepare(engine='shared'): the ranks cannot open one another's memory: they are on several hosts, in "
                "containers with process numbers of their own, or of several users\n  fix: start all ranks on one host "
                "as one user; or leave engine out, and torch's collectives are used"
            )
    nccl = on_gpus and dist.is_nccl_available()
    return TorchEngine(parameters, dist.new_group(backend="nccl") if nccl else bootstrap.gloo(), group, telemetry)
