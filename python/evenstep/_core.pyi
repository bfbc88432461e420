"""What the extension has, for type checkers. One block a subject."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from typing_extensions import Self

version: str

class EvenstepError(RuntimeError):
    status: str
    fix: str | None
    rank: int | None
    device: str | None

# --- telemetry ---

SPAN_DATA: int
SPAN_FORWARD: int
SPAN_BACKWARD: int
SPAN_COMMUNICATION: int
SPAN_WAIT: int
SPAN_OPTIMIZER: int
SPAN_CHECKPOINT: int
SPAN_EVALUATION: int
EVENT_SHARES: int
EVENT_CHECKPOINT: int
EVENT_TOTAL_STEPS: int
EVENT_EPOCH: int
EVENT_RESUME: int
EVENT_MESSAGE: int
EVENT_BALANCING: int
EVENT_JOINING: int
EVENT_JOINED: int
EVENT_SCALAR: int
EVENT_COMPRESSION: int
EVENT_STALL: int
SCALAR_NAME_BYTES: int

def clock_ns() -> int: ...
def telemetry_segment(ranks: int, records: int = 0, /) -> int: ...

class Telemetry:
    """Writes rank's ring in segment fd; with fd -1 every call does nothing."""
    def __new__(cls, fd: int, rank: int) -> Telemetry: ...
    @property
    def handle(self) -> Any | None: ...
    paused: bool  # write only
    def span(self, kind: int, step: int, start_ns: int, duration_ns: int, bytes: int = 0, /) -> None: ...
    def step(
        self,
        step: int,
        epoch: int,
        end_ns: int,
        duration_ns: int,
        busy_ns: int,
        samples: int,
        batch: int,
        loss: float = ...,
        predicted_seconds: float = ...,
    ) -> None: ...
    def event(self, event: int, step: int, value: int = 0, words: str = "", at_ns: int = 0) -> None: ...
    def scalar(self, name: str, step: int, number: float, /) -> None: ...

class TelemetryReader:
    def __new__(cls, fd: int) -> TelemetryReader: ...
    def drain(self) -> tuple[list[tuple[Any, ...]], int]: ...

# --- comm ---

DTYPE_F32: int
DTYPE_F64: int
DTYPE_F16: int
DTYPE_BF16: int
DTYPE_I8: int
DTYPE_U8: int
DTYPE_I16: int
DTYPE_I32: int
DTYPE_I64: int
DTYPE_BOOL: int
OP_SUM: int
OP_AVG: int
OP_PRODUCT: int
OP_MIN: int
OP_MAX: int
OP_BAND: int
OP_BOR: int
OP_BXOR: int

def open_peer_fd(pid: int, fd: int, /) -> int: ...
def comm_simd() -> str: ...
def ucx_version(library: str | None = None, /) -> str: ...

class Request:
    """A message that has begun. Keep its data until it is done."""
    def done(self) -> bool: ...
    def wait(self, seconds: float = 0, /) -> int: ...

def data_of(array: Any, /) -> tuple[int, int, int, int, int, bool, Any]:
    """(address, elements, bytes of one, dtype or -1, reals in one, read-only, keeper)"""

class Reducer:
    """What torch hands to a backend, all-reduced in one call where it is plain."""
    def __new__(cls, comm: Comm, types: tuple[type, ...], ops: dict[int, int], unset: Any, /) -> Reducer: ...
    def __call__(self, tensors: Any, options: Any, /) -> bool: ...

