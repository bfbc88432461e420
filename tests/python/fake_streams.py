"""Stands for torch.cuda where there is no GPU: CPU tensors as device memory, streams of the made-up driver
(tests/comm/fake_gpu.h). A wait for a stream or an event waits on the host, and every call is written down."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pathlib
import shutil
import subprocess
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from evenstep import backend, backend_exchange, backend_messages, backend_staged, backend_tensors
from evenstep.backend_legs import device_collectives
from evenstep.device_groups import DeviceGroups
from evenstep.device_places import over_hosts_among
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


HOST_MEMORY: dict[int, torch.Tensor] = {}
"""What `pinned` gave, by its address; kept, so that no other memory comes to have that. All other is a GPU's."""


def is_on_host(tensor: torch.Tensor) -> bool:
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return all(part.untyped_storage().data_ptr() in HOST_MEMORY for part in parts)


class FakeStream:
    def __init__(self, world: FakeStreams, name: str, device: int) -> None:
        self._world, self.name = world, name
        self.cuda_stream: int = world.library.fake_gpu_stream(device)

    def wait_stream(self, other: FakeStream) -> None:
        self._world.log.append(f"{self.name} waits for {other.name}")
        self._world.library.fake_gpu_wait(other.cuda_stream, 0)

    def wait_event(self, event: FakeEvent) -> None:
        self._world.log.append(f"{self.name} waits for an event of {event.stream.name}")
        event.synchronize()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing on it goes on."""
        self._world.library.fake_gpu_hold(self.cuda_stream, True)
        try:
            yield
        finally:
            self._world.library.fake_gpu_hold(self.cuda_stream, False)


class FakeEvent:
    def __init__(self, world: FakeStreams, stream: FakeStream) -> None:
        self._world, self.stream = world, stream
        self._mark = world.library.fake_gpu_mark(stream.cuda_stream)
        weakref.finalize(self, world.library.fake_gpu_mark_free, self._mark)

    def query(self) -> bool:
        return bool(self._world.library.fake_gpu_passed(self._mark))

    def synchronize(self) -> None:
        self._world.library.fake_gpu_await(self._mark)


class FakeFuture(Future[Any]):
    """One of CPU tensors waits for no stream: their value is set when it is there."""

    def __init__(self, world: FakeStreams) -> None:
        super().__init__()
        self._world = world

    def set_result(self, result: Any) -> None:
        self._world.settle(self._world.current(0).cuda_stream)
        super().set_result(result)


class FakeStreams(CudaStreams):
    def __init__(self, device: int) -> None:
        super().__init__()
        self.library = ctypes.CDLL(os.environ["EVENSTEP_NCCL_LIBRARY"])
        self.library.fake_gpu_stream.restype = ctypes.c_void_p
        self.library.fake_gpu_violation.restype = ctypes.c_char_p
        self.library.fake_gpu_log.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        for name, arguments in {
            "wait": [pointer, ctypes.c_int],
            "hold": [pointer, ctypes.c_bool],
            "copy": [pointer, pointer, pointer, ctypes.c_size_t],
            "mark": [pointer],
            "passed": [pointer],
            "await": [pointer],
            "mark_free": [pointer],
        }.items():
            getattr(self.library, f"fake_gpu_{name}").argtypes = arguments
        self.library.fake_gpu_mark.restype = pointer
        self.library.fake_gpu_passed.restype = ctypes.c_bool
        self._copied: list[tuple[FakeEvent, torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()
        self.log: list[str] = []
        self.kept: list[tuple[int, str]] = []  # addresses, and the streams
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
        try:
            yield
        finally:
            self._used.stream = before

    def captures(self) -> bool:
        return False

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(max(1, math.prod(shape)), dtype=dtype)
        HOST_MEMORY[memory.untyped_storage().data_ptr()] = memory
        return memory[: math.prod(shape)].view(tuple(shape))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype, (target, source)
        assert target.is_contiguous() and source.is_contiguous(), "a GPU copies no gaps to or from the host on its own"
        assert is_on_host(target) != is_on_host(source), "one side is pinned memory"
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed."
            )  # as torch has it
        stream = self.current(self._device)
        self.log.append(f"a copy {'down' if is_on_host(target) else 'up'} on {stream.name}")
        self.library.fake_gpu_copy(stream.cuda_stream, target.data_ptr(), source.data_ptr(), target.nbytes)
        with self._lock:  # torch keeps both until the stream has passed
            self._copied = [one for one in self._copied if not one[0].query()]
            self._copied.append((FakeEvent(self, stream), target, source))

    def mark(self, stream: Any, blocking: bool = False) -> Any:
        self.log.append(f"an event on {stream.name}")
        if self.careful:
            self.settle(stream.cuda_stream)
        return FakeEvent(self, stream)

    def future(self, device: int) -> Future[Any]:
        return FakeFuture(self)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self.log.append(f"kept for {stream.name}")
        self.kept.append((tensor.data_ptr(), stream.name))

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


class OfHost:
    """The reducer of plain calls, without a GPU's tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _takes(self, tensors: Any) -> bool:
        return all(map(is_on_host, [tensors] if isinstance(tensors, torch.Tensor) else tensors))

    def __call__(self, tensors: Any, options: Any) -> bool:
        return self._takes(tensors) and self._reducer(tensors, options)

    def put(self, queue: Any, token: Any, place: Any, tensors: Any, options: Any) -> bool:
        return self._takes(tensors) and self._reducer.put(queue, token, place, tensors, options)


def stand_in(group: Any, timeout_seconds: float = 60.0) -> FakeStreams:
    """Makes a group take all tensors for CUDA's, but those that its streams made as pinned memory."""
    for module in (backend, backend_exchange, backend_messages, backend_tensors):
        module.is_ours = lambda tensor: tensor.layout is torch.strided and is_on_host(tensor)
    for module in (backend_messages, backend_staged):
        module.is_on_gpu = lambda tensor: not is_on_host(tensor)
    streams = FakeStreams(group.rank())
    store = dist.PrefixStore(f"stand-in/{group.group_name}/", group._store)
    groups = DeviceGroups(
        store, group.rank(), group.size(), timeout_seconds, streams.identity, beside=group._comm, name="stand-in"
    )
    group._reducer = group._reducer and OfHost(group._reducer)
    said = [json.loads(group._device_store.get(f"engine/{rank}")) for rank in range(group.size())]
    _, hosts, wishes = zip(*said)
    host, devices = group._beneath["cpu"], device_collectives(groups, streams, hosts, over_hosts_among(hosts, wishes))
    group._devices = group._beneath["cpu"] = devices
    group._under = lambda tensor: host if is_on_host(tensor) else devices
    return streams


def stand_in_for_all() -> list[FakeStreams]:
    """The same of every group that is made from now on; their streams, whose tensors live as long as torch's C++ wants."""
    made: list[FakeStreams] = []
    begin = backend.EvenstepGroup.__init__

    def begun(group: Any, *arguments: Any, **named: Any) -> None:
        begin(group, *arguments, **named)
        made.append(stand_in(group))
        made[-1].careful = True

    backend.EvenstepGroup.__init__ = begun  # type: ignore[method-assign]
    return made
