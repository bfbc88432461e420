"""A host of three is cut off, and comes back while the others go on: its agent of before waits there, too (root and ip)."""

from __future__ import annotations

import pathlib

import pytest
import three_hosts as three
from run_jobs import alive, wait_until
from test_run_hosts import _ip

names, hosts = three.names, three.hosts  # fixtures

# As many steps as it takes until there is a file `end`, and some more: all ranks end with the same one.
ENDLESS = """
import itertools, os, pathlib, torch, evenstep as es
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(1 << 20, 8))
model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=12))
print("is process", os.getpid(), flush=True)
last = pathlib.Path("last")
for (given,) in itertools.chain.from_iterable(loader for _ in range(1000)):
    optimizer.zero_grad()
    model(given).square().mean().backward()
    optimizer.step()
    if os.path.exists("end") and not last.exists():
        pathlib.Path(f"last-{os.getpid()}").write_text(str(es.step() + 50))
        os.rename(f"last-{os.getpid()}", last)
    if last.exists() and es.step() >= int(last.read_text()):
        break
"""


@pytest.mark.more
def test_ranks_of_a_host_that_is_back_outlive_the_agent_that_was_cut_off(
    hosts: three.Hosts, script: three.Script, tmp_path: pathlib.Path
) -> None:
    """That agent holds its ranks, for another leader might go on with them, until it hears that there is none."""
    job = hosts.start("--name", "a", "--recovery", "replace", "--log-rank", "2", script(ENDLESS))
    job.wait_for(three.STANDS)
    (held,) = (int(one) for one in job.wait_for(r"\[rank 2 [^]]*\] is process (\d+)"))
    _ip(f"-n {hosts.names[2]} link set eth0 down")
    try:
        job.wait_for(r"generation 1: ranks 0 and 1 go on without host \S+ \(rank 2\)")
    finally:
        _ip(f"-n {hosts.names[2]} link set eth0 up")
        _ip(f"-n {hosts.names[2]} route replace 10.80.0.0/16 via 10.80.2.1")
    job.wait_for(r"\[rank 2 [^]]*\] is process (\d+)", times=2)
    assert not alive(held)  # before the next one started; that agent would end it, too, but later
    job.wait_for("generation 2: rank 2 joins ranks 0 and 1")
    (tmp_path / "end").touch()
    code, text = job.finish()
    assert code == 0 and "generation 3" not in text and "SIGKILL" not in text, text
    wait_until(lambda: not hosts.agents())  # the one of before, too
