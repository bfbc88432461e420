"""One all-reduce over ranks on devices of different makers: GPUs and CPUs, or GPUs of two makers.

Inside each maker, on each host, its own collectives (NCCL for CUDA, RCCL for ROCm, XCCL for XPUs, our shared memory for CPUs);
between these parts pinned staging and our engine of the host's memory (UCX, or Gloo, between hosts), one rank of each. A
tensor goes in pieces, so that while the parts' sums of one piece are added on the host, the next one is on its way down
and the last one on its way up.
"""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="attr-defined,no-any-return"

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep._core import EvenstepError
from evenstep.accelerators import Accelerators
from evenstep.backend_tensors import factor_of
from evenstep.device_places import agreed_over_hosts, has_xccl, maker_of, wanted_over_hosts
from evenstep.group import TorchGroup, gather_objects
from evenstep.group_end import wait_for
from evenstep.hosts import host_numbers, this_host

PIECE_BYTES = 4 << 20
_AHEAD = 2  # pieces on their way down while one is added on the host
_OPS = {
    dist.ReduceOp.SUM: dist.ReduceOp.SUM,
    dist.ReduceOp.AVG: dist.ReduceOp.SUM,
    dist.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: dist.ReduceOp.MIN,
    dist.ReduceOp.MAX: dist.ReduceOp.MAX,
}


