"""Every collective of torch on backend "evenstep", with every dtype, operation and group, against a plain reference and
against Gloo where Gloo can do it. Run in each rank: `python backend_conformance_cases.py PART`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import evenstep
from evenstep import backend_older
from evenstep.backend_tensors import WAITS_UNASKED

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]  # of which torch itself computes little, and Gloo reduces none
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool]
SIZES = (1, 37, 3000, 40_000)
OP = dist.ReduceOp
PREMUL = 0.5


def value(dtype: torch.dtype, rank: int, count: int, seed: int = 0) -> torch.Tensor:
    """What rank `rank` puts in; every rank can work it out for all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_complex:
        return torch.randn(count, 2, generator=generator, dtype=torch.float64).view(torch.complex128).view(-1).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 7, (count,), generator=generator).to(dtype)


def reduced(op: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The operation over the tensors, in the plainest way."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        table: dict[Any, Callable[[Any, Any], Any]] = {
            OP.SUM: torch.logical_or,
            OP.PRODUCT: torch.logical_and,
            OP.MIN: torch.logical_and,
            OP.MAX: torch.logical_or,
            OP.BAND: torch.logical_and,
            OP.BOR: torch.logical_or,
            OP.BXOR: torch.logical_xor,
        }
        return functools.reduce(table[op], tensors)
    if dtype.is_complex:
        return torch.view_as_complex(reduced(op, [torch.view_as_real(tensor) for tensor in tensors]))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.int64 if dtype in UNSIGNED else dtype
    values = [tensor.to(wide) for tensor in tensors]
    steps: dict[Any, Callable[[Any, Any], Any]] = {
        OP.PRODUCT: torch.mul,
        OP.MIN: torch.minimum,
        OP.MAX: torch.maximum,
        OP.BAND: torch.bitwise_and,
        OP.BOR: torch.bitwise_or,
        OP.BXOR: torch.bitwise_xor,
    }
    result = functools.reduce(steps.get(op, torch.add), values)
    return (result / len(values) if op == OP.AVG else result).to(dtype)


def possible(op: Any, dtype: torch.dtype) -> bool:
    if op == OP.AVG:
        return dtype.is_floating_point or dtype.is_complex
    if op in (OP.BAND, OP.BOR, OP.BXOR):
        return not (dtype.is_floating_point or dtype.is_complex)
    return op == OP.SUM or not dtype.is_complex


def same(got: torch.Tensor, wanted: torch.Tensor, what: object, exact: bool = True) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    if exact:
        equal = torch.equal(got, wanted)
    else:  # Gloo rounds 16-bit floats at every step, and sums in another order
        rough = 5e-2 if got.dtype in (torch.float16, torch.bfloat16) else 1e-5
        equal = torch.allclose(got, wanted, rtol=rough, atol=rough)
    assert equal, f"{what}: {got[:8]} instead of {wanted[:8]}"


def all_same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], what: object, exact: bool = True) -> None:
    assert len(got) == len(wanted), what
    for one, expected in zip(got, wanted):
        same(one, expected, what, exact=exact)


