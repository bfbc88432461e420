"""Groups whose ranks are on several hosts: which engine connects them, over which network interface, and how they meet."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from evenstep import _core
from evenstep._core import EvenstepError

ENGINES = ("shm", "ucx", "mpi", "gloo", "hosts", "hosts-gloo")
_SIOCGIFFLAGS = 0x8913  # asks an interface for its state
_SIOCGIFADDR = 0x8915  # and for its IPv4 address
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_LINK_SECONDS = 2.0  # the kernel says within one that a link is there

_said_gloo: set[str] = set()


def wanted_engine() -> str:
    """EVENSTEP_COMM_ENGINE: the engine that the user forces; "" where none is."""
    wanted = os.environ.get("EVENSTEP_COMM_ENGINE", "")
    if wanted not in ("", "auto", *ENGINES):
        raise EvenstepError(
            f"EVENSTEP_COMM_ENGINE is {wanted!r}; choose one of {', '.join(ENGINES)}\n"
            "  fix: unset it, and the engine is chosen from where the ranks are"
        )
    return "" if wanted == "auto" else wanted


def this_host() -> str:
    """The kernel's own name of the host: two hosts may have one node name (containers). EVENSTEP_HOST_ID stands for it where
    one host plays several."""
    said = os.environ.get("EVENSTEP_HOST_ID")
    try:
        return said or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


# ---- UCX ----


def ucx_library() -> str | None:
    """The library to open: EVENSTEP_UCX_LIBRARY, else the wheel's (`evenstep[ucx]`), else (None) the system's."""
    forced = os.environ.get("EVENSTEP_UCX_LIBRARY")
    if forced:
        return forced
    found = find_spec("libucx")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        library = Path(folder) / "lib" / "libucp.so.0"
        if library.exists():
            return str(library)
    return None


def ucx_state() -> tuple[str, str]:
    """UCX's version and "", or "" and why it cannot be used."""
    # It reads these when it is opened: a guest neither takes over a process's crash handlers nor writes warnings.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        return _core.ucx_version(ucx_library()), ""
    except EvenstepError as error:
        return "", str(error).splitlines()[0]


# ---- network interfaces ----


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _towards(host: str) -> str | None:
    """The interface over which this host reaches another; None where that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return None  # this is that host
    return next((name for name, address in addresses().items() if address == own), None)


def await_links(names: str | None, seconds: float = _LINK_SECONDS) -> None:
    """Until the interfaces among `names` (as of interfaces()) that are switched on have a link, `seconds` at most.

    UCX passes over one without, and finds no way to the other hosts. The kernel says up to a second later that a link has come, which
    carries packets all the while (Linux, net/core/link_watch.c): on a host that has just started, or whose cable was out."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in (names or "").split(","):
            while time.monotonic() < deadline:
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name[:15].encode()))
                except OSError:
                    break  # no network interface: an RDMA port, or a word that UCX knows
                flags = struct.unpack_from("=H", answer, 16)[0]
                if not flags & _IFF_UP or flags & _IFF_RUNNING:
                    break
                time.sleep(0.01)


def interfaces() -> str | None:
    """What UCX may use, as its NET_DEVICES; None: UCX chooses.

    EVENSTEP_COMM_INTERFACE: names ("eth0", "mlx5_0:1,eth1") or an IPv4 network ("10.1.0.0/16": each host's interface in
    it). Else UCX_NET_DEVICES as UCX reads it. Else, without RDMA, the interface towards MASTER_ADDR: it reaches the
    others, which a bridge of containers does not.
    """
    wanted = os.environ.get("EVENSTEP_COMM_INTERFACE", "")
    if wanted and wanted[0].isdigit() and "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError as error:
            raise EvenstepError(f"EVENSTEP_COMM_INTERFACE is {wanted!r}, which is no network: {error}") from None
        known = addresses()
        names = [name for name, address in known.items() if ipaddress.ip_address(address) in network]
        if not names:
            here = ", ".join(f"{name} {address}" for name, address in known.items())
            raise EvenstepError(
                f"EVENSTEP_COMM_INTERFACE is {wanted}, but host {socket.gethostname()} has no address in it ({here})\n"
                "  fix: give a network that all hosts are in, or the interfaces' names"
            )
        return ",".join(names)
    if wanted:
        return wanted
    if "UCX_NET_DEVICES" in os.environ or Path("/sys/class/infiniband").exists():
        return None
    return _towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


# ---- who is where, and what connects them ----


def ucx_record() -> dict[str, str]:
    """What a rank tells the others of its UCX."""
    version, why = ucx_state()
    return {"ucx": version, "why": why, "host": socket.gethostname()}


def agreed(wishes: list[str]) -> str:
    """The engine that all ranks want."""
    if len(set(wishes)) > 1:
        words = ", ".join(f"rank {rank} {wish or 'unset'}" for rank, wish in enumerate(wishes))
        raise EvenstepError(f"EVENSTEP_COMM_ENGINE differs among the ranks: {words}\n  fix: give all ranks the same")
    return wishes[0]


