"""A job whose disk becomes full: it trains on, says so, and goes on with checkpoints, history and logs when there is room."""

from __future__ import annotations

import json
import pathlib
import sqlite3
import subprocess
from collections.abc import Callable

TRAINING = """
import os
import pathlib

import torch

import evenstep as es

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 256))
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = es.prepare(model, optimizer, loader)
filler = pathlib.Path(os.environ["EVENSTEP_RUN_DIR"]) / "filler"


def fill():
    # again and again: a checkpoint that could not be written gives back what it had
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


step = 0
for epoch in es.epochs(20):
    for (batch,) in loader:
        step += 1
        if es.is_main() and 30 <= step <= 50:
            fill()
        if es.is_main() and step == 40:
            kept = sorted(os.listdir(filler.parent / "checkpoints"))
            print("kept", kept, flush=True)
        if step == 51:
            filler.unlink(missing_ok=True)
            es.barrier()
            print("room", flush=True)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if es.is_main():
    print("END", step, flush=True)
"""


def test_checkpoints_wait_and_training_goes_on(
    script: Callable[[str], str],
    small_disk: Callable[..., pathlib.Path],
    program: pathlib.Path,
    environment: dict[str, str],
) -> None:
    disk = small_disk("6m")
    command = [str(program), "run", "-n", "2", "--name", "full", "--checkpoint-every", "5"]
    command += ["--runs-dir", str(disk), "--log-rank", "0", script(TRAINING)]
    done = subprocess.run(
        command,
        cwd=disk.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "END 80" in told, told
    assert told.count("checkpoints wait from step ") == 1, told
    assert told.count("the disk has room again: the checkpoint of step ") == 1, told
    assert "restart" not in told, told
    folder = disk / "full"
    # The newest of before stayed: all of those that were there when the disk became full.
    line = next(line for line in told.splitlines() if "kept [" in line)
    assert "step-000000" in line and ".partial" not in line, line
    with sqlite3.connect(folder / "run.db") as history:
        events = history.execute(
            "SELECT step, value FROM events WHERE event = 'checkpoints_wait' ORDER BY at_ns"
        ).fetchall()
        assert [value > 0 for _, value in events] == [True, False], events
        assert 29 <= events[0][0] <= 50 < events[1][0], events
        assert history.execute("SELECT max(step) FROM steps").fetchone()[0] == 79
        assert history.execute("SELECT value FROM meta WHERE key = 'exit_code'").fetchone() == ("0",)
    newest = max((folder / "checkpoints").iterdir())
    assert json.loads((newest / "manifest.json").read_text())["state"]["step"] == 80
    assert "room" in (folder / "logs" / "rank-1.log").read_text()
