"""es.find_batch_size on a real process's memory, run in ranks by test_batch_size.py: `case` names a function below."""

from __future__ import annotations

import copy
import random
import resource
import sys
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep.device_memory import is_out_of_memory

MIB = 1 << 20
WIDE = 1 << 14  # floats a sample in each of a step's few large tensors: some 64 KiB


class Wide(nn.Module):
    """A few parameters, and activations that grow by some 0.2 MiB a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.drop(self.norm(self.layer(x)))
        return inner.repeat(1, WIDE // 8).sigmoid().log().mean()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0])


def made() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor]]:
    torch.manual_seed(7)
    model = Wide()
    return model, torch.optim.Adam(model.parameters()), (torch.randn(4, 8),)


def size_of(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(f"{name}:"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, size: int) -> bool:
    """Whether a step of `size` samples runs."""
    try:
        optimizer.zero_grad()
        loss_of(model, (batch[0].repeat(-(-size // 4), 1)[:size],)).backward()
        optimizer.step()
    except Exception as error:
        assert is_out_of_memory(error), error
        return False
    return True


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().clone().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    parameters = list(model.parameters())
    return copy.deepcopy(
        (
            bits(model.state_dict()),
            bits(optimizer.state_dict()),
            bits([p.grad for p in parameters]),
            [(id(p), p.data_ptr(), id(p.grad), p.grad is not None and p.grad.data_ptr()) for p in parameters],
            [module.training for module in model.modules()],
            bits(torch.get_rng_state()),
            random.getstate(),
            bits(numpy.random.get_state(legacy=False)["state"]["key"].tolist()),
        )
    )


def all_is_as_before() -> None:
    """With state in the optimizer and without, gradients there and not, a loader and a batch, a trial that fails."""
    data = TensorDataset(torch.arange(80.0).reshape(10, 8))
    model, optimizer, batch = made()
    for number in range(3):
        before = state(model, optimizer)
        if number == 0:
            found = es.find_batch_size(model, optimizer, batch, loss_of, most=16, seconds=1e9)
        elif number == 1:
            loader = DataLoader(data, batch_size=4, shuffle=True)
            found = es.find_batch_size([model], {"one": optimizer}, loader, lambda m, b: loss_of(m[0], b), seconds=1e9)
            assert found.largest <= 10 and found.ranks[0].stopped_by == "most", found
        else:

            def fails(model: nn.Module, optimizer: Any, batch: Any) -> None:
                loss_of(model, batch).backward()
                optimizer.step()
                raise KeyError("no such thing")

            try:
                es.find_batch_size(model, optimizer, batch, step=fails)
            except KeyError:
                pass
            else:
                raise AssertionError("a failing step was not told")
        assert state(model, optimizer) == before, number
        loss_of(model, (torch.randn(4, 8),)).backward()
        optimizer.step()


def the_process_limit_is_found() -> None:
    """RLIMIT_AS, by the kernel's own refusal."""
    model, optimizer, batch = made()
    es.barrier()  # the ranks' shared memory is there before the limit is
    assert train(model, optimizer, batch, 2)
    room = 80 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (size_of("VmSize") + room, resource.RLIM_INFINITY))
    found = es.find_batch_size(model, optimizer, batch, loss_of, seconds=1e9)
    (one,) = found.ranks
    assert one.limit == "RLIMIT_AS" and one.stopped_by == "memory", found
    assert 2 <= found.fastest <= found.largest, found
    assert all(trial.fits for trial in one.trials if trial.samples <= found.largest), found
    # Other threads of the process take addresses, too, for moments: what is found leaves them none.
    assert any(train(model, optimizer, batch, found.largest) for _ in range(3))
    assert not train(model, optimizer, batch, 1000)  # 200 MiB and more
    assert any(train(model, optimizer, batch, found.largest) for _ in range(3))


def memory_that_runs_out_is_recovered() -> None:
    """A need that no smaller size shows: from 24 samples on a workspace that the process's limit refuses."""
    model, optimizer, batch = made()
    es.barrier()  # the ranks' shared memory is there before the limit is
    assert train(model, optimizer, batch, 2)
    resource.setrlimit(resource.RLIMIT_AS, (size_of("VmSize") + 200 * MIB, resource.RLIM_INFINITY))

    def greedy(model: nn.Module, batch: Any) -> torch.Tensor:
        workspace = torch.ones((400 if len(batch[0]) >= 24 else 1) * MIB // 4)
        return loss_of(model, batch) + 0 * workspace.sum()

    before = state(model, optimizer)
    found = es.find_batch_size(model, optimizer, batch, greedy, seconds=1e9)
    (one,) = found.ranks
    assert found.largest == 23 and one.stopped_by == "memory", found
    failed = [trial for trial in one.trials if not trial.fits]
    assert failed and all(trial.peak_bytes is None and trial.samples >= 24 for trial in failed), found
    assert "out of memory" in str(found)
    assert state(model, optimizer) == before
    nothing = es.find_batch_size(model, optimizer, batch, loss_of, memory_bytes=1, seconds=1e9)
    assert nothing.largest == nothing.fastest == 0, nothing  # BatchNorm: one sample alone is not tried
    assert [trial.samples for trial in nothing.ranks[0].trials] == [2]


def each_rank_has_its_own_figures() -> None:
    model, optimizer, batch = made()
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        loss_of(model, (x,)).backward()
        optimizer.step()
        break
    room = 70 * MIB if es.rank() else 160 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (size_of("VmSize") + room, resource.RLIM_INFINITY))
    before = state(model, optimizer)
    found = es.find_batch_size(model, optimizer, batch, loss_of, seconds=1e9)
    assert state(model, optimizer) == before
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [one.rank for one in found.ranks] == [0, 1]
    first, second = (one.largest for one in found.ranks)
    assert first > second > 0, found
    assert found.largest == first + second and f"all 2 ranks together: largest {first + second}" in str(found)
    texts = es.session().all_gather_bytes(str(found).encode())
    assert texts[0] == texts[1]
    for (x,) in loader:  # training goes on, and the ranks stay alike
        optimizer.zero_grad()
        loss_of(model, (x,)).backward()
        optimizer.step()
    sums = es.session().all_gather_bytes(repr(bits(model.state_dict())).encode())
    assert sums[0] == sums[1]

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        if es.world_size() == 1 and RANK == 1:  # inside a trial a rank is alone
            raise ValueError("no such layer")
        return loss_of(model, batch)

    try:
        es.find_batch_size(model, optimizer, batch, fails, most=2)
    except ValueError:
        assert RANK == 1
    except es.EvenstepError as error:
        assert RANK == 0 and "failed on rank 1: ValueError: no such layer" in str(error), error
    else:
        raise AssertionError("not told")


RANK = es.rank()
globals()[sys.argv[1]]()
print("FOUND")