class _HostStage:
    """Of a leader whose device is the CPU: pieces are added where they lie."""

    def down(self, piece: torch.Tensor, slot: int) -> torch.Tensor:
        return piece

    def ready(self, slot: int) -> None:
        pass

    def up(self, piece: torch.Tensor, slot: int) -> None:
        pass

    @contextlib.contextmanager
    def going_down(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        pass


class _PinnedStage:
    """Of a leader on an accelerator: pinned memory for a few pieces, and a stream on which pieces go down."""

    def __init__(self, device: torch.device, piece_bytes: int, accelerators: Accelerators | None = None) -> None:
        self._device, self._torch = device, accelerators or Accelerators()
        self._stream = self._torch.stream(device)
        self._memory = [self._torch.pinned(piece_bytes) for _ in range(_AHEAD + 1)]
        self._arrived = [self._torch.event(device) for _ in self._memory]
        self._risen = [self._torch.event(device) for _ in self._memory]
        self._used = [False] * len(self._memory)

    def _current(self) -> Any:
        return self._torch.current(self._device)

    def begin(self) -> None:
        """What goes down comes after what the caller has put on the current stream."""
        self._stream.wait_stream(self._current())

    @contextlib.contextmanager
    def going_down(self) -> Iterator[None]:
        with self._torch.beside(self._stream, self._device):
            yield

    def down(self, piece: torch.Tensor, slot: int) -> torch.Tensor:
        """Begins the copy, on the stream that goes down; the slot's last use must have risen."""
        if self._used[slot]:
            self._risen[slot].synchronize()
        staged = self._memory[slot][: piece.nbytes].view(piece.dtype)
        self._torch.copy(staged, piece)
        self._arrived[slot].record(self._stream)
        self._used[slot] = True
        return staged

    def ready(self, slot: int) -> None:
        self._arrived[slot].synchronize()

    def up(self, piece: torch.Tensor, slot: int) -> None:
        """Begins the copy back, on the current stream."""
        staged = self._memory[slot][: piece.nbytes].view(piece.dtype)
        self._torch.copy(piece, staged)
        self._risen[slot].record(self._current())


def _exchanges(device: torch.device) -> bool:
    """Whether the backend "evenstep" exchanges the tensors of such devices among themselves."""
    return device.type in ("cpu", "cuda") or (device.type == "xpu" and has_xccl())


def _by_host(names: Sequence[str], types: Sequence[str], places: Sequence[str], wanted: str) -> Sequence[str]:
    """The names, in which those of different hosts differ where each host's devices are to add up among themselves: with
    several makers, or where EVENSTEP_DEVICE_HOSTS says so."""
    hosts = host_numbers(list(places))
    several = len(set(names)) > 1 and wanted != "nccl"
    if max(hosts) == 0 or not (several or (wanted == "legs" and set(types) != {"cpu"})):
        return names
    return [f"{name} on host {host}" for name, host in zip(names, hosts)]


def _made_by(names: Sequence[str], exchanging: Sequence[bool]) -> dict[str, list[int]]:
    """The ranks of each maker. Where several have one whose devices have no collectives, each is a maker of its own."""
    makers: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        makers.setdefault(name, []).append(rank)
    for name, ranks in list(makers.items()):
        if len(ranks) > 1 and not all(exchanging[rank] for rank in ranks):
            del makers[name]
            makers.update({f"{name} of rank {rank}": [rank] for rank in ranks})
    return makers


def _everyone(group: Any, value: Any) -> list[Any]:
    return gather_objects(TorchGroup(group), value)


class HybridGroup:
    """All ranks of the default group, each with the device of its own. Making one is collective, and so is every call.

    `maker` is what its devices' own collectives are named by: the device's type ("cuda-hip" for ROCm's), unless a name is
    given (two groups of CPUs then stand for two makers). CUDA's, ROCm's and, where torch has XCCL, XPUs have such collectives;
    of others each goes through the host. On several hosts those of each host are a maker of their own (EVENSTEP_DEVICE_HOSTS=nccl: they
    are not); where all devices are of one maker, with EVENSTEP_DEVICE_HOSTS=legs.
    """

    def __init__(
        self,
        device: torch.device | str,
        maker: str | None = None,
        piece_bytes: int = PIECE_BYTES,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.device = torch.device(device)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._piece_bytes = max(256, piece_bytes // 256 * 256)
        everyone = dist.new_group(timeout=timeout, backend="evenstep")
        name = maker or maker_of(self.device)
        own = (name, self._piece_bytes, self.device.type, _exchanges(self.device), this_host(), wanted_over_hosts())
        names, sizes, types, exchanging, places, wishes = zip(*_everyone(everyone, own))
        if len(set(sizes)) > 1:
            raise EvenstepError(
                f"HybridGroup: the ranks want pieces of different sizes: {list(sizes)}\n"
                "  fix: give all ranks the same piece_bytes"
            )
        self.makers = _made_by(_by_host(names, types, places, agreed_over_hosts(wishes)), exchanging)
        self._inner: Any = None
        for ranks in self.makers.values():  # every rank takes part in the making of every group
            group = dist.new_group(ranks, timeout=timeout, backend="evenstep")
            if self._rank in ranks:
                self._inner, self._peers = group, ranks
        self._leader = self._peers[0]
        leaders = [ranks[0] for ranks in self.makers.values()]
        self._between = dist.new_group(leaders, timeout=timeout, backend="evenstep")
        dist.destroy_process_group(everyone)  # which nobody is in any more
        self._stage: Any = None
        if self._rank == self._leader:
            self._stage = _HostStage() if self.device.type == "cpu" else _PinnedStage(self.device, self._piece_bytes)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, factor: float | None = None) -> None:
        """In place on all ranks; `factor` multiplies this rank's before it is added (SUM; PREMUL_SUM brings one). On an
        accelerator the current stream has the result; the host of each maker's first rank waits for the host leg."""
        own = factor_of(op)
        if own is not None:
            op, factor = dist.ReduceOp.SUM, own if factor is None else factor * own
        inner_op = _OPS.get(op)
        if inner_op is None:
            raise ValueError(f"HybridGroup.all_reduce: {op} is not SUM, AVG, PREMUL_SUM, PRODUCT, MIN or MAX")
        if factor is not None:
            tensor.mul_(factor)
        flat = tensor.contiguous().view(-1)
        if len(self.makers) == 1 and self._ranks > 1:
            dist.all_reduce(flat, op=inner_op, group=self._inner)
        elif self._ranks > 1:
            self._reduce(flat, inner_op)
        if op == dist.ReduceOp.AVG:
            flat.div_(self._ranks)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _reduce(self, flat: torch.Tensor, op: Any) -> None:
        """Down k+2, host k, up k: every rank of a maker makes that maker's calls in this order."""
        pieces = flat.split(self._piece_bytes // flat.element_size()) if flat.numel() else []
        staged: list[Any] = [None] * len(pieces)
        if self._stage is not None:
            self._stage.begin()
        for k in range(len(pieces) + _AHEAD):
            if k < len(pieces):
                staged[k] = self._down(pieces[k], k, op)
            if k >= _AHEAD:
                self._up(pieces, staged, k - _AHEAD, op)

    def _down(self, piece: torch.Tensor, k: int, op: Any) -> Any:
        with self._stage.going_down() if self._stage is not None else contextlib.nullcontext():
            if len(self._peers) > 1:
                dist.reduce(piece, dst=self._leader, op=op, group=self._inner)
            return None if self._stage is None else self._stage.down(piece, k % (_AHEAD + 1))

    def _up(self, pieces: Sequence[torch.Tensor], staged: list[Any], k: int, op: Any) -> None:
        if self._stage is not None:
            self._stage.ready(k % (_AHEAD + 1))
            wait_for(dist.all_reduce(staged[k], op=op, group=self._between, async_op=True), self._between)
            self._stage.up(pieces[k], k % (_AHEAD + 1))
        if len(self._peers) > 1:
            dist.broadcast(pieces[k], src=self._leader, group=self._inner)
        staged[k] = None
