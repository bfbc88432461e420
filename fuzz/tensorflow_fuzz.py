"""TensorFlow checkpoints that nobody wrote, made of ones that are right: read_table and the reader of bundles either read them or
refuse them, in bounded time, and take no memory for a size that no file has.

    fuzz/tensorflow_fuzz.py SECONDS [SEED [NUMBER]]      # NUMBER: of the one input that is made again

What it finds is kept in build/fuzz/crashes; the seed is printed."""

from __future__ import annotations

import importlib.util
import random
import resource
import secrets
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST_SECONDS = 20
MOST_MEMORY = 4 << 30  # beside what is there once torch is
Table = dict[bytes, bytes]


def find_package() -> None:
    """The tree's, with the newest extension that a build has left."""
    found = [path for where in ("python/evenstep", "build/*/python") for path in ROOT.glob(f"{where}/_core.abi3.so")]
    sys.path.insert(0, str(ROOT / "python"))
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        spec = importlib.util.spec_from_file_location("evenstep._core", newest)
        assert spec is not None and spec.loader is not None
        sys.modules["evenstep._core"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


find_package()

import torch  # noqa: E402

from evenstep import convert_tensorflow as tf  # noqa: E402
from evenstep.convert_contents import Contents, Optimizer, Refused  # noqa: E402
from evenstep.convert_formats import read  # noqa: E402
from evenstep.convert_tensorflow_table import (  # noqa: E402
    entries_of,
    make_table,
    masked,
    read_table,
    read_varint,
    write_field,
)

KNOWN = (ValueError, IndexError, struct.error, Refused)  # of read_table, whose callers tell which file it was


def make_samples(folder: Path) -> list[Path]:
    """Bundles as they are written: of a few variables, of many (several blocks), of one that is empty, of an
    optimizer's states."""
    some = {f"layer.{i}/w": torch.arange(6).to(dtype) for i, dtype in enumerate(tf._CODES) if not dtype.is_complex}
    models = [
        some,
        {f"many.{i}": torch.tensor([i]) for i in range(3000)},
        {"none": torch.empty(0, 4), "one": torch.ones(2, 2)},
    ]
    for number, model in enumerate(models):
        place = folder / str(number)
        place.mkdir()
        tf.write_folder(Contents("made", {"model": model}), place)
    part_up(folder / str(len(models) - 1) / "model.index")
    states = {"w": {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(3.0)}}
    adam = Optimizer([{"lr": 0.1, "betas": (0.9, 0.999)}], [["w"]], states)
    place = folder / str(len(models))
    place.mkdir()
    tf.write_folder(Contents("made", {"model": {"w": torch.ones(3)}}, optimizers={"optimizer": adam}), place)
    return [folder / str(number) for number in range(len(models) + 1)]


def part_up(index: Path) -> None:
    """Its two rows of ones become parts of a partitioned variable."""
    table = read_table(index.read_bytes())
    extents = [[(row, 1), (0, -1)] for row in range(2)]
    slices = b"".join(
        write_field(7, write_field(1, write_field(1, row) + write_field(2, 1)) + write_field(1, b""))
        for row in range(2)
    )
    dimension = write_field(2, write_field(1, 2))
    table[b"one"] = write_field(1, 1) + write_field(2, dimension + dimension) + slices
    for row, extent in enumerate(extents):
        table[tf._part_key(b"one", extent)] = tf._entry(torch.ones(1, 2), 8 * row, torch.ones(1, 2).numpy().tobytes())
    index.write_bytes(make_table(table))
    whole = read(index).model()["one"]
    assert torch.equal(whole, torch.ones(2, 2))


def cut_up(data: bytearray, chance: random.Random) -> None:
    """Bytes put in, taken out, changed."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        new = chance.choice((b"", chance.randbytes(chance.randrange(5)), b"\xff" * chance.randrange(1, 11), b"\0"))
        data[at : at + chance.choice((0, 1, 1, 2, 8))] = new


def sum_blocks(table: bytearray) -> None:
    """Checksums that are right again, of what the footer and the index name."""

    def put(handle: bytes, at: int) -> tuple[bytes, int]:
        offset, at = read_varint(handle, at)
        size, at = read_varint(handle, at)
        if offset + size + 5 <= len(table):
            whole = bytes(table[offset : offset + size + 1])
            table[offset + size + 1 : offset + size + 5] = struct.pack("<I", masked(whole))
        return bytes(table[offset : offset + size]), at

    try:
        footer = bytes(table[-48:-8])
        _, at = put(footer, 0)
        index, _ = put(footer, at)
        for _, handle in entries_of(index):
            put(handle, 0)
    except (ValueError, IndexError, struct.error, OverflowError):
        pass


def altered(index: bytes, chance: random.Random) -> bytes:
    way = chance.randrange(4)
    if way == 0:  # messages and names, in a table that is right
        table: Table = dict(read_table(index))
        for _ in range(chance.choice((1, 1, 3))):
            name = chance.choice(sorted(table)) if table else b""
            value, key = bytearray(table.pop(name, b"")), bytearray(name)
            cut_up(value, chance)
            if chance.random() < 0.3:
                cut_up(key, chance)
            table[bytes(key)] = bytes(value)
        return make_table(table)
    whole = bytearray(index)
    if way == 3:  # nothing of it is left but its end
        whole = bytearray(chance.randbytes(chance.randrange(200)) + index[-48:])
    cut_up(whole, chance)
    if way != 1:
        whole[-8:] = index[-8:]
        sum_blocks(whole)
    return bytes(whole)


def try_one(folder: Path, sample: Path, chance: random.Random) -> bool:
    """One input. Whether it was refused; what must not be is raised."""
    index, data = "model.index", "model.data-00000-of-00001"
    content = altered((sample / index).read_bytes(), chance)
    values = bytearray((sample / data).read_bytes())
    if chance.random() < 0.2:
        cut_up(values, chance)
    (folder / index).write_bytes(content)
    (folder / data).write_bytes(values)
    try:
        read_table(content)
    except KNOWN:
        pass
    try:
        model = read(folder / "model").model()
    except Refused:
        return True
    assert all(isinstance(tensor, torch.Tensor) for tensor in model.values())
    return False


def too_long(*_: Any) -> None:
    raise TimeoutError(f"one input took {LONGEST_SECONDS} s")


def main(words: list[str]) -> int:
    seconds = float(words[0])
    seed = int(words[1]) if len(words) > 1 else secrets.randbits(32)
    number, last = (int(words[2]), int(words[2])) if len(words) > 2 else (0, None)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, too_long)
    until, refused, first = time.monotonic() + seconds, 0, number
    with tempfile.TemporaryDirectory() as there:
        samples = make_samples(Path(there))
        folder = Path(there) / "made"
        folder.mkdir()
        while number == first or (last is None and time.monotonic() < until):
            chance = random.Random(f"{seed}/{number}")
            signal.alarm(LONGEST_SECONDS)
            try:
                refused += try_one(folder, samples[chance.choice((0, 0, 0, 1, 2, 3))], chance)
            except Exception:
                kept = ROOT / "build/fuzz/crashes" / f"tensorflow-{seed}-{number}"
                kept.mkdir(parents=True, exist_ok=True)
                for path in folder.iterdir():
                    (kept / path.name).write_bytes(path.read_bytes())
                traceback.print_exc()
                print(f"again: fuzz/tensorflow_fuzz.py 0 {seed} {number}; kept in {kept}", file=sys.stderr)
                return 1
            finally:
                signal.alarm(0)
            number += 1
    print(f"seed {seed}: {number - first} inputs, {refused} of them refused")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
