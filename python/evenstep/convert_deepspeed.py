"""DeepSpeed's checkpoint folders, read (convert_deepspeed_writer writes them): ZeRO stages 1, 2 and 3, and plain ones.

Stages 1 and 2: each rank's file has, for each group, its piece of one flat fp32 vector of the group's parameters, one
after the other, padded at the end. Stage 3: convert_deepspeed_stage_3."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.convert_contents import DAMAGED, UNSUPPORTED, Contents, Key, Optimizer, Refused, Scheduler
from evenstep.convert_deepspeed_stage_3 import (
    keys_of,
    model_file,
    read_frozen,
    read_groups,
    settings_of,
    vectors_of,
)
from evenstep.convert_torch import add_model, is_something, load_safely, optimizer_of, tensors_of

_MODEL_FILE = "mp_rank_00_model_states.pt"
_STAGE_3_FILE = model_file(0)
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
_KNOWN = (
    "module",
    "optimizer",
    "lr_scheduler",
    "global_steps",
    "param_shapes",
    "buffer_names",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
)
_BOOKKEEPING = (
    "csr_tensor_module_names",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "data_sampler",
    "random_ltd",
)


def names_of_its_own() -> frozenset[str]:
    """Of the model's file: entries of the user's may not have these."""
    return frozenset((*_KNOWN, *_BOOKKEEPING, "epoch", "optimizer_state_dict"))


def _has_model(folder: Path) -> bool:
    return (folder / _MODEL_FILE).is_file() or (folder / _STAGE_3_FILE).is_file()


def _has_optimizer(folder: Path) -> bool:
    return any(_OPTIMIZER_FILE.match(path.name) for path in folder.iterdir())


def _find(folder: Path, has: Callable[[Path], bool]) -> Path | None:
    """This folder, or the one that `latest` names."""
    if has(folder):
        return folder
    latest = folder / "latest"
    if not latest.is_file() or latest.stat().st_size > 1024:
        return None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag in ("", ".", "..") or "/" in tag or "\0" in tag or not (folder / tag).is_dir():
        return None
    return _find(folder / tag, has) if tag != "latest" else None


def checkpoint_in(folder: Path) -> Path | None:
    """The folder with the files: this one, or the one that `latest` names. None: it is not DeepSpeed's."""
    return _find(folder, _has_model)


def refuse_without_model(folder: Path) -> None:
    """Raises Refused where files of optimizer states are there alone. Ask last: other folders may have such, too."""
    found = _find(folder, _has_optimizer)
    if found is not None:
        raise Refused(
            f"{found} has neither {_MODEL_FILE} nor {_STAGE_3_FILE}: the model's file is missing", "", DAMAGED
        )


def _optimizer_files(folder: Path) -> list[Path]:
    found = {}
    for path in folder.iterdir():
        match = _OPTIMIZER_FILE.match(path.name)
        if match is None:
            continue
        if int(match.group(2)) != 0:
            raise Refused(
                f"{folder} was written by tensor-parallel ranks ({path.name})",
                "merge it with DeepSpeed's ds_to_universal.py first",
                UNSUPPORTED,
            )
        found[int(match.group(1))] = path
    ranks = sorted(found)
    if ranks != list(range(len(ranks))):
        raise Refused(f"{folder} has optimizer files of ranks {ranks}: others are missing", "", DAMAGED)
    return [found[rank] for rank in ranks]


