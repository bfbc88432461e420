"""What a training script may rely on, checked on every rank of one job; run by test_prepare_loops.py.

Prints ORDER and the indices that all ranks saw together, so that jobs of different sizes can be compared.
"""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import os
import random
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, WeightedRandomSampler

import evenstep as es

RANKS = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])


class Numbers(Dataset):
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), index


class Shuffled(Sampler):
    """Without a length; draws from three generators as it goes."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        numbers = list(range(self.count))
        random.shuffle(numbers)
        for number in numbers:
            yield (number + int(torch.randint(3, ()))) % self.count


class Batches(Sampler):
    """A batch sampler of growing batches."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for number in range(self.count):
            yield list(range(number + 1))


class Cursor(Sampler):
    """A batch sampler that goes round and round: an epoch begins where the one before ended."""

    def __init__(self, count: int):
        self.count, self.at = count, 0
        self.source = random.Random(4)

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        for _ in range(3):
            batch = [(self.at + n) % self.count for n in range(4)]
            self.at += 4
            yield self.source.sample(batch, 4)


class LateFirst(Numbers):
    """Its first batch is fetched only when another worker has reached the second."""

    def __init__(self, batch: int):
        super().__init__(4 * batch)
        self.batch = batch
        self.reached = multiprocessing.Event()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index < self.batch:
            assert self.reached.wait(60)
        elif index < 2 * self.batch:
            self.reached.set()
        return super().__getitem__(index)


def everyone(values: list[int]) -> list[list[int]]:
    return [json.loads(data) for data in es.session().all_gather_bytes(json.dumps(values).encode())]


def seen_in_order(loader: es.EvenLoader) -> list[int]:
    """The global batches of one epoch, put together from the ranks' shares; no index twice or missing."""
    order = []
    for _, indices in loader:
        plan = es.session().latest
        mine = indices.tolist() if plan.samples else []
        parts = everyone(mine)
        assert [len(part) for part in parts] == plan.shares, (parts, plan.shares)
        order += [i for part in parts for i in part]
    return order


def prepare(loader: DataLoader, **options) -> es.EvenLoader:
    shares = random_shares if options.pop("change", True) else None
    return es.prepare(loader, shares=shares, **options)


def random_shares(number: int, batch: int) -> list[int]:
    cuts = sorted(random.Random(number).randint(0, batch) for _ in range(RANKS - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, batch])]


def check_orders() -> dict[str, list[int]]:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(7 + RANK)  # the order comes from rank 0's seed alone

    data = Numbers(23)
    orders = {}
    shuffled = prepare(DataLoader(data, batch_size=5, shuffle=True, generator=seeded()))
    first, second = seen_in_order(shuffled), seen_in_order(shuffled)
    assert sorted(first) == sorted(second) == list(range(23)) and first != second
    assert len(shuffled) == 5 and shuffled.batch_size == 5 and len(shuffled.dataset) == 23
    again = prepare(DataLoader(data, batch_size=5, shuffle=True, generator=seeded()))
    again.set_epoch(1)
    assert seen_in_order(again) == second
    orders["shuffled"] = first + second
    dropped = prepare(DataLoader(data, batch_size=5, drop_last=True))
    assert len(dropped) == 4 and seen_in_order(dropped) == list(range(20))
    torch.manual_seed(7 + RANK)
    random.seed(RANK)
    orders["own sampler"] = seen_in_order(prepare(DataLoader(data, batch_size=4, sampler=Shuffled(23))))
    orders["weighted"] = seen_in_order(
        prepare(DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(torch.arange(23.0), 30)))
    )
    grown = prepare(DataLoader(data, batch_sampler=Batches(6)))
    assert seen_in_order(grown) == [i for n in range(6) for i in range(n + 1)]
    alone, cursor = Cursor(23), prepare(DataLoader(data, batch_sampler=Cursor(23)))
    for _ in range(3):
        assert seen_in_order(cursor) == [i for batch in alone for i in batch]
    once = prepare(DataLoader(data, batch_sampler=(list(range(n, n + 5)) for n in range(0, 20, 5))))
    once.set_epoch(3)
    assert seen_in_order(once) == list(range(20)) and seen_in_order(once) == []
    workers = prepare(DataLoader(data, batch_size=5, shuffle=True, num_workers=2, persistent_workers=True))
    orders["workers"] = seen_in_order(workers) + seen_in_order(workers)
    return orders


