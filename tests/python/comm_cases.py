"""What each rank does with `es.comm` in test_comm.py: `python comm_cases.py PART`. Neither torch nor a store is there."""

from __future__ import annotations

import array
import ctypes
import enum
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import evenstep as es
from evenstep import _core

ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def refused(call: Callable[[], Any], *words: str, status: str = "EVEN_ERR_ARGUMENT") -> None:
    try:
        call()
    except es.EvenstepError as error:
        assert error.status == status, error
        assert error.fix or status == "EVEN_ERR_REVOKED", error
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"not refused: {words}")


def reductions(group: es.comm.Group) -> None:
    rank, size = group.rank, group.size
    total = size * (size + 1) // 2
    for dtype in ("f4", "f8", "f2", "i1", "u1", "i2", "i4", "i8", "c8", "c16"):
        x = np.full((2, 3), rank + 1, dtype=dtype)
        assert group.all_reduce(x) is x
        assert (x == total).all(), dtype
    x = np.array([rank + 1.0, -rank])
    assert group.all_reduce(x.copy(), "max").tolist() == [size, 0]
    assert group.all_reduce(x.copy(), "min").tolist() == [1, 1 - size]
    assert np.allclose(group.all_reduce(x.copy(), "avg"), [(size + 1) / 2, -(size - 1) / 2])
    flags = np.array([rank == 0, True])
    assert group.all_reduce(flags, "band").tolist() == [size == 1, True]
    assert group.all_reduce(np.array(1 << rank), "bor").item() == (1 << size) - 1
    group.all_reduce(np.empty((0, 5)))
    large = np.full(300_000, float(rank))
    assert (group.all_reduce(large) == size * (size - 1) / 2).all()
    mine = np.full(4, float(rank))
    group.reduce(mine, root=size - 1)
    assert (mine == (size * (size - 1) / 2 if rank == size - 1 else rank)).all()
    parts, out = np.arange(float(2 * size)), np.empty(2)
    group.reduce_scatter(parts, out)
    assert out.tolist() == [2 * rank * size, (2 * rank + 1) * size]
    uneven, out = np.arange(float(total)), np.empty(rank + 1)
    group.reduce_scatter(uneven, out, counts=[r + 1 for r in range(size)], op="avg")
    assert out.tolist() == list(range(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2))
    group.reduce_scatter(parts, parts[2 * rank : 2 * rank + 2])  # in place
    assert parts[2 * rank] == 2 * rank * size