def _entry(path: Path, value: Any, key: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise Refused(f"{path} has no {key!r}: it is no file of DeepSpeed's ZeRO", "", DAMAGED)
    return value[key]


def _holds(values: int, shapes: dict[str, Any], align: int) -> bool:
    """Whether a vector of so many values has the parameters', and no more than fill it up."""
    wanted = sum(math.prod(shape) for shape in shapes.values())
    return wanted <= values and -(-wanted // align) == -(-values // align)


def _cut(folder: Path, flat: torch.Tensor, shapes: dict[str, Any], align: int) -> dict[str, torch.Tensor]:
    """The parameters, one after the other in `flat`, which is padded at its end."""
    wanted = sum(math.prod(shape) for shape in shapes.values())
    if not _holds(flat.numel(), shapes, align):
        raise Refused(f"{folder}: a group has {flat.numel()} values, its parameters need {wanted}", "", DAMAGED)
    parts = {}
    at = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        parts[name] = flat[at : at + count].view(tuple(shape))
        at += count
    return parts


def _join(pieces: list[Any], folder: Path) -> torch.Tensor:
    return torch.cat(vectors_of(pieces, f"{folder}: a rank's file has no flat vector of values"))


def _flat_groups(folder: Path, zero: list[dict[str, Any]], shapes: list[dict[str, Any]], key: str) -> list[list[Any]]:
    """For each group the ranks' pieces."""
    groups: list[Any] = [state.get(key) for state in zero]
    if not all(isinstance(group, (list, tuple)) and len(group) == len(shapes) for group in groups):
        raise Refused(f"{folder}: {key} has not one vector for each of {len(shapes)} groups", "", DAMAGED)
    return [[group[i] for group in groups] for i in range(len(shapes))]


def _states(folder: Path, ranks: list[Any], size: int, group: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """What the optimizer keeps of one group's parameters. Raises ValueError where its form is not known."""
    align = 2 * len(ranks)
    state: dict[Key, dict[str, Any]] = {name: {} for name in group}
    for key in keys_of(ranks, size):
        own = [rank[key] for rank in ranks]
        first = own[0]
        if isinstance(first, torch.Tensor) and first.dim() == 1 and first.numel() > 1:
            flat = _join(own, folder)
            if not _holds(flat.numel(), group, align) and flat.numel() == len(ranks) * first.numel():
                raise ValueError(f"{key!r} has not as many values as its parameters")
            for name, part in _cut(folder, flat, group, align).items():
                state[name][key] = part
        elif isinstance(first, torch.Tensor) and first.numel() > 1:
            raise ValueError(f"{key!r} has not as many values as its parameters")
        else:
            for name in group:
                state[name][key] = first.clone() if isinstance(first, torch.Tensor) else first
    return state


def _low_stage(into: Contents, folder: Path, zero: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> None:
    align = 2 * len(zero)
    vectors = _flat_groups(folder, zero, shapes, "single_partition_of_fp32_groups")
    for pieces, group in zip(vectors, shapes):
        into.model().update(_cut(folder, _join(pieces, folder), group, align))
    bases: list[Any] = [state.get("base_optimizer_state") for state in zero]
    if not all(isinstance(base, dict) and isinstance(base.get("param_groups"), list) for base in bases):
        into.leave("the optimizer's state: it is of DeepSpeed's elastic form, or left out")
        return
    state: dict[Key, dict[str, Any]] = {}
    try:
        for i, (pieces, group) in enumerate(zip(vectors, shapes)):
            state.update(_states(folder, [base["state"].get(i, {}) for base in bases], pieces[0].numel(), group))
    except ValueError as error:
        into.leave(f"the optimizer's state: {error}")
        return
    settings = settings_of(bases[0]["param_groups"])
    if len(settings) != len(shapes):
        into.leave("the optimizer's state: its groups are not those of the weights")
        return
    kept = {name: values for name, values in state.items() if values}
    into.optimizers["optimizer"] = Optimizer(settings, [list(group) for group in shapes], kept)


def _ordered(into: Contents, names: list[str]) -> None:
    """In the order of the module's own state_dict(), where that is known."""
    model = into.model()
    first = {name: model[name] for name in names if name in model}
    into.models["model"] = {**first, **model}


def _read_zero(into: Contents, folder: Path, main: Path, model: dict[str, Any], files: list[Path]) -> None:
    zero = [_entry(path, load_safely(path), "optimizer_state_dict") for path in files]
    stage = int(_entry(files[0], zero[0], "zero_stage"))
    count = _entry(files[0], zero[0], "partition_count")
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(files):
        raise Refused(f"{folder} was written by {count} ranks and has the files of {len(files)}", "", DAMAGED)
    shapes = _entry(main, model, "param_shapes")
    shapes = [shapes] if isinstance(shapes, dict) else list(shapes)
    module = tensors_of(model.get("module")) or {}
    buffers = {name: module[name] for name in model.get("buffer_names", ()) if name in module}
    into.models["model"] = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in buffers.items()
    }
    if stage <= 2:
        into.model().update(model.get("frozen_param_fragments") or {})
        _low_stage(into, folder, zero, shapes)
    elif stage == 3:
        read_frozen(into, folder, model.get("frozen_param_shapes") or {}, len(files))
        read_groups(into, folder, zero, shapes)
    else:
        raise Refused(f"{folder} is of ZeRO stage {stage}, which this does not know", "", UNSUPPORTED)
    shared = model.get("shared_params") or {}
    for name, source in shared.items() if isinstance(shared, dict) else shared:
        if source in into.model():
            into.model()[name] = into.model()[source]
    rest = {name: tensor for name, tensor in module.items() if name not in into.model()}
    for name, tensor in rest.items():  # of stage 1 frozen parameters are in the module alone
        if stage == 3 and tensor.numel() == 0:
            into.leave(f"{name}: no file has its values")
        else:
            into.model()[name] = tensor.float() if tensor.is_floating_point() else tensor
    _ordered(into, list(module))
    into.format = f"DeepSpeed ZeRO stage {stage}, {len(files)} ranks"
    into.note("weights are the optimizer's fp32 ones, not the lower precision that the model ran in")


def read_folder(folder: Path) -> Contents:
    """`folder`: what checkpoint_in gave."""
    into = Contents("DeepSpeed", {"model": {}})
    main = folder / _MODEL_FILE if (folder / _MODEL_FILE).is_file() else folder / _STAGE_3_FILE
    model = load_safely(main)
    if not isinstance(model, dict):
        raise Refused(f"{main} is no file of DeepSpeed's", "", DAMAGED)
    if any(path.name.startswith("mp_rank_01") for path in folder.iterdir()):
        raise Refused(f"{folder} was written by tensor-parallel ranks", "merge it with ds_to_universal.py", UNSUPPORTED)
    files = _optimizer_files(folder)
    if not files and main.name == _STAGE_3_FILE:
        raise Refused(f"{folder} has no files of optimizer states, where ZeRO 3 has the weights, too", "", DAMAGED)
    if files:
        _read_zero(into, folder, main, model, files)
    else:
        if tensors_of(model.get("module")) is None:
            raise Refused(f"{main} has no weights, and no file of an optimizer's is there", "", DAMAGED)
        add_model(into, "model", model["module"])
        if isinstance(model.get("optimizer"), dict) and "param_groups" in model["optimizer"]:
            into.optimizers["optimizer"] = optimizer_of(model["optimizer"], into.model())
    if isinstance(model.get("lr_scheduler"), dict):
        into.schedulers["scheduler"] = Scheduler(model["lr_scheduler"])
    steps, epoch = model.get("global_steps"), model.get("epoch")
    into.step = steps if isinstance(steps, int) else None
    into.epoch = epoch if type(epoch) is int and epoch >= 0 else None
    for key, value in model.items():
        if key in _BOOKKEEPING and is_something(value):
            into.leave(f"{key!r} of DeepSpeed's own")
        elif key not in _KNOWN and key not in _BOOKKEEPING and not (key == "epoch" and into.epoch is not None):
            into.extra[str(key)] = value
    optimizer = model.get("optimizer")
    if optimizer is not None and not into.optimizers:
        wide = isinstance(optimizer, dict) and any(str(key).startswith("fp32_groups") for key in optimizer)
        into.leave(
            "'optimizer' of DeepSpeed's own" + (", and its fp32 weights, too: those are the module's" if wide else "")
        )
    return into
