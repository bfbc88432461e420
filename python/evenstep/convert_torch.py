"""Files of torch.save: read without running anything in them, whatever dictionary they hold, and written.

Known dictionaries: a bare state_dict; the usual training checkpoint ("model_state_dict", "optimizer_state_dict",
"scheduler_state_dict", "epoch", "step", "metrics"; several spellings); Lightning's .ckpt."""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from evenstep.convert_contents import DAMAGED, INPUT, UNSUPPORTED, Contents, Optimizer, Refused, Scheduler, numbered

_MODEL_KEYS = ("model_state_dict", "state_dict", "model", "net", "module", "weights")
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optim", "optimizer_states", "optimizers", "optim_state_dict")
_SCHEDULER_KEYS = ("scheduler_state_dict", "lr_scheduler_state_dict", "lr_scheduler", "scheduler", "lr_schedulers")
_STEP_KEYS = ("step", "global_step", "global_steps", "iteration", "iter", "steps")
_LIGHTNING = "pytorch-lightning_version"


# -- reading without running code --


class _Inert:
    """Stands for an object of another library's: holds what was in the file, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.arguments = args


class _InertNumber(int):
    """Stands for a member of another library's enumeration."""


# What Lightning and DeepSpeed put into their files beside tensors. Everything else that is code is refused.
_STAND_INS: list[tuple[Any, str]] = [
    (dict, "lightning.fabric.utilities.data.AttributeDict"),
    (dict, "lightning_fabric.utilities.data.AttributeDict"),
    (dict, "lightning.pytorch.utilities.parsing.AttributeDict"),
    (dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    (_Inert, "argparse.Namespace"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_InertNumber, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]

_REASON = re.compile(r"WeightsUnpickler error:\s*([^\n]+)")
_NAMED = re.compile(r"(?:GLOBAL|global|class|instruction:|function)\s+(?:<[a-z-]+ )?'?([A-Za-z_][\w.]*)")


def load_safely(path: Path, data: bytes | None = None) -> Any:
    """torch.load of weights alone; `data`: bytes of the file instead of all of it. Raises Refused."""
    source: Any = path if data is None else io.BytesIO(data)
    mapped = data is None and _is_zip(path)
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # what the end of a zip file, looked for before its beginning, comes to
            raise
        raise Refused(f"{path} is damaged: it is cut off", "check the copy's size", DAMAGED) from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, UnicodeError) as error:
        if "TorchScript" in str(error):
            raise _refusal(path, str(error)) from None
        raise Refused(
            f"{path} is damaged, or no file of torch.save: {first_line(error)}",
            "check the copy: its size, its checksum where there is one",
            DAMAGED,
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _refusal(path: Path, text: str) -> Refused:
    if "TorchScript" in text:
        what = "is a TorchScript program"
    elif "GLOBAL" in text or "global" in text or "reduce" in text or "class" in text:
        found = _NAMED.search(text)
        what = f"holds more than weights: {found.group(1)}" if found else "holds more than weights"
    else:
        # torch's first lines are advice to load it with code and all, which is no fix here
        reason = _REASON.search(text)
        told = reason.group(1)[:300] if reason else "torch's reader of weights cannot read it"
        return Refused(
            f"{path} is damaged, or no file of torch.save: {told}",
            "check the copy: its size, its checksum where there is one; a plain pickle is never read",
            DAMAGED,
        )
    return Refused(
        f"{path} {what}, which is code of someone's; nothing in a file is ever run",
        "where you trust it: load it in Python with that code at hand, and torch.save() its state_dict() alone",
        INPUT,
    )


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


# -- what a dictionary means --


def tensors_of(value: Any) -> dict[str, torch.Tensor] | None:
    """The tensors, where it is a state_dict: names to tensors, but for what get_extra_state gave."""
    if not isinstance(value, Mapping) or not value:
        return None
    tensors = {}
    for key, item in value.items():
        if not isinstance(key, str):
            return None
        if isinstance(item, torch.Tensor):
            tensors[key] = item.detach()
        elif not key.endswith("_extra_state"):
            return None
    return tensors or None


_PREFIXES = {"module.": "DDP's", "_orig_mod.": "torch.compile's"}


def _without(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in values.items()}


def add_model(into: Contents, name: str, value: Any) -> None:
    tensors = dict(tensors_of(value) or {})
    extra = {key: item for key, item in value.items() if key not in tensors}
    for prefix, whose in [*_PREFIXES.items()] * 2:  # one may be around the other
        if all(key.startswith(prefix) for key in (*tensors, *extra)):
            tensors, extra = _without(prefix, tensors), _without(prefix, extra)
            into.note(f"the prefix {prefix!r} ({whose}) was taken off the names of {name}'s tensors")
    into.models[name] = tensors
    if extra:
        into.model_extra[name] = extra


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def _bare(name: Any, known: dict[str, torch.Tensor]) -> Any:
    """The name as the model has it."""
    while isinstance(name, str) and name not in known:
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is None:
            break
        name = name[len(prefix) :]
    return name


def optimizer_of(value: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Optimizer:
    """From an optimizer's state_dict(), whose parameters are numbers (torch's), or names (DCP's)."""
    name_of: dict[Any, Any] = {}
    members: list[list[Any]] = []
    for group in value["param_groups"]:
        keys, names = list(group["params"]), group.get("param_names")
        if isinstance(names, (list, tuple)) and len(names) == len(keys):
            name_of.update(zip(keys, names))
        members.append(keys)
    every = [key for keys in members for key in keys]
    names = {key: _bare(name_of.get(key, key), tensors) for key in every}
    if not all(names[key] in tensors for key in every):  # names of something else, or none
        names = {key: place for place, key in enumerate(every)}
    state = {names.get(key, key): dict(item) for key, item in value["state"].items() if isinstance(item, Mapping)}
    return Optimizer(
        groups=[
            {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in value["param_groups"]
        ],
        members=[[names[key] for key in keys] for keys in members],
        state=state,
        other={key: item for key, item in value.items() if key not in ("state", "param_groups")},
    )


def _add_optimizers(into: Contents, key: str, value: Any) -> None:
    each = value if isinstance(value, (list, tuple)) else [value]
    for index, one in enumerate(each):
        if _is_optimizer(one):
            if not all(isinstance(item, Mapping) for item in one["state"].values()):
                into.leave(f"entries of {key!r} that are no states of a parameter")
            into.optimizers[numbered("optimizer", index)] = optimizer_of(one, into.model())
        elif one is not None:
            into.leave(f"{key!r}: it is no state_dict() of an optimizer of torch's form")


def _add_schedulers(into: Contents, key: str, value: Any) -> None:
    for index, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        if isinstance(one, Mapping):
            into.schedulers[numbered("scheduler", index)] = Scheduler(dict(one))
        elif one is not None:
            into.leave(f"{key!r}: it is no state_dict() of a scheduler")


def _number(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _take(value: dict[Any, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    for key in keys:
        if key in value:
            return key, value.pop(key)
    return "", None


def _take_number(value: dict[Any, Any], keys: tuple[str, ...]) -> int | None:
    """The first of them that is a count; what is none stays, as an entry of the user's."""
    key = next((key for key in keys if _number(value.get(key)) is not None), None)
    return None if key is None else _number(value.pop(key))


def is_something(value: Any) -> bool:
    """Whether there is anything in an entry: of a tensor that is no matter of its values."""
    return value.numel() > 0 if isinstance(value, torch.Tensor) else bool(value)


def interpret(value: Any, origin: Path, kind: str) -> Contents:
    """What a loaded dictionary holds. Raises Refused where there are no weights that this knows."""
    if tensors_of(value) is not None:
        into = Contents("a state_dict" if kind == "torch" else kind)
        add_model(into, "model", value)
        return into
    if not isinstance(value, Mapping):
        what = "one tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise Refused(f"{origin} holds {what}, not a dictionary with weights", "save a state_dict()")
    rest = dict(value)
    lightning = _LIGHTNING in rest
    into = Contents("Lightning" if lightning and kind == "torch" else kind)
    model = next((key for key in _MODEL_KEYS if tensors_of(rest.get(key)) is not None), None)
    if model is None:
        names = ", ".join(map(repr, list(rest)[:12])) or "nothing"
        raise Refused(
            f"{origin} holds no weights that this knows: its keys are {names}",
            f"weights are looked for as a state_dict() by itself, or under {', '.join(_MODEL_KEYS)}",
            UNSUPPORTED,
        )
    add_model(into, "model", rest.pop(model))
    key, found = _take(rest, _OPTIMIZER_KEYS)
    _add_optimizers(into, key, found)
    key, found = _take(rest, _SCHEDULER_KEYS)
    _add_schedulers(into, key, found)
    into.epoch = _take_number(rest, ("epoch",))
    into.step = _take_number(rest, _STEP_KEYS)
    if lightning:
        rest.pop(_LIGHTNING)
        for name in list(rest):
            if is_something(rest[name]):
                into.leave(f"{name!r} of Lightning's file")
            del rest[name]
    into.extra.update({str(name): item for name, item in rest.items()})
    return into


# -- writing --


def optimizer_to_torch(optimizer: Optimizer) -> dict[str, Any]:
    place = {key: i for i, key in enumerate(optimizer.keys())}
    groups = []
    for settings, members in zip(optimizer.groups, optimizer.members):
        group = {**settings, "params": [place[key] for key in members]}
        if optimizer.is_named():
            group["param_names"] = list(members)
        groups.append(group)
    state = {place.get(key, key): value for key, value in optimizer.state.items()}
    return {**optimizer.other, "state": state, "param_groups": groups}


def model_to_torch(contents: Contents, name: str = "model") -> dict[str, Any]:
    return {**contents.models[name], **contents.model_extra.get(name, {})}


def leave_further(contents: Contents, *kinds: str) -> None:
    """For formats with room for one of each."""
    for kind in kinds:
        for name in list(getattr(contents, kind))[1:]:
            contents.leave(f"{name}: the format has one of {kind} alone")


def six_keys(contents: Contents) -> dict[str, Any]:
    leave_further(contents, "models", "optimizers", "schedulers")
    optimizer = next(iter(contents.optimizers.values()), None)
    scheduler = next(iter(contents.schedulers.values()), None)
    extra = dict(contents.extra)
    written = {
        "model_state_dict": model_to_torch(contents),
        "optimizer_state_dict": None if optimizer is None else optimizer_to_torch(optimizer),
        "scheduler_state_dict": None if scheduler is None else scheduler.state,
        "epoch": contents.epoch or 0,
        "step": contents.step or 0,
        "metrics": extra.pop("metrics", {}),
    }
    for key, value in extra.items():
        if key in written:
            contents.leave(f"{key!r} of the input's own entries: the format has another of that name")
        else:
            written[key] = value
    return written


def lightning(contents: Contents) -> dict[str, Any]:
    leave_further(contents, "models")
    for key in contents.extra:
        contents.leave(f"{key!r} of the input's own entries: Lightning's file has no place for it")
    return {
        "state_dict": model_to_torch(contents),
        "optimizer_states": [optimizer_to_torch(one) for one in contents.optimizers.values()],
        "lr_schedulers": [one.state for one in contents.schedulers.values()],
        "epoch": contents.epoch or 0,
        "global_step": contents.step or 0,
        "callbacks": {},
        _LIGHTNING: "2.0.0",
    }


def save(value: Any, file: BinaryIO) -> None:
    torch.save(value, file)
