"""Ranks whose gradients are used later (es.Stale), and whose votes come with them (test_late_votes.py). Prints what was found, as JSON,
from every rank.

    python late_cases.py CASE [ARGUMENT …]
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import quiet_cases
import torch
from quiet_cases import CALLS, RANK, Centred, Raises, prepared, say
from torch import nn

import evenstep as es
from evenstep.checkpoint import _background

K = 3
STEPS = 16


class Meetings:
    """In which steps this rank's group was called: where it waited for all."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.now = -1
        self._group = es.session().group
        for name in CALLS:
            setattr(self._group, name, self._counted(getattr(self._group, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.now >= 0 and self.now not in self.steps:
                self.steps.append(self.now)
            return call(*args, **options)

        return counted

    def end(self) -> None:
        for name in CALLS:
            delattr(self._group, name)


def train(
    before: Callable[[int], None] = lambda number: None, mode: Any = None, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    """In which steps the ranks met, the parameters in the end, and what shares were decided by last in each step."""
    model, optimizer, loader = prepared(mode or es.Stale(steps=K), steps, **options)
    met, seen = Meetings(), []
    for number, (x,) in enumerate(loader):
        before(number)
        met.now = number
        model(x).square().mean().backward()
        optimizer.step()
        met.now = -1
        optimizer.zero_grad()
        seen.append([round(samples) for samples, *_ in loader.shares.last])
        reached(number)
    met.end()
    return {"met": met.steps, "values": quiet_cases._digest(list(model.parameters())), "seen": seen}


def reached(number: int) -> None:
    """This rank has made step `number`."""
    pathlib.Path(f"rank-{RANK}-{number}").touch()


def await_step(rank: int, number: int) -> None:
    while not pathlib.Path(f"rank-{rank}-{number}").exists():
        time.sleep(0.002)


def clear() -> None:
    es.session().steps.syncs.clear()
    es.session().models.clear()
    es.session().optimizers.clear()
    es.barrier()
    for path in pathlib.Path().glob(f"rank-{RANK}-*"):
        path.unlink()
    es.barrier()


def ahead() -> None:
    """In step 5 rank 1 begins only once rank 0 has made all steps that need nothing of it, in step 9 rank 0 once rank 1 has."""
    undisturbed = train()
    clear()
    quiet = es.session().steps.quiet
    allowed, quiet.allowed = quiet.allowed, lambda: False
    voted = train()
    quiet.allowed = allowed
    clear()

    def before(number: int) -> None:
        if (number, RANK) in ((5, 1), (9, 0)):
            await_step(1 - RANK, number + K - 1)

    disturbed = train(before)
    say({"undisturbed": undisturbed, "voted": voted, "disturbed": disturbed})


def ends() -> None:
    """Rank 1 begins its last steps once rank 0's script is at its end, and has had time to end its process."""
    found = [True]

    def before(number: int) -> None:
        if RANK == 1 and number == STEPS - K:
            await_step(0, STEPS)
            process = pathlib.Path("process").read_text()
            for _ in range(100):
                time.sleep(0.005)
                found.append(is_there(process))

    facts = train(before)
    say({"met": facts["met"], "there": all(found)})
    if RANK == 0:
        pathlib.Path("process").write_text(str(os.getpid()))
        reached(STEPS)


def epochs() -> None:
    """Of two, with shares by what was measured: rank 1 begins the second once rank 0 has made the steps that need nothing of it."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS, shares=None)
    met, number, known = Meetings(), 0, []
    for _ in range(2):
        for (x,) in loader:
            if number == STEPS and RANK == 1:
                await_step(0, STEPS + K - 1)
            met.now = number
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            known.append(len(loader.shares.last))
            reached(number)
            number += 1
    met.end()
    say({"met": met.steps, "known": known, "step": es.step()})


def checkpoints() -> None:
    """One is asked for all the time. Rank 0 is asked to end in step 12."""
    current = es.session()
    current.environment = dataclasses.replace(current.environment, checkpoint_seconds=1e-9)
    ring = current.steps.telemetry

    class Asks:
        asks_end = False

        def __getattr__(self, name: str) -> Any:
            return getattr(ring, name)

    asks = current.steps.telemetry = Asks()  # type: ignore[assignment]

    def before(number: int) -> None:
        _background.join()  # so that each of them is there, and the next may be asked for
        asks.asks_end = asks.asks_end or (number == 12 and RANK == 0)

    with suppress(SystemExit):
        train(before, steps=20)
    _background.join()
    folder = pathlib.Path(os.environ["EVENSTEP_CHECKPOINT_DIR"])
    es.barrier()
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-"))
    say({"step": es.step(), "checkpoints": steps})


def differs() -> None:
    """A parameter changes on rank 1 in step 5: found by what is told in step 6."""
    es.session().parameter_checks.every = 6
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    for number, (x,) in enumerate(loader):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 5 and RANK == 1:
            model[0].bias.data[0] += 1.0
    say({"step": es.step()})


def is_there(process: str) -> bool:
    """And has not ended, though its parent may not have heard of it."""
    try:
        stat = pathlib.Path("/proc", process, "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def stays() -> None:
    """Where something needs a vote in every step."""
    current = es.session()
    facts: dict[str, Any] = {}

    def note(name: str, **options: Any) -> None:
        facts[name] = train(**options)["met"]
        clear()

    note("adasum", reduction="adasum")
    note("torch", engine="torch")
    note("norm", norm=True, batch_norm="local")
    note("norm of its own", norm=True, batch_norm="local", broadcast_buffers=False)
    current.nonfinite.policy = "skip"
    note("skip")
    current.nonfinite.policy = "report"
    es.prepare(nn.Linear(1, 1))
    note("another")
    note("again")
    say(facts)


def refused(who: str) -> None:
    """Backward fails in step 5, on all ranks or on one; who fails makes its step later."""
    say(quiet_cases.with_failing_backwards(es.Stale(steps=K), STEPS, who))


def fails(how: str) -> None:
    """Rank 1 fails halfway in its backward of step 5, or dies there; the others end with an error, not by the time limit."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    made, error, status = 0, "", ""
    try:
        for number, (x,) in enumerate(loader):
            if number == 5 and RANK == 1 and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            hidden = model[1](model[0](x))
            if number == 5 and RANK == 1:
                await_step(0, 4)
                hidden = Raises.apply(hidden, "halfway")  # once the last layer has its gradients
            model[2](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reached(number)
            made += 1
    except (es.EvenstepError, ValueError) as raised:
        error, status = str(raised), getattr(raised, "status", "")
    say({"made": made, "error": error, "status": status})


def draws() -> None:
    """Rank 1 draws a batch more in step 5."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    error, number, batches = "", 0, iter(loader)
    try:
        for number in range(12):
            (x,) = next(batches)
            if number == 5 and RANK == 1:
                (x,) = next(batches)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except es.EvenstepError as raised:
        error = str(raised)
    say({"at": number, "error": error})


def nonfinite() -> None:
    """Rank 1 has a loss that is not finite in step 5."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    for number, (x,) in enumerate(loader):
        model(x * math.nan if number == 5 and RANK == 1 else x).square().mean().backward()
        if number == 5 + K:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    say({"step": es.step()})


def unused() -> None:
    """In step 5 no backward of rank 1 gives the model a gradient, in step 7 none of any rank's; a backward that has nothing to do with
    it comes first in step 9."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    beside = torch.zeros(1, requires_grad=True)
    for number, (x,) in enumerate(loader):
        loss = model(x).square().mean()
        if number == 9:
            beside.sum().backward()
        (beside.sum() if number == 7 or (number == 5 and RANK == 1) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = quiet_cases._digest(list(model.parameters()))
    say({"step": es.step(), "values": values})


def clipped() -> None:
    """In step 5 no backward of rank 1 gives the model a gradient, in step 7 none of any rank's; each clips, and a checkpoint is made
    in step 5 before the optimizer's step."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    beside, met, norms = torch.zeros((), requires_grad=True), Meetings(), []
    for number, (x,) in enumerate(loader):
        met.now = number
        (beside * 1.0 if number == 7 or (number == 5 and RANK == 1) else model(x).square().mean()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        met.now = -1
        if number == 5:
            es.checkpoint("between")
        optimizer.step()
        optimizer.zero_grad()
    met.end()
    say({"step": es.step(), "met": met.steps, "norms": norms, "values": quiet_cases._digest(list(model.parameters()))})


def breaks_off() -> None:
    """Rank 1 runs out of memory in step 5 once it has said that it gives gradients, and goes on only when rank 0 has ended."""
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    made, error = 0, ""

    def full(*_: Any) -> None:
        raise MemoryError("no room")

    try:
        for number, (x,) in enumerate(loader):
            if number == 5 and RANK == 1:
                es.session().steps.syncs[0].stale._finish_oldest = full
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
    except (es.EvenstepError, MemoryError) as raised:
        error = str(raised)
        if RANK == 1:
            await_step(0, STEPS)
    reached(STEPS)
    say({"made": made, "error": error})


def _apart(every: int, then: Callable[[nn.Module], None]) -> None:
    """A parameter of rank 1 differs from step 6 on, and `then` comes at that step's end."""
    es.session().parameter_checks.every = every
    model, optimizer, loader = prepared(es.Stale(steps=K), STEPS)
    for number, (x,) in enumerate(loader):
        if number == 6 and RANK == 1:
            model[0].bias.data[0] += 1.0
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 6:
            then(model)
    say({"step": es.step()})


def passes_by() -> None:
    """It differs in step 6 alone, before all ranks have others."""

    def anew(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()

    _apart(6, anew)


def stays_apart() -> None:
    """A checkpoint in step 7 finds it, and sums of before are still to come."""
    _apart(1, lambda _model: es.checkpoint("apart"))


def buffers() -> None:
    """A buffer changes for the first time in step 5: the ranks have it alike a few steps later."""
    torch.manual_seed(3)
    centred = Centred()
    model = nn.Sequential(nn.Linear(2, 2), centred).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    es.prepare(model, optimizer, sync=es.Stale(steps=K))
    met = Meetings()
    for number in range(STEPS):
        y = model[0](torch.full((2, 2), float(RANK), dtype=torch.float64))
        if number >= 5:
            y = centred(y)
        met.now = number
        y.square().mean().backward()
        optimizer.step()
        met.now = -1
        optimizer.zero_grad()
    met.end()
    say({"met": met.steps, "mean": float(centred.mean)})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
