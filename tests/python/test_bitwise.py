"""exact="bitwise": the same bits for any number of ranks, any split and any history of failures; refused where it could
not be."""

from __future__ import annotations

import ast
import json
import math
import pathlib
import random
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from run_jobs import Run
from script_parts import EVENTS

SCRIPT = pathlib.Path(__file__).parent / "bitwise_cases.py"
STEPS = 7
WHOLE: dict[str, list[Any]] = {}  # how each case ends on one rank, without failures


def end_of(results: list[Any]) -> list[Any]:
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("END "))
    end: list[Any] = json.loads(line.removeprefix("END "))
    return end


def whole(run_ranks: Callable[..., list[Any]], case: str) -> list[Any]:
    if case not in WHOLE:
        WHOLE[case] = end_of(run_ranks(SCRIPT, ranks=1, args=(case, "0")))
        assert WHOLE[case][1] == STEPS and math.isfinite(float.fromhex(WHOLE[case][2]))
    return WHOLE[case]


def live(run_ranks: Callable[..., list[Any]], folder: pathlib.Path, case: str, seed: int) -> list[Any]:
    """A random history: jobs of 1 to 4 ranks, each but the last ended by the death of one, with random splits."""
    draw = random.Random(seed)
    environment = {
        "EVENSTEP_CHECKPOINT_EVERY": str(draw.choice([1, 2])),
        "EVENSTEP_CHECKPOINT_DIR": str(folder),
        "WORKERS": str(draw.choice([0, 0, 2])),
    }
    stops = sorted(draw.sample(range(2, STEPS), draw.choice([1, 1, 2])))
    for number, stop in enumerate(stops):
        ranks = draw.randint(2, 4) if number == 0 else draw.randint(1, 4)
        death = (str(draw.randrange(ranks)), str(stop))
        ended = run_ranks(SCRIPT, ranks=ranks, args=(case, str(seed + number), *death), env=environment, check=False)
        assert ended[int(death[0])].returncode == 9, ended
        newest = sorted(folder.glob("step-*"))
        if newest:
            environment["EVENSTEP_RESUME"] = str(newest[-1])
    return end_of(run_ranks(SCRIPT, ranks=draw.randint(1, 4), args=(case, str(seed + 7)), env=environment))


@pytest.mark.parametrize(("case", "seed"), [("gpt", 2), pytest.param("cnn", 5, marks=pytest.mark.more)])
def test_same_bits_over_random_histories(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, case: str, seed: int
) -> None:
    assert live(run_ranks, tmp_path / "checkpoints", case, seed) == whole(run_ranks, case)


