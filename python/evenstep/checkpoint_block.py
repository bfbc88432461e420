"""Memory that holds a checkpoint's file as it is, its tensors views of it: a device writes into it, and nothing is copied once more.
It begins at a huge page, so that a read of a disk finds few pieces and the kernel few faults. It lives as long as any of
its tensors does."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence

import torch

from evenstep import _core

# A smaller file's tensors get memory of their own each.
LEAST = 4 << 20
# Where a tensor must begin: a cache line, as in torch's own memory.
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


_memmove = ctypes.CDLL(None).memmove  # other threads go on meanwhile
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


class Block:
    """Of a file of `size` bytes in which so many tensors may lie anywhere."""

    def __init__(self, size: int, tensors: int = 0) -> None:
        room = size + tensors * ALIGNMENT
        self._memory = mmap.mmap(-1, room + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._begin = -address % _HUGE_PAGE
        self.address = address + self._begin

    def holds(self, head: bytes) -> bool:
        """Whether it begins with these bytes."""
        return self._memory[self._begin : self._begin + len(head)] == head

    def tensors(self, places: Sequence[tuple[int, torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
        """Those that begin at these bytes, which rise. What does not begin at a cache line is moved there, with what follows it: a
        copy would take its memory again. Once."""
        found, moves = [], []
        end = 0
        for begin, dtype, shape in places:
            count = math.prod(shape)
            at = -(-max(begin, end) // ALIGNMENT) * ALIGNMENT
            if count == 0:
                found.append(torch.empty(shape, dtype=dtype))
                continue
            values = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._begin + at)
            end = at + values.nbytes
            moves.append((self.address + at, self.address + begin, values.nbytes))
            found.append(values.view(shape))
        for to, source, size in reversed(moves):  # upwards: nothing is overwritten that is yet to be moved
            if to != source:
                _memmove(to, source, size)
        return found


def move(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Copies the second of each pair to the first by several threads, where both are plain memory of the host of one form,
    and no other's first lies in a part of it; nothing where both are the same memory. Which of them were."""
    pairs = list(pairs)
    plain = [
        is_plain(to) and is_plain(values) and to.dtype == values.dtype and to.shape == values.shape
        for to, values in pairs
    ]
    apart = ranges_apart({range_of(to) for (to, _), may in zip(pairs, plain) if may})
    done = []
    moves = {}  # tied parameters are one memory
    for (to, values), may in zip(pairs, plain):
        begin, end = range_of(to) if may else (0, 0)
        done.append(may and (begin == end or (begin, end) in apart))
        if done[-1] and begin < end and begin != values.data_ptr():
            moves[begin] = (begin, values.data_ptr(), end - begin)
            torch.autograd.graph.increment_version(to)
    _core.move_bytes(tuple(moves.values()))
    return done


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def ranges_apart(ranges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those that share no byte with another."""
    ordered = sorted((begin, end) for begin, end in ranges if begin < end)
    apart = set()
    furthest = 0
    for i, (begin, end) in enumerate(ordered):
        if furthest <= begin and (i + 1 == len(ordered) or end <= ordered[i + 1][0]):
            apart.add((begin, end))
        furthest = max(furthest, end)
    return apart


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )
