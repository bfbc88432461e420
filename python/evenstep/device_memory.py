"""What memory a rank's device holds for it, at most held, and leaves it: of a CPU by control groups, the process's limits and
the host, of a GPU by torch's allocator."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from evenstep._core import EvenstepError, Memory
from evenstep.device_places import place_of
from evenstep.group_end import is_gone

_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "alloc_failed",
    "could not create a memory",
    "unable to allocate",
)


@dataclass(frozen=True)
class Limit:
    bytes: int
    source: str  # what sets it, for people


class DeviceMemory(Protocol):
    device: str  # as torch names it
    place: str  # the same for ranks that share the memory

    def held(self) -> int: ...

    def start(self) -> None:
        """Gives back what nobody uses, and begins a new peak."""

    def peak(self) -> int:
        """The most that was held since `start`."""

    def settle(self) -> None:
        """Waits until the device has done what it was told."""

    def limit(self, sharers: int, asked: int | None) -> Limit:
        """What this process may hold, if `sharers` processes get equal parts of what is free now."""

    def bounded(self, limit_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Inside, more than that is refused by an exception, where that can be had."""


def memory_of(modules: Sequence[nn.Module]) -> DeviceMemory:
    """That of the device on which the parameters are. Raises EvenstepError where they are on several, or where nobody could
    tell how much is used."""
    parameters = [p for module in modules for p in module.parameters()]
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise EvenstepError(
            f"the parameters are on {' and '.join(devices)}, and the memory of one device is measured\n"
            "  fix: move the model to one device"
        )
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type == "cuda":
        return _OfGPU(device)
    if device.type == "cpu":
        return _OfHost()
    raise EvenstepError(
        f"the memory of {device} cannot be measured: of CPUs and CUDA devices it can\n  fix: choose the size by hand"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this process lacks memory: an error that tells of another rank's, in its words, is none."""
    if isinstance(error, EvenstepError) and is_gone(error):
        return False
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
    if isinstance(error, kinds) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


class _OfGPU:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = str(device)
        properties: Any = torch.cuda.get_device_properties(device)
        self.place = f"{place_of(()).host} {getattr(properties, 'uuid', '') or self.device}"

    def held(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def start(self) -> None:
        gc.collect(1)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def limit(self, sharers: int, asked: int | None) -> Limit:
        self.start()  # what torch keeps for later is free, too
        free, _ = torch.cuda.mem_get_info(self._device)
        whole = Limit(self.held() + free // sharers, "the memory of the GPU" + _shared(sharers))
        return whole if asked is None or asked > whole.bytes else Limit(asked, "memory_bytes")

    def bounded(self, limit_bytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # torch's allocator raises of itself


class _OfHost:
    device = "cpu"

    def __init__(self) -> None:
        self.place = f"{place_of(()).host} {os.uname().nodename} memory"  # a container's is its own
        self._memory = Memory()
        if not self._memory.reset_peak():
            raise EvenstepError(
                "this kernel does not begin new peaks of a process's memory (/proc/self/clear_refs), so nobody could tell "
                "what a trial used\n  fix: choose the size by hand"
            )

    def held(self) -> int:
        return self._memory.read()[0]

    def start(self) -> None:
        gc.collect(1)  # what a step leaves in circles is young; all of torch's objects take a tenth of a second
        with contextlib.suppress(AttributeError, OSError):  # another C library than glibc keeps nothing back
            ctypes.CDLL(None).malloc_trim(0)
        self._memory.reset_peak()

    def peak(self) -> int:
        return self._memory.read()[1]

    def settle(self) -> None: ...

    def limit(self, sharers: int, asked: int | None) -> Limit:
        held, _, available, _, folder, _ = self._memory.read()
        source = f"the control group {folder}" if folder else "the memory of the host"
        found = [Limit(held + available // sharers, source + _shared(sharers))]
        found += [Limit(held + free, source) for free, source in process_room()]
        if asked is not None:
            found.append(Limit(asked, "memory_bytes"))
        return min(found, key=lambda one: one.bytes)

    @contextlib.contextmanager
    def bounded(self, limit_bytes: int) -> Iterator[None]:
        """By RLIMIT_DATA: the kernel would else end the process that takes more than its control group has."""
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = _status("VmData") + max(0, limit_bytes - self.held())
        if any(known != resource.RLIM_INFINITY and known < wanted for known in (soft, hard)):
            wanted = soft
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _shared(sharers: int) -> str:
    return f", divided among {sharers} ranks" if sharers > 1 else ""


def _status(name: str) -> int:
    """A size of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def process_room() -> Iterator[tuple[int, str]]:
    """What the process's own limits leave it."""
    for name, size in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield max(0, soft - _status(size)), name
