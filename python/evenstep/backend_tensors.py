"""What of torch's tensors and reduce operations the engine understands."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core

_DTYPES = {
    torch.float32: _core.DTYPE_F32,
    torch.float64: _core.DTYPE_F64,
    torch.float16: _core.DTYPE_F16,
    torch.bfloat16: _core.DTYPE_BF16,
    torch.int8: _core.DTYPE_I8,
    torch.uint8: _core.DTYPE_U8,
    torch.int16: _core.DTYPE_I16,
    torch.int32: _core.DTYPE_I32,
    torch.int64: _core.DTYPE_I64,
    torch.uint16: _core.DTYPE_U16,
    torch.uint32: _core.DTYPE_U32,
    torch.uint64: _core.DTYPE_U64,
    torch.bool: _core.DTYPE_BOOL,
}
_OTHERS = (
    "complex64",
    "complex128",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
# What ranks compare of the bytes that they move. A dtype that is not here is not compared.
_ELEMENTS = {dtype: number + 1 for dtype, number in _DTYPES.items()}
_ELEMENTS.update(
    (getattr(torch, name), _core.ELEMENTS_OTHER + i) for i, name in enumerate(_OTHERS) if hasattr(torch, name)
)
_ON_GPUS = {  # NCCL reduces them from 2.24 on, the CPU engine does not
    **_DTYPES,
    torch.float8_e4m3fn: _core.DTYPE_F8E4M3,
    torch.float8_e5m2: _core.DTYPE_F8E5M2,
}
_FLOATING = {_core.DTYPE_F32, _core.DTYPE_F64, _core.DTYPE_F16, _core.DTYPE_BF16}
_RED_OP = dist.ReduceOp.RedOpType
_OPS = {
    _RED_OP.SUM: _core.OP_SUM,
    _RED_OP.AVG: _core.OP_AVG,
    _RED_OP.PRODUCT: _core.OP_PRODUCT,
    _RED_OP.MIN: _core.OP_MIN,
    _RED_OP.MAX: _core.OP_MAX,
    _RED_OP.BAND: _core.OP_BAND,
    _RED_OP.BOR: _core.OP_BOR,
    _RED_OP.BXOR: _core.OP_BXOR,
    _RED_OP.PREMUL_SUM: _core.OP_SUM,
}
_DENSE = torch.strided
# An operation of torch hashes to its number, which the extension finds there in a tenth of a microsecond.
_HASHES = {hash(dist.ReduceOp(theirs)): ours for theirs, ours in _OPS.items() if theirs != _RED_OP.PREMUL_SUM}
_FEW = len(_HASHES) == len(_OPS) - 1 and all(0 <= number < 16 for number in _HASHES)


def reducer_of(comm: _core.Comm | None) -> _core.Reducer | None:
    """All-reduces the plainest calls in one step of C and says so: one dense CPU tensor, contiguous, in the group's time limit;
    or puts them into a queue, where the call may return before. False for all others, of which nothing is done."""
    options = dist.AllreduceOptions()
    if comm is None or not _FEW or not hasattr(options, "asyncOp"):
        return None
    return _core.Reducer(comm, (torch.Tensor, torch.nn.Parameter), _HASHES, options.timeout)


WAITS_UNASKED = not hasattr(dist.AllreduceOptions(), "asyncOp")
"""torch 2.6 and 2.7: its functions wait for the Work of a call for which they have not asked one, and take no None."""


def wants_work(options: Any) -> bool:
    """Whether the caller of a call with these options needs a Work."""
    return WAITS_UNASKED or bool(getattr(options, "asyncOp", True))


def limit_of(options: Any) -> float:
    """Seconds that a call with these options has of its own; 0 for none (torch says -1 ms then)."""
    timeout = getattr(options, "timeout", None)
    return 0.0 if timeout is None else max(0.0, timeout.total_seconds())


def op_of(options: Any) -> int | None:
    """Our number for the options' reduce operation; PREMUL_SUM is a SUM of what `factor_of` has multiplied."""
    if options is None:
        return _core.OP_SUM
    op = getattr(options, "reduceOp", options)
    return _OPS.get(getattr(op, "op", op))


