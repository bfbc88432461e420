"""What collectives cost, kept from one job to the next: where the table lies, of what make-up a group is, and by what a
group chooses. The table itself is C's (`evenstep/comm_costs.h`)."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.comm_debug import note

LONGEST_SHAPE = 255
MEASURE_SECONDS = 0.5
"""At first use, of a group whose ways are not known."""


def path() -> Path | None:
    """EVENSTEP_COMM_COSTS: a file, or "off" (None: nothing is kept, nor measured beforehand); else the user's cache. None
    too where there is no home for one: not a folder "~" wherever the job runs."""
    wanted = os.environ.get("EVENSTEP_COMM_COSTS", "")
    if wanted == "off":
        return None
    if wanted:
        return Path(wanted)
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # as the XDG specification says
        folder = os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        return None
    return Path(folder) / "evenstep" / "comm-costs.json"


class _Kept:
    """The table of this process, and where it is kept."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.costs = _core.CommCosts()
        self.path = path()
        if self.path is None:
            wanted = os.environ.get("EVENSTEP_COMM_COSTS", "")
            note(f"costs are not kept: {'EVENSTEP_COMM_COSTS=off' if wanted else 'the user has no home'}")
            return
        try:
            self.costs.load(str(self.path))
        except UnicodeError:
            note("costs are not kept: the path of their file is not UTF-8")
            self.path = None
            return
        except EvenstepError as error:
            if error.status == "EVEN_ERR_INPUT":  # it would never heal by itself
                warnings.warn(f"what communication costs is not kept: {error}", stacklevel=2)
            self._give_up(error)
            return
        note(f"costs are kept in {self.path} ({len(self.costs.rows())} known)")

    def _give_up(self, error: EvenstepError) -> None:
        note(f"costs are not kept: {str(error).splitlines()[0]}")
        self.path = None

    def save(self) -> None:
        if self.path is not None and self.process == os.getpid():
            try:
                self.costs.save(str(self.path))
            except EvenstepError as error:
                self._give_up(error)


_kept: _Kept | None = None

followed = ""
"""The make-up of the group that this process, as its rank 0, opened last."""


def table() -> _core.CommCosts:
    """What this process knows of costs; read from its file once. A forked process has its own."""
    global _kept
    if _kept is None or _kept.process != os.getpid():
        if _kept is None:
            atexit.register(keep)
        _kept = _Kept()
    return _kept.costs


def measures() -> bool:
    """Whether what is not known may be measured when a group is opened."""
    return path() is not None


def keep() -> None:
    """Writes what was learnt; where that cannot be, EVENSTEP_COMM_DEBUG says why."""
    if _kept is not None:
        _kept.save()


# ---- the make-up of a group ----


@functools.cache
def machine() -> str:
    """The processors of this host."""
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                model = " ".join(line.partition(":")[2].split())
                break
    except OSError:
        pass
    return f"{(model or platform.machine())[:60]} x {os.cpu_count() or 1}"


def cpu_mask() -> str:
    """The CPUs that this process may use."""
    return format(sum(1 << cpu for cpu in os.sched_getaffinity(0)), "x")


def _share_cores(host_of: Sequence[int], masks: Sequence[str]) -> bool:
    """Whether a host's ranks may use fewer CPUs together than they are."""
    for host in range(max(host_of) + 1):
        here = [int(mask, 16) for mask, at in zip(masks, host_of) if at == host]
        together = 0
        for mask in here:
            together |= mask
        if bin(together).count("1") < len(here):
            return True
    return False


def shape_of(host_of: Sequence[int], masks: Sequence[str], machines: Sequence[str], network: str = "") -> str:
    """Words for a group's make-up, the same for groups whose calls cost the same."""
    counts = [list(host_of).count(host) for host in range(max(host_of) + 1)]
    runs = [(len(list(run)), count) for count, run in groupby(counts)]
    ranks = "+".join(str(count) if times == 1 else f"{times}x{count}" for times, count in runs)
    words = [
        f"{ranks} ranks",
        "cores shared" if _share_cores(host_of, masks) else "cores of their own",
        " and ".join(sorted(set(machines))),
    ]
    if len(counts) > 1:
        words.append(network)
    text = "; ".join(word for word in words if word)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text.encode()[:LONGEST_SHAPE].decode(errors="ignore")


# ---- what is chosen ----


def wanted_way() -> str | None:
    """EVENSTEP_COMM_ALGORITHM: the way that the user forces; C says which there are."""
    wanted = os.environ.get("EVENSTEP_COMM_ALGORITHM", "")
    return None if wanted in ("", "auto") else wanted


def follow(comm: _core.Comm, shape: str, may_measure: bool = True) -> None:
    """Lets a group choose its ways by what rank 0 knows, which is measured where several hosts make it a question and
    it may be. Collective; the others' shapes do not count."""
    global followed
    if comm.rank != 0:
        comm.choose()
        return
    followed = shape
    seconds = MEASURE_SECONDS if may_measure and comm.engine != "shm" and measures() else 0.0
    comm.choose(table(), shape, wanted_way(), seconds)
    if seconds:
        keep()


def better_engine(shape: str) -> str:
    """Of a group of several hosts with several ranks on some: "hosts" or "ucx" by what is known of both; "" where that is
    too little."""
    apart, together = table().step(shape, "hosts"), table().step(shape, "ucx")
    if apart is None or together is None:
        return ""
    # Between ranks of one host the first has shared memory's promises (who stands still, flight records): it is left
    # only where that is worth something.
    engine = "ucx" if together < 0.8 * apart else "hosts"
    note(
        f"engine {engine} for {shape}: the all-reduces of a step take {apart * 1e3:.3g} ms through the hosts' first "
        f"ranks, {together * 1e3:.3g} ms over UCX between all (which is taken below 80%)"
    )
    return engine
