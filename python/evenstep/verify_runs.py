"""The runs that es.verify compares: one device alone, all ranks of the job, and ranks that one process plays."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep import checkpoint_random
from evenstep._core import EvenstepError
from evenstep.backward import observed_backward
from evenstep.batch_norm import make_local, synchronise
from evenstep.environment import Environment
from evenstep.gradient_hooks import hooks_of
from evenstep.loader import BatchPlan
from evenstep.lockstep import play
from evenstep.session import Session, in_place_of_session
from evenstep.verify_data import Batches, mapped

if TYPE_CHECKING:
    from evenstep.group import Group

Step = Callable[[Any, Any, Any], None]  # (model, optimizer, batch): one step of training, whatever it is


@dataclasses.dataclass
class Outcome:
    """Where a run has led. Of tensors with the names of the model's, in 64 bits on the CPU."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of each element the largest of all steps, without its sign
    local_norms: list[str]  # BatchNorms whose statistics were each rank's own
    rounded: str = ""  # the 16-bit type in which some module computed


@dataclasses.dataclass
class Start:
    """What every run begins with: copies, so that nothing of the script's is touched."""

    model: Any
    optimizer: Any
    dtype: torch.dtype | None
    random: tuple[Any, dict[str, torch.Tensor]]
    hooks: Mapping[str, list[Callable[..., Any]]]  # the script's, on gradients of these parameters: copies have none

    def again(self) -> tuple[Any, Any]:
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for module in modules_in(model) if self.dtype is not None else ():
            module.to(self.dtype)
        for one in optimizers_in(optimizer) if self.dtype is not None else ():
            for state in one.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                        state[key] = value.to(self.dtype)
        for name, p in _parameters_of(model) if self.hooks else ():
            for hook in self.hooks.get(name, ()):
                p.register_hook(hook)
        state, tensors = self.random
        checkpoint_random.restore(state, tensors.__getitem__)
        return model, optimizer

    def batch(self, batch: Any) -> Any:
        if self.dtype is None:
            return batch
        return mapped(batch, lambda one: one.to(self.dtype) if one.is_floating_point() else one)


def take(model: Any, optimizer: Any, dtype: torch.dtype | None) -> Start:
    try:
        copies = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise EvenstepError(
            f"es.verify could not copy the model and its optimizer: {error}\n"
            "  fix: call it before torch.compile, and without hooks or attributes that cannot be copied"
        ) from error
    for module in modules_in(copies[0]):
        module.zero_grad()
        make_local(module)
    return Start(*copies, dtype, checkpoint_random.capture(), _hooks_of(model))


def _hooks_of(model: Any) -> dict[str, list[Callable[..., Any]]]:
    return {name: hooks for name, p in _parameters_of(model) if (hooks := hooks_of(p))}


def _parameters_of(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Each once, by its name in the report."""
    seen: set[int] = set()
    for prefix, module in _named(model):
        for name, p in module.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield prefix + name, p


def loss_of(call: str, loss: Callable[[Any, Any], Any], model: Any, batch: Any) -> torch.Tensor:
    """What backward begins with. Raises TypeError where the user's function gives something else."""
    found = loss(model, batch)
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"{call}: loss(model, batch) gave a {type(found).__name__}, where backward begins with a tensor\n"
            "  fix: return the loss alone; what it is a mean over, where that is no number of samples, goes to es.set_weight(n)"
        )
    return found


def modules_in(given: Any) -> list[nn.Module]:
    return _found(given, nn.Module)


def optimizers_in(given: Any) -> list[Optimizer]:
    return _found(given, Optimizer)


def _found(given: Any, kind: type) -> list[Any]:
    if isinstance(given, kind):
        return [given]
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    return [one for part in parts for one in _found(part, kind)]


def _named(model: Any) -> Iterator[tuple[str, nn.Module]]:
    found = modules_in(model)
    for number, module in enumerate(found):
        yield f"{number}." if len(found) > 1 else "", module


def outcome_of(model: Any, gradients: Mapping[int, torch.Tensor], local: Sequence[str], rounded: str = "") -> Outcome:
    """gradients: by the parameters' ids."""
    parameters, buffers, seen = {}, {}, {}
    for prefix, module in _named(model):
        for name, p in module.named_parameters():
            parameters[prefix + name] = p.detach().double().cpu().clone()
            seen[prefix + name] = gradients.get(id(p), torch.zeros(()))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffers[prefix + name] = buffer.detach().double().cpu().clone()
    return Outcome(parameters, buffers, seen, list(local), rounded)


