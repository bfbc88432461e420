"""What a loader's course keeps of the batches of a pass, for they may come again; and what it says where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from evenstep._core import EvenstepError
from evenstep.loops import Place


@dataclass
class Part:
    """Of a pass: the batches that came of one iteration and epoch. Where all that was before the first of them."""

    turn: int  # of the iteration
    place: Place  # in es.epochs' loops
    before: int
    iterations: dict[str, Any]
    epoch: int
    batch: int
    drawn: int
    samples: int
    came: int
    stepped: bool
    sampler: str
    position: Any  # of a stream
    backwards: int  # that had been begun
    sizes: list[tuple[int, int]]  # of an epoch whose batch is adapted
    count: int = 0  # batches


def no_batch(loader: DataLoader[Any], batch_size: int | None) -> EvenstepError:
    return EvenstepError(
        f"the training loader has no batch: {_samples_in(loader)}, batch_size {batch_size}, drop_last {loader.drop_last}\n"
        "  fix: give it a dataset with samples, or a smaller batch_size; a sampler that is used up before es.prepare, build anew"
    )


def _samples_in(loader: DataLoader[Any]) -> str:
    try:
        return f"{len(loader.sampler)} samples"  # type: ignore[arg-type]
    except TypeError:
        return "an unknown number of samples"
