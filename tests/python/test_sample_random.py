"""Random numbers of samples: the same whatever rank, worker or process fetches them, and the script's own stay what they were."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

import evenstep as es
from evenstep import sample_random
from evenstep.random_generators import watched
from evenstep.share_samples import Place, ShareSamples, Task, part
from evenstep.unreadable import CollateReadable, ReadableSamples

numpy = pytest.importorskip("numpy")

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "random's half a pair": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "numpy's half a pair": lambda: float(numpy.random.normal()),
}


class Drawing(Dataset):
    """Sample i draws as kinds[i] says."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds, self.calls = kinds, Counter[int]()

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.calls[index] += 1
        return index, DRAWS[self.kinds[index]]()


def fetch(samples: ShareSamples, indices: list[int], shares: Sequence[int], rank: int, first: int) -> Any:
    """What the rank gets of this global batch, the epoch's samples from number `first` on."""
    mine = part(indices, shares, rank, 1)
    return samples[Task(-1, tuple(shares), mine, rank, 1, Place(7, 2, 0, first))].batch


def alone(kinds: Sequence[str], order: Sequence[int]) -> list[Any]:
    """One rank that fetches sample by sample, from a new data set each."""
    return [fetch(ShareSamples(Drawing(kinds), list, None, 1), [i], [1], 0, at)[0] for at, i in enumerate(order)]


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
    script=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6),
    seed=st.integers(0, 99),
)
def test_numbers_are_the_samples_own(
    kinds: list[str], cuts: list[tuple[int, int]], script: list[str], seed: int
) -> None:
    """Two ranks that split batches anyhow, in one process that draws in between, against one sample at a time. Samples come
    several times, as from a sampler that repeats them."""
    total = sum(map(sum, cuts))
    order = random.Random(seed).choices(range(len(kinds)), k=total)
    wanted = alone(kinds, order)
    ranks = [ShareSamples(Drawing(kinds), list, None, 1) for _ in range(2)]
    at = 0
    for shares in cuts:
        batch = order[at : at + sum(shares)]
        if not batch:
            continue
        for rank, samples in enumerate(ranks):
            for kind in script:
                DRAWS[kind]()
            before = own_generators()
            found = fetch(samples, batch, shares, rank, at)
            assert same_generators(before, own_generators())
            first = at + sum(shares[:rank]) if shares[rank] else at
            assert found == wanted[first : first + max(1, shares[rank])]
        at += len(batch)


def own_generators() -> Any:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)


def same_generators(one: Any, other: Any) -> bool:
    (torchs, python, numpys), (torchs_2, python_2, numpys_2) = one, other
    keys, keys_2 = numpys["state"]["key"], numpys_2["state"]["key"]
    rest, rest_2 = ({**state, "state": int(state["state"]["pos"])} for state in (numpys, numpys_2))
    return bool(torch.equal(torchs, torchs_2) and python == python_2 and (keys == keys_2).all() and rest == rest_2)


@pytest.mark.parametrize("kind", [kind for kind in DRAWS if kind != "nothing"])
def test_each_place_of_each_epoch_and_loader_has_other_numbers(kind: str) -> None:
    def drawn(seed: int, epoch: int, first: int, loader: int) -> float:
        samples = ShareSamples(Drawing([kind]), list, None, loader)
        return float(samples[Task(-1, (1,), [0], 0, 1, Place(seed, epoch, 0, first))].batch[0][1])

    wanted = drawn(1, 1, 1, 1)
    assert drawn(1, 1, 1, 1) == wanted
    others = [drawn(*(2 if n == other else 1 for n in range(4))) for other in range(4)]
    assert len({wanted, *others}) == 5


def test_what_draws_nothing_is_fetched_once_and_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Drawing(["nothing"] * 8)
    samples = ShareSamples(data, default_collate, None, 1)
    fetch(samples, [0, 1], [2], 0, 0)
    monkeypatch.setattr(sample_random, "epoch_seed", lambda *_: 0)
    for generator in watched():
        monkeypatch.setattr(generator, "seed", lambda _: pytest.fail("seeded"))
    for at in range(2, 8, 2):
        fetch(samples, [at, at + 1], [2], 0, at)
    assert data.calls == Counter(range(8))


