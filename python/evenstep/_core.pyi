"""What the extension has, for type checkers. One block a subject."""

from collections.abc import Callable, Sequence
from os import PathLike
from types import FrameType
from typing import Any

from typing_extensions import Self

version: str
commit: str  # "": not known; with a + behind it: files were changed since

class EvenstepError(RuntimeError):
    status: str  # "": made without one
    fix: str | None
    rank: int | None
    device: str | None

# --- telemetry ---

AT_SCRIPT: int
AT_DATA: int
AT_FORWARD: int
AT_BACKWARD: int
AT_COLLECTIVE: int
AT_OPTIMIZER: int
AT_CHECKPOINT: int
AT_EVALUATION: int
AT_COMPILE: int
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
EVENT_GROUP: int
EVENT_MEMORY: int
EVENT_LEFT_OUT: int
EVENT_GENERATION: int
EVENT_NONFINITE: int
EVENT_PARAMETERS: int
EVENT_CHECKPOINTS_WAIT: int
EVENT_SKIPPED: int
EVENT_BATCH: int
EVENT_OPENING: int
EVENT_OPENED: int
ROW_LATER: int
SCALAR_NAME_BYTES: int

def clock_ns() -> int: ...
def norm_through(
    sums: int,
    variance: int,
    weight: int,
    dtype: int,
    channels: int,
    eps: float,
    values: float,
    part: float,
    out: int,
    /,
) -> None: ...
def norm_moments(x: int, dtype: int, outer: int, channels: int, inner: int, out: int, /) -> None: ...
def norm_input(
    gradient: int,
    x: int,
    dtype: int,
    outer: int,
    channels: int,
    inner: int,
    mean: int,
    variance: int,
    eps: float,
    weight: int,
    through: int,
    out: int,
    /,
) -> None: ...
def norm_follow(running: int, dtype: int, values: int, channels: int, momentum: float, factor: float, /) -> None: ...
def telemetry_segment(ranks: int, records: int = 0, /) -> int: ...
def telemetry_row(row: int, /) -> None: ...
def ranges_open(library: str | None = None, /) -> None: ...
def range_start(name: str, /) -> int: ...
def range_end(range: int, /) -> None: ...
def stacks_open() -> tuple[int, int]: ...
def hold_end_signal(always: bool, /) -> None: ...
def threads_rest(name: str, seconds: float, busy: float, /) -> bool: ...

class Telemetry:
    """Writes rank's ring in segment fd; with fd -1 every call does nothing."""
    def __new__(cls, fd: int, rank: int) -> Telemetry: ...
    def open(self, fd: int, rank: int, /) -> None: ...  # of one with fd -1
    @property
    def handle(self) -> Any | None: ...
    @property
    def asks_end(self) -> bool: ...
    @property
    def wants_calls(self) -> bool: ...
    paused: bool  # write only
    def all_reduce(
        self,
        group: int,
        number: int,
        ranks: int,
        member: int,
        dtype: int,
        start_ns: int,
        duration_ns: int,
        bytes: int,
    ) -> None: ...
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
    def enter(self, activity: int, /) -> None: ...

Over = Any
"""What tells a Comm that the group is over: there is a newer generation."""

class Generation:
    """Who is left of the job's ranks on this host: the memory that the agent shares with them."""
    def __new__(cls, fd: int) -> Generation: ...
    @property
    def number(self) -> int: ...
    @property
    def refused(self) -> bool: ...
    @property
    def ranks(self) -> int: ...
    def wait(self, after: int, seconds: float, /) -> int: ...
    def has(self, rank: int, number: int, /) -> bool: ...
    def say(self, rank: int, why: str, /) -> None: ...
    def say_early(self, rank: int, early: int, /) -> None: ...
    def meet(self, number: int, port: int, /) -> None: ...
    def port(self, number: int, seconds: float, /) -> tuple[str, int]: ...
    @property
    def wished(self) -> int: ...
    @property
    def takes_in(self) -> bool: ...
    def process(self, rank: int, /) -> int: ...
    def stand(self, rank: int, number: int, /) -> None: ...
    def doubt(self, rank: int, number: int, /) -> None: ...
    def offer(self, rank: int, /) -> None: ...
    def give(self, rank: int, number: int, fd: int, /) -> None: ...
    def over(self, number: int, ranks: Sequence[int] = ..., /) -> Over: ...
    def number_of(self, ranks: Sequence[int], /) -> int: ...
    def meet_at(self, rank: int, number: int, port: int, /) -> None: ...
    def port_at(self, rank: int, number: int, seen: int, seconds: float, /) -> int: ...
    def train_apart(self) -> None: ...
    def leave(self, rank: int, /) -> None: ...
    def left(self, rank: int, /) -> bool: ...
    def given(self, number: int, /) -> tuple[int, int] | None: ...
    def gives_away(self, rank: int, number: int, /) -> bool: ...
    def fail_giving(self, number: int, why: str, /) -> None: ...
    def ungiven(self, number: int, /) -> str | None: ...
    def take(self, rank: int, number: int, /) -> None: ...

