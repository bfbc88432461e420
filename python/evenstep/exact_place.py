"""What decides the bits of a computation beside its numbers: the ranks of `exact="bitwise"` must have all of it alike."""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from evenstep import __version__
from evenstep._core import EvenstepError
from evenstep.group import Group, as_bytes, gather_objects

# Which kernels MKL and oneDNN choose, and torch's own.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
_ENVIRONMENT = "environment: "
# Not only what it can: oneDNN cuts long sums so that a part fits a core's caches, and MKL has code for makers and models.
_OF_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "cache size")
_OTHERWISE = "or leave exact='bitwise' out, and results agree to 1e-5"
_FIX = {
    "threads": "es.Config(threads=1), or OMP_NUM_THREADS, the same for all ranks and all runs",
    "torch": "install the same versions everywhere",
    "evenstep": "install the same versions everywhere",
    "torch's kernels": f"run on machines of one kind, with the same ATEN_CPU_CAPABILITY or none; {_OTHERWISE}",
}


def _processor(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """Of the first CPU: vendor, family, model, cache, and a checksum of what its instruction set has."""
    found: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().split("\n\n")[0]
    except OSError:
        return found
    for line in text.splitlines():
        name, _, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if name in _OF_PROCESSOR:
            found[f"processor: {name}"] = value
        elif name in ("flags", "Features"):
            found["instruction set"] = f"{zlib.crc32(' '.join(sorted(value.split())).encode()):08x}"
    return found


def _flushes_denormals() -> bool:
    return bool(torch.tensor(2.0**-1060, dtype=torch.float64).mul(1.0) == 0)


def _device(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.major}.{properties.minor}, {properties.multi_processor_count}",
        "CUDA": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "TF32": f"{torch.backends.cuda.matmul.allow_tf32}, {torch.backends.cudnn.allow_tf32}",
    }


def _devices(devices: Sequence[torch.device]) -> dict[str, str]:
    """Of all that the models are on."""
    each = [_device(device) for device in devices]
    return {name: "; ".join(one[name] for one in each if name in one) for one in each for name in one}


def probe(device: torch.device) -> str:
    """A checksum of what this place computes in a small network, forward and backward: what nothing above has named."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    image, kernel, left, right = drawn(2, 3, 19, 19), drawn(8, 3, 3, 3), drawn(33, 257), drawn(257, 65)
    query = drawn(2, 2, 17, 16)
    tensors = [image, kernel, left, right, query]
    with torch.enable_grad():
        attended = functional.scaled_dot_product_attention(query, query, query)
        convolved = functional.layer_norm(torch.tanh(functional.conv2d(image, kernel)), (17, 17))
        total = (left @ right).softmax(-1).log().mean() + convolved.square().mean() + functional.gelu(attended).sum()
        gradients = torch.autograd.grad(total, tensors)
    checksum = 0
    for one in (total.detach().reshape(1), *gradients):
        checksum = zlib.crc32(as_bytes(one.cpu().contiguous()), checksum)
    return f"{checksum:08x}"


def place_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Name -> value, in words; compared with ==."""
    devices = list(dict.fromkeys(p.device for model in models for p in model.parameters())) or [torch.device("cpu")]
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    groups = [[str(group.get(name)) for name in ("foreach", "fused", "capturable")] for group in param_groups]
    return {
        "torch": torch.__version__,
        "evenstep": __version__,
        "machine": platform.machine(),
        **_processor(),
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "flushed denormals": str(_flushes_denormals()),
        **_devices(devices),
        **{f"{_ENVIRONMENT}{name}": os.environ[name] for name in _VARIABLES if name in os.environ},
        "the optimizer's foreach, fused, capturable": str(groups),
        "probe": ", ".join(map(probe, devices)),
    }


def difference(mine: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first thing in which the two differ; "" for none."""
    return next((name for name in (*other, *mine) if mine.get(name) != other.get(name)), "")


def _refuse(who: str, name: str, value: str | None, whose: str, other: str | None) -> EvenstepError:
    what = (
        "in what it computes in a small network (probe)" if name == "probe" else f"in {name}: {value}, {whose}: {other}"
    )
    fix = _FIX.get(name, f"run on machines of one kind, set up alike; {_OTHERWISE}")
    if name.startswith(_ENVIRONMENT):
        fix = f"set {name.removeprefix(_ENVIRONMENT)} to the same value for all ranks and all runs, or for none"
    return EvenstepError(f"exact='bitwise' gives the same bits on equal machines alone, and {who} {what}\n  fix: {fix}")


def check_alike(group: Group, mine: dict[str, str]) -> None:
    """Raises, on every rank, where a rank's place differs from rank 0's. Collective."""
    everyone: list[dict[str, str]] = gather_objects(group, mine)
    for rank, theirs in enumerate(everyone):
        name = difference(theirs, everyone[0])
        if name:
            raise _refuse(f"rank {rank} differs", name, theirs.get(name), "rank 0", everyone[0].get(name))


class ExactState:
    """What a checkpoint must say so that going on from it gives the same bits."""

    def __init__(self, block: int, place: dict[str, str]) -> None:
        self._block, self._place = block, place

    def state_dict(self) -> dict[str, Any]:
        return {"block": self._block, "place": dict(self._place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["block"] != self._block:
            raise EvenstepError(
                f"the checkpoint's training had blocks of {state['block']} samples, this one has blocks of {self._block}, whose "
                f"sums have other bits\n  fix: es.Config(exact='bitwise', block={state['block']})"
            )
        name = difference(self._place, state["place"])
        if name:
            raise _refuse(
                "this place differs from the checkpoint's",
                name,
                self._place.get(name),
                "the checkpoint's",
                state["place"].get(name),
            )
