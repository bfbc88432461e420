"""The session of this process: its rank, what was prepared, and where training stands. One for the whole job, and one for
each process set that this rank is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from evenstep import _core, plain
from evenstep._core import EvenstepError
from evenstep.batch_rates import RateFactor
from evenstep.call_results import packs_later
from evenstep.counted_share import CountedShare
from evenstep.end_signal import hold_end_signal
from evenstep.environment import Environment, read_environment
from evenstep.generations import WITHOUT_MEMORY, Recovery, agree_on_recovery, open_recovery
from evenstep.group import Alone, Bootstrap, Group, broadcast_bytes, gather_bytes, gather_objects
from evenstep.lineage import look_for_the_first
from evenstep.loops import Loops
from evenstep.measured_place import host_name
from evenstep.mended_group import MendedGroup
from evenstep.nonfinite import NonFinite
from evenstep.optimizer_steps import OptimizerSteps
from evenstep.parameter_checks import ParameterChecks
from evenstep.pass_order import PassOrder
from evenstep.pass_state import PassState
from evenstep.regrouping import training_shares
from evenstep.schedulers import AgreedMetric, SchedulerSteps
from evenstep.step_checks import StepChecks
from evenstep.steps import Steps
from evenstep.successor import await_predecessors, ring_of
from evenstep.unexchanged import Unexchanged

if TYPE_CHECKING:
    from evenstep.apart import Apart
    from evenstep.checkpoint import Loaded
    from evenstep.checkpoint_last import LastStep
    from evenstep.data_course import DataCourse
    from evenstep.loader import BatchPlan, EvenLoader
    from evenstep.optim import InPieces
    from evenstep.shares import Shares

T = TypeVar("T")


class Session:
    """What es.prepare was given, and where training stands: `es.session()`.

    Of a process set: `environment` is that of a job of its ranks, and `bootstrap` opens its groups. Without `telemetry`
    nothing of it is recorded.
    """

    def __init__(
        self,
        environment: Environment,
        bootstrap: Bootstrap | None = None,
        telemetry: _core.Telemetry | None = None,
        name: str = "",
    ) -> None:
        self.environment = environment
        self.name = name  # of its process set; "": all ranks
        self.rank, self.world_size = environment.rank, environment.world_size
        self.place = (self.rank, self.world_size)  # that a process is to take, until it has
        self.places: list[int | None] | None = None  # of all ranks, among those that the job began with
        self.models: dict[str, nn.Module] = {}
        self.buffer_rules: dict[str, bool | None] = {}  # es.prepare(broadcast_buffers=…) of each model
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, Any] = {}
        self.loaders: dict[str, EvenLoader] = {}
        self.evaluated: EvenLoader | None = None  # in an es.evaluate: which it goes through
        self.objects: dict[str, Any] = {}  # of which checkpoints keep the state: a GradScaler, for one
        # Of all ranks, while a checkpoint is written (evenstep.exchange_state).
        self.exchange_state: dict[str, Any] = {}
        self.user_state: dict[str, Any] = {}
        self.group: Group = Alone()
        self._opens = bootstrap
        self.bootstrap: Bootstrap | None = None  # once the ranks have come together
        self.telemetry = telemetry or _core.Telemetry(-1, environment.rank)
        self.steps = Steps(self.group, self.telemetry)
        self.steps.loaders = self.loaders
        self.plan: Any = None  # of `evenstep plan`
        self.watch: Any = None  # of `evenstep verify`: ends the script after its steps
        self.lineage = ""  # which training this is, once a checkpoint asked (evenstep.checkpoint_keeping)
        self.turn = self.number = 0  # what its checkpoints say of their order (evenstep.checkpoint_order)
        self.resumed_from: Path | None = None
        self.last_checkpoint: Path | None = None  # that this process wrote
        self.shares_files = True  # the next one with it: it is not known to be damaged
        self.devices = [environment.device]  # of all ranks, once they have joined
        self.hosts = [host_name()]  # the same
        self.resumed = self._committed = False
        self.restarted = False  # from a checkpoint that this job wrote itself
        self.last_step: LastStep | None = None  # at which a checkpoint was due
        self.loaded: Loaded | None = None  # the last checkpoint that was loaded
        self.resume: Any = None  # the checkpoint to go on from, until the first batch
        self.pending_random: Callable[[], None] | None = None  # puts a checkpoint's generators back
        self.pending_objects: Callable[[], None] | None = None  # the same for `objects`
        self.replayed = False  # the script came by epochs that were done, and by what follows each
        self.dummy_samples = 1
        self.norm_calls = 0  # of all ranks together in BatchNorms (evenstep.batch_norm)
        self.follows_statistics = True  # running ones: of several blocks of one model, one does it for all
        self.latest: BatchPlan | None = None  # the batch of a prepared loader that the script is at
        self.trains_on: BatchPlan | None = None  # that of its training loop
        self.total_epochs = 0  # 0: unknown
        self.pass_order = PassOrder()
        self.recovery: Recovery | None = None
        self.sharing: list[InPieces] = []  # optimizers whose states the ranks of a host share
        self.optimizer_steps = OptimizerSteps(self)
        self.scheduler_steps = SchedulerSteps(lambda: self.iterating, lambda: self.redoing, AgreedMetric(self))
        self.pass_state = PassState(self.models, self.objects, self.optimizers, self.scheduler_steps)
        self.unexchanged = Unexchanged(self)
        self.counted_share = CountedShare(self)
        self.loops = Loops(self.loaders, self.scheduler_steps, self.rank)
        self.checks = StepChecks()
        self.rates = RateFactor()
        self.nonfinite = NonFinite(self.steps, environment.on_nonfinite, lambda: self._scales)
        self.parameter_checks = ParameterChecks(self.steps, environment.check_parameters, environment.on_difference)
        self.steps.parameters = self.parameter_checks
        self.steps.quiet.allowed = self._may_go_quiet
        self._last_checkpoint = time.monotonic()
        self.apart: list[Apart] = []  # iterations of batches that train nothing, and are not over
        self.checkpointed = self.in_memory = 0  # the steps up to which either is done

    def take_place(self) -> None:
        """From now on it is what `session()` gives, outside process sets."""
        global _session
        _session = self

    def prepared(self) -> list[Any]:
        """All but the loaders, which come back as other objects."""
        return [
            one
            for known in (self.models, self.optimizers, self.schedulers, self.objects)
            for one in dict(known).values()
        ]

    # -- the group --

    @property
    def in_job(self) -> bool:
        return self.environment.in_job

    @property
    def restarted_set(self) -> bool:
        """Whether a process set may have checkpoints of before a restart, of which the agent knows nothing."""
        return bool(self.name) and self.environment.restart > 0

    def join(self) -> None:
        """Finds the other ranks, which must come too; once. Every collective call does so first: es.prepare may come
        later (`if es.is_main(): download()`, `es.barrier()`)."""
        if self.bootstrap is None and not self.name and self.in_job:
            look_for_the_first(self.environment.rank)
        if self.bootstrap is None and not self.name and await_predecessors(self).joins:
            self._stand_in()
            return
        if self.bootstrap is None and self.in_job:
            hold_end_signal()
            # the agent ends the wait when a rank for which it is has ended
            self.telemetry.event(_core.EVENT_JOINING, self.step, words="waits for all ranks")
            bootstrap = self._opens or Bootstrap(self.environment)
            with self.steps.phases.during(_core.AT_COLLECTIVE):
                bootstrap.start()
                self.group = self.steps.group = self._control(bootstrap)
            self.bootstrap = bootstrap
            self.telemetry.event(_core.EVENT_JOINED, self.step, words="all ranks have come")
            told = gather_objects(self.group, (self.environment.device, self.hosts[0], self._has_memory))
            self.devices, self.hosts = [device for device, _, _ in told], [host for _, host, _ in told]
            agree_on_recovery(self, [has for _, _, has in told])

    def _stand_in(self) -> None:
        """A process that takes a lost rank's place is alone until its first batch: what others have done together long
        ago, it does by itself."""
        place = self.environment
        bootstrap = self._opens or Bootstrap(place)
        self.place = (place.rank, place.world_size)
        environment = replace(place, rank=0, world_size=1, resume="", speeds=None)
        bootstrap.go_on(environment, dist.HashStore(), [place.rank], 0)
        self.group = self.steps.group = self._control(bootstrap)
        if self.recovery is None:
            raise EvenstepError("this process cannot take a lost rank's place: the agent's memory is closed here")
        self.environment, self.bootstrap, self.rank, self.world_size = environment, bootstrap, 0, 1

    @property
    def joining(self) -> bool:
        """Whether this process takes a lost rank's place, and has not met the others yet."""
        return self.environment.joins and (self.recovery is None or self.recovery.joining)

    @property
    def seen_rank(self) -> int:
        """As the script sees it."""
        return self.place[0] if self.joining else self.rank

    @property
    def seen_world_size(self) -> int:
        return self.place[1] if self.joining else self.world_size

    def _control(self, bootstrap: Bootstrap) -> Group:
        self._has_memory = (recovery := open_recovery(self)) is not None
        if recovery is None:
            return bootstrap.control()
        recovery.watch(bootstrap)
        comm = bootstrap.lasting("control", recovery.heed)
        if comm is None:
            recovery.say(WITHOUT_MEMORY)
            return bootstrap.over_torch()
        bootstrap.heed = recovery.heed  # of groups of torch's that are made from now on
        self.recovery = self.steps.recovery = recovery
        return MendedGroup(comm, recovery)

    # -- other ranks (evenstep.generations) --

    def shares_for_evaluation(self, known: Shares) -> Shares:
        """Those of training, which ranks that are lost and others that join change; else what the loader was prepared with."""
        return training_shares(self) or known

    def checkpoint_now(self) -> None:
        """Between two steps, on all ranks: but where this step's is written."""
        if self.checkpointed != self.step:
            from evenstep.checkpoint import automatic

            automatic(self)
            self.checkpointed = self.step

    @property
    def in_training_loop(self) -> bool:
        """Whether the script is at a batch of a training loader."""
        return self.latest is not None and (self.latest.loader.train or self.latest.beside is not None)

    @property
    def metric_samples(self) -> int | None:
        """This rank's, of which a metric is that the script has now: of the loop that ended since the last training batch came,
        an evaluation or a training; in a training loop else of its batch. None: of none that is known."""
        if self.steps.ended_samples is not None:
            return self.steps.ended_samples
        return self.latest.at_work.samples if self.latest is not None else self.steps.loop_samples

    @property
    def in_pass(self) -> bool:
        """Whether it is at one, or left its loop before the step on its batches."""
        return self.in_training_loop or (self.recovery is not None and self.recovery.in_pass)

    def call(self, make: Callable[[], T], asks: Callable[[], bool]) -> T:
        """make(), to which all ranks come; where one is lost, those that are left make it again. asks: it cannot be, since it needs
        what each of them gives."""
        self.join()
        group = self.group
        return group.call(make, packs_later, plain.loads, asks) if isinstance(group, MendedGroup) else make()

    def call_by_all(self, make: Callable[[], T]) -> T:
        """make(), by those that are left where one is lost: nothing is missing without what it would have given."""
        return self.call(make, lambda: False)

    @property
    def redoing(self) -> bool:
        """Whether the last optimizer.step() applied nothing, since a rank was lost: its batches come again."""
        return self.recovery is not None and self.recovery.redoing

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        self.join()
        with self.steps.blocking():
            self.group.barrier()

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        self.join()
        with self.steps.blocking():
            return broadcast_bytes(self.group, data, root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.join()
        with self.steps.blocking():
            return gather_bytes(self.group, data)

    # -- where training stands --

    @property
    def step(self) -> int:
        """Optimizer steps done since the start of training."""
        return self.steps.step

    @step.setter
    def step(self, value: int) -> None:
        self.steps.step = self.checkpointed = self.in_memory = value

    @property
    def epoch(self) -> int:
        """That the training loader is in, from 0."""
        return next((loader.epoch for loader in self.loaders.values() if loader.train), 0)

    @property
    def at_restart(self) -> bool:
        """Whether training stands where the launcher has restarted this job."""
        return self.restarted and self.loaded is not None and self.loaded.by_launcher and self.loaded.step == self.step

    @property
    def loss(self) -> float:
        """Of the last step, over all ranks; NaN where unknown."""
        return self.steps.loss

    @property
    def planning(self) -> bool:
        """Whether this job measures for `evenstep plan`."""
        return self.plan is not None

    # -- called by loaders --

    def batch_arrives(self, plan: BatchPlan, asked_ns: int, batch: Any = None) -> None:
        self.latest = self.trains_on = plan
        if self.recovery is not None:
            self.recovery.redoing = False
            for loader in self.loaders.values():
                loader.forget_look()
            self.pass_order.arrives(plan.loader)
            if self.recovery.begins_pass():
                self.pass_order.begins()
                self.keep_pass_state()
            plan.loader.mark(self.recovery.pass_number)
        self.steps.batch_arrives(plan, asked_ns, batch)

    def keep_pass_state(self) -> None:
        """At a pass's beginning, and after each step that was committed."""
        if self.recovery is not None and self.recovery.can_go_on:
            why = self.pass_state.keep()
            if why:
                self.recovery.say(why)
            if self.recovery.void:
                self.pass_state.want()

    def begin_pass_anew(self, models: bool) -> None:
        """What was loaded stays, whatever becomes of the pass under way. models: their values were."""
        for sync in self.steps.syncs if models else ():
            sync.stands()
        self.keep_pass_state()

    def epoch_begins(self, loader: DataCourse, epoch: int) -> None:
        if self.rank == 0:
            self.telemetry.event(_core.EVENT_EPOCH, self.step, epoch)
            if loader.has_length:
                total = loader.expected_batches(self.total_epochs or epoch + 1)
                self.telemetry.event(_core.EVENT_TOTAL_STEPS, self.step, total)

    def check_arrived(self, call: str) -> None:
        """Raises where the others made this call long ago, and what they gave to it is gone."""
        self.join()
        if self.recovery is not None:
            self.recovery.needs_places(call)
        self.refuse_in_place(call)

    def refuse_in_place(self, call: str) -> None:
        """Raises in a process that takes a lost rank's place, and has not met the others yet."""
        if self.joining:
            raise EvenstepError(
                f"{call} before the first batch: a process that takes a lost rank's place (--recovery replace) cannot make "
                "this call again with the others\n  fix: call it after the first batch, or use --recovery restart"
            )

    def arrive(self) -> None:
        """Before an epoch's batches are shared out: a process that takes a lost rank's place meets the others."""
        if self.joining and self.resume is not None:  # with nobody, as all before
            self.resume.finish()
            self.resume = None
        if self.recovery is not None:
            self.recovery.arrive()

    def first_fetch(self) -> None:
        """Before an epoch's first batch is fetched: a resumed run is now where its checkpoint was written."""
        if self.resume is not None:
            self.resume.finish()
            self.resume = None
        self.put_objects_back()
        self.pending_objects = None
        if self.pending_random is not None:
            put_back, self.pending_random = self.pending_random, None
            put_back()

    def put_objects_back(self) -> None:
        """Where what follows done epochs has changed them once more since they were put there last."""
        if self.pending_objects is not None and self.replayed:
            self.pending_objects()
        self.replayed = False

    def _forget_pending(self) -> None:
        """A step without a loader's batch: training has gone on from the checkpoint, whose state is past."""
        self.pending_random = self.pending_objects = None

    @property
    def iterating(self) -> bool:
        return any(loader.iterating for loader in self.loaders.values())

    def iteration_begins(self) -> None:
        """The step before a break, whose loop did not come back for another batch, is over too."""
        if not self.iterating:
            self.boundary()

    def boundary(self) -> None:
        """Between two batches: what must not fall into the middle of a step."""
        if not self._committed or (self.recovery is not None and self.recovery.comes_again):
            return
        self._committed = False
        for asked in (self.plan, self.watch):
            if asked is not None and asked.done:
                asked.finish(self.all_gather_bytes)
        if self.steps.end_agreed:
            from evenstep.checkpoint import save_and_end

            save_and_end(self)
        self._checkpoint_when_due()
        if self.recovery is not None:
            self.recovery.between_steps()

    def _checkpoint_due(self) -> bool:
        """The same on all ranks. Where they train on their own, at their next synchronisation."""
        if not self._whole:
            return False
        if self.environment.checkpoint_seconds > 0:
            return self.steps.checkpoint_agreed
        every = self.environment.checkpoint_steps
        return every > 0 and self.steps.step // every > self.checkpointed // every

    @property
    def checkpoint_waits(self) -> bool:
        """Whether the last step's checkpoint is due, and no batch has been asked for since."""
        return self._committed and self._checkpoint_due()

    def _checkpoint_when_due(self) -> None:
        environment = self.environment
        steps = self.steps
        due = self._checkpoint_due()
        if environment.checkpoint_seconds > 0:
            passed = time.monotonic() - self._last_checkpoint
            wants = passed >= environment.checkpoint_seconds and not _is_writing()
            steps.wants_checkpoint = self.rank == 0 and wants and not due
        if due:
            self.parameter_checks.check_by(self.call_by_all)
            from evenstep.checkpoint import automatic

            automatic(self)
            self.checkpointed = steps.step
            self._last_checkpoint = time.monotonic()
            steps.checkpoint_is_made()
        self._keep_in_memory_when_due(due)

    def _keep_in_memory_when_due(self, on_disk: bool) -> None:
        every = self.environment.memory_steps
        if every > 0 and self._whole and not self.name and self.step // every > self.in_memory // every:
            self.in_memory = self.step
            if not on_disk:
                from evenstep.checkpoint_memory import keep

                keep(self)

    # -- steps --

    @property
    def _scales(self) -> bool:
        """Whether a GradScaler was prepared, which may make losses infinite that are not."""
        return any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in self.objects.values())

    def _may_go_quiet(self) -> bool:
        """Where ranks train on their own: whether nothing needs a vote in every step (evenstep.quiet_passes)."""
        watched = self.plan is not None or self.watch is not None or self.steps.noise is not None
        return self.recovery is None and not watched and self.nonfinite.policy == "report" and not self._scales

    def after_synchronisation(self) -> None:
        """Of ranks that train on their own, after an optimizer's step. Collective where there was one."""
        if self.steps.quiet.rare and self._whole:
            self.parameter_checks.check_when_due()

    def synchronise_models(self) -> None:
        """Ends the time in which ranks train on their own (es.LocalSGD, es.DiLoCo), wherever it stands. Collective."""
        for sync in self.steps.syncs:
            if sync.local is not None:
                sync.local.synchronise()

    @property
    def _whole(self) -> bool:
        """Whether all ranks have the same parameters."""
        return all(sync.local is None or sync.local.whole for sync in self.steps.syncs)

    def forget_pass(self) -> None:
        """What was made since the last step counts nothing."""
        self.steps.forget_pass()
        self.norm_calls = 0

    def pass_comes_again(self) -> None:
        """After a void pass, before its first batch: what the script did since its end is undone, too."""
        if self.recovery is not None and self.recovery.comes_again:
            self.pass_state.put_back()
            self.recovery.pass_comes_again()

    def step_done(self) -> None:
        self.steps.stepped()
        plan = self.steps.last_plan
        for loader in self.loaders.values():
            loader.committed(plan is not None and plan.loader is loader)
        if self.loops.trained:  # a checkpoint was loaded in an iteration that trains
            self.loops.settle(beginning=False)
        if not self.iterating:
            self._forget_pending()
        late, self._committed = self._committed, True  # late: no loader was asked for a batch since the step before
        if not self.iterating and (late or not self.loaders):
            self.boundary()


_session: Session | None = None
_entered: list[Session] = []  # of the process sets whose `with` is open, the innermost last
of_sets: list[Session] = []  # of the process sets that this rank is in, in the order in which they were made


def _is_writing() -> bool:
    from evenstep.checkpoint import is_writing

    return is_writing()


def session() -> Session:
    """This process's session: that of the process set whose `with` it is in, else the whole job's; made on first use."""
    return _entered[-1] if _entered else whole_session()


def whole_session() -> Session:
    """That of the whole job."""
    global _session
    if _session is None:
        environment = read_environment()
        _session = Session(environment, telemetry=ring_of(environment))
    return _session


def inside_a_set() -> bool:
    """Whether the `with` of a process set is open."""
    return bool(_entered)


def enter(current: Session) -> None:
    """Until `leave`, `current` is this process's session."""
    _entered.append(current)


def leave(current: Session) -> None:
    for place in reversed(range(len(_entered))):  # the innermost: a generator may have kept another open
        if _entered[place] is current:
            del _entered[place]
            return


@contextmanager
def entered(current: Session) -> Iterator[None]:
    """Inside, `current` is this process's session."""
    enter(current)
    try:
        yield
    finally:
        leave(current)


def sessions() -> list[Session]:
    """The whole job's and those of this rank's process sets, in the order in which all ranks know them."""
    return [whole_session(), *of_sets]


@contextmanager
def in_place_of_session(other: Session) -> Iterator[None]:
    """Every call inside is about another session (es.verify), as if there were no process sets."""
    before, inside, known = whole_session(), list(_entered), list(of_sets)
    _entered.clear()
    of_sets.clear()
    other.take_place()
    try:
        yield
    finally:
        _entered[:], of_sets[:] = inside, known
        before.take_place()


def session_named(name: str) -> Session:
    """That of a process set of this rank; "": of the whole job."""
    return next((one for one in of_sets if one.name == name), whole_session())


def training_session(call: str) -> Session:
    """The session that a call about training means. Raises EvenstepError where it stands outside the `with` of a set, on a
    rank that trains in process sets alone."""
    current = session()
    trained = [one for one in of_sets if one.steps.syncs or one.loaders]
    if inside_a_set() or current.steps.syncs or current.loaders or not trained:
        return current
    name = trained[0].name
    raise EvenstepError(
        f"{call} outside any `with`: this rank trains in the process set {name!r} and not with all ranks of the job\n"
        f"  fix: call it inside the `with` of the set; for all ranks of the job, of a set that names them all"
    )