def agree(positions: list[tuple[int, int, int, bool, bool]], /) -> tuple[int, int, int, int, bool]: ...

class Timeline:
    """Writes what segment fd's first ring gets into a file, on a thread of its own."""
    def __new__(cls, fd: int, rank: int, path: str, /) -> Timeline: ...
    def close(self) -> None: ...

class TelemetryReader:
    def __new__(cls, fd: int) -> TelemetryReader: ...
    def drain(self) -> tuple[list[tuple[Any, ...]], int]: ...
    def want_calls(self, wanted: bool, /) -> None: ...
    def activity(self, rank: int, /) -> tuple[int, int, bool, bool]: ...
    def totals(self, rank: int, /) -> tuple[int, int, int, int, int, int, int]: ...

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
DTYPE_U16: int
DTYPE_U32: int
DTYPE_U64: int
DTYPE_F8E4M3: int
DTYPE_F8E5M2: int
OP_SUM: int
OP_AVG: int
OP_PRODUCT: int
OP_MIN: int
OP_MAX: int
OP_BAND: int
OP_BOR: int
OP_BXOR: int
CALL_GATHER: int
CALL_SCATTER: int
ELEMENTS_OTHER: int

def open_peer_fd(pid: int, fd: int, /) -> int: ...
def comm_others_may_call() -> bool: ...
def comm_rest(rests: bool, /) -> None: ...
def comm_waits_in_backward(frame: FrameType, /) -> None: ...
def comm_backward_over() -> None: ...
def comm_simd() -> str: ...
def lane_rank(lane: int, lanes: int, ranks: int, /) -> int: ...
def ucx_version(library: str | None = None, /) -> str: ...
def mpi_version(library: str | None = None, /) -> str: ...
def mpi_place(library: str | None = None, /) -> tuple[int, int]: ...

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
    def put(
        self, queue: CallQueue, token: Any, place: tuple[str, int, str] | None, tensors: Any, options: Any, /
    ) -> bool:
        """Whether the call is in the queue, whose next() makes it and then gives the token."""

class CallQueue:
    """Calls that one thread makes, in the order in which they were put."""
    def put(self, token: Any, /) -> None: ...
    def next(self) -> tuple[Any, BaseException | None]:
        """Waits for the next, and makes it where it is an all-reduce: what was given with it, and what it failed with."""

