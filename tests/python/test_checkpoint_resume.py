"""A job that was killed and goes on from its checkpoint, on as many ranks or others, ends where one that never stopped
ends, and every sample counts once an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = """
    import json, os, signal, sys
    import torch
    from torch import nn
    import evenstep as es

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 90

        def __getitem__(self, i):
            return torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    every_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    every_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader = torch.utils.data.DataLoader(Data(), batch_size=12, shuffle=True)
    model, optimizer = es.prepare(model, optimizer)
    loader, every_step, every_epoch = es.prepare(loader, every_step, every_epoch)
    tag, die = sys.argv[1], int(sys.argv[2])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with open(f"seen-{tag}-{attempt}-{es.rank()}.jsonl", "a") as seen:
        for epoch in range(4):
            for x, indices in loader:
                if es.step() == die and attempt == 0 and es.rank() == es.world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                every_step.step()
                mine = indices.tolist() if es.session().latest.samples else []
                drawn = torch.rand(()).item()
                print(json.dumps([es.step(), epoch, mine, drawn]), file=seen, flush=True)
            every_epoch.step()
    if es.is_main():
        rates = [group["lr"] for group in optimizer.param_groups]
        torch.save([[p.detach() for p in model.parameters()], rates, es.step()], f"end-{tag}.pt")
"""

STEPS_AN_EPOCH, EPOCHS, SAMPLES = 8, 4, 90

Job = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    (path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture(scope="module")
def job(folder: Path, program: Path) -> Job:
    """job(tag, die, *options): trains to the end under `evenstep run`; gives what it printed."""

    def run(tag: str, die: int, *options: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVENSTEP_") or "_TEST" in k}
        environment["EVENSTEP_PYTHON"] = sys.executable
        done = subprocess.run(
            [program, "run", "--no-monitor", "--name", tag, *options, "train.py", tag, str(die)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def whole(job: Job, folder: Path) -> Any:
    """Where a run that nothing disturbs ends."""
    job("whole", -1, "-n", "2")
    return torch.load(folder / "end-whole.pt")


@pytest.fixture(scope="module")
def killed(job: Job) -> str:
    """A run whose last rank is killed in its 21st step, and that goes on; all its checkpoints are kept."""
    return job("killed", 20, "-n", "2", "--checkpoint-every", "3", "--keep", "100")


def expect_same_end(folder: Path, tag: str, whole: Any) -> None:
    parameters, rates, step = torch.load(folder / f"end-{tag}.pt")
    assert step == whole[2] == STEPS_AN_EPOCH * EPOCHS
    assert rates == whole[1]
    for have, want in zip(parameters, whole[0]):
        assert float((have - want).norm() / want.norm()) <= 1e-12


def samples_by_epoch(folder: Path, tag: str, attempt: int, first: int, last: int) -> dict[int, Counter[int]]:
    """What all ranks of one attempt had in steps first … last."""
    epochs: dict[int, Counter[int]] = {}
    for path in folder.glob(f"seen-{tag}-{attempt}-*.jsonl"):
        for line in path.read_text().splitlines():
            step, epoch, indices, _ = json.loads(line)
            if first <= step <= last:
                epochs.setdefault(epoch, Counter()).update(indices)
    return epochs


def random_numbers(folder: Path, tag: str, attempt: int, rank: int, first: int) -> list[float]:
    """What a rank drew in each step from `first` on."""
    lines = (folder / f"seen-{tag}-{attempt}-{rank}.jsonl").read_text().splitlines()
    return [drawn for step, _, _, drawn in map(json.loads, lines) if step >= first]


def expect_each_sample_once(parts: list[dict[int, Counter[int]]]) -> None:
    for epoch in range(EPOCHS):
        total: Counter[int] = Counter()
        for part in parts:
            total.update(part.get(epoch, Counter()))
        assert total == Counter(range(SAMPLES)), f"epoch {epoch}"


def test_a_killed_rank_changes_nothing(killed: str, whole: Any, folder: Path) -> None:
    assert "restart 1 of 3 from" in killed and "step-00000018" in killed
    expect_same_end(folder, "killed", whole)
    before = samples_by_epoch(folder, "killed", 0, 1, 18)
    after = samples_by_epoch(folder, "killed", 1, 19, 99)
    expect_each_sample_once([before, after])
    for rank in range(2):
        drawn = random_numbers(folder, "killed", 1, rank, 19)
        assert len(drawn) == 14 and drawn == random_numbers(folder, "whole", 0, rank, 19)


@pytest.mark.parametrize("ranks, step", [(3, 15), (1, 24)])  # in the middle of an epoch, and at the very end of one
def test_another_number_of_ranks_goes_on_the_same(
    ranks: int, step: int, killed: str, whole: Any, job: Job, folder: Path
) -> None:
    tag = f"resumed-{ranks}-{step}"
    job(tag, -1, "-n", str(ranks), "--resume", f"runs/killed/checkpoints/step-{step:08d}")
    expect_same_end(folder, tag, whole)
    # up to that checkpoint the killed run's samples, behind it those of this one
    first = samples_by_epoch(folder, "killed", 0, 1, min(step, 18))
    second = samples_by_epoch(folder, "killed", 1, 19, step)
    expect_each_sample_once([first, second, samples_by_epoch(folder, tag, 0, step + 1, 99)])


def test_a_damaged_checkpoint_is_refused(killed: str, job: Job, folder: Path) -> None:
    checkpoints = folder / "runs/killed/checkpoints"
    newest = max(checkpoints.iterdir())
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    with pytest.raises(AssertionError, match=r"chunk 0 of model.safetensors .* is altered"):
        job("refused", -1, "-n", "2", "--max-restarts", "0", "--resume", f"runs/killed/checkpoints/{newest.name}")
