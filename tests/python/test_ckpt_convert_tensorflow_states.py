"""Optimizers' states in TensorFlow's checkpoints: by graphs of objects put together here as trackable_object_graph.proto says, and there and back.
By TensorFlow itself: test_formats_elsewhere.py."""

from __future__ import annotations

import pathlib
import random
import struct
from typing import Any

import pytest
import torch
from test_ckpt_convert_tensorflow import convert, entry, masked

from evenstep.convert_contents import Contents, Optimizer, Refused, numbered
from evenstep.convert_formats import read
from evenstep.convert_tensorflow import write_folder
from evenstep.convert_tensorflow_table import make_table, write_field, write_varint

GRAPH = b"_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
Slot = tuple[int, str, int]


def node(children: dict[str, int], key: str = "", name: str = "", slots: tuple[Slot, ...] = ()) -> bytes:
    out = b"".join(write_field(1, write_field(1, at) + write_field(2, word.encode())) for word, at in children.items())
    if key:
        words = (b"VARIABLE_VALUE", name.encode(), (key + VALUE).encode())
        out += write_field(2, b"".join(write_field(1 + i, word) for i, word in enumerate(words)))
    for variable, word, state in slots:
        out += write_field(3, write_field(1, variable) + write_field(2, word.encode()) + write_field(3, state))
    return write_field(1, out)


def text(word: bytes, offset: int) -> tuple[bytes, bytes]:
    """A tensor of text of one word: what lies in the file, and its entry, whose checksum is of the length as four bytes."""
    length = struct.pack("<I", len(word))
    data = write_varint(len(word)) + masked(length) + word
    size = write_varint(4 << 3) + write_varint(offset) + write_field(5, len(data))
    return data, b"\x08\x07\x12\x00" + size + b"\x35" + masked(length + masked(length) + word)


def write(folder: pathlib.Path, values: dict[str, torch.Tensor], nodes: list[bytes] | None) -> pathlib.Path:
    data = b""
    table = {b"": b"\x08\x01\x1a\x02\x08\x01"}
    for key, value in values.items():
        part = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        code = {torch.float32: 1, torch.int64: 9}[value.dtype]
        table[(key + (VALUE if nodes else "")).encode()] = entry(code, list(value.shape), part, len(data))
        data += part
    if nodes:
        part, table[GRAPH] = text(b"".join(nodes), len(data))
        data += part
    folder.mkdir(exist_ok=True)
    (folder / "ckpt.index").write_bytes(make_table(table))
    (folder / "ckpt.data-00000-of-00001").write_bytes(data)
    return folder / "ckpt"


def keras_3(folder: pathlib.Path) -> tuple[pathlib.Path, torch.Tensor]:
    """The shortest way to a trained weight is by the optimizer, whose own variables are numbered."""
    kernel = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values = {
        "optimizer/_trainable_variables/0": kernel,
        "model/mean": torch.tensor([5.0]),
        "optimizer/_variables/2": kernel * 10,
        "optimizer/_variables/3": kernel * 100,
        "optimizer/_iterations": torch.tensor(7),
        "optimizer/_learning_rate": torch.tensor(0.25),
        "save_counter": torch.tensor(1),
    }
    nodes = [
        node({"model": 1, "optimizer": 2, "save_counter": 11}),
        node({"optimizer": 2, "layer": 3, "mean": 12}),
        node({"_iterations": 4, "_learning_rate": 5, "_momentums": 6, "_velocities": 7, "_trainable_variables": 8}),
        node({"a/b.c": 13}),
        node({}, "optimizer/_iterations", "adam/iteration"),
        node({}, "optimizer/_learning_rate", "adam/learning_rate"),
        node({"0": 9}),
        node({"0": 10}),
        node({"0": 13}),
        node({}, "optimizer/_variables/2", "adam/dense_kernel_momentum"),
        node({}, "optimizer/_variables/3", "adam/dense_kernel_velocity"),
        node({}, "save_counter", "save_counter"),
        node({}, "model/mean", "dense/mean"),
        node({}, "optimizer/_trainable_variables/0", "dense/kernel"),
    ]
    return write(folder, values, nodes), kernel


