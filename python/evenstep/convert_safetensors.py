"""Single .safetensors files and Hugging Face folders: weights in one file or in shards with an index, and what lies
beside them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from evenstep._core import EvenstepError
from evenstep.checkpoint_files import DTYPES, TensorFile, find_tied
from evenstep.convert_contents import DAMAGED, UNSUPPORTED, Contents, Refused, Tensors
from evenstep.convert_torch import add_model, leave_further, load_safely, tensors_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MOST_BESIDE = 64 << 20  # of a file: configurations and tokenizers are small
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


# -- reading --


def _read_tensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors of a file, and the names that its metadata has beside them -> the one whose tensor each is."""
    try:
        with TensorFile(path) as file:
            tensors = {name: file.read(name) for name in file.names()}
            tied = {name: of for name, of in file.metadata.items() if name not in tensors and of in tensors}
    except EvenstepError as error:
        raise Refused(str(error).splitlines()[0], "check the copy, or save it again", DAMAGED) from None
    return tensors, tied


def _add_tied(tensors: Tensors, tied: dict[str, str]) -> None:
    tensors.update({name: tensors[of] for name, of in tied.items() if name not in tensors})


def read_tensors(path: Path) -> Tensors:
    """All tensors of a file, tied ones under each of their names. Raises Refused."""
    tensors, tied = _read_tensors(path)
    _add_tied(tensors, tied)
    return tensors


def read_file(path: Path) -> Contents:
    into = Contents("safetensors", {"model": read_tensors(path)})
    _need_tensors(into, path)
    return into


def _need_tensors(into: Contents, path: Path) -> None:
    if not into.model():
        raise Refused(f"{path} holds no tensors")


def _inside(folder: Path, name: Any, index: Path) -> Path:
    """A file that an index names: of its own folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Refused(f"{index} names {name!r}, which is no file of its folder", "", DAMAGED)
    if not (folder / name).is_file():
        raise Refused(f"{index} names {name}, which is not there", "download the missing shard", DAMAGED)
    return folder / name


def shards_of(folder: Path, index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = list(dict.fromkeys(names.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{index} is no index of shards: {type(error).__name__}: {error}", "", DAMAGED) from None
    return [_inside(folder, name, index) for name in files]


def _merge(into: Tensors, path: Path, more: Tensors) -> None:
    for name in more:
        if name in into:
            raise Refused(f"{path} has the tensor {name!r}, which another shard has, too", "", DAMAGED)
    into.update(more)


def read_folder(folder: Path) -> Contents:
    """A folder as transformers' save_pretrained writes it."""
    into = Contents("a Hugging Face folder", {"model": {}})
    tensors = into.model()
    if (folder / INDEX).exists():
        index = folder / INDEX
        files = shards_of(folder, index)
        tied: dict[str, str] = {}
        for path in files:
            more, names = _read_tensors(path)
            _merge(tensors, path, more)
            tied.update(names)
        _add_tied(tensors, tied)
        wanted = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(set(wanted) - set(tensors))
        if missing:
            raise Refused(f"{index} names the tensor {missing[0]!r}, which no shard has", "", DAMAGED)
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
        tensors.update(read_tensors(files[0]))
    else:
        files = (
            shards_of(folder, folder / _PICKLED_INDEX) if (folder / _PICKLED_INDEX).exists() else [folder / _PICKLED]
        )
        for path in files:
            loaded = load_safely(path)
            if tensors_of(loaded) is None:
                raise Refused(f"{path} holds no state_dict()", "", UNSUPPORTED)
            add_model(into, "shard", loaded)
            _merge(tensors, path, into.models.pop("shard"))
    _need_tensors(into, folder)
    _look_beside(into, folder, {path.name for path in files})
    return into


def _look_beside(into: Contents, folder: Path, read: set[str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.name in read or path.name in (INDEX, _PICKLED_INDEX) or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix not in _WEIGHTS and path.stat().st_size <= _MOST_BESIDE:
            into.files.append(path)
        else:
            into.leave(f"{path.name}: {'a folder' if path.is_dir() else 'weights of another form'} beside the model")


# -- writing --


def prepare(contents: Contents, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """The tensors to store, each memory once, and the names of those left out for that -> the name that has it."""
    tied = find_tied(tensors)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.dtype not in DTYPES:
            raise Refused(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be put into a safetensors file",
                "write a file of torch's instead: --as torch",
                UNSUPPORTED,
            )
    if tied:
        contents.note(
            f"tied tensors are stored once, as safetensors wants it: {', '.join(sorted(tied))} only named there"
        )
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def write_tensors(file: BinaryIO, tensors: Tensors, metadata: dict[str, str]) -> None:
    """One file: header, then the data, widest elements first, so that each is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        plain = tensors[name].detach().resolve_neg().contiguous()
        if plain.numel():
            file.write(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))


def leave_all_but_weights(contents: Contents) -> None:
    """For formats that hold weights and nothing else."""
    leave_further(contents, "models")
    for kind in ("optimizers", "schedulers"):
        for name in getattr(contents, kind):
            contents.leave(f"{name}: the format holds weights alone")
    for name, extra in contents.model_extra.items():
        contents.leave(f"{', '.join(sorted(extra))} of {name}: they are no tensors, and the format holds weights alone")
    for name, value in (("step", contents.step), ("epoch", contents.epoch)):
        if value is not None:
            contents.leave(f"{name} {value}: the format holds weights alone")
    for name in contents.extra:
        contents.leave(f"{name!r} of the input's own entries: the format holds weights alone")


def leave_files(contents: Contents) -> None:
    for path in contents.files:
        contents.leave(f"{path.name}: the format has no place for other files")


def write_file(contents: Contents, file: BinaryIO) -> None:
    leave_all_but_weights(contents)
    leave_files(contents)
    tensors, tied = prepare(contents, contents.model())
    write_tensors(file, tensors, tied)


def _parts(tensors: Tensors, most_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and filled + size > most_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def write_folder(contents: Contents, folder: Path, most_bytes: int, beside: Iterable[Path]) -> None:
    """A folder that from_pretrained reads; `beside`: further files for it, such as config.json."""
    leave_all_but_weights(contents)
    tensors, tied = prepare(contents, contents.model())
    parts = _parts(tensors, most_bytes)
    where = {}
    for i, names in enumerate(parts):
        file_name = SINGLE if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            write_tensors(
                file,
                {name: tensors[name] for name in names},
                {name: of for name, of in tied.items() if of in names},
            )
            file.flush()
            os.fsync(file.fileno())
        where.update(dict.fromkeys(names, file_name))
    if len(parts) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    for path in (*contents.files, *beside):
        (folder / path.name).write_bytes(path.read_bytes())
    if not (folder / "config.json").exists():
        contents.note(
            "there is no config.json, which from_pretrained asks for: give it by --config FILE, or put it there"
        )
