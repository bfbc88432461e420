"""States with tensors apart: they come back as they were, on other ranks and from a file; bytes of somebody else's run nothing."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep import EvenstepError, plain, state_apart

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def there_and_back(value: Any) -> Any:
    text, memories = state_apart.take_apart(value)
    return state_apart.put_together(text, [memory.clone() for memory in memories])


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_tensors_of_each_type(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(kind)
    got = there_and_back({"x": [tensor]})["x"][0]
    assert type(got) is torch.Tensor and got.dtype == kind and got.shape == tensor.shape
    assert torch.equal(
        got.view(torch.uint8) if kind.itemsize == 1 else got, tensor.view(torch.uint8) if kind.itemsize == 1 else tensor
    )


def test_tensors_come_back_as_they_lay() -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    whole = torch.arange(12.0)
    value = {"images": images, "parts": (whole[2:6], whole[5:].t()), "turned": whole.reshape(3, 4).t()[1:, ::2]}
    got = there_and_back(value)
    assert got["images"].stride() == images.stride() and torch.equal(got["images"], images)
    assert torch.equal(got["turned"], value["turned"]) and got["turned"].stride() == value["turned"].stride()
    got["parts"][0][3] = -1.0  # element 5 of what they share
    assert got["parts"][1][0] == -1.0
    one = torch.ones(1).expand(1000)
    assert state_apart.sizes_of(state_apart.take_apart(one)[0]) == [4]
    assert there_and_back(one).stride() == (0,)


def test_tensors_of_other_kinds() -> None:
    waves = torch.tensor([1 + 2j, 3j])
    assert torch.equal(there_and_back(waves.conj()), waves.conj())
    assert torch.equal(there_and_back(waves.conj().imag), torch.tensor([-2.0, -3.0]))
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got = there_and_back([weight, torch.ones(1, requires_grad=True)])
    assert type(got[0]) is torch.nn.Parameter and not got[0].requires_grad and got[1].requires_grad
    for sparse in (
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True),
        torch.zeros(3).to_sparse(),
    ):
        back = there_and_back(sparse)
        assert back.is_coalesced() == sparse.is_coalesced() and torch.equal(back.to_dense(), sparse.to_dense())


def test_values_around_them() -> None:
    value = {
        0: {
            "step": torch.tensor(3.0),
            "none": None,
            "words": "a\0ü",
            "pair": (0.9, True, b"x"),
            "size": torch.Size([2]),
        },
        "kinds": [
            OrderedDict(b=1, a=torch.ones(1)),
            Counter("aab"),
            {1, 2},
            1 + 2j,
            torch.bfloat16,
            torch.device("cpu"),
        ],
        (1, None): -(10**30),
    }
    got = there_and_back(value)
    assert repr(got) == repr(value)
    assert type(got["kinds"][0]) is OrderedDict and type(got["kinds"][1]) is Counter


class Tagged(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[], Any]] = {
    "an object": object,
    "code": lambda: {"x": lambda: 0},
    "a class of tensors": lambda: torch.ones(2).as_subclass(Tagged),
    "meta": lambda: torch.empty(2, device="meta"),
    "CSR": torch.eye(2).to_sparse_csr,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("what", OTHERS)
def test_other_things_are_refused(what: str) -> None:
    with pytest.raises(TypeError, match="cannot be told to other ranks"):
        state_apart.take_apart({"state": [OTHERS[what]()]})


class Halves(torch.Tensor):
    """Twice the tensor that it is around."""

    half: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor, why: str) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, half.shape, half.stride(), dtype=half.dtype)
        made.half, made.why = half, why  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["half"], (self.why,)  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, shape: torch.Size, strides: tuple[int, ...]) -> Halves:
        assert (shape, strides) == (parts["half"].shape, parts["half"].stride())
        return cls(parts["half"], *context)

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{call} of a tensor around another one")


def test_tensors_around_tensors_of_classes_that_were_marked() -> None:
    value = {"x": Halves(torch.arange(6.0).reshape(2, 3), "so")}
    with pytest.raises(TypeError, match=r"Halves of layout .* cannot be told to other ranks"):
        state_apart.take_apart(value)
    with torch.serialization.safe_globals([Halves]):
        text, memories = state_apart.take_apart(value)
        got = state_apart.put_together(text, memories)["x"]
    assert type(got) is Halves and torch.equal(got.half, value["x"].half) and got.why == "so"
    with pytest.raises(EvenstepError, match="cannot be read: KeyError"):
        state_apart.put_together(text, memories)


def lies(**others: Any) -> bytes:
    fields = {
        "memory": 0,
        "dtype": torch.float32,
        "shape": [2],
        "strides": [1],
        "offset": 0,
        "wants_gradient": False,
        "is_parameter": False,
    }
    return plain.dumps((state_apart.Dense(**{**fields, **others}), [8]))


HOSTILE = [
    pickle.dumps(print),
    plain.dumps("words"),
    plain.dumps((1, [-8])),
    plain.dumps((1, [2.0])),
    plain.dumps((1, [9])),
    lies(memory=1),
    lies(memory="0"),
    lies(shape=[3]),
    lies(shape=[1 << 40]),
    lies(shape=[-1]),
    lies(shape=2),
    lies(strides=[2]),
    lies(strides=[-1]),
    lies(strides=[1, 1]),
    lies(offset=1),
    lies(offset=-1),
    lies(dtype=torch.float64),
    lies(dtype="float32"),
    lies(dtype=torch.int64, wants_gradient=True, shape=[1]),
    json.dumps({"tuple": [{"own": ["evenstep.state_apart", "Dense", [0]]}, [8]]}).encode(),
    json.dumps({"tuple": [{"own": ["evenstep.state_apart", "Sparse", [0, 0, [2], True]]}, [8]]}).encode(),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_texts_of_somebody_else_are_an_error(text: bytes) -> None:
    with pytest.raises(EvenstepError, match="cannot be read"):
        state_apart.put_together(text, [torch.zeros(8, dtype=torch.uint8)])


def test_indices_outside_a_sparse_tensor_are_an_error() -> None:
    text, memories = state_apart.take_apart(torch.sparse_coo_tensor([[1]], [2.0], (4,), check_invariants=True))
    memories[0].view(torch.int64)[0] = 1 << 40
    with pytest.raises(EvenstepError, match="cannot be read"):
        state_apart.put_together(text, memories)


def test_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state"
    value = {"a": torch.randn(1000), "none": torch.empty(0), "b": [torch.arange(3), "words"]}
    state_apart.write(path, value)
    assert repr(state_apart.read(path)) == repr(value)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:20], whole[:4], b"", (1 << 62).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(EvenstepError, match="cannot be read"):
            state_apart.read(path)


# ---- rank 0's optimizer, at es.prepare ----

OPTIMIZERS = """
    import os, sys
    import torch
    from torch import nn
    import evenstep as es

    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 600), nn.Linear(600, 600))
    model = model.to(memory_format=torch.channels_last)
    table = nn.Embedding(5, 3, sparse=True)
    half = nn.Linear(4, 4).to(torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    sparse = torch.optim.SGD(table.parameters(), lr=1e-2, momentum=0.9)
    own = torch.optim.SGD(half.parameters(), lr=1e-2, momentum=0.9)
    plain = torch.optim.SGD(half.parameters(), lr=1e-2)  # has no state

    def step():
        model(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)).square().mean().backward()
        table(torch.tensor([1, 1, 4])).sum().backward()
        half(torch.randn(2, 4).bfloat16()).sum().backward()
        for one in (adam, sparse, own, plain):
            one.step()
        own.state[half.weight]["more"] = {"none": None, 3: [(2.5, True), torch.arange(3).bfloat16()]}  # torch casts other types

    if rank == 0:
        step()
    else:
        own.state[half.weight]["momentum_buffer"] = torch.ones(4, 4)  # is not to stay
    *_, adam, sparse, own, plain = es.prepare(model, table, half, adam, sparse, own, plain)
    assert len(plain.state) == 0
    states = [adam.state[p] for p in model.parameters()] + [sparse.state[table.weight], own.state[half.weight]]
    assert states[0]["exp_avg"].stride() == model[0].weight.stride()
    assert states[4]["exp_avg"].numel() * 4 > 1 << 20  # one that travels alone
    print("FOUND", states, flush=True)
    for state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                every = es.gather(value.to_dense().float().reshape(1, -1))
                assert torch.equal(every[0], every[1]) and len(every) == 2, key
