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


def _vectors(folder: Path, rank: int, state: dict[str, Any]) -> list[torch.Tensor]:
    found = state.get("fp32_flat_groups")
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in found):
        raise Refused(f"{folder}: the file of rank {rank} has no 'fp32_flat_groups', vectors of values", "", DAMAGED)
    return [one.detach().reshape(-1) for one in found]


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
    """What the optimizer keeps of one vector's parameters."""
    state: dict[Key, dict[str, Any]] = {name: {} for name in members}
    for key, first in ranks[0].items():
        if key != "step" and isinstance(first, torch.Tensor) and first.dim() == 1 and (first.numel() > 1 or size == 1):
            own = [rank.get(key) for rank in ranks]
            if not all(isinstance(one, torch.Tensor) and one.shape == (size,) for one in own):
                raise Refused(
                    f"{folder}: {key!r} has not on all ranks {size} values, as its parameters have", "", DAMAGED
                )
            for name, part in _whole([one.detach() for one in own], members).items():
                state[name][key] = part
        else:
            for name in members:
                state[name][key] = first.clone() if isinstance(first, torch.Tensor) else first
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
    for i, (size, some) in enumerate(zip(sizes, members)):
        ranks = [base["state"].get(i, {}) for base in bases]
        state.update(_states(folder, ranks, size, some))
    into.optimizers["optimizer"] = Optimizer(
        [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups],
        [[name for place in own for name in members[place]] for own in places],
        state,
    )


def read_groups(into: Contents, folder: Path, zero: list[dict[str, Any]], shapes: list[Shapes]) -> None:
    """Trained parameters, and the optimizer; `zero`: the ranks' files."""
    if any(state.get("ds_zero_partition_groups") for state in zero):
        raise Refused(
            f"{folder} has experts that lie on some of the ranks alone", "use ds_to_universal.py", UNSUPPORTED
        )
    vectors = [_vectors(folder, rank, state) for rank, state in enumerate(zero)]
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
