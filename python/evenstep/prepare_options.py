"""What es.prepare may be told about the exchange of gradients, checked before anything is done."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from evenstep._core import EvenstepError
from evenstep.compression import parse_compression, parse_way
from evenstep.engine import EngineOptions
from evenstep.environment import Environment, cadence
from evenstep.modes import DiLoCo, LocalSGD, Mode, Stale

if TYPE_CHECKING:
    from evenstep.session import Session

_MOST_MB = 1 << 20
_MOST_ELEMENTS = 1 << 40
_MOST_BUCKET = 1 << 20  # EVEN_MOST_BUCKET


@dataclass(frozen=True)
class DDPOptions:
    """Those that users know from DistributedDataParallel; None: as Evenstep does it."""

    find_unused_parameters: bool | None = None  # False: a parameter without a gradient on any rank is an error
    static_graph: bool = False  # True: another set of parameters with gradients than in the first pass is an error
    gradient_as_bucket_view: bool = True  # False: p.grad is memory of its own
    broadcast_buffers: bool | None = None  # None: averaged; True: rank 0's; False: each rank's own

    @property
    def watches(self) -> bool:
        return self.static_graph or self.find_unused_parameters is False


def engine_options(
    environment: Environment,
    engine: str | None,
    compression: str | None,
    reduction: str,
    bucket_cap_mb: float | None,
    reduce_bucket_size: float | None = None,
    models: Iterable[nn.Module] = (),
) -> EngineOptions:
    """Raises ValueError, or EvenstepError where the launcher's variables are wrong."""
    if engine not in (None, "shared", "torch"):
        raise ValueError(f"es.prepare(engine={engine!r}): choose 'shared' or 'torch', or leave it to Evenstep")
    if reduction not in ("mean", "sum", "adasum"):
        raise ValueError(
            f"es.prepare(reduction={reduction!r}): choose 'mean' (the loss is one over samples: weighted by the shares), 'sum' (it "
            "is a sum over samples) or 'adasum'"
        )
    if compression is not None:
        chosen = parse_compression(compression)
    else:
        try:
            chosen = parse_compression(environment.compression or None, "EVENSTEP_COMPRESSION")
        except ValueError as error:
            raise EvenstepError(str(error)) from None
    adasum = reduction == "adasum"
    if adasum and chosen is not None:
        raise ValueError(
            f"es.prepare(reduction='adasum', compression={str(chosen)!r}): Adasum needs the gradients as they are\n"
            "  fix: leave one of the two out (compression='none' where the launcher sets one)"
        )
    sizes = _bucket_sizes(bucket_cap_mb, reduce_bucket_size, models)
    seed, way = environment.seed or 0, parse_way(environment.compression_way)
    return EngineOptions(engine, chosen, *sizes, adasum, seed, way, sums=reduction == "sum")


def _bucket_sizes(cap_mb: float | None, elements: float | None, models: Iterable[nn.Module]) -> tuple[int, int]:
    """In bytes and in elements, 0: not said. Raises TypeError or ValueError."""
    if cap_mb is not None and not (0 < cap_mb <= _MOST_MB and math.isfinite(cap_mb)):
        raise ValueError(f"es.prepare(bucket_cap_mb={cap_mb!r}): give MiB, more than 0 and up to {_MOST_MB}")
    cap = 0 if cap_mb is None else max(1, int(cap_mb * (1 << 20)))
    if elements is None:
        return cap, 0
    if isinstance(elements, bool) or not isinstance(elements, (int, float)):
        raise TypeError(f"es.prepare(reduce_bucket_size={elements!r}): give a number of elements, as DeepSpeed's (5e8)")
    if not (1 <= elements <= _MOST_ELEMENTS and elements == int(elements)):
        raise ValueError(
            f"es.prepare(reduce_bucket_size={elements!r}): give a whole number of elements, from 1 to {_MOST_ELEMENTS}"
        )
    if cap == 0:
        return 0, int(elements)
    for size in sorted({p.element_size() for model in models for p in model.parameters() if p.requires_grad} or {4}):
        if int(elements) * size != cap:
            raise ValueError(
                f"es.prepare(bucket_cap_mb={cap_mb!r}, reduce_bucket_size={elements!r}): so many elements of {size} bytes "
                f"are {int(elements) * size / (1 << 20):g} MiB\n  fix: give one of the two"
            )
    return cap, 0


