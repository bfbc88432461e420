"""How the ranks of a group find each other: through torch's store, once, when the group is made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.comm_debug import explain
from evenstep.hosts import agreed, choose, host_numbers, open_hosts, open_ucx, say_gloo, ucx_record, wanted_engine

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def _place() -> str:
    """The same for all processes that can open each other's memory, different for any others.

    EVENSTEP_HOST_ID stands for the host where the kernel's own name of it does not tell (network namespaces that play
    hosts)."""
    host = os.environ.get("EVENSTEP_HOST_ID")
    if not host:
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{host} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


_processes: dict[int, int] = {}
"""Of the job's ranks on this host that have opened a group together with this one."""


def _ended(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return isinstance(error, (FileNotFoundError, ProcessLookupError))
    return stat[stat.rindex(")") + 2] in "ZX"


def _never_comes(rank: int, process: int, name: str) -> _core.EvenstepError:
    fix = f"the end of rank {rank}'s own output says why"
    error = _core.EvenstepError(
        f"rank {rank} (process {process}) died or came to its end before it opened the group {name} "
        f"(EVEN_ERR_PEER_LOST)\n  fix: {fix}"
    )
    error.status, error.fix, error.rank, error.device = "EVEN_ERR_PEER_LOST", fix, rank, None
    return error


class _Meeting:
    """What is known of the ranks while they come together."""

    def __init__(self, store: Store, prefix: str, name: str, members: Sequence[int], timeout_seconds: float) -> None:
        self._store, self._prefix, self._name, self._members = store, prefix, name, members
        self._deadline = time.monotonic() + timeout_seconds
        self.keys: list[str] = []  # set by this rank
        self.processes = {rank: _processes[member] for rank, member in enumerate(members) if member in _processes}

    def get(self, key: str) -> str:
        """The value of a key that another rank sets; an error where one of those that must come has ended."""
        pause, looked = 0.0005, time.monotonic()
        while not self._store.check([f"{self._prefix}/{key}"]):
            now = time.monotonic()
            if now >= self._deadline:
                self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=0.001))  # its error has torch's words
            if now - looked > 0.1:
                looked = now
                self._look(key)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self._store.get(f"{self._prefix}/{key}").decode()

    def put(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)
        self.keys.append(key)

    def gather(self, subject: str, rank: int, ranks: int, record: bytes) -> bytes:
        """The records of all ranks that call this for the subject, in rank order."""
        self.put(f"{subject}/{rank}", record.hex())
        return b"".join(bytes.fromhex(self.get(f"{subject}/{other}")) for other in range(ranks))

    def forget(self) -> None:
        for key in self.keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    def _look(self, key: str) -> None:
        for rank, process in self.processes.items():
            # One that did its part may have ended by an error of the meeting, which the key will say.
            if _ended(process) and not self._store.check([f"{self._prefix}/{key}"]):
                raise _never_comes(rank, process, self._name)

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
        }
        if max(plan["host_of"]) == 0 and plan["wanted"] in ("", "shm"):
            fd = _core.Comm.create_segment(ranks, arena_bytes, plan["processes"])
            plan["segment"] = _share_segment(fd)
    except Exception as error:
        meeting.put("plan", json.dumps({"error": str(error)}))
        raise
    meeting.put("plan", json.dumps(plan))
    return plan, fd


def _plan(meeting: _Meeting, rank: int, ranks: int, arena_bytes: int) -> tuple[dict[str, Any], int]:
    """What rank 0 makes of where all are, the same on all ranks; rank 0 also has the descriptor of one host's memory."""
    own = {"place": _place(), "wanted": wanted_engine(), "process": os.getpid()}
    meeting.put(str(rank), json.dumps(own))
    if rank == 0:
        meeting.learn(0, os.getpid())
        return _make_plan(meeting, own, ranks, arena_bytes)
    first = json.loads(meeting.get("0"))
    if first["place"] == own["place"]:
        meeting.learn(0, first["process"])
    plan = json.loads(meeting.get("plan"))
    if "error" in plan:
        raise EvenstepError(f"rank 0 could not make the group: {plan['error']}")
    for other, host in enumerate(plan["host_of"]):
        if host == plan["host_of"][rank]:
            meeting.learn(other, plan["processes"][other])
    return plan, -1


def _choose(meeting: _Meeting, rank: int, ranks: int, plan: dict[str, Any]) -> tuple[str, str]:
    """The engine, chosen by every rank from the same facts. UCX is looked for only where it may be needed."""
    meeting.put(f"ucx/{rank}", json.dumps(ucx_record()))
    records = [json.loads(meeting.get(f"ucx/{other}")) for other in range(ranks)]
    return choose(plan["wanted"], plan["host_of"], records)


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
) -> _core.Comm | None:
    """Opens a group over `store`; collective over its `ranks` ranks. None where only Gloo can connect them.

    `name` tells groups of one store apart; a restarted job (TORCHELASTIC_RESTART_COUNT) has names of its own. `members`
    are the ranks' numbers in the whole job, where the group is not all of it. On several hosts `messages` says whether
    ranks will send to one another and call all-to-all, which takes connections between all.
    """
    limits: dict[str, Any] = {"timeout_seconds": timeout_seconds, "spin": spin}

    def open_shared(fd: int, rank: int, ranks: int) -> _core.Comm:
        try:
            return _core.Comm(fd, rank, ranks, arena_bytes, timeout_seconds, spin)
        finally:
            os.close(fd)

    if ranks == 1:
        return open_shared(_core.Comm.create_segment(1, arena_bytes), 0, 1)
    prefix = f"evenstep/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    meeting = _Meeting(store, prefix, name, members or range(ranks), timeout_seconds)

    def open_inside(host: int, rank: int, ranks: int) -> _core.Comm:
        if rank == 0:
            here = [process for process, at in zip(plan["processes"], plan["host_of"]) if at == host]
            fd = _core.Comm.create_segment(ranks, arena_bytes, here)
            meeting.put(f"inside/{host}", _share_segment(fd))
        else:
            fd = _find_segment(meeting.get(f"inside/{host}"))
        return open_shared(fd, rank, ranks)

    plan, fd = _plan(meeting, rank, ranks, arena_bytes)
    engine, why = ("shm", "") if "segment" in plan else _choose(meeting, rank, ranks, plan)
    if engine == "gloo":
        if rank == 0:
            say_gloo(why)
        return None
    if engine == "shm":
        comm = open_shared(fd if rank == 0 else _find_segment(plan["segment"]), rank, ranks)
    elif engine == "ucx":
        comm = open_ucx(meeting.gather, "all", rank, ranks, arena_bytes=arena_bytes, **limits)
    else:
        comm = open_hosts(meeting.gather, open_inside, rank, plan["host_of"], messages=messages, **limits)
    # All have read the keys once all have come: a later group of this name must not find them, nor lose its own.
    comm.barrier()
    meeting.forget()
    comm.barrier()
    meeting.keep()
    explain(name, comm, "at its opening")
    return comm