def check_distributed_sampler() -> None:
    sampler = DistributedSampler(Numbers(21), num_replicas=RANKS, rank=RANK, shuffle=True, seed=3)
    loader = prepare(DataLoader(Numbers(21), batch_size=2, sampler=sampler), change=False)
    assert loader.batch_size == 2 * RANKS
    assert sorted(seen_in_order(loader)) == list(range(21))  # no padding, no repeats


def check_batches_come_with_their_plans() -> None:
    # a user's in_order=False would bring batch 1 first, under the weight of batch 0
    options = {"in_order": False} if "in_order" in inspect.signature(DataLoader).parameters else {}
    loader = prepare(DataLoader(LateFirst(6), batch_size=6, num_workers=2, **options))
    for number, (_, indices) in enumerate(loader):
        plan = es.session().latest
        assert plan.batch == number and (plan.samples == 0 or {index // 6 for index in indices.tolist()} == {number})


def check_random_numbers_are_the_users() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state().clone(), random.getstate()
    loader = prepare(DataLoader(Numbers(9), batch_size=3, sampler=Shuffled(9)))
    iterator = iter(loader)
    next(iterator)
    torch.manual_seed(5)
    list(iterator)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def check_evaluation() -> None:
    for count, batch in ((23, 5), (23, 1), (1, 4), (7, 7)):
        loader = DataLoader(Numbers(count), batch_size=batch)
        model = nn.Sequential(nn.Dropout(), nn.Linear(2, 1))
        model.train()

        def metrics(module: nn.Module, data: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            assert not module.training and not torch.is_grad_enabled()
            x, index = data
            return {"each": x[:, 0] ** 2, "mean": index.float().mean(), "vector": x}

        result = es.evaluate(model, loader, metrics)
        assert model.training
        expected = sum(i * i for i in range(count)) / count
        assert math.isclose(result["each"], expected, rel_tol=1e-12, abs_tol=1e-12), (result, expected)
        assert math.isclose(result["mean"], (count - 1) / 2, rel_tol=1e-6)
        assert torch.allclose(result["vector"], torch.full((2,), (count - 1) / 2, dtype=torch.float64))
        single = es.evaluate(model, es.prepare(loader=loader, train=False), lambda m, d: d[0][:, 0])
        assert math.isclose(single, (count - 1) / 2)
        split = es.prepare(loader=loader, train=False)
        mine = [i for _, indices in split if es.session().latest.samples for i in indices.tolist()]
        parts = everyone(mine)
        assert sorted(i for part in parts for i in part) == list(range(count))
        lengths = everyone([sum(1 for _ in split)])
        assert all(one == [len(split)] for one in lengths), (lengths, len(split))


def check_evaluation_by_hand_of_fewer_samples_than_ranks() -> None:
    split = es.prepare(loader=DataLoader(Numbers(1)), train=False)
    rows, means = [], []
    for _, index in split:  # every rank goes through it, so that the calls match
        rows += es.gather(index + 5).tolist()
        means.append(es.reduce_mean(float(index) if es.session().latest.samples else math.nan))
    assert rows == [5] and means == [0.0]


def check_evaluation_of_what_is_no_loader() -> None:
    """Batches that no prepared loader gave are counted by themselves, also between two training batches."""
    model = nn.Linear(2, 1)
    model.train()
    own = [torch.full((n, 2), float(n)) for n in range(1, 4)]  # smaller and smaller shares of no global batch
    texts = [{"words": ["a"], "rows": [torch.ones(2), torch.zeros(2)]}]
    loader = es.prepare(DataLoader(Numbers(2 * RANKS), batch_size=RANKS), shares=lambda n, b: [b] + [0] * (RANKS - 1))
    for _ in loader:
        latest = es.session().latest
        assert es.evaluate(model, own, lambda m, x: x.mean()) == (1 + 4 + 9) / 6
        assert es.evaluate(model, own, lambda m, x: x[:, 0]) == (1 + 4 + 9) / 6
        assert es.evaluate(model, texts, lambda m, b: b["rows"][0]) == 1.0
        split = es.prepare(loader=DataLoader(Numbers(7), batch_size=3), train=False)
        assert math.isclose(es.evaluate(model, (one for one in split), lambda m, d: d[0][:, 0]), 3.0)
        assert es.session().latest is latest
    again = prepare(DataLoader(Numbers(2 * RANKS), batch_size=RANKS))
    try:
        es.evaluate(model, (one for one in again), lambda m, d: d[0].mean())
        raise AssertionError("not refused")
    except es.EvenstepError as error:
        assert "was given a training loader" in str(error)


def check_numbers_over_ranks() -> None:
    loader = prepare(DataLoader(Numbers(22), batch_size=4))
    for x, index in loader:
        plan = es.session().latest
        rows = es.gather(index)
        assert rows.tolist() == list(range(plan.batch * 4, plan.batch * 4 + plan.total))
        value = x[:, 0].mean() if plan.samples else torch.tensor(math.nan)
        assert math.isclose(float(es.reduce_mean(value)), sum(rows.tolist()) / len(rows), rel_tol=1e-6)
        assert isinstance(es.reduce_mean(1.5), float)
        assert es.set_weight(7) == (7 if plan.samples else 0)  # a dummy sample's words count nothing
    assert es.reduce_mean(float(RANK), weight=RANK + 1.0) == sum(r * (r + 1) for r in range(RANKS)) / sum(
        r + 1 for r in range(RANKS)
    )
    assert es.gather(torch.full((RANK, 2), RANK)).tolist() == [[r, r] for r in range(RANKS) for _ in range(r)]


def check_numbers_after_the_loop() -> None:
    """They count as many samples as the rank had in the loop; one that had only dummy samples counts nothing."""
    loader = es.prepare(
        DataLoader(Numbers(6), batch_size=6), shares=lambda n, b: [b - 1, 1, 0][:RANKS] if RANKS > 1 else [b]
    )
    look = iter(loader)
    next(look)  # whose samples are none of the loop's, though it stays open
    for x, _ in loader:
        inside = es.reduce_mean(x[:, 0].mean() if es.session().latest.samples else torch.tensor(math.nan))
    value = x[:, 0].mean() if RANK < 2 else torch.tensor(math.nan)
    assert float(inside) == float(es.reduce_mean(value)) == 2.5
    assert es.session().steps.loop_samples == [[6], [5, 1], [5, 1, 0]][RANKS - 1][RANK]
    rest = es.prepare(
        DataLoader(Numbers(5), batch_size=4),
        shares=lambda n, b: [b - RANKS + 1] + [1] * (RANKS - 1) if b > 1 else [1] + [0] * (RANKS - 1),
    )
    mine = []
    for _, index in rest:
        mine += index.tolist() if es.session().latest.samples else []
    assert es.session().steps.last_plan.shares[1:] == [0] * (RANKS - 1)  # the last batch is the first rank's alone
    assert math.isclose(es.reduce_mean(sum(mine) / len(mine)), 2.0)
    for _ in es.prepare(loader=DataLoader(Numbers(7)), train=False):
        pass
    assert es.evaluate(nn.Linear(2, 1), DataLoader(Numbers(5)), lambda m, d: d[0][:, 0]) == 2.0
    assert es.reduce_mean(float(RANK == RANKS - 1)) > 0  # a flag of a rank without a sample in the last batch is seen
    assert es.reduce_mean(float(RANK == RANKS - 1), weight=1) == 1 / RANKS
    rows = es.gather(torch.tensor([RANK]))  # of no batch any more: collected over the loop, say
    assert rows.tolist() == list(range(RANKS))


def check_rows_of_a_rank_without_samples() -> None:
    """None of them comes, however many the dummy sample made; with batch=False all do."""
    loader = es.prepare(DataLoader(Numbers(6), batch_size=3), shares=lambda n, b: [0] * (RANKS - 1) + [b])
    for _, index in loader:
        tokens = index.repeat_interleave(4)  # as logits.flatten(0, 1)
        wanted = [3 * es.session().latest.batch + i for i in range(3) for _ in range(4)]
        assert es.gather(tokens).tolist() == wanted
        assert es.gather(torch.tensor([RANK]), batch=False).tolist() == list(range(RANKS))


def check_an_evaluation_beside_training() -> None:
    """An iterator that the script holds: what it computes with gradients is of the training's batch, and so is what follows its end."""
    train = es.prepare(DataLoader(Numbers(20), batch_size=4), shares=lambda n, b: [0] * (RANKS - 1) + [b])
    others = es.prepare(loader=DataLoader(Numbers(5 * RANKS), batch_size=RANKS), train=False)
    held = iter(others)
    for _, index in train:
        plan = es.session().latest
        _, seen = next(held)
        assert es.session().latest is not plan and es.session().in_training_loop
        wanted = list(range(4 * plan.batch, 4 * plan.batch + 4))
        assert es.gather(index).tolist() == wanted
        assert es.reduce_mean(index.double().mean() if plan.samples else math.nan) == sum(wanted) / 4
        assert es.session().latest.trains
        with torch.no_grad():
            assert es.gather(seen).tolist() == list(range(RANKS * plan.batch, RANKS * (plan.batch + 1)))
            assert not es.session().latest.trains
        if plan.batch == 2:  # one that is not held, of the same loader, with gradients
            rows = [row for _, some in others for row in es.gather(some).tolist()]
            assert rows == list(range(5 * RANKS)) and es.session().latest is plan
        if plan.batch == 4:
            assert next(held, None) is None and es.session().latest is plan
            held = iter(others)
            next(held)
            assert es.gather(index).tolist() == wanted
    del held
    assert len(list(zip(others, others))) == 5 and es.session().latest is None


def check_buffers() -> None:
    """Running statistics are the mean of the ranks', weighted by samples; a dummy sample's count nothing."""
    torch.manual_seed(RANK)  # other values on every rank until es.prepare
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = {1: [6], 2: [4, 2], 3: [4, 2, 0]}[RANKS]
    loader = DataLoader(Numbers(12), batch_size=6)
    model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: parts, batch_norm="local")
    for x, _ in loader:
        model(x.double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for first in (0, 6):
        samples = torch.arange(first, first + 6.0)[:, None].expand(-1, 2).double()
        shares = model[0](samples).detach().split(parts)
        mean = 0.9 * mean + 0.1 * sum(len(h) / 6 * h.mean(0) for h in shares if len(h))
        variance = 0.9 * variance + 0.1 * sum(len(h) / 6 * h.var(0) for h in shares if len(h))
    norm = model[1]
    assert torch.allclose(norm.running_mean, mean, rtol=1e-12), (norm.running_mean, mean)
    assert torch.allclose(norm.running_var, variance, rtol=1e-12), (norm.running_var, variance)
    assert int(norm.num_batches_tracked) == 2
    rows = es.gather(torch.cat([norm.running_mean, norm.running_var])[None])
    assert rows.shape[0] == RANKS and bool((rows == rows[0]).all())


def check_a_graph_that_outlives_a_step() -> None:
    """A GAN's samples, made once: the critic steps on them, and then backward goes through what made them, whose running
    statistics that step has averaged."""
    maker = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(1, track_running_stats=True)).double()
    critic = nn.Linear(3, 1).double()
    makes, judges = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, critic))
    loader = DataLoader(Numbers(12), batch_size=6)
    options = {"shares": lambda n, b: {1: [6], 2: [4, 2], 3: [4, 2, 0]}[RANKS], "batch_norm": "local"}
    maker, critic, makes, judges, loader = es.prepare(maker, critic, makes, judges, loader, **options)
    before = maker[0].weight.detach().clone()
    for x, _ in loader:
        made = maker[2](maker[:2](x.double())[:, None])[:, 0]
        critic(made.detach()).square().mean().backward()
        judges.step()
        judges.zero_grad()
        critic(made).square().mean().backward()
        makes.step()
        makes.zero_grad()
    assert not torch.equal(maker[0].weight, before)


