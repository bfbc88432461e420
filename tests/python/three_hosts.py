"""Three hosts of network namespaces of this machine (root and ip), and jobs on them whose leader another one can replace."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import pytest
from run_jobs import Job, end_all, go_without
from test_run_hosts import _ip, _missing, await_link

Script = Callable[[str], str]

COUNT = 3

# As ssh: its end, and that of who called it, is no matter for what it started on another machine.
SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name setsid ip netns exec "$name" "$@" <&3 3<&- &
wait $!
"""


@pytest.fixture(scope="module")
def names(program: pathlib.Path) -> Iterator[list[str]]:
    """Hosts with a router between them: 10.80.0.2, 10.80.1.2 …"""
    if why := _missing():
        go_without("namespaces", why)
    if "no libraft" in subprocess.run([program, "doctor"], capture_output=True, text=True, timeout=150).stdout:
        pytest.skip("the program was built without libraft")
    router = f"evens-{os.getpid()}-r"
    hosts = [f"evens-{os.getpid()}-{letter}" for letter in "abc"[:COUNT]]
    try:
        for name in (router, *hosts):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"netns exec {router} sysctl -q -w net.ipv4.ip_forward=1")
        for number, name in enumerate(hosts):
            _ip(f"link add eth0 netns {name} type veth peer name port{number} netns {router}")
            _ip(f"-n {router} addr add 10.80.{number}.1/24 dev port{number}")
            _ip(f"-n {router} link set port{number} up")
            _ip(f"-n {name} addr add 10.80.{number}.2/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} route add 10.80.0.0/16 via 10.80.{number}.1")
        for name in hosts:
            await_link(name)
        yield hosts
    finally:
        for name in (*hosts, router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Hosts:
    def __init__(
        self, names: list[str], program: pathlib.Path, folder: pathlib.Path, environment: dict[str, str]
    ) -> None:
        self.names, self.program, self.folder, self.environment = names, program, folder, environment
        self.jobs: list[Job] = []

    def start(self, *words: str, witness: bool = False) -> Job:
        """On all hosts; with `witness` on all but the last, which only votes."""
        self.reach()
        shell = self.folder / "shell.sh"
        command = ["ip", "netns", "exec", self.names[0], "env", f"EVENSTEP_HOST_ID={self.names[0]}"]
        command += [
            str(self.program),
            "run",
            *(["--witness", self.names[-1]] if witness else []),
            "--hosts",
            ",".join(self.names[:-1] if witness else self.names),
            "--ssh",
            str(shell),
            "-n",
            "1",
            "--no-pin",
        ]
        self.jobs.append(Job([*command, *words], self.folder, self.environment))
        return self.jobs[-1]

    def _reach_by(self, script: str) -> None:
        shell = self.folder / "new-shell.sh"
        shell.write_text(script)
        shell.chmod(0o755)
        shell.replace(self.folder / "shell.sh")

    def reach(self) -> None:
        self._reach_by(SHELL)

    def reach_nobody(self) -> None:
        """From now on no agent can be started: a lost host does not come back."""
        self._reach_by("#!/bin/sh\nexit 1\n")

    def agents_of(self, *names: str) -> list[int]:
        """Processes of the program on these hosts, guardians too."""
        marks = [f"EVENSTEP_HOST_ID={name}".encode() for name in names]
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    environment = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[0].endswith(b"/evenstep") and any(mark in environment for mark in marks):
                    found.append(int(entry.name))
        return found

    def agents(self) -> list[int]:
        return self.agents_of(*self.names)

    def log(self, name: str) -> str:
        path = self.folder / "runs" / name / "logs/leader.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def hosts(
    names: list[str], program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]
) -> Iterator[Hosts]:
    group = Hosts(names, program, tmp_path, environment)
    yield group
    end_all(group.jobs, group.agents)


# Once all members vote that shall.
STANDS = r"where this host is lost, another one takes its place \(3 of 3 vote\)"

# Says its place, waits in the first attempt, and ends in the second one.
WAITING = """#!/bin/sh
echo "attempt $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE at $MASTER_ADDR process $$"
while [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; do sleep 0.05; done
"""

# Twelve steps of one model on any number of ranks, in the first attempt with a wait in the eighth, a checkpoint behind it.
TRAINING = """
    import os, time
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    place = os.environ["RANK"], "of", os.environ["WORLD_SIZE"]
    print("attempt", attempt, "rank", *place, "begins at step", es.step(), flush=True)
    for _ in es.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            while attempt == 0 and es.step() >= 8:
                time.sleep(0.01)
    print("ended after", es.step(), "steps", flush=True)
"""


@contextlib.contextmanager
def cut_off(hosts: Hosts, number: int = 0) -> Iterator[None]:
    """This host's cable is out meanwhile."""
    name = hosts.names[number]
    _ip(f"-n {name} link set eth0 down")
    try:
        yield
    finally:
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} route replace 10.80.0.0/16 via 10.80.{number}.1")


def leads(hosts: Hosts, name: str) -> bool:
    """Whether the agent of this host has become the leader: what it says goes into the leader's log."""
    for process in hosts.agents_of(name):
        try:
            if os.readlink(f"/proc/{process}/fd/1").endswith("/leader.log"):
                return True
        except OSError:
            pass
    return False


def stands(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