def movements(group: es.comm.Group) -> None:
    rank, size = group.rank, group.size
    for dtype in ("f4", "u2", "u4", "u8", "M8[s]", "S3", ">i4", "c16"):
        mine = np.full(3, rank, dtype="i4").astype(dtype)
        everything = np.zeros((size, 3), dtype=dtype)
        assert group.all_gather(mine, everything) is everything
        assert all((everything[r] == np.full(3, r, dtype="i4").astype(dtype)).all() for r in range(size)), dtype
    uneven = np.zeros(size * (size + 1) // 2)
    group.all_gather(np.full(rank + 1, rank), uneven.astype("i8"), counts=[r + 1 for r in range(size)])
    rows = np.zeros((size, 4))
    rows[rank] = rank
    group.all_gather(rows[rank], rows)  # in place
    assert (rows == np.arange(float(size))[:, None]).all()
    assert group.broadcast(np.full(5, rank), root=1).tolist() == [1] * 5
    frozen = np.full(5, rank)
    frozen.flags.writeable = rank != 1
    group.broadcast(frozen, root=1)  # only read there
    out = np.zeros((size, 2), dtype="i8") if rank == 1 else None
    group.gather(np.array([rank, -rank]), out, root=1)
    assert out is None or out.tolist() == [[r, -r] for r in range(size)]
    part = np.zeros(2, dtype="i8")
    group.scatter(out, part, root=1)
    assert part.tolist() == [rank, -rank]
    got = np.zeros(size, dtype="i8")
    group.all_to_all(np.arange(size) + 10 * rank, got)
    assert got.tolist() == [10 * r + rank for r in range(size)]
    given = [np.full(to + rank, rank) for to in range(size)]
    wanted = [np.zeros(rank + source, dtype="i8") for source in range(size)]
    group.all_to_all(given, wanted)
    assert all((part == source).all() for source, part in enumerate(wanted))
    group.barrier()


def messages(group: es.comm.Group) -> None:
    rank, size = group.rank, group.size
    right, left = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(200_000)
    sent = group.isend(np.full(200_000, float(rank)), right, tag=5)  # the group keeps the array
    assert group.recv(got, left, tag=5) == left and (got == left).all()
    sent.wait()
    assert sent.done()
    two = np.array([1.5, 2.5], "f4")
    both = ("8 bytes of F32", "8 of I32", "; sent at ", "comm_cases.py:", "in messages; received at ", "in <lambda>")
    if rank == 0:
        group.send(two, size - 1, tag=6)
        refused(lambda: group.recv(bytearray(1), size - 1, tag=8), *both, status="EVEN_ERR_MISMATCH")  # told, too
        group.send(np.ones(1), size - 1, tag=7)
    if rank == size - 1:
        wrong = np.zeros(2, "i4")
        refused(lambda: group.recv(wrong, 0, tag=6), *both, status="EVEN_ERR_MISMATCH")
        group.recv(np.zeros(1), 0, tag=7)
        raw = bytearray(8)  # bytes are what the other side says
        group.recv(raw, 0, tag=6)
        assert raw == two.tobytes()
    word = np.array([rank])
    if rank:
        group.send(word, 0)
    else:
        assert sorted(group.recv(np.zeros(1, "i8")) for _ in range(1, size)) == list(range(1, size))
    group.barrier()


FIELDS = np.dtype([("number", "<i4"), ("swapped", ">f8"), ("word", "S3"), ("pair", "<f2", (2,))], align=True)


def filled(rank: int, count: int = 3) -> Any:
    data = np.zeros(count, FIELDS)
    data["number"], data["swapped"], data["word"], data["pair"] = rank, rank / 2, f"r{rank}".encode(), [rank, -rank]
    return data


def structures(group: es.comm.Group) -> None:
    """Arrays whose elements have fields are moved by every call that only moves."""
    rank, size = group.rank, group.size
    everything = np.zeros((size, 3), FIELDS)
    group.all_gather(filled(rank), everything)
    assert all((everything[r] == filled(r)).all() for r in range(size))
    assert (group.broadcast(filled(rank), root=1) == filled(1)).all()
    assert (group.broadcast(filled(rank).view(np.recarray), root=1).number == 1).all()
    assert group.broadcast(filled(rank, 1).reshape(()), root=1) == filled(1)[0]
    whole = np.zeros((size, 3), FIELDS) if rank == 1 else None
    group.gather(filled(rank), whole, root=1)
    assert whole is None or (whole == everything).all()
    part = np.zeros(3, FIELDS)
    group.scatter(whole, part, root=1)
    assert (part == filled(rank)).all()
    given, got = np.zeros((size, 2), FIELDS), np.zeros((size, 2), FIELDS)
    for to in range(size):
        given[to] = filled(10 * rank + to, 2)
    group.all_to_all(given, got)
    assert all((got[source] == filled(10 * source + rank, 2)).all() for source in range(size))
    sent = group.isend(filled(rank), (rank + 1) % size)
    group.recv(part, (rank - 1) % size)
    sent.wait()
    assert (part == filled((rank - 1) % size)).all()
    shared = group.empty(3, FIELDS)
    shared[:] = filled(rank)
    assert (group.broadcast(shared, root=1) == filled(1)).all()
    frozen = filled(rank)
    frozen.flags.writeable = rank != 1
    group.broadcast(frozen, root=1)
    frozen.flags.writeable = False
    refused(lambda: group.all_gather(filled(rank), frozen), "read-only")
    refused(lambda: group.broadcast(filled(rank)[::2]), "one after the other")
    refused(lambda: group.broadcast(filled(rank)["number"]), "one after the other")
    refused(lambda: group.broadcast(np.zeros(3, [("a", "i4"), ("b", "O")])), "fields that are Python objects")
    for call in (group.all_reduce, group.reduce):
        refused(lambda call=call: call(filled(rank)), "cannot be reduced", "structures", "moved only")


def _address(capsule: Any) -> int:
    return int(ctypes.pythonapi.PyCapsule_GetPointer(capsule, None))


def odd_dtypes(group: es.comm.Group) -> None:
    """Each is moved and reduced, is moved alone, or is refused."""
    rank, size = group.rank, group.size
    for dtype in ("?", "f2", "f4", "u8"):
        data = np.array(rank == 0, dtype)  # no dimensions
        assert group.all_reduce(data) is data and data == 1, dtype
        assert group.broadcast(np.array(rank, dtype), root=1) == 1, dtype
    for dtype in ("M8[ns]", "m8[s]", "S3", "U2", "V5", ">f4", ">i8", "g", "G"):
        data = np.full(3, rank, "i4").astype(dtype) if dtype != "V5" else np.array([bytes([rank] * 5)] * 3, dtype)
        everything = np.zeros((size, 3), dtype)
        group.all_gather(data, everything)
        assert everything[rank].tobytes() == data.tobytes() and everything.tobytes().count(data.tobytes()) == 1, dtype
        for op in ("sum", "max", "band"):
            refused(lambda data=data, op=op: group.all_reduce(data, op), "cannot be reduced", "moved only")
    refused(lambda: group.all_reduce(np.float32(3)), "read-only")  # a number, whose memory is a copy
    refused(lambda: group.all_gather(np.float32(3), np.float32(3)), "read-only")
    three = np.zeros(size, "f4")
    assert group.all_gather(np.float32(3), three).tolist() == [3.0] * size
    one = np.array(rank + 1.0)
    group.all_reduce(Structure(one.__array_struct__))  # no dimensions, another library's
    assert one == size * (size + 1) / 2
    words = (ctypes.c_char * 56).from_buffer_copy(ctypes.string_at(_address(one.__array_struct__), 56))
    words[8] = b"\0"  # its kind
    nameless = ctypes.pythonapi.PyCapsule_New(ctypes.addressof(words), None, None)
    refused(lambda: group.broadcast(Structure(nameless)), "lie elsewhere")
    columns = np.ones((2, 3), order="F")
    refused(lambda: group.all_reduce(columns), "one after the other", "ascontiguousarray")
    assert (group.all_reduce(columns.T) == size).all() and (columns == size).all()
    refused(lambda: group.all_reduce(np.arange(4.0)[::-1]), "one after the other")
    if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):  # NumPy 2: its letters lie elsewhere
        refused(lambda: group.broadcast(np.array(["a", "b" * 50], np.dtypes.StringDType())), "lie elsewhere")
    group.barrier()


