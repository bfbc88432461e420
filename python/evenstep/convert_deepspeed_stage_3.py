"""ZeRO 3's files of DeepSpeed, read. Each parameter is cut into equal pieces, one a rank, the last ones filled up; each
rank's file has its pieces one after the other: a vector for each group of the optimizer, or several, of whole parameters,
where one would be too large. The optimizer's states are beside them in vectors of the same form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from evenstep.convert_contents import DAMAGED, UNSUPPORTED, Contents, Key, Optimizer, Refused, Tensors
from evenstep.convert_torch import load_safely

Shapes = dict[str, Any]  # of parameters, by name, in order


def model_file(rank: int) -> str:
    """Has a rank's pieces of frozen parameters, and what other stages have in one file for all."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def piece_size(values: int, ranks: int) -> int:
    """How many values of a parameter each rank has."""
    return -(-values // ranks)


def vectors_of(values: Any, lack: str) -> list[torch.Tensor]:
    """Tensors, each as one vector. Raises Refused, with `lack`, where they are none."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in values):
        raise Refused(lack, "", DAMAGED)
    return [one.detach().reshape(-1) for one in values]


def settings_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the optimizer's groups, what does not say which parameters they have."""
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def keys_of(ranks: list[dict[str, Any]], size: int) -> list[str]:
    """Names of one vector's states, which has `size` values of a rank. Raises ValueError where a rank lacks one: of an
    empty one the values are elsewhere, on a disk."""
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        values = [rank.get(key) for rank in ranks]
        if any(key not in rank for rank in ranks):
            raise ValueError(f"{key!r} is in the files of some ranks alone")
        if size > 0 and any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in values):
            raise ValueError(f"{key!r} has no values in the files")
    return list(ranks[0])


def _sizes(folder: Path, vectors: list[list[torch.Tensor]]) -> list[int]:
    """Of the vectors, which are the same on all ranks."""
    first = [one.numel() for one in vectors[0]]
    for rank, own in enumerate(vectors):
        sizes = [one.numel() for one in own]
        if sizes != first:
            raise Refused(f"{folder}: rank {rank} has vectors of {sizes} values, rank 0 of {first}", "", DAMAGED)
    return first


def _members(folder: Path, sizes: list[int], shapes: list[Shapes], ranks: int) -> list[Shapes]:
    """The parameters of each vector."""
    found: list[Shapes] = [{} for _ in sizes]
    left, at = list(sizes), 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        piece = piece_size(math.prod(shape), ranks)
        while at + 1 < len(left) and left[at] == 0:
            at += 1
        if at >= len(left) or not 0 <= piece <= left[at]:
            raise Refused(
                f"{folder}: {name!r} needs {piece} values of each rank, whose vector has {left[at] if left else 0} more",
                "" if any(sizes) else "weights that were offloaded to a disk are not in these files: save without that",
                DAMAGED,
            )
        left[at] -= piece
        found[at][name] = shape
    if any(left):
        wanted = sum(sizes) - sum(left)
        raise Refused(f"{folder}: each rank has {sum(sizes)} values, its parameters need {wanted}", "", DAMAGED)
    return found


def _whole(vectors: list[torch.Tensor], members: Shapes) -> Tensors:
    """The parameters out of the ranks' vectors."""
    parts, at = {}, 0
    for name, shape in members.items():
        count = math.prod(shape)
        piece = piece_size(count, len(vectors))
        parts[name] = torch.cat([one[at : at + piece] for one in vectors])[:count].view(tuple(shape))
        at += piece
    return parts


