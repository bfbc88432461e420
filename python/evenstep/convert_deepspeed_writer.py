"""DeepSpeed's checkpoint folders, written: ZeRO stages 1 and 2 of N ranks, which differ by the stage's number alone.

    latest                                              the name of the folder beside it
    global_stepS/mp_rank_00_model_states.pt             the module, shapes and names of its parameters
    global_stepS/zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's piece of each group's flat vectors

A group's vector holds its parameters one after the other, in fp32, and zeros at its end, up to a multiple of twice the ranks."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint_files import find_tied
from evenstep.convert_contents import (
    UNSUPPORTED,
    Contents,
    Optimizer,
    Refused,
    Tensors,
    name_optimizers,
    parameter_order,
)
from evenstep.convert_deepspeed import names_of_its_own
from evenstep.convert_safetensors import leave_files
from evenstep.convert_torch import leave_further, save

_LAYOUT = "0.16.0"  # DeepSpeed's version whose layout this is: its readers refuse files that name none


def _flat(tensors: list[torch.Tensor | None], sizes: list[int], begin: int, count: int) -> torch.Tensor:
    """A piece of these tensors' values, one after the other; None: zeros."""
    out = torch.zeros(count)
    at = 0
    for tensor, size in zip(tensors, sizes):
        low, high = max(at, begin), min(at + size, begin + count)
        if tensor is not None and low < high:
            out[low - begin : high - begin] = tensor.reshape(-1)[low - at : high - at]
        at += size
    return out


