"""How the ranks of a group find each other: through torch's store, once, when the group is made."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evenstep import _core, mpi
from evenstep._core import EvenstepError
from evenstep.comm_costs import (
    MEASURE_SECONDS,
    better_engine,
    cpu_mask,
    follow,
    keep,
    machine,
    measures,
    shape_of,
    table,
)
from evenstep.comm_debug import explain, note
from evenstep.errors import error_of
from evenstep.hosts import (
    agreed,
    choose,
    host_numbers,
    interfaces,
    open_hosts,
    open_ucx,
    say_gloo,
    this_host,
    ucx_record,
    wanted_engine,
)
from evenstep.ring import record_calls

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def _place() -> str:
    """The same for all processes that can open each other's memory, different for any others."""
    return f"{this_host()} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


_processes: dict[int, int] = {}
"""Of the job's ranks on this host that have opened a group together with this one."""
_had_world = False


def _state(process: int) -> str:
    """One letter of proc(5); "X" also where there is none, "" where it cannot be told."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return "X" if isinstance(error, (FileNotFoundError, ProcessLookupError)) else ""
    return stat[stat.rindex(")") + 2]


def _ended(process: int) -> bool:
    return _state(process) in ("Z", "X")


def begin_world() -> None:
    """torch's group of all ranks is opened: in one after the first a rank's number may be another process than before."""
    global _had_world
    if _had_world:
        _processes.clear()
    _had_world = True


def know(processes: Mapping[int, int]) -> None:
    """Which processes ranks of the job are now, 0: of another host. Another one may have taken a lost rank's place."""
    for rank, process in processes.items():
        if process:
            _processes[rank] = process
        else:
            _processes.pop(rank, None)


def are_here(members: Sequence[int]) -> bool:
    """Whether all these ranks of the job are on this host, as far as they were met."""
    return all(rank in _processes for rank in members)


def has_ended(members: Sequence[int]) -> bool:
    """Whether one of these ranks of the job, as far as they were met, is known to have ended."""
    return any(_ended(_processes[rank]) for rank in members if rank in _processes)


def stands_still(members: Sequence[int]) -> bool:
    """Whether one of them is known to be stopped (SIGSTOP)."""
    return any(_state(_processes[rank]) == "T" for rank in members if rank in _processes)


def _never_comes(rank: int, process: int, name: str) -> EvenstepError:
    words = f"rank {rank} (process {process}) died or came to its end before it opened the group {name}"
    return error_of("EVEN_ERR_PEER_LOST", words, f"the end of rank {rank}'s own output says why", rank)


def _stands(rank: int, process: int, name: str) -> EvenstepError:
    words = f"rank {rank} (process {process}) was stopped before it opened the group {name}"
    return error_of("EVEN_ERR_PEER_LOST", words, f"`kill -CONT {process}` lets it go on", rank)


def look_for_dead(ranks: Mapping[int, int], name: str) -> None:
    """Raises where one of the ranks is known to have ended: one of this host, that has opened a group with this one before. `ranks`:
    of the group, and their numbers in the job."""
    for rank, member in ranks.items():
        process = _processes.get(member)
        if process is not None and _ended(process):
            raise _never_comes(rank, process, name)


def _store_lost(name: str) -> _core.EvenstepError:
    fix = "the end of rank 0's own output says why; where it says nothing, see that MASTER_ADDR can be reached"
    words = f"the process that keeps the job's store (rank 0, or the launcher) ended before the group {name} was opened"
    return error_of("EVEN_ERR_PEER_LOST", words, fix, 0)


def has_all(store: Store, keys: list[str], name: str) -> bool:
    """Whether the store has these keys; an error of ours where the store has gone."""
    try:
        return store.check(keys)
    except RuntimeError as error:
        if type(error).__name__ != "DistNetworkError":
            raise
        raise _store_lost(name) from error


