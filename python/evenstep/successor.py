"""A rank that was started while the ranks before it still train, for the hosts of their job change: it runs the script up to
where it needs the others (es.prepare, mostly), and waits there until these have ended. Then it hears what the agent tells
a rank: the checkpoint to go on from, and the memory that they share (src/orchestrator/warm.h)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from evenstep import _core
from evenstep.environment import read_environment
from evenstep.ring import open_late, open_ring

if TYPE_CHECKING:
    from evenstep.environment import Environment
    from evenstep.session import Session

_VARIABLE = "EVENSTEP_AWAITS"


def ring_of(environment: Environment) -> _core.Telemetry:
    """The rank's telemetry ring; of one that waits, one that writes nothing yet."""
    if _VARIABLE in os.environ:
        return _core.Telemetry(-1, environment.rank)
    return open_ring(environment.telemetry_fd, environment.rank)


def await_predecessors(session: Session) -> Environment:
    """Where this process was started so: returns once it is a rank, and its session knows all that a rank knows. What the
    launcher told this process."""
    pipes = os.environ.pop(_VARIABLE, "")
    if not pipes:
        return session.environment
    go, ready = (int(each) for each in pipes.split(","))
    os.write(ready, b"1")
    os.close(ready)
    with open(go, encoding="utf-8", errors="surrogateescape") as pipe:
        line = pipe.readline()
    if not line:
        raise SystemExit("the job goes on without this process")
    told = json.loads(line)
    os.environ.update(told["set"])
    for name, path in told["open"].items():
        os.environ[name] = str(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    session.environment = read_environment()
    open_late(session.telemetry, session.environment.telemetry_fd, session.environment.rank)
    return session.environment
