"""EVENSTEP_COMM_DEBUG: each choice of what moves data is said, with its reason, by rank 0 alone or by all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import backend

PREPARED = """
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(5, 1)
    es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), engine={engine})
    es.barrier()
"""

LINE = "evenstep: comm: es.prepare: gradients go "


@pytest.mark.parametrize(
    ("engine", "variables", "words"),
    [
        (None, {}, "on our engine shm: it connects all ranks"),
        ("shared", {}, "on our engine shm: engine='shared' was asked for"),
        ("torch", {}, "through torch (gloo), during backward: engine='torch' was asked for"),
        (
            None,
            {"EVENSTEP_COMM_ENGINE": "gloo"},
            "through torch (gloo), during backward: no engine of ours connects the ranks",
        ),
    ],
)
def test_the_engine_of_gradients(
    run_ranks: Callable[..., Any], engine: str | None, variables: dict[str, str], words: str
) -> None:
    env = {**variables, "EVENSTEP_COMM_DEBUG": "1"}
    first, second = run_ranks(PREPARED.format(engine=repr(engine)), 2, env=env)
    assert first.stderr.count(LINE) == 1 and f"{LINE}{words}\n" in first.stderr, first.stderr
    assert "evenstep: comm:" not in second.stderr


def test_groups_over_gloo(run_ranks: Callable[..., Any]) -> None:
    script = """
        import torch, torch.distributed as dist, evenstep
        dist.init_process_group("evenstep")
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    """
    env = {"EVENSTEP_COMM_ENGINE": "gloo", "EVENSTEP_COMM_DEBUG": "all"}
    for rank, result in enumerate(run_ranks(script, 2, env=env)):
        words = f"rank {rank}, at its opening: Gloo through torch, 2 ranks: EVENSTEP_COMM_ENGINE=gloo\n"
        assert result.stderr.count("evenstep: comm: group torch/") == 1 and words in result.stderr, result.stderr


class Store(dict):  # type: ignore[type-arg]
    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        assert all(key in self for key in keys)


@pytest.mark.parametrize(
    ("versions", "torchs", "words"),
    [
        ((23003, 22703), None, "our NCCL engine (NCCL 22703)"),
        ((23003, 0), "nccl", "torch's NCCL: ours was not found, or not wanted, on the ranks [1]"),
        ((0, 0), None, "nothing: ours was not found, or not wanted, on the ranks [0, 1]"),
    ],
)
def test_the_engine_of_cuda_tensors(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    versions: tuple[int, int],
    torchs: str | None,
    words: str,
) -> None:
    """A group's first call with CUDA tensors, without a GPU."""
    for name in ("CudaStreams", "DeviceGroups", "device_collectives"):
        monkeypatch.setattr(backend, name, lambda *arguments, **named: SimpleNamespace(identity=None))
    monkeypatch.setattr(backend, "nccl_library", lambda: None)
    store = Store({f"engine/{rank}": json.dumps([version, "here", ""]) for rank, version in enumerate(versions)})
    for rank, asked in ((0, "1"), (1, "1"), (1, "all"), (0, "0")):
        monkeypatch.setenv("EVENSTEP_COMM_DEBUG", asked)
        group: Any = SimpleNamespace(
            _device_store=store,
            _rank=rank,
            _size=2,
            _timeout=timedelta(seconds=1),
            _name="0",
            over_hosts=None,
            _members=None,
            _comm=None,
            _board=None,
            _torch_nccl=torchs,
            _beneath={},
        )
        backend.EvenstepGroup._choose_for_devices(group)
        assert ("cuda" in group._beneath) == (0 not in versions)
        said = f"evenstep: comm: group torch/0: CUDA tensors go to {words}\n"
        assert capfd.readouterr().err == (said if asked == "all" or (rank == 0 and asked == "1") else "")
