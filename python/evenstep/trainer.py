"""es.Trainer: a training loop that is owned by Evenstep, for what a loop of the user's cannot have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep._core import EvenstepError
from evenstep.batch_adapt import AdaptBatch
from evenstep.checkpoint import load_checkpoint
from evenstep.evaluation import reduce_mean
from evenstep.exact_blocks import default_block, in_blocks
from evenstep.exact_lockstep import Stage
from evenstep.exact_models import check_not_compiled
from evenstep.exact_training import Blocks, BlockSteps, deterministic, fix_workspace
from evenstep.micro_batches import AUTO, all_want, measured
from evenstep.nonfinite import check_policy
from evenstep.order import GlobalOrder
from evenstep.parameter_checks import POLICIES as DIFFERENCE_POLICIES
from evenstep.policies import Policy
from evenstep.prepare import prepare
from evenstep.prepare_options import frequency_of
from evenstep.session import session
from evenstep.session_calls import epochs as epochs_of
from evenstep.share_schedule import ShareSchedule
from evenstep.step_in_pieces import StepInPieces

if TYPE_CHECKING:
    from evenstep.loader import EvenLoader

T = TypeVar("T")

# (model, batch) -> its loss, a mean over the batch's samples; or (loss, what it is a mean over: tokens, say)
TrainStep = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Config:
    """How an es.Trainer trains; the same on all ranks.

    exact="bitwise": the same parameters to the bit for any number of ranks, any split and any history of failures, on equal
    machines. The batch is cut into blocks of `block` samples (default: a sixteenth of the batch), each computed by itself;
    `threads` is torch.set_num_threads: the same bits need the same number everywhere. docs/exactness.md

    clip_norm, clip_value: of the whole gradient, before each step. policy, shares, skip_unreadable, adapt_batch,
    checkpoint_frequency: as es.prepare's.
    bucket: as es.prepare's, this rank's own. micro_batch: no more samples than so many run at once on this rank, its own too; a
    share that is larger runs as several forwards and backwards of one step, whose gradients are added up (not with BatchNorm).
    "auto" (on all ranks): as many as each rank is fastest with and memory holds, by trial steps of up to ten seconds in the first fit.
    options: further ones of es.prepare.

    on_nonfinite: "report", "skip" or "stop" where a loss or a gradient is not finite; None: what the launcher says
    (`evenstep run --on-nonfinite`), else "report". check_parameters: every so many steps the ranks' parameters are compared
    (None: the launcher's, else 100; 0: never); on_difference: "report" or "stop". docs/fault-tolerance.md
    """

    exact: str | None = None
    block: int | None = None
    threads: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    policy: Policy | None = None
    shares: ShareSchedule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_nonfinite: str | None = None
    check_parameters: int | None = None
    on_difference: str | None = None
    skip_unreadable: bool | None = None
    adapt_batch: AdaptBatch | None = None
    checkpoint_frequency: int | str | None = None
    bucket: int | None = None
    micro_batch: int | str | None = None

    def __post_init__(self) -> None:
        if self.exact not in (None, "bitwise"):
            raise ValueError(f"es.Config(exact={self.exact!r}): choose 'bitwise', or leave it out")
        for name in ("block", "threads", "micro_batch"):
            value = getattr(self, name)
            if value is None or (name == "micro_batch" and value == AUTO):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                instead = ", or 'auto'" if name == "micro_batch" else ""
                raise ValueError(f"es.Config({name}={value!r}): give a whole number of at least 1{instead}")
        if self.block is not None and self.exact is None:
            raise ValueError("es.Config(block=…) is of exact='bitwise'\n  fix: give both, or neither")
        for name in ("bucket", "micro_batch"):
            if self.exact is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"es.Config(exact='bitwise', {name}=…): a rank runs one block at a time, and its share is whole blocks\n"
                    f"  fix: leave {name} out, and give blocks of that size: es.Config(block=…)"
                )
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"es.Config({name}={value!r}): give a number above 0")
        if self.on_nonfinite is not None:
            check_policy(self.on_nonfinite, f"es.Config(on_nonfinite={self.on_nonfinite!r})")
        if self.on_difference not in (None, *DIFFERENCE_POLICIES):
            raise ValueError(f"es.Config(on_difference={self.on_difference!r}): choose 'report' or 'stop'")
        every = self.check_parameters
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
            raise ValueError(f"es.Config(check_parameters={every!r}): give a number of steps, or 0 for never")
        frequency_of(self.checkpoint_frequency, "es.Config")
        own = {"policy", "shares", "skip_unreadable", "adapt_batch", "bucket", "checkpoint_frequency"}
        taken = sorted(({"exact", "train", "loader", "group"} | own) & set(self.options))
        if taken:
            raise ValueError(f"es.Config(options=…): {taken[0]!r} is none of the options that can be passed on")


class Trainer:
    """Trains `model` with `optimizer` on the loss that `train_step(model, batch)` gives: a mean over the batch's samples, a
    pair (loss, amount) where it is a mean over something else (tokens), or, with options={"reduction": "sum"}, a sum over samples. It neither calls backward nor steps.

    Of several models (a GAN), `model` is a list of them, which train_step is given as it is. Of several optimizers, `optimizer` and
    `train_step` are lists as long as one another: with each batch, one after the other, each train_step's loss is computed, makes
    gradients of the parameters of its own optimizer alone, and this one steps.

    scheduler: steps after every batch's optimizer steps, or, scheduler_every="epoch", after every epoch; or a list of some. scaler: a
    torch.amp.GradScaler. on_step(trainer): called after every batch's steps; the script is then between two steps, and may log,
    evaluate or write a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        train_step: TrainStep | Sequence[TrainStep],
        *,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scheduler_every: str = "step",
        scaler: Any = None,
        on_step: Callable[[Trainer], None] | None = None,
        config: Config = Config(),
    ) -> None:
        self._models, self._optimizers = _listed(model, nn.Module), _listed(optimizer, Optimizer)
        if not self._models or not self._optimizers:
            raise TypeError(
                f"es.Trainer takes a torch.nn.Module and a torch.optim.Optimizer, or lists of them, not a {type(model).__name__} and a "
                f"{type(optimizer).__name__}"
            )
        train_steps: list[Any] = list(train_step) if isinstance(train_step, (list, tuple)) else [train_step]
        if not all(map(callable, train_steps)):
            raise TypeError("es.Trainer: train_step is called with (model, batch) and gives the loss")
        if len(train_steps) != len(self._optimizers):
            raise ValueError(
                f"es.Trainer: {len(self._optimizers)} optimizers and {len(train_steps)} train_steps: each optimizer steps on the loss of "
                "its own train_step\n  fix: two lists of one length; of several losses for one optimizer give their sum"
            )
        if scheduler_every not in ("step", "epoch"):
            raise ValueError(f"es.Trainer(scheduler_every={scheduler_every!r}): choose 'step' or 'epoch'")
        self.model, self.optimizer, self.config = model, optimizer, config
        self.losses = [math.nan for _ in train_steps]  # of the last step, over the whole global batch
        self._train_steps, self._on_step = train_steps, on_step
        one: list[Any] = [scheduler] if hasattr(scheduler, "step") else []  # it need not be torch's
        self._schedulers: list[Any] = one or list(scheduler or ())  # type: ignore[call-overload]
        self._every, self._scaler = scheduler_every, scaler
        self._weights = [0.0 for _ in train_steps]  # of this rank's losses of the last step among the others'
        if config.micro_batch == AUTO and self._several:
            raise ValueError(
                "es.Config(micro_batch='auto') tries steps of one model with one optimizer\n  fix: give micro_batch a number"
            )
        if config.micro_batch is not None and any(map(_has_batch_norm, self._models)):
            raise ValueError(
                "es.Config(micro_batch=…): the model has BatchNorm, whose statistics are those of a whole batch\n"
                "  fix: leave micro_batch out; or use LayerNorm or GroupNorm"
            )
        if config.exact is not None:
            fix_workspace()  # before anything is multiplied
        self._sums = config.options.get("reduction") == "sum"
        micro_batch = config.micro_batch if isinstance(config.micro_batch, int) else None
        self._pieces = [
            StepInPieces(self._models, loss, self._scale, micro_batch, self._sums, trained)
            for loss, trained in zip(self._losses_of, self._trained)
        ]
        self._blocks: Blocks | None = None
        self._steps: list[BlockSteps] = []  # where batches come in blocks: one a loss
        self._loaders: dict[
            int, tuple[Any, EvenLoader]
        ] = {}  # by id of the script's, which is kept so that the id is its own

    @property
    def loss(self) -> float:
        """Of the last step, over the whole global batch; of several losses their sum (`losses` has each)."""
        return sum(self.losses)

    @property
    def _several(self) -> bool:
        return len(self._models) > 1 or len(self._optimizers) > 1

    @property
    def _losses_of(self) -> list[Callable[[Any], tuple[torch.Tensor, float | None]]]:
        return [partial(self._loss_of, train_step, self.model) for train_step in self._train_steps]

    @property
    def _trained(self) -> Sequence[Optimizer | None]:
        """By each loss: this one's parameters; None: all there is."""
        return self._optimizers if self._several else [None]

    @property
    def step(self) -> int:
        """Optimizer steps done since the start of training, of several optimizers' on one batch the first's."""
        return session().step

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0."""
        return session().epoch

    def fit(
        self, loader: DataLoader[Any], epochs: int = 1, *, steps: int | None = None, resume: str | None = None
    ) -> float:
        """Trains for so many epochs; the last step's loss. Collective.

        The loader's batch_size is the global batch. steps: ends after so many steps since the start of training. resume: a
        checkpoint to go on from, instead of the launcher's (`evenstep run --resume`); not instead of what the job itself
        wrote before it was restarted.
        """
        if epochs < 0 or (steps is not None and steps < 0):
            raise ValueError(f"Trainer.fit(epochs={epochs}, steps={steps}): neither can be negative")
        if self.config.exact is not None:
            # in each fit: it may have been compiled since
            check_not_compiled(self._models, self._optimizers, self._train_steps)
        else:  # exact keeps no copies from block to block
            self._check_autocast()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        with deterministic() if self.config.exact else nullcontext():
            prepared = self._prepare(loader)
            if resume is not None and not session().at_restart:
                load_checkpoint(resume)
            self._run(prepared, epochs, steps)
        return self.loss

    def _check_autocast(self) -> None:
        kinds = sorted({p.device.type for model in self._models for p in model.parameters()})
        around = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
        if around is not None:
            raise EvenstepError(
                "Trainer.fit inside torch.autocast: its copies of the parameters live until it ends, so that every step would "
                f"use the first one's\n  fix: with torch.autocast({around!r}, …) inside train_step"
            )

    def _run(self, loader: Any, epochs: int, steps: int | None) -> None:
        for _ in epochs_of(epochs):
            for batch in loader:
                if steps is not None and self.step >= steps:
                    return
                self._one_step(batch)
                if steps is not None and self.step >= steps:
                    return
            if self._every == "epoch":
                for scheduler in self._schedulers:
                    scheduler.step()

    def _one_step(self, batch: Any) -> None:
        scaled, recovery = False, session().recovery
        for number, optimizer in enumerate(self._optimizers):
            stands = recovery is not None and recovery.passes_over  # made before a rank was lost, and its loss with it
            loss, weight = self._backward(number, batch)
            if not stands or math.isnan(self.losses[number]):
                self.losses[number], self._weights[number] = loss, weight
            # a step that stands is applied no more: not the scaler's to leave out, which would leave the next one's out
            scaled = self._update(optimizer, None if stands else self._scaler) or scaled
        if scaled:
            self._scaler.update()
        if session().redoing:
            return  # a rank was lost: the batch comes again
        for number in range(len(self.losses)) if not self._steps else ():
            self._tell_loss(number)
        if self._every == "step":
            for scheduler in self._schedulers:
                scheduler.step()
        if self._on_step is not None:
            self._on_step(self)

    def _backward(self, number: int, batch: Any) -> tuple[float, float]:
        """Of one loss; its value, and this rank's weight in that of all."""
        if self._steps:
            plan = session().latest
            assert plan is not None
            loss = self._steps[number].run(batch, plan)
            self._steps[number].optimizer_seed(plan)
            return loss, 0.0
        pieces = self._pieces[number]
        pieces.run(session(), batch)
        return pieces.loss, pieces.amount

    def _tell_loss(self, number: int) -> None:
        """The mean over all ranks, but where they train on their own (es.LocalSGD, es.DiLoCo)."""
        current, loss, weight = session(), self.losses[number], self._weights[number]
        if current.world_size == 1 or any(sync.local is not None for sync in current.steps.syncs):
            return
        if self._scaler is None and not self._several and not math.isnan(current.loss):
            self.losses[number] = current.loss
        elif self._sums:
            self.losses[number] = current.world_size * float(reduce_mean(loss if weight > 0 else 0.0, 1.0))
        else:  # a scaled loss was told, of several the first's; of a step that the scaler skips, none
            mean, weighed = reduce_mean(torch.tensor([loss, 1.0], dtype=torch.float64), weight).tolist()
            nothing = math.isnan(weighed)  # of the batch counted, as without a scaler
            self.losses[number] = 0.0 if nothing else mean

    def _update(self, optimizer: Optimizer, scaler: Any) -> bool:
        """Whether the scaler has stepped."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clipped = self.config.clip_norm is not None or self.config.clip_value is not None
        scaler = scaler if any(p.grad is not None for p in parameters) else None  # it wants some gradient
        if scaler is not None and self._steps:
            scaler.scale(
                parameters[0].new_zeros(())
            )  # a rank without blocks has scaled nothing yet, and the scaler wants that
        if clipped and scaler is not None:
            scaler.unscale_(optimizer)
        if self.config.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.config.clip_value)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
        return scaler is not None

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _loss_of(self, train_step: TrainStep, model: Any, batch: Any) -> tuple[torch.Tensor, float | None]:
        given = train_step(model, batch)
        loss, amount = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = type(loss).__name__ if not isinstance(loss, torch.Tensor) else f"tensor of {loss.numel()} elements"
            raise TypeError(
                f"train_step gave a {what}\n  fix: return the loss, a tensor of one element, or (loss, what it is a mean over)"
            )
        if amount is not None and not 0 <= float(amount) < math.inf:
            raise ValueError(
                f"train_step gave {float(amount):g} as what its loss is a mean over\n  fix: give a number >= 0 beside the loss (of tokens, say), or "
                "the loss alone"
            )
        return loss, None if amount is None else float(amount)

    # -- es.prepare --

    def _prepare(self, loader: DataLoader[Any]) -> Any:
        known = self._loaders.get(id(loader))
        if known is not None:
            return known[1]
        first = not self._loaders
        objects: list[Any] = [*self._models, *self._optimizers, *self._schedulers] if first else []
        objects += [self._scaler] if first and self._scaler is not None else []
        every = {"workers", "most_samples"}  # are about loaders, the others about the model
        options: dict[str, Any] = {key: one for key, one in self.config.options.items() if first or key in every}
        given = loader
        if self.config.exact is not None:
            if first:
                block = self.config.block or default_block(_batch_of(loader))
                self._blocks = Blocks(self._models, self._optimizers, block)
                objects.append(self._blocks.state)
            assert self._blocks is not None
            if options.get("most_samples") is not None and not self._blocks.side_by_side:
                raise ValueError(
                    "es.Config(exact='bitwise', options={'most_samples': …}): without BatchNorm a rank holds one block at a time, "
                    "however many are its share\n  fix: leave most_samples out, and where a block does not fit give a smaller one: "
                    "es.Config(block=…)"
                )
            given = in_blocks(loader, self._blocks.block)
            options["exact"] = self._blocks
        if self.config.on_nonfinite is not None:
            session().nonfinite.policy = self.config.on_nonfinite
        if self.config.check_parameters is not None:
            session().parameter_checks.every = self.config.check_parameters
        if self.config.on_difference is not None:
            session().parameter_checks.policy = self.config.on_difference
        prepared = prepare(
            *objects,
            loader=given,
            policy=self.config.policy,
            shares=self.config.shares,
            skip_unreadable=self.config.skip_unreadable,
            adapt_batch=self.config.adapt_batch,
            checkpoint_frequency=self.config.checkpoint_frequency,
            bucket=self.config.bucket,
            **options,
        )
        even: Any = prepared[-1] if isinstance(prepared, tuple) else prepared
        if first and self._blocks is not None:
            self._make_steps(self._blocks)
        plain = self._blocks is None and not self._several and not _has_batch_norm(self._models[0])
        if plain and getattr(even, "shares", None) is not None:
            even.shares.let_come_in_pieces()
        if first and self._blocks is None:
            self._measure_micro_batch(loader, even)
        self._loaders[id(loader)] = (loader, even)
        return even

    def _make_steps(self, blocks: Blocks) -> None:
        stage = Stage()
        for number, (loss, trained) in enumerate(zip(self._losses_of, self._trained)):
            self._steps.append(BlockSteps(session(), blocks, stage, number, loss, trained, self._scale, self._sums))

    def _measure_micro_batch(self, loader: DataLoader[Any], even: EvenLoader) -> None:
        current = session()
        if not all_want(current, self.config.micro_batch == AUTO) or current.joining:
            return  # the others train meanwhile: neither its time nor its memory are what they will be

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return self._loss_of(self._train_steps[0], model, batch)[0]

        most = getattr(even, "batch_size", None)
        self._pieces[0].prefer(measured(current, self._models[0], self._optimizers[0], loader, loss, most))


def _listed(given: T | Sequence[T], kind: type[T]) -> list[T]:
    """One, or a list of them; none where it is neither."""
    found = [given] if isinstance(given, kind) else list(given) if isinstance(given, (list, tuple)) else []
    return found if all(isinstance(one, kind) for one in found) else []


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules())


def _batch_of(loader: DataLoader[Any]) -> int:
    size = GlobalOrder(loader, session().world_size).batch_size
    if size is None:
        raise EvenstepError(
            "es.Config(exact='bitwise'): the loader's batch sampler has no batch_size, so it is not known how large a block is\n"
            "  fix: es.Config(exact='bitwise', block=…)"
        )
    return size
