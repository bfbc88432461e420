"""Hosts made of network namespaces on one machine, joined by a bridge over links of one speed (root, ip and tc)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

PORT = 29511
FIRST_ADDRESS = "10.78.0.1"


def missing() -> str:
    """Why there can be none here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    without = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"no {' and no '.join(without)} (apt-get install iproute2)" if without else ""


def _command(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True, text=True)


class ShapedHosts:
    """`with ShapedHosts(4, 1000) as hosts: hosts.run([...])`; its namespaces have this process's number in their names."""

    def __init__(self, hosts: int, mbit: float | None, ranks: int = 1) -> None:
        """mbit: None: links as fast as the machine makes them."""
        self.hosts, self.mbit, self.ranks = hosts, mbit, ranks
        self._net = f"evens-{os.getpid()}-net"

    def _name(self, host: int) -> str:
        return f"evens-{os.getpid()}-{host}"

    @property
    def names(self) -> list[str]:
        """Of their namespaces."""
        return [self._name(host) for host in range(self.hosts)]

    def __enter__(self) -> ShapedHosts:
        try:
            _command(f"ip netns add {self._net}")
            _command(f"ip -n {self._net} link add br0 type bridge")
            _command(f"ip -n {self._net} link set br0 up")
            for host in range(self.hosts):
                self._make(host)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            raise SystemExit(f"no network namespaces: {getattr(error, 'stderr', '') or error}") from None
        return self

    def _make(self, host: int) -> None:
        name = self._name(host)
        _command(f"ip netns add {name}")
        _command(f"ip link add eth0 netns {name} type veth peer name p{host} netns {self._net}")
        _command(f"ip -n {self._net} link set p{host} master br0 up")
        _command(f"ip -n {name} addr add 10.78.0.{host + 1}/24 dev eth0")
        _command(f"ip -n {name} link set eth0 up")
        _command(f"ip -n {name} link set lo up")
        for where, link in (
            ((name, "eth0"), (self._net, f"p{host}")) if self.mbit else ()
        ):  # out of the host, and into it
            _command(f"tc -n {where} qdisc add dev {link} root tbf rate {self.mbit}mbit burst 256kb latency 100ms")

    def _remove(self) -> None:
        for name in (*(self._name(host) for host in range(self.hosts)), self._net):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(self, command: Sequence[str], more: Mapping[str, str], seconds: float) -> int:
        """As many ranks on each host; what rank 0 prints comes out here. The worst exit code."""
        ranks = []
        for rank in range(self.hosts * self.ranks):
            host = rank // self.ranks
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.hosts * self.ranks),
                "LOCAL_RANK": str(rank % self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": FIRST_ADDRESS,
                "MASTER_PORT": str(PORT),
                "EVENSTEP_HOST_ID": self._name(host),
                "EVENSTEP_COMM_COSTS": "off",
                "GLOO_SOCKET_IFNAME": "eth0",
                "UCX_TLS": "tcp,self",
                "OMP_NUM_THREADS": "1",
                **more,
            }
            entered = ["ip", "netns", "exec", self._name(host), *command]
            ranks.append(subprocess.Popen(entered, env=environment, stdout=None if rank == 0 else subprocess.DEVNULL))
        try:
            return max(abs(rank.wait(seconds)) for rank in ranks)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"not done after {seconds:.0f} s\n")
            return 124
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
