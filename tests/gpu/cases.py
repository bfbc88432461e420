"""What the ranks of tests/gpu/run.py do: `python cases.py NAME`, with torchrun's variables where there are several."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from run import free_port

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = os.environ.get("EVENSTEP_CHECK_DEVICE", "cuda")  # "cpu": where what stands for a GPU is made up
HERE = pathlib.Path(__file__).resolve().parent


def row(**values: Any) -> None:
    print("ROW " + json.dumps(values), flush=True)


def program(*words: str, seconds: float = 50.0) -> str:
    path = os.environ["EVENSTEP_PROGRAM"]
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, (words, done.returncode, done.stdout[-1000:], done.stderr[-1000:])
    return done.stdout


def own_gpu() -> int:
    if DEVICE == "cpu":
        return 0
    device = RANK % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return device


def same(got: torch.Tensor, want: Any, tolerance: float = 0.0) -> None:
    want = torch.as_tensor(want, dtype=torch.float64).expand(got.shape)
    difference = (got.double().cpu() - want).abs().max().item() if got.numel() else 0.0
    assert difference <= tolerance, (difference, got.flatten()[:8].tolist(), want.flatten()[:8].tolist())


def join(backend: str, seconds: float = 60.0) -> None:
    import evenstep  # noqa: F401  (makes torch know the backend)

    if RANKS == 1:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=seconds))
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


# ---- what there is ----


def probe() -> None:
    from evenstep import _core
    from evenstep.device_groups import nccl_library

    facts: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["torch_nccl"] = ""
    if dist.is_nccl_available():
        facts["torch_nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if facts["gpus"] else "built in"
    facts["nccl_library"] = nccl_library() or "libnccl.so.2, where the loader finds it"
    facts["evenstep"] = _core.version
    try:
        facts["nccl"] = _core.DeviceComm.version(nccl_library())
    except _core.EvenstepError as error:
        facts["nccl"], facts["nccl_error"] = 0, str(error).splitlines()[0]
    facts["cpus"] = len(os.sched_getaffinity(0))
    row(**facts)


def cpu_program() -> None:
    assert "evenstep" in program("--version")
    assert "devices" in json.loads(program("devices", "--json"))


def gpu_listed() -> None:
    text = program("devices", "--json")
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in text, (torch.cuda.get_device_name(index), text[:2000])
    assert "cuda:0" in text


def gpu_profiled() -> None:
    out = pathlib.Path("profile.json")
    program("profile", "--quick", "--devices", "cuda:0", "-o", str(out), seconds=55)
    assert "cuda:0" in out.read_text()


# ---- CPU ----


def cpu_collectives() -> None:
    join("evenstep")
    tensor = torch.full((1000,), RANK + 1.0)
    dist.all_reduce(tensor)
    same(tensor, sum(range(1, RANKS + 1)))
    dist.barrier()
    dist.destroy_process_group()


def _train(device: str, out: str) -> None:
    """The demo model, with the example's own code; as a job also where there is one rank, so that samples are the same."""
    if RANKS == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    sys.argv = ["char_gpt.py", "--steps", "12", "--batch", "16", "--layers", "2", "--width", "64", "--length", "32"]
    sys.argv += ["--dtype", "float64", "--text-bytes", "200000", "--device", device, "--save", out]
    import char_gpt

    char_gpt.main()


def _distance(a: str, b: str) -> float:
    first, second = torch.load(a, map_location="cpu"), torch.load(b, map_location="cpu")
    off = sum(float((first[k] - second[k]).double().square().sum()) for k in first)
    return (off / sum(float(first[k].double().square().sum()) for k in first)) ** 0.5


def _train_and_compare(device: str, name: str) -> None:
    """Trains, and on rank 0 compares with the same on one CPU in a process of its own."""
    torch.set_num_threads(1)
    out, reference = f"{name}.pt", f"{name}.reference.pt"
    _train(device, out)
    if RANK == 0:
        variables = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        words = [sys.executable, str(HERE / "cases.py"), "reference"]
        subprocess.run(words, check=True, env={**variables, "REFERENCE": reference}, timeout=60)
        distance = _distance(reference, out)
        row(relative_difference=distance)
        assert distance < 1e-9, distance


def nvtx_ranges() -> None:
    """With NVTX's own library, or torch's: ranges are made, and nothing breaks. What a profiler shows of them is for eyes."""
    os.environ["EVENSTEP_NVTX"] = "1"
    import evenstep as es
    from evenstep import _core, ranges

    with es.comm.open() as group:
        data = torch.ones(1000)
        group.all_reduce(data)
    assert ranges._start is not None, "neither NVTX's library nor torch's NVTX can be used"
    own = ranges._start is _core.range_start
    row(nvtx="its library" if own else "torch's, phases alone")
    phases = ranges.Phases(_core.Telemetry(-1, RANK))
    for name in ("data", "forward", None):
        phases.enter(name)


