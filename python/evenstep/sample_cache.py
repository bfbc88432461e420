"""es.SampleCache: samples that were decoded once, kept in memory that the ranks of a host and their workers share.

The memory is a memfd: it has no name, and goes with the last process that holds it, whatever its end. Nothing is ever taken
out of it: in epochs that use each sample once, what was kept first serves as well as anything else."""

from __future__ import annotations

import errno
import fcntl
import functools
import operator
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from evenstep import _core
from evenstep._core import EvenstepError, Memory
from evenstep.group import gather_objects
from evenstep.memory import HostMemory
from evenstep.rendezvous import _place
from evenstep.sample_record import pack, unpack

if TYPE_CHECKING:
    from evenstep.session import Session

_HEAD = struct.Struct("<QQ")  # bytes taken, samples kept
_ENTRY = struct.Struct("<QQ")  # of each sample: where, how many bytes
_FIRST = 64  # where entries begin
_CLAIMED = 1  # somebody writes it; no place of a record
_LINE = 64
_LOOKS = 64  # a part of what is left is taken between two looks at it: as many processes may do so at once
_DEEP = 8  # data sets inside one another that are looked through for a cache


class SampleCache(Dataset):
    """Keeps what a map-style `dataset` gives, up to `max_bytes` a host (with 16 bytes for each sample of it).

    Put it around what decodes and below what is random: `Augmented(es.SampleCache(Decoded(…), 8 << 30))`. Samples may be
    tensors, NumPy arrays, PIL images, numbers and strings, in tuples, lists and dictionaries; each caller gets memory of its own.
    Indices are whole numbers 0 … len - 1, also NumPy's and tensors'; any other is given to the data set. The ranks of a host share one once a loader over it is
    prepared. A sample that does not fit is not kept, and none is taken out.
    """

    def __init__(self, dataset: Any, max_bytes: int) -> None:
        try:
            self._length = len(dataset)
        except TypeError:
            raise EvenstepError(
                f"es.SampleCache needs a data set with a length; {type(dataset).__name__} has none\n"
                "  fix: give a map-style data set with __len__ and __getitem__"
            ) from None
        self.dataset = dataset
        self.max_bytes = int(max_bytes)
        self._data = _FIRST + -(-_ENTRY.size * self._length // _LINE) * _LINE
        if self.max_bytes <= self._data:
            raise ValueError(
                f"es.SampleCache(max_bytes={max_bytes}): the list of {self._length} samples alone needs {self._data} bytes"
            )
        _check_memory(self.max_bytes)
        self._fd = os.memfd_create("evenstep-samples", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.max_bytes)
        os.pwrite(self._fd, _HEAD.pack(self._data, 0), 0)
        self._shared = False
        self._budget = 0  # bytes that may be taken before the next look at what memory is left
        self._mutex = os.getpid(), threading.Lock()

    # -- what a data set has --

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        place = self._number(index)
        if place is None:
            return self.dataset[index]
        found = self._find(place)
        if found is not None:
            return unpack(found)
        sample = self.dataset[index]
        self._keep(place, sample)
        return sample

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self[index] for index in indices]
        places = [self._number(index) for index in indices]
        found = [None if place is None else self._find(place) for place in places]
        missing = [index for index, record in zip(indices, found) if record is None]
        decoded = iter(many(missing) if missing else ())
        samples = []
        for place, record in zip(places, found):
            sample = next(decoded) if record is None else unpack(record)
            if record is None and place is not None:
                self._keep(place, sample)
            samples.append(sample)
        return samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def used_bytes(self) -> int:
        """Of max_bytes, by all ranks of the host."""
        return int(self._head()[0])

    @property
    def kept_samples(self) -> int:
        """How many decoded samples the host's ranks have in the cache by now."""
        return int(self._head()[1])

    # -- the memory --

    def _number(self, index: Any) -> int | None:
        """None where it names no sample: that is the data set's own affair. A tensor of one element asks for a batch, True for a row more."""
        if isinstance(index, bool) or getattr(index, "ndim", None) or getattr(index, "dtype", None) is torch.bool:
            return None
        try:
            place = operator.index(index)
        except (TypeError, RuntimeError):
            return None
        return place if 0 <= place < self._length else None

    @contextmanager
    def _locked(self, how: int, start: int, length: int) -> Iterator[None]:
        """Between processes by the kernel's lock, which goes with its process; between threads by a mutex."""
        process, mutex = self._mutex
        if process != os.getpid():  # a worker: another thread may have held it when it was forked
            self._mutex = process, mutex = os.getpid(), threading.Lock()
        with mutex:
            fcntl.lockf(self._fd, how, length, start)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, length, start)

    def _head(self) -> tuple[int, int]:
        with self._locked(fcntl.LOCK_SH, 0, _HEAD.size):
            return _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0))

    def _find(self, index: int) -> bytearray | None:
        place = _FIRST + index * _ENTRY.size
        with self._locked(fcntl.LOCK_SH, place, _ENTRY.size):
            where, size = _ENTRY.unpack(os.pread(self._fd, _ENTRY.size, place))
        if where <= _CLAIMED:
            return None
        record = bytearray(size)
        return record if os.preadv(self._fd, [record], where) == size else None

    def _keep(self, index: int, sample: Any) -> None:
        pieces = pack(sample)
        size = sum(map(len, pieces))
        if not self._may_take(size):
            return
        place = _FIRST + index * _ENTRY.size
        with self._locked(fcntl.LOCK_EX, 0, _HEAD.size):
            where, kept = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0))
            after = where + -(-size // _LINE) * _LINE
            if after > self.max_bytes or _ENTRY.unpack(os.pread(self._fd, _ENTRY.size, place))[0]:
                return
            if self._write([_ENTRY.pack(_CLAIMED, 0)], place):
                self._write([_HEAD.pack(after, kept)], 0)
        if not self._write(pieces, where):
            return
        with self._locked(fcntl.LOCK_EX, place, _ENTRY.size):
            self._write([_ENTRY.pack(where, size)], place)
        with self._locked(fcntl.LOCK_EX, 0, _HEAD.size):
            used, kept = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0))
            self._write([_HEAD.pack(used, kept + 1)], 0)

    def _may_take(self, size: int) -> bool:
        if size > self._budget:
            left = _left()
            if left < size:
                return False
            self._budget = max(size, left // _LOOKS)
        self._budget -= size
        return True

    def _write(self, pieces: Sequence[Any], where: int) -> bool:
        """False where the host has no memory left: the sample is not kept, and training goes on."""
        try:
            for first in range(0, len(pieces), 512):  # the kernel takes up to 1024 at once
                some = pieces[first : first + 512]
                size = sum(map(len, some))
                if os.pwritev(self._fd, some, where) != size:
                    return False
                where += size
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return False
        return True

    # -- other processes --

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: they open the memory of this process."""
        return {**self.__dict__, "_mutex": None, "_fd": (os.getpid(), self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mutex = os.getpid(), threading.Lock()
        self._fd = _core.open_peer_fd(*state["_fd"])

    def __del__(self) -> None:
        fd = self.__dict__.pop("_fd", None)
        if isinstance(fd, int):
            os.close(fd)

    def record(self) -> tuple[str, int, int, int, int]:
        """For the other ranks: where this process is, what it holds."""
        return _place(), os.getpid(), self._fd, self._length, self.max_bytes

    def take(self, process: int, fd: int) -> None:
        """From now on it is the cache of that process, whose samples are the same."""
        own, self._fd = self._fd, _core.open_peer_fd(process, fd)
        os.close(own)


def share_caches(session: Session, dataset: Any) -> None:
    """Makes the caches among a loader's data sets one for each host. Collective."""
    caches = [cache for cache in _caches(dataset) if not cache._shared]
    everybody = gather_objects(session.group, [cache.record() for cache in caches])  # also of a rank that has none
    counts = [len(records) for records in everybody]
    if len(set(counts)) > 1:
        raise EvenstepError(
            f"the ranks have different numbers of es.SampleCache in this loader's data set: {counts}, by rank\n"
            "  fix: cache on every rank, or on none; where memory is short, with a smaller max_bytes"
        )
    if not caches:
        return
    failure = ""
    for number, cache in enumerate(caches):
        records = [records[number] if number < len(records) else None for records in everybody]
        mine = records[session.rank]
        if any(record is None or mine is None or record[3:] != mine[3:] for record in records):
            raise EvenstepError(
                f"the ranks' caches differ in samples or max_bytes: {[record and record[3:] for record in records]}\n"
                "  fix: give es.SampleCache the same data set and the same max_bytes on every rank"
            )
        first = next(
            rank for rank, record in enumerate(records) if record is not None and record[0] == cache.record()[0]
        )
        if first != session.rank:
            _, process, fd, _, _ = everybody[first][number]
            try:
                cache.take(process, fd)
            except (EvenstepError, OSError) as error:
                failure = failure or f"rank {session.rank} cannot open rank {first}'s es.SampleCache: {error}"
        cache._shared = True
    failures = gather_objects(session.group, failure)  # all hold it before its first owner may end
    failure = next(filter(None, failures), "")
    if failure:
        raise EvenstepError(
            f"{failure}\n  fix: run the host's ranks as one user that may open its processes' files (ptrace_scope, /proc), or "
            "train without es.SampleCache"
        )


def has_caches(dataset: Any) -> bool:
    return bool(_caches(dataset))


def _caches(dataset: Any) -> list[SampleCache]:
    """Those that are, or are attributes of, the data sets around one another."""
    found: dict[int, SampleCache] = {}
    around = [dataset]
    for _ in range(_DEEP):
        found.update({id(one): one for one in around if isinstance(one, SampleCache)})
        around = [
            value for one in around for value in getattr(one, "__dict__", {}).values() if isinstance(value, Dataset)
        ]
    return list(found.values())


@functools.cache
def _memory() -> Memory:
    return Memory()


def _check_memory(wanted: int) -> None:
    _, _, available, _, folder, _ = _memory().read()
    if wanted > available:
        whose = f"the control group {folder}" if folder else "this host"
        raise EvenstepError(
            f"es.SampleCache(max_bytes={wanted}): {whose} has {available} bytes of memory left\n"
            "  fix: give it less; what does not fit is decoded each time"
        )


def _left() -> int:
    """Bytes that this process may take without leaving training too few, by its host and by the control groups above it: these do
    not refuse memory, they end processes."""
    _, _, available, limit, _, _ = _memory().read()
    return available - int(HostMemory.reserve * limit)
