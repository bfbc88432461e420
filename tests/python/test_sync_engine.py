"""The gradient engine from Python: one rank, real addresses."""

import pytest
import torch

import evenstep._core as core

F32, F64 = 0, 1


def test_a_round_scales_in_the_arena():
    parameters = [(10, F32), (3, F64)]
    size = core.Sync.arena_bytes(parameters)
    fd = core.Comm.create_segment(1, size)
    comm = core.Comm(fd, 0, 1, size)
    sync = core.Sync(comm, parameters)
    arena = comm.arena()
    first = torch.frombuffer(arena, dtype=torch.float32, count=10, offset=sync.offset(0))
    gradient = torch.arange(10, dtype=torch.float32)
    sync.begin(0.5)
    sync.ready(0, gradient.data_ptr())
    used, _, _, _, _, moved, buckets, full, nonfinite = sync.finish()
    assert used == b"\x01\x00"
    assert torch.equal(first, gradient / 2)
    assert (moved, buckets, full, nonfinite) == (size, 2, size, 0)
    with pytest.raises(core.EvenstepError, match="no round"):
        sync.finish()
    with pytest.raises(IndexError):
        sync.offset(2)
    sync.close()
    with pytest.raises(core.EvenstepError, match="closed"):
        sync.begin(1.0)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="parameter 0"):
        core.Sync.arena_bytes([(-1, F32)])
    with pytest.raises(ValueError, match="negative"):
        core.Sync.arena_bytes([(4, F32)], -1)
    with pytest.raises(core.EvenstepError, match="dtype"):
        core.Sync.arena_bytes([(4, 99)])
