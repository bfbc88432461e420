"""es.verify on ranks and in one process (what it must say: verify_cases.py), and that it leaves nothing open."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "verify_cases.py"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.more), 3])
def test_what_it_says(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    for result in run_ranks(SCRIPT, ranks=ranks):
        assert "VERIFIED" in result.stdout


def test_outside_a_job(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and "VERIFIED" in done.stdout, done.stderr


def test_all_ranks_have_one_report_and_nothing_stays_open(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import os
    import torch
    from torch import nn
    import evenstep as es

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    counts = []
    for number in range(4):
        torch.manual_seed(es.rank())  # rank 0's model, batch and numbers are taken
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        batch = torch.randn(8, 3), torch.randn(8, 2)
        found = es.verify(model, torch.optim.Adam(model.parameters()), batch, loss, dtype=torch.float64)
        assert found.exact, str(found)
        texts = [data.decode() for data in es.session().all_gather_bytes(str(found).encode())]
        assert texts[0] == texts[1]
        maps = sum("evenstep" in line for line in open("/proc/self/maps"))
        counts.append((len(os.listdir("/proc/self/fd")), maps))
    assert counts[1] == counts[-1], counts
    """
    run_ranks(code)


def test_under_evenstep_run(run: Any, script: Callable[[str], str]) -> None:
    name = script(
        """
        import torch
        from torch import nn
        import evenstep as es

        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        batch = torch.randn(8, 3)
        report = es.verify(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, lambda m, x: m(x).square().mean())
        es.print(report)
        """
    )
    done = run("-n", "2", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: after 5 steps on 2 ranks of this job" in done.stdout


@pytest.mark.parametrize("early", ["", "torch.distributed.init_process_group('evenstep')"])
def test_the_run_records_training_alone(
    program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path, script: Callable[[str], str], early: str
) -> None:
    name = script(
        f"""
        import torch
        import torch.distributed
        from torch.utils.data import DataLoader, TensorDataset
        import evenstep as es

        def loss(model, batch):
            return model(batch[0]).square().mean()

        {early}
        model, loader = torch.nn.Linear(3, 1), DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        es.verify(model, optimizer, loader, loss)
        model, optimizer, loader = es.prepare(model, optimizer, loader)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        """
    )
    command = [str(program), "run", "-n", "2", "--timeline", "--name", "t", name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/t/run.db")) as history:
        assert sorted(history.execute("SELECT rank, step FROM steps")) == [(r, s) for r in (0, 1) for s in range(3)]
        words = [words for (words,) in history.execute("SELECT words FROM events WHERE event = 'group' AND rank = 0")]
    assert sum("gradients" in one for one in words) > 0, words  # of the groups that training opened


def test_a_process_set_verifies_for_itself(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    def loss(model, batch):
        return model(batch).square().mean()

    def verified(**options):
        return es.verify(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss, dtype=torch.float64, **options)

    def refused(words, call):
        try:
            call()
        except (es.EvenstepError, TypeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")

    pair, single = es.ProcessSet([0, 1]), es.ProcessSet([2])
    if pair.included:
        torch.manual_seed(1)
        model, batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), torch.randn(8, 3)
        es.prepare(model, group=pair)
        with pair:
            found = verified()
            assert found.exact and found.ranks == 2, str(found)
            refused("inside the `with` of the process set", lambda: verified(group=pair))
        assert list(pair.session.models) == ["model"]
        refused("es.verify outside any `with`", verified)  # rank 2 would never come
    es.barrier()
    """
    run_ranks(code, ranks=3)
