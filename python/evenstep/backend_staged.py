"""Which calls of CUDA tensors a group makes through the host, and why: what NCCL lacks, or legs between hosts do not carry, and its
own CPU engine has."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from evenstep import _core
from evenstep.backend_device import DeviceCollectives
from evenstep.backend_gloo import changed, flat
from evenstep.backend_sparse import summable
from evenstep.backend_tensors import WORDS, engine_dtype, factor_of, given_options, is_on_gpu, op_of, wants_work
from evenstep.backend_work import Worker
from evenstep.comm_debug import note
from evenstep.device_host import HostCalls
from evenstep.device_streams import CudaStreams, SeveralWorks

_NARROW = (torch.int16, torch.uint16)
_UNKNOWN_TO_TORCH = (torch.uint32, torch.uint64)  # though not to NCCL
_TAGS = 1 << 30
"""Tags of messages over the host begin here: CPU tensors' are others, as CPU tensors' messages without tags are."""


def lacking(tensors: Sequence[torch.Tensor], options: Any, torchs: bool) -> str:
    """What NCCL lacks for this reduction of CUDA tensors, where the CPU engine has it; else "". `torchs`: it is torch's NCCL."""
    op = op_of(options)
    if op is None or factor_of(options) is not None or not tensors or not all(map(is_on_gpu, tensors)):
        return ""
    if tensors[0].layout is torch.sparse_coo:
        return "sparse tensors" if len(tensors) == 1 and op == _core.OP_SUM and summable(tensors[0]) else ""
    if any(tensor.layout is not torch.strided or engine_dtype(tensor.dtype, op) is None for tensor in tensors):
        return ""
    if op in WORDS:
        return WORDS[op]
    unknown = (*_NARROW, *_UNKNOWN_TO_TORCH) if torchs else _NARROW
    return next((f"reductions of {tensor.dtype}" for tensor in tensors if tensor.dtype in unknown), "")


@contextlib.contextmanager
def _with_a_work(options: Any) -> Iterator[None]:
    """Inside, the options ask for a Work."""
    if getattr(options, "asyncOp", True):
        yield
        return
    options.asyncOp = True
    try:
        yield
    finally:
        options.asyncOp = False


