"""What ranks tell one another: any value of the known kinds comes back as it was; bytes of somebody else's build and run nothing."""

from __future__ import annotations

import ast
import json
import math
import pickle
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import EvenstepError, plain
from evenstep.device_places import Place
from evenstep.generation_told import Told

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())  # with half surrogate pairs, NUL
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.int64, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=30,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    got = plain.loads(plain.dumps(value))
    assert got == value
    assert repr(got) == repr(value)  # the kinds, too: 1 and True, lists and tuples, -0.0, the order of a dictionary


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_tensors_come_back_to_the_bit(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(kind)
    got = plain.loads(plain.dumps({"x": [tensor]}))["x"][0]
    assert got.dtype == kind and got.shape == tensor.shape and torch.equal(got, tensor)
    got.zero_()  # memory of its own, to write


def test_what_is_not_finite_and_parts_of_tensors() -> None:
    assert math.isnan(plain.loads(plain.dumps(float("nan")))) and plain.loads(plain.dumps(-math.inf)) == -math.inf
    part = torch.arange(12.0).reshape(3, 4).t()[1:, ::2]
    assert torch.equal(plain.loads(plain.dumps(part)), part)
    waves = torch.tensor([1 + 2j, 3j])
    assert torch.equal(plain.loads(plain.dumps([waves.conj(), waves.conj().imag]))[1], torch.tensor([-2.0, -3.0]))
    negative = plain.loads(plain.dumps(torch.tensor([-0.0, math.nan])))
    assert math.copysign(1, negative[0]) == -1 and negative[1].isnan()


def test_records_of_evenstep_and_numbers_of_numpy() -> None:
    values: list[Any] = [[0, 2], (1, 2, 3, True, False), 0, b"\0\xff", None, "cpu:0", {2: [0.5, None]}]
    told = Told._make(values[number % len(values)] for number in range(len(Told._fields)))
    got = plain.loads(plain.dumps(told))
    assert type(got) is Told and got == told
    place = Place(**dict.fromkeys(Place.__dataclass_fields__, "x"))
    assert plain.loads(plain.dumps([place])) == [place]
    number = plain.loads(plain.dumps(numpy.float32(0.1)))
    assert number == numpy.float32(0.1) and number.dtype == numpy.float32
    for some in ({"a", "b", None}, frozenset([1, (2, "x")])):
        assert plain.loads(plain.dumps(some)) == some and type(plain.loads(plain.dumps(some))) is type(some)
    both = numpy.complex64(1 + 2j)
    assert plain.loads(plain.dumps(both)) == both and plain.loads(plain.dumps(both)).dtype == both.dtype
    for made in (OrderedDict(b=1, a=2), Counter("aab")):
        assert repr(plain.loads(plain.dumps(made))) == repr(made)


class Custom:
    pass


@pytest.mark.parametrize("value", [Custom(), [Custom], lambda: 0, torch.eye(2).to_sparse(), {1: {2: Custom()}}])
def test_other_things_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be told to other ranks"):
        plain.dumps(value)


def test_an_integer_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be told to other ranks"):
        plain.dumps([10**5000])


def test_a_value_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="deep"):
        plain.dumps(value)


HOSTILE = [
    pickle.dumps(print),
    b"",
    b"{}",
    b"\xff",
    b"[" * 100_000,
    json.dumps({"own": ["os", "system", "true"]}).encode(),
    json.dumps({"own": ["evenstep.plain", "importlib", {"dict": []}]}).encode(),
    json.dumps({"own": ["evenstep.group", "Bootstrap", {"dict": []}]}).encode(),
    json.dumps({"own": ["evenstep.device_places", "Place", {"dict": [["other", 1]]}]}).encode(),
    json.dumps({"own": ["evenstep.nothing", "Place", {"dict": []}]}).encode(),
    json.dumps({"dtype": "load"}).encode(),
    json.dumps({"dtype": "onnx"}).encode(),
    json.dumps({"tensor": ["float32", [5, 3], ""]}).encode(),
    json.dumps({"tensor": ["float32", [-2, -2], "AAAAAAAAAAAAAAAAAAAAAA=="]}).encode(),
    json.dumps({"tensor": ["float32", [1 << 40], "AAAA"]}).encode(),
    json.dumps({"tensor": ["float32", [2], "AAAA"]}).encode(),
    json.dumps({"numpy": ["O", "x"]}).encode() + b"x",
    json.dumps({"set": [[1]]}).encode(),
    json.dumps({"tuple": [], "set": []}).encode(),
]


def test_nothing_of_torch_is_imported_by_a_name() -> None:
    with pytest.raises(EvenstepError, match="no type of torch's"):
        plain.loads(b'{"dtype":"_inductor"}')
    assert vars(torch).get("_inductor") is sys.modules.get("torch._inductor")


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_bytes_of_somebody_else_are_an_error(data: bytes) -> None:
    with pytest.raises(EvenstepError, match="cannot be read"):
        plain.loads(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 400))
def test_damaged_bytes_are_an_error_or_another_value(noise: bytes, at: int) -> None:
    data = plain.dumps({"a": (1, [2.5, b"xyz"], torch.arange(3)), "b": {None: torch.float16}})
    try:
        plain.loads(data[:at] + noise + data[at + len(noise) :])
    except EvenstepError:
        pass


PACKAGE = Path(plain.__file__).parent
OBJECTS = {
    f"{call}_{what}"
    for call in ("send", "recv", "broadcast", "scatter", "gather", "all_gather")
    for what in ("object", "object_list")
}
READS_FOREIGN_FILES = {  # of `ckpt convert`, which a user names; whatever else is in them is refused
    "convert_dcp.py": ["pickle.Unpickler"],  # one of its own, that knows DCP's records
    "convert_torch.py": ["torch.load(…, weights_only=True)"],
}
READS_ITS_OWN = {"sample_record.py": ["marshal.loads", "marshal.loads"]}  # in memory that processes of one user share


def reads_pickles(tree: ast.AST) -> list[str]:
    """What would build, or run, what others' bytes say."""
    found = []
    for node in ast.walk(tree):
        words = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        if words.rpartition(".")[2] in OBJECTS:
            found.append(words)  # torch's: pickles between ranks
        if words in ("pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle", "dill", "cloudpickle", "joblib"):
            found.append(words)
        if words in ("marshal.load", "marshal.loads", "shelve"):
            found.append(words)
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "_pickle", "marshal", "shelve"):
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            found += [ast.unparse(node) for one in node.names if one.name == "load"]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.serialization.load"):
            safe = {one.arg: ast.unparse(one.value) for one in node.keywords}.get("weights_only") == "True"
            found.append("torch.load(…, weights_only=True)" if safe else ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("np.load", "numpy.load")):
            found += [ast.unparse(node) for one in node.keywords if one.arg == "allow_pickle"]
    return found


def test_nothing_here_reads_pickles() -> None:
    """docs/fault-tolerance.md promises it, and says what the exceptions are."""
    found = {path.name: reads_pickles(ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.glob("*.py")}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == READS_FOREIGN_FILES | READS_ITS_OWN
    for bad in (
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
        "pickle.loads(b)",
        "torch.load(p)",
        "torch.load(p, weights_only=True)",
        "from torch import load",
        "marshal.loads(b)",
    ):
        assert reads_pickles(ast.parse(bad)), bad
