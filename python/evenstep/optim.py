"""es.optim: SGD, Adam and AdamW of torch.optim, whose states the ranks of one host have once.

    optimizer = es.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = es.prepare(model, optimizer, loader)

With torch's own optimizers every rank has all states and makes the whole step. These have one copy of the states in memory
that the ranks of a host share, and of each step a rank does as many pieces as it comes to, so that all end at the same time;
the result is the same to the bit on any ranks (include/evenstep/optim.h). Outside a job they are torch's, with a step of one
pass over the memory; and so they are on a rank that is alone on its host, and with es.LocalSGD and es.DiLoCo, where each rank
has states of its own. state_dict() has torch's form, and goes to torch's optimizers and back.

max_grad_norm: in a step all its gradients together count as clipped to this norm (torch.nn.utils.clip_grad_norm_, but p.grad
stays as it is). shard_gradients: gradients are reduced to who steps on them, and gathered by nobody: p.grad shows its shape alone
(ranks of one host that share the states).

Each class is a subclass of torch's, with its arguments but for foreach, fused, capturable and differentiable. Parameters in
bfloat16 and float16 have states and values in float32 (`state[p]["master"]`), from which they are rounded after each step.
Optimizers of parameters that are not dense floating-point numbers in the host's memory make torch's own step, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Union

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.engine import memory_format_of
from evenstep.errors import error_of
from evenstep.group import DTYPES
from evenstep.mended_group import is_lost
from evenstep.sharded_gradients import ShardedGradient

__all__ = ["SGD", "Adam", "AdamW"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SHORT = (torch.float16, torch.bfloat16)
_Number = Union[float, torch.Tensor]
_DECOUPLES = issubclass(torch.optim.AdamW, torch.optim.Adam)  # since torch 2.7 Adam has decoupled_weight_decay
Rule = tuple[int, float, float, float, float, float, float, float, bool, bool, bool]


class _Store:
    """The states of some parameters: what the optimizer's `state` shows are views of it."""

    def __init__(
        self, kinds: Sequence[tuple[torch.Tensor, tuple[str, ...]]], comm: _core.Comm | None, survives: bool
    ) -> None:
        """kinds: each parameter, and what states it has. Collective where there is a group."""
        self.core = _core.Optim([(p.numel(), DTYPES[p.dtype], len(names)) for p, names in kinds], comm, survives)
        self.fresh = [True] * len(kinds)  # zeros, of each parameter
        self.names: list[tuple[str, ...]] = []
        self.views: list[list[torch.Tensor]] = []
        self.strides: list[tuple[int, ...]] = []
        memory = self.core.memory()
        for number, (parameter, names) in enumerate(kinds):
            shape, stride = memory_format_of(parameter)
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self.names.append((*names, "master") if parameter.dtype in _SHORT else names)
            views = []
            for state in range(len(self.names[-1])):
                flat = torch.empty(0, dtype=wide)
                if parameter.numel():
                    at = self.core.offset(number, state)
                    flat = torch.frombuffer(memory, dtype=wide, count=parameter.numel(), offset=at)
                views.append(flat.as_strided(shape, stride))
            self.views.append(views)
            self.strides.append(stride)