class CommCosts:
    """What collectives cost: measured seconds, kept in a file from job to job."""
    def load(self, path: str, /) -> None: ...
    def save(self, path: str, /) -> None: ...
    def add(self, collective: str, shape: str, engine: str, way: str, bytes: int, seconds: float, /) -> None: ...
    def find(self, collective: str, shape: str, engine: str, way: str, bytes: int, /) -> float | None: ...
    def step(self, shape: str, engine: str, /) -> float | None: ...
    def rows(self) -> list[tuple[str, str, str, str, int, float, int, int]]: ...

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
        over: Over | None = None,
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
        over: Over | None = None,
    ) -> Comm: ...
    @classmethod
    def open_mpi(
        cls,
        gather: Callable[[bytes], bytes] | None,
        rank: int,
        ranks: int,
        arena_bytes: int = 0,
        timeout_seconds: float = 1800.0,
        spin: int = -1,
        library: str | None = None,
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
        lanes: Sequence[Comm | None] | None = None,
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
    def reduce_scatter(
        self, input: int, output: int, counts: Sequence[int], dtype: int, op: int, root: int = -1, /
    ) -> None: ...
    def all_gather(self, input: int, output: int, counts: Sequence[int], dtype: int, elements: int = 0, /) -> None: ...
    def norm_statistics(
        self,
        mark: float,
        place: float,
        count: float,
        mean: int,
        variance: int,
        dtype: int,
        channels: int,
        out: int,
        narrow: int,
        /,
    ) -> tuple[float, ...] | None: ...
    def norm_sums(
        self,
        mark: float,
        place: float,
        weight: float,
        gradient: int,
        product: int,
        dtype: int,
        channels: int,
        out: int,
        /,
    ) -> tuple[float, ...] | None: ...
    def all_to_all(
        self,
        inputs: Sequence[int],
        input_bytes: Sequence[int],
        outputs: Sequence[int],
        output_bytes: Sequence[int],
        elements: int = 0,
        call: int = 0,
        root: int = 0,
        /,
    ) -> None: ...
    def broadcast(self, address: int, bytes: int, root: int, elements: int = 0, /) -> None: ...
    def send(
        self, address: int, bytes: int, rank: int, tag: int, elements: int = 0, site: str | None = None, /
    ) -> Request: ...
    def receive(self, address: int, bytes: int, rank: int, tag: int, elements: int = 0, /) -> Request: ...
    def barrier(self) -> None: ...
    def choose(
        self,
        costs: CommCosts | None = None,
        shape: str | None = None,
        way: str | None = None,
        measure_seconds: float = 0.0,
    ) -> None: ...
    def measure(self, costs: CommCosts | None, shape: str, seconds: float, /) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def set_site(self, text: str | None, /) -> None: ...
    def record(self, telemetry: Telemetry, name: str, /) -> None: ...
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
        gather: Callable[[bytes], bytes] | None = None,
        numbers: Sequence[int] | None = None,
        leave_abort: bool = False,
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
        gather: Callable[[bytes], bytes] | None = None,
        numbers: Sequence[int] | None = None,
        leave_abort: bool = False,
    ) -> DeviceComm: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def ended(self) -> bool: ...
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
    def set_call_timeout(self, seconds: float, /) -> None: ...
    def set_site(self, text: str | None, /) -> None: ...
    def flight(self, rank: int, /) -> list[tuple[int, str, str, str, int, int]]: ...
    def record(self, telemetry: Telemetry, name: str, /) -> None: ...
    def go_beside(self, comm: Comm | None, /) -> None: ...
    def meet(self, gather: Callable[[bytes], bytes], numbers: Sequence[int] | None = None) -> None: ...
    def shrink(self, excluded: Sequence[int], abort: bool = False, /) -> DeviceComm: ...
    def grow_id(self) -> bytes: ...
    def grow(self, ranks: int, id: bytes | None = None, /) -> DeviceComm: ...
    def close(self) -> None: ...

# --- balancer ---

class Balancer:
    """Shares that follow the measured steps; the same observations give the same shares on every rank."""
    def __new__(
        cls,
        policy: str | Callable[..., Sequence[int]],
        ranks: int,
        batch: int,
        speeds: Sequence[float] | None = None,
        caps: Sequence[int | None] | None = None,
        buckets: Sequence[int | None] | None = None,
    ) -> Self: ...
    @property
    def policy(self) -> str: ...
    @property
    def on_equal(self) -> tuple[bool, float, float]: ...
    @property
    def choice(self) -> tuple[str, float, float]: ...
    def set_caps(self, caps: Sequence[int | None] | None, /) -> None: ...
    def set_micro_batches(self, sizes: Sequence[int | None], more_samples: Sequence[float], /) -> None: ...
    def observe(
        self,
        timings: Sequence[tuple[int, float]],
        spared: Sequence[int] = ...,
        exchange: Sequence[float] | None = ...,
        passes: Sequence[float] | None = ...,
        /,
    ) -> None:
        """exchange: seconds that each rank needed for the exchange by itself. passes: busy seconds with what was waited for
        others within the step; 0: nothing was."""
    def shares(self, batch: int = ..., /) -> list[int]: ...
    def without_caps(self) -> tuple[list[int], float]: ...
    def save(self) -> bytes: ...
    def restore(self, saved: bytes, /) -> None:
        """EvenstepError, after which nothing has changed: of another balancer, damaged, or of a later version."""
    def predict(self, rank: int, samples: int, /) -> float: ...