def claim(store: Store, rank: int) -> None:
    """This process is the job's rank from now on, for all who meet at the store. Raises where another one is, and lives:
    started twice, or left from before."""
    mine = f"{_place()} {os.getpid()}"
    key = f"evenstep/process/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"
    holder = store.compare_set(key, "", mine).decode()
    while holder != mine:
        place, _, process = holder.rpartition(" ")
        if place == _place() and not _ended(int(process)):
            raise _is_there(rank, int(process))
        # it has ended; or is on another host, from where the launcher may have moved the rank
        holder = store.compare_set(key, holder, mine).decode()


def _is_there(rank: int, process: int) -> _core.EvenstepError:
    fix = "start each rank once; end what is left of an earlier start; give each job a MASTER_PORT of its own"
    words = f"rank {rank} of this job is process {process} already, so process {os.getpid()} cannot be it"
    return error_of("EVEN_ERR_IN_USE", words, fix, rank)


def notice_cut(address: str, port: int, seconds: int = 3) -> None:
    """Lets a connection of this process to there end soon where its other end is silent: torch's own waits for the kernel to give
    it up, which takes a quarter of an hour."""
    for name in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(name))
        except OSError:
            continue  # the one of the listing
        try:
            connection = socket.socket(fileno=own)
        except OSError:
            os.close(own)  # no socket
            continue
        with connection, suppress(OSError):
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue  # another family's addresses are made otherwise
            peer = connection.getpeername()
            if (peer[0].removeprefix("::ffff:"), peer[1]) != (address, port):
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


class Overtaken(Exception):
    """The ranks that meet are no more those that are to: there is a newer generation."""


def stop_grace() -> float:
    """Seconds, as the engine has them, which has checked the variable."""
    return float(os.environ.get("EVENSTEP_STOP_GRACE") or 0) or 0.15


_PATIENCE_SECONDS = 2.0
"""How long rank 0 stays for others to hear that there will be no group."""


class _Meeting:
    """What is known of the ranks while they come together."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        name: str,
        members: Sequence[int],
        timeout_seconds: float,
        look: Callable[[], None] | None = None,
        heeds: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._prefix, self._name, self._members = store, prefix, name, members
        self._deadline = time.monotonic() + timeout_seconds
        self._look_around = look or heeds
        self._minds_stops = heeds is not None and look is None
        self._stood: dict[int, float] = {}  # ranks, and since when they were seen to
        self._longest_pause = 0.05 if look is None else 0.005  # where others wait for nothing else than this
        self.keys: list[str] = []  # set by this rank
        self.processes = {rank: _processes[member] for rank, member in enumerate(members) if member in _processes}

    def get(self, key: str) -> str:
        """The value of a key that another rank sets; an error where one of those that must come has ended."""
        with self._reaching():
            return self._get(key)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """The store's end is the loss of who keeps it, at whatever call."""
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ != "DistNetworkError":
                raise
            raise _store_lost(self._name) from error

    def _get(self, key: str) -> str:
        pause, looked = 0.0005, time.monotonic()
        while not self._store.check([f"{self._prefix}/{key}"]):
            if self._look_around is not None:
                self._look_around()
            now = time.monotonic()
            if now >= self._deadline:
                self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=0.001))  # its error has torch's words
            if now - looked > 0.1:
                looked = now
                self._look(key)
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest_pause)
        return self._store.get(f"{self._prefix}/{key}").decode()

    def stay_until_heard(self, ranks: int) -> None:
        """Rank 0, before it fails: the store may be its own, and go with it, before the others have read why."""
        until = time.monotonic() + _PATIENCE_SECONDS
        ended = {rank for rank, process in self.processes.items() if _ended(process)}
        heard = [f"{self._prefix}/heard/{rank}" for rank in range(1, ranks) if rank not in ended]
        while heard and time.monotonic() < until and not self._store.check(heard):
            if self._look_around is not None:
                self._look_around()
            time.sleep(0.005)

    def put(self, key: str, value: str) -> None:
        with self._reaching():
            self._store.set(f"{self._prefix}/{key}", value)
        self.keys.append(key)

    def gather(self, subject: str, rank: int, ranks: int, record: bytes) -> bytes:
        """The records of all ranks that call this for the subject, in rank order."""
        self.put(f"{subject}/{rank}", record.hex())
        return b"".join(bytes.fromhex(self.get(f"{subject}/{other}")) for other in range(ranks))

    def forget(self) -> None:
        with self._reaching():
            for key in self.keys:
                self._store.delete_key(f"{self._prefix}/{key}")

    def forget_when_read(self, word: str, ranks: int) -> None:
        """The keys of all ranks, by the last that has read them: for ranks that no group of ours connects. A later group of the name is
        opened when all have come through here, and `word` is of this one alone."""
        read = f"{self._prefix}/read/{word}"
        with self._reaching():
            if self._store.add(read, 1) == ranks:
                of_ranks = [f"{self._prefix}/{part}{rank}" for part in ("", "network/") for rank in range(ranks)]
                for key in (*of_ranks, f"{self._prefix}/plan", read):
                    self._store.delete_key(key)

    def _look(self, key: str) -> None:
        for rank, process in self.processes.items():
            # One that did its part may have ended by an error of the meeting, which the key will say.
            if _ended(process) and not self._store.check([f"{self._prefix}/{key}"]):
                raise _never_comes(rank, process, self._name)

        if self._minds_stops:
            now, stand = time.monotonic(), [rank for rank, one in self.processes.items() if _state(one) == "T"]
            self._stood = {rank: self._stood.get(rank, now) for rank in stand}
            for rank, since in self._stood.items():
                if now - since >= stop_grace():
                    raise _stands(self._members[rank], self.processes[rank], self._name)

    def learn(self, rank: int, process: int) -> None:
        """Of a rank on this host."""
        self.processes[rank] = process

    def keep(self) -> None:
        """Those of this host have come."""
        for rank, process in self.processes.items():
            _processes[self._members[rank]] = process


