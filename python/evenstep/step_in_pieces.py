"""A step of es.Trainer whose batch does not fit this rank's memory: forward and backward are made once more in pieces, and what
all pieces give together takes part in the exchange, as the whole batch would have. The other ranks wait meanwhile, and notice
nothing else. How many samples did fit is told them in the vote, so that later shares are no larger where the others can take the
rest (docs/balancing.md#memory); where they cannot, this rank goes on in pieces.

Gradients that a backward handed over before it ran out of memory are those of the whole batch: the pieces make the others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.device_memory import is_out_of_memory
from evenstep.piece_times import PieceTimes
from evenstep.session_calls import set_weight
from evenstep.verify_data import mapped, slice_of

if TYPE_CHECKING:
    from evenstep.session import Session

# batch -> (loss, what it is a mean over; None: the batch's samples)
Loss = Callable[[Any], "tuple[torch.Tensor, float | None]"]


class StepInPieces:
    """Forward and backward of this rank's part of a batch, for one loss."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss,
        scale: Callable[[torch.Tensor], torch.Tensor],
        micro_batch: int | None = None,
        sums: bool = False,
        trained: Optimizer | None = None,
    ) -> None:
        """models: that the loss goes through. micro_batch: no more samples at once, whatever fits. sums: losses are sums over
        samples. trained: whose parameters are to have gradients of it, by the time of each pass; None: all of the models."""
        self._models, self._loss, self._scale, self._sums = models, loss, scale, sums
        self._trained = trained
        self._micro_batch = micro_batch
        self._asked = micro_batch is not None  # by the script
        self._times = PieceTimes()
        self._most = 0  # samples at once, since it ran out of memory; 0: it did not
        self.loss = 0.0  # of this rank's samples
        self.amount = 0.0  # what it is a mean over

    def prefer(self, size: int | None) -> None:
        """So many samples at once, by measurement; a batch that cannot be cut runs in one."""
        self._micro_batch, self._asked = size, False

    def run(self, current: Session, batch: Any) -> None:
        """Afterwards p.grad is as after the backward of one piece."""
        plan = current.latest
        empty = plan is not None and plan.samples == 0  # a dummy sample counts nothing
        samples = _samples(batch, None if plan is None else plan.samples)
        most = self._known_most(current)
        told = self._times.told
        # what is told is of this size, and of this Trainer
        current.steps.micro_batch = told if told[0] == most else (0, 0.0)
        if empty or not samples > most > 0:
            self._at_once(current, batch, samples, empty)
            return
        why = self._why_not(current, batch, samples)
        if why and self._asked and self._micro_batch is not None and samples > self._micro_batch:
            raise EvenstepError(
                f"es.Config(micro_batch={self._micro_batch}): rank {current.rank} cannot make a batch of {samples} samples in pieces: "
                f"{why}\n  fix: leave micro_batch out, or what hinders it"
            )
        if why:
            current.steps.micro_batch = (0, 0.0)
            self._at_once(current, batch, samples, empty)
        else:
            self._in_pieces(current, batch, samples, most, begun=False, weight_set=False)

    def _known_most(self, current: Session) -> int:
        """Samples at once that fit, by what ran out and by this rank's own limit (EVENSTEP_MEMORY_LIMIT), or that the script wants; 0:
        unknown."""
        memory = current.steps.memory
        cap = 0 if memory is None or memory.watch.cap < 0 else max(1, memory.watch.cap)
        known = [one for one in (self._most, cap, self._micro_batch or 0) if one > 0]
        return min(known, default=0)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """That are to have gradients."""
        if self._trained is None:
            every = [p for model in self._models for p in model.parameters()]
        else:
            every = [p for group in self._trained.param_groups for p in group["params"]]
        return list({id(p): p for p in every if p.requires_grad}.values())

    # -- at once --

    def _at_once(self, current: Session, batch: Any, samples: int, empty: bool) -> None:
        steps = current.steps
        done = _Done()
        steps.ran_short, steps.mends_memory = False, not empty
        try:
            loss, amount = self._loss(batch)
            self._take(current, float(loss.detach()), amount, empty, samples)
            done.forward = True
            self._scale(loss).backward(inputs=None if self._trained is None else self._parameters)
            return
        except Exception as error:
            # What went wrong in the exchange itself is for nobody to repeat.
            if not is_out_of_memory(error) or empty or (done.forward and not steps.ran_short and steps.syncs):
                raise
            why = self._why_not(current, batch, samples)
            if why:
                steps.mends_memory = False
                if done.forward and steps.syncs:
                    steps.failed_backward(error)
                raise EvenstepError(
                    f"rank {current.rank} ran out of memory in a batch of {samples} samples, and cannot make it in pieces: {why} "
                    f"({_first_line(error)})\n  fix: a smaller batch_size; es.Config(options={{'most_samples': …}}) for this rank"
                ) from error
            words = _first_line(error)
        finally:
            steps.mends_memory = False
        loss = amount = None  # type: ignore[assignment]
        self._ran_out(current, samples)
        self._in_pieces(current, batch, samples, self._most, begun=done.forward, weight_set=done.forward)
        self._tell(current, samples, words)

    def _take(self, current: Session, loss: float, amount: float | None, empty: bool, samples: int) -> None:
        self.loss = loss
        if amount is not None:
            set_weight(0.0 if empty else amount)
        self.amount = 0.0 if empty else float(samples) if amount is None else amount

    def _why_not(self, current: Session, batch: Any, samples: int) -> str:
        """In words; "" where nothing hinders."""
        if samples < 2:
            return "one sample does not fit"
        modules = (one for model in self._models for one in model.modules())
        if any(isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training for one in modules):
            return "the model has BatchNorm, whose statistics are those of a whole batch"
        if any(sync.local is not None or sync.stale is not None for sync in current.steps.syncs):
            return "es.prepare(sync=…) exchanges less often, or later"
        buffers = current.steps.buffers
        changed = buffers.names(buffers.changed()) if buffers is not None else []
        if changed:
            return f"forward changed the {changed[0]}, which cannot be undone"
        return "" if _can_be_cut(batch, samples) else "not all of its tensors have one row a sample"

    # -- in pieces --

    def _ran_out(self, current: Session, size: int) -> None:
        """So many samples at once did not fit: half of them may."""
        self._most = size // 2
        gc.collect()  # the error and its frames are gone, what they held may be in circles
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if current.steps.memory is not None:
            current.steps.memory.watch.ran_out(self._most)

    def _in_pieces(
        self, current: Session, batch: Any, samples: int, most: int, *, begun: bool, weight_set: bool
    ) -> None:
        """Of at most so many samples. begun: backward had begun, and what it has handed over stays; weight_set: the ranks know this one's weight."""
        steps = current.steps
        handed = {id(p) for sync in steps.syncs for p in sync.handed_over} if begun else set()
        parameters = [p for p in self._parameters if id(p) not in handed]
        for parameter in parameters:
            parameter.grad = None
        total = amounts = 0.0
        gives_amounts = False
        sums = _Sums(len(parameters))
        took: list[tuple[int, float]] = []
        at = 0
        while at < samples:
            size = min(most, samples - at)
            start = _core.clock_ns()
            piece = self._piece(parameters, slice_of(batch, samples, at, size), size, samples, sums)
            if piece is None:
                if size == 1:
                    raise EvenstepError(
                        f"rank {current.rank} ran out of memory with a single sample\n  fix: a smaller model, or a larger device"
                    )
                self._ran_out(current, size)
                most = self._most
                took.clear()
                continue
            took.append((size, (_core.clock_ns() - start) / 1e9))
            loss, amount, gives_amounts = piece
            counted = 1.0 if self._sums else amount
            total += counted * loss if amount else 0.0  # a loss that is a mean over nothing may be no number
            amounts += amount
            at += size
        if took and all(p.is_cpu for p in parameters):  # elsewhere a piece goes on after its call has returned
            self._times.take(most, took)
            steps.micro_batch = self._times.told
        if self._sums:
            mean = total
        else:
            mean = total / amounts if amounts else 0.0
            sums.divide(amounts / samples)
        for parameter, gradient in zip(parameters, sums.gradients):
            if gradient is not None:
                parameter.grad = gradient
        if not weight_set:
            self._take(current, mean, amounts if gives_amounts else None, False, samples)
        if steps.memory is not None:
            steps.memory.watch.came_in_pieces(most)
        if steps.syncs and begun:
            steps.resume_backward()
        elif steps.syncs:
            steps.exchange_gradients(torch.tensor(mean, dtype=torch.float64))

    def _piece(
        self, parameters: list[nn.Parameter], piece: Any, size: int, samples: int, sums: _Sums
    ) -> tuple[float, float, bool] | None:
        """Its loss, what that is a mean over, and whether train_step said so; None where it ran out of memory, and `sums` are
        as they were."""
        try:
            loss, amount = self._loss(piece)
            counted = float(size) if amount is None else amount
            # As small as in the whole batch's backward: what fits fp16 there fits here, whatever a GradScaler makes of it.
            part = 1.0 if self._sums else size / samples
            gradients = torch.autograd.grad(self._scale(loss) * part, parameters, allow_unused=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        sums.add(gradients, float(counted > 0) if self._sums else counted / size)
        return float(loss.detach()), counted, amount is not None

    def _tell(self, current: Session, samples: int, words: str) -> None:
        said = f"rank {current.rank} ran out of memory with {samples} samples, and goes on in pieces of {self._most}"
        current.telemetry.event(_core.EVENT_MEMORY, current.step, 1, said)
        sys.stderr.write(f"evenstep: warning: {said} ({words}); the step counts as it would have\n")


class _Sums:
    """Gradients of pieces, added up with what each sample of them counts. A piece that counts nothing adds zeros, whatever it gives:
    the mean over no tokens is not a number."""

    def __init__(self, parameters: int) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * parameters
        self._usual = 0.0  # the most that a sample counted in a piece so far: as a rule the same in all

    def add(self, gradients: Sequence[torch.Tensor | None], each: float) -> None:
        """each: what one of its samples counts."""
        if each > self._usual:  # nothing is made larger than it came, for fp16 may not hold it
            self._multiply(self._usual / each)
            self._usual = each
        factor = each / self._usual if each else 0.0
        seen: set[int] = set()  # of two parameters that are added up there is one gradient
        for index, gradient in enumerate(gradients):
            again = gradient is not None and id(gradient) in seen
            seen.add(id(gradient))
            before = self.gradients[index]
            if gradient is None or (before is not None and not factor):
                continue
            if not factor:
                self.gradients[index] = torch.zeros_like(gradient)
            elif before is not None:
                self.gradients[index] = before.add_(gradient, alpha=factor)
            else:
                own = not again and not gradient.is_sparse and _is_own(gradient) and factor == 1.0
                self.gradients[index] = gradient if own else gradient * factor

    def divide(self, mean: float) -> None:
        """mean: what a sample counted in all pieces together."""
        if mean and mean != self._usual:
            self._multiply(self._usual / mean)

    def _multiply(self, factor: float) -> None:
        for gradient in self.gradients:
            if gradient is not None:
                gradient.mul_(factor)


class _Done:
    forward = False


def _is_own(gradient: torch.Tensor) -> bool:
    """Whether it can be written: torch.autograd.grad may give expanded memory, or another tensor's."""
    return gradient._base is None and gradient.is_contiguous()


def _samples(batch: Any, known: int | None) -> int:
    """This rank's; of a dummy, its own."""
    if known:
        return known
    sizes: list[int] = []
    mapped(batch, lambda one: sizes.append(one.shape[0]) if one.dim() else None)
    return sizes[0] if sizes else 1


def _can_be_cut(batch: Any, samples: int) -> bool:
    rows: list[int] = []
    mapped(batch, lambda one: rows.append(one.shape[0]) if one.dim() else None)
    return bool(rows) and all(count == samples for count in rows)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
