"""Every wrong use of es.prepare and its companions ends with one clear error that says what to do."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import evenstep as es
from evenstep.agreement import _comparable, _difference, _options
from evenstep.device_places import Place
from evenstep.embeddings import check_embeddings
from evenstep.engine import EngineOptions
from evenstep.engine_choice import choose_engine
from evenstep.environment import read_environment
from evenstep.order import batch_hash, epoch_seed
from evenstep.vote import Ballot, check, unpack


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def numbers(count: int = 8, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(count))), **options)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class NoLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter(())


def test_outside_a_job_everything_comes_back_unchanged() -> None:
    model = nn.Linear(2, 2)
    optimizer, loader = optimizer_of(model), numbers()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert es.prepare(optimizer, model, loader, scheduler) == (optimizer, model, loader, scheduler)
    assert es.prepare(loader) is loader
    assert (es.rank(), es.world_size(), es.is_main()) == (0, 1, True)
    assert list(es.epochs(3)) == [0, 1, 2]
    assert es.reduce_mean(2.0) == 2.0
    before = es.step()
    with es.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert es.step() == before + 1
    assert es.evaluate(model, numbers(8, batch_size=3), lambda m, batch: batch[0]) == 3.5


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: (), TypeError, "needs something to prepare"),
        (lambda: (5,), TypeError, "argument 1 of es.prepare is a builtins.int"),
        (lambda: (nn.Linear(1, 1).parameters(),), TypeError, "fix: give model.parameters"),
        (lambda: (nn.ReLU(),), es.EvenstepError, "has no parameters"),
        (lambda: [nn.Linear(1, 1)] * 2, es.EvenstepError, "was prepared before"),
        (lambda: (optimizer_of(nn.Linear(1, 1)),), es.EvenstepError, "belong to no prepared model"),
        (lambda: (nn.DataParallel(nn.Linear(1, 1)),), TypeError, "give the model itself"),
        (lambda: (DataLoader(Stream(), batch_size=None),), es.EvenstepError, "batch_size=None, so its IterableDataset"),
        (lambda: (DataLoader(NoLength()),), es.EvenstepError, "a NoLength, has no length"),
        (lambda: (nn.Sequential(nn.ReLU(), nn.LazyLinear(2)),), es.EvenstepError, r"its '1\.weight' is lazy"),
        (lambda: (nn.Linear(1, 1, device="meta"),), es.EvenstepError, "its 'weight' is on the meta device"),
        (lambda: (OwnLoader(TensorDataset(torch.ones(3))),), es.EvenstepError, "has its own __iter__"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        es.prepare(*make())


def test_prepared_twice() -> None:
    model = nn.Linear(1, 1)
    es.prepare(model)
    with pytest.raises(es.EvenstepError, match=r"argument 1 of es\.prepare \(Linear\) was prepared before"):
        es.prepare(model)


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="choose 'shared' or 'torch'"):
        es.prepare(nn.Linear(1, 1), engine="fast")


def test_shares_without_a_training_loader() -> None:
    def shares(number: int, batch: int) -> list[int]:
        return [batch]

    with pytest.raises(ValueError, match="how training batches are split, but this call has train=False"):
        es.prepare(loader=numbers(), train=False, shares=shares)
    with pytest.raises(ValueError, match="this call has no DataLoader"):
        es.prepare(nn.Linear(1, 1), shares=shares)
    with pytest.raises(TypeError, match="give a function"):
        es.prepare(nn.Linear(1, 1), numbers(), shares=[1, 2])  # type: ignore[arg-type]
    es.prepare(nn.Linear(1, 1), numbers(), shares=shares)


class Elsewhere:
    """Ranks that cannot open one another's memory."""

    def shared(self, arena_bytes: int, purpose: str, **how: bool) -> None: ...


def test_shared_memory_that_cannot_be_had() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    places = [Place("cpu", host, "cpu", "") for host in ("one", "two")]
    arguments: Any = (Elsewhere(), None, places, EngineOptions("shared"), None)
    with pytest.raises(
        es.EvenstepError, match=r"cannot open one another's memory.*\n  fix: start all ranks on one host"
    ):
        choose_engine(parameters, *arguments)


class First:
    rank = 0