class Both:
    """A subset of the ranks, as a group of either backend."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.ours = dist.new_group(ranks, backend="evenstep")
        self.gloo = dist.new_group(ranks, backend="gloo")
        self.inside = RANK in ranks
        self.own = ranks.index(RANK) if self.inside else -1
        self.size = len(ranks)
        self.beneath = self.inside and self.ours._comm is None  # Gloo carries this group's data
        self.by_hosts = self.inside and bool(self.ours.over_hosts_by_gloo)  # between hosts, where it moves bytes

    def compare(self, what: object, call: Callable[[Any], Any], wanted: Any, floats: bool = False) -> None:
        """`call(group)` gives tensors: as wanted to the last bit on ours, nearly on Gloo where it can do that at all. Where Gloo
        is beneath ours, both can do the same."""
        try:
            theirs = call(self.gloo)
        except (RuntimeError, ValueError):
            theirs = None  # refused before anything was sent
        if theirs is None and self.beneath:
            try:
                ours = call(self.ours)
            except (RuntimeError, ValueError):
                return
            assert self.by_hosts and not floats, f"{what}: refused on Gloo, and not here"
            all_same(ours, wanted, what)
            return
        all_same(call(self.ours), wanted, what, exact=not (floats and self.beneath))
        if theirs is not None:
            all_same(theirs, wanted, (what, "on Gloo"), exact=not floats)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def reductions(both: Both) -> None:
    for seed, dtype in enumerate(ALL):
        for op in (OP.SUM, OP.AVG, OP.PRODUCT, OP.MIN, OP.MAX, OP.BAND, OP.BOR, OP.BXOR):
            count = SIZES[(seed + int(op)) % len(SIZES)]
            inputs = [value(dtype, rank, count, seed) for rank in range(both.size)]
            if not possible(op, dtype):
                try:
                    dist.all_reduce(inputs[both.own].clone(), op, group=both.ours)
                except (RuntimeError, ValueError):
                    continue
                raise AssertionError(f"{op} of {dtype} was not refused")
            one_reduction(both, dtype, op, inputs)


def one_reduction(both: Both, dtype: torch.dtype, op: Any, inputs: list[torch.Tensor]) -> None:
    count, own, size = inputs[0].numel(), both.own, both.size
    floats = dtype.is_floating_point or dtype.is_complex
    wanted = reduced(op, inputs)
    to_gloo = dtype not in (torch.bool, *UNSIGNED)  # whose SUM of booleans on Gloo is not one
    if both.beneath and not to_gloo:
        return

    def all_reduce(group: Any, asynchronous: bool = False) -> list[torch.Tensor]:
        tensor = inputs[own].clone()
        finish(dist.all_reduce(tensor, op, group=group, async_op=asynchronous))
        return [tensor]

    def reduce(group: Any) -> list[torch.Tensor]:
        tensor = inputs[own].clone()
        dist.reduce(tensor, both.ranks[-1], op, group=group)
        return [tensor] if own == size - 1 else []

    def reduce_scatter(group: Any) -> list[torch.Tensor]:
        part = torch.empty(count, dtype=dtype)
        parts = [value(dtype, own, count, 50 + r) for r in range(size)]
        dist.reduce_scatter(part, parts, op, group=group)
        whole = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(whole, torch.cat(parts), op, group=group)
        return [part, whole]

    compare = both.compare if to_gloo else functools.partial(only_ours, both)
    compare(("all_reduce", dtype, op, count), all_reduce, [wanted], floats)
    alone = both.compare if both.beneath else functools.partial(only_ours, both)
    alone("async", lambda group: all_reduce(group, True), [wanted], floats)
    compare(("reduce", dtype, op, count), reduce, [wanted] if own == size - 1 else [], floats)
    scattered = reduced(op, [value(dtype, rank, count, 50 + own) for rank in range(size)])
    compare(("reduce_scatter", dtype, op, count), reduce_scatter, [scattered, scattered], floats)


def only_ours(both: Both, what: object, call: Callable[[Any], Any], wanted: Any, floats: bool = False) -> None:
    all_same(call(both.ours), wanted, what)


def premultiplied(both: Both) -> None:
    make = getattr(torch._C._distributed_c10d, "_make_nccl_premul_sum", None)
    if make is None:
        return
    for dtype in FLOATS:
        inputs = [value(dtype, rank, 1000 * max(3, both.size), 3) for rank in range(both.size)]
        wanted = reduced(OP.SUM, [tensor * PREMUL for tensor in inputs])
        tensor = inputs[both.own].clone()
        dist.all_reduce(tensor, make(PREMUL), group=both.ours)
        exact = not both.beneath
        same(tensor, wanted, ("PREMUL_SUM", dtype), exact)
        alone = inputs[both.own].clone()
        dist.reduce(alone, both.ranks[-1], make(PREMUL), group=both.ours)
        if both.own == both.size - 1:
            same(alone, wanted, ("PREMUL_SUM reduced", dtype), exact)
        else:
            same(alone, inputs[both.own], "what is not the root's")
        kept = inputs[both.own].clone()
        part = torch.empty(1000, dtype=dtype)
        whole = kept[: 1000 * both.size]
        dist.reduce_scatter_tensor(part, whole, make(PREMUL), group=both.ours)
        same(kept, inputs[both.own], "the input of reduce_scatter")
        own_part = wanted[1000 * both.own : 1000 * both.own + 1000]
        same(part, own_part, ("PREMUL_SUM scattered", dtype), exact)
        if not (both.beneath and WAITS_UNASKED):  # Gloo of 2.6 has none
            dist.reduce_scatter(part, list(whole.split(1000)), make(PREMUL), group=both.ours)
            same(kept, inputs[both.own], "the inputs of reduce_scatter")
            same(part, own_part, ("PREMUL_SUM scattered from a list", dtype), exact)
        several = [inputs[both.own].clone(), inputs[both.own].clone()]
        with dist._coalescing_manager(both.ours):
            for tensor in several:
                dist.all_reduce(tensor, make(torch.tensor([PREMUL], dtype=dtype)), group=both.ours)
        for tensor in several:
            same(tensor, wanted, ("PREMUL_SUM by a tensor", dtype), exact)
    for dtype in (torch.int32, torch.int64, torch.bool):
        whole, part = torch.ones(3 * both.size, dtype=dtype), torch.zeros(3, dtype=dtype)
        for refused in (
            lambda whole=whole, part=part: dist.all_reduce(whole, make(PREMUL), group=both.ours),
            lambda whole=whole, part=part: dist.reduce(whole, both.ranks[0], make(PREMUL), group=both.ours),
            lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole, make(PREMUL), group=both.ours),
        ):
            try:
                refused()
            except RuntimeError as error:
                assert "can't be cast" in str(error), error
            else:
                raise AssertionError(f"PREMUL_SUM of {dtype} by a fraction was not refused")
        assert whole.all() and not part.any(), dtype
    dist.barrier(group=both.ours)


def movements(both: Both) -> None:
    for seed, dtype in enumerate(ALL):
        for count in (SIZES[seed % len(SIZES)], SIZES[(seed + 2) % len(SIZES)]):
            move(both, dtype, count, seed)


def move(both: Both, dtype: torch.dtype, count: int, seed: int) -> None:
    own, size, last = both.own, both.size, both.ranks[-1]
    inputs = [value(dtype, rank, count, seed) for rank in range(size)]
    mine = inputs[own]

    def empty(length: int = count) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)

    def broadcast(group: Any) -> list[torch.Tensor]:
        tensor = mine.clone()
        dist.broadcast(tensor, last, group=group)
        return [tensor]

    def all_gather(group: Any) -> list[torch.Tensor]:
        outputs = [empty() for _ in range(size)]
        finish(dist.all_gather(outputs, mine, group=group, async_op=True))
        whole = empty(count * size)
        dist.all_gather_into_tensor(whole, mine, group=group)
        return [*outputs, whole]

    def all_gather_coalesced(group: Any) -> list[torch.Tensor]:
        outputs = [[empty(), empty(1)] for _ in range(size)]
        dist.all_gather_coalesced(outputs, [mine, mine[-1:].clone()], group=group)
        return [tensor for of_rank in outputs for tensor in of_rank]

    def gather(group: Any) -> list[torch.Tensor]:
        outputs = [empty() for _ in range(size)] if last == RANK else None
        dist.gather(mine, outputs, last, group=group)
        return outputs or []

    def gather_single(group: Any) -> list[torch.Tensor]:
        if group is both.gloo:  # which has none
            return [torch.cat(parts)] if (parts := gather(group)) else []
        whole = empty(count * size if last == RANK else 0)
        if hasattr(dist, "gather_single"):  # since torch 2.14
            dist.gather_single(mine, whole, last, group=group)
        else:
            options = dist.GatherOptions()
            options.rootRank = size - 1
            finish(group.gather_single(whole, mine, options))
        return [whole] if last == RANK else []

    def scatter(group: Any) -> list[torch.Tensor]:
        output = empty()
        dist.scatter(output, inputs if last == RANK else None, last, group=group)
        return [output]

    def all_to_all(group: Any) -> list[torch.Tensor]:
        outputs = [empty(sender + 2 * own) for sender in range(size)]
        dist.all_to_all(outputs, [mine[:1].repeat(own + 2 * r) for r in range(size)], group=group)
        return outputs

    def all_to_all_single(group: Any) -> list[torch.Tensor]:
        output = empty(size * 3)
        dist.all_to_all_single(output, mine[:1].repeat(3 * size), group=group)
        uneven = empty(sum(sender + own for sender in range(size))).view(-1, 1)
        sent = [own + receiver for receiver in range(size)]
        dist.all_to_all_single(
            uneven, mine[:1].repeat(sum(sent)).view(-1, 1), [s + own for s in range(size)], sent, group=group
        )
        return [output, uneven]

    compare = both.compare
    compare(("broadcast", dtype, count), broadcast, [inputs[-1]])
    compare(("all_gather", dtype, count), all_gather, [*inputs, torch.cat(inputs)])
    both_parts = [part for tensor in inputs for part in (tensor, tensor[-1:])]
    compare(("all_gather_coalesced", dtype, count), all_gather_coalesced, both_parts)
    compare(("gather", dtype, count), gather, inputs if last == RANK else [])
    compare(("gather_single", dtype, count), gather_single, [torch.cat(inputs)] if last == RANK else [])
    compare(("scatter", dtype, count), scatter, [mine])
    firsts = [tensor[:1] for tensor in inputs]
    alone = both.compare if both.beneath else functools.partial(only_ours, both)
    alone(("all_to_all", dtype), all_to_all, [f.repeat(s + 2 * own) for s, f in enumerate(firsts)])
    compare(
        ("all_to_all_single", dtype),
        all_to_all_single,
        [
            torch.cat([f.repeat(3) for f in firsts]),
            torch.cat([f.repeat(s + own) for s, f in enumerate(firsts)]).view(-1, 1),
        ],
    )


def objects(both: Both) -> None:
    first = both.ranks[0]
    everything = [{"rank": rank, "text": "x" * (rank * 5000)} for rank in both.ranks]
    mine = everything[both.own]
    gathered: list[Any] = [None] * both.size
    dist.all_gather_object(gathered, mine, group=both.ours)
    assert gathered == everything
    at_root: list[Any] | None = [None] * both.size if first == RANK else None
    dist.gather_object(mine, at_root, first, group=both.ours)
    assert at_root is None or at_root == everything
    words: list[Any] = [mine, both.own]
    dist.broadcast_object_list(words, first, group=both.ours)
    assert words == [everything[0], 0]
    out: list[Any] = [None]
    dist.scatter_object_list(out, everything if first == RANK else None, first, group=both.ours)
    assert out == [mine]


def functional(both: Both) -> None:
    """The collectives that torch.compile and DTensor use: on our engine too, not on the Gloo beneath."""
    import torch.distributed._functional_collectives as calls

    group, size, own = both.ours, both.size, both.own
    for backend in group._beneath.values():
        backend_older.ended(backend, "shutdown")  # nobody may need it
    inputs = [value(torch.float32, rank, 600 * size, 4) for rank in range(size)]
    total = reduced(OP.SUM, inputs)
    same(calls.all_reduce(inputs[own], "sum", group) + 0, total, "functional all_reduce")
    gathered = calls.all_gather_tensor(inputs[own], 0, group) + 0
    same(gathered, torch.cat(inputs), "functional all_gather")
    part = calls.reduce_scatter_tensor(inputs[own], "sum", 0, group) + 0
    same(part, total[600 * own : 600 * own + 600], "functional reduce_scatter")
    exchanged = calls.all_to_all_single(inputs[own], None, None, group) + 0
    same(exchanged, torch.cat([i[600 * own : 600 * own + 600] for i in inputs]), "functional all_to_all_single")
    same(calls.broadcast(inputs[own], size - 1, group) + 0, inputs[-1], "functional broadcast")
    several = calls.all_reduce_coalesced([inputs[own], inputs[own][:5].clone()], "avg", group)
    same(several[1] + 0, reduced(OP.AVG, [i[:5] for i in inputs]), "functional all_reduce_coalesced")


def lying(tensor: torch.Tensor, how: int) -> torch.Tensor:
    """The same rows and columns in memory: row by row, column by column, or with something between them."""
    if how % 3 == 0:
        return tensor.clone()
    if how % 3 == 1:
        return tensor.t().contiguous().t()
    apart = torch.full((*tensor.shape, 2), -1.0)[..., 0]
    return apart.copy_(tensor)


def lie_otherwise(both: Both, asynchronous: bool) -> None:
    """Tensors of one shape that lie otherwise on each rank."""
    own, size, first, last = both.own, both.size, both.ranks[0], both.ranks[-1]
    options: Any = {"group": both.ours, "async_op": asynchronous}
    values = [torch.arange(12.0).view(3, 4) + 100 * rank for rank in range(size)]
    total = torch.stack(values).sum(0)
    summed, alone, told, mine = (lying(values[own], own + more) for more in range(4))
    finish(dist.all_reduce(summed, **options))
    same(summed, total, "all_reduce")
    finish(dist.broadcast(told, last, **options))
    same(told, values[-1], "broadcast")
    finish(dist.reduce(alone, last, **options))
    assert own < size - 1 or torch.equal(alone, total), alone
    parts = [lying(torch.zeros(3, 4), own + rank) for rank in range(size)]
    finish(dist.all_gather(parts, mine, **options))
    all_same(parts, values, "all_gather")
    parts = [lying(torch.zeros(3, 4), own + rank) for rank in range(size)]
    finish(dist.gather(mine, parts if own == 0 else None, first, **options))
    assert own > 0 or all(map(torch.equal, parts, values)), parts
    part = lying(torch.zeros(3, 4), own + 1)
    given = [lying(value, rank) for rank, value in enumerate(values)]
    finish(dist.scatter(part, given if own == 0 else None, first, **options))
    same(part, values[own], "scatter")
    whole, into = lying(torch.cat(values) * (own + 1), own), lying(torch.zeros(3 * size, 4), own + 1)
    finish(dist.all_to_all_single(into, whole, **options))
    same(into, torch.cat([values[own] * (rank + 1) for rank in range(size)]), "all_to_all_single")
    finish(dist.reduce_scatter_tensor(part, whole, **options))
    same(part, values[own] * (size * (size + 1) / 2), "reduce_scatter_tensor")
    finish(dist.all_gather_into_tensor(into, mine, **options))
    same(into, torch.cat(values), "all_gather_into_tensor")


def layouts(both: Both) -> None:
    """Tensors whose elements do not lie one after the other, and what torch refuses."""
    own, size, first = both.own, both.size, both.ranks[0]
    total = size * (size + 1) / 2
    matrix = torch.full((3, 4), float(own + 1))
    dist.reduce(matrix.t(), first, group=both.ours)
    assert torch.equal(matrix, torch.full((3, 4), total if own == 0 else own + 1.0))
    columns = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.gather(torch.full((3, 4), float(own)), columns if own == 0 else None, first, group=both.ours)
    assert own != 0 or all(bool(c.eq(r).all()) for r, c in enumerate(columns))
    wide = torch.zeros(size, 6)[:, :2]
    dist.all_to_all_single(wide, torch.full((size, 2), float(own)), group=both.ours)
    assert torch.equal(wide, torch.arange(float(size)).view(-1, 1).expand(size, 2))
    outputs = [torch.zeros(2) for _ in range(size)]
    if not both.beneath or both.by_hosts:  # Gloo reduces no complex numbers, and scatters no sums of lists
        pair = torch.view_as_complex(torch.tensor([[1.0, own + 1.0]]))
        part, parts = torch.zeros(1, dtype=torch.complex64), [pair.conj()] * size
        dist.reduce_scatter(part, parts, group=both.ours)
        assert torch.equal(part, torch.tensor([complex(size, -total)]))
        dist.reduce_scatter_tensor(part, torch.cat([pair] * size).conj(), group=both.ours)
        assert torch.equal(part, torch.tensor([complex(size, -total)]))
    for asynchronous in (False, True):
        lie_otherwise(both, asynchronous)
    root_here = dist.GatherOptions()
    root_here.rootRank = own
    for bad in (
        # Outputs that are larger than what is given would be filled from beyond its end.
        lambda: dist.all_gather(outputs, torch.ones(1), group=both.ours),
        lambda: dist.all_gather(outputs, torch.ones(3), group=both.ours),
        lambda: both.ours.allgather([outputs], [torch.ones(2, dtype=torch.float64)]),
        lambda: dist.all_gather_coalesced([[output] for output in outputs], [torch.ones(1)], group=both.ours),
        lambda: dist.reduce_scatter(torch.zeros(2), [torch.zeros(1)] * size, group=both.ours),
        lambda: both.ours.reduce_scatter([torch.zeros(2)], [[torch.zeros(2, dtype=torch.float64)] * size]),
        lambda: dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1), group=both.ours),
        lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1] * size, [4] * size, group=both.ours),
        lambda: dist.scatter(torch.zeros(2), [torch.zeros(3)] * size, RANK, group=both.ours),
        lambda: dist.gather(torch.zeros(2), [torch.zeros(2)] * (size + 1), RANK, group=both.ours),
        lambda: both.ours.gather_single(torch.zeros(2 * size + 1), torch.zeros(2), root_here),
        lambda: both.ours.gather_single(torch.zeros(2 * size, dtype=torch.float64), torch.zeros(2), root_here),
        lambda: both.ours.gather_single(torch.zeros(2 * size, 2)[:, 0], torch.zeros(2), root_here),
    ):
        try:
            bad()
        except ValueError:
            continue
        except RuntimeError:
            if both.beneath:  # refused by Gloo itself
                continue
            raise
        raise AssertionError(f"not refused: line {bad.__code__.co_firstlineno}")
    dist.barrier(group=both.ours)


def limits() -> None:
    """A call's own time limit; the group's stays."""
    options = dist.BarrierOptions()
    if not WAITS_UNASKED:
        options.asyncOp = False
    options.timeout = timedelta(seconds=0.2)
    group = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()
    group.monitored_barrier(timedelta(seconds=50))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    if RANK == 0:
        try:
            work = group.barrier(options)
            if WAITS_UNASKED:
                work.wait()
        except evenstep.EvenstepError as error:
            assert error.status == "EVEN_ERR_TIMEOUT" and "0.2 s" in str(error), error
        else:
            raise AssertionError("no time limit")
        store.set("seen", "1")
        store.wait([f"told{rank}" for rank in range(1, SIZE)])
    else:
        store.wait(["seen"])
        store.set(f"told{RANK}", "1")
    os._exit(0)


PARTS = {
    "reductions": reductions,
    "premultiplied": premultiplied,
    "movements": movements,
    "objects": objects,
    "functional": functional,
    "layouts": layouts,
}


def begin(store: dist.Store) -> None:
    dist.init_process_group("evenstep", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))


if __name__ == "__main__":
    kept = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, RANK == 0)
    begin(kept)
    if sys.argv[1] == "limits":
        limits()
    groups = [Both(list(range(SIZE))), Both([0, SIZE - 1]), Both([1, SIZE - 1]) if SIZE > 2 else Both([0])]
    for subset in groups:
        if subset.inside:
            for part in sys.argv[1:]:
                PARTS[part](subset)
    dist.barrier()
    dist.destroy_process_group()
    begin(kept)  # where the first one has left what it wrote
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [SIZE] * 3
    dist.destroy_process_group()
