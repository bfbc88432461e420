"""The files of a checkpoint: tensors into safetensors files through the C writer, and back; the manifest."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.checkpoint_encoding import UnsavableState

# name, dtype, shape, address, bytes
Spec = tuple[str, str, "tuple[int, ...]", int, int]
# name, tensors or the whole file, metadata, what gives the address of a tensor that has none
File = tuple[
    str,
    "list[Spec] | bytes",
    "list[tuple[str, str]]",
    "Callable[[int], int] | None",
]

FORMAT = "evenstep-checkpoint-1"
MANIFEST = "manifest.json"
PARTIAL = ".evenstep.partial"
REPLACED = ".evenstep.replaced"  # one that another was about to replace, where folders cannot be swapped in one step
_NAMED = 4  # tensors that an error names

# The manifest ends with a checksum over all that stands before this line.
_TAIL = b'\n  "manifest_checksum": "'
_END = b'"\n}\n'
_TAIL_BYTES = len(_TAIL) + 16 + len(_END)
_FAMILY = re.compile(rb'\s*\{\s*"format"\s*:\s*"(evenstep-checkpoint-[0-9]{1,9})"')  # how those of all versions begin


def _dtypes() -> dict[torch.dtype, str]:
    known = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U8": "uint8",
        "U16": "uint16",
        "U32": "uint32",
        "U64": "uint64",
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
    }
    return {getattr(torch, name): code for code, name in known.items() if hasattr(torch, name)}


DTYPES = _dtypes()
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}


def damaged(text: str) -> EvenstepError:
    return EvenstepError(
        f"{text}\n  fix: resume from an earlier checkpoint; `evenstep ckpt ls` lists them, `evenstep ckpt verify` "
        "checks them"
    )


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as plain numbers (complex: a last dimension of two), or an error that names it."""
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.is_quantized or plain.is_meta or hasattr(plain, "full_tensor"):
        raise UnsavableState(
            f"tensor {name!r} cannot be put into a checkpoint: it is sparse, quantized, distributed or without data\n"
            "  fix: make it a dense tensor before es.checkpoint"
        )
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.dtype not in DTYPES:
        raise UnsavableState(f"tensor {name!r} has the type {plain.dtype}, which safetensors files do not know")
    return plain


