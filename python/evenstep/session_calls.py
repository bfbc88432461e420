"""What a training script calls beside es.prepare: where it is, waits, weights, epochs, numbers for the record."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.session import inside_a_set, session, sessions, training_session


def rank() -> int:
    """This process's number among all ranks, inside the `with` of a process set among its ranks; 0 outside a job."""
    return session().seen_rank


def local_rank() -> int:
    """This process's number on its host; 0 outside a job."""
    return session().environment.local_rank


def world_size() -> int:
    """How many ranks the job has, inside the `with` of a process set how many that has; 1 outside a job."""
    return session().seen_world_size


def is_main() -> bool:
    """True on rank 0, of the process set where its `with` is open, and outside a job."""
    return session().seen_rank == 0


def print_main(*values: Any, **options: Any) -> None:
    """print on rank 0 only."""
    if is_main():
        options.setdefault("flush", True)
        builtins.print(*values, **options)


def step_count() -> int:
    """Optimizer steps done since the start of training; a resumed run goes on counting."""
    return session().step


def barrier() -> None:
    """Returns when all ranks have come."""
    session().barrier()


def epochs(count: int) -> Iterator[int]:
    """range(count), but in a resumed run loops that were over yield nothing, and the one that was under way starts with
    its epoch of then."""
    current = training_session("es.epochs")
    current.total_epochs = count
    outermost = not current.loops.now.inside
    yield from current.loops.run(count)
    if outermost:
        current.iteration_begins()  # none does: the last step, left by a break, is over all the same


def set_weight(amount: float) -> float:
    """Before backward: the loss is a mean over `amount` things (tokens, say) on this rank. Collective.

    The gradients of the next backward are then those of the mean over all ranks' things. Gives what counts, as a weight for
    es.reduce_mean: `amount`, and 0 on a rank that has a dummy sample in place of a share of the batch.
    """
    current = training_session("es.set_weight")
    current.join()
    return current.steps.weight.give(float(amount))


def synchronise_models() -> None:
    """Where ranks train on their own (es.LocalSGD, es.DiLoCo): makes their parameters one now, before an evaluation or the
    end of training. Else nothing. Collective."""
    training_session("es.synchronise_models").synchronise_models()


def exchange_gradients() -> None:
    """After `p.grad = …` by hand (`torch.autograd.grad`), before the optimizer's step: p.grad = the mean over the ranks,
    each with its part of the batch, as backward does it. Collective.

    All prepared models that have a gradient on some rank take part; what is the same on all ranks stays what it is.
    """
    training_session("es.exchange_gradients").steps.exchange_gradients()


@contextmanager
def no_sync(*models: nn.Module) -> Iterator[None]:
    """Backward passes inside only add up on each rank; the next one outside makes the exact sum of all.

    Without models: all prepared ones (inside the `with` of a process set: those of that set). Enter it on every rank for the same passes.
    """
    known = [training_session("es.no_sync()")] if inside_a_set() or not models else sessions()
    syncs = [sync for one in known for sync in one.steps.syncs]
    chosen = [sync for sync in syncs if not models or any(sync.model is model for model in models)]
    for model in models:
        if session().in_job and not any(sync.model is model for sync in syncs):
            raise EvenstepError(f"es.no_sync was given a {type(model).__name__} that es.prepare has not prepared")
    before = [sync.enabled for sync in chosen]
    for sync in chosen:
        sync.enabled = False
    try:
        yield
    finally:
        for sync, enabled in zip(chosen, before):
            sync.enabled = enabled


def log(**scalars: float) -> None:
    """Numbers of yours for the run's record, from rank 0: of the step whose backward was made, else of the last step.

    `loss` takes the place of the number that backward began from, on the page, in metrics and in the report: give it where
    that one is scaled or only a part. Names have up to 127 bytes.
    """
    current = training_session("es.log")
    step = current.step if current.steps.has_pass else max(0, current.step - 1)
    for name, value in scalars.items():
        number = float(value)
        if current.rank == 0:
            current.telemetry.scalar(_fitting(name), step, number)


def _fitting(name: str) -> str:
    encoded = name.encode(errors="replace")
    if len(encoded) <= _core.SCALAR_NAME_BYTES:
        return encoded.decode()
    kept = encoded[: _core.SCALAR_NAME_BYTES].decode(errors="ignore")
    warnings.warn(
        f"es.log: a name of {len(encoded)} bytes is kept as {kept!r}\n"
        f"  fix: give it at most {_core.SCALAR_NAME_BYTES} bytes, so that no two names become one",
        stacklevel=3,
    )
    return kept
