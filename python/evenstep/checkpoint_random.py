"""Random number generators of a rank: torch (CPU, CUDA), random, numpy."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from typing import Any, Callable

import torch

from evenstep.checkpoint_encoding import decode, encode


def capture() -> tuple[Any, dict[str, torch.Tensor]]:
    """The state of this process's generators: JSON and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        state["numpy"] = numpy.random.get_state(legacy=False)
    tensors: dict[str, torch.Tensor] = {}
    return encode(state, "random", tensors), tensors


def restore(state: Any, tensor: Callable[[str], torch.Tensor]) -> None:
    values = decode(state, tensor)
    torch.set_rng_state(values["torch"])
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in values and torch.cuda.is_available():
        torch.cuda.set_rng_state(values["cuda"])
    if "numpy" in values:
        import numpy

        numpy.random.set_state(values["numpy"])


def capture_after(put_back: Callable[[], None]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state that `put_back` sets; the generators stay as they are."""
    state, tensors = capture()
    put_back()
    try:
        return capture()
    finally:
        restore(state, tensors.__getitem__)


def derive(seed: int, rank: int, step: int) -> None:
    """For a rank that no checkpointed rank stands for: the same generators on every resume from that step."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    value = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value % (1 << 32))