class _Group:
    """Parameters that DeepSpeed keeps in one vector."""

    def __init__(self, names: list[str], tensors: Tensors, ranks: int) -> None:
        self.names, self.tensors = names, [tensors[name] for name in names]
        self.sizes = [tensor.numel() for tensor in self.tensors]
        align = 2 * ranks
        self.piece = -(-sum(self.sizes) // align) * align // ranks

    def shapes(self) -> OrderedDict[str, torch.Size]:
        return OrderedDict((name, tensor.shape) for name, tensor in zip(self.names, self.tensors))

    def piece_of(self, rank: int, tensors: list[Any]) -> torch.Tensor:
        return _flat(tensors, self.sizes, rank * self.piece, self.piece)


class _State:
    """What an optimizer keeps of a group: vectors beside the parameters', and values that all of them share."""

    def __init__(self, group: _Group, optimizer: Optimizer) -> None:
        states = [optimizer.state.get(name, {}) for name in group.names]
        self.vectors: dict[str, list[Any]] = {}
        self.shared: dict[str, Any] = {}
        self.without = [name for name, state in zip(group.names, states) if not state]
        some = [state for state in states if state]
        for key in dict.fromkeys(key for state in some for key in state):
            values = [state.get(key) for state in states]
            if key != "step" and all(
                _fits(value, tensor) for value, tensor, state in zip(values, group.tensors, states) if state
            ):
                self.vectors[key] = values
                continue
            first = some[0].get(key)
            if not all(_is_same(first, state.get(key)) for state in some):
                raise ValueError(
                    f"{key!r} is not the same for all parameters of a group, or has another shape than they"
                )
            self.shared[key] = first

    def piece_of(self, rank: int, group: _Group) -> dict[str, Any]:
        return {**self.shared, **{key: group.piece_of(rank, values) for key, values in self.vectors.items()}}


def _fits(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.numel() == 1 and a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


def _optimizer(contents: Contents) -> Optimizer | None:
    leave_further(contents, "models", "optimizers", "schedulers")
    name_optimizers(contents)
    optimizer = next(iter(contents.optimizers.values()), None)
    members = [] if optimizer is None else optimizer.keys()
    if not all(name in contents.model() for name in members):
        contents.leave("the optimizer's state: it has parameters that are not the model's")
        return None
    return optimizer


def _groups(contents: Contents, optimizer: Optimizer | None, ranks: int) -> list[_Group]:
    model = contents.model()
    members = (
        [parameter_order(model)] if optimizer is None else [[str(key) for key in some] for some in optimizer.members]
    )
    if not all(members):
        raise Refused("a group of the optimizer has no parameters, which DeepSpeed does not know", "", UNSUPPORTED)
    groups = [_Group(names, model, ranks) for names in members]
    for group in groups:
        for name, tensor in zip(group.names, group.tensors):
            if not tensor.is_floating_point():
                raise Refused(f"parameter {name!r} ({tensor.dtype}) has no place in a vector of fp32", "", UNSUPPORTED)
            if tensor.dtype == torch.float64:
                contents.note("float64 parameters, and their states, are rounded to fp32 there")
    return groups


def _states(contents: Contents, groups: list[_Group], optimizer: Optimizer | None) -> list[_State] | None:
    if optimizer is None:
        return None
    try:
        states = [_State(group, optimizer) for group in groups]
    except ValueError as error:
        contents.leave(f"the optimizer's state: {error}")
        return None
    for state in states:
        if state.without and len(state.without) < sum(len(group.names) for group in groups):
            for name in state.without:
                contents.note(f"the optimizer has no state of {name}: zeros stand for it")
    if optimizer.other:
        contents.leave(f"the optimizer's own entries: {', '.join(map(repr, optimizer.other))}")
    return states


def _model_states(contents: Contents, groups: list[_Group], ranks: int, stage: int) -> dict[str, Any]:
    model = contents.model()
    trained = {name for group in groups for name in group.names}
    tied = {name: source for name, source in find_tied(model).items() if name not in trained}
    for name in contents.model_extra.get("model", {}):
        contents.leave(f"{name!r} beside the model's tensors")
    scheduler = next(iter(contents.schedulers.values()), None)
    written = {
        "module": OrderedDict(model),
        "buffer_names": [name for name in model if name not in trained and name not in tied],
        "optimizer": None,
        "param_shapes": [group.shapes() for group in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": tied,
        "lr_scheduler": None if scheduler is None else scheduler.state,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": contents.step or 0,
        "global_samples": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": _LAYOUT,
    }
    if contents.epoch is not None:
        written["epoch"] = contents.epoch
    for key, value in contents.extra.items():
        if key in names_of_its_own():
            contents.leave(f"{key!r} of the input's own entries: DeepSpeed has another of that name")
        else:
            written[key] = value
    return written


def _rank_states(
    groups: list[_Group], states: list[_State] | None, settings: list[dict[str, Any]], rank: int, ranks: int, stage: int
) -> dict[str, Any]:
    base = {} if states is None else {i: state.piece_of(rank, groups[i]) for i, state in enumerate(states)}
    paddings = [group.piece * ranks - sum(group.sizes) if rank == ranks - 1 else 0 for group in groups]
    state = {  # no loss scale and no clipping: DeepSpeed keeps its configuration's then
        "base_optimizer_state": {
            "state": {i: one for i, one in base.items() if one},
            "param_groups": [{**one, "params": [i]} for i, one in enumerate(settings)],
        },
        "single_partition_of_fp32_groups": [group.piece_of(rank, group.tensors) for group in groups],
        "zero_stage": stage,
        "group_paddings": paddings,
        "partition_count": [ranks] * len(groups),
        "ds_version": _LAYOUT,
    }
    return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": _LAYOUT}


def write_folder(contents: Contents, folder: Path, ranks: int, stage: int) -> None:
    """`folder` is there, and empty."""
    leave_files(contents)
    optimizer = _optimizer(contents)
    groups = _groups(contents, optimizer, ranks)
    states = _states(contents, groups, optimizer)
    settings = [] if optimizer is None or states is None else optimizer.groups
    tag = f"global_step{contents.step or 0}"
    (folder / tag).mkdir()
    with (folder / tag / "mp_rank_00_model_states.pt").open("wb") as file:
        save(_model_states(contents, groups, ranks, stage), file)
    for rank in range(ranks):
        with (folder / tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").open("wb") as file:
            save(_rank_states(groups, states, settings, rank, ranks, stage), file)
    (folder / "latest").write_text(tag)
    contents.note(
        f"for {ranks} rank{'' if ranks == 1 else 's'} of ZeRO stage {stage}; parameters in no optimizer, and buffers, are "
        "kept as the module has them"
    )