@pytest.mark.parametrize(("case", "ranks"), [("gan", 3), ("gan_penalty", 2)])
def test_same_bits_of_several_models_and_optimizers(run_ranks: Callable[..., list[Any]], case: str, ranks: int) -> None:
    """Three models, two optimizers with a loss each; in one case with BatchNorm, whose blocks run side by side."""
    assert end_of(run_ranks(SCRIPT, ranks=ranks, args=(case, "4"))) == whole(run_ranks, case)


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, 4])
def test_same_bits_of_two_optimizers_with_a_scaler(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    assert end_of(run_ranks(SCRIPT, ranks=ranks, args=("gan_scaler", "4"))) == whole(run_ranks, "gan_scaler")


@pytest.mark.more
@pytest.mark.parametrize("case", ["gan", "gan_penalty"])
@pytest.mark.parametrize("seed", range(3))
def test_same_bits_of_a_gan_over_random_histories(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, case: str, seed: int
) -> None:
    assert live(run_ranks, tmp_path / "checkpoints", case, seed) == whole(run_ranks, case)


def lose(run: Run, folder: pathlib.Path, recovery: str, which: int) -> list[Any]:
    """A GAN of two ranks, of which one dies in its third step, in forward of this train_step."""
    environment = {"LOST": "1:3", "LOST_FOLDER": str(folder), "LOST_IN": str(which)}
    done = run("-n", "2", "--recovery", recovery, "--max-restarts", "0", str(SCRIPT), "gan", "1", env=environment)
    assert done.returncode == 0 and (folder / "1-3").exists(), done.stdout + done.stderr
    end: list[Any] = json.loads(next(one.partition("END ")[2] for one in done.stdout.splitlines() if "END " in one))
    return end


def test_same_bits_where_a_rank_is_lost_between_two_optimizers_steps(
    run_ranks: Callable[..., list[Any]], run: Run, tmp_path: pathlib.Path
) -> None:
    """What the first one applied stands: its part of the batch is computed once more, and counts nothing."""
    assert lose(run, tmp_path, "shrink", 1) == whole(run_ranks, "gan")


@pytest.mark.more
@pytest.mark.parametrize(("recovery", "which"), [("shrink", 0), ("replace", 0), ("replace", 1)])
def test_same_bits_where_a_rank_of_a_gan_is_lost(
    run_ranks: Callable[..., list[Any]], run: Run, tmp_path: pathlib.Path, recovery: str, which: int
) -> None:
    assert lose(run, tmp_path, recovery, which) == whole(run_ranks, "gan")


@pytest.mark.more
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", ["gpt", "cnn", "gpt_bf16", "bert", "bert_scaler_recomputed"])
def test_same_bits_over_twenty_histories(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, case: str, seed: int
) -> None:
    assert live(run_ranks, tmp_path / "checkpoints", case, seed) == whole(run_ranks, case)


def test_the_histories_that_the_bench_plays(bench_module: Callable[[str], ModuleType]) -> None:
    """No two cases have the same, and each, one with BatchNorm among them, loses ranks and goes on without them and with others."""
    bench = bench_module("bitwise")
    found = {case: [bench.course(case, number, 20) for number in range(5)] for case in bench.CASES}
    each = [one for courses in found.values() for one in courses]
    assert "cnn" in found and len({(one.deaths, one.ranks, one.recovery, one.lost) for one in each}) == 20
    used = [one.seed + number for one in each for number in (*range(len(one.deaths)), 7)]
    assert len(set(used)) == len(used), "splits that are those of another job"
    for courses in found.values():
        assert {one.recovery for one in courses if one.lost} == {"shrink", "replace"}
    for one in (bench.course(case, number, 6) for case in bench.CASES for number in range(100)):
        assert all(one.deaths[-1][2] < step < 6 and rank < one.ranks for step, rank in one.lost), one
        assert bool(one.lost) == bool(one.recovery) and len(one.lost) < one.ranks


@pytest.mark.parametrize(
    ("case", "ranks"), [("gpt_bf16", 2), ("exact_fp64", 2), ("cnn_autocast_kept", 2), ("cnn_frozen", 2)]
)
def test_same_bits_in_other_types_and_modes(run_ranks: Callable[..., list[Any]], case: str, ranks: int) -> None:
    assert end_of(run_ranks(SCRIPT, ranks=ranks, args=(case, "4"))) == whole(run_ranks, case)


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        "gpt_autocast",
        "gpt_autocast_around",
        "gpt_scaler",
        "gpt_recomputed",
        "cnn_autocast",
        "cnn_autocast_kept",
        "cnn_autocast_around",
        "cnn_recomputed",
        "bert",
    ],
)
def test_same_bits_with_autocast_a_scaler_and_recomputed_activations(
    run_ranks: Callable[..., list[Any]], case: str, ranks: int
) -> None:
    assert end_of(run_ranks(SCRIPT, ranks=ranks, args=(case, str(ranks)))) == whole(run_ranks, case)


def test_same_bits_of_a_bert_whose_scaler_skips_steps_and_whose_layers_run_twice(
    run_ranks: Callable[..., list[Any]],
) -> None:
    case = "bert_scaler_recomputed"
    results = run_ranks(SCRIPT, ranks=3, args=(case, "5"))
    assert end_of(results) == whole(run_ranks, case)
    (scale,) = (float(line.split()[1]) for line in results[0].stdout.splitlines() if line.startswith("SCALE"))
    assert scale < 2.0**24  # it has skipped some


def test_same_bits_outside_a_job_and_by_the_balancer(run_ranks: Callable[..., list[Any]]) -> None:
    assert end_of(run_ranks(SCRIPT, ranks=1, args=("cnn", "0", "alone"))) == whole(run_ranks, "cnn")
    speeds = {"EVENSTEP_SPEEDS": "1,0.3"}
    assert end_of(run_ranks(SCRIPT, ranks=2, args=("cnn", "-1"), env=speeds)) == whole(run_ranks, "cnn")


