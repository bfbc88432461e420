"""What a checkpoint holds of a model, and how it is compared with a model here and put into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from evenstep._core import EvenstepError
from evenstep.checkpoint_block import move
from evenstep.checkpoint_encoding import decode, encode
from evenstep.checkpoint_files import find_tied, index_of, shard_name, total_bytes
from evenstep.checkpoint_reading import StoredFiles, files_of
from evenstep.checkpoint_snapshot import OTHER_FILE, Snapshot, Tensors


def parameter_names(models: dict[str, Any]) -> dict[int, str]:
    """id of a parameter -> its name; those of a second model begin with "model_1:"."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        prefix = "" if model_name == "model" else f"{model_name}:"
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return names


_LEAST_APART = 1 << 20  # bytes: less is written again, for less


def save_model(name: str, model: Any, into: Snapshot) -> None:
    tensors: Tensors = {}
    other: Tensors = {}
    extra = {}
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:  # what get_extra_state gives
            extra[key] = encode(value, f"{name}/{key}", other)
    tied = find_tied(tensors)
    own = {key: value for key, value in tensors.items() if key not in tied}
    parts = _apart(model, own)
    files = [shard_name(name, i, len(parts)) for i in range(len(parts))]
    for file, part in zip(files, parts):
        into.files[file] = {key: own[key] for key in part}
        into.metadata[file] = [
            (key, of) for key, of in tied.items() if of in part
        ]  # as safetensors' load_model reads them
    into.files[OTHER_FILE].update(other)
    into.state["models"][name] = {"file": files[0], "tied": tied, "extra": extra}
    if len(files) > 1:
        where = {key: file for file, part in zip(files, parts) for key in part}
        index = f"{name}.safetensors.index.json"
        into.tables[index] = index_of(where, total_bytes(own))
        into.state["models"][name].update(files=files, index=index)


def _apart(model: Any, tensors: Tensors) -> list[list[str]]:
    """Names by file: what is trained, and what is frozen, where that is worth a file of its own. A file that is as it was
    in the checkpoint before is not written again."""
    fixed = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen = [key for key in tensors if key in fixed]
    trained = [key for key in tensors if key not in fixed]
    size = sum(tensors[key].numel() * tensors[key].element_size() for key in frozen)
    return [trained, frozen] if trained and size >= _LEAST_APART else [list(tensors)]


_MOST_LISTED = 16  # of a kind: who has more wrong has another model


def listed(items: Iterable[str]) -> str:
    texts = sorted(items)
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return f"{', '.join(texts[:_MOST_LISTED])}{more}"


def difference(what: str, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    parts = []
    for kind, names in (("lacks", list(missing)), ("has, unknown here,", list(unexpected))):
        if names:
            parts.append(f"{kind} {listed(names)}")
    return f"the checkpoint's {what} {'; it '.join(parts)}"


def _tensor_difference(key: str, saved: torch.Tensor, here: torch.Tensor) -> str:
    """ "" where they fit."""
    if isinstance(here, torch.nn.parameter.UninitializedTensorMixin):
        return ""
    if saved.shape != here.shape:
        return f"{key!r} has the shape {list(saved.shape)} in the checkpoint and {list(here.shape)} here"
    if saved.dtype != here.dtype:
        return f"{key!r} has the type {saved.dtype} in the checkpoint and {here.dtype} here"
    return ""


def _is_extra(key: str) -> bool:
    """What a module's get_extra_state gave: its own affair, whatever its form."""
    return key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _tied_in(saved: dict[str, Any], here: dict[str, Any], own: Iterable[str]) -> dict[str, str]:
    """Keys that are not stored -> those whose tensors they share: as the checkpoint says, and as the model here has it, for a
    file of another library stores such a tensor once and does not say of whom else it is."""
    tied: dict[str, str] = dict(saved["tied"])
    first = find_tied({key: value for key, value in here.items() if isinstance(value, torch.Tensor)})
    stored = {first.get(key, key): key for key in here if key in own}
    for key in here:
        if key not in own and key not in tied and first.get(key, key) in stored:
            tied[key] = stored[first.get(key, key)]
    return tied


def check_model(name: str, model: Any, saved: dict[str, Any], files: StoredFiles) -> None:
    """All that does not fit is told at once: names, shapes, types."""
    here, extra = model.state_dict(), saved["extra"]
    told = []
    own = files.tensors(files_of(saved))
    tied = _tied_in(saved, here, own)
    there = {*own, *(key for key, source in tied.items() if source in own), *extra}
    if there != set(here):
        told.append(difference(f"model {name!r}", set(here) - there, there - set(here)))
    both = [key for key in here if key in there and key not in extra and not _is_extra(key)]
    tensors = [_tensor_difference(key, own[tied.get(key, key)], here[key]) for key in both]
    others = [text for text in tensors if text]
    if others:
        told.append(f"model {name!r}: tensor {listed(others)}")
    if told:
        only_types = len(told) == 1 and bool(others) and all("has the type" in text for text in others)
        fix = "convert the model to that type before es.prepare" if only_types else ""
        text = "; ".join(told)
        raise EvenstepError(f"{text}\n  fix: {fix or 'build the model as it was when the checkpoint was written'}")


def load_model(model: Any, saved: dict[str, Any], files: StoredFiles, other: Any) -> None:
    here, extra = model.state_dict(), saved["extra"]
    own = files.tensors(files_of(saved))
    tied = _tied_in(saved, here, own)
    files.drop(files_of(saved))
    state = {
        key: decode(extra[key], other, value) if key in extra else own[tied.get(key, key)]
        for key, value in here.items()
    }
    _put_in_place(model, state, extra)
    model.load_state_dict(state)


def _put_in_place(model: Any, state: dict[str, Any], extra: Any) -> None:
    """Copies what is plain memory by several threads. The model gets these tensors as its own then, and copies nothing more:
    what its modules do when they are loaded they do all the same."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    live = model.state_dict(keep_vars=True)
    keys = [key for key in state if key not in extra and not _is_extra(key) and isinstance(live.get(key), torch.Tensor)]
    for key, done in zip(keys, move([(live[key], state[key]) for key in keys])):
        if done:
            state[key] = live[key]