class InPieces(torch.optim.Optimizer):
    """What the classes below share. Threads: one at a time, as in torch."""

    _method: int
    _names: tuple[str, ...]  # of the states, those that are not always there last
    _counts: bool  # whether "step" is one, too
    _torch: type[torch.optim.Optimizer]
    max_grad_norm: float | None = None  # may be changed between steps, on all ranks
    shard_gradients = False  # what es.prepare goes by
    grad_norm: float | None = None  # of the last step, before it was clipped; None without max_grad_norm

    def _take(self, max_grad_norm: float | None, shard_gradients: bool) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"es.optim.{type(self).__name__}(max_grad_norm={max_grad_norm!r}): give a norm of more than 0"
            )
        self.max_grad_norm, self.shard_gradients = max_grad_norm, bool(shard_gradients)

    def __getstate__(self) -> dict[str, Any]:
        own = {"max_grad_norm": self.max_grad_norm, "shard_gradients": self.shard_gradients}
        return {**super().__getstate__(), **own}

    def share(
        self,
        comm: _core.Comm | None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        waited: Callable[[int], None] | None = None,
        survives: bool = False,
        after: int = 0,
        joins: bool = False,
        waits: Callable[[], None] | None = None,
    ) -> None:
        """From the next step on its states are shared by the ranks of this group, which are on one host, have the same
        parameters and step together; None: they are its own. es.prepare does so. around: of a step; waited: is told the
        nanoseconds that it waited for the others in one. survives: ranks that end in a step are no error. after: steps that
        some of these ranks have made in the group before: this one makes so many there, too, but where it joins them. waits: called while it waits in a step for a rank that has
        not ended, and may stand still."""
        own = self.__dict__
        own.update(_around=around, _waited=waited, _survives=survives, _waits=waits)
        if joins:
            own["_made"] = after
        own["_next"] = after, comm
        self._turn_to_next()

    def _turn_to_next(self) -> None:
        own = self.__dict__
        if own.get("_next") is not None and self.made >= own["_next"][0]:
            own["_comm"], own["_next"], own["_store"] = own["_next"][1], None, None

    @property
    def made(self) -> int:
        """Steps on gradients, since it was made."""
        return int(self.__dict__.get("_made", 0))

    @property
    def shares(self) -> bool:
        """Whether other ranks have the same memory."""
        comm = self.__dict__.get("_comm")
        return comm is not None and comm.ranks > 1

    def _states_of(self, group: dict[str, Any]) -> int:
        raise NotImplementedError

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        raise NotImplementedError

    def _steps_of(self, state: dict[str, Any]) -> int:
        """How many the parameter was given before."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as torch's. Collective among the ranks of a host once es.prepare has it."""
        if not all(is_ours(p) for group in self.param_groups for p in group["params"]):
            return self._torchs_step(closure)
        loss = None
        if closure is not None:
            if self.shares and self.__dict__["_survives"]:
                raise EvenstepError(
                    f"es.optim.{type(self).__name__}.step(closure) under --recovery: a step that is taken back cannot be "
                    "taken back in memory that ranks share\n  fix: call backward() before step(), without a closure"
                )
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _torchs_step(self, closure: Callable[[], Any] | None) -> Any:
        if self.max_grad_norm is None:
            return _step_of(self._torch)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        _step_of(self._torch)(self)
        return loss

    def _step(self) -> None:
        self.grad_norm = None
        parameters = [p for group in self.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            return  # on all ranks alike; under recovery those that came meanwhile make no such step
        store = self._store_of(parameters)
        inputs = _Inputs()
        stepped, counts = [], []
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None:
                inputs.pass_over()
                continue
            if gradient.is_sparse:
                raise EvenstepError(
                    f"es.optim.{type(self).__name__} has a parameter with a sparse gradient\n"
                    "  fix: build its embedding with sparse=False, or take torch.optim.SGD or SparseAdam for it"
                )
            state = self.state[parameter] if self._counts or store.names[number] else {}  # torch's SGD has none either
            inputs.add(parameter, gradient, store.strides[number], self._steps_of(state) + 1)
            self._adopt(state, store, number)
            stepped.append(parameter)
            if "step" in state:
                counts.append(state["step"])
        rule_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        rules = [self._rule_of(group) for group in self.param_groups]
        with self.__dict__.get("_around", nullcontext)():
            most, waits = self.max_grad_norm or 0.0, self.__dict__.get("_waits")
            report = store.core.step(
                rules, inputs.values, inputs.gradients, rule_of, inputs.steps, inputs.parts_of(self), most, waits
            )
        inputs.spend()
        if self.max_grad_norm is not None:
            self.grad_norm = report[5]
        if self.__dict__.get("_waited") is not None:
            self.__dict__["_waited"](report[3])
        inputs.put_back()
        self.__dict__["_made"] = self.made + 1
        self._turn_to_next()
        if counts:
            torch._foreach_add_(counts, 1)
        torch.autograd.graph.increment_version(stepped)

    def _adopt(self, state: dict[str, Any], store: _Store, number: int) -> None:
        """Puts what is there of a parameter's states (loaded, or made by torch's step) into the store, and its views in their
        place. In a group all ranks do so before the step's first barrier, with the same numbers."""
        if "step" not in state and self._counts:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name, view in zip(store.names[number], store.views[number]):
            there = state.get(name)
            if there is view:
                continue
            if there is not None:
                view.copy_(there)
            elif not store.fresh[number]:
                view.zero_()
            state[name] = view
        store.fresh[number] = False

    def _is_adopted(self, parameters: Sequence[torch.Tensor], store: _Store) -> bool:
        """Whether all states that are there are views of it."""
        for parameter, names, views in zip(parameters, store.names, store.views):
            state = self.state.get(parameter, {})
            if any(state.get(name) is not None and state[name] is not view for name, view in zip(names, views)):
                return False
        return True

    def _store_of(self, parameters: Sequence[torch.Tensor]) -> _Store:
        """Made anew where the parameters are others than in the last step: a group was added, say. Collective then."""
        own = self.__dict__
        states = [self._states_of(group) for group in self.param_groups for _ in group["params"]]
        kinds = [(id(p), p.dtype, p.numel(), count) for p, count in zip(parameters, states)]
        store: _Store | None = own.get("_store")
        survives = self.shares and bool(own["_survives"])
        if store is not None and own["_kinds"] == kinds and not (survives and not self._is_adopted(parameters, store)):
            return store
        named = [(p, self._names[:count]) for p, count in zip(parameters, states)]
        store = self._open_surviving(named) if survives else _Store(named, own.get("_comm"), False)
        own["_store"], own["_kinds"] = store, kinds
        return store

    def _open_surviving(self, named: Sequence[tuple[torch.Tensor, tuple[str, ...]]]) -> _Store:
        """Where others end a step without those that are lost, and do not wait for who comes late: all states have to be in
        the store before anybody begins. A store of its own where a rank is lost meanwhile, until there is another group."""
        comm = self.__dict__["_comm"]
        before = {p: dict(self.state[p]) for p, _ in named if p in self.state}
        try:
            if before and comm.rank == 0:  # the others' is the same memory; the one before stays until they have moved
                try:
                    _ask(named, 1, "optimizers' states are shared anew")
                except EvenstepError:
                    comm.revoke()  # the others hear it now, not when this rank ends
                    raise
            store = _Store(named, comm, True)
            for number, (parameter, names) in enumerate(named):
                if any(self.state.get(parameter, {}).get(name) is not None for name in names):
                    self._adopt(self.state[parameter], store, number)
            comm.barrier()
            return store
        except EvenstepError as error:
            if not is_lost(error):
                raise
            for parameter, state in before.items():
                self.state[parameter] = state
            # Each of the host's ranks makes one at the same time, but for the one that was lost.
            _ask(named, max(comm.ranks - 1, 1), "a rank was lost while optimizers' states were shared anew")
            return _Store(named, None, False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but float32 states of 16-bit parameters stay what they are."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for parameter, index in zip(parameters, indices):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and parameter.dtype in _SHORT and value.dtype == torch.float32:
                    self.state[parameter][name] = value.clone()


def _ask(named: Sequence[tuple[torch.Tensor, tuple[str, ...]]], copies: int, why: str) -> None:
    """Raises where so many stores have no room, before the kernel ends a rank for it."""
    numbers = [
        (p.numel() * (8 if p.dtype == torch.float64 else 4), len(names) + (p.dtype in _SHORT)) for p, names in named
    ]
    try:
        what = "a copy of the optimizer's states" if copies == 1 else f"{copies} copies of the optimizer's states"
        _core.Memory().ask(copies * sum(size * states for size, states in numbers), what)
    except EvenstepError as error:
        if error.status == "EVEN_ERR_MEMORY":  # else nobody can say
            what = f"{why}: {str(error).partition(' (EVEN_ERR_')[0]}"
            fix = "start fewer ranks on this host, or give the job more memory; --recovery restart makes no copies"
            raise error_of("EVEN_ERR_MEMORY", what, fix) from None


class _Inputs:
    """Of one step: addresses, and what has to live as long as these are used."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.gradients: list[int] = []
        self.steps: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._parts: list[ShardedGradient] = []
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pass_over(self) -> None:
        self._append(0, 0, 0)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor, stride: tuple[int, ...], step: int) -> None:
        where = parameter
        if parameter.stride() != stride:
            where = _laid_out(parameter, parameter, stride)
            self._copied.append((parameter, where))
        if isinstance(gradient, ShardedGradient):
            self._parts.append(gradient)
            self._append(where.data_ptr(), gradient.address, step)
            return
        if gradient.dtype != parameter.dtype or gradient.stride() != stride:
            gradient = _laid_out(gradient, parameter, stride)
            self._kept.append(gradient)
        self._append(where.data_ptr(), gradient.data_ptr(), step)

    def _append(self, values: int, gradient: int, step: int) -> None:
        self.values.append(values)
        self.gradients.append(gradient)
        self.steps.append(step)

    def parts_of(self, optimizer: InPieces) -> _core.Comm | None:
        """The group whose ranks have parts of the gradients; None: these are whole."""
        whole = len(self.steps) - self.steps.count(0) - len(self._parts)
        if any(part.spent for part in self._parts):
            raise EvenstepError(
                f"es.optim.{type(optimizer).__name__}.step() a second time on gradients of which each rank has a part "
                "(shard_gradients=True)\n  fix: one step after each backward, or leave shard_gradients out"
            )
        if self._parts and whole:
            raise EvenstepError(
                f"es.optim.{type(optimizer).__name__}.step(): {whole} parameters have a gradient of the script's own, of the "
                f"{len(self._parts)} others each rank has a part (shard_gradients=True)\n"
                "  fix: leave all gradients as backward made them, or shard_gradients out"
            )
        return self._parts[0].comm if self._parts else None

    def spend(self) -> None:
        for part in self._parts:
            part.spent = True

    def put_back(self) -> None:
        """After the step: parameters that do not lie densely."""
        for parameter, where in self._copied:
            parameter.copy_(where)


def _laid_out(values: torch.Tensor, parameter: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype).copy_(values)


def is_ours(parameter: torch.Tensor) -> bool:
    dense = parameter.layout is torch.strided and type(parameter) in (torch.nn.Parameter, torch.Tensor)
    return dense and parameter.device.type == "cpu" and parameter.dtype in _FLOATS


def _step_of(kind: Any) -> Any:
    """torch's own step, without the hooks, which go around ours."""
    step = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


class SGD(InPieces, torch.optim.SGD):
    """torch.optim.SGD, with momentum, dampening, Nesterov's momentum, weight decay and maximize."""

    _method = _core.OPTIM_SGD
    _names = ("momentum_buffer",)
    _counts = False
    _torch = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: _Number = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        shard_gradients: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self._take(max_grad_norm, shard_gradients)

    def _states_of(self, group: dict[str, Any]) -> int:
        return 1 if group["momentum"] != 0 else 0

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        rates = float(group["lr"]), float(group["weight_decay"])
        flags = False, bool(group["nesterov"]), bool(group["maximize"])
        return (self._method, *rates, momentum, dampening, 0.0, 0.0, 0.0, *flags)

    def _steps_of(self, state: dict[str, Any]) -> int:
        return 0 if state.get("momentum_buffer") is None else 1  # all that its step asks


class Adam(InPieces, torch.optim.Adam):
    """torch.optim.Adam, with weight decay, AMSGrad and maximize."""

    _method = _core.OPTIM_ADAM
    _names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _counts = True
    _torch: type[torch.optim.Optimizer] = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: tuple[_Number, _Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        shard_gradients: bool = False,
    ) -> None:
        if decoupled_weight_decay and not _DECOUPLES:
            raise _core.EvenstepError(
                f"torch {torch.__version__} has no Adam with decoupled_weight_decay\n  fix: use es.optim.AdamW, or torch 2.7"
            )
        decoupled = {"decoupled_weight_decay": decoupled_weight_decay} if _DECOUPLES else {}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **decoupled)
        self._take(max_grad_norm, shard_gradients)

    def _states_of(self, group: dict[str, Any]) -> int:
        return 3 if group["amsgrad"] else 2

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        decoupled = group.get("decoupled_weight_decay", self._torch is torch.optim.AdamW)
        method = _core.OPTIM_ADAMW if decoupled else self._method
        rates = float(group["lr"]), float(group["weight_decay"])
        betas = float(group["betas"][0]), float(group["betas"][1])
        flags = bool(group["amsgrad"]), False, bool(group["maximize"])
        return (method, *rates, 0.0, 0.0, *betas, float(group["eps"]), *flags)

    def _steps_of(self, state: dict[str, Any]) -> int:
        return int(state.get("step", 0))


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, with AMSGrad and maximize."""

    _torch = torch.optim.AdamW
    _init_group = torch.optim.AdamW._init_group  # torch 2.6's is no Adam, whose own takes other words

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: tuple[_Number, _Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        shard_gradients: bool = False,
    ) -> None:
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._take(max_grad_norm, shard_gradients)