def _states(folder: Path, ranks: list[Any], size: int, members: Shapes) -> dict[Key, dict[str, Any]]:
    """What the optimizer keeps of one vector's parameters. Raises ValueError where its form is not known."""
    state: dict[Key, dict[str, Any]] = {name: {} for name in members}
    for key in keys_of(ranks, size):
        own = [rank[key] for rank in ranks]
        forms = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in own]
        if None not in forms and len(set(forms)) > 1:
            rank = next(rank for rank, form in enumerate(forms) if form != forms[0])
            raise Refused(
                f"{folder}: {key!r} of rank {rank} is of shape {forms[rank]}, of rank 0 {forms[0]}", "", DAMAGED
            )
        if key != "step" and set(forms) == {(size,)}:
            for name, part in _whole([one.detach() for one in own], members).items():
                state[name][key] = part
        elif all(form is None or math.prod(form) == 1 for form in forms):
            for name in members:
                state[name][key] = own[0].clone() if isinstance(own[0], torch.Tensor) else own[0]
        else:
            raise ValueError(f"{key!r} has not as many values as its parameters")
    return {name: values for name, values in state.items() if values}


def _optimizer(into: Contents, folder: Path, bases: list[Any], sizes: list[int], members: list[Shapes]) -> None:
    if not all(isinstance(one, dict) and isinstance(one.get("state"), dict) for one in bases):
        into.leave("the optimizer's state: it is not in the files")
        return
    groups = bases[0].get("param_groups")
    places = [group["params"] for group in groups] if isinstance(groups, list) else []
    if [place for own in places for place in own] != list(range(len(members))):
        into.leave("the optimizer's state: its groups are not those of the weights")
        return
    state: dict[Key, dict[str, Any]] = {}
    try:
        for i, (size, some) in enumerate(zip(sizes, members)):
            state.update(_states(folder, [base["state"].get(i, {}) for base in bases], size, some))
    except ValueError as error:
        into.leave(f"the optimizer's state: {error}")
        return
    into.optimizers["optimizer"] = Optimizer(
        settings_of(groups),
        [[name for place in own for name in members[place]] for own in places],
        state,
    )


def read_groups(into: Contents, folder: Path, zero: list[dict[str, Any]], shapes: list[Shapes]) -> None:
    """Trained parameters, and the optimizer; `zero`: the ranks' files."""
    if any(state.get("ds_zero_partition_groups") for state in zero):
        raise Refused(
            f"{folder} has experts that lie on some of the ranks alone", "use ds_to_universal.py", UNSUPPORTED
        )
    lack = "has no 'fp32_flat_groups', vectors of values"
    vectors = [
        vectors_of(state.get("fp32_flat_groups"), f"{folder}: the file of rank {rank} {lack}")
        for rank, state in enumerate(zero)
    ]
    sizes = _sizes(folder, vectors)
    members = _members(folder, sizes, shapes, len(zero))
    for i, some in enumerate(members):
        into.model().update(_whole([own[i] for own in vectors], some))
    _optimizer(into, folder, [state.get("optimizer_state_dict") for state in zero], sizes, members)


def _fragments(path: Path, rank: int, shapes: Shapes, ranks: int) -> Tensors:
    if not path.is_file():
        raise Refused(f"{path} is not there: it has rank {rank}'s pieces of frozen parameters", "", DAMAGED)
    model: Any = load_safely(path)
    found = model.get("frozen_param_fragments") if isinstance(model, dict) else None
    pieces = {}
    for name, shape in shapes.items():
        piece = found.get(name) if isinstance(found, dict) else None
        wanted = piece_size(math.prod(shape), ranks)
        if not isinstance(piece, torch.Tensor) or piece.numel() != wanted:
            raise Refused(f"{path} has not {wanted} values of the frozen parameter {name!r}", "", DAMAGED)
        pieces[name] = piece.detach().reshape(-1)
    return pieces


def read_frozen(into: Contents, folder: Path, shapes: Shapes, ranks: int) -> None:
    """In the type that the model has them in."""
    if shapes:
        own = [_fragments(folder / model_file(rank), rank, shapes, ranks) for rank in range(ranks)]
        for name, shape in shapes.items():
            into.model().update(_whole([pieces[name] for pieces in own], {name: shape}))