def _share_segment(fd: int) -> str:
    return f"{os.getpid()}:{fd}"


def _find_segment(words: str) -> int:
    process, fd = words.split(":")
    return _core.open_peer_fd(int(process), int(fd))


def _shape(plan: dict[str, Any], everybody: list[dict[str, Any]]) -> str:
    """The group's make-up, by which costs are kept."""
    network = ""
    if plan["wanted"] == "mpi":
        network = f"MPI ({mpi.state()[0]})"
    elif max(plan["host_of"]) > 0 and plan["wanted"] != "gloo":
        network = f"UCX over {os.environ.get('UCX_TLS', 'all')}, {interfaces() or 'any interface'}"
    masks, machines = [rank["cpus"] for rank in everybody], [rank["machine"] for rank in everybody]
    return shape_of(plan["host_of"], masks, machines, network)


def _make_plan(meeting: _Meeting, own: dict[str, Any], ranks: int, arena_bytes: int) -> tuple[dict[str, Any], int]:
    """Rank 0: where all are and what they want; where that is one host and its memory, the descriptor of the segment."""
    fd = -1
    try:
        everybody = [own]
        for rank in range(1, ranks):
            other = json.loads(meeting.get(str(rank)))
            everybody.append(other)
            if other["place"] == own["place"]:
                meeting.learn(rank, other["process"])
        plan = {
            "wanted": agreed([other["wanted"] for other in everybody]),
            "host_of": host_numbers([other["place"] for other in everybody]),
            "processes": [other["process"] for other in everybody],
            "word": os.urandom(8).hex(),
        }
        plan["shape"] = _shape(plan, everybody)
        if max(plan["host_of"]) == 0 and plan["wanted"] in ("", "shm", "hosts-gloo"):
            fd = _core.Comm.create_segment(ranks, arena_bytes, plan["processes"])
            plan["segment"] = _share_segment(fd)
    except Overtaken:
        raise
    except Exception as error:
        meeting.put("plan", json.dumps({"error": str(error), "status": getattr(error, "status", "")}))
        meeting.stay_until_heard(ranks)
        raise
    meeting.put("plan", json.dumps(plan))
    return plan, fd