def factor_of(options: Any) -> Any:
    """What PREMUL_SUM multiplies with before it sums, None with any other operation."""
    op = getattr(options, "reduceOp", options)
    return op.__getstate__()[1] if getattr(op, "op", op) == _RED_OP.PREMUL_SUM else None


# kind_of(dtype, 0): the number by which ranks compare the dtype of a message; 0 for one without.
kind_of = _ELEMENTS.get


def kind_of_all(tensors: Iterable[torch.Tensor | None]) -> int:
    """The same of all of these; 0 where they differ."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return _ELEMENTS.get(dtypes.pop(), 0) if len(dtypes) == 1 else 0


def elements_of(tensor: torch.Tensor) -> int:
    """The number that all ranks must have for the elements of what a call moves; 0 where it moves nothing."""
    return _ELEMENTS.get(tensor.dtype, 0) if tensor.nbytes else 0


def is_ours(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is _DENSE


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def engine_dtype(dtype: torch.dtype, op: int) -> int | None:
    """The dtype's number where the engine can reduce it with this operation, else None."""
    number = _DTYPES.get(dtype)
    if (op == _core.OP_AVG and number not in _FLOATING) or (op in WORDS and number in _FLOATING):
        return None
    return number


def reducible(tensor: torch.Tensor, op: int | None) -> int | None:
    """The same of a tensor, which is the engine's."""
    return None if op is None or not is_ours(tensor) else engine_dtype(tensor.dtype, op)


WORDS = {_core.OP_BAND: "BAND", _core.OP_BOR: "BOR", _core.OP_BXOR: "BXOR"}
"""What the operations on bits are called."""


def refuse(tensors: Sequence[torch.Tensor], op: int | None) -> None:
    """Says which dense CPU tensor no backend for these can reduce, in torch's words; of others nothing."""
    for tensor in tensors:
        if op is None or not is_ours(tensor) or reducible(tensor, op) is not None:
            continue
        if op == _core.OP_AVG and tensor.dtype in _DTYPES:
            raise RuntimeError(f"Cannot use ReduceOp.AVG with {tensor.dtype}: use SUM, and divide")
        if op in WORDS and (tensor.is_floating_point() or tensor.is_complex()):
            raise RuntimeError(f"Cannot use ReduceOp.{WORDS[op]} with non-integral dtype {tensor.dtype}")
        raise RuntimeError(f"Invalid scalar type: {tensor.dtype} cannot be reduced so; convert it")


def root_of(options: Any, call: str, ranks: int) -> int:
    """The root that the options name, which must be one of the group's ranks."""
    root = 0 if options is None else int(options.rootRank)
    if not 0 <= root < ranks:
        raise ValueError(f"{call}: invalid root rank: {root} in a group of {ranks}")
    return root


def device_dtype(tensor: torch.Tensor, op: int | None) -> int:
    """The dtype's number for a reduction on a GPU; what NCCL cannot reduce is refused there, with the reason."""
    dtype = _ON_GPUS.get(tensor.dtype)
    if tensor.layout is not _DENSE or dtype is None or op is None:
        raise _core.EvenstepError(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot be reduced with this operation on a GPU\n"
            "  fix: convert it, or reduce a CPU copy"
        )
    return dtype


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its elements lie one after the other and mean what they say, else a copy that does."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def landing(tensor: torch.Tensor) -> torch.Tensor:
    """Where to write what the tensor shall hold: itself where its elements lie one after the other and mean what they
    say, else new memory, which `tensor.copy_` then takes."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_outputs(outputs: Any) -> None:
    """Refuses, as torch does, to write into a tensor several of whose elements are one place in memory: the last to be
    written would win. `outputs` may be lists of lists."""
    for output in outputs:
        if isinstance(output, (list, tuple)):
            check_outputs(output)
        elif output.layout is _DENSE and not output.is_contiguous() and torch._debug_has_internal_overlap(output) == 1:
            raise RuntimeError(
                f"unsupported operation: more than one element of the written-to tensor, of shape {tuple(output.shape)} "
                f"and strides {output.stride()}, refers to a single memory location. Please clone() the tensor"
            )


def of_inference(outputs: Any) -> bool:
    """Whether one of these, which may be lists of lists, was made in inference mode: torch writes into it in that mode alone,
    which is a thread's, as the group's own thread does not have it."""
    return any(of_inference(one) if isinstance(one, (list, tuple)) else one.is_inference() for one in outputs)


def apart(source: torch.Tensor, targets: Sequence[torch.Tensor | None], place: int | None = None) -> torch.Tensor:
    """A contiguous source that no target overlaps, a copy where one does: the engine reads it while it writes. Not
    where one begins `place` bytes behind the source's beginning (negative: before it): that is in place."""
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    for target in targets:
        if target is None or not target.nbytes or not source.nbytes:
            continue
        at = target.data_ptr()
        if at < end and begin < at + target.nbytes and at - begin != place:
            return source.clone()
    return source


