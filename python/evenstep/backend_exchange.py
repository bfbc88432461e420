"""Collectives of the backend in which ranks have different parts: reduce, gather, scatter, all-to-all."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep import _core
from evenstep.backend_gloo import in_place, into
from evenstep.backend_tensors import (
    apart,
    as_real,
    elements_of,
    factor_of,
    given_options,
    is_ours,
    kind_of,
    kind_of_all,
    landing,
    named,
    op_of,
    plain,
    refuse,
    root_of,
    scaled,
)
from evenstep.hosts_over_gloo import Collectives


def rows(tensor: torch.Tensor, splits: Sequence[int], ranks: int, name: str) -> list[int]:
    """Bytes of each rank's part of a tensor that is split in its first dimension; equally where no splits are given."""
    length = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if length % ranks:
            raise ValueError(
                f"all_to_all_single: the {name} has {length} rows, which {ranks} ranks cannot share equally"
            )
        splits = [length // ranks] * ranks
    if len(splits) != ranks or sum(splits) != length or min(splits) < 0:
        raise ValueError(f"all_to_all_single: {name} splits {list(splits)} of {length} rows among {ranks} ranks")
    row = tensor.nbytes // length if length else 0
    return [split * row for split in splits]


def offsets(tensor: torch.Tensor, parts: Sequence[int]) -> list[int]:
    """Where each part of a contiguous tensor begins, parts given in bytes."""
    return [tensor.data_ptr() + before for before in itertools.accumulate([0, *parts[:-1]])]


def places(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int]]:
    """Addresses and bytes of contiguous tensors."""
    return (
        [0 if tensor is None else tensor.data_ptr() for tensor in tensors],
        [0 if tensor is None else tensor.nbytes for tensor in tensors],
    )