class Memory:
    """What this process holds, and how much more it may take."""
    def __new__(cls, root: str = "") -> Self: ...
    def read(self) -> tuple[int, int, int, int, str, float]:
        """(resident, peak, available, limit: bytes; folder of the control group whose limit that is; the least part that is
        free of any such limit)"""
    def ask(self, bytes: int, what: str, /) -> None:
        """Raises EVEN_ERR_MEMORY where it may not take so many more and leave an eighth of what is free to others."""
    def reset_peak(self) -> bool: ...
    def give_back(self) -> None: ...
    def keep(self, keep: bool, /) -> bool:
        """Whether the allocator keeps what is freed from now on, or no longer does; False: it cannot be told to."""
    def kept(self) -> int:
        """Bytes that are free in the allocator's heaps; 0: it does not say."""

class MemoryCurve:
    """The memory that a rank needs for how many samples, by measured peaks."""
    def __new__(cls) -> Self: ...
    def take(self, samples: int, peak_bytes: float, /) -> None: ...
    def cap(self, limit_bytes: float, /) -> int: ...

def memory_caps(reports: Sequence[tuple[int, int, int, int | None]], batch: int, wanted: Sequence[int], /) -> list[int]:
    """A report of each rank: (pool, samples, cap or -1, room or None)."""

def balance(
    tables: Sequence[Sequence[tuple[int, float]]],
    batch: int,
    caps: Sequence[int | None] | None = None,
    constant_seconds: Sequence[float] | None = None,
    buckets: Sequence[int | None] | None = None,
    micro_batches: Sequence[int | None] | None = None,
) -> tuple[list[int], float]: ...
def best_micro_batch(table: Sequence[tuple[int, float]], most: int, /) -> int: ...
def memory_cap(peaks: Sequence[tuple[int, float]], limit_bytes: float, /) -> int | None: ...
def memory_bytes(peaks: Sequence[tuple[int, float]], samples: int, /) -> float: ...

# --- checkpoint ---

class CheckpointWriter:
    """Writes a checkpoint folder that is whole or not there; a tensor is (name, dtype, shape, address, bytes)."""
    def __new__(
        cls,
        folder: str | PathLike[str],
        replace: bool = False,
        expected_bytes: int = 0,
        previous: str | PathLike[str] | None = None,
        run_folder: str | None = None,
        job: str | None = None,
        sign_seen: bool = False,
    ) -> CheckpointWriter: ...
    def add(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, tuple[int, ...], int, int]] | bytes,
        metadata: Sequence[tuple[str, str]] | None = None,
        fetch: Callable[[int], int] | None = None,
    ) -> None: ...
    def commit(self, state_json: str, /) -> tuple[int, int, int]: ...
    def abandon(self) -> None: ...

class CheckpointSnapshot:
    """Memory that a checkpoint is copied to, and written from; a file is (name, tensors, metadata, fetch)."""
    def __new__(cls, fd: int = -1) -> CheckpointSnapshot: ...
    def take(
        self,
        folder: str | PathLike[str],
        files: Sequence[
            tuple[
                str,
                Sequence[tuple[str, str, tuple[int, ...], int, int]] | bytes,
                Sequence[tuple[str, str]] | None,
                Callable[[int], int] | None,
            ]
        ],
        state_json: str,
        replace: bool = False,
        expected_bytes: int = 0,
        previous: str | PathLike[str] | None = None,
        run_folder: str | None = None,
        job: str | None = None,
        sign_seen: bool = False,
    ) -> None: ...
    def write(self) -> tuple[int, int, int]: ...