def reference() -> None:
    torch.set_num_threads(1)
    _train("cpu", os.environ["REFERENCE"])


def cpu_training() -> None:
    _train_and_compare("cpu", "cpu")


def train_gpu() -> None:
    _train_and_compare("cuda:0", "gpu")


def train_gpu_pair() -> None:
    _train_and_compare(f"cuda:{own_gpu()}", "gpu_pair")


def train_own_nccl_pair() -> None:
    """Gradients on our NCCL engine during backward; on the host where both ranks have one GPU."""
    os.environ["EVENSTEP_DEVICE_ENGINE"] = "evenstep"
    _train_and_compare(f"cuda:{own_gpu()}", "own_nccl_pair")
    import evenstep as es

    row(engine=type(es.session().steps.syncs[0].engine).__name__)


def train_gpu_and_cpu() -> None:
    _train_and_compare("cuda:0" if RANK == 0 else "cpu", "gpu_and_cpu")


def train_legs() -> None:
    """Each rank takes itself for a host of its own; both may have one GPU. Not run yet."""
    os.environ["EVENSTEP_HOST_ID"], os.environ["EVENSTEP_DEVICE_HOSTS"] = f"host-{RANK}", "legs"
    _train_and_compare(f"cuda:{own_gpu()}", "legs")
    import evenstep as es

    engine: Any = es.session().steps.syncs[0].engine
    assert type(engine).__name__ == "LegEngine", engine
    row(legs=[type(leg).__name__ for leg in engine._legs.values()])


def train_legs_four() -> None:
    """Two made-up hosts of two ranks, each with two GPUs, which the ranks of the other have, too. Not run yet."""
    os.environ["EVENSTEP_HOST_ID"], os.environ["EVENSTEP_DEVICE_HOSTS"] = f"host-{RANK // 2}", "legs"
    _train_and_compare(f"cuda:{own_gpu()}", "legs_four")
    import evenstep as es

    engine: Any = es.session().steps.syncs[0].engine
    assert type(engine).__name__ == "LegEngine" and len(engine._team.carriers) == 2, engine


# ---- our NCCL engine, from its own calls ----


class Direct:
    """A communicator over a store of torch's, without the backend."""

    def __init__(self, blocking: bool = False, seconds: float = 30.0) -> None:
        from evenstep.device_groups import DeviceGroups, nccl_library
        from evenstep.device_streams import CudaStreams

        if not dist.is_initialized():
            join("gloo")
        store = dist.PrefixStore(f"direct/{blocking}/", dist.distributed_c10d._get_default_store())
        groups = DeviceGroups(store, RANK, RANKS, seconds, CudaStreams().identity, nccl_library(), blocking)
        self.comm = groups.open(own_gpu())

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream


def _nccl() -> None:
    from evenstep import _core

    at = Direct()
    comm, total = at.comm, sum(range(1, RANKS + 1))
    kinds = {
        torch.float32: _core.DTYPE_F32,
        torch.float64: _core.DTYPE_F64,
        torch.float16: _core.DTYPE_F16,
        torch.bfloat16: _core.DTYPE_BF16,
        torch.int8: _core.DTYPE_I8,
        torch.uint8: _core.DTYPE_U8,
        torch.int32: _core.DTYPE_I32,
        torch.int64: _core.DTYPE_I64,
    }
    product = 1
    for r in range(RANKS):
        product *= r + 1
    ops = {_core.OP_SUM: total, _core.OP_PRODUCT: product, _core.OP_MIN: 1, _core.OP_MAX: RANKS}
    for dtype, number in kinds.items():
        for op, want in ops.items():
            for count in (1, 1000, 100_003):
                data = torch.full((count,), RANK + 1, dtype=dtype, device="cuda")
                comm.all_reduce(data.data_ptr(), data.data_ptr(), count, number, op, None, at.stream)
                same(data, want)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        data = torch.full((1000,), 4.0, dtype=dtype, device="cuda")
        comm.all_reduce(
            data.data_ptr(), data.data_ptr(), 1000, kinds[dtype], _core.OP_SUM, 0.25 * (RANK + 1), at.stream
        )
        same(data, total)  # each rank's own weight
    counts = [3 * r for r in range(RANKS)]
    whole = torch.arange(float(sum(counts) or 1), device="cuda")
    part = torch.zeros(max(1, counts[RANK]), device="cuda")
    comm.reduce_scatter(whole.data_ptr(), part.data_ptr(), counts, _core.DTYPE_F32, _core.OP_SUM, None, at.stream)
    begin = sum(counts[:RANK])
    same(part[: counts[RANK]], whole[begin : begin + counts[RANK]].double().cpu() * RANKS)
    back = torch.zeros_like(whole)
    comm.all_gather(part.data_ptr(), back.data_ptr(), [4 * c for c in counts], at.stream)
    same(back[: sum(counts)], whole[: sum(counts)].double().cpu() * RANKS)
    data = torch.full((10,), float(RANK), device="cuda")
    comm.broadcast(data.data_ptr(), 40, RANKS - 1, at.stream)
    same(data, RANKS - 1)
    inputs = [torch.full((5,), 10.0 * RANK + r, device="cuda") for r in range(RANKS)]
    outputs = [torch.zeros(5, device="cuda") for _ in range(RANKS)]
    places = [[t.data_ptr() for t in side] for side in (inputs, outputs)]
    comm.all_to_all(places[0], [20] * RANKS, places[1], [20] * RANKS, at.stream)
    for r in range(RANKS):
        same(outputs[r], 10 * r + RANK)
    comm.barrier(at.stream)
    comm.poll()
    torch.cuda.synchronize()
    comm.close()