def frequency_of(value: int | str | None, call: str) -> tuple[int, float] | None:
    """Steps and seconds between two automatic checkpoints, one of them 0; (0, 0.0): never; None: nothing is said. Raises
    TypeError or ValueError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{call}(checkpoint_frequency={value!r}): give steps (100), seconds ('30s'), or 0 for never")
    if value in (0, "0", "off"):
        return 0, 0.0
    try:
        steps, seconds = cadence("", str(value))
    except EvenstepError:
        steps, seconds = 0, 0.0
    if not (steps or seconds):
        raise ValueError(f"{call}(checkpoint_frequency={value!r}): give steps (100), seconds ('30s'), or 0 for never")
    return steps, seconds


def use_frequency(current: Session, value: int | str | None) -> None:
    """What the script says counts, also against the launcher's, which is told."""
    said = frequency_of(value, "es.prepare")
    told = current.environment.checkpoint_steps, current.environment.checkpoint_seconds
    if said is None or said == told:
        return
    if any(told) and current.rank == 0:
        launcher = told[0] or f"{told[1]:g}s"
        sys.stderr.write(
            f"evenstep: checkpoint_frequency={value!r} of the script counts, not the launcher's {launcher} (--checkpoint-every)\n"
        )
    current.environment = replace(current.environment, checkpoint_steps=said[0], checkpoint_seconds=said[1])


def check_most_samples(most: int | None, trains: bool, schedule: object) -> None:
    """Raises TypeError or ValueError."""
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, int):
        raise TypeError(
            f"es.prepare(most_samples={most!r}): give a whole number, the most samples of a batch that this rank's "
            "memory holds"
        )
    if most < 0:
        raise ValueError(f"es.prepare(most_samples={most}): give 0 or more")
    if not trains:
        raise ValueError(
            "es.prepare(most_samples=…) is about the shares of training batches, but this call has no training DataLoader\n"
            "  fix: give it with the training loader"
        )
    if schedule is not None:
        raise ValueError(
            "es.prepare(shares=…, most_samples=…): the schedule alone says how batches are split\n  fix: leave one out"
        )


def check_bucket(bucket: int | None, trains: bool, schedule: object, exact: bool) -> None:
    """Raises TypeError or ValueError."""
    if bucket is None:
        return
    if isinstance(bucket, bool) or not isinstance(bucket, int):
        raise TypeError(
            f"es.prepare(bucket={bucket!r}): give a whole number, of how many samples this rank's kernels work at once"
        )
    if not 1 <= bucket <= _MOST_BUCKET:
        raise ValueError(f"es.prepare(bucket={bucket}): give 1 (none) to {_MOST_BUCKET}")
    if exact:
        raise ValueError(
            "es.prepare(bucket=…) with exact='bitwise': shares are whole blocks there\n"
            "  fix: leave bucket out, and give blocks of that size: es.Config(block=…)"
        )
    if not trains:
        raise ValueError(
            "es.prepare(bucket=…) is about the shares of training batches, but this call has no training DataLoader\n"
            "  fix: give it with the training loader"
        )
    if schedule is not None:
        raise ValueError(
            "es.prepare(shares=…, bucket=…): the schedule alone says how batches are split\n  fix: leave one out"
        )


def check_seed_samples(asked: bool | None, environment: Environment) -> bool:
    """What holds. Raises TypeError."""
    if asked is not None and not isinstance(asked, bool):
        raise TypeError(f"es.prepare(seed_samples={asked!r}): give True or False")
    return environment.seed_samples if asked is None else asked


