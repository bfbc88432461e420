"""The gradient noise scale, from the gradients of ranks with unequal shares (McCandlish et al., "An Empirical Model of
Large-Batch Training", 2018, section 2.2 and appendix A.1, which have two batch sizes; here each rank's share is one).

Of R ranks with b_r samples, B together: g_r is the mean gradient of rank r's samples, g = sum_r b_r / B g_r that of all, G
the true one, S the trace of the covariance of a sample's gradient. Since E|g_r|² = |G|² + S / b_r and E|g|² = |G|² + S / B,

    S   = (sum_r b_r |g_r|² - B |g|²) / (R - 1)        the mean square between groups (analysis of variance, one way)
    |G|² = |g|² - S / B

have these expectations whatever the b_r are, and S is never below zero. With equal shares it is the paper's (A.2). The noise
scale is S / |G|²: each is smoothed by itself, for a quotient of the single estimates is biased.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from evenstep.steps import Steps

_KEPT = 0.95  # of what was known, at each measurement: some 20 of them count
_RECORD = struct.Struct("<ddd?")


def between_ranks(counts: Sequence[float], squares: Sequence[float], whole: float) -> tuple[float, float] | None:
    """Unbiased estimates of (S, |G|²): counts: b_r; squares: |g_r|²; whole: |g|². None where fewer than two ranks have
    samples. |G|² may come out below zero where noise is most of the gradient."""
    ranks = [(count, square) for count, square in zip(counts, squares) if count > 0]
    if len(ranks) < 2:
        return None
    batch = math.fsum(count for count, _ in ranks)
    spread = math.fsum([*(count * square for count, square in ranks), -batch * whole])
    noise = max(0.0, spread / (len(ranks) - 1))  # below zero by rounding alone
    return noise, whole - noise / batch


class NoiseScale:
    """Smoothed over measurements."""

    def __init__(self) -> None:
        self.noise = self.signal = 0.0  # S and |G|²
        self.count = 0  # measurements

    def add(self, noise: float, signal: float) -> None:
        """The first ones count alike, until they are so many that the older ones fade."""
        self.count += 1
        part = max(1.0 / self.count, 1.0 - _KEPT)
        self.noise += part * (noise - self.noise)
        self.signal += part * (signal - self.signal)

    @property
    def scale(self) -> float:
        """In samples; infinite where no gradient is seen under the noise, NaN before the first measurement."""
        if self.count == 0:
            return math.nan
        if self.signal <= 0.0:
            return math.inf if self.noise > 0.0 else math.nan
        return self.noise / self.signal

    def gain(self, base: int, batch: int) -> float:
        """How many steps of `base` samples one of `batch` is worth: 1 … batch / base (Johnson et al., "AdaScale SGD", ICML
        2020, equation 3)."""
        signal = max(0.0, self.signal)
        ahead = self.noise / base + signal
        behind = self.noise / batch + signal
        return ahead / behind if behind > 0.0 else 1.0

    def state(self) -> list[float]:
        return [self.noise, self.signal, self.count]

    def load(self, state: Sequence[float]) -> None:
        self.noise, self.signal, self.count = float(state[0]), float(state[1]), int(state[2])


@torch.no_grad()
def square_of(tensors: Sequence[torch.Tensor]) -> float:
    """The sum of the squares of all."""
    if not tensors:
        return 0.0
    norms = [_norm(one) for one in tensors]
    return float(torch.stack([one.to(norms[0].device) for one in norms]).double().square().sum())


@torch.no_grad()
def _norm(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    wide = dense.dtype in (torch.float64, torch.complex64, torch.complex128)
    norm: torch.Tensor = torch.linalg.vector_norm(dense, dtype=None if wide else torch.float32)
    return norm


class NoiseProbe:
    """Measures at the first backward of every `stride`-th step: hooks, on that pass alone, see this rank's gradients before
    they are exchanged. What is kept of them is a norm each."""

    def __init__(self, steps: Steps, stride: int, scale: Callable[[], float] | None = None) -> None:
        self.known = NoiseScale()
        self._steps, self._stride = steps, stride
        self._scale = scale  # what a GradScaler multiplies losses by
        self._armed = False
        self._clean = False  # nothing of before was in p.grad
        self._hooks: list[Any] = []
        self._norms: dict[int, torch.Tensor] = {}  # by the number of the hook
        self._stood = self.known.state()  # of the steps that are committed, where ranks may be lost

    def begin(self, first: bool) -> None:
        """Before a backward; the same on all ranks. first: since the last step."""
        self._let_go()
        steps = self._steps
        syncs = [sync for sync in steps.syncs if sync.enabled]
        due = first and steps.step % self._stride == 0
        self._armed = due and bool(syncs) and steps.plan is not None and not steps.weight.empty
        if not self._armed:
            return
        parameters = [p for sync in syncs for p in sync.parameters]
        self._clean = square_of([p.grad for p in parameters if p.grad is not None]) == 0.0
        if self._clean and steps.weight.now() > 0.0:
            trained = [p for p in parameters if p.requires_grad]
            self._hooks = [p.register_hook(partial(self._saw, number)) for number, p in enumerate(trained)]

    def _saw(self, number: int, gradient: torch.Tensor) -> None:
        if number in self._norms:
            self._clean = False  # in parts (reentrant checkpointing), whose sum is not seen
        self._norms[number] = _norm(gradient.detach())

    def exchanged(self) -> None:
        """After the sums are in p.grad. Collective where it is armed."""
        armed, self._armed = self._armed, False
        norms = list(self._norms.values())
        self._let_go()
        if not armed:
            return
        steps = self._steps
        assert steps.plan is not None
        count = steps.weight.now() * steps.plan.total
        square = float(torch.stack([one.cpu() for one in norms]).double().square().sum()) if norms else 0.0
        syncs = [sync for sync in steps.syncs if sync.enabled]
        whole = square_of([p.grad for sync in syncs for p in sync.parameters if p.grad is not None])
        with steps.blocking():
            seen = self._clean and (bool(norms) or count == 0.0)  # gradients by hand come by no hook
            told = steps.group.exchange(_RECORD.pack(count, square, whole, seen))
        self._take([_RECORD.unpack(one) for one in told])

    def _take(self, told: Sequence[tuple[float, float, float, bool]]) -> None:
        found = between_ranks([one[0] for one in told], [one[1] for one in told], told[0][2])
        unit = self._scale() if self._scale is not None else 1.0
        finite = found is not None and all(math.isfinite(one) for one in found)
        if found is not None and finite and unit > 0 and all(clean for _, _, _, clean in told):
            self.known.add(found[0] / unit**2, found[1] / unit**2)

    def load(self, state: Sequence[float]) -> None:
        """What was known before."""
        self.known.load(state)
        self._stood = self.known.state()

    def stands(self) -> None:
        """The turn under way is committed."""
        self._stood = self.known.state()

    def take_back(self) -> None:
        """What was measured since then counts nothing, or is measured a second time."""
        self._let_go()
        self._armed = False
        self.known.load(self._stood)

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._norms = [], {}