def test_one_that_draws_later_is_fetched_twice_once() -> None:
    kinds = ["nothing", "nothing", "torch", "nothing", "torch", "torch"]
    data = Drawing(kinds)
    samples = ShareSamples(data, list, None, 1)
    found = [one for at in range(0, 6, 2) for one in fetch(samples, [at, at + 1], [2], 0, at)]
    assert found == alone(kinds, range(6))
    assert data.calls == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1, 5: 1}


class Several(Drawing):
    """Gives several samples in one call, as datasets' of Hugging Face do; as: what a call returns."""

    def __init__(self, kinds: Sequence[str], kind: Callable[[list[Any]], Any] = list) -> None:
        super().__init__(kinds)
        self.sizes: list[int] = []
        self._as = kind

    def __getitems__(self, indices: list[int]) -> Any:
        self.sizes.append(len(indices))
        return self._as([self[index] for index in indices])


def test_several_in_one_call_where_nothing_is_drawn() -> None:
    data = Several(["nothing"] * 6)
    samples = ShareSamples(data, list, None, 1)
    for at in (0, 3):
        fetch(samples, [at, at + 1, at + 2], [3], 0, at)
    assert data.sizes == [3, 3] and data.calls == Counter(range(6))


@pytest.mark.parametrize("around", [lambda data: data, lambda data: Subset(data, range(6))])
def test_several_in_one_call_that_draws_are_asked_for_one_by_one(around: Callable[[Any], Any]) -> None:
    kinds = ["numpy", "torch", "random"] * 2
    data = Several(kinds)
    samples = ShareSamples(around(data), list, None, 1)
    found = [one for at in (0, 3) for one in fetch(samples, [at, at + 1, at + 2], [3], 0, at)]
    assert found == alone(kinds, range(6)) and data.sizes == [3] + [1] * 6


def test_a_batch_made_by_the_data_set_stays_whole() -> None:
    """One call, whatever is drawn: what it returns can be collated by its own function alone."""
    data = Several(["torch"] * 4, lambda found: torch.tensor([number for _, number in found]))
    samples = ShareSamples(data, lambda batch: batch, None, 1)
    first = fetch(samples, [0, 1], [2], 0, 0)
    assert data.sizes == [2, 2] and torch.equal(fetch(samples, [0, 1], [2], 0, 0), first)
    assert not torch.equal(fetch(samples, [0, 1], [2], 0, 2), first)


def test_collating_draws_by_where_the_part_begins() -> None:
    def noisy(found: list[Any]) -> Any:
        return [one[0] for one in found], float(torch.rand(()))

    def of(shares: Sequence[int], rank: int, first: int = 0) -> Any:
        samples = ShareSamples(Drawing(["random"] * 4), noisy, None, 1)
        return fetch(samples, [0, 1, 2, 3], shares, rank, first)

    before = own_generators()
    whole = of([4], 0)
    assert of([4], 0) == whole and of([4], 0, 4)[1] != whole[1]
    assert of([2, 2], 0)[1] == whole[1] != of([2, 2], 1)[1]
    assert same_generators(before, own_generators())


def test_collating_that_draws_later_gets_fresh_samples() -> None:
    """It may have changed the ones that it was given."""
    now = False

    def popping(found: list[dict[str, int]]) -> list[Any]:
        values = [one.pop("x") for one in found]
        return [*values, float(torch.rand(()))] if now else values

    class Words(Dataset):
        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": index}

    samples = ShareSamples(Words(), popping, None, 1)
    assert fetch(samples, [0, 1], [2], 0, 0) == [0, 1]
    now = True
    fresh = ShareSamples(Words(), popping, None, 1)
    assert fetch(samples, [2, 3], [2], 0, 2) == fetch(fresh, [2, 3], [2], 0, 2)