@pytest.mark.more
@pytest.mark.parametrize("recovery", ["shrink", "replace"])
def test_same_bits_where_a_rank_is_lost_behind_a_step_that_a_scaler_skips(
    run: Run, tmp_path: pathlib.Path, recovery: str
) -> None:
    """Both batches come again, and what the scheduler made behind the first one is undone."""
    bits = []
    for ranks, lost in ((1, ""), (2, "1:1:3")):
        environment = {"STEPS": "3", "LOST": lost, "LOST_FOLDER": str(tmp_path)}
        words = ("-n", str(ranks), "--recovery", recovery, "--max-restarts", "0", str(SCRIPT))
        done = run(*words, "bert_scaler_recomputed", "1", env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        bits.append(next(line.partition("END ")[2] for line in done.stdout.splitlines() if "END " in line))
    assert (tmp_path / "1-1").exists() and bits[0] == bits[1]


@pytest.mark.parametrize("case", ["gpt", "gpt_bf16"])
def test_same_bits_of_gradients_on_a_device(run_ranks: Callable[..., list[Any]], case: str) -> None:
    """A made-up one: blocks' gradients come to the host, and what is summed goes back."""
    ranks = run_ranks(SCRIPT, ranks=3, args=(case, "3"), env={"DEVICE": "1"})
    assert end_of(ranks) == whole(run_ranks, case)


@pytest.mark.parametrize("case", ["gpt", "cnn"])
def test_same_bits_with_fewer_blocks_than_ranks(run_ranks: Callable[..., list[Any]], case: str) -> None:
    """Those without a block idle, which is said once."""
    two = {"BLOCK": "13"}
    alone = run_ranks(SCRIPT, ranks=1, args=(case, "0"), env=two)
    ranks = run_ranks(SCRIPT, ranks=3, args=(case, "-1"), env=two)
    assert end_of(ranks) == end_of(alone) != whole(run_ranks, case)
    words = (
        "warning: es.Config(exact='bitwise'): the global batch of 26 has 2 blocks of 13 samples, fewer than the 3 ranks"
    )
    assert [rank.stderr.count(words) for rank in ranks] == [1, 0, 0] and words not in alone[0].stderr
    assert "smaller blocks (es.Config(block=…)) or a larger batch, either of which gives other bits" in ranks[0].stderr


def test_blocks_that_count_nothing_leave_no_trace(run_ranks: Callable[..., list[Any]]) -> None:
    """Their losses are no numbers, for which on_nonfinite="stop" would end the job."""
    exact = whole(run_ranks, "gpt_gaps")
    assert end_of(run_ranks(SCRIPT, ranks=3, args=("gpt_gaps", "6"))) == exact
    assert math.isfinite(exact[3])


@pytest.mark.parametrize("of", ["", pytest.param("gan_", marks=pytest.mark.more)])
def test_agrees_with_one_device_on_whole_batches(run_ranks: Callable[..., list[Any]], of: str) -> None:
    """BatchNorm's statistics and the loss are the whole batch's, not a block's."""
    plain = end_of(run_ranks(SCRIPT, ranks=1, args=(f"{of}plain_fp64", "0")))
    exact = whole(run_ranks, f"{of}exact_fp64")
    assert exact[3] == pytest.approx(plain[3], rel=1e-12)
    assert float.fromhex(exact[2]) == pytest.approx(float.fromhex(plain[2]), rel=1e-11)


def test_same_bits_where_the_script_says_what_a_rank_holds(run_ranks: Callable[..., list[Any]]) -> None:
    """With BatchNorm it holds all of its blocks at once; in seven samples are two blocks, of which one is the batch's smaller last one."""
    results = run_ranks(SCRIPT, ranks=2, args=("cnn", "-1"), rank_env={1: {"MOST": "7"}})
    assert end_of(results) == whole(run_ranks, "cnn")
    most = [int(line.split()[1]) for rank in results for line in rank.stdout.splitlines() if line.startswith("MOST")]
    assert most[0] >= 21 and most[1] == 5, most


def test_same_bits_of_a_model_that_begins_to_train_in_its_train_step(run_ranks: Callable[..., list[Any]]) -> None:
    """In eval() when it is given, on one rank: what a rank holds is no less limited."""
    results = run_ranks(SCRIPT, ranks=2, args=("cnn", "-1"), rank_env={1: {"MOST": "7", "EVAL": "1"}})
    assert end_of(results) == whole(run_ranks, "cnn")
    most = [int(line.split()[1]) for rank in results for line in rank.stdout.splitlines() if line.startswith("MOST")]
    assert most[0] >= 21 and most[1] == 5, most


LIMITED = (
    """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es
from evenstep import _core

class Wide(nn.Module):  # 16 MiB a sample, which are held until all blocks have met
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("pattern", torch.linspace(-1, 1, 2**21))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(torch.tanh(x * self.pattern * self.gain).square().mean(1, keepdim=True))

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
    + EVENTS
    + """
torch.manual_seed(1)
model = Wide()
data = TensorDataset(torch.randn(128, 1), torch.randn(128, 1))
session = es.session()
session.telemetry = Events(session.telemetry)
seen = []

def on_step(trainer):
    seen.append(list(session.latest.shares))
    if trainer.step == 2 and "MOST" in os.environ:
        session.steps.memory.watch.ran_out(int(os.environ["MOST"]))

trainer = es.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss, on_step=on_step,
    config=es.Config(exact="bitwise", block=2, threads=1, policy="equal"),
)
trainer.fit(DataLoader(data, batch_size=16))
told = [one[2] for one in session.telemetry.told if one[0] == _core.EVENT_MEMORY]
bits = [p.item().hex() for p in (model.gain, model.norm.running_var, model.norm.weight)]
print(bits, trainer.loss.hex())
print([seen[0], seen[-1], told], int(session.steps.memory.watch._largest_peak), sep=chr(10))
"""
)


def test_same_bits_where_a_rank_is_told_to_hold_less(run_ranks: Callable[..., list[Any]]) -> None:
    """A model with BatchNorm, of which a rank holds all of its blocks at once: its memory's measurer is told of five samples."""
    free = run_ranks(LIMITED)[0].stdout.splitlines()
    first, second = (rank.stdout.splitlines() for rank in run_ranks(LIMITED, rank_env={1: {"MOST": "5"}}))
    assert first[0] == second[0] == free[0]
    begins, ends, told = ast.literal_eval(first[1])
    assert (begins, ends, told[-1]) == ([8, 8], [12, 4], "memory holds 2 of 4 blocks on rank 1")


@pytest.mark.more
def test_same_bits_where_memory_limits_a_rank(run_ranks: Callable[..., list[Any]]) -> None:
    """By what is measured: some three samples fewer than its part, and two runs' memory is never the same."""
    free = [rank.stdout.splitlines() for rank in run_ranks(LIMITED)]
    assert free[0][:2] == [free[1][0], "[[8, 8], [8, 8], []]"]
    limit = {"EVENSTEP_MEMORY_LIMIT": str(int(free[1][2]) - 3 * 2**24)}
    first, second = (rank.stdout.splitlines() for rank in run_ranks(LIMITED, rank_env={1: limit}))
    assert first[0] == second[0] == free[0][0]
    begins, ends, told = ast.literal_eval(first[1])
    assert begins == [8, 8] and sum(ends) == 16, first
    limited = [int(one.split()[2]) for one in told if one.endswith("of 4 blocks on rank 1")]
    assert ends[1] <= 2 * limited[-1] if told and told[-1].endswith("on rank 1") else ends == [8, 8], first


REFUSED = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

what = sys.argv[1]
options = {}
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
if what == "buffer":
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1)))
if what == "sparse":
    model.add_module("bag", nn.EmbeddingBag(4, 1, sparse=True))
