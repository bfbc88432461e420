"""IterableDatasets: every sample once, in the order of one device, whatever the shares, the workers and the resumes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_cases import Numbers, Skipping, Stateful
from torch.utils.data import DataLoader

import evenstep as es
from evenstep.stream import Begin, Opening, StreamDataset, Task, checksum, cut, left

HERE = pathlib.Path(__file__).parent
BEGIN = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
"""

ORDER = (
    BEGIN
    + """
import torch
from torch import nn
from torch.utils.data import DataLoader
import evenstep as es
from stream_cases import Numbers, Skipping, Stateful, joined, own_part, parts, plain, uneven

cases = [
    (Numbers(23), dict(batch_size=5)),
    (Numbers(23), dict(batch_size=5, drop_last=True)),
    (Numbers(20), dict(batch_size=5)),
    (Numbers(3), dict(batch_size=5)),
    (Stateful(23), dict(batch_size=5)),
    (Skipping(23), dict(batch_size=5)),
]
in_workers = [
    (Skipping(37), dict(batch_size=5, num_workers=2)),
    (Numbers(23), dict(batch_size=5, num_workers=2, worker_init_fn=own_part, persistent_workers=True)),
    (Numbers(37), dict(batch_size=5, num_workers=3)),
    (Numbers(37), dict(batch_size=5, num_workers=2, drop_last=True)),
]
for data, options in cases if sys.argv[1] == "0" else in_workers[:2] if sys.argv[1] == "1" else in_workers[2:]:
    expected = plain(data, **options)
    loader = es.prepare(loader=DataLoader(data, **options), shares=uneven(es.world_size()))
    for epoch in range(2 if options.get("persistent_workers") or not options.get("num_workers") else 1):
        Skipping.drawn = 0
        mine = parts(loader)
        got = joined(mine)
        assert got == expected, (data, options, got, expected)
        if type(data) is Skipping and not options.get("num_workers"):
            assert Skipping.drawn <= sum(map(len, mine)) + 10, (Skipping.drawn, mine)
    if options.get("num_workers"):
        continue
    for batch in loader:  # left in its middle: the next one begins anew
        break
    assert joined(parts(loader)) == expected
    small = {**options, "batch_size": 2}
    value = es.evaluate(nn.Identity(), DataLoader(data, **small), lambda model, x: x)
    kept = [x for batch in plain(data, **small) for x in batch]
    assert options.get("drop_last") or abs(float(value[0]) - sum(kept) / len(kept)) < 1e-12, (value, kept)
shuffled = es.prepare(loader=DataLoader(Numbers(23, shuffled=True), batch_size=5), shares=uneven(es.world_size()))
orders = [[x for batch in joined(parts(shuffled)) for x in batch] for _ in range(2)]
assert all(sorted(one) == list(range(23)) for one in orders) and orders[0] != orders[1]
"""
)


@pytest.mark.parametrize("which", ["0", "1", pytest.param("2", marks=pytest.mark.more)])
def test_the_order_of_one_device(run_ranks: Callable[..., list[Any]], which: str) -> None:
    run_ranks(ORDER, ranks=2 if which == "1" else 3, args=(which,))


TRAINING = (
    BEGIN
    + """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader
import evenstep as es
from stream_cases import Numbers, Skipping, Stateful, joined, part, uneven

kind, workers, stop_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = {"stateful": Stateful(23), "shuffled": Numbers(23, shuffled=True), "skipping": Skipping(23)}[kind]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, num_workers=workers)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=uneven(int(os.environ["WORLD_SIZE"])))
seen = []
for epoch in es.epochs(2):
    for x in loader:
        seen.append(part(x))
        ((model(x / 10) - x.cos()) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == stop_at:
            es.checkpoint("kept")
            raise SystemExit(0)
seen = joined(seen)
if es.is_main():
    values = torch.cat([p.reshape(-1) for p in model.parameters()]).tolist()
    print("END " + json.dumps([es.step(), seen, values, Stateful.given]))
"""
)