class Comm:
    """A rank's place in a group of processes of one host; opening it returns when all ranks have come."""
    def __new__(
        cls,
        fd: int,
        rank: int,
        ranks: int,
        arena_bytes: int = 0,
        timeout_seconds: float = 1800.0,
        spin: int = -1,
    ) -> Comm: ...
    @staticmethod
    def create_segment(ranks: int, arena_bytes: int = 0, processes: Sequence[int] | None = None) -> int: ...
    @classmethod
    def open_ucx(
        cls,
        gather: Callable[[bytes], bytes],
        rank: int,
        ranks: int,
        arena_bytes: int = 0,
        timeout_seconds: float = 1800.0,
        spin: int = -1,
        library: str | None = None,
        interfaces: str | None = None,
        number: int = -1,
    ) -> Comm: ...
    @classmethod
    def open_hosts(
        cls,
        rank: int,
        host_of: Sequence[int],
        inside: Comm,
        between: Comm | None = None,
        everyone: Comm | None = None,
        timeout_seconds: float = 1800.0,
    ) -> Comm: ...
    @property
    def engine(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def wait_ns(self) -> int: ...
    @property
    def description(self) -> str: ...
    @property
    def sends(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def handle(self) -> Any: ...
    def arena(self) -> memoryview: ...
    def all_reduce(self, address: int, count: int, dtype: int, op: int, /) -> None: ...
    def all_reduce_data(self, array: Any, op: int, /) -> None: ...
    def reduce_scatter(self, input: int, output: int, counts: Sequence[int], dtype: int, op: int, /) -> None: ...
    def all_gather(self, input: int, output: int, counts: Sequence[int], dtype: int, /) -> None: ...
    def all_to_all(
        self,
        inputs: Sequence[int],
        input_bytes: Sequence[int],
        outputs: Sequence[int],
        output_bytes: Sequence[int],
        /,
    ) -> None: ...
    def broadcast(self, address: int, bytes: int, root: int, /) -> None: ...
    def send(self, address: int, bytes: int, rank: int, tag: int, /) -> Request: ...
    def receive(self, address: int, bytes: int, rank: int, tag: int, /) -> Request: ...
    def barrier(self) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def set_stop_grace(self, seconds: float, /) -> None: ...
    def set_site(self, text: str | None, /) -> None: ...
    def flight(self, rank: int, /) -> list[tuple[int, str, str, str, int, int]]: ...
    def revoke(self) -> None: ...
    def close(self) -> None: ...

class DeviceComm:
    """A rank's place in a group of GPUs, through NCCL; opening it returns when all ranks have come. Data are addresses
    of device memory, streams the numbers of CUDA streams (0: the default one)."""
    def __new__(
        cls,
        id: bytes,
        rank: int,
        ranks: int,
        device: int,
        shares_device: bool = False,
        blocking: bool = False,
        timeout_seconds: float = 1800.0,
        library: str | None = None,
    ) -> DeviceComm: ...
    @staticmethod
    def version(library: str | None = None, /) -> int: ...
    @staticmethod
    def make_id(library: str | None = None, /) -> bytes: ...
    @staticmethod
    def join(
        id: bytes,
        rank: int,
        ranks: int,
        device: int,
        shares_device: bool = False,
        blocking: bool = False,
        timeout_seconds: float = 1800.0,
        library: str | None = None,
    ) -> DeviceComm: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def all_reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, factor: float | None, stream: int, /
    ) -> None: ...
    def reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, factor: float | None, root: int, stream: int, /
    ) -> None: ...
    def reduce_scatter(
        self,
        input: int,
        output: int,
        counts: Sequence[int],
        dtype: int,
        op: int,
        factor: float | None,
        stream: int,
        /,
    ) -> None: ...
    def all_gather(self, input: int, output: int, bytes: Sequence[int], stream: int, /) -> None: ...
    def broadcast(self, data: int, bytes: int, root: int, stream: int, /) -> None: ...
    def all_to_all(
        self,
        inputs: Sequence[int],
        input_bytes: Sequence[int],
        outputs: Sequence[int],
        output_bytes: Sequence[int],
        stream: int,
        /,
    ) -> None: ...
    def send(self, data: int, bytes: int, peer: int, stream: int, /) -> None: ...
    def receive(self, data: int, bytes: int, peer: int, stream: int, /) -> None: ...
    def barrier(self, stream: int, /) -> None: ...
    def group_begin(self) -> None: ...
    def group_end(self) -> None: ...
    def poll(self) -> None: ...
    def abort(self) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def shrink(self, excluded: Sequence[int], abort: bool = False, /) -> DeviceComm: ...
    def grow_id(self) -> bytes: ...
    def grow(self, ranks: int, id: bytes | None = None, /) -> DeviceComm: ...
    def close(self) -> None: ...

# --- balancer ---

class Balancer:
    """Shares that follow the measured steps; the same observations give the same shares on every rank."""
    def __new__(
        cls,
        policy: str,
        ranks: int,
        batch: int,
        speeds: Sequence[float] | None = None,
        caps: Sequence[int | None] | None = None,
    ) -> Self: ...
    @property
    def policy(self) -> str: ...
    @property
    def on_equal(self) -> tuple[bool, float, float]: ...
    def observe(self, timings: Sequence[tuple[int, float]], /) -> None: ...
    def shares(self, batch: int = ..., /) -> list[int]: ...
    def predict(self, rank: int, samples: int, /) -> float: ...

def balance(
    tables: Sequence[Sequence[tuple[int, float]]], batch: int, caps: Sequence[int | None] | None = None
) -> tuple[list[int], float]: ...

# --- checkpoint ---

class CheckpointWriter:
    """Writes a checkpoint folder that is whole or not there; a tensor is (name, dtype, shape, address, bytes)."""
    def __new__(
        cls, folder: str | PathLike[str], replace: bool = False, expected_bytes: int = 0
    ) -> CheckpointWriter: ...
    def add(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, tuple[int, ...], int, int]],
        metadata: Sequence[tuple[str, str]] | None = None,
        fetch: Callable[[int], int] | None = None,
    ) -> None: ...
    def commit(self, state_json: str, /) -> None: ...
    def abandon(self) -> None: ...

def file_checksums(path: str | PathLike[str], chunk_bytes: int, /) -> tuple[list[int], int]: ...
def checksum(data: bytes, /) -> int: ...
def checkpoint_remove(folder: str | PathLike[str], /) -> None: ...

# --- sync ---

class Sync:
    """The gradient engine of one group: rounds of begin, ready …, finish (include/evenstep/sync.h)."""
    def __new__(
        cls,
        comm: Comm,
        parameters: Sequence[tuple[int, int] | tuple[int, int, bool]],
        bucket_bytes: int = 0,
        first_bucket_bytes: int = 0,
        arena_offset: int = 0,
        telemetry: Telemetry | None = None,
        wire: int = 0,
    ) -> Sync: ...
    @staticmethod
    def arena_bytes(
        parameters: Sequence[tuple[int, int] | tuple[int, int, bool]],
        bucket_bytes: int = 0,
        first_bucket_bytes: int = 0,
        wire: int = 0,
    ) -> int: ...
    def offset(self, index: int, /) -> int: ...
    def begin(self, weight: float, step: int = 0, /) -> None: ...
    def ready(self, index: int, address: int, /) -> None: ...
    def finish(self) -> tuple[bytes, int, int, int, int, int, int, int]: ...
    def close(self) -> None: ...

ENCODE_INT8: int
ENCODE_ONE_BIT: int
ENCODE_TOP: int

def encoded_bytes(kind: int, count: int, number: int, /) -> int: ...
def encode(kind: int, values: int, count: int, number: int, payload: int, /) -> None: ...
def decode_add(kind: int, payload: int, into: int, count: int, number: int, factor: float, /) -> None: ...
