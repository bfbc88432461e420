"""PyTorch's own wrappers (backend_pattern_cases.py) on our NCCL engine, in two ranks: CPU tensors and made-up streams stand for a
GPU's, so that what they call is what they call of a CPU's mesh, and their own streams are not there."""

from __future__ import annotations

import os
import sys
import warnings

import backend_pattern_cases as patterns
import torch.distributed as dist
from fake_streams import stand_in_for_all

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    streams = stand_in_for_all()
    dist.init_process_group("evenstep")
    patterns.pipeline()
    if patterns.CPUS_TRAIN_SHARDED:
        patterns.saved(patterns.fully_sharded())
    patterns.ddp()
    patterns.tensors()
    patterns.functional()
    patterns.zero_redundancy()
    dist.barrier()
    assert all(one.violation() == "" for one in streams), [one.violation() for one in streams]
    if os.environ.get("EVENSTEP_DEVICE_HOSTS") == "legs":  # each rank alone on its host
        assert any("a copy up on side legs up" in one.log for one in streams)
        dist.destroy_process_group()
        sys.exit()
    called = streams[0].library.fake_gpu_log().decode()
    for name in ("ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclSend", "ncclRecv"):
        assert name in called, (name, called)
    dist.destroy_process_group()