def test_samples_that_cannot_be_read() -> None:
    class Damaged(Drawing):
        def __getitem__(self, index: int) -> tuple[int, float]:
            sample = super().__getitem__(index)
            if index in (1, 4, 5):
                raise OSError("damaged")
            return sample

    kinds = ["torch", "random", "numpy"] * 2
    wanted = alone(kinds, range(6))
    samples = ShareSamples(ReadableSamples(Damaged(kinds)), CollateReadable(list), None, 1)
    found = [fetch(samples, [at, at + 1], [2], 0, at) for at in (0, 2, 4)]
    assert [one.batch for one in found] == [wanted[:1], wanted[2:4], [found[2].batch[0]]]
    assert [[index for index, _ in one.missing] for one in found] == [[1], [], [4, 5]]


def test_the_scripts_generators_come_back_from_an_error() -> None:
    class Failing(Drawing):
        def __getitem__(self, index: int) -> tuple[int, float]:
            super().__getitem__(index)
            raise KeyError(index)

    before = own_generators()
    for kind in DRAWS:
        with pytest.raises(KeyError):
            fetch(ShareSamples(Failing([kind]), list, None, 1), [0], [1], 0, 0)
    assert same_generators(before, own_generators())


def test_only_yes_or_no() -> None:
    with pytest.raises(TypeError, match="give True or False"):
        es.prepare(nn.Linear(1, 1), seed_samples=1)  # type: ignore[arg-type]


SCRIPT = """
import random, sys
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
import evenstep as es

class Noisy(Dataset):
    def __len__(self): return 22
    def __getitem__(self, index):
        numbers = [torch.rand((), dtype=torch.float64).item(), random.random(), numpy.random.normal()]
        return torch.tensor([index, *numbers], dtype=torch.float64)

def shares(number, batch):
    mine = (2 + 3 * number) % (batch + 1)
    return [batch] if es.world_size() == 1 else [mine, batch - mine]

def seen(loader):
    found = []
    for x in loader:
        found += es.gather(x).tolist()
        if loader.train:
            torch.rand(es.rank() + 1)  # the script draws, on each rank otherwise
            model(x[:, :1]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found

torch.manual_seed(11 + 100 * int(sys.argv[1]) * es.rank())
model = nn.Linear(1, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = es.prepare(model, optimizer)
ways = [dict(), dict(num_workers=2), dict(num_workers=1, persistent_workers=True)]
loaders = []
for way in ways:
    torch.manual_seed(11)
    loaders.append([es.prepare(loader=DataLoader(Noisy(), batch_size=6, shuffle=train, **way), train=train,
                               **(dict(shares=shares) if train else {}))
                    for train in (True, False)])
rounds = [[[seen(pair[of]) for pair in loaders] for of in (0, 1)] for epoch in range(2)]  # evaluations: at one step
all_found = [[[trained[way], evaluated[way]] for trained, evaluated in rounds] for way in range(3)]
# Training loaders have numbers of their own: one that stands for the others.
assert len({row[1] for found in all_found for row in found[0][0]}) == 3 * 22
off = es.prepare(loader=DataLoader(Noisy(), batch_size=22), train=False, seed_samples=False)
before = torch.get_rng_state()
list(off)
assert not torch.equal(before, torch.get_rng_state())
print(all_found)
"""


def test_any_ranks_and_splits_have_the_same_samples(run_ranks: Callable[..., list[Any]]) -> None:
    """Training and evaluation, without workers, with two, with one that stays; and ranks whose own numbers differ."""
    one = ast.literal_eval(run_ranks(SCRIPT, ranks=1, args=["0"])[0].stdout.splitlines()[-1])
    two = ast.literal_eval(run_ranks(SCRIPT, ranks=2, args=["1"])[0].stdout.splitlines()[-1])
    assert two == one
    evaluations = [epochs[epoch][1] for epochs in one for epoch in range(2)]
    assert evaluations[0] == evaluations[2] == evaluations[4] != evaluations[1]  # however many workers