def test_weights_under_the_optimizers_name_are_the_models(tmp_path: pathlib.Path) -> None:
    prefix, kernel = keras_3(tmp_path)
    found = read(prefix)
    name = "model/layer/a.Sb..c"  # as TensorFlow writes "a/b.c" in keys
    assert set(found.model()) == {name, "model/mean"} and torch.equal(found.model()[name], kernel)
    adam = found.optimizers["optimizer"]
    assert adam.class_name == "Adam" and adam.members == [[name]] and adam.groups[0]["lr"] == 0.25
    assert found.step == 7 and adam.state[name]["step"].item() == 7
    assert torch.equal(adam.state[name]["exp_avg"], kernel * 10)
    assert torch.equal(adam.state[name]["exp_avg_sq"], kernel * 100)
    assert [line.split("'")[1] for line in found.left] == ["save_counter" + VALUE]


@pytest.mark.parametrize("keras", [False, True])
def test_slots_of_the_graph(tmp_path: pathlib.Path, keras: bool) -> None:
    """Momentum of Keras has the learning rate in it, and goes the other way; of tf.compat.v1.train it is torch's."""
    weight, momentum = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 4.0])
    values = {"w": weight, "w/.OPTIMIZER_SLOT/o/momentum": momentum}
    values |= {"o/iter": torch.tensor(5), "o/learning_rate": torch.tensor(0.5)} if keras else {}
    optimizer = {"iter": 4, "learning_rate": 5} if keras else {}
    nodes = [
        node({"o": 1, "w": 2}),
        node(optimizer, slots=((2, "momentum", 3),)),
        node({}, "w", "w"),
        node({}, "w/.OPTIMIZER_SLOT/o/momentum", "w/Momentum"),
        node({}, "o/iter", "iter"),
        node({}, "o/learning_rate", "learning_rate"),
    ]
    found = read(write(tmp_path, values, nodes if keras else nodes[:4]))
    assert list(found.model()) == ["w"]
    sgd = found.optimizers["optimizer"]
    assert (
        sgd.class_name == "SGD" and sgd.groups[0]["momentum"] == 0.9
    )  # not in the file: none would leave the states unused
    assert torch.equal(sgd.state["w"]["momentum_buffer"], momentum / -0.5 if keras else momentum)
    assert (found.step, sgd.groups[0]["lr"]) == ((5, 0.5) if keras else (None, 0.001))
    assert any("and momentum 0.9" in note for note in found.notes)


def test_an_optimizer_that_torch_has_not_is_listed(tmp_path: pathlib.Path) -> None:
    values = {"w": torch.ones(2), "w/.OPTIMIZER_SLOT/o/linear": torch.ones(2)}
    nodes = [
        node({"o": 1, "w": 2}),
        node({}, slots=((2, "linear", 3),)),
        node({}, "w", "w"),
        node({}, "w/.OPTIMIZER_SLOT/o/linear", "w/Ftrl_1"),
    ]
    found = read(write(tmp_path, values, nodes))
    assert list(found.model()) == ["w"] and not found.optimizers
    assert found.left == ["'o': an optimizer without states, with none that torch has, or of unclear weights"]


def test_a_state_that_is_not_of_its_weights_shape_is_not_taken(tmp_path: pathlib.Path) -> None:
    values = {"w": torch.ones(2), "w/.OPTIMIZER_SLOT/o/momentum": torch.ones(3)}
    nodes = [
        node({"o": 1, "w": 2}),
        node({}, slots=((2, "momentum", 3),)),
        node({}, "w", "w"),
        node({}, "w/.OPTIMIZER_SLOT/o/momentum", "w/Momentum"),
    ]
    found = read(write(tmp_path, values, nodes))
    assert not found.optimizers and len(found.left) == 1
    plain = {"w": torch.ones(2), "w/Momentum": torch.ones(3)}
    assert set(read(write(tmp_path, plain, None)).model()) == {"w", "w/Momentum"}


def test_names_of_savers_states(tmp_path: pathlib.Path) -> None:
    weight = torch.tensor([[1.0, 2.0]])
    values = {"d/kernel": weight, "d/kernel/Adam": weight * 2, "d/kernel/Adam_1": weight * 3, "Adam": torch.ones(1)}
    powers = {"beta1_power": torch.tensor(0.9**13), "beta2_power": torch.tensor(0.999**13)}
    found = read(write(tmp_path, {**values, **powers, "global_step": torch.tensor(20)}, None))
    assert set(found.model()) == {"d/kernel", "Adam"} and found.step == 20
    state = found.optimizers["optimizer"].state["d/kernel"]
    assert torch.equal(state["exp_avg"], weight * 2) and torch.equal(state["exp_avg_sq"], weight * 3)
    assert state["step"].item() == 12  # of the powers: this optimizer's own
    powers["beta1_power"] = torch.tensor(0.8**13)  # not 0.9: the powers do not tell
    found = read(write(tmp_path, {**values, **powers, "global_step": torch.tensor(20)}, None))
    assert found.optimizers["optimizer"].state["d/kernel"]["step"].item() == 20
    own = {"d/kernel": weight, "d/kernel/adam_m": weight * 2, "d/kernel/adam_v": weight * 3}  # BERT's
    state = read(write(tmp_path, own, None)).optimizers["optimizer"].state["d/kernel"]
    assert torch.equal(state["exp_avg"], weight * 2) and torch.equal(state["exp_avg_sq"], weight * 3)
    half = {"d/kernel": weight, "d/kernel/Adam": weight * 2}  # one of two: no states of Adam's
    found = read(write(tmp_path, half, None))
    assert set(found.model()) == {"d/kernel", "d/kernel/Adam"} and not found.optimizers


SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.25, **SETTINGS[name])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    saved = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "step": 3}
    torch.save(saved, tmp_path / "in.pt")
    told = convert(tmp_path / "in.pt", tmp_path / "tf", "tensorflow")
    assert not any("optimizer" in line for line in told["left"])
    back = read(tmp_path / "tf")
    assert {key: value.tolist() for key, value in back.model().items()} == {
        key: value.tolist() for key, value in model.state_dict().items()
    }
    found = back.optimizers["optimizer"]
    assert back.step == 3 and found.class_name == name.replace("AdamW", "Adam")
    ours = dict(zip([key for key, _ in model.named_parameters()], optimizer.state_dict()["state"].values()))
    for key, state in ours.items():
        wanted = {what: value.tolist() for what, value in state.items()}
        have = {what: value.tolist() for what, value in found.state[key].items()}
        if name == "RMSprop":  # momentum there has a learning rate in it that the file does not tell
            wanted.pop("momentum_buffer")
        assert have == wanted


def test_states_of_other_kinds_are_left_and_listed(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adamax(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "in.pt"
    )
    told = convert(tmp_path / "in.pt", tmp_path / "tf", "tensorflow")
    assert sum("the states of optimizer" in line for line in told["left"]) == 1
    assert set(read(tmp_path / "tf").model()) == set(model.state_dict())


def test_any_graph_is_refused_or_read(tmp_path: pathlib.Path) -> None:
    """Altered behind the checksums, and the text itself altered: nothing but Refused, and never other weights."""
    prefix, kernel = keras_3(tmp_path / "whole")
    data = (tmp_path / "whole/ckpt.data-00000-of-00001").read_bytes()
    (tmp_path / "whole/ckpt.data-00000-of-00001").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Refused, match="the graph of its objects is altered"):
        read(prefix)
    chance = random.Random(11)
    values = {"w": kernel, "w/.OPTIMIZER_SLOT/o/momentum": kernel}
    good = node({"o": 1, "w": 2}) + node({}, slots=((2, "momentum", 3),)) + node({}, "w", "w")
    good += node({}, "w/.OPTIMIZER_SLOT/o/momentum", "w/Momentum")
    refused = 0
    for _ in range(400):
        altered = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            begin = chance.randrange(len(altered))
            altered[begin : begin + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        try:
            found = read(write(tmp_path / "altered", values, [bytes(altered)]))
        except Refused:
            refused += 1
            continue
        assert all(torch.equal(value, kernel) for value in found.model().values())
    assert 100 < refused < 400


def by_ends(folder: pathlib.Path, names: tuple[str, str], **also: int) -> pathlib.Path:
    """Keras 2.11 to 2.15, with a learning-rate schedule: two weights under those names; lists with a gap at their second places."""
    values = {key: torch.full((2,), float(i)) for i, key in enumerate(("a", "b", "o/_variables/1", "o/_variables/2"))}
    values |= {f"o/_variables/{i}": torch.full((2,), float(i)) for i in (3, 4)}
    values |= {"o/_iterations": torch.tensor(7), "o/ema": torch.ones(2)}
    nodes = [
        node({"gen_opt": 1, "a": 2, "b": 3}),
        node({"_iterations": 4, "_momentums": 5, "_velocities": 6, "ema": 11, **also}),
        node({}, "a", names[0]),
        node({}, "b", names[1]),
        node({}, "o/_iterations", "iteration"),
        node({"0": 7, "2": 9}),
        node({"0": 8, "2": 10}),
        node({}, "o/_variables/1", f"Adam/m/{names[0]}"),
        node({}, "o/_variables/2", f"Adam/v/{names[0]}"),
        node({}, "o/_variables/3", f"Adam/m/{names[1]}"),
        node({}, "o/_variables/4", f"Adam/v/{names[1]}"),
        node({}, "o/ema", "ema"),
        node({"inner_optimizer": 1, "scale": 13}),
        node({}, "o/scale", "scale"),
    ]
    if also:  # a loss scale's optimizer around it
        nodes[0], values["o/scale"] = node({"optimizer": 12, "a": 2, "b": 3}), torch.ones(1)
    return write(folder, values, nodes)


def listed(lines: list[str]) -> set[str]:
    return {line.split("'")[1].removesuffix(VALUE) for line in lines}


def test_an_optimizer_with_a_schedule_and_gaps_is_taken(tmp_path: pathlib.Path) -> None:
    found = read(by_ends(tmp_path, ("d/kernel", "e/kernel")))
    assert set(found.model()) == {"a", "b"} and found.step == 7
    states = found.optimizers["optimizer"].state
    kinds = ("exp_avg", "exp_avg_sq")
    assert [states[name][kind][0].item() for name in "ab" for kind in kinds] == [2, 3, 3, 4]
    assert listed(found.left) == {"o/ema"}  # what is not taken is told


def test_states_of_weights_under_one_name_are_listed(tmp_path: pathlib.Path) -> None:
    found = read(by_ends(tmp_path, ("d/kernel", "d/kernel")))
    assert set(found.model()) == {"a", "b"} and not found.optimizers and found.step == 7
    assert listed(found.left) == {"gen_opt"}
    found = read(by_ends(tmp_path, ("d/kernel", "other/d/kernel")))
    assert found.optimizers["optimizer"].state["b"]["exp_avg"].tolist() == [3.0, 3.0]


def test_of_an_optimizer_around_another_only_its_own_is_listed(tmp_path: pathlib.Path) -> None:
    found = read(by_ends(tmp_path, ("d/kernel", "e/kernel"), unused=11))
    assert set(found.optimizers["optimizer"].state) == {"a", "b"}
    assert listed(found.left) == {"o/ema", "o/scale"}


@pytest.mark.parametrize("steps", [12, 800, 1000, 50_000])
def test_steps_of_powers(tmp_path: pathlib.Path, steps: int) -> None:
    """As 32 bits have them: the first one loses its digits at some 800 steps and stays at a few of the smallest numbers."""
    weight, first = torch.ones(2), torch.tensor(max(0.9 ** (steps + 1), 5.6e-45))
    values = {"w": weight, "w/Adam": weight, "w/Adam_1": weight, "beta1_power": first}
    found = read(write(tmp_path, {**values, "beta2_power": torch.tensor(0.999 ** (steps + 1))}, None))
    assert list(found.model()) == ["w"]
    assert found.optimizers["optimizer"].state["w"]["step"].item() == pytest.approx(steps, rel=1e-4)
    found = read(write(tmp_path, {**values, "beta2_power": torch.tensor(0.5)}, None))
    assert found.optimizers["optimizer"].state["w"]["step"].item() == 0 and "cannot be told" in found.notes[1]


def test_powers_of_very_many_steps(tmp_path: pathlib.Path) -> None:
    tensors = {name: torch.ones(2) for name in ("w", "w/Adam", "w/Adam_1")}
    tensors |= {name: torch.tensor(0.0) for name in ("beta1_power", "beta2_power")}
    found = read(write(tmp_path, tensors, None))
    assert found.optimizers["optimizer"].state["w"]["step"].item() == 90_000 and found.step is None
    found = read(write(tmp_path, {**tensors, "global_step": torch.tensor(123_456)}, None))
    assert found.optimizers["optimizer"].state["w"]["step"].item() == 123_456


def test_two_adams_of_one_model(tmp_path: pathlib.Path) -> None:
    """As tf.compat.v1 numbers them; of a weight that the model has not, or not of that shape, no state is written."""
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    optimizers = {
        numbered("optimizer", i): Optimizer(
            [{"lr": 0.1, "betas": (0.9, 0.999)}], [[name, "none"]], {name: {**state, "step": torch.tensor(3.0 + i)}}
        )
        for i, name in enumerate(("a", "b"))
    }
    optimizers["optimizer_1"].state["none"] = {**state, "step": torch.tensor(4.0)}
    optimizers["optimizer_1"].state["c"] = {**state, "step": torch.tensor(4.0)}
    model = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(3)}
    contents = Contents("made", {"model": model}, optimizers=optimizers)
    write_folder(contents, tmp_path)
    assert listed(contents.left) == {"none", "c"}
    found = read(tmp_path)
    assert set(found.model()) == {"a", "b", "c"} and set(found.optimizers["optimizer"].state) == {"a", "b"}
    assert listed(found.left) == {"beta1_power_1"}
