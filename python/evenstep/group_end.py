"""How a process group of torch's ends, and why: Gloo says of a lost rank that a connection is closed, and to those alone who have
that connection; the ranks tell one another the rest in the job's store."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from evenstep._core import EvenstepError
from evenstep.errors import error_of
from evenstep.exits import ended_by_exception, is_ending, stop_at_exit
from evenstep.measured_place import host_name

T = TypeVar("T")

_GONE = {f"EVEN_ERR_{one}" for one in ("PEER_LOST", "REVOKED", "TIMEOUT", "MISMATCH", "SYSTEM")}

_TAG = 1702260078  # of messages that nobody sends
_LOOK_SECONDS = 0.5  # who waits for longer looks in the store, and at the processes of its host
_HEEDS = 10  # of them in a look, where ranks may be lost and the others go on at once
_ENDED_LOOKS = (
    20  # so often one of these is seen to have ended: it may have ended after this call, in which others are slow
)
_CLOSED_LOOKS = (
    60  # so often a connection is seen to be closed: the call may need it no more, and be slow over another one
)
_CLOSED_EVERY = 4  # looks: who asks Gloo whether a connection is closed leaves a few bytes in those that are not
_GRACE_SECONDS = 1.0  # a rank whose call ended by its time limit has closed its connections, and says so soon
_PATIENCE_SECONDS = 3.0  # for a rank that knows the cause
_STAY_SECONDS = 2.0  # the first rank may keep the store: the others are to hear before it goes
ABORT_SECONDS = 5.0  # an abort of NCCL's that hangs must not keep the error back
STORE_SECONDS = 5.0  # beyond these, where the store does not answer; a rank that ends on a busy host is not lost


_RAW: Any = getattr(dist, "ProcessGroupGloo", ())
"""Gloo without a group of torch's around it, which some of our own have: for the functions of this file either is a group."""
_TORCHS: Any = (_RAW, getattr(dist, "ProcessGroup", ()))


def _backend(group: Any) -> str:
    if isinstance(group, _RAW):
        return "gloo"
    try:
        return dist.get_backend(group)
    except ValueError:  # torch's list of groups has it no more: it was destroyed, or left with its generation
        return str(group.name())


def _others(group: Any) -> list[int]:
    own_size = isinstance(group, _TORCHS)  # torch's list of groups knows those of its group of all ranks alone
    ranks, own = (group.size(), group.rank()) if own_size else (dist.get_world_size(group), dist.get_rank(group))
    return [rank for rank in range(ranks) if rank != own]


def closed_peers(group: Any) -> list[int]:
    """Ranks of a Gloo group whose connection with this one is closed: they have ended, or have ended the group."""
    found = []
    for rank in _others(group):
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], rank, _TAG)
        except RuntimeError:
            found.append(rank)
    return found


def end_calls(group: Any) -> None:
    """Ends all calls in a process group of torch's, those under way and those to come: of this rank at once, over Gloo of the
    others when they find the connection closed. Any thread. Raises nothing: why they end is known already."""
    with suppress(Exception):  # the script may have destroyed torch's groups
        backend = _backend(group)
        if backend == "gloo":
            _close_gloo(group)
        elif backend in ("nccl", "xccl", "evenstep") and hasattr(group, "abort"):  # not in every torch
            within(ABORT_SECONDS, group.abort)


def _close_gloo(group: Any) -> None:
    """Gloo has no call for it; but a message that does not come in time closes all connections of its group."""
    for rank in _others(group):
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], rank, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # so it is; where this connection was closed before, the next one does it