def total_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def find_tied(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are the same memory as an earlier one -> that one's name: they are saved once."""
    seen: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if seen.setdefault(place, name) != name:
            tied[name] = seen[place]
    return tied


def _spec(key: str, plain: torch.Tensor) -> Spec:
    direct = plain.device.type == "cpu" and plain.is_contiguous() and not plain.is_neg() and plain.numel() > 0
    bytes_ = plain.numel() * plain.element_size()
    return key, DTYPES[plain.dtype], tuple(plain.shape), plain.data_ptr() if direct else 0, bytes_


def file_of(name: str, tensors: dict[str, torch.Tensor], metadata: Iterable[tuple[str, str]] = ()) -> File:
    """One safetensors file, as the extension takes it. Tensors on a device, or not contiguous, are staged one at a time."""
    specs: list[Spec] = []
    staged: list[torch.Tensor] = []
    later: dict[int, torch.Tensor] = {}  # as plain numbers, by their place: those that `fetch` is asked for
    complex_names = []
    for key, tensor in tensors.items():
        code = DTYPES.get(tensor.dtype)
        # training waits for this: nearly all are of this kind
        if (
            code is not None
            and type(tensor) in _PLAIN
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            size = tensor.nbytes
            specs.append((key, code, tuple(tensor.shape), tensor.data_ptr() if size else 0, size))
            continue
        plain = _checked(key, tensor)
        if tensor.is_complex():
            complex_names.append(key)
        later[len(specs)] = plain
        specs.append(_spec(key, plain))

    def fetch(index: int) -> int:
        staged[:] = [later[index].resolve_neg().cpu().contiguous()]
        return staged[0].data_ptr()

    pairs = [("format", "pt"), *metadata]
    if complex_names:
        pairs.append(("complex", json.dumps(complex_names)))
    return name, specs, pairs, fetch


def write_tensors(
    writer: _core.CheckpointWriter,
    file_name: str,
    tensors: dict[str, torch.Tensor],
    metadata: Iterable[tuple[str, str]] = (),
) -> None:
    writer.add(*file_of(file_name, tensors, metadata))


def shard_name(prefix: str, i: int, count: int) -> str:
    """Of one of several files, as transformers names them."""
    return f"{prefix}.safetensors" if count == 1 else f"{prefix}-{i + 1:05d}-of-{count:05d}.safetensors"


def index_of(where: dict[str, str], total_bytes: int) -> bytes:
    """The table of several files that transformers reads: which tensor lies where."""
    table = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


class TensorFile:
    """Reads the tensors of a safetensors file one by one, each into memory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("rb")
        self.metadata: dict[str, str] = {}
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
            self._file.close()
            raise damaged(f"{path} is not a valid safetensors file: {error}") from None

    def _read_header(self) -> None:
        (length,) = struct.unpack("<Q", self._file.read(8))
        if length > 100_000_000:
            raise ValueError(f"a header of {length} bytes")
        self.head = struct.pack("<Q", length) + self._file.read(length)
        header = json.loads(self.head[8:].decode("utf-8"))
        self.metadata = header.pop("__metadata__", {})
        self._start = 8 + length
        room = os.fstat(self._file.fileno()).st_size - self._start
        self._complex = set(json.loads(self.metadata.get("complex", "[]")))
        self._entries = {
            name: (_BY_CODE[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        }
        for name, (dtype, shape, begin, end) in self._entries.items():
            if not all(_is_count(value, 0) for value in (*shape, begin, end)) or end > room:
                raise ValueError(f"tensor {name!r} lies beyond its end, or has an impossible shape")
            if math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"tensor {name!r} has a size that its shape does not have")
        ends = 0
        for begin, end, name in sorted((entry[2], entry[3], name) for name, entry in self._entries.items()):
            if begin < ends:
                raise ValueError(f"tensor {name!r} lies over another one")
            ends = end

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def names(self) -> list[str]:
        return list(self._entries)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape, as they were saved."""
        dtype, shape, _, _ = self._entries[name]
        if name in self._complex:
            return (torch.complex64 if dtype == torch.float32 else torch.complex128), shape[:-1]
        return dtype, shape

    def by_place(self) -> list[tuple[str, int]]:
        """Names in the order in which they lie in the file, each with its first byte there."""
        order = sorted(self._entries, key=lambda name: self._entries[name][2:])
        return [(name, self._start + self._entries[name][2]) for name in order]

    def bytes_of(self, name: str) -> int:
        _, _, begin, end = self._entries[name]
        return int(end - begin)

    def plain(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of its plain numbers."""
        dtype, shape, _, _ = self._entries[name]
        return dtype, shape

    def empty(self, name: str) -> torch.Tensor:
        """Memory for a tensor, as plain numbers."""
        dtype, shape = self.plain(name)
        return torch.empty(shape, dtype=dtype)  # aligned as torch's kernels like it

    def as_saved(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The tensor whose plain numbers these are."""
        return torch.view_as_complex(values) if name in self._complex else values

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        """Its bytes, so many at a time."""
        _, _, begin, end = self._entries[name]
        for at in range(begin, end, most):
            self._file.seek(self._start + at)
            piece = self._file.read(min(most, end - at))
            if len(piece) != min(most, end - at):
                raise damaged(f"{self.path} is truncated: tensor {name!r} ends beyond it")
            yield piece

    def read(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise damaged(f"{self.path} has no tensor {name!r}")
        _, _, begin, end = self._entries[name]
        values = self.empty(name)
        size = end - begin
        if size > 0:
            self._file.seek(self._start + begin)
            place = (ctypes.c_char * size).from_address(values.data_ptr())
            if self._file.readinto(place) != size:  # type: ignore[attr-defined]
                raise damaged(f"{self.path} is truncated: tensor {name!r} ends beyond it")
        return self.as_saved(name, values)


def owner() -> tuple[str | None, str | None, bool]:
    """By which writers see whether the job still has its run folder, where other hosts see that, too; the job; and whether
    its agent has seen that it has."""
    environ = os.environ
    return environ.get("EVENSTEP_RUN_SIGN"), environ.get("EVENSTEP_JOB"), "EVENSTEP_RUN_SIGN_SEEN" in environ


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in it stays so, also after a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def first_wrong(data: bytes, wanted: int, chunk: int, sums: Sequence[str]) -> int | None:
    """The chunk whose checksum is another one."""
    if len(data) != wanted:
        raise OSError(f"{len(data)} bytes came where {wanted} were asked for")
    for index, expected in enumerate(sums):
        if f"{_core.checksum(data[index * chunk : (index + 1) * chunk]):016x}" != expected:
            return index
    return None


def sync_files(folder: Path) -> None:
    """Its files, then itself: a power cut after its rename leaves no half of it."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its own checksum verified."""
    path = folder / MANIFEST
    _refuse_link(path)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if folder.exists():
            raise EvenstepError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
        if (aside := folder.with_name(folder.name + REPLACED)).exists():
            raise EvenstepError(
                f"checkpoint {folder} does not exist: it is being replaced, or was when the power went\n"
                f"  fix: load {aside}; the next checkpoint written beside it gives it its name back"
            ) from None
        raise EvenstepError(
            f"checkpoint {folder} does not exist\n  fix: `evenstep ckpt ls` lists the checkpoints there are"
        ) from None
    manifest = parse_manifest(path, text)
    for entry in manifest["files"]:
        _refuse_link(folder / entry["name"])
    return manifest


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise damaged(f"{path} is a symbolic link: a checkpoint's files lie in its folder")


def _of_another_version(path: Path, form: str) -> EvenstepError:
    return EvenstepError(
        f"{path} has the format {form[:64]!r}, not {FORMAT!r}\n"
        "  fix: it is of another version of Evenstep: use that one, or a newer one"
    )


def parse_manifest(path: Path, text: bytes) -> dict[str, Any]:
    """What a manifest says, its own checksum compared; `path` is for errors."""
    body, tail = text[:-_TAIL_BYTES], text[-_TAIL_BYTES:]
    said = tail[len(_TAIL) : len(_TAIL) + 16]
    ends = tail.startswith(_TAIL) and tail.endswith(_END)
    if not ends:
        begins = _FAMILY.match(text[:127])
        if begins is not None and begins[1].decode() != FORMAT:
            raise _of_another_version(path, begins[1].decode())
    if not ends or said != b"%016x" % _core.checksum(body):
        raise damaged(f"{path} is damaged: its checksum does not match its text")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(f"{path} is damaged: it is no JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), str):
        raise damaged(f"{path} is damaged: it has no format")
    if manifest["format"] != FORMAT:
        raise _of_another_version(path, manifest["format"])
    _check_entries(path, manifest)
    return manifest


# What readers take for granted, of members that are there.
_STATE_TYPES: dict[str, type] = {
    **dict.fromkeys(("step", "epoch", "world_size", "seed"), int),
    **dict.fromkeys(("lineage", "job", "process_set"), str),
    **dict.fromkeys(("versions", "models", "optimizers", "schedulers", "objects", "loaders", "random"), dict),
}


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _check_entries(path: Path, manifest: dict[str, Any]) -> None:
    """A manifest may be made up by someone, its own checksum with it: it names files of its own folder alone."""
    files, state = manifest.get("files"), manifest.get("state")
    if not isinstance(files, list) or not isinstance(state, dict) or not isinstance(manifest.get("created"), str):
        raise damaged(f"{path} is damaged: it lacks its files, its state or its time")
    for kind, value in state.items():
        known = _STATE_TYPES.get(kind)
        if known is not None and not (_is_count(value, 0) if known is int else isinstance(value, known)):
            raise damaged(f"{path} is damaged: {kind!r} in its state is of another form")
    names: set[str] = set()
    for entry in files:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name in ("", ".", "..", *names) or "/" in name or "\0" in name:
            raise damaged(f"{path} is damaged: {name!r} is no name of a file of its folder, or is there twice")
        size, chunk, sums = entry.get("bytes"), entry.get("chunk_bytes"), entry.get("checksums")
        if not _is_count(size, 0) or not _is_count(chunk, 1) or not isinstance(sums, list):
            raise damaged(f"{path} is damaged: {name} lacks its size or its checksums")
        if len(sums) != -(-size // chunk):
            raise damaged(f"{path} is damaged: the number of checksums does not fit the size of {name}")
        names.add(name)
    for kind in ("models", "optimizers"):
        for saved in state.get(kind, {}).values():
            named = (saved.get("files") or [saved.get("file")]) if isinstance(saved, dict) else None
            for name in named if isinstance(named, list) else [None]:
                if not isinstance(name, str) or name not in names:
                    raise damaged(f"{path} is damaged: its state names {name!r}, which is none of its files")


Place = tuple[int, int, int]  # first byte in the file, number of bytes, address


def compare(folder: Path, entry: dict[str, Any], places: tuple[Place, ...] = ()) -> None:
    """Reads a file once, by several threads, bytes to their places; an error names the first damage."""
    compare_all(folder, [(entry, places)])


def compare_all(
    folder: Path, wanted: Sequence[tuple[dict[str, Any], tuple[Place, ...]]], partly: Container[str] = ()
) -> None:
    """The same of several files, which the threads share; of those in `partly` only chunks in which a place lies."""
    files = tuple(
        (folder / name, entry["bytes"], entry["chunk_bytes"], _sums_in(folder, entry), places, name in partly)
        for (entry, places), name in zip(wanted, (entry["name"] for entry, _ in wanted))
    )
    try:
        _core.read_files(files)
    except EvenstepError as error:
        what, code, rest = str(error).splitlines()[0].partition(" (EVEN_ERR_")
        tensors = damaged_tensors(folder, [entry for entry, _ in wanted], what)
        damage = damage_of(folder, what + tensors + code + rest)
        damage.status = getattr(error, "status", "")
        raise damage from None


def _sums_in(folder: Path, entry: dict[str, Any]) -> tuple[int, ...]:
    try:
        sums = tuple(int(digits, 16) for digits in entry["checksums"])
    except (TypeError, ValueError):
        sums = (-1,)
    if any(not 0 <= one < 1 << 64 for one in sums):
        raise damage_of(folder, f"its manifest has a checksum of {entry['name']} that is none")
    return sums


def damaged_tensors(folder: Path, entries: Sequence[dict[str, Any]], what: str) -> str:
    """Which tensors of the chunk that an error names are damaged, by the checksums of what each has in it, in brackets; by a
    manifest without them, which lie there. As src/checkpoint/verify.c does."""
    found = re.search(r"^chunk \d+ of (.*) \(bytes (\d+)\D(\d+)\) is altered$", what)
    entry = next((one for one in entries if found is not None and one["name"] == found[1]), None)
    if found is None or entry is None or not entry["name"].endswith(".safetensors"):
        return ""
    path, first, end = folder / entry["name"], int(found[2]), int(found[3]) + 1
    names: list[str] = []
    try:
        parts = [part for part in entry.get("parts", []) if first <= part[0] and part[0] + part[1] <= end]
        with path.open("rb") as file:
            right = {(begin, begin + size) for begin, size, digits in parts if _sum_at(file, begin, size) == digits}
        if first == 0 and not (parts and (parts[0][0], parts[0][0] + parts[0][1]) in right):
            names.append("header")
        with TensorFile(path) as tensors:
            for name, begin in tensors.by_place():
                last = min(begin + tensors.bytes_of(name), end)
                if first < last and begin < last and (max(begin, first), last) not in right:
                    names.append(name)
    except (EvenstepError, OSError, TypeError, ValueError, IndexError, AttributeError):
        pass  # the chunk is named all the same
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({', '.join(names[:_NAMED])}{more})" if names else ""


def _sum_at(file: BinaryIO, begin: int, size: int) -> str:
    file.seek(begin)
    return f"{_core.checksum(file.read(size)):016x}"


def damage_of(folder: Path, what: str) -> EvenstepError:
    return damaged(f"checkpoint {folder} is damaged: {what}")


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Compares every checksum; an error names the first damage."""
    for entry in manifest["files"]:
        compare(folder, entry)


def holds(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder is that checkpoint, every checksum compared."""
    try:
        if read_manifest(folder) != manifest:
            return False
        verify(folder, manifest)
    except EvenstepError:
        return False
    return True
