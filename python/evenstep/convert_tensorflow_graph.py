"""The graph of objects that a checkpoint of TensorFlow 2 holds beside its variables: which variable is a weight, which a state of an
optimizer, and of which weight. Names in the table do not say it: Keras 3 has the trained weights of a model under its optimizer's name, since
the way to each variable is the shortest one. Sources of the layout: TensorFlow's trackable_object_graph.proto, tensor_bundle.cc (text), the
checkpoints of tf.compat.v1.train, of Keras 2.10 (slots), 2.11 to 2.15 and 3 (lists of an optimizer's)."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import deque

from evenstep.convert_tensorflow_table import masked, read_fields, read_varint

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # behind the name of a variable of an object
GRAPH = b"_CHECKPOINTABLE_OBJECT_GRAPH"
# Keras's lists: what only that class has -> its lists as slots.
LISTS = {
    "RMSprop": ("_average_gradients", {"_velocities": "rms", "_average_gradients": "mg", "_momentums": "momentum"}),
    "SGD": ("momentums", {"momentums": "momentum"}),
    "Adadelta": ("_accumulated_grads", {"_accumulated_grads": "accum_grad", "_accumulated_delta_vars": "accum_var"}),
    "Adagrad": ("_accumulators", {"_accumulators": "accumulator"}),
    "Adam": ("_velocities", {"_momentums": "m", "_velocities": "v", "_velocity_hats": "vhat"}),
}
OTHER_LISTS = {"_u_product", "_linears", "_m", "_u"}  # of Nadam, Ftrl, Adamax
_OF_OPTIMIZERS = {"_learning_rate", *OTHER_LISTS, *(name for _, lists in LISTS.values() for name in lists)}
_PLACE = re.compile("[0-9]{1,9}")
_INSIDE = ("optimizer", "inner_optimizer")  # also where nothing else of the object says what it is: around another one


@dataclasses.dataclass
class Node:
    """An object: a variable where it has a key."""

    children: dict[str, int] = dataclasses.field(default_factory=dict)  # name here -> number
    key: str | None = None  # in the table
    full_name: str = ""  # as the variable itself is called
    slots: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)  # (variable, kind, state), by numbers

    def is_optimizer(self) -> bool:
        keras_2 = {"iter", "learning_rate"} <= self.children.keys()
        keras_3 = "_iterations" in self.children and bool(
            self.children.keys() & _OF_OPTIMIZERS
        )  # a schedule has no rate
        return bool(self.slots) or keras_2 or keras_3


@dataclasses.dataclass
class Graph:
    nodes: list[Node]
    optimizers: dict[int, str]  # number -> the way to it
    weights: dict[str, str]  # key in the table -> name: those that are found without an optimizer
    states: set[str]  # keys in the table: what only an optimizer has

    def weight_of(self, node: int) -> str | None:
        """The name of the weight that this object is."""
        return self.weights.get(self.nodes[node].key or "")

    def listed(self, node: int, name: str) -> dict[int, int]:
        """The objects of a list, by their places, of which some may be empty; none where there is no list of that name."""
        at = self.nodes[node].children.get(name)
        children = {} if at is None else self.nodes[at].children
        return {int(place): child for place, child in children.items() if _PLACE.fullmatch(place)}

    def keys_of(self, optimizer: int) -> set[str]:
        """Of its states in the table, and of what else it alone has; not those of an optimizer that it is around."""
        seen, waiting = {optimizer}, [optimizer]
        while waiting:
            node = self.nodes[waiting.pop()]
            more = {*node.children.values(), *(state for _, _, state in node.slots)} - seen - self.optimizers.keys()
            seen |= more
            waiting += more
        return {self.nodes[one].key or "" for one in seen} & self.states


def text_of(data: bytes, crc: int) -> bytes:
    """The one word of a tensor of text: its length, a checksum of that, and itself. crc: of the tensor. Raises ValueError."""
    size, at = read_varint(data, 0)
    length = struct.pack("<I" if size < 1 << 32 else "<Q", size)
    checked, word = data[at : at + 4], data[at + 4 :]
    if len(word) != size or checked != struct.pack("<I", masked(length)) or masked(length + checked + word) != crc:
        raise ValueError("the graph of its objects is altered: its checksum is wrong")
    return word


def _node(data: bytes) -> Node:
    node = Node()
    for kind, value in read_fields(data):
        if kind == 1:
            child = {1: 0, 2: b"", **dict(read_fields(value))}
            node.children[child[2].decode()] = child[1]
        elif kind == 2:
            attribute = {1: b"", 2: b"", 3: b"", **dict(read_fields(value))}
            if attribute[1] == b"VARIABLE_VALUE":
                node.key, node.full_name = attribute[3].decode(), attribute[2].decode()
        elif kind == 3:
            slot = {1: 0, 2: b"", 3: 0, **dict(read_fields(value))}
            node.slots.append((slot[1], slot[2].decode(), slot[3]))
    return node


def _escaped(name: str) -> str:
    return name.replace(".", "..").replace("/", ".S")


def _ways(nodes: list[Node], around: dict[int, str]) -> dict[int, str]:
    """The shortest way from the first object to each, as keys have them, by none of those."""
    ways = {0: ""} if nodes else {}
    waiting = deque(ways)
    while waiting:
        at = waiting.popleft()
        for name, child in nodes[at].children.items():
            if child not in ways and child not in around:
                ways[child] = f"{ways[at]}/{_escaped(name)}" if ways[at] else _escaped(name)
                waiting.append(child)
    return ways


def read_graph(word: bytes) -> Graph:
    """Raises ValueError, UnicodeDecodeError or TypeError where it is no such graph."""
    nodes = [_node(value) for kind, value in read_fields(word) if kind == 1]
    for node in nodes:
        if any(
            not 0 <= at < len(nodes)
            for at in (*node.children.values(), *(one for a, _, b in node.slots for one in (a, b)))
        ):
            raise ValueError("the graph of its objects names one that is not there")
    ways = _ways(nodes, {})
    named = {child for node in nodes for name, child in node.children.items() if name in _INSIDE}
    optimizers = {
        i: way for i, way in ways.items() if i and (nodes[i].is_optimizer() or (i in named and nodes[i].key is None))
    }
    clean = _ways(nodes, optimizers)
    weights, states = {}, set()
    for i, node in enumerate(nodes):
        if node.key is None or not node.key.endswith(VALUE):
            continue
        if i in clean:
            written = node.key[: -len(VALUE)]
            inside = any(written.startswith(f"{way}/") for way in optimizers.values())
            weights[node.key] = clean[i] if inside else written
        else:
            states.add(node.key)
    return Graph(nodes, optimizers, weights, states)
