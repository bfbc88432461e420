"""DeepSpeed's checkpoint folders, written: of ZeRO's stages 1 and 2, which differ by the stage's number alone, and 3.

    latest                                              the name of the folder beside it
    global_stepS/mp_rank_00_model_states.pt             the module, shapes and names of its parameters
    global_stepS/zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's piece of each group's flat vectors

A group's vector holds its parameters one after the other, in fp32, and zeros at its end, up to a multiple of twice the
ranks. Of stage 3 see convert_deepspeed_stage_3 and _Cut, and there is a file of the model for each rank."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from evenstep import convert_foreign
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
from evenstep.convert_deepspeed_stage_3 import model_file, piece_size
from evenstep.convert_foreign import Foreign
from evenstep.convert_safetensors import leave_files
from evenstep.convert_torch import leave_further, save

_LAYOUT = "0.16.0"  # DeepSpeed's version whose layout this is: its readers refuse files that name none
_MOST_VALUES = 1_000_000_000  # of a rank in one vector of stage 3: what DeepSpeed does where no sub_group_size is given


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

    def __init__(self, names: list[str], tensors: Tensors, ranks: int, place: int) -> None:
        self.names, self.tensors = names, [tensors[name] for name in names]
        self.place = place  # of the optimizer's group
        self.sizes = [tensor.numel() for tensor in self.tensors]
        align = 2 * ranks
        self.piece = -(-sum(self.sizes) // align) * align // ranks

    def shapes(self) -> OrderedDict[str, torch.Size]:
        return OrderedDict((name, tensor.shape) for name, tensor in zip(self.names, self.tensors))

    def piece_of(self, rank: int, tensors: list[Any]) -> torch.Tensor:
        return _flat(tensors, self.sizes, rank * self.piece, self.piece)


def _put_piece(out: torch.Tensor, tensor: torch.Tensor, rank: int) -> None:
    """The rank's values, of which `out` has the number; beyond the tensor's last it stays as it is."""
    own = tensor.reshape(-1)[rank * out.numel() : (rank + 1) * out.numel()]
    out[: own.numel()] = own


class _Cut(_Group):
    """Of stage 3: each parameter is cut into pieces."""

    def __init__(self, names: list[str], tensors: Tensors, ranks: int, place: int) -> None:
        super().__init__(names, tensors, ranks, place)
        self.pieces = [piece_size(size, ranks) for size in self.sizes]
        self.piece = sum(self.pieces)

    def piece_of(self, rank: int, tensors: list[Any]) -> torch.Tensor:
        out = torch.zeros(self.piece)
        for place, tensor in zip(out.split(self.pieces), tensors):
            if tensor is not None:
                _put_piece(place, tensor, rank)
        return out


def _cut(names: list[str], tensors: Tensors, ranks: int, place: int) -> list[_Group]:
    """Of a group of the optimizer: several where it is large, as DeepSpeed makes them."""
    groups: list[_Group] = []
    some: list[str] = []
    size = 0
    for name in names:
        some.append(name)
        size += piece_size(tensors[name].numel(), ranks)
        if size >= _MOST_VALUES or name == names[-1]:
            groups.append(_Cut(some, tensors, ranks, place))
            some, size = [], 0
    return groups


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

    def begin_as(self, other: _State) -> None:
        """For a group without any state: zeros, and what the parameters of another one share."""
        self.vectors = {key: [None] * len(self.without) for key in other.vectors}
        self.shared = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in other.shared.items()}

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


def _groups(contents: Contents, optimizer: Optimizer | None, ranks: int, stage: int) -> list[_Group]:
    model = contents.model()
    members = (
        [parameter_order(model)] if optimizer is None else [[str(key) for key in some] for some in optimizer.members]
    )
    if stage == 3:
        for name in [name for names in members for name in names if model[name].numel() == 0]:
            contents.note(f"{name} has no values, and so none in the optimizer there")
        members = [[name for name in names if model[name].numel() > 0] for names in members]
    if not all(members):
        raise Refused("a group of the optimizer has no parameters, which DeepSpeed does not know", "", UNSUPPORTED)
    groups = []
    for place, names in enumerate(members):
        groups += _cut(names, model, ranks, place) if stage == 3 else [_Group(names, model, ranks, place)]
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
    known = [(state, group) for state, group in zip(states, groups) if len(state.without) < len(group.names)]
    for state, group in zip(states, groups):
        if known and len(state.without) == len(group.names):
            state.begin_as(next((other for other, its in known if its.place == group.place), known[0][0]))
        for name in state.without if known else []:
            contents.note(f"the optimizer has no state of {name}: zeros stand for it")
    if optimizer.other:
        contents.leave(f"the optimizer's own entries: {', '.join(map(repr, optimizer.other))}")
    return states


def _tied(model: Tensors, trained: dict[str, None]) -> dict[str, str]:
    """Names of what another one's values are, and that one: the trained one, where one is, of several the first."""
    first = find_tied(model)
    holder: dict[str, str] = {}
    for name in trained:
        holder.setdefault(first.get(name, name), name)
    tied = {name: first.get(name, name) for name in model if name not in trained}
    tied = {name: holder.get(source, source) for name, source in tied.items()}
    return {name: source for name, source in tied.items() if name != source}