def wait_for(
    work: Any,
    group: Any,
    is_over: Callable[[], bool] = lambda: False,
    needed: Callable[[list[int]], list[int]] = lambda closed: closed,
    heed: Callable[[], None] | None = None,
) -> None:
    """Until a call of a process group of torch's is done; raises what it failed with. Any thread.

    Where a message is half read when its connection ends, Gloo forgets it: its call goes on until the group's time limit (gloo,
    transport/tcp/pair.cc: `signalException` passes over the operation under way). So a call of Gloo's also fails here when a
    connection of its group has been closed for 30 s, and it goes on; or when is_over(), which is asked twice a second. needed:
    of ranks whose connections are closed, those that the call may wait for. heed: raises, twenty times a second, where the call waits
    for a rank that is lost; who then leaves the group has to end the call. A thread beside the script's fails when the process ends."""
    group = group or dist.group.WORLD
    if _backend(group) != "gloo" or work.is_completed():
        work.wait()
        return
    with _Waiting() as waiting:
        looks = seen = 0
        while True:
            if waiting.ends:
                _keep(group)
                raise error_of(
                    "EVEN_ERR_REVOKED",
                    "this rank's process ends while a thread of it waits in a call of all ranks",
                    "wait for the thread where the script ends",
                )
            if _ends_within_look(work, heed):
                return
            if waiting.ends:
                continue
            looks += 1
            words = ""
            if looks % _CLOSED_EVERY == 0:
                closed = needed(closed_peers(group))
                seen = seen + _CLOSED_EVERY if closed else 0
                if seen >= _CLOSED_LOOKS:
                    words = f"Connection closed by rank {', '.join(map(str, closed))}, which this call was to hear from"
            if is_over():
                words = words or "another rank has ended the group"
            if words:
                _keep(group)
                raise RuntimeError(words)


def _ends_within_look(work: Any, heed: Callable[[], None] | None) -> bool:
    times = 1 if heed is None else _HEEDS
    for _ in range(times):
        try:
            work.wait(timedelta(seconds=_LOOK_SECONDS / times))
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # its own error, if it has one
                return True
        if heed is not None:
            heed()
    return False


class _Waiting:
    """For a call, on this thread: one beside the script's comes back from C++ no more when the interpreter is ending."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._beside = threading.current_thread() is not threading.main_thread()

    def __enter__(self) -> _Waiting:
        if self._beside:
            stop_at_exit(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @property
    def ends(self) -> bool:
        return self._beside and is_ending()

    def stop(self, seconds: float) -> None:
        """For `exits`."""
        self._over.wait(seconds)


def _keep(group: Any) -> None:
    """For ever: the end of a Gloo group, also the interpreter's, waits for its calls, of which one may go on until its time limit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class _Standing:
    """A thread that is there before the script ends: from then on Python 3.12 begins none, nor need a later one. Made once a process."""

    def __init__(self) -> None:
        self.process = os.getpid()  # a forked one has none of its parent's
        self._runs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="evenstep-standing", daemon=True)
        self._thread.start()
        stop_at_exit(self)

    def make(self, run: Callable[[], None]) -> bool:
        """After what it was given before. False: it has been stopped."""
        self._runs.put(run)
        return self._thread.is_alive()

    def _serve(self) -> None:
        while (run := self._runs.get()) is not None:
            run()

    def stop(self, seconds: float) -> None:
        """For `exits`."""
        self._runs.put(None)
        self._thread.join(seconds)


_standing: _Standing | None = None


def _stand_by() -> None:
    global _standing
    if _standing is None or _standing.process != os.getpid():
        with suppress(RuntimeError):  # the script has ended
            _standing = _Standing()


