"""What a checkpoint holds of an optimizer, by its parameters' names, and how it is given back."""

from __future__ import annotations

from typing import Any

import torch

from evenstep._core import EvenstepError
from evenstep.checkpoint_encoding import decode, encode
from evenstep.checkpoint_models import difference, listed
from evenstep.checkpoint_reading import StoredFiles, files_of
from evenstep.checkpoint_snapshot import Snapshot, Tensors


def groups_of(optimizer: Any, state: dict[str, Any], names: dict[int, str]) -> list[list[tuple[int, str, Any]]]:
    """For each parameter group: (index in the state_dict, name, parameter)."""
    groups = []
    for g, (group, live) in enumerate(zip(state["param_groups"], optimizer.param_groups)):
        groups.append(
            [
                (index, names.get(id(parameter), f"group{g}.{i}"), parameter)
                for i, (index, parameter) in enumerate(zip(group["params"], live["params"]))
            ]
        )
    return groups


def has_torch_form(state: Any) -> bool:
    return isinstance(state, dict) and isinstance(state.get("state"), dict) and "param_groups" in state


def save_optimizer(name: str, optimizer: Any, names: dict[int, str], into: Snapshot) -> None:
    state = optimizer.state_dict()
    tensors: Tensors = {}
    file = f"{name}.safetensors"
    saved: dict[str, Any] = {"file": file, "class": class_name(optimizer)}
    if not has_torch_form(state) or len(state["param_groups"]) != len(optimizer.param_groups):
        saved["whole"] = encode(state, name, tensors)
    else:
        groups = groups_of(optimizer, state, names)
        indices = {index: key for group in groups for index, key, _ in group}
        saved["parameters"] = [[[key, list(parameter.shape)] for _, key, parameter in group] for group in groups]
        saved["groups"] = [
            {k: encode(v, f"{name}/group{g}/{k}", tensors) for k, v in group.items() if k not in _BY_PARAMETER}
            for g, group in enumerate(state["param_groups"])
        ]
        saved["state"] = {
            indices[index]: encode(value, f"{name}/{indices[index]}", tensors)
            for index, value in state["state"].items()
            if index in indices
        }
        # some optimizers keep entries that belong to no parameter
        saved["other"] = encode(
            {
                "keys": {k: v for k, v in state.items() if k not in ("state", "param_groups")},
                "state": {k: v for k, v in state["state"].items() if k not in indices},
            },
            f"{name}/other",
            tensors,
        )
    into.files[file] = tensors
    into.state["optimizers"][name] = saved


# A group's entries that follow its parameters' order: taken from the optimizer that loads.
_BY_PARAMETER = ("params", "param_names")


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_optimizer(
    name: str, optimizer: Any, names: dict[int, str], saved: dict[str, Any], files: StoredFiles
) -> None:
    if saved["class"] not in (None, class_name(optimizer)):  # None: converted from a format that does not say
        raise EvenstepError(
            f"optimizer {name!r} was {saved['class']} when the checkpoint was written and is {class_name(optimizer)} "
            "here\n  fix: use the same optimizer, or load the model alone: "
            "es.load_checkpoint(path, optimizers=False, schedulers=False)"
        )
    current = optimizer.state_dict()
    groups = [] if "whole" in saved else groups_of(optimizer, current, names)
    if "whole" not in saved:
        _check_parameters(name, groups, saved["parameters"])
    _decode_optimizer(current, groups, saved, files)


def _decode_optimizer(
    current: dict[str, Any], groups: list[list[tuple[int, str, Any]]], saved: dict[str, Any], files: StoredFiles
) -> dict[str, Any]:
    """What its load_state_dict takes. Copies no tensor, so that it may be tried before anything is put in place."""
    own = files.tensors(files_of(saved))

    def give(name: str) -> torch.Tensor:
        if name not in own:
            raise files.damage(f"{saved['file']} has no tensor {name!r}")
        return own[name]

    if "whole" in saved:
        return decode(saved["whole"], give, current)  # type: ignore[no-any-return]
    index_of = {key: index for group in groups for index, key, _ in group}
    strangers = [key for key in saved["state"] if key not in index_of]
    if strangers:
        raise files.damage(f"it has states of {listed(strangers)}, which no group there has")
    other = decode(saved["other"], give)
    state = {index_of[key]: decode(value, give) for key, value in saved["state"].items()}
    param_groups = []
    for group, settings in zip(current["param_groups"], saved["groups"]):
        kept = {key: group[key] for key in _BY_PARAMETER if key in group}
        param_groups.append({**decode(settings, give, group), **kept})
    return {**other["keys"], "state": {**state, **other["state"]}, "param_groups": param_groups}


def load_optimizer(optimizer: Any, names: dict[int, str], saved: dict[str, Any], files: StoredFiles) -> None:
    current = optimizer.state_dict()
    groups = [] if "whole" in saved else groups_of(optimizer, current, names)
    whole = _decode_optimizer(current, groups, saved, files)
    files.drop(files_of(saved))
    optimizer.load_state_dict(whole)
    if groups:
        _keep_types(optimizer, groups, whole["state"])


def _check_parameters(name: str, groups: list[list[tuple[int, str, Any]]], saved: list[list[list[Any]]]) -> None:
    if len(groups) != len(saved):
        raise EvenstepError(
            f"optimizer {name!r} had {len(saved)} parameter groups when the checkpoint was written and has "
            f"{len(groups)} here\n  fix: make the same groups"
        )
    for g, (group, wanted) in enumerate(zip(groups, saved)):
        here = {key: list(parameter.shape) for _, key, parameter in group}
        there = dict(wanted)
        if set(here) != set(there):
            text = difference(f"optimizer {name!r}, group {g},", set(here) - set(there), set(there) - set(here))
            raise EvenstepError(f"{text}\n  fix: give the optimizer the same parameters in the same groups")
        for key, shape in there.items():
            if here[key] != shape:
                raise EvenstepError(
                    f"optimizer {name!r}: parameter {key!r} has the shape {shape} in the checkpoint and {here[key]} "
                    "here\n  fix: build the model as it was when the checkpoint was written"
                )


def _keep_types(optimizer: Any, groups: list[list[tuple[int, str, Any]]], saved: dict[int, Any]) -> None:
    """torch casts loaded state to its parameter's type; state that was kept wider (fp32 for bf16) stays so."""
    for group in groups:
        for index, _, parameter in group:
            loaded = optimizer.state.get(parameter)
            values = saved.get(index)
            if not isinstance(values, dict) or not isinstance(loaded, dict):
                continue
            for key, value in values.items():
                now = loaded.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    loaded[key] = value.to(now.device)