@contextmanager
def gradients_seen(optimizer: Any) -> Iterator[dict[int, torch.Tensor]]:
    seen: dict[int, torch.Tensor] = {}

    def look(one: Optimizer, *_: Any) -> None:
        for p in (p for group in one.param_groups for p in group["params"] if p.grad is not None):
            size = p.grad.detach().to_dense().abs().double().cpu()
            seen[id(p)] = torch.maximum(size, seen.get(id(p), size))

    hooks = [one.register_step_pre_hook(look) for one in optimizers_in(optimizer)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _rounding_seen(model: Any) -> Iterator[list[str]]:
    """The 16-bit types that modules give back."""
    seen: list[str] = []

    def look(module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.dtype in (torch.bfloat16, torch.float16):
            seen[:] = [str(out.dtype).removeprefix("torch.")]

    hooks = [m.register_forward_hook(look) for one in modules_in(model) for m in one.modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def alone(start: Start, step: Step, batches: Batches, steps: int | None = None) -> Outcome:
    """One device on whole global batches, by torch alone."""
    model, optimizer = start.again()
    with (
        in_place_of_session(Session(Environment())),
        observed_backward(None),
        gradients_seen(optimizer) as gradients,
        _rounding_seen(model) as rounded,
    ):
        for number in range(len(batches) if steps is None else steps):
            step(model, optimizer, start.batch(batches.whole(number)))
    return outcome_of(model, gradients, [], "".join(rounded))


def _plan(batches: Batches, number: int, shares: list[int], rank: int) -> BatchPlan:
    total = batches.sizes[number]
    return BatchPlan(None, 0, number, total, shares, shares[rank], 0, float("nan"))  # type: ignore[arg-type]


def _part(start: Start, batches: Batches, plan: BatchPlan, rank: int, least: int) -> Any:
    """A rank's samples, or dummy ones."""
    first = sum(plan.shares[:rank]) if plan.samples else 0
    return start.batch(batches.part(plan.batch, first, plan.samples or min(least, plan.total)))


def fresh(current: Session) -> Session:
    """A session of the same ranks that records nothing, and neither resumes nor writes checkpoints."""
    environment = dataclasses.replace(
        current.environment, telemetry_fd=-1, checkpoint_steps=0, checkpoint_seconds=0.0, plan="", resume=""
    )
    session = Session(environment)
    session.group = session.steps.group = current.group
    session.bootstrap, session.devices = current.bootstrap, current.devices
    return session


def on_ranks(
    current: Session, start: Start, step: Step, batches: Batches, options: Mapping[str, Any]
) -> tuple[Outcome, list[list[int]]]:
    """All ranks by es.prepare, with uneven shares; collective. Also the shares."""
    from evenstep.prepare import prepare
    from evenstep.verify_data import shares_of

    model, optimizer = start.again()
    session = fresh(current)
    with in_place_of_session(session), observed_backward(None):
        try:
            prepare(*modules_in(model), *optimizers_in(optimizer), **options)
            shares = shares_of(batches, session.world_size, alone=session.dummy_samples == 1)
            for number, one in enumerate(shares):
                plan = _plan(batches, number, one, session.rank)
                session.latest = session.steps.plan = plan
                step(model, optimizer, _part(start, batches, plan, session.rank, session.dummy_samples))
            session.synchronise_models()
        finally:
            session.checks.forget()
            for sync in session.steps.syncs:
                sync.close()
    return outcome_of(model, {}, local_norms(model)), shares


def local_norms(model: Any) -> list[str]:
    """BatchNorms in training that use their rank's samples alone."""
    from evenstep.batch_norm import is_synchronised

    return [
        prefix + path
        for prefix, module in _named(model)
        for path, one in module.named_modules()
        if one.training and _is_norm(one) and not is_synchronised(one)
    ]


def _is_norm(module: nn.Module) -> bool:
    scripted = getattr(module, "original_name", "")
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or scripted.startswith("BatchNorm")


Loss = Callable[[Any, Any], torch.Tensor]
_PLAYED = "model"


def played(start: Start, loss: Loss, batches: Batches, shares: list[list[int]], sums: bool) -> Outcome:
    """As `on_ranks`, in one process: the same sums, formed by torch. sums: the loss is one over samples."""
    ranks = len(shares[0])
    places = [Session(dataclasses.replace(Environment(), rank=rank, world_size=ranks)) for rank in range(ranks)]
    for place in places if sums else ():
        place.steps.weight.sums.add(_PLAYED)
    copies = [start.again() for _ in places]
    for module in (module for model, _ in copies for module in modules_in(model)):
        if on_cpu(module):
            synchronise(_PLAYED, module)
    least = 2 if local_norms(copies[0][0]) else 1

    def train(rank: int) -> Outcome:
        session, (model, optimizer) = places[rank], copies[rank]
        for number, one in enumerate(shares):
            plan = _plan(batches, number, one, rank)
            session.latest = session.steps.plan = plan
            for each in optimizers_in(optimizer):
                each.zero_grad()
            loss_of("es.verify", loss, model, _part(start, batches, plan, rank, least)).backward()
            _exchange(session, model)
            for each in optimizers_in(optimizer):
                each.step()
        return outcome_of(model, {}, local_norms(model))

    with observed_backward(None):
        return play(places, train)[0]


def on_cpu(module: nn.Module) -> bool:
    """Elsewhere autograd's own threads run backward, which could not wait for one another."""
    return all(p.device.type == "cpu" for p in module.parameters())


def _exchange(session: Session, model: Any) -> None:
    part = session.steps.weight.of_model(_PLAYED)
    group: Group = session.group
    for p in (p for module in modules_in(model) for p in module.parameters()):
        used = torch.tensor([float(p.grad is not None)])
        group.sum_(used)
        if float(used) == 0:
            continue
        whole = torch.zeros_like(p) if p.grad is None or part == 0 else p.grad.to_dense() * part
        group.sum_(whole)
        p.grad = whole
    session.steps.weight.forget()