class _Asked(Generic[T]):
    """ask(), on a thread of its own: the store's host may be cut off, or its process gone."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask, self._found = ask, list[T]()
        self._over = threading.Event()
        thread = threading.Thread(target=self._run, name="evenstep-group-end", daemon=True)
        self._thread: threading.Thread | None = None  # of its own
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # none can begin any more
            if _standing is None or _standing.process != os.getpid() or not _standing.make(self._run):
                self._over.set()  # nothing is asked
        stop_at_exit(self)

    def _run(self) -> None:
        try:
            with suppress(Exception):
                self._found.append(self._ask())
        finally:
            self._over.set()

    def within(self, seconds: float) -> T | None:
        """What it gave; None where it takes longer, or has failed."""
        self._wait(seconds)
        return self._found[0] if self._found else None

    @property
    def hangs(self) -> bool:
        return self._thread.is_alive() if self._thread is not None else not self._over.is_set()

    def stop(self, seconds: float) -> None:
        """For `exits`: the store may answer when the interpreter is ending."""
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)  # not for its answer alone: it is to be gone
        else:
            self._over.wait(seconds)


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What it gives; None where it takes longer, or fails. Its thread is left behind then: nothing can end it."""
    return _Asked(ask).within(seconds)


def raise_instead(made: BaseException, error: BaseException) -> NoReturn:
    """`made`, of which `error` is the cause, where it is another one."""
    if made is error:
        raise error
    raise made from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_gone(error: BaseException) -> bool:
    """Whether after it some rank makes no call any more that others wait for."""
    return getattr(error, "status", "") in _GONE


def is_late(error: BaseException) -> bool:
    """Whether a call of Gloo's ended by its time limit, and has closed its rank's connections by that."""
    return any(words in str(error) for words in ("Timed out waiting", "Application timeout"))


