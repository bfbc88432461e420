"""Reads a checkpoint's files back by several threads, their checksums compared on the way: into memory of its own, once; or,
where their tensors have memory already and that costs less, first to compare them and then, once all else is right, into that.
Nothing that was not compared is given to anybody."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.checkpoint_block import LEAST, Block, has_room_in_huge_pages
from evenstep.checkpoint_files import Place, TensorFile, compare, damage_of
from evenstep.checkpoint_homes import fitting, without_shared

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """The quick look before anything is read: files that are not there, cut off or too long."""
    for entry in manifest["files"]:
        try:
            there = (folder / entry["name"]).stat().st_size
        except OSError as error:
            raise damage_of(folder, f"{entry['name']} cannot be read: {error.strerror}") from None
        if there != entry["bytes"]:
            how = "truncated" if there < entry["bytes"] else "too long"
            raise damage_of(folder, f"{entry['name']} is {how}: {there} of {entry['bytes']} bytes")


class StoredFiles:
    """The files of one checkpoint, and what was read of them so far."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._folder = folder
        self._entries = {entry["name"]: entry for entry in manifest["files"]}
        self._read: dict[str, Tensors] = {}
        self._right: set[str] = set()  # files whose checksums were compared
        self._homes: dict[str, Tensors] = {}  # of files that `fill` reads into memory that is there
        self._to_fill: dict[str, tuple[tuple[Place, ...], Tensors]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def expect(self, homes: dict[str, Tensors], copied: Iterable[str]) -> None:
        """Memory in which tensors of these files may be put: what fits there is compared when its file is read, and read into it
        by `fill`. copied: files whose tensors come into it in any case, copied from memory of their own else."""
        copied = set(copied)
        found = []
        for name in homes:
            if self._costs_less_twice(name, name in copied):
                try:
                    with TensorFile(self._folder / name) as file:
                        found.append((name, fitting(file, homes[name])))
                except (EvenstepError, OSError):
                    continue  # who reads it says what is wrong
        self._homes = without_shared(found)

    def read(self, names: Iterable[str]) -> None:
        """Reads these files whole, those that were not yet. What is to go to memory that is there is that memory, and not yet right."""
        for name in names:
            if name not in self._read:
                self._read[name] = self._read_file(name)

    def fill(self, names: Iterable[str]) -> None:
        """Reads into the memory that is there what was compared of these files."""
        for name in names:
            places, homes = self._to_fill.pop(name, ((), {}))
            if not places:
                continue
            try:
                self._compare(name, places)
            except EvenstepError as error:
                raise EvenstepError(
                    f"{str(error).splitlines()[0]}; it was right a moment before, so it changed while it was loaded, and what was "
                    "prepared holds parts of it by now\n  fix: load a checkpoint, this one or another, before training goes on"
                ) from error
            for home in homes.values():
                torch.autograd.graph.increment_version(home)

    def drop(self, names: Iterable[str]) -> None:
        """What was given out of these files belongs to who has it."""
        for name in names:
            self._read.pop(name, None)

    def check_rest(self) -> None:
        """Compares the files that nothing was read of."""
        for name in self._entries:
            if name not in self._right:
                self._compare(name, ())

    def tensors(self, names: Iterable[str]) -> Tensors:
        """Of all these files, by name."""
        self.read(names := list(names))
        return {key: tensor for name in names for key, tensor in self._read[name].items()}

    def tensor_of(self, file: str) -> Callable[[str], torch.Tensor]:
        """What gives the tensors of a file, a copy each: it may be asked for again."""

        def give(name: str) -> torch.Tensor:
            self.read([file])
            if name not in self._read[file]:
                raise damage_of(self._folder, f"{file} has no tensor {name!r}")
            return self._read[file][name].clone()

        return give

    def _compare(self, name: str, places: tuple[Place, ...]) -> None:
        if name not in self._entries:
            raise damage_of(self._folder, f"its manifest has no file {name}")
        compare(self._folder, self._entries[name], places)
        self._right.add(name)

    def _read_file(self, name: str) -> Tensors:
        try:
            with TensorFile(self._folder / name) as file:
                return self._read_tensors(name, file)
        except (EvenstepError, OSError):
            if name not in self._right:  # a header that is no header: what is wrong with the file says more
                self._compare(name, ())
            raise

    def _read_tensors(self, name: str, file: TensorFile) -> Tensors:
        homes = self._homes.get(name, {})
        if not homes and self._is_large(name):
            return self._read_block(name, file)
        header = ctypes.create_string_buffer(len(file.head))
        places, later = [(0, len(file.head), ctypes.addressof(header))], []
        tensors = {}
        for key, begin in file.by_place():
            if key in homes:
                tensors[key] = homes[key].detach()
                later.append((begin, file.bytes_of(key), homes[key].data_ptr()))
                continue
            values = file.empty(key)
            tensors[key] = file.as_saved(key, values)
            size = values.numel() * values.element_size()
            if size > 0:
                places.append((begin, size, values.data_ptr()))
        self._compare(name, tuple(places))
        if header.raw != file.head:
            raise damage_of(self._folder, f"{name} changed while it was read")
        if later:
            self._to_fill[name] = tuple(later), homes
        return tensors

    def _costs_less_twice(self, name: str, copied: bool) -> bool:
        """To read a file once to compare it and once into memory that is there. Not where a disk had to be read twice, and not
        where it saves no copy and new memory is to be had in huge pages, which the kernel clears in less time than a second
        reading takes."""
        if not self._is_large(name) or name in self._read or not _core.file_is_cached(self._folder / name):
            return False
        return copied or not has_room_in_huge_pages(self._entries[name]["bytes"])

    def _is_large(self, name: str) -> bool:
        return name in self._entries and bool(self._entries[name]["bytes"] >= LEAST)

    def _read_block(self, name: str, file: TensorFile) -> Tensors:
        size = self._entries[name]["bytes"]
        block = Block(size)
        self._compare(name, ((0, size, block.address),))
        if not block.holds(file.head):
            raise damage_of(self._folder, f"{name} changed while it was read")
        return {key: file.as_saved(key, block.tensor(begin, *file.plain(key))) for key, begin in file.by_place()}


def on_all_ranks(session: Any, work: Callable[[], T]) -> T:
    """Collective. What all ranks do, each for itself, before anything is put in place: where one fails, all do."""
    failed: BaseException | None = None
    try:
        done = work()
    except (
        EvenstepError,
        MemoryError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        failed = error
    told = [text.decode() for text in session.all_gather_bytes(_words(failed).encode())]
    if failed is not None:
        raise failed if isinstance(failed, EvenstepError) else EvenstepError(_words(failed)) from failed
    for rank, text in enumerate(told):
        if text:
            raise EvenstepError(f"rank {rank} could not load the checkpoint: {text}")
    return done


def _words(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def files_of(saved: dict[str, Any]) -> list[str]:
    """The files in which a model's or an optimizer's tensors lie."""
    return list(saved.get("files") or [saved["file"]])


__all__ = ["StoredFiles", "check_sizes", "files_of", "on_all_ranks"]
