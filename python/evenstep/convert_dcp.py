"""Folders of torch.distributed.checkpoint (DCP). torch reads their .metadata with pickle, which would run what a file
says; here only DCP's own records are made from it, and tensors are read as weights alone."""

from __future__ import annotations

import collections
import io
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, filesystem
from torch.distributed.checkpoint import metadata as records

from evenstep.convert_contents import DAMAGED, UNSUPPORTED, Contents, Refused
from evenstep.convert_torch import first_line, interpret, leave_further, load_safely, model_to_torch

METADATA = ".metadata"


class _Records(pickle.Unpickler):
    """Makes DCP's records, and nothing else."""

    path = Path()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _RECORDS:
            return getattr(records, name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")):
            return _path_text
        raise Refused(
            f"{self.path} holds {module}.{name}, which is no record of DCP's; nothing in a file is ever run",
            "do not load this folder with torch either, unless you trust where it comes from",
        )


_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)


def _layout(name: str) -> Any:
    return getattr(torch, str(name).rpartition(".")[2]) if name == "torch.strided" else None


def _path_text(*parts: str) -> str:
    return "/".join(map(str, parts))


def _read_metadata(folder: Path) -> Any:
    path = folder / METADATA
    reader = _Records(io.BytesIO(path.read_bytes()))
    reader.path = path
    try:
        metadata = reader.load()
    except Refused:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise Refused(f"{path} is damaged: {type(error).__name__}: {first_line(error)}", "", DAMAGED) from None
    if not isinstance(metadata, records.Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise Refused(f"{path} is damaged: it is no record of DCP's", "", DAMAGED)
    return metadata


class _Folder:
    """The entries of a folder, read one by one."""

    def __init__(self, folder: Path, storage: Any) -> None:
        self._folder = folder
        self._places: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, info in storage.items() if isinstance(storage, dict) else ():
            offset = None if getattr(index, "offset", None) is None else tuple(index.offset)
            self._places.setdefault(index.fqn, {})[offset] = info

    def _damaged(self, name: str, why: str) -> Refused:
        return Refused(f"{self._folder} is damaged: entry {name!r} {why}", "", DAMAGED)

    def _load(self, name: str, info: Any) -> Any:
        place = str(info.relative_path)
        if place in ("", ".", "..") or "/" in place or "\0" in place or (self._folder / place).is_symlink():
            raise self._damaged(name, f"lies in {place!r}, which is no file of this folder")
        if getattr(info, "transform_descriptors", None):
            raise Refused(
                f"{self._folder}: entry {name!r} is compressed or encrypted ({', '.join(info.transform_descriptors)})",
                "save it without _extensions",
                UNSUPPORTED,
            )
        path = self._folder / place
        if not path.is_file():
            raise self._damaged(name, f"lies in {place}, which is not there")
        if not 0 <= info.offset <= info.offset + info.length <= path.stat().st_size:
            raise self._damaged(name, f"lies beyond the end of {place}")
        with path.open("rb") as file:
            file.seek(info.offset)
            return load_safely(path, file.read(info.length))

    def value(self, name: str) -> Any:
        places = self._places.get(name, {})
        if len(places) != 1:
            raise self._damaged(name, "has no place in a file")
        return self._load(name, next(iter(places.values())))

    def tensor(self, name: str, about: Any) -> torch.Tensor:
        sizes = [tuple(chunk.sizes) for chunk in about.chunks]
        if sum(math.prod(size) for size in sizes) != math.prod(about.size):
            raise self._damaged(name, "is not covered by its parts")
        parts = []
        for chunk, size in zip(about.chunks, sizes):
            begin = tuple(chunk.offsets)
            places = self._places.get(name, {})
            info = places.get(begin, places.get(None))
            fits = len(begin) == len(size) == len(about.size)
            if info is None or not fits or any(o < 0 or o + s > n for o, s, n in zip(begin, size, about.size)):
                raise self._damaged(name, "has a part without a place")
            part = self._load(name, info)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != size:
                raise self._damaged(name, "has a part of another shape")
            parts.append((begin, part.detach()))
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(tuple(about.size), dtype=about.properties.dtype)
        for begin, part in parts:
            whole[tuple(slice(o, o + n) for o, n in zip(begin, part.shape))] = part
        return whole


def _nest(flat: dict[str, Any], paths: Any) -> Any:
    """Puts entries back where the saved dictionary had them."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    return _lists(root)


def _lists(value: Any) -> Any:
    """Dictionaries of 0, 1, 2 … were lists; not so those of an optimizer's state, whose parameters have numbers."""
    if not isinstance(value, dict):
        return value
    made = {key: item if key == "state" else _lists(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made) and set(made) == set(range(len(made))):
        return [made[place] for place in range(len(made))]  # ranks write theirs in any order
    if isinstance(made.get("param_groups"), list):
        made.setdefault("state", {})  # DCP keeps no empty dictionary
    return made


def read_folder(folder: Path) -> Contents:
    metadata = _read_metadata(folder)
    source = _Folder(folder, metadata.storage_data)
    flat = {}
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, records.TensorStorageMetadata):
            flat[name] = source.tensor(name, about)
        else:
            flat[name] = source.value(name)
    return interpret(_nest(flat, metadata.planner_data), folder, "DCP")


def write_folder(contents: Contents, folder: Path) -> None:
    """{"model": …, "optimizer": …} with states by name, as torch's get_state_dict() gives them."""
    leave_further(contents, "models", "optimizers", "schedulers")
    state: dict[str, Any] = {"model": model_to_torch(contents)}
    for optimizer in [*contents.optimizers.values()][:1]:
        groups = [{**settings, "params": keys} for settings, keys in zip(optimizer.groups, optimizer.members)]
        state["optimizer"] = {**optimizer.other, "state": optimizer.state, "param_groups": groups}
    for scheduler in [*contents.schedulers.values()][:1]:
        state["scheduler"] = scheduler.state
    for key, value in (("step", contents.step), ("epoch", contents.epoch)):
        if value is not None:
            state[key] = value
    for key, value in contents.extra.items():
        if key in state:
            contents.leave(f"{key!r} of the input's own entries: the format has another of that name")
        else:
            state[key] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there is what was asked for
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        except CheckpointException as error:  # it wraps what went wrong on each rank
            raise next(iter(error.failures.values()))[0] from None
