"""`exact="bitwise"`: what es.Trainer gives to es.prepare, and a step of it.

The global batch is cut into fixed blocks. Each block's gradient is computed by itself, with random numbers of its own, so
it does not depend on who computes it; and blocks are summed along a fixed tree (include/evenstep/exact.h).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.backward import observed_backward
from evenstep.batch_norm import is_synchronised
from evenstep.engine import EngineOptions
from evenstep.exact_blocks import FORWARD, BlockShares, InBlocks, block_seed, blocks_in
from evenstep.exact_engine import ExactEngine
from evenstep.exact_lockstep import Stage
from evenstep.exact_models import check_model
from evenstep.exact_place import ExactState, check_alike, place_of
from evenstep.modes import Mode
from evenstep.order import epoch_seed
from evenstep.policies import Policy
from evenstep.random_generators import seed_generators
from evenstep.share_schedule import Schedule
from evenstep.verify_data import mapped

if TYPE_CHECKING:
    from evenstep.environment import Environment
    from evenstep.gradients import GradientSync
    from evenstep.group import Bootstrap
    from evenstep.loader import BatchPlan, EvenLoader
    from evenstep.prepare_options import DDPOptions
    from evenstep.session import Session

# batch -> (loss, what it is a mean over; None: the batch's samples)
Loss = Callable[[Any], "tuple[torch.Tensor, float | None]"]


def fix_workspace() -> None:
    """cuBLAS gives the same bits again with workspaces of a fixed size alone, which it reads when its first handle is made; torch
    refuses to multiply under deterministic algorithms without. (https://docs.nvidia.com/cuda/cublas/#results-reproducibility)"""
    if torch.version.cuda is not None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's kernels in their deterministic variants; one that has none is torch's error. cuDNN's are not chosen by their times,
    which are chance."""
    timed, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = timed
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


class Blocks:
    """What es.prepare(exact=…) is given: blocks instead of parts of any size."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], block: int) -> None:
        self.block = block
        # All of a rank's blocks at once, whether a norm trains or not: train_step may change that, on each rank otherwise.
        modules = (module for model in models for module in model.modules())
        self.side_by_side = any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in modules)
        self.place = place_of(models, optimizers)
        self.state = ExactState(self.block, self.place)

    def check(
        self,
        current: Session,
        options: EngineOptions,
        mode: Mode | None,
        ddp: DDPOptions,
        whole_norms: bool,
        seeded: bool,
    ) -> None:
        """Refuses what has other bits on other ranks, and what would be passed over; collective. seeded: samples have random
        numbers of their own."""
        wrong = ""
        if options.compression is not None:
            wrong = f"compression ({options.compression}) rounds what the ranks exchange"
        elif options.adasum or mode is not None:
            wrong = "reduction='adasum' and sync= depend on how many ranks there are"
        elif options.engine is not None:
            wrong = f"engine={options.engine!r} adds up in an order of its own"
        elif options.bucket_bytes or options.bucket_elements:
            which = "bucket_cap_mb" if options.bucket_bytes else "reduce_bucket_size"
            wrong = f"{which} is about gradients that travel in buckets; here blocks' sums do, once backward has ended"
        elif ddp.broadcast_buffers is False:
            wrong = "broadcast_buffers=False leaves each rank buffers of its own, which forward may not change here"
        elif not seeded:
            wrong = (
                "seed_samples=False (or EVENSTEP_SEED_SAMPLES=0) draws samples' random numbers by who fetches them, and here each "
                "block has its own"
            )
        elif not whole_norms:
            wrong = "batch_norm='local' depends on the shares"
        elif current.environment.plan:
            wrong = "`evenstep plan` measures shares of any size"
        elif current.steps.syncs:
            wrong = "another model of this process was prepared before, whose gradients are not summed block by block"
        elif current.name:
            wrong = f"the process set {current.name!r} trains as one with the others of the job: only all ranks can"
        if wrong:
            raise EvenstepError(f"exact='bitwise': {wrong}\n  fix: leave one of the two out")
        check_alike(current.group, self.place)

    def check_model(self, name: str, model: nn.Module, sparse: bool) -> None:
        check_model(name, model, sparse)

    def make_engine(
        self, parameters: Sequence[torch.Tensor], bootstrap: Bootstrap | None, telemetry: _core.Telemetry
    ) -> ExactEngine:
        comm = None
        if bootstrap is not None and bootstrap.environment.world_size > 1:
            comm = bootstrap.shared(0, "exact", messages=True)
            if comm is None:
                raise EvenstepError(
                    "exact='bitwise' needs shared memory, or UCX between hosts: the sums of torch's collectives have an order "
                    "of their own\n  fix: start all ranks on one host as one user; or install UCX (evenstep doctor)"
                )
        return ExactEngine(parameters, comm, telemetry)

    def shares(
        self,
        environment: Environment,
        batch: int,
        schedule: Schedule | None,
        policy: Policy | None,
        caps: Sequence[int | None],
    ) -> BlockShares:
        return BlockShares(
            policy or environment.policy,
            environment.world_size,
            batch,
            environment.speeds,
            schedule,
            self.block,
            caps if self.side_by_side else None,
            held=self.side_by_side,
        )

    def use(self, loader: EvenLoader, current: Session) -> None:
        """Its batches come in blocks (evenstep.exact_blocks.in_blocks)."""
        loader.fetch_as = InBlocks(self.block)