class StagedMixin:
    """A group's calls of CUDA tensors through the host."""

    over_hosts = ""  # how they cross hosts, in place of EVENSTEP_DEVICE_HOSTS, where it is set before the first call

    _comm: _core.Comm | None
    _rank: int
    _name: str
    _worker: Callable[[], Worker]
    _devices: DeviceCollectives | None
    _torch_nccl: Any
    _host_calls: HostCalls | None
    _told: set[str]
    _for_device: Callable[[torch.device], Any]
    send: Callable[..., Any]
    recv: Callable[..., Any]
    recv_anysource: Callable[..., Any]

    def _lacking(self, tensors: Sequence[torch.Tensor], options: Any) -> str:
        """What sends this reduction through the host."""
        if not tensors or not is_on_gpu(tensors[0]):
            return ""
        self._for_device(tensors[0].device)  # chooses the engine
        lacks = lacking(tensors, options, self._devices is None)
        return f"NCCL has no {lacks}" if lacks else ""

    def _left(self, call: str, tensors: Sequence[torch.Tensor], peer: int | None = None) -> str:
        """What sends a call through the host that NCCL has."""
        if not tensors or not is_on_gpu(tensors[0]):
            return ""
        self._for_device(tensors[0].device)
        return "" if self._devices is None else self._devices.leaves(call, peer)

    def _through_host(self, call: str, why: str) -> HostCalls:
        """Says it once for each call and reason."""
        words = f"{call} of CUDA tensors goes through the host: {why}"
        if words not in self._told:
            self._told.add(words)
            note(f"group torch/{self._name}: {words}", self._rank)
        return self._calls_of_host()

    def _calls_of_host(self) -> HostCalls:
        """Where the engine of CUDA tensors is chosen: both have the same streams."""
        if self._host_calls is None:
            streams = CudaStreams() if self._devices is None else self._devices.streams
            self._host_calls = HostCalls(streams, self._before_the_next)
        return self._host_calls

    def _before_the_next(self, job: Callable[[], None]) -> Any:
        """Calls of the CPU engine come after `job`. Gloo orders its calls when they are made: there the caller waits."""
        comm = self._comm
        if comm is None:
            job()
            return None

        def or_nobody() -> None:
            try:
                job()
            except Exception:
                comm.revoke()  # no rank may take what did not come for data
                raise

        return self._worker().submit(or_nobody, None)

    def _staged(
        self, method: Callable[..., Any], why: str, tensors: Sequence[Any], options: Any, writes: bool = True
    ) -> Any:
        """The group's own method with copies of these tensors (lists of them, or lists of lists): it reads the last ones and
        writes the first ones, which may be the same."""
        outputs = list(flat(tensors[0])) if writes else []
        calls = self._through_host(method.__name__, why)
        with _with_a_work(options):
            work = calls.collective(
                list(flat(tensors[-1])),
                outputs,
                lambda copies: method(*(changed(one, copies) for one in tensors), *given_options(options)),
                tensors[0],
            )
        if wants_work(options):
            return work
        work.wait()
        return None

    # -- messages --

    def _by_host(self, tensors: Any, tag: int, peer: int | None) -> str:
        """Why a message goes there: it has a tag, or legs are between the two. The others go over NCCL, on whose both sides nobody
        knows of the other's tag."""
        if len(tensors) != 1 or not is_on_gpu(tensors[0]):
            return ""
        if tag == 0:
            return "" if peer is None else self._left("message", tensors, peer)
        if not 0 < tag < _TAGS:
            raise ValueError(f"tag {tag}: messages of CUDA tensors have tags of 0 to {_TAGS - 1}")
        self._for_device(tensors[0].device)
        return "NCCL has no tags"

    def _staged_send(self, tensor: torch.Tensor, destination: int, tag: int, why: str) -> Any:
        post = lambda copy: self.send([copy], destination, _TAGS + tag)  # noqa: E731
        return self._through_host("send", why).send(tensor, destination, post)

    def _staged_receive(self, tensor: torch.Tensor, source: int | None, tag: int, why: str) -> Any:
        def post(copy: torch.Tensor) -> Any:
            if source is None:
                return self.recv_anysource([copy], _TAGS + tag)
            return self.recv([copy], source, _TAGS + tag)

        return self._through_host("recv", why).receive(tensor, post)

    # -- several calls as one --

    def _start_coalescing(self, device: Any) -> None:
        """torch's own opens a group in its NCCL; around calls of our engine its Work would stand for theirs."""
        beneath = self._for_device(torch.device(device))
        if self._is_of_gpus(beneath):
            self._calls_of_host().start_coalescing()
        if isinstance(beneath, DeviceCollectives):
            beneath.start_coalescing()
        else:
            super()._start_coalescing(device)  # type: ignore[misc]  # of ProcessGroup

    def _end_coalescing(self, device: Any) -> Any:
        beneath = self._for_device(torch.device(device))
        ours = isinstance(beneath, DeviceCollectives)
        work = beneath.end_coalescing() if ours else super()._end_coalescing(device)  # type: ignore[misc]
        return self._end_staged(work) if self._is_of_gpus(beneath) else work

    def _is_of_gpus(self, beneath: Any) -> bool:
        return beneath is self._devices or beneath is self._torch_nccl

    def _end_staged(self, work: Any) -> Any:
        """One Work of `work`, which may be None, and of what went through the host."""
        staged = self._calls_of_host().end_coalescing()
        works = staged if work is None else [work, *staged]
        return SeveralWorks(works) if len(works) > 1 else works[0] if works else None
