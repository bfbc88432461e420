"""What es.prepare makes of a DataLoader: an EvenLoader, and for training its shares, its caps and its adapted batch."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from evenstep._core import EvenstepError, clock_ns
from evenstep.agreement import check_same, check_same_loader
from evenstep.batch_adapt import AdaptBatch
from evenstep.batch_adapting import adapt_batches
from evenstep.caps import after_shortage
from evenstep.engine import SharedEngine
from evenstep.group import broadcast_bytes, gather_objects
from evenstep.kept_memory import begin_where_asked
from evenstep.left_out import Exchange
from evenstep.loader import EvenLoader
from evenstep.memory import MemoryWatch, RanksMemory, memory_of
from evenstep.plan_start import start_from_plan
from evenstep.policies import Policy
from evenstep.sample_cache import share_caches
from evenstep.session import Session
from evenstep.share_schedule import Schedule, ShareSchedule
from evenstep.shares import Shares, crowded

if TYPE_CHECKING:
    from evenstep.exact_training import Blocks
    from evenstep.gradients import GradientSync


_MEASURED = 4  # sums, of which the shortest counts: others may have been held up
_MOST_MEASURED = 16 << 20  # bytes of one
_SEEDS = 0x7FFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # epochs are added to seeds: others lie far away


class LoaderOptions(NamedTuple):
    """What a call of es.prepare says of its loaders, see there."""

    train: bool
    shares: ShareSchedule | None
    policy: Policy | None
    most_samples: int | None  # of this rank
    bucket: int | None
    skip_unreadable: bool
    seed_samples: bool
    adapt: AdaptBatch | None
    workers: str | None  # "auto", "off": how their number is chosen


def prepare_loader(
    current: Session, loader: DataLoader[Any], options: LoaderOptions, exact: Blocks | None
) -> EvenLoader:
    """Collective."""
    environment = current.environment
    train, policy, adapt = options.train, options.policy, options.adapt
    schedule = None if options.shares is None else Schedule(options.shares, current.place[1], current.places)
    seed = environment.seed
    if seed is None:
        seed = loader.generator.initial_seed() if loader.generator is not None else torch.initial_seed()
    if train:
        seed = _another_order(current, loader, seed)
    seed = int(broadcast_bytes(current.group, str(seed & _SEEDS).encode()))
    check_same_loader(current.group, loader, options.seed_samples)
    share_caches(current, loader.dataset)
    number = (1 + len(current.loaders) if train else 0) if options.seed_samples else None
    even = EvenLoader(
        current,
        loader,
        train=train,
        shares=None,
        seed=seed,
        skip_unreadable=options.skip_unreadable,
        number=number,
    )
    batch = even.first_batch_size()
    if train and exact is None and even.batch_size is not None and even.batch_size < current.world_size:
        _say_crowded(current, *crowded(even.batch_size, current.world_size))
    if train:
        workers, use_plan = options.workers or "", environment.use_plan
        mine = (options.most_samples, options.bucket, environment.memory_cap, workers, use_plan)
        everybody = gather_objects(current.group, mine)
        check_same(  # where some ranks look at what their loading takes, all must
            [one[3] for one in everybody],
            "otherwise than rank 0 how the training loader's workers are chosen",
            "set EVENSTEP_WORKERS, and give es.prepare workers",
        )
        caps, buckets = [one[0] for one in everybody], [one[1] for one in everybody]
        _check_one_adapted(current, adapt)
        if adapt is not None and not current.planning:
            even.adapting = adapt_batches(current, even, adapt)
            batch = even.adapting.fit(caps)
        # Of blocks a rank may hold one at a time; and a schedule of the script's says it all.
        limited = schedule is None and (exact is None or exact.side_by_side)
        if limited:
            alike = partial(Shares, policy or environment.policy, current.world_size, batch, environment.speeds)
            told = [None if current.joining else one[2] for one in everybody]  # who joins is alone yet
            given = caps

            def begins() -> list[int]:
                if exact is not None:
                    return exact.shares(environment, batch, None, policy, given).draw(batch)
                return alike(caps=given, buckets=buckets).draw(batch)

            adapted, block = even.adapting is not None, 1 if exact is None else exact.block
            caps, why_not_less = after_shortage(given, told, begins, batch, adapted, block)
            if why_not_less and current.rank == 0:
                sys.stderr.write(f"evenstep: {why_not_less}\n")
        if even.adapting is not None:
            batch = even.adapting.fit(caps)
        if not any(known.train for known in current.loaders.values()):
            current.plan = _plan(current, batch, caps, buckets)
        _watch_memory(current, adapt)
        even.set_shares(
            _same_shares(current, batch, schedule, policy, caps, buckets)
            or (
                exact.shares(environment, batch, schedule, policy, [None] if current.joining else caps)
                if exact is not None
                else None
            )
            or Shares(
                policy or environment.policy,
                current.world_size,
                batch,
                environment.speeds,
                schedule,
                current.plan,
                [None] if current.joining else caps,  # alone it need not hold the whole batch
                buckets,
            )
        )
        if even.shares is not None and not current.name:
            start_from_plan(current, even.shares, everybody[0][4])
        if limited and even.shares is not None and even.shares.given_caps == caps:
            even.shares.said_caps = given
        if current.joining and even.shares is not None:
            even.shares.given_caps = even.shares.said_caps = caps
        if exact is not None:
            too_few = even.shares.crowded() if even.shares is not None else None
            if too_few is not None and current.rank == 0:
                sys.stderr.write(f"evenstep: warning: {too_few[0]}\n  fix: {too_few[1]}\n")
            exact.use(even, current)
        if even.adapting is not None and even.shares is not None:
            even.shares.let_shrink()
        if not current.loaders and even.shares is not None:
            said = even.shares.left_out_at_start(current.devices, current.hosts, lambda: _exchange(current))
            for line in said.splitlines() if current.rank == 0 else ():
                sys.stderr.write(f"evenstep: {line}\n")
        current.loaders["loader" if not current.loaders else f"loader_{len(current.loaders)}"] = even
    else:
        trained = next((known for known in current.loaders.values() if known.train), None)
        even.set_shares(
            trained.shares
            if trained is not None
            else Shares(environment.policy, current.world_size, batch, environment.speeds)
        )
    if even.unwrapped and current.rank == 0:
        warnings.warn(
            f"es.prepare took the DistributedSampler away: its batch_size times {current.world_size} ranks, {batch}, "
            "is now the global batch, and each rank gets the share that it can finish in the same time",
            stacklevel=3,
        )
    return even


def _exchange(current: Session) -> Exchange | None:
    """Of a step's gradients: what a sum of as many bytes takes between the ranks' memory; None where they go another way. Collective."""
    size = sum(p.numel() * p.element_size() for sync in current.steps.syncs for p in sync.parameters)
    if size == 0 or current.joining:  # who joins is alone yet
        return None
    if not all(gather_objects(current.group, all(map(_is_a_plain_sum, current.steps.syncs)))):
        return None
    values = torch.zeros(-(-min(size, _MOST_MEASURED) // 4))
    took = []
    for _ in range(_MEASURED):
        current.group.barrier()
        begun = clock_ns()
        current.group.sum_(values)
        took.append(clock_ns() - begun)
    return Exchange(size, min(took) / 1e9 * max(1.0, size / _MOST_MEASURED))


def _is_a_plain_sum(sync: GradientSync) -> bool:
    """Whether the exchange of its gradients is no more, and begins and ends in this rank's memory on the CPU."""
    plain = type(sync.engine) is SharedEngine and not sync.compression and sync.local is None and sync.stale is None
    return plain and all(parameter.is_cpu for parameter in sync.parameters)