nccl_alone = nccl_pair = _nccl


# ---- through torch ----


def _nccl_version() -> int:
    from evenstep import _core
    from evenstep.device_groups import nccl_library

    return _core.DeviceComm.version(nccl_library())


def _backend() -> None:
    device = own_gpu()
    join("evenstep")
    total = sum(range(1, RANKS + 1))
    for later in (False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = torch.full((1000,), RANK + 1, device="cuda").to(dtype)
            work = dist.all_reduce(tensor, async_op=later)
            if work is not None:
                work.wait()
            same(tensor, 1 if dtype is torch.bool else total)
    backend = dist.group.WORLD._devices
    assert backend is not None, "CUDA tensors did not go to our engine"
    tensor = torch.full((8,), 2.0, device="cuda")
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5 * (RANK + 1)))
    same(tensor, total)
    averaged = torch.full((8,), RANK + 1, device="cuda")
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    same(averaged, total // RANKS)
    if torch.cuda.get_device_capability() >= (9, 0) and _nccl_version() >= 22400:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = torch.full((1000,), RANK + 1.0, device="cuda").to(dtype)
            dist.all_reduce(tensor)
            same(tensor.float(), total)
    complex_ = torch.full((3,), complex(1, 2), device="cuda")
    dist.all_reduce(complex_)
    same(complex_.real, RANKS)
    crossed = torch.zeros(4, 4, device="cuda")
    crossed[:, 1] = 1.0
    dist.all_reduce(crossed[:, 1])
    same(crossed.sum(), 4 * RANKS)
    out = torch.zeros(2 * RANKS, device="cuda")
    dist.all_gather_into_tensor(out, torch.full((2,), float(RANK), device="cuda"))
    same(out, [r for r in range(RANKS) for _ in range(2)])
    part = torch.zeros(2, device="cuda")
    dist.reduce_scatter_tensor(part, out.clone())
    same(part, RANK * RANKS)
    parts = [torch.zeros(r + 1, device="cuda") for r in range(RANKS)]
    dist.all_gather(parts, torch.full((RANK + 1,), float(RANK), device="cuda"))
    for r in range(RANKS):
        same(parts[r], r)
    root = torch.full((4,), float(RANK), device="cuda")
    dist.broadcast(root, src=RANKS - 1)
    same(root, RANKS - 1)
    sent = torch.arange(float(RANKS), device="cuda") + 10 * RANK
    got = torch.zeros(RANKS, device="cuda")
    dist.all_to_all_single(got, sent)
    same(got, [10 * r + RANK for r in range(RANKS)])
    if RANKS > 1:
        inbox, outbox = torch.zeros(1 << 20, device="cuda"), torch.full((1 << 20,), float(RANK), device="cuda")
        peer, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
        for work in [dist.isend(outbox, peer), dist.irecv(inbox, before)]:
            work.wait()
        same(inbox, before)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8).cuda(), device_ids=[device])
    model(torch.ones(2, 64, device="cuda") * (RANK + 1)).sum().backward()
    same(model.module.weight.grad, 2 * total / RANKS, 1e-4)
    everyone: list = [None] * RANKS
    dist.all_gather_object(everyone, {"rank": RANK})
    assert [one["rank"] for one in everyone] == list(range(RANKS))
    torch.cuda.synchronize()
    dist.destroy_process_group()


backend_alone = backend_pair = _backend


def host_does_not_wait() -> None:
    """A collective behind long work on the stream returns before that work ends; so does wait()."""
    own_gpu()
    join("evenstep")
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)  # connects
    torch.cuda.synchronize()
    for later in (False, True):
        torch.cuda._sleep(2_000_000_000)  # about a second
        work = dist.all_reduce(tensor, async_op=later)
        if work is not None:
            work.wait()
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the host has waited for the GPU"
        torch.cuda.synchronize()
    same(tensor, 1)
    dist.destroy_process_group()