def check_skip_unreadable(asked: bool | None, skips: bool, given: Iterable[Any], exact: bool) -> None:
    """asked: in the call; skips: what holds for its loaders. Raises TypeError, ValueError or EvenstepError."""
    if asked is not None and not isinstance(asked, bool):
        raise TypeError(f"es.prepare(skip_unreadable={asked!r}): give True or False")
    if not skips:
        return
    if exact:
        raise ValueError(
            "exact='bitwise' with skip_unreadable: a sample that can be read on one rank or in one run alone would change the bits\n"
            "  fix: leave one of the two out"
        )
    if any(isinstance(one, DataLoader) and isinstance(one.dataset, IterableDataset) for one in given):
        raise EvenstepError(
            "skip_unreadable: an IterableDataset that has raised an exception gives no further samples\n"
            "  fix: catch it in the data set; or give a map-style one"
        )


def check_mode(mode: Mode | None, options: EngineOptions, ddp: DDPOptions) -> None:
    """Raises TypeError or ValueError where the two make no sense together."""
    if mode is None:
        return
    if not isinstance(mode, (LocalSGD, DiLoCo, Stale)):
        raise TypeError(
            f"es.prepare(sync={mode!r}): give es.LocalSGD(every=8), es.DiLoCo(every=32), es.Stale(steps=1), or leave it out"
        )
    if ddp.watches:
        which = "static_graph=True" if ddp.static_graph else "find_unused_parameters=False"
        raise ValueError(
            f"es.prepare({which}, sync={mode!r}): which parameters have gradients is known only where all ranks exchange "
            "them at every step\n  fix: leave one of the two out"
        )
    chosen = options.compression
    if options.adasum and not isinstance(mode, Stale):
        raise ValueError(
            f"es.prepare(reduction='adasum', sync={mode!r}): Adasum adds up gradients, which do not travel here\n"
            "  fix: leave one of the two out"
        )
    if options.sums and not isinstance(mode, Stale):
        raise ValueError(
            f"es.prepare(reduction='sum', sync={mode!r}): each rank steps by the loss of its own samples there, and a sum over more "
            "of them makes a longer step\n  fix: a loss that is a mean (loss / len(x)), without reduction; or leave sync out"
        )
    if chosen is None:
        return
    feedback = chosen.name in ("onebit", "topk", "powersgd")
    if isinstance(mode, LocalSGD):
        why, fix = "the parameters themselves would be rounded", "es.DiLoCo(…, outer_lr=1, outer_momentum=0)"
    elif feedback and isinstance(mode, DiLoCo):
        why, fix = "what it leaves out is made up for only at every step", "compression='bf16' or 'int8'"
    elif feedback and isinstance(mode, Stale) and mode.steps > 1:
        why, fix = "what it leaves out is made up for in the very next exchange", "es.Stale(steps=1)"
    else:
        return
    raise ValueError(f"es.prepare(compression={str(chosen)!r}, sync={mode!r}): {why}\n  fix: {fix}")


def synchronises_batch_norm(asked: str | None, mode: Mode | None, options: EngineOptions) -> bool:
    """Whether BatchNorm's statistics are those of the whole global batch. Raises ValueError."""
    if asked not in (None, "sync", "local"):
        raise ValueError(f"es.prepare(batch_norm={asked!r}): choose 'sync' or 'local', or leave it to Evenstep")
    apart = f"sync={mode!r}" if isinstance(mode, (LocalSGD, DiLoCo)) else "reduction='adasum'" if options.adasum else ""
    if asked == "sync" and apart:
        raise ValueError(
            f"es.prepare(batch_norm='sync', {apart}): the ranks do not train as one there, so no statistics are those of "
            "one device\n  fix: leave one of the two out"
        )
    return asked != "local" and not apart


def check_scalers(stale: bool, objects: Iterable[Any]) -> None:
    """Raises ValueError where gradients come late and one of what is prepared scales them."""
    if stale and any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in objects):
        raise ValueError(
            "es.prepare(sync=es.Stale(…)) with a GradScaler: it finds no gradients in the first steps, and would divide late "
            "ones by a scale that they were not made with\n  fix: train in bf16 without one, or leave sync out"
        )
