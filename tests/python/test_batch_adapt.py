"""The global batch that follows the gradients' noise: the estimator, the decisions, and trainings that they change."""

from __future__ import annotations

import json
import math
import pathlib
import sqlite3
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

import evenstep as es
from evenstep.batch_adapt import decide, factor_of, parse_adapt
from evenstep.batch_noise import NoiseScale, between_ranks
from evenstep.batch_rates import RateFactor
from evenstep.batch_sizes import SizedBatches

# ---- the estimator ----


def estimates(counts: list[int], trials: int) -> tuple[torch.Tensor, float, float, list[list[float]]]:
    """(S, |G|²) of each trial, their true values, and (b_r |g_r|² …, |g|²) of each: gradients of samples are normal, of a known mean and
    covariance."""
    torch.manual_seed(7)
    mean, deviation = torch.linspace(-1.0, 2.0, 6).double(), torch.tensor([0.5, 3.0, 1.0, 2.0, 0.1, 4.0]).double()
    batch = sum(counts)
    samples = mean + deviation * torch.randn(trials, batch, 6, dtype=torch.float64)
    parts = [part.mean(1) for part in samples.split(counts, 1)]
    squares = torch.stack([part.square().sum(1) for part in parts], 1).tolist()
    whole = samples.mean(1).square().sum(1).tolist()
    found = [between_ranks(counts, mine, all_) for mine, all_ in zip(squares, whole)]
    told = [[*mine, all_] for mine, all_ in zip(squares, whole)]
    return torch.tensor(found, dtype=torch.float64), float(deviation.square().sum()), float(mean.square().sum()), told


@pytest.mark.parametrize("counts", [[1, 3, 12], [2, 30], [5, 5, 5, 5], [1, 1, 40]])
def test_the_estimate_is_unbiased_for_unequal_shares(counts: list[int]) -> None:
    trials = 4000
    found, noise, signal, told = estimates(counts, trials)
    error = found.std(0) / math.sqrt(trials)
    assert abs(found[:, 0].mean() - noise) < 4.5 * error[0]
    assert abs(found[:, 1].mean() - signal) < 4.5 * error[1]
    assert error[0] < 0.02 * noise  # so that a bias would show: as of taking unequal shares for equal ones
    ranks, batch = len(counts), sum(counts)
    as_equal = [batch * (sum(one[:-1]) / ranks - one[-1]) / (ranks - 1) for one in told]
    apart = abs(sum(as_equal) / trials - noise) / noise
    assert (apart > 0.3) if len(set(counts)) > 1 else (apart < 0.1)


def test_of_equal_shares_it_is_the_papers() -> None:
    small, big = [3.0, 5.0, 4.0], 2.5  # |g_r|² of batches of 8, |g|² of 24: McCandlish et al., A.2
    noise = (sum(small) / 3 - big) / (1 / 8 - 1 / 24)
    signal = (24 * big - 8 * sum(small) / 3) / (24 - 8)
    assert between_ranks([8, 8, 8], small, big) == pytest.approx((noise, signal))
    assert between_ranks([8, 8, 0, 8], [3.0, 5.0, 0.0, 4.0], big) == pytest.approx((noise, signal))
    assert between_ranks([0, 24], [0.0, big], big) is None


def test_it_is_smoothed_and_says_when_noise_is_all() -> None:
    known = NoiseScale()
    assert math.isnan(known.scale) and known.gain(8, 16) == 1.0
    for _ in range(3):
        known.add(100.0, 2.0)
    known.add(100.0, -2.0)  # one estimate of |G|² alone may be below zero
    assert known.scale == pytest.approx(100.0) and known.count == 4
    again = NoiseScale()
    again.load(json.loads(json.dumps(known.state())))
    assert again.state() == known.state()
    for _ in range(200):
        known.add(100.0, -2.0)
    assert known.scale == math.inf and known.gain(8, 16) == pytest.approx(2.0)
    assert again.gain(8, 32) == pytest.approx((100 / 8 + 1) / (100 / 32 + 1))


# ---- decisions ----


@pytest.mark.parametrize(
    ("now", "wanted", "memory", "batch"),
    [
        (64, 127.0, None, 64),
        (64, 128.0, None, 128),
        (64, math.inf, None, 128),
        (64, 33.0, None, 64),
        (64, 32.0, None, 32),
        (33, 1.0, None, 20),  # bounds: 20 … 200
        (20, 1.0, None, 20),
        (150, 1e9, None, 200),
        (200, 1e9, None, 200),
        (64, 1e9, 100, 100),
        (64, 1e9, 50, 64),  # it runs: what is known of memory limits growing alone
        (64, math.nan, None, 64),
        (16, 16.0, None, 20),
        (512, 512.0, None, 200),
    ],
)
def test_the_batch_doubles_and_halves_between_bounds(now: int, wanted: float, memory: int | None, batch: int) -> None:
    found = decide(now, wanted, 20, 200, memory)
    assert found.batch == batch
    assert ("memory holds" in found.why) == (memory is not None)


