"""es.prepare: takes what a training loop has and makes it train on all ranks of the job, each with its share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from evenstep._core import EvenstepError
from evenstep.agreement import (
    broadcast_model,
    broadcast_optimizer,
    check_same,
    check_same_model,
    check_same_optimizer,
)
from evenstep.backward import observe_backward
from evenstep.batch_adapt import AdaptBatch
from evenstep.batch_adapting import adapt_asked, check_adapt
from evenstep.buffers import BufferSync
from evenstep.chaos import spoil_when_asked
from evenstep.copied_values import CopiedValues
from evenstep.device_places import kinds_of, place_of
from evenstep.embeddings import check_embeddings
from evenstep.engine import Engine, EngineOptions
from evenstep.engine_choice import choose_engine
from evenstep.generation_limits import why_not
from evenstep.gradients import GradientSync
from evenstep.group import gather_objects
from evenstep.late_votes import open_late_votes
from evenstep.loader import EvenLoader, check_loader
from evenstep.local_training import LocalTraining
from evenstep.modes import Mode, Stale
from evenstep.nonfinite import agreed_ways
from evenstep.passes import passes
from evenstep.policies import Policy, check_policy
from evenstep.prepare_again import prepare_together
from evenstep.prepare_loader import LoaderOptions, prepare_loader
from evenstep.prepare_options import (
    DDPOptions,
    check_bucket,
    check_mode,
    check_most_samples,
    check_scalers,
    check_seed_samples,
    check_skip_unreadable,
    engine_options,
    synchronises_batch_norm,
    use_frequency,
)
from evenstep.process_sets import ProcessSet, process_set_of
from evenstep.session import Session, session, sessions
from evenstep.share_schedule import ShareSchedule
from evenstep.shared_states import check_sharding, shards, share_states
from evenstep.sparse import sparse_parameters
from evenstep.stale import StaleRounds
from evenstep.used_parameters import trained_parameters

if TYPE_CHECKING:
    from evenstep.exact_training import Blocks


def prepare(
    *objects: Any,
    loader: DataLoader[Any] | None = None,
    train: bool = True,
    shares: ShareSchedule | None = None,
    policy: Policy | None = None,
    most_samples: int | None = None,
    bucket: int | None = None,
    engine: str | None = None,
    compression: str | None = None,
    reduction: str = "mean",
    bucket_cap_mb: float | None = None,
    reduce_bucket_size: float | None = None,
    sync: Mode | None = None,
    find_unused_parameters: bool | None = None,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    broadcast_buffers: bool | None = None,
    batch_norm: str | None = None,
    workers: str | None = None,
    skip_unreadable: bool | None = None,
    seed_samples: bool | None = None,
    adapt_batch: AdaptBatch | None = None,
    checkpoint_frequency: int | str | None = None,
    group: ProcessSet | Any = None,
    exact: Blocks | None = None,
) -> Any:
    """Prepares models, optimizers, DataLoaders, learning-rate schedulers, and what else has a state; returns them in the
    order given.

    Models, optimizers and schedulers come back as the same objects. So does anything else that has state_dict() and
    load_state_dict() (torch.amp.GradScaler, an average of the weights, a counter of yours): checkpoints keep its state,
    that of rank 0, and every rank gets it back. A loader comes back as an `EvenLoader`: its
    batch_size is the global batch, of which each rank gets a share that follows its speed. Outside a job (plain
    `python script.py`) everything comes back unchanged.

    train=False: the loaders of this call serve evaluation, split without padding or repeats.
    shares: a schedule instead of the balancer for this call's training loaders, for tests and experiments:
    shares(number, samples) of a batch, by its number in the training, gives one share a rank. policy: "auto", "equal",
    "proportional", "dynamic", "hybrid" or a function of a PolicyView (docs/balancing.md), instead of the launcher's.
    most_samples: no share of this rank is larger, for its memory holds no more (each rank says its own; None: learned from
    measured peaks alone, docs/balancing.md#memory). bucket: this rank's device takes as long for fewer samples as for the next
    multiple of so many (tiles of 8, say), and gets whole multiples as far as the batch allows (each rank says its own).
    engine="torch": torch's collectives instead of
    shared memory; "shared": an error where shared memory cannot be had.

    compression: "fp16", "bf16", "int8", "onebit", "topk:0.01" or "powersgd:4": gradients travel as fewer bytes, and are
    no longer exact (docs/compression.md); None: what EVENSTEP_COMPRESSION says, else none; "none". reduction: what
    losses are over samples: "mean", or "sum" as of a VAE (one for the models of a call; docs/python-api.md#losses-that-are-sums);
    "adasum": Adasum instead of the weighted mean. bucket_cap_mb: how many MiB of gradients are exchanged at once, instead of a
    size chosen by measurement (docs/communication.md); reduce_bucket_size: the same in elements, as in DeepSpeed. sync:
    es.LocalSGD(every=8), es.DiLoCo(every=32) or es.Stale(steps=1): ranks that exchange less often, or later
    (docs/asynchronous.md).

    As in DistributedDataParallel: find_unused_parameters needs not be asked for; False makes a parameter that has no
    gradient on any rank an error. static_graph=True makes it an error when other parameters have gradients than in the
    first pass. gradient_as_bucket_view=False: p.grad is memory of its own. broadcast_buffers=True: rank 0's instead of the
    average; False: each rank keeps its own.

    batch_norm: "sync" (the default where all ranks train as one): BatchNorm's statistics in training are those of the whole
    global batch, as on one device; "local": each rank's own, as in DistributedDataParallel. All of these hold for the models
    of this call.

    workers="auto": training loaders without num_workers get them where loading is slow and steps become shorter so, each rank
    as many as its measured steps need, of a stream one (docs/python-api.md). "off": none, and nothing is said of it. None:
    what EVENSTEP_WORKERS says, else none, and a line on stderr where they would help.

    skip_unreadable=True: samples of training loaders whose data set raises an exception are left out, and the average is over
    the others; each is an event of the history, with its index. None: what EVENSTEP_SKIP_UNREADABLE says, else an error.

    seed_samples: each sample of a map-style data set is fetched with random numbers of its own, by seed, epoch and its place in the
    order, the same on any ranks and workers (docs/python-api.md#random-numbers-of-samples). False: those of whoever fetches it, as
    in torch; None: what EVENSTEP_SEED_SAMPLES says, else True.

    adapt_batch: es.AdaptBatch(most=1024, lr_rule="sqrt"): the global batch follows the noise of the gradients, between bounds
    (docs/balancing.md#adapting-the-global-batch); None: what EVENSTEP_BATCH_ADAPT says, else it stays what the loader says.

    checkpoint_frequency: an automatic checkpoint every so many steps (100) or seconds ("30s"); 0: none; None: what the launcher
    says (--checkpoint-every), else none. The same on all ranks; in a job (docs/checkpoints.md).

    group: an es.ProcessSet, whose ranks alone make this call and train what is given, or a process group of torch (one of a
    device mesh, say), of which a set is made: every rank of the job then makes the call, each with its own group.

    exact: es.Trainer's own: a loop of the script's cannot be exact to the bit.
    """
    if isinstance(exact, str):
        raise ValueError(
            f"es.prepare(exact={exact!r}): only a loop that computes the batch block by block can be exact to the bit\n"
            "  fix: es.Trainer(model, optimizer, train_step, config=es.Config(exact='bitwise')).fit(loader)"
        )
    with nullcontext() if group is None else process_set_of(group):
        given = [*objects, *([] if loader is None else [loader])]
        if not given:
            raise TypeError("es.prepare() needs something to prepare: a model, an optimizer, a DataLoader, a scheduler")
        if shares is not None and not callable(shares):
            raise TypeError(
                f"es.prepare(shares={shares!r}): give a function of the batch's number and its samples\n"
                "  fix: shares=lambda number, batch: [one a rank, all of batch together]"
            )
        if shares is not None and not (train and any(isinstance(one, DataLoader) for one in given)):
            raise ValueError(
                "es.prepare(shares=…) says how training batches are split, but this call has "
                f"{'no DataLoader' if train else 'train=False'}\n  fix: leave shares out, or give it with the training loader"
            )
        if workers not in (None, "auto", "off"):
            raise ValueError(
                f"es.prepare(workers={workers!r}): give 'auto' or 'off', or set num_workers of the DataLoader"
            )
        check_most_samples(most_samples, train and any(isinstance(one, DataLoader) for one in given), shares)
        check_bucket(bucket, train and any(isinstance(one, DataLoader) for one in given), shares, exact is not None)
        check_policy(policy)
        skips = skip_unreadable if skip_unreadable is not None else session().environment.skip_unreadable
        check_skip_unreadable(skip_unreadable, skips and train, given, exact is not None)
        seeded = check_seed_samples(seed_samples, session().environment)
        if policy is not None and shares is not None:
            raise ValueError(
                "es.prepare(shares=…, policy=…): both say how training batches are split\n  fix: leave one out"
            )
        current = session()
        use_frequency(current, checkpoint_frequency)
        trained = [one for one in given if isinstance(one, nn.Module)]
        sizes = bucket_cap_mb, reduce_bucket_size, trained
        options = engine_options(current.environment, engine, compression, reduction, *sizes)
        options = replace(options, static_graph=static_graph)
        ddp = DDPOptions(find_unused_parameters, static_graph, gradient_as_bucket_view, broadcast_buffers)
        check_mode(sync, options, ddp)
        adapt = adapt_asked(current, adapt_batch, train and any(isinstance(one, DataLoader) for one in given))
        if adapt is not None:
            sharded = any(known.leaves_parts for known in current.steps.syncs)
            check_adapt(options, sync, exact is not None, sharded)
        whole_norms = synchronises_batch_norm(batch_norm, sync, options)
        stale = isinstance(sync, Stale) or any(known.stale for known in current.steps.syncs)
        check_scalers(stale, [*current.objects.values(), *given])
        _check_arguments(current, given)
        models = _register(current.models, "model", [g for g in given if isinstance(g, nn.Module)])
        optimizers = _register(current.optimizers, "optimizer", [g for g in given if isinstance(g, Optimizer)])
        schedulers = _register(current.schedulers, "scheduler", [g for g in given if isinstance(g, LRScheduler)])
        _register(current.objects, "object", [g for g in given if not isinstance(g, _KNOWN)])
        for optimizer in optimizers.values():
            current.optimizer_steps.watch(optimizer)
        sized = workers or current.environment.workers
        of_loaders = LoaderOptions(train, shares, policy, most_samples, bucket, skips and train, seeded, adapt, sized)
        results: dict[int, Any] = {}
        if current.in_job or exact is not None:
            current.join()
            if exact is not None and models:
                exact.check(current, options, sync, ddp, whole_norms, seeded)
            if shards(current, models, optimizers):
                check_sharding(current, models, optimizers, options, ddp, sync, adapt is not None, exact is not None)
                options = replace(options, unsummed=True, engine="shared")

            def together() -> None:
                _prepare_models(current, models, optimizers, options, sync, ddp, whole_norms, exact)
                for one in given:
                    if isinstance(one, DataLoader):
                        results[id(one)] = even = prepare_loader(current, one, of_loaders, exact)
                        if train and sized != "off":
                            even.size_workers(asked=sized == "auto")

            special = {"exact": exact, f"sync={sync!r}": sync, "adapt_batch": adapt}
            words = ", ".join(name for name, one in special.items() if one is not None)
            prepare_together(current, together, given, options, words)
            for name, scheduler in schedulers.items():
                current.scheduler_steps.watch(name, scheduler)
            if models:
                observe_backward(passes)
                spoil_when_asked(p for model in models.values() for _, p in trained_parameters(model))
            asked = current.environment
            if current.rank == 0 and (asked.checkpoint_steps or asked.checkpoint_seconds or asked.memory_steps):
                from evenstep.checkpoint import expect_automatic

                expect_automatic(current)
            if current.recovery is not None:
                current.recovery.say(why_not(current))
                _take_place(current)
        if current.environment.resume or current.restarted_set or current.resume is not None:
            _resume(current)
        returned = tuple(results.get(id(one), one) for one in given)
        return returned[0] if len(returned) == 1 else returned


def _take_place(current: Session) -> None:
    """A process that takes a lost rank's place goes on from a living one's state, as it would from a checkpoint."""
    assert current.recovery is not None
    gift = current.recovery.take_place()
    if gift is not None:
        from evenstep.checkpoint import Resume

        current.resumed = True
        current.resume = Resume(current, gift)
        current.checkpointed, current.in_memory = current.recovery.done  # what comes next is due for all at once


def _resume(current: Session) -> None:
    if not current.in_job:
        raise EvenstepError(
            "EVENSTEP_RESUME is set, but this process is no rank of a job, so its data position cannot be put back\n"
            "  fix: start it with `evenstep run --resume PATH`, or call es.load_checkpoint(PATH)"
        )
    if not current.resumed:
        from evenstep.checkpoint import resume_of

        current.resumed = True
        current.resume = resume_of(current)
    if current.resume is not None:
        current.resume.take()


def _register(registry: dict[str, Any], kind: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Names them: "model", "model_1", …"""
    added: dict[str, Any] = {}
    for one in objects:
        name = kind if not registry else f"{kind}_{len(registry)}"
        registry[name] = added[name] = one
    return added


_KNOWN = (nn.Module, Optimizer, DataLoader, LRScheduler)


def _has_state(one: Any) -> bool:
    """Whether it is kept for its state alone. Not what looks like a loader or an optimizer that is none of torch's: each
    rank would go its own way with it, and nothing would say so."""
    methods = (getattr(one, name, None) for name in ("state_dict", "load_state_dict"))
    return (
        not isinstance(one, type)
        and all(callable(method) for method in methods)
        and not any(hasattr(one, name) for name in ("__iter__", "param_groups"))
    )


def _instead_of(one: Any) -> str:
    """What to give, where this is nothing for es.prepare."""
    held = next((name for name, value in getattr(one, "__dict__", {}).items() if isinstance(value, DataLoader)), None)
    if held is not None:
        name = type(one).__name__
        return f"prepare the DataLoader that it holds, before it is iterated over: in {name}, self.{held} = es.prepare(self.{held})"
    if isinstance(one, _BaseDataLoaderIter):
        return "give the DataLoader itself, and make the iterator of what es.prepare returns"
    return "give model.parameters()'s model" if hasattr(one, "__next__") else "leave it out"


def _check_arguments(current: Session, given: Sequence[Any]) -> None:
    seen: set[int] = set()
    for position, one in enumerate(given, 1):
        what = f"argument {position} of es.prepare"
        if isinstance(one, (DataParallel, DistributedDataParallel)):
            raise TypeError(
                f"{what} is wrapped in {type(one).__name__}; es.prepare does its work\n  fix: give the model itself"
            )
        if isinstance(one, EvenLoader) or id(one) in seen:
            raise EvenstepError(f"{what} ({type(one).__name__}) was prepared before\n  fix: prepare each object once")
        if not isinstance(one, _KNOWN) and not _has_state(one):
            raise TypeError(
                f"{what} is a {type(one).__module__}.{type(one).__qualname__}; es.prepare takes torch.nn.Module, "
                "torch.optim.Optimizer, torch.utils.data.DataLoader, learning-rate schedulers, and what has state_dict() "
                f"and load_state_dict() and is neither an optimizer nor iterable\n  fix: {_instead_of(one)}"
            )
        seen.add(id(one))
        if any(one is known for each in sessions() for known in each.prepared()):
            raise EvenstepError(f"{what} ({type(one).__name__}) was prepared before\n  fix: prepare each object once")
        if isinstance(one, nn.Module) and not any(True for _ in one.parameters()):
            raise EvenstepError(
                f"{what}, a {type(one).__name__}, has no parameters, so there is nothing to train\n"
                "  fix: give the module that holds the parameters, after its layers exist (lazy ones: run it once)"
            )
        if isinstance(one, nn.Module):
            _check_values(what, one)
        if isinstance(one, DataLoader):
            check_loader(one)
    models = [*current.models.values(), *(g for g in given if isinstance(g, nn.Module))]
    _check_no_other_training(current, models)
    known = {id(p) for model in models for p in model.parameters()}
    for position, one in enumerate(given, 1):
        if isinstance(one, Optimizer):
            for group, options in enumerate(one.param_groups):
                strangers = sum(1 for p in options["params"] if id(p) not in known)
                if strangers:
                    raise EvenstepError(
                        f"argument {position} of es.prepare: parameter group {group} of the {type(one).__name__} has "
                        f"{strangers} parameters that belong to no prepared model, so their gradients would differ "
                        "between ranks\n  fix: give every model that the optimizer trains to es.prepare; move models "
                        "to their device before building the optimizer"
                    )


def _check_no_other_training(current: Session, models: Sequence[nn.Module]) -> None:
    """A parameter has one set of ranks that all have it alike."""
    mine = {id(p): name for model in models for name, p in model.named_parameters()}
    for other in sessions():
        shared = [id(p) for sync in other.steps.syncs for p in sync.parameters if id(p) in mine]
        if other is not current and shared:
            whose = f"the process set {other.name!r}" if other.name else "all ranks of the job"
            raise EvenstepError(
                f"es.prepare: parameter {mine[shared[0]]!r} is trained by {whose} already\n"
                "  fix: give each parameter to one process set, in a module of its own"
            )


def _check_values(what: str, model: nn.Module) -> None:
    """Rank 0's values are sent to all ranks: there must be some."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise EvenstepError(
                f"{what}, a {type(model).__name__}: its {name!r} is lazy and has no shape yet\n"
                "  fix: run the model once on one sample before es.prepare (and before building the optimizer)"
            )
        if tensor.is_meta:
            raise EvenstepError(
                f"{what}, a {type(model).__name__}: its {name!r} is on the meta device and has no values\n"
                "  fix: model.to_empty(device=…) and set the values (load_state_dict, or the layers' reset_parameters) "
                "before es.prepare"
            )


def _prepare_models(
    current: Session,
    models: dict[str, nn.Module],
    optimizers: dict[str, Optimizer],
    options: EngineOptions,
    mode: Mode | None,
    ddp: DDPOptions,
    whole_norms: bool,
    exact: Blocks | None,
) -> None:
    group, bootstrap = current.group, current.bootstrap
    told = gather_objects(group, (len(models), len(optimizers), (options, mode, ddp, whole_norms)))
    counts = [one[:2] for one in told]
    if len(set(counts)) > 1:
        raise EvenstepError(
            f"the ranks gave es.prepare different numbers of models and optimizers: {counts}\n"
            "  fix: call es.prepare with the same arguments on every rank"
        )
    check_same(
        [one[2] for one in told],
        "another way to exchange gradients than rank 0",
        "call es.prepare with the same arguments, and set EVENSTEP_COMPRESSION",
    )
    checks = current.parameter_checks
    cadence = (current.environment.checkpoint_steps, current.environment.checkpoint_seconds)
    check_same(
        gather_objects(group, (current.nonfinite.policy, checks.every, checks.policy, *cadence)),
        "otherwise than rank 0 what to do about numbers that are not finite, how to compare parameters, or when to write checkpoints",
        "set EVENSTEP_ON_NONFINITE, EVENSTEP_CHECK_PARAMETERS, EVENSTEP_ON_DIFFERENCE and EVENSTEP_CHECKPOINT_EVERY, and the same of "
        "es.prepare and es.Config",
    )
    if len(current.models) > 64:
        raise EvenstepError(f"{len(current.models)} models were prepared; this version keeps up to 64 in step")
    _give_values(current, models, optimizers)
    apart = mode is not None and not isinstance(mode, Stale)
    for name, model in models.items():
        if current.world_size > 1 or current.recovery is not None or exact is not None:
            tells = current.rank == 0 and not options.adasum
            check_embeddings(name, model, apart, exact is not None, tells)
        sparse = sparse_parameters(model, optimizers.values())
        if sparse and (options.adasum or mode is not None):
            which = "reduction='adasum'" if options.adasum else f"sync={mode!r}"
            raise EvenstepError(
                f"es.prepare({which}): model {name!r} has sparse gradients, whose rows are only added up\n"
                f"  fix: build its embeddings with sparse=False, or leave {which.partition('=')[0]} out"
            )
        others = {id(p) for sync in current.steps.syncs for p in sync.parameters}
        parameters = [p for _, p in trained_parameters(model) if id(p) not in sparse and id(p) not in others]
        frozen = kinds_of(p for p in model.parameters() if not p.requires_grad)
        lies = gather_objects(group, (place_of(parameters), frozen))
        places = [place for place, _ in lies]
        checks.one_kind = checks.one_kind and len({place.device.partition(":")[0] for place in places}) == 1
        checks.frozen_too = checks.frozen_too and all(theirs == lies[0][1] for _, theirs in lies)
        engines: list[Engine] = []
        for _ in range(mode.steps if isinstance(mode, Stale) else 1):
            if exact is not None:
                engines.append(exact.make_engine(parameters, bootstrap, current.telemetry))
            else:
                assert bootstrap is not None
                engines.append(choose_engine(parameters, bootstrap, group, places, options, current.telemetry))
        if hasattr(engines[0], "takes_back"):
            engines[0].takes_back = current.recovery is not None and not isinstance(mode, Stale)
        sync = GradientSync(name, model, engines[0], current.steps, sparse, others)
        current.steps.syncs.append(sync)  # at once: a rank may be lost in what follows, and its hooks are undone then
        sync.compression, sync.adds = str(options.compression or ""), options.adasum
        sync.leaves_parts = options.unsummed
        of_sums = current.steps.weight.sums
        if options.sums:
            of_sums.add(name)
            if exact is None:  # which forms them itself
                sync.add_up()
        if of_sums:
            current.steps.loss_form.expect_sums(of_all=len(of_sums) == len(current.steps.syncs))
        sync.look.acts_at_once = current.nonfinite.policy != "report"
        sync.look.engine_tells, sync.look.tells_late = agreed_ways(group, engines[0], sync.parameters)
        asks_once = ddp.static_graph and all(gather_objects(group, getattr(engines[0], "asks_once", False)))
        sync.use_options(ddp, asks_once)
        if isinstance(mode, Stale):
            sync.stale, sync.defer = StaleRounds(engines, current.recovery, current.world_size, options.sums), True
            if current.steps.late is not None:
                current.steps.late.forget()
            if current.recovery is None:  # which needs a vote in every step
                current.steps.late = open_late_votes(current.steps, sync, engines, group, bootstrap)
        elif mode is not None:
            sync.local = LocalTraining(mode, engines[0], sync.parameters, current.steps)
        current.steps.quiet.agreed = False  # the next vote tells whether its passes may be quiet, too
        _prepare_batch_norm(current, name, model, whole_norms, always=exact is not None)
        if exact is not None:
            sync.close()  # what is summed are blocks, not what each backward leaves
            exact.check_model(name, model, bool(sparse))
    if models:
        current.checks.watch_all(current.steps.syncs)
        current.buffer_rules.update(dict.fromkeys(models, ddp.broadcast_buffers))
        current.steps.buffers = BufferSync([(m, current.buffer_rules[n]) for n, m in current.models.items()])
    share_states(current, optimizers.values(), apart=apart)


def _give_values(current: Session, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> None:
    """Rank 0's, first of all: as long as it may alone have them, the others cannot go on without it."""
    for name, model in models.items():
        check_same_model(current.group, name, model)
    prepared = (one for each in sessions() for one in each.models.values())
    copies = CopiedValues(current.group, models.values(), prepared)
    for model in models.values():
        broadcast_model(current.group, model)
    copies.follow()
    for name, optimizer in optimizers.items():
        check_same_optimizer(current.group, name, optimizer)
        broadcast_optimizer(current.group, name, optimizer)
    if current.recovery is not None:
        current.recovery.has_values = True


def _prepare_batch_norm(current: Session, name: str, model: nn.Module, whole: bool, always: bool) -> None:
    """always: also for one rank, which has several blocks. So has one that others may join, or that joins others."""
    has_any = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if whole and (current.world_size > 1 or always or current.recovery is not None):
        from evenstep.batch_norm import is_synchronised, synchronise

        left = synchronise(name, model, current.name)
        if left and current.rank == 0:
            warnings.warn(
                f"model {name!r}: each rank computes the statistics of {', '.join(left[:5])} from its own samples, because "
                "they are scripted, or have a forward or a group of ranks of the script's own\n  fix: script a plain copy, "
                "pickle.loads(pickle.dumps(model)), after training; es.prepare(batch_norm='local') if that is meant",
                stacklevel=4,
            )
        has_any = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and not is_synchronised(m) for m in model.modules()
        )
    if has_any:
        current.dummy_samples = 2  # one sample alone has no variance
