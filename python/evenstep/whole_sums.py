"""Gradients that are sums of all ranks' already, where losses are sums over samples: ranks' gradients are added up as they are, so of
what all have alike each must bring its part alone, or a second backward would count it once a rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class WholeSums:
    """Of one model. part(): this rank's of the batch; those of all ranks sum to 1."""

    def __init__(self, parameters: Sequence[torch.Tensor], part: Callable[[], float]) -> None:
        self._parameters, self._part = parameters, part
        self.on = False  # else nothing of this is done
        self._waiting: set[int] = set()  # whose p.grad is whole
        self._came: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # and its version then
        self._hooks: list[Any] = []

    def begin(self, counts: bool) -> None:
        """Before a backward. counts: what is there takes part in its round, and no pass under no_sync came since the last."""
        if not self.on:
            return
        self._waiting = {i for i, p in enumerate(self._parameters) if p.grad is not None} if counts else set()
        if self._waiting and not self._hooks:  # only in scripts that accumulate
            for index, parameter in enumerate(self._parameters):
                self._hooks.append(parameter.register_hook(partial(self._divide, index)))

    @torch.no_grad()
    def _divide(self, index: int, _: Any = None) -> None:
        """Before autograd adds to it."""
        if index in self._waiting:
            self._waiting.discard(index)
            gradient = self._parameters[index].grad
            if gradient is not None:
                gradient.mul_(self._part())

    def end(self) -> None:
        """Backward has ended: those that it did not reach take part all the same."""
        for index in list(self._waiting):
            self._divide(index)

    @torch.no_grad()
    def divide_sums(self, sums: Sequence[int]) -> None:
        """Before a second round of the same pass: where the first has put its sum in p.grad itself (`sums`)."""
        for gradient in [self._parameters[index].grad for index in sums if self.on]:
            if gradient is not None:
                gradient.data.mul_(self._part())  # create_graph=True: the graph stays

    def leave(self) -> None:
        """The pass has ended and made nothing for this model: what is whole stays, also where torch.autograd.grad calls the hooks."""
        self._waiting.clear()

    def take_own(self) -> None:
        """No backward comes: whatever has been set or changed since the last round is this rank's."""
        self._waiting = {i for i in self._waiting if self._is_as_it_came(i)}

    def _is_as_it_came(self, index: int) -> bool:
        gradient, (came, version) = self._parameters[index].grad, self._came.get(index, (_nothing, 0))
        return gradient is not None and gradient._version == version and came() is gradient

    def remember(self) -> None:
        """A round is over."""
        if not self.on:
            return
        self._waiting.clear()
        grads = ((i, p.grad) for i, p in enumerate(self._parameters))
        self._came = {i: (weakref.ref(grad), grad._version) for i, grad in grads if grad is not None}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _nothing() -> None:
    return None