def file_checksums(path: str | PathLike[str], chunk_bytes: int, /) -> tuple[list[int], int]: ...
def read_files(
    files: tuple[tuple[str | PathLike[str], int, int, tuple[int, ...], tuple[tuple[int, int, int], ...], bool], ...], /
) -> None: ...
def file_is_cached(path: str | PathLike[str], /) -> bool: ...
def move_bytes(moves: tuple[tuple[int, int, int], ...], /) -> None: ...
def checksum(data: bytes, /) -> int: ...
def crc32c(data: bytes, /) -> int: ...
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
        encoding: int = 0,
        way: int = 0,
        ratio: float = 0.0,
        seed: int = 0,
        bucket_elements: int = 0,
        unsummed: bool = False,
        static_graph: bool = False,
    ) -> Sync: ...
    @staticmethod
    def arena_bytes(
        parameters: Sequence[tuple[int, int] | tuple[int, int, bool]],
        bucket_bytes: int = 0,
        first_bucket_bytes: int = 0,
        wire: int = 0,
        bucket_elements: int = 0,
        static_graph: bool = False,
    ) -> int: ...
    @staticmethod
    def choose_sizes(
        parameters: Sequence[tuple[int, int] | tuple[int, int, bool]],
        ready: Sequence[float],
        end: float,
        costs: CommCosts,
        shape: str,
        engine: str,
        arena_bytes: int = 0,
        wire: int = 0,
    ) -> tuple[int, int, float, float]: ...
    def offset(self, index: int, /) -> int: ...
    def begin(self, weight: float, step: int = 0, /) -> None: ...
    def ready(self, index: int, address: int, /) -> None: ...
    def complete(self) -> None: ...
    def finish(self) -> tuple[bytes, int, int, int, int, int, int, int, int]: ...
    def know(self, used: bytes | None, /) -> None: ...
    def wait(self, index: int, /) -> None: ...
    def nonfinite(self) -> list[tuple[int, bool]]: ...
    def left_out(self, index: int, of_sums: bool, /) -> tuple[int, int, int]: ...
    def discard(self) -> None: ...
    def keep(self, index: int, /) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...

SYNC_PLAIN: int
SYNC_INT8: int
SYNC_ONE_BIT: int
SYNC_TOP: int
SYNC_CHEAPER: int
SYNC_GATHER: int
SYNC_PARTS: int
SYNC_PARTS_RANKS: int
SYNC_PARTS_BYTES: int

def content_sums(places: Sequence[tuple[int, int]], /) -> list[int]: ...

class Exact:
    """Sums over the blocks of a batch, exact to the bit (include/evenstep/exact.h)."""
    def __new__(cls, parameters: Sequence[tuple[int, int]], comm: Comm | None = None, part_bytes: int = 0) -> Exact: ...
    def begin(self, counts: Sequence[int], /) -> None: ...
    def add(self, weight: float, loss: float, addresses: Sequence[int], /) -> None: ...
    def finish(self, addresses: Sequence[int], /) -> tuple[bytes, float, float, int, int, int]: ...
    def close(self) -> None: ...

OPTIM_SGD: int
OPTIM_ADAM: int
OPTIM_ADAMW: int

class Optim:
    """States of optimizers that the ranks of one host share; see evenstep/optim.h. One thread at a time."""

    def __init__(
        self, parameters: Sequence[tuple[int, int, int]], comm: Comm | None = None, survives: bool = False
    ) -> None:
        """parameters: (elements, dtype, states). Collective where there is a group, which lives as long as this does.
        survives: a rank that ends in a step leaves nothing half done, and no error to the others."""
    bytes: int  # of shared memory, once a host
    ranks: int
    def memory(self) -> memoryview:
        """All of it, writable bytes; it stays as long as this view, also after close (slices do not count)."""
    def offset(self, parameter: int, state: int) -> int:
        """Where in the memory that state of that parameter begins; its numbers are float64 for DTYPE_F64, else float32. After
        the last state, of 16-bit floats: their values in float32."""
    def step(
        self,
        rules: Sequence[tuple[int, float, float, float, float, float, float, float, bool, bool, bool]],
        values: Sequence[int],
        gradients: Sequence[int],
        rule_of: Sequence[int],
        steps: Sequence[int],
        parts: Comm | None = None,
        max_norm: float = 0.0,
        waits: Callable[[], None] | None = None,
    ) -> tuple[int, int, int, int, int, float]:
        """rules: (method, lr, weight_decay, momentum, dampening, beta1, beta2, eps, amsgrad, nesterov, maximize); then one
        entry a parameter: addresses (a gradient's may be 0: none), its rule, and how many steps it has been given with
        this one. parts: gradients lie in this group's arena, a part with each rank. max_norm: they are clipped to this; 0:
        they are not. waits: called while it waits for a rank that has not ended. Gives the elements that this rank did and all, the nanoseconds of the update, of waiting and of
        taking the others' values, and the norm. Without the GIL."""
    def close(self) -> None:
        """Views of states stay; a step raises."""

ENCODE_INT8: int
ENCODE_ONE_BIT: int
ENCODE_TOP: int

def encoded_bytes(kind: int, count: int, number: int, /) -> int: ...
def encode(kind: int, values: int, count: int, number: int, payload: int, /) -> None: ...
def decode_add(kind: int, payload: int, into: int, count: int, number: int, factor: float, /) -> None: ...
