"""Point-to-point calls of the backend: send, recv, recv from any rank."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import _core, sites
from evenstep.backend_tensors import check_outputs, is_on_gpu, is_ours, kind_of, plain

_ANY_RANK = -1


class MessageWork(dist.Work):
    """A message under way. `data` are the bytes that the engine sees, `target` where they belong when they have come."""

    def __init__(self, request: _core.Request, data: torch.Tensor, target: torch.Tensor | None) -> None:
        super().__init__()
        self._request = request
        self._data: torch.Tensor | None = data  # until the message has ended
        self._target = target
        self._rank = _ANY_RANK
        self._recorded: Future[Any] | None = None

    def keep_record(self, record: Any) -> None:
        """The profiler's record ends when the message is found to have."""
        if not self._request.done():
            self._recorded = Future()
            record._call_end_callbacks_on_future(self._recorded)

    def end_record(self) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.set_result(None)

    def _end(self, seconds: float) -> None:
        try:
            self._rank = self._request.wait(seconds)
        finally:
            if self._recorded is not None and self._request.done():
                self.end_record()
        data, target = self._data, self._target
        if data is not None and target is not None:
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                target.copy_(data)
        self._data = self._target = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end(0 if timeout is None else timeout.total_seconds())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._request.done():
            return False
        self.end_record()
        if self._data is not None or self._target is not None:
            with contextlib.suppress(
                _core.EvenstepError
            ):  # whoever waits is told; a transfer that failed may still write
                self._end(0)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the message failed with; None where it did not, or is under way."""
        if not self._request.done():
            return None
        try:
            self._end(0)
        except _core.EvenstepError as error:
            return error
        return None

    def source_rank(self) -> int:
        return self._rank

    _source_rank = source_rank


class MessagesMixin:
    """What a group does for single pairs of ranks. They need not come in the order of its collectives."""

    _comm: _core.Comm | None
    _size: int
    _messages: list[MessageWork]
    _messages_lock: threading.Lock  # CUDA tensors' messages are sent by threads
    _under: Callable[[torch.Tensor], Any]
    _by_host: Callable[[Any, int, int | None], str]
    _staged_send: Callable[[torch.Tensor, int, int, str], Any]
    _staged_receive: Callable[[torch.Tensor, int | None, int, str], Any]

    def _message(self, tensors: Any) -> torch.Tensor | None:
        """The tensor, where the engine can send or receive it."""
        possible = self._comm is not None and self._comm.sends and len(tensors) == 1 and is_ours(tensors[0])
        return tensors[0] if possible else None

    def _begun(self, request: _core.Request, data: torch.Tensor, target: torch.Tensor | None = None) -> MessageWork:
        work = MessageWork(request, data, target)
        # Kept until it is done: its data must stay, even where nobody keeps the Work.
        with self._messages_lock:
            self._messages = [other for other in self._messages if not other.is_completed()]
            if not work.is_completed():
                self._messages.append(work)
        return work

    def _end_records(self) -> None:
        """At the group's end, for messages that nobody waits for."""
        with self._messages_lock:
            for work in self._messages:
                work.end_record()

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        tensor = self._message(tensors)
        if tensor is None or self._comm is None:
            if why := self._by_host(tensors, tag, dstRank):
                return self._staged_send(tensors[0], dstRank, tag, why)
            return self._under(tensors[0]).send(tensors, dstRank, tag)
        data = plain(tensor.detach())
        kind, site = kind_of(data.dtype, 0), sites.of_message()
        request = self._comm.send(data.data_ptr(), data.nbytes, dstRank, tag, kind, site)
        return self._begun(request, data)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> MessageWork:
        assert self._comm is not None
        check_outputs([tensor])
        data = plain(tensor.detach())
        direct = data.data_ptr() == tensor.data_ptr()
        request = self._comm.receive(data.data_ptr(), data.nbytes, source, tag, kind_of(data.dtype, 0))
        return self._begun(request, data, None if direct else tensor)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        if not 0 <= srcRank < self._size:  # the engine takes -1 for any rank
            raise ValueError(f"recv: invalid source rank: {srcRank} in a group of {self._size}")
        tensor = self._message(tensors)
        if tensor is not None:
            return self._receive(tensor, srcRank, tag)
        if why := self._by_host(tensors, tag, srcRank):
            return self._staged_receive(tensors[0], srcRank, tag, why)
        return self._under(tensors[0]).recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        tensor = self._message(tensors)
        if tensor is not None:
            return self._receive(tensor, _ANY_RANK, tag)
        if why := self._by_host(tensors, tag, None):
            return self._staged_receive(tensors[0], None, tag, why)
        if is_on_gpu(tensors[0]):
            raise _core.EvenstepError(
                "a CUDA tensor cannot be received from any rank without a tag: such messages go over NCCL, which has to know "
                "who sends\n  fix: give the send and the receive one tag other than 0 (it then goes through the host), or give "
                "recv a src"
            )
        return self._under(tensors[0]).recv_anysource(tensors, tag)