def end_of(results: list[Any]) -> list[Any]:
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("END "))
    end: list[Any] = json.loads(line.removeprefix("END "))
    return end


@pytest.mark.parametrize(
    ("kind", "workers", "ranks"),
    [
        ("stateful", 2, (2, 3)),
        ("shuffled", 0, (3, 2)),
        pytest.param("stateful", 0, (2, 1), marks=pytest.mark.more),
        pytest.param("shuffled", 2, (2, 3), marks=pytest.mark.more),
        pytest.param("skipping", 2, (2, 3), marks=pytest.mark.more),
    ],
)
def test_goes_on_where_it_stood(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, kind: str, workers: int, ranks: tuple[int, int]
) -> None:
    environment = {"EVENSTEP_SEED": "5"}
    whole = end_of(run_ranks(TRAINING, ranks=1, args=(kind, str(workers), "-1"), env=environment))
    run_ranks(TRAINING, ranks=ranks[0], args=(kind, str(workers), "9"), env=environment)
    again = {**environment, "EVENSTEP_RESUME": str(tmp_path / "kept")}
    resumed = end_of(run_ranks(TRAINING, ranks=ranks[1], args=(kind, str(workers), "-1"), env=again))
    assert resumed[0] == whole[0]
    assert resumed[1] == whole[1][9:]
    assert resumed[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)
    if kind == "stateful" and workers == 0:
        assert resumed[3] < whole[3] / 2 + 5  # nothing was drawn again


WRONG = (
    BEGIN
    + """
import itertools, os, pickle, re
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es
from stream_cases import Numbers, Skipping, Stateful

class OwnPart(Numbers):
    def __iter__(self):
        rank = int(os.environ["RANK"])
        return itertools.islice(super().__iter__(), rank, None, int(os.environ["WORLD_SIZE"]))

class Liar(Skipping):
    def __iter__(self):
        iterator = super().__iter__()
        iterator.skip = lambda count: count + 1
        return iterator

def fails(words, work):
    try:
        work()
    except es.EvenstepError as error:
        assert re.search(words, str(error), re.S) and "fix: " in str(error), error
    else:
        raise AssertionError(f"no error: {words}")

def at(data, **options):
    \"\"\"A loader's state in the middle of an epoch, and a way to go on there in another.\"\"\"
    loader = es.prepare(loader=DataLoader(data, batch_size=5, **options))
    for _ in zip(range(2), loader):
        state = loader.state_dict()
    return pickle.loads(es.session().broadcast_bytes(pickle.dumps(state)))  # rank 0's, as in a checkpoint

def resume(state, data, **options):
    loader = es.prepare(loader=DataLoader(data, batch_size=5, **options))
    loader.load_state_dict(state)
    next(iter(loader))

model = nn.Linear(1, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(OwnPart(23), batch_size=5))
fails("see the samples in different orders.*whole stream", lambda: model(next(iter(loader))).mean().backward())
state = at(Numbers(23))
fails("does not give the samples of before the checkpoint: the first 2 batches of epoch 0 differ",
      lambda: resume(state, Numbers(23, shuffled=True)))
fails("does not give the samples", lambda: resume(state, Numbers(8)))
fails("in 1 workers.*this loader has 2", lambda: resume(state, Numbers(23), num_workers=2))
fails("is that of a stream", lambda: resume(state, TensorDataset(torch.arange(23.0))))
fails("is that of a map-style data set", lambda: resume(at(TensorDataset(torch.arange(23.0))), Numbers(23)))
fails("another stream: Numbers has no load_state_dict", lambda: resume(at(Stateful(23)), Numbers(23)))
fails(r"skip\\(\\d+\\) returned", lambda: list(es.prepare(loader=DataLoader(Liar(23), batch_size=5))))
fails("the training loader has no batch", lambda: list(es.prepare(loader=DataLoader(Numbers(0), batch_size=5))))
fails("the training loader has no batch",
      lambda: list(es.prepare(loader=DataLoader(Numbers(3), batch_size=5, drop_last=True))))
linear = nn.Linear(1, 1)
fails("which has no indices to draw",
      lambda: es.verify(linear, torch.optim.SGD(linear.parameters(), lr=0.1), DataLoader(Numbers(9), batch_size=5),
                        lambda m, x: m(x.float()).mean()))
"""
)


