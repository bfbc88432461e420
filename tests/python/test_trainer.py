"""es.Trainer: its loop does what a loop of one's own around es.prepare does."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evenstep as es
from evenstep.caps import after_shortage, among_others, cap_of_joining
from evenstep.exact_blocks import BlockShares, block_seed

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

by_hand, scaled = sys.argv[1] == "hand", sys.argv[2] == "scaled"
if int(os.environ["WORLD_SIZE"]) == 1:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
import evenstep as es

torch.manual_seed(3)
data = TensorDataset(torch.randn(26, 4, dtype=torch.float64), torch.randn(26, 1, dtype=torch.float64))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(data, batch_size=6, shuffle=True)
scaler = torch.amp.GradScaler("cpu") if scaled else None
losses = []

def shares(number, batch):  # zeros among them
    return [batch] if es.world_size() == 1 else [number * 5 % (batch + 1), batch - number * 5 % (batch + 1)]

def loss_of(model, batch):
    x, y = batch
    counted = (y > 0).double()
    return ((model(x) - y) ** 2 * counted).sum() / counted.sum().clamp(min=1), float(counted.sum())

if by_hand:
    model, optimizer, scheduler, loader = es.prepare(model, optimizer, scheduler, loader, shares=shares)
    for epoch in es.epochs(3):
        for batch in loader:
            loss, amount = loss_of(model, batch)
            es.set_weight(amount)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(es.session().loss)
        scheduler.step()
else:
    trainer = es.Trainer(
        model, optimizer, loss_of, scheduler=scheduler, scheduler_every="epoch", scaler=scaler,
        on_step=lambda trainer: losses.append(trainer.loss), config=es.Config(clip_norm=0.5, shares=shares),
    )
    last = trainer.fit(loader, epochs=3)
    assert last == trainer.loss and trainer.step == 15
if es.is_main():
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    print("END " + json.dumps([values, optimizer.param_groups[0]["lr"], losses]))
"""


def end_of(results: list[Any]) -> list[Any]:
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("END "))
    end: list[Any] = json.loads(line.removeprefix("END "))
    return end