class GroupEnd:
    """Of a Gloo group, on one of its ranks. `place`: a name that no other group of the store has. `ended`: whether a rank is known
    to have ended.

    In the store, below `place`: who/R, the process and host of rank R; heard/R, in which call it heard of the end; cause, which
    the first rank that knows it says, for all; read/R, that it has read it; left/R, after which call its script came to its end.
    """

    def __init__(self, group: Any, store: Any, place: str, ended: Callable[[int], bool] = lambda rank: False) -> None:
        self._group, self._store, self._place, self._ended = group, store, place, ended
        self._rank = dist.get_rank(group)
        self._call, self._what, self._own = 0, "nothing", True
        self._look: _Asked[tuple[bool, dict[int, int]]] | None = None
        self.error: EvenstepError | None = None
        self._process = os.getpid()
        store.set(f"{place}/who/{self._rank}", f"rank {self._rank} (process {self._process} on host {host_name()})")
        _open.add(self)
        _stand_by()

    def begins(self, what: str) -> None:
        """A call."""
        if self.error is not None:
            raise self._again(self.error)
        self._call, self._what = self._call + 1, what

    def was_refused(self) -> None:
        """The call, by torch, before any other rank heard of it."""
        self._call -= 1

    def wait(self, work: Any) -> None:
        """For the call. A rank finds by its own connections that another one has ended only where it waits for that one in the call:
        else others say it."""
        seen = 0

        def is_over() -> bool:
            nonlocal seen
            ended = [rank for rank in _others(self._group) if self._ended(rank)]
            over, left = self._look_in_store(ended)
            missing = [rank for rank in ended if left.get(rank, -1) < self._call]  # the others have made it
            seen = seen + 1 if missing else 0
            return over or seen >= _ENDED_LOOKS or any(rank in left for rank in missing)

        def needed(closed: list[int]) -> list[int]:
            left = self._look_in_store(closed)[1] if closed else {}
            return [rank for rank in closed if left.get(rank, -1) < self._call]

        wait_for(work, self._group, is_over, needed)

    def _look_in_store(self, ended: list[int]) -> tuple[bool, dict[int, int]]:
        """Whether the cause of the group's end is there, and _left(ended). As far as the store says: it may have gone with a rank that
        is not of this group, and the call needs none."""
        if self._look is None or not self._look.hangs:
            self._look = _Asked(lambda: (bool(self._store.check([f"{self._place}/cause"])), self._left(ended)))
        return self._look.within(_LOOK_SECONDS) or (False, {})

    def _left(self, ranks: list[int]) -> dict[int, int]:
        """Those of these ranks whose scripts have come to their end, and after which call."""
        keys = {rank: f"{self._place}/left/{rank}" for rank in ranks}
        return {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    @staticmethod
    def _again(error: EvenstepError) -> EvenstepError:
        what = str(error).partition("\n")[0].removesuffix(f" ({error.status})")
        return error_of(error.status, what, error.fix, error.rank)

    # -- by this rank --

    def revoke(self, why: str) -> None:
        """Ends what the others wait for, and says why. Does nothing a second time."""
        if self.error is not None:
            return
        cause = {"kind": "revoked", "ranks": [self._rank], "who": "", "why": why}
        told = within(STORE_SECONDS, lambda: self._tell(cause))
        self.error = self._explained(told or {**cause, "who": f"rank {self._rank}"}, "")
        end_calls(self._group)

    def _tell(self, cause: dict[str, Any]) -> dict[str, Any]:
        said = self._say(cause)
        self._hear()
        return said

    def leaves(self) -> None:
        """At the end of this rank's script: it makes no call any more, and is not lost."""
        if self.error is None and self._process == os.getpid():
            within(STORE_SECONDS, self._write_left)

    def _write_left(self) -> None:
        key = f"{self._place}/left/{self._rank}"
        self._store.set(key, str(self._call))
        self._store.check([key])  # now it is there

    # -- by another --

    def heard(self, error: BaseException, what: str = "") -> EvenstepError:
        """What is to be raised for this error of a call. what: it was no call of this group, but of another one of the same ranks."""
        if self.error is not None:
            return self._again(self.error)
        self._what, self._own = what or self._what, not what
        words, late = first_line(error), is_late(error)
        closed = [] if late else closed_peers(self._group)
        cause = within(_PATIENCE_SECONDS + _STAY_SECONDS + STORE_SECONDS, lambda: self._find(closed, late))
        end_calls(self._group)
        self.error = self._explained(cause or {"kind": "store", "ranks": [], "who": "", "why": ""}, words)
        return self.error

    def _find(self, closed: list[int], late: bool) -> dict[str, Any]:
        self._hear(late)
        end_calls(self._group)
        store, place, begin, pause = self._store, self._place, time.monotonic(), 0.002
        keys = {rank: f"{place}/heard/{rank}" for rank in range(dist.get_world_size(self._group))}
        while not store.check([f"{place}/cause"]):
            silent = (
                [] if store.check(list(keys.values())) else [r for r, key in keys.items() if not store.check([key])]
            )
            waited = time.monotonic() - begin
            left = self._left(silent)
            silent = [r for r in silent if left.get(r, -1) <= self._call - self._own]  # the others have made this call
            lost = [r for r in silent if self._ended(r) or (waited >= _GRACE_SECONDS and (r in closed or r in left))]
            died = [r for r in lost if r not in left]
            if lost:
                self._say({"kind": "lost" if died else "left", "ranks": died or lost, "why": ""})
            elif not silent or waited >= _PATIENCE_SECONDS:
                self._say(self._by_records(silent))
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, 0.05)
        cause: dict[str, Any] = json.loads(store.get(f"{place}/cause"))
        store.set(f"{place}/read/{self._rank}", "")
        if self._rank == 0:
            self._stay(cause["ranks"])
        return cause

    def _hear(self, late: bool = False) -> None:
        """Before this rank closes its connections: who finds one closed knows by it that the rank lives."""
        record = {"call": self._call, "what": self._what, "own": self._own, "late": late}
        self._store.set(f"{self._place}/heard/{self._rank}", json.dumps(record))

    def _say(self, cause: dict[str, Any]) -> dict[str, Any]:
        """What all are told: the first one says it."""
        cause["who"] = " and ".join(map(self._who, cause["ranks"]))
        key = f"{self._place}/cause"
        told: dict[str, Any] = json.loads(self._store.compare_set(key, "", json.dumps(cause)))
        return told

    def _who(self, rank: int) -> str:
        key = f"{self._place}/who/{rank}"  # which a rank that died before has not set: get would wait for it
        return str(self._store.get(key).decode()) if self._store.check([key]) else f"rank {rank}"

    def _by_records(self, silent: list[int]) -> dict[str, Any]:
        """Where nobody knows of a rank that is lost."""
        store, place = self._store, self._place
        keys = {rank: f"{place}/heard/{rank}" for rank in range(dist.get_world_size(self._group)) if rank not in silent}
        records = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        calls = [f"rank {rank} in call {one['call']} ({one['what']})" for rank, one in records.items()]
        if silent:
            late = any(one["late"] for one in records.values())
            return {"kind": "late" if late else "silent", "ranks": silent, "why": ""}
        made = {(one["call"], one["what"]) for one in records.values() if one["own"]}
        numbers = {call for call, _ in made}  # a rank may be ahead of another by a call, and both be right
        apart = len(made) > len(numbers)
        return {"kind": "apart" if apart else "network", "ranks": [], "why": ", ".join(calls)}

    def _stay(self, gone: list[int]) -> None:
        until = time.monotonic() + _STAY_SECONDS
        keys = [
            f"{self._place}/read/{rank}" for rank in _others(self._group) if rank not in gone and not self._ended(rank)
        ]
        while keys and not self._store.check(keys) and time.monotonic() < until:
            time.sleep(0.005)

    # -- in words --

    def _explained(self, cause: dict[str, Any], words: str) -> EvenstepError:
        who, rank = cause["who"], cause["ranks"][0] if len(cause["ranks"]) == 1 else None
        here = f"rank {self._rank} on host {host_name()}, in call {self._call} of the ranks' group over Gloo ({self._what})"
        output = f"the end of {'its' if rank is not None else 'their'} own output says why"
        network = "see what the network between the hosts does"
        table: dict[str, tuple[str, str, str]] = {
            "revoked": (
                "REVOKED",
                f"{who} ended what the ranks wait for: {cause['why']}",
                "the reason is in that rank's output",
            ),
            "lost": (
                "PEER_LOST",
                f"{who} has ended, or cannot be reached any more: found by {here}: {words}",
                f"{output}; where it says nothing, {network}",
            ),
            "left": (
                "PEER_LOST",
                f"{who} {'has' if rank is not None else 'have'} left the job: {'its script has' if rank is not None else 'their scripts have'} ended: "
                f"found by {here}: {words}",
                "let the scripts of all ranks make the same steps, and the same of the calls that all ranks make",
            ),
            "late": (
                "TIMEOUT",
                f"{who} did not come to {self._what} within the time limit: {here}: {words}",
                "look what it waits for or computes there (py-spy dump --pid PROCESS)",
            ),
            "silent": (
                "PEER_LOST",
                f"{who} does not answer: ended, cut off, or in a long computation: {here}: {words}",
                f"{output}; where it says nothing, {network}",
            ),
            "apart": (
                "MISMATCH",
                f"the ranks were in different calls: {cause['why']}: {words}",
                "let all ranks do the same, in the same order",
            ),
            "network": (
                "SYSTEM",
                f"connections of the ranks' group over Gloo have ended, and no rank has: {here}: {words}",
                network,
            ),
            "store": (
                "PEER_LOST",
                f"another rank has ended, and so has the process that keeps the job's store, or cannot be reached: {here}: {words}",
                "the end of rank 0's own output says why; where it says nothing, see that MASTER_ADDR can be reached",
            ),
        }
        status, said, fix = table[cause["kind"]]
        return error_of(f"EVEN_ERR_{status}", said, fix, rank)


_open: weakref.WeakSet[GroupEnd] = weakref.WeakSet()


def _leave_all() -> None:
    if not ended_by_exception():
        for end in list(_open):
            end.leaves()


atexit.register(_leave_all)
