"""How flat buffers of gradients go between the ranks, over torch's collectives or an engine group in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.device_memory import is_out_of_memory
from evenstep.errors import error_of
from evenstep.generation_torch import let_go
from evenstep.group import DTYPES, Group, TorchGroup
from evenstep.group_end import end_calls, first_line, is_late, wait_for
from evenstep.mended_group import Heed

if TYPE_CHECKING:
    from evenstep.group import Bootstrap

# its name since torch 2.13
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Exchange(Protocol):
    """Every method is collective, on contiguous flat tensors."""

    ranks: int
    met_ns: int  # when this rank last met the others here, but in what is waited for elsewhere

    def all_reduce(self, values: torch.Tensor) -> Any:
        """values = their sum over ranks once the work that it gives (maybe None) has been waited for."""

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """One row a rank of equally many bytes."""

    def gather_parts(self, payload: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """counts[r] bytes of rank r."""

    def swap(self, payloads: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Bytes for every rank, against `count` from each."""

    @property
    def lasts(self) -> bool:
        """Whether those that are left when ranks are lost can have another one."""

    def revoke(self) -> None:
        """Ends what the other ranks, and this one, wait for here. Not collective."""

    def meet_again(self, bootstrap: Bootstrap) -> Exchange:
        """That of the generation that begins, by `bootstrap`. Collective; this one stays as it is. Where it `lasts`."""

    def leave(self) -> None:
        """After `revoke`, when nothing is exchanged here any more."""


class _Call:
    """Of a process group of torch's, under way."""

    def __init__(self, work: Any, exchange: TorchExchange) -> None:
        self._work, self._exchange = work, exchange

    @property
    def over(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        exchange = self._exchange
        wait_for(self._work, exchange.process_group, heed=exchange.heed)
        exchange.under_way.remove(self)
        exchange.met_ns = _core.clock_ns()


class TorchExchange:
    """Over a process group of torch. heed: where ranks may be lost and the others go on, raises in a call that waits for one."""

    def __init__(self, process_group: Any, heed: Heed = None) -> None:
        self.process_group, self.heed = process_group, heed
        self.ranks = dist.get_world_size(process_group)
        self.met_ns = 0
        self.under_way: list[_Call] = []  # or failed

    def _begun(self, work: Any) -> _Call:
        self.under_way.append(_Call(work, self))
        return self.under_way[-1]

    def all_reduce(self, values: torch.Tensor) -> Any:
        return self._begun(dist.all_reduce(values, group=self.process_group, async_op=True))

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        rows = payload.new_empty(self.ranks * payload.numel())
        self._begun(all_gather_single(rows, payload, group=self.process_group, async_op=True)).wait()
        return rows.view(self.ranks, -1)

    def gather_parts(self, payload: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        padded = payload.new_zeros(max(counts))
        padded[: payload.numel()] = payload
        return [row[:count] for row, count in zip(self.gather(padded), counts)]

    def swap(self, payloads: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        theirs = payloads[0].new_empty(self.ranks * count)
        sizes = [one.numel() for one in payloads]
        given = theirs, torch.cat(payloads), [count] * self.ranks, sizes
        self._begun(dist.all_to_all_single(*given, group=self.process_group, async_op=True)).wait()
        return list(theirs.split(count)) if count else list(payloads[0].new_empty((self.ranks, 0)))

    def failed(self, group: Group, error: RuntimeError) -> BaseException:
        """What is to be raised for an error of a round. `group`: of the same ranks, none of which waits for this one any more."""
        if isinstance(error, EvenstepError):  # which all ranks have, or hear of
            return error
        if is_out_of_memory(error):
            group.revoke(first_line(error))  # before the others find that calls have ended
            end_calls(self.process_group)
            return error
        end_calls(self.process_group)
        if self.heed is not None and not is_late(error):  # as the agent will say, or there is no other generation
            words = f"rank {group.rank}: torch (gloo) could not exchange the gradients: {first_line(error)}"
            return error_of("EVEN_ERR_PEER_LOST", words, "another rank has ended, or hangs: see what the others say")
        told = group.explained(error, "the exchange of gradients") if isinstance(group, TorchGroup) else None
        return told or error

    # -- where ranks may be lost --

    @property
    def lasts(self) -> bool:
        return self.heed is not None

    def revoke(self) -> None:
        end_calls(self.process_group)

    def meet_again(self, bootstrap: Bootstrap) -> TorchExchange:
        return TorchExchange(bootstrap.torch_group("gloo"), self.heed)

    def leave(self) -> None:
        let_go((self.process_group,), self.under_way)
        self.under_way = []  # what has failed refers to this, and so to the group


class SharedExchange:
    """Over an engine group of CPU ranks on one host; tensors of other devices are staged."""

    lasts = True

    def __init__(self, comm: _core.Comm) -> None:
        self._comm = comm
        self.ranks = comm.ranks
        self.met_ns = 0

    def revoke(self) -> None:
        self._comm.revoke()

    def meet_again(self, bootstrap: Bootstrap) -> SharedExchange:
        comm = bootstrap.shared(0, "gradients")
        assert comm is not None
        return SharedExchange(comm)

    def leave(self) -> None: ...

    def all_reduce(self, values: torch.Tensor) -> Any:
        staged = values.cpu()
        self._comm.all_reduce(staged.data_ptr(), staged.numel(), DTYPES[staged.dtype], _core.OP_SUM)
        self.met_ns = _core.clock_ns()
        if staged is not values:
            values.copy_(staged)

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        staged = payload.cpu()
        rows = staged.new_empty((self.ranks, staged.numel()))
        counts = [staged.numel()] * self.ranks
        self._comm.all_gather(staged.data_ptr(), rows.data_ptr(), counts, _core.DTYPE_U8)
        self.met_ns = _core.clock_ns()
        return rows.to(payload.device)

    def gather_parts(self, payload: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        staged = payload.cpu()
        rows = staged.new_empty(sum(counts))
        self._comm.all_gather(staged.data_ptr() or rows.data_ptr(), rows.data_ptr(), counts, _core.DTYPE_U8)
        self.met_ns = _core.clock_ns()
        return list(rows.to(payload.device).split(counts))

    def swap(self, payloads: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        staged = [one.cpu() for one in payloads]
        rows = staged[0].new_empty((self.ranks, count))
        self._comm.all_to_all(
            [one.data_ptr() for one in staged],
            [one.numel() for one in staged],
            [row.data_ptr() for row in rows],
            [count] * self.ranks,
        )
        self.met_ns = _core.clock_ns()
        return list(rows.to(payloads[0].device))
