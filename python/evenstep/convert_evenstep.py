"""Evenstep's own checkpoints as a format beside others: read with every checksum compared, and written."""

from __future__ import annotations

import json
import platform
import secrets
from pathlib import Path
from typing import Any

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.checkpoint_encoding import UnsavableState, decode, encode
from evenstep.checkpoint_files import TensorFile, find_tied, read_manifest, total_bytes, verify, write_tensors
from evenstep.checkpoint_keeping import order_beside
from evenstep.checkpoint_reading import files_of
from evenstep.convert_contents import (
    DAMAGED,
    UNSUPPORTED,
    Contents,
    Optimizer,
    Refused,
    Scheduler,
    Tensors,
    name_optimizers,
)

_OTHER = "state.safetensors"
_FOR_EVENSTEP = {  # parts of the state that no other format has a place for, in words
    "random": "the ranks' generators of random numbers",
    "loaders": "the data position",
    "objects": "the state of other prepared objects",
    "exchange": "what the exchange of gradients remembered",
}


def refused(error: EvenstepError) -> Refused:
    """What cannot be read of a checkpoint, with its exit code."""
    what, _, fix = str(error).partition("\n  fix: ")
    return Refused(what, fix, UNSUPPORTED if "another version" in fix else DAMAGED)


def read_folder(folder: Path) -> Contents:
    try:
        manifest = read_manifest(folder)
        verify(folder, manifest)
        return _contents(folder, manifest["state"])
    except EvenstepError as error:
        raise refused(error) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(
            f"{folder} is damaged: its state is not what was written: {type(error).__name__}: {error}", "", DAMAGED
        ) from None


def _contents(folder: Path, state: dict[str, Any]) -> Contents:
    into = Contents("Evenstep", step=state.get("step"), epoch=state.get("epoch"))

    def other(name: str) -> torch.Tensor:
        with TensorFile(folder / _OTHER) as file:
            return file.read(name)

    for name, saved in state["models"].items():
        tensors = _tensors(folder, saved)
        into.models[name] = {**tensors, **{key: tensors[of] for key, of in saved["tied"].items()}}
        extra = {key: decode(value, other) for key, value in saved["extra"].items()}
        if extra:
            into.model_extra[name] = extra
    for name, saved in state["optimizers"].items():
        _read_optimizer(into, name, saved, folder)
    for name, saved in state["schedulers"].items():
        into.schedulers[name] = Scheduler(decode(saved["state"], other), saved["class"])
    extra = decode(state.get("extra"), other)
    into.extra = dict(extra) if isinstance(extra, dict) else {} if extra is None else {"extra": extra}
    for key, words in _FOR_EVENSTEP.items():
        if state.get(key):
            into.leave(f"{words}: it means something to Evenstep alone")
    if not into.models:
        raise Refused(f"{folder} holds no model")
    if "model" not in into.models:
        first = next(iter(into.models))
        into.models = {"model": into.models.pop(first), **into.models}
    return into


def _tensors(folder: Path, saved: dict[str, Any]) -> Tensors:
    """Of a model or an optimizer, out of all its files."""
    tensors: Tensors = {}
    for name in files_of(saved):
        with TensorFile(folder / name) as file:
            tensors.update({key: file.read(key) for key in file.names()})
    return tensors


def _read_optimizer(into: Contents, name: str, saved: dict[str, Any], folder: Path) -> None:
    if "whole" in saved:
        into.leave(f"the state of {name} ({saved['class']}): it has a form of its own")
        return
    give = _tensors(folder, saved).__getitem__
    other = decode(saved["other"], give)
    into.optimizers[name] = Optimizer(
        groups=[decode(group, give) for group in saved["groups"]],
        members=[[key for key, _ in group] for group in saved["parameters"]],
        state={key: decode(value, give) for key, value in saved["state"].items()},
        class_name=saved["class"],
        other=other["keys"],
    )
    for key in other["state"]:
        into.leave(f"entry {key!r} of {name}, which belongs to no parameter")


# -- writing --


