"""Backend "evenstep" beside dense collectives, and the ways in which PyTorch's own wrappers use a backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("part", ["rest", "absent"])
def test_what_else_a_backend_is_asked_for(run_ranks: Callable[..., Any], part: str) -> None:
    run_ranks(FOLDER / "backend_rest_cases.py", 3, args=(part,))


def test_a_monitored_barrier_over_gloo_waits_and_names(run_ranks: Callable[..., Any]) -> None:
    run_ranks(FOLDER / "backend_rest_cases.py", 3, args=("absent",), env={"EVENSTEP_COMM_ENGINE": "gloo"})


GROUPS = """
    import torch, torch.distributed as dist, evenstep
    dist.init_process_group("evenstep")
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("asked", "speak"), [("1", [0]), ("all", [0, 1]), ("0", [])])
def test_it_says_how_it_moves_data(run_ranks: Callable[..., Any], asked: str, speak: list[int]) -> None:
    results = run_ranks(GROUPS, 2, env={"EVENSTEP_COMM_DEBUG": asked})
    for rank, result in enumerate(results):
        said = [line for line in result.stderr.splitlines() if line.startswith("evenstep: comm: group ")]
        assert len(said) == (2 if rank in speak else 0), result.stderr
        where = "evenstep: comm: costs are not kept: EVENSTEP_COMM_COSTS=off\n"  # said by the rank that would keep them
        assert (where in result.stderr) == (rank == 0 and bool(speak)), result.stderr
        for line, when in zip(said, ("at its opening", "at its end")):
            assert f"rank {rank}, {when}: shared memory, 2 ranks, " in line


LISTS = """
    import os, torch, torch.distributed as dist, evenstep
    from evenstep import backend, backend_device
    words = os.environ["BACKENDS"]
    backend.engine_version = lambda: 22000  # as if every rank had NCCL, for ours
    torch.cuda.is_available = lambda: True
    dist.is_nccl_available = lambda: False  # and none for torch's
    dist.init_process_group(words)

    def calls(group):
        tensor = torch.ones(3)
        with torch.profiler.profile() as seen:
            dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 3
        return {event.key for event in seen.key_averages()}

    def for_gpus(group):
        try:
            return type(group._for_device(torch.device("cuda")))
        except evenstep.EvenstepError as error:
            assert "has nothing for tensors on cuda" in str(error), error
            return None

    for group in (dist.group.WORLD, dist.new_group(), dist.new_group(backend="evenstep")):
        has = words if group.group_name in ("0", "1") else "evenstep"
        assert isinstance(group, backend.EvenstepGroup)
        assert ("gloo:all_reduce" in calls(group)) == ("cpu:gloo" in has), (group.group_name, has)
        assert for_gpus(group) is (None if "cuda:nccl" in has else backend_device.DeviceCollectives)
        assert group._board is not None  # by which ranks with GPUs watch one another, whatever CPU tensors go over
        group.barrier()
        group.monitored_barrier()
    for wrong, why in (("cpu:evenstep,cuda:ucc", "no ucc for tensors on cuda"), ("hpu:x,cpu:evenstep", "leave 'hpu' out")):
        try:
            dist.new_group(backend=wrong)
        except evenstep.EvenstepError as error:
            assert why in str(error) and wrong in str(error), error
        else:
            raise AssertionError(wrong)
    board = group._board
    dist.destroy_process_group()
    assert board.closed
"""


@pytest.mark.parametrize("words", ["cpu:gloo,cuda:evenstep", "cpu:evenstep,cuda:nccl"])
def test_the_others_of_a_list_of_backends_are_heeded(run_ranks: Callable[..., Any], words: str) -> None:
    """In the group of all ranks, in those that are made after it, and not where one names us alone."""
    run_ranks(LISTS, 2, env={"BACKENDS": words})


SILENT = """
    import os, warnings, torch, torch.distributed as dist
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the ranks talk through Gloo")
    warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)  # torch 2.6's torch.distributed.nn
    import evenstep
    from evenstep.exchange import all_gather_single
    dist.init_process_group("evenstep")
    half = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=half)
    all_gather_single(torch.zeros(2), torch.ones(1))
    parts = [torch.zeros(1), torch.zeros(1)] if os.environ["RANK"] == "0" else None
    dist.gather(torch.ones(1), parts)
    dist.all_gather_object([None, None], "word")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_no_call_of_torch_of_ours_brings_a_warning(run_ranks: Callable[..., Any], engine: str) -> None:
    """Such as that a call is deprecated: torch 2.14 has one for what older ones wanted of a Gloo group."""
    results = run_ranks(SILENT, 2, env={"EVENSTEP_COMM_ENGINE": engine})
    assert all("Warning" not in result.stderr and "deprecated" not in result.stderr for result in results), results


OLDER = """
    import torch, torch.distributed as dist
    import evenstep
    from evenstep import backend_tensors
    dist.init_process_group("evenstep")
    group, options = dist.group.WORLD, dist.BroadcastOptions()
    options.asyncOp = False
    for backend_tensors.WAITS_UNASKED in (True, False):
        work = group.broadcast([torch.ones(3)], options)
        assert (work is not None) == backend_tensors.WAITS_UNASKED
        assert work is None or work.wait()
    dist.destroy_process_group()
"""


def test_a_torch_that_waits_unasked_has_a_work_to_wait_for(run_ranks: Callable[..., Any]) -> None:
    """As 2.6 and 2.7 do: all_gather_into_tensor, broadcast, barrier and others that are not asynchronous."""
    run_ranks(OLDER, 2)


FROM_CPP = """
    import gc, operator, weakref, torch, torch.distributed as dist
    import evenstep
    from evenstep import backend, backend_older, backend_tensors
    if not backend_tensors.WAITS_UNASKED:
        backend_older.keep_works_for_cpp(backend.EvenstepGroup)
    dist.init_process_group("evenstep")
    group, rank = dist.group.WORLD, dist.get_rank()

    def from_cpp(tensor):  # no frame's code has the name, as where C++ calls
        return operator.methodcaller("allreduce", [tensor], dist.AllreduceOptions())(group)

    def from_python(tensor):
        return group.allreduce([tensor], dist.AllreduceOptions())

    for end in ("wait", "get_future"):
        held = weakref.ref(from_cpp(tensor := torch.ones(3)))
        gc.collect()
        assert held() is not None, "nobody holds it"
        future = getattr(held(), end)()
        assert future is True or future.wait()
        assert tensor.tolist() == [2.0] * 3
        gc.collect()
        assert held() is None, "it is held for ever"
    assert from_python(tensor).wait() and tensor.tolist() == [4.0] * 3 and not backend_older._kept
    held = weakref.ref(from_cpp(torch.ones(3 + rank)))
    try:
        held().wait()
    except evenstep.EvenstepError as error:
        assert error.status == "EVEN_ERR_MISMATCH", error
    else:
        raise AssertionError("sizes that differ were taken")
    assert not backend_older._kept
    dist.destroy_process_group()
"""


def test_works_of_an_older_torch_outlive_their_call(run_ranks: Callable[..., Any]) -> None:
    """C++ of 2.6 holds no Work that is Python's, and would wait for ever for one that is gone."""
    run_ranks(FROM_CPP, 2)


def test_the_wrappers_of_torch(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(FOLDER / "backend_pattern_cases.py", 2, args=(str(tmp_path / "saved"),))


@pytest.mark.more
def test_functional_collectives_under_torchs_own_compiler(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(FOLDER / "backend_pattern_cases.py", 2, args=(str(tmp_path), "inductor"), timeout=300, fresh=True)