if what in ("local", "own"):
    model.add_module("norm", nn.BatchNorm1d(1))
if what == "own":
    model.norm.forward = lambda x: x
if what == "local":
    options["batch_norm"] = "local"
if what == "most":
    options["most_samples"] = 4
if what == "compiled":
    model.compile(backend="eager")
if what == "compression":
    options["compression"] = "bf16"
if "=" in what:
    options = eval(f"dict({what})")
if "unused" in sys.argv:
    model.unused = nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=what == "fused" and es.rank() == 1)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
config = es.Config(exact="bitwise", block=4, options=options)
trainer = es.Trainer(model, optimizer, lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), config=config)

def of_their_own(*_):
    views = [view.data_ptr() for view in es.session().steps.syncs[0].engine.views]
    assert "view=False" not in what or not any(p.grad.data_ptr() in views for p in model.parameters())

optimizer.register_step_pre_hook(of_their_own)
trainer.fit(DataLoader(data, batch_size=16))
if what == "later":
    model.compile(backend="eager")
    print("trained once", flush=True)
    trainer.fit(DataLoader(data, batch_size=8))
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("buffer", "forward changed the buffer '_u of a"),
        ("fused", "rank 1 differs in the optimizer's foreach, fused, capturable"),
        ("most", "without BatchNorm a rank holds one block at a time, however many are its share"),
        ("compiled", "the model is compiled (torch.compile, torch.jit): what computes a block"),
        ("later", "the model is compiled (torch.compile, torch.jit): what computes a block"),
    ],
)
def test_refused_with_the_reason(run_ranks: Callable[..., list[Any]], what: str, words: str) -> None:
    for rank in run_ranks(REFUSED, ranks=2 if what == "fused" else 1, args=(what,), check=False):
        assert rank.returncode == 1 and words in rank.stderr, rank.stderr
        assert ("trained once" in rank.stdout) == (what == "later")


