"""A cluster of Slurm on this machine for the tests that want a real one: slurmctld, two slurmd and munged, in a folder of their own.

Each host has a network, a host name, a /etc/hosts and processes of its own (namespaces: root); n1 is also where a user types."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

import pytest
from run_jobs import Job, end_all, go_without, wait_until
from test_mpi import TORCHRUN
from test_run_hosts import await_link

HOSTS = ("n1", "n2")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "munged")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=n1(10.80.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=n[1-2] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""

# Of the host whose network is the first word. (`ip netns exec` would take the control groups away, which slurmd looks for.)
ON_HOST = ["unshare", "-u", "-m", "sh", "-c", 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"']


class Cluster:
    """Its daemons, and jobs on it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.networks = {host: f"evens-{os.getpid()}-{host}" for host in HOSTS}
        self._environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def on(self, host: str, *words: str) -> list[str]:
        network = ["nsenter", f"--net=/run/netns/{self.networks[host]}"]
        return [*network, *ON_HOST, host, str(self.folder / "hosts"), *words]

    def ask(self, *words: str) -> str:
        """One of Slurm's programs, typed on n1."""
        asked = subprocess.run(
            self.on("n1", *words), env=self._environment, capture_output=True, text=True, timeout=150
        )
        return asked.stdout + asked.stderr

    def environment(self, own: dict[str, str]) -> dict[str, str]:
        given = {name: value for name, value in own.items() if name not in TORCHRUN}
        return given | {name: self._environment[name] for name in ("PATH", "SLURM_CONF")} | {"NO_COLOR": "1"}

    def _start(self, name: str, words: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(words, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def begin(self) -> None:
        for network in self.networks.values():
            _ip(f"netns add {network}")
            _ip(f"-n {network} link set lo up")
        first, second = self.networks.values()
        _ip(f"link add eth0 netns {first} type veth peer name eth0 netns {second}")
        for number, network in enumerate(self.networks.values(), 1):
            _ip(f"-n {network} addr add 10.80.0.{number}/24 dev eth0")
            _ip(f"-n {network} link set eth0 up")
        for network in self.networks.values():
            await_link(network)
        for name in ("state", *(f"spool-{host}" for host in HOSTS)):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.80.0.1 n1\n10.80.0.2 n2\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", ["munged", "-F", "--force", f"--socket={self.folder}/munge.sock", *files])
        wait_until((self.folder / "munge.sock").exists)
        self._start("slurmctld", self.on("n1", "slurmctld", "-D"))
        for host in HOSTS:
            own = ["unshare", "-p", "-f", "--kill-child", "--mount-proc"]  # all of it ends with the daemon
            self._start(f"slurmd-{host}", self.on(host, *own, "slurmd", "-D"))
        try:
            wait_until(self._is_ready)
        except AssertionError:
            pytest.fail("".join(path.read_text()[-2000:] for path in self.folder.glob("*.out")))

    def _is_ready(self) -> bool:
        return self.ask("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"]

    def be_free(self) -> None:
        """No job of before, and both hosts are there."""
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        self.ask("scancel", "--user=root")
        wait_until(lambda: self.ask("squeue", "-h", "-t", "all", "-o", "%T").split().count("COMPLETING") == 0)
        for host in HOSTS:
            self.ask("scontrol", "update", f"NodeName={host}", "State=RESUME")
        wait_until(self._is_ready)

    def end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        for network in self.networks.values():
            subprocess.run(["ip", "netns", "del", network], capture_output=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    missing = [name for name in (*NEEDED, "ip", "nsenter", "unshare") if shutil.which(name, path=PATH) is None]
    if missing:
        go_without("slurm", f"no {', '.join(missing)} (scripts/install_services.sh)")
    if os.geteuid() != 0:
        go_without("namespaces", "network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="es-slurm-") as folder:  # short: paths of sockets are
        cluster = Cluster(pathlib.Path(folder))
        try:
            cluster.begin()
            yield cluster
        finally:
            cluster.end()


class Typed:
    """What a user types on n1, in the test's own folder, which both hosts see."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path, environment: dict[str, str]) -> None:
        self.cluster, self.folder = cluster, folder
        self.environment = cluster.environment(environment)
        self.jobs: list[Job] = []

    def start(self, *words: str, **more: str) -> Job:
        self.jobs.append(Job(self.cluster.on("n1", *words), self.folder, self.environment | more))
        return self.jobs[-1]

    def batch(self, lines: str, *words: str) -> Job:
        """sbatch, which waits for the job's end; what the job prints is in `out`."""
        (self.folder / "batch.sh").write_text(f"#!/bin/sh\n{lines}\n")
        return self.start("sbatch", "-W", "-o", "out", "--open-mode=append", *words, "batch.sh")

    def out(self) -> str:
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture
def typed(slurm: Cluster, tmp_path: pathlib.Path, environment: dict[str, str]) -> Iterator[Typed]:
    made = Typed(slurm, tmp_path, environment)
    yield made
    slurm.be_free()
    end_all(made.jobs)
