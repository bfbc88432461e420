"""One model's gradients: hooks that hand them to the engine as backward makes them, and the whole sums put back.

After every synchronised backward, p.grad = sum over ranks of weight_r * p.grad_r (no gradient counts as zero; None
stays None where no rank has one). The weights of the ranks sum to 1, so what was already a sum stays what it is. Where
losses are sums over samples each rank that has some weighs 1, and WholeSums sees to that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenstep._core import EvenstepError
from evenstep.agreement import first_differing
from evenstep.bucket_layout import BucketLayout
from evenstep.engine import Engine, Report, SharedEngine
from evenstep.gradient_hooks import HookLook
from evenstep.gradient_look import GradientLook
from evenstep.kept import KeptGradients
from evenstep.local_training import LocalTraining
from evenstep.nonfinite import UNNAMED, Found
from evenstep.second_round import sums_of_all
from evenstep.sparse import sum_sparse
from evenstep.used_parameters import UsedParameters, trained_parameters
from evenstep.whole_sums import WholeSums

if TYPE_CHECKING:
    from evenstep.prepare_options import DDPOptions
    from evenstep.stale import StaleRounds
    from evenstep.steps import Steps


class GradientSync:
    """Hooks of one model. `steps` says this rank's part of the batch now in backward.

    The engine has the parameters that are not in `sparse` (ids), in the model's order; those in it come after them
    here, and their gradients are added up when backward has ended. `others` are parameters (ids) that belong to the
    GradientSync of another model: each is reduced and rescaled once.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        engine: Engine,
        steps: Steps,
        sparse: Container[int] = frozenset(),
        others: Container[int] = frozenset(),
    ) -> None:
        self.name, self.model, self.engine = name, model, engine
        trained = [one for one in trained_parameters(model) if id(one[1]) not in others]
        named = [one for one in trained if id(one[1]) not in sparse]
        self._dense = len(named)
        named += [one for one in trained if id(one[1]) in sparse]
        self.frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self._kept = KeptGradients(engine.views, engine.memory)
        self._whole: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients beside the views that all ranks have alike
        self._steps = steps
        self._current_weight = steps.weight.now
        self.wholes = WholeSums(self.parameters, steps.weight.now)
        self._fired: set[int] = set()
        self._fired_before: set[int] = set()  # under no_sync, since the last round
        self._submitted: set[int] = set()
        self._handing = threading.Lock()  # autograd has a thread for each device
        self._layout = BucketLayout(engine, name, steps, self._lay_out)
        self._refired: set[int] = set()  # changed after they had been handed over
        self._open = False
        self._ids = {id(p) for p in self.parameters}
        self._pending: float | None = None  # weight of what backward left in p.grad under no_sync
        self._stash: dict[int, torch.Tensor] | None = None
        self._stash_goes = False  # once the pass has made gradients of this model
        self._watch: UsedParameters | None = None
        self.compression = ""  # of its engine, in words
        self.adds = False  # by Adasum: no mean comes of it
        self.leaves_parts = False  # p.grad is no sum: es.optim forms these (evenstep.sharded_gradients)
        self.local: LocalTraining | None = None  # es.LocalSGD, es.DiLoCo: gradients stay on their rank
        self.stale: StaleRounds | None = None  # es.Stale
        self.enabled = True  # False under no_sync
        self.rounds = 0  # that are done
        self.nonfinite: Found = []  # what was not finite in the last of them
        self.look = GradientLook()
        self._hooks: list[Any] = []
        self._hook_look: HookLook | None = HookLook()
        self.idle = False  # the pass under way is void: what it makes stays here
        self.defer = False  # nested backward passes seen: hand over only at the end
        for index, parameter in enumerate(self.parameters):
            self._hook(index, parameter)

    def use_options(self, options: DDPOptions, asks_once: bool = False) -> None:
        """asks_once: every rank's engine can be told which parameters have gradients in all rounds to come."""
        if not options.gradient_as_bucket_view:
            self._kept.own.update(range(self._dense))
        if options.watches:
            self._watch = UsedParameters(self.name, self._names[: self._dense], options)
            self._watch.asks_once = asks_once

    def add_up(self) -> None:
        """Before the first pass: losses are sums over samples, so gradients are added up as they are."""
        self._current_weight = self._steps.weight.count
        self.wholes.on = True

    def _hook(self, index: int, parameter: nn.Parameter) -> None:
        if not parameter.is_leaf:
            raise EvenstepError(
                f"parameter {self._names[index]!r} of model {self.name!r} is not a leaf tensor, so it gets no gradient"
            )

        fired, submit = self._fired, self._submit

        def on_gradient(p: torch.Tensor) -> None:
            if index in fired:
                self._fired_again(index, p)
                return
            fired.add(index)
            if self._layout.watches and self.local is None and self.stale is None:
                self._layout.saw(index)
            if self.enabled and self._stash is None and not self.defer and self.local is None and not self.idle:
                submit(index, p)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    @property
    def engines(self) -> Sequence[Engine]:
        """All that its gradients go through: under es.Stale several."""
        return [self.engine] if self.stale is None else self.stale.engines

    @torch.no_grad()
    def go_on(self, engines: Sequence[Engine]) -> None:
        """With other engines, of the ranks that are left. Gradients that are whole stay: their step may stand."""
        engine = engines[0]
        own = self._kept.own
        whole = {id(one): one for one in (*self.engine.views, *(known() for known in self._whole.values()))}
        self.engine = engine
        if self.local is not None:
            self.local.engine = engine
        self._kept = KeptGradients(engine.views, engine.memory)
        self._kept.own.update(own)
        self._layout = BucketLayout(engine, self.name, self._steps, self._lay_out)
        if self._watch is not None:
            self._watch.begin_anew()
        self._whole.clear()
        self._fired.clear()
        self._fired_before.clear()
        self._submitted.clear()
        self._refired.clear()
        self._open = False
        self._pending = self._stash = None
        self.rounds = 0
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad  # in the memory of the engine that has ended
            if gradient is not None:
                parameter.grad = gradient.detach().clone()
                if id(gradient) in whole:  # another optimizer may step on it
                    self._whole[index] = weakref.ref(parameter.grad)

    @torch.no_grad()
    def leave_void(self) -> None:
        """The end of a backward pass that counts nothing."""
        self.abandon()
        self.idle = False
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    # -- what is remembered from step to step, where ranks may be lost --

    @property
    def _remember(self) -> list[Any]:
        return [one for one in (self.local, self.stale, self.engine) if hasattr(one, "take_back")]

    def stands(self) -> None:
        """The turn under way is committed."""
        for one in self._remember:
            one.stands()

    def take_back(self) -> None:
        """What was made since then counts nothing, or is made a second time."""
        for one in self._remember:
            one.take_back()

    def lost_with(self, ranks: Sequence[int]) -> list[str]:
        """What nobody has any more once these ranks are lost."""
        return [f"model {self.name!r}: {words}" for one in self._remember if (words := one.lost_with(ranks))]

    def close(self) -> None:
        """The parameters are torch's again; the engine goes when nothing refers to its memory any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.wholes.close()

    # -- during backward --

    def _fired_again(self, index: int, parameter: torch.Tensor) -> None:
        if index not in self._submitted:
            return  # it has not been handed over, so all of it will be
        if self._kept.has(index, parameter.grad):
            raise EvenstepError(
                f"parameter {self._names[index]!r} got a second gradient in one backward (reentrant "
                "checkpointing) after its first was already being reduced\n"
                "  fix: use torch.utils.checkpoint with use_reentrant=False, or zero_grad(set_to_none=True)"
            )
        self._refired.add(index)

    def _submit(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or index >= self._dense:
            return
        if gradient.layout is not torch.strided:  # from no layer that said so: other ranks may have it dense
            gradient = parameter.grad = gradient.to_dense()
        with self._handing:
            if not self._open:
                self._begin(self._current_weight())
            self._submitted.add(index)  # also where it fails: it lies in its place
            self.engine.ready(index, gradient)

    def _begin(self, weight: float) -> None:
        self._kept.let_go(self.parameters[: self._dense])
        self.engine.begin(weight, self._steps.step)
        self._open = True

    # -- around backward --

    def before_backward(self, empty: bool = False) -> None:
        """Makes what no_sync left in p.grad count with its own weight beside the gradients to come.

        empty: they count nothing on any rank, so that all that is there stays.
        """
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise EvenstepError(
                    f"parameter {name!r} of model {self.name!r} was frozen when es.prepare saw it and now requires a "
                    "gradient, which would differ between ranks\n"
                    "  fix: call es.prepare while all parameters that will ever be trained require gradients"
                )
        weight = self._current_weight()
        if not self._open:
            self._layout.between_rounds()
        if self._hook_look is not None and not self._looks_at_hooks(self._hook_look):
            self._hook_look = None
        if self.stale is not None and self.enabled:
            self.stale.check_once_a_step(self._steps.step)
        if empty or (weight == 0.0 and (self._pending is not None or not self.enabled or self.local is not None)):
            # What comes counts nothing; what is there is kept apart. A whole sum from before counts with this pass's weights, on the
            # other ranks in full and here not at all: it goes, but where the pass is of other models alone, or fails.
            self._stash = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
            self._stash_goes = not empty and self._pending is None and self.local is None
            for parameter in self.parameters:
                parameter.grad = None
        elif self._pending is not None and self._pending != weight and self.local is None:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._pending / weight)
            self._pending = weight
        self.wholes.begin(weight > 0 and self._pending is None and self._stash is None)

    def _looks_at_hooks(self, look: HookLook) -> bool:
        group = self._steps.group
        mine = group.rank == 0 and group.ranks > 1 and self.local is None
        return mine and look.goes_on(self.name, self._names, self.parameters, self.rounds)

    def after_unsynchronised(self) -> None:
        """Closes a backward under no_sync."""
        if self.local is not None:
            self.local.saw(self._steps.weight.amount() if self._fired else 0.0)
        if self._stash is not None:
            if self._fired and self._stash_goes:
                self._stash.clear()
            self._unstash()
        elif self._fired:
            self.wholes.end()
            self._pending = self._current_weight()
            self._fired_before |= self._fired
        self.wholes.leave()
        self._fired.clear()
        self._refired.clear()

    def _unstash(self) -> None:
        assert self._stash is not None
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self._stash.get(index)
        self._stash = None
        self._fired.clear()  # what came was thrown away

    def has_any(self, ids: set[int]) -> bool:
        """Whether one of these parameters (ids) is among those that it reduces."""
        return not self._ids.isdisjoint(ids)

    def differing(self, ids: set[int]) -> str | None:
        """One of these parameters (ids) whose gradient is another on some rank; None where all are whole.

        Collective where a gradient is not the object that a round left: the script may have computed it from one, so only
        the values can tell. Where ranks train on their own, they do differ.
        """
        if self.local is not None:
            return None
        views, found = self.engine.views, {}
        for index, parameter in enumerate(self.parameters[: self._dense]):
            gradient = parameter.grad
            if gradient is None or gradient is views[index] or id(parameter) not in ids:
                continue
            known = self._whole.get(index)
            if known is None or known() is not gradient:
                found[index] = gradient
        if not found:
            return None
        with self._steps.blocking():
            index = first_differing(self._steps.group, found)
        # Those that are the same are not remembered: the script may write others into the same objects.
        return None if index is None else self._names[index]

    @property
    def handed_over(self) -> list[torch.Tensor]:
        """Parameters whose gradients the pass under way has made."""
        return [self.parameters[index] for index in self._fired]

    def take_gradients(self, but: Sequence[torch.Tensor] = ()) -> None:
        """What is in p.grad takes part in the round to come, as if a backward pass had made it; `but`: that is there already."""
        there = {id(p) for p in but}
        self.wholes.take_own()
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or id(parameter) in there:
                continue
            self._fired.add(index)
            if index in self._kept.own or gradient.requires_grad:
                # It is to be written in place, and torch.autograd.grad may give expanded or shared memory.
                parameter.grad = gradient.clone()

    def taken(self) -> str | None:
        """A parameter whose gradient of this pass is gone: a hook of the script has used it as this rank alone has it."""
        gone = (self._names[index] for index in self._fired if self.parameters[index].grad is None)
        return next(gone, None)

    def abandon(self) -> None:
        """A backward failed before anything was handed over, or counts nothing: what was there before it stays."""
        if self._stash is not None:
            self._unstash()
        self.wholes.leave()
        self._fired.clear()
        self._refired.clear()

    @property
    def fired(self) -> bool:
        """Whether this backward, or one under no_sync before it, gave this model a gradient on this rank."""
        return (bool(self._fired) and not self._steps.weight.empty) or self._pending is not None

    @property
    def unsynchronised(self) -> bool:
        """Whether p.grad holds what only this rank has."""
        return self._pending is not None

    @property
    def ids(self) -> set[int]:
        """Of its parameters."""
        return self._ids

    @property
    def may_be_spared(self) -> bool:
        """Whether zeros may be handed over in place of what backward would make. Not in the first round, which shows in
        what order gradients come."""
        plain = self.local is None and self.stale is None and self._dense == len(self.parameters) and not self.defer
        return plain and self.enabled and self.rounds > 0 and self._pending is None and self._stash is None

    @torch.no_grad()
    def hand_over_zeros(self, reached: Container[int]) -> None:
        """What a backward that counts nothing hands over: gradients of these parameters (ids), whatever they are."""
        for index, parameter in enumerate(self.parameters):
            if id(parameter) not in reached:
                continue
            if not self._open:
                self._begin(0.0)
            self._fired.add(index)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter) if index in self._kept.own else self.engine.views[index]
            self._submit(index, parameter)

    @property
    def open(self) -> bool:
        return self._open

    @property
    def begun(self) -> bool:
        """Whether the pass under way has changed a p.grad, or handed one over."""
        return self._open or (bool(self._fired) and self._stash is None)

    @property
    def refired(self) -> bool:
        return bool(self._refired)

    def give_up(self, begins: bool = False) -> None:
        """The round under way counts nothing, on no rank, and some may wait for what this one has not handed over. begins: where
        it has none yet, others may have one."""
        if self.local is not None or self.stale is not None or not hasattr(self.engine, "give_up"):
            return
        with self._handing:  # another device's thread may still be in backward
            if begins and not self._open:
                self._begin(0.0)
            if self._open:
                self.engine.give_up()

    def end_calls(self, by_others: bool = False) -> None:
        """A rank is lost, hangs, or has failed: what engines of torch's wait for ends, on all ranks. by_others: these hear of it from
        this one, and end theirs."""
        for engine in self.engines:
            if hasattr(engine, "end_calls"):
                engine.end_calls(by_others)

    def settle(self) -> bool:
        """Before the ranks vote: until what this rank does for the exchange by itself is done, where the engine has such a part.
        Whether it has."""
        if not (self._open and hasattr(self.engine, "settle")):
            return False
        self.engine.settle()
        return True

    @torch.no_grad()
    def finish(self, again: bool) -> Report:
        """Collective. `again`: some rank's gradient changed after it was handed over, so the round runs twice."""
        weight, made = self._current_weight(), bool(self._fired)  # made: by this rank's own backward
        if self._stash is not None:
            self._unstash()
            weight = self._pending if self._pending is not None else 0.0
        self.wholes.end()
        if self.local is not None or self.stale is not None:
            report = self._stay_local(made) if self.local is not None else self._take_turns(weight)
            return self._done(report)
        if not self._open:
            self._begin(weight)
        if again and hasattr(self.engine, "discard"):
            self.engine.discard()
        used, report = self._close_round()
        if again:
            self._keep_sums(weight)
            self._begin(weight)
            used, second = self._close_round()
            report.goes_on(second)
        if self._watch is not None:
            self._watch_used(self._watch, used)
        self.nonfinite = self.look.at_sums(
            self.engine, [index for index in range(self._dense) if used[index]], self.parameters
        )
        self._layout.round_ends(used, report)
        views = self.engine.views
        for index, parameter in enumerate(self.parameters[: self._dense]):
            if used[index]:
                gradient = parameter.grad
                if self.leaves_parts:
                    self._leave_part(index, parameter)
                elif gradient is not views[index]:
                    self._put(index, parameter, gradient)
        if self._dense < len(self.parameters):
            with self._steps.blocking():
                moved = sum_sparse(self._steps.group, self.parameters[self._dense :], weight)
            report.bytes += moved
            report.full_bytes += moved
            report.own_ns = 0  # what came before this meeting lay between two
            self.nonfinite += self.look.at_common(range(self._dense, len(self.parameters)), self.parameters, late=False)
        return self._done(report)

    def _keep_sums(self, weight: float) -> None:
        """Between two rounds of one pass: what the first summed into p.grad of a rank that counts is all ranks' gradient of the second."""
        mine = self._kept.in_memory(self.parameters[: self._dense]) if weight > 0 else []
        with self._steps.blocking():
            sums = sums_of_all(self._steps.group, mine, self._refired, self._names)
        for index in set(sums).difference(mine):
            self._put(index, self.parameters[index], self.parameters[index].grad)
        if hasattr(self.engine, "keep"):
            self.engine.keep(sums)
        self.wholes.divide_sums(sums)

    def _watch_used(self, watch: UsedParameters, used: Any) -> None:
        watch.check(used)
        if watch.settled is None:
            ballots, rank = self._steps.ballots, self._steps.group.rank
            watch.saw(used, self._having, [one.weight for one in ballots], rank)
            if watch.settled is not None:
                self.engine.know(watch.settled)  # type: ignore[attr-defined]

    @property
    def _having(self) -> Set[int]:
        """What this rank has gradients of for the round that is to be closed, or has been: what backward made, for what else is
        there may be an earlier round's sum. But what would not travel counts in any case."""
        if len(self._submitted) == self._dense:
            return self._submitted
        made = self._fired_before if self._stash is not None else self._fired_before | self._fired
        settled = self._watch.settled if self._watch is not None else None
        if settled is None:
            return {index for index in made if index < self._dense}
        grads = [p.grad for p in self.parameters] if self._stash is None else map(self._stash.get, range(self._dense))
        return {i for i, (one, known) in enumerate(zip(grads, settled)) if i in made or not (known or one is None)}

    @property
    def changed(self) -> bool:
        """Whether static_graph=True was said and this rank now has gradients of others than it had. Before the ranks vote."""
        watch = self._watch
        return (
            watch is not None and watch.settled is not None and watch.differs(self._having, self._current_weight() > 0)
        )

    def refuse_changed(self, ranks: Sequence[int]) -> None:
        """Raises on every rank where these have others, after the round: none waits for another then."""
        if ranks and self._watch is not None:
            raise self._watch.refuse(ranks, self._steps.group.rank)

    def look_at_own(self, counts: bool, quiet: bool = False) -> bool:
        """Where gradients stay on their rank: whether this rank's are finite. The vote tells the others."""
        found = self.look.at_own(self.parameters) if counts else []
        assert self.local is not None
        self.nonfinite = self.local.to_tell([(index, index != UNNAMED) for index, _ in found], quiet, self.fired)
        return not self.nonfinite

    def name_of(self, index: int) -> str:
        return self._names[index]

    def _done(self, report: Report) -> Report:
        self._fired.clear()
        self._fired_before.clear()
        self._refired.clear()
        self._pending = None
        self.rounds += 1
        self.wholes.remember()
        return report

    def _stay_local(self, made: bool) -> Report:
        assert self.local is not None
        self.local.saw(self._steps.weight.amount() if made else 0.0)
        self.local.spare_exchange()
        return Report(0, 0, 0, 0)

    def _take_turns(self, weight: float) -> Report:
        """p.grad goes to the other ranks, and the sum of an earlier step comes in its place."""
        assert self.stale is not None
        if self.stale.passes_over:
            return Report(0, 0, 0, 0)
        mine = {i: p.grad.detach() for i, p in enumerate(self.parameters) if p.grad is not None}
        mine = {i: g if g.layout is torch.strided else g.to_dense() for i, g in mine.items()}
        due, reports = self.stale.turn(mine, weight, self._steps.step)
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad = due.get(index)
            if gradient is not None:
                self._whole[index] = weakref.ref(gradient)
        self.nonfinite = self.look.at_common(range(len(self.parameters)), self.parameters)
        self._steps.saved.add(str(self.stale), 0, 0)  # as many bytes as without, but at another time
        return Report.of_others(reports)

    def take_order(self, order: tuple[list[int], list[int]] | None) -> None:
        """BucketLayout.take_order."""
        self._layout.take_order(order, self._dense)

    @torch.no_grad()
    def _lay_out(self, anew: Callable[[], bool]) -> None:
        """Between rounds: `anew` moves the engine's views. What p.grad still holds of its memory gets memory of its own."""
        parameters = self.parameters[: self._dense]
        self._kept.let_go(parameters)
        for index in self._kept.in_memory(parameters):
            gradient = parameters[index].grad
            assert gradient is not None
            gradient = parameters[index].grad = gradient.clone()
            self._whole[index] = weakref.ref(gradient)
        if anew():
            own, self._kept = self._kept.own, KeptGradients(self.engine.views, self.engine.memory)
            self._kept.own.update(own)

    def _close_round(self) -> tuple[Any, Report]:
        if len(self._submitted) < self._dense:
            for index, parameter in enumerate(self.parameters[: self._dense]):
                if parameter.grad is not None and index not in self._submitted:
                    self._submit(index, parameter)
        used, report = self.engine.finish()
        self._open = False
        self._submitted.clear()
        return used, report

    def _leave_part(self, index: int, parameter: nn.Parameter) -> None:
        assert isinstance(self.engine, SharedEngine)
        part = self.engine.part(index)
        if parameter.requires_grad and part is not None:
            parameter.grad = part
            self._whole[index] = weakref.ref(part)

    def _put(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        view = self.engine.views[index]
        if gradient is not None and gradient.requires_grad:  # create_graph=True: keep the graph, change the value
            gradient.data.copy_(view)
        elif index in self._kept.own and gradient is not None:
            gradient.copy_(view)
        elif parameter.requires_grad:
            gradient = parameter.grad = view.clone() if index in self._kept.own else view
        else:
            return
        self._whole[index] = weakref.ref(gradient)