class ExchangeMixin:
    """What a group does where not all ranks have or get the same."""

    _comm: _core.Comm | None
    _engine: Collectives | None
    _rank: int
    _size: int

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """The root's tensor = op over ranks; the others keep theirs."""
        comm, op, factor = self._engine, op_of(opts), factor_of(opts)
        tensor = as_real(tensors, op)[0]
        dtype = self._reducible(tensor, op)
        if comm is None or dtype is None or op is None or len(tensors) != 1:
            if lacks := self._lacking(tensors, opts):
                at_root = self._rank == root_of(opts, "reduce", self._size)
                return self._staged(self.reduce, lacks, (tensors,), opts, writes=at_root)
            refuse([tensor] if comm is not None else (), op)
            at_root = self._rank == root_of(opts, "reduce", self._size)
            return in_place(self._under(tensors[0]).reduce, tensors, opts, here=at_root)
        root = root_of(opts, "reduce", self._size)

        def job() -> None:
            counts = [0] * self._size
            counts[root] = tensor.numel()
            data = scaled(tensor, factor)
            comm.reduce_scatter(data.data_ptr(), data.data_ptr(), counts, dtype, op, root)  # writes the root's alone
            if self._rank == root and data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data)

        return self._run(opts, job, tensors)

    def _exchange_tensors(
        self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None], *called: int
    ) -> None:
        """Rank r gets inputs[r] as the entry for this rank of its outputs; None: nothing goes. `called`: what else the
        engine is told of the call."""
        assert self._comm is not None
        targets = [None if tensor is None else landing(tensor) for tensor in outputs]
        sources = [None if tensor is None else apart(plain(tensor), targets) for tensor in inputs]
        self._comm.all_to_all(*places(sources), *places(targets), *called)
        for tensor, target in zip(outputs, targets):
            if tensor is not None and target is not None and target is not tensor:
                tensor.copy_(target)

    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        if len(parts) != self._size or any(p.numel() != own.numel() or p.dtype != own.dtype for p in parts):
            raise ValueError(
                f"{name} needs {self._size} tensors of {own.numel()} {own.dtype} elements on its root; got "
                f"{[(part.numel(), part.dtype) for part in parts]}"
            )

    def _rooted(
        self, name: str, own: torch.Tensor, parts: Sequence[torch.Tensor], outputs: Any, inputs: Any, opts: Any
    ) -> Any:
        """gather and scatter: `own` on every rank, one of the root's `parts` for each."""
        if self._comm is None or not all(map(is_ours, [own, *parts])):
            if left := self._left(name, [own]):
                return self._staged(getattr(self, name), left, (outputs, inputs), opts)
            return into(getattr(self._under(own), name), outputs, inputs, *given_options(opts))
        root = root_of(opts, name, self._size)
        every: Sequence[torch.Tensor | None] = [None] * self._size
        if self._rank == root:
            self._check_parts(name, parts, own)
            every = list(parts)
        one = [own if rank == root else None for rank in range(self._size)]
        sources, targets = (one, every) if name == "gather" else (every, one)
        called = (elements_of(own), _core.CALL_GATHER if name == "gather" else _core.CALL_SCATTER, root)
        return self._run(opts, lambda: self._exchange_tensors(sources, targets, *called), outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._rooted("gather", inputs[0], outputs[0] if outputs else [], outputs, inputs, opts)

    def gather_single(self, output: Any, own: Any, opts: Any = None) -> Any:
        """gather, into the parts of one tensor at the root; the others' is not looked at. torch asks for it since 2.14."""
        outputs: list[list[torch.Tensor]] = []
        if self._rank == root_of(opts, "gather_single", self._size):
            if output.numel() != own.numel() * self._size or output.dtype != own.dtype or not output.is_contiguous():
                raise ValueError(
                    f"gather_single of {own.numel()} {own.dtype} elements on each of {self._size} ranks needs a contiguous "
                    f"output of {own.numel() * self._size} on its root; got one of shape {tuple(output.shape)} and strides "
                    f"{output.stride()} of {output.dtype}"
                )
            outputs = [list(output.detach().view(self._size, *own.shape).unbind(0))]
        return self.gather(outputs, [own], opts)

    gather_into_tensor = gather_single  # its deprecated name

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._rooted("scatter", outputs[0], inputs[0] if inputs else [], outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if self._comm is None or not all(map(is_ours, [*outputs, *inputs])):
            if left := self._left("all_to_all", outputs):
                return self._staged(self.alltoall, left, (outputs, inputs), opts)
            return into(self._under(outputs[0]).alltoall, outputs, inputs, *given_options(opts))
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all needs {self._size} inputs and outputs, not {len(inputs)} and {len(outputs)}")
        kind, sources, targets = kind_of_all([*inputs, *outputs]), list(inputs), list(outputs)
        return self._run(opts, lambda: self._exchange_tensors(sources, targets, kind), outputs)

    def all_to_all_single(self, output: Any, whole: Any, outs: Any, ins: Any, opts: Any = None) -> Any:
        comm, ours = self._comm, is_ours(output) and is_ours(whole)
        if ours and output.dtype != whole.dtype:
            raise ValueError(f"all_to_all_single from {whole.dtype} into {output.dtype}")
        received = rows(output, outs, self._size, "output") if ours else []
        sent = rows(whole, ins, self._size, "input") if ours else []
        if comm is None or not ours:
            if left := self._left("all_to_all_single", [whole]):

                def all_to_all_single(into: Any, given: Any, *options: Any) -> Any:
                    return self.all_to_all_single(*into, *given, outs, ins, *options)

                return self._staged(all_to_all_single, left, ([output], [whole]), opts)
            call = named(self._under(whole), "all_to_all_single", "alltoall_base")
            return into(call, output, whole, outs, ins, *given_options(opts))

        def job() -> None:
            target = landing(output)
            source = apart(plain(whole), [target])
            comm.all_to_all(offsets(source, sent), sent, offsets(target, received), received, kind_of(whole.dtype, 0))
            if target is not output:
                output.copy_(target)

        return self._run(opts, job, [output])

    def alltoall_base(self, *given: Any, **named: Any) -> Any:
        return self.all_to_all_single(*given, **named)

    _reducible: Callable[[torch.Tensor, int | None], int | None]
    _run: Callable[..., Any]
    _lacking: Callable[..., str]
    _left: Callable[..., str]
    _staged: Callable[..., Any]
    _under: Callable[..., Any]