def _aligned(batch: Any) -> Any:
    """Kernels may treat memory that is not aligned in another way, and where a batch lies is chance."""
    found: list[torch.Tensor] = []
    mapped(batch, found.append)
    astray = any(one.is_cpu and one.layout is torch.strided and one.data_ptr() % 64 for one in found)
    return mapped(batch, torch.clone) if astray else batch


class _ModelSums:
    """What one loss sums of one model: the gradients of the parameters that it trains."""

    def __init__(self, sync: GradientSync, trained: Container[int] | None) -> None:
        """trained: ids; None: all."""
        self._sync = sync
        self._indices = [i for i, p in enumerate(sync.parameters) if trained is None or id(p) in trained]
        self.parameters = [sync.parameters[index] for index in self._indices]
        self.seen: set[int] = set()  # those that one of this rank's blocks had a gradient for

    @property
    def engine(self) -> ExactEngine:
        """Another one where a rank was lost meanwhile."""
        engine = self._sync.engine
        assert isinstance(engine, ExactEngine)
        return engine

    def add(self, amount: float, loss: float, gradients: Sequence[torch.Tensor | None]) -> None:
        """This rank's next block."""
        each: list[torch.Tensor | None] = [None] * len(self._sync.parameters)
        for index, gradient in zip(self._indices, gradients):
            each[index] = gradient
            if gradient is not None:
                self.seen.add(index)
        self.engine.add(amount, loss, each)

    def take_part(self) -> None:
        """p.grad is where the exchange writes, of those that were seen."""
        views = self.engine.views
        for index, parameter in zip(self._indices, self.parameters):
            parameter.grad = views[index] if index in self.seen else None


