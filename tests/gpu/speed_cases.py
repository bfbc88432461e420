"""What is measured on a GPU: all-reduces of our NCCL engine and of torch's. Part of cases.py, which starts it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import RANK, RANKS, Direct, join, own_gpu, row


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
            host, whole = _measure(
                lambda data=data, at=at: at.comm.all_reduce(
                    data.data_ptr(), data.data_ptr(), data.numel(), _core.DTYPE_F32, _core.OP_MAX, None, at.stream
                ),
                bytes_,
            )
            _show("ours, blocking" if blocking else "ours", bytes_, host, whole)
        at.comm.close()


bench_alone = bench_pair = _bench


def _bench_torch() -> None:
    own_gpu()
    join("nccl")
    for bytes_ in SIZES:
        data = torch.ones(bytes_ // 4, device="cuda")
        _show("torch's NCCL", bytes_, *_measure(lambda data=data: dist.all_reduce(data, op=dist.ReduceOp.MAX), bytes_))
    dist.destroy_process_group()


bench_torch_alone = bench_torch_pair = _bench_torch
