"""States of optimizers in TensorFlow's checkpoints, and what they are called in torch's state_dict(): Adam, SGD with momentum, RMSprop, Adagrad,
Adadelta. Three forms are read: slots in the graph of objects (tf.compat.v1.train's optimizers, Keras 2), lists of an optimizer's there (Keras
2.11 and later, Keras 3), and names behind the variable's, as tf.compat.v1.train.Saver writes them and as is written here. Sources: the update
rules of tensorflow/python/training and keras/src/optimizers, which say where a state has the learning rate in it and torch's has not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch

from evenstep.convert_contents import Contents, Key, Optimizer, Tensors, name_optimizers, numbered
from evenstep.convert_tensorflow_graph import LISTS, OTHER_LISTS, Graph, Node

# Each class: its states' names there (slots) -> torch's; the first ones are always there.
_NEEDED = {"Adam": 2, "SGD": 1, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2}
_STATES = {
    "Adam": {"m": "exp_avg", "v": "exp_avg_sq", "vhat": "max_exp_avg_sq"},
    "SGD": {"momentum": "momentum_buffer"},
    "RMSprop": {"rms": "square_avg", "mg": "grad_avg", "momentum": "momentum_buffer"},
    "Adagrad": {"accumulator": "sum"},
    "Adadelta": {"accum_grad": "square_avg", "accum_var": "acc_delta"},
}
_OLDER = {"accum": "accum_grad", "accum_update": "accum_var"}  # tf.compat.v1.train.AdadeltaOptimizer
# Names behind a variable's, by the number of states: Saver's, and those of BERT's own optimizer.
_SAVED: dict[str, dict[int, tuple[str, ...]]] = {
    "Adam": {2: ("m", "v")},
    "Momentum": {1: ("momentum",)},
    "RMSProp": {2: ("rms", "momentum"), 3: ("rms", "mg", "momentum")},
    "Adagrad": {1: ("accumulator",)},
    "Adadelta": {2: ("accum_grad", "accum_var")},
}
_CLASSES = {"Momentum": "SGD", "RMSProp": "RMSprop"}
_BEHIND = re.compile(r"(.+)/(?:(Adam|Momentum|RMSProp|Adagrad|Adadelta)(?:_([1-9]))?|adam_([mv]))")
_MOMENTUM = 0.9
_COUNTS = ("_iterations", "iter")
_POWERS = ("beta1_power", "beta2_power")
_SETTINGS = (*_COUNTS, *_POWERS, "_learning_rate", "learning_rate", "beta_1", "beta_2", "momentum", "rho")
_SMALLEST = 1e-37  # a power below it has lost its digits, in 32 bits
_MANY = 90_000  # steps, by which both powers have: their corrections are none any more
Keys = dict[str, dict[str, str]]  # weight -> slot -> key in the table


@dataclasses.dataclass
class _Found:
    """An optimizer as it is found: the states of each weight by its name."""

    kind: str
    states: dict[str, Tensors] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int | None = None
    keras: bool = False  # momentum has the learning rate, and its other sign, in it


def _whole(value: torch.Tensor | None) -> int | None:
    return int(value) if value is not None and value.numel() == 1 and not value.is_floating_point() else None


def _settings_of(kind: str) -> dict[str, Any]:
    made: Any = getattr(torch.optim, kind)([torch.zeros(1)])
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def _momentum(found: _Found, state: torch.Tensor, into: Contents) -> torch.Tensor | None:
    """As torch has it: without the learning rate. None: it can't be had."""
    if found.kind == "SGD" and not found.keras:
        return state
    rate = found.settings.get("lr")
    if rate is None or not rate > 0:
        if bool(state.count_nonzero()):
            into.leave(f"momentum of {found.kind}: the learning rate that is in it is not in the file")
        return None
    return state / (-rate if found.kind == "SGD" else rate)