def _plan(meeting: _Meeting, rank: int, ranks: int, arena_bytes: int) -> tuple[dict[str, Any], int]:
    """What rank 0 makes of where all are, the same on all ranks; rank 0 also has the descriptor of one host's memory."""
    own = {
        "place": _place(),
        "wanted": wanted_engine(),
        "process": os.getpid(),
        "cpus": cpu_mask(),
        "machine": machine(),
    }
    meeting.put(str(rank), json.dumps(own))
    if rank == 0:
        meeting.learn(0, os.getpid())
        return _make_plan(meeting, own, ranks, arena_bytes)
    first = json.loads(meeting.get("0"))
    if first["place"] == own["place"]:
        meeting.learn(0, first["process"])
    plan = json.loads(meeting.get("plan"))
    if "error" in plan:
        meeting.put(f"heard/{rank}", "")
        said = EvenstepError(f"rank 0 could not make the group: {plan['error']}")
        if plan["status"]:  # of a rank that was lost, say: those that are left may go on
            said.status = plan["status"]
        raise said
    for other, host in enumerate(plan["host_of"]):
        if host == plan["host_of"][rank]:
            meeting.learn(other, plan["processes"][other])
    return plan, -1


def _choose(meeting: _Meeting, rank: int, ranks: int, plan: dict[str, Any], lasts: bool) -> tuple[str, str, bool]:
    """The engine, chosen by every rank from the same facts. UCX is looked for only where it may be needed. With whether all say that
    it `lasts`."""
    over_mpi = plan["wanted"] == "mpi"
    own = mpi.record() if over_mpi else ucx_record()
    meeting.put(f"network/{rank}", json.dumps({**own, "lasts": lasts}))
    records = [json.loads(meeting.get(f"network/{other}")) for other in range(ranks)]
    all_last = all(record["lasts"] for record in records)
    if over_mpi:
        return mpi.choose(plan["host_of"], records), "", all_last
    return *choose(plan["wanted"], plan["host_of"], records), all_last


class OverGloo(NamedTuple):
    """What ranks that only Gloo connects know of their group."""

    word: str  # that no other group has
    host_of: list[int]  # the host of each rank; []: Gloo connects also ranks of one host
    lasts: bool  # all ranks were given `over`


MOST_MEASURED = 64
"""Ranks of a group between all of which connections are made to see whether they are worth it."""


def _open_cheaper(
    meeting: _Meeting, rank: int, shape: str, may_measure: bool, open_engine: Callable[[str], _core.Comm]
) -> _core.Comm:
    """Through the hosts' first ranks, or between all ranks: what costs less. Where that is not known, both are opened and
    measured, where that may be."""
    if rank == 0:
        meeting.put("engine", better_engine(shape) or ("measure" if may_measure and measures() else "hosts"))
    engine = meeting.get("engine")
    if engine != "measure":
        return open_engine(engine)
    comms = {engine: open_engine(engine) for engine in ("hosts", "ucx")}
    for comm in comms.values():
        comm.measure(table() if rank == 0 else None, shape, MEASURE_SECONDS)
    if rank == 0:
        meeting.put("measured", better_engine(shape) or "hosts")
        keep()
    chosen = comms.pop(meeting.get("measured"))
    chosen.barrier()  # nobody is in the other one any more
    for comm in comms.values():
        comm.close()
    return chosen


