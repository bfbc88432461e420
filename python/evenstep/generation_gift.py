"""The state of training on its way from a living rank to one that joins: in memory that both map, and that has no name."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evenstep import _core, plain
from evenstep._core import EvenstepError
from evenstep.checkpoint_reading import StoredFiles, Tensors
from evenstep.checkpoint_snapshot import Snapshot

Entry = tuple[torch.dtype, tuple[int, ...], int]  # type, shape, where it lies

_MAGIC = b"evengift"
_ALIGNMENT = 64
_PATIENCE_SECONDS = 600.0
_HEAD = len(_MAGIC) + 24  # magic, generation, length of the index, of all


class Gift:
    """What a checkpoint would hold, and where its giver stands: `place`. Read like a checkpoint's folder."""

    name = "the state of a living rank"

    def __init__(self, descriptor: int, generation: int) -> None:
        """Of a descriptor that it owns from now on. Raises EvenstepError where it holds no gift of that generation."""
        self.descriptor = descriptor
        try:
            # of its own: torch takes no memory that cannot be written
            self._memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            head = self._memory[:_HEAD]
            if head[: len(_MAGIC)] != _MAGIC or int.from_bytes(head[8:16], "little") != generation:
                raise ValueError("another one")
            length, total = int.from_bytes(head[16:24], "little"), int.from_bytes(head[24:32], "little")
            if len(self._memory) != total or _start(length) > total:
                raise ValueError(f"it has {len(self._memory)} bytes, and shall have {total}")
            self.state, self.place, files = plain.loads(self._memory[_HEAD : _HEAD + length])
            self.stored = _Stored(self._memory, _start(length), files)
        except Exception as error:  # whatever another process wrote there
            os.close(descriptor)
            raise EvenstepError(f"the state that a living rank gave cannot be read: {error}") from None

    @staticmethod
    @torch.no_grad()
    def wrap(snapshot: Snapshot, place: Any, generation: int) -> int:
        """A descriptor of memory that holds it, the caller's."""
        files: dict[str, dict[str, Entry]] = {}
        tensors: list[tuple[int, torch.Tensor]] = []
        at = 0
        for file, named in snapshot.files.items():
            files[file] = {}
            for name, tensor in named.items():
                flat = tensor.detach().to("cpu").contiguous().reshape(-1)
                files[file][name] = (tensor.dtype, tuple(tensor.shape), at)
                if flat.numel():
                    tensors.append((at, flat.view(torch.uint8)))
                at += -(-flat.numel() * flat.element_size() // _ALIGNMENT) * _ALIGNMENT
        index = plain.dumps((snapshot.state, place, files))
        start = _start(len(index))
        lengths = (generation, len(index), start + at)
        descriptor = os.memfd_create("evenstep-gift", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, start + at)
            with mmap.mmap(descriptor, start + at) as memory:
                memory[:_HEAD] = _MAGIC + b"".join(one.to_bytes(8, "little") for one in lengths)
                memory[_HEAD : _HEAD + len(index)] = index
                for offset, flat in tensors:
                    room = torch.frombuffer(memory, dtype=torch.uint8, count=flat.numel(), offset=start + offset)
                    room.copy_(flat)
                    del room  # it holds the mapping
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def open(cls, process: int, descriptor: int, generation: int) -> Gift:
        """That of another process. Raises EvenstepError where it has ended, or is about something else by now."""
        return cls(_core.open_peer_fd(process, descriptor), generation)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def _start(index_bytes: int) -> int:
    return -(-(_HEAD + index_bytes) // _ALIGNMENT) * _ALIGNMENT


class _Stored(StoredFiles):
    """As those of a checkpoint, but that nothing can have happened to them since."""

    def __init__(self, memory: mmap.mmap, start: int, files: dict[str, dict[str, Entry]]) -> None:
        super().__init__(Path(Gift.name), {"files": [{"name": name} for name in files]})
        self._memory, self._start, self._files = memory, start, files

    def check_rest(self) -> None: ...

    def _read_files(self, names: Sequence[str]) -> dict[str, Tensors]:
        return {name: {key: self._copy(*entry) for key, entry in self._files[name].items()} for name in names}

    def _copy(self, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        size = values.numel() * values.element_size()
        if size:
            there = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._start + at)
            values.reshape(-1).view(torch.uint8).copy_(there)
        return values


def gift_seconds() -> float:
    """For so long a process that takes a lost rank's place waits for the state, once it is a member."""
    try:
        seconds = float(os.environ.get("EVENSTEP_STATE_PATIENCE", ""))
    except ValueError:
        return _PATIENCE_SECONDS
    return seconds if 0 < seconds < float("inf") else _PATIENCE_SECONDS


def gift_lacks(rank: int, elder: Sequence[int], near: bool) -> EvenstepError:
    """It did not come, and nobody has said why. elder: those that have it; near: one of them is on this host."""
    who = f"rank {elder[0]}" if len(elder) == 1 else f"one of ranks {', '.join(map(str, elder))}"
    return EvenstepError(
        f"rank {rank} cannot take a lost rank's place: the state of the training, which {who} of "
        f"{'this' if near else 'another'} host has, has not come within {gift_seconds():g} s\n"
        f"  fix: see in the logs of {who} what holds it up{'' if near else ', and that the hosts reach one another'}; where "
        "it only takes longer, EVENSTEP_STATE_PATIENCE gives more seconds"
    )
