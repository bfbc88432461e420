"""es.prepare over a process group of torch's: buckets go to the other ranks while backward goes on. That it does is told by the
order of events alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_accelerator import FakeAccelerators
from torch import nn

from evenstep import _core
from evenstep.engine import EngineOptions
from evenstep.group import Alone
from evenstep.sums_under_way import Room
from evenstep.torch_engine import TorchEngine

CASES = Path(__file__).with_name("torch_engine_cases.py")
LAYERS = 6


def told(ranks: list[Any]) -> list[Any]:
    return [json.loads(rank.stdout.strip().splitlines()[-1]) for rank in ranks]


def test_buckets_leave_during_backward_and_in_one_order_on_all_ranks(run_ranks: Callable[..., Any]) -> None:
    first, second = told(run_ranks(CASES, args=("order",)))
    differ = 0
    for of_first, of_second in zip(first, second):
        gradients = [[n for kind, n in one if kind == "gradient"] for one in (of_first, of_second)]
        buckets = [[n for kind, n in one if kind == "bucket"] for one in (of_first, of_second)]
        assert sorted(gradients[0]) == sorted(gradients[1]) == list(range(LAYERS))
        assert buckets[0] == buckets[1] == list(range(LAYERS))  # each parameter has one
        differ += gradients[0] != gradients[1]
    assert differ >= 4, "the ranks' gradients came in the same order: nothing is tested"
    in_order = first[1]  # as in the first step, which has learned rank 0's order, but for where it begins
    assert in_order.index(["bucket", 0]) < max(in_order.index(one) for one in in_order if one[0] == "gradient")
    assert sum(one[0] == "bucket" for one in in_order[: in_order.index(["end", 0])]) == LAYERS


def test_what_no_rank_uses_does_not_travel(run_ranks: Callable[..., Any]) -> None:
    first, second = told(run_ranks(CASES, args=("unused",)))
    assert first == second
    steps, _ = first
    names = ["first.weight", "last.weight"]
    for number, (has, handed, buckets) in enumerate(steps):
        assert has == (["first.weight", "rare.weight", "last.weight"] if number == 2 else names)
        used = {0, 3} | ({2} if number == 2 else set())
        assert [buckets[n] for n in handed] == [one for one in buckets if used & set(one)]
    assert steps[1][2] == [[3], [0], [2], [1]]  # what no rank has used goes last


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_backward_that_fails_leaves_no_rank_waiting(run_ranks: Callable[..., Any], compression: str) -> None:
    first, second = told(run_ranks(CASES, args=("fails", compression)))
    words, seen, handed, waiting, again = second
    assert words == "the script's own" and 0 < seen[0] < LAYERS  # in the middle
    assert handed == LAYERS and waiting == 0 and "no longer in step" in again
    words, _, handed, waiting, again = first
    assert "another rank's backward failed: " in words
    assert handed == LAYERS and waiting == 0 and "no longer in step" in again


def test_a_backward_that_fails_hands_on_every_model_alike(run_ranks: Callable[..., Any]) -> None:
    first, second = told(run_ranks(CASES, args=("fails_one_of_two",)))
    assert first == second == [LAYERS, LAYERS, 0]  # rank 0 has not begun the second model


def test_a_failure_before_the_vote_hands_on_what_others_may_have_begun(run_ranks: Callable[..., Any]) -> None:
    first, second = told(run_ranks(CASES, args=("settles_one_of_two",)))
    assert second == ["out of memory", [LAYERS, LAYERS], 0]
    assert first[0].startswith("another rank's backward failed: ") and first[2] == 0


def test_memory_that_one_rank_lacks_in_backward_leaves_no_rank_waiting(run_ranks: Callable[..., Any]) -> None:
    first, second = told(run_ranks(CASES, args=("short", "backward")))
    assert first == ["EvenstepError", first[1], LAYERS, 0] and "another rank's backward failed: " in first[1]
    assert second == ["RuntimeError", "out of memory", LAYERS, 0]


def ended_with(words: str) -> bool:
    """Whether rank 0 has heard after the vote that rank 1 has failed: in a sum, or in the call before the sums, which may take longer on
    it than on rank 1."""
    in_sum = words.startswith("rank 0: torch (gloo) could not add up bucket ")
    return (in_sum and words.endswith(" (closed: the connection with rank 1)")) or words.startswith(
        "another rank's backward failed: "
    )


def test_memory_that_one_rank_lacks_for_a_sum_ends_those_of_the_others(run_ranks: Callable[..., Any]) -> None:
    """After the vote, in the same step: the others must not take what it hands on for a sum."""
    first, second = told(run_ranks(CASES, args=("short", "finish")))
    assert first[0] == "EvenstepError" and first[3] == 0
    assert ended_with(first[1])
    assert second == ["EvenstepError", "rank 1: torch (gloo) could not add up the gradients: out of memory", 2, 0]


@pytest.mark.parametrize("moment", ["once", "always", "add_up"])
def test_memory_that_one_rank_lacks_in_16_bits_keeps_every_rank_from_the_step(
    run_ranks: Callable[..., Any], moment: str
) -> None:
    first, second = told(run_ranks(CASES, args=("short_in_16_bits", moment)))
    assert second == ["rank 1: torch (gloo) could not add up the gradients: out of memory", True, 0]
    assert first[1:] == [True, 0]
    assert ended_with(first[0]) if moment == "add_up" else first[0].startswith("another rank's backward failed: ")


def test_a_sum_that_fails_in_backward_ends_the_round_and_begins_no_other(run_ranks: Callable[..., Any]) -> None:
    for rank, (words, begun) in enumerate(told(run_ranks(CASES, args=("lost",)))):
        assert words[0].startswith(
            f"rank {rank}: torch (gloo) could not add up bucket 2 of 6 of the gradients: Connection closed by peer [10.0.0.7]:41\n"
            "  fix: "
        )
        assert "no longer in step" in words[1] and begun == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_16_bits_are_those_of_the_engine_in_c(run_ranks: Callable[..., Any], ranks: int) -> None:
    run_ranks(CASES, ranks, args=("bits",))


@pytest.mark.parametrize("engine", ["torch", "shared"])
def test_a_static_graph_is_told_once(run_ranks: Callable[..., Any], engine: str) -> None:
    first, second = told(run_ranks(CASES, args=("static", engine)))
    # Rank 1 has no samples in the first two steps; in the last it has a gradient that it had not.
    assert first[0] == second[0] == [True, True, True, False, False, False]
    fix = "\n  fix: leave static_graph out where the graph changes"
    assert second[1] == (
        "es.prepare(static_graph=True): parameter 'rare.weight' of model 'model' had none of the gradients of the first "
        f"backward pass on rank 1 and has one now{fix}"
    )
    assert first[1] == (
        "es.prepare(static_graph=True): rank 1 has gradients of other parameters of model 'model' than in the first backward "
        f"pass: which, it says itself{fix}"
    )


@pytest.mark.parametrize("engine", ["torch", "shared"])
def test_what_other_ranks_alone_use_is_no_change_of_a_static_graph(run_ranks: Callable[..., Any], engine: str) -> None:
    first, second = told(run_ranks(CASES, args=("static_kept", engine)))
    assert first == second == ["", True]


def test_a_static_graph_without_dense_parameters(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, args=("static_sparse",))


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_spans_and_reports(run_ranks: Callable[..., Any], compression: str) -> None:
    for noted, reports in told(run_ranks(CASES, args=("spans", compression))):
        size = 8 * 8 * 4
        assert len(noted) == LAYERS * len(reports)
        for step, (communication, exposed, own, moved, full) in enumerate(reports):
            of_step = [one for one in noted if one[1] == step]
            assert len(of_step) == LAYERS and {one[0] for one in of_step} == {_core.SPAN_COMMUNICATION}
            assert all(a[3] <= b[2] for a, b in zip(of_step, of_step[1:]))
            assert communication == sum(one[3] - one[2] for one in of_step)
            assert 0 < own <= exposed
            assert full == LAYERS * size and moved == sum(one[4] for one in of_step)
            assert moved == (full // 2 if compression == "bf16" else full)


# -- on a device that there is not --


def test_the_size_of_buckets_is_ddps_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(12)]  # of 4 MiB

    def buckets(backend: str) -> int:
        monkeypatch.setattr("evenstep.torch_engine.dist.get_backend", lambda group: backend)
        monkeypatch.setattr("evenstep.torch_engine.dist.get_world_size", lambda group: 2)
        return len(TorchEngine(parameters, "group", Alone(), _core.Telemetry(-1, 0), EngineOptions())._buckets)

    assert [buckets("gloo"), buckets("nccl")] == [12, 2]


def test_calls_end_once_and_over_gloo_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep import torch_engine

    ended: list[Any] = []
    monkeypatch.setattr(torch_engine.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch_engine, "end_calls", ended.append)
    parameters = [nn.Parameter(torch.zeros(4))]
    for backend, expected in (("gloo", []), ("nccl", ["nccl"])):
        monkeypatch.setattr(torch_engine.dist, "get_backend", lambda group: group)
        engine = TorchEngine(parameters, backend, Alone(), _core.Telemetry(-1, 0), EngineOptions())
        engine.end_calls(by_others=True)
        assert ended == expected
        engine.end_calls()
        engine.end_calls()
        assert ended == [backend]
        ended.clear()


def test_both_halves_of_16_bits_over_gloo_go_the_same_way_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep import torch_engine
    from evenstep.compression import Compression

    made: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch_engine.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch_engine.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch_engine, "NarrowSum", lambda *words: made.append(words[2:]))
    parameters = [nn.Parameter(torch.zeros(4))]
    options = EngineOptions(compression=Compression("bf16"))
    engine = TorchEngine(parameters, "first", Alone(), _core.Telemetry(-1, 0), options, "second")
    for device in ("cpu", "meta"):
        engine._begin_sum(torch.zeros(4, device=device), narrow=True)
    assert [one[:2] for one in made] == [("first", "second")] * 2 and all(isinstance(one[2], Room) for one in made)


@pytest.mark.parametrize("backend", ["gloo", "evenstep"])
def test_a_group_that_records_its_calls_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    from evenstep import torch_engine

    monkeypatch.setattr(torch_engine.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch_engine.dist, "get_world_size", lambda group: 2)
    noted: list[tuple[int, ...]] = []

    class Telemetry:
        wants_calls = False

        def all_reduce(self, *values: int) -> None:
            noted.append(values)

    torch_engine._Recorded(Telemetry(), "group", 0).add(torch.float32, 1, 2, 3)  # type: ignore[arg-type]
    assert len(noted) == (backend == "gloo")


def test_16_bits_on_a_device_go_on_a_stream_beside_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep import sums_under_way

    device = torch.device("cpu")
    fake = FakeAccelerators(device)
    calls: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        def call(target: torch.Tensor, source: torch.Tensor, group: Any) -> None:
            calls.append(f"{name} on {fake.current(device).name}")
            target[: source.numel()].copy_(source)

        return call

    monkeypatch.setattr(sums_under_way.dist, "all_to_all_single", noted("parts"))
    monkeypatch.setattr(sums_under_way, "all_gather_single", noted("sums"))
    monkeypatch.setattr(sums_under_way.dist, "get_world_size", lambda group: 1)
    values = torch.tensor([1.0, 1.0 / 3.0, -2.5])
    streams = sums_under_way.SideStreams(fake)
    for _ in range(2):
        one = sums_under_way.NarrowSumBeside(values, torch.bfloat16, "group", streams)
        assert fake.current(device) is fake.own and fake.device() == 1
        one.wait()
    assert calls == ["parts on side 1", "sums on side 1"] * 2
    assert torch.equal(values, torch.tensor([1.0, 1.0 / 3.0, -2.5]).bfloat16().float())
    assert (
        fake.log
        == [
            "an event on own",
            "side 1 waits for an event of own",
            "an event on side 1",
            "own waits for an event of side 1",
        ]
        * 2
    )
