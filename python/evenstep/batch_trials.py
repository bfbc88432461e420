"""Trial steps of es.find_batch_size: on the model's own memory, whose contents are kept and put back."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from evenstep import checkpoint_random
from evenstep._core import EvenstepError
from evenstep.backward import observed_backward
from evenstep.batch_norm import make_local
from evenstep.device_memory import DeviceMemory, is_out_of_memory
from evenstep.environment import Environment
from evenstep.loader import EvenLoader, check_loader
from evenstep.session import Session, in_place_of_session
from evenstep.verify_data import samples_in
from evenstep.verify_runs import Step, local_norms, loss_of, modules_in, optimizers_in

_TIMED = 3  # steps, of which the median counts
_TAKEN = 32  # samples of a data set


def one_batch(data: Any) -> Any:
    """A collated batch: the one given, or samples from all over the loader's data set."""
    if not isinstance(data, (DataLoader, EvenLoader)):
        return data
    loader = data.loader if isinstance(data, EvenLoader) else data
    if isinstance(loader.dataset, IterableDataset):
        raise EvenstepError(
            "es.find_batch_size: samples taken from a stream would be missing in training\n"
            "  fix: give one collated batch of it instead of the loader"
        )
    check_loader(loader)
    count = len(loader.dataset)
    taken = min(count, _TAKEN)
    indices = [number * count // taken for number in range(taken)]
    many = getattr(loader.dataset, "__getitems__", None)
    return loader.collate_fn(many(indices) if many is not None else [loader.dataset[index] for index in indices])


def resized(batch: Any, samples: int, size: int) -> Any:
    """`size` samples of a batch of `samples`, each as often as needed."""
    if isinstance(batch, torch.Tensor):
        if not batch.dim() or batch.shape[0] != samples:
            return batch
        return batch[torch.arange(size, device=batch.device) % samples]
    if isinstance(batch, Mapping):
        return {key: resized(value, samples, size) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(resized(value, samples, size) for value in batch))
    if isinstance(batch, list) and len(batch) == samples and not any(isinstance(one, torch.Tensor) for one in batch):
        return [batch[number % samples] for number in range(size)]  # words, one a sample
    if isinstance(batch, (list, tuple)):
        return type(batch)(resized(value, samples, size) for value in batch)
    return batch


class Lent:
    """A model and its optimizers once more, with the same memory for parameters, buffers and states: what is done to these is
    undone by `put_back`. Everything else in them is a copy."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.kept_bytes = 0  # on the host
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        lent: dict[int, Any] = {}
        for tensor in _tensors(model, optimizer):
            if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
                lent[id(tensor)] = self._lend(tensor)
        try:
            self.model, self.optimizer = copy.deepcopy((model, optimizer), lent)
        except Exception as error:
            raise EvenstepError(
                f"es.find_batch_size could not copy the model and its optimizer: {error}\n"
                "  fix: call it before torch.compile, and without hooks or attributes that cannot be copied"
            ) from error
        for module in modules_in(self.model):
            make_local(module)

    def _lend(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._kept:
            kept = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._kept[storage.data_ptr()] = storage, kept
            self.kept_bytes += storage.nbytes()
        if not isinstance(tensor, nn.Parameter):
            return tensor.data
        parameter = nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
        vars(parameter).update(vars(tensor))
        return parameter

    def put_back(self) -> None:
        for storage, kept in self._kept.values():
            storage.copy_(kept)


def _tensors(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    for module in modules_in(model):
        yield from module.parameters()
        yield from module.buffers()
    for one in optimizers_in(optimizer):
        for group in one.param_groups:
            yield from group["params"]
            yield from (value for value in group.values() if isinstance(value, torch.Tensor))  # a learning rate
        for state in one.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class TrialRuns:
    """Of one rank, as evenstep.batch_search wants them; a context manager, at whose end all is as before."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        batch: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        step: Step | None,
        memory: DeviceMemory,
        random: tuple[Any, dict[str, torch.Tensor]],
    ) -> None:
        self._given, self._memory, self._random = (model, optimizer), memory, random
        self._batch, self._samples = batch, samples_in(batch, "es.find_batch_size")
        self._loss, self._step = loss, step
        self._warm = False
        self.least = 1
        self.floor_bytes = 0

    def __enter__(self) -> TrialRuns:
        grads = (p.grad for module in modules_in(self._given[0]) for p in module.parameters())
        self.extra_bytes = sum(g.numel() * g.element_size() for g in grads if g is not None and not g.is_sparse)
        self._lent = Lent(*self._given)
        self.least = 2 if local_norms(self._lent.model) else 1  # of one sample a BatchNorm has no variance
        if self._memory.device == "cpu":
            self.extra_bytes += self._lent.kept_bytes
        self.floor_bytes = self._memory.held()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lent.put_back()
        del self._lent
        self._memory.start()

    def run(self, samples: int, limit_bytes: int) -> tuple[int | None, float]:
        if not self._warm:  # what is made once, whatever the size: optimizer states, libraries, threads
            self._warm = True
            self._attempt(samples, 1)
            self.floor_bytes = self._memory.held()
            bounded: Any = nullcontext()  # threads that cannot be started end the process
        else:
            bounded = self._memory.bounded(limit_bytes)
        with bounded:
            return self._attempt(samples, 1 + _TIMED)

    def _attempt(self, samples: int, steps: int) -> tuple[int | None, float]:
        """All the memory that an attempt took, also one that ran out, is given back."""
        self._memory.start()
        checkpoint_random.restore(self._random[0], self._random[1].__getitem__)
        ran_out = False
        try:
            seconds = self._steps(samples, steps)
            return self._memory.peak(), seconds
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
            return None, float("nan")
        finally:
            for p in (p for module in modules_in(self._lent.model) for p in module.parameters()):
                p.grad = None
            if ran_out:
                gc.collect()
            self._memory.start()

    def _steps(self, samples: int, steps: int) -> float:
        batch = resized(self._batch, self._samples, samples)
        times = []
        with in_place_of_session(Session(Environment())), observed_backward(None), torch.enable_grad():
            for _ in range(steps):
                self._memory.settle()
                began = time.perf_counter()
                self._one(batch)
                self._memory.settle()
                times.append(time.perf_counter() - began)
        return statistics.median(times[1:] or times)

    def _one(self, batch: Any) -> None:
        model, optimizer = self._lent.model, self._lent.optimizer
        if self._step is not None:
            self._step(model, optimizer, batch)
            return
        assert self._loss is not None
        for one in optimizers_in(optimizer):
            one.zero_grad()
        loss_of("es.find_batch_size", self._loss, model, batch).backward()
        for one in optimizers_in(optimizer):
            one.step()
