"""What a session tells of itself, from the training loop through the rings to run.db and the report."""

from __future__ import annotations

import pathlib
import sqlite3
import subprocess
from collections.abc import Callable

# Rank 1 comes half a second late to the backward of steps 4, 5 and 6; equal shares are said to have won at step 7.
TRAIN = """
    import os, time
    import torch
    import evenstep as es
    from evenstep.shares import Shares
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(160, 8)), batch_size=16)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    Shares.turned = lambda self: (True, "21.5 ms, equal 18.2 ms") if es.session().step == 7 else None
    for (x,) in loader:
        loss = model(x).square().mean()
        if os.environ["RANK"] == "1" and es.session().step in (4, 5, 6):
            time.sleep(0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_a_session_tells_arrives(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], script: Callable[[str], str]
) -> None:
    def call(*words: str) -> str:
        ended = subprocess.run(
            [str(program), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    call("run", "-n", "2", "--name", "told", "--no-pin", script(TRAIN))
    history = sqlite3.connect(tmp_path / "runs/told/run.db")

    told = history.execute("SELECT rank, step, value, words FROM events WHERE event = 'balancing'").fetchall()
    assert told == [(0, 7, 1, "21.5 ms, equal 18.2 ms")]  # all ranks know, one says it
    assert "slower than equal shares (21.5 ms, equal 18.2 ms): went back at step 7" in call("report", "told")

    joined = history.execute("SELECT event, rank FROM events WHERE event LIKE 'join%' ORDER BY event, rank").fetchall()
    assert joined == [("joined", 0), ("joined", 1), ("joining", 0), ("joining", 1)]

    # While rank 1 sleeps, rank 0's gradients are ready and its engine waits: that is wait, not communication.
    query = "SELECT sum(duration_ns) / 1e9 FROM spans WHERE rank = 0 AND span = ? AND step BETWEEN 4 AND 6"
    waited, communicated = (history.execute(query, (span,)).fetchone()[0] for span in ("wait", "communication"))
    assert waited > 0.3
    assert communicated < waited / 2
    history.close()