def _add(into: Contents, found: _Found) -> None:
    """Into torch's form, under the weights' names."""
    names = _STATES[found.kind.replace("AdamW", "Adam")]
    state: dict[Key, dict[str, Any]] = {}
    for weight, slots in found.states.items():
        values: dict[str, Any] = {}
        for slot, tensor in slots.items():
            value = _momentum(found, tensor, into) if slot == "momentum" else tensor
            if value is not None:
                values[names[slot]] = value
        if found.kind != "SGD":
            values["step"] = torch.tensor(float(found.step or 0))
        if values:
            state[weight] = values
    told = list(found.settings)
    if "momentum" not in told and any("momentum_buffer" in values for values in state.values()):
        found.settings["momentum"] = _MOMENTUM  # none at all would leave the states unused
    settings = {**_settings_of(found.kind), **found.settings}
    if any("max_exp_avg_sq" in values for values in state.values()):
        settings["amsgrad"] = True
    if any("grad_avg" in values for values in state.values()):
        settings["centered"] = True
    name = numbered("optimizer", len(into.optimizers))
    into.optimizers[name] = Optimizer([settings], [list(found.states)], state, class_name=found.kind)
    into.step = found.step if into.step is None and found.step != _MANY else into.step
    known = f" but {', '.join(told)}" if told else ""
    taken = f", and momentum {_MOMENTUM}" if len(told) < len(found.settings) else ""
    into.note(
        f"{name} is {found.kind}; of its settings the file has none{known}: the others are torch's defaults{taken}"
    )
    if found.step is None and found.kind != "SGD":
        into.note(
            f"{name}: how many steps it has made cannot be told from the file (there is no count of them, and powers of betas "
            "tell it of 0.9 and 0.999 alone), so that its states count as those of step 0"
        )
    if found.step == _MANY:
        into.note(f"{name}: the powers of its betas are too small to tell its steps, which are taken for {_MANY}")


# -- by the graph --


def _keras_kind(node: Node, full_name: str) -> str | None:
    if node.children.keys() & OTHER_LISTS or full_name.startswith("lamb"):
        return None
    kind = next((kind for kind, (own, _) in LISTS.items() if own in node.children), None)
    return "AdamW" if kind == "Adam" and full_name.lower().startswith(("adamw", "adam_w")) else kind


def _slot_kind(slots: set[str]) -> str | None:
    for kind, names in _STATES.items():
        if slots <= names.keys() and {*list(names)[: _NEEDED[kind]]} <= slots:
            return kind
    return None


def _by_end(graph: Graph, full_name: str) -> str | None:
    """Keras 2.11 to 2.15: a state is called as its weight, with something before that. None: as no weight, or as several."""
    fits: dict[int, list[str]] = {}
    for one in graph.nodes:
        if one.key in graph.weights and one.full_name and full_name.endswith(f"/{one.full_name}"):
            fits.setdefault(len(one.full_name), []).append(graph.weights[str(one.key)])
    longest = fits[max(fits)] if fits else []
    return longest[0] if len(longest) == 1 else None


def _of_lists(graph: Graph, at: int, values: Tensors, kind: str) -> Keys:
    trained = {i: graph.weight_of(one) for i, one in graph.listed(at, "_trainable_variables").items()}
    states: Keys = {}
    for listed, slot in LISTS[kind.replace("AdamW", "Adam")][1].items():
        for i, one in graph.listed(at, listed).items():
            node = graph.nodes[one]
            weight = trained[i] if i in trained else _by_end(graph, node.full_name)
            if weight is not None and node.key in values:
                states.setdefault(weight, {})[slot] = str(node.key)
    return states


def _of_slots(graph: Graph, at: int, values: Tensors) -> Keys:
    states: Keys = {}
    for variable, slot, state in graph.nodes[at].slots:
        weight, key = graph.weight_of(variable), graph.nodes[state].key
        if weight is not None and key in values:
            states.setdefault(weight, {})[_OLDER.get(slot, slot)] = str(key)
    return states


def _setting(graph: Graph, at: int, values: Tensors, *names: str) -> torch.Tensor | None:
    children = graph.nodes[at].children
    keys = (graph.nodes[children[name]].key for name in names if name in children)
    return next((values[key] for key in keys if key in values and values[key].numel() == 1), None)


def _all_alike(states: Keys) -> set[str] | None:
    kinds = {frozenset(slots) for slots in states.values()}
    return set(next(iter(kinds))) if len(kinds) == 1 else None


def _fill(graph: Graph, at: int, values: Tensors, found: _Found) -> None:
    found.step = _whole(_setting(graph, at, values, *_COUNTS))
    rate = _setting(graph, at, values, "_learning_rate", "learning_rate")
    if rate is not None:
        found.settings["lr"] = float(rate)
    betas = [_setting(graph, at, values, name) for name in ("beta_1", "beta_2")]
    if found.kind == "Adam" and betas[0] is not None and betas[1] is not None:
        found.settings["betas"] = (float(betas[0]), float(betas[1]))
    momentum, rho = _setting(graph, at, values, "momentum"), _setting(graph, at, values, "rho")
    if momentum is not None and found.kind in ("SGD", "RMSprop"):
        found.settings["momentum"] = float(momentum)
    if rho is not None and found.kind in ("RMSprop", "Adadelta"):
        found.settings["alpha" if found.kind == "RMSprop" else "rho"] = float(rho)
    powers = [_setting(graph, at, values, name) for name in _POWERS]
    if found.step is None:
        found.step = _steps(powers[0], powers[1])


