"""Steps of which one rank has all samples: no BatchNorm needs the others there. That rank computes with its own statistics, the
others with any, for what they make counts nothing; and its running statistics go to all before the step counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from evenstep.feeds import BatchPlan
    from evenstep.group import Group
    from evenstep.session import Session
    from evenstep.steps import Steps

_IN_A_ROW = 2  # batches, before a step's ranks do without one another: a script may fetch them ahead
_KEPT = ("running_mean", "running_var", "num_batches_tracked")


def sole(shares: Sequence[int]) -> int | None:
    """The rank that has all samples; None where several have some."""
    having = [rank for rank, share in enumerate(shares) if share > 0]
    return having[0] if len(having) == 1 and len(shares) > 1 else None


class SoleRank:
    """Of one session's steps. All ranks know the shares of a batch. From which one on its BatchNorms do without the others they
    agree on in a vote: who has just come has not seen the batches before."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._models: Mapping[str, nn.Module] = {}  # that are prepared, …
        self._norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # … and what of them is synchronised
        self._root: int | None = None  # of the last batches, …
        self._batches = 0  # … and how many these are
        self._agreed: tuple[int, int] | None = None  # it, and the generation of ranks that agreed
        self._source: tuple[int, int] | None = None  # the same: whose statistics may be newer than the others'
        self._apart = False  # they are: a BatchNorm has followed there alone

    def watch(self, models: Mapping[str, nn.Module], norms: Iterable[nn.Module]) -> None:
        """The running statistics of these, as long as they are part of a prepared model, are sent where one rank alone follows
        them; the same on all ranks."""
        self._models = models
        self._norms.update(norms)

    def arrives(self, plan: BatchPlan) -> None:
        root = sole(plan.shares)
        self._batches = self._batches + 1 if root == self._root else 1
        self._root = root

    @property
    def ready(self) -> bool:
        """What this rank says in a vote. Not where a script has fetched batches that are not in forward yet: then nobody knows
        which one is."""
        several = self._root is not None and self._batches >= _IN_A_ROW
        return several and bool(self._norms) and not self._steps.may_fetch_ahead

    def hear(self, all_ready: bool) -> None:
        """After the vote, in which all ranks had the same batches."""
        self._agreed = (self._root, self._generation) if all_ready and self._root is not None else None
        if self._agreed not in (None, self._source):  # of other ranks than before, which have the same statistics
            self._source, self._apart = self._agreed, False

    def of(self, norm: nn.Module, current: Session) -> int | None:
        """The rank that has all samples of what is in the BatchNorm's forward; None where all meet, as in what updates running
        statistics alone, also of copies of a model."""
        if self._agreed is None or norm not in self._norms or not torch.is_grad_enabled():
            return None
        plan, (root, generation) = current.latest or self._steps.plan, self._agreed
        here = plan is not None and len(plan.shares) == current.group.ranks and sole(plan.shares) == root
        return root if here and generation == self._generation else None

    def follows(self, root: int) -> None:
        """That one alone; said on all ranks."""
        self._source, self._apart = (root, self._generation), True

    @property
    def apart(self) -> bool:
        """Whether one rank's running statistics are newer than the others': the same on all ranks."""
        return self._apart and self._may_be_apart

    @property
    def _may_be_apart(self) -> bool:
        """The same, whatever this rank's script has run. Ranks that others come to, or leave, have the same ones."""
        return self._source is not None and self._source[1] == self._generation

    @property
    def _generation(self) -> int:
        """Of the ranks that train now."""
        return 0 if self._steps.recovery is None else self._steps.recovery.number

    def come_together(self, group: Group, commits: bool = False) -> None:
        """Where one rank has followed alone, all get its running statistics; commits: a step counts, so where it may have.
        Collective there."""
        if self.apart or (commits and self._may_be_apart):
            with self._steps.blocking():
                self.settle(group)

    def settle(self, group: Group) -> None:
        """All get the running statistics of the rank that has followed. Collective."""
        assert self._source is not None
        source, self._apart = self._source[0], False
        if self._agreed is None:
            self._source = None
        modules = (module for model in self._models.values() for module in model.modules())
        kept = [one for module in modules if module in self._norms for one in _statistics(module)]
        if not kept:
            return
        flat = torch.cat([one.detach().to("cpu", torch.float64).reshape(-1) for one in kept])
        group.broadcast_(flat, source)
        if group.rank != source:
            for one, values in zip(kept, flat.split([one.numel() for one in kept])):
                one.data.copy_(values.view(one.shape))  # no new version, as by torch's kernels


def _statistics(norm: nn.Module) -> list[torch.Tensor]:
    """All are exact as numbers of 64 bits."""
    found = [norm._buffers.get(name) for name in _KEPT]
    return [one for one in found if one is not None and not is_lazy(one)]
