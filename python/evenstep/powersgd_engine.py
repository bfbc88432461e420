"""PowerSGD of gradients, by torch's own hook: over groups of ours or of torch's, and where ranks may be lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.backend_work import completed
from evenstep.encoded_engine import State
from evenstep.engine import EngineOptions
from evenstep.exchange import Exchange, TorchExchange
from evenstep.gathering_engine import GatheringEngine, all_finite
from evenstep.generation_told import name
from evenstep.group import Group


class _Bucket:
    """What torch's hook asks a bucket of DistributedDataParallel for."""

    def __init__(self, number: int, last: bool, flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        self._number, self._last, self._flat, self._gradients = number, last, flat, gradients

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


class _Sums(dist.ProcessGroup):  # type: ignore[misc]
    """What torch's hook asks a process group for, over an exchange that can be ended. Each sum is there when its call returns: the
    hook's callbacks wait for further ones. An error does not travel through torch's futures: it is kept, and nothing is added up
    after it."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(rank, exchange.ranks)
        self._exchange = exchange
        self.error: RuntimeError | None = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if self.error is None and tensors[0].numel():
            try:
                work = self._exchange.all_reduce(tensors[0])
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                self.error = error
        return completed(tensors)


class PowerSGDEngine(GatheringEngine):
    """Low-rank factors by torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, whose first steps are a plain
    all-reduce. The hook gives means over ranks, so each brings ranks * weight * gradient."""

    PLAIN_STEPS = 10
    feedback_counts_as_mean = True
    takes_back = False  # rounds may have to count nothing

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, exchange, group, telemetry, options)
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        assert options.compression is not None
        self._hook: Any = hooks.powerSGD_hook
        own = exchange.process_group if isinstance(exchange, TorchExchange) and not exchange.lasts else None
        self._sums = _Sums(exchange, group.rank) if own is None else None  # futures of torch's wait for whoever is lost
        self._shapes = [tuple(p.shape) or (1,) for p in parameters]
        self._last = len(self._buckets) - 1
        self._seed = options.seed & 0x7FFFFFFF
        self._before: tuple[Any, ...] | None = None  # the first round since `stands`
        self._counts = True  # the round under way
        self._discarded: dict[int, torch.Tensor] = {}  # errors of the last round
        self.state = hooks.PowerSGDState(
            self._sums if own is None else own,
            matrix_approximation_rank=int(options.compression.number),
            start_powerSGD_iter=self.PLAIN_STEPS,
            orthogonalization_epsilon=1e-8,
            random_seed=self._seed,
        )

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        self._counts = True
        self._discarded = {}

    def discard(self) -> None:
        self._counts = False

    def keep(self, indices: Iterable[int]) -> None:
        kept, errors = set(indices), self.state.error_dict
        for number, left in self._discarded.items():
            whole, at = errors[number].clone() if number in errors else torch.zeros_like(left), 0
            for index in self._buckets[number].indices:
                end = at + self.views[index].numel()
                if index in kept:
                    whole[at:end] = left[at:end]
                at = end
            errors[number] = whole

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        encoded = [number for number, flat in flats if flat.dtype in self._encoded and flat.numel() > 0]
        self._last = max(encoded, default=-1)
        before = self._memory()
        if self.takes_back and self._before is None:
            self._before = before
        costs = super()._reduce(flats)
        if encoded:
            finite = all(map(any, self._group.exchange(bytes([all_finite(flats)]))))
            self._met_ns = _core.clock_ns()
            if not (finite and self._counts):  # what is not finite would stay in every later one
                self._discarded = dict(self.state.error_dict) if finite else {}
                self._put_back(*before)  # a GradScaler skips the step, or its round is made a second time
        return costs

    def _memory(self) -> tuple[Any, ...]:
        """What the hook keeps between steps. It writes into the factors, and makes new errors."""
        state = self.state
        return state.iter, dict(state.error_dict), _copied(state.p_memory_dict), _copied(state.q_memory_dict)

    def _put_back(self, steps: int, errors: Any, p: Any, q: Any) -> None:
        state = self.state
        state.iter, state.error_dict = steps, dict(errors)
        state.p_memory_dict, state.q_memory_dict = _copied(p), _copied(q)

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        state, size = self.state, flat.element_size()
        gradients, at = [], 0
        for index in self._buckets[number].indices:
            count = self.views[index].numel()
            if count:
                gradients.append(flat[at : at + count].view(self._shapes[index]))
            at += count
        plain = state.iter < state.start_powerSGD_iter
        before = state.total_numel_after_compression
        left = state.error_dict.get(number)
        if (
            number not in state.p_memory_dict
        ):  # the hook draws its first factors: whoever has made other rounds draws the same
            state.rng.seed((self._seed * 1_000_003 + number) & 0x7FFFFFFF)
        flat.mul_(self._exchange.ranks)
        result = self._hook(state, _Bucket(number, number == self._last, flat, gradients)).wait()
        if self._sums is not None and self._sums.error is not None:
            raise self._sums.error
        result = result[0] if isinstance(result, (list, tuple)) else result
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)
        if not plain:
            for part in self._unused(number):
                state.error_dict[number][part] = left[part] if left is not None else 0.0
        return (flat.numel() if plain else int(state.total_numel_after_compression - before)) * size

    # -- what is kept beyond its life --

    def feedback_state(self) -> State:
        """For a checkpoint: "N" is what this rank has left out of bucket N, whose parameters are "bN"; all but "N" is alike on all
        ranks."""
        state = {str(number): error.clone() for number, error in self.state.error_dict.items()}
        state.update({f"b{number}": torch.tensor(self._buckets[int(number)].indices) for number in state})
        for kind, memory in (("p", self.state.p_memory_dict), ("q", self.state.q_memory_dict)):
            state.update({f"{kind}{number}": values.clone() for number, values in memory.items()})
        state["iter"] = torch.tensor(self.state.iter)
        return state

    def shared_state(self) -> State:
        """Of that what all ranks have alike, for one that joins."""
        return {key: torch.zeros_like(one) if key.isdigit() else one for key, one in self.feedback_state().items()}

    def of_ranks(self, state: State, ranks: int) -> State:
        """What was left out while there were so many, for those that there are now, whose mean is as much."""
        part = self._exchange.ranks / ranks
        return {key: one * part if key.isdigit() else one for key, one in state.items()}

    def load_feedback(self, state: State) -> bool:
        """In place of all that is there. What was left out of a parameter goes with it into its bucket; factors are those of whole
        buckets. Whether some begin anew."""
        memories = {"p": self.state.p_memory_dict, "q": self.state.q_memory_dict}
        for kept in (self.state.error_dict, *memories.values()):
            kept.clear()
        self.state.iter = int(state.get("iter", 0))
        left, anew = self._left_of_parameters(state), False
        for number, bucket in enumerate(self._buckets):
            if left.keys().isdisjoint(bucket.indices):
                continue
            parts = [left.get(i, torch.zeros(self.views[i].numel())).to(bucket.flat) for i in bucket.indices]
            self.state.error_dict[number] = torch.cat(parts)
            same = f"p{number}" in state and self._indices_of(state, number) == bucket.indices
            for kind, memory in memories.items() if same else ():
                memory[number] = state[f"{kind}{number}"].to(bucket.flat, copy=True)
            anew = anew or not same
        return anew

    def _indices_of(self, state: State, number: int) -> list[int]:
        """The parameters of a checkpoint's bucket; in older ones it is as this engine's."""
        if f"b{number}" in state:
            return [int(index) for index in state[f"b{number}"]]
        return self._buckets[number].indices if number < len(self._buckets) else []

    def _left_of_parameters(self, state: State) -> dict[int, torch.Tensor]:
        left: dict[int, torch.Tensor] = {}
        for key in filter(str.isdigit, state):
            indices = self._indices_of(state, int(key))
            counts = [self.views[index].numel() for index in indices if index < len(self.views)]
            if len(counts) == len(indices) and sum(counts) == state[key].numel():  # else of another model
                left.update(zip(indices, state[key].split(counts)))
        return left

    # -- where ranks may be lost --

    def stands(self) -> None:
        """The rounds since the last call count."""
        self._before = None

    def take_back(self) -> None:
        """They do not: all is as it was before."""
        if self._before is not None:
            self._put_back(*self._before)
        self._before = None

    def lost_with(self, ranks: Sequence[int]) -> str:
        if not self.state.error_dict:
            return ""
        return f"what {self._options.compression} left out of the gradients of {name(ranks, '')} is lost"

    def again(self, exchange: Exchange) -> PowerSGDEngine:
        """Another one for the same parameters; what this rank has left out goes with it."""
        self.take_back()
        other = super().again(exchange)
        assert isinstance(other, PowerSGDEngine)
        other.takes_back = self.takes_back
        other.load_feedback(other.of_ranks(self.feedback_state(), self._exchange.ranks))
        return other


def _copied(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {number: one.clone() for number, one in tensors.items()}