def check_batchnorm_with_few_samples() -> None:
    # one sample a rank would be too few for a variance, where one device has enough
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(2 * RANKS), batch_size=RANKS + 1)
    model, optimizer, loader = es.prepare(model, optimizer, loader, batch_norm="local")
    for x, _ in loader:
        plan = es.session().latest
        assert sum(plan.shares) == plan.total
        if plan.total > 1:  # one device cannot do a batch of one either
            assert 1 not in plan.shares
            model(x).sum().backward()
            optimizer.step()


def check_two_models() -> None:
    """A GAN's pattern: backward through both, two optimizers, each stepping once a batch; one commit a batch."""
    torch.manual_seed(0)
    makers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    torch.manual_seed(0)
    plain = [nn.Linear(2, 2), nn.Linear(2, 1)]
    data = DataLoader(Numbers(24), batch_size=6)

    def train(generator: nn.Module, critic: nn.Module, loader, optimizers) -> None:
        for x, _ in loader:
            x = x / 24
            optimizers[1].zero_grad()
            (critic(x).mean() - critic(generator(x).detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(generator(x)).mean() + generator(x).square().mean()).backward()
            optimizers[0].step()

    train(*plain, data, [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in makers]
    g, c, og, oc = es.prepare(makers[0], makers[1], *optimizers)
    before = es.step()
    train(g, c, prepare(data), [og, oc])
    assert es.step() == before + 4, (before, es.step())
    for ours, theirs in zip((g, c), plain):
        for a, b in zip(ours.parameters(), theirs.parameters()):
            assert torch.allclose(a, b, atol=1e-6), (a, b)


def check_a_rate_that_follows_a_metric() -> None:
    """A script of one device: each rank has the mean over its own samples, also where these are a dummy's."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model, optimizer, scheduler = es.prepare(model, optimizer, plateau(optimizer, patience=0))
    validation = es.prepare(DataLoader(Numbers(4 * RANKS + 1), batch_size=RANKS + 1), train=False)

    def own_mean(loader) -> float:
        values = torch.cat([x[:, 0].double() for x, _ in loader])
        return values.mean().item()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in range(3):
            scheduler.step(own_mean(validation) - 10 * (epoch == 2))
            rate, best = optimizer.param_groups[0]["lr"], 2 * RANKS - 10 * (epoch == 2)
            assert math.isclose(scheduler.best, best, rel_tol=1e-9), (scheduler.best, best)
            assert math.isclose(rate, 0.1 * 0.1 ** (epoch > 0)), rate  # the second is no better than the first
        seen = [str(one.message) for one in told if "ReduceLROnPlateau.step" in str(one.message)]
        assert len(seen) == (RANK == 0 and RANKS > 1), seen
        scheduler = es.prepare(plateau(optimizer, patience=0, mode="max"))
        for x, _ in prepare(DataLoader(Numbers(12), batch_size=6)):
            scheduler.step(metrics=x[:, 0].mean())
        assert math.isclose(scheduler.best, 8.5), scheduler.best
        scheduler.step(100.1)
        assert scheduler.best == 100.1, scheduler.best


def check_ranks_that_were_told_otherwise() -> None:
    environment = es.session().environment
    wrong = {
        "how the training loader's workers are chosen: auto, rank 0: off": {"workers": "auto" if RANK == 1 else "off"},
        "or when to write checkpoints: ": {"checkpoint_frequency": 5 + RANK},
    }
    for words, options in wrong.items():
        try:
            es.prepare(DataLoader(Numbers(2 * RANKS), batch_size=RANKS), **options)
            assert RANKS == 1, "not refused"
        except es.EvenstepError as error:
            assert str(error).startswith("rank 1 was told otherwise than rank 0") and words in str(error), error
        es.session().environment = environment


def main() -> None:
    orders = check_orders()
    check_distributed_sampler()
    check_batches_come_with_their_plans()
    check_random_numbers_are_the_users()
    check_evaluation()
    check_evaluation_by_hand_of_fewer_samples_than_ranks()
    check_evaluation_of_what_is_no_loader()
    check_numbers_over_ranks()
    check_numbers_after_the_loop()
    check_rows_of_a_rank_without_samples()
    check_an_evaluation_beside_training()
    check_two_models()
    check_buffers()
    check_a_graph_that_outlives_a_step()
    check_batchnorm_with_few_samples()
    check_a_rate_that_follows_a_metric()
    check_ranks_that_were_told_otherwise()
    es.barrier()
    es.print("ORDER " + json.dumps(orders))


if __name__ == "__main__":
    main()