def test_an_engine_for_gpus_that_nobody_has_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = (Elsewhere(), First(), [Place("cpu", "one", "cpu", "")], EngineOptions("shared"), None)
    monkeypatch.setenv("EVENSTEP_DEVICE_ENGINE", "evenstep")
    with pytest.warns(UserWarning, match="EVENSTEP_DEVICE_ENGINE=evenstep counts for nothing here"):
        with pytest.raises(es.EvenstepError, match="cannot open one another's memory"):
            choose_engine(list(nn.Linear(1, 1).parameters()), *arguments)
    monkeypatch.setenv("EVENSTEP_DEVICE_ENGINE", "fast")
    with pytest.raises(es.EvenstepError, match="EVENSTEP_DEVICE_ENGINE is 'fast'; choose 'torch' or 'evenstep'"):
        choose_engine(list(nn.Linear(1, 1).parameters()), *arguments)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK is 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks go from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"EVENSTEP_POLICY": "best"}, "choose one of auto, equal, proportional, dynamic, hybrid"),
        ({"RANK": "0", "WORLD_SIZE": "2", "EVENSTEP_SPEEDS": "1,-1"}, "needs 2 positive numbers"),
        ({"EVENSTEP_CHECKPOINT_EVERY": "often"}, "seconds"),
    ],
)
def test_wrong_environment(variables: dict[str, str], words: str) -> None:
    with pytest.raises(es.EvenstepError, match=words):
        read_environment(variables)


def test_launcher_without_address() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    code = "import evenstep as es; from torch import nn; es.prepare(nn.Linear(1, 1))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0 and "MASTER_ADDR and MASTER_PORT are not" in ended.stderr


def ballot(**changes: Any) -> Ballot:
    values: dict[str, Any] = dict.fromkeys(Ballot.__dataclass_fields__, 0) | {"weight": 0.5} | changes
    return Ballot(**values)


def test_a_ballot_survives_its_record() -> None:
    one = ballot(checksum=2**64 - 1, fired=2**63, busy_seconds=1.25, batches=3)
    assert unpack(one.pack()) == one


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("batches", "drawn different numbers of batches: rank 2 differs"),
        ("checksum", "see the samples in different orders, or split them differently: rank 2 differs"),
        ("step", "optimizer.step"),
        ("enabled", "no_sync"),
        ("backward", "call backward at different times"),
    ],
)
def test_the_vote_names_the_rank_that_differs(field: str, words: str) -> None:
    check([ballot(), ballot(), ballot()])
    with pytest.raises(es.EvenstepError, match=words):
        check([ballot(), ballot(), ballot(**{field: 1})])


