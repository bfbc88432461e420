"""Loaders at their limits: lengths that change or differ, samplers without one, fewer samples than a batch or than ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ODD = """
import itertools, os, re
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset
import evenstep as es

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

class Growing(Dataset):
    count = 10
    def __len__(self): return self.count
    def __getitem__(self, index): return torch.tensor([float(index)], dtype=torch.float64)

class Few(Growing):
    count = 2

class NoLength(Sampler):
    def __iter__(self): return iter([3, 1, 4, 1, 5, 9, 2, 6])

def epoch(loader):
    return [x for batch in loader for x in es.gather(batch).reshape(-1).tolist()]

def fails(words, work):
    try:
        work()
    except es.EvenstepError as error:
        assert re.search(words, str(error), re.S) and "fix: " in str(error), error
    else:
        raise AssertionError(f"no error: {words}")

# the length changes between epochs
data = Growing()
loader = es.prepare(loader=DataLoader(data, batch_size=4, shuffle=True))
assert sorted(epoch(loader)) == list(range(10)) and len(loader) == 3
data.count = 17
assert sorted(epoch(loader)) == list(range(17)) and len(loader) == 5
data.count = 3
assert sorted(epoch(loader)) == list(range(3)) and len(loader) == 1

# and while a checkpoint waited
for _ in zip(range(2), loader2 := es.prepare(loader=DataLoader(Growing(), batch_size=4, shuffle=True))):
    state = loader2.state_dict()
other = Growing()
other.count = 11
fails("the sampler RandomSampler does not give the samples of before the checkpoint.*",
      lambda: (lambda one: (one.load_state_dict(state), next(iter(one))))(
          es.prepare(loader=DataLoader(other, batch_size=4, shuffle=True))))

# a sampler without a length
loader = es.prepare(loader=DataLoader(Growing(), batch_size=3, sampler=NoLength()))
assert [epoch(loader), epoch(loader)] == [[3, 1, 4, 1, 5, 9, 2, 6]] * 2
try:
    len(loader)
except TypeError as error:
    assert "NoLength" in str(error)
else:
    raise AssertionError("a length")
mean = es.evaluate(nn.Identity(), DataLoader(Growing(), batch_size=3, sampler=NoLength()), lambda model, x: x)
assert abs(float(mean) - 31 / 8) < 1e-12

# fewer samples than a batch, and than ranks: as on one device
for count in (5, 2, 1):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 1, dtype=torch.float64))
    ends = []
    for prepared in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=8)
        if prepared:
            model, optimizer, loader = es.prepare(model, optimizer, loader)
            assert len(loader) == 1
        for _ in range(4):
            for x, y in loader:
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.allclose(*ends, rtol=1e-12, atol=1e-13), ends
fails("the training loader has no batch: 2 samples, batch_size 8, drop_last True",
      lambda: epoch(es.prepare(loader=DataLoader(Few(), batch_size=8, drop_last=True))))
fails("the training loader has no batch",
      lambda: epoch(es.prepare(loader=DataLoader(TensorDataset(torch.ones(0, 1)), batch_size=8))))

# ranks whose loaders differ
mine = Growing()
mine.count = 10 + rank
fails("loader of rank 1 differs from rank 0's: its samples is 11, where rank 0 has 10",
      lambda: es.prepare(loader=DataLoader(mine, batch_size=4)))
fails("its batch_size is 5, where rank 0 has 4", lambda: es.prepare(loader=DataLoader(Growing(), batch_size=4 + rank)))
fails("its num_workers is 2, where rank 0 has 1",
      lambda: es.prepare(loader=DataLoader(Growing(), batch_size=4, num_workers=1 + rank)))

# one that becomes shorter in mid-epoch: its own error, with what has changed; and an index that it never had
shorter = "\\n  fix: the data set had 12 samples when the epoch began, and has 6 now: let it become shorter between two epochs"
for had, left, said in ((1, 6, shorter), (2, 12, "")):
    rows = [torch.ones(1) for _ in range(12)]
    batches = iter(es.prepare(loader=DataLoader(rows, batch_size=6, sampler=range(18))))
    for _ in range(had):
        next(batches)
    del rows[left:]
    try:
        next(batches)
    except IndexError as error:
        assert type(error) is IndexError and str(error) == "list index out of range" + said, error
    else:
        raise AssertionError("no error")
"""


def test_odd_loaders(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(ODD, ranks=3)
