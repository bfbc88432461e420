"""How the ranks of `es.comm` on one host meet, without torch: rank 0 listens on a local socket that is named after the job
and hands each of the others the descriptor of the shared memory."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.comm_costs import cpu_mask, follow, machine, shape_of
from evenstep.comm_debug import explain
from evenstep.errors import error_of
from evenstep.ring import record_calls

_LONGEST = 4096
_STRAGGLERS_SECONDS = 2.0  # for those that come after the group has failed
_GRACE_SECONDS = 10.0  # longer than rank 0 waits, so that its error, which names who is missing, comes to all
_LONGEST_WAIT_SECONDS = 1e6  # at once: the system's own limit is some 25 days


def _address(name: str) -> bytes:
    """In the abstract namespace: nothing is left behind, however the processes end."""
    job = [str(os.getuid()), name]
    for variable in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        job.append(os.environ.get(variable, ""))
    return b"\0evenstep-" + hashlib.sha256("\0".join(job).encode()).hexdigest()[:32].encode()


def _owner(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _tell(connection: socket.socket, outcome: BaseException | int) -> None:
    """The descriptor of the group's memory, or why there is none."""
    status = getattr(outcome, "status", "") or "EVEN_ERR_SYSTEM"
    words = {"status": status, "rank": getattr(outcome, "rank", None), "what": str(outcome).split("\n")[0][:2000]}
    try:
        if isinstance(outcome, int):
            socket.send_fds(connection, [b"{}"], [outcome])
        else:
            connection.sendall(json.dumps(words).encode())
    except OSError:
        pass  # it has ended; whoever waits for it will see that
    connection.close()


class _Meeting:
    """Rank 0's side: who has come, and whether what they say fits."""

    def __init__(self, listener: socket.socket, facts: dict[str, Any]) -> None:
        self._listener = listener
        self._facts = facts
        self._come: dict[int, socket.socket] = {}
        self._silent: list[socket.socket] = []  # have connected, and said nothing so far
        self.cpus = {0: cpu_mask()}
        self._refused: set[int] = set()
        self._failure: EvenstepError | None = None

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._facts["ranks"]) if rank not in self._come and rank not in self._refused]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Whoever it is, the others are not kept waiting until it says so."""
        connection = self._listener.accept()[0]
        if _owner(connection) != os.getuid():
            connection.close()
            return
        self._silent.append(connection)
        selector.register(connection, selectors.EVENT_READ, connection)

    def _admit(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._silent.remove(connection)
        selector.unregister(connection)
        try:
            said = json.loads(connection.recv(_LONGEST))
            rank = int(said.pop("rank"))
            self.cpus[rank] = format(int(said.pop("cpus"), 16), "x")
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError, OSError):
            connection.close()  # no rank of ours
            return
        words = ""
        engine, own = said.pop("engine", ""), dict(self._facts)
        if engine != own.pop("engine"):
            words = (
                f"EVENSTEP_COMM_ENGINE differs among the ranks: rank 0 {self._facts['engine']}, rank {rank} {engine}"
            )
        elif said != own:
            words = f"rank {rank} opens the group with {said}, rank 0 with {own}"
        elif rank not in self._missing():
            words = f"rank {rank} came twice, or is none of {self._facts['ranks']} ranks"
        if words:
            fix = "start every rank once, with the same arguments and the same EVENSTEP_ variables"
            error = error_of("EVEN_ERR_MISMATCH", words, fix, rank)
            _tell(connection, error)
            self._refused.add(rank)
            self._failure = self._failure or error
            return
        self._come[rank] = connection
        selector.register(connection, selectors.EVENT_READ, rank)

    def gather(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := self._missing():
                if self._failure is not None:  # those that come yet are told, too
                    deadline = min(deadline, time.monotonic() + _STRAGGLERS_SECONDS)
                ready = selector.select(min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_SECONDS))
                late = not ready and time.monotonic() >= deadline
                if late and self._failure is not None:
                    break
                if late:
                    raise error_of(
                        "EVEN_ERR_TIMEOUT",
                        f"Timed out: of the group's {self._facts['ranks']} ranks these did not come: {missing}",
                        "see that all of them run on this host and call es.comm.open",
                        missing[0],
                    )
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.data, socket.socket):
                        self._admit(key.data, selector)
                    else:
                        raise error_of(
                            "EVEN_ERR_PEER_LOST",
                            f"rank {key.data} ended before all ranks had come",
                            f"the end of rank {key.data}'s own output says why",
                            key.data,
                        )

        if self._failure is not None:
            raise self._failure

    def tell(self, outcome: BaseException | int) -> None:
        for connection in self._come.values():
            _tell(connection, outcome)
        for connection in self._silent:  # no descriptor for who has not said that it is a rank
            if isinstance(outcome, BaseException):
                _tell(connection, outcome)
            else:
                connection.close()


def _host(name: str, facts: dict[str, Any], deadline: float) -> tuple[int, list[str]]:
    """The descriptor of the group's memory, and the CPUs of its ranks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(name))
        except OSError as error:
            raise error_of(
                "EVEN_ERR_IN_USE",
                f"another job on this host uses the same MASTER_PORT, or rank 0 opens {name!r} twice: {error.strerror}",
                "give each job a MASTER_PORT of its own",
            ) from None
        listener.listen(facts["ranks"])
        meeting = _Meeting(listener, facts)
        try:
            meeting.gather(deadline)
            fd = _core.Comm.create_segment(facts["ranks"], facts["arena_bytes"])
        except BaseException as error:
            meeting.tell(error)
            raise
        meeting.tell(fd)
        return fd, [meeting.cpus[rank] for rank in range(facts["ranks"])]