@pytest.mark.more
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sparse", "has sparse gradients"),
        ("local", "batch_norm='local' depends on the shares"),
        ("own", "the statistics of norm of model 'model' depend on the shares"),
        ("compression", "compression (bf16) rounds what the ranks exchange"),
    ],
)
def test_refused_with_the_reason_too(run_ranks: Callable[..., list[Any]], what: str, words: str) -> None:
    for rank in run_ranks(REFUSED, args=(what,), check=False):
        assert rank.returncode == 1 and words in rank.stderr, rank.stderr


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bucket_cap_mb=4", "bucket_cap_mb is about gradients that travel in buckets"),
        ("reduce_bucket_size=5e5", "reduce_bucket_size is about gradients that travel in buckets"),
        ("seed_samples=False", "here each block has its own"),
        ("broadcast_buffers=False", "which forward may not change here"),
        ("engine='torch'", "adds up in an order of its own"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(
    run_ranks: Callable[..., list[Any]], what: str, words: str
) -> None:
    (rank,) = run_ranks(REFUSED, ranks=1, args=(what,), check=False)
    assert rank.returncode == 1 and words in rank.stderr and "fix: leave one of the two out" in rank.stderr, rank.stderr


def test_options_of_ddp_that_hold(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(REFUSED, args=("find_unused_parameters=True, static_graph=True", "unused"))
    run_ranks(REFUSED, args=("broadcast_buffers=True, gradient_as_bucket_view=False",))


def test_unused_parameters_are_found(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(REFUSED, args=("find_unused_parameters=False", "unused"), check=False):
        assert rank.returncode == 1 and "no rank had a gradient of unused of model" in rank.stderr, rank.stderr


def test_ranks_whose_kernels_are_others_are_refused(run_ranks: Callable[..., list[Any]]) -> None:
    """As those of a processor without the instruction set of the others are. Fresh: torch chooses once a process."""
    kernels, plain = torch.backends.cpu.get_cpu_capability(), "DEFAULT|NO AVX"  # the latter is torch 2.6's word
    found = f"torch's kernels: ({plain}), rank 0: "
    what = "environment: ATEN_CPU_CAPABILITY: default" if kernels in plain.split("|") else found
    for rank in run_ranks(
        REFUSED, args=("fine",), rank_env={1: {"ATEN_CPU_CAPABILITY": "default"}}, check=False, fresh=True
    ):
        assert rank.returncode == 1 and re.search(f"rank 1 differs in {what}", rank.stderr), rank.stderr
        assert "fix: " in rank.stderr and "ATEN_CPU_CAPABILITY" in rank.stderr


def test_unlike_ranks_and_checkpoints_are_refused(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    for rank in run_ranks(REFUSED, args=("threads",), rank_env={1: {"OMP_NUM_THREADS": "2"}}, check=False):
        assert rank.returncode == 1
        assert "rank 1 differs in threads: 2, rank 0: 1" in rank.stderr and "fix: es.Config(threads=1)" in rank.stderr
    environment = {"EVENSTEP_CHECKPOINT_EVERY": "3", "EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    script = REFUSED.replace("batch_size=16)", "batch_size=8), epochs=2")
    run_ranks(script, ranks=1, args=("fine",), env=environment)
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    other = script.replace("block=4", "block=2")
    for rank in run_ranks(other, ranks=1, args=("fine",), env={"EVENSTEP_RESUME": str(newest)}, check=False):
        assert rank.returncode == 1 and "blocks of 4 samples, this one has blocks of 2" in rank.stderr, rank.stderr
