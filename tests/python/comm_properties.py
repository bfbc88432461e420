"""Random calls of `es.comm` and of backend "evenstep", compared with a plain reference, in one job: hypothesis draws the
same examples on every rank. Run in each: `python comm_properties.py EXAMPLES [device]`, with `device` of the backend alone, whose
tensors stand for CUDA's (fake_streams.py): over a made-up NCCL, by legs between hosts, and through the host."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import evenstep as es

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
TORCH_OPS = {
    name: getattr(dist.ReduceOp, torch_name)
    for name, torch_name in zip(OPS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
}
UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
FLOATS, INTEGERS = ("f4", "f8", "f2"), ("i1", "u1", "i2", "i4", "i8", "u2", "u4", "u8")
BFLOAT, BOOL, COMPLEX = "bfloat16", "?", ("c8", "c16")  # the first is torch's alone; NumPy's arrays hold it as f4
SUBSETS = [list(range(SIZE)), [SIZE - 1, 0], [1, SIZE - 1] if SIZE > 2 else [0], list(range(1, SIZE))]

ORDER = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
if not ORDER:  # torch 2.6 knows no other than the ranks' own
    SUBSETS = [sorted(subset) for subset in SUBSETS]

# Around what changes the way: nothing, one cache line, a slot (8 KB), a staged piece.
lengths = st.one_of(
    st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 2047, 2048, 2049, 8192, 8193, 70_000]), st.integers(0, 9000)
)
seeds = st.integers(0, 2**20)
groups = st.integers(0, len(SUBSETS) - 1)


def value(seed: int, rank: int, shape: Any, dtype: str) -> np.ndarray:
    """What a rank puts in: small whole numbers, so that every order of adding and multiplying gives the same."""
    random = np.random.default_rng([seed, rank])
    numbers = random.integers(0, 2, shape) if dtype == BOOL else random.integers(1, 3, shape)
    return numbers.astype("f4" if dtype == BFLOAT else dtype) * (1 + 2j if dtype in COMPLEX else 1)


def reduced(op: str, values: list[np.ndarray]) -> np.ndarray:
    result = functools.reduce(UFUNCS[op], values)
    if op != "avg":
        return result
    reals = result.view(result.real.dtype) / len(values)  # NumPy divides complex numbers by other steps
    return reals.astype(result.real.dtype).view(result.dtype)


def rounded(data: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(data).to(torch.bfloat16).float().numpy() if dtype == BFLOAT else data


def possible(op: str, dtype: str) -> bool:
    if dtype in COMPLEX:
        return op in ("sum", "avg")
    return op != "avg" if dtype in (*INTEGERS, BOOL) else op not in ("band", "bor", "bxor")


def counts_for(draw: Any, ranks: int) -> list[int]:
    return [draw(lengths) for _ in range(ranks)]


class NumpyFace:
    """The calls on `es.comm`; arrays in the arena or in plain memory."""

    DTYPES = (*FLOATS, *INTEGERS, BOOL, *COMPLEX)

    def __init__(self) -> None:
        self.width = 1
        world = es.comm.open()
        self.groups = [world.split(subset) for subset in SUBSETS]
        self.group: Any = None

    def use(self, number: int, width: int = 1, dtype: str = "f4") -> None:
        self.group, self.width = self.groups[number], width

    def elements(self, rows: list[int]) -> list[int]:
        return [self.width * count for count in rows]

    def array(self, data: np.ndarray, shared: bool) -> Any:
        if not shared:
            return data.copy()
        array = self.group.empty(data.shape, data.dtype)
        array[...] = data
        return array

    def to_numpy(self, array: Any) -> np.ndarray:
        return array

    def all_reduce(self, x: Any, op: str) -> None:
        self.group.all_reduce(x, op)

    def reduce(self, x: Any, root: int, op: str) -> None:
        self.group.reduce(x, root, op)

    def reduce_scatter(self, x: Any, out: Any, counts: list[int], op: str) -> None:
        self.group.reduce_scatter(x, out, self.elements(counts), op)

    def all_gather(self, x: Any, out: Any, counts: list[int]) -> None:
        self.group.all_gather(x, out, self.elements(counts))

    def broadcast(self, x: Any, root: int) -> None:
        self.group.broadcast(x, root)

    def gather(self, x: Any, out: Any, root: int) -> None:
        self.group.gather(x, out, root)

    def scatter(self, x: Any, out: Any, root: int) -> None:
        self.group.scatter(x, out, root)

    def all_to_all(self, x: Any, out: Any, sends: list[int], receives: list[int]) -> None:
        self.group.all_to_all(x, out, self.elements(sends), self.elements(receives))

    def ring(self, x: Any, out: Any, tag: int) -> None:
        group = self.group
        sent = group.isend(x, (group.rank + 1) % group.size, tag)
        assert group.recv(out, (group.rank - 1) % group.size, tag) == (group.rank - 1) % group.size
        sent.wait()


class TorchFace:
    """The same on the backend; tensors are contiguous or not."""

    DTYPES = (*NumpyFace.DTYPES, BFLOAT)

    def __init__(self) -> None:
        self.dtype = ""
        dist.init_process_group("evenstep")
        self.groups = [dist.new_group(subset, **ORDER) for subset in SUBSETS]
        self.group: Any = None
        self.ranks: list[int] = []

    def use(self, number: int, width: int = 1, dtype: str = "f4") -> None:
        self.group, self.ranks, self.dtype = self.groups[number], SUBSETS[number], dtype

    def array(self, data: np.ndarray, shared: bool) -> Any:
        tensor = torch.from_numpy(data.copy())
        tensor = tensor.to(torch.bfloat16) if self.dtype == BFLOAT else tensor
        return torch.stack([tensor, tensor], -1)[..., 0] if shared else tensor  # every other element

    def to_numpy(self, array: Any) -> np.ndarray:
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def all_reduce(self, x: Any, op: str) -> None:
        work = dist.all_reduce(x, TORCH_OPS[op], group=self.group, async_op=x.numel() % 2 == 1)
        if work is not None:
            work.wait()

    def reduce(self, x: Any, root: int, op: str) -> None:
        dist.reduce(x, self.ranks[root], TORCH_OPS[op], group=self.group)

    def reduce_scatter(self, x: Any, out: Any, counts: list[int], op: str) -> None:
        if len(set(counts)) == 1:
            dist.reduce_scatter_tensor(out, x, TORCH_OPS[op], group=self.group)
        else:
            dist.reduce_scatter(out, list(x.split(counts)), TORCH_OPS[op], group=self.group)

    def all_gather(self, x: Any, out: Any, counts: list[int]) -> None:
        if len(set(counts)) == 1:
            dist.all_gather_into_tensor(out, x, group=self.group)
        else:
            dist.all_gather(list(out.split(counts)), x, group=self.group)

    def broadcast(self, x: Any, root: int) -> None:
        dist.broadcast(x, self.ranks[root], group=self.group)

    def gather(self, x: Any, out: Any, root: int) -> None:
        parts = None if out is None else list(out.chunk(len(self.ranks))) if out.numel() else [out] * len(self.ranks)
        dist.gather(x, parts, self.ranks[root], group=self.group)

    def scatter(self, x: Any, out: Any, root: int) -> None:
        parts = None if x is None else list(x.chunk(len(self.ranks))) if x.numel() else [x] * len(self.ranks)
        dist.scatter(out, parts, self.ranks[root], group=self.group)

    def all_to_all(self, x: Any, out: Any, sends: list[int], receives: list[int]) -> None:
        if sum(sends) % 2:
            dist.all_to_all(list(out.split(receives)), list(x.split(sends)), group=self.group)
        else:
            dist.all_to_all_single(out, x, receives, sends, group=self.group)

    def ring(self, x: Any, out: Any, tag: int) -> None:
        own = self.ranks.index(RANK)
        right, left = self.ranks[(own + 1) % len(self.ranks)], self.ranks[own - 1]
        works = [dist.irecv(out, left, self.group, tag), dist.isend(x, right, self.group, tag)]
        for work in works:
            work.wait()


class DeviceFace(TorchFace):
    """The same of tensors that are taken for a GPU's."""

    WITHOUT = (("avg", "f2"), ("avg", BFLOAT))  # the made-up NCCL does not round to these

    def __init__(self) -> None:
        from fake_streams import stand_in_for_all

        self.streams = stand_in_for_all()
        super().__init__()

    def ring(self, x: Any, out: Any, tag: int) -> None:
        """The made-up streams wait on the host, so that who receives first waits for ever where all do."""
        own = self.ranks.index(RANK)
        right, left = self.ranks[(own + 1) % len(self.ranks)], self.ranks[own - 1]
        for work in [dist.isend(x, right, self.group, tag), dist.irecv(out, left, self.group, tag)]:
            work.wait()

    def to_numpy(self, array: Any) -> np.ndarray:
        for streams in self.streams:
            streams.finish()
        return super().to_numpy(array)