class _Model:
    """The files of the model."""

    def __init__(self, contents: Contents, groups: list[_Group], ranks: int, stage: int) -> None:
        self.model, self.ranks, self.stage = contents.model(), ranks, stage
        trained = dict.fromkeys(name for group in groups for name in group.names)
        tied = _tied(self.model, trained)
        looks = parameter_order(self.model) if stage == 3 else []
        self.frozen = [name for name in looks if name not in trained and name not in tied]
        apart = {*trained, *self.frozen}  # not in the module
        for name in contents.model_extra.get("model", {}):
            contents.leave(f"{name!r} beside the model's tensors")
        scheduler = next(iter(contents.schedulers.values()), None)
        module = OrderedDict(self.model)
        if stage == 3:
            away = {name for name in module if name in apart or tied.get(name) in apart}
            module.update((name, torch.empty(0, dtype=module[name].dtype)) for name in away)
        self.written: dict[str, Any] = {
            "module": module,
            "buffer_names": [name for name in self.model if name not in apart and name not in tied],
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
            self.written["epoch"] = contents.epoch
        for key, value in contents.extra.items():
            if key in names_of_its_own():
                contents.leave(f"{key!r} of the input's own entries: DeepSpeed has another of that name")
            else:
                self.written[key] = value

    def _fragment(self, name: str, rank: int) -> torch.Tensor:
        tensor = self.model[name]
        out = torch.zeros(piece_size(tensor.numel(), self.ranks), dtype=tensor.dtype)
        _put_piece(out, tensor, rank)
        return out

    def write(self, folder: Path) -> None:
        if self.stage < 3:
            with (folder / "mp_rank_00_model_states.pt").open("wb") as file:
                save(self.written, file)
            return
        self.written["frozen_param_shapes"] = OrderedDict((name, self.model[name].shape) for name in self.frozen)
        for rank in range(self.ranks):
            fragments = OrderedDict((name, self._fragment(name, rank)) for name in self.frozen)
            with (folder / model_file(rank)).open("wb") as file:
                save({**self.written, "frozen_param_fragments": fragments}, file)


def _loss_scaler(groups: list[_Group]) -> Foreign:
    """As DeepSpeed begins with, where its configuration says nothing else. Its stage 3 wants one in the file."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    if any(tensor.dtype != torch.float16 for group in groups for tensor in group.tensors):
        return Foreign(module, "LossScaler", {"cur_scale": 1.0, "dynamic": False})
    state = {
        "cur_scale": 2**16,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": torch.float16,
    }
    return Foreign(module, "DynamicLossScaler", state)


class _Optimizer:
    """The files of the optimizer, one a rank."""

    def __init__(self, groups: list[_Group], states: list[_State] | None, settings: list[dict[str, Any]], ranks: int):
        self.groups, self.states, self.settings, self.ranks = groups, states, settings, ranks

    def _base(self, rank: int) -> dict[str, Any]:
        """A state_dict() of torch's form, whose parameters are the vectors."""
        states = enumerate(zip(self.states or [], self.groups))
        base = {i: state.piece_of(rank, group) for i, (state, group) in states}
        return {
            "state": {i: one for i, one in base.items() if one},
            "param_groups": [
                {**one, "params": [i for i, group in enumerate(self.groups) if group.place == place]}
                for place, one in enumerate(self.settings)
            ],
        }

    def _low_stage(self, rank: int, stage: int) -> dict[str, Any]:
        last = rank == self.ranks - 1
        return {  # no loss scale and no clipping: DeepSpeed keeps its configuration's then
            "base_optimizer_state": self._base(rank),
            "single_partition_of_fp32_groups": [group.piece_of(rank, group.tensors) for group in self.groups],
            "zero_stage": stage,
            "group_paddings": [group.piece * self.ranks - sum(group.sizes) if last else 0 for group in self.groups],
            "partition_count": [self.ranks] * len(self.groups),
            "ds_version": _LAYOUT,
        }

    def _stage_3(self, rank: int) -> dict[str, Any]:
        scaler = _loss_scaler(self.groups)
        return {
            "zero_stage": 3,
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.attributes["dynamic"],
            "overflow": False,
            "partition_count": self.ranks,
            "optimizer_state_dict": self._base(rank),
            "fp32_flat_groups": [group.piece_of(rank, group.tensors) for group in self.groups],
        }

    def write(self, folder: Path, stage: int) -> None:
        bf16 = all(tensor.dtype == torch.bfloat16 for group in self.groups for tensor in group.tensors)
        for rank in range(self.ranks):
            state = self._stage_3(rank) if stage == 3 else self._low_stage(rank, stage)
            name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            with (folder / name).open("wb") as file:
                convert_foreign.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": _LAYOUT}, file)


_SHOWN = 8  # names in a note


def _note(contents: Contents, frozen: list[str], ranks: int, stage: int) -> None:
    words = "parameters in no optimizer, and buffers, are kept as the module has them"
    if stage == 3:
        names = ", ".join(frozen[:_SHOWN]) + (f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else "")
        words = f"frozen parameters there: {names or 'none'}"
    contents.note(f"for {ranks} rank{'' if ranks == 1 else 's'} of ZeRO stage {stage}; {words}")


def write_folder(contents: Contents, folder: Path, ranks: int, stage: int) -> None:
    """`folder` is there, and empty."""
    leave_files(contents)
    optimizer = _optimizer(contents)
    groups = _groups(contents, optimizer, ranks, stage)
    states = _states(contents, groups, optimizer)
    settings = [] if optimizer is None or states is None else optimizer.groups
    tag = f"global_step{contents.step or 0}"
    (folder / tag).mkdir()
    model = _Model(contents, groups, ranks, stage)
    model.write(folder / tag)
    _Optimizer(groups, states, settings, ranks).write(folder / tag, stage)
    (folder / "latest").write_text(tag)
    _note(contents, model.frozen, ranks, stage)