def open_group(
    store: Store,
    rank: int,
    ranks: int,
    *,
    name: str = "group",
    arena_bytes: int = 0,
    timeout_seconds: float = 1800.0,
    spin: int = -1,
    members: Sequence[int] | None = None,
    messages: bool = True,
    measures: bool = True,
    over: _core.Over | None = None,
    look: Callable[[], None] | None = None,
    heeds: Callable[[], None] | None = None,
    number: int = -1,
    over_gloo: Callable[[OverGloo], None] | None = None,
) -> _core.Comm | None:
    """Opens a group over `store`; collective over its `ranks` ranks. None where only Gloo can connect them.

    `name` tells groups of one store apart; a restarted job (TORCHELASTIC_RESTART_COUNT) has names of its own. `members`
    are the ranks' numbers in the whole job, where the group is not all of it. On several hosts `messages` says whether
    ranks will send to one another and call all-to-all, which takes connections between all, and `measures` whether the
    engine may be chosen by measurement where it is not known which costs less. `over` tells the group, and
    `look`, called while ranks come together, raises, when it is to be opened, or used, no more; so does `heeds`, where
    the ranks would begin again without one that is lost: then they wait for none that is stopped, beyond EVENSTEP_STOP_GRACE.
    `number`: what errors call this rank where each is on a host of its own; -1: as the group does. `over_gloo` hears of
    it where only Gloo connects the hosts.
    """
    limits: dict[str, Any] = {"timeout_seconds": timeout_seconds, "spin": spin}

    def open_shared(fd: int, rank: int, ranks: int) -> _core.Comm:
        try:
            return _core.Comm(fd, rank, ranks, arena_bytes, timeout_seconds, spin, over)
        finally:
            os.close(fd)

    if ranks == 1:
        alone = open_shared(_core.Comm.create_segment(1, arena_bytes), 0, 1)
        record_calls(alone, name)
        return alone
    prefix = f"evenstep/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    meeting = _Meeting(store, prefix, name, members or range(ranks), timeout_seconds, look, heeds)

    def open_inside(host: int, rank: int, ranks: int) -> _core.Comm:
        if rank == 0:
            here = [process for process, at in zip(plan["processes"], plan["host_of"]) if at == host]
            fd = _core.Comm.create_segment(ranks, arena_bytes, here)
            meeting.put(f"inside/{host}", _share_segment(fd))
        else:
            fd = _find_segment(meeting.get(f"inside/{host}"))
        return open_shared(fd, rank, ranks)

    plan, fd = _plan(meeting, rank, ranks, arena_bytes)
    lasts = over is not None
    engine, why, all_last = ("shm", "", lasts) if "segment" in plan else _choose(meeting, rank, ranks, plan, lasts)
    if engine in ("gloo", "hosts-gloo"):
        inside = engine == "hosts-gloo" and over_gloo is not None
        if rank == 0:
            say_gloo(why, "hosts" if inside else "ranks")
        ways = "shared memory on each host, Gloo through torch between them" if inside else "Gloo through torch"
        note(f"group {name}, rank {rank}, at its opening: {ways}, {ranks} ranks: {why}", rank)
        meeting.keep()
        meeting.forget_when_read(plan["word"], ranks)
        if over_gloo is not None:
            over_gloo(OverGloo(plan["word"], plan["host_of"] if inside else [], all_last))
        return None

    network = mpi.open_mpi if plan["wanted"] == "mpi" else partial(open_ucx, over=over)
    if network is mpi.open_mpi and rank == 0:
        mpi.say()

    def open_engine(engine: str) -> _core.Comm:
        if engine == "shm":
            return open_shared(fd if rank == 0 else _find_segment(plan["segment"]), rank, ranks)
        if engine in ("ucx", "mpi"):
            return network(meeting.gather, "all", rank, ranks, arena_bytes=arena_bytes, number=number, **limits)
        return open_hosts(
            meeting.gather, open_inside, rank, plan["host_of"], messages=messages, network=network, **limits
        )

    if engine == "hosts" and plan["wanted"] == "":
        may_measure = measures and ranks <= MOST_MEASURED and look is None
        comm = _open_cheaper(meeting, rank, plan["shape"], may_measure, open_engine)
    else:
        comm = open_engine(engine)
    follow(comm, plan["shape"], may_measure=look is None)  # who goes on after a loss does so at once, by what is known
    record_calls(comm, name)
    # All have read the keys once all have come: a later group of this name must not find them, nor lose its own.
    comm.barrier()
    meeting.forget()
    comm.barrier()
    meeting.keep()
    explain(name, comm, "at its opening")
    return comm