def _another_order(current: Session, loader: DataLoader[Any], seed: int) -> int:
    """The seed of a loader that draws on from a generator which loaders before it have drawn from, as one made anew in each epoch
    does: torch's would give it another order, too. A generator of its own, seeded as another, gives the same."""
    known = [one.loader.generator for one in current.loaders.values() if one.train]
    seed += sum(one is loader.generator for one in known) * _GOLDEN
    if current.environment.seed is not None and loader.generator is not None:  # it stands for all generators' seeds
        seeds = dict.fromkeys(one.initial_seed() for one in known if one is not None)
        seed += [*seeds, loader.generator.initial_seed()].index(loader.generator.initial_seed()) * _GOLDEN**2
    return seed


def _say_crowded(current: Session, words: str, fix: str) -> None:
    """Refused where a job begins so. Where others have come to one that trains, it goes on, and some of its ranks have nothing to do."""
    if not (current.environment.restart > 0 and current.environment.resume):
        raise ValueError(f"{words}\n  fix: {fix}")
    if current.rank == 0:
        sys.stderr.write(f"evenstep: warning: {words}\n")


def _check_one_adapted(current: Session, adapt: AdaptBatch | None) -> None:
    known = [one for one in current.loaders.values() if one.train]
    if known and (adapt is not None or any(one.adapting is not None for one in known)):
        raise ValueError(
            "a global batch is adapted where there is one training loader alone, and this is another one: a step over several has "
            "batches of one size\n  fix: leave adapt_batch (--batch-adapt) out"
        )


def _watch_memory(current: Session, adapt: AdaptBatch | None) -> None:
    """From the first training loader on; where there are other ranks that samples could go to, or batches may be smaller."""
    alone = current.world_size == 1 and current.recovery is None and adapt is None
    if current.steps.memory is not None or alone:
        return
    parameters = (p for sync in current.steps.syncs for p in sync.parameters)
    device = next((p.device for p in parameters), None)
    if not current.planning:
        begin_where_asked(current.environment, "" if device is None else device.type)
    watch = MemoryWatch(memory_of(device or torch.device("cpu")), current.environment.memory_limit)
    pools = gather_objects(current.group, watch.pool)
    current.steps.memory = RanksMemory(watch, pools, current.rank)


def _same_shares(
    current: Session,
    batch: int,
    schedule: Schedule | None,
    policy: Policy | None,
    caps: list[int | None],
    buckets: list[int | None],
) -> Shares | None:
    """Those of another training loader with batches of this size: a backward over both has one weight."""
    if schedule is not None or current.plan is not None:
        return None
    known = (one.shares for one in current.loaders.values() if one.train and one.shares is not None)
    return next(
        (
            shares
            for shares in known
            if shares.batch == batch
            and not shares.scheduled
            and (policy is None or shares.policy == policy)
            and (shares.given_caps == caps or not any(cap is not None for cap in caps))
            and (shares.given_buckets == buckets or not any(buckets))
        ),
        None,
    )


def _plan(current: Session, batch: int, caps: list[int | None], buckets: list[int | None]) -> Any:
    if not current.environment.plan:
        return None
    if current.name:
        raise EvenstepError(
            f"`evenstep plan` measures a training of all ranks, and this one is of the process set {current.name!r}\n"
            "  fix: plan for a script that trains this set's model with as many ranks as it has"
        )
    from evenstep.plan import Plan

    device = current.environment.device or "cpu"
    return Plan.from_environment(
        rank=current.rank,
        world_size=current.world_size,
        batch=batch,
        device=device,
        speeds=current.environment.speeds,
        caps=caps,
        buckets=buckets,
    )
