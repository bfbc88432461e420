"""Stands for torch.cuda where there is no GPU: CPU tensors as device memory, streams of the made-up driver
(tests/comm/fake_gpu.h). A wait for a stream or an event waits on the host, and every call is written down."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import backend, backend_exchange, backend_messages, backend_tensors
from evenstep.backend_device import DeviceCollectives
from evenstep.device_groups import DeviceGroups
from evenstep.device_streams import CudaStreams

TREE = pathlib.Path(__file__).resolve().parents[2]


def build_fake(folder: pathlib.Path) -> pathlib.Path | None:
    """The made-up libraries, compiled; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    out = folder / "libfake_nccl.so"
    sources = [
        str(TREE / "tests" / "comm" / name)
        for name in ("fake_gpu.c", "fake_nccl.c", "fake_nccl_lives.c", "fake_operations.c", "fake_world.c")
    ]
    words = [compiler, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{TREE / 'tests'}"]
    subprocess.run([*words, *sources, "-o", str(out), "-lm", "-lpthread"], check=True)
    return out


class FakeStream:
    def __init__(self, world: FakeStreams, name: str, device: int) -> None:
        self._world, self.name = world, name
        self.cuda_stream: int = world.library.fake_gpu_stream(device)

    def wait_stream(self, other: FakeStream) -> None:
        self._world.log.append(f"{self.name} waits for {other.name}")
        self._world.library.fake_gpu_wait(other.cuda_stream, 0)

    def wait_event(self, event: FakeEvent) -> None:
        self._world.log.append(f"{self.name} waits for an event of {event.stream.name}")
        self._world.library.fake_gpu_wait(event.stream.cuda_stream, 0)


class FakeEvent:
    def __init__(self, world: FakeStreams, stream: FakeStream) -> None:
        self._world, self.stream = world, stream

    def query(self) -> bool:
        return bool(self._world.library.fake_gpu_idle(self.stream.cuda_stream))


class FakeStreams(CudaStreams):
    def __init__(self, device: int) -> None:
        super().__init__()
        self.library = ctypes.CDLL(os.environ["EVENSTEP_NCCL_LIBRARY"])
        self.library.fake_gpu_stream.restype = ctypes.c_void_p
        self.library.fake_gpu_violation.restype = ctypes.c_char_p
        self.library.fake_gpu_log.restype = ctypes.c_char_p
        for name in ("fake_gpu_wait", "fake_gpu_idle"):
            getattr(self.library, name).argtypes = [ctypes.c_void_p, ctypes.c_int][: 2 if name.endswith("wait") else 1]
        self.library.fake_gpu_idle.restype = ctypes.c_bool
        self.log: list[str] = []
        # torch's C++ frees tensors that a GPU's stream has still to pass, as its allocator allows; the host's does not
        self.careful = False
        self._device = device
        self._own = FakeStream(self, "current", device)
        self._used = threading.local()  # as in torch, each thread has a current stream of its own

    def device(self, tensor: torch.Tensor) -> int:
        return self._device

    def identity(self, device: int) -> str:
        return f"fake-{device}"

    def current(self, device: int) -> Any:
        return getattr(self._used, "stream", self._own)

    def side(self, device: int, pair: Any = None) -> Any:
        if (device, pair) not in self._sides:
            self._sides[(device, pair)] = FakeStream(self, f"side {pair}" if pair else "side", device)
        return self._sides[(device, pair)]

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before = self.current(self._device)
        self._used.stream = stream
        yield
        self._used.stream = before

    def mark(self, stream: Any) -> Any:
        self.log.append(f"an event on {stream.name}")
        if self.careful:
            self.settle(stream.cuda_stream)
        return FakeEvent(self, stream)

    def future(self, device: int) -> Future[Any]:
        for stream in self._sides.values():  # a future of CPU tensors waits for no stream: wait here
            self.library.fake_gpu_wait(stream.cuda_stream, 0)
        return Future()

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self.log.append(f"kept for {stream.name}")

    def let_go(self, stream: Any) -> None:
        if self.careful:
            self.settle(stream.cuda_stream)

    def settle(self, stream: int) -> None:
        self.library.fake_gpu_wait(stream, 0)

    def finish(self) -> None:
        """All that was put anywhere is done."""
        for stream in [self._own, *self._sides.values()]:
            self.library.fake_gpu_wait(stream.cuda_stream, 0)

    def violation(self) -> str:
        return self.library.fake_gpu_violation().decode()


def stand_in(group: Any, timeout_seconds: float = 60.0) -> FakeStreams:
    """Makes a group send all its tensors to the device collectives, as if they were CUDA's."""
    for module in (backend, backend_exchange, backend_messages, backend_tensors):
        module.is_ours = lambda tensor: False
    streams = FakeStreams(group.rank())
    store = dist.PrefixStore(f"stand-in/{group.group_name}/", group._store)
    groups = DeviceGroups(
        store, group.rank(), group.size(), timeout_seconds, streams.identity, beside=group._comm, name="stand-in"
    )
    group._reducer = None
    devices = DeviceCollectives(groups, streams)
    group._devices = group._beneath["cpu"] = devices
    return streams
