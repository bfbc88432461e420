"""What the ranks of test_backend.py, test_backend_ends.py and test_backend_crossed.py begin and end with."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

SECONDS = 300  # that a test's processes may take

Check = Callable[[Callable[..., None], int], None]


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(backend: str = "evenstep", seconds: float = 60) -> tuple[int, int]:
    from datetime import timedelta

    import torch.distributed as dist

    import evenstep  # noqa: F401

    torch.manual_seed(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return rank_and_size()


def leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
