"""Ranks of two hosts that wait for one another in collectives: no host's agent sees that alone."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

# After step 4 of the first attempt each rank waits in another group for the other one.
WAITS = """
    import os
    import torch
    import torch.distributed as dist
    import evenstep as es

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if es.step() == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            dist.all_reduce(torch.ones(1), group=groups[int(os.environ["RANK"])])
    print("trained to step", es.step(), flush=True)
"""


@pytest.mark.more
def test_where_all_ranks_of_all_hosts_wait_it_is_told_and_ended(
    hosts: Hosts, script: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    job = hosts.start(
        *("--name", "a", "--hang-timeout", "0.5", "--on-hang", "restart", "--max-restarts", "1", "--log-rank", "all"),
        script(WAITS),
    )
    code, text = job.finish()
    assert code == 0, text
    its_call = r"; in call \d+ \(all_reduce of 1 F32 elements with SUM\) of a group of 2 ranks"
    all_wait = r"no progress for \S+ s in .*; all ranks of all hosts wait in collectives" + its_call
    assert re.search(r"evenstep: rank 0 \(cpu.*\) hangs: " + all_wait, text), text
    assert re.search(rf"host {hosts.names[1]}: rank 1 \(cpu.*\) hangs: " + all_wait, text), text
    written = (tmp_path / "runs/a/logs/hang-rank-1.txt").read_text()
    assert "line 20 in <module>" in written and "\nIt waits in a collective: call " in written
    assert re.search(
        r"\nWhat the ranks of that group reached \(its own numbers\): .*rank 1 in call \d+ \(all_red", written
    ), written
    assert text.count("trained to step 8") == 2 and "restart 1 of 1" in text
