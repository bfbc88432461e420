"""What happens around each optimizer's step: it commits a step of training, or applies nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS, Optimizer

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.closure_steps import ClosureStep, WholeLoss, closure_of, goes_by_loss, with_closure
from evenstep.hidden_gradients import HiddenGradients

if TYPE_CHECKING:
    from evenstep.session import Session


class OptimizerSteps:
    """Of one session's optimizers. Of several that share a batch, the first to step commits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hidden = HiddenGradients()
        self._void_turn = False  # the last gradients that an optimizer stepped on count nothing
        self._turn_open = False  # an optimizer is making the first step on gradients
        self._leader: int | None = None  # id of the optimizer whose step is the commit where no loader is prepared
        self._closure: ClosureStep | None = None  # of the step under way

    def watch(self, optimizer: Optimizer) -> None:
        """From now on its steps are commits."""
        self._leader = None
        self._session.checks.watch(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(
        self, optimizer: Optimizer, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Gives other arguments for the step, or None."""
        session = self._session
        steps, recovery = session.steps, session.recovery
        self._hidden.put_back_after_error()
        self._closure = None
        changed = self._by_whole_loss(optimizer, arguments, options)
        arguments, options = changed or (arguments, options)
        closure = closure_of(arguments, options) if recovery is not None else None
        fresh = closure is not None or steps.backwards > 0 or self._leader in (None, id(optimizer))
        steps.backwards = 0
        if recovery is not None and steps.fetches_ahead:
            recovery.say("the script fetches a batch before it has made the step on an older one")
        if fresh:
            self._void_turn = recovery is not None and (recovery.void or recovery.passes_over)
            self._turn_open = True
        if closure is not None and recovery is not None:  # its gradients are still to come
            may_be_void = recovery.can_go_on or session.nonfinite.policy != "report"
            self._closure = ClosureStep(optimizer, closure, recovery, keeps=may_be_void)
            session.rates.before_step(optimizer)
            return self._closure.within(arguments, options)
        if self._void_turn:
            self._hidden.hide(optimizer)
            return None
        left_out, leads = self._look(optimizer, fresh)
        if recovery is not None and steps.syncs:
            if fresh:
                self._void_turn = recovery.void or not recovery.commit(leads)
        elif leads:
            self.book()
        if left_out or self._void_turn:
            self._hidden.hide(optimizer)
        session.rates.before_step(optimizer)
        return changed

    def _by_whole_loss(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The step's arguments with a closure that gives all ranks the same loss, where it matters."""
        session = self._session
        syncs = session.steps.syncs
        closure = (
            closure_of(arguments, options) if session.world_size > 1 and syncs and goes_by_loss(optimizer) else None
        )
        if closure is None or any(sync.local is not None for sync in syncs):
            return None
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        sums = any(sync.name in session.steps.weight.sums for sync in syncs if sync.has_any(ids))
        return with_closure(arguments, options, WholeLoss(closure, session, sums, isinstance(optimizer, LBFGS)))

    def _look(self, optimizer: Optimizer, fresh: bool) -> tuple[bool, bool]:
        """At the whole gradients: whether the step is to apply nothing, and whether it counts as a step of training. Collective.
        fresh: its turn is not committed yet, and is void where a rank is lost here."""
        session = self._session
        steps, recovery = session.steps, session.recovery
        try:
            if session.world_size > 1 and steps.syncs:
                session.checks.check(optimizer, session.models.values(), steps.syncs)
        except EvenstepError as error:
            if recovery is None or not fresh or not recovery.mends(error):
                raise
        if self._leader is None:
            self._leader = id(optimizer)
        leads = steps.has_new_batch or self._leader == id(optimizer)
        if leads and steps.syncs:
            steps.finish_missed()
        void = recovery is not None and recovery.void
        try:
            left_out = not void and session.nonfinite.before_step(optimizer, leads)
        except EvenstepError as error:
            if recovery is None or not recovery.mends(error):
                raise
            left_out = session.nonfinite.policy == "skip"  # all knew it before they asked who it was
            if session.nonfinite.policy == "stop" and not fresh:  # else the pass is void, and made again
                raise EvenstepError(
                    "the loss or gradients of an optimizer whose step comes second are not finite on some rank (another one was lost "
                    "while the ranks told which); the job ends\n  fix: look at the data and the learning rate, then go on with --resume auto"
                ) from error
        if leads:
            self._leader = id(optimizer)
        return left_out, leads

    def _close(self, optimizer: Optimizer, step: ClosureStep) -> None:
        """At the end of a step with a closure: what _before does of others."""
        steps, recovery = self._session.steps, self._session.recovery
        assert recovery is not None
        steps.backwards = 0
        self._void_turn = self._void_turn or recovery.void
        if not self._void_turn:
            try:
                left_out, leads = self._look(optimizer, fresh=True)
            except EvenstepError:
                step.leave_out()
                raise
            if steps.syncs:
                self._void_turn = recovery.void or not recovery.commit(leads)
            elif leads:
                self.book()
            if left_out and not self._void_turn:
                step.leave_out()
        if self._void_turn:
            step.take_back()

    def book(self) -> None:
        """The step under way stands: it counts from now on."""
        session = self._session
        steps = session.steps
        timings = steps.commit()
        plan = steps.last_plan
        loaders = [loader for loader in session.loaders.values() if loader.train and loader.fetched]
        for loader in loaders:
            loader.stepped()
        if plan is not None and plan.loader not in loaders:
            loaders.append(plan.loader)
        observing = {id(loader.shares): loader.shares for loader in loaders if loader.shares is not None}
        for shares in observing.values() if timings else ():
            shares.take_micro_batches([(one.micro_batch, one.piece_samples) for one in steps.told])
            shares.observe(
                timings,
                steps.step_seconds,
                steps.spared,
                [one.exchange_seconds for one in steps.told],
                [one.pass_seconds / max(1, one.batches) for one in steps.told],
            )
            for kind, news in (
                (_core.EVENT_BALANCING, shares.turned()),
                (_core.EVENT_LEFT_OUT, shares.left_out(timings)),
                (_core.EVENT_MEMORY, shares.take_memory(steps.reports)),
            ):
                if news is not None and session.rank == 0:
                    session.telemetry.event(kind, session.step, news[0], news[1])

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        session = self._session
        session.rates.after_step()
        self._hidden.put_back()
        closure, self._closure = self._closure, None
        if closure is not None:
            self._close(optimizer, closure)
        ended, self._turn_open = self._turn_open, False
        if self._void_turn:
            if ended:
                self._turn_is_void()
            return
        if ended and session.recovery is not None:
            session.recovery.turn_ended(counts=True)
            session.keep_pass_state()
        for sync in session.steps.syncs:
            if sync.local is not None:
                sync.local.after_step(optimizer)
        session.after_synchronisation()
        if self._leader == id(optimizer):
            session.step_done()
        if session.checkpoint_waits and not session.planning:
            from evenstep.checkpoint_last import remember

            remember(session, ends_turn=ended)

    def _turn_is_void(self) -> None:
        session = self._session
        assert session.recovery is not None
        if session.recovery.void:
            if session.steps.may_fetch_ahead:
                raise _fetched_ahead()
            session.pass_order.comes_again()
            for loader in session.loaders.values():
                loader.take_back(session.recovery.pass_number)
            session.forget_pass()
        else:
            session.steps.passed_over()
        for sync in session.steps.syncs:
            sync.take_back()
        if session.steps.noise is not None:
            session.steps.noise.take_back()
        session.pass_state.put_back()
        session.recovery.turn_ended(counts=False)


def _fetched_ahead() -> EvenstepError:
    return EvenstepError(
        "a rank was lost in a step, whose batches come again, but the script fetches a batch before it has made the step on an "
        "older one, so that it would train one twice and one never (EVEN_ERR_PEER_LOST)\n"
        "  fix: call optimizer.step() on each batch before the next is fetched; workers load ahead (num_workers)"
    )