def _recognised(graph: Graph, at: int, values: Tensors, model: Tensors) -> tuple[str | None, Keys]:
    """Its class, None where it is none of torch's or its states are not of that; and the keys of its states."""
    node = graph.nodes[at]
    first = node.children.get("_iterations")
    kind = _keras_kind(node, graph.nodes[first].full_name) if first is not None else None
    states = _of_lists(graph, at, values, kind) if kind is not None else _of_slots(graph, at, values)
    if kind == "SGD" and not states:  # without momentum
        trained = map(graph.weight_of, graph.listed(at, "_trainable_variables").values())
        states = {name: {} for name in trained if name is not None}
    slots = _all_alike(states)
    if first is None and slots:
        kind = _slot_kind(slots)
    known = slots is not None and kind is not None
    known = known and (kind == "SGD" or _slot_kind(slots or set()) == str(kind).replace("AdamW", "Adam"))
    shapes = all(
        name in model and values[key].shape == model[name].shape for name, one in states.items() for key in one.values()
    )
    return (kind if known and shapes else None), states


def take_from_graph(into: Contents, graph: Graph, values: Tensors) -> None:
    """The states of what the graph has as optimizers; what is not taken is listed. values: by their keys in the table."""
    done: set[str] = set()  # taken, or listed
    for at, way in graph.optimizers.items():
        node = graph.nodes[at]
        kind, keys = _recognised(graph, at, values, into.model())
        if kind is None:
            around = any(child in graph.optimizers for child in node.children.values())
            own = set() if around else graph.keys_of(at)  # what is around another one: each of its variables, below
            if own:
                into.leave(f"{way!r}: an optimizer without states, with none that torch has, or of unclear weights")
                made = _whole(_setting(graph, at, values, *_COUNTS))
                into.step = made if into.step is None else into.step
            done |= own
            continue
        states = {name: {slot: values[key] for slot, key in one.items()} for name, one in keys.items()}
        found = _Found(kind, states, keras="_iterations" in node.children or "iter" in node.children)
        _fill(graph, at, values, found)
        _add(into, found)
        done |= {key for one in keys.values() for key in one.values()}
        done |= {graph.nodes[node.children[name]].key or "" for name in _SETTINGS if name in node.children}
    for key in sorted(values.keys() - done):
        into.leave(f"{key!r}: of an optimizer, with no place in torch's, or of an unclear weight")


# -- by names --


def _steps(first: torch.Tensor | None, second: torch.Tensor | None) -> int | None:
    """How many steps Adam has made by the powers of its betas, where these are 0.9 and 0.999: of t steps the power t + 1 is kept.
    _MANY: too many for that."""
    powers = [float(one) if one is not None and one.numel() == 1 else -1.0 for one in (first, second)]
    if not all(0 <= power < 1 for power in powers):
        return None
    if powers[1] < _SMALLEST:
        return _MANY if powers[0] < _SMALLEST else None
    by_second = math.log(powers[1]) / math.log(0.999) - 1
    if powers[0] < _SMALLEST:
        return round(by_second) if by_second > math.log(_SMALLEST) / math.log(0.9) - 2 else None
    by_first = math.log(powers[0]) / math.log(0.9) - 1
    count = round(by_first)
    return count if abs(by_first - count) < 0.01 and abs(by_second - count) < 0.1 + 1e-3 * count else None