@pytest.mark.parametrize("ranks", [1, 2])
def test_trains_as_a_loop_by_hand(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    """One rank: outside a job, where the order of the samples is torch's own. A scaler changes nothing."""
    hand = end_of(run_ranks(SCRIPT, ranks=ranks, args=("hand", "plain")))
    values, rate, losses = end_of(run_ranks(SCRIPT, ranks=ranks, args=("trainer", "plain")))
    assert (values, rate) == (pytest.approx(hand[0], rel=1e-12), hand[1])
    assert len(losses) == 15
    if ranks > 1:
        assert losses == pytest.approx(hand[2], rel=1e-10)
        scaled = end_of(run_ranks(SCRIPT, ranks=ranks, args=("trainer", "scaled")))
        assert scaled[0] == pytest.approx(hand[0], rel=1e-9)
        assert scaled[2] == pytest.approx(hand[2], rel=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exact": "bits"}, "exact='bits'"),
        ({"exact": "bitwise", "block": 0}, "block=0"),
        ({"block": 4}, "block=…"),
        ({"threads": True}, "threads=True"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"clip_value": -1.0}, "clip_value=-1.0"),
        ({"options": {"group": None}}, "'group'"),
        ({"exact": "bitwise", "micro_batch": 4}, "a rank runs one block at a time"),
        ({"exact": "bitwise", "bucket": 4}, "its share is whole blocks"),
        ({"micro_batch": 0}, "whole number of at least 1"),
        ({"micro_batch": "best"}, "at least 1, or 'auto'"),
        ({"exact": "bitwise", "micro_batch": "auto"}, "a rank runs one block at a time"),
        ({"options": {"bucket": 4}}, "'bucket' is none of the options"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        es.Config(**options)


def test_wrong_arguments() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="not a Linear and a Linear"):
        es.Trainer(model, model, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train_step is called"):
        es.Trainer(model, optimizer, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a list and a list"):
        es.Trainer([], [], [])
    with pytest.raises(ValueError, match=r"1 optimizers and 2 train_steps.*\n  fix: two lists of one length"):
        es.Trainer([model], [optimizer], [print, print])
    with pytest.raises(ValueError, match="steps of one model with one optimizer"):
        es.Trainer([model, nn.Linear(1, 1)], optimizer, print, config=es.Config(micro_batch="auto"))
    with pytest.raises(ValueError, match="scheduler_every='batch'"):
        es.Trainer(model, optimizer, print, scheduler_every="batch")
    trainer = es.Trainer(model, optimizer, lambda model, batch: batch)
    with pytest.raises(ValueError, match="epochs=-1"):
        trainer.fit([], epochs=-1)  # type: ignore[arg-type]
    with torch.autocast("cpu"), pytest.raises(es.EvenstepError, match="inside train_step"):
        trainer.fit([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensor of 2 elements\n  fix: return the loss"):
        trainer._loss_of(lambda model, batch: batch, model, torch.zeros(2))
    for amount, said in ((-1, "-1"), (torch.tensor(math.nan), "nan"), (math.inf, "inf")):
        with pytest.raises(ValueError, match=f"train_step gave {said} as what its loss is a mean over"):
            trainer._loss_of(lambda model, batch: batch, model, (torch.zeros(()), amount))
    with pytest.raises(ValueError, match="only a loop that computes the batch block by block"):
        es.prepare(model, exact="bitwise")  # type: ignore[arg-type]


GAN = """
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

def networks():
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    trained = (discriminator, generator[1:])  # the generator's first layer is frozen until `thaw`
    return [generator, discriminator], [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in trained]

def thaw(step, models, optimizers):
    if step == 3:
        optimizers[1].add_param_group({"params": models[0][0].parameters()})

def seen(models, batch):
    x, drawn = batch
    with torch.no_grad():
        fake = models[0](drawn)
    return softplus(-models[1](x)).mean() + softplus(models[1](fake)).mean()

def fooled(models, batch):
    return softplus(-models[1](models[0](batch[1]))).mean(), 2.0 * len(batch[0])

torch.manual_seed(7)
data = TensorDataset(torch.randn(26, 3, dtype=torch.float64), torch.randn(26, 2, dtype=torch.float64))
models, optimizers = networks()
"""

LOOPS = """
by_hand = []
for _ in range(2):
    for batch in DataLoader(data, batch_size=6):
        losses = []
        for loss_of, optimizer in zip((seen, lambda *given: fooled(*given)[0]), optimizers):
            optimizer.zero_grad()
            loss = loss_of(models, batch)
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
            optimizer.step()
            losses.append(loss.item())
        by_hand.append(losses)
        thaw(len(by_hand), models, optimizers)
wanted = [p.detach() for one in models for p in one.state_dict().values()]

def shares(number, batch):  # zeros among them
    return [number * 5 % (batch + 1), batch - number * 5 % (batch + 1)]

models, optimizers = networks()
schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)]
told = []

def on_step(trainer):
    told.append([*trainer.losses, trainer.loss])
    thaw(trainer.step, models, optimizers)

trainer = es.Trainer(
    models, optimizers, [seen, fooled], scheduler=schedulers, on_step=on_step,
    config=es.Config(clip_norm=0.1, shares=shares),
)
trainer.fit(DataLoader(data, batch_size=6), epochs=2)
assert trainer.step == 10 and trainer.model is models
for value, other in zip(wanted, (p.detach() for one in models for p in one.state_dict().values())):
    torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-14)
torch.testing.assert_close(torch.tensor(told), torch.tensor([[*each, sum(each)] for each in by_hand]), rtol=1e-10, atol=0)
"""


def test_trains_several_models_as_a_loop_by_hand(run_ranks: Callable[..., list[Any]]) -> None:
    """A GAN: each loss makes gradients of what its own optimizer has, and of nothing else on the way."""
    run_ranks(GAN + LOOPS)


THAWED = """
frozen = models[0][0].weight.detach().clone()
changed = []

def on_step(trainer):
    thaw(trainer.step, models, optimizers)
    changed.append(not torch.equal(models[0][0].weight, frozen))

es.Trainer(models, optimizers, [seen, fooled], on_step=on_step, config=es.Config(exact="bitwise", block=2)).fit(
    DataLoader(data, batch_size=6)
)
assert changed == [False] * 3 + [True] * 2, changed
"""


def test_bit_by_bit_what_an_optimizer_gets_later_is_trained(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(GAN + THAWED)


def test_losses_and_schedulers_may_be_any() -> None:
    """Networks that diverge have losses of infinite values with opposite signs; schedulers need not be torch's."""

    class Warmth:
        def step(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    warmth = Warmth()
    trainer = es.Trainer(model, optimizers, [lambda model, batch: batch] * 2, scheduler=warmth)  # type: ignore[arg-type]
    assert trainer._schedulers == [warmth]
    trainer.losses = [math.inf, -math.inf]
    assert math.isnan(trainer.loss)


RESUMED = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

model = nn.Linear(4, 1)
seen = []

def on_step(trainer):
    seen.append(trainer.step)
    if es.step() == int(sys.argv[1]):
        es.checkpoint(sys.argv[2])

trainer = es.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).square().mean(), on_step=on_step
)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
trainer.fit(loader, steps=int(sys.argv[1]), resume=sys.argv[3] or None)
print(seen)
"""


def test_a_restart_goes_on_from_the_newest(run_ranks: Callable[..., list[Any]]) -> None:
    """fit(resume=…) is instead of what `--resume` names, but not instead of what the job wrote before a failure."""

    def run(last: int, to: str, resume: str, **env: str) -> str:
        return str(run_ranks(RESUMED, ranks=2, args=(str(last), to, resume), env=env)[0].stdout)

    assert run(2, "first", "", EVENSTEP_JOB="1" * 16) == "[1, 2]\n"
    assert run(4, "second", "first", EVENSTEP_JOB="2" * 16) == "[3, 4]\n"
    assert run(6, "third", "first", EVENSTEP_JOB="2" * 16, EVENSTEP_RESUME="second") == "[5, 6]\n"
    assert run(4, "fourth", "first", EVENSTEP_JOB="3" * 16, EVENSTEP_RESUME="second") == "[3, 4]\n"


def test_options_of_loaders_hold_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "evenstep.trainer.prepare", lambda *objects, **options: given.append(options) or options["loader"]
    )
    model = nn.Linear(2, 1)
    options = {"workers": "auto", "most_samples": 4, "reduction": "mean"}
    trainer = es.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: batch,
        config=es.Config(options=options),
    )
    for loader in ([1], [2]):
        trainer._prepare(loader)  # type: ignore[arg-type]
    assert [sorted(set(one) & set(options)) for one in given] == [sorted(options), ["most_samples", "workers"]]


def test_shares_are_whole_blocks() -> None:
    shares = BlockShares("hybrid", 3, 50, [1.0, 2.0, 4.0], None, 4)
    for batch in (50, 49, 4, 1):
        drawn = shares.draw(batch)
        ends = [sum(drawn[: rank + 1]) for rank in range(3)]
        assert ends[-1] == batch and all(end % 4 == 0 or end == batch for end in ends), drawn
    assert shares.draw(50)[2] > shares.draw(50)[0]
    for _ in range(30):  # rank 2 turns out to be slow
        shares.observe(
            [(share, share * (0.1 if rank == 2 else 0.01)) for rank, share in enumerate(shares.draw(50))], 1.0
        )
    assert shares.draw(50)[2] < min(shares.draw(50)[:2])
    again = BlockShares("hybrid", 3, 50, None, None, 4)
    again.learn(shares.state())
    assert again.state() == shares.state() and again.state()[-1][0][0] == shares.draw(50)[0]


def told(shares: BlockShares, *reports: tuple[int, int, int, int | None]) -> tuple[int, str] | None:
    return shares.take_memory(list(reports))


def test_blocks_that_are_held_together_are_limited_by_memory() -> None:
    """In whole blocks; the batch's last one is smaller."""
    shares = BlockShares("equal", 2, 50, None, None, 4, [None, 15], held=True)
    assert shares.limited and shares.given_caps == [None, 15]
    assert shares.draw(50) == [40, 10] and shares.draw(49) == [40, 9] and shares.draw(10) == [8, 2]
    assert told(shares, (1, 40, 8, None), (2, 9, 4, None)) is None  # of another batch
    assert told(shares, (1, 40, -1, 6), (2, 10, 9, None)) == (1, "memory holds 2 of 6 blocks on rank 1")
    assert shares.draw(50) == [44, 6] and shares.caps == [44, 8]
    again = BlockShares("equal", 2, 50, None, None, 4, [None, 15], held=True)
    again.learn_caps(shares.caps)  # from a checkpoint
    assert again.draw(50) == [44, 6]
    assert shares.draw(90) == [80, 10]  # larger than what memory was asked for: as the script says
    assert sum(shares.split(200)) == 200 and shares.split(200)[1] > 15  # evaluation keeps nothing for backward
    with pytest.raises(es.EvenstepError) as error:
        told(shares, (1, 44, 30, None), (2, 6, -1, None))
    assert "all of its blocks of 4 samples at once, and of 13 blocks there is room for 9 (rank 0 7, rank 1 2)" in str(
        error.value
    )
    assert "fix: a batch_size of at most 36, more ranks" in str(error.value)
    with pytest.raises(es.EvenstepError, match="there is room for 1 "):
        BlockShares("equal", 2, 50, None, None, 4, [7, 3], held=True)


def test_the_last_block_of_a_full_memory_stays_where_it_is() -> None:
    shares = BlockShares("equal", 2, 26, None, None, 3, None, held=True)
    assert shares.draw(26) == [15, 11]
    assert told(shares, (1, 15, -1, 3), (2, 11, -1, 0)) is None and shares.draw(26) == [15, 11]
    assert told(shares, (1, 15, -1, 3), (2, 11, -1, -1)) is not None and shares.draw(26) == [18, 8]


def test_a_limit_that_holds_the_smaller_last_block_leaves_it() -> None:
    shares = BlockShares("equal", 2, 23, None, None, 4, None, held=True)
    assert shares.draw(23) == [12, 11]
    assert told(shares, (1, 12, -1, None), (2, 11, 11, None)) is None and shares.draw(23) == [12, 11]
    assert told(shares, (1, 12, -1, None), (2, 11, 10, None)) == (1, "memory holds 2 of 3 blocks on rank 1")
    assert shares.draw(23) == [16, 7]


def test_blocks_one_at_a_time_are_not_limited() -> None:
    for shares in (
        BlockShares("equal", 2, 50, None, None, 4),
        BlockShares("equal", 2, 50, None, lambda number, batch: [batch - 10, 10], 4, None, held=True),
    ):
        before = shares.draw(50)
        assert not shares.limited and told(shares, (1, before[0], 4, 0), (2, before[1], 4, -40)) is None
        shares.learn_caps([4, 4])
        assert shares.draw(50) == before and shares.caps == [-1, -1]


def test_among_other_ranks_caps_hold_in_whole_blocks() -> None:
    shares = BlockShares("equal", 2, 16, None, None, 4, [None, 7], held=True)
    assert shares.anew(None, [None, 7, None], [None] * 3).draw(16) == [8, 4, 4]
    caps, why = among_others([7, 9], [7, None], 16, shares.block)
    assert caps == [4, None] and "does not hold the global batch of 16" in why and "(rank 0 4, rank 1 8)" in why
    assert after_shortage([None, None], [(9, 16), (7, 16)], list, 16, block=4)[0] == [None, None]
    assert after_shortage([None, None], [(12, 16), (7, 16)], list, 16, block=4) == ([12, 4], "")


def test_who_ran_out_of_memory_with_one_block_keeps_one() -> None:
    """A block runs whole: with less than one it would have none for good."""
    assert after_shortage([None, None], [None, (2, 16)], list, 16, block=4) == ([None, 4], "")
    assert after_shortage([None, None], [None, (0, 8)], lambda: [12, 4], 16, block=4) == ([None, 4], "")
    assert after_shortage([None, 3], [None, (2, 16)], list, 16, block=4) == ([None, 0], "")  # as its script says
    assert cap_of_joining(None, (2, 16), 16, 2, 4) == 4 and cap_of_joining(3, (2, 16), 16, 2, 4) == 3


def test_ranks_beyond_the_blocks_have_none() -> None:
    two = BlockShares("auto", 2, 8, None, None, 4)
    assert two.crowded() is None
    for _ in range(30):
        two.observe([(4, 0.01), (4, 0.02)], 1.0)
    four = two.anew(None, [None] * 4, [*two.of_each(), None, None])
    for _ in range(30):
        drawn = four.draw(8)
        assert sum(drawn) == 8 and sorted(drawn)[:2] == [0, 0]
        four.observe([(share, 0.01 * share) for share in drawn], 1.0)
    assert sum(four.split(5)) == 5
    told = four.crowded()
    assert told is not None and "has 2 blocks of 4 samples, fewer than the 4 ranks" in told[0]
    assert "other bits" in told[1]
    one = BlockShares("auto", 2, 4, None, None, 4).crowded()
    assert one is not None and "has 1 block of 4 samples" in one[0]


@pytest.mark.parametrize("policy", ["equal", "proportional", "dynamic", "hybrid", "auto"])
def test_every_policy_has_shares_for_more_ranks_than_blocks(policy: str) -> None:
    crowd = BlockShares(policy, 5, 3, [1.0, 2.0, 1.0, 0.5, 1.0], None, 2)  # two blocks, the last of one sample
    for _ in range(20):
        drawn = crowd.draw(3)
        assert sum(drawn) == 3 and sorted(drawn)[:3] == [0, 0, 0] and set(drawn) <= {0, 1, 2, 3}
        crowd.observe([(share, 0.01 * share) for share in drawn], 1.0)


GROWN = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(12, 2), torch.ones(12, 1))
loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
most = 4 if "save" in sys.argv else 8
seen = []

def on_step(trainer):
    seen.append(sum(es.session().latest.shares))
    if "save" in sys.argv and es.step() == 1:
        es.checkpoint("here")

config = es.Config(exact="bitwise", block=2) if "bitwise" in sys.argv else es.Config()
trainer = es.Trainer(model, optimizer, loss, on_step=on_step, config=config)
trainer.fit(DataLoader(data, batch_size=2), epochs=9, steps=most)
print(es.step(), seen[-1], [p.sum().item() for p in model.parameters()])
"""


@pytest.mark.parametrize("how", ["plain", "bitwise"])
def test_a_restart_with_more_ranks_than_samples_goes_on(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, how: str
) -> None:
    """As it is where hosts have joined: the ranks beyond the batch, or its blocks, have none."""
    before, after = (1, 2) if how == "bitwise" else (2, 3)
    job = {"EVENSTEP_JOB": "grown"}
    run_ranks(GROWN, ranks=before, args=["save", how], env=job)
    resumed = {**job, "EVENSTEP_RESUME": str(tmp_path / "here")}
    ended = run_ranks(GROWN, ranks=after, args=[how], env={**resumed, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert len({rank.stdout for rank in ended}) == 1 and ended[0].stdout.startswith("8 2 ")
    words = "in every step some rank"
    assert [words in rank.stderr for rank in ended] == [True] + [False] * before
    again = run_ranks(GROWN, ranks=after, args=[how], env=resumed, check=False)  # a job that begins so
    if how == "bitwise":
        assert {rank.stdout for rank in again} == {ended[0].stdout} and words in again[0].stderr
    else:
        assert all(rank.returncode == 1 and "fewer ranks" in rank.stderr for rank in again)


def test_shares_that_are_no_blocks_are_refused() -> None:
    shares = BlockShares("equal", 2, 16, None, lambda number, batch: [7, 9], 5)
    with pytest.raises(es.EvenstepError, match="rank 0's share ends within a block of 5"):
        shares.draw(16)


def test_seeds_of_blocks_differ() -> None:
    seeds = {
        block_seed(s, e, b, k, p)
        for s in (0, 1)
        for e in range(3)
        for b in range(4)
        for k in range(5)
        for p in range(3)
    }
    assert len(seeds) == 2 * 3 * 4 * 5 * 3 and min(seeds) >= 0 and max(seeds) < 2**63
