"""A whole script on one rank and on all: where its first steps lead. It runs as it stands, up to the batch after the last of
these steps; only the shares that the ranks get are uneven on purpose."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import evenstep
from evenstep import state_apart
from evenstep._core import EvenstepError
from evenstep.group import gather_objects
from evenstep.session import Session, session
from evenstep.verify import Verification, compared
from evenstep.verify_data import uneven
from evenstep.verify_reasons import droppers
from evenstep.verify_runs import Outcome, local_norms, outcome_of

_SEED = 0
_OUTPUT_KEPT = 4000


class Refused(EvenstepError):
    """There is nothing that could be verified: of the command's user, not of the script."""


class _Done(SystemExit):
    """The script has trained its steps."""


class _Watch:
    """The session of the script asks it between two batches whether all is done."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.alone = os.environ.get("WORLD_SIZE") == "1"  # whose gradients tell which elements have none
        self.shares: list[list[int]] = []
        self.first: dict[str, float] = {}  # of each parameter, at its es.prepare
        self.found: Outcome | None = None
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def done(self) -> bool:
        return session().step >= self.steps

    def finish(self, _: Any) -> None:
        self.take()
        raise _Done(0)

    def take(self) -> None:
        current = session()
        current.synchronise_models()
        models = list(current.models.values())
        self.found = outcome_of(models, self._gradients, local_norms(models))

    def look(self, optimizer: Optimizer, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            size = p.grad.detach().to_dense().abs().double().cpu()
            self._gradients[id(p)] = torch.maximum(size, self._gradients.get(id(p), size))

    def schedule(self, number: int, batch: int) -> Sequence[int]:
        shares = uneven(batch, session().world_size, number, alone=False)
        if len(self.shares) < self.steps:
            self.shares.append(shares)
        return shares

    def prepared(self, current: Session) -> None:
        current.watch = self
        for number, model in enumerate(current.models.values()):
            for name, p in model.named_parameters():
                self.first[f"{number}.{name}"] = float(p.detach().double().sum())


@contextlib.contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """es.prepare gives uneven shares and tells of what it was given."""
    module: Any = importlib.import_module("evenstep.prepare")
    original = module.prepare

    def prepare(*objects: Any, **options: Any) -> Any:
        current = session()
        loaders = any(isinstance(one, DataLoader) for one in (*objects, options.get("loader")))
        free = all(options.get(name) is None for name in ("shares", "policy", "exact"))  # bitwise: of whole blocks
        if current.world_size > 1 and loaders and options.get("train", True) and free:
            options["shares"] = watch.schedule
        try:
            return original(*objects, **options)
        finally:
            watch.prepared(current)

    module.prepare = evenstep.prepare = prepare
    hook = register_optimizer_step_pre_hook(watch.look) if watch.alone else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        module.prepare = evenstep.prepare = original


def seed() -> None:
    """Whatever a script or a function draws before it trains, it draws alike on all ranks."""
    os.environ.setdefault("EVENSTEP_SEED", str(_SEED))  # of the loaders' orders
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(_SEED)


def _run(script: str, arguments: Sequence[str], steps: int) -> _Watch:
    """Raises what the script raises, Refused where it trains nothing."""
    seed()
    watch = _Watch(steps)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with _watched(watch):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ending:
            if not isinstance(ending, _Done) and ending.code not in (None, 0):
                raise
        if watch.found is None and session().step > 0:
            watch.take()
    if watch.found is None or not watch.found.parameters:
        raise Refused(
            f"{script} made no step of an optimizer that es.prepare was given\n"
            "  fix: verify a script that trains with es.prepare; for another name MODULE:FUNCTION"
        )
    return watch


def alone(script: str, arguments: Sequence[str], steps: int, path: Path) -> None:
    watch = _run(script, arguments, steps)
    assert watch.found is not None
    state_apart.write(path, {"first": watch.first, "steps": session().step, **vars(watch.found)})


def _reference(script: str, arguments: Sequence[str], steps: int) -> dict[str, Any]:
    """What a job of one rank comes to, started beside this process with its variables."""
    left_out = ("EVENSTEP_TELEMETRY_FD", "EVENSTEP_SPEEDS", "EVENSTEP_USE_PLAN", "EVENSTEP_VERIFY_OUT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out and "ELASTIC" not in name}
    one = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0")
    one |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    environment |= {**one, "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="evenstep-verify-") as folder:
        path = Path(folder) / "alone"
        environment |= {"EVENSTEP_RUN_DIR": folder, "EVENSTEP_CHECKPOINT_DIR": f"{folder}/checkpoints"}
        words = ["--steps", str(steps), "--alone", str(path), script, *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "evenstep.verify_command", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode != 0 or not path.exists():
            output = done.stdout.decode(errors="replace")[-_OUTPUT_KEPT:].rstrip()
            raise Refused(
                f"{script} on one rank ended with {done.returncode}; the end of its output:\n{output}\n"
                f"  fix: let it run alone first: `evenstep run -n 1 {script}`"
            )
        return state_apart.read(path)  # type: ignore[no-any-return]


def on_ranks(script: str, arguments: Sequence[str], steps: int) -> Verification:
    """The same on all ranks; rank 0 runs the script alone first, while the others wait for it. Collective."""
    began = time.monotonic()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        raise Refused(
            "a script is compared with itself on one rank: it wants two ranks at least\n  fix: start it with -n 2"
        )
    if not Path(script).exists():
        raise Refused(f"script {script} does not exist\n  fix: check the path")
    reference = _reference(script, arguments, steps) if rank == 0 else {}
    watch = _run(script, arguments, steps)
    assert watch.found is not None
    group = session().group
    sums = [(name, float(one.sum()), float(one.square().sum())) for name, one in watch.found.parameters.items()]
    same = len({repr(one) for one in gather_objects(group, sums)}) == 1
    found = _compared(watch, reference, same) if rank == 0 else None
    found = gather_objects(group, found)[0]
    assert found is not None
    return replace(found, seconds=time.monotonic() - began)


def _compared(watch: _Watch, reference: dict[str, Any], same: bool) -> Verification:
    ours, current = watch.found, session()
    assert ours is not None
    words = {name: reference[name] for name in ("parameters", "buffers", "gradients", "local_norms", "rounded")}
    theirs = Outcome(**words)
    models = list(current.models.values())
    dtypes = {p.dtype for model in models for p in model.parameters() if p.is_floating_point()}
    found = compared(ours, theirs, dtypes, watch.shares, same)
    reasons: list[str] = []
    if not found.exact:
        reasons = _reasons(watch, reference, models)
    return replace(found, ranks=current.world_size, steps=current.step, reasons=reasons)


def _reasons(watch: _Watch, reference: dict[str, Any], models: list[Any]) -> list[str]:
    found = []
    if reference["steps"] != session().step:
        found.append(f"one rank made {reference['steps']} steps, all ranks {session().step}")
    if reference["first"] != watch.first:
        found.append(
            "the script begins with other parameters on several ranks than on one, with the same seed: what it draws before "
            "depends on the ranks"
        )
    assert watch.found is not None
    if watch.found.local_norms:
        found.append(f"BatchNorm by each rank's own samples: {', '.join(watch.found.local_norms[:4])}")
    drop = droppers(models)
    if drop:
        found.append(f"random numbers are drawn in the step: {', '.join(drop[:4])}")
    found.append("es.verify, or MODULE:FUNCTION here, tries out what else may make the difference")
    return found
