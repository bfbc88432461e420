"""What es.prepare(compression=…) may be, and how gradients are encoded that every rank sends to every other.

Sources: stochastic rounding by blocks after Alistarh et al., "QSGD", NeurIPS 2017; the sign with the mean magnitude after
Seide et al., Interspeech 2014; top-k after Aji and Heafield, EMNLP 2017; what an encoding leaves out is added to the next
gradient (error feedback) as in Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from evenstep import _core

_NUMBERS = {"topk": 0.01, "powersgd": 4.0}  # the part that travels; the rank of the matrices
_PLAIN = ("fp16", "bf16", "int8", "onebit")
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ENCODINGS = {"int8": _core.SYNC_INT8, "onebit": _core.SYNC_ONE_BIT, "topk": _core.SYNC_TOP}
WAYS = {"auto": _core.SYNC_CHEAPER, "gather": _core.SYNC_GATHER, "parts": _core.SYNC_PARTS}


@dataclass(frozen=True)
class Compression:
    """One choice; `number` is the ratio of topk and the rank of powersgd."""

    name: str
    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}:{self.number:g}" if self.name in _NUMBERS else self.name


def parse_compression(words: str | None, where: str = "es.prepare(compression=…)") -> Compression | None:
    """None and "none": gradients travel as they are. Raises ValueError."""
    if words is None or words == "none":
        return None
    name, colon, text = str(words).partition(":")
    if name in _PLAIN and not colon:
        return Compression(name)
    if name in _NUMBERS:
        try:
            number = float(text) if colon else _NUMBERS[name]
        except ValueError:
            number = math.nan
        if (name == "topk" and 0 < number <= 1) or (name == "powersgd" and number >= 1 and number.is_integer()):
            return Compression(name, number)
    raise ValueError(
        f"{where} is {words!r}\n  fix: choose 'fp16', 'bf16', 'int8', 'onebit', 'topk:0.01' (the part that travels, up to 1), "
        "'powersgd:4' (the rank of the matrices, from 1), or 'none'"
    )


def parse_way(words: str) -> str:
    """EVENSTEP_COMPRESSION_WAY. Raises EvenstepError."""
    if words and words not in WAYS:
        raise _core.EvenstepError(
            f"EVENSTEP_COMPRESSION_WAY is {words!r}; choose one of {', '.join(WAYS)}\n"
            "  fix: unset it, and what sends fewer bytes is taken"
        )
    return words or "auto"


def in_parts(way: str, ranks: int, payload_bytes: int) -> bool:
    """Whether an encoding of so many bytes goes in parts: the same on all ranks (include/evenstep/sync.h)."""
    if way == "auto":
        return ranks >= _core.SYNC_PARTS_RANKS and payload_bytes >= _core.SYNC_PARTS_BYTES
    return way == "parts"


MOST_VALUES = 2**31 - 1  # that are encoded together: places are int32


class Encoding:
    """Flat fp32 values to bytes and back, in C where they are on a CPU, else by torch's operations: the same bytes but for
    what is random, for means, which torch adds up in another order, and for which of equal values are the largest. The
    bytes of equally many values are equally many on every rank. Decoding is one operation an element, so that it gives the
    same bits on every rank; what is not finite stays so."""

    feedback = True  # whether what it leaves out is to be added to the next values
    kind: int
    BLOCK = 1  # values that are encoded together

    def number(self, count: int, seed: int) -> int:
        """What the encoding wants to know beside the values."""
        return 0

    def bytes(self, count: int) -> int:
        """Of so many values encoded; of none, none."""
        return _core.encoded_bytes(self.kind, count, self.number(count, 0)) if count else 0

    def encode(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.uint8)
        if not values.is_cpu:
            return self.encode_by_torch(values, seed)
        number = self.number(values.numel(), seed)
        payload = torch.empty(_core.encoded_bytes(self.kind, values.numel(), number), dtype=torch.uint8)
        _core.encode(self.kind, values.data_ptr(), values.numel(), number, payload.data_ptr())
        return payload

    def add(self, payload: torch.Tensor, into: torch.Tensor, factor: int = 1) -> None:
        """into += factor (1 or -1) * what was encoded."""
        if into.numel() == 0:
            return
        if not into.is_cpu:
            self.add_by_torch(payload, into, factor)
            return
        number = self.number(into.numel(), 0)
        assert payload.numel() == _core.encoded_bytes(self.kind, into.numel(), number)
        _core.decode_add(self.kind, payload.data_ptr(), into.data_ptr(), into.numel(), number, factor)

    def encode_by_torch(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        raise NotImplementedError

    def add_by_torch(self, payload: torch.Tensor, into: torch.Tensor, factor: int) -> None:
        raise NotImplementedError


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of `size`, the last one filled with zeros."""
    rows = -(-values.numel() // size)
    padded = values.new_zeros(rows * size)
    padded[: values.numel()] = values
    return padded.view(rows, size)


def _as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


class Int8(Encoding):
    """q = floor(x / s + u), u uniform in [0, 1): x on average. s: a 127th of the largest magnitude in each 256 values."""

    feedback = False
    kind = _core.ENCODE_INT8
    BLOCK = 256

    def number(self, count: int, seed: int) -> int:
        return seed

    def encode_by_torch(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        rows = _blocks(values, self.BLOCK)
        scales = rows.abs().amax(1, keepdim=True) / 127
        random = torch.Generator(values.device).manual_seed(seed)
        steps = rows / torch.where(scales > 0, scales, torch.ones_like(scales))
        steps += torch.rand(rows.shape, generator=random, device=values.device)
        return _as_bytes(scales, steps.floor_().clamp_(-127, 127).nan_to_num_(0).to(torch.int8))

    def add_by_torch(self, payload: torch.Tensor, into: torch.Tensor, factor: int) -> None:
        rows = -(-into.numel() // self.BLOCK)
        scales = payload[: 4 * rows].view(torch.float32)
        steps = payload[4 * rows :].view(torch.int8).view(rows, self.BLOCK)
        into += (steps.to(torch.float32) * (factor * scales[:, None])).view(-1)[: into.numel()]


class OneBit(Encoding):
    """The sign of each value and the mean magnitude of each 1024."""

    kind = _core.ENCODE_ONE_BIT
    BLOCK = 1024

    def encode_by_torch(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        rows = _blocks(values, self.BLOCK)
        scales = rows.abs().sum(1)
        counts = torch.full_like(scales, self.BLOCK)
        counts[-1] -= rows.numel() - values.numel()
        bits = (rows >= 0).view(-1, 8) * self._masks(values)
        return _as_bytes(scales / counts, bits.sum(1, dtype=torch.uint8))

    @staticmethod
    def _masks(like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=like.device)

    def add_by_torch(self, payload: torch.Tensor, into: torch.Tensor, factor: int) -> None:
        rows = -(-into.numel() // self.BLOCK)
        scales = factor * payload[: 4 * rows].view(torch.float32)[:, None]
        signs = (payload[4 * rows :, None] & self._masks(into)).ne_(0).view(rows, self.BLOCK)
        into += torch.where(signs.bool(), scales, -scales).view(-1)[: into.numel()]


class TopK(Encoding):
    """The largest values by magnitude, with their places."""

    kind = _core.ENCODE_TOP

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def number(self, count: int, seed: int) -> int:
        return max(1, math.ceil(self.ratio * count))

    def encode_by_torch(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        places = values.abs().topk(self.number(values.numel(), seed), sorted=False).indices
        return _as_bytes(values[places], places.to(torch.int32))

    def add_by_torch(self, payload: torch.Tensor, into: torch.Tensor, factor: int) -> None:
        count = payload.numel() // 8
        values, places = payload[: 4 * count].view(torch.float32), payload[4 * count :].view(torch.int32)
        into.index_add_(0, places, factor * values)


def encoding_of(compression: Compression) -> Encoding:
    if compression.name == "topk":
        return TopK(compression.number)
    return Int8() if compression.name == "int8" else OneBit()
