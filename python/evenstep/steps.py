"""What happens around each training step: gradients finished when backward ends, the ranks' records exchanged, the
step committed when the optimizer steps; and the times of all that."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from evenstep import _core, vote
from evenstep._core import EvenstepError
from evenstep.cpu_quota import CpuQuota
from evenstep.device_memory import is_out_of_memory
from evenstep.failed_pass import FailedPass, no_gradient
from evenstep.fetched import FetchedBatches, which_counts
from evenstep.group_end import first_line, is_gone
from evenstep.idle_backward import IdleBackward
from evenstep.kept_memory import kept_memory
from evenstep.loss_form import LossForm
from evenstep.pass_weight import PassWeight
from evenstep.quiet_passes import QuietPasses
from evenstep.ranges import Phases
from evenstep.saved_bytes import SavedBytes
from evenstep.step_loss import total_of
from evenstep.step_part import StepPart
from evenstep.step_times import StepTimes
from evenstep.step_votes import StepVotes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from evenstep.batch_noise import NoiseProbe
    from evenstep.buffers import BufferSync
    from evenstep.data_course import DataCourse
    from evenstep.engine import Report
    from evenstep.generations import Recovery
    from evenstep.gradients import GradientSync
    from evenstep.group import Group
    from evenstep.late_votes import LateVotes
    from evenstep.loader import BatchPlan, EvenLoader
    from evenstep.memory import RanksMemory
    from evenstep.parameter_checks import ParameterChecks


_ACTIVITIES = {_core.SPAN_EVALUATION: _core.AT_EVALUATION, _core.SPAN_CHECKPOINT: _core.AT_CHECKPOINT}


class Steps:
    """The step under way on this rank. One per session, used by the thread that trains."""

    def __init__(self, group: Group, telemetry: _core.Telemetry) -> None:
        self.group = group
        self.telemetry = telemetry
        self.syncs: list[GradientSync] = []
        self.buffers: BufferSync | None = None
        self.memory: RanksMemory | None = None
        self.loaders: Mapping[str, EvenLoader] = {}  # that are prepared
        self.recovery: Recovery | None = None  # where ranks may be lost and the others go on
        self.parameters: ParameterChecks | None = None
        self.noise: NoiseProbe | None = None  # where the global batch is adapted
        self.reports: list[Any] = []  # what the ranks told of their memory before the last commit
        self.spared: list[int] = []  # ranks that left out every backward before it, for want of samples
        self.told: list[vote.Ballot] = []  # in the last vote before it
        self.micro_batch = (0, 0.0)  # evenstep.piece_times
        self._part = StepPart()
        self.quiet = QuietPasses(self)
        self.late: LateVotes | None = None  # es.Stale
        self._batches = self._busy = 0  # of the step, up to its last backward: batches; ns
        self.begun_backwards = 0  # passes of backward, also those that count nothing
        self.step = 0
        self.loss = math.nan  # of the last committed step, over all ranks
        self.plan: BatchPlan | None = None  # the training batch now at work
        self._at_work: tuple[BatchPlan | None, ...] = ()  # that, while a backward is over an older one
        self.last_plan: BatchPlan | None = None  # the last one that was, also when its epoch has ended
        self.loop_samples: int | None = None  # of this rank, in the iteration that ended last
        self.ended_samples: int | None = None  # the same, evaluations too; None once a training batch has come
        self._had: dict[DataCourse, int] = {}  # the same, of those under way
        self._had_at_step: dict[DataCourse, int] = {}
        self.ballots: list[vote.Ballot] = []  # of the last synchronised backward since the last commit
        self.wants_checkpoint = False
        self.checkpoint_agreed = False  # rank 0 asked for one in the last vote
        self.end_agreed = False  # and for the end, with the state saved
        self.weight = PassWeight(self)
        self.backwards = 0  # exchanged, or void, since the last step of an optimizer
        self._fetched = FetchedBatches()
        self._idle_backward = IdleBackward()
        self.loss_form = LossForm()
        self.loss_ranks: list[int] = []  # whose loss was not finite, as they said in the last vote
        self._failure = FailedPass(self)
        self.votes = StepVotes(self, self._part, self._failure)
        self.mends_memory = False  # es.Trainer makes a pass that runs out of memory once more, in pieces
        self.ran_short = False  # such a one did, and stands where it was
        self.saved = SavedBytes(telemetry)
        self.times = StepTimes(telemetry, self._waited_ns, CpuQuota())
        self._record: tuple[Any, ...] | None = None
        self._reported_shares: list[int] = []
        self.phases = Phases(telemetry)

    def has_samples(self, latest: BatchPlan | None) -> bool:
        """Whether what is in forward are samples of this rank, and no dummy ones. `latest`: the batch that the script is
        at."""
        if self._fetched.unlike:
            if not self.weight.is_given:
                raise which_counts(self.group.rank)
            return self.weight.amount() > 0
        # the last also where the script keeps a batch of an ended iteration; `beside`: checkpointing computes without gradients first
        plan = (latest.beside or latest) if latest is not None else self.plan
        return plan is None or plan.samples > 0

    @property
    def is_idle(self) -> bool:
        """Whether the next backward is over dummy samples alone, as far as that can be told."""
        return self.plan is not None and self.plan.samples == 0 and self._fetched.all_idle

    @property
    def may_be_idle(self) -> bool:
        """Whether it is over dummy samples or over others, and which cannot be told."""
        return self._fetched.unlike

    # -- time blocked on others --

    def blocked_ns(self) -> int:
        """Spent waiting for other ranks, since the beginning."""
        return self.times.blocked_ns()

    def _waited_ns(self) -> int:
        comm = getattr(self.group, "comm", None)
        return (comm.wait_ns if comm is not None else 0) + _backend_wait_ns()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a collective of the group, which may not count its own waiting."""
        with self.phases.during(_core.AT_COLLECTIVE):
            start = _core.clock_ns()
            try:
                yield
            finally:
                if not hasattr(self.group, "comm"):
                    self.times.blocks(_core.clock_ns() - start)
                self.times.meets()

    @contextmanager
    def apart(self, span: int) -> Iterator[None]:
        """Work that is no part of a training step: not the balancer's business."""
        start = self.times.mark()
        try:
            with self.phases.during(_ACTIVITIES[span]):
                yield
        finally:
            duration = self.times.apart_since(start)
            self.telemetry.span(span, self.step, start.at, duration)
            if self.memory is not None:
                self.memory.watch.begin()

    # -- batches --

    def pause(self, loader: DataCourse | None = None) -> None:
        """A loader's epoch ended: what comes until the next batch is asked for is no training, and a backward on other
        data has not the last batch's weight."""
        self.phases.enter(None)
        if loader is not None:
            if self.plan is not None and self.plan.loader is loader and not self._fetched.has(self.plan):
                self.plan = None
            self._fetched.end(loader)
            self.loop_samples = self.ended_samples = self._had.pop(loader, self.loop_samples)
        self.times.pause()

    def unpause(self, loader: DataCourse) -> None:
        """An iteration over the loader begins. What one that was only looked into had is no training loop's."""
        self._had.pop(loader, None)
        if self.times.unpause() and self.memory is not None:
            self.memory.watch.begin()

    def batch_arrives(self, plan: BatchPlan, asked_ns: int, batch: Any = None) -> None:
        self.times.batch_arrives(self.step, asked_ns)
        self.phases.enter("forward")
        self._batches_are_back()
        self._fetched.add(plan, batch)
        self._had[plan.loader] = self._had.get(plan.loader, 0) + plan.samples
        self.ended_samples = None
        self.plan = self.last_plan = plan
        self._part.batch_arrives(plan)

    @property
    def fetches_ahead(self) -> bool:
        """Whether the script is known to fetch a batch before it has made the step on an older one."""
        return self._fetched.pace.ahead or self._fetched.pace.between

    @property
    def may_fetch_ahead(self) -> bool:
        """The same, where it may be so."""
        return self._fetched.may_be_ahead

    # -- backward --

    def before_backward(self, losses: Any) -> None:
        if not self.syncs:
            return
        self._failure.check()
        self.begun_backwards += 1
        if self._void:
            for sync in self.syncs:
                sync.idle = True
            return
        if self.recovery is not None:
            self.recovery.begins_turn()
        self._batches_are_back()
        if (older := self._fetched.set_aside(losses)) is not None:
            self._at_work, self.plan = (self.plan,), older
        if not self.weight.is_given:
            if self.plan is not None and self._fetched.let_go(self.plan):
                self.plan = None
            self._fetched.check_one_weight(tells=self.plan is None and self.group.rank == 0)
            if self.plan is not None and self.plan.samples and self.group.ranks > 1 and not self._fetched.several:
                self.loss_form.look(losses, self.plan)
        self.times.backward_begins(self.step, forward=self.plan is not None)
        self.phases.enter("backward")
        self._part.loss.begins_from(losses)
        self._part.passes += 1
        for sync in self.syncs:
            sync.before_backward(self.weight.empty)
        if self.noise is not None:
            self.noise.begin(first=self._part.passes == 1)

    def spares_backward(self, losses: Any) -> bool:
        """Whether this rank has no samples, so that its gradients count nothing, and nothing else would come of them:
        then zeros have been handed over in their place."""
        if self._void:
            return False
        empty = self.plan is not None and self.plan.samples == 0 and self.weight.now() == 0.0 and not self.weight.empty
        if not (empty and all(sync.may_be_spared for sync in self.syncs)):
            return False
        reached = self._idle_backward.parameters_of(losses, self.syncs)
        if reached is None:
            return False
        for sync in self.syncs:
            sync.hand_over_zeros(reached)
        self._part.spared_passes += 1
        return True

    def nested_backward(self) -> None:
        for sync in self.syncs:
            sync.defer = True

    def failed_backward(self, error: BaseException) -> None:
        """The error goes on to the script, which may catch it: the other ranks must not wait for this one meanwhile.

        Where there are gradients already, the group is revoked. Else this rank says so in the vote that the others are
        in, or come to; where all of them failed (a batch that the model refuses), the pass counts on none and
        training goes on.
        """
        if self._void:
            self._leave_void()
            return
        if self.mends_memory and is_out_of_memory(error):
            self.ran_short = True
            return
        if not any(sync.enabled for sync in self.syncs):  # a pass that no other rank waits for
            for sync in self.syncs:
                sync.abandon()
            return
        name = type(error).__name__
        if any(sync.begun for sync in self.syncs) or not isinstance(error, Exception):
            self._failure.with_gradients(name)
            return
        self._part.backwards += 1
        if self.quiet.comes or self._is_late:
            self.quiet.fails()
        else:
            flags = vote.FAILED | self.quiet.flags(self._part.loss.bad, False)
            if not self._failure.is_everyones(name, lambda: self._exchange(0.0, 0, flags)):
                return
        self.weight.forget()
        self._fetched.used()
        for sync in self.syncs:
            sync.abandon()

    @property
    def _void(self) -> bool:
        return self.recovery is not None and self.recovery.void

    def _leave_void(self) -> None:
        self.backwards += any(sync.enabled for sync in self.syncs)
        for sync in self.syncs:
            sync.leave_void()
        self._fetched.used()
        self.weight.forget()
        self.phases.enter("optimizer")

    def forget_pass(self) -> None:
        """At the end of a void one: its batches come again."""
        self._part.is_void()
        self.loss_ranks = []
        for sync in self.syncs:
            sync.nonfinite = []
        self.ballots, self.reports, self.spared = [], [], []
        self._fetched = FetchedBatches(self._fetched.pace)
        self._had = dict(self._had_at_step)
        self.times.begin_anew()
        self.phases.enter(None)

    def passed_over(self) -> None:
        """At the end of a turn that was committed before: what was made for it is not of the next."""
        self.ballots = []
        self._part.begins_anew()

    def after_backward(self) -> None:
        try:
            if self.syncs:
                self._end_backward()
        finally:
            self._batches_are_back()

    def _batches_are_back(self) -> None:
        """The backward over an older batch is over: the one at work is that which was fetched last."""
        if self._at_work:
            self.plan, self._at_work = self._at_work[0], ()

    def _end_backward(self) -> None:
        if self._void:
            self._leave_void()
            return
        end = self.times.backward_ends(self.step)
        weight = self.weight.now()
        self._part.loss.counts(self.weight.of_loss())
        self._fetched.used()
        enabled = [sync for sync in self.syncs if sync.enabled]
        taken = self._taken()
        quiet, late = self.quiet.comes, self._is_late
        if taken and (quiet or late or not enabled):  # no vote comes in which the other ranks hear of it
            self._failure.breaks(taken)
            raise no_gradient(taken)
        for sync in self.syncs:
            if not sync.enabled:
                sync.after_unsynchronised()
        if enabled:
            try:
                if quiet:
                    self._stay_quiet(end, weight)
                elif late:
                    self._part.backwards += 1
                    self._late_turn(end, weight)
                else:
                    self._synchronise(end, weight, taken)
            except BaseException as error:
                if self.recovery is not None and not self._failure.why and self.recovery.mends(error):
                    self._leave_void()
                    return
                self._raise_of_exchange(error)
            self.backwards += 1
        if self.weight.empty:
            for sync in enabled:
                sync.abandon()
        self.weight.forget()

    def exchange_gradients(self, losses: Any = None) -> None:
        """What the end of a backward pass does, for gradients that none made. losses: what it would begin from."""
        if self.syncs:
            self.before_backward(losses)
            for sync in self.syncs:
                sync.take_gradients()
            self.after_backward()

    def resume_backward(self) -> None:
        """The end of a pass that ran short of memory: what is in p.grad beside what it handed over takes part."""
        for sync in self.syncs:
            sync.take_gradients(sync.handed_over)
        self.after_backward()

    def _exchange(self, weight: float, busy_ns: int, flags: int) -> list[vote.Ballot]:
        ballot = self._part.ballot(self, weight, busy_ns, flags).pack()
        for ballots in self.late.rest() if self.late is not None else ():
            self.votes.hear(ballots)
        with self.blocking():
            return [vote.unpack(record) for record in self.group.exchange(ballot)]

    def _raise_of_exchange(self, error: BaseException) -> NoReturn:
        made = self._failure.of_exchange(error)
        if made is error:
            raise error
        raise made from None

    def _taken(self) -> str:
        """Which gradient a hook took away before backward ended, in words; "" for none."""
        for sync in self.syncs:
            name = sync.taken()
            if name is not None:
                return f"the gradient of parameter {name!r} of model {sync.name!r} was gone when backward ended"
        return ""

    def _synchronise(self, end: int, weight: float, taken: str) -> None:
        self.phases.enter("communication")
        self._part.backwards += 1
        self._failure.begun = None
        end = self._settle(end)
        busy = self.times.busy_until(end)
        flags = self.votes.flags(weight) | (vote.TAKEN if taken else 0)
        self.passes(busy)
        ballots = self._exchange(weight, busy, flags)
        self.times.meets_to_exchange()
        self._failure.begun = fired = vote.fired(ballots)
        self.votes.check(ballots, taken)
        self.votes.hear(ballots)
        refired = functools.reduce(int.__or__, (one.refired for one in ballots))
        for index, sync in enumerate(self.syncs):
            if fired >> index & 1:
                report = sync.finish(again=bool(refired >> index & 1))
                self._failure.begun &= ~(1 << index)  # done
                sync.refuse_changed(vote.changed(ballots, index))
                self.exchanged_gradients(sync, report)
            elif sync.enabled:  # this pass was another model's: what was kept apart for it goes back
                sync.abandon()
        if self.noise is not None:
            self.noise.exchanged()
        self.times.synchronised(self.step, end)
        self.phases.enter("optimizer")

    def exchanged_gradients(self, sync: GradientSync, report: Report) -> None:
        self.times.blocks(report.exposed_ns)
        self.times.works_alone(report.own_ns)
        name = f"compression {sync.compression}" if sync.compression else ""
        self.saved.add(name, report.bytes, report.full_bytes)

    @property
    def _is_late(self) -> bool:
        return self.late is not None and self.late.comes

    def _late_turn(self, end: int, weight: float) -> None:
        """As _synchronise, where gradients are used later: what is heard is what all said of those that are due."""
        self.phases.enter("communication")
        assert self.late is not None
        try:
            self.late.pass_ends(end, weight)
        except BaseException as error:
            if not is_gone(error) and (not isinstance(error, EvenstepError) or error.status):  # not what all hear alike
                self._failure.breaks(first_line(error))
            raise
        self.times.synchronised(self.step, end)
        self.phases.enter("optimizer")

    def checkpoint_is_made(self) -> None:
        """That a vote asked for; the next may be some steps away."""
        self.checkpoint_agreed = False
        if self.late is not None:
            self.late.asked_from = self.step

    def _stay_quiet(self, end: int, weight: float) -> None:
        """As _synchronise, of ranks that train on their own: what the vote would tell waits for their synchronisation."""
        self._part.backwards += 1
        self.passes(self.times.busy_until(end))
        self.loss_ranks = []
        for sync in self.syncs:
            if sync.enabled:
                sync.look_at_own(counts=weight > 0, quiet=True)
                if sync.fired:
                    sync.finish(again=False)
                else:
                    sync.abandon()
                    if sync.local is not None:
                        sync.local.saw(0.0)
        self.quiet.made(bad=self._part.loss.bad)
        self._part.loss.bad = False
        self.times.synchronised(self.step, end)
        self.phases.enter("optimizer")

    def passes(self, busy_ns: int) -> None:
        """At the end of each that counts."""
        part = self._part
        self._batches, self._busy = part.batches, busy_ns
        if self.memory is not None and part.batches and self.last_plan is not None:
            self.memory.watch.stepped(self.step, part.samples // part.batches, self.last_plan.shares)
            if why := kept_memory.take_end():
                words = f"{why}: what a step frees is not kept for the next one any more"
                self.telemetry.event(_core.EVENT_MESSAGE, self.step, 0, words)

    def _settle(self, end: int) -> int:
        """When this rank's own part of the pass has ended; `end`, where engines have none after backward."""
        try:
            for sync in self.syncs:
                if sync.enabled and sync.settle():
                    end = _core.clock_ns()
        except BaseException as error:
            self._failure.begun = -1  # the others may have begun with any model
            if not is_gone(error):  # they come to the vote
                self._failure.breaks(first_line(error))
            raise
        return end

    # -- the optimizer's step --

    @property
    def has_new_batch(self) -> bool:
        """Whether a batch that no step has used was in a backward."""
        return self.has_pass and self._batches > 0

    @property
    def has_pass(self) -> bool:
        """Whether a backward that counts was made since the last commit."""
        late = self.late is not None and self.late.open
        return bool(self.ballots) or self.quiet.open or late

    def synchronise_buffers(self, group: Group) -> None:
        """Before the step counts: those that forward changed become the same on all ranks."""
        checksums = [ballot.buffers for ballot in self.ballots if ballot.step == self.step]  # no late ones
        if any(checksums) and self.buffers is not None:
            with self.blocking():
                self.buffers.synchronise(
                    group, self._part.changed, checksums, [ballot.weight for ballot in self.ballots]
                )

    def commit(self) -> list[tuple[int, float]]:
        """Before the first optimizer's step: makes the step count. Returns each rank's (samples, busy seconds) of one
        batch, or nothing where no batch of a prepared loader was in it."""
        self.finish_missed()
        timings: list[tuple[int, float]] = []
        self.reports, self.spared = [], []
        if self.recovery is None:
            self.synchronise_buffers(self.group)
        passed, late = self.has_pass, self.late is not None and self.late.open
        ballots = self.told = self.ballots
        self.ballots = []
        self.loss = math.nan
        if ballots:
            self.loss = total_of(ballot.loss for ballot in ballots)
            batches = ballots[0].batches
            self.spared = vote.spared(ballots)
            if batches > 0:
                timings = [(round(b.samples / batches), b.busy_seconds / batches) for b in ballots]
                if self.memory is not None:
                    self.reports = self.memory.reports(ballots, timings)
        plan = self.last_plan
        self._record = (
            self.step,
            plan.epoch if plan is not None else 0,
            self.times.seen if passed else 0,  # by the clock, as all else that telemetry tells
            self._part.samples,
            self._part.total,
            self.loss,
            plan.predicted_seconds if plan is not None else math.nan,
        )
        if plan is not None and plan.shares != self._reported_shares and self.group.rank == 0:
            self._reported_shares = plan.shares
            words = ",".join(map(str, plan.shares))
            self.telemetry.event(_core.EVENT_SHARES, self.step, plan.total, words)
        if not any(sync.local for sync in self.syncs):
            self.saved.tell(self.step, aloud=self.group.rank == 0)
        busy = (self._busy, self.times.seen, self.times.waited) if passed else (0, 0, 0)
        self._part.begins_anew(bool(ballots) or late or not self.quiet.agreed, *busy)
        self._had_at_step = dict(self._had)
        if passed:
            self.times.committed(self._batches)
        self.quiet.commits()
        if self.late is not None:
            self.late.commits()
        self.step += 1
        return timings

    def finish_missed(self) -> None:
        """A backward that did not come through torch.autograd.backward."""
        if any(sync.open for sync in self.syncs):
            self.before_backward_missed()

    def exchanged(self, mode: str, report: Report) -> None:
        """Parameters of ranks that train on their own were exchanged."""
        self.times.blocks(report.exposed_ns)
        self.saved.add(mode, report.bytes, 0)
        self.saved.tell(self.step, aloud=self.group.rank == 0)

    def before_backward_missed(self) -> None:
        """Hooks fired, but the end of that backward was not seen: finish now, on every rank alike."""
        self.times.backward_begins(self.step, forward=False)
        self._part.loss.is_unknown()
        self.after_backward()

    @property
    def step_seconds(self) -> float:
        """Since the end of the step before."""
        return self.times.seconds

    def stepped(self) -> None:
        """After the first optimizer's step."""
        self.phases.enter(None)
        now, duration = self.times.stepped(max(0, self.step - 1))
        if self._record is not None:
            step, epoch, busy, samples, batch, loss, predicted = self._record
            self.telemetry.step(step, epoch, now, duration, busy, samples, batch, loss, predicted)
            self._record = None


def _backend_wait_ns() -> int:
    """Waiting in collectives that the user calls through backend "evenstep"."""
    world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    comm = getattr(world, "_comm", None)
    return comm.wait_ns if comm is not None and not comm.closed else 0