def late_rank() -> None:
    """A rank that does not come to a call: the other's is ended at the limit, and says so."""
    from evenstep import EvenstepError

    own_gpu()
    join("evenstep", 60.0)
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.group.WORLD._devices._set_default_timeout(timedelta(seconds=2))
    if RANK == 0:
        began = time.monotonic()
        dist.all_reduce(tensor, async_op=True)
        torch.cuda.synchronize()
        row(ended_after_seconds=round(time.monotonic() - began, 2))
        assert time.monotonic() - began < 12, "the abort did not end the kernel"
        try:
            dist.all_reduce(tensor)
        except EvenstepError as error:
            assert "EVEN_ERR_TIMEOUT" in str(error), error
        else:
            raise AssertionError("no error after the time-out")
    else:
        time.sleep(8)
    os._exit(0)


def _lose(number: int, words: str) -> None:
    """Rank 1 gets a signal when rank 0 is in a collective: that one's ends within 5 s, far below the limit, and says whom."""
    from evenstep import EvenstepError

    own_gpu()
    join("evenstep", 60.0)
    processes: list = [None] * RANKS
    dist.all_gather_object(processes, os.getpid())
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    comm = dist.group.WORLD._devices._groups.opened()[0]
    if RANK == 1:
        while comm.flight(0)[-1][0] < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), number)
        os._exit(0)  # it was stopped, and let go by rank 0
    began = time.monotonic()
    dist.all_reduce(tensor, async_op=True)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    row(ended_after_seconds=round(took, 3))
    try:
        dist.all_reduce(tensor)
    except EvenstepError as error:
        assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == 1 and words in str(error), error
        assert "in call 2 (all_reduce of 1024 F32 elements with SUM)" in str(error), error
    else:
        raise AssertionError("no error after the loss of a rank")
    assert took < 5, took
    if number == signal.SIGSTOP:
        os.kill(processes[1], signal.SIGCONT)
    os._exit(0)


def dead_rank() -> None:
    _lose(signal.SIGKILL, "died or came to its end")


def stopped_rank() -> None:
    _lose(signal.SIGSTOP, "was stopped")


def different_calls() -> None:
    """Ranks in different collectives are told so, with both sides, instead of hanging."""
    from evenstep import EvenstepError

    own_gpu()
    join("evenstep", 60.0)
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    began = time.monotonic()
    try:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX if RANK else dist.ReduceOp.SUM, async_op=True)
        torch.cuda.synchronize()
        while work.exception() is None and time.monotonic() - began < 30:
            time.sleep(0.001)
        work.wait()
    except EvenstepError as error:
        assert error.status == "EVEN_ERR_MISMATCH" and "with MAX at " in str(error) and "with SUM at " in str(error), (
            error
        )
    else:
        raise AssertionError("no error though the ranks differ")
    row(told_after_seconds=round(time.monotonic() - began, 3))
    os._exit(0)


def calls_on_the_timeline() -> None:
    """The GPU's own times are in the records: a call is as long as events around it say, and lies where it was."""
    from evenstep import _core

    segment = _core.telemetry_segment(1, 1 << 12)
    reader = _core.TelemetryReader(segment)
    reader.want_calls(True)
    at = Direct()
    at.comm.record(_core.Telemetry(segment, 0), "check")
    data = torch.ones(16 << 20, device="cuda")
    before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        began = _core.clock_ns()
        before.record()
        at.comm.all_reduce(
            data.data_ptr(), data.data_ptr(), data.numel(), _core.DTYPE_F32, _core.OP_MAX, None, at.stream
        )
        behind.record()
        torch.cuda.synchronize()
        ended = _core.clock_ns()
        while at.comm.flight(RANK)[-1][3] != "done":
            at.comm.poll()
        call = next(record for record in reader.drain()[0] if record[0] == "call")
        start, duration = call[12], call[13]
        row(recorded_us=round(duration / 1e3, 1), by_torch_us=round(before.elapsed_time(behind) * 1e3, 1))
        assert began - 2_000_000 <= start and start + duration <= ended + 2_000_000, (began, start, duration, ended)
        assert duration <= before.elapsed_time(behind) * 1e6 + 50_000, (duration, before.elapsed_time(behind))
    at.comm.close()


if __name__ == "__main__":
    if sys.argv[1] in globals():
        globals()[sys.argv[1]]()
    else:
        import exact_cases
        import random_cases
        import speed_cases
        import torch_cases

        modules = (exact_cases, random_cases, speed_cases, torch_cases)
        next(vars(one)[sys.argv[1]] for one in modules if sys.argv[1] in vars(one))()