"""


@pytest.mark.parametrize("engine", ["", "gloo"])
def test_optimizers_begin_with_rank_0s_state(run_ranks: Callable[..., list[Any]], engine: str) -> None:
    env = {"EVENSTEP_COMM_ENGINE": engine} if engine else {}
    first, second = run_ranks(OPTIMIZERS, env=env)
    found = [one.stdout.partition("FOUND")[2] for one in (first, second)]
    assert found[0] and found[0] == found[1]


def test_a_state_that_cannot_be_told_is_an_error_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    script = """
        import os
        import torch
        from torch import nn
        import evenstep as es

        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if os.environ["RANK"] == "0":
            optimizer.state[model.bias]["history"] = object()
        try:
            es.prepare(model, optimizer)
        except es.EvenstepError as error:
            print("ERROR", error, flush=True)
    """
    for rank in run_ranks(script):
        assert "the state of optimizer" in rank.stdout and "a builtins.object cannot be told" in rank.stdout
        assert "fix: keep numbers" in rank.stdout


UNTOLD = """
    import os, sys
    import torch
    import evenstep as es
    from evenstep.state_apart import CannotBeTold, broadcast_state

    what, rank = sys.argv[1], int(os.environ["RANK"])

    class Around(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)
            made.inner = inner
            return made

        def __tensor_flatten__(self):
            if what == "flatten":
                raise OSError("no such tensor")
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, parts, context, shape, strides):
            return cls(parts["inner"])

        @classmethod
        def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
            raise AssertionError(call)

    if rank == 0 or what != "unmarked":
        torch.serialization.add_safe_globals([Around])
    value = [Around(torch.ones(2))]
    if what == "deep":
        for _ in range(10000):
            value = [value]
    es.gather(torch.ones(1))  # finds the others
    try:
        broadcast_state(es.session().group, value if rank == 0 else None)
    except CannotBeTold as error:
        print("ERROR", error, flush=True)
    print(es.gather(torch.ones(1)).sum().item())
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("flatten", "ERROR OSError: no such tensor"),
        ("deep", "ERROR RecursionError: "),
        ("unmarked", "ERROR rank 1: a state cannot be read: KeyError: '__main__.Around'"),
    ],
)
def test_whatever_keeps_a_rank_from_telling_or_reading_is_an_error_on_all(
    run_ranks: Callable[..., list[Any]], what: str, words: str
) -> None:
    for rank in run_ranks(UNTOLD, args=(what,)):
        assert words in rank.stdout and rank.stdout.endswith("2.0\n"), rank.stdout