def test_seeds_and_checksums() -> None:
    seeds = {epoch_seed(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500 and all(0 <= seed < 2**63 for seed in seeds)
    assert batch_hash([1, 2, 3]) != batch_hash([1, 3, 2])
    assert batch_hash(["a", ("b", 1)]) != batch_hash(["a", ("b", 2)])
    assert batch_hash([object()]) == batch_hash([object()])  # nothing to compare: the length alone


# What every rank is told, or each of the two.
MISUSES: dict[str, tuple[str, str | tuple[str, str]]] = {
    "other model": (
        "model = nn.Linear(2, 2 + rank)\nes.prepare(model)",
        "model 'model' of rank 1 differs from rank 0's: its 'weight' is",
    ),
    "other optimizer": (
        "model = nn.Linear(2, 2)\nes.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank))",
        "optimizer 'optimizer' of rank 1 differs from rank 0's: in parameter group 0 its 'lr' is 1.1, where rank 0 has 0.1",
    ),
    "optimizer of another class": (
        "model = nn.Linear(2, 2)\nes.prepare(model, [torch.optim.SGD, torch.optim.Adagrad][rank](model.parameters(), lr=0.1))",
        r"it is a torch\.optim\.adagrad\.Adagrad, rank 0's a torch\.optim\.sgd\.SGD",
    ),
    "other order": (
        "from torch.utils.data import Sampler\n"
        "class Own(Sampler):\n"
        "    def __len__(self): return 8\n"
        "    def __iter__(self): return iter(range(rank, 8 + rank))\n"
        "data = TensorDataset(torch.arange(20.0)[:, None])\n"
        "model = nn.Linear(1, 1)\n"
        "model, loader = es.prepare(model, DataLoader(data, batch_size=4, sampler=Own()))\n"
        "for (x,) in loader: model(x).sum().backward()",
        "the ranks see the samples in different orders, or split them differently: rank 1 differs",
    ),
    "a sampler without batches": (
        "model, loader = es.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(3)), batch_sampler=iter([])))\n"
        "for batch in loader: pass",
        r"the training loader has no batch: 3 samples(.|\n)*a sampler that is used up before es\.prepare, build anew",
    ),
    "shared memory for complex numbers": (
        "es.prepare(nn.Linear(1, 1, dtype=torch.complex64), engine='shared')",
        r"engine='shared'\): the model has parameters of torch\.complex64, which",
    ),
    "thawed later": (
        "model = nn.Linear(2, 2)\nmodel.bias.requires_grad_(False)\nes.prepare(model)\nmodel.bias.requires_grad_(True)\n"
        "model(torch.ones(1, 2)).sum().backward()",
        "parameter 'bias' of model 'model' was frozen when es.prepare saw it",
    ),
    "embeddings that look at their own rows": (
        "es.prepare(nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True), nn.EmbeddingBag(4, 2, max_norm=1.5)))",
        (
            r"embedding '0' of model 'model' has scale_grad_by_freq(.|\n)*embedding '1' of model 'model' has max_norm=1\.5",
            r"fix: build it without max_norm, and once .*: 1\.weight\.renorm_\(2, 0, 1\.5\)",
        ),
    ),
    "rank 1 stops in backward": (
        "model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\nes.prepare(model)\n"
        "def fail(g): raise ValueError('mine')\n"
        "h = model[0](torch.ones(1, 2))\n"
        "if rank: h.register_hook(fail)\n"
        "try: model[1](h).sum().backward()\n"
        "except ValueError as error: raise SystemExit(str(error))",
        ("another rank's backward failed: .*EVEN_ERR_REVOKED", "mine"),
    ),
    "rank 1 fails before its first gradient and goes on": (
        "import pathlib, time\n"
        "model = nn.Linear(2, 2)\nes.prepare(model)\n"
        "class Fails(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): raise ValueError('mine')\n"
        "y = model(torch.ones(1, 2))\n"
        "if rank:\n"
        "    try: Fails.apply(y).sum().backward()\n"
        "    except ValueError: pass\n"
        "    while not pathlib.Path('rank 0 knows').exists(): time.sleep(0.01)\n"
        "    raise SystemExit('waited for rank 0')\n"
        "try: y.sum().backward()\n"
        "finally: pathlib.Path('rank 0 knows').touch()",
        ("backward failed on rank 1, not on rank 0", "waited for rank 0"),
    ),
    "no samples": (
        "loader = es.prepare(DataLoader(TensorDataset(torch.ones(0)), batch_size=4))\nlist(loader)",
        "the training loader has no batch: 0 samples, batch_size 4, drop_last False",
    ),
    "fewer samples than a batch": (
        "loader = es.prepare(DataLoader(TensorDataset(torch.ones(3)), batch_size=4, drop_last=True))\nlist(loader)",
        "the training loader has no batch: 3 samples, batch_size 4, drop_last True",
    ),
    "no samples to evaluate": (
        "es.evaluate(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(0))), None)",
        "es.evaluate: the loader has no samples",
    ),
    "a batch smaller than the ranks": (
        "list(es.prepare(DataLoader(TensorDataset(torch.ones(3)))))",
        "the global batch of 1 is smaller than the 2 ranks",
    ),
    "parameters added later": (
        "model = nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nes.prepare(model, optimizer)\n"
        "model.late = nn.Linear(2, 2)\noptimizer.add_param_group({'params': list(model.late.parameters())})\n"
        "model.late(model(torch.ones(1, 2))).sum().backward()\noptimizer.step()",
        r"the SGD has got parameters since es\.prepare \(late\.weight, late\.bias\)",
    ),
    "a step after no_sync": (
        "model = nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nes.prepare(model, optimizer)\n"
        "with es.no_sync(): model(torch.ones(1, 2)).sum().backward()\noptimizer.step()",
        r"fix: leave the last backward before the step outside es\.no_sync",
    ),
    "wrong shares": (
        "data = TensorDataset(torch.arange(20.0))\nlist(es.prepare(DataLoader(data, batch_size=4), shares=lambda n, b: [b, 1]))",
        r"the share schedule \S+ \(\S+:\d+\) gave \[4, 1\]",
    ),
    "no_sync with a stranger": (
        "es.prepare(nn.Linear(1, 1))\nwith es.no_sync(nn.Linear(1, 1)): pass",
        "that es.prepare has not prepared",
    ),
    "evaluation of a training loader": (
        "loader = es.prepare(DataLoader(TensorDataset(torch.ones(4)), batch_size=2))\nes.evaluate(nn.Linear(1, 1), loader, None)",
        "was given a training loader",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_in_a_job(run_ranks: Callable[..., list[Any]], name: str) -> None:
    code, words = MISUSES[name]
    head = (
        "import os, torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "import evenstep as es\nrank = int(os.environ['RANK'])\n"
    )
    results = run_ranks(head + code, ranks=2, check=False)
    for result, told in zip(results, (words, words) if isinstance(words, str) else words):
        assert result.returncode != 0 and re.search(told, result.stderr), results


def test_embeddings_whose_rows_shrink_only_where_ranks_differ_anyway() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    check_embeddings("m", model, apart=True, exact=False, tells=True)
    with pytest.raises(es.EvenstepError, match="embedding '0' of model 'm' has max_norm=1: "):
        check_embeddings("m", model, apart=False, exact=False, tells=True)
    model.requires_grad_(False)
    check_embeddings("m", model, apart=False, exact=False, tells=True)
    with pytest.raises(es.EvenstepError, match="has max_norm"):
        check_embeddings("m", model, apart=False, exact=True, tells=True)
    theirs = nn.Sequential(nn.Linear(1, 1))
    theirs.original_name = "Embedding"  # a scripted one's class
    check_embeddings("m", theirs, apart=False, exact=True, tells=True)


def test_a_batch_that_fails_on_all_ranks_may_be_skipped(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            raise ValueError("mine")

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    es.prepare(model)
    x = torch.full((1, 2), es.rank() + 1.0)
    for number in range(4):
        y = model(x)
        try:
            (Fails.apply(y) if number % 2 else y).sum().backward()
        except ValueError:
            es.print("skipped", number)
    print("gradient", model.weight.grad.tolist())
    """
    results = run_ranks(code, ranks=2)
    assert "skipped 1\nskipped 3\n" in results[0].stdout
    for result in results:  # two passes of the mean of 1 and 2
        assert "gradient [[3.0, 3.0], [3.0, 3.0]]" in result.stdout


@pytest.mark.parametrize("value", [float("nan"), 1, None, (0.9, 0.99), torch.ones(3), {"a": [1]}, print, nn.ReLU()])
def test_an_option_agrees_with_itself(value: Any) -> None:
    assert _comparable(value) == _comparable(copy.deepcopy(value))


def test_options_that_only_say_how_to_compute_may_differ() -> None:
    model = nn.Linear(1, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=lr, foreach=f) for lr, f in ((0.1, True), (0.1, False)))
    assert _difference(_options(one), _options(other)) == ""
    one.param_groups[0]["lr"] = torch.tensor(0.25)
    other.param_groups[0]["lr"] = torch.tensor(0.5)
    assert _difference(_options(one), _options(other)) == "in parameter group 0 its 'lr' is 0.25, where rank 0 has 0.5"
    one.param_groups[0]["lr"] = 0.5
    other.param_groups[0]["own"] = 1
    assert "rank 0 has an option 'own', which it lacks" in _difference(_options(one), _options(other))


@pytest.mark.parametrize("text", ["0", "0.5", "-1", "inf", "nan", "soon", "1000001"])
def test_a_time_limit_that_is_none(text: str) -> None:
    with pytest.raises(es.EvenstepError, match=f"EVENSTEP_TIMEOUT is '{text}'\n  fix: give seconds from 1 to 1000000"):
        read_environment({"EVENSTEP_TIMEOUT": text})


@pytest.mark.parametrize("hosts", [False, True])
def test_who_does_not_come_is_waited_for_as_long_as_was_said(run_ranks: Callable[..., Any], hosts: bool) -> None:
    apart = {rank: {"EVENSTEP_HOST_ID": "ab"[rank]} for rank in range(2)} if hosts else None  # over Gloo
    waits, _ = run_ranks(
        """
        import pathlib, time
        import torch
        import evenstep as es
        model = torch.nn.Linear(1, 1)
        es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if es.rank() == 0:
            try:
                es.barrier()
            except es.EvenstepError as error:
                print(error.status, flush=True)
        else:
            while "TIMEOUT" not in pathlib.Path("run_1_rank_0.out").read_text():
                time.sleep(0.01)
        """,
        2,
        env={"EVENSTEP_TIMEOUT": "12", **({"EVENSTEP_COMM_ENGINE": "gloo"} if hosts else {})},
        rank_env=apart,
    )
    assert waits.stdout == "EVEN_ERR_TIMEOUT\n"
