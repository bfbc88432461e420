"""Whether this process is the rank that its environment names: one that the job's agent has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from evenstep.errors import error_of
from evenstep.process_stat import process_stat

# "PROCESS START": the agent, or what starts another one in its place, and since when it runs (src/orchestrator/environment.c)
_VARIABLE = "EVENSTEP_PARENT"


def _is_below(agent: int) -> bool:
    """Whether the agent has started this process, or one that has, or was given an orphan of theirs."""
    process = os.getpid()
    while process > 0:  # the agent may be a container's first process
        if process == agent:
            return True
        facts = process_stat(process)
        if not facts:
            return True  # it cannot be told
        process = int(facts[1])
    return False


def _parent(process: int) -> int:
    facts = process_stat(process)
    return int(facts[1]) if facts else 0


def _first(agent: int, rank: int) -> int:
    """The process that the agent has started as the rank; 0: it has ended, or cannot be found."""
    wanted = f"RANK={rank}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            # `agent` may be the process that starts agents
            its = parent == agent or (parent > 0 and _parent(parent) == agent)
            with suppress(OSError):
                if its and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
    return 0


def look_for_the_first(rank: int) -> None:
    """Raises where the job's agent lives and has not started this process, which is a second one then: started with another
    one's environment, whether that one lives, has ended, or another has its place by now. Without an agent nothing is known."""
    agent, _, start = os.environ.get(_VARIABLE, "").partition(" ")
    if not agent.isdigit() or int(agent) == os.getpid():
        return
    facts = process_stat(int(agent))
    if len(facts) < 20 or facts[19] != start or facts[0] in "ZX" or _is_below(int(agent)):
        return
    first = _first(int(agent), rank)
    which = f"process {first} already" if first else "another process, which has ended"
    fix = (
        "start each rank once, and leave it to the launcher; where a wrapper starts it elsewhere (a container that sees the host's "
        f"processes), unset {_VARIABLE}"
    )
    words = (
        f"rank {rank} of this job is {which}, and process {os.getpid()} was not started by the job's agent (process {agent}), "
        "so it cannot be it"
    )
    raise error_of("EVEN_ERR_IN_USE", words, fix, rank)
