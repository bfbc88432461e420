"""Measures devices with torch for `evenstep profile`: requests come and answers go as lines of JSON.

The program starts it as ``python -m evenstep.profile_worker``, reads a first line with torch's version, and then sends
one request a device, each answered by one line. It ends when no more requests can come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

# Sides of the square matrices, tried in this order until one product takes long enough to time it well.
SIDES = (256, 512, 1024, 2048, 4096, 8192)
ENOUGH_SECONDS = 0.03


def pin(cpus: list[int]) -> None:
    """Binds every thread of this process, those of torch's pool included."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:  # a thread that has just ended
            pass


def rate(work: Callable[[], None], wait: Callable[[], None], seconds: float) -> float:
    """How often `work` runs in a second, counted over all of the time, so that a CPU quota shows."""
    wait()
    count = 0
    start = time.perf_counter()
    while True:
        work()
        wait()
        count += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            return count / passed


def matmul_gflops(torch: Any, device: str, dtype: Any, wait: Callable[[], None], seconds: float) -> float:
    """Square matrix products, in 10^9 floating-point operations a second (2 n^3 a product)."""
    began = time.perf_counter()
    for side in SIDES:
        a = torch.ones(side, side, dtype=dtype, device=device)
        b = torch.ones(side, side, dtype=dtype, device=device)
        c = torch.empty(side, side, dtype=dtype, device=device)
        torch.mm(a, b, out=c)  # the first one loads and tunes the kernel
        wait()
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        wait()
        once = time.perf_counter() - start
        # the next side takes eight times as long; stop before that eats the time there is
        if once >= ENOUGH_SECONDS or once * 16 > seconds or time.perf_counter() - began > seconds / 2:
            break
    return rate(lambda: torch.mm(a, b, out=c), wait, seconds) * 2.0 * side**3 / 1e9


def copy_gb_per_second(torch: Any, device: str, wait: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Copying (bytes read plus written) and reading an array larger than the GPU's cache, in 10^9 bytes a second."""
    free, _ = torch.cuda.mem_get_info(device)
    count = int(min(1 << 28, free // 4)) // 4
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = rate(lambda: target.copy_(source), wait, seconds / 2) * 8.0 * count
    read = rate(lambda: source.sum(), wait, seconds / 2) * 4.0 * count
    return copied / 1e9, read / 1e9


def measure(torch: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answers one request: {"name", "kind", "cpus", "threads", "index", "seconds"}."""
    seconds = float(request["seconds"])
    pin(request["cpus"])
    answer: dict[str, Any] = {"name": request["name"]}
    if request["kind"] == "cuda":
        device = f"cuda:{request['index']}"

        def wait() -> None:
            torch.cuda.synchronize(device)

        copied, read = copy_gb_per_second(torch, device, wait, seconds / 2)
        answer["memory_bandwidth_gb_per_second"] = copied
        answer["memory_read_gb_per_second"] = read
    else:
        device = "cpu"

        def wait() -> None:
            pass

        torch.set_num_threads(request["threads"])
    answer["matmul_fp32_gflops"] = matmul_gflops(torch, device, torch.float32, wait, seconds / 2)
    answer["matmul_bf16_gflops"] = matmul_gflops(torch, device, torch.bfloat16, wait, seconds / 2)
    return answer


def main() -> int:
    """Reads requests until there are no more."""
    import torch

    print(json.dumps({"torch": str(torch.__version__), "cuda": bool(torch.cuda.is_available())}), flush=True)
    with os.fdopen(int(os.environ["EVENSTEP_REQUESTS_FD"]), encoding="utf-8") as requests:
        for line in requests:
            try:
                answer = measure(torch, json.loads(line))
            except Exception as error:  # whatever a device does must not end the measurement of the others
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