def test_wrong_streams(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(WRONG, ranks=2)


def test_streams_that_cannot_be_shared_out() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(es.EvenstepError, match="let the data set yield samples"):
        es.prepare(loader=DataLoader(Numbers(5), batch_size=None))
    with pytest.raises(es.EvenstepError, match="an IterDataPipe"):
        es.prepare(loader=DataLoader(IterableWrapper(range(5)), batch_size=2))


def test_what_is_left_of_shares() -> None:
    assert cut([3, 0, 2, 4], 9, True) == [3, 0, 2, 4]
    assert cut([3, 0, 2, 4], 6, True) == [3, 0, 2, 1]
    assert cut([3, 0, 2, 4], 6, False) == [3, 0, 3, 0]  # none has a single sample
    assert cut([3, 0, 2, 4], 4, False) == [4, 0, 0, 0]
    assert cut([3, 0, 2, 4], 1, False) == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", [Numbers, Skipping])
@pytest.mark.parametrize("total", [1, 2, 6, 7, 9, 12])
def test_no_single_sample_where_none_may_be(kind: type[Numbers], total: int) -> None:
    """Ranks of a model whose BatchNorm has each rank's statistics."""
    shares = (3, 0, 2, 4)
    parts: list[list[float]] = []
    for rank, share in enumerate(cut(shares, min(total, 9), False)):
        opening = Opening(0, 1, rank, 9, False, False, Begin())
        reply = StreamDataset(kind(total), list, None)[Task(1, True, -1, shares, 2, opening)]
        parts.append([float(x) for x in reply.batch] if share else [])
        assert len(reply.batch) == (share or min(2, total))  # dummies
    assert [x for part in parts for x in part] == [float(x) for x in range(min(total, 9))]


@pytest.mark.parametrize("kind", [Numbers, Skipping])
@pytest.mark.parametrize("total", [2, 4, 7, 9, 10])
def test_every_rank_has_a_sample_of_an_evaluation(kind: type[Numbers], total: int) -> None:
    """Also of its last batch, where there are enough; not where they were passed over before their number was known."""
    shares, parts = (5, 1, 2, 1), []
    for rank in range(4):
        opening = Opening(0, 1, rank, 9, False, False, Begin(), evaluates=True)
        reply = StreamDataset(kind(total), list, None)[Task(1, True, -1, shares, 1, opening)]
        plan = left(shares, min(total, 9), True, reply.everyone)
        parts.append([float(x) for x in reply.batch] if plan[rank] else [])
        assert len(reply.batch) == max(1, plan[rank])  # dummies
        assert plan[rank] or total < 4 or (kind is Skipping and total < 9)
    assert [x for part in parts for x in part] == [float(x) for x in range(min(total, 9))]


def test_what_samples_are_told_apart_by() -> None:
    image = torch.zeros(3, 32, 32)
    other = image.clone()
    other[1, 16:20] = 1
    samples = [image, other, image[:1], image.double(), 1, 1.0, "1", b"1", None, [1], {"a": 1}, {"a": 2}, image.numpy()]
    assert len({checksum(sample) for sample in samples}) == len(samples)
    assert checksum((image, 3)) == checksum([image.clone(), 3])


def test_outside_a_job_a_stream_stays_as_it_is() -> None:
    loader = DataLoader(Stateful(7), batch_size=3)
    assert es.prepare(loader=loader) is loader
    assert [batch.numel() for batch in loader] == [3, 3, 1]