class _Snapshot:
    """Files and state of a checkpoint under construction."""

    def __init__(self, contents: Contents) -> None:
        self.files: dict[str, Tensors] = {}
        self.metadata: dict[str, list[tuple[str, str]]] = {}
        self.other: Tensors = {}
        self.state: dict[str, Any] = {
            "lineage": secrets.token_hex(16),
            "process_set": "",
            "job": "",
            "step": contents.step or 0,
            "epoch": contents.epoch or 0,
            "world_size": 1,
            "seed": 0,
            "versions": {"evenstep": _core.version, "torch": torch.__version__, "python": platform.python_version()},
            "converted": contents.format,
            "models": {},
            "optimizers": {},
            "schedulers": {},
            "loaders": {},
            "random": {},
            "exchange": {},
            "between": False,
        }

    def add_model(self, contents: Contents, name: str) -> None:
        file = f"{name}.safetensors"
        tied = find_tied(contents.models[name])
        tensors = {key: value for key, value in contents.models[name].items() if key not in tied}
        extra = contents.model_extra.get(name, {})
        encoded = {key: encode(value, f"{name}/{key}", self.other) for key, value in extra.items()}
        self.files[file], self.metadata[file] = tensors, list(tied.items())
        self.state["models"][name] = {"file": file, "tied": tied, "extra": encoded}

    def add_optimizer(self, contents: Contents, name: str, optimizer: Optimizer) -> None:
        tensors: Tensors = {}
        members = set(optimizer.keys())
        for key in [key for key in optimizer.state if key not in members]:
            contents.leave(f"entry {key!r} of {name}, which belongs to no parameter")
            del optimizer.state[key]
        shapes = {
            key if model == "model" else f"{model}:{key}": list(t.shape)
            for model, tensors_of in contents.models.items()
            for key, t in tensors_of.items()
        }
        self.state["optimizers"][name] = {
            "file": f"{name}.safetensors",
            "class": optimizer.class_name,
            "parameters": [[[key, shapes[str(key)]] for key in group] for group in optimizer.members],
            "groups": [
                {k: encode(v, f"{name}/group{g}/{k}", tensors) for k, v in group.items()}
                for g, group in enumerate(optimizer.groups)
            ],
            "state": {key: encode(value, f"{name}/{key}", tensors) for key, value in optimizer.state.items()},
            "other": encode({"keys": optimizer.other, "state": {}}, f"{name}/other", tensors),
        }
        self.files[f"{name}.safetensors"] = tensors


def _snapshot(contents: Contents) -> _Snapshot:
    into = _Snapshot(contents)
    for name in contents.models:
        into.add_model(contents, name)
    name_optimizers(contents)
    for name, optimizer in contents.optimizers.items():
        into.add_optimizer(contents, name, optimizer)
    for name, scheduler in contents.schedulers.items():
        state = encode(scheduler.state, name, into.other)
        into.state["schedulers"][name] = {"class": scheduler.class_name, "state": state}
    kept = {}
    for key, value in contents.extra.items():
        try:
            encode(value, f"extra/{key}", {})
            kept[key] = value
        except UnsavableState as error:
            contents.leave(f"{key!r} of the input's own entries: {str(error).splitlines()[0]}")
    into.state["extra"] = encode(kept, "extra", into.other) if kept else None
    if into.other:
        into.files[_OTHER] = into.other
    return into


def write_folder(contents: Contents, folder: Path, replace: bool) -> None:
    """The writer of checkpoints makes it whole or not at all, and puts it in place of one that is there."""
    for path in contents.files:
        contents.leave(f"{path.name}: a checkpoint has no place for other files")
    try:
        into = _snapshot(contents)
        into.state["order"] = order_beside(folder)
        text = json.dumps(into.state, ensure_ascii=False, allow_nan=False)
        size = sum(total_bytes(tensors) for tensors in into.files.values()) + len(text)
        writer = _core.CheckpointWriter(folder, replace, size)
        try:
            for name, tensors in into.files.items():
                write_tensors(writer, name, tensors, into.metadata.get(name, ()))
            writer.commit(text)
        finally:
            writer.abandon()
    except UnsavableState as error:
        raise Refused(str(error).splitlines()[0], "", UNSUPPORTED) from None
