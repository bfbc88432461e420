"""Reads a checkpoint's files back by several threads, their checksums compared on the way: into memory of its own, once; or,
where their tensors have memory already and the page cache has them, first to compare them and then, once all else is right,
into that. Where the kernel does not tell what it has, or is not asked (NFS, btrfs, overlayfs, FUSE), it counts as having all:
what it has not is read twice from where it lies. Nothing that was not compared is given to anybody."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.checkpoint_block import LEAST, Block
from evenstep.checkpoint_files import Place, TensorFile, compare_all, damage_of
from evenstep.checkpoint_homes import fitting, without_shared

_CORRUPT = "EVEN_ERR_CORRUPT"

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


class _Reading(NamedTuple):
    """How a file is read: where its bytes go, and what gives its tensors then."""

    name: str
    places: tuple[Place, ...]
    tensors: Callable[[], Tensors]


class StoredFiles:
    """The files of one checkpoint, and what was read of them so far."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._folder = folder
        self._entries = {entry["name"]: entry for entry in manifest["files"]}
        self._read: dict[str, Tensors] = {}
        self._right: set[str] = set()  # files whose checksums were compared
        self._heads: dict[str, TensorFile] = {}  # of files that `expect` looked at
        self._homes: dict[str, Tensors] = {}  # of files that `fill` reads into memory that is there
        self._to_fill: dict[str, tuple[tuple[Place, ...], Tensors]] = {}
        self._not_asked: dict[str, Set[str]] = {}  # of files that `pass_over` told of

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def pass_over(self, file: str, names: Set[str]) -> None:
        """Nobody asks for these tensors here, other ranks do: chunks that have no others are neither read nor compared. Who asks
        for one after all (ranks are others since) has the whole file read."""
        if names:
            self._not_asked[file] = names

    def expect(self, homes: dict[str, Tensors]) -> None:
        """Memory in which tensors of these files may be put: what fits there is compared when its file is read, and read into it
        by `fill`. A copy would cost more, and so may memory that is new: the kernel clears it first, and a virtual machine's
        host may have to find it."""
        found = []
        for name in homes:
            if self._is_large(name) and name not in self._read and _core.file_is_cached(self._folder / name):
                try:
                    file = self._heads[name] = self._head_of(name)
                except (EvenstepError, OSError):
                    continue  # who reads it says what is wrong
                found.append((name, fitting(file, homes[name])))
        self._homes = without_shared(found)

    def read(self, names: Iterable[str]) -> None:
        """Reads these files whole, those that were not yet, side by side. What is to go to memory that is there is that memory,
        and not yet right."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._read]
        if wanted:
            self._read.update(self._read_files(wanted))

    def fill(self, names: Iterable[str]) -> None:
        """Reads into the memory that is there what was compared of these files, and compares it once more."""
        to_fill = [(name, *self._to_fill.pop(name)) for name in dict.fromkeys(names) if name in self._to_fill]
        try:
            self._compare([(name, places) for name, places, _ in to_fill])
        except (EvenstepError, MemoryError) as error:
            for name, _, _ in to_fill:  # the memory holds anything: who asks again has it read again
                self._read.pop(name, None)
                self._right.discard(name)
            raise self._not_filled(error) from error
        finally:
            for _, _, homes in to_fill:
                for home in homes.values():
                    torch.autograd.graph.increment_version(home)

    def _not_filled(self, error: EvenstepError | MemoryError) -> EvenstepError:
        if getattr(error, "status", "") == _CORRUPT:
            how = (
                "it was right a moment before: it changed while it was loaded, or the disk has other bytes than the page cache "
                "had; what was prepared holds parts of it by now"
            )
        else:
            how = "the checkpoint could not be read a second time; what was prepared may hold parts of it by now"
        said = str(error).splitlines()[0] if str(error) else "there is no memory to read it with"
        return EvenstepError(f"{said}; {how}\n  fix: load a checkpoint, this one or another, before training goes on")

    def damage(self, what: str) -> EvenstepError:
        return damage_of(self._folder, what)

    def drop(self, names: Iterable[str]) -> None:
        """What was given out of these files belongs to who has it."""
        for name in names:
            self._read.pop(name, None)

    def check_rest(self) -> None:
        """Compares the files that nothing was read of."""
        self._compare([(name, ()) for name in self._entries if name not in self._right])

    def tensors(self, names: Iterable[str]) -> Tensors:
        """Of all these files, by name."""
        self.read(names := list(names))
        return {key: tensor for name in names for key, tensor in self._read[name].items()}

    def tensor_of(self, file: str, copy: bool = True) -> Callable[[str], torch.Tensor]:
        """What gives the tensors of a file, a copy each (or to look at only): it may be asked for again."""

        def give(name: str) -> torch.Tensor:
            if name in self._not_asked.get(file, ()):
                del self._not_asked[file]
                self._read.pop(file, None)
                self._right.discard(file)
            self.read([file])
            if name not in self._read[file]:
                raise self.damage(f"{file} has no tensor {name!r}")
            return self._read[file][name].clone() if copy else self._read[file][name]

        return give

    def _compare(self, wanted: Sequence[tuple[str, tuple[Place, ...]]], partly: Container[str] = ()) -> None:
        for name, _ in wanted:
            if name not in self._entries:
                raise damage_of(self._folder, f"its manifest has no file {name}")
        if wanted:
            compare_all(self._folder, [(self._entries[name], places) for name, places in wanted], partly)
        self._right.update(name for name, _ in wanted)

    def _read_files(self, names: Sequence[str]) -> dict[str, Tensors]:
        readings = [self._begin(name) for name in names]
        self._compare([(one.name, one.places) for one in readings], self._not_asked)
        return {one.name: one.tensors() for one in readings}

    def _head_of(self, name: str) -> TensorFile:
        with TensorFile(self._folder / name) as file:
            return file

    def _begin(self, name: str) -> _Reading:
        try:
            file = self._heads.pop(name, None) or self._head_of(name)
            homes = self._homes.get(name, {})
            whole = not homes and name not in self._not_asked and self._is_large(name)
            return self._into_block(name, file) if whole else self._apart(name, file, homes)
        except (EvenstepError, OSError):
            self._compare([(name, ())])  # a header that is no header: what is wrong with the file says more
            raise

    def _apart(self, name: str, file: TensorFile, homes: Tensors) -> _Reading:
        """Each tensor into memory of its own, or, later, to where it belongs."""
        header = ctypes.create_string_buffer(len(file.head))
        places, later = [(0, len(file.head), ctypes.addressof(header))], []
        tensors = {}
        not_asked = self._not_asked.get(name, ())
        for key, begin in file.by_place():
            if key in not_asked:
                continue
            if key in homes:
                tensors[key] = homes[key].detach()
                later.append((begin, file.bytes_of(key), homes[key].data_ptr()))
                continue
            values = file.empty(key)
            tensors[key] = file.as_saved(key, values)
            size = values.numel() * values.element_size()
            if size > 0:
                places.append((begin, size, values.data_ptr()))

        def give() -> Tensors:
            if header.raw != file.head:
                raise damage_of(self._folder, f"{name} changed while it was read")
            if later:
                self._to_fill[name] = tuple(later), homes
            return tensors

        return _Reading(name, tuple(places), give)

    def _is_large(self, name: str) -> bool:
        return name in self._entries and bool(self._entries[name]["bytes"] >= LEAST)

    def _into_block(self, name: str, file: TensorFile) -> _Reading:
        size, order = self._entries[name]["bytes"], file.by_place()
        block = Block(size, len(order))

        def give() -> Tensors:
            if not block.holds(file.head):
                raise damage_of(self._folder, f"{name} changed while it was read")
            values = block.tensors([(begin, *file.plain(key)) for key, begin in order])
            return {key: file.as_saved(key, one) for (key, _), one in zip(order, values)}

        return _Reading(name, ((0, size, block.address),), give)


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