def test_learning_rates_follow_the_rule_and_are_as_set_between_steps() -> None:
    assert factor_of("linear", 32, 128, 3.0, 1.0) == 4.0
    assert factor_of("sqrt", 32, 128, 3.0, 1.0) == 2.0
    assert factor_of("none", 32, 128, 3.0, 1.0) == 1.0
    assert factor_of("adascale", 32, 128, 3.0, 1.0) == 3.0
    assert factor_of("adascale", 32, 128, 3.1, 3.0) == 3.0  # no news
    assert factor_of("adascale", 32, 32, 1.0, 3.0) == 1.0
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}])
    rates = RateFactor()
    rates.factor = 4.0
    rates.before_step(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    rates.before_step(optimizer)  # the step before raised
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    rates.after_step()
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_changing_sizes_are_the_same_samples(drop_last: bool) -> None:
    torch.manual_seed(3)
    order = list(RandomSampler(range(50)))
    sized = SizedBatches(BatchSampler(order, 4, drop_last))
    for changes in ([], [(2, 8)], [(2, 8), (4, 3)], [(0, 7)], [(12, 100)], [(40, 2)]):
        sized.sizes = [(0, 4)]
        for batch, size in changes:
            sized.change(batch, size)
        drawn = list(sized)
        assert len(sized) == len(drawn)
        assert [one for batch in drawn for one in batch] == order[: sum(map(len, drawn))]
        assert drop_last or sum(map(len, drawn)) == 50
    sized.change(3, 9)
    sized.begin_epoch()
    assert sized.sizes == [(0, 9)]


@pytest.mark.parametrize(
    "text",
    ["64", "64:1024", "64:32,lr=sqrt", "a:b,lr=sqrt", "64:128,lr=cubic", "1:2,lr=none,every=0", "1:2,lr=none,x=1"],
)
def test_what_cannot_be_meant_is_refused(text: str, run: Any, script: Callable[[str], str]) -> None:
    with pytest.raises(es.EvenstepError, match="EVENSTEP_BATCH_ADAPT"):
        parse_adapt(text)
    result = run("--batch-adapt", text, script("pass"))
    assert result.returncode == 2 and "by which learning-rate rule" in result.stderr, result.stderr


def test_what_is_meant_is_understood() -> None:
    assert parse_adapt("64:1024,lr=sqrt") == es.AdaptBatch(1024, "sqrt", 64, 100)
    assert parse_adapt("1:2,lr=adascale,every=epoch") == es.AdaptBatch(2, "adascale", 1, "epoch")
    for wrong in ({"most": 0}, {"most": True}, {"least": 200}, {"lr_rule": "cubic"}, {"every": "day"}):
        with pytest.raises(ValueError, match=r"es\.AdaptBatch"):
            es.AdaptBatch(**{"most": 100, "lr_rule": "none", **wrong})


# ---- trainings ----

TRAIN = """
    import json, os, sys
    import torch
    from torch import nn
    import evenstep as es

    torch.manual_seed(1)
    what = sys.argv[1]
    count = 600
    x = torch.randn(count, 5, dtype=torch.float64)
    y = x @ torch.arange(5.0).double().unsqueeze(1) + 30 * torch.randn(count, 1, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, y, torch.arange(count))

    def make():
        torch.manual_seed(2)
        model = nn.Linear(5, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)

    def step(model, optimizer, scheduler, a, b):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        scheduler.step()

    model, optimizer, scheduler = make()
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    adapt = es.AdaptBatch(most=64, lr_rule="linear", every=4)

    def shares(number, batch):  # unequal ones
        return [batch - batch // 4, batch // 4]

    model, optimizer, scheduler, loader = es.prepare(model, optimizer, scheduler, loader, adapt_batch=adapt, shares=shares)
    if what == "resume":
        es.load_checkpoint("here")
    seen = []
    for epoch in es.epochs(2):
        for a, b, index in loader:
            seen.append([loader.batch_size, es.session().rates.factor, index.tolist(), len(loader)])
            step(model, optimizer, scheduler, a, b)
            if what == "save" and es.step() == 10:
                es.checkpoint("here")
    rows = [json.loads(one) for one in es.session().all_gather_bytes(json.dumps(seen).encode())]
    if what == "save":  # one device, given the same batches and factors
        twin, by, rates = make()
        for number, (size, factor, _, _) in enumerate(rows[0]):
            whole = [index for row in rows for index in row[number][2]]
            for group in by.param_groups:
                group["lr"] *= factor
            by.zero_grad()
            nn.functional.mse_loss(twin(x[whole]), y[whole]).backward()
            by.step()
            for group in by.param_groups:
                group["lr"] = group["lr"] / factor
            rates.step()
        apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters()))
        print("APART", apart)
    print("RESULT", json.dumps([rows, [p.flatten().tolist() for p in model.parameters()]]))
"""


def test_a_training_grows_its_batch_exactly_and_goes_on_from_its_checkpoint(
    run_ranks: Callable[..., list[Any]],
) -> None:
    ranks = run_ranks(TRAIN, args=["save"])
    rows, parameters = (json.loads(ranks[0].stdout.partition("RESULT ")[2])) if ranks else ([], [])
    assert float(ranks[0].stdout.partition("APART ")[2].split()[0]) < 1e-12
    sizes = [one[0] for one in rows[0]]
    assert sizes[0] == 8 and sizes == sorted(sizes) and sizes[-1] == 64, sizes  # mostly noise: it grows to the bound
    assert [one[:2] for one in rows[0]] == [one[:2] for one in rows[1]]  # alike on all ranks
    assert all(factor == size / 8 for size, factor, _, _ in rows[0])
    first = [len(mine[2]) + len(theirs[2]) for mine, theirs in zip(*rows)]
    drawn = [index for mine, theirs in zip(*rows) for index in (*mine[2], *theirs[2])]
    assert first[: len(first) // 3] == sizes[: len(first) // 3] and len(drawn) == 1200
    assert sorted(drawn[:600]) == sorted(drawn[600:]) == list(range(600))  # each sample once an epoch
    epoch = next(n for n in range(1, len(first)) if sum(first[:n]) == 600)
    assert (
        rows[0][epoch - 1][3] == epoch and rows[0][-1][3] == len(first) - epoch
    )  # len(loader) counts batches as they are
    assert "global batch 8 -> 16 samples: noise scale" in ranks[0].stderr and "global batch" not in ranks[1].stderr
    assert "learning rate x 2 (linear)" in ranks[0].stderr

    resumed = run_ranks(TRAIN, args=["resume"])
    again, final = json.loads(resumed[0].stdout.partition("RESULT ")[2])
    assert final == parameters  # to the bit
    assert [one[:3] for one in again[0]] == [one[:3] for one in rows[0][10:]]
    at = rows[0][10][0]
    assert 8 < at < 64
    assert f"global batch {at} samples, as in the checkpoint" in resumed[0].stderr


REFUSED = """
    import sys
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    adapt = es.AdaptBatch(most=16, lr_rule="none")

    class Own(torch.utils.data.BatchSampler):
        pass

    def said(call):
        try:
            call()
        except (es.EvenstepError, ValueError, TypeError) as error:
            return print("SAID", str(error).splitlines()[0])
        raise AssertionError("nothing was refused")

    one = torch.utils.data.DataLoader(data, batch_sampler=Own(range(32), 4, False))
    stream = torch.utils.data.DataLoader(torch.utils.data.ChainDataset([]), batch_size=4)
    said(lambda: es.prepare(loader, adapt_batch=64))
    said(lambda: es.prepare(model, adapt_batch=adapt))
    said(lambda: es.prepare(model, loader, adapt_batch=adapt, compression="bf16"))
    said(lambda: es.prepare(model, loader, adapt_batch=adapt, sync=es.LocalSGD(every=2)))
    said(lambda: es.prepare(one, adapt_batch=adapt))
    said(lambda: es.prepare(stream, adapt_batch=adapt))
    model, optimizer, loader = es.prepare(model, optimizer, loader, adapt_batch=adapt)
    said(lambda: es.prepare(torch.utils.data.DataLoader(data, batch_size=4)))
    said(lambda: es.Config(exact="bitwise", options={"adapt_batch": adapt}))
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("BATCH", loader.batch_size)
"""


def test_what_cannot_be_adapted_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    (alone,) = run_ranks(REFUSED, ranks=1)
    said = [line.partition(" ")[2] for line in alone.stdout.splitlines() if line.startswith("SAID")]
    expected = [
        "adapt_batch=64",
        "no training DataLoader",
        "bf16",
        "LocalSGD",
        "a Own",
        "a stream",
        "one training loader",
        "adapt_batch",
    ]
    assert len(said) == len(expected)
    assert all(word in line for word, line in zip(expected, said)), said
    assert "BATCH 4" in alone.stdout
    assert "stays at 4 samples: one rank has no other to compare" in alone.stderr


JOB = """
    import torch
    import evenstep as es
    torch.manual_seed(1)
    x = torch.randn(960, 5)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) + 3 * torch.randn(960, 1))
    model = torch.nn.Linear(5, 1)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for a, b in loader:
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.more
def test_the_launcher_asks_for_it_and_the_history_tells(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], script: Callable[[str], str]
) -> None:
    def call(*words: str) -> str:
        ended = subprocess.run(
            [program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    call("run", "-n", "2", "--name", "told", "--batch-adapt", "8:16,lr=sqrt,every=4", script(JOB))
    history = sqlite3.connect(tmp_path / "runs/told/run.db")
    rows = history.execute("SELECT rank, value, words FROM events WHERE event = 'batch'").fetchall()
    history.close()
    assert len(rows) == 1 and rows[0][:2] == (0, 16), rows
    assert rows[0][2].startswith("batch 8 -> 16 samples: noise scale") and "x 1.41 (sqrt)" in rows[0][2]
    assert "batch 8 -> 16 samples" in call("report", "told")
