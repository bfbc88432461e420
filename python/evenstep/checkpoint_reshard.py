"""What `evenstep ckpt reshard` starts: the same tensors in other files, read back and compared before it says so.

    python -m evenstep.checkpoint_reshard IN OUT (--files N | --shard-bytes N) [--force]

IN is an Evenstep checkpoint, a Hugging Face folder or a .safetensors file; OUT is a folder of the same form (a Hugging Face
folder, for a file). Of a checkpoint one tensor is in memory at a time, of a Hugging Face folder one file's."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from evenstep import _core, ckpt_convert, convert_safetensors
from evenstep._core import EvenstepError
from evenstep.checkpoint_files import DTYPES, File, TensorFile, index_of, read_manifest, shard_name, verify
from evenstep.checkpoint_reading import files_of
from evenstep.convert_contents import DAMAGED, UNSUPPORTED, USAGE, Refused, Tensors
from evenstep.convert_evenstep import refused
from evenstep.convert_formats import kind_of

FORMAT = "evenstep-ckpt-reshard-1"
_PIECE = 16 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evenstep.checkpoint_reshard")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--shard-bytes", type=int, default=0)
    parser.add_argument("--force", action="store_true")
    return parser.parse_args()


class Shards:
    """Tensors that lie in several files, of which the one that was asked last is open: who goes through them in their order
    opens each once, and reads its header once."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self._last: TensorFile | None = None
        self._files: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        self.tied: dict[str, str] = {}
        for path in self.paths:
            file = self._open(path)
            for name, _ in file.by_place():
                if name in self._files:
                    self.close()
                    raise Refused(f"{path} has the tensor {name!r}, which another file has, too", "", DAMAGED)
                self._files[name] = path
                self.sizes[name] = file.bytes_of(name)
            self.tied.update({k: of for k, of in file.metadata.items() if of in self._files})
        self.tied = {k: of for k, of in self.tied.items() if k not in self._files}

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What is asked then opens one again."""
        if self._last is not None:
            self._last.close()
            self._last = None

    def _open(self, path: Path) -> TensorFile:
        if self._last is None or self._last.path != path:
            self.close()
            self._last = TensorFile(path)
        return self._last

    def _of(self, name: str) -> TensorFile:
        return self._open(self._files[name])

    def read(self, names: Iterable[str]) -> Tensors:
        return {name: self._of(name).read(name) for name in names}

    def file(self, file_name: str, names: Iterable[str], metadata: Iterable[tuple[str, str]]) -> File:
        """One file of these, as the extension takes it: each is read when it is its turn."""
        names = list(names)
        specs, complex_names = [], []
        for name in names:
            file = self._of(name)
            dtype, shape = file.plain(name)
            specs.append((name, DTYPES[dtype], shape, 0, file.bytes_of(name)))
            complex_names += [name] if file.describe(name)[0].is_complex else []
        held: list[torch.Tensor] = []

        def fetch(index: int) -> int:
            held.clear()  # before the next one comes
            held.extend(self.read([names[index]]).values())
            return held[0].data_ptr()

        pairs = [("format", "pt"), *metadata]
        if complex_names:
            pairs.append(("complex", json.dumps(complex_names)))
        return file_name, specs, pairs, fetch

    def compare(self, other: Shards) -> None:
        """Every bit of every tensor."""
        if set(self.sizes) != set(other.sizes):
            raise Refused("what was written does not read back as it was: names differ", "check the disk", DAMAGED)
        for name in self.sizes:
            a, b = self._of(name), other._of(name)
            pieces = zip(a.pieces(name, _PIECE), b.pieces(name, _PIECE))
            if a.describe(name) != b.describe(name) or any(one != its for one, its in pieces):
                raise Refused(f"what was written does not read back as it was: {name!r}", "check the disk", DAMAGED)


def split(sizes: dict[str, int], files: int, most_bytes: int) -> list[list[str]]:
    """Names in their order, cut into as many parts of nearly equal size, or into parts of at most so many bytes (a larger
    tensor has one of its own)."""
    if files > max(len(sizes), 1):  # one may be empty: an optimizer's that has made no step
        raise Refused(f"{len(sizes)} tensors do not make {files} files: no tensor is cut", "give fewer files", USAGE)
    parts: list[list[str]] = [[]]
    total, filled, done = sum(sizes.values()), 0, 0
    for left, (name, size) in zip(range(len(sizes), 0, -1), sizes.items()):
        if files:
            # on to the next one where this is full, or where each tensor that is left is needed for a file
            full = parts[-1] and (done + size / 2 > total * len(parts) / files or left <= files - len(parts))
            over = full and len(parts) < files
        else:
            over = bool(parts[-1]) and filled + size > most_bytes
        if over:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled, done = filled + size, done + size
    return parts


# -- Hugging Face folders --


def _hf_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / convert_safetensors.INDEX
    if index.exists():
        return convert_safetensors.shards_of(source, index)
    if (source / convert_safetensors.SINGLE).exists():
        return [source / convert_safetensors.SINGLE]
    raise Refused(
        f"{source} has no safetensors files", "`evenstep ckpt convert IN OUT --as hf` makes some", UNSUPPORTED
    )


def _reshard_folder(source: Path, target: Path, options: argparse.Namespace) -> int:
    with Shards(_hf_files(source)) as shards, ckpt_convert.partial_of(target) as partial:
        parts = split(shards.sizes, options.files, options.shard_bytes)
        partial.mkdir()
        where = {}
        for i, names in enumerate(parts):
            name = shard_name("model", i, len(parts))
            tied = {k: of for k, of in shards.tied.items() if of in names}
            with (partial / name).open("wb") as file:
                convert_safetensors.write_tensors(file, shards.read(names), tied)
            where.update(dict.fromkeys(names, name))
        if len(parts) > 1:
            (partial / convert_safetensors.INDEX).write_bytes(index_of(where, sum(shards.sizes.values())))
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if path not in shards.paths and path.name != convert_safetensors.INDEX and path.is_file():
                shutil.copy(path, partial / path.name)
        with Shards(_hf_files(partial)) as written:
            shards.compare(written)
        ckpt_convert.sync_tree(partial)
    return len(parts)


# -- Evenstep's own --


def _reshard_checkpoint(source: Path, target: Path, options: argparse.Namespace) -> int:
    try:
        manifest = read_manifest(source)
        verify(source, manifest)
    except EvenstepError as error:
        raise refused(error) from None
    state = manifest["state"]
    written: dict[str, list[str]] = {}
    split_files: set[str] = set()
    writer = _core.CheckpointWriter(
        target.absolute(), bool(options.force), sum(entry["bytes"] for entry in manifest["files"])
    )
    try:
        for kind in ("models", "optimizers"):
            for name, saved in state.get(kind, {}).items():
                split_files.update(files_of(saved))
                split_files.update([saved["index"]] if saved.get("index") else [])
                with Shards(source / file for file in files_of(saved)) as shards:
                    written[name] = _write(writer, kind, name, saved, shards, options)
        for entry in manifest["files"]:
            if entry["name"] not in split_files:
                _copy(writer, source, entry["name"])
        writer.commit(json.dumps(state, ensure_ascii=False, allow_nan=False))
    finally:
        writer.abandon()
    _compare_checkpoints(source, target)
    return sum(len(files) for files in written.values())


def _write(
    writer: _core.CheckpointWriter,
    kind: str,
    name: str,
    saved: dict[str, Any],
    shards: Shards,
    options: argparse.Namespace,
) -> list[str]:
    """A model or an optimizer; `saved` then says in which files."""
    files = min(options.files, max(1, len(shards.sizes))) if kind == "optimizers" else options.files
    parts = split(shards.sizes, files, options.shard_bytes)
    written = [shard_name(name, i, len(parts)) for i in range(len(parts))]
    for file, names in zip(written, parts):
        tied = [(k, of) for k, of in shards.tied.items() if of in names]
        writer.add(*shards.file(file, names, tied))
    saved.pop("files", None), saved.pop("index", None)
    saved["file"] = written[0]
    if len(parts) > 1:
        saved["files"] = written
        if kind == "models":
            saved["index"] = f"{name}.safetensors.index.json"
            where = {key: file for file, names in zip(written, parts) for key in names}
            writer.add(saved["index"], index_of(where, sum(shards.sizes.values())))
    return written


def _copy(writer: _core.CheckpointWriter, source: Path, name: str) -> None:
    if not name.endswith(".safetensors"):
        writer.add(name, (source / name).read_bytes())
        return
    with TensorFile(source / name) as file:
        pairs = [(k, v) for k, v in file.metadata.items() if k not in ("format", "complex")]
        names = file.names()
    with Shards([source / name]) as shards:
        writer.add(*shards.file(name, names, pairs))


def _compare_checkpoints(source: Path, target: Path) -> None:
    new = read_manifest(target)
    verify(target, new)
    old = read_manifest(source)["state"]
    for kind in ("models", "optimizers"):
        for name, saved in new["state"].get(kind, {}).items():
            here, there = files_of(old[kind][name]), files_of(saved)
            with Shards(source / file for file in here) as one, Shards(target / file for file in there) as other:
                one.compare(other)


def reshard(options: argparse.Namespace) -> dict[str, Any]:
    if (options.files > 0) == (options.shard_bytes > 0):
        raise Refused(
            "either the number of files or the most bytes of one is given", "--files N or --shard-bytes N", USAGE
        )
    ckpt_convert.check_place(options.input, options.output, options.force)
    kinds: dict[str, Callable[[Path, Path, argparse.Namespace], int]] = {
        "evenstep": _reshard_checkpoint,
        "hf": _reshard_folder,
        "safetensors": _reshard_folder,
    }
    kind = kind_of(options.input)
    if kind not in kinds:
        raise Refused(
            f"{options.input} is in the format {kind}, which has no shards of this kind",
            "`evenstep ckpt convert IN OUT --as hf` makes them",
            UNSUPPORTED,
        )
    files = kinds[kind](options.input, options.output, options)
    return {
        "format": FORMAT,
        "input": os.fspath(options.input),
        "output": os.fspath(options.output),
        "kind": kind,
        "files": files,
    }


def main() -> int:
    try:
        report = reshard(arguments())
    except (Refused, OSError, MemoryError, EvenstepError) as error:
        print(json.dumps(ckpt_convert.failure(error)), flush=True)
        return 1
    text = f"{report['output']}: {report['files']} files of tensors, read back and compared"
    print(json.dumps({"text": ckpt_convert.clean(text), "report": report}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
