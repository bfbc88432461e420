"""What is measured on a GPU: all-reduces of our NCCL engine and of torch's, and of a GPU with a CPU. Part of cases.py, which
starts it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import DEVICE, RANK, RANKS, Direct, join, own_gpu, row, same


def _measure(call: Callable[[], Any], bytes_: int) -> tuple[float, float]:
    """Seconds of the host in the call, and seconds until the stream has passed: medians."""
    repeats = 50 if bytes_ <= 1 << 20 else 10
    host, whole = [], []
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    return statistics.median(host), statistics.median(whole)


def _show(engine: str, bytes_: int, host: float, whole: float) -> None:
    if RANK == 0:
        row(
            engine=engine,
            bytes=bytes_,
            host_us=round(host * 1e6, 1),
            us=round(whole * 1e6, 1),
            bus_gb_per_second=round(2 * (RANKS - 1) / RANKS * bytes_ / whole / 1e9, 2),
        )


SIZES = (1 << 10, 1 << 20, 64 << 20, 256 << 20)


def _bench() -> None:
    from evenstep import _core

    for blocking in (False, True):
        at = Direct(blocking)
        for bytes_ in SIZES:
            data = torch.ones(bytes_ // 4, device="cuda")
            place, how = data.data_ptr(), (data.numel(), _core.DTYPE_F32, _core.OP_MAX, None, at.stream)
            host, whole = _measure(partial(at.comm.all_reduce, place, place, *how), bytes_)
            _show("ours, blocking" if blocking else "ours", bytes_, host, whole)
        at.comm.close()


bench_alone = bench_pair = _bench


def _bench_torch() -> None:
    own_gpu()
    join("nccl")
    for bytes_ in SIZES:
        data = torch.ones(bytes_ // 4, device="cuda")
        _show("torch's NCCL", bytes_, *_measure(partial(dist.all_reduce, data, dist.ReduceOp.MAX), bytes_))
    dist.destroy_process_group()


bench_torch_alone = bench_torch_pair = _bench_torch

HYBRID_SIZES = [1 << 20, 64 << 20]


def hybrid_gpu_and_cpu() -> None:
    """A GPU rank and a CPU rank in one all-reduce, and how much of the slower leg's speed it has."""
    join("evenstep")
    from evenstep.hybrid import HybridGroup

    device = torch.device(DEVICE, 0) if RANK == 0 else torch.device("cpu")
    group = HybridGroup(device, maker=f"of rank {RANK}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for count in (1, 1000, 3_000_001):
            tensor = torch.full((count,), RANK + 1, dtype=dtype, device=device)
            group.all_reduce(tensor)
            same(tensor, 3)
    weighted = torch.full((1000,), 2.0, device=device)
    group.all_reduce(weighted, factor=0.5 * (RANK + 1))
    same(weighted, 3)
    hybrid_speed(group, device, HYBRID_SIZES)
    dist.destroy_process_group()


def hybrid_speed(group: Any, device: torch.device, sizes: Sequence[int]) -> None:
    """Its legs: the copy down, the host's all-reduce, the copy up, each alone and in one piece. They overlap, so that the slowest
    of the three is what one all-reduce takes at best; the number to reach is 0.8 of that speed."""
    for bytes_ in sizes:
        data, plain = torch.ones(bytes_ // 4, device=device), torch.ones(bytes_ // 4)
        pinned = torch.ones(bytes_ // 4, pin_memory=device.type == "cuda")
        calls: dict[str, Callable[[], Any]] = {
            "hybrid": partial(group.all_reduce, data),
            "host": partial(dist.all_reduce, plain),
            "down": partial(pinned.copy_, data, non_blocking=True),
            "up": partial(data.copy_, pinned, non_blocking=True),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(7):
            for name, call in calls.items():
                dist.barrier()
                began = time.perf_counter()
                if RANK == 0 or name in ("hybrid", "host"):
                    call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - began)
        if RANK == 0:
            medians = {name: statistics.median(t) for name, t in times.items()}
            slower = max(("host", "down", "up"), key=medians.__getitem__)
            part = medians[slower] / medians["hybrid"]
            row(
                bytes=bytes_,
                **{f"{name}_us": round(seconds * 1e6) for name, seconds in medians.items()},
                slower_leg=slower,
                of_its_speed=round(part, 3),
                reaches_80_percent=part >= 0.8,
            )