def _connect(name: str, deadline: float) -> socket.socket:
    pause = 0.001
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address(name))
            return connection
        except OSError:
            connection.close()
        if time.monotonic() + pause > deadline:
            raise error_of(
                "EVEN_ERR_TIMEOUT",
                f"Timed out: rank 0 of the group {name!r} was not found on this host",
                "see that rank 0 runs on this host and calls es.comm.open; with ranks on several hosts set "
                "LOCAL_WORLD_SIZE, as torchrun does",
                0,
            )
        time.sleep(pause)  # rank 0 has not begun to listen, and nobody can tell when it does
        pause = min(2 * pause, 0.05)


def _join(name: str, rank: int, facts: dict[str, Any], deadline: float) -> int:
    with _connect(name, deadline) as connection:
        if _owner(connection) != os.getuid():
            raise error_of(
                "EVEN_ERR_PERMISSION",
                f"user {_owner(connection)} listens where rank 0 of the group {name!r} was expected: not trusted",
                "run all ranks as one user; give the job another MASTER_PORT, from which the name is made",
                0,
            )
        left = max(0.0, deadline - time.monotonic()) + _GRACE_SECONDS
        connection.settimeout(left if left < _LONGEST_WAIT_SECONDS else None)
        try:
            with suppress(OSError):  # rank 0 may have given up just now; what it said last can still be read
                connection.sendall(json.dumps({"rank": rank, "cpus": cpu_mask(), **facts}).encode())
            said, fds, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        except socket.timeout:
            raise error_of(
                "EVEN_ERR_TIMEOUT",
                f"Timed out: not all {facts['ranks']} ranks of the group {name!r} came",
                "rank 0's own error names those that did not",
            ) from None
        except OSError:
            said, fds = b"", []
    if fds:
        return int(fds[0])
    if not said:
        what = "rank 0 ended before all ranks had come"
        raise error_of("EVEN_ERR_PEER_LOST", what, "the end of rank 0's own output says why", 0)
    words = json.loads(said)
    raise error_of(words["status"], f"rank 0 could not open the group: {words['what']}", "see rank 0", words["rank"])


def meet(
    name: str, rank: int, ranks: int, *, arena_bytes: int, timeout_seconds: float, engine: str = ""
) -> _core.Comm | None:
    """Opens the group `name` of the job over memory of this host; collective over all ranks. Where all ranks want another
    engine than shared memory, None: they are to meet elsewhere. Ranks that want different ones get an error, all of them."""
    facts = {"ranks": ranks, "arena_bytes": arena_bytes, "engine": engine or "shm"}
    deadline = time.monotonic() + timeout_seconds
    if ranks == 1:
        fd = _core.Comm.create_segment(1, arena_bytes)
    else:
        fd, cpus = _host(name, facts, deadline) if rank == 0 else (_join(name, rank, facts, deadline), [])
    try:
        if facts["engine"] != "shm":
            return None
        comm = _core.Comm(fd, rank, ranks, arena_bytes, timeout_seconds)
    finally:
        os.close(fd)
    if ranks > 1:
        follow(comm, shape_of([0] * ranks, cpus, [machine()]) if rank == 0 else "")
    record_calls(comm, f"comm/{name}")
    explain(f"comm/{name}", comm, "at its opening")
    return comm