def all_apart(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], places: Sequence[int]
) -> list[torch.Tensor]:
    """The same of pairs that go as one operation, in no order: no pair's target may overlap a source; the source's own
    target may be in place."""
    if len(sources) == 1:
        return [apart(sources[0], targets, places[0])]
    spans = sorted((to.data_ptr(), to.data_ptr() + to.nbytes, i) for i, to in enumerate(targets) if to.nbytes)
    begins = [begin for begin, _, _ in spans]
    reach = list(itertools.accumulate((end for _, end, _ in spans), max))  # of a span and all before it

    def overlapped(i: int) -> bool:
        begin, end = sources[i].data_ptr(), sources[i].data_ptr() + sources[i].nbytes
        at = bisect.bisect_left(begins, end) if begin < end else 0
        while at > 0 and reach[at - 1] > begin:
            at -= 1
            to, to_end, pair = spans[at]
            if to_end > begin and (pair != i or to - begin != places[i]):
                return True
        return False

    return [source.clone() if overlapped(i) else source for i, source in enumerate(sources)]


def scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    """`plain`, or a copy of it multiplied by the factor where there is one: of the same dtype, or torch refuses it, as it does
    in place (integers by a fraction)."""
    data = plain(tensor)
    if factor is None:
        return data
    with torch.no_grad():
        return torch.mul(data, factor, out=torch.empty_like(data))


@contextlib.contextmanager
def premultiplied(
    tensors: Sequence[torch.Tensor], options: Any, in_place: bool = False
) -> Iterator[tuple[Sequence[torch.Tensor], tuple[Any, ...]]]:
    """For a call of Gloo, which has no PREMUL_SUM: the tensors multiplied, themselves or copies, and options that say SUM.
    Anything else, and what another backend takes, as it is."""
    factor = factor_of(options)
    if factor is None or not all(map(is_ours, tensors)):
        yield tensors, given_options(options)
        return
    with torch.no_grad():
        multiplied = [tensor.mul_(factor) if in_place else scaled(tensor, factor) for tensor in tensors]
    if not hasattr(options, "reduceOp"):
        yield multiplied, (dist.ReduceOp.SUM,)
        return
    kept = copy.copy(options.reduceOp)  # what it gives is a view
    options.reduceOp = dist.ReduceOp.SUM
    try:
        yield multiplied, (options,)
    finally:
        options.reduceOp = kept  # the caller's


def as_real(tensors: Sequence[torch.Tensor], op: int | None) -> list[torch.Tensor]:
    """Complex tensors seen as pairs of reals, where the operation means the same on them."""
    if op not in (_core.OP_SUM, _core.OP_AVG):
        return list(tensors)
    return [torch.view_as_real(t) if t.is_complex() and not t.is_conj() else t for t in tensors]


def sources_as_real(tensors: Sequence[torch.Tensor], op: int | None) -> list[torch.Tensor]:
    """The same for tensors that are only read: a conjugate may then be a copy."""
    return as_real([tensor.resolve_conj() for tensor in tensors], op)


def given_options(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)


def named(backend: Any, name: str, older: str) -> Callable[..., Any]:
    """A backend's method under the name that this torch has for it."""
    method: Callable[..., Any] = getattr(backend, name, None) or getattr(backend, older)
    return method