class BlockSteps:
    """Forward and backward of one global batch for one loss: afterwards p.grad is the whole gradient of what it trains, on every
    rank to the bit."""

    def __init__(
        self,
        current: Session,
        blocks: Blocks,
        stage: Stage,
        number: int,
        loss: Loss,
        trained: Optimizer | None,
        scale: Callable[[torch.Tensor], torch.Tensor],
        sums: bool = False,
    ) -> None:
        """number: of the loss, among those that each batch has. trained: whose parameters it trains, by the time of each batch; None:
        all. sums: losses are sums over samples."""
        self._session, self._blocks, self._sums = current, blocks, sums
        self._loss, self._scale, self._number = loss, scale, number
        self._trained = trained
        self._chosen: list[int] = []  # ids of what that had when the models were looked through
        self._models: list[_ModelSums] = []
        self._parameters: list[nn.Parameter] = []
        self._choose()
        self._norms = any(is_synchronised(module) for model in current.models.values() for module in model.modules())
        self._stage = stage
        self._losses: list[tuple[float, float]] = []  # of this rank's blocks that count: what it is a mean over, loss

    def _choose(self) -> None:
        """What it trains: groups are added to an optimizer while it runs (layers that were frozen)."""
        groups = [] if self._trained is None else self._trained.param_groups
        ids = [id(p) for group in groups for p in group["params"]]
        if self._models and ids == self._chosen:
            return
        kept = None if self._trained is None else set(ids)
        models = [_ModelSums(sync, kept) for sync in self._session.steps.syncs]
        self._models = [one for one in models if one.parameters]
        self._parameters = [p for one in self._models for p in one.parameters]
        self._chosen = ids

    def run(self, batch: list[Any], plan: BatchPlan) -> float:
        """The global batch's loss; NaN where a rank was lost, so that the batch comes again."""
        steps = self._session.steps
        self._choose()
        self._losses.clear()
        for one in self._models:
            one.seen.clear()
        # also what an earlier loss, or the script, left to parameters that this one does not train
        for sync in steps.syncs:
            for parameter in sync.parameters:
                parameter.grad = None
        try:
            if not self._void:
                self._compute_blocks(batch, plan)
                self._check_buffers()
        except BaseException as error:
            if not self._goes_on(error):
                steps.failed_backward(error)
                raise
        for one in self._models:
            if self._void:
                one.seen.clear()
            one.take_part()
        counted = sum(amount for amount, _ in self._losses)
        mean = sum(amount * loss for amount, loss in self._losses) / counted if counted else 0.0
        total = mean * counted if self._sums else mean
        steps.exchange_gradients(torch.tensor(total, dtype=torch.float64))  # for the record; the exact one comes of it
        if self._void:
            return math.nan
        done = next((one.engine for one in self._models if one.engine.weight > 0), None)
        if done is None:  # nothing of the batch counts: no gradient was written
            self._forget_gradients()
            return 0.0
        return done.loss * self._blocks_to_sum(done.weight)

    def _blocks_to_sum(self, weight: float) -> float:
        """What makes sums of the means over blocks that the engine gives, of gradients at once: the same for any split."""
        blocks = weight if self._sums else 1.0
        for parameter in self._parameters if blocks != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(blocks)
        return blocks

    @property
    def _void(self) -> bool:
        """Whether the pass under way counts nothing: what is left of it need not be computed."""
        return self._session.recovery is not None and self._session.recovery.void

    def _goes_on(self, error: BaseException) -> bool:
        """Whether it says that a rank was lost, which the blocks hear where they meet, and the others go on."""
        return self._session.recovery is not None and self._session.recovery.mends(error)

    def _compute_blocks(self, batch: list[Any], plan: BatchPlan) -> None:
        block = self._blocks.block
        counts = [blocks_in(share, block) for share in plan.shares]
        sizes = [min(block, plan.total - at) for at in range(0, plan.total, block)]
        for one in self._models:
            one.engine.begin_blocks(counts)
        try:
            with observed_backward(None):
                if self._norms:  # whether they train is train_step's affair; where none does, no block waits
                    self._side_by_side(batch, plan, sizes, counts)
                else:
                    self._one_by_one(batch, plan, sizes[sum(counts[: self._session.rank]) :])
        finally:
            torch.clear_autocast_cache()  # the optimizer writes the weights, of which a context around the loop keeps copies

    def optimizer_seed(self, plan: BatchPlan) -> None:
        """All ranks' generators alike: for optimizers that draw, and for what the script does between two steps."""
        seed_generators(self._seed(plan, plan.total))

    def _seed(self, plan: BatchPlan, block: int) -> int:
        seed = block_seed(plan.loader.seed, plan.epoch, plan.batch, block, FORWARD)
        return epoch_seed(seed, self._number) if self._number else seed

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _compute(self, part: Any, samples: int) -> tuple[torch.Tensor, float]:
        loss, amount = self._loss(_aligned(part))
        counted = float(samples if amount is None else amount)
        return loss, float(counted > 0) if self._sums else counted

    def _add(self, amount: float, loss: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        value = float(loss.detach())
        if amount > 0:  # else it may be the mean over nothing, which is no number
            self._losses.append((amount, value))
        begin = 0
        for one in self._models:
            end = begin + len(one.parameters)
            one.add(amount, value, gradients[begin:end])
            begin = end

    def _one_by_one(self, batch: list[Any], plan: BatchPlan, sizes: Sequence[int]) -> None:
        first = sum(plan.shares[: self._session.rank]) // self._blocks.block
        for number, part in enumerate(batch if plan.samples else []):
            seed_generators(self._seed(plan, first + number))
            torch.clear_autocast_cache()
            loss, amount = self._compute(part, sizes[number])
            if self._void:  # heard of in a call that the script makes there
                return
            self._forget_gradients()
            # Not what the loss goes through and does not train: a discriminator, on the way to its generator.
            self._scale(loss).backward(
                inputs=None if self._trained is None else [p for p in self._parameters if p.requires_grad]
            )
            self._add(amount, loss, [p.grad for p in self._parameters])

    def _side_by_side(self, batch: list[Any], plan: BatchPlan, sizes: Sequence[int], counts: Sequence[int]) -> None:
        first = sum(counts[: self._session.rank])

        def work(number: int, place: Session) -> None:
            samples = sizes[first + number] if plan.samples else 0
            loss, amount = self._compute(batch[number], samples)
            place.steps.weight.take(amount if plan.samples else 0.0)
            # Not backward(): the blocks share their parameters, and each has a gradient of its own.
            trained = [p for p in self._parameters if p.requires_grad]
            found = iter(torch.autograd.grad(self._scale(loss), trained, allow_unused=True))
            if plan.samples:
                self._add(amount, loss, [next(found) if p.requires_grad else None for p in self._parameters])

        seeds = [self._seed(plan, first + number) for number in range(max(1, counts[self._session.rank]))]
        self._stage.run(self._session.steps, plan, sizes, counts, seeds, work)

    def _check_buffers(self) -> None:
        buffers = self._session.steps.buffers
        changed = buffers.names(buffers.changed()) if buffers is not None else []
        if changed:
            raise EvenstepError(
                f"exact='bitwise': forward changed the buffer {changed[0]!r}, so that what a block computes depends on the "
                "blocks that its rank had before\n  fix: keep the buffer fixed in training (momentum, spectral norms and "
                "codebooks change theirs); BatchNorm's are known and stay exact"
            )
