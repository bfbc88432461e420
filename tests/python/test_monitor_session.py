"""What a session tells of itself, from the training loop through the rings to run.db and the report."""

from __future__ import annotations

import json
import pathlib
import sqlite3
import subprocess
from collections.abc import Callable

# Rank 1 comes a second late to the backward of steps 4, 5 and 6; equal shares are said to have won at step 7.
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
            time.sleep(1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_a_session_tells_arrives(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], script: Callable[[str], str]
) -> None:
    def call(*words: str) -> str:
        ended = subprocess.run(
            [str(program), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
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


# Nothing is told of steps 4 and 5. Odd steps give their loss before the optimizer's step, even ones after it; backward begins from another number.
LOGS = """
    import torch
    import evenstep as es
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(192, 8)), batch_size=16)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for number, (x,) in enumerate(loader):
        es.session().telemetry.paused = number in (4, 5)
        (65536 * model(x).square().mean()).backward()
        if number % 2:
            es.log(loss=number + 0.5)
        optimizer.step()
        if number % 2 == 0:
            es.log(loss=number + 0.5)
        optimizer.zero_grad()
    es.log(validation_perplexity_wikitext=torch.tensor(1 / 3, dtype=torch.float64), never=float("nan"))
    es.log(**{"n" * 126 + "é": 1})
"""


def test_what_a_script_logs_is_kept_whole(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], script: Callable[[str], str]
) -> None:
    command = [str(program), "run", "-n", "2", "--name", "logs", "--no-pin", script(LOGS)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a name of 128 bytes" in ended.stdout + ended.stderr
    history = sqlite3.connect(tmp_path / "runs/logs/run.db")
    query = "SELECT step, value FROM events WHERE event = 'scalar' AND words = ? ORDER BY rowid"
    assert history.execute(query, ("loss",)).fetchall() == [(s, s + 0.5) for s in range(12) if s not in (4, 5)]
    assert history.execute(query, ("validation_perplexity_wikitext",)).fetchall() == [(11, 1 / 3)]
    assert history.execute(query, ("never",)).fetchall() == [(11, None)]
    assert history.execute(query, ("n" * 126,)).fetchall() == [(11, 1.0)]
    assert history.execute("SELECT max(loss) FROM steps").fetchone()[0] > 1000  # what backward began from
    exchanged = history.execute("SELECT DISTINCT step FROM spans WHERE span = 'communication' ORDER BY step").fetchall()
    assert exchanged == [(s,) for s in range(12) if s not in (4, 5)]  # the engine's own spans
    history.close()
    report = subprocess.run(
        [str(program), "report", "logs", "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    numbers = json.loads(report.stdout)["run"]
    assert (numbers["first_loss"], numbers["last_loss"]) == (0.5, 11.5)