class Example:
    """One random call on a face, and what must come of it."""

    def __init__(self, face: Any, draw: Any) -> None:
        self.face, self.draw = face, draw
        number = draw(groups)
        self.ranks = len(SUBSETS[number])
        self.seed, self.dtype = draw(seeds), draw(st.sampled_from(face.DTYPES))
        self.width = draw(st.sampled_from([1, 1, 3]))  # more: arrays of two dimensions, whose rows are cut
        self.length, self.root = draw(lengths), draw(st.integers(0, self.ranks - 1))
        without = getattr(face, "WITHOUT", ())
        self.op = draw(
            st.sampled_from([op for op in OPS if possible(op, self.dtype) and (op, self.dtype) not in without])
        )
        self.shared = draw(st.booleans())
        self.inside = RANK in SUBSETS[number]
        self.own = SUBSETS[number].index(RANK) if self.inside else -1
        face.use(number, self.width, self.dtype)

    def shape(self, length: int) -> tuple[int, ...]:
        return (length,) if self.width == 1 else (length, self.width)

    def inputs(self, lengths: list[int]) -> list[np.ndarray]:
        return [value(self.seed, rank, self.shape(length), self.dtype) for rank, length in enumerate(lengths)]

    def zeros(self, length: int) -> Any:
        return self.face.array(np.zeros_like(value(0, 0, self.shape(length), self.dtype)), self.shared)

    def given(self, data: np.ndarray) -> Any:
        return self.face.array(data, self.shared)

    def expect(self, got: Any, wanted: np.ndarray) -> None:
        array = self.face.to_numpy(got)
        what = (self.op, self.dtype, self.length, self.width, self.root, self.shared)
        wanted = rounded(wanted, self.dtype)
        assert array.dtype == wanted.dtype and np.array_equal(array, wanted), (what, array[:9], wanted[:9])

    def all_reduce(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        x = self.given(inputs[self.own])
        self.face.all_reduce(x, self.op)
        self.expect(x, reduced(self.op, inputs))

    def reduce(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        x = self.given(inputs[self.own])
        self.face.reduce(x, self.root, self.op)
        self.expect(x, reduced(self.op, inputs) if self.own == self.root else inputs[self.own])

    def reduce_scatter(self, counts: list[int]) -> None:
        inputs = self.inputs([sum(counts)] * self.ranks)
        out = self.zeros(counts[self.own])
        self.face.reduce_scatter(self.given(inputs[self.own]), out, counts, self.op)
        begin = sum(counts[: self.own])
        self.expect(out, reduced(self.op, inputs)[begin : begin + counts[self.own]])

    def all_gather(self, counts: list[int]) -> None:
        inputs = self.inputs(counts)
        out = self.zeros(sum(counts))
        self.face.all_gather(self.given(inputs[self.own]), out, counts)
        self.expect(out, np.concatenate(inputs))

    def broadcast(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        x = self.given(inputs[self.own])
        self.face.broadcast(x, self.root)
        self.expect(x, inputs[self.root])

    def gather(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        out = self.zeros(self.length * self.ranks) if self.own == self.root else None
        self.face.gather(self.given(inputs[self.own]), out, self.root)
        if out is not None:
            self.expect(out, np.concatenate(inputs))

    def scatter(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        out = self.zeros(self.length)
        whole = self.given(np.concatenate(inputs)) if self.own == self.root else None
        self.face.scatter(whole, out, self.root)
        self.expect(out, inputs[self.own])

    def all_to_all(self, table: list[list[int]]) -> None:
        """table[from][to] elements."""
        inputs = self.inputs([sum(row) for row in table])
        receives = [row[self.own] for row in table]
        out = self.zeros(sum(receives))
        self.face.all_to_all(self.given(inputs[self.own]), out, table[self.own], receives)
        parts = [data[sum(row[: self.own]) :][: row[self.own]] for data, row in zip(inputs, table)]
        self.expect(out, np.concatenate(parts))

    def ring(self) -> None:
        inputs = self.inputs([self.length] * self.ranks)
        out = self.zeros(self.length)
        self.face.ring(self.given(inputs[self.own]), out, self.seed)
        self.expect(out, inputs[self.own - 1])

    def run(self) -> None:
        kind = self.draw(st.integers(0, 8))
        # drawn on all ranks, also on those that are not in the group
        counts = [self.length] * self.ranks if self.draw(st.booleans()) else counts_for(self.draw, self.ranks)
        table = [counts_for(self.draw, self.ranks) for _ in range(self.ranks)] if kind == 7 else []
        if not self.inside:
            return
        calls = (
            self.all_reduce,
            self.reduce,
            lambda: self.reduce_scatter(counts),
            lambda: self.all_gather(counts),
            self.broadcast,
            self.gather,
            self.scatter,
            lambda: self.all_to_all(table),
            self.ring,
        )
        if kind == 8 and self.ranks == 1:
            return  # nobody to send to
        calls[kind]()


def one_of_each_way(face: Any) -> None:
    """Of every rank, and while there is room in the log: what is drawn need not have one."""
    face.use(0)
    for dtype, op, want in (("f4", "sum", SIZE), ("i4", "bor", 1)):
        x = face.array(np.ones(3, dtype), False)
        face.all_reduce(x, op)
        assert face.to_numpy(x).tolist() == [want] * 3


def one_message(face: Any) -> None:
    """Of every rank: what is drawn need not have one."""
    face.use(0)
    got = face.array(np.zeros(3, "f4"), False)
    face.ring(face.array(np.full(3, RANK, "f4"), False), got, 7)
    assert face.to_numpy(got).tolist() == [(RANK - 1) % SIZE] * 3


def check_ways(face: Any) -> None:
    """Both were gone, and nothing was misused."""
    streams = face.streams
    logs = [line for one in streams for line in one.log]
    assert any(line.startswith("a copy down on side ") for line in logs), "no message went through the host"
    assert "a copy up on side up" in logs, "no collective went through the host"
    called = streams[0].library.fake_gpu_log().decode()
    if os.environ.get("EVENSTEP_DEVICE_HOSTS") == "legs":
        assert "a copy up on side legs up" in logs, "no collective went by legs"
        alone = os.environ["HOSTS"].count(os.environ["EVENSTEP_HOST_ID"]) == 1
        assert ("ncclReduce " in called) != alone, called
    else:
        assert "ncclAllReduce" in called, called
    assert streams[0].violation() == "", streams[0].violation()


def main() -> None:
    device = "device" in sys.argv
    faces = {"device": DeviceFace()} if device else {"numpy": NumpyFace(), "torch": TorchFace()}

    if device:
        one_of_each_way(faces["device"])

    # Without shrinking and with seeds of its own making: every rank draws the same.
    @settings(
        max_examples=int(sys.argv[1]),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(sorted(faces)), st.data())
    def calls_are_as_the_reference(name: str, data: st.DataObject) -> None:
        Example(faces[name], data.draw).run()

    try:
        calls_are_as_the_reference()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others are told by it
    if device:
        one_message(faces["device"])
    dist.barrier()
    if device:
        check_ways(faces["device"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
