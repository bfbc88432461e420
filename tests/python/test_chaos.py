"""evenstep chaos: what survives real faults, what is told where the promise is not kept, and what is refused."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

TRAINING = """
import os
import sys

import torch

import evenstep as es

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(64, 8, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1, dtype=torch.float64))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader)
work = torch.randn(300, 300)
for epoch in es.epochs(100):
    for batch, target in loader:
        for _ in range(4):
            work @ work
        loss = torch.nn.functional.mse_loss(model(batch), target)
        if len(sys.argv) > 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            loss = loss * float(sys.argv[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def chaos(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Run:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "chaos", *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )

    return call


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


KINDS = [
    "kill,garbage",
    pytest.param("stop,slow", marks=pytest.mark.more),
    pytest.param("agent", marks=pytest.mark.more),
    pytest.param("bit-flip,torn-write", marks=pytest.mark.more),
]


@pytest.mark.parametrize("kinds", KINDS)
def test_the_promise_is_kept(chaos: Run, script: Callable[[str], str], kinds: str) -> None:
    path = script(TRAINING)
    done = chaos("-n", "2", "--seed", "3", "--faults", "2", "--kinds", kinds, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(done)
    assert found["kept"] and found["broken"] is None and found["seed"] == 3
    assert found["injected"] == 2 and {fault["kind"] for fault in found["faults"]} == set(kinds.split(","))
    assert all(fault["injected"] and fault["step"] >= 0 and fault["what"] for fault in found["faults"])
    assert found["tensors"] == 4 and found["numbers_that_differ"] == 0


def test_a_promise_that_is_not_kept_is_told(chaos: Run, script: Callable[[str], str]) -> None:
    """A script that trains otherwise once it was restarted."""
    words = ("-n", "2", "--seed", "1", "--faults", "1", "--kinds", "kill", script(TRAINING), "1.5")
    done = chaos(*words)
    assert done.returncode == 11, done.stdout + done.stderr
    assert "NOT KEPT: " in done.stdout and " numbers differ, most in " in done.stdout
    assert "rank 0 (process " in done.stdout or "rank 1 (process " in done.stdout


def test_what_is_refused(chaos: Run, script: Callable[[str], str]) -> None:
    path = script("raise SystemExit(5)")
    cases = [
        ((), 2, "no script was given"),
        (("--kinds", "kil", path), 2, "did you mean kill?"),
        (("--faults", "0", path), 2, "--faults"),
        (("--tolerance", "-1", path), 2, "must not be negative"),
        (("--name", "a/b", path), 2, "cannot name a run"),
        (("-n", "1", path), 7, "fails without any fault (exit code 5)"),
    ]
    for words, code, said in cases:
        done = chaos(*words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