class Structure:
    """An array of another library, known by its structure alone."""

    def __init__(self, structure: Any) -> None:
        self.__array_struct__ = structure


VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # its DLPack


class Dlpack:
    """An array that has DLPack alone, of before versions."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self) -> Any:
        return self.data.__dlpack__()


class VersionedDlpack(Dlpack):
    def __dlpack__(self, *, max_version: Any = None, **more: Any) -> Any:
        return self.data.__dlpack__(**({"max_version": max_version} if VERSIONED else {}))


class Old(Dlpack):
    """As a tensor of a torch that has no table of functions."""

    negative = False

    def is_neg(self) -> bool:
        return self.negative


class Conjugate(Dlpack):
    """As a lazy conjugate of such a torch, which does not give it out."""

    def is_conj(self) -> bool:
        return True

    def __dlpack__(self) -> Any:
        raise RuntimeError("Can't export tensors with the conjugate bit set")


class Elsewhere:
    """In the memory of the device that it names; what else it is asked for it does not give."""

    def __init__(self, device: Any, error: BaseException | None = None) -> None:
        self.device, self.error = device, error or AssertionError("asked for memory that is elsewhere")

    def __dlpack_device__(self) -> Any:
        return (self.device, 0)

    def __dlpack__(self, **more: Any) -> Any:
        raise self.error


def tensors_elsewhere(group: es.comm.Group) -> None:
    class Kind(enum.IntEnum):  # as NumPy and CuPy have them
        CUDA = 2

    for device in (2, Kind.CUDA, 8, 10, 14):  # CUDA, Metal, ROCm, oneAPI
        refused(lambda d=device: group.all_reduce(Elsewhere(d)), "not in this host's memory", "x.cpu()")
    words = "only CPU tensors can be exported"
    refused(lambda: group.all_reduce(Elsewhere(1, BufferError(f"{words}\nmore"))), words, "x.cpu()")
    refused(lambda: group.all_reduce(Elsewhere(None, RuntimeError(""))), "x.cpu()")
    try:
        group.all_reduce(Elsewhere(1, MemoryError()))
    except MemoryError:
        pass
    else:
        raise AssertionError("an error of another kind was taken for a refusal")


def kinds_of_arrays(group: es.comm.Group) -> None:
    size = group.size
    for kind in (Dlpack, VersionedDlpack):
        data = np.ones(3, dtype="f4")
        group.all_reduce(kind(data))
        assert data.tolist() == [size] * 3, kind
    for data in (bytearray(b"\1\2"), array.array("f", [1, 2]), memoryview(array.array("q", [1, 2]))):
        group.all_reduce(data)
        assert list(data) == [size, 2 * size]
        group.all_reduce(data, "min")
    out = bytearray(2 * size)
    group.all_gather(b"ab", out)  # read-only, and only read
    assert out == b"ab" * size
    frozen = np.ones(3)
    frozen.flags.writeable = False
    refused(lambda: group.all_reduce(frozen), "read-only")
    if VERSIONED:  # else NumPy gives out nothing that is read-only
        refused(lambda: group.all_reduce(VersionedDlpack(frozen)), "read-only")
    refused(lambda: group.all_reduce(b"ab"), "read-only")
    refused(lambda: group.all_reduce(np.ones((4, 4))[:, 1]), "one after the other")
    refused(lambda: group.all_reduce(np.ones((4, 4)).T), "one after the other")
    refused(lambda: group.all_reduce(np.array([object()])), "Python objects")
    refused(lambda: group.all_reduce([1.0, 2.0]), "'list'")
    refused(lambda: group.all_reduce(np.zeros(3, dtype="V4")), "cannot be reduced")
    refused(lambda: group.all_reduce(np.ones(3, dtype="i4"), "avg"), "cannot be reduced")
    refused(lambda: group.all_reduce(np.ones(3, dtype=">f4")), "cannot be reduced")
    refused(lambda: group.all_reduce(np.ones(3), "mean"), "'mean'", "choose one of sum")
    refused(lambda: group.reduce(np.ones(3, dtype="c8"), op="max"), "cannot be reduced")
    refused(lambda: group.broadcast(np.ones(3), root=size), f"rank {size}")
    refused(lambda: group.all_gather(np.ones(3), np.ones(3 * size + 1)), "do not divide")
    refused(lambda: group.all_gather(np.ones(2), np.ones(3 * size)), "data has 2 elements")
    refused(lambda: group.all_gather(np.ones(3), np.ones(3 * size, dtype="f4")), "different dtypes")
    refused(lambda: group.reduce_scatter(np.ones(3 * size), np.ones(3), counts=[3] * (size + 1)), "counts")
    whole = np.ones(3 * size)
    refused(lambda: group.all_gather(whole[1:4], whole), "overlaps")
    refused(lambda: group.reduce_scatter(whole, whole[1:4]), "overlaps")
    refused(lambda: group.all_to_all(whole, whole), "overlaps")
    refused(lambda: group.gather(np.ones(3), None, root=group.rank), "no array for all parts")
    refused(lambda: group.split([0, 0]), "none twice")
    group.barrier()  # the group is as it was


def arena(group: es.comm.Group) -> None:
    rank, size = group.rank, group.size
    x = group.empty((100, 50), "f8")
    x[:] = rank + 1
    group.all_reduce(x)
    assert (x == size * (size + 1) / 2).all()
    place = x.ctypes.data
    row = x[3]
    del x
    gc.collect()
    y = group.empty((100, 50), "f8")
    assert y.ctypes.data != place  # the row keeps it
    del row
    gc.collect()
    assert group.empty((100, 50), "f8").ctypes.data == place
    assert group.empty(0).shape == (0,) and group.empty(()).shape == ()
    refused(lambda: group.empty(1 << 40), "arena_bytes")
    refused(lambda: group.empty(3, object), "can be shared")
    many = [group.empty(1000, "u1") for _ in range(100)]
    assert len({a.ctypes.data for a in many}) == 100 and all(a.ctypes.data % 64 == 0 for a in many)


def groups(group: es.comm.Group) -> None:
    rank, size = group.rank, group.size
    with es.comm.open("other", arena_bytes=0) as other, es.comm.open("other") as third:
        refused(lambda: other.empty(3), "arena")
        assert (third.all_reduce(other.all_reduce(np.ones(2))) == size**2).all()
    assert other.closed
    backwards = list(reversed(range(1, size)))
    part = group.split(backwards)
    assert (part is None) == (rank == 0)
    if part is not None:
        assert part.rank == backwards.index(rank) and part.size == size - 1
        assert part.broadcast(np.array([rank])).item() == size - 1
        part.close()
    try:
        group.split([rank])
    except es.EvenstepError as error:
        assert "name the same ranks" in str(error), error
    else:
        raise AssertionError("every rank named another")
    group.timeout = 77
    assert group.timeout == 77


def revoked(group: es.comm.Group) -> None:
    part = group.split(range(group.size), arena_bytes=0)
    assert part is not None
    if part.rank == 0:
        part.revoke()
    refused(part.barrier, status="EVEN_ERR_REVOKED")
    part.close()


def forked(group: es.comm.Group) -> None:
    child = os.fork()
    if child == 0:
        try:
            refused(lambda: group.all_reduce(np.ones(3)), "was forked from rank", status="EVEN_ERR_STATE")
            group.revoke()
            group.close()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert group.all_reduce(np.ones(1)).item() == group.size


def closing_lets_other_threads_go_on(group: es.comm.Group) -> None:
    """Of a group over UCX that has ended, while its other rank is stopped and does not say that it has heard so."""

    def gather(record: bytes) -> bytes:
        out = bytearray(len(record) * group.size)
        group.all_gather(bytearray(record), out)
        return bytes(out)

    try:
        _core.ucx_version()
    except es.EvenstepError:
        return
    if group.size != 2:
        return
    part = _core.Comm.open_ucx(gather, group.rank, group.size)
    other = int(gather(str(os.getpid()).encode().ljust(16)).split()[1])
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        part.close()
        return
    while Path(f"/proc/{other}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    go, closed, woken = threading.Event(), False, []

    def go_on() -> None:
        go.wait()
        woken.append(not closed)
        os.kill(other, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    part.revoke()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only who waits lets another thread run
    go.set()
    part.close()
    closed = True
    sys.setswitchinterval(usual)
    thread.join()
    assert woken == [True]


def calls() -> None:
    with es.comm.open() as group:
        for part in (
            reductions,
            movements,
            messages,
            kinds_of_arrays,
            tensors_elsewhere,
            structures,
            odd_dtypes,
            arena,
            groups,
            revoked,
            closing_lets_other_threads_go_on,
            forked,
        ):
            part(group)
        kept = group.empty(10)
        kept[:] = group.rank
    assert group.closed and (kept == group.rank).all()  # its memory is there
    del kept, group
    gc.collect()
    assert "evenstep-group" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "torch" not in sys.modules


def torch_tensors() -> None:
    import torch

    with es.comm.open() as group:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
            x = torch.full((4, 3), group.rank + 1).to(dtype)
            group.all_reduce(x)
            assert torch.equal(x, torch.full((4, 3), group.size * (group.size + 1) // 2).to(dtype)), dtype
        shared = torch.from_numpy(group.empty(1000))
        shared.fill_(1.0)
        assert (group.all_reduce(shared) == group.size).all()
        whole = torch.zeros(group.size, 2, dtype=torch.uint16)
        group.all_gather(torch.tensor([group.rank, 7], dtype=torch.uint16), whole)
        assert whole.tolist() == [[r, 7] for r in range(group.size)]
        leaf = torch.ones(2, requires_grad=True)
        refused(lambda: group.all_reduce(torch.ones(4, 4).t()[:2]), "one after the other")
        refused(lambda: group.all_reduce(torch.ones(3, dtype=torch.complex64).conj()), "conjugate")
        refused(lambda: group.all_reduce(torch.ones(3, device="meta")), "meta", "x.cpu()")
        refused(lambda: group.all_reduce(Conjugate(leaf)), "conjugate")
        refused(lambda: group.all_reduce(torch._neg_view(torch.ones(3))), "negative")
        old = Old(torch.ones(3))
        group.all_reduce(old)
        assert old.data.tolist() == [group.size] * 3
        old.negative = True
        refused(lambda: group.all_reduce(old), "negative")
        group.all_reduce(leaf.detach())
        assert leaf.tolist() == [group.size] * 2
        assert not torch.distributed.is_initialized()


def killed() -> None:
    group = es.comm.open()
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(np.ones(100_000))
    except es.EvenstepError as error:
        assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == 1, error
    else:
        raise AssertionError("no error")


def missing() -> None:
    """Rank 1 never comes."""
    if os.environ["RANK"] == "1":
        return
    try:
        es.comm.open(timeout=1.0)
    except es.EvenstepError as error:
        assert error.status == "EVEN_ERR_TIMEOUT" and "[1]" in str(error) and error.rank == 1, error
    else:
        raise AssertionError("no error")


def unlike() -> None:
    """The ranks ask for different arenas."""
    try:
        es.comm.open(arena_bytes=64 << int(os.environ["RANK"]))
    except es.EvenstepError as error:
        assert error.status == "EVEN_ERR_MISMATCH" and error.rank == 1, error
        assert "rank 1 opens the group with {'ranks': 2, 'arena_bytes': 128}" in str(error), error
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