def host_numbers(places: list[str]) -> list[int]:
    """The host of each rank; hosts are numbered in the order of their first ranks."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(place, len(numbers)) for place in places]


def choose(wanted: str, host_of: list[int], ranks: list[dict[str, str]]) -> tuple[str, str]:
    """The engine for these ranks, and why it is Gloo where it is: "shm", "ucx", "hosts", "gloo" (between all ranks) or
    "hosts-gloo" (between the hosts, of which one has several ranks)."""
    hosts = max(host_of) + 1
    over_gloo = "hosts-gloo" if hosts < len(ranks) else "gloo"
    without = [i for i, rank in enumerate(ranks) if not rank["ucx"]]
    if wanted == "gloo":
        return "gloo", "EVENSTEP_COMM_ENGINE=gloo"
    if hosts == 1 and wanted == "hosts":
        raise EvenstepError(
            "EVENSTEP_COMM_ENGINE=hosts, but all ranks are on one host\n  fix: unset it, and shared memory connects them"
        )
    if hosts == 1 and wanted != "ucx":
        return "shm", ""
    if wanted == "hosts-gloo":
        return over_gloo, "EVENSTEP_COMM_ENGINE=hosts-gloo"
    if wanted == "shm":
        raise EvenstepError(
            f"EVENSTEP_COMM_ENGINE=shm, but the ranks are on {hosts} hosts (or in containers or of users that cannot "
            "open one another's memory)\n  fix: unset it, and UCX or Gloo connects them"
        )
    if without:
        first = ranks[without[0]]
        why = f"rank {without[0]} on host {first['host']} has no UCX ({first['why']})"
        if wanted:
            raise EvenstepError(
                f"EVENSTEP_COMM_ENGINE={wanted}, but {why}\n"
                "  fix: apt-get install libucx0, or pip install 'evenstep[ucx]', on every host"
            )
        return over_gloo, why
    return wanted or ("ucx" if hosts == len(ranks) else "hosts"), ""


_NOT_PROMISED = {
    "ranks": "Gloo is slower, notices a dead rank only when its connection breaks or at the time limit, names neither it nor ranks in "
    "different calls in the script's own groups, keeps no flight record and no timeline, knows fewer dtypes and operations, and its "
    "sums may differ in their last bits from those of one host",
    "hosts": "Between them Gloo is slower, notices a dead rank only when its connection breaks or at the time limit, and does not name "
    "it on other hosts than its own; sums of more than two hosts may differ in their last bits from those of UCX; and what does not "
    "go host by host (messages, all-to-alls, gathers, scatters) is Gloo's between all ranks, of which there is no flight record and "
    "no timeline, and which knows fewer dtypes",
}


def say_gloo(why: str, who: str = "ranks") -> None:
    """Once a process for each that may talk through it: what Gloo does not promise."""
    if who not in _said_gloo:
        _said_gloo.add(who)
        warnings.warn(
            f"the {who} talk through Gloo: {why}. {_NOT_PROMISED[who]}. "
            "fix: apt-get install libucx0, or pip install 'evenstep[ucx]', on every host",
            stacklevel=3,
        )


Gather = Callable[[str, int, int, bytes], bytes]
"""gather(subject, rank, ranks, record): the records of `ranks` ranks that call it for this subject, joined."""


def joined(gather: Gather, subject: str, rank: int, ranks: int) -> Callable[[bytes], bytes]:
    calls = 0

    def call(record: bytes) -> bytes:
        nonlocal calls
        calls += 1
        return gather(f"{subject}/{calls}", rank, ranks, record)

    return call


def open_ucx(
    gather: Gather,
    subject: str,
    rank: int,
    ranks: int,
    *,
    arena_bytes: int = 0,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
    number: int = -1,
    over: _core.Over | None = None,
) -> _core.Comm:
    """A group of `ranks` ranks over UCX; `number` is what this one is called in errors."""
    names = interfaces()
    await_links(names)
    return _core.Comm.open_ucx(
        joined(gather, subject, rank, ranks),
        rank,
        ranks,
        arena_bytes,
        timeout_seconds,
        spin,
        ucx_library(),
        names,
        number,
        over,
    )


MOST_LANES = 4
"""Ranks of a host that carry a part each of what crosses between hosts; others see by them that a first rank stands still."""


def open_hosts(
    gather: Gather,
    open_inside: Callable[[int, int, int], _core.Comm],
    rank: int,
    host_of: list[int],
    *,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
    messages: bool = True,
    network: Callable[..., _core.Comm] = open_ucx,
) -> _core.Comm:
    """Shared memory on each host, `network` between some ranks of each, lane by lane; without `messages` also no all-to-all.

    open_inside(host, rank, ranks) opens this host's group.
    """
    own = host_of[rank]
    hosts = max(host_of) + 1
    members = [other for other, host in enumerate(host_of) if host == own]
    local = members.index(rank)
    everyone = None
    inside = open_inside(own, local, len(members))
    lanes = min(max(host_of.count(host) for host in range(hosts)), MOST_LANES)
    between: list[_core.Comm | None] = [None] * lanes
    for lane in range(lanes):
        if _core.lane_rank(lane, lanes, len(members)) == local:
            subject = f"between/{lane}"
            between[lane] = network(
                gather, subject, own, hosts, timeout_seconds=timeout_seconds, spin=spin, number=rank
            )
    if messages:
        everyone = network(gather, "everyone", rank, len(host_of), timeout_seconds=timeout_seconds, spin=spin)
    return _core.Comm.open_hosts(rank, host_of, inside, between[0], everyone, timeout_seconds, between[1:])