def _pop_powers(into: Contents) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of the first Adam. More of them, as tf.compat.v1 numbers those of one graph, are listed: names do not tell whose a state is."""
    model = into.model()
    powers = (model.pop(_POWERS[0], None), model.pop(_POWERS[1], None))
    further = 1
    while all(numbered(power, further) in model for power in _POWERS):
        for power in _POWERS:
            del model[numbered(power, further)]
        into.leave(
            f"{numbered(_POWERS[0], further)!r}: the steps of one more Adam; which states are whose the file does not say: all "
            "are in one optimizer, with the steps of the first"
        )
        further += 1
    return powers


def _numbered_states(model: Tensors) -> dict[str, dict[str, dict[int, str]]]:
    """Optimizer's name -> weight -> place -> the tensor's name."""
    kinds: dict[str, dict[str, dict[int, str]]] = {}
    for name, tensor in model.items():
        match = _BEHIND.fullmatch(name)
        weight = model.get(match.group(1)) if match else None
        if match is None or weight is None or weight.shape != tensor.shape:
            continue
        place = "mv".index(match.group(4)) if match.group(4) else int(match.group(3) or 0)
        kinds.setdefault(match.group(2) or "adam_", {}).setdefault(match.group(1), {})[place] = name
    return kinds


def take_by_names(into: Contents) -> None:
    """What Saver calls as its states, out of the weights: each state of each weight there, of one shape."""
    model = into.model()
    for of, weights in _numbered_states(model).items():
        counts = {len(places) for places in weights.values()}
        slots = _SAVED["Adam" if of == "adam_" else of].get(counts.pop()) if len(counts) == 1 else None
        if slots is None or any(set(places) != set(range(len(slots))) for places in weights.values()):
            continue
        found = _Found("Adam" if of == "adam_" else _CLASSES.get(of, of))
        for weight, places in weights.items():
            found.states[weight] = {slot: model.pop(places[i]) for i, slot in enumerate(slots)}
        counted = _steps(*_pop_powers(into)) if of == "Adam" else None
        told = _whole(model.get("global_step"))
        found.step = told if counted is None or (counted == _MANY and told is not None) else counted
        _add(into, found)
    step = _whole(model.get("global_step"))
    if step is not None and len(model) > 1:
        into.step = step
        del model["global_step"]


# -- writing --


def _kind_of(values: dict[str, Any]) -> str | None:
    names = {name for name, value in values.items() if name != "step" and value is not None}
    for kind, known in _STATES.items():
        if names and names <= set(known.values()) and {*list(known.values())[: _NEEDED[kind]]} <= names:
            return kind
    return None


def _written(kind: str, values: dict[str, Any], rate: float) -> list[torch.Tensor]:
    """In Saver's order."""
    if kind == "RMSprop":
        momentum = values.get("momentum_buffer")
        momentum = torch.zeros_like(values["square_avg"]) if momentum is None else momentum * rate
        average = [] if values.get("grad_avg") is None else [values["grad_avg"]]
        return [values["square_avg"], *average, momentum]
    names = [name for slot, name in _STATES[kind].items() if slot != "vhat"]
    return [values[name] for name in names]


def _step_of(optimizer: Optimizer) -> int | None:
    steps = {float(one["step"]) for one in optimizer.state.values() if one.get("step") is not None}
    return int(steps.pop()) if len(steps) == 1 else None


def put_by_names(contents: Contents) -> Tensors:
    """What Saver would call as states, of each optimizer whose class is one of these; takes them out of contents, and lists what it leaves."""
    name_optimizers(contents)
    out: Tensors = {}
    weights, adams = contents.model(), 0
    for of, optimizer in list(contents.optimizers.items()):
        state = {str(key): values for key, values in optimizer.state.items() if values}
        kinds = {_kind_of(values) for values in state.values()}
        kind, step = (kinds.pop() if len(kinds) == 1 else None), _step_of(optimizer)
        rates = {group.get("lr") for group in optimizer.groups}
        rate = rates.pop() if len(rates) == 1 else None
        if kind is None or (kind == "RMSprop" and not isinstance(rate, float)):
            if state:
                contents.leave(
                    f"the states of {of}: none that tf.compat.v1.train's optimizers have, or of several kinds"
                )
            del contents.optimizers[of]
            continue
        called = next((there for there, ours in _CLASSES.items() if ours == kind), kind)
        made: Tensors = {}
        for weight, values in state.items():
            tensors = _written(kind, values, rate if isinstance(rate, float) else 0.0)
            if weight not in weights or any(one.shape != weights[weight].shape for one in tensors):
                contents.leave(
                    f"the state of {weight!r} in {of}: the model has no such weight, or one of another shape"
                )
                continue
            for place, tensor in enumerate(tensors):
                made[f"{weight}/{called}" + (f"_{place}" if place else "")] = tensor
        betas = {tuple(group.get("betas") or ()) for group in optimizer.groups}
        if kind == "Adam" and made and step is not None and len(betas) == 1:
            for name, beta in zip(_POWERS, betas.pop()):
                made[numbered(name, adams)] = torch.tensor(beta ** (step + 1))
        taken = sorted(made.keys() & (weights.keys() | out.keys()))
        if taken:
            contents.leave(f"the states of {of}: there is already something called {taken[0]!r}")
        elif made:
            out |= made
            adams += kind == "Adam"
            if any("max_exp_avg_sq" in values for values in state.values()):
                contents.leave(f"max_exp_avg_sq of {of}: tf.compat.v1.train's Adam has no AMSGrad")
            contents.note(f"{of} is written as tf.compat.v1.train.{called}Optimizer has it, without its settings")
        del contents.optimizers[of]
        contents.step = step if contents.step is None else contents.step
    if contents.step is not None and "global_step" not in weights:
        out["global_step"] = torch.tensor(contents.step, dtype=torch.int64)
        contents.step = None
    return out
